//! CreatePermission and ChannelBind (RFC 8656 sections 10 and 12): how a client opens the way to a peer.

use std::net::{IpAddr, SocketAddr};

use smallvec::SmallVec;
use turnpike_wire::channel_data::ChannelNumber;

use super::{
    Answer, Client, Family, Gate, Server,
    allocation::{BindError, Channel},
    attribute,
    auth::Who,
    request::Request,
};
use crate::time::Now;

impl<G: Gate> Server<G> {
    pub(super) fn create_permission(
        &mut self,
        now: Now,
        client: &Client,
        request: &Request<'_>,
        who: &Who,
    ) -> Answer {
        let signer = who.signer.as_ref();
        let index = match self.owned(now, client, request, who) {
            Ok(index) => index,
            Err(answer) => return answer,
        };
        // Section 10.2: "The CreatePermission request MUST contain at least one XOR-PEER-ADDRESS attribute and MAY contain
        // multiple such attributes. If no such attribute exists, or if any of these attributes are invalid, then a 400
        // (Bad Request) error is returned." The port of the address is ignored.
        let mut peers = SmallVec::<[IpAddr; 8]>::new();
        for peer in request.peers() {
            let Some(peer) = peer else { return self.fail(request, signer, 400) };
            peers.push(peer.ip());
        }
        if peers.is_empty() {
            return self.fail(request, signer, 400);
        }
        peers.sort_unstable();
        peers.dedup();
        let Some((_, allocation)) = self.table.at(index) else { return self.fail(request, signer, 437) };
        // "If an XOR-PEER-ADDRESS attribute contains an address of an address family that is not the same as that of a
        // relayed transport address for the allocation, the server MUST generate an error response with the 443". An IPv4-mapped
        // address has the family that stands beside it, which is IPv6.
        if peers.iter().any(|ip| !allocation.has(Family::of(*ip))) {
            return self.fail(request, signer, 443);
        }
        // "The server MAY impose restrictions on the IP address allowed in the XOR-PEER-ADDRESS attribute; if a value is
        // not allowed, the server rejects the request with a 403 (Forbidden) error."
        if let Some(refused) = peers.iter().find(|ip| !self.config.peers.permits(**ip)) {
            return self.refuse_peer(now, client, request, who, SocketAddr::new(*refused, 0));
        }
        // "If the server is unable to satisfy the request due to some capacity limit [...] 508 (Insufficient Capacity)".
        // All are installed or none.
        if !allocation.permissions.room_for(&peers, now.ms, self.config.max_permissions) {
            self.stats.permission_limit += 1;
            return self.fail(request, signer, 508);
        }
        let expires_ms = now.ms + u64::from(self.config.permission_lifetime) * 1000;
        for ip in peers {
            allocation.permit(ip, expires_ms);
        }
        self.done(request, signer)
    }

    pub(super) fn channel_bind(
        &mut self,
        now: Now,
        client: &Client,
        request: &Request<'_>,
        who: &Who,
    ) -> Answer {
        let signer = who.signer.as_ref();
        let index = match self.owned(now, client, request, who) {
            Ok(index) => index,
            Err(answer) => return answer,
        };
        // RFC 6062 relays connections, which no channel carries.
        if self.table.at(index).is_some_and(|(_, allocation)| allocation.tcp.is_some()) {
            return self.fail(request, signer, 400);
        }
        // Section 12.2: "The request contains both a CHANNEL-NUMBER and an XOR-PEER-ADDRESS attribute" and "The channel
        // number is in the range 0x4000 through 0x4FFF, inclusive", which the configuration may widen to that of RFC 5766;
        // else 400. Nothing can be sent to port 0.
        let number = match request.get(attribute::CHANNEL_NUMBER) {
            Some([high, low, _, _]) => {
                ChannelNumber::within(self.config.channels, u16::from_be_bytes([*high, *low]))
            }
            _ => None,
        };
        let (Some(number), Some(Some(peer))) = (number, request.peers().next()) else {
            return self.fail(request, signer, 400);
        };
        if peer.port() == 0 {
            return self.fail(request, signer, 400);
        }
        let Some((_, allocation)) = self.table.at(index) else { return self.fail(request, signer, 437) };
        // "If the XOR-PEER-ADDRESS attribute contains an address of an address family that is not the same as that of a
        // relayed transport address for the allocation [...] 443 (Peer Address Family Mismatch)".
        if !allocation.has(Family::of(peer.ip())) {
            return self.fail(request, signer, 443);
        }
        // "The server MAY impose restrictions on the IP address and port values allowed [...] 403 (Forbidden)".
        if !self.config.peers.permits_endpoint(peer) {
            return self.refuse_peer(now, client, request, who, peer);
        }
        match allocation.channels.may_bind(number, peer, now.ms, self.config.max_channels) {
            Ok(()) => {}
            Err(BindError::Conflict) => return self.fail(request, signer, 400),
            Err(BindError::Full) => {
                self.stats.channel_limit += 1;
                return self.fail(request, signer, 508);
            }
        }
        if !allocation.permissions.room_for(&[peer.ip()], now.ms, self.config.max_permissions) {
            self.stats.permission_limit += 1;
            return self.fail(request, signer, 508);
        }
        // "A ChannelBind transaction also creates or refreshes a permission towards the peer (see Section 9)."
        let permitted_until_ms = now.ms + u64::from(self.config.permission_lifetime) * 1000;
        let expires_ms = now.ms + u64::from(self.config.channel_lifetime) * 1000;
        allocation.channels.bind(Channel { peer, expires_ms, permitted_until_ms, number });
        allocation.permit(peer.ip(), permitted_until_ms);
        self.done(request, signer)
    }
}
