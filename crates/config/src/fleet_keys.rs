//! `[fleet]`: settings that make several servers one service.

use turnpike_convert::toml_text::{list, quoted};
use turnpike_fleet::{Entrance, NodeName};
use turnpike_strict::Value;
use turnpike_wire::secret::MASK;

use turnpike_wire::names::server_name;

use super::{
    Secret,
    key::{ValueKind, list_of, named},
};

/// Minimum length in characters. Anyone who can read the store could brute-force a shorter secret.
const SHORTEST_SECRET: usize = 32;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetSettings {
    /// Store URL exactly as configured; `None` without a fleet.
    pub url: Option<Secret>,
    pub secret: Option<Secret>,
    /// Selects one of several fleets in a store.
    pub name: NodeName,
    pub node: Option<NodeName>,
    pub zone: Option<NodeName>,
    pub addresses: Vec<Entrance>,
    /// Listener ports that a load balancer delivers to.
    pub balancer_ports: Vec<u16>,
    /// Name in this node's certificate, sent to TLS clients in redirects.
    pub domain: Option<String>,
    pub redirect: FleetRedirect,
    /// Limit on the allocations of all nodes together; 0 for none.
    pub allocations: u32,
    /// Capacity of this node in bits per second; 0 if unknown.
    pub bits_per_second: u64,
    /// Interval in seconds at which the shared keys are replaced.
    pub key_rotation: u32,
    /// True if allocations are published in coturn's format.
    pub coturn_status: bool,
}

impl Default for FleetSettings {
    fn default() -> Self {
        #[expect(clippy::expect_used, reason = "a test checks that it is valid")]
        let name = "turnpike".parse().expect("a valid name");
        Self {
            url: None,
            secret: None,
            name,
            node: None,
            zone: None,
            addresses: Vec::new(),
            balancer_ports: Vec::new(),
            domain: None,
            redirect: FleetRedirect::Load,
            allocations: 0,
            bits_per_second: 0,
            key_rotation: 86_400,
            coturn_status: false,
        }
    }
}

/// Condition for redirecting clients to another node, or to this node's own address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FleetRedirect {
    /// While this node drains or is full.
    Full,
    /// While this node drains, is full, or is much busier than others.
    Load,
    /// On each new allocation that did not arrive at one of `addresses`, for example because of
    /// anycast.
    Always,
}

pub(super) const URL: ValueKind<Option<Secret>> = ValueKind::one(
    "redis://:PASSWORD@HOST, rediss://..., redis+sentinel://:PASSWORD@HOST,HOST,HOST/MASTER or redis+cluster://:PASSWORD@HOST,HOST, or \"\" for no fleet",
    |reader, node| match &node.value {
        Value::List(lines) if lines.len() == 1 => reader.secret(&lines[0]).map(Some),
        _ => reader.secret(node).map(|url| Some(url).filter(|url| !url.reveal().is_empty())),
    },
    |url| quoted(url.as_ref().map_or("", |_| MASK)),
)
.secret();

pub(super) const SECRET: ValueKind<Option<Secret>> = ValueKind::one(
    "32 characters or more, the same on all nodes, for example from `openssl rand -hex 32`; \"\" without a fleet",
    |reader, node| {
        let secret = match &node.value {
            Value::List(lines) if lines.len() == 1 => reader.secret(&lines[0])?,
            _ => reader.secret(node)?,
        };
        match secret.reveal().chars().count() {
            0 => Some(None),
            SHORTEST_SECRET.. => Some(Some(secret)),
            _ => reader.refuse(node, Some("it is too short".to_owned())),
        }
    },
    |secret| quoted(secret.as_ref().map_or("", |_| MASK)),
)
.secret();

pub(super) const NAME: ValueKind<NodeName> = ValueKind::one(
    "a name of 1 to 64 letters, digits, dots, hyphens and underscores",
    |reader, node| reader.parsed(node, |text| text.parse()),
    |name| quoted(name.as_str()),
);

pub(super) const NAME_OR_NONE: ValueKind<Option<NodeName>> = ValueKind::one(
    "a name of 1 to 64 letters, digits, dots, hyphens and underscores, or \"\"",
    |reader, node| {
        reader.parsed(node, |text| if text.is_empty() { Ok(None) } else { text.parse().map(Some) })
    },
    |name| quoted(name.as_ref().map_or("", NodeName::as_str)),
);

pub(super) const ADDRESSES: ValueKind<Vec<Entrance>> = list_of!(
    "a list of \"udp://ADDR:PORT\", \"tcp://...\", \"tls://...\" and \"dtls://...\" that clients use to reach this node, or [] for those of its listeners",
    |text| text.parse::<Entrance>()
);

/// Listener ports behind a load balancer that rewrites the destination to the node's address.
pub(super) const PORTS: ValueKind<Vec<u16>> = ValueKind::list(
    "a list of listener ports, such as [13478, 15349]",
    |reader, node| reader.list(node, |reader, node| reader.integer(node, &(1..=65_535))),
    |ports| list(ports.iter().map(ToString::to_string)),
);

pub(super) const DOMAIN: ValueKind<Option<String>> = ValueKind::one(
    "the host name in this node's certificate, such as \"turn2.example.org\", or \"\"",
    |reader, node| {
        reader.parsed(node, |text| if text.is_empty() { Ok(None) } else { server_name(text).map(Some) })
    },
    |domain| quoted(domain.as_deref().unwrap_or_default()),
);

pub(super) const REDIRECT: ValueKind<FleetRedirect> = named!(
    "\"full\", \"load\" or \"always\"",
    "full" => FleetRedirect::Full,
    "load" => FleetRedirect::Load,
    "always" => FleetRedirect::Always,
);
