//! Strangers who mean harm, and names that lie, at `turnpike forward`: those who are served notice nothing.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
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
use crate::{
    harness::{Dir, SOON, V4, need},
    kernel_path::{PEER, SERVER, on_links},
};

/// Bytes that a connection may cost the process, whatever its client does. What waits for a reader is the kernel's.
const MOST_MEMORY: u64 = 16 << 10;

/// How long it lasts.
fn a_while() -> Duration {
    or_thorough(Duration::from_secs(1), Duration::from_secs(6))
}

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn clients_that_hardly_speak() {
    let row = Row::new(
        "clients_that_hardly_speak",
        "forward: 500 clients send a byte a second (slow loris), 500 more are half closed or never read",
    );
    // Room for those who are served and for these.
    let most = Forwarder::clients() + 1000;
    let wanted = Wanted::default().with_rule(&format!("max_connections = {most}\n"));
    let seen = Forwarder::local(wanted).row(row, |forwarder, row| {
        let before = forwarder.kept();
        let connect =
            || TcpStream::connect_timeout(&forwarder.tcp, Duration::from_secs(5)).expect("it listens");
        let slow: Vec<TcpStream> = (0..500).map(|_| connect()).collect();
        let deaf: Vec<TcpStream> = (0..500).map(|_| connect()).collect();
        for (number, mut stream) in deaf.iter().enumerate() {
            if number % 2 == 0 {
                stream.write_all(talks::HOLD).expect("it is open");
                stream.shutdown(std::net::Shutdown::Write).expect("it is open");
            } else {
                // What the target sends back finds no reader.
                stream.set_nonblocking(true).expect("it is open");
                while stream.write(&[7; 16_384]).is_ok() {}
            }
        }
        let spent = cpu_ms(forwarder.pid());
        for _ in 0..a_while().as_secs() {
            for mut stream in &slow {
                stream.write_all(b".").expect("it is open");
            }
            thread::sleep(Duration::from_secs(1));
        }
        let spent = cpu_ms(forwarder.pid()) - spent;
        // With the sessions of the rule for datagrams.
        let all = most + Forwarder::clients();
        within(SOON, "all of them are there", || forwarder.kept().sessions == all);
        let held = forwarder.kept();
        for _ in 0..100 {
            assert_eq!(talks::newcomer(forwarder.tcp), Fate::Refused, "the rule has its most");
        }
        let open = forwarder.metrics().sum("turnpike_forward_connections", "rule=\"t\"");
        assert!(open <= most, "{open} are open");
        within(SOON, "those who were refused are counted", || {
            forwarder.metrics().sum("turnpike_forward_ended_total", "reason=\"limit\"") >= 100
        });
        let each = held.memory.saturating_sub(before.memory) / 1000;
        assert!(each <= MOST_MEMORY, "{each} bytes of memory for each");
        let descriptors = held.descriptors.saturating_sub(before.descriptors);
        assert!(descriptors <= 2 * 1000 + 10, "{descriptors} descriptors");
        row.note(format!(
            "meanwhile {} KiB of memory for each of them, {} ms of processor time a second; 100 more were refused by `max_connections`",
            each / 1024,
            spent / a_while().as_secs()
        ));
    });
    unharmed(&seen);
}

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn connections_that_never_come_about() {
    const TEST: &str = "faults::forward_abuse::connections_that_never_come_about";
    on_links(TEST, |links| {
        // Room for those who are served, and for one more.
        let most = Forwarder::clients() + 1;
        let wanted = Wanted::inside(links).with_rule(&format!("max_connections = {most}\n"));
        let forwarder = Forwarder::between(SERVER[0], Target::on(PEER[0]), wanted);
        // From this address nothing leaves but the first packet of each connection.
        run("ip", &["addr", "add", "10.77.1.66/24", "dev", "c"]);
        run("nft", &["add table inet flood"]);
        run("nft", &["add chain inet flood out { type filter hook output priority 0; }"]);
        run("nft", &["add rule inet flood out ip saddr 10.77.1.66 tcp flags != syn drop"]);
        let row = Row::new(
            "connections_that_never_come_about",
            "forward: SYN flood of 20,000, and no answer to any SYN-ACK",
        );
        let seen = forwarder.row(row, |forwarder, row| {
            let before = forwarder.kept();
            let mut sent = 0_u32;
            let (mut half, mut served) = (0, 0);
            for turn in 0..or_thorough(10, 100) {
                let flood: Vec<socket2::Socket> = (0..200).filter_map(|_| half_open(forwarder.tcp)).collect();
                sent += u32::try_from(flood.len()).expect("a few");
                thread::sleep(Duration::from_millis(50));
                // Those that the kernel keeps: state 03 is SYN_RECV.
                let table = links.inside_says(&["cat", "/proc/net/tcp"]);
                let state = |line: &str| line.split_whitespace().nth(3).map(str::to_owned);
                half = half.max(table.lines().filter(|line| state(line).as_deref() == Some("03")).count());
                if turn % 10 == 9 {
                    let fate = talks::newcomer(forwarder.tcp);
                    assert_eq!(fate, Fate::Served, "the flood takes nobody's place");
                    served += 1;
                }
            }
            let held = forwarder.kept();
            assert!(half > 100, "only {half} were half open at a time");
            assert!(held.sessions <= before.sessions + 1, "none of them is a connection: {held:?}");
            assert!(held.descriptors <= before.descriptors + 4, "{before:?}, {held:?}");
            assert!(held.memory <= before.memory + (4 << 20), "{before:?}, {held:?}");
            row.note(format!(
                "{sent} begun, {half} half open at a time at most: the kernel keeps them, the forwarder none; \
                 {served} newcomers meanwhile were served by a rule with room for one"
            ));
        });
        unharmed(&seen);
    });
}

/// Sends the first packet of a connection.
fn half_open(to: SocketAddr) -> Option<socket2::Socket> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).ok()?;
    socket.set_nonblocking(true).ok()?;
    socket.bind(&SocketAddr::from((Ipv4Addr::new(10, 77, 1, 66), 0)).into()).ok()?;
    // It is under way.
    let _ = socket.connect(&to.into());
    Some(socket)
}

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn hostile_proxy_headers() {
    let row = Row::new(
        "hostile_proxy_headers",
        "forward: connections with PROXY headers that are malformed, endless, or lie",
    );
    let wanted = Wanted::default().with_rule("proxy_protocol_from = [\"127.0.0.9\"]\n");
    let seen = Forwarder::local(wanted).row(row, |forwarder, row| {
        let signature = b"\r\n\r\n\0\r\nQUIT\n";
        let hostile: Vec<Vec<u8>> = vec![
            b"PROXY TCP4 999.1.1.1 1.1.1.1 1 2\r\n".to_vec(),
            b"PROXY TCP4 127.0.0.1 127.0.0.1 99999 1\r\n".to_vec(),
            b"PROXY TCP6 ::1 1.2.3.4 1 1\r\n".to_vec(),
            [b"PROXY UNKNOWN ".to_vec(), vec![b'x'; 4096]].concat(),
            b"PROXY".to_vec(),
            b"PROXY TCP4 \0\0\0\r\n".to_vec(),
            [signature.to_vec(), vec![0x21, 0x11, 0xFF, 0xFF], vec![0; 65_535]].concat(),
            [signature.to_vec(), vec![0x21, 0x11, 0, 3, 1, 2, 3]].concat(),
            [signature.to_vec(), vec![0x31, 0x11, 0, 12], vec![1; 12]].concat(),
            [signature.to_vec(), vec![0x21, 0x21, 0, 12], vec![1; 12]].concat(),
            [signature.to_vec(), vec![0x21, 0x11, 0, 20], vec![1; 12], vec![4, 0xFF, 0xFF, 0, 0, 0, 0, 0]]
                .concat(),
            vec![0xFF; 20_000],
            signature[..5].to_vec(),
        ];
        let (mut tried, mut answered) = (0, 0);
        for turn in 0..or_thorough(2, 40) {
            for header in &hostile {
                let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)
                    .expect("a descriptor");
                socket
                    .bind(&SocketAddr::from((Ipv4Addr::new(127, 0, 0, 9), 0)).into())
                    .expect("loopback has it");
                socket.connect(&forwarder.tcp.into()).expect("it listens");
                let mut stream = TcpStream::from(socket);
                stream.set_read_timeout(Some(Duration::from_millis(20))).expect("not zero");
                // In pieces, every other time.
                let piece = if turn % 2 == 0 { header.len() } else { 7 };
                header.chunks(piece).try_for_each(|bytes| stream.write_all(bytes)).ok();
                tried += 1;
                answered += u32::from(stream.read(&mut [0; 16]).is_ok_and(|len| len > 0));
            }
        }
        assert_eq!(answered, 0, "the target has answered to one of them");
        row.note(format!("{tried} such connections, none of which a target saw"));
    });
    unharmed(&seen);
}

/// Where the name leads.
const TARGET: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);

/// What a name server says, and what becomes of those who come new then. An answer that is none, or that names nobody, leaves the last one
/// as it was; one with addresses counts, wherever these lead.
const LIES: [(&str, Fate); 7] = [
    ("the truth", Fate::Served),
    ("no such name", Fate::Served),
    ("nothing", Fate::Served),
    ("bytes without sense", Fate::Served),
    ("0.0.0.0", Fate::Served),
    ("its own address", Fate::Refused),
    ("200 addresses", Fate::Refused),
];

#[test]
#[ignore = "takes long: cargo xtask faults"]
fn a_name_server_lies() {
    const TEST: &str = "faults::forward_abuse::a_name_server_lies";
    let probe = ["mount", "--bind", "/etc/resolv.conf", "/etc/resolv.conf"];
    in_namespaces(TEST, "nm", &probe, || {
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
        // Not where 0.0.0.0 would lead, and not where the forwarder listens.
        let target = Target::on(TARGET.into());
        let forwarder = Forwarder::to_name(Wanted::default(), target, "target.faults.test");
        let row = Row::new(
            "a_name_server_lies",
            "forward: the name server says that the target's name is not, is silent, garbles, sends to nowhere, back, or to 200 addresses",
        );
        let seen = forwarder.row(row, |forwarder, row| {
            // The name is asked for once a second; an answer that is waited for takes longer.
            let is_asked = |times: u64| {
                let asked = server.asked();
                within(SOON, "it asks again", || server.asked() >= asked + times);
            };
            for (lie, (said, fate)) in LIES.iter().enumerate().skip(1) {
                server.say(lie);
                // Questions for both families, and one more round.
                is_asked(or_thorough(4, 8));
                within(SOON, said, || talks::newcomer(forwarder.tcp) == *fate);
                let fates = [(); 5].map(|()| talks::newcomer(forwarder.tcp));
                assert_eq!(fates, [*fate; 5], "newcomers by TCP, the name server saying {said}");
                let by_udp = talks::newcomer_of_udp(forwarder.udp, 100);
                assert_eq!(by_udp == Fate::Served, *fate == Fate::Served, "{said}: {by_udp:?}");
            }
            server.say(0);
            within(SOON, "the truth counts", || talks::newcomer(forwarder.tcp) == Fate::Served);
            let told = |wanted: Fate| {
                let lies = LIES[1..].iter().filter(|(_, fate)| *fate == wanted).map(|(said, _)| *said);
                lies.collect::<Vec<_>>().join(", ")
            };
            row.note(format!(
                "newcomers were served by the last good answer ({}) or refused at once ({}); connections and sessions that there were went on",
                told(Fate::Served),
                told(Fate::Refused)
            ));
        });
        unharmed(&seen);
    });
}

/// Answers for every name.
struct NameServer {
    says: Arc<AtomicU8>,
    asked: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
}

impl NameServer {
    fn start() -> Result<Self, String> {
        let socket = UdpSocket::bind((V4, 53)).map_err(|error| format!("no port 53: {error}"))?;
        socket.set_read_timeout(Some(Duration::from_millis(100))).expect("not zero");
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

/// An answer to a question with one name (RFC 1035 section 4).
fn answer(question: &[u8], lie: usize) -> Option<Vec<u8>> {
    let name = question.get(12..)?;
    let end = name.iter().position(|byte| *byte == 0)?;
    let asked = name.get(..end + 5)?;
    let is_a = asked[end + 1..end + 3] == [0, 1];
    let (code, addresses): (u8, Vec<[u8; 4]>) = match LIES[lie].0 {
        "nothing" => return None,
        "bytes without sense" => return Some(vec![0xA5; 300]),
        "no such name" => (3, Vec::new()),
        "0.0.0.0" => (0, vec![[0; 4]]),
        // Where the forwarder itself listens: at the port of the target nobody is.
        "its own address" => (0, vec![[127, 0, 0, 1]]),
        "200 addresses" => (0, (0..200).map(|last| [198, 51, 100, last]).collect()),
        _ => (0, vec![TARGET.octets()]),
    };
    let addresses = if is_a { addresses } else { Vec::new() };
    let count = u16::try_from(addresses.len()).ok()?;
    // Response, recursion available; then question and answers, a second's life each.
    let mut out = [&question[..2], &[0x81, 0x80 | code, 0, 1], &count.to_be_bytes(), &[0; 4], asked].concat();
    for address in addresses {
        out.extend([0xC0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4]);
        out.extend(address);
    }
    Some(out)
}

/// Not rows.
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_one_for_dig() {
        // A question for a.b, type A, class IN.
        let question = [7, 9, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, b'a', 1, b'b', 0, 0, 1, 0, 1];
        let said = answer(&question, 0).expect("the truth");
        assert_eq!(said[..12], [7, 9, 0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
        assert_eq!(said[12..21], question[12..]);
        assert_eq!(said[21..], [0xC0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4, 127, 0, 0, 3]);
        assert_eq!(answer(&question, 2), None);
    }
}
