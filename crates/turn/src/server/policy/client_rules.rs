//! Client addresses that the server serves, checked for each request.

use std::net::IpAddr;

use crate::server::Cidr;

/// Deny rules take precedence. Without allow rules, all other clients are served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientRules {
    pub allow: Vec<Cidr>,
    pub deny: Vec<Cidr>,
}

impl ClientRules {
    #[must_use]
    #[inline]
    pub fn admits(&self, client: IpAddr) -> bool {
        (self.allow.is_empty() && self.deny.is_empty()) || self.admit_by_rules(client)
    }

    #[cold]
    fn admit_by_rules(&self, client: IpAddr) -> bool {
        let has = |rules: &[Cidr]| rules.iter().any(|rule| rule.contains(client));
        !has(&self.deny) && (self.allow.is_empty() || has(&self.allow))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deny_wins_over_allow_and_no_allow_rule_admits_all() {
        let prefixes = |texts: &[&str]| texts.iter().map(|text| text.parse().expect("a prefix")).collect();
        for (allow, deny, client, admitted) in [
            (&[][..], &[][..], "192.0.2.7", true),
            (&[], &["192.0.2.0/24"], "192.0.2.7", false),
            (&[], &["192.0.2.0/24"], "::ffff:192.0.2.7", false),
            (&[], &["192.0.2.0/24"], "198.51.100.1", true),
            (&["192.0.2.0/24"], &[], "192.0.2.7", true),
            (&["192.0.2.0/24"], &[], "198.51.100.1", false),
            (&["192.0.2.0/24"], &[], "2001:db8::1", false),
            (&["192.0.2.0/24"], &["192.0.2.7"], "192.0.2.7", false),
        ] {
            let rules = ClientRules { allow: prefixes(allow), deny: prefixes(deny) };
            let client: IpAddr = client.parse().expect("an address");
            assert_eq!(rules.admits(client), admitted, "{rules:?} {client}");
        }
    }
}
