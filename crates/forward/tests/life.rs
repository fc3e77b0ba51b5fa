//! Starting, reloading, draining and stopping.

use crate::prelude::*;

use turnpike_forward::StartError;

fn at(mut rule: Rule, address: SocketAddr) -> Rule {
    rule.ports.first = address.port();
    rule.ports.last = address.port();
    rule
}

#[test]
fn port_in_use_is_reported_with_its_rule_and_nothing_stays_open() {
    let (_taken, address) = listener();
    let (other, free) = listener();
    drop(other);
    let rules = [at(rule("good", greeter("a")), free), at(rule("bad", greeter("b")), address)];
    let error = Forwarder::start(&settings(), &rules, Arc::new(Reports::default())).err().expect("an error");
    assert!(
        matches!(&error, StartError::Listen { rule, error }
        if rule == "bad" && error.source.kind() == ErrorKind::AddrInUse),
        "{error}"
    );
    assert!(TcpStream::connect(free).is_err());
}

#[test]
fn two_forwarders_do_not_share_a_port_silently() {
    let first = Running::start(&[rule("r", greeter("a"))]);
    let again = at(rule("r", greeter("b")), first.address("r"));
    assert!(Forwarder::start(&settings(), &[again], Arc::new(Reports::default())).is_err());
}

#[test]
fn with_keep_going_the_other_rules_run() {
    let (_taken, address) = listener();
    let mut settings = settings();
    settings.keep_going = true;
    let rules = [at(rule("bad", greeter("b")), address), rule("good", greeter("a"))];
    let (forwarder, failed) = Forwarder::start(&settings, &rules, Arc::new(Reports::default())).unwrap();
    assert_eq!(failed.len(), 1);
    assert!(failed[0].to_string().contains("bad"), "{}", failed[0]);
    let (id, address) = forwarder.listeners().remove(0);
    assert_eq!(id.0, "good");
    assert_eq!(read_exactly(&mut support::client(support::socket_address(&address)), 1), b"a");
}

#[test]
fn unusable_source_is_reported_with_its_rule_and_nothing_listens() {
    let (other, free) = listener();
    drop(other);
    // RFC 5737: no machine has this address.
    let mut foreign = rule("foreign", greeter("b"));
    foreign.source = Some([203, 0, 113, 1].into());
    let rules = [at(rule("good", greeter("a")), free), foreign];
    let error = Forwarder::start(&settings(), &rules, Arc::new(Reports::default())).err().expect("an error");
    assert!(matches!(&error, StartError::Outgoing { rule, .. } if rule == "foreign"), "{error}");
    assert!(TcpStream::connect(free).is_err());
}

#[test]
fn with_keep_going_a_reload_uses_the_rules_that_can_be_bound() {
    let (taken, address) = listener();
    let mut settings = settings();
    settings.keep_going = true;
    let (good, bad) = (rule("good", greeter("a")), at(rule("bad", greeter("b")), address));
    let rules = [bad.clone(), good];
    let (forwarder, failed) = Forwarder::start(&settings, &rules, Arc::new(Reports::default())).unwrap();
    assert_eq!(failed.len(), 1);
    let rules = [&rules[..], &[rule("new", greeter("n"))]].concat();
    let failed = forwarder.reload(&settings, &rules).unwrap();
    assert!(failed[0].to_string().contains("rule bad: "), "{failed:?}");
    let new = forwarder.listeners().into_iter().find(|(id, _)| id.0 == "new").expect("a listener").1;
    let new = support::socket_address(&new);
    assert_eq!(read_exactly(&mut support::client(new), 1), b"n");
    // The old rules stay active if no new rule could be bound.
    assert!(forwarder.reload(&settings, &[bad]).is_err());
    assert_eq!(read_exactly(&mut support::client(new), 1), b"n");
    drop(taken);
    assert!(forwarder.reload(&settings, &rules).unwrap().is_empty());
    assert_eq!(read_exactly(&mut support::client(address), 1), b"b");
}

#[test]
fn several_workers_share_one_port() {
    let mut settings = settings();
    settings.workers = 3;
    let running = Running::start_with(&settings, &[rule("r", greeter("a"))]);
    let mut open: Vec<_> = (0..64).map(|_| running.connect("r")).collect();
    open.iter_mut().for_each(|client| assert_eq!(read_exactly(client, 1), b"a"));
    eventually("all workers have published their counters", || running.snapshot("r").active == 64);
    assert_eq!(running.forwarder.active(), 64);
    drop(open);
    running.log.wait(64);
    assert_eq!(running.forwarder.active(), 0);
}

#[test]
fn reload_keeps_connections_and_applies_to_new_ones() {
    let (kept, changed, gone) =
        (rule("kept", greeter("k")), rule("changed", greeter("a")), rule("gone", greeter("g")));
    let running = Running::start(&[kept.clone(), changed, gone]);
    let mut open = ["kept", "changed", "gone"].map(|id| running.connect(id));
    open.iter_mut().for_each(|client| drop(read_exactly(client, 1)));
    let (changed_at, gone_at) = (running.address("changed"), running.address("gone"));
    // Port 0 would become a different port after each change.
    let changed = at(rule("changed", greeter("b")), changed_at);
    let rules = [kept, changed, rule("new", greeter("n"))];
    let kept_at = running.address("kept");
    running.forwarder.reload(&settings(), &rules).unwrap();
    assert_eq!(running.address("kept"), kept_at);
    for client in &mut open {
        client.write_all(b"still here").unwrap();
        assert_eq!(read_exactly(client, 10), b"still here");
    }
    assert_eq!(read_exactly(&mut running.connect("kept"), 1), b"k");
    assert_eq!(read_exactly(&mut support::client(changed_at), 1), b"b");
    assert_eq!(read_exactly(&mut running.connect("new"), 1), b"n");
    assert_eq!(TcpStream::connect(gone_at).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    assert_eq!(running.snapshot("gone").active, 1);
    drop(open);
    eventually("the rule is removed", || !running.forwarder.snapshots().iter().any(|(id, _)| id.0 == "gone"));
}

#[test]
fn failed_reload_changes_nothing() {
    let (_taken, taken) = listener();
    let old = rule("r", greeter("a"));
    let running = Running::start(std::slice::from_ref(&old));
    let mut open = running.connect("r");
    assert_eq!(read_exactly(&mut open, 1), b"a");
    let rules = [at(rule("r", greeter("b")), running.address("r")), at(rule("bad", greeter("c")), taken)];
    let error = running.forwarder.reload(&settings(), &rules).unwrap_err();
    assert!(error.to_string().contains("bad"), "{error}");
    assert_eq!(running.forwarder.listeners().len(), 1);
    assert_eq!(read_exactly(&mut running.connect("r"), 1), b"a");
    open.write_all(b"x").unwrap();
    assert_eq!(read_exactly(&mut open, 1), b"x");
}

#[test]
fn two_rules_cannot_take_over_the_same_port() {
    let running = Running::start(&[rule("r", greeter("a"))]);
    let address = running.address("r");
    let rules = [at(rule("one", greeter("b")), address), at(rule("two", greeter("c")), address)];
    assert!(running.forwarder.reload(&settings(), &rules).is_err());
    assert_eq!(read_exactly(&mut running.connect("r"), 1), b"a");
}

#[test]
fn port_moves_from_one_address_to_the_wildcard_and_back() {
    // No other test may use this port as a client port on another address, because that would block the
    // wildcard.
    let address = free_address();
    let running = Running::start(&[at(rule("r", greeter("a")), address)]);
    let mut wide = at(rule("r", greeter("b")), address);
    wide.bind = [0, 0, 0, 0].into();
    running.forwarder.reload(&settings(), &[wide]).unwrap();
    // For a moment both rules listen, and clients in the queue of the listener that closes are reset.
    eventually("the wildcard rule serves clients", || greeting_at(address) == Some(*b"b"));
    let narrow = [at(rule("r", greeter("c")), address)];
    running.forwarder.reload(&settings(), &narrow).unwrap();
    eventually("the rule with the specific address serves clients", || greeting_at(address) == Some(*b"c"));
}

/// First byte sent to a client, if it is served.
fn greeting_at(address: SocketAddr) -> Option<[u8; 1]> {
    let mut byte = [0];
    TcpStream::connect(address).and_then(|mut client| client.read_exact(&mut byte)).ok()?;
    Some(byte)
}

#[test]
fn no_connection_fails_during_reloads_under_load() {
    let (first, second) = (greeter("a"), greeter("a"));
    let running = Running::start(&[rule("r", first)]);
    let address = running.address("r");
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let (stop, done) = (Arc::clone(&stop), Arc::clone(&done));
            thread::spawn(move || {
                let mut count = 0;
                while !stop.load(Ordering::Relaxed) {
                    let mut client = support::client(address);
                    assert_eq!(read_exactly(&mut client, 1), b"a");
                    let sent = support::pattern(count as u64, 3000, 9);
                    client.write_all(&sent).unwrap();
                    assert_eq!(read_exactly(&mut client, 3000), sent);
                    count += 1;
                    done.fetch_add(1, Ordering::Relaxed);
                }
                count
            })
        })
        .collect();
    for round in 0..60 {
        let target = if round % 2 == 0 { second } else { first };
        let before = done.load(Ordering::Relaxed);
        running.forwarder.reload(&settings(), &[at(rule("r", target), address)]).unwrap();
        eventually("a client was served between two reloads", || done.load(Ordering::Relaxed) > before);
    }
    stop.store(true, Ordering::Relaxed);
    let total: usize = clients.into_iter().map(|client| client.join().unwrap()).sum();
    assert!(running.log.wait(total).iter().all(|report| report.reason == EndReason::Finished));
}

#[test]
fn drain_keeps_connections_and_accepts_no_new_ones() {
    let running = Running::start(&[rule("r", greeter("a"))]);
    let address = running.address("r");
    let mut open = running.connect("r");
    assert_eq!(read_exactly(&mut open, 1), b"a");
    running.forwarder.drain();
    eventually("the listener is closed", || TcpStream::connect(address).is_err());
    open.write_all(b"x").unwrap();
    assert_eq!(read_exactly(&mut open, 1), b"x");
    assert_eq!(running.forwarder.active(), 1);
}

#[test]
fn stop_resets_connections_and_reports_them() {
    let running = Running::start(&[rule("r", greeter("a"))]);
    let mut open = running.connect("r");
    assert_eq!(read_exactly(&mut open, 1), b"a");
    running.forwarder.stop();
    assert_eq!(running.log.all()[0].reason, EndReason::Shutdown);
    assert_eq!(open.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
}
