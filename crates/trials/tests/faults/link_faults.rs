//! What can happen to the two links (`c` to clients, `p` to peers or targets), whoever is between them: they go down, lose their addresses,
//! become narrow, full or lossy, or have a firewall that is full.

use std::{thread, time::Duration};

use turnpike_testkit::alone::run;

use super::or_thorough;
use turnpike_trials::links::Links;

const DEVICES: [&str; 2] = ["p", "c"];

/// How long a fault of a link lasts.
pub(super) fn a_while() {
    thread::sleep(or_thorough(Duration::from_millis(500), Duration::from_secs(3)));
}

/// One after the other goes down and comes up.
pub(super) fn go_down_and_up(links: &Links) {
    for device in DEVICES {
        links.inside(&["ip", "link", "set", device, "down"]);
        a_while();
        links.inside(&["ip", "link", "set", device, "up"]);
        a_while();
    }
}

/// One after the other loses its address and has it again; `without` is called meanwhile.
pub(super) fn lose_their_addresses(links: &Links, mut without: impl FnMut(&str)) {
    for (device, address) in [("p", "10.77.2.1/24"), ("c", "10.77.1.1/24")] {
        links.inside(&["ip", "addr", "del", address, "dev", device]);
        let left = links.inside_says(&["ip", "-o", "addr", "show", "dev", device]);
        assert!(!left.contains(address), "{left}");
        a_while();
        without(device);
        links.inside(&["ip", "addr", "add", address, "dev", device]);
        a_while();
    }
}

/// Both take packets of 1,000 bytes for a while, then of 1,500 again; `narrow` is called meanwhile.
pub(super) fn become_narrow(links: &Links, mut narrow: impl FnMut()) {
    for mtu in ["1000", "1500"] {
        for device in DEVICES {
            let set = ["ip", "link", "set", device, "mtu", mtu];
            // Both ends, as it is with a link: an end that takes less than the other sends would drop it.
            links.inside(&set);
            run(set[0], &set[1..]);
        }
        a_while();
        if mtu == "1000" {
            narrow();
        }
    }
}

/// The queues of both take 1 Mbit/s for a while; how many packets they have refused.
pub(super) fn are_full(links: &Links) -> u64 {
    for device in DEVICES {
        let rate = or_thorough("100kbit", "1mbit");
        let limit = ["tbf", "rate", rate, "burst", "3k", "limit", "6k"];
        links.inside(&[&["tc", "qdisc", "add", "dev", device, "root"], &limit[..]].concat());
    }
    a_while();
    let refused = DEVICES.map(|device| {
        let said = links.inside_says(&["tc", "-s", "qdisc", "show", "dev", device, "root"]);
        links.inside(&["tc", "qdisc", "del", "dev", device, "root"]);
        number_behind(&said, "(dropped ")
    });
    refused.iter().sum()
}

/// So many packets in a hundred are lost, on both links and both ways, until `meanwhile` is over; how many these were.
pub(super) fn lose(links: &Links, in_a_hundred: u32, meanwhile: impl FnOnce()) -> u64 {
    let nft = |words: &str| links.inside(&["nft", words]);
    nft("add table inet lossy");
    for hook in ["input", "output"] {
        nft(&format!("add chain inet lossy {hook} {{ type filter hook {hook} priority 0; }}"));
        nft(&format!("add rule inet lossy {hook} numgen random mod 100 < {in_a_hundred} counter drop"));
    }
    meanwhile();
    let said = links.inside_says(&["nft", "list table inet lossy"]);
    nft("delete table inet lossy");
    said.lines().map(|line| number_behind(line, "counter packets ")).sum()
}

/// A firewall that follows connections finds no place for a new one while `meanwhile` lasts.
pub(super) fn have_a_full_firewall(links: &Links, meanwhile: impl FnOnce()) {
    let nft = |words: &str| links.inside(&["nft", words]);
    nft("add table inet full");
    for hook in ["input", "output"] {
        nft(&format!("add chain inet full {hook} {{ type filter hook {hook} priority 0; }}"));
        // From the first rule on that asks for it, connections are followed.
        nft(&format!("add rule inet full {hook} ct state new accept"));
    }
    a_while();
    // As a full table does it: who is known goes on, who is new finds no place.
    for hook in ["input", "output"] {
        nft(&format!("flush chain inet full {hook}"));
        nft(&format!("add rule inet full {hook} ct state new counter drop"));
    }
    a_while();
    meanwhile();
    let said = links.inside_says(&["nft", "list table inet full"]);
    nft("delete table inet full");
    let dropped: u64 = said.lines().map(|line| number_behind(line, "counter packets ")).sum();
    assert!(dropped > 0, "the table was not full: {said}");
}

/// The first number behind these words, 0 where they do not stand.
fn number_behind(text: &str, words: &str) -> u64 {
    let digits = text.split_once(words).map_or("", |(_, rest)| rest);
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().unwrap_or(0)
}

/// Not rows.
mod tests {
    use super::*;

    #[test]
    fn a_number_is_found_behind_its_words() {
        let said = " Sent 5 bytes 1 pkt (dropped 12081, overlimits 24 requeues 0)";
        assert_eq!((number_behind(said, "(dropped "), number_behind(said, "lost ")), (12_081, 0));
    }
}
