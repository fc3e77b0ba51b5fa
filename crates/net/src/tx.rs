//! Send queue: datagrams are queued during a tick and leave in super-packets.
//!
//! ```text
//! push ─▶ datagrams, chained by route ─▶ flush: per socket, per route, runs of equal size
//!                                         header │ payload in the arena │ padding   ⎫ iovecs of one message,
//!                                         header │ payload in the arena │ padding   ⎭ UDP_SEGMENT = size
//! ```
//!
//! Adjacent pieces share an iovec, so a reflected super-packet, or a run of generated datagrams, needs only
//! one.

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use std::hash::BuildHasher;

use crate::{
    ArenaSpan, Datapath, Rx, SocketId, Sockets,
    queued::{NONE, Payload, Queued, Route, TxStats},
    send::{self, Bytes, Linux, SendBatch, SendCalls},
};

/// Routes per socket that are searched linearly instead of in a table.
const FEW: u32 = 4;

#[derive(Clone, Copy)]
struct RouteGroup {
    route: Route,
    first: u32,
    last: u32,
    next_of_socket: u32,
}

/// Routes queued for one socket.
#[derive(Clone, Copy)]
struct Chain {
    first: u32,
    last: u32,
    count: u32,
}

const EMPTY: Chain = Chain { first: NONE, last: NONE, count: 0 };

pub struct Tx {
    datapath: Datapath,
    own: Vec<u8>,
    queue: Vec<Queued>,
    queued: usize,
    groups: Vec<RouteGroup>,
    /// Indexed by socket.
    chains: Vec<Chain>,
    touched: Vec<SocketId>,
    /// Groups of sockets with more than `FEW` routes.
    table: HashTable<u32>,
    hasher: RandomState,
    batch: SendBatch,
    stats: TxStats,
}

impl Tx {
    pub fn new(datapath: Datapath) -> Self {
        Self::with_segments(datapath, if datapath == Datapath::Gso { send::max_segments() } else { 1 })
    }

    /// `segments` is the maximum number of segments per super-packet.
    pub(crate) fn with_segments(datapath: Datapath, segments: usize) -> Self {
        Self {
            datapath,
            own: Vec::with_capacity(1 << 16),
            queue: Vec::with_capacity(4096),
            queued: 0,
            groups: Vec::with_capacity(512),
            chains: Vec::new(),
            touched: Vec::with_capacity(512),
            table: HashTable::new(),
            hasher: RandomState::default(),
            batch: SendBatch::new(segments),
            stats: TxStats::default(),
        }
    }

    /// Queues `header ++ payload ++ padding zero bytes`. The header is at most 64 KiB long; the payload stays
    /// in the arena.
    ///
    /// # Panics
    /// If `padding` exceeds 3, the maximum of STUN and ChannelData.
    #[inline]
    pub fn push(&mut self, route: &Route, header: &[u8], payload: ArenaSpan, padding: u8) {
        assert!(padding <= 3, "padding rounds up to a multiple of 4");
        let at = self.own_end();
        self.own.extend_from_slice(header);
        #[expect(clippy::cast_possible_truncation, reason = "headers are a few dozen bytes")]
        let header_len = header.len() as u16;
        let len = u32::from(header_len) + payload.len + u32::from(padding);
        self.append(
            route,
            Queued {
                header: at,
                header_len,
                padding,
                payload: Payload::Arena(payload),
                len,
                run: 1,
                next: NONE,
            },
        );
    }

    pub fn push_bytes(&mut self, route: &Route, bytes: &[u8]) {
        self.push_run(route, 1, bytes.len(), |out| out.copy_from_slice(bytes));
    }

    /// Queues `count` datagrams of `len` bytes, written by `fill` into one contiguous buffer with arbitrary
    /// content. Cheaper than single pushes, for load generators. If there are several datagrams, they start a
    /// new super-packet.
    #[inline]
    pub fn push_run(&mut self, route: &Route, count: usize, len: usize, fill: impl FnOnce(&mut [u8])) {
        if count == 0 {
            return;
        }
        let at = self.own_end();
        let start = self.own.len();
        self.own.resize(start + count * len, 0);
        fill(&mut self.own[start..]);
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a datagram is shorter than 64 KiB, and a tick has far fewer than 2^32 of them"
        )]
        let (len, run) = (len as u32, count as u32);
        self.append(
            route,
            Queued { header: at, header_len: 0, padding: 0, payload: Payload::Own(at), len, run, next: NONE },
        );
    }

    /// Datagrams queued since the last flush.
    pub fn queued(&self) -> usize {
        self.queued
    }

    /// Sends the queue. Datagrams that the kernel refuses are dropped and counted.
    pub fn flush(&mut self, sockets: &mut Sockets, rx: &Rx) {
        self.flush_through(&mut Linux, sockets, rx);
    }

    pub fn stats(&self) -> &TxStats {
        &self.stats
    }

    pub(crate) fn flush_through(&mut self, kernel: &mut impl SendCalls, sockets: &mut Sockets, rx: &Rx) {
        for index in 0..self.touched.len() {
            let id = self.touched[index];
            let chain = std::mem::replace(&mut self.chains[id.index()], EMPTY);
            let Some(socket) = sockets.get(id) else {
                self.stats.refused += self.count(chain);
                continue;
            };
            let bytes = Bytes { own: &self.own, rx };
            let one_by_one = self.datapath == Datapath::Basic;
            let mut sender = self.batch.open(kernel, socket, bytes, one_by_one, &mut self.stats);
            // DF is a socket option, and sending datagrams with DF last takes two changes of the option per
            // flush instead of one per route.
            let mut also_df = false;
            for df in [false, true] {
                if df && !also_df {
                    break;
                }
                let mut group = chain.first;
                while group != NONE {
                    let RouteGroup { route, first, next_of_socket, .. } = self.groups[group as usize];
                    group = next_of_socket;
                    if route.dont_fragment != df {
                        also_df = true;
                        continue;
                    }
                    let mut next = first;
                    sender.route(&route);
                    while next != NONE {
                        let queued = &self.queue[next as usize];
                        sender.push(queued);
                        next = queued.next;
                    }
                }
            }
            sender.finish();
        }
        self.touched.clear();
        self.groups.clear();
        self.queue.clear();
        self.queued = 0;
        self.own.clear();
        if !self.table.is_empty() {
            self.table.clear();
        }
    }

    #[cold]
    fn count(&self, chain: Chain) -> u64 {
        let mut count = 0;
        let mut group = chain.first;
        while group != NONE {
            let mut next = self.groups[group as usize].first;
            while next != NONE {
                count += u64::from(self.queue[next as usize].run);
                next = self.queue[next as usize].next;
            }
            group = self.groups[group as usize].next_of_socket;
        }
        count
    }

    fn own_end(&self) -> u32 {
        u32::try_from(self.own.len()).unwrap_or(u32::MAX)
    }

    #[inline]
    fn append(&mut self, route: &Route, queued: Queued) {
        #[expect(clippy::cast_possible_truncation, reason = "a tick queues far fewer than 2^32 datagrams")]
        let index = self.queue.len() as u32;
        self.queued += queued.run as usize;
        self.queue.push(queued);
        let group = self.group(route);
        let group = &mut self.groups[group];
        if group.last == NONE {
            group.first = index;
        } else {
            self.queue[group.last as usize].next = index;
        }
        group.last = index;
    }

    /// Index of the route's group, created if missing. Consecutive datagrams often have the same route, so
    /// the newest group is tried first.
    #[inline]
    fn group(&mut self, route: &Route) -> usize {
        if let Some(newest) = self.groups.last()
            && newest.route == *route
        {
            return self.groups.len() - 1;
        }
        self.find_or_make(route)
    }

    fn find_or_make(&mut self, route: &Route) -> usize {
        let socket = route.socket.index();
        if socket >= self.chains.len() {
            self.chains.resize(socket + 1, EMPTY);
        }
        let chain = self.chains[socket];
        if chain.count <= FEW {
            let mut at = chain.first;
            while at != NONE {
                let group = &self.groups[at as usize];
                if group.route == *route {
                    return at as usize;
                }
                at = group.next_of_socket;
            }
        } else {
            let hash = self.hasher.hash_one(route);
            if let Some(found) = self.table.find(hash, |at| self.groups[*at as usize].route == *route) {
                return *found as usize;
            }
        }
        self.make(route, chain)
    }

    fn make(&mut self, route: &Route, mut chain: Chain) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "a tick queues far fewer than 2^32 datagrams")]
        let new = self.groups.len() as u32;
        self.groups.push(RouteGroup { route: *route, first: NONE, last: NONE, next_of_socket: NONE });
        if chain.count == 0 {
            self.touched.push(route.socket);
            chain.first = new;
        } else {
            self.groups[chain.last as usize].next_of_socket = new;
        }
        chain.last = new;
        chain.count += 1;
        self.chains[route.socket.index()] = chain;
        if chain.count > FEW {
            let mut at = if chain.count == FEW + 1 { chain.first } else { new };
            while at != NONE {
                let hash = self.hasher.hash_one(self.groups[at as usize].route);
                let (groups, hasher) = (&self.groups, &self.hasher);
                self.table.insert_unique(hash, at, |other| hasher.hash_one(groups[*other as usize].route));
                at = self.groups[at as usize].next_of_socket;
            }
        }
        new as usize
    }
}
