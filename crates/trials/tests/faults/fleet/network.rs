//! Network of a fleet: clients, a router that acts as the balancer, and a namespace for each node.
//!
//! ```text
//!  clients and their peers      this test: router, HAProxy, stores     nodes
//!  10.78.0.2 c ─────────────── c 10.78.0.1              10.78.1.1 n1 ─────── n 10.78.1.2
//!                                10.78.9.1 (stores)     10.78.2.1 n2 ─────── n 10.78.2.2
//!                                                       10.78.3.1 n3 ─────── n 10.78.3.2
//! ```

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    path::Path,
    process::Command,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use turnpike_testkit::{alone::run, stun};

use turnpike_trials::{Dir, Namespace, Program, installed};

pub(super) const NODES: usize = 3;
const PORT: u16 = 3478;
pub(super) const FLEET: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 78, 0, 1)), PORT);
pub(super) const PEERS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 78, 0, 2)), 3480);
pub(super) const STORES: Ipv4Addr = Ipv4Addr::new(10, 78, 9, 1);

pub(super) fn node_address(node: usize) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 78, number(node), 2)), PORT)
}

pub(super) fn balancer_of(node: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 78, number(node), 1)
}

fn number(node: usize) -> u8 {
    u8::try_from(node + 1).expect("a few nodes")
}

pub(super) struct Network {
    pub(super) nodes: [Namespace; NODES],
    pub(super) clients: Namespace,
    router: Arc<Router>,
    _haproxy: Program,
}

impl Network {
    pub(super) fn is_possible() -> Result<(), String> {
        ["ip", "nsenter", "nft", "haproxy"].into_iter().try_for_each(|program| installed(program).map(drop))
    }

    /// Requires that this process has a network namespace of its own.
    pub(super) fn up(dir: &Dir) -> Self {
        run("ip", &["addr", "add", &format!("{STORES}/32"), "dev", "lo"]);
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").expect("the namespace belongs to this test");
        let clients = linked("c", "c", 0);
        // The router keeps mapping a source port to a dead node for some minutes; with many ports, few clients use such a port.
        clients.inside(&["sh", "-c", "echo 1024 65535 >/proc/sys/net/ipv4/ip_local_port_range"]);
        as_many(&clients);
        let nodes = std::array::from_fn(|node| linked(&device(node), "n", number(node)));
        let haproxy = balance_streams(&dir.file("haproxy.cfg", haproxy_configuration()));
        Self { nodes, clients, router: Router::start(), _haproxy: haproxy }
    }

    pub(super) fn cut(&self, node: usize, is_cut: bool) {
        run("ip", &["link", "set", "dev", &device(node), if is_cut { "down" } else { "up" }]);
    }

    pub(super) fn reaches(&self, node: usize) -> bool {
        answers(node)
    }

    pub(super) fn partition(&self, node: Option<usize>, store: SocketAddr, is_cut: bool) {
        if !is_cut {
            return nft("delete table ip partition");
        }
        let from = node.map_or(String::new(), |node| format!("iifname {} ", device(node)));
        nft(&format!(
            "add table ip partition; add chain ip partition input {{ type filter hook input priority 0; }}; \
             add rule ip partition input {from}ip daddr {STORES} tcp dport {} drop",
            store.port()
        ));
    }

    pub(super) fn leads_to_all(&self) -> bool {
        *self.router.alive() == [true; NODES]
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.router.ends.store(true, Relaxed);
    }
}

fn device(node: usize) -> String {
    format!("n{}", number(node))
}

/// Creates a namespace behind a link, with a default route through it.
fn linked(ours: &str, theirs: &str, link: u8) -> Namespace {
    let namespace = Namespace::with_loopback();
    let pid = namespace.pid().to_string();
    run("ip", &["link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", &pid]);
    run("ip", &["addr", "add", &format!("10.78.{link}.1/24"), "dev", ours]);
    run("ip", &["link", "set", "dev", ours, "up"]);
    namespace.inside(&["ip", "addr", "add", &format!("10.78.{link}.2/24"), "dev", theirs]);
    namespace.inside(&["ip", "link", "set", "dev", theirs, "up"]);
    namespace.inside(&["ip", "route", "add", "default", "via", &format!("10.78.{link}.1")]);
    namespace
}

/// Gives the clients a hundred source addresses, because the server limits concurrent user lookups per address.
fn as_many(clients: &Namespace) {
    let addresses: Vec<String> = (0..100).map(|number| format!("{number} : 10.78.4.{number}")).collect();
    run("ip", &["route", "add", "10.78.4.0/24", "via", "10.78.0.2"]);
    clients.inside(&[
        "nft",
        &format!(
            "add table ip many; add chain ip many postrouting {{ type nat hook postrouting priority 100; }}; \
             add rule ip many postrouting meta l4proto {{ tcp, udp }} th dport {PORT} \
             snat to numgen inc mod 100 map {{ {} }}",
            addresses.join(", ")
        ),
    ]);
}

fn nft(script: &str) {
    run("nft", &[script]);
}

/// Sends each new UDP flow to a random node that answers; existing flows keep their node.
struct Router {
    alive: Mutex<[bool; NODES]>,
    ends: AtomicBool,
}

impl Router {
    /// Checks each node five times a second; after three missed answers a node is considered dead.
    fn start() -> Arc<Self> {
        nft(
            "add table ip balancer; add chain ip balancer prerouting { type nat hook prerouting priority -100; }",
        );
        let router = Arc::new(Self { alive: Mutex::new([true; NODES]), ends: AtomicBool::new(false) });
        lead_to(&[true; NODES]);
        for node in 0..NODES {
            let router = Arc::clone(&router);
            thread::spawn(move || {
                let mut failed = 0;
                while !router.ends.load(Relaxed) {
                    failed = if answers(node) { 0 } else { failed + 1 };
                    match failed {
                        0 => router.is(node, true),
                        3 => router.is(node, false),
                        _ => {}
                    }
                    thread::sleep(Duration::from_millis(50));
                }
            });
        }
        router
    }

    fn alive(&self) -> std::sync::MutexGuard<'_, [bool; NODES]> {
        self.alive.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is(&self, node: usize, alive: bool) {
        let mut all = self.alive();
        if std::mem::replace(&mut all[node], alive) != alive {
            lead_to(&all);
        }
    }
}

fn lead_to(alive: &[bool; NODES]) {
    let nodes: Vec<String> =
        (0..NODES).filter(|node| alive[*node]).map(|node| node_address(node).ip().to_string()).collect();
    let places: Vec<String> = nodes.iter().enumerate().map(|(place, ip)| format!("{place} : {ip}")).collect();
    let target = match nodes.as_slice() {
        [] => return,
        [one] => one.clone(),
        all => format!("numgen random mod {} map {{ {} }}", all.len(), places.join(", ")),
    };
    nft(&format!(
        "flush chain ip balancer prerouting; \
         add rule ip balancer prerouting ip daddr {} udp dport {PORT} dnat to {target}",
        FLEET.ip()
    ));
}

fn answers(node: usize) -> bool {
    let Ok(socket) = UdpSocket::bind((balancer_of(node), 0)) else { return false };
    let asked = socket
        .connect(node_address(node))
        .and_then(|()| socket.send(&stun::plain_message(stun::kind::BINDING, &[])));
    socket.set_read_timeout(Some(Duration::from_millis(150))).expect("the timeout is not zero");
    let answered = asked.is_ok() && socket.recv(&mut [0; 512]).is_ok();
    // Keeps the interval constant, whether the request is refused immediately or times out.
    if !answered {
        thread::sleep(Duration::from_millis(50));
    }
    answered
}

/// Forwards TCP, with or without TLS inside, and sends the client's address first (PROXY protocol), as load balancers do for TURN.
fn haproxy_configuration() -> String {
    let server = |node: usize| format!("  server n{node} {} send-proxy-v2 check\n", node_address(node));
    format!(
        "global\n  maxconn 4000\ndefaults\n  mode tcp\n  balance leastconn\n  retries 3\n  option redispatch 1\n\
         \x20 timeout connect 300ms\n  timeout check 200ms\n  timeout client 1h\n  timeout server 1h\n\
         \x20 default-server inter 200ms fall 3 rise 1\n\
         listen turn\n  bind {FLEET}\n{}",
        (0..NODES).map(server).collect::<String>()
    )
}

fn balance_streams(file: &Path) -> Program {
    let haproxy = installed("haproxy").expect("the program was found before");
    Program::start(Command::new(haproxy).args(["-db", "-f"]).arg(file))
}
