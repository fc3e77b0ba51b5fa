//! Excerpt from a program's log, shown when the program has exited: the first line with an error, since later errors usually follow from
//! it, and the last lines. The amount of text read and kept is limited.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::Path,
};

/// Number of bytes read from the start and from the end of the log.
const READ: u64 = 256 * 1024;
const WIDTH: usize = 300;
const LAST: usize = 3;

/// Makes the excerpt. Skips the first `skip` bytes, which are from an earlier run; `program` is the program's file name.
pub(crate) fn of(log: &Path, skip: u64, program: &str) -> String {
    let (head, tail) = both_ends(log, skip).unwrap_or_default();
    let mut lines = readable(&head);
    let gap = lines.len();
    lines.extend(readable(&tail));
    let mut kept: Vec<usize> = (lines.len().saturating_sub(LAST)..lines.len()).collect();
    if let Some(first) = first_complaint(&lines, program) {
        // A panic's message is on the line after its location.
        let length = if lines[first].contains(PANIC) { 2 } else { 1 };
        kept.extend(first..(first + length).min(lines.len()));
        kept.sort_unstable();
        kept.dedup();
    }
    let mut words = String::new();
    let mut next = kept.first().copied();
    for index in kept {
        let is_gap = next != Some(index) || (index == gap && index > 0 && !tail.is_empty());
        words += if words.is_empty() {
            ""
        } else if is_gap {
            " / … / "
        } else {
            " / "
        };
        words += &lines[index];
        next = Some(index + 1);
    }
    words
}

const PANIC: &str = "panicked at";

fn first_complaint(lines: &[String], program: &str) -> Option<usize> {
    const WORDS: [&str; 7] = ["ERROR", "FATAL", "CRITICAL", "EMERG", "ALERT", "PANIC", "Traceback"];
    const BRACKETED: [&str; 5] = ["[error]", "[fatal]", "[emerg]", "[alert]", "[crit]"];
    let is_error = |line: &String| {
        let start = line.get(..5).unwrap_or(line).to_lowercase();
        line.contains(PANIC)
            || start == "error"
            || start == "fatal"
            || line.contains(": error: ")
            || BRACKETED.iter().any(|mark| line.contains(mark))
            || line.split(|c: char| !c.is_alphanumeric()).any(|word| WORDS.contains(&word))
    };
    let complains = |line: &String| {
        line.strip_prefix(program).is_some_and(|rest| {
            rest.split_once(':').is_some_and(|(between, _)| {
                between.is_empty() || (between.starts_with(' ') && between.split_whitespace().count() == 1)
            })
        })
    };
    let found = lines.iter().position(is_error);
    found.or_else(|| if program.is_empty() { None } else { lines.iter().position(complains) })
}

fn both_ends(log: &Path, skip: u64) -> std::io::Result<(Vec<u8>, Vec<u8>)> {
    let mut file = File::open(log)?;
    let length = file.metadata()?.len();
    let (mut head, mut tail) = (Vec::new(), Vec::new());
    file.seek(SeekFrom::Start(skip))?;
    file.by_ref().take(READ).read_to_end(&mut head)?;
    if length > skip + READ {
        file.seek(SeekFrom::Start((skip + READ).max(length - READ)))?;
        file.take(READ).read_to_end(&mut tail)?;
    }
    Ok((head, tail))
}

fn readable(bytes: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(bytes)
        .lines()
        .map(|line| {
            let line = without_escapes(line);
            let line = line.trim();
            match line.char_indices().nth(WIDTH) {
                Some((end, _)) => format!("{}…", &line[..end]),
                None => line.to_owned(),
            }
        })
        .filter(|line| !line.is_empty())
        .collect()
}

/// Removes escape sequences (`ESC [ ... letter`) and single control characters.
fn without_escapes(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut characters = line.chars();
    while let Some(c) = characters.next() {
        if c == '\x1b' {
            if characters.next() == Some('[') {
                let _ = characters.by_ref().find(char::is_ascii_alphabetic);
            }
        } else if c == '\t' {
            plain.push(' ');
        } else if !c.is_control() {
            plain.push(c);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::Dir;

    use super::*;

    fn words(log: &str, program: &str) -> String {
        let directory = Dir::new();
        let path = directory.at("log");
        std::fs::write(&path, log).unwrap();
        of(&path, 0, program)
    }

    #[test]
    fn the_error_is_kept_when_other_lines_follow_it() {
        let log = "\
2026-11-20 INFO starting
2026-11-20 \x1b[31mERROR\x1b[0m cannot bind 10.0.0.1:3478: address in use
2026-11-20 INFO stopping workers
2026-11-20 INFO 0 sessions
2026-11-20 INFO closing the log
2026-11-20 INFO bye
";
        assert_eq!(
            words(log, "turnpike"),
            "2026-11-20 ERROR cannot bind 10.0.0.1:3478: address in use / … / 2026-11-20 INFO 0 sessions / \
             2026-11-20 INFO closing the log / 2026-11-20 INFO bye"
        );
    }

    #[test]
    fn a_panic_is_kept_with_its_message() {
        let log = "\
up
thread 'worker' panicked at src/worker.rs:7:5:
index out of bounds
note: run with `RUST_BACKTRACE=1`
a
b
c
";
        let words = words(log, "relay");
        assert!(
            words.starts_with("thread 'worker' panicked at src/worker.rs:7:5: / index out of bounds / … / a"),
            "{words}"
        );
    }

    #[test]
    fn errors_are_recognized_by_keyword_or_program_name() {
        for (line, program) in [
            ("turnpike: cannot read x", "turnpike"),
            ("turnpike serve: cannot read x", "turnpike"),
            ("[ALERT] (42) : cannot bind", "haproxy"),
            ("nginx: [emerg] bind() failed", "nginx"),
            ("iperf3: error - unable to connect", "iperf3"),
            ("0: : ERROR: Cannot bind", "turnserver"),
            ("error: unexpected argument", "x"),
        ] {
            let told = words(&format!("hello\n{line}\n1\n2\n3\n4\n"), program);
            assert!(told.starts_with(line), "{told}");
        }
        assert_eq!(words("no errors\n1\n2\n3\n", "x"), "1 / 2 / 3");
        let told = words("turnpike: welcome\n1\nERROR no port\n2\n3\n4\n5\n", "turnpike");
        assert!(told.starts_with("ERROR no port"), "{told}");
    }

    #[test]
    fn an_error_from_an_earlier_run_is_not_repeated() {
        let directory = Dir::new();
        let path = directory.at("log");
        let earlier = "ERROR from an earlier run\n";
        std::fs::write(&path, format!("{earlier}up\nno route\n")).unwrap();
        assert_eq!(of(&path, earlier.len() as u64, "x"), "up / no route");
    }

    #[test]
    fn empty_logs_yield_nothing_and_long_ones_are_cut() {
        assert_eq!(words("", "x"), "");
        assert_eq!(of(Path::new("/no/such/log"), 0, "x"), "");
        assert_eq!(words("one\n\ntwo", "x"), "one / two");
        let long =
            format!("ERROR {}\n{}end\n", "y".repeat(5000), format!("{}\n", "z".repeat(999)).repeat(2000));
        let told = words(&long, "x");
        assert!(told.starts_with("ERROR yyy") && told.ends_with("z… / end"), "{told}");
        assert!(told.chars().count() <= (LAST + 2) * (WIDTH + 5), "{}", told.chars().count());
    }
}
