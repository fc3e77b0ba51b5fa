//! Renamed commands and flags. The old names are accepted for one more version, with a notice.

use std::ffi::OsString;

/// The words of a command. If the last word begins with `--`, it is a flag, which may be anywhere after
/// the others.
struct RenamedWords {
    old: &'static [&'static str],
    new: &'static [&'static str],
}

const RENAMED: &[RenamedWords] = &[
    RenamedWords { old: &["sessions"], new: &["allocations"] },
    RenamedWords { old: &["session"], new: &["allocation"] },
    RenamedWords { old: &["fleet", "sessions"], new: &["fleet", "allocations"] },
];

/// Returns the command line with the new names, and a notice for each old one.
pub(crate) fn rename(arguments: Vec<OsString>) -> (Vec<OsString>, Vec<String>) {
    rename_with(arguments, RENAMED)
}

fn rename_with(mut arguments: Vec<OsString>, renamed: &[RenamedWords]) -> (Vec<OsString>, Vec<String>) {
    let mut notices = Vec::new();
    for words in renamed {
        if words.replace(&mut arguments) {
            let RenamedWords { old, new } = words;
            notices.push(format!(
                "`turnpike {}` is now `turnpike {}`: the next version refuses the old name",
                old.join(" "),
                new.join(" ")
            ));
        }
    }
    (arguments, notices)
}

impl RenamedWords {
    fn replace(&self, arguments: &mut [OsString]) -> bool {
        let flag = self.old.last().zip(self.new.last()).filter(|(old, _)| old.starts_with("--"));
        let command = &self.old[..self.old.len() - usize::from(flag.is_some())];
        let is_command = command
            .iter()
            .enumerate()
            .all(|(at, word)| arguments.get(at + 1).is_some_and(|argument| argument == word));
        if !is_command {
            return false;
        }
        let Some((old, new)) = flag else {
            for (argument, word) in arguments[1..].iter_mut().zip(self.new) {
                *argument = word.into();
            }
            return true;
        };
        let mut is_replaced = false;
        for argument in arguments.iter_mut().take_while(|argument| *argument != "--") {
            let Some(rest) = argument.to_str().and_then(|text| text.strip_prefix(old)) else { continue };
            if rest.is_empty() || rest.starts_with('=') {
                *argument = format!("{new}{rest}").into();
                is_replaced = true;
            }
        }
        is_replaced
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::args::Cli;

    const FLAGS: &[RenamedWords] =
        &[RenamedWords { old: &["serve", "--relay-address"], new: &["serve", "--relay-ip"] }];

    fn renamed(line: &str, table: &[RenamedWords]) -> (String, usize) {
        let words = line.split(' ').map(OsString::from).collect();
        let (words, notices) = rename_with(words, table);
        let words: Vec<String> = words.into_iter().map(|word| word.into_string().unwrap()).collect();
        (words.join(" "), notices.len())
    }

    #[test]
    fn old_commands_are_accepted_with_a_notice() {
        for (old, new) in [
            ("turnpike sessions --user session", "turnpike allocations --user session"),
            ("turnpike session end 5f", "turnpike allocation end 5f"),
            ("turnpike fleet sessions --json", "turnpike fleet allocations --json"),
        ] {
            assert_eq!(renamed(old, RENAMED), (new.to_owned(), 1));
        }
        let (_, notices) = rename(["turnpike", "sessions"].map(OsString::from).to_vec());
        assert_eq!(
            notices,
            ["`turnpike sessions` is now `turnpike allocations`: the next version refuses the old name"]
        );
    }

    #[test]
    fn words_that_are_not_renamed_commands_are_kept() {
        for line in ["turnpike", "turnpike user add sessions", "turnpike fleet status", "turnpike fleet"] {
            assert_eq!(renamed(line, RENAMED), (line.to_owned(), 0));
        }
    }

    #[test]
    fn old_flags_are_accepted_with_a_notice() {
        for (old, new, notices) in [
            ("turnpike serve --relay-address 10.0.0.1", "turnpike serve --relay-ip 10.0.0.1", 1),
            ("turnpike serve --udp --relay-address=10.0.0.1", "turnpike serve --udp --relay-ip=10.0.0.1", 1),
            ("turnpike serve -- --relay-address", "turnpike serve -- --relay-address", 0),
            ("turnpike serve --relay-addresses 1", "turnpike serve --relay-addresses 1", 0),
            ("turnpike forward --relay-address 1", "turnpike forward --relay-address 1", 0),
        ] {
            assert_eq!(renamed(old, FLAGS), (new.to_owned(), notices));
        }
    }

    #[test]
    fn new_commands_exist_and_old_ones_do_not() {
        let cli = Cli::command();
        let exists = |words: &[&str]| {
            let mut command = Some(&cli);
            for word in words.iter().filter(|word| !word.starts_with("--")) {
                command = command.and_then(|command| command.find_subcommand(word));
            }
            let flag = words.iter().find_map(|word| word.strip_prefix("--"));
            command.is_some_and(|command| {
                flag.is_none_or(|flag| command.get_arguments().any(|known| known.get_long() == Some(flag)))
            })
        };
        for RenamedWords { old, new } in RENAMED {
            assert!(exists(new) && !exists(old), "{old:?}, {new:?}");
        }
    }
}
