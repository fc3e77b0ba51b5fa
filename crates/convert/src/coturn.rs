//! coturn's turnserver.conf and command line, as of 4.17: each option is translated, needs nothing, or is named with what to do instead
//! ([`options`] has the table, [`read`] the syntax).

mod draft;
pub(crate) mod options;
mod peers;
mod read;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;

use std::{
    net::{IpAddr, UdpSocket},
    path::Path,
};

use turnpike_strict::{Mistake, Mistakes, file_text, nearest};

use crate::{
    translation::{Imported, Note},
    wrong_format::{self, Reader},
};
use draft::Draft;
pub use options::is_option;
use options::{Handling, OPTIONS};
use read::{Setting, is_on, settings, whole, without_comment};

/// Facts about the machine on which the translation runs, which is often the server's.
struct Machine {
    is_own: fn(IpAddr) -> bool,
    is_file: fn(&Path) -> bool,
    /// Whether a certificate and its key can be used for DTLS; `None` if they cannot be read here.
    can_dtls: fn(cert: &Path, key: &Path) -> Option<bool>,
    /// Mistakes of a configuration, whose files are not read: they may be on another machine.
    mistakes: fn(&str) -> Vec<Mistake>,
}

/// Reads and translates a file, the arguments of a command line, or both. Arguments win, as in coturn. `can_dtls` tells whether DTLS
/// can use a certificate and its key (`None` if it cannot be read here), `mistakes` finds those of the result without reading the files
/// that it names.
///
/// # Errors
/// The file cannot be read, or is another program's; or there is neither a file nor an argument.
pub fn import(
    path: Option<&Path>,
    arguments: &[String],
    can_dtls: fn(cert: &Path, key: &Path) -> Option<bool>,
    mistakes: fn(&str) -> Vec<Mistake>,
) -> Result<Imported, Mistakes> {
    let mut notes = Vec::new();
    let given = read::arguments(arguments, &mut notes);
    if let Some(named) = path.filter(|_| given.no_file) {
        let text = format!(
            "coturn reads no file with it; {} is translated too, since it is named here",
            named.display()
        );
        notes.push(Note { line: 0, option: "-n".to_owned(), text, is_harmless: true });
    }
    let path = path.or(given.file.filter(|_| !given.no_file));
    let mut problems = Vec::new();
    let text = match path {
        Some(path) => {
            let text = file_text(path, &mut problems);
            problems.extend(
                text.as_ref().and_then(|text| wrong_format::of_another_program(path, text, Reader::Coturn)),
            );
            text.filter(|_| problems.is_empty()).ok_or(Mistakes(problems))?
        }
        None => zeroize::Zeroizing::default(),
    };
    let name = match path {
        Some(path) if arguments.is_empty() => path.display().to_string(),
        Some(path) => format!("{} and a command line", path.display()),
        None => "a command line".to_owned(),
    };
    if path.is_none() && !given.no_file {
        let text = "coturn also reads its turnserver.conf here: name that file too if there is one";
        notes.push(Note { line: 0, option: "-n".to_owned(), text: text.to_owned(), is_harmless: true });
    }
    let here = Machine { is_own, is_file: Path::is_file, can_dtls, mistakes };
    let all = settings(&text).chain(given.settings);
    Ok(translate(&name, all, notes, &here))
}

/// Packets to such an address leave from it. It is not enough that it can be bound: with `ip_nonlocal_bind` every address can.
fn is_own(ip: IpAddr) -> bool {
    let any = if ip.is_ipv4() { IpAddr::from([0; 4]) } else { IpAddr::from([0; 16]) };
    let from = || {
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect((ip, 9))?;
        socket.local_addr()
    };
    !ip.is_unspecified() && !ip.is_multicast() && from().is_ok_and(|from| from.ip() == ip)
}

/// Translates settings; `name` is the place that the result names as their source.
fn translate<'a>(
    name: &str,
    all: impl Iterator<Item = Setting<'a>>,
    mut notes: Vec<Note>,
    machine: &Machine,
) -> Imported {
    let all: Vec<Setting<'a>> = all.collect();
    let mut draft = Draft::default();
    for (line, option, value) in &all {
        let mut note = |text: String, is_harmless| {
            notes.push(Note { line: *line, option: (*option).to_owned(), text, is_harmless });
        };
        let Some((_, handling)) = OPTIONS.iter().find(|(known, _)| known == option) else {
            let names = OPTIONS.iter().map(|(name, _)| *name);
            let meant =
                nearest(option, names).map_or_else(String::new, |name| format!("; did you mean {name}?"));
            note(format!("coturn 4.17 has no such option{meant}"), false);
            continue;
        };
        apply(&mut draft, handling, value, &mut note);
    }
    let mut toml = draft.finish(machine, &mut notes);
    notes.extend((machine.mistakes)(&toml).into_iter().map(of_result));
    for note in notes.iter_mut().filter(|note| note.line == 0) {
        note.line = line_of(&all, note);
    }
    notes.sort_by_key(|note| note.line);
    let from = format!("From {name}, by turnpike import coturn. docs/from-coturn.md lists the differences.");
    toml.insert_str(0, &format!("{}\n", comment(&from)));
    let open: Vec<_> = notes.iter().filter(|note| !note.is_harmless).collect();
    if !open.is_empty() {
        toml.push_str("\n# What has no translation:\n");
        open.iter().for_each(|note| toml.push_str(&comment(&note.to_string())));
    }
    Imported { toml, notes }
}

/// Brings one setting into the draft. `note` takes a remark, and whether it is harmless.
fn apply(draft: &mut Draft, handling: &Handling, raw: &str, note: &mut impl FnMut(String, bool)) {
    let (value, has_comment) = without_comment(raw);
    match handling {
        Handling::Number(translate) => {
            let value = value.trim();
            let digits = &value[..value.bytes().take_while(u8::is_ascii_digit).count()];
            let rest = value[digits.len()..].trim();
            if digits.is_empty() && !value.is_empty() {
                return note(format!("{value:?} is not a number"), false);
            }
            if !rest.is_empty() && !rest.starts_with('#') {
                note(format!("coturn reads {digits} and ignores {rest:?}: so does this translation"), false);
            }
            if let Err(why) = translate(draft, digits) {
                note(why, false);
            }
        }
        Handling::Value(translate) => {
            if has_comment {
                let why = "the comment behind the value is left out; coturn takes it for a part of the value and rejects that";
                note(why.to_owned(), true);
            }
            if let Err(why) = translate(draft, value) {
                note(why, false);
            }
        }
        Handling::Text(translate) => {
            if has_comment {
                let why = "coturn knows no comments behind values: everything up to the end of the line is a part of this one, there and \
                           in this translation; take the comment out if it is not what clients use";
                note(why.to_owned(), false);
            }
            if let Err(why) = translate(draft, whole(raw)) {
                note(why, false);
            }
        }
        Handling::Switch(translate) => match is_on(value) {
            Some(on) => translate(draft, on),
            None => note(format!("{value:?} is neither on nor off"), false),
        },
        Handling::Flag(translate) => {
            if is_on(value) == Some(false) {
                note(
                    format!("coturn takes it for on, in spite of {value:?}: so does this translation"),
                    false,
                );
            }
            translate(draft);
        }
        Handling::Needless(why) => note((*why).to_owned(), true),
        Handling::Instead(_) if is_on(value) == Some(false) => {}
        Handling::Instead(what) => note((*what).to_owned(), false),
    }
}

/// The line of the option that a note is about, of several lines the one whose value the note names; 0 if there is none.
fn line_of(all: &[Setting<'_>], note: &Note) -> usize {
    let is_named = |value: &str| without_comment(value).0.split('/').all(|part| note.text.contains(part));
    let lines = all.iter().filter(|(_, option, _)| *option == note.option);
    lines.map(|(line, _, value)| (is_named(value), *line)).max().map_or(0, |(_, line)| line)
}

/// A line of a comment. Control characters have no place in it, or it might end before its text does (TOML 1.0).
fn comment(text: &str) -> String {
    format!("# {}\n", text.replace(char::is_control, " "))
}

/// A mistake in the result.
fn of_result(Mistake { key, problem, expected, .. }: Mistake) -> Note {
    Note { line: 0, option: key, text: format!("{problem}; expected {expected}"), is_harmless: false }
}
