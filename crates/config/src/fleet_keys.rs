//! `[fleet]`: what makes several servers one service.

use turnpike_convert::toml_text::{list, quoted};
use turnpike_fleet::{Entrance, NodeName};
use turnpike_strict::Value;

use turnpike_wire::names::server_name;

use super::{
    Secret,
    key::{Kind, list_of, named},
    secret::MASK,
};

/// Characters that a secret has at least: who can read the store could try all shorter ones.
const SHORTEST_SECRET: usize = 32;

/// Settings of a fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetSettings {
    /// Where the store is, as the operator wrote it; `None` without a fleet.
    pub url: Option<Secret>,
    /// What all nodes have.
    pub secret: Option<Secret>,
    /// Which of the fleets in that store.
    pub name: NodeName,
    /// What this node is called; `None` for the name of the machine.
    pub node: Option<NodeName>,
    /// Where it is; nodes of one zone are near. `None` if nobody says.
    pub zone: Option<NodeName>,
    /// Where clients reach it; from the listeners if empty.
    pub addresses: Vec<Entrance>,
    /// Ports of listeners at which a balancer delivers.
    pub balancer_ports: Vec<u16>,
    /// The name in its certificate, where clients are to be told one.
    pub domain: Option<String>,
    /// When clients are sent elsewhere.
    pub redirect: FleetRedirect,
    /// Allocations of all nodes together; 0 for no limit.
    pub allocations: u32,
    /// What this node can carry, in bits a second; 0 if nobody knows.
    pub bits_per_second: u64,
    /// Seconds.
    pub key_rotation: u32,
    /// Whether sessions are published as coturn publishes them.
    pub coturn_status: bool,
}

impl Default for FleetSettings {
    fn default() -> Self {
        #[expect(clippy::expect_used, reason = "a test holds that it is one")]
        let name = "turnpike".parse().expect("it is a name");
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

/// When clients are sent to another node, or to this one by an address of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FleetRedirect {
    /// While this node drains or has no room.
    Full,
    /// Also while it is much busier than others.
    Load,
    /// Each new allocation that did not come to an address of `addresses`: by anycast, or through a balancer.
    Always,
}

/// Where the store is. It may hold a password.
pub(super) const URL: Kind<Option<Secret>> = Kind::one(
    "redis://:PASSWORD@HOST, rediss://..., redis+sentinel://:PASSWORD@HOST,HOST,HOST/MASTER or redis+cluster://:PASSWORD@HOST,HOST, \"\" for no fleet",
    |reader, node| match &node.value {
        // A file has lines.
        Value::List(lines) if lines.len() == 1 => reader.secret(&lines[0]).map(Some),
        _ => reader.secret(node).map(|url| Some(url).filter(|url| !url.reveal().is_empty())),
    },
    |url| quoted(url.as_ref().map_or("", |_| MASK)),
)
.secret();

/// What all nodes have.
pub(super) const SECRET: Kind<Option<Secret>> = Kind::one(
    "32 characters or more, the same on all nodes, such as those of `openssl rand -hex 32`; \"\" without a fleet",
    |reader, node| {
        let secret = match &node.value {
            Value::List(lines) if lines.len() == 1 => reader.secret(&lines[0])?,
            _ => reader.secret(node)?,
        };
        match secret.reveal().chars().count() {
            0 => Some(None),
            SHORTEST_SECRET.. => Some(Some(secret)),
            _ => reader.refuse(node, Some("it is shorter".to_owned())),
        }
    },
    |secret| quoted(secret.as_ref().map_or("", |_| MASK)),
)
.secret();

/// Which of the fleets.
pub(super) const NAME: Kind<NodeName> = Kind::one(
    "a name of 1 to 64 letters, digits, points, hyphens and underscores",
    |reader, node| reader.parsed(node, |text| text.parse()),
    |name| quoted(name.as_str()),
);

/// The same, or none.
pub(super) const NAME_OR_NONE: Kind<Option<NodeName>> = Kind::one(
    "a name of 1 to 64 letters, digits, points, hyphens and underscores, or \"\"",
    |reader, node| {
        reader.parsed(node, |text| if text.is_empty() { Ok(None) } else { text.parse().map(Some) })
    },
    |name| quoted(name.as_ref().map_or("", NodeName::as_str)),
);

/// Where clients reach this node.
pub(super) const ADDRESSES: Kind<Vec<Entrance>> = list_of!(
    "a list of \"udp://ADDR:PORT\", \"tcp://...\", \"tls://...\" and \"dtls://...\" as clients reach this node, [] for those of its listeners",
    |text| text.parse::<Entrance>()
);

/// Where a balancer delivers that puts the node's address in place of its own.
pub(super) const PORTS: Kind<Vec<u16>> = Kind::list(
    "a list of ports of listeners, such as [13478, 15349]",
    |reader, node| reader.list(node, |reader, node| reader.integer(node, &(1..=65_535))),
    |ports| list(ports.iter().map(ToString::to_string)),
);

/// The name in its certificate.
pub(super) const DOMAIN: Kind<Option<String>> = Kind::one(
    "the host name in this node's certificate, such as \"turn2.example.org\", or \"\"",
    |reader, node| {
        reader.parsed(node, |text| if text.is_empty() { Ok(None) } else { server_name(text).map(Some) })
    },
    |domain| quoted(domain.as_deref().unwrap_or_default()),
);

/// When clients are sent elsewhere.
pub(super) const REDIRECT: Kind<FleetRedirect> = named!(
    "\"full\", \"load\" or \"always\"",
    "full" => FleetRedirect::Full,
    "load" => FleetRedirect::Load,
    "always" => FleetRedirect::Always,
);
