//! Validity of nonces after an address change. A nonce is bound to the address it was issued to, but two
//! kinds of request may come from a different address. A ConnectionBind (RFC 6062 section 5.4) may do so
//! because a NAT may give the data connection another address. A Refresh with a mobility ticket (RFC 8016
//! section 3.2.2) comes from the client's new address. Both may use a nonce issued to the allocation's client.
//!
//! The drawback is that an eavesdropper can replay one of these requests from its own address and win if the
//! replay arrives first. Each request is accepted only once, and with TLS or DTLS an eavesdropper cannot read
//! it.

use std::net::IpAddr;

use crate::{
    server::{
        Policy, Server,
        auth::{
            nonce::{self, Standing},
            realm::RealmTerms,
        },
        request::{Method, context::Context},
    },
    time::Now,
};

impl<P: Policy> Server<P> {
    /// [`Standing::ForOwner`] only lets the request pass to the worker that can decide.
    pub(crate) fn standing_elsewhere(
        &mut self,
        context: &Context<'_>,
        realm: &RealmTerms,
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

    pub(crate) fn nonce_scope<'a>(
        &'a self,
        unix: u64,
        client: IpAddr,
        realm: &'a RealmTerms,
    ) -> nonce::Scope<'a> {
        nonce::Scope {
            key: &self.config.nonce_keys.at(unix).0,
            client,
            realm: &realm.name,
            algorithms: realm.algorithms,
            anonymity: realm.anonymity,
        }
    }

    pub(crate) fn judge(&self, now: Now, client: IpAddr, realm: &RealmTerms, nonce: &[u8]) -> Standing {
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

    /// Accepts only the current ticket, or the previous one in an exact retransmission. If an attacker
    /// replays the request later, the replay needs a nonce for the attacker's address.
    fn bound_before_moving(&mut self, context: &Context<'_>) -> BoundTo {
        let Some(ticket) = self.ticket_of(context.request) else { return BoundTo::Nothing };
        let Some(index) = self.pending_moves.owned.get(&ticket.key).copied() else {
            return BoundTo::OwnerKnows;
        };
        let Some((_, entry, state)) = self.allocation(index) else { return BoundTo::Nothing };
        let at = entry.client.address.ip();
        match &state.mobility {
            Some(mobility) if mobility.is_good(&ticket) || mobility.is_repeated(context) => {
                // The nonce may have been issued to an address that the client left before sending data.
                BoundTo::Addresses([
                    Some(at),
                    mobility.arriving.map(|(source, _)| source.client.address.ip()),
                ])
            }
            _ => BoundTo::Nothing,
        }
    }
}

enum BoundTo {
    Nothing,
    Addresses([Option<IpAddr>; 2]),
    OwnerKnows,
}
