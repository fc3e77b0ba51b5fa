//! Hostile clients of `turnpike forward`, and a name server that gives wrong answers: other clients must not be affected.

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use turnpike_testkit::alone::{in_namespaces, run};

use super::{
    Row, Wanted,
    forwarder::Forwarder,
    forwards::unharmed,
    limits::cpu_ms,
    or_thorough,
    talks::{self, Fate, Target},
    within,
};
use turnpike_trials::links::{PEER, SERVER, on_links};
use turnpike_trials::{Dir, SOON, V4, need};

/// Maximum memory of the process per connection. Data waiting to be read is in the kernel's buffers.
const MOST_MEMORY: u64 = 16 << 10;

fn a_while() -> Duration {
    or_thorough(Duration::from_secs(1), Duration::from_secs(6))
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn slow_clients_of_a_forwarder() {
    let row = Row::new(
        "slow_clients_of_a_forwarder",
        "forward: 500 clients send one byte per second (slow loris); 500 more are half-closed or never read",
    );
    let most = Forwarder::clients() + 1000;
    let wanted = Wanted::default().with_rule(&format!("max_connections = {most}\n"));
    let seen = Forwarder::local(wanted).row(row, |forwarder, row| {
        let before = forwarder.kept();
        let connect = || {
            TcpStream::connect_timeout(&forwarder.tcp, Duration::from_secs(5))
                .expect("the listener accepts connections")
        };
        let slow: Vec<TcpStream> = (0..500).map(|_| connect()).collect();
        let deaf: Vec<TcpStream> = (0..500).map(|_| connect()).collect();
        for (number, mut stream) in deaf.iter().enumerate() {
            if number % 2 == 0 {
                stream.write_all(talks::HOLD).expect("the connection is open");
                stream.shutdown(std::net::Shutdown::Write).expect("the connection is open");
            } else {
                stream.set_nonblocking(true).expect("the connection is open");
                while stream.write(&[7; 16_384]).is_ok() {}
            }
        }
        let spent = cpu_ms(forwarder.pid());
        for _ in 0..a_while().as_secs() {
            for mut stream in &slow {
                stream.write_all(b".").expect("the connection is open");
            }
            thread::sleep(Duration::from_secs(1));
        }
        let spent = cpu_ms(forwarder.pid()) - spent;
        // The count includes the sessions of the UDP rule.
        let all = most + Forwarder::clients();
        within(SOON, "all clients are connected", || forwarder.kept().sessions == all);
        let held = forwarder.kept();
        for _ in 0..100 {
            assert_eq!(talks::newcomer(forwarder.tcp), Fate::Refused, "the rule is at its limit");
        }
        let open = forwarder.metrics().sum("turnpike_forward_connections", "rule=\"t\"");
        assert!(open <= most, "{open} connections are open");
        within(SOON, "refusals are counted", || {
            forwarder.metrics().sum("turnpike_forward_ended_total", "reason=\"limit\"") >= 100
        });
        let each = held.memory.saturating_sub(before.memory) / 1000;
        assert!(each <= MOST_MEMORY, "{each} bytes of memory per connection");
        let descriptors = held.descriptors.saturating_sub(before.descriptors);
        assert!(descriptors <= 2 * 1000 + 10, "{descriptors} descriptors");
        row.note(format!(
            "{} KiB of memory per slow client, {} ms CPU per second; 100 more refused by `max_connections`",
            each / 1024,
            spent / a_while().as_secs()
        ));
    });
    unharmed(&seen);
}

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn half_open_connections_to_a_forwarder() {
    on_links(turnpike_testkit::this_test!(), |links| {
        let most = Forwarder::clients() + 1;
        let wanted = Wanted::inside(links).with_rule(&format!("max_connections = {most}\n"));
        let forwarder = Forwarder::between(SERVER[0], Target::on(PEER[0]), wanted);
        // Only SYNs leave this address, so no connection from it is ever completed.
        run("ip", &["addr", "add", "10.77.1.66/24", "dev", "c"]);
        run("nft", &["add table inet flood"]);
        run("nft", &["add chain inet flood out { type filter hook output priority 0; }"]);
        run("nft", &["add rule inet flood out ip saddr 10.77.1.66 tcp flags != syn drop"]);
        let row = Row::new(
            "half_open_connections_to_a_forwarder",
            "forward: SYN flood of 20,000 without replies to SYN-ACK",
        );
        let seen = forwarder.row(row, |forwarder, row| {
            let before = forwarder.kept();
            let mut sent = 0_u32;
            let (mut half, mut served) = (0, 0);
            for turn in 0..or_thorough(10, 100) {
                let flood: Vec<socket2::Socket> = (0..200).filter_map(|_| half_open(forwarder.tcp)).collect();
                sent += u32::try_from(flood.len()).expect("a few");
                thread::sleep(Duration::from_millis(50));
                // Connections in state 03, SYN_RECV.
                let table = links.inside_says(&["cat", "/proc/net/tcp"]);
                let state = |line: &str| line.split_whitespace().nth(3).map(str::to_owned);
                half = half.max(table.lines().filter(|line| state(line).as_deref() == Some("03")).count());
                if turn % 10 == 9 {
                    let fate = talks::newcomer(forwarder.tcp);
                    assert_eq!(fate, Fate::Served, "the flood does not keep other clients out");
                    served += 1;
                }
            }
            let held = forwarder.kept();
            assert!(half > 100, "at most {half} were half-open at a time");
            assert!(held.sessions <= before.sessions + 1, "connections were established: {held:?}");
            assert!(held.descriptors <= before.descriptors + 4, "{before:?}, {held:?}");
            assert!(held.memory <= before.memory + (4 << 20), "{before:?}, {held:?}");
            row.note(format!(
                "{sent} SYNs, at most {half} half-open, all in the kernel; {served} new clients served in the meantime by a rule limited \
                 to one connection"
            ));
        });
        unharmed(&seen);
    });
}

fn half_open(to: SocketAddr) -> Option<socket2::Socket> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).ok()?;
    socket.set_nonblocking(true).ok()?;
    socket.bind(&SocketAddr::from((Ipv4Addr::new(10, 77, 1, 66), 0)).into()).ok()?;
    let _ = socket.connect(&to.into());
    Some(socket)
}

/// Trusted PROXY source, and an untrusted one.
const PROXY: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 9);
const NO_PROXY: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 8);
/// Timeout for receiving a header, set as the connect timeout.
const TOO_LATE: Duration = Duration::from_secs(2);
/// Deadline for closing a connection without a complete header, below the default connect timeout of ten seconds.
const MUCH_LATER: Duration = Duration::from_secs(5);
/// Data after a header; the target echoes it if it receives it.
const BEHIND: &[u8] = b"let me through";
const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn hostile_proxy_headers() {
    let row = Row::new("hostile_proxy_headers", "forward: malformed, endless and forged PROXY headers");
    let rule = format!("proxy_protocol_from = [\"{PROXY}\"]\nconnect_timeout = {}\n", TOO_LATE.as_secs());
    let seen = Forwarder::local(Wanted::default().with_rule(&rule)).row(row, |forwarder, row| {
        let refused = |reason: &str| {
            let of_it = format!("rule=\"t\",reason=\"{reason}\"");
            forwarder.metrics().sum("turnpike_forward_ended_total", &of_it)
        };
        let all_are_counted = |reason: &str, wanted: u64| {
            within(SOON, reason, || refused(reason) >= wanted);
            assert_eq!(refused(reason), wanted, "{reason}");
        };
        let (bad, untrusted) = (refused("bad_proxy_header"), refused("untrusted_proxy"));
        let [connections, heard] = forwarder.visits();
        let served = good_headers_are_served(forwarder.tcp);
        assert_eq!(
            forwarder.visits(),
            [connections + served, heard + served],
            "the target serves connections with valid headers"
        );

        let (mut tried, mut late) = (0, 0);
        for turn in 0..or_thorough(2, 40) {
            for header in bad_headers() {
                let stream = come_from(PROXY, forwarder.tcp);
                say(&stream, &[&header[..], BEHIND].concat(), if turn % 2 == 0 { usize::MAX } else { 7 });
                assert_eq!(until_its_end(&stream), b"", "{}", header.escape_ascii());
                tried += 1;
            }
        }
        for _ in 0..or_thorough(1, 5) {
            late += headers_without_an_end(forwarder.tcp);
        }
        all_are_counted("bad_proxy_header", bad + tried + late);
        assert_eq!(
            forwarder.visits(),
            [connections + served, heard + served],
            "one of the refused connections reached a target"
        );

        let mut liars = 0;
        for header in good_headers().into_iter().filter(|header| !header.is_empty()) {
            for piece in [usize::MAX, 1] {
                let stream = come_from(NO_PROXY, forwarder.tcp);
                say(&stream, &[&header[..], BEHIND].concat(), piece);
                assert_eq!(until_its_end(&stream), b"", "{}", header.escape_ascii());
                liars += 1;
            }
        }
        all_are_counted("untrusted_proxy", untrusted + liars);
        // The connection may exist before its client has sent anything.
        let visits = forwarder.visits();
        assert!(visits[0] <= connections + served + liars && visits[1] == heard + served, "{visits:?}");

        let served = served + good_headers_are_served(forwarder.tcp);
        assert_eq!(forwarder.visits()[1], heard + served, "the target serves connections with valid headers");
        all_are_counted("bad_proxy_header", bad + tried + late);
        all_are_counted("untrusted_proxy", untrusted + liars);
        let after = TOO_LATE.as_secs();
        row.note(format!("{tried} connections refused, {late} closed after {after} s"));
        row.note(format!("none reached a target, nor did {liars} from an untrusted address"));
        row.note(format!("all counted; {served} valid ones served"));
    });
    unharmed(&seen);
}

fn come_from(ip: Ipv4Addr, to: SocketAddr) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)
        .expect("a descriptor is left");
    socket.bind(&SocketAddr::from((ip, 0)).into()).expect("the address is on loopback");
    socket.connect(&to.into()).expect("the listener accepts connections");
    let stream = TcpStream::from(socket);
    stream.set_nodelay(true).expect("the connection is open");
    stream.set_read_timeout(Some(SOON)).expect("the timeout is not zero");
    stream
}

/// Sends in pieces; the peer may close the connection before the last one.
fn say(mut stream: &TcpStream, bytes: &[u8], piece: usize) {
    let _ = bytes.chunks(piece).try_for_each(|bytes| stream.write_all(bytes));
}

fn until_its_end(mut stream: &TcpStream) -> Vec<u8> {
    let mut back = Vec::new();
    if let Err(error) = stream.read_to_end(&mut back) {
        assert_ne!(error.kind(), ErrorKind::WouldBlock, "the connection is not closed");
    }
    back
}

/// Valid headers; the empty one is for sources that are not trusted.
fn good_headers() -> Vec<Vec<u8>> {
    let v2 = |len: u8| [SIGNATURE, &[0x21, 0x11, 0, len], &[1; 12]].concat();
    vec![
        b"PROXY TCP4 192.0.2.7 192.0.2.8 4660 443\r\n".to_vec(),
        b"PROXY UNKNOWN\r\n".to_vec(),
        v2(12),
        // A TLV that claims to be longer than it is; receivers may skip it unread (section 2.2).
        [&v2(20)[..], &[4, 0xFF, 0xFF, 0, 0, 0, 0, 0]].concat(),
        Vec::new(),
    ]
}

/// Asserts that data after valid headers is echoed; returns the number of headers.
fn good_headers_are_served(server: SocketAddr) -> u64 {
    let mut served = 0;
    for header in good_headers() {
        for piece in [usize::MAX, 1] {
            let stream = come_from(if header.is_empty() { NO_PROXY } else { PROXY }, server);
            say(&stream, &[&header[..], BEHIND].concat(), piece);
            let mut back = [0; BEHIND.len()];
            (&stream).read_exact(&mut back).unwrap_or_else(|error| {
                panic!("not served after header {}: {error}", header.escape_ascii());
            });
            assert_eq!(back, BEHIND, "{}", header.escape_ascii());
            served += 1;
        }
    }
    served
}

fn bad_headers() -> Vec<Vec<u8>> {
    let v2 = |rest: &[&[u8]]| [&[SIGNATURE][..], rest].concat().concat();
    vec![
        Vec::new(),
        b"PROXY TCP4 999.1.1.1 1.1.1.1 1 2\r\n".to_vec(),
        b"PROXY TCP4 127.0.0.1 127.0.0.1 99999 1\r\n".to_vec(),
        b"PROXY TCP6 ::1 1.2.3.4 1 1\r\n".to_vec(),
        [b"PROXY UNKNOWN ".to_vec(), vec![b'x'; 4096]].concat(),
        b"PROXY".to_vec(),
        b"PROXY TCP4 \0\0\0\r\n".to_vec(),
        v2(&[&[0x21, 0x11, 0xFF, 0xFF], &[0; 65_535]]),
        v2(&[&[0x21, 0x11, 0, 3, 1, 2, 3]]),
        v2(&[&[0x31, 0x11, 0, 12], &[1; 12]]),
        v2(&[&[0x21, 0x21, 0, 12], &[1; 12]]),
        vec![0xFF; 20_000],
        SIGNATURE[..5].to_vec(),
    ]
}

/// Proxies that send a header slowly or never finish it: connections are closed at the timeout, not earlier. Returns their number.
fn headers_without_an_end(server: SocketAddr) -> u64 {
    let beginning = |bytes: &[u8], slowly| (bytes.to_vec(), slowly);
    // Length of the longest header that is accepted.
    let longest = [SIGNATURE, &[0x21, 0x11, 0x0F, 0xF0]].concat();
    let headers = [
        beginning(b"", false),
        beginning(b"PROXY", false),
        beginning(b"PROXY TCP4 127.0.0.1", false),
        beginning(&SIGNATURE[..5], false),
        beginning(&[SIGNATURE, &[0x21, 0x11, 0, 12], &[1; 11]].concat(), false),
        beginning(&[&longest[..], &[0; 4000]].concat(), false),
        beginning(b"PROXY UNKNOWN ", true),
        beginning(&longest, true),
    ];
    let tried = headers.len() as u64;
    thread::scope(|scope| {
        for (bytes, slowly) in headers {
            scope.spawn(move || {
                let begun = Instant::now();
                let stream = come_from(PROXY, server);
                say(&stream, &bytes, usize::MAX);
                if slowly {
                    stream.set_read_timeout(Some(TOO_LATE / 20)).expect("the timeout is not zero");
                    while (&stream).read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock) {
                        say(&stream, b"x", 1);
                    }
                } else {
                    assert_eq!(until_its_end(&stream), b"", "{}", bytes.escape_ascii());
                }
                let lasted = begun.elapsed();
                let in_time = lasted > TOO_LATE - TOO_LATE / 10 && lasted < MUCH_LATER;
                assert!(in_time, "{} ended after {lasted:?}", bytes.escape_ascii());
            });
        }
    });
    tried
}

const TARGET: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);

/// Answers of the name server, and what happens to new clients. An invalid or empty answer changes nothing; a valid one is applied,
/// whatever its addresses. The forwarder listens on the target's ports on 127.0.0.1.
const LIES: [(&str, Fate); 8] = [
    ("the truth", Fate::Served),
    ("no such name", Fate::Served),
    ("no answer", Fate::Served),
    ("garbage", Fate::Served),
    ("0.0.0.0", Fate::Served),
    ("the forwarder's own address", Fate::Refused),
    ("an address without a listener", Fate::Refused),
    ("200 addresses", Fate::Refused),
];

#[test]
#[ignore = "thorough: cargo xtask faults"]
fn the_name_server_gives_wrong_answers() {
    let probe = ["mount", "--bind", "/etc/resolv.conf", "/etc/resolv.conf"];
    in_namespaces(turnpike_testkit::this_test!(), "nm", &probe, || {
        run("ip", &["link", "set", "lo", "up"]);
        let dir = Dir::new();
        for (name, text) in [
            ("resolv.conf", "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"),
            ("nsswitch.conf", "hosts: dns\n"),
        ] {
            let there = format!("/etc/{name}");
            if fs::exists(&there).unwrap_or(false) {
                run("mount", &["--bind", dir.file(name, text).to_str().expect("UTF-8"), &there]);
            }
        }
        let server = need!(NameServer::start());
        // The target's address is neither the one to which 0.0.0.0 connects nor the forwarder's own.
        let target = Target::on(TARGET.into());
        let forwarder = Forwarder::to_name(Wanted::default(), target, "target.faults.test");
        let row = Row::new(
            "the_name_server_gives_wrong_answers",
            "forward: the name server sends wrong answers or none",
        );
        let seen = forwarder.row(row, |forwarder, row| {
            // The name is resolved once a second; a timed-out query takes longer.
            let is_asked = |times: u64| {
                let asked = server.asked();
                within(SOON, "the name is resolved again", || server.asked() >= asked + times);
            };
            let told = |what: &str| forwarder.lines().iter().filter(|line| line.contains(what)).count();
            let sum = |family: &str, label: &str| forwarder.metrics().sum(family, label);
            let begun = |rule: &str| sum("turnpike_forward_accepted_total", rule);
            let unreached =
                |rule: &str| sum("turnpike_forward_ended_total", &format!("{rule},reason=\"connect_failed\""));
            for (lie, (said, fate)) in LIES.iter().enumerate().skip(1) {
                server.say(lie);
                // Waits for the queries for both families, and for one more round.
                is_asked(or_thorough(4, 8));
                within(SOON, said, || talks::newcomer(forwarder.tcp) == *fate);
                let (kept, before) = (forwarder.kept(), RULES.map(begun));
                let failed = RULES.map(unreached);
                let fates = [(); 5].map(|()| talks::newcomer(forwarder.tcp));
                assert_eq!(fates, [*fate; 5], "new TCP clients, answer: {said}");
                let by_udp = talks::newcomer_of_udp(forwarder.udp, 100);
                assert_eq!(by_udp == Fate::Served, *fate == Fate::Served, "{said}: {by_udp:?}");
                match fate {
                    Fate::Served => within(SOON, said, || told("cannot resolve") > 0),
                    _ => within(SOON, said, || {
                        let now = RULES.map(unreached);
                        now[0] >= failed[0] + 5 && now[1] > failed[1]
                    }),
                }
                let (now, more) = (forwarder.kept(), RULES.map(begun));
                assert!(now.sessions <= kept.sessions + FEW, "{said}: {kept:?}, {now:?}");
                assert!(now.descriptors as u64 <= kept.descriptors as u64 + FEW, "{said}: {kept:?}, {now:?}");
                assert!((0..2).all(|rule| more[rule] <= before[rule] + FEW), "{said}: {before:?}, {more:?}");
            }
            assert!(told("the target is the rule's own listener") > 0, "{:?}", forwarder.lines());
            server.say(0);
            within(SOON, "the correct answer is used again", || talks::newcomer(forwarder.tcp) == Fate::Served);
            let of_fate = |wanted: Fate| {
                let lies = LIES[1..].iter().filter(|(_, fate)| *fate == wanted).map(|(said, _)| *said);
                lies.collect::<Vec<_>>().join(", ")
            };
            row.note(format!(
                "last good answer used ({}) or new clients refused immediately ({}); existing connections and sessions continued",
                of_fate(Fate::Served),
                of_fate(Fate::Refused)
            ));
        });
        unharmed(&seen);
    });
}

const RULES: [&str; 2] = ["rule=\"t\"", "rule=\"u\""];
const FEW: u64 = 20;

struct NameServer {
    says: Arc<AtomicU8>,
    asked: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
}

impl NameServer {
    fn start() -> Result<Self, String> {
        let socket =
            UdpSocket::bind((V4, 53)).map_err(|error| format!("port 53 is not available: {error}"))?;
        socket.set_read_timeout(Some(Duration::from_millis(100))).expect("the timeout is not zero");
        let server = Self { says: Arc::default(), asked: Arc::default(), ends: Arc::default() };
        let (says, asked, ends) =
            (Arc::clone(&server.says), Arc::clone(&server.asked), Arc::clone(&server.ends));
        thread::spawn(move || {
            let mut buffer = [0; 1500];
            while !ends.load(Relaxed) {
                let Ok((len, client)) = socket.recv_from(&mut buffer) else { continue };
                asked.fetch_add(1, Relaxed);
                if let Some(answer) = answer(&buffer[..len], says.load(Relaxed).into()) {
                    let _ = socket.send_to(&answer, client);
                }
            }
        });
        Ok(server)
    }

    fn say(&self, lie: usize) {
        self.says.store(u8::try_from(lie).expect("a few"), Relaxed);
    }

    fn asked(&self) -> u64 {
        self.asked.load(Relaxed)
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        self.ends.store(true, Relaxed);
    }
}

/// Answer to a query with one name (RFC 1035 section 4).
fn answer(question: &[u8], lie: usize) -> Option<Vec<u8>> {
    let name = question.get(12..)?;
    let end = name.iter().position(|byte| *byte == 0)?;
    let asked = name.get(..end + 5)?;
    let is_a = asked[end + 1..end + 3] == [0, 1];
    let (code, addresses): (u8, Vec<[u8; 4]>) = match LIES[lie].0 {
        "no answer" => return None,
        "garbage" => return Some(vec![0xA5; 300]),
        "no such name" => (3, Vec::new()),
        "0.0.0.0" => (0, vec![[0; 4]]),
        "the forwarder's own address" => (0, vec![[127, 0, 0, 1]]),
        "an address without a listener" => (0, vec![[127, 0, 0, 4]]),
        "200 addresses" => (0, (0..200).map(|last| [198, 51, 100, last]).collect()),
        _ => (0, vec![TARGET.octets()]),
    };
    let addresses = if is_a { addresses } else { Vec::new() };
    let count = u16::try_from(addresses.len()).ok()?;
    // A response with recursion available; then the question, and answers with a TTL of one second.
    let mut out = [&question[..2], &[0x81, 0x80 | code, 0, 1], &count.to_be_bytes(), &[0; 4], asked].concat();
    for address in addresses {
        out.extend([0xC0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4]);
        out.extend(address);
    }
    Some(out)
}

mod tests {
    use super::*;

    #[test]
    fn dns_answer_has_the_expected_bytes() {
        // Query for a.b, type A, class IN.
        let question = [7, 9, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, b'a', 1, b'b', 0, 0, 1, 0, 1];
        let said = answer(&question, 0).expect("the truth");
        assert_eq!(said[..12], [7, 9, 0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
        assert_eq!(said[12..21], question[12..]);
        assert_eq!(said[21..], [0xC0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4, 127, 0, 0, 3]);
        assert_eq!(answer(&question, 2), None);
    }
}
