//! A worker's access to the flow table of the program: installs and removes flows, and reads their counters.
//! Nothing blocks, and changes are effective when the call returns.

use std::{
    net::SocketAddr,
    os::fd::AsFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
};

use aya::maps::{HashMap, Map, MapData};
use serde::{Deserialize, Serialize};
use turnpike_wire::channel_data::ChannelNumber;

use crate::{
    clock::now_ns,
    error::OffloadError,
    layout::{
        BEHIND, BYTES, CALM, DATAGRAMS, Flow, FlowKey, Kind, Lease, MEASURED, STATE_WORDS, UP, XDP_GAP_NS,
        address, mapped,
    },
    object::map_error,
    shared::SharedMaps,
    streams::{KnownStream, Streams},
};

pub struct Flows {
    shared: Arc<SharedMaps>,
    map: HashMap<MapData, FlowKey, Flow>,
    /// Flows by the key of their datagrams as they leave; `None` without leases.
    departures: Option<HashMap<MapData, FlowKey, FlowKey>>,
}

#[derive(Clone, Copy, Debug)]
pub struct NewFlow<'a> {
    pub kind: Kind,
    pub remote: SocketAddr,
    pub local: SocketAddr,
    /// Channel on which datagrams arrive, or leave towards a client.
    pub channel: Option<ChannelNumber>,
    pub from: SocketAddr,
    pub to: SocketAddr,
    /// Shared by flows whose datagrams must stay in order relative to each other.
    pub state: &'a FlowState,
    pub socket: u32,
    /// Expiry in nanoseconds of [`now_ns`].
    pub expires_ns: u64,
}

/// An installed flow; must be removed.
#[derive(Debug)]
#[must_use = "the flow stays until it is removed"]
pub struct Installed(Flow);

/// Counters and ordering state of one or more flows; must be given back.
#[derive(Debug)]
#[must_use = "its slot is lost unless it is given back"]
pub struct FlowState {
    slot: u32,
    seen: Counted,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    pub datagrams: u64,
    pub bytes: u64,
}

impl Counted {
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.datagrams == 0 && self.bytes == 0
    }
}

impl FlowState {
    /// Counters at the last reading, for [`Flows::adopt_state`] of another process.
    #[must_use]
    pub fn seen(&self) -> Counted {
        self.seen
    }
}

/// The table is full: the flow stays in user space. Counted as refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableFull;

impl Flows {
    pub(crate) fn new(shared: Arc<SharedMaps>) -> Result<Self, OffloadError> {
        let map = own(&shared.flows)?.try_into().map_err(map_error)?;
        let departures = shared.departures.as_ref().map(own).transpose()?;
        let departures = departures.map(HashMap::try_from).transpose().map_err(map_error)?;
        Ok(Self { shared, map, departures })
    }

    /// False while a rule of this machine keeps all flows in user space.
    #[must_use]
    pub fn can_cross(&self) -> bool {
        !self.shared.is_blocked.load(Ordering::Relaxed)
    }

    /// Allocates a number for a socket that receives packets passed to user space. `None` if no number is
    /// left, which is counted as a refused flow.
    pub fn socket(&self) -> Option<u32> {
        let slot = locked(&self.shared.socket_slots).take(now_ns());
        let Some(slot) = slot else {
            self.refuse();
            return None;
        };
        self.shared.drained[slot as usize].store(0, Ordering::Relaxed);
        Some(slot)
    }

    pub fn give_back_socket(&self, socket: u32) {
        locked(&self.shared.socket_slots).give_back(now_ns(), socket);
    }

    /// Reports that everything queued in this socket at `at_ns` has been sent.
    pub fn drained(&self, socket: u32, at_ns: u64) {
        // Packets that the program saw within the gap before that time may not have been queued yet.
        let before_ns = at_ns.saturating_sub(self.shared.gap_ns);
        let word = &self.shared.drained[socket as usize];
        // Only the worker that has the socket writes this word. Release: the sends must be visible first.
        word.store((word.load(Ordering::Relaxed) & !BEHIND).max(before_ns), Ordering::Release);
    }

    /// Marks an overloaded socket, which loses datagrams anyway: until the next [`Flows::drained`], the
    /// program drops packets that would have to wait for it to be drained.
    pub fn behind(&self, socket: u32, is_behind: bool) {
        let word = &self.shared.drained[socket as usize];
        let time = word.load(Ordering::Relaxed) & !BEHIND;
        word.store(if is_behind { time | BEHIND } else { time }, Ordering::Release);
    }

    #[must_use]
    pub fn come_before_gro(&self) -> bool {
        self.shared.gap_ns == XDP_GAP_NS
    }

    /// Maximum time between the program seeing a packet and its arrival in the socket, in nanoseconds.
    #[must_use]
    pub fn gap_ns(&self) -> u64 {
        self.shared.gap_ns
    }

    /// Allocates a state for new flows. Their packets go to user space until their socket is drained, since
    /// earlier packets may be in flight.
    pub fn state(&self) -> Result<FlowState, TableFull> {
        let Some(slot) = locked(&self.shared.state_slots).take(now_ns()) else {
            self.refuse();
            return Err(TableFull);
        };
        let state = FlowState { slot, seen: self.read(slot) };
        self.word(slot, CALM).store(0, Ordering::Relaxed);
        self.word(slot, MEASURED).store(0, Ordering::Relaxed);
        self.hold_up(&state);
        Ok(state)
    }

    /// Passes packets to user space until the socket is drained.
    pub fn hold_up(&self, state: &FlowState) {
        self.word(state.slot, UP).fetch_max(now_ns(), Ordering::Release);
    }

    /// True if the kernel can measure the quality of media.
    #[must_use]
    pub fn can_measure(&self) -> bool {
        self.shared.measures
    }

    /// Measures the media of flows with this state from now on. `known` are streams that user space has already measured. `None` if
    /// [`Flows::can_measure`] is false.
    pub fn measure(&self, state: &FlowState, known: &[KnownStream], reads_rtcp: bool) -> Option<Streams> {
        let streams = self.can_measure().then(|| Streams::new(Arc::clone(&self.shared), state.slot))?;
        // The program must not count while the slot is prepared.
        self.word(state.slot, MEASURED).store(0, Ordering::Release);
        streams.prepare(known, reads_rtcp);
        self.word(state.slot, MEASURED).store(u64::from(state.slot) + 1, Ordering::Release);
        Some(streams)
    }

    /// Ends the measurement that [`Flows::measure`] began.
    pub fn end_measuring(&self, state: &FlowState) {
        self.word(state.slot, MEASURED).store(0, Ordering::Relaxed);
    }

    pub fn counted(&self, state: &mut FlowState) -> Counted {
        let (before, now) = (state.seen, self.read(state.slot));
        state.seen = now;
        Counted { datagrams: now.datagrams - before.datagrams, bytes: now.bytes - before.bytes }
    }

    /// Releases a state without flows; returns the counts since the last [`Flows::counted`].
    pub fn give_back_state(&self, mut state: FlowState) -> Counted {
        let last = self.counted(&mut state);
        locked(&self.shared.state_slots).give_back(now_ns(), state.slot);
        last
    }

    pub fn install(&mut self, new: &NewFlow<'_>) -> Result<Installed, TableFull> {
        let NewFlow { kind, remote, local, channel, from, to, state, socket, expires_ns } = *new;
        let routes = &self.shared.routes;
        let Some(route) = routes.hold(from.ip(), to.ip()) else {
            self.refuse();
            return Err(TableFull);
        };
        let Some(back) = routes.hold(local.ip(), remote.ip()) else {
            routes.give_back(route);
            self.refuse();
            return Err(TableFull);
        };
        if kind == Kind::Forward {
            self.shared.ports.hold(local.port());
        }
        let to_client = kind == Kind::ToClient;
        let mut installed = Installed(Flow {
            stamp: 0,
            key: FlowKey::new(remote, local, channel.filter(|_| !to_client)),
            from: mapped(from.ip()),
            to: mapped(to.ip()),
            from_port: from.port().to_be_bytes(),
            to_port: to.port().to_be_bytes(),
            channel: channel.filter(|_| to_client).map_or([0; 2], |number| number.get().to_be_bytes()),
            kind: kind as u8,
            unused: 0,
            route,
            back,
            state: state.slot,
            socket,
            expires: 0,
            stamp_end: 0,
            lease: Lease::default(),
        });
        let is_counted = kind != Kind::Client;
        let has_room = !is_counted
            || self.shared.held.fetch_add(1, Ordering::Relaxed) < u64::from(self.shared.most_flows);
        if has_room && self.extend(&mut installed, expires_ns).is_ok() {
            return Ok(installed);
        }
        self.let_go(&installed.0);
        self.refuse();
        Err(TableFull)
    }

    /// Takes over a flow that the previous process installed in the shared maps, if it leads to `to`. The
    /// flow stays unchanged.
    pub fn adopt(&mut self, key: &FlowKey, to: SocketAddr) -> Option<Installed> {
        let leads_there = |flow: &Flow| (flow.to, flow.to_port) == (mapped(to.ip()), to.port().to_be_bytes());
        let flow = self.map.get(key, 0).ok().filter(leads_there)?;
        let ip = |ip, port| address(ip, port).ip();
        let routes = &self.shared.routes;
        routes.adopt(flow.route, ip(flow.from, flow.from_port), ip(flow.to, flow.to_port));
        routes.adopt(flow.back, ip(key.local, key.local_port), ip(key.remote, key.remote_port));
        if flow.kind != Kind::Client as u8 {
            self.shared.held.fetch_add(1, Ordering::Relaxed);
        }
        locked(&self.shared.adopted).insert(*key);
        Some(Installed(flow))
    }

    /// State of an adopted flow; the previous process has read its counters up to `seen`.
    pub fn adopt_state(&self, Installed(flow): &Installed, seen: Counted) -> FlowState {
        locked(&self.shared.state_slots).claim(flow.state);
        FlowState { slot: flow.state, seen }
    }

    pub fn adopt_socket(&self, Installed(flow): &Installed) -> u32 {
        locked(&self.shared.socket_slots).claim(flow.socket);
        flow.socket
    }

    /// Removes flows of the previous process that were not adopted; returns their number.
    pub(crate) fn remove_strangers(&mut self) -> usize {
        let adopted = std::mem::take(&mut *locked(&self.shared.adopted));
        let first = self.shared.first_stamp;
        let is_strange = |key: &FlowKey, flow: &Flow| !adopted.contains(key) && flow.stamp < first;
        let strangers: Vec<FlowKey> = self
            .map
            .iter()
            .filter_map(Result::ok)
            .filter_map(|(key, flow)| is_strange(&key, &flow).then_some(key))
            .collect();
        for key in &strangers {
            let leaves = self.map.get(key, 0).ok().and_then(|flow| flow.leaves());
            let _ = self.map.remove(key);
            if let Some((departures, leaves)) = self.departures.as_mut().zip(leaves) {
                let _ = departures.remove(&leaves);
            }
        }
        strangers.len()
    }

    /// Sets the expiry in nanoseconds of [`now_ns`]. After an error, the flow is unchanged.
    pub fn extend(&mut self, flow: &mut Installed, expires_ns: u64) -> Result<(), TableFull> {
        let Installed(flow) = flow;
        if flow.stamp != 0 && flow.expires == expires_ns {
            return Ok(());
        }
        let stamp = self.shared.stamp.fetch_add(1, Ordering::Relaxed);
        let new = Flow { stamp, expires: expires_ns, stamp_end: stamp, ..*flow };
        self.map.insert(new.key, new, 0).map_err(|_| TableFull)?;
        *flow = new;
        if let Some((departures, leaves)) = self.departures.as_mut().zip(new.leaves()) {
            // Without this entry the flow never gets a lease, and stays in user space.
            let _ = departures.insert(leaves, new.key, 0);
        }
        Ok(())
    }

    /// Removes a flow; the program no longer finds it afterwards.
    pub fn remove(&mut self, Installed(flow): Installed) {
        // Cannot be missing, because only this worker removes it.
        let _ = self.map.remove(&flow.key);
        if let Some((departures, leaves)) = self.departures.as_mut().zip(flow.leaves()) {
            let _ = departures.remove(&leaves);
        }
        self.let_go(&flow);
    }

    /// Keys of all flows, including those of other workers. Only for tests, because the kernel walks the
    /// whole map.
    pub fn keys(&self) -> Vec<FlowKey> {
        self.map.keys().filter_map(Result::ok).collect()
    }

    #[must_use]
    pub fn routes(&self) -> usize {
        self.shared.routes.len()
    }

    fn let_go(&self, flow: &Flow) {
        self.shared.routes.give_back(flow.route);
        self.shared.routes.give_back(flow.back);
        if flow.kind == Kind::Forward as u8 {
            self.shared.ports.give_back(u16::from_be_bytes(flow.key.local_port));
        }
        if flow.kind != Kind::Client as u8 {
            self.shared.held.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn refuse(&self) {
        self.shared.refused.fetch_add(1, Ordering::Relaxed);
    }

    fn read(&self, slot: u32) -> Counted {
        let word = |word| self.word(slot, word).load(Ordering::Relaxed);
        Counted { datagrams: word(DATAGRAMS), bytes: word(BYTES) }
    }

    fn word(&self, slot: u32, word: usize) -> &std::sync::atomic::AtomicU64 {
        &self.shared.states[slot as usize * STATE_WORDS + word]
    }
}

fn own(map: &MapData) -> Result<Map, OffloadError> {
    let descriptor = map.fd().as_fd().try_clone_to_owned()?;
    MapData::from_fd(descriptor).and_then(Map::from_map_data).map_err(map_error)
}

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
