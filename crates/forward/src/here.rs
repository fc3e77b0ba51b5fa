//! Detects targets that are listeners of this process. A name may resolve to this machine. Each
//! connection to the target would then come back as a new client, until file descriptors run out.

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket},
};

use hashbrown::HashMap;
use turnpike_net::SocketProtocol;
use turnpike_wire::address::canonical_ip;

use turnpike_rules::{hears, reached};

use crate::{Address, Bind, binder::Active, listen::ListenerKind, state::RuleState};

/// Milliseconds for which an address counts as ours after a client has connected to it; after that,
/// it may belong to another machine.
const ASKED_MS: u64 = 10_000;
/// Milliseconds for which the result of a check for a local address is cached.
const LOCAL_MS: u64 = 1000;
/// Maximum number of cached addresses in each list.
const MOST: usize = 64;

/// Listeners of the active rules, replaced as a whole by a reload.
#[derive(Default)]
pub(crate) struct Listening(HashMap<(SocketProtocol, u16), Vec<Listener>>);

#[derive(Clone, Copy)]
struct Listener {
    /// [`RuleState::key`].
    rule: u32,
    ip: IpAddr,
    ipv6_only: bool,
}

impl Listening {
    pub(crate) fn new(rules: &[Active]) -> Self {
        let mut all = Self::default();
        for Active { state, addresses, .. } in rules {
            for address in addresses {
                all.add(state, address);
            }
        }
        all
    }

    fn add(&mut self, state: &RuleState, address: &Address) {
        if let Address::Ip(address) = address {
            let transport = ListenerKind::of(state.rule.protocol).speaks();
            let listener = Listener { rule: state.key, ip: address.ip(), ipv6_only: state.rule.ipv6_only };
            self.0.entry((transport, address.port())).or_default().push(listener);
        }
    }

    fn hear(&self, transport: SocketProtocol, target: SocketAddr) -> impl Iterator<Item = &Listener> + Clone {
        let at_port = self.0.get(&(transport, target.port())).map(Vec::as_slice).unwrap_or_default();
        at_port.iter().filter(move |listener| hears(listener.ip, listener.ipv6_only, target.ip()))
    }
}

/// Local addresses known to a worker. Used only when connections and sessions begin. Only a target with a
/// port in [`Listening`] costs more than a table lookup.
#[derive(Default)]
pub(crate) struct Here {
    /// Addresses to which clients of wildcard listeners have recently connected, each with the
    /// time.
    asked: Vec<(IpAddr, u64)>,
    /// Addresses with a zone but no port, whether the kernel considers them local, and the time of each
    /// check.
    local: Vec<(SocketAddr, bool, u64)>,
}

impl Here {
    /// True if `target` is a listener of this process. `asked` is the address that the client used.
    ///
    /// Returns `HostUnreachable` for a loop that nothing else would stop: if the target is the rule's own
    /// listener or, with `transparent` UDP, any listener, because datagrams with the client's address do not
    /// show how many rules they have passed. A wildcard rule may connect to one of its own addresses once:
    /// then it sees itself as a client, and refuses that target. It cannot refuse the target any earlier,
    /// because something else, such as IPVS, may serve the address.
    pub(crate) fn approach(
        &mut self,
        listening: &Listening,
        state: &RuleState,
        target: &Address,
        asked: impl FnOnce() -> Option<IpAddr>,
        now: u64,
    ) -> io::Result<bool> {
        let rule = &state.rule;
        let target = match (target, &rule.bind) {
            (Address::Unix(target), Bind::Unix(own)) if own == target => return Err(own_listener()),
            (Address::Unix(_), _) => return Ok(false),
            (Address::Ip(target), _) => *target,
        };
        let transport = state.targets_speak();
        let found = listening.hear(transport, target);
        if found.clone().next().is_none() || !self.is_local(target, now) {
            return Ok(false);
        }
        // Another routing table may lead to a different machine.
        if rule.mark.is_some() || rule.device.is_some() {
            return Ok(true);
        }
        if rule.transparent && transport == SocketProtocol::Udp {
            return Err(io::Error::new(
                io::ErrorKind::HostUnreachable,
                "the target is a listener of this forwarder, which `transparent` does not allow",
            ));
        }
        if let Some(own) = found.into_iter().find(|listener| listener.rule == state.key) {
            if !own.ip.is_unspecified() {
                return Err(own_listener());
            }
            self.learn(asked().map(canonical_ip), now);
            if self.asked.iter().any(|(known, _)| *known == reached(target.ip())) {
                return Err(own_listener());
            }
        }
        Ok(true)
    }

    fn learn(&mut self, asked: Option<IpAddr>, now: u64) {
        self.asked.retain(|(known, since)| Some(*known) != asked && now.saturating_sub(*since) < ASKED_MS);
        if let Some(asked) = asked {
            self.asked.truncate(MOST - 1);
            self.asked.insert(0, (asked, now));
        }
    }

    fn is_local(&mut self, target: SocketAddr, now: u64) -> bool {
        if reached(target.ip()).is_loopback() {
            return true;
        }
        let mut address = target;
        address.set_port(0);
        self.local.retain(|(_, _, since)| now.saturating_sub(*since) < LOCAL_MS);
        if let Some((_, is_local, _)) = self.local.iter().find(|(known, ..)| *known == address) {
            return *is_local;
        }
        let is_local = reaches_itself(target);
        self.local.truncate(MOST - 1);
        self.local.insert(0, (address, is_local, now));
        is_local
    }
}

fn own_listener() -> io::Error {
    io::Error::new(io::ErrorKind::HostUnreachable, "the target is the rule's own listener")
}

/// Asks the kernel with connect(2) on a UDP socket, which sends nothing. bind(2) alone would accept any
/// address if net.ipv4.ip_nonlocal_bind is set.
fn reaches_itself(target: SocketAddr) -> bool {
    match canonical_ip(target.ip()) {
        // A local IPv4 address is set as the source explicitly, because the kernel may choose a different one
        // for the route.
        IpAddr::V4(ip) => {
            let socket = UdpSocket::bind((ip, 0));
            socket.and_then(|socket| socket.connect((ip, target.port()))).is_ok()
        }
        // IPv6 does not check the source, but prefers the target itself (RFC 6724 section 5, rule 1).
        IpAddr::V6(ip) => {
            let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0));
            let source = socket.and_then(|socket| {
                socket.connect(target)?;
                socket.local_addr()
            });
            source.is_ok_and(|source| source.ip() == ip)
        }
    }
}

#[cfg(test)]
mod tests {
    use turnpike_wire::address::UnixName;

    use std::net::Ipv4Addr;

    use super::*;
    use crate::{PortRange, Protocol, Rule, targets::Targets};

    const HERE: Ipv4Addr = Ipv4Addr::LOCALHOST;
    const ALSO_HERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
    const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

    fn at_port_80(bind: impl Into<IpAddr>) -> Rule {
        let target = SocketAddr::from((HERE, 80));
        Rule::new("r", SocketAddr::new(bind.into(), 80), target.into())
    }

    fn at(ip: impl Into<IpAddr>, port: u16) -> SocketAddr {
        SocketAddr::new(ip.into(), port)
    }

    fn in_force(rules: impl IntoIterator<Item = Rule>) -> (Vec<RuleState>, Listening) {
        let mut listening = Listening::default();
        let states = (0..).zip(rules).map(|(key, rule)| {
            let targets = Targets::new(&rule, |_, _| unreachable!("the rules contain no names"));
            let state = RuleState::new(key, rule, targets, false);
            if let Bind::Ip(ip) = state.rule.bind {
                let PortRange { first, last } = state.rule.ports;
                (first..=last).for_each(|port| listening.add(&state, &ip.at(port).into()));
            }
            state
        });
        (states.collect(), listening)
    }

    struct OneRule(Here, RuleState, Listening);

    impl OneRule {
        fn new(rule: Rule) -> Self {
            let (mut states, listening) = in_force([rule]);
            Self(Here::default(), states.remove(0), listening)
        }

        fn is_refused(&mut self, target: SocketAddr, asked: impl Into<IpAddr>, now: u64) -> bool {
            let Self(here, state, listening) = self;
            here.approach(listening, state, &target.into(), || Some(asked.into()), now).is_err()
        }
    }

    #[test]
    fn listener_of_one_address_is_its_own_target_only_there() {
        let mut rule = OneRule::new(at_port_80(HERE));
        for (target, expected) in [
            (at(HERE, 80), true),
            (at(HERE.to_ipv6_mapped(), 80), true),
            (at(HERE, 81), false),
            (at(ALSO_HERE, 80), false),
            (at(Ipv6Addr::LOCALHOST, 80), false),
        ] {
            assert_eq!(rule.is_refused(target, HERE, 0), expected, "{target}");
        }
        let across = Rule { protocol: Protocol::UdpToTcp { framed: false }, ..at_port_80(HERE) };
        assert!(!OneRule::new(across).is_refused(at(HERE, 80), HERE, 0), "another transport");
        for elsewhere in [
            Rule { mark: Some(7), ..at_port_80(HERE) },
            Rule { device: Some("d".to_owned()), ..at_port_80(HERE) },
        ] {
            assert!(!OneRule::new(elsewhere).is_refused(at(HERE, 80), HERE, 0), "a different routing table");
        }
        let range = Rule { ports: PortRange { first: 80, last: 82 }, ..at_port_80(HERE) };
        assert!(OneRule::new(range).is_refused(at(HERE, 82), HERE, 0));
    }

    #[test]
    fn wildcard_listener_is_its_own_target_at_addresses_used_recently() {
        let mut rule = OneRule::new(at_port_80(Ipv4Addr::UNSPECIFIED));
        assert!(rule.is_refused(at(HERE, 80), HERE, 0));
        // The rule learns its address from its own connection.
        assert!(!rule.is_refused(at(ALSO_HERE, 80), HERE, 0));
        assert!(rule.is_refused(at(ALSO_HERE, 80), ALSO_HERE, 1));
        // A name that has both addresses is also refused.
        assert!(rule.is_refused(at(HERE, 80), ALSO_HERE, 2));
        assert!(rule.is_refused(at(ALSO_HERE, 80), HERE, ASKED_MS + 1));
        assert!(!rule.is_refused(at(ALSO_HERE, 80), HERE, ASKED_MS + 2));
        // TPROXY clients use the address of another machine.
        assert!(!rule.is_refused(at(ELSEWHERE, 80), ELSEWHERE, 0));
    }

    #[test]
    fn ipv6_wildcard_is_its_own_ipv4_target_only_if_dual_stack() {
        for (ipv6_only, expected) in [(true, false), (false, true)] {
            let rule = Rule { ipv6_only, ..at_port_80(Ipv6Addr::UNSPECIFIED) };
            assert_eq!(OneRule::new(rule).is_refused(at(HERE, 80), HERE, 0), expected);
        }
    }

    #[test]
    fn unix_socket_is_its_own_target_by_name() {
        let name = |text: &str| text.parse::<UnixName>().unwrap();
        let rule = Rule { bind: Bind::Unix(name("@own")), ..at_port_80(HERE) };
        let OneRule(mut here, state, listening) = OneRule::new(rule);
        let mut is_refused =
            |target| here.approach(&listening, &state, &Address::Unix(target), || None, 0).is_err();
        assert!(is_refused(name("@own")));
        assert!(!is_refused(name("@other")));
    }

    #[test]
    fn targets_match_listeners_by_address_port_and_transport() {
        let udp = |bind: &str, port| {
            let rule = Rule::new("r", SocketAddr::new(bind.parse().unwrap(), port), at(ELSEWHERE, 9).into());
            Rule { protocol: Protocol::Udp, ..rule }
        };
        let (states, listening) =
            in_force([udp("127.0.0.1", 9), udp("0.0.0.0", 53), udp("127.0.0.1", 54), at_port_80(HERE)]);
        for (target, expected) in [
            ("127.0.0.9:53", true),
            ("[::ffff:127.0.0.9]:53", true),
            ("0.0.0.0:54", true),
            ("127.0.0.9:54", false),
            ("127.0.0.1:80", false),
            ("[::1]:53", false),
            ("192.0.2.1:53", false),
        ] {
            let target: SocketAddr = target.parse().unwrap();
            let leads_here = Here::default().approach(&listening, &states[0], &target.into(), || None, 0);
            assert_eq!(leads_here.ok(), Some(expected), "{target}");
        }
        let to_udp = Rule { protocol: Protocol::TcpToUdp { framed: false }, ..at_port_80(ALSO_HERE) };
        let OneRule(mut here, state, _) = OneRule::new(to_udp);
        assert!(here.approach(&listening, &state, &at(HERE, 54).into(), || None, 0).unwrap());
    }

    #[test]
    fn transparent_datagrams_never_go_to_a_listener_of_this_process() {
        let udp = |bind| Rule { protocol: Protocol::Udp, ..at_port_80(bind) };
        let (states, listening) = in_force([Rule { transparent: true, ..udp(ALSO_HERE) }, udp(HERE)]);
        let approach =
            |target| Here::default().approach(&listening, &states[0], &Address::Ip(target), || None, 0).ok();
        assert_eq!(approach(at(HERE, 80)), None);
        assert_eq!(approach(at(HERE, 81)), Some(false));
        assert_eq!(approach(at(ELSEWHERE, 80)), Some(false));
    }

    #[test]
    fn number_of_remembered_addresses_is_limited() {
        let mut here = Here::default();
        for last in 0..200 {
            here.learn(Some([127, 0, 1, last].into()), 0);
            here.is_local(at([192, 0, 2, last], 80), 0);
        }
        assert_eq!((here.asked.len(), here.asked[0].0), (MOST, IpAddr::from([127, 0, 1, 199])));
        assert_eq!((here.local.len(), here.local[0].0), (MOST, at([192, 0, 2, 199], 0)));
        here.is_local(at(ELSEWHERE, 80), LOCAL_MS);
        assert_eq!(here.local.len(), 1);
    }
}
