//! A worker's way to the flows of the program: it installs them, removes them, and reads what they have counted. Nothing here waits, and a
//! change holds when the call returns.

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
        BEHIND, BYTES, CALM, DATAGRAMS, Flow, FlowKey, Kind, STATE_WORDS, UP, XDP_GAP_NS, address, mapped,
    },
    object::map_error,
    shared::Shared,
};

/// One worker's.
pub struct Flows {
    shared: Arc<Shared>,
    map: HashMap<MapData, FlowKey, Flow>,
}

/// A flow to be.
#[derive(Clone, Copy, Debug)]
pub struct NewFlow<'a> {
    /// What becomes of its packets.
    pub kind: Kind,
    /// Who sends them.
    pub remote: SocketAddr,
    /// Which of our addresses they come to.
    pub local: SocketAddr,
    /// On which channel they come, or, to a client, leave.
    pub channel: Option<ChannelNumber>,
    /// From which of our addresses they leave.
    pub from: SocketAddr,
    /// Where they are sent.
    pub to: SocketAddr,
    /// What it shares with others whose datagrams keep their order among each other.
    pub state: &'a State,
    /// The socket that takes what goes up, by [`Flows::socket`].
    pub socket: u32,
    /// Until when, by [`now_ns`].
    pub expires_ns: u64,
}

/// A flow that is installed; to be removed.
#[derive(Debug)]
#[must_use = "it stays until it is removed"]
pub struct Installed(Flow);

/// What changes with each datagram of one or several flows; to be given back.
#[derive(Debug)]
#[must_use = "its place is lost unless it is given back"]
pub struct State {
    slot: u32,
    seen: Counted,
}

/// Datagrams that went across, and bytes of their payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// Datagrams.
    pub datagrams: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Counted {
    /// Whether nothing was counted.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        // The program adds to one behind the other, and may be in between.
        self.datagrams == 0 && self.bytes == 0
    }
}

impl State {
    /// What its counters said when they were last read; for [`Flows::adopt_state`] of another process.
    #[must_use]
    pub fn seen(&self) -> Counted {
        self.seen
    }
}

/// No room: the flow stays in user space, and that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

impl Flows {
    pub(crate) fn new(shared: Arc<Shared>) -> Result<Self, OffloadError> {
        let descriptor = shared.flows.fd().as_fd().try_clone_to_owned()?;
        let map = MapData::from_fd(descriptor)
            .and_then(|data| HashMap::try_from(Map::from_map_data(data)?))
            .map_err(map_error)?;
        Ok(Self { shared, map })
    }

    /// A number for a socket that takes what goes up. `None` where all are given out, which is counted as no room for a flow.
    pub fn socket(&self) -> Option<u32> {
        let slot = locked(&self.shared.socket_slots).take(now_ns());
        let Some(slot) = slot else {
            self.refuse();
            return None;
        };
        self.shared.drained[slot as usize].store(0, Ordering::Relaxed);
        Some(slot)
    }

    /// The socket is closed.
    pub fn give_back_socket(&self, socket: u32) {
        locked(&self.shared.socket_slots).give_back(now_ns(), socket);
    }

    /// All that was in the queue of this socket at that time has been sent on.
    pub fn drained(&self, socket: u32, at_ns: u64) {
        // What the program has seen since then less the gap may not have been in the queue yet.
        let before_ns = at_ns.saturating_sub(self.shared.gap_ns);
        let word = &self.shared.drained[socket as usize];
        // Only the worker that has the socket writes here. Release: it was sent before this is seen.
        word.store((word.load(Ordering::Relaxed) & !BEHIND).max(before_ns), Ordering::Release);
    }

    /// Whether this worker cannot keep up with this socket, so that what its flows receive is lost in any case: then the program drops
    /// what waits for the socket to be emptied, instead of adding to it. Until the next [`Flows::drained`].
    pub fn behind(&self, socket: u32, is_behind: bool) {
        let word = &self.shared.drained[socket as usize];
        let time = word.load(Ordering::Relaxed) & !BEHIND;
        word.store(if is_behind { time | BEHIND } else { time }, Ordering::Release);
    }

    /// Whether the program sees what comes before the kernel has gathered any of it.
    #[must_use]
    pub fn come_before_gro(&self) -> bool {
        self.shared.gap_ns == XDP_GAP_NS
    }

    /// How long, after the program has seen a packet, it may take that into its socket, in nanoseconds.
    #[must_use]
    pub fn gap_ns(&self) -> u64 {
        self.shared.gap_ns
    }

    /// A state for new flows. What comes until their socket has been emptied goes up: something of theirs may be on its way.
    pub fn state(&self) -> Result<State, Full> {
        let Some(slot) = locked(&self.shared.state_slots).take(now_ns()) else {
            self.refuse();
            return Err(Full);
        };
        let state = State { slot, seen: self.read(slot) };
        // That of whoever had it before.
        self.word(slot, CALM).store(0, Ordering::Relaxed);
        self.hold_up(&state);
        Ok(state)
    }

    /// What comes until the socket has been emptied goes up.
    pub fn hold_up(&self, state: &State) {
        self.word(state.slot, UP).fetch_max(now_ns(), Ordering::Release);
    }

    /// What was counted since the last call.
    pub fn counted(&self, state: &mut State) -> Counted {
        let (before, now) = (state.seen, self.read(state.slot));
        state.seen = now;
        Counted { datagrams: now.datagrams - before.datagrams, bytes: now.bytes - before.bytes }
    }

    /// Its flows are gone; what was counted since the last call of [`Flows::counted`].
    pub fn give_back_state(&self, mut state: State) -> Counted {
        let last = self.counted(&mut state);
        locked(&self.shared.state_slots).give_back(now_ns(), state.slot);
        last
    }

    /// Installs a flow.
    ///
    /// # Errors
    /// [`Full`].
    pub fn install(&mut self, new: &NewFlow<'_>) -> Result<Installed, Full> {
        let NewFlow { kind, remote, local, channel, from, to, state, socket, expires_ns } = *new;
        let routes = &self.shared.routes;
        let Some(route) = routes.hold(from.ip(), to.ip()) else {
            self.refuse();
            return Err(Full);
        };
        let Some(back) = routes.hold(local.ip(), remote.ip()) else {
            routes.give_back(route);
            self.refuse();
            return Err(Full);
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
        });
        let is_counted = kind != Kind::Client;
        let has_room = !is_counted
            || self.shared.held.fetch_add(1, Ordering::Relaxed) < u64::from(self.shared.most_flows);
        if has_room && self.extend(&mut installed, expires_ns).is_ok() {
            return Ok(installed);
        }
        self.let_go(&installed.0);
        self.refuse();
        Err(Full)
    }

    /// A flow that the process before this one has installed in the maps that this one goes on with, if it leads there: its own from now on. It
    /// stays as it is.
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

    /// The state of a flow that was adopted, whose counters the other process has read up to `seen`.
    pub fn adopt_state(&self, Installed(flow): &Installed, seen: Counted) -> State {
        locked(&self.shared.state_slots).claim(flow.state);
        State { slot: flow.state, seen }
    }

    /// The number of the socket that takes what goes up of a flow that was adopted.
    pub fn adopt_socket(&self, Installed(flow): &Installed) -> u32 {
        locked(&self.shared.socket_slots).claim(flow.socket);
        flow.socket
    }

    /// Removes what another process has left in the maps and nobody has adopted. How many flows that were.
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
        strangers.iter().for_each(|key| _ = self.map.remove(key));
        strangers.len()
    }

    /// Lets a flow live until then, by [`now_ns`].
    ///
    /// # Errors
    /// [`Full`]: it lives as long as before.
    pub fn extend(&mut self, flow: &mut Installed, expires_ns: u64) -> Result<(), Full> {
        let Installed(flow) = flow;
        if flow.stamp != 0 && flow.expires == expires_ns {
            return Ok(());
        }
        let stamp = self.shared.stamp.fetch_add(1, Ordering::Relaxed);
        let new = Flow { stamp, expires: expires_ns, stamp_end: stamp, ..*flow };
        self.map.insert(new.key, new, 0).map_err(|_| Full)?;
        *flow = new;
        Ok(())
    }

    /// Removes a flow: when this returns, the program does not find it any more.
    pub fn remove(&mut self, Installed(flow): Installed) {
        // It is ours alone, so that it is there.
        let _ = self.map.remove(&flow.key);
        self.let_go(&flow);
    }

    /// Keys of all flows in the map, those of other workers too. For tests: the kernel walks the whole map.
    pub fn keys(&self) -> Vec<FlowKey> {
        self.map.keys().filter_map(Result::ok).collect()
    }

    /// Routes that are held, those of other workers too. For tests.
    #[must_use]
    pub fn routes(&self) -> usize {
        self.shared.routes.len()
    }

    /// Gives back what a flow holds beside its place in the map.
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

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
