use proptest::prelude::*;
use serde_json::Value;
use turnpike_testkit::Dir;

use super::*;

fn open(dir: &Dir, most_bytes: u64) -> Spool {
    Spool::open(&dir.at("s"), &"/turnpike/a".into(), most_bytes).expect("a directory").expect("unlocked")
}

fn event(number: u64) -> Arc<Event> {
    Arc::new(Event::new("/turnpike/a", "a", &number))
}

fn append(spool: &mut Spool, numbers: std::ops::Range<u64>) {
    let events: Vec<_> = numbers.map(event).collect();
    let mut rest = &events[..];
    while !rest.is_empty() {
        rest = &rest[spool.append(rest).expect("it is written")..];
    }
}

/// Sequence number, type and data of each event.
fn read(records: &[Record]) -> Vec<(u64, String, Value)> {
    let read = |record: &Record| {
        let json: Value = serde_json::from_slice(&record.json).expect("JSON");
        assert_eq!(json["sequence"], format!("{:020}", record.sequence));
        assert!(json["id"].as_str().expect("text").ends_with(&format!("-{}", record.sequence)));
        (record.sequence, json["type"].as_str().expect("text").to_owned(), json["data"].clone())
    };
    records.iter().map(read).collect()
}

fn take(spool: &mut Spool, most: usize) -> Vec<(u64, String, Value)> {
    read(&spool.take(most, 1 << 20).expect("it is read"))
}

fn numbers(events: &[(u64, String, Value)]) -> Vec<u64> {
    events.iter().filter_map(|(_, kind, data)| data.as_u64().filter(|_| kind == "a")).collect()
}

#[test]
fn undelivered_events_and_numbers_survive_the_process() {
    let dir = Dir::new();
    let mut spool = open(&dir, 1 << 20);
    append(&mut spool, 0..10);
    assert_eq!(numbers(&take(&mut spool, 6)), [0, 1, 2, 3, 4, 5]);
    spool.delivered(3).expect("recorded");
    assert_eq!(spool.waiting(), 7);
    drop(spool);
    let mut spool = open(&dir, 1 << 20);
    assert_eq!(spool.waiting(), 7);
    append(&mut spool, 10..12);
    let events = take(&mut spool, 100);
    assert_eq!(numbers(&events), (3..12).collect::<Vec<_>>());
    assert_eq!(events.iter().map(|event| event.0).collect::<Vec<_>>(), (4..13).collect::<Vec<_>>());
    assert!(!spool.has_more() && take(&mut spool, 100).is_empty());
    append(&mut spool, 12..13);
    assert!(spool.has_more());
    assert_eq!(numbers(&take(&mut spool, 100)), [12]);
}

#[test]
fn only_one_process_at_a_time_writes() {
    let dir = Dir::new();
    let spool = open(&dir, 1 << 20);
    let again = || Spool::open(&dir.at("s"), &"".into(), 1 << 20).expect("a directory");
    assert!(again().is_none());
    drop(spool);
    assert!(again().is_some());
}

#[test]
fn delivered_segments_are_removed() {
    let dir = Dir::new();
    let mut spool = open(&dir, 64 << 10);
    for round in 0..20 {
        append(&mut spool, round * 100..(round + 1) * 100);
        assert_eq!(take(&mut spool, 1000).len(), 100);
        spool.delivered((round + 1) * 100).expect("recorded");
        assert!(spool.segments.len() <= 2, "{:?}", spool.segments);
    }
    let files = fs::read_dir(dir.at("s")).expect("a directory").count();
    assert!(files <= 4, "{files} files");
    drop(spool);
    assert_eq!(open(&dir, 64 << 10).next, 2001);
}

#[test]
fn a_full_spool_drops_the_oldest_events_and_reports_how_many() {
    let dir = Dir::new();
    let mut spool = open(&dir, 64 << 10);
    append(&mut spool, 0..20);
    // These are on their way, and must not be dropped.
    assert_eq!(take(&mut spool, 5).len(), 5);
    append(&mut spool, 20..2000);
    let bytes: u64 = spool.segments.iter().map(|segment| segment.bytes).sum();
    assert!(bytes <= 64 << 10, "{bytes}");
    spool.delivered(5).expect("recorded");
    let mut events = Vec::new();
    while spool.has_more() {
        events.extend(take(&mut spool, 100));
    }
    let reported: u64 = events
        .iter()
        .filter(|(_, kind, _)| kind == LOST)
        .map(|(_, _, data)| {
            let (first, last) =
                (data["first"].as_u64().expect("first"), data["last"].as_u64().expect("last"));
            let count = data["count"].as_u64().expect("a count");
            assert!(count <= last + 1 - first, "{data}");
            count
        })
        .sum();
    let kept = numbers(&events);
    // Reports are dropped too, and then contained in later ones.
    assert_eq!(kept.len() as u64 + 5 + reported, 2000, "every event is delivered or reported");
    assert_eq!(spool.dropped, reported);
    assert!(reported > 1000, "{reported}");
    assert_eq!(kept.last(), Some(&1999));
    assert!(kept.is_sorted());
}

#[test]
fn a_report_that_could_not_be_written_is_written_later() {
    let dir = Dir::new();
    let mut spool = open(&dir, 1 << 20);
    spool.report(LostEvents::unnumbered(7, "the queue was full"));
    assert!(spool.has_lost());
    assert_eq!(spool.append(&[]).expect("written"), 0);
    let events = take(&mut spool, 10);
    assert_eq!((&*events[0].1, &events[0].2["count"]), (LOST, &Value::from(7)));
    assert!(!spool.has_lost());
}

#[test]
fn numbers_continue_after_delivered_lines_that_a_power_failure_took() {
    let dir = Dir::new();
    let mut spool = open(&dir, 1 << 20);
    append(&mut spool, 0..10);
    take(&mut spool, 10);
    spool.delivered(8).expect("recorded");
    drop(spool);
    let path = dir.at("s").join(format!("{:020}.{ENDING}", 1));
    let text = fs::read_to_string(&path).expect("a segment");
    let three: usize = text.lines().take(3).map(|line| line.len() + 1).sum();
    fs::write(&path, [&text.as_bytes()[..three], &[0; 100]].concat()).expect("written");
    let mut spool = open(&dir, 1 << 20);
    append(&mut spool, 20..22);
    let events = take(&mut spool, 10);
    assert_eq!(events.iter().map(|event| event.0).collect::<Vec<_>>(), [9, 10]);
    assert_eq!(numbers(&events), [20, 21]);
}

proptest! {
    /// Any crash leaves a prefix of the lines, and maybe rubbish after it.
    #[test]
    fn a_damaged_end_loses_only_the_damaged_lines(cut in 0_usize..4000, rubbish in proptest::collection::vec(any::<u8>(), 0..50)) {
        let dir = Dir::new();
        let mut spool = open(&dir, 1 << 20);
        append(&mut spool, 0..20);
        drop(spool);
        let path = dir.at("s").join(format!("{:020}.{ENDING}", 1));
        let text = fs::read(&path).expect("a segment");
        let cut = cut.min(text.len());
        fs::write(&path, [&text[..cut], &rubbish].concat()).expect("written");
        let whole = text[..cut].iter().filter(|byte| **byte == b'\n').count() as u64;
        let mut spool = open(&dir, 1 << 20);
        append(&mut spool, 100..101);
        let found = take(&mut spool, 100);
        prop_assert_eq!(found.len() as u64, whole + 1);
        prop_assert_eq!(numbers(&found), (0..whole).chain([100]).collect::<Vec<_>>());
    }
}
