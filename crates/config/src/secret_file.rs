//! Files of secrets, one per line. Detects text that would become part of a secret by mistake.

use crate::Secret;

/// Windows editors put this character at the beginning of UTF-8 files.
const BYTE_ORDER_MARK: char = '\u{feff}';

pub(crate) fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(without_mark(text).lines().map(str::trim)).filter(|(_, line)| !line.is_empty())
}

fn without_mark(text: &str) -> &str {
    text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text)
}

/// Explains a line that contains more than a secret, without quoting it.
pub(crate) fn fault(line: &str) -> Option<String> {
    let is_in = |quote| line.len() > 1 && line.starts_with(quote) && line.ends_with(quote);
    if is_in('"') || is_in('\'') {
        return Some("the quotes would be part of the secret: remove them".to_owned());
    }
    if line.starts_with("# ") {
        return Some("the comment would be read as a secret: the file may contain only secrets".to_owned());
    }
    // Base64 ends in `=`, but does not start with an option name.
    let (name, _) = line.split_once('=')?;
    let name = name.trim_start_matches('-').trim_end();
    let is_option =
        ["static-auth-secret", "auth-secret", "secret", "secrets", "auth.secrets"].contains(&name);
    (is_option || name.starts_with("TURNPIKE_"))
        .then(|| format!("{name}= would be part of the secret: remove the option name"))
}

/// Reads the secret on the first line of a file.
pub fn first_secret(text: &str) -> Result<Secret, String> {
    match without_mark(text).lines().next() {
        None | Some("") => Err("the first line is empty".to_owned()),
        Some(line) => fault(line.trim()).map_or_else(|| Ok(Secret::new(line)), Err),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_must_be_alone_on_its_line() {
        for (text, expected) in [
            ("north\n", Ok("north")),
            ("\u{feff}north\r\n", Ok("north")),
            ("bm9ydGg=\n", Ok("bm9ydGg=")),
            (" no rth ", Ok(" no rth ")),
            ("no\"rth", Ok("no\"rth")),
            ("#north", Ok("#north")),
            ("\"", Ok("\"")),
            ("", Err("empty")),
            ("\nnorth", Err("empty")),
            ("\u{feff}", Err("empty")),
            ("\"north\"", Err("quotes")),
            ("'north'", Err("quotes")),
            ("static-auth-secret=north", Err("static-auth-secret= would")),
            ("--static-auth-secret = north", Err("static-auth-secret= would")),
            ("TURNPIKE_AUTH_SECRETS=north", Err("TURNPIKE_AUTH_SECRETS= would")),
            ("# for Matrix", Err("comment")),
        ] {
            match (first_secret(text), expected) {
                (Ok(found), Ok(secret)) => assert_eq!(found.reveal(), secret, "{text:?}"),
                (Err(why), Err(words)) => assert!(why.contains(words) && !why.contains("north"), "{why}"),
                (found, _) => panic!("{text:?}: {found:?}"),
            }
        }
    }
}
