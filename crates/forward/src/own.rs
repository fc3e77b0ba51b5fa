//! Targets that are the rule's own listener. A name may lead anywhere, here too, and then each connection to the target would come in as
//! another one, until no descriptor is left.

use std::{
    io,
    net::{IpAddr, UdpSocket},
};

use crate::{Address, Bind, Protocol, Rule};

/// How long an address counts as ours after somebody has come there, in milliseconds: one day it may be another machine's.
const KNOWN_MS: u64 = 10_000;
/// Addresses that are known at a time.
const MOST: usize = 64;

/// The addresses at which clients have come to a worker lately, and when; for listeners of all addresses.
#[derive(Default)]
pub(crate) struct Own(Vec<(IpAddr, u64)>);

impl Own {
    /// Whether a rule may connect to a target: not where it listens itself, which is told as a target that cannot be reached. `asked` is
    /// the address that the client came to. Who listens at several addresses connects to another one of them once, sees somebody come
    /// there, and does not do it again.
    ///
    /// Of rules that lead to each other nothing is known here: a chain of rules looks the same.
    pub(crate) fn check(
        &mut self,
        rule: &Rule,
        target: &Address,
        asked: impl FnOnce() -> Option<IpAddr>,
        now: u64,
    ) -> io::Result<()> {
        let is_own = match (&rule.bind, target) {
            (Bind::Unix(own), Address::Unix(target)) => own == target,
            (Bind::Ip(own), Address::Ip(target)) if may_lead_back(rule, target.port()) => {
                let (own, target) = (own.ip().to_canonical(), target.ip().to_canonical());
                if own.is_unspecified() {
                    let is_heard = own.is_ipv4() == target.is_ipv4() || own.is_ipv6() && !rule.ipv6_only;
                    self.learn(asked().map(|asked| asked.to_canonical()), now);
                    is_heard && self.0.iter().any(|(known, _)| *known == target) && is_here(target)
                } else {
                    own == target && is_here(target)
                }
            }
            _ => false,
        };
        if is_own {
            return Err(io::Error::new(io::ErrorKind::HostUnreachable, "the rule itself listens there"));
        }
        Ok(())
    }

    /// Takes an address as ours, and forgets those that were so long ago.
    fn learn(&mut self, asked: Option<IpAddr>, now: u64) {
        self.0.retain(|(known, since)| Some(*known) != asked && now.saturating_sub(*since) < KNOWN_MS);
        if let Some(asked) = asked {
            self.0.truncate(MOST - 1);
            self.0.insert(0, (asked, now));
        }
    }
}

/// Whether whoever connects to such a port may come back to the rule. By another table of routes the same address may be somebody else's.
fn may_lead_back(rule: &Rule, port: u16) -> bool {
    (rule.ports.first..=rule.ports.last).contains(&port)
        && matches!(rule.protocol, Protocol::Tcp | Protocol::Udp)
        && rule.mark.is_none()
        && rule.device.is_none()
}

/// Whether an address is this machine's: one that was asked need not be, where connections to others are led here (TPROXY).
fn is_here(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

    use turnpike_net::UnixName;

    use super::*;
    use crate::PortRange;

    const HERE: Ipv4Addr = Ipv4Addr::LOCALHOST;
    const ALSO_HERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
    const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

    fn listening(bind: impl Into<IpAddr>) -> Rule {
        let target = SocketAddr::from((HERE, 80));
        Rule::new("r", SocketAddr::new(bind.into(), 80), target.into())
    }

    fn at(ip: impl Into<IpAddr>, port: u16) -> Address {
        SocketAddr::new(ip.into(), port).into()
    }

    fn leads_back(own: &mut Own, rule: &Rule, target: Address, asked: impl Into<IpAddr>, now: u64) -> bool {
        own.check(rule, &target, || Some(asked.into()), now).is_err()
    }

    #[test]
    fn a_listener_of_one_address_is_its_own_target_there_and_nowhere_else() {
        let (mut own, rule) = (Own::default(), listening(HERE));
        for (target, expected) in [
            (at(HERE, 80), true),
            (at(HERE.to_ipv6_mapped(), 80), true),
            (at(HERE, 81), false),
            (at(ALSO_HERE, 80), false),
            (at(Ipv6Addr::LOCALHOST, 80), false),
        ] {
            assert_eq!(leads_back(&mut own, &rule, target.clone(), HERE, 0), expected, "{target}");
        }
        let across = Rule { protocol: Protocol::UdpToTcp { framed: false }, ..listening(HERE) };
        assert!(!leads_back(&mut own, &across, at(HERE, 80), HERE, 0), "another transport");
        for elsewhere in [
            Rule { mark: Some(7), ..listening(HERE) },
            Rule { device: Some("d".to_owned()), ..listening(HERE) },
        ] {
            assert!(!leads_back(&mut own, &elsewhere, at(HERE, 80), HERE, 0), "another table of routes");
        }
        let range = Rule { ports: PortRange { first: 80, last: 82 }, ..listening(HERE) };
        assert!(leads_back(&mut own, &range, at(HERE, 82), HERE, 0));
    }

    #[test]
    fn a_listener_of_all_addresses_is_its_own_target_where_somebody_has_come_lately() {
        let (mut own, rule) = (Own::default(), listening(Ipv4Addr::UNSPECIFIED));
        assert!(leads_back(&mut own, &rule, at(HERE, 80), HERE, 0));
        // That it is ours is learned from the connection that we make.
        assert!(!leads_back(&mut own, &rule, at(ALSO_HERE, 80), HERE, 0));
        assert!(leads_back(&mut own, &rule, at(ALSO_HERE, 80), ALSO_HERE, 1));
        // And a name that leads to both is no way around it.
        assert!(leads_back(&mut own, &rule, at(HERE, 80), ALSO_HERE, 2));
        assert!(leads_back(&mut own, &rule, at(ALSO_HERE, 80), HERE, KNOWN_MS + 1));
        assert!(!leads_back(&mut own, &rule, at(ALSO_HERE, 80), HERE, KNOWN_MS + 2));
        // A client that was led here from another machine's address makes it none of ours.
        assert!(!leads_back(&mut own, &rule, at(ELSEWHERE, 80), ELSEWHERE, 0));
    }

    #[test]
    fn a_listener_of_all_addresses_of_ipv6_is_the_target_of_ipv4_only_with_both_families() {
        for (ipv6_only, expected) in [(true, false), (false, true)] {
            let rule = Rule { ipv6_only, ..listening(Ipv6Addr::UNSPECIFIED) };
            assert_eq!(leads_back(&mut Own::default(), &rule, at(HERE, 80), HERE, 0), expected);
        }
    }

    #[test]
    fn a_unix_socket_is_its_own_target_by_its_name() {
        let name = |text: &str| UnixName::new(text).unwrap();
        let rule = Rule { bind: Bind::Unix(name("@own")), ..listening(HERE) };
        let check = |target| Own::default().check(&rule, &Address::Unix(target), || None, 0);
        assert!(check(name("@own")).is_err());
        assert!(check(name("@other")).is_ok());
    }

    #[test]
    fn no_more_addresses_are_known_than_the_limit() {
        let mut own = Own::default();
        for last in 0..200 {
            own.learn(Some([127, 0, 1, last].into()), 0);
        }
        assert_eq!((own.0.len(), own.0[0].0), (MOST, IpAddr::from([127, 0, 1, 199])));
    }
}
