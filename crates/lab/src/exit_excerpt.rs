//! Excerpt from a program's log, shown when the program has exited: the first line with an error, since later errors usually follow from
//! it, and the last lines. The amount of text read and kept is limited.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::Path,
};

/// Maximum number of bytes read, from the end of the log.
const READ: u64 = 4 << 20;
const WIDTH: usize = 300;
const LAST: usize = 3;
const PANIC: &str = "panicked at";

/// Makes the excerpt. Skips the first `skip` bytes, which are from an earlier run.
pub(crate) fn of(log: &Path, skip: u64) -> String {
    let lines = readable(&read(log, skip).unwrap_or_default());
    let tail = lines.len().saturating_sub(LAST);
    let Some(first) = lines[..tail].iter().position(|line| is_error(line)) else {
        return lines[tail..].join(" / ");
    };
    // A panic's message is on the line after its location.
    let end = if lines[first].contains(PANIC) { first + 2 } else { first + 1 };
    let gap = if end < tail { " / … / " } else { " / " };
    [lines[first..end].join(" / "), lines[end.max(tail)..].join(" / ")].join(gap)
}

fn is_error(line: &str) -> bool {
    const WORDS: [&str; 8] =
        ["error", "fatal", "critical", "emerg", "alert", "panicked", "traceback", "cannot"];
    line.split(|c: char| !c.is_alphanumeric())
        .any(|word| WORDS.iter().any(|known| word.eq_ignore_ascii_case(known)))
}

fn read(log: &Path, skip: u64) -> std::io::Result<Vec<u8>> {
    let (mut file, mut bytes) = (File::open(log)?, Vec::new());
    let start = file.metadata()?.len().saturating_sub(READ);
    file.seek(SeekFrom::Start(skip.max(start)))?;
    file.take(READ).read_to_end(&mut bytes)?;
    Ok(bytes)
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

    fn words(log: &str) -> String {
        let directory = Dir::new();
        let path = directory.at("log");
        std::fs::write(&path, log).unwrap();
        of(&path, 0)
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
            words(log),
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
        let words = words(log);
        assert!(
            words.starts_with("thread 'worker' panicked at src/worker.rs:7:5: / index out of bounds / … / a"),
            "{words}"
        );
    }

    #[test]
    fn errors_are_recognized_by_keyword() {
        for line in [
            "turnpike serve: cannot read x",
            "[ALERT] (42) : cannot bind",
            "nginx: [emerg] bind() failed",
            "iperf3: error - unable to connect",
            "0: : ERROR: Cannot bind",
        ] {
            let told = words(&format!("hello\n{line}\n1\n2\n3\n4\n"));
            assert_eq!(told, format!("{line} / … / 2 / 3 / 4"));
        }
        assert_eq!(words("terrors\n1\n2\n3\n"), "1 / 2 / 3");
        assert_eq!(words("ERROR x\n1\n2\n3\n"), "ERROR x / 1 / 2 / 3");
    }

    #[test]
    fn an_error_from_an_earlier_run_is_not_repeated() {
        let directory = Dir::new();
        let path = directory.at("log");
        let earlier = "ERROR from an earlier run\n";
        std::fs::write(&path, format!("{earlier}up\nno route\n")).unwrap();
        assert_eq!(of(&path, earlier.len() as u64), "up / no route");
    }

    #[test]
    fn empty_logs_yield_nothing_and_long_ones_are_cut() {
        assert_eq!(words(""), "");
        assert_eq!(of(Path::new("/no/such/log"), 0), "");
        assert_eq!(words("one\n\ntwo"), "one / two");
        let long =
            format!("ERROR {}\n{}end\n", "y".repeat(5000), format!("{}\n", "z".repeat(999)).repeat(2000));
        let told = words(&long);
        assert!(told.starts_with("ERROR yyy") && told.ends_with("z… / end"), "{told}");
        assert!(told.chars().count() <= (LAST + 2) * (WIDTH + 5), "{}", told.chars().count());
    }
}
