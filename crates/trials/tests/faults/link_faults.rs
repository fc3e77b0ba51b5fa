//! Faults of the two links (`c` to clients, `p` to peers or targets): link down, no address, small MTU, full queue, loss, and a firewall
//! whose connection table is full.

use std::{thread, time::Duration};

use turnpike_testkit::alone::run;

use super::or_thorough;
use turnpike_trials::links::Links;

const DEVICES: [&str; 2] = ["p", "c"];

pub(super) fn a_while() {
    thread::sleep(or_thorough(Duration::from_millis(500), Duration::from_secs(3)));
}

pub(super) fn go_down_and_up(links: &Links) {
    for device in DEVICES {
        links.inside(&["ip", "link", "set", device, "down"]);
        a_while();
        links.inside(&["ip", "link", "set", device, "up"]);
        a_while();
    }
}

/// Removes and restores the address of each link in turn; `without` is called in between.
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

/// Sets the MTU of both links to 1,000 bytes and back to 1,500; `narrow` is called in between.
pub(super) fn become_narrow(links: &Links, mut narrow: impl FnMut()) {
    for mtu in ["1000", "1500"] {
        for device in DEVICES {
            let set = ["ip", "link", "set", device, "mtu", mtu];
            // Sets both ends, as on a real link: an end with a smaller MTU drops packets.
            links.inside(&set);
            run(set[0], &set[1..]);
        }
        a_while();
        if mtu == "1000" {
            narrow();
        }
    }
}

/// Limits both queues to 1 Mbit/s for a while; returns the number of dropped packets.
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

/// Drops a percentage of packets on both links in both directions during `meanwhile`; returns the number of dropped packets.
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

/// Drops new connections during `meanwhile`, as with a full conntrack table.
pub(super) fn have_a_full_firewall(links: &Links, meanwhile: impl FnOnce()) {
    let nft = |words: &str| links.inside(&["nft", words]);
    nft("add table inet full");
    for hook in ["input", "output"] {
        nft(&format!("add chain inet full {hook} {{ type filter hook {hook} priority 0; }}"));
        // Connection tracking is enabled by the first rule that needs it.
        nft(&format!("add rule inet full {hook} ct state new accept"));
    }
    a_while();
    // New connections get no entry, as with a full table.
    for hook in ["input", "output"] {
        nft(&format!("flush chain inet full {hook}"));
        nft(&format!("add rule inet full {hook} ct state new counter drop"));
    }
    a_while();
    meanwhile();
    let said = links.inside_says(&["nft", "list table inet full"]);
    nft("delete table inet full");
    let dropped: u64 = said.lines().map(|line| number_behind(line, "counter packets ")).sum();
    assert!(dropped > 0, "no packet was dropped: {said}");
}

fn number_behind(text: &str, words: &str) -> u64 {
    let digits = text.split_once(words).map_or("", |(_, rest)| rest);
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().unwrap_or(0)
}

mod tests {
    use super::*;

    #[test]
    fn number_after_words_is_parsed() {
        let said = " Sent 5 bytes 1 pkt (dropped 12081, overlimits 24 requeues 0)";
        assert_eq!((number_behind(said, "(dropped "), number_behind(said, "lost ")), (12_081, 0));
    }
}
