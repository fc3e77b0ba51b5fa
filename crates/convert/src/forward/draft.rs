//! Rules while they are being read: the keys that are set, and their positions.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use turnpike_rules::{Bind, Endpoint, Protocol, Rule, RuleId};
use turnpike_strict::Origin;

use super::parts;

/// A rule while it is being read, with the positions of its keys.
#[derive(Clone, Debug)]
pub struct Draft {
    pub rule: Rule,
    pub origin: Origin,
    pub origins: BTreeMap<&'static str, Origin>,
}

impl Draft {
    pub fn new(origin: Origin) -> Self {
        Self { rule: defaults(Protocol::Tcp), origin, origins: BTreeMap::new() }
    }

    pub fn has(&self, path: &str) -> bool {
        self.origins.contains_key(path)
    }

    pub fn origin_of(&self, path: &str) -> &Origin {
        self.origins.get(path).unwrap_or(&self.origin)
    }

    /// Fills in the name and the defaults that depend on the protocol.
    pub fn with_defaults(mut self) -> Self {
        if !self.has("rule.idle") {
            self.rule.idle = defaults(self.rule.protocol).idle;
        }
        if !self.has("rule.name") {
            self.rule.id = default_id(&self.rule);
        }
        self
    }
}

pub fn defaults(protocol: Protocol) -> Rule {
    // Default of rinetd and oxidinetd. A UDP session ends only through a timeout.
    let idle = (protocol != Protocol::Tcp).then_some(Duration::from_secs(72));
    Rule { protocol, idle, ..Rule::default() }
}

/// `tcp://0.0.0.0:9000`: each listener has one rule, so this name stays the same when the target changes.
/// With port 0, the listener is unknown, so the target becomes part of the name.
pub fn default_id(rule: &Rule) -> RuleId {
    let mut id = format!("{}://{}", rule.protocol.name(), parts::show_listener(&rule.bind, rule.ports));
    if rule.ports.first == 0 && !matches!(rule.bind, Bind::Unix(_)) {
        let targets: Vec<String> = rule.targets.iter().map(Endpoint::to_string).collect();
        let _ = write!(id, "={}", targets.join(","));
    }
    RuleId(id)
}
