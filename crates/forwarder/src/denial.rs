//! Finds the access list that denies a client, for the log and the connection file.

use std::{collections::HashMap, net::IpAddr};

use turnpike_config::forward::{ForwardSettings, show_pattern};
use turnpike_forward::{Access, Pattern};

#[derive(Clone, Debug, Default)]
pub(crate) struct AccessLists {
    /// Global lists, checked first.
    global: Access,
    rules: HashMap<String, Access>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessDenial<'a> {
    /// An allow list exists, but no pattern matches.
    NotAllowed,
    Denied(&'a Pattern),
}

impl AccessLists {
    pub(crate) fn new(settings: &ForwardSettings) -> Self {
        let rules = settings.rules.iter().map(|rule| (rule.id.0.clone(), rule.access.clone())).collect();
        Self { global: settings.access.clone(), rules }
    }

    /// First list that denies the client, in the order in which the forwarder checks them. Returns `None` if
    /// these lists, which may be newer than the denial, allow the client.
    pub(crate) fn denial(&self, rule: &str, client: Option<IpAddr>) -> Option<AccessDenial<'_>> {
        let Some(client) = client else {
            // For a client without an address, the global lists are skipped, and no pattern matches.
            let access = self.rules.get(rule)?;
            return (!access.allow.is_empty()).then_some(AccessDenial::NotAllowed);
        };
        [Some(&self.global), self.rules.get(rule)].into_iter().flatten().find_map(|access| {
            let matches = |pattern: &&Pattern| pattern.matches(client);
            if !access.allow.is_empty() && !access.allow.iter().any(|pattern| matches(&pattern)) {
                return Some(AccessDenial::NotAllowed);
            }
            access.deny.iter().find(matches).map(AccessDenial::Denied)
        })
    }
}

impl AccessDenial<'_> {
    pub(crate) fn text(self) -> String {
        match self {
            Self::NotAllowed => "default: no allow pattern matches".to_owned(),
            Self::Denied(pattern) => format!("deny {}", show_pattern(pattern)),
        }
    }
}

#[cfg(test)]
pub(crate) fn rule(argument: &str) -> turnpike_forward::Rule {
    use turnpike_config::{Checks, Flags, forward::ForwardSources};
    let sources = ForwardSources::from_process(None, vec![argument.to_owned()], Flags::new(), Checks::NONE);
    sources.load().expect("a valid rule").settings.rules.remove(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_denial_contains_the_pattern_or_the_missing_allow() {
        let rule = "tcp://0.0.0.0:8080=10.0.0.2:80?name=web&allow=192.0.2.*&deny=192.0.2.9,192.0.2.16/28";
        let rule = super::rule(rule);
        let global = Access { allow: Vec::new(), deny: vec![Pattern::Wildcard("203.0.113.*".to_owned())] };
        let settings = ForwardSettings { rules: vec![rule], access: global, ..ForwardSettings::default() };
        let lists = AccessLists::new(&settings);
        for (rule, client, text) in [
            ("web", "192.0.2.9", Some("deny 192.0.2.9")),
            ("web", "192.0.2.17", Some("deny 192.0.2.16/28")),
            ("web", "203.0.113.1", Some("deny 203.0.113.*")),
            ("web", "198.51.100.1", Some("default: no allow pattern matches")),
            ("web", "192.0.2.1", None),
            ("another", "198.51.100.1", None),
        ] {
            let denial = lists.denial(rule, client.parse().ok());
            assert_eq!(denial.map(AccessDenial::text).as_deref(), text, "{rule} {client}");
        }
    }
}
