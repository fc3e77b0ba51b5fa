//! Repairs PEM whose markers are not on lines of their own, as after `cat` of files without a final newline.
//! Otherwise, parsers would silently skip such sections.

use std::borrow::Cow;

const MARKERS: [&[u8]; 2] = [b"-----BEGIN ", b"-----END "];

pub fn with_markers_on_lines(pem: &[u8]) -> Cow<'_, [u8]> {
    let starts_marker = |at: &usize| MARKERS.iter().any(|marker| pem[*at..].starts_with(marker));
    let is_inside_line = |at: &usize| *at > 0 && !matches!(pem[at - 1], b'\n' | b'\r');
    let breaks: Vec<usize> = (0..pem.len()).filter(starts_marker).filter(is_inside_line).collect();
    if breaks.is_empty() {
        return Cow::Borrowed(pem);
    }
    let mut lines = Vec::with_capacity(pem.len() + breaks.len());
    let mut from = 0;
    for at in breaks {
        lines.extend_from_slice(&pem[from..at]);
        lines.push(b'\n');
        from = at;
    }
    lines.extend_from_slice(&pem[from..]);
    Cow::Owned(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_on_one_line_are_separated() {
        for (pem, lines) in [
            ("-----BEGIN A-----\nAA==\n-----END A-----\n", None),
            ("-----BEGIN A-----\r\nAA==\r\n-----END A-----", None),
            (
                "-----BEGIN A-----\nAA==\n-----END A----------BEGIN B-----\nBB==\n-----END B-----",
                Some("-----BEGIN A-----\nAA==\n-----END A-----\n-----BEGIN B-----\nBB==\n-----END B-----"),
            ),
            (
                "  -----BEGIN A-----\n  AA==-----END A-----",
                Some("  \n-----BEGIN A-----\n  AA==\n-----END A-----"),
            ),
            ("", None),
            ("no PEM", None),
        ] {
            let found = with_markers_on_lines(pem.as_bytes());
            assert_eq!(std::str::from_utf8(&found), Ok(lines.unwrap_or(pem)));
            assert_eq!(matches!(found, Cow::Owned(_)), lines.is_some(), "{pem:?}");
        }
    }
}
