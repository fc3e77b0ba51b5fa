//! CreatePermission and ChannelBind (RFC 8656 sections 10 and 12).

use std::net::{IpAddr, SocketAddr};

use smallvec::SmallVec;
use turnpike_wire::{channel_data::ChannelNumber, stun::kind};

use crate::{
    server::{
        AllocationSlot, Disposition, Effect, Family, Fault, Policy, RequestRefusal, Server,
        data::forwarding::BindError,
        request::{Request, context::Context},
    },
    time::Now,
};

impl<P: Policy> Server<P> {
    pub(crate) fn create_permission(&mut self, context: &Context<'_>) -> Disposition {
        let index = match self.owned(context) {
            Ok(index) => index,
            Err(answer) => return answer,
        };
        let mut peers = SmallVec::<[IpAddr; 8]>::new();
        for peer in context.request.peers() {
            let Some(peer) = peer else {
                return self.bad(context, kind::XOR_PEER_ADDRESS, Fault::Malformed);
            };
            peers.push(peer.ip());
        }
        if peers.is_empty() {
            return self.bad(context, kind::XOR_PEER_ADDRESS, Fault::Missing);
        }
        peers.sort_unstable();
        peers.dedup();
        self.sweep(context.now, index);
        let most = self.config.limits.permissions;
        let Some((id, entry)) = self.data.forwarding.at(index) else { return self.fail(context, 437) };
        // The family is as encoded, so an IPv4-mapped address is IPv6.
        if let Some(other) = peers.iter().find(|ip| !entry.has(Family::of(**ip))) {
            return self.refuse(context, 443, RequestRefusal::PeerFamily(SocketAddr::new(*other, 0)));
        }
        let room = entry.permissions.room_for(&peers, most);
        if let Some(refused) = peers.iter().find(|ip| !self.config.peers_in(&context.who.realm).permits(**ip))
        {
            return self.refuse_peer(context, SocketAddr::new(*refused, 0), peers.len() - 1);
        }
        if !room {
            self.data.stats.permission_limit += 1;
            return self.refuse(context, 508, RequestRefusal::Permissions);
        }
        if peers.iter().any(|ip| self.is_anothers(context.now, index, *ip)) {
            return self.refuse_shared(context);
        }
        for peer in peers {
            self.permit(context, id, peer, 0);
        }
        self.done(context)
    }

    pub(crate) fn channel_bind(&mut self, context: &Context<'_>) -> Disposition {
        let index = match self.owned(context) {
            Ok(index) => index,
            Err(answer) => return answer,
        };
        // Channels cannot carry the connections of RFC 6062.
        if self.data.forwarding.at(index).is_some_and(|(_, entry)| entry.relays_tcp) {
            return self.bad(context, kind::CHANNEL_NUMBER, Fault::RelaysTcp);
        }
        let number = match context.request.get(kind::CHANNEL_NUMBER) {
            Some([high, low, _, _]) => {
                let number = u16::from_be_bytes([*high, *low]);
                ChannelNumber::within(self.config.channels, number).ok_or(Fault::OutOfRange)
            }
            Some(_) => Err(Fault::Malformed),
            None => Err(Fault::Missing),
        };
        let number = match number {
            Ok(number) => number,
            Err(fault) => return self.bad(context, kind::CHANNEL_NUMBER, fault),
        };
        let peer = match peer_endpoint(context.request) {
            Ok(peer) => peer,
            Err(fault) => return self.bad(context, kind::XOR_PEER_ADDRESS, fault),
        };
        let now = context.now;
        self.sweep(now, index);
        let (most, most_permissions) = (self.config.limits.channels, self.config.limits.permissions);
        let Some((id, entry)) = self.data.forwarding.at(index) else { return self.fail(context, 437) };
        if !entry.has(Family::of(peer.ip())) {
            return self.refuse(context, 443, RequestRefusal::PeerFamily(peer));
        }
        let at = self.config.peers.own.internal(peer);
        let renewed = entry.channels.by_number(number, now.ms).is_some();
        let may_bind = entry.channels.may_bind(number, (peer, at), now.ms, most);
        let room = entry.permissions.room_for(&[peer.ip()], most_permissions);
        if !self.config.peers_in(&context.who.realm).permits_endpoint(peer) {
            return self.refuse_peer(context, peer, 0);
        }
        match may_bind {
            Ok(()) => {}
            Err(BindError::NumberTaken) => {
                return self.bad(context, kind::CHANNEL_NUMBER, Fault::ChannelTaken(number));
            }
            Err(BindError::PeerHas(other)) => {
                return self.bad(context, kind::CHANNEL_NUMBER, Fault::PeerHasChannel(other));
            }
            Err(BindError::Full) => {
                self.data.stats.channel_limit += 1;
                return self.refuse(context, 508, RequestRefusal::Channels);
            }
        }
        if !room {
            self.data.stats.permission_limit += 1;
            return self.refuse(context, 508, RequestRefusal::Permissions);
        }
        if self.is_anothers(now, index, peer.ip()) {
            return self.refuse_shared(context);
        }
        // A channel also permits its peer (section 9).
        let expires_ms = now.ms + u64::from(self.config.channel_lifetime) * 1000;
        self.permit(context, id, peer.ip(), expires_ms);
        self.data.emit(now, Effect::Bound { allocation: id, number, peer, at, expires_ms, renewed });
        self.done(context)
    }

    fn is_anothers(&mut self, now: Now, index: u32, peer: IpAddr) -> bool {
        // Check all translated addresses of the peer.
        let aliases: SmallVec<[IpAddr; 2]> = self.config.peers.own.aliases(peer).collect();
        aliases.into_iter().any(|peer| {
            let Some(rival) = self.data.forwarding.rival(index, peer) else { return false };
            // The rival's binding may have expired without having been swept yet.
            self.expire(now, rival);
            self.data.forwarding.rival(index, peer).is_some()
        })
    }

    /// Ends bindings of a peer that two clients claimed before its addresses were known to belong to one
    /// host.
    pub(crate) fn end_contested(&mut self, now: Now, index: u32) {
        if !self.config.peers.own.are_translated() {
            return;
        }
        let Some((_, entry)) = self.data.forwarding.at(index) else { return };
        if !entry.is_shared() {
            return;
        }
        let peers: SmallVec<[IpAddr; 8]> = entry.bindings().map(|binding| binding.named()).collect();
        let contested: SmallVec<[IpAddr; 8]> =
            peers.into_iter().filter(|peer| self.is_anothers(now, index, *peer)).collect();
        if !contested.is_empty() {
            self.end_bindings(now, index, |binding| contested.contains(&binding.named()));
        }
    }

    /// Refuses with 508, because only an allocation on another port can help the client.
    fn refuse_shared(&mut self, context: &Context<'_>) -> Disposition {
        self.data.stats.shared_peer_limit += 1;
        self.refuse(context, 508, RequestRefusal::SharedPeer)
    }

    /// Installs or refreshes a permission. It lasts for the usual lifetime, and with `channels_permit` at
    /// least until `channel_ms` and until all channels to the peer have expired.
    fn permit(&mut self, context: &Context<'_>, allocation: AllocationSlot, peer: IpAddr, channel_ms: u64) {
        let (now, channels_permit) = (context.now, self.config.channels_permit);
        let Some(entry) = self.data.forwarding.get(allocation) else { return };
        let renewed = entry.permissions.allow(peer, now.ms);
        let mut expires_ms = now.ms + u64::from(self.config.permission_lifetime) * 1000;
        if channels_permit {
            expires_ms = expires_ms.max(channel_ms).max(entry.channels.until(peer));
        }
        self.data.emit(now, Effect::Permitted { allocation, peer, expires_ms, renewed });
    }

    /// Extends permissions that would end before a channel to their peer, if `channels_permit` is set.
    pub(crate) fn permit_by_channels(&mut self, now: Now, index: u32) {
        if !self.config.channels_permit {
            return;
        }
        let Some((allocation, entry)) = self.data.forwarding.at(index) else { return };
        for (peer, expires_ms) in entry.outlasted_permissions() {
            let entry = self.data.forwarding.get(allocation);
            let renewed = entry.is_some_and(|entry| entry.permissions.allow(peer, now.ms));
            self.data.emit(now, Effect::Permitted { allocation, peer, expires_ms, renewed });
        }
    }
}

/// Peer address of the request; refuses port 0, because nothing can be sent to it.
pub(crate) fn peer_endpoint(request: &Request<'_>) -> Result<SocketAddr, Fault> {
    match request.peers().next() {
        None => Err(Fault::Missing),
        Some(None) => Err(Fault::Malformed),
        Some(Some(peer)) if peer.port() == 0 => Err(Fault::PortZero),
        Some(Some(peer)) => Ok(peer),
    }
}
