//! Text that someone else chose, as log lines, tables, pages and messages show it: usernames, realms, certificate names, a server's
//! SOFTWARE.
//!
//! Values keep the true text, and the place that shows it escapes it, so the two never mix: [`name`] for one value, [`line`](fn@line)
//! for a whole line whose values are escaped already, [`json`] for serialised JSON. The page has the same rule in JavaScript
//! (`admin/src/web/format.js`).
//!
//! Escapes are those of a Rust string: `\n`, `\0`, `\\`, `\"`, `\u{202e}`. Two different names never look the same: a backslash is
//! escaped, and so are characters without a shape of their own (control, format and combining characters, separators) and spaces that
//! a reader would miss.

use std::{
    borrow::Cow,
    fmt::{self, Write as _},
};

/// Ends a text that was cut; a name's own is escaped.
const MARK: char = '…';

/// One value. The alternate form (`{:#}`) has double quotes around it.
pub fn name(text: &str) -> Name<'_> {
    Name { text, most: usize::MAX }
}

/// See [`name`].
#[derive(Clone, Copy, Debug)]
pub struct Name<'a> {
    text: &'a str,
    most: usize,
}

impl Name<'_> {
    /// Shows the first characters, and a mark where there are more.
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

/// A line with nothing in it that ends it, moves a cursor or reorders it. What its values escape stays as it is.
pub fn line(text: &str) -> impl fmt::Display {
    struct Line<'a>(&'a str);
    impl fmt::Display for Line<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.chars().try_for_each(|character| write(f, character))
        }
    }
    Line(text)
}

/// Serialised JSON that a terminal can show: characters without a shape of their own as `\u202e`, which reads as the same text.
pub fn json(text: &str) -> Cow<'_, str> {
    // Line ends and spaces of the layout stay; the serialiser has escaped those of strings.
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
                // A String takes any text.
                let _ = write!(escaped, "\\u{unit:04x}");
            }
        }
    }
    Cow::Owned(escaped)
}

/// True for characters with a shape of their own, and the space.
#[must_use]
pub fn is_plain(character: char) -> bool {
    // Letters and symbols without ink: Hangul fillers and the blank of Braille.
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
    fn a_name_is_shown_as_it_would_be_typed_into_a_string() {
        for (text, shown) in names::CORPUS {
            assert_eq!(name(text).to_string(), *shown);
            assert_eq!(format!("{:#}", name(text)), format!("\"{shown}\""));
            assert_eq!(line(shown).to_string(), *shown, "a line leaves what is escaped");
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
    fn a_cut_name_has_a_mark_that_no_whole_one_has() {
        assert_eq!(name("abcd").cut(3).to_string(), "abc…");
        assert_eq!(name("abc").cut(3).to_string(), "abc");
        assert_eq!(name("abc…").cut(4).to_string(), "abc\\u{2026}");
    }

    #[test]
    fn nothing_in_a_line_ends_it_or_reorders_it() {
        let shown = line("no user \"a\\n\": b\nc\u{202e}\u{2028}\u{1b}[2J…").to_string();
        assert_eq!(shown, "no user \"a\\n\": b\\nc\\u{202e}\\u{2028}\\u{1b}[2J…");
    }

    #[test]
    fn json_keeps_its_layout_and_reads_as_the_same_text() {
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
