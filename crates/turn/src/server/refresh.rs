//! Refresh (RFC 8656 section 8): prolongs or deletes an allocation, or one family of it.

use super::{
    Answer, Client, ClosedReason, Effect, Family, Gate, RelayId, Server, attribute,
    auth::Who,
    request::{Method, Request, read_family},
    response::Response,
    ticket,
};
use crate::time::Now;

impl<G: Gate> Server<G> {
    pub(super) fn refresh(&mut self, now: Now, client: &Client, request: &Request<'_>, who: &Who) -> Answer {
        let signer = who.signer.as_ref();
        let proposed = match request.get(attribute::LIFETIME).map(<[u8; 4]>::try_from) {
            None => None,
            Some(Ok(seconds)) => Some(u32::from_be_bytes(seconds)),
            Some(Err(_)) => return self.fail(request, signer, 400),
        };
        // The same deletion again, whose answer was lost: RFC 8489 section 6.3.1.
        if proposed == Some(0) && self.tombstones.contains(now.ms, client, request.transaction, &who.username)
        {
            self.stats.retransmits += 1;
            return self.refreshed(request, who, 0, None);
        }
        let found = match request.get(attribute::MOBILITY_TICKET) {
            Some(_) => self.presented(now, client, request, who).map(|(index, spent)| (index, Some(spent))),
            None => self.owned(now, client, request, who).map(|index| (index, None)),
        };
        let (index, spent) = match found {
            Ok(found) => found,
            Err(answer) => return answer,
        };
        let family = match request.get(attribute::REQUESTED_ADDRESS_FAMILY).map(read_family) {
            None => None,
            Some(None) => return self.fail(request, signer, 400),
            Some(Some(Ok(family))) => Some(family),
            Some(Some(Err(_))) => return self.fail(request, signer, 443),
        };
        let granted = match proposed {
            Some(0) => 0,
            proposed => who.limit(now, self.granted(proposed)),
        };
        let Some((id, allocation)) = self.table.at(index) else { return self.fail(request, signer, 437) };
        // Section 8.2: "If the Refresh request contains a REQUESTED-ADDRESS-FAMILY attribute and the address family [...]
        // does not match the address family of the allocation, the server MUST generate [...] 443 (Peer Address Family
        // Mismatch)".
        if family.is_some_and(|family| !allocation.has(family)) {
            return self.fail(request, signer, 443);
        }
        // A newer token takes the place of the one before, and may name another key.
        if let Some(grant) = &who.grant {
            allocation.grant = Some(grant.clone());
            allocation.username.clone_from(&who.username);
        }
        if granted == 0 {
            match family {
                Some(family) if allocation.relays.iter().flatten().count() > 1 => {
                    allocation.forget(family);
                    // With a ticket it is answered again with the next one: see `presented`.
                    if spent.is_none() {
                        self.tombstones.insert(now.ms, client, request.transaction, &who.username);
                    }
                    let relay = RelayId { allocation: id, family };
                    self.effects.push_back(Effect::RelayClosed { relay });
                    self.close_connections(index, |peer| Family::of(peer.ip()) == family);
                }
                _ => {
                    self.tombstones.insert(now.ms, client, request.transaction, &who.username);
                    self.close(now, index, ClosedReason::Deleted);
                    return self.refreshed(request, who, 0, None);
                }
            }
        } else {
            let expires_ms = now.ms + u64::from(granted) * 1000;
            for which in [Family::V4, Family::V6] {
                if family.is_none_or(|family| family == which)
                    && let Some(relay) = allocation.relay(which)
                {
                    relay.expires_ms = expires_ms;
                }
            }
        }
        self.rearm(now, index);
        let mut ticket = None;
        if let Some(spent) = spent {
            self.arrive(index, client, request.transaction, now, granted, spent);
            ticket = self.ticket(index);
        }
        self.refreshed(request, who, granted, ticket)
    }

    /// The success response; the new ticket of RFC 8016 in it, where the request had one.
    pub(super) fn refreshed(
        &mut self,
        request: &Request<'_>,
        who: &Who,
        granted: u32,
        ticket: Option<[u8; ticket::LEN]>,
    ) -> Answer {
        self.stats.successes[Method::Refresh as usize] += 1;
        let mut response = Response::success(&mut self.reply, Method::Refresh, request.transaction);
        response.number(attribute::LIFETIME, granted);
        if let Some(ticket) = ticket {
            response.attribute(attribute::MOBILITY_TICKET, &ticket);
        }
        response.sign(who.signer.as_ref(), self.config.software.as_deref(), request.fingerprint);
        Answer::Reply
    }
}
