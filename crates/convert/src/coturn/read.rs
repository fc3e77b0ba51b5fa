//! Parses coturn's two sources of settings: lines of a turnserver.conf, and command line arguments.

use std::path::Path;

use super::{
    Note,
    options::{self, OPTIONS},
};

/// A setting: its line (0 for the command line), its name, and its value as written.
pub(super) type Setting<'a> = (usize, &'a str, &'a str);

/// Settings in a file: a name, then `=` or spaces, then a value that may be quoted. `#` begins a comment
/// line.
pub(super) fn settings(text: &str) -> impl Iterator<Item = Setting<'_>> {
    let lines = (1..).zip(text.lines()).map(|(number, line)| (number, line.trim()));
    lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')).map(|(number, line)| {
        let is_gap = |c: char| matches!(c, ' ' | '=' | '\t');
        let (name, value) = line.split_once(is_gap).unwrap_or((line, ""));
        (number, name, value.trim_start_matches(is_gap))
    })
}

/// A value as coturn reads it: the rest of the line without the quotes. coturn has no comments after values.
pub(super) fn whole(value: &str) -> &str {
    value.strip_prefix('"').map_or(value, |rest| rest.strip_suffix('"').unwrap_or(rest))
}

/// A value without its quotes and trailing comment, and true if there was a comment: a `#` after a space.
pub(super) fn without_comment(value: &str) -> (&str, bool) {
    let is_comment = |text: &str| text.starts_with([' ', '\t']) && text.trim_start().starts_with('#');
    if let Some(rest) = value.strip_prefix('"') {
        let closing = rest.match_indices('"').find(|(at, _)| is_comment(&rest[at + 1..]));
        return closing.map_or((whole(value), false), |(at, _)| (&rest[..at], true));
    }
    if value.starts_with('#') {
        return ("", true);
    }
    let comment = value.char_indices().find(|(at, _)| is_comment(&value[*at..]));
    comment.map_or((value, false), |(at, _)| (value[..at].trim_end(), true))
}

/// Parses a switch as coturn does: only the first letter is checked, and a switch that has no value is on.
pub(super) fn is_on(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "" | "on" => Some(true),
        "off" => Some(false),
        other => match other.as_bytes()[0] {
            b'0' | b'n' | b'f' => Some(false),
            b'1'..=b'9' | b'y' | b't' => Some(true),
            _ => None,
        },
    }
}

#[derive(Debug, Default)]
pub(super) struct Arguments<'a> {
    pub(super) settings: Vec<Setting<'a>>,
    pub(super) file: Option<&'a Path>,
    /// `-n`: coturn reads no file.
    pub(super) no_file: bool,
}

/// coturn's short options, each with its long name.
const LETTERS: [(char, &str); 28] = [
    ('d', "listening-device"),
    ('p', "listening-port"),
    ('L', "listening-ip"),
    ('E', "relay-ip"),
    ('X', "external-ip"),
    ('i', "relay-device"),
    ('m', "relay-threads"),
    ('l', "log-file"),
    ('r', "realm"),
    ('u', "user"),
    ('b', "userdb"),
    ('B', "bps-capacity"),
    ('e', "psql-userdb"),
    ('M', "mysql-userdb"),
    ('J', "mongo-userdb"),
    ('N', "redis-userdb"),
    ('O', "redis-statsdb"),
    ('q', "user-quota"),
    ('Q', "total-quota"),
    ('s', "max-bps"),
    ('C', "rest-api-separator"),
    ('A', "allocation-default-address-family"),
    ('v', "verbose"),
    ('V', "Verbose"),
    ('o', "daemon"),
    ('f', "fingerprint"),
    ('a', "lt-cred-mech"),
    ('z', "no-auth"),
];

/// Parses arguments as getopt_long(3) does: `--name=value`, `--name value`, abbreviated names, `-p 3478`,
/// `-p3478`, `-va`.
pub(super) fn arguments<'a>(arguments: &'a [String], notes: &mut Vec<Note>) -> Arguments<'a> {
    let mut read = Arguments::default();
    let mut words = arguments.iter().map(String::as_str);
    let mut first = true;
    while let Some(word) = words.next() {
        let is_program = std::mem::take(&mut first) && !word.starts_with('-') && word.ends_with("turnserver");
        if let Some(long) = word.strip_prefix("--").filter(|long| !long.is_empty()) {
            let (name, value) =
                long.split_once('=').map_or((long, None), |(name, value)| (name, Some(value)));
            let name = full_name(name);
            let value = value
                .or_else(|| if options::needs_value(name) { words.next() } else { None })
                .unwrap_or_default();
            read.settings.push((0, name, value));
        } else if let Some(letters) = word.strip_prefix('-').filter(|letters| !letters.is_empty()) {
            read.letters(letters, &mut words, notes);
        } else if !is_program {
            notes.push(strange(word, "this is not an option, and coturn ignores it"));
        }
    }
    read
}

impl<'a> Arguments<'a> {
    fn letters(
        &mut self,
        mut letters: &'a str,
        words: &mut impl Iterator<Item = &'a str>,
        notes: &mut Vec<Note>,
    ) {
        while let Some(letter) = letters.chars().next() {
            letters = &letters[letter.len_utf8()..];
            let mut value = || match std::mem::take(&mut letters) {
                "" => words.next().unwrap_or_default(),
                value => value,
            };
            match (letter, LETTERS.iter().find(|(known, _)| *known == letter)) {
                ('n', _) => self.no_file = true,
                ('c', _) => self.file = Some(Path::new(value())),
                ('S', _) => self.settings.push((0, "stun-only", "")),
                ('K', _) => self.settings.push((0, "keep-address-family", value())),
                (_, Some((_, name))) if options::needs_value(name) => self.settings.push((0, name, value())),
                (_, Some((_, name))) => self.settings.push((0, name, "")),
                (_, None) => notes.push(strange(&format!("-{letter}"), "coturn has no such option")),
            }
        }
    }
}

fn strange(word: &str, why: &str) -> Note {
    Note { line: 0, option: word.to_owned(), text: why.to_owned(), is_harmless: false }
}

/// Returns the option with this name, or the only option with this prefix.
fn full_name(name: &str) -> &str {
    let mut longer = OPTIONS.iter().map(|(known, _)| *known).filter(|known| known.starts_with(name));
    match (OPTIONS.iter().any(|(known, _)| *known == name), longer.next(), longer.next()) {
        (false, Some(only), None) => only,
        _ => name,
    }
}
