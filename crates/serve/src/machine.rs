//! Addresses of this machine: detected relay addresses, configured ones that are absent, and lost ones,
//! whose allocations are ended.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    net::IpAddr,
    time::{Duration, Instant, SystemTime},
};

use turnpike_relay::{
    Config, RelayAddress, RelayState, interface_of_route, relay_address_remedy, route_addresses,
};

use crate::own_addresses::{self, OwnAddress, can_bind};

/// Time that a lost address may be absent before its allocations end: long enough for a DHCP lease or a VRRP
/// election, but shorter than clients wait.
const GRACE: Duration = Duration::from_secs(60);

pub(crate) struct Machine {
    /// Addresses of this machine; `None` if they cannot be read. All configured addresses are then assumed
    /// to be present.
    own: Option<Vec<OwnAddress>>,
    /// Detected IPv4 and IPv6 addresses. An address stays here until another one replaces it.
    detected: [Option<IpAddr>; 2],
    /// True once there has been a default route. Until then, any address of the machine is used.
    had_route: bool,
    displaced: BTreeSet<IpAddr>,
    stale: bool,
    /// True if the addresses last read have not been applied yet.
    is_retried: bool,
    gone: BTreeMap<IpAddr, MissingAddress>,
    were_up: BTreeSet<IpAddr>,
    states: Vec<RelayState>,
    complaint: Option<String>,
}

enum MissingAddress {
    Since(Instant),
    Ended,
}

impl Machine {
    /// Reads the addresses. `before` are the relay addresses of the previous process.
    pub(crate) fn find(before: &[RelayAddress]) -> Self {
        let of =
            |v4: bool| before.iter().map(|it| it.bind).find(|ip| ip.is_ipv4() == v4 && !ip.is_loopback());
        let mut machine = Self {
            own: None,
            detected: [true, false].map(of),
            had_route: false,
            displaced: BTreeSet::new(),
            stale: false,
            is_retried: false,
            gone: BTreeMap::new(),
            were_up: BTreeSet::new(),
            states: Vec::new(),
            complaint: None,
        };
        match own_addresses::read() {
            Ok(own) => machine.own = Some(own),
            Err(error) => tracing::warn!(
                "cannot read the addresses of this machine ({error}): only loopback, relay addresses and \
                 turnpike's own listeners are refused as peers, so clients can reach other services on this machine; allow AF_NETLINK sockets"
            ),
        }
        machine.detect();
        machine
    }

    pub(crate) fn may_have_changed(&mut self) {
        self.stale = true;
    }

    /// Reads the addresses again if requested; returns true if there are changes to apply.
    pub(crate) fn reread(&mut self) -> bool {
        let is_retried = std::mem::take(&mut self.is_retried);
        if !std::mem::take(&mut self.stale) {
            return is_retried;
        }
        let own = match own_addresses::read() {
            Ok(own) => own,
            Err(error) => {
                // Retried at the next notification, or after a second.
                self.stale = true;
                tracing::debug!("cannot read the addresses of this machine: {error}");
                return is_retried;
            }
        };
        let before_own = self.own.replace(own);
        let detected = self.detected;
        self.detect();
        let (before, now) = (set_of(before_own.as_deref()), set_of(self.own.as_deref()));
        let named = |of: &BTreeSet<IpAddr>, other: &BTreeSet<IpAddr>| {
            of.difference(other).map(ToString::to_string).collect::<Vec<_>>().join(", ")
        };
        if before != now {
            let (added, removed) = (named(&now, &before), named(&before, &now));
            tracing::info!(added, removed, "the addresses of this machine have changed");
        }
        // An unchanged address may have become usable, for example a tentative one.
        is_retried || before_own != self.own || detected != self.detected
    }

    fn detect(&mut self) {
        let own = self.own.as_deref().unwrap_or_default();
        let sources = route_addresses();
        self.had_route |= !sources.is_empty();
        for (detected, v4) in self.detected.iter_mut().zip([true, false]) {
            let source = sources.iter().copied().find(|ip| ip.is_ipv4() == v4);
            let chosen = if self.had_route {
                own_addresses::choose(source, own)
            } else {
                own_addresses::choose_without_route(v4, own)
            };
            let before = *detected;
            *detected = chosen.or(before);
            if *detected != before {
                self.displaced.extend(before);
            }
        }
    }

    /// Detected relay addresses, at most one of each family.
    pub(crate) fn detected(&self) -> Vec<IpAddr> {
        self.detected.iter().flatten().copied().collect()
    }

    pub(crate) fn had_route(&self) -> bool {
        self.had_route
    }

    pub(crate) fn all(&self) -> Vec<IpAddr> {
        set_of(self.own.as_deref()).into_iter().collect()
    }

    /// Configured addresses that the machine lacks. Leaves out swapped bind/external pairs, which are
    /// configuration errors that abort startup.
    pub(crate) fn absent(&self, named: impl Iterator<Item = IpAddr>, relay: &[RelayAddress]) -> Vec<IpAddr> {
        let is_swapped = |ip: IpAddr| {
            let pair = relay.iter().find(|relay| relay.bind == ip);
            let external = pair.and_then(|relay| relay.external);
            external.is_some_and(|external| self.has(external)) && !can_bind(ip)
        };
        let absent: BTreeSet<IpAddr> = named.filter(|ip| !self.has(*ip) && !is_swapped(*ip)).collect();
        absent.into_iter().collect()
    }

    fn has(&self, ip: IpAddr) -> bool {
        self.own.as_deref().is_none_or(|own| own_addresses::has(own, ip))
    }

    /// Records the addresses now in effect, and logs changes except at startup.
    pub(crate) fn put_into_force(&mut self, config: &Config) {
        self.complaint = None;
        let before = std::mem::take(&mut self.states);
        let now = SystemTime::now();
        for address in &config.relay {
            let is_up = !config.absent.contains(&address.bind);
            let known = before.iter().find(|state| state.address == *address);
            let since = known.filter(|state| state.is_up == is_up).map_or(now, |state| state.since);
            self.states.push(RelayState { address: *address, is_up, since });
            self.were_up.extend(is_up.then_some(address.bind));
            if before.is_empty() {
                continue;
            }
            let ip = address.bind;
            match (known.map(|state| state.is_up), is_up) {
                (None | Some(false), true) => tracing::info!("relaying on {ip}"),
                (Some(true), false) => tracing::warn!(
                    "relay address {ip} is gone from this machine: new allocations there get 508, and its allocations end in {} s unless it returns",
                    GRACE.as_secs()
                ),
                (None, false) => tracing::warn!("{}", absent(address)),
                _ => {}
            }
        }
        for RelayState { address, .. } in before {
            if !config.relay.contains(&address) {
                tracing::info!(
                    "no longer relaying on {}: its allocations continue as long as the machine has the address",
                    address.bind
                );
            }
        }
    }

    /// Logs once that the addresses could not be applied, and retries.
    pub(crate) fn not_in_force(&mut self, error: &impl Display) {
        let complaint = Some(error.to_string());
        if self.complaint != complaint {
            tracing::error!("cannot apply the changed addresses of this machine: {error}; retrying");
            self.complaint = complaint;
        }
        self.is_retried = true;
    }

    pub(crate) fn states(&self) -> &[RelayState] {
        &self.states
    }

    /// Relay addresses whose allocations must end, because the address has been missing, or has not been
    /// routed through its interface, for a minute.
    pub(crate) fn lost(&mut self, relayed: &[RelayAddress], now: Instant) -> Vec<IpAddr> {
        let missing: BTreeSet<IpAddr> =
            relayed.iter().map(|relay| relay.bind).filter(|ip| !self.serves(*ip)).collect();
        self.gone.retain(|ip, _| missing.contains(ip));
        let mut lost = Vec::new();
        for ip in missing {
            let gone = self.gone.entry(ip).or_insert(MissingAddress::Since(now));
            if let MissingAddress::Since(since) = gone
                && now.duration_since(*since) >= GRACE
            {
                *gone = MissingAddress::Ended;
                if self.were_up.contains(&ip) {
                    tracing::warn!(
                        "relay address {ip} has been gone for {} s: ending its allocations",
                        GRACE.as_secs()
                    );
                }
                lost.push(ip);
            }
        }
        lost
    }

    fn serves(&self, ip: IpAddr) -> bool {
        if !self.has(ip) {
            return false;
        }
        // A configured address is never considered displaced.
        if !self.displaced.contains(&ip) || self.states.iter().any(|state| state.address.bind == ip) {
            return true;
        }
        let own = self.own.iter().flatten().find(|address| address.ip == ip);
        own.is_none_or(|own| interface_of_route(ip).is_none_or(|interface| interface == own.interface))
    }
}

fn set_of(own: Option<&[OwnAddress]>) -> BTreeSet<IpAddr> {
    own.unwrap_or_default().iter().map(|address| address.ip).collect()
}

pub(crate) fn absent(address: &RelayAddress) -> String {
    let remedy = relay_address_remedy(address);
    format!("this machine does not have the relay address {}: waiting for it; {remedy}", address.bind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::own_addresses::AddressRank;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 1));
    const GONE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 2));

    fn relay(bind: IpAddr, external: Option<IpAddr>) -> RelayAddress {
        RelayAddress { bind, external }
    }

    fn own(ip: IpAddr) -> OwnAddress {
        OwnAddress { ip, interface: "eth0".to_owned(), prefix: 24, standing: AddressRank::Stable }
    }

    fn machine(own: Option<Vec<OwnAddress>>) -> Machine {
        Machine { own, ..Machine::find(&[]) }
    }

    #[test]
    fn allocations_end_only_once_after_a_minute_without_their_address() {
        let relayed = [relay(HERE, None), relay(GONE, None)];
        let mut machine = machine(Some(vec![own(HERE)]));
        let begun = Instant::now();
        let after = |seconds| begun + Duration::from_secs(seconds);
        let mut lost = |seconds| machine.lost(&relayed, after(seconds));
        let ended = [0, 59, 60, 61, 600].map(|seconds| lost(seconds).len());
        assert_eq!(ended, [0, 0, 1, 0, 0]);
    }

    #[test]
    fn an_address_that_returns_within_a_minute_keeps_its_allocations() {
        let relayed = [relay(GONE, None)];
        let mut machine = machine(Some(vec![own(HERE)]));
        let begun = Instant::now();
        let after = |seconds| begun + Duration::from_secs(seconds);
        assert!(machine.lost(&relayed, after(0)).is_empty());
        machine.own = Some(vec![own(GONE)]);
        assert!(machine.lost(&relayed, after(50)).is_empty());
        machine.own = Some(vec![own(HERE)]);
        assert!(machine.lost(&relayed, after(70)).is_empty(), "a new minute begins");
        assert!(machine.lost(&relayed, after(129)).is_empty());
        assert_eq!(machine.lost(&relayed, after(130)), [GONE]);
    }

    #[test]
    fn absent_addresses_are_awaited_except_in_swapped_pairs() {
        let machine = machine(Some(vec![own(HERE)]));
        let named = [HERE, GONE, IpAddr::from([127, 0, 0, 9]), IpAddr::from([0, 0, 0, 0])];
        assert_eq!(machine.absent(named.into_iter(), &[relay(GONE, None)]), [GONE]);
        assert_eq!(machine.absent(named.into_iter(), &[relay(GONE, Some(HERE))]), [] as [IpAddr; 0]);
        let unknown = self::machine(None);
        assert_eq!(unknown.absent(named.into_iter(), &[]), [] as [IpAddr; 0]);
    }

    #[test]
    fn each_address_has_the_time_of_its_last_state_change() {
        let mut machine = machine(Some(vec![own(HERE)]));
        let config = |absent: &[IpAddr]| Config {
            relay: vec![relay(HERE, None), relay(GONE, None)],
            absent: absent.to_vec(),
            ..Config::default()
        };
        machine.put_into_force(&config(&[GONE]));
        let long_ago = SystemTime::UNIX_EPOCH;
        machine.states.iter_mut().for_each(|state| state.since = long_ago);
        machine.put_into_force(&config(&[GONE]));
        assert!(machine.states().iter().all(|state| state.since == long_ago));
        machine.put_into_force(&config(&[]));
        let states: Vec<_> = machine.states().iter().map(|it| (it.is_up, it.since == long_ago)).collect();
        assert_eq!(states, [(true, true), (true, false)]);
    }
}
