//! What the control plane knows of an allocation (RFC 8656 section 3.2): who made it, how its requests are answered again, and what else
//! it has that no datagram needs. Small while idle: what only an Allocate in progress needs is freed with it.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::{
    AllocationId, Family, UserRef,
    auth::{
        claim::{Grant, Who},
        replay::Recorded,
        secret::Secret,
    },
    data::forwarding::Entry,
    mobility::Mobility,
    request::{connections::TcpRelay, response::Envelope},
};
use crate::random::Random;

/// Names a session for as long as it lives, on whichever worker and in whichever process it is: 128 random bits, written as 32 hex
/// digits. A number that counts would come again after a restart, and end somebody else's session for whoever kept it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SessionId([u8; 16]);

impl SessionId {
    pub(crate) fn draw(random: &mut Random) -> Self {
        Self(random.bytes())
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionId({self})")
    }
}

/// No session is called this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a session is named by 32 hex digits")]
pub struct NoSessionId;

impl FromStr for SessionId {
    type Err = NoSessionId;

    fn from_str(text: &str) -> Result<Self, NoSessionId> {
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(NoSessionId);
        }
        u128::from_str_radix(text, 16).map(|bits| Self(bits.to_be_bytes())).map_err(|_| NoSessionId)
    }
}

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

    /// Its user, as quotas count it.
    pub(crate) fn user(&self) -> UserRef<'_> {
        UserRef::new(&self.realm, self.identity())
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
    use crate::random::Seed;

    #[test]
    fn a_name_is_read_as_it_is_written_and_in_no_other_way() {
        let id = SessionId::draw(&mut Random::new(Seed([7; 32])));
        let text = id.to_string();
        assert_eq!((text.len(), text.parse()), (32, Ok(id)));
        assert_eq!(SessionId([0; 16]).to_string(), "0".repeat(32));
        let longer = format!("{text}0");
        let signed = format!("+{}", &text[1..]);
        for bad in ["", &text[1..], &longer, &signed, &"g".repeat(32), &"\u{e9}".repeat(16)] {
            assert_eq!(bad.parse::<SessionId>(), Err(NoSessionId), "{bad:?}");
        }
    }

    #[test]
    fn an_idle_allocation_is_small() {
        let sizes = (size_of::<Entry>(), size_of::<Session>());
        println!("{sizes:?} bytes");
        // Beside it: the username, two table slots (24), a timer (16), a hash entry (about 8), the allocator's headers.
        assert!(sizes.0 + sizes.1 <= 448, "{sizes:?}");
    }
}
