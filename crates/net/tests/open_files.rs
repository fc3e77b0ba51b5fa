//! Limit on open files, and size of the descriptor table.

use turnpike_net::rlimit::{make_room, raise_open_files};

fn limits() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/self/limits").unwrap();
    let line = text.lines().find(|l| l.starts_with("Max open files")).unwrap();
    let number = |word: &str| word.parse().unwrap_or(u64::MAX);
    let mut words = line.split_whitespace().skip(3);
    (number(words.next().unwrap()), number(words.next().unwrap()))
}

#[test]
fn descriptor_limit_is_raised_and_never_lowered() {
    // The limit is process-wide.
    turnpike_testkit::alone::in_own_process(turnpike_testkit::this_test!(), raise);
}

fn raise() {
    let (soft, hard) = limits();
    assert_eq!(raise_open_files(1), soft);
    assert_eq!(limits(), (soft, hard));
    let wanted = soft.saturating_add(1).min(hard);
    assert_eq!(raise_open_files(wanted), wanted);
    assert_eq!(limits().0, wanted);
    // A value beyond fs.nr_open is refused: the limit in effect is returned, and it is not lower than before.
    let most = raise_open_files(u64::MAX / 2);
    assert_eq!(limits().0, most);
    assert!(most >= wanted);
}

/// Entries of the kernel's table (FDSize of proc_pid_status(5)).
fn table() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
    line.trim().parse().unwrap()
}

#[test]
fn descriptor_table_is_enlarged_in_advance() {
    turnpike_testkit::alone::in_own_process(turnpike_testkit::this_test!(), || {
        let most = raise_open_files(2000).min(2000);
        assert!(table() < most, "the initial table is small");
        let open = turnpike_testkit::process::descriptors();
        make_room(most).unwrap();
        assert!(table() >= most && turnpike_testkit::process::descriptors() == open);
    });
}
