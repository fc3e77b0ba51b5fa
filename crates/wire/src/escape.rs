//! Escaping of untrusted text, such as usernames and certificate names, in log lines, tables, pages and
//! messages.
//!
//! Values keep the original text, and only the output escapes it. The admin page does the same in JavaScript
//! (`admin/src/web/format.js`). Escapes are those of Rust strings. Distinct names never look the same: the
//! backslash, invisible characters and unusual spaces are escaped.

use std::{
    borrow::Cow,
    fmt::{self, Write as _},
};

/// Marks truncated text.
const MARK: char = '…';

/// Escapes a single value. The alternate form (`{:#}`) adds double quotes.
pub fn name(text: &str) -> Name<'_> {
    Name { text, most: usize::MAX }
}

#[derive(Clone, Copy, Debug)]
pub struct Name<'a> {
    text: &'a str,
    most: usize,
}

impl Name<'_> {
    /// Truncates to `most` characters and marks the truncation.
    #[must_use]
    pub fn cut(self, most: usize) -> Self {
        Self { most, ..self }
    }
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quote = if f.alternate() { "\"" } else { "" };
        f.write_str(quote)?;
        let mut characters = self.text.chars().enumerate().peekable();
        let mut after_space = true;
        while let Some((at, character)) = characters.next() {
            if at == self.most {
                f.write_char(MARK)?;
                break;
            }
            match character {
                '\\' | '"' => write!(f, "\\{character}")?,
                MARK => escape(f, character)?,
                ' ' if after_space || characters.peek().is_none() => escape(f, character)?,
                _ => write(f, character)?,
            }
            after_space = character == ' ';
        }
        f.write_str(quote)
    }
}

/// Escapes characters that end a line, move the cursor or reorder text. Existing escapes stay as they are.
pub fn line(text: &str) -> impl fmt::Display {
    struct Line<'a>(&'a str);
    impl fmt::Display for Line<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.chars().try_for_each(|character| write(f, character))
        }
    }
    Line(text)
}

/// Makes serialized JSON safe for a terminal; the escapes parse to the same text.
pub fn json(text: &str) -> Cow<'_, str> {
    // Line ends and spaces of the layout are kept; the serializer has escaped those within strings.
    let is_plain = |character: char| character < '\x7f' || is_plain(character);
    if text.chars().all(is_plain) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        if is_plain(character) {
            escaped.push(character);
        } else {
            for unit in character.encode_utf16(&mut [0; 2]) {
                let _ = write!(escaped, "\\u{unit:04x}");
            }
        }
    }
    Cow::Owned(escaped)
}

/// True for visible characters and the space.
#[must_use]
pub fn is_plain(character: char) -> bool {
    // Letters and symbols that are displayed as blank: Hangul fillers and the blank Braille pattern.
    const BLANK: [char; 5] = ['\u{115f}', '\u{1160}', '\u{2800}', '\u{3164}', '\u{ffa0}'];
    match character {
        ' '..='~' => true,
        _ => character.escape_debug().len() == 1 && !BLANK.contains(&character),
    }
}

fn write(f: &mut fmt::Formatter<'_>, character: char) -> fmt::Result {
    if is_plain(character) { f.write_char(character) } else { escape(f, character) }
}

fn escape(f: &mut fmt::Formatter<'_>, character: char) -> fmt::Result {
    match character {
        '\0' => f.write_str("\\0"),
        '\t' => f.write_str("\\t"),
        '\n' => f.write_str("\\n"),
        '\r' => f.write_str("\\r"),
        _ => write!(f, "{}", character.escape_unicode()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use turnpike_testkit::names;

    use super::*;

    #[test]
    fn a_name_is_shown_as_a_string_literal() {
        for (text, shown) in names::CORPUS {
            assert_eq!(name(text).to_string(), *shown);
            assert_eq!(format!("{:#}", name(text)), format!("\"{shown}\""));
            assert_eq!(line(shown).to_string(), *shown, "a line keeps existing escapes");
        }
    }

    #[test]
    fn names_that_differ_look_different() {
        let mut seen = HashMap::new();
        let odd = ['a', ' ', '\\', '"', '0', 'n', '…', '\0', '\n', 'u', '{', '}', '\u{200b}', '\u{301}'];
        for a in odd {
            for b in odd {
                for c in odd {
                    for text in [String::from_iter([a, b, c]), format!("{a}{b}{c}\\u{{200b}}")] {
                        let shown = name(&text).to_string();
                        if let Some(other) = seen.insert(shown.clone(), text.clone()) {
                            assert_eq!(other, text, "{shown}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn only_a_truncated_name_ends_with_the_mark() {
        assert_eq!(name("abcd").cut(3).to_string(), "abc…");
        assert_eq!(name("abc").cut(3).to_string(), "abc");
        assert_eq!(name("abc…").cut(4).to_string(), "abc\\u{2026}");
    }

    #[test]
    fn a_line_contains_no_line_end_or_reordering() {
        let shown = line("no user \"a\\n\": b\nc\u{202e}\u{2028}\u{1b}[2J…").to_string();
        assert_eq!(shown, "no user \"a\\n\": b\\nc\\u{202e}\\u{2028}\\u{1b}[2J…");
    }

    #[test]
    fn json_keeps_its_layout_and_parses_to_the_same_text() {
        for (text, _) in names::CORPUS {
            let value = serde_json::json!({ "user": text, "ü": [text, 1] });
            let pretty = serde_json::to_string_pretty(&value).unwrap();
            let shown = json(&pretty);
            assert_eq!(shown.lines().count(), pretty.lines().count());
            assert!(shown.chars().all(|character| character == '\n' || is_plain(character)), "{shown}");
            assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
        }
        assert!(matches!(json("{\"user\":\"müller\"}"), Cow::Borrowed(_)));
        assert_eq!(json("\"\u{e0041}\""), "\"\\udb40\\udc41\"");
    }
}
