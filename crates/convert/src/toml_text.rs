//! Formats values as TOML.

use turnpike_wire::escape;

pub fn strings<T: ToString>(items: &[T]) -> String {
    list(items.iter().map(|item| quoted(&item.to_string())))
}

/// Formats a list of values that are already TOML.
pub fn list(items: impl Iterator<Item = String>) -> String {
    format!("[{}]", items.collect::<Vec<_>>().join(", "))
}

/// Quotes text on one line; unprintable characters get TOML escapes.
pub fn quoted(text: &str) -> String {
    if text.chars().all(escape::is_plain) {
        return toml::Value::String(text.to_owned()).to_string();
    }
    let escaped = text.chars().map(|char| match char {
        '\n' => "\\n".to_owned(),
        '"' | '\\' => format!("\\{char}"),
        char if escape::is_plain(char) => char.to_string(),
        char => format!("\\U{:08x}", u32::from(char)),
    });
    format!("\"{}\"", escaped.collect::<String>())
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::names::CORPUS;

    #[test]
    fn any_quoted_text_is_one_line_and_round_trips() {
        let more = ["", "\"\\'", "a\nlisten\n", "\r\n\"\u{0}\u{7f}\\é", "'''\n\"\"\""];
        for text in CORPUS.iter().map(|(text, _)| *text).chain(more) {
            let shown = super::quoted(text);
            assert!(shown.chars().all(super::escape::is_plain), "{shown}");
            let read: toml::Table = format!("x = {shown}").parse().expect("TOML");
            assert_eq!(read["x"].as_str(), Some(text), "{shown}");
        }
    }
}
