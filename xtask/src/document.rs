//! Generated tables in the documentation, each between two markers.

use crate::Failure;

/// Replaces the table of this name; `by` is the command that generates it.
pub(crate) fn with_table(text: &str, name: &str, by: &str, table: &str) -> Result<String, Failure> {
    let [begin, end] = markers(name, by);
    let (before, rest) = text.split_once(&begin).ok_or(format!("the document has no {}", begin.trim()))?;
    let (_, after) = rest.split_once(&end).ok_or(format!("the document has no {end}"))?;
    Ok(format!("{before}{begin}{table}{end}{after}"))
}

/// Lines of the table; none if the document does not have it.
pub(crate) fn lines_of<'a>(text: &'a str, name: &str, by: &str) -> Vec<&'a str> {
    let [begin, end] = markers(name, by);
    let rest = text.split_once(&begin).map_or("", |(_, rest)| rest);
    rest.split_once(&end).map_or("", |(lines, _)| lines).lines().collect()
}

fn markers(name: &str, by: &str) -> [String; 2] {
    [format!("<!-- {name}: written by {by} -->\n"), format!("<!-- end of {name} -->")]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_replaces_the_previous_one() {
        let document =
            |table: &str| format!("a\n<!-- x: written by cargo xtask y -->\n{table}<!-- end of x -->\nb\n");
        let new = with_table(&document("old\n"), "x", "cargo xtask y", "new\n");
        assert_eq!(new.expect("the document has both markers"), document("new\n"));
        for wrong in ["a\n", "<!-- x: written by cargo xtask y -->\n", "<!-- end of x -->\n"] {
            assert!(with_table(wrong, "x", "cargo xtask y", "new\n").is_err(), "{wrong}");
        }
    }
}
