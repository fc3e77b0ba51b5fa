//! Events about the server itself, found by comparing its state each second.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use turnpike_acme::AcmeStatus;
use turnpike_api::{CertificateEvent, NodeEvent};
use turnpike_config::EventType;
use turnpike_events::Events;

use super::server_events::ServerEvents;
use crate::{certificate_expiry::Nearness, certificates::CertificateState, fleet::FleetMembership};

#[derive(Debug, Default)]
pub(crate) struct StateWatch(Option<ServerState>);

/// State that events are about.
#[derive(Clone, Debug, Default, PartialEq)]
struct ServerState {
    /// Last second of validity, by file.
    valid_until: BTreeMap<String, u64>,
    nearness: BTreeMap<String, Nearness>,
    failed_reloads: u64,
    /// Failed orders and the last error, by name.
    orders: BTreeMap<String, (u32, Option<String>)>,
    /// Other nodes of the fleet.
    nodes: BTreeSet<String>,
}

impl StateWatch {
    /// Does nothing while events are not wanted.
    pub(crate) fn look(
        &mut self,
        events: &ServerEvents,
        (certificates, acme, fleet): (&CertificateState, &AcmeStatus, &FleetMembership),
        allocations: u64,
    ) {
        if !events.hub.is_wanted() {
            self.0 = None;
            return;
        }
        if fleet.is_cordoned() {
            events.drain_begins(allocations, None);
        } else {
            events.drain_ends(allocations);
        }
        let now = ServerState::of(certificates, acme, fleet);
        let before = self.0.take();
        now.emit_since(before.as_ref(), &events.hub);
        self.0 = Some(now);
    }
}

impl ServerState {
    fn of(certificates: &CertificateState, acme: &AcmeStatus, fleet: &FleetMembership) -> Self {
        let validities = certificates.expiry.validities().into_iter();
        let orders = acme.names().into_iter();
        Self {
            valid_until: validities.map(|(file, (_, last))| (file, last)).collect(),
            nearness: certificates.expiry.nearness().into_iter().collect(),
            failed_reloads: certificates.failed_reloads(),
            orders: orders.map(|(name, status)| (name, (status.failures, status.error))).collect(),
            nodes: fleet.other_nodes(),
        }
    }

    /// Without a state `before`, only the certificates that expire soon are news.
    fn emit_since(&self, before: Option<&Self>, events: &Events) {
        for (kind, event) in self.certificates_since(before) {
            events.emit(kind.name(), &event);
        }
        for (kind, node) in self.nodes_since(before) {
            events.emit(kind.name(), &NodeEvent { node });
        }
    }

    fn certificates_since(&self, before: Option<&Self>) -> Vec<(EventType, CertificateEvent)> {
        let mut found = Vec::new();
        let event = |certificate: &str, not_after: Option<u64>, error: Option<String>| CertificateEvent {
            certificate: Some(certificate.to_owned()),
            not_after: not_after.map(date),
            error,
        };
        if let Some(before) = before {
            for (file, last) in &self.valid_until {
                if before.valid_until.get(file) != Some(last) {
                    found.push((EventType::CertificateRenewed, event(file, Some(*last), None)));
                }
            }
            for (name, (failures, error)) in &self.orders {
                if *failures > before.orders.get(name).map_or(0, |(failures, _)| *failures) {
                    found.push((EventType::CertificateFailed, event(name, None, error.clone())));
                }
            }
            if self.failed_reloads > before.failed_reloads {
                let error = Some(
                    "the certificates could not be loaded, see the log; the old ones stay in use".to_owned(),
                );
                found.push((
                    EventType::CertificateFailed,
                    CertificateEvent { error, ..CertificateEvent::default() },
                ));
            }
        }
        for (file, nearness) in &self.nearness {
            let known = before.and_then(|before| before.nearness.get(file)).copied().unwrap_or(Nearness::Far);
            if *nearness > known {
                let not_after = self.valid_until.get(file).copied();
                found.push((EventType::CertificateExpiring, event(file, not_after, None)));
            }
        }
        found
    }

    fn nodes_since(&self, before: Option<&Self>) -> Vec<(EventType, String)> {
        let Some(before) = before else { return Vec::new() };
        let joined = self.nodes.difference(&before.nodes).map(|node| (EventType::NodeJoined, node.clone()));
        let left = before.nodes.difference(&self.nodes).map(|node| (EventType::NodeLeft, node.clone()));
        joined.chain(left).collect()
    }
}

fn date(unix: u64) -> String {
    let time = i64::try_from(unix).ok().and_then(|unix| Timestamp::from_second(unix).ok());
    time.unwrap_or(Timestamp::MAX).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificate_events_are_differences() {
        let file = |last| [("a.pem".to_owned(), last)].into();
        let before = ServerState { valid_until: file(100), failed_reloads: 3, ..ServerState::default() };
        let orders = [("a.example".to_owned(), (2, Some("no route".to_owned())))].into();
        let nearness = [("a.pem".to_owned(), Nearness::Soon)].into();
        let now =
            ServerState { valid_until: file(200), failed_reloads: 4, orders, nearness, ..before.clone() };
        let found = now.certificates_since(Some(&before));
        let kinds: Vec<&str> = found.iter().map(|(kind, _)| kind.name()).collect();
        let failed = EventType::CertificateFailed.name();
        assert_eq!(kinds, ["certificate.renewed", failed, failed, "certificate.expiring"]);
        assert_eq!(found[0].1.not_after.as_deref(), Some("1970-01-01T00:03:20Z"));
        assert_eq!(found[1].1.error.as_deref(), Some("no route"));
        assert_eq!(now.certificates_since(Some(&now)), []);
        let kinds: Vec<EventType> = now.certificates_since(None).into_iter().map(|(kind, _)| kind).collect();
        assert_eq!(kinds, [EventType::CertificateExpiring], "at first, only this is news");
    }

    #[test]
    fn nodes_join_and_leave() {
        let state = |names: &[&str]| ServerState {
            nodes: names.iter().map(|name| (*name).to_owned()).collect(),
            ..ServerState::default()
        };
        let found = state(&["b", "c"]).nodes_since(Some(&state(&["a", "b"])));
        assert_eq!(found, [(EventType::NodeJoined, "c".to_owned()), (EventType::NodeLeft, "a".to_owned())]);
        assert_eq!(state(&["b"]).nodes_since(None), []);
    }
}
