//! Inbound ports that a firewall must open, in the syntax of several firewalls.

mod cloud;
mod host;

use std::{fmt, net::IpAddr, ops::RangeInclusive};

use strum::{EnumString, IntoStaticStr, VariantArray};
use turnpike_rules::{Bind, Protocol, Rule};

use crate::{AdminSettings, RelayPlace, Settings, forward::ForwardSettings};

#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum FirewallFormat {
    /// File for `nft -f` with a separate chain, to which the chain that drops packets must jump.
    Nftables,
    /// Shell script of iptables and ip6tables commands with a separate chain.
    Iptables,
    /// Commands for Ubuntu's ufw.
    Ufw,
    Aws,
    Gcp,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Firewall {
    openings: Vec<FirewallOpening>,
    notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct FirewallOpening {
    transport: FirewallProtocol,
    place: FirewallTarget,
    ports: RangeInclusive<u16>,
    what: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
enum FirewallProtocol {
    Udp,
    Tcp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FirewallTarget {
    All,
    AllV4,
    AllV6,
    One(IpAddr),
}

const PEERS: &str = "peers, to relayed addresses";
const CLIENTS: &str = "clients";

impl Firewall {
    /// Relay ports are opened on all addresses if the relay addresses are detected at startup.
    #[must_use]
    pub fn of_server(settings: &Settings) -> Self {
        let mut all = Self::default();
        for at in &settings.listen {
            if settings.udp {
                all.open(FirewallProtocol::Udp, at.ip(), at.port()..=at.port(), CLIENTS);
            }
            if settings.tcp {
                all.open(FirewallProtocol::Tcp, at.ip(), at.port()..=at.port(), CLIENTS);
            }
        }
        for at in &settings.tls.listen {
            all.open(FirewallProtocol::Tcp, at.ip(), at.port()..=at.port(), "clients over TLS");
        }
        for at in &settings.dtls.listen {
            all.open(FirewallProtocol::Udp, at.ip(), at.port()..=at.port(), "clients over DTLS");
        }
        for at in &settings.credentials.listen {
            all.open(FirewallProtocol::Tcp, at.ip(), at.port()..=at.port(), "applications, for credentials");
        }
        for at in settings.http_challenge_listeners() {
            all.open(FirewallProtocol::Tcp, at.ip(), at.port()..=at.port(), "certificate authority");
        }
        for address in &settings.discovery.addresses {
            for port in settings.discovery.ports {
                all.open(FirewallProtocol::Udp, address.bind, port..=port, "NAT behavior discovery");
            }
        }
        let relay: Vec<FirewallTarget> = match &settings.relay.addresses[..] {
            _ if settings.stun_only => Vec::new(),
            [] => vec![FirewallTarget::All],
            places => places
                .iter()
                .map(|place| match place {
                    RelayPlace::At(address) => FirewallTarget::of(address.bind),
                    RelayPlace::Behind(external) if external.is_ipv4() => FirewallTarget::AllV4,
                    RelayPlace::Behind(_) => FirewallTarget::AllV6,
                    RelayPlace::Detected => FirewallTarget::All,
                })
                .collect(),
        };
        let transports = if settings.relay.tcp {
            &[FirewallProtocol::Udp, FirewallProtocol::Tcp][..]
        } else {
            &[FirewallProtocol::Udp]
        };
        for transport in transports {
            for place in &relay {
                all.add(*transport, *place, settings.relay.ports.clone(), PEERS);
            }
        }
        all.leave_admin_closed(&settings.admin);
        all
    }

    #[must_use]
    pub fn of_forwarder(settings: &ForwardSettings) -> Self {
        let mut all = Self::default();
        for rule in &settings.rules {
            all.open_rule(rule);
        }
        all.leave_admin_closed(&settings.admin);
        all
    }

    #[must_use]
    pub fn show(&self, format: FirewallFormat) -> String {
        match format {
            FirewallFormat::Nftables => host::nftables(self),
            FirewallFormat::Iptables => host::iptables(self),
            FirewallFormat::Ufw => host::ufw(self),
            FirewallFormat::Aws => cloud::aws(self),
            FirewallFormat::Gcp => cloud::gcp(self),
        }
    }

    fn open_rule(&mut self, rule: &Rule) {
        let what = format!("rule {}", rule.id.0);
        let ip = match &rule.bind {
            Bind::Ip(ip) => ip.ip(),
            Bind::Name(name) => {
                return self
                    .notes
                    .push(format!("{what} listens on the host name {name}: open its ports yourself"));
            }
            Bind::Unix(name) => return self.notes.push(format!("unix:{name}: nothing to open ({what})")),
        };
        let transport = match rule.protocol {
            Protocol::Tcp | Protocol::TcpToUdp { .. } => FirewallProtocol::Tcp,
            Protocol::Udp | Protocol::UdpToTcp { .. } => FirewallProtocol::Udp,
        };
        let ports = rule.ports.first..=rule.ports.last;
        let families_share = ip.is_ipv6() && ip.is_unspecified() && !rule.ipv6_only;
        if families_share {
            self.add(transport, FirewallTarget::All, ports, &what);
        } else {
            self.open(transport, ip, ports, &what);
        }
    }

    fn open(&mut self, transport: FirewallProtocol, ip: IpAddr, ports: RangeInclusive<u16>, what: &str) {
        if ip.is_loopback() {
            let opening =
                FirewallOpening { transport, place: FirewallTarget::of(ip), ports, what: what.to_owned() };
            self.notes.push(format!("{opening} is on loopback and does not need to be opened"));
        } else {
            self.add(transport, FirewallTarget::of(ip), ports, what);
        }
    }

    /// Skips ports that are already open, and merges wildcards of both families.
    fn add(
        &mut self,
        transport: FirewallProtocol,
        place: FirewallTarget,
        ports: RangeInclusive<u16>,
        what: &str,
    ) {
        let same = self.openings.iter_mut().find(|known| {
            known.transport == transport && known.ports == ports && known.place.with(place).is_some()
        });
        match same {
            Some(known) => {
                known.place = known.place.with(place).unwrap_or(known.place);
                if known.what != what && !known.what.split(", ").any(|one| one == what) {
                    known.what = format!("{}, {what}", known.what);
                }
            }
            None => self.openings.push(FirewallOpening { transport, place, ports, what: what.to_owned() }),
        }
    }

    fn leave_admin_closed(&mut self, admin: &AdminSettings) {
        for at in admin.tcp().filter(|at| !at.ip().to_canonical().is_loopback()) {
            self.notes.push(format!(
                "tcp {at}, the admin interface, stays closed: allow only the addresses of its users"
            ));
        }
    }
}

impl FirewallTarget {
    fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(ip) if ip.is_unspecified() => Self::AllV4,
            IpAddr::V6(ip) if ip.is_unspecified() => Self::AllV6,
            ip => Self::One(ip),
        }
    }

    /// Returns a single place that covers both, if there is one.
    fn with(self, other: Self) -> Option<Self> {
        match (self, other) {
            (one, other) if one == other => Some(one),
            (Self::All, Self::AllV4 | Self::AllV6) | (Self::AllV4 | Self::AllV6, Self::All) => {
                Some(Self::All)
            }
            (Self::AllV4, Self::AllV6) | (Self::AllV6, Self::AllV4) => Some(Self::All),
            (all @ (Self::All | Self::AllV4), Self::One(IpAddr::V4(_)))
            | (Self::One(IpAddr::V4(_)), all @ (Self::All | Self::AllV4))
            | (all @ (Self::All | Self::AllV6), Self::One(IpAddr::V6(_)))
            | (Self::One(IpAddr::V6(_)), all @ (Self::All | Self::AllV6)) => Some(all),
            _ => None,
        }
    }

    fn has_v4(self) -> bool {
        matches!(self, Self::All | Self::AllV4 | Self::One(IpAddr::V4(_)))
    }

    fn has_v6(self) -> bool {
        matches!(self, Self::All | Self::AllV6 | Self::One(IpAddr::V6(_)))
    }

    fn address(self) -> Option<IpAddr> {
        match self {
            Self::One(ip) => Some(ip),
            _ => None,
        }
    }
}

impl FirewallOpening {
    fn ports(&self, between: &str) -> String {
        match (self.ports.start(), self.ports.end()) {
            (first, last) if first == last => first.to_string(),
            (first, last) => format!("{first}{between}{last}"),
        }
    }
}

impl fmt::Display for FirewallOpening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let transport: &str = self.transport.into();
        let ports = self.ports("-");
        match self.place {
            FirewallTarget::One(IpAddr::V4(ip)) => write!(f, "{transport} {ip}:{ports}"),
            FirewallTarget::One(IpAddr::V6(ip)) => write!(f, "{transport} [{ip}]:{ports}"),
            _ => write!(f, "{transport} port {ports}"),
        }?;
        write!(f, " ({})", self.what)
    }
}

/// Makes text from the configuration safe in a comment of any of these formats.
fn plain(text: &str) -> String {
    const MOST: usize = 100;
    let harmless = |c: char| c.is_ascii_alphanumeric() || " ,.:/-_()[]+@".contains(c);
    text.chars().take(MOST).map(|c| if harmless(c) { c } else { '_' }).collect()
}

#[cfg(test)]
mod tests;
