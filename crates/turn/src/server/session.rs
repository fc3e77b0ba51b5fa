//! What the control plane knows of an allocation (RFC 8656 section 3.2): who made it, how its requests are answered again, and what else
//! it has that no datagram needs. Small while idle: what only an Allocate in progress needs is freed with it.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{
    AllocationId, Family,
    auth::{Who, replay::Recorded, secret::Secret, third_party::Grant},
    data::forwarding::Entry,
    mobility::Mobility,
    request::{connections::TcpRelay, response::Envelope},
    view::SessionId,
};

pub(crate) struct Session {
    pub(crate) id: SessionId,
    /// Where its user is known.
    pub(crate) realm: Arc<str>,
    /// Of the Allocate: later requests must have the same (RFC 8656 section 5).
    pub(crate) username: Box<str>,
    /// Whom quotas count, if not the username.
    pub(crate) identity: Option<Box<str>>,
    /// Where its client was when it was made: quotas count it there.
    pub(crate) prefix: IpAddr,
    /// Of a client that authenticates with tokens, its last one.
    pub(crate) grant: Option<Box<Grant>>,
    /// Last Unix second of the time-limited credential that made it.
    pub(crate) until_unix: Option<u64>,
    pub(crate) opened_ms: u64,
    /// Of the Allocate request, and what else its answer said: to answer it again.
    pub(crate) transaction: [u8; 12],
    pub(crate) granted: u32,
    pub(crate) reservation: Option<Secret<[u8; 8]>>,
    pub(crate) address_error: Option<(Family, u16)>,
    /// The one of two relayed transport addresses that has ended before the other; for the log.
    pub(crate) former: Option<Box<SocketAddr>>,
    /// While relay sockets are being opened.
    pub(crate) pending: Option<Box<Pending>>,
    /// Where TCP is relayed (RFC 6062): its connections.
    pub(crate) tcp: Option<Box<TcpRelay>>,
    /// Where the client has asked for it (RFC 8016).
    pub(crate) mobility: Option<Box<Mobility>>,
}

/// What the answer to an Allocate in progress needs.
pub(crate) struct Pending {
    pub(crate) envelope: Envelope,
    pub(crate) first: Family,
    pub(crate) second: Option<Family>,
    /// Whether the client wants a mobility ticket.
    pub(crate) mobile: bool,
    /// None without authentication.
    pub(crate) recorded: Option<Recorded>,
    /// When the request came, in milliseconds.
    pub(crate) asked_ms: u64,
}

impl Session {
    pub(crate) fn identity(&self) -> &str {
        self.identity.as_deref().unwrap_or(&self.username)
    }

    /// Whether this is who made it, on whatever 5-tuple the request came. A token's USERNAME is its key's name, which all
    /// have who were given one: there it has to be the same token.
    pub(crate) fn is_of(&self, who: &Who) -> bool {
        let same = match (&self.grant, &who.grant) {
            (None, None) => self.username == who.username,
            (Some(held), Some(shown)) => held.is_same(shown) || *self.identity() == *who.identity,
            _ => false,
        };
        same && self.is_in(&who.realm)
    }

    /// Whether its user is one of this realm. A user of the same name in another realm is another.
    pub(crate) fn is_in(&self, realm: &str) -> bool {
        *self.realm == *realm
    }

    /// Every relayed transport address that it has had, IPv4 first.
    pub(crate) fn relayed(&self, entry: &Entry) -> [Option<SocketAddr>; 2] {
        let former = |family| self.former.as_deref().filter(|address| Family::of(address.ip()) == family);
        [Family::V4, Family::V6].map(|family| {
            let relay = entry.relays[family as usize];
            relay.map(|relay| relay.address).or_else(|| former(family).copied())
        })
    }
}

/// The sessions of a worker, in the slots of their allocations.
#[derive(Default)]
pub(crate) struct Sessions(Vec<Option<Box<Session>>>);

impl Sessions {
    pub(crate) fn get(&mut self, index: u32) -> Option<&mut Session> {
        self.0.get_mut(index as usize)?.as_deref_mut()
    }

    pub(crate) fn insert(&mut self, id: AllocationId, session: Session) {
        let index = id.index as usize;
        if self.0.len() <= index {
            self.0.resize_with(index + 1, || None);
        }
        self.0[index] = Some(Box::new(session));
    }

    pub(crate) fn remove(&mut self, index: u32) -> Option<Box<Session>> {
        self.0.get_mut(index as usize)?.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_allocation_is_small() {
        let sizes = (size_of::<Entry>(), size_of::<Session>());
        println!("{sizes:?} bytes");
        // Beside it: the username, two table slots (24), a timer (16), a hash entry (about 8), the allocator's headers.
        assert!(sizes.0 + sizes.1 <= 448, "{sizes:?}");
    }
}
