//! The network of a fleet: clients, a router that is the balancer, and a machine for each node.
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
/// Of the balancer and of each node.
const PORT: u16 = 3478;
/// Where clients find the fleet.
pub(super) const FLEET: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 78, 0, 1)), PORT);
/// Where clients' peers are.
pub(super) const PEERS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 78, 0, 2)), 3480);
/// Where nodes find the stores.
pub(super) const STORES: Ipv4Addr = Ipv4Addr::new(10, 78, 9, 1);

/// Where a node listens.
pub(super) fn node_address(node: usize) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 78, number(node), 2)), PORT)
}

/// From where the balancer speaks to a node.
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
    /// What this machine needs for it.
    pub(super) fn is_possible() -> Result<(), String> {
        ["ip", "nsenter", "nft", "haproxy"].into_iter().try_for_each(|program| installed(program).map(drop))
    }

    /// In this process's namespace, which is its own.
    pub(super) fn up(dir: &Dir) -> Self {
        run("ip", &["addr", "add", &format!("{STORES}/32"), "dev", "lo"]);
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").expect("a namespace of our own");
        let clients = linked("c", "c", 0);
        // A port whose node is gone is still led there for some minutes. With many ports hardly a client draws one of these.
        clients.inside(&["sh", "-c", "echo 1024 65535 >/proc/sys/net/ipv4/ip_local_port_range"]);
        as_many(&clients);
        let nodes = std::array::from_fn(|node| linked(&device(node), "n", number(node)));
        let haproxy = balance_streams(&dir.file("haproxy.cfg", haproxy_configuration()));
        Self { nodes, clients, router: Router::start(), _haproxy: haproxy }
    }

    /// Pulls a node's cable, or puts it back.
    pub(super) fn cut(&self, node: usize, is_cut: bool) {
        run("ip", &["link", "set", "dev", &device(node), if is_cut { "down" } else { "up" }]);
    }

    /// Whether a node answers by its link.
    pub(super) fn reaches(&self, node: usize) -> bool {
        answers(node)
    }

    /// Has a node and the store of the fleet hear nothing of one another, or again; `None` for all nodes.
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

    /// Whether the balancer takes all nodes for alive.
    pub(super) fn leads_to_all(&self) -> bool {
        *self.router.alive() == [true; NODES]
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.router.ends.store(true, Relaxed);
    }
}

/// The router's end of a node's link.
fn device(node: usize) -> String {
    format!("n{}", number(node))
}

/// A namespace at the other end of a link of ours, which leads to everything.
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

/// Has clients come from a hundred addresses, as they do in life: of one address only so many requests wait for the users' database at a time.
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

/// Leads each new flow of datagrams to a node that answers, by chance. Flows that there are stay where they are.
struct Router {
    alive: Mutex<[bool; NODES]>,
    ends: AtomicBool,
}

impl Router {
    /// Asks each node five times a second; who has not answered three times is dead.
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

/// Where new flows go.
fn lead_to(alive: &[bool; NODES]) {
    let nodes: Vec<String> =
        (0..NODES).filter(|node| alive[*node]).map(|node| node_address(node).ip().to_string()).collect();
    let places: Vec<String> = nodes.iter().enumerate().map(|(place, ip)| format!("{place} : {ip}")).collect();
    let target = match nodes.as_slice() {
        // There is nothing better to do.
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

/// Whether a node answers a Binding request soon.
fn answers(node: usize) -> bool {
    let Ok(socket) = UdpSocket::bind((balancer_of(node), 0)) else { return false };
    let asked = socket
        .connect(node_address(node))
        .and_then(|()| socket.send(&stun::plain_message(stun::kind::BINDING, &[])));
    socket.set_read_timeout(Some(Duration::from_millis(150))).expect("not zero");
    let answered = asked.is_ok() && socket.recv(&mut [0; 512]).is_ok();
    // Asked as often, whether refused at once or silent.
    if !answered {
        thread::sleep(Duration::from_millis(50));
    }
    answered
}

/// Streams, TLS inside or not, as a balancer in front of TURN has them: with the client's address in front (PROXY protocol).
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
    let haproxy = installed("haproxy").expect("it was there before");
    Program::start(Command::new(haproxy).args(["-db", "-f"]).arg(file))
}
