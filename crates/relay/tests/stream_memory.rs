//! Memory used for TCP and TLS clients that never finish handshakes or never read.

use crate::prelude::*;
use crate::support::*;
use turnpike_relay::HandOnRule;
use turnpike_rules::Selector;
use turnpike_testkit::process::memory;

const NAME: &str = "turn.example.org";
/// Number of clients. Both ends are in this process, which may have at most 1024 descriptors.
const CROWD: u64 = 400;
/// Number of clients of a web server.
const READERS: usize = 24;

fn world() -> World {
    start(|config| {
        config.tls = Some(context(&[identity(&[NAME])]));
        config.limits.first_message = Duration::from_millis(600_000);
    })
}

/// Records of 2 KiB that contain the first `len` bytes of a 60,000-byte ClientHello.
fn part_of_hello(len: usize) -> Vec<u8> {
    let mut body = vec![0; len];
    body[..4].copy_from_slice(&[1, 0, 0xEA, 0x60]);
    let record =
        |part: &[u8]| [&[0x16, 3, 1], &u16::try_from(part.len()).unwrap().to_be_bytes()[..], part].concat();
    body.chunks(2048).flat_map(record).collect()
}

fn crowd(world: &World, bytes: &[u8]) -> Vec<TcpStream> {
    let before = world.streams().read_bytes;
    let crowd = (0..CROWD)
        .map(|_| {
            let mut stream = connect(world.tls());
            stream.write_all(bytes).unwrap();
            stream
        })
        .collect();
    let total = before + CROWD * bytes.len() as u64;
    world.wait_for("everything is read", |streams| streams.read_bytes >= total);
    crowd
}

#[test]
fn unfinished_handshakes_buffer_at_most_a_record() {
    alone::in_own_process(turnpike_testkit::this_test!(), begin_handshakes);
}

fn begin_handshakes() {
    let world = world();
    let witness = Witness::start(&world);
    // The first connection allocates memory that is needed only once.
    drop(tls_connect(world.tls(), NAME, &tls_config(&[])).unwrap());
    // Closed by FIN, or by RST because of the unread ticket.
    world.wait_for("the connection is closed", |streams| streams.accepted == 2 && streams.open == 1);
    let start = memory();
    drop(crowd(&world, &part_of_hello(100)));
    world.wait_for("all unfinished handshakes are closed", |streams| streams.open == 1);
    // Just below the limit; TLS buffers every byte.
    let within = part_of_hello(18_300);
    let held = crowd(&world, &within);
    let (sent, of_held) = (CROWD * within.len() as u64, memory().saturating_sub(start));
    println!("{CROWD} unfinished handshakes, {sent} bytes in total, take {of_held} bytes");
    assert_eq!(world.streams().open, 1 + CROWD);
    assert!(of_held < 3 * sent, "{of_held} bytes of memory for {sent} bytes sent");
    for mut stream in held {
        // Fails if the server has closed the connection.
        let _ = stream.write_all(&part_of_hello(30_000));
        Client::new(stream).ends();
    }
    world.wait_for_failed(HandshakeFailure::TooLong, CROWD);
    world.wait_for_closed(CloseReason::Handshake, CROWD);
    let of_others = grown(|| {
        for _ in 0..3 {
            drop(crowd(&world, &within));
            world.wait_for("all unfinished handshakes are closed", |streams| streams.open == 1);
        }
    });
    assert!(of_others < of_held, "{of_others} bytes for later clients, {of_held} for the first ones");
    witness.lost_nothing();
}

/// Data connections (RFC 6062) whose client does not read while the peer keeps sending: the kernel
/// buffers the data, the server's memory does not grow, and nothing is lost.
#[test]
fn unread_data_connections_stall_without_using_memory() {
    alone::in_own_process(turnpike_testkit::this_test!(), read_no_data);
}

fn read_no_data() {
    let world = world();
    let mut control = world.client();
    control.ask(&stun(ALLOCATE, 1, &[(0x0019, &[6, 0, 0, 0])]));
    let config = tls_config(&[]);
    let mut pairs: Vec<(Box<dyn ReadWrite>, TcpStream)> = Vec::new();
    for number in 0..6 {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let there = xored(listener.local_addr().unwrap());
        let connection = control.ask(&stun(0x000A, 10 + number, &[(0x0012, &there)])).attribute(0x002A);
        let (far, _) = listener.accept().unwrap();
        far.set_nonblocking(true).unwrap();
        let mut client: Box<dyn ReadWrite> = if number % 2 == 0 {
            Box::new(connect(world.tcp()))
        } else {
            Box::new(tls_connect(world.tls(), NAME, &config).unwrap())
        };
        client.write_all(&stun(0x000B, 7, &[(0x002A, &connection)])).unwrap();
        client.flush().unwrap();
        let mut header = [0; 20];
        client.read_exact(&mut header).unwrap();
        assert_eq!(header[..2], [0x01, 0x0B]);
        client.read_exact(&mut vec![0; usize::from(u16::from_be_bytes([header[2], header[3]]))]).unwrap();
        pairs.push((client, far));
    }
    let witness = Witness::start(&world);
    let mut sent = [0_u64; 6];
    let grown = grown(|| {
        for (total, (_, far)) in sent.iter_mut().zip(&mut pairs) {
            *total = fill(&mut control, far);
        }
    });
    println!("{sent:?} bytes in flight between six clients and their peers, {grown} of them in the server");
    assert!(grown < sent.iter().sum::<u64>() / 4, "{grown} bytes of {sent:?}");
    world.wait_for_stalls(6);
    // Stalled connections take no CPU time either.
    Thread::named("relay-0").comes_to_rest();
    witness.lost_nothing();
    for (total, (mut client, far)) in sent.into_iter().zip(pairs) {
        drop(far);
        let mut read = 0;
        let mut buffer = vec![0; 1 << 16];
        loop {
            match client.read(&mut buffer).unwrap() {
                0 => break,
                len => {
                    assert!(buffer[..len].iter().all(|byte| *byte == 7));
                    read += len as u64;
                }
            }
        }
        assert_eq!(read, total);
    }
    world.wait_for_counter("connection_bytes", "to_client", sent.iter().sum());
}

/// Clients of a web server that do not read its responses: the data stays in the kernel, apart from one
/// turn's bytes per connection.
#[test]
fn unread_responses_of_a_web_server_stall_without_using_memory() {
    alone::in_own_process(turnpike_testkit::this_test!(), read_no_answers);
}

fn read_no_answers() {
    let web = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let rule = HandOnRule { selector: Selector::Plain, to: web.local_addr().unwrap(), proxy_protocol: None };
    let world = start(|config| config.hand_on = vec![rule]);
    let mut control = world.client();
    let mut pairs: Vec<(TcpStream, TcpStream)> = Vec::new();
    for _ in 0..READERS {
        let mut client = connect(world.tcp());
        client.write_all(b"GET /").unwrap();
        let (mut far, _) = web.accept().unwrap();
        far.read_exact(&mut [0; 5]).unwrap();
        far.set_nonblocking(true).unwrap();
        pairs.push((client, far));
    }
    let witness = Witness::start(&world);
    let mut sent = [0_u64; READERS];
    let grown = grown(|| {
        for (total, (_, far)) in sent.iter_mut().zip(&mut pairs) {
            *total = fill(&mut control, far);
        }
    });
    let sum: u64 = sent.iter().sum();
    println!(
        "{sum} bytes in flight between a web server and {READERS} clients, {grown} of them in the server"
    );
    // 64 KiB per reader, and a huge page.
    assert!(grown < ((READERS as u64) << 16) + (2 << 20), "{grown} bytes of {sum}");
    Thread::named("relay-0").comes_to_rest();
    witness.lost_nothing();
    for (total, (mut client, far)) in sent.into_iter().zip(pairs) {
        drop(far);
        assert_eq!(std::io::copy(&mut client, &mut std::io::sink()).unwrap(), total);
    }
}

trait ReadWrite: Read + Write {}

impl<S: Read + Write> ReadWrite for S {}

/// Writes until the relay accepts no more data, even after the worker has had a hundred turns.
fn fill(control: &mut Client<TcpStream>, far: &mut TcpStream) -> u64 {
    let (mut total, mut quiet) = (0, 0);
    while quiet < 100 {
        match far.write(&[7; 1 << 16]) {
            Ok(len) => {
                total += len as u64;
                quiet = 0;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                control.ask(&binding(1));
                thread::sleep(Duration::from_millis(1));
                quiet += 1;
            }
        }
    }
    total
}

#[test]
fn client_that_never_reads_replies_is_disconnected_without_memory_growth() {
    alone::in_own_process(turnpike_testkit::this_test!(), read_no_replies);
}

fn read_no_replies() {
    let world = start(|_| {});
    let mut others = world.client();
    others.ask(&allocate());
    let requests: Vec<u8> = (0..=255).flat_map(binding).collect();
    let attack = || {
        let closed = world.streams().closed(CloseReason::RepliesUnread);
        let mut client = world.client();
        client.stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        eventually("the connection is closed", || {
            match client.stream.write(&requests) {
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {}
                Err(error) => panic!("{error}"),
            }
            world.streams().closed(CloseReason::RepliesUnread) == closed + 1
        });
    };
    // The bound allows for 64 KiB of replies in a buffer that doubles as it grows, and for a huge page or
    // two.
    let of_first = grown(attack);
    assert!(of_first < 4 << 20, "{of_first} bytes for one client");
    settles(|| (0..16).for_each(|_| attack()));
    others.ask(&refresh(1));
}
