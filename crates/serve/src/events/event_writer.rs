//! Events about allocations and refusals.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use turnpike_api::{AllocationBegin, AllocationEnd, ClientRefusals, NetworkInfo, Traffic};
use turnpike_config::EventType;
use turnpike_process::{log_queue::LogCounts, logging::seconds};
use turnpike_relay::TurnedAway;
use turnpike_turn::server::{ClientNetwork, Effect};

use super::{
    refusal_events::{MORE_REFUSALS, RefusalEvents},
    server_events::ServerEvents,
};
use crate::refusals::{RefusalEntry, RefusalGroup};

/// Turns entries of the allocation log into events.
pub(crate) struct EventWriter {
    events: Arc<ServerEvents>,
    refusals: RefusalEvents,
    /// Entries that the log's queue had dropped at the last look.
    lost: u64,
    counts: Arc<LogCounts>,
}

impl EventWriter {
    pub(crate) fn new(events: Arc<ServerEvents>, counts: Arc<LogCounts>) -> Self {
        Self { events, refusals: RefusalEvents::default(), lost: 0, counts }
    }

    pub(crate) fn hear(&mut self, now: Duration, unix_ms: u64, effect: &Effect, network: ClientNetwork) {
        let hub = &self.events.hub;
        if !hub.is_wanted() {
            return;
        }
        match effect {
            Effect::Opened { .. } => {
                if let Some(begin) = begin(effect, network) {
                    hub.emit(EventType::AllocationBegin.name(), &begin);
                }
            }
            Effect::Closed { .. } => {
                if let Some(end) = end(effect, network) {
                    hub.emit(EventType::AllocationEnd.name(), &end);
                }
            }
            _ => {
                if let Some(entry) = RefusalEntry::of(unix_ms, effect, network) {
                    self.refused(now, entry);
                }
            }
        }
    }

    pub(crate) fn turned_away(
        &mut self,
        now: Duration,
        unix_ms: u64,
        turned: &TurnedAway,
        network: ClientNetwork,
    ) {
        if self.events.hub.is_wanted() {
            self.refused(now, RefusalEntry::of_connection(unix_ms, turned, network));
        }
    }

    fn refused(&mut self, now: Duration, entry: RefusalEntry) {
        if let Some(first) = self.refusals.hear(now, entry) {
            self.emit(first);
        }
    }

    /// Emits summaries of repeated refusals, and the number of entries that the log's queue dropped.
    pub(crate) fn due(&mut self, now: Duration) {
        let lost = self.counts.lost.load(Ordering::Relaxed);
        let new = lost - std::mem::replace(&mut self.lost, lost);
        if new > 0 {
            self.events.hub.lost(new, "the program was busy");
        }
        let (summaries, omitted) = self.refusals.due(now);
        summaries.into_iter().for_each(|summary| self.emit(summary));
        if omitted > 0 {
            self.events.hub.lost(omitted, MORE_REFUSALS);
        }
    }

    fn emit(&self, entry: RefusalEntry) {
        let kind = if entry.why.is_quota() { EventType::Quota } else { EventType::Refusal };
        self.events.hub.emit(kind.name(), &ClientRefusals::from(RefusalGroup::new(entry)));
    }
}

fn begin(effect: &Effect, network: ClientNetwork) -> Option<AllocationBegin> {
    let Effect::Opened { id, client, realm, username, relayed, .. } = effect else { return None };
    Some(AllocationBegin {
        id: id.to_string(),
        realm: realm.to_string(),
        user: username.to_string(),
        client: client.address.to_string(),
        network: NetworkInfo::of(network),
        server: client.local.to_string(),
        relayed: [Some(relayed.0), relayed.1].into_iter().flatten().map(|at| at.to_string()).collect(),
    })
}

/// `None` for an allocation that ended before it began.
fn end(effect: &Effect, network: ClientNetwork) -> Option<AllocationEnd> {
    let Effect::Closed {
        id,
        client,
        realm,
        username,
        identity,
        relayed,
        transport,
        relay_transport,
        reason,
        lived_ms,
        to_peer,
        to_client,
        ..
    } = effect
    else {
        return None;
    };
    let relayed: Vec<String> = relayed.iter().flatten().map(SocketAddr::to_string).collect();
    if relayed.is_empty() {
        return None;
    }
    let traffic = |(datagrams, bytes): (u64, u64)| Traffic { datagrams, bytes };
    Some(AllocationEnd {
        id: id.to_string(),
        realm: realm.to_string(),
        user: username.to_string(),
        identity: identity.as_deref().map(str::to_owned),
        client: client.address.to_string(),
        network: NetworkInfo::of(network),
        server: client.local.to_string(),
        transport: <&str>::from(*transport).to_owned(),
        relayed,
        relayed_transport: <&str>::from(*relay_transport).to_owned(),
        reason: <&str>::from(*reason).to_owned(),
        seconds: seconds(Duration::from_millis(*lived_ms)),
        to_peer: traffic(*to_peer),
        to_client: traffic(*to_client),
    })
}
