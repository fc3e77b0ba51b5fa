//! Flows with leases on a real link, while this machine has rules of various kinds: the kernel relays only
//! what would have passed through user space unchanged.

use crate::prelude::*;
use std::{
    io::ErrorKind,
    net::UdpSocket,
    process::Command,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use turnpike_offload::{Flows, Kernel, KernelSettings, OffloadError, layout::LEASE_NS};

/// Ends of the link: this machine (`one`) and the client and peer (`other`).
const LISTENER: &str = "10.78.0.1:3478";
const RELAY: &str = "10.78.0.1:50000";
const CLIENT: &str = "10.78.0.2:1000";
const PEER: &str = "10.78.0.2:6000";

/// More datagrams than a flow needs to settle and be granted its lease.
pub(crate) const SOME: u32 = 40;
/// Time after which new rules have been read, even if the process that changes them and the thread that reads
/// them have to wait for the CPU.
const READ_AFTER: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(3);

pub(crate) fn run(line: &str) {
    let output = Command::new("sh").args(["-c", line]).output().expect("sh(1) runs");
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Applies the rules. If this kernel does not support them, prints a skip notice and returns false.
fn has_made(rules: &str) -> bool {
    let output = Command::new("sh").args(["-c", rules]).output().expect("sh(1) runs");
    if !output.status.success() {
        skip(&format!("{rules}: {}", String::from_utf8_lossy(&output.stderr)));
    }
    output.status.success()
}

fn is_there(program: &str) -> bool {
    Command::new(program).arg("-V").output().is_ok()
}

/// The far end of the link in its own namespace.
struct Far {
    client: UdpSocket,
    peer: UdpSocket,
}

pub(crate) struct Bench {
    pub(crate) kernel: Kernel,
    flows: Flows,
    socket: u32,
    listener: UdpSocket,
    relay: UdpSocket,
    far: Far,
    pub(crate) sent: u32,
    pub(crate) arrived: u32,
    last: u32,
}

/// Result of a series of datagrams.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Passed {
    pub(crate) by_kernel: u64,
    pub(crate) arrived: u32,
}

impl Bench {
    /// `None` without permission. `rules` are in effect before the flow starts.
    pub(crate) fn new(rules: &str) -> Option<Self> {
        // SAFETY: affects only this thread, and the threads and processes that it starts later.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            skip("no permission for network namespaces");
            return None;
        }
        let (send, far) = mpsc::channel();
        let (made, wait) = mpsc::channel();
        thread::spawn(move || {
            // SAFETY: as above.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
            // SAFETY: no arguments.
            send.send(Err(unsafe { libc::gettid() })).expect("the receiver is open");
            wait.recv().expect("the link is made");
            run("ip addr add 10.78.0.2/24 dev other && ip link set other up && ip link set lo up");
            // A route over the link for rules that change addresses.
            run("ip route add 10.79.0.0/24 dev other");
            let [client, peer] = [CLIENT, PEER].map(|at| UdpSocket::bind(at).expect("an address of ours"));
            send.send(Ok(Far { client, peer })).expect("the receiver is open");
            // The sockets keep the namespace alive.
        });
        let Ok(Err(thread)) = far.recv() else { panic!("the thread did not send its ID first") };
        run(
            "ip link set lo up && ip link add one type veth peer name other && ip addr add 10.78.0.1/24 dev one",
        );
        run(&format!("ip link set other netns {thread} && ip link set one up"));
        made.send(()).expect("the thread waits for the link");
        let Ok(Ok(far)) = far.recv() else { panic!("the thread did not send its sockets") };
        far.peer.set_nonblocking(true).expect("a socket");
        if !has_made(rules) {
            return None;
        }
        let settings = KernelSettings {
            listeners: vec![LISTENER.parse().expect("an address")],
            relay_ports: 49_152..=65_535,
            flows: 64,
            sockets: 8,
            hook: Hook::Best,
            leases: true,
            measures: false,
        };
        let kernel = match Kernel::start(&settings) {
            Ok(kernel) => kernel,
            Err(OffloadError::Capability { missing, .. }) => {
                skip(&format!("this process lacks {missing}"));
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let mut flows = kernel.flows().expect("a descriptor");
        let socket = flows.socket().expect("a free socket slot");
        let state = flows.state().expect("a free state slot");
        let [local, from, remote, to] =
            [LISTENER, RELAY, CLIENT, PEER].map(|at| at.parse().expect("an address"));
        let flow = NewFlow {
            kind: Kind::Forward,
            remote,
            local,
            channel: None,
            from,
            to,
            state: &state,
            socket,
            expires_ns: u64::MAX,
        };
        let _ = flows.install(&flow).expect("there is room");
        let [listener, relay] = [LISTENER, RELAY].map(|at| UdpSocket::bind(at).expect("an address of ours"));
        listener.set_nonblocking(true).expect("a socket");
        Some(Self { kernel, flows, socket, listener, relay, far, sent: 0, arrived: 0, last: 0 })
    }

    pub(crate) fn count(&self, count: Count) -> u64 {
        self.kernel.snapshot().counts[count as usize]
    }

    /// Sends datagrams; user space forwards those it receives, and reports them as read.
    pub(crate) fn send(&mut self, count: u32) -> Passed {
        let (before, arrived) = (self.count(Count::Forwarded), self.arrived);
        for _ in 0..count {
            self.sent += 1;
            let _ = self.far.client.send_to(&self.sent.to_be_bytes(), LISTENER);
            let until = Instant::now() + PAUSE;
            while Instant::now() < until {
                let began_ns = now_ns();
                let mut bytes = [0; 64];
                match self.listener.recv_from(&mut bytes) {
                    Ok((len, _)) => _ = self.relay.send_to(&bytes[..len], PEER),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        self.flows.drained(self.socket, began_ns);
                        thread::sleep(PAUSE / 10);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            let mut number = [0; 4];
            while self.far.peer.recv_from(&mut number).is_ok() {
                let number = u32::from_be_bytes(number);
                assert!(number > self.last, "datagram {number} arrives after {}", self.last);
                self.last = number;
                self.arrived += 1;
            }
        }
        Passed { by_kernel: self.count(Count::Forwarded) - before, arrived: self.arrived - arrived }
    }

    /// Sends until new rules must have been read and the current lease must have ended.
    pub(crate) fn outlast_lease(&mut self) {
        let until = Instant::now() + Duration::from_nanos(LEASE_NS) + READ_AFTER;
        while Instant::now() < until {
            self.send(1);
        }
    }
}

/// Rules that keep the flow in user space: how they are made, the tool they need, and the reason counted.
const RULES: &[(&str, &str, &str, Count)] = &[
    (
        "drop on input",
        "nft",
        "nft add table ip t && nft 'add chain ip t c { type filter hook input priority 0; }' && \
      nft add rule ip t c udp dport 3478 drop",
        Count::Unseen,
    ),
    (
        "drop on output",
        "nft",
        "nft add table ip t && nft 'add chain ip t c { type filter hook output priority 0; }' && \
      nft add rule ip t c udp dport 6000 drop",
        Count::Unseen,
    ),
    (
        "reject on input",
        "nft",
        "nft add table ip t && nft 'add chain ip t c { type filter hook input priority 0; }' && \
      nft add rule ip t c udp dport 3478 reject",
        Count::Unseen,
    ),
    (
        "drop at netdev ingress",
        "nft",
        "nft add table netdev t && \
      nft 'add chain netdev t c { type filter hook ingress device one priority 0; }' && \
      nft add rule netdev t c udp dport 3478 drop",
        Count::Unseen,
    ),
    (
        "mark on output",
        "nft",
        "nft add table ip t && nft 'add chain ip t c { type filter hook output priority 0; }' && \
      nft add rule ip t c udp dport 6000 meta mark set 7",
        Count::RefusedMark,
    ),
    (
        "priority on output",
        "nft",
        "nft add table ip t && nft 'add chain ip t c { type filter hook output priority 0; }' && \
      nft add rule ip t c udp dport 6000 meta priority set 1:5",
        Count::RefusedPriority,
    ),
    (
        "DSCP on output",
        "nft",
        "nft add table ip t && nft 'add chain ip t c { type filter hook output priority 0; }' && \
      nft add rule ip t c udp dport 6000 ip dscp set ef",
        Count::RefusedDscp,
    ),
    (
        "SNAT",
        "nft",
        "nft add table ip t && nft 'add chain ip t c { type nat hook postrouting priority 100; }' && \
      nft add rule ip t c udp dport 6000 snat to 10.78.0.1:40000",
        Count::RefusedSource,
    ),
    (
        "MASQUERADE",
        "nft",
        "nft add table ip t && nft 'add chain ip t c { type nat hook postrouting priority 100; }' && \
      nft add rule ip t c udp dport 6000 masquerade to :40000-40010",
        Count::RefusedSource,
    ),
    (
        "iptables MARK",
        "iptables",
        "iptables -t mangle -A OUTPUT -p udp --dport 6000 -j MARK --set-mark 7",
        Count::RefusedMark,
    ),
    (
        "iptables hashlimit",
        "iptables",
        "iptables -A INPUT -p udp --dport 3478 -m hashlimit --hashlimit-name t --hashlimit-above 5/second -j DROP",
        Count::Unseen,
    ),
    (
        "DNAT on output",
        "nft",
        "nft add table ip t && nft 'add chain ip t c { type nat hook output priority -100; }' && \
      nft add rule ip t c udp dport 6000 dnat to 10.78.0.2:6001",
        Count::Unseen,
    ),
    (
        "DNAT on input",
        "nft",
        "nft add table ip t && nft 'add chain ip t c { type nat hook prerouting priority -100; }' && \
      nft add rule ip t c udp dport 3478 redirect to :3479",
        Count::Unseen,
    ),
    (
        "route by mark",
        "nft",
        "ip link add d0 type veth peer name d1 && ip link set d1 up && ip link set d0 up && ip addr add 10.80.0.1/24 dev d0 && \
      ip neigh add 10.78.0.2 lladdr 02:00:00:00:00:01 dev d0 && \
      ip rule add fwmark 9 lookup 99 && ip route add default dev d0 table 99 && nft add table ip t && \
      nft 'add chain ip t c { type route hook output priority 0; }' && \
      nft add rule ip t c udp dport 6000 meta mark set 9",
        Count::RefusedInterface,
    ),
    (
        "route by port",
        "ip",
        "ip link add d0 type veth peer name d1 && ip link set d1 up && ip link set d0 up && ip addr add 10.80.0.1/24 dev d0 && \
      ip neigh add 10.78.0.2 lladdr 02:00:00:00:00:01 dev d0 && \
      ip rule add ipproto udp dport 6000 lookup 99 && ip route add default dev d0 table 99",
        Count::Unseen,
    ),
    (
        "drop at tc ingress",
        "tc",
        "tc qdisc add dev one ingress && \
      tc filter add dev one ingress protocol ip u32 match ip dport 3478 0xffff action drop",
        Count::Unseen,
    ),
    (
        "rate limit",
        "nft",
        "nft add table ip t && nft 'add chain ip t c { type filter hook input priority 0; }' && \
      nft add rule ip t c udp dport 3478 limit rate over 5/second drop",
        Count::Unseen,
    ),
    (
        "IPsec policy",
        "ip",
        "ip xfrm policy add src 10.78.0.1 dst 10.78.0.2 dir out tmpl src 10.78.0.1 dst 10.78.0.2 \
      proto esp mode transport",
        Count::Unseen,
    ),
];

/// Limits only the log, and counts recent connections over TCP.
const UFW: &str = "iptables-restore <<'RULES'
*filter
:INPUT DROP [0:0]
:FORWARD DROP [0:0]
:OUTPUT ACCEPT [0:0]
:before-input - [0:0]
:logging-deny - [0:0]
:not-local - [0:0]
:user-input - [0:0]
:user-limit - [0:0]
-A INPUT -j before-input
-A INPUT -j user-input
-A INPUT -m limit --limit 3/min --limit-burst 10 -j LOG --log-prefix blocked
-A before-input -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A before-input -m conntrack --ctstate INVALID -j logging-deny
-A before-input -m conntrack --ctstate INVALID -j DROP
-A before-input -p icmp -m icmp --icmp-type 8 -j ACCEPT
-A before-input -j not-local
-A logging-deny -m conntrack --ctstate INVALID -m limit --limit 3/min --limit-burst 10 -j RETURN
-A logging-deny -m limit --limit 3/min --limit-burst 10 -j LOG --log-prefix blocked
-A not-local -m addrtype --dst-type LOCAL -j RETURN
-A not-local -m limit --limit 3/min --limit-burst 10 -j logging-deny
-A not-local -j DROP
-A user-input -p tcp -m tcp --dport 22 -m conntrack --ctstate NEW -m recent --set --name ssh --rsource
-A user-input -p tcp -m tcp --dport 22 -m conntrack --ctstate NEW -m recent --update --seconds 30 --hitcount 6 --name ssh --rsource -j user-limit
-A user-input -p udp -m udp --dport 3478 -j ACCEPT
-A user-input -p udp -m udp --dport 49152:65535 -j ACCEPT
-A user-limit -m limit --limit 3/min -j LOG --log-prefix limited
-A user-limit -j REJECT --reject-with icmp-port-unreachable
COMMIT
RULES";

/// Translates addresses of containers, and limits only forwarded packets.
const DOCKER: &str = "iptables-restore <<'RULES'
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A DOCKER ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:OUTPUT ACCEPT [0:0]
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A DOCKER-USER -m limit --limit 5/sec -j DROP
COMMIT
RULES";

/// Chooses chains by a map.
const FIREWALLD: &str = "nft -f - <<'RULES'
table inet t {
  chain input {
    type filter hook input priority filter + 10; policy accept;
    ct state { established, related } accept
    ct state invalid drop
    jump zones
    reject with icmpx admin-prohibited
  }
  chain zones {
    iifname vmap { lo : accept, one : goto public }
  }
  chain public {
    meta l4proto icmp accept
    udp dport { 3478, 49152-65535 } accept
  }
  chain prerouting {
    type filter hook prerouting priority mangle + 10;
    meta nfproto ipv6 fib saddr . mark . iif oif missing drop
  }
}
RULES";

/// Rules under which the kernel relays.
const HARMLESS: &[(&str, &str, &str)] = &[
    ("nothing", "ip", ""),
    (
        "conntrack",
        "nft",
        "nft add table ip t && nft 'add chain ip t c { type filter hook input priority 0; policy drop; }' && \
      nft add rule ip t c ct state established,related accept && nft add rule ip t c udp dport 3478 ct state new accept",
    ),
    (
        "shaping",
        "tc",
        "tc qdisc add dev one root handle 1: htb default 1 && tc class add dev one parent 1: classid 1:1 htb rate 1gbit",
    ),
    ("rules shaped like ufw's", "iptables", UFW),
    ("rules shaped like Docker's", "iptables", DOCKER),
    ("rules shaped like firewalld's", "nft", FIREWALLD),
];

fn cases<T>(all: &[T], tool: impl Fn(&T) -> &'static str) -> impl Iterator<Item = &T> {
    all.iter().filter(move |case| {
        let has = is_there(tool(case));
        if !has {
            skip(&format!("{} is not installed", tool(case)));
        }
        has
    })
}

/// Runs the case in a thread of its own, because a namespace belongs to a thread.
fn in_namespace(case: impl FnOnce() + Send) {
    thread::scope(|scope| scope.spawn(case).join()).expect("the test case passes");
}

#[test]
fn flows_stay_in_user_space_if_rules_would_affect_them() {
    for (name, _, rules, reason) in cases(RULES, |(_, tool, ..)| tool) {
        in_namespace(|| {
            let Some(mut bench) = Bench::new(rules) else { return };
            // On a busy machine, the kernel may be slower than the sender.
            let has_reason = (0..5).any(|_| {
                let passed = bench.send(SOME);
                assert_eq!(passed.by_kernel, 0, "{name}: {passed:?}");
                bench.count(*reason) > 0
            });
            assert!(has_reason, "{name}: {:?}", bench.kernel.snapshot());
        });
    }
}

#[test]
fn the_kernel_relays_flows_that_rules_let_through() {
    for (name, _, rules) in cases(HARMLESS, |(_, tool, _)| tool) {
        in_namespace(|| {
            let Some(mut bench) = Bench::new(rules) else { return };
            let passed = bench.send(SOME);
            assert!(
                passed.by_kernel > u64::from(SOME) / 2,
                "{name}: {passed:?} {:?}",
                bench.kernel.snapshot()
            );
            assert_eq!(passed.arrived, SOME, "{name}: {passed:?}");
        });
    }
}

#[test]
fn rules_added_later_take_effect_after_one_lease() {
    thread::scope(|scope| {
        let cases: Vec<_> = cases(RULES, |(_, tool, ..)| tool)
            .map(|(name, _, rules, _)| {
                let case = move || {
                    let Some(mut bench) = Bench::new("") else { return };
                    assert!(bench.send(SOME).by_kernel > 0, "{name}: the kernel did not relay at first");
                    if !has_made(rules) {
                        return;
                    }
                    bench.outlast_lease();
                    let passed = bench.send(SOME);
                    assert_eq!(passed.by_kernel, 0, "{name}: {passed:?}");
                };
                (name, scope.spawn(case))
            })
            .collect();
        for (name, case) in cases {
            assert!(case.join().is_ok(), "{name}");
        }
    });
}

#[test]
fn no_datagram_is_lost_or_overtaken_when_rules_come_and_go() {
    if !is_there("nft") {
        return skip("nft(8) is not installed");
    }
    in_namespace(|| {
        let Some(mut bench) = Bench::new("") else { return };
        for _ in 0..2 {
            assert!(bench.send(SOME).by_kernel > 0);
            run("nft add table ip t && nft 'add chain ip t c { type filter hook output priority 0; }' && \
                 nft add rule ip t c udp dport 6000 meta mark set 7");
            bench.outlast_lease();
            assert_eq!(bench.send(SOME).by_kernel, 0);
            run("nft delete table ip t");
            turnpike_testkit::eventually("the kernel relays again", || bench.send(5).by_kernel > 0);
        }
        bench.send(1);
        assert_eq!(bench.arrived, bench.sent);
    });
}

#[test]
fn shaping_applies_to_relayed_datagrams() {
    if !is_there("tc") {
        return skip("tc(8) is not installed");
    }
    in_namespace(|| {
        let Some(mut bench) = Bench::new("") else { return };
        assert!(bench.send(SOME).by_kernel > 0);
        if !has_made("tc qdisc add dev one root tbf rate 16kbit burst 200 limit 200") {
            return;
        }
        let passed = bench.send(5 * SOME);
        // 0.6 s at 2,000 bytes per second: some 30 frames of 46 bytes.
        assert!(passed.by_kernel > 0 && passed.arrived < 2 * SOME, "{passed:?}");
        run("tc -s qdisc show dev one | grep -qE 'dropped [1-9]'");
    });
}

#[test]
fn a_route_by_source_is_followed() {
    if !is_there("ip") {
        return skip("ip(8) is not installed");
    }
    in_namespace(|| {
        let Some(mut bench) = Bench::new("") else { return };
        assert!(bench.send(SOME).by_kernel > 0);
        run("ip link add d0 type veth peer name d1 && ip link set d1 up && ip link set d0 up && \
             ip addr add 10.80.0.1/24 dev d0 && ip neigh add 10.78.0.2 lladdr 02:00:00:00:00:01 dev d0 && \
             ip rule add from 10.78.0.1 lookup 99 && ip route add 10.78.0.2 dev d0 table 99");
        bench.outlast_lease();
        let passed = bench.send(SOME);
        assert_eq!(passed.arrived, 0, "{passed:?}");
    });
}

#[test]
fn a_lease_is_renewed_by_one_datagram() {
    in_namespace(|| {
        let Some(mut bench) = Bench::new("") else { return };
        bench.outlast_lease();
        bench.send(SOME);
        let snapshot = bench.kernel.snapshot();
        let [leases, relayed] = [Count::Lease, Count::Forwarded].map(|count| snapshot.counts[count as usize]);
        assert!((2..=4).contains(&leases) && relayed > 100 * leases, "{snapshot:?}");
        assert_eq!(bench.count(Count::Unseen) + bench.count(Count::Refused), 0, "{snapshot:?}");
    });
}

#[test]
fn an_obstacle_is_named_and_the_kernel_relays_again_without_it() {
    if !is_there("ip") {
        return skip("ip(8) is not installed");
    }
    in_namespace(|| {
        let policy = "src 10.99.0.1 dst 10.99.0.2 dir out";
        let Some(mut bench) = Bench::new(&format!("ip xfrm policy add {policy} action block")) else {
            return;
        };
        assert!(
            bench.kernel.obstacle().is_some_and(|it| it.contains("IPsec")),
            "{:?}",
            bench.kernel.obstacle()
        );
        assert_eq!(bench.send(SOME).by_kernel, 0);
        run(&format!("ip xfrm policy delete {policy}"));
        turnpike_testkit::eventually("the policy is gone", || bench.kernel.obstacle().is_none());
        turnpike_testkit::eventually("the kernel relays again", || bench.send(5).by_kernel > 0);
    });
}
