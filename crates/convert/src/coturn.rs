//! Translates coturn's turnserver.conf and command line, as of 4.17. Each option is translated, needs no
//! translation, or gets a note.

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
    wrong_format::{self, FormatReader},
};
use draft::CoturnDraft;
pub use options::is_option;
use options::{Handling, OPTIONS};
use read::{Setting, is_on, settings, whole, without_comment};

/// Facts about the machine that runs the translation, which is often the server.
struct CoturnHost {
    is_own: fn(IpAddr) -> bool,
    is_file: fn(&Path) -> bool,
    /// Returns true if DTLS can use a certificate and its key; `None` if the files cannot be read on this
    /// machine.
    can_dtls: fn(cert: &Path, key: &Path) -> Option<bool>,
    /// Returns the errors in a configuration without reading the files that it names, which may be on
    /// another machine.
    mistakes: fn(&str) -> Vec<Mistake>,
}

/// Translates a file, command line arguments, or both; arguments take precedence, as in coturn.
/// `can_dtls` decides whether DTLS can use a certificate and its key (`None` if the files are
/// unreadable). `mistakes` checks the result.
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
            "coturn would not read a file; {} is translated anyway, because it was passed explicitly",
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
                text.as_ref()
                    .and_then(|text| wrong_format::of_another_program(path, text, FormatReader::Coturn)),
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
        let text = "coturn also reads its turnserver.conf: pass that file too if it exists";
        notes.push(Note { line: 0, option: "-n".to_owned(), text: text.to_owned(), is_harmless: true });
    }
    let here = CoturnHost { is_own, is_file: Path::is_file, can_dtls, mistakes };
    let all = settings(&text).chain(given.settings);
    Ok(translate(&name, all, notes, &here))
}

/// Returns true if this machine has the address: the kernel then also uses it as the source of packets to it. A
/// successful bind would prove nothing if `ip_nonlocal_bind` is set.
fn is_own(ip: IpAddr) -> bool {
    let any = if ip.is_ipv4() { IpAddr::from([0; 4]) } else { IpAddr::from([0; 16]) };
    let from = || {
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect((ip, 9))?;
        socket.local_addr()
    };
    !ip.is_unspecified() && !ip.is_multicast() && from().is_ok_and(|from| from.ip() == ip)
}

fn translate<'a>(
    name: &str,
    all: impl Iterator<Item = Setting<'a>>,
    mut notes: Vec<Note>,
    machine: &CoturnHost,
) -> Imported {
    let all: Vec<Setting<'a>> = all.collect();
    let mut draft = CoturnDraft::default();
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
    let from = format!(
        "Translated from {name} by turnpike import coturn. docs/from-coturn.md lists the differences."
    );
    toml.insert_str(0, &format!("{}\n", comment(&from)));
    let open: Vec<_> = notes.iter().filter(|note| !note.is_harmless).collect();
    if !open.is_empty() {
        toml.push_str("\n# Options without a translation:\n");
        open.iter().for_each(|note| toml.push_str(&comment(&note.to_string())));
    }
    Imported { toml, notes }
}

fn apply(draft: &mut CoturnDraft, handling: &Handling, raw: &str, note: &mut impl FnMut(String, bool)) {
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
                note(
                    format!("coturn reads {digits} and ignores {rest:?}, and so does this translation"),
                    false,
                );
            }
            if let Err(why) = translate(draft, digits) {
                note(why, false);
            }
        }
        Handling::Value(translate) => {
            if has_comment {
                let why = "the comment after the value is dropped; coturn treats it as part of the value and rejects the line";
                note(why.to_owned(), true);
            }
            if let Err(why) = translate(draft, value) {
                note(why, false);
            }
        }
        Handling::Text(translate) => {
            if has_comment {
                let why = "coturn has no comments after values: everything up to the end of the line is part of the value, both there and \
                           in this translation; delete the comment unless clients really use it as part of the value";
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
                    format!("coturn treats it as on despite {value:?}, and so does this translation"),
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

/// Line of the option that a note is about; if there are several, the one whose value the note quotes. 0
/// if there is none.
fn line_of(all: &[Setting<'_>], note: &Note) -> usize {
    let is_named = |value: &str| without_comment(value).0.split('/').all(|part| note.text.contains(part));
    let lines = all.iter().filter(|(_, option, _)| *option == note.option);
    lines.map(|(line, _, value)| (is_named(value), *line)).max().map_or(0, |(_, line)| line)
}

/// Formats a comment line. Control characters are replaced, because they could end the comment (TOML
/// 1.0).
fn comment(text: &str) -> String {
    format!("# {}\n", text.replace(char::is_control, " "))
}

fn of_result(Mistake { key, problem, expected, .. }: Mistake) -> Note {
    Note { line: 0, option: key, text: format!("{problem}; expected {expected}"), is_harmless: false }
}
