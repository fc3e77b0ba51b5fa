//! Quality of media per leg: judges the workers' cumulative reports, keeps one small record per allocation with media, and states in a
//! sentence which network spoils it.
//!
//! ```text
//!  workers ── cumulative Quality, about every 10 s per allocation ──▶ QualityMonitor ──▶ metrics
//!  workers ── ends of allocations ──────────────────────────────────▶       │
//!                                                 API, page, `top` ◀── problem, sentence
//! ```

mod collector;
mod figures;
mod networks;
mod sentence;
mod trouble;

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use turnpike_admin::AllocationQualities;
use turnpike_api::{
    FlowDirection, Leg, QualityProblem,
    quality::{FlowQuality, LegQuality, Quality},
};
use turnpike_turn::server::{AllocationId, ClientNetworks, Effect};
use turnpike_wire::address::canonical_ip;

use networks::{NetworkKey, Networks};
use sentence::Finding;
use trouble::{FlowState, Measure, Trouble};

pub(crate) use collector::collect;
pub(crate) use figures::{JITTER_BOUNDS, LOSS_BOUNDS, QualityFigures, ROUND_TRIP_BOUNDS, Samples};

/// Flows of an allocation.
pub(crate) const FLOWS: [(Leg, FlowDirection); 4] = [
    (Leg::Client, FlowDirection::Uplink),
    (Leg::Client, FlowDirection::Downlink),
    (Leg::Peer, FlowDirection::Uplink),
    (Leg::Peer, FlowDirection::Downlink),
];
pub(crate) const LEGS: [Leg; 2] = [Leg::Client, Leg::Peer];
/// Seconds without media after which old troubles are not shown.
const STALE: u64 = 60;

/// Quality of the allocations with media, shared by workers and the admin interface.
#[derive(Debug)]
pub(crate) struct QualityMonitor {
    networks: Arc<dyn ClientNetworks>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    records: HashMap<AllocationId, Record>,
    networks: Networks,
    figures: Option<QualityFigures>,
}

#[derive(Debug)]
struct Record {
    client: IpAddr,
    network: NetworkKey,
    quality: Quality,
    /// Ordered as [`FLOWS`].
    flows: [FlowState; 4],
    /// Ordered as [`LEGS`].
    round_trips: [Option<Trouble>; 2],
    reported_at: u64,
    /// Trouble of the client's leg, as counted in [`Networks`].
    is_client_troubled: bool,
}

impl QualityMonitor {
    pub(crate) fn new(networks: Arc<dyn ClientNetworks>) -> Self {
        Self { networks, state: Mutex::default() }
    }

    /// Takes the cumulative quality of an allocation. Called on the worker's thread, not per packet.
    pub(crate) fn report(&self, id: AllocationId, client: SocketAddr, quality: &Quality) {
        self.report_at(unix(), id, client.ip(), quality);
    }

    fn report_at(&self, now: u64, id: AllocationId, client: IpAddr, quality: &Quality) {
        let client = canonical_ip(client);
        let is_known = self.state().records.get(&id).is_some_and(|record| record.client == client);
        // The look-up needs no lock.
        let network = (!is_known).then(|| NetworkKey::of(client, &*self.networks));
        let mut state = self.state();
        if let Some(network) = network {
            state.arrive(id, client, network);
        }
        state.judge(now, id, quality);
    }

    pub(crate) fn effect(&self, effect: &Effect) {
        if let Effect::Closed { id, .. } = effect {
            self.state().remove(*id);
        }
    }

    /// `None` until the first report.
    pub(crate) fn figures(&self) -> Option<QualityFigures> {
        self.state().figures
    }

    fn problem_at(&self, now: u64, id: AllocationId) -> Option<QualityProblem> {
        let state = self.state();
        let record = state.records.get(&id)?;
        let findings = record.findings(now);
        let (others, network) = (state.networks.others(record.network, record.client), record.network);
        sentence::problem(&findings, now, others, &network)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AllocationQualities for QualityMonitor {
    fn quality(&self, id: AllocationId) -> Option<Quality> {
        self.state().records.get(&id).map(|record| record.quality)
    }

    fn problem(&self, id: AllocationId) -> Option<QualityProblem> {
        self.problem_at(unix(), id)
    }
}

fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl State {
    /// Creates the record of an allocation, or moves it to the new address of its client.
    fn arrive(&mut self, id: AllocationId, client: IpAddr, network: NetworkKey) {
        self.networks.join(network, client);
        if let Some(record) = self.records.get_mut(&id) {
            if record.is_client_troubled {
                self.networks.set_troubled(record.network, record.client, false);
                self.networks.set_troubled(network, client, true);
            }
            self.networks.leave(record.network, record.client);
            (record.client, record.network) = (client, network);
            return;
        }
        let record = Record {
            client,
            network,
            quality: Quality::default(),
            flows: Default::default(),
            round_trips: [None; 2],
            reported_at: 0,
            is_client_troubled: false,
        };
        self.records.insert(id, record);
    }

    fn judge(&mut self, now: u64, id: AllocationId, quality: &Quality) {
        let Some(record) = self.records.get_mut(&id) else { return };
        let figures = self.figures.get_or_insert_default();
        (record.quality, record.reported_at) = (*quality, now);
        for (index, (leg, direction)) in FLOWS.into_iter().enumerate() {
            let Some(flow) = flow_of(quality, leg, direction) else { continue };
            let before_ms = jitter_before(quality, leg, direction);
            if let Some(window) = record.flows[index].judge(flow, before_ms, now) {
                figures.loss[index].add(&LOSS_BOUNDS, window.loss);
                figures.jitter[index].add(&JITTER_BOUNDS, window.jitter_ms / 1000.0);
            }
        }
        for (index, leg) in LEGS.into_iter().enumerate() {
            let Some(ms) = leg_of(quality, leg).round_trip_ms else { continue };
            Trouble::follow(&mut record.round_trips[index], Measure::RoundTrip, ms, now);
            figures.round_trip[index].add(&ROUND_TRIP_BOUNDS, ms / 1000.0);
        }
        let is_troubled = record.findings(now).iter().any(|finding| finding.leg == Leg::Client);
        if is_troubled != record.is_client_troubled {
            record.is_client_troubled = is_troubled;
            self.networks.set_troubled(record.network, record.client, is_troubled);
        }
    }

    fn remove(&mut self, id: AllocationId) {
        let Some(record) = self.records.remove(&id) else { return };
        if record.is_client_troubled {
            self.networks.set_troubled(record.network, record.client, false);
        }
        self.networks.leave(record.network, record.client);
    }
}

impl Record {
    /// Current troubles, the worst first.
    fn findings(&self, now: u64) -> Vec<Finding> {
        let mut findings = Vec::new();
        let is_current = |at: u64| now.saturating_sub(at) <= STALE;
        for ((leg, direction), flow) in FLOWS.into_iter().zip(&self.flows) {
            let measures = [(Measure::Loss, flow.loss), (Measure::Jitter, flow.jitter)];
            for (measure, trouble) in measures.into_iter().filter(|_| is_current(flow.judged_at)) {
                let direction = Some(direction);
                findings.extend(trouble.map(|trouble| Finding { leg, direction, measure, trouble }));
            }
        }
        for (leg, trouble) in LEGS.into_iter().zip(self.round_trips) {
            let trouble = trouble.filter(|_| is_current(self.reported_at));
            let measure = Measure::RoundTrip;
            findings.extend(trouble.map(|trouble| Finding { leg, direction: None, measure, trouble }));
        }
        findings.sort_by(|a, b| b.severity().total_cmp(&a.severity()));
        findings
    }
}

fn leg_of(quality: &Quality, leg: Leg) -> &LegQuality {
    match leg {
        Leg::Client => &quality.client,
        Leg::Peer => &quality.peer,
    }
}

fn flow_of(quality: &Quality, leg: Leg, direction: FlowDirection) -> Option<&FlowQuality> {
    let leg = leg_of(quality, leg);
    match direction {
        FlowDirection::Uplink => leg.uplink.as_ref(),
        FlowDirection::Downlink => leg.downlink.as_ref(),
    }
}

/// Jitter with which a flow arrived at the relay: a receiver's report contains that of both legs.
fn jitter_before(quality: &Quality, leg: Leg, direction: FlowDirection) -> f64 {
    let sender = match leg {
        Leg::Client => &quality.peer,
        Leg::Peer => &quality.client,
    };
    let uplink = sender.uplink.filter(|_| direction == FlowDirection::Downlink);
    uplink.map_or(0.0, |uplink| uplink.jitter_ms)
}

#[cfg(test)]
mod tests;
