//! Data that a node publishes: its [`Card`] once per process, and its load with each [`Beat`].

use std::{fmt, net::SocketAddr, str::FromStr};

use serde::{Deserialize, Serialize};
use turnpike_turn::server::Transport;

/// Maximum number of nodes in a fleet: CONNECTION-IDs and tickets hold a node number in 12 bits, and 0 means
/// none.
pub const MOST_NODES: u16 = 4095;

/// Name of a node: 1 to 64 letters, digits, `.`, `_` and `-`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NodeName(Box<str>);

impl NodeName {
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for NodeName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if (1..=64).contains(&text.len()) && text.bytes().all(fits) {
            Ok(Self(text.into()))
        } else {
            Err("a name must be 1 to 64 letters, digits, dots, hyphens or underscores")
        }
    }
}

impl TryFrom<String> for NodeName {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<NodeName> for String {
    fn from(name: NodeName) -> Self {
        name.0.into_string()
    }
}

/// Public address and transport at which clients reach a node, such as `tls://203.0.113.5:5349`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Entrance {
    /// Transport between client and server.
    pub transport: Transport,
    /// Public address.
    pub address: SocketAddr,
}

impl fmt::Display for Entrance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", <&str>::from(self.transport), self.address)
    }
}

impl FromStr for Entrance {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let expected = "expected an address such as udp://203.0.113.5:3478, with udp, tcp, tls or dtls";
        let (transport, address) = text.trim().split_once("://").ok_or(expected)?;
        let transport = transport.parse().map_err(|_| expected)?;
        let address: SocketAddr = address.parse().map_err(|_| expected)?;
        if address.port() == 0 || address.ip().is_unspecified() || address.ip().is_multicast() {
            return Err("clients cannot connect to this address");
        }
        Ok(Self { transport, address })
    }
}

impl TryFrom<String> for Entrance {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Entrance> for String {
    fn from(entrance: Entrance) -> Self {
        entrance.to_string()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    pub name: NodeName,
    /// Random number that distinguishes processes with the same name.
    pub incarnation: u64,
    /// Name of the zone; may be empty. Nodes in one zone are near each other.
    #[serde(default)]
    pub zone: String,
    pub version: String,
    pub entrances: Vec<Entrance>,
    /// Name in the node's certificate. Redirects include it for TLS and DTLS clients.
    #[serde(default)]
    pub domain: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    pub allocations: u32,
    /// Maximum allocations.
    pub most_allocations: u32,
    /// Relayed payload in bits per second, both directions together.
    pub bits_per_second: u64,
    /// Configured capacity in bits per second; 0 if not configured.
    pub most_bits_per_second: u64,
    /// Recent CPU use of the busiest worker in thousandths of a core.
    pub cpu: u16,
    pub ports_left: u32,
    pub ports: u32,
}

impl Load {
    /// The highest utilization among allocations, traffic, relay ports and CPU: 0 is idle, 1 is full.
    #[must_use]
    pub fn busy(&self) -> f64 {
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        #[expect(clippy::cast_precision_loss, reason = "a share needs no more than 52 bits")]
        let traffic = share(self.bits_per_second as f64, self.most_bits_per_second as f64);
        let allocations = share(self.allocations.into(), self.most_allocations.into());
        let ports = share(self.ports.saturating_sub(self.ports_left).into(), self.ports.into());
        allocations.max(traffic).max(ports).max(f64::from(self.cpu) / 1000.0)
    }

    #[must_use]
    pub fn is_nearly_full(&self) -> bool {
        let most = if self.ports > 0 { self.most_allocations.min(self.ports) } else { self.most_allocations };
        most > 0 && most.saturating_sub(self.allocations) <= most / 50
    }

    #[must_use]
    pub fn is_full(&self) -> bool {
        self.allocations >= self.most_allocations || (self.ports > 0 && self.ports_left == 0)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beat {
    /// Number from 1 to [`MOST_NODES`] that the store assigns, for CONNECTION-IDs and tickets.
    pub number: u16,
    /// Same as in the node's card.
    pub incarnation: u64,
    pub draining: bool,
    pub load: Load,
}

impl Beat {
    /// Rest of the record. The store prepends number and incarnation, because it assigns the number.
    #[must_use]
    pub fn rest(draining: bool, load: &Load) -> String {
        let Load {
            allocations,
            most_allocations,
            bits_per_second,
            most_bits_per_second,
            cpu,
            ports_left,
            ports,
        } = load;
        format!(
            "{} {allocations} {most_allocations} {bits_per_second} {most_bits_per_second} {cpu} {ports_left} {ports}",
            u8::from(draining)
        )
    }
}

/// Parses the store's format: number, incarnation, [`Beat::rest`]. Additional fields from newer versions are
/// ignored.
impl FromStr for Beat {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut fields = text.split(' ');
        let mut next = || fields.next().ok_or(());
        let number = next()?.parse().map_err(drop)?;
        if !(1..=MOST_NODES).contains(&number) {
            return Err(());
        }
        let incarnation = u64::from_str_radix(next()?, 16).map_err(drop)?;
        let draining = next()? != "0";
        let load = Load {
            allocations: next()?.parse().map_err(drop)?,
            most_allocations: next()?.parse().map_err(drop)?,
            bits_per_second: next()?.parse().map_err(drop)?,
            most_bits_per_second: next()?.parse().map_err(drop)?,
            cpu: next()?.parse().map_err(drop)?,
            ports_left: next()?.parse().map_err(drop)?,
            ports: next()?.parse().map_err(drop)?,
        };
        Ok(Self { number, incarnation, draining, load })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn load_is_the_highest_of_the_four_utilizations() {
        let idle = Load { most_allocations: 100, ports: 1000, ports_left: 1000, ..Load::default() };
        assert!(idle.busy().abs() < 1e-9);
        for (load, busy) in [
            (Load { allocations: 50, ..idle }, 0.5),
            (Load { bits_per_second: 7, most_bits_per_second: 10, ..idle }, 0.7),
            (Load { bits_per_second: 7, ..idle }, 0.0),
            (Load { cpu: 900, allocations: 50, ..idle }, 0.9),
            (Load { ports_left: 750, ..idle }, 0.25),
        ] {
            assert!((load.busy() - busy).abs() < 1e-9, "{load:?}");
            assert!(!load.is_full());
        }
        for (most_allocations, ports, allocations, nearly) in [
            (100, 1000, 97, false),
            (100, 1000, 98, true),
            (100, 50, 48, false),
            (100, 50, 49, true),
            (20, 0, 19, false),
        ] {
            let load = Load { allocations, most_allocations, ports, ports_left: ports, ..Load::default() };
            assert_eq!(load.is_nearly_full(), nearly, "{load:?}");
        }
        assert!(Load { allocations: 100, ..idle }.is_full());
        assert!(Load { ports_left: 0, ..idle }.is_full());
        assert!(Load::default().is_full(), "no capacity means full");
    }

    #[test]
    fn names_and_addresses_round_trip() {
        for name in ["a", "turn-1.eu_west", &"x".repeat(64)] {
            assert_eq!(name.parse::<NodeName>().unwrap().to_string(), name);
        }
        for bad in ["", "a b", "a/b", "ü", &"x".repeat(65)] {
            assert!(bad.parse::<NodeName>().is_err(), "{bad}");
        }
        for text in ["udp://203.0.113.5:3478", "tls://[2001:db8::5]:5349"] {
            assert_eq!(text.parse::<Entrance>().unwrap().to_string(), text);
        }
        for bad in [
            "203.0.113.5:3478",
            "quic://203.0.113.5:1",
            "udp://0.0.0.0:3478",
            "udp://203.0.113.5:0",
            "udp://a:1",
        ] {
            assert!(bad.parse::<Entrance>().is_err(), "{bad}");
        }
    }

    #[test]
    fn card_round_trips() {
        let card = Card {
            name: "a".parse().unwrap(),
            incarnation: u64::MAX,
            zone: "west".to_owned(),
            version: "0.1.0".to_owned(),
            entrances: vec!["udp://203.0.113.5:3478".parse().unwrap()],
            domain: None,
        };
        let text = serde_json::to_string(&card).unwrap();
        assert_eq!(serde_json::from_str::<Card>(&text).unwrap(), card);
        assert!(serde_json::from_str::<Card>(&text.replace("\"a\"", "\"a b\"")).is_err());
    }

    proptest! {
        #[test]
        fn heartbeat_round_trips(
            number in 1..=MOST_NODES, incarnation: u64, draining: bool,
            allocations: u32, bits_per_second: u64, cpu in 0_u16..=1000, ports_left: u32,
        ) {
            let load = Load {
                allocations, most_allocations: 7, bits_per_second, most_bits_per_second: 9, cpu, ports_left, ports: 8,
            };
            let beat = Beat { number, incarnation, draining, load };
            let text = format!("{number} {incarnation:x} {}", Beat::rest(draining, &load));
            prop_assert_eq!(text.parse(), Ok(beat));
            prop_assert_eq!(format!("{text} 7 x").parse(), Ok(beat));
        }

        #[test]
        fn parser_rejects_invalid_text_without_panic(text in "\\PC{0,60}") {
            let _ = text.parse::<Beat>();
            let _ = text.parse::<Entrance>();
            let _ = text.parse::<NodeName>();
        }
    }
}
