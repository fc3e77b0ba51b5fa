use std::net::{IpAddr, SocketAddr};

use turnpike_wire::channel_data::ChannelNumber;

use super::FEW;

#[derive(Clone, Copy)]
pub(crate) struct Channel {
    /// Address to send to.
    pub(crate) peer: SocketAddr,
    /// IP address by which the client knows the peer; differs from `peer` for relayed addresses of this
    /// server behind a NAT.
    pub(crate) named: IpAddr,
    pub(crate) expires_ms: u64,
    /// Expiry of the peer's permission, so that a datagram from the peer needs only one lookup.
    pub(crate) permitted_until_ms: u64,
    pub(crate) number: ChannelNumber,
    pub(crate) used: bool,
}

impl Channel {
    pub(crate) fn name(&self) -> SocketAddr {
        SocketAddr::new(self.named, self.peer.port())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BindError {
    /// Error 400: the number is bound to another peer.
    NumberTaken,
    /// Error 400: the peer is bound to this other number.
    PeerHas(ChannelNumber),
    /// Error 508: too many channels.
    Full,
}

/// Bound channels, sorted by number; long lists have an index by peer.
#[derive(Default)]
pub(crate) struct Channels {
    list: Vec<Channel>,
    /// Positions in `list`, sorted by peer. Empty for short lists.
    by_peer: Box<[u16]>,
}

impl Channels {
    #[inline]
    pub(crate) fn by_number(&self, number: ChannelNumber, now_ms: u64) -> Option<&Channel> {
        let found = if self.list.len() <= FEW {
            self.list.iter().find(|channel| channel.number == number)
        } else {
            self.position(number).ok().map(|at| &self.list[at])
        };
        found.filter(|channel| channel.expires_ms > now_ms)
    }

    #[inline]
    pub(crate) fn by_peer(&self, peer: SocketAddr, now_ms: u64) -> Option<&Channel> {
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

    /// `name` is the address by which the client knows `peer`. Expired channels must have been swept.
    pub(crate) fn may_bind(
        &self,
        number: ChannelNumber,
        (name, peer): (SocketAddr, SocketAddr),
        now_ms: u64,
        most: usize,
    ) -> Result<(), BindError> {
        // RFC 8656 section 12.2: numbers and peers map one to one.
        match (self.by_number(number, now_ms), self.by_peer(peer, now_ms)) {
            (Some(one), Some(other)) if one.number == other.number && one.named == name.ip() => return Ok(()),
            (None, None) => {}
            (_, Some(other)) if other.number != number => return Err(BindError::PeerHas(other.number)),
            _ => return Err(BindError::NumberTaken),
        }
        if self.list.len() < most { Ok(()) } else { Err(BindError::Full) }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Channel> {
        self.list.iter()
    }

    /// Latest expiry of any channel to this address; 0 if there are none.
    pub(crate) fn until(&self, ip: IpAddr) -> u64 {
        let to_it = self.list.iter().filter(|channel| channel.named == ip);
        to_it.map(|channel| channel.expires_ms).max().unwrap_or_default()
    }

    pub(crate) fn permit(&mut self, ip: IpAddr, expires_ms: u64) {
        for channel in self.list.iter_mut().filter(|channel| channel.named == ip) {
            channel.permitted_until_ms = expires_ms;
        }
    }

    pub(crate) fn mark_used(&mut self, number: ChannelNumber) {
        if let Ok(at) = self.position(number) {
            self.list[at].used = true;
        }
    }

    /// Binds or refreshes a channel. A refresh leaves `used` unchanged.
    pub(crate) fn bind(&mut self, new: Channel) {
        match self.position(new.number) {
            Ok(at) => self.list[at] = Channel { used: self.list[at].used, ..new },
            Err(at) => {
                if self.list.capacity() == 0 {
                    self.list.reserve_exact(1);
                }
                self.list.insert(at, new);
                self.index();
            }
        }
    }

    pub(crate) fn retain(&mut self, keep: impl Fn(&Channel) -> bool) {
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

    proptest! {
        #[test]
        fn channels_behave_like_two_maps(
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
                let of_peer = model.iter().find(|(_, (bound, _))| *bound == p).map(|(n, _)| *n);
                let expected = match (model.get(&n), of_peer) {
                    (Some((bound, _)), _) if *bound == p => Ok(()),
                    (None, None) if model.len() < MOST => Ok(()),
                    (None, None) => Err(BindError::Full),
                    (_, Some(other)) => Err(BindError::PeerHas(number(other))),
                    (Some(_), None) => Err(BindError::NumberTaken),
                };
                channels.retain(|channel| channel.expires_ms > now);
                prop_assert_eq!(channels.may_bind(number(n), (peer(p), peer(p)), now, MOST), expected);
                if expected.is_ok() {
                    let expires_ms = now + lifetime;
                    let (peer, number) = (peer(p), number(n));
                    let named = peer.ip();
                    channels.bind(Channel {
                        peer,
                        named,
                        expires_ms,
                        permitted_until_ms: 0,
                        number,
                        used: false,
                    });
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
