//! What a nonce is worth. It holds for the address that asked for it; but two requests name an allocation, and come from clients
//! that may have another address than where they learned it: a ConnectionBind (RFC 6062 section 5.4), whose connection a NAT may
//! give another address than the control connection has, and a Refresh with a mobility ticket (RFC 8016 section 3.2.2). For those
//! two, a nonce counts that holds for the allocation's client.
//!
//! What that gives up: who sees such a request in the clear can send it again from an address of his own, and take what it names
//! if his copy is the first. Both are good once, and TLS and DTLS hide them.

use std::net::IpAddr;

use crate::{
    server::{
        Policy, Server,
        auth::{
            nonce::{self, Standing},
            realm::Terms,
        },
        request::{Method, context::Context},
    },
    time::Now,
};

impl<P: Policy> Server<P> {
    /// Judges a nonce that was not given to the address of its request. One that is [`Standing::ForOwner`] lets a request no further than
    /// to the worker that can tell.
    pub(crate) fn standing_elsewhere(
        &mut self,
        context: &Context<'_>,
        realm: &Terms,
        nonce: &[u8],
    ) -> Standing {
        let now = context.now;
        let learned = match context.request.method {
            Method::ConnectionBind => self.bound_on_control_connection(context),
            Method::Refresh => self.bound_before_moving(context),
            _ => return Standing::Foreign,
        };
        match learned {
            BoundTo::Addresses(addresses) => {
                let standings = addresses.into_iter().flatten().map(|ip| self.judge(now, ip, realm, nonce));
                standings
                    .into_iter()
                    .find(|standing| *standing != Standing::Foreign)
                    .unwrap_or(Standing::Foreign)
            }
            BoundTo::OwnerKnows => Standing::ForOwner,
            BoundTo::Nothing => Standing::Foreign,
        }
    }

    /// For nonces of `unix` seconds.
    pub(crate) fn nonce_scope<'a>(&'a self, unix: u64, client: IpAddr, realm: &'a Terms) -> nonce::Scope<'a> {
        nonce::Scope {
            key: &self.config.nonce_keys.at(unix).0,
            client,
            realm: &realm.name,
            algorithms: realm.algorithms,
            anonymity: realm.anonymity,
        }
    }

    /// What a nonce is worth in the hands of `client`.
    pub(crate) fn judge(&self, now: Now, client: IpAddr, realm: &Terms, nonce: &[u8]) -> Standing {
        let scope = self.nonce_scope(nonce::claimed(nonce, now.unix), client, realm);
        scope.judge(nonce, now.unix, self.config.nonce_lifetime)
    }

    fn bound_on_control_connection(&mut self, context: &Context<'_>) -> BoundTo {
        let Ok(connection) = self.connection_to_bind(context) else { return BoundTo::Nothing };
        if self.on_another_node(connection).is_some() || self.on_another_worker(connection).is_some() {
            return BoundTo::OwnerKnows;
        }
        let index = self.connections.owner(connection);
        match index.and_then(|index| self.data.forwarding.at(index)) {
            Some((_, entry)) => BoundTo::Addresses([Some(entry.client.address.ip()), None]),
            None => BoundTo::Nothing,
        }
    }

    /// Only the good ticket counts, and the last one if it is shown by the very request again: a copy that somebody else sends
    /// after the client's own needs a nonce of its sender's address.
    fn bound_before_moving(&mut self, context: &Context<'_>) -> BoundTo {
        let Some(ticket) = self.ticket_of(context.request) else { return BoundTo::Nothing };
        let Some(index) = self.pending_moves.owned.get(&ticket.key).copied() else {
            return BoundTo::OwnerKnows;
        };
        let Some((_, entry, session)) = self.allocation(index) else { return BoundTo::Nothing };
        let at = entry.client.address.ip();
        match &session.mobility {
            Some(mobility) if mobility.is_good(&ticket) || mobility.is_repeated(context) => {
                // Having moved again before it sent data from there, it may have learned it there.
                BoundTo::Addresses([
                    Some(at),
                    mobility.arriving.map(|(source, _)| source.client.address.ip()),
                ])
            }
            _ => BoundTo::Nothing,
        }
    }
}

/// Where else a client may have learned a nonce.
enum BoundTo {
    Nothing,
    Addresses([Option<IpAddr>; 2]),
    /// Of another worker's allocation, or another node's.
    OwnerKnows,
}
