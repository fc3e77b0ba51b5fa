//! The limit of open files is raised as far as the process may, and the table of descriptors is made as large.

use turnpike_net::rlimit::{make_room, raise_open_files};

fn limits() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/self/limits").unwrap();
    let line = text.lines().find(|l| l.starts_with("Max open files")).unwrap();
    let number = |word: &str| word.parse().unwrap_or(u64::MAX);
    let mut words = line.split_whitespace().skip(3);
    (number(words.next().unwrap()), number(words.next().unwrap()))
}

#[test]
fn the_limit_is_raised_and_never_lowered() {
    // The limit belongs to the process.
    turnpike_testkit::alone::in_own_process(turnpike_testkit::this_test!(), raise);
}

fn raise() {
    let (soft, hard) = limits();
    assert_eq!(raise_open_files(1), soft);
    assert_eq!(limits(), (soft, hard));
    let wanted = soft.saturating_add(1).min(hard);
    assert_eq!(raise_open_files(wanted), wanted);
    assert_eq!(limits().0, wanted);
    // No process may have more than fs.nr_open: what is in force is returned, and it is not less than before.
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
fn the_table_has_room_before_anybody_asks_for_a_descriptor() {
    turnpike_testkit::alone::in_own_process(turnpike_testkit::this_test!(), || {
        let most = raise_open_files(2000).min(2000);
        assert!(table() < most, "it is small by itself");
        let open = turnpike_testkit::process::descriptors();
        make_room(most).unwrap();
        assert!(table() >= most && turnpike_testkit::process::descriptors() == open);
    });
}
