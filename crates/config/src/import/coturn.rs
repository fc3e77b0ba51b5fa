//! coturn's turnserver.conf, as of 4.17: each of its options is translated, needs nothing, or is told with what to do instead
//! ([`options`] has the table). Read as coturn reads it: a name, then `=` or blanks, then a value that may stand in quotes; a line that
//! begins with `#` is a comment.

mod draft;
mod options;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;

use std::path::Path;

use super::{Imported, Note};
use turnpike_strict::nearest;

use crate::{Flags, Mistake, Mistakes, Sources, certificates, source};
use draft::Draft;
use options::{Handling, OPTIONS};

/// Reads and translates a file.
///
/// # Errors
/// It cannot be read.
pub fn import(path: &Path) -> Result<Imported, Mistakes> {
    let mut problems = Vec::new();
    match source::file_text(path, &mut problems) {
        Some(text) => Ok(translate(&path.display().to_string(), &text)),
        None => Err(Mistakes(problems)),
    }
}

/// Translates the text of a file; `name` is what the result calls it.
pub fn translate(name: &str, text: &str) -> Imported {
    let (mut draft, mut notes) = (Draft::default(), Vec::new());
    for (line, option, value) in settings(text) {
        let mut note = |text: String, is_harmless| {
            notes.push(Note { line, option: option.to_owned(), text, is_harmless });
        };
        let Some((_, handling)) = OPTIONS.iter().find(|(known, _)| *known == option) else {
            let names = OPTIONS.iter().map(|(name, _)| *name);
            let meant =
                nearest(option, names).map_or_else(String::new, |name| format!("; did you mean {name}?"));
            note(format!("coturn 4.17 has no such option{meant}"), false);
            continue;
        };
        match handling {
            Handling::Value(translate) => {
                if let Err(why) = translate(&mut draft, value) {
                    note(why, false);
                }
            }
            Handling::Switch(translate) => match is_on(value) {
                Some(on) => translate(&mut draft, on),
                None => note(format!("{value:?} is neither on nor off"), false),
            },
            Handling::Needless(why) => note((*why).to_owned(), true),
            Handling::Instead(_) if is_on(value) == Some(false) => {}
            Handling::Instead(what) => note((*what).to_owned(), false),
        }
    }
    let mut toml = draft.finish(&mut notes);
    notes.extend(mistakes(&toml));
    for note in notes.iter_mut().filter(|note| note.line == 0) {
        note.line = line_of(text, note);
    }
    notes.sort_by_key(|note| note.line);
    let from = format!("From {name}, by turnpike import coturn. docs/from-coturn.md tells what differs.");
    toml.insert_str(0, &format!("{}\n", comment(&from)));
    let told: Vec<_> = notes.iter().filter(|note| !note.is_harmless).collect();
    if !told.is_empty() {
        toml.push_str("\n# What has no translation:\n");
        told.iter().for_each(|note| toml.push_str(&comment(&note.to_string())));
    }
    Imported { toml, notes }
}

/// Where the option stands that a note is named after, of several lines with it the one whose value the note tells; 0 if none does.
fn line_of(text: &str, note: &Note) -> usize {
    let is_told = |value: &str| value.split('/').all(|part| note.text.contains(part));
    let named = settings(text).filter(|(_, option, _)| *option == note.option);
    named.map(|(line, _, value)| (is_told(value), line)).max().map_or(0, |(_, line)| line)
}

/// A line of a comment. Control characters have no place in it, or it might end before its text does (TOML 1.0).
fn comment(text: &str) -> String {
    format!("# {}\n", text.replace(char::is_control, " "))
}

/// Line, name and value of each setting.
fn settings(text: &str) -> impl Iterator<Item = (usize, &str, &str)> {
    let lines = (1..).zip(text.lines()).map(|(number, line)| (number, line.trim()));
    lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')).map(|(number, line)| {
        let is_gap = |c: char| matches!(c, ' ' | '=' | '\t');
        let (name, value) = line.split_once(is_gap).unwrap_or((line, ""));
        let value = value.trim_start_matches(is_gap).trim_end();
        let unquoted = value.strip_prefix('"').map_or(value, |rest| rest.strip_suffix('"').unwrap_or(rest));
        (number, name, unquoted)
    })
}

/// coturn looks at the first letter, and takes a switch without a value for one that is on.
fn is_on(value: &str) -> Option<bool> {
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

/// What is wrong with the result, files that it names left out: they may be on another machine.
fn mistakes(toml: &str) -> Vec<Note> {
    let mut problems = Vec::new();
    let entries = source::parse_file(Path::new("result"), toml, &mut problems);
    let sources = Sources::new(None, Vec::new(), Flags::new());
    let errors = match sources.merge(&entries, problems, |_| certificates::Found::default()) {
        Ok(_) => Vec::new(),
        Err(Mistakes(errors)) => errors,
    };
    let note = |Mistake { key, problem, expected, .. }: Mistake| {
        let text = format!("{problem}; expected {expected}");
        Note { line: 0, option: key, text, is_harmless: false }
    };
    errors.into_iter().map(note).collect()
}
