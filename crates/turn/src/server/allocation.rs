//! One allocation (RFC 8656 section 3.2), with its permissions and channels. Small while idle: both lists are empty
//! vectors until used, and what only an Allocate in progress needs is freed with it.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use turnpike_wire::channel_data::ChannelNumber;

use super::{
    Client, Family,
    auth::Who,
    connections::TcpRelay,
    granted::Noted,
    mobility::{Mobility, shift},
    response::Signer,
    third_party::Grant,
};

/// Up to here a scan is faster than a search.
const FEW: usize = 8;

pub(super) struct Allocation {
    pub(super) client: Client,
    /// Where its user is known.
    pub(super) realm: Arc<str>,
    /// "The username [...] of the Allocate request" (RFC 8656 section 5): later requests must have the same.
    pub(super) username: Box<str>,
    /// Whom quotas count, if not the username.
    pub(super) identity: Option<Box<str>>,
    /// Of a client that authenticates with tokens, its last one.
    pub(super) grant: Option<Box<Grant>>,
    pub(super) opened_ms: u64,
    /// Of the Allocate request, and what else its answer said: to answer it again.
    pub(super) transaction: [u8; 12],
    pub(super) granted: u32,
    pub(super) reservation: Option<[u8; 8]>,
    pub(super) address_error: Option<(Family, u16)>,
    /// Relayed transport addresses: IPv4, IPv6.
    pub(super) relays: [Option<Relay>; 2],
    /// The one of two that has ended before the other; for the log.
    pub(super) former: Option<Box<SocketAddr>>,
    pub(super) channels: Channels,
    pub(super) permissions: Permissions,
    pub(super) to_peer: (u64, u64),
    pub(super) to_client: (u64, u64),
    /// While relay sockets are being opened.
    pub(super) pending: Option<Box<Pending>>,
    /// Where TCP is relayed (RFC 6062): its connections.
    pub(super) tcp: Option<Box<TcpRelay>>,
    /// Where the client has asked for it (RFC 8016).
    pub(super) mobility: Option<Box<Mobility>>,
    /// Mobile, and its client's connection is closed: nothing can be sent to `client`, which may be somebody else's by now.
    pub(super) away: bool,
}

/// One relayed transport address.
#[derive(Clone, Copy)]
pub(super) struct Relay {
    pub(super) address: SocketAddr,
    pub(super) expires_ms: u64,
}

/// What the answer to an Allocate in progress needs.
pub(super) struct Pending {
    pub(super) signer: Option<Signer>,
    pub(super) fingerprint: bool,
    pub(super) first: Family,
    pub(super) second: Option<Family>,
    /// Whether the client wants a mobility ticket.
    pub(super) mobile: bool,
    /// None where nobody authenticates.
    pub(super) noted: Option<Noted>,
}

impl Allocation {
    pub(super) fn identity(&self) -> &str {
        self.identity.as_deref().unwrap_or(&self.username)
    }

    /// Whether this is who made it, on whatever 5-tuple the request came. A token's USERNAME is its key's name, which all
    /// have who were given one: there it has to be the same token.
    pub(super) fn is_of(&self, who: &Who) -> bool {
        let same = match (&self.grant, &who.grant) {
            (None, None) => self.username == who.username,
            (Some(held), Some(shown)) => held.is_same(shown) || *self.identity() == *who.identity,
            _ => false,
        };
        same && self.is_in(&who.realm)
    }

    /// Whether its user is one of this realm. A user of the same name in another realm is another.
    pub(super) fn is_in(&self, realm: &str) -> bool {
        *self.realm == *realm
    }

    /// Milliseconds until it expires, all of it.
    pub(super) fn patience_ms(&self, now_ms: u64) -> u64 {
        let expires_ms = self.relays.iter().flatten().map(|relay| relay.expires_ms).max();
        expires_ms.unwrap_or(now_ms).saturating_sub(now_ms)
    }

    pub(super) fn relay(&mut self, family: Family) -> &mut Option<Relay> {
        &mut self.relays[family as usize]
    }

    pub(super) fn has(&self, family: Family) -> bool {
        self.relays[family as usize].is_some()
    }

    /// Every relayed transport address that it has had, IPv4 first.
    pub(super) fn relayed(&self) -> [Option<SocketAddr>; 2] {
        let former = |family| self.former.as_deref().filter(|address| Family::of(address.ip()) == family);
        [Family::V4, Family::V6].map(|family| {
            let relay = self.relays[family as usize];
            relay.map(|relay| relay.address).or_else(|| former(family).copied())
        })
    }

    /// When the next of its relayed transport addresses expires, or one of its connections has to be looked at.
    pub(super) fn expires_ms(&self) -> Option<u64> {
        let relays = self.relays.iter().flatten().map(|relay| relay.expires_ms);
        relays.chain(self.tcp.iter().flat_map(|tcp| tcp.deadlines())).min()
    }

    /// All times of one worker's clock in another's.
    pub(super) fn rebase(&mut self, theirs: u64, ours: u64) {
        let rebase = |ms: &mut u64| *ms = shift(*ms, theirs, ours);
        rebase(&mut self.opened_ms);
        self.relays.iter_mut().flatten().for_each(|relay| rebase(&mut relay.expires_ms));
        self.permissions.list.iter_mut().for_each(|permission| rebase(&mut permission.expires_ms));
        for channel in &mut self.channels.list {
            rebase(&mut channel.expires_ms);
            rebase(&mut channel.permitted_until_ms);
        }
        if let Some(mobility) = &mut self.mobility {
            mobility.rebase(theirs, ours);
        }
    }

    /// RFC 8656 section 8.1: "Deleting a single allocation destroys any permissions or channels associated with that
    /// particular allocation; it MUST NOT affect" those of the other family.
    pub(super) fn forget(&mut self, family: Family) {
        self.former = self.relay(family).take().map(|relay| Box::new(relay.address));
        self.retain_peers(|ip| Family::of(ip) != family, |peer| Family::of(peer.ip()) != family);
    }

    /// Keeps the permissions and the channels of these peers.
    pub(super) fn retain_peers(
        &mut self,
        permitted: impl Fn(IpAddr) -> bool,
        bound: impl Fn(SocketAddr) -> bool,
    ) {
        self.permissions.list.retain(|permission| permitted(permission.ip));
        self.channels.retain(|channel| bound(channel.peer));
    }

    /// Installs or refreshes a permission. The caller has asked [`Permissions::room_for`].
    pub(super) fn permit(&mut self, ip: IpAddr, expires_ms: u64) {
        self.permissions.insert(ip, expires_ms);
        for channel in &mut self.channels.list {
            if channel.peer.ip() == ip {
                channel.permitted_until_ms = expires_ms;
            }
        }
    }
}

impl Family {
    pub(super) fn of(ip: IpAddr) -> Self {
        if ip.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

/// Installed permissions (RFC 8656 section 9), sorted by address.
#[derive(Default)]
pub(super) struct Permissions {
    list: Vec<Permission>,
}

struct Permission {
    ip: IpAddr,
    expires_ms: u64,
}

impl Permissions {
    #[inline]
    pub(super) fn allow(&self, ip: IpAddr, now_ms: u64) -> bool {
        let found = if self.list.len() <= FEW {
            self.list.iter().find(|permission| permission.ip == ip)
        } else {
            self.position(ip).ok().map(|at| &self.list[at])
        };
        found.is_some_and(|permission| permission.expires_ms > now_ms)
    }

    /// Whether these distinct addresses fit in as well. Sweeps out the expired, if it must.
    pub(super) fn room_for(&mut self, ips: &[IpAddr], now_ms: u64, most: usize) -> bool {
        let new = |this: &Self| ips.iter().filter(|ip| this.position(**ip).is_err()).count();
        if self.list.len() + new(self) <= most {
            return true;
        }
        self.list.retain(|permission| permission.expires_ms > now_ms);
        self.list.len() + new(self) <= most
    }

    fn insert(&mut self, ip: IpAddr, expires_ms: u64) {
        match self.position(ip) {
            Ok(at) => self.list[at].expires_ms = expires_ms,
            Err(at) => {
                if self.list.capacity() == 0 {
                    self.list.reserve_exact(1);
                }
                self.list.insert(at, Permission { ip, expires_ms });
            }
        }
    }

    fn position(&self, ip: IpAddr) -> Result<usize, usize> {
        self.list.binary_search_by(|permission| permission.ip.cmp(&ip))
    }
}

/// A channel binding (RFC 8656 section 12).
#[derive(Clone, Copy)]
pub(super) struct Channel {
    pub(super) peer: SocketAddr,
    pub(super) expires_ms: u64,
    /// Of the permission for the peer's address, so that a datagram from the peer needs one lookup.
    pub(super) permitted_until_ms: u64,
    pub(super) number: ChannelNumber,
}

/// Why a channel cannot be bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BindError {
    /// The number is bound to another peer, or the peer to another number: 400.
    Conflict,
    /// As many as there may be: 508.
    Full,
}

/// Bound channels, sorted by number; once there are many, with an index by peer.
#[derive(Default)]
pub(super) struct Channels {
    list: Vec<Channel>,
    /// Positions in `list`, sorted by peer. Empty while there are few.
    by_peer: Box<[u16]>,
}

impl Channels {
    /// The channel of this number, unless it has expired.
    #[inline]
    pub(super) fn by_number(&self, number: ChannelNumber, now_ms: u64) -> Option<&Channel> {
        let found = if self.list.len() <= FEW {
            self.list.iter().find(|channel| channel.number == number)
        } else {
            self.position(number).ok().map(|at| &self.list[at])
        };
        found.filter(|channel| channel.expires_ms > now_ms)
    }

    /// The channel of this peer, unless it has expired.
    #[inline]
    pub(super) fn by_peer(&self, peer: SocketAddr, now_ms: u64) -> Option<&Channel> {
        let found = if self.list.len() <= FEW {
            self.list.iter().find(|channel| channel.peer == peer)
        } else {
            self.by_peer
                .binary_search_by(|at| self.list[usize::from(*at)].peer.cmp(&peer))
                .ok()
                .map(|at| &self.list[usize::from(self.by_peer[at])])
        };
        found.filter(|channel| channel.expires_ms > now_ms)
    }

    /// Checks that [`Channels::bind`] may be called. Sweeps out the expired, if it must.
    pub(super) fn may_bind(
        &mut self,
        number: ChannelNumber,
        peer: SocketAddr,
        now_ms: u64,
        most: usize,
    ) -> Result<(), BindError> {
        // RFC 8656 section 12.2: "The channel number is not currently bound to a different transport address" and
        // "The transport address is not currently bound to a different channel number".
        match (self.by_number(number, now_ms), self.by_peer(peer, now_ms)) {
            (Some(one), Some(other)) if one.number == other.number => return Ok(()),
            (None, None) => {}
            _ => return Err(BindError::Conflict),
        }
        if self.list.len() >= most {
            self.retain(|channel| channel.expires_ms > now_ms);
        }
        if self.list.len() >= most { Err(BindError::Full) } else { Ok(()) }
    }

    /// Binds or refreshes. An expired binding of the number or the peer gives way.
    pub(super) fn bind(&mut self, new: Channel) {
        if let Ok(at) = self.position(new.number)
            && self.list[at].peer == new.peer
        {
            self.list[at] = new;
            return;
        }
        self.list.retain(|channel| channel.number != new.number && channel.peer != new.peer);
        if self.list.capacity() == 0 {
            self.list.reserve_exact(1);
        }
        if let Err(at) = self.position(new.number) {
            self.list.insert(at, new);
        }
        self.index();
    }

    fn retain(&mut self, keep: impl Fn(&Channel) -> bool) {
        let before = self.list.len();
        self.list.retain(keep);
        if self.list.len() != before {
            self.index();
        }
    }

    fn index(&mut self) {
        if self.list.len() <= FEW {
            self.by_peer = Box::default();
            return;
        }
        #[expect(clippy::cast_possible_truncation, reason = "there are 4,096 channel numbers")]
        let mut by_peer: Vec<u16> = (0..self.list.len()).map(|at| at as u16).collect();
        by_peer.sort_unstable_by_key(|at| self.list[usize::from(*at)].peer);
        self.by_peer = by_peer.into_boxed_slice();
    }

    fn position(&self, number: ChannelNumber) -> Result<usize, usize> {
        self.list.binary_search_by_key(&number, |channel| channel.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn an_idle_allocation_is_small() {
        let size = size_of::<Allocation>();
        println!("Allocation: {size} bytes");
        // Beside it: the username, a table slot (16), a timer (16), a hash entry (about 8), the allocator's header.
        assert!(size <= 448, "{size}");
    }

    proptest! {
        /// However many, channels are found by number and by peer exactly while bound.
        #[test]
        fn channels_behave_as_two_maps(
            steps in prop::collection::vec((0..40_u16, 0..40_u16, 1..50_u64), 1..200),
        ) {
            const MOST: usize = 30;
            let mut channels = Channels::default();
            let mut model: BTreeMap<u16, (u16, u64)> = BTreeMap::new();
            let number = |n: u16| ChannelNumber::new(0x4000 + n).unwrap();
            let peer = |p: u16| SocketAddr::from(([192, 0, 2, (p % 5) as u8], 1000 + p));
            for (now, (n, p, lifetime)) in steps.into_iter().enumerate() {
                let now = now as u64;
                model.retain(|_, (_, expires)| *expires > now);
                let expected = match (model.get(&n), model.values().any(|(bound, _)| *bound == p)) {
                    (Some((bound, _)), _) if *bound == p => Ok(()),
                    (None, false) if model.len() < MOST => Ok(()),
                    (None, false) => Err(BindError::Full),
                    _ => Err(BindError::Conflict),
                };
                prop_assert_eq!(channels.may_bind(number(n), peer(p), now, MOST), expected);
                if expected.is_ok() {
                    let expires_ms = now + lifetime;
                    channels.bind(Channel { peer: peer(p), expires_ms, permitted_until_ms: 0, number: number(n) });
                    model.insert(n, (p, expires_ms));
                }
                for n in 0..40 {
                    prop_assert_eq!(channels.by_number(number(n), now).map(|c| c.peer), model.get(&n).map(|(p, _)| peer(*p)));
                }
                for p in 0..40 {
                    let bound = model.iter().find(|(_, (bound, _))| *bound == p).map(|(n, _)| number(*n));
                    prop_assert_eq!(channels.by_peer(peer(p), now).map(|c| c.number), bound);
                }
                prop_assert!(channels.list.len() <= MOST);
            }
        }
    }
}
