//! Measures how long a worker is kept from handling packets while all its allocations are being listed
//! repeatedly:
//!
//! ```text
//! ulimit -n 250000; cargo run --release -p turnpike-relay --example listing -- [ALLOCATIONS [LISTINGS]]
//! ```
//!
//! By default, one worker has 100,000 allocations on loopback. The worker reports how long each slice took.
//! One allocation relays to a peer, one datagram at a time; its round-trip times are reported with and
//! without concurrent listing.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a program for one measurement")]

use std::{
    env,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use turnpike_relay::{
    Config, Relay, RelayAddress,
    allocations::{Look, Looked, SLICE_ALLOCATIONS},
};
use turnpike_testkit::stun;
use turnpike_turn::server::{AllocationLimits, PeerRules, ServerConfig, ServerLimits};

/// Number of server addresses per client socket; each makes a separate 5-tuple.
const FAN: u32 = 1000;
const SOON: Duration = Duration::from_secs(10);

fn main() {
    let mut arguments = env::args().skip(1).map(|argument| argument.parse().unwrap());
    let allocations: u32 = arguments.next().unwrap_or(100_000);
    let listings = arguments.next().unwrap_or(20);
    let limit = turnpike_net::rlimit::raise_open_files(u64::from(allocations) + 2 * u64::from(FAN));
    // One socket per allocation, or shared sockets if the limit on open files is too low.
    let shared_ports = if limit > u64::from(allocations) + 500 { 0 } else { 8 };
    if shared_ports != 0 {
        println!("ulimit -n is {limit}: the allocations share {shared_ports} relay ports");
    }
    let relay = relay(allocations, shared_ports);
    let began = Instant::now();
    let _clients: Vec<UdpSocket> =
        (0..allocations.div_ceil(FAN)).map(|client| allocate(&relay, client, allocations)).collect();
    println!("{allocations} allocations after {:.1} s", began.elapsed().as_secs_f64());

    let alone = witness(&relay, || thread::sleep(Duration::from_secs(3)));
    println!("round trips without listing             {}", told(alone));
    let mut looked = Vec::new();
    let beside = witness(&relay, || {
        for _ in 0..listings {
            looked.extend(list(&relay, allocations));
        }
    });
    println!("round trips while allocations are listed   {}", told(beside));
    let found: usize = looked.iter().map(|looked| looked.allocations.len()).sum();
    println!("{listings} listings, {} slices, {found} allocations returned", looked.len());
    println!("a slice kept the worker for   {}", told(looked.iter().map(|looked| looked.took).collect()));
    println!("a slice waited for the worker {}", told(looked.iter().map(|looked| looked.waited).collect()));
}

fn relay(allocations: u32, shared_ports: usize) -> Relay {
    let most = allocations as usize + 10;
    let address = |last| RelayAddress { bind: Ipv4Addr::new(127, 7, 7, last).into(), external: None };
    let config = Config {
        listen: vec![(Ipv4Addr::UNSPECIFIED, 0).into()],
        relay: (1..=4).map(address).collect(),
        ports: 1024..=65_535,
        shared_ports,
        relay_buffer: 4096,
        limits: AllocationLimits {
            allocations: most,
            allocations_per_user: most,
            ..AllocationLimits::default()
        },
        server: ServerConfig {
            authenticate: false,
            relay_v6: false,
            limits: ServerLimits { default_lifetime: 3600, ..ServerLimits::default() },
            peers: PeerRules { allow: vec!["127.0.0.0/8".parse().unwrap()], ..PeerRules::default() },
            ..ServerConfig::default()
        },
        ..Config::default()
    };
    Relay::start(&config, Arc::new(()), Arc::new(())).unwrap()
}

fn allocate(relay: &Relay, client: u32, allocations: u32) -> UdpSocket {
    let port = relay.listeners().udp[0].port();
    let socket = UdpSocket::bind((Ipv4Addr::new(127, 9, 9, 9), 0)).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    let request = stun::message(0x0003, 1, &[(0x0019, &[17, 0, 0, 0])]);
    for number in 0..FAN.min(allocations - client * FAN) {
        let to = Ipv4Addr::from_bits(Ipv4Addr::new(127, 8, 0, 1).to_bits() + number);
        socket.send_to(&request, (to, port)).unwrap();
        let mut answer = [0; 1500];
        let (length, from) = socket.recv_from(&mut answer).unwrap();
        assert_eq!((&answer[..2], from.ip()), (&[0x01, 0x03][..], to.into()), "{:?}", &answer[..length]);
    }
    socket
}

fn list(relay: &Relay, allocations: u32) -> Vec<Looked> {
    let mut slices = Vec::new();
    let mut from = Some(0);
    while let Some(slot) = from {
        let (sender, answer) = mpsc::channel();
        let look = Look { from: slot, most: SLICE_ALLOCATIONS, filter: Arc::default(), details: false };
        relay.look(0, look, move |looked| sender.send(looked).unwrap());
        let looked = answer.recv_timeout(SOON).unwrap();
        from = looked.next;
        slices.push(looked);
    }
    let found: usize = slices.iter().map(|looked| looked.allocations.len()).sum();
    assert_eq!(found, allocations as usize + 1, "all allocations, and the witness");
    slices
}

/// Round-trip times between one allocation and its peer while `meanwhile` runs.
fn witness(relay: &Relay, meanwhile: impl FnOnce()) -> Vec<Duration> {
    let server = SocketAddr::from((Ipv4Addr::LOCALHOST, relay.listeners().udp[0].port()));
    let bound = || {
        let socket = UdpSocket::bind((Ipv4Addr::new(127, 9, 9, 8), 0)).unwrap();
        socket.set_read_timeout(Some(SOON)).unwrap();
        socket
    };
    let (client, peer) = (bound(), bound());
    client.connect(server).unwrap();
    let ask = |request: &[u8]| {
        client.send(request).unwrap();
        let mut answer = [0; 1500];
        let length = client.recv(&mut answer).unwrap();
        assert_eq!(answer[0], 1, "{:?}", &answer[..length]);
        answer[..length].to_vec()
    };
    ask(&stun::message(0x0003, 1, &[(0x0019, &[17, 0, 0, 0])]));
    let to = stun::xor_address(peer.local_addr().unwrap(), 0);
    ask(&stun::message(0x0009, 2, &[(0x000C, &[0x40, 1, 0, 0]), (0x0012, &to)]));
    let stop = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&stop);
    let thread = thread::spawn(move || {
        let mut trips = Vec::new();
        while !over.load(Ordering::Relaxed) {
            let began = Instant::now();
            client.send(&[0x40, 1, 0, 4, 1, 2, 3, 4]).unwrap();
            let mut buffer = [0; 100];
            let (length, relayed) = peer.recv_from(&mut buffer).unwrap();
            peer.send_to(&buffer[..length], relayed).unwrap();
            client.recv(&mut buffer).unwrap();
            trips.push(began.elapsed());
            thread::sleep(Duration::from_micros(200));
        }
        client.send(&stun::message(0x0004, 3, &[(0x000D, &[0; 4])])).unwrap();
        client.recv(&mut [0; 100]).unwrap();
        trips
    });
    meanwhile();
    stop.store(true, Ordering::Relaxed);
    thread.join().unwrap()
}

fn told(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |share: usize| times[(times.len() - 1) * share / 1000].as_micros();
    format!(
        "p50 {} us, p99 {} us, p99.9 {} us, max {} us ({} times)",
        at(500),
        at(990),
        at(999),
        at(1000),
        times.len()
    )
}
