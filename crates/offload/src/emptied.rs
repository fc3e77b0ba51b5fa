//! Which sockets have had something lately, and since when they are known to be empty, which the program waits for: nothing overtakes what
//! went through user space. epoll tells it without being asked: a socket that a wait does not name was empty when it began, and all that it
//! had was sent before.

use crate::{
    flows::{Flows, now_ns},
    layout,
};

/// A packet is in its socket's queue so long after the program has seen it, at the latest: both happen in one run of a softirq, which hands
/// on eight packets at a time.
const GAP_NS: u64 = 100_000;
/// How long the program keeps a flow in user space after a super-packet; so long has a socket to be watched.
const CALM_NS: u64 = layout::CALM_NS + GAP_NS;
/// Between two looks at sockets that have had something, in milliseconds: soon after they had, and when the flow has been calm.
const SOON_MS: u64 = 1;
const CALM_MS: u64 = CALM_NS.div_ceil(1_000_000) + 1;

/// The sockets of one worker, by numbers that are small and the worker's own.
#[derive(Default)]
pub struct Emptied {
    /// By the number of the socket, while flows need it.
    places: Vec<Option<Place>>,
    /// Numbers of those sockets that are watched.
    watched: Vec<u32>,
    /// When the wait began of which we look at the result.
    before_ns: u64,
    look_ms: u64,
    /// At once, without waiting.
    again: bool,
    /// Counts waits.
    wait: u64,
}

#[derive(Clone, Copy)]
struct Place {
    /// In `drained`.
    slot: u32,
    is_watched: bool,
    /// The last wait that told of the socket.
    ready: u64,
    /// Not after this was it touched last; 0 for not yet known.
    touched_ns: u64,
}

impl Emptied {
    /// The socket's number in the program's map, for [`crate::NewFlow::socket`].
    pub fn slot(&mut self, socket: u32, flows: &Flows) -> Option<u32> {
        let at = socket as usize;
        if self.places.len() <= at {
            self.places.resize(at + 1, None);
        }
        if self.places[at].is_none() {
            let place = |slot| Place { slot, is_watched: false, ready: 0, touched_ns: 0 };
            self.places[at] = flows.socket().map(place);
        }
        self.places[at].map(|place| place.slot)
    }

    /// The socket is about to be closed, or its number to be another's; its flows are gone.
    pub fn forget(&mut self, socket: u32, flows: &Flows) {
        if let Some(place) = self.places.get_mut(socket as usize).and_then(Option::take) {
            flows.give_back_socket(place.slot);
            if place.is_watched {
                self.watched.retain(|watched| *watched != socket);
            }
        }
    }

    /// Something may be on its way through this socket.
    pub fn touch(&mut self, socket: u32) {
        let Some(Some(place)) = self.places.get_mut(socket as usize) else { return };
        (place.ready, place.touched_ns) = (self.wait, 0);
        if !place.is_watched {
            place.is_watched = true;
            self.watched.push(socket);
        }
    }

    /// Before the worker waits for events. True if it is to look only, and not to sleep.
    pub fn before_wait(&mut self) -> bool {
        self.before_ns = now_ns();
        self.again && !self.watched.is_empty()
    }

    /// What the worker was told: sockets that are ready (numbers of none are passed over), whether it was told anything at all, and whether
    /// there is nothing else ready.
    pub fn after_wait(
        &mut self,
        now_ms: u64,
        ready: impl Iterator<Item = u32>,
        any: bool,
        are_all: bool,
        flows: &Flows,
    ) {
        self.wait += 1;
        ready.for_each(|socket| self.touch(socket));
        // One look more behind whatever came: what is empty then was sent just now.
        self.again = !self.watched.is_empty() && (any || now_ms >= self.look_ms);
        if !are_all || self.watched.is_empty() {
            return;
        }
        let (wait, before_ns) = (self.wait, self.before_ns);
        // What was queued before the wait began, and is not told of, was read and sent before.
        let empty_ns = before_ns.saturating_sub(GAP_NS);
        let mut next_ms = now_ms + CALM_MS;
        let places = &mut self.places;
        self.watched.retain(|socket| {
            let Some(Some(place)) = places.get_mut(*socket as usize) else { return false };
            if place.ready == wait {
                next_ms = now_ms + SOON_MS;
                return true;
            }
            if place.touched_ns == 0 {
                place.touched_ns = before_ns;
            }
            flows.drained(place.slot, empty_ns);
            if empty_ns < place.touched_ns {
                next_ms = now_ms + SOON_MS;
            }
            place.is_watched = empty_ns < place.touched_ns + CALM_NS;
            place.is_watched
        });
        self.look_ms = next_ms;
    }

    /// When to look without an event, in milliseconds.
    #[must_use]
    pub fn due(&self) -> Option<u64> {
        (!self.watched.is_empty()).then_some(if self.again { 0 } else { self.look_ms })
    }
}
