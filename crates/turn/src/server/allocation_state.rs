//! Control-plane state of an allocation. State of an Allocate in progress is boxed, so that idle allocations
//! stay small.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::{
    AllocationSlot, AllocationUsage, Family, UserRef,
    auth::{
        claim::{TokenGrant, Who},
        masked::Masked,
        replay::Recorded,
    },
    data::forwarding::ForwardingEntry,
    mobility::Mobility,
    request::{connections::TcpRelay, response::Envelope},
};
use crate::random::Random;

/// 128 random bits, written as 32 hex digits. A counter would repeat after a restart, so a command with an
/// old ID could close the wrong allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AllocationId([u8; 16]);

impl AllocationId {
    pub(crate) fn draw(random: &mut Random) -> Self {
        Self(random.bytes())
    }
}

impl fmt::Display for AllocationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for AllocationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AllocationId({self})")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an allocation ID: expected 32 hex digits")]
pub struct InvalidAllocationId;

impl FromStr for AllocationId {
    type Err = InvalidAllocationId;

    fn from_str(text: &str) -> Result<Self, InvalidAllocationId> {
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(InvalidAllocationId);
        }
        u128::from_str_radix(text, 16).map(|bits| Self(bits.to_be_bytes())).map_err(|_| InvalidAllocationId)
    }
}

pub(crate) struct AllocationState {
    pub(crate) id: AllocationId,
    pub(crate) realm: Arc<str>,
    /// USERNAME of the Allocate; later requests must use the same one (RFC 8656 section 5).
    pub(crate) username: Box<str>,
    pub(crate) identity: Option<Box<str>>,
    /// Client's address prefix at allocation time; quotas keep counting the allocation under this prefix.
    pub(crate) prefix: IpAddr,
    pub(crate) grant: Option<Box<TokenGrant>>,
    /// Expiry of a time-limited credential, in Unix seconds.
    pub(crate) until_unix: Option<u64>,
    pub(crate) opened_ms: u64,
    /// Transaction ID of the Allocate. This and the next three fields reproduce the response for
    /// retransmissions.
    pub(crate) transaction: [u8; 12],
    pub(crate) granted: u32,
    pub(crate) reservation: Option<Masked<[u8; 8]>>,
    pub(crate) address_error: Option<(Family, u16)>,
    /// Totals in the last report to the usage ledger.
    pub(crate) reported: Option<Box<AllocationUsage>>,
    /// Relayed transport address that ended first in a dual-stack allocation, for the log.
    pub(crate) former: Option<Box<SocketAddr>>,
    /// Present while relay sockets are being opened.
    pub(crate) pending: Option<Box<Pending>>,
    pub(crate) tcp: Option<Box<TcpRelay>>,
    /// Present if the client requested mobility (RFC 8016).
    pub(crate) mobility: Option<Box<Mobility>>,
}

pub(crate) struct Pending {
    pub(crate) envelope: Envelope,
    pub(crate) first: Family,
    pub(crate) second: Option<Family>,
    pub(crate) mobile: bool,
    pub(crate) recorded: Option<Recorded>,
    pub(crate) asked_ms: u64,
}

impl AllocationState {
    pub(crate) fn identity(&self) -> &str {
        self.identity.as_deref().unwrap_or(&self.username)
    }

    pub(crate) fn user(&self) -> UserRef<'_> {
        UserRef::new(&self.realm, self.identity())
    }

    /// True if the allocation belongs to this user, on any 5-tuple. The USERNAME of a token user
    /// names a key that many clients share, so the token must match.
    pub(crate) fn is_of(&self, who: &Who) -> bool {
        let same = match (&self.grant, &who.grant) {
            (None, None) => self.username == who.username,
            (Some(held), Some(shown)) => held.is_same(shown) || *self.identity() == *who.identity,
            _ => false,
        };
        same && self.is_in(&who.realm)
    }

    /// A username in another realm is a different user.
    pub(crate) fn is_in(&self, realm: &str) -> bool {
        *self.realm == *realm
    }

    /// Relayed addresses, IPv4 first, including one that has already ended.
    pub(crate) fn relayed(&self, entry: &ForwardingEntry) -> [Option<SocketAddr>; 2] {
        let former = |family| self.former.as_deref().filter(|address| Family::of(address.ip()) == family);
        [Family::V4, Family::V6].map(|family| {
            let relay = entry.relays[family as usize];
            relay.map(|relay| relay.address).or_else(|| former(family).copied())
        })
    }
}

#[derive(Default)]
pub(crate) struct AllocationStates(Vec<Option<Box<AllocationState>>>);

impl AllocationStates {
    pub(crate) fn get(&mut self, index: u32) -> Option<&mut AllocationState> {
        self.0.get_mut(index as usize)?.as_deref_mut()
    }

    pub(crate) fn insert(&mut self, id: AllocationSlot, state: AllocationState) {
        let index = id.index as usize;
        if self.0.len() <= index {
            self.0.resize_with(index + 1, || None);
        }
        self.0[index] = Some(Box::new(state));
    }

    pub(crate) fn remove(&mut self, index: u32) -> Option<Box<AllocationState>> {
        self.0.get_mut(index as usize)?.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Seed;

    #[test]
    fn an_allocation_id_parses_only_as_displayed() {
        let id = AllocationId::draw(&mut Random::new(Seed([7; 32])));
        let text = id.to_string();
        assert_eq!((text.len(), text.parse()), (32, Ok(id)));
        assert_eq!(AllocationId([0; 16]).to_string(), "0".repeat(32));
        let longer = format!("{text}0");
        let signed = format!("+{}", &text[1..]);
        for bad in ["", &text[1..], &longer, &signed, &"g".repeat(32), &"\u{e9}".repeat(16)] {
            assert_eq!(bad.parse::<AllocationId>(), Err(InvalidAllocationId), "{bad:?}");
        }
    }

    #[test]
    fn an_idle_allocation_is_small() {
        let sizes = (size_of::<ForwardingEntry>(), size_of::<AllocationState>());
        println!("{sizes:?} bytes");
        // Not included: the username, two table slots (24 bytes), a timer (16), a hash entry (about 8) and
        // allocator headers.
        assert!(sizes.0 + sizes.1 <= 456, "{sizes:?}");
    }
}
