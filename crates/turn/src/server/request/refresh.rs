//! Refresh (RFC 8656 section 8): extends or deletes an allocation, or deletes one of its families.

use turnpike_wire::stun::kind;

use crate::server::{
    ClosedReason, Disposition, Effect, Family, Fault, Policy, RelayId, Server,
    auth::replay::Once,
    mobility::ticket,
    policy::duration_limit,
    request::{Delivery, Method, context::Context},
};

impl<P: Policy> Server<P> {
    pub(crate) fn refresh(&mut self, context: &Context<'_>) -> Disposition {
        let Context { now, request, who, .. } = context;
        let proposed = match request.get(kind::LIFETIME).map(<[u8; 4]>::try_from) {
            None => None,
            Some(Ok(seconds)) => Some(u32::from_be_bytes(seconds)),
            Some(Err(_)) => return self.bad(context, kind::LIFETIME, Fault::Malformed),
        };
        // A retransmitted deletion whose response was lost (RFC 8489 section 6.3.1).
        let (client, transaction) = (context.client(), request.transaction());
        if proposed == Some(0) && self.tombstones.contains(now.ms, client, transaction, &who.username) {
            self.data.stats.retransmits += 1;
            return self.refreshed(context, 0, None);
        }
        let found = match request.get(kind::MOBILITY_TICKET) {
            Some(_) => self.presented(context).map(|(index, spent)| (index, Some(spent))),
            None => self.owned(context).map(|index| (index, None)),
        };
        let (index, spent) = match found {
            Ok(found) => found,
            Err(answer) => return answer,
        };
        let family = match request.get(kind::REQUESTED_ADDRESS_FAMILY).map(Family::read) {
            None => None,
            Some(None) => return self.bad(context, kind::REQUESTED_ADDRESS_FAMILY, Fault::Malformed),
            Some(Some(Ok(family))) => Some(family),
            Some(Some(Err(_))) => return self.fail(context, 443),
        };
        let granted = match proposed {
            Some(0) => 0,
            proposed => who.limit(*now, self.granted(proposed)),
        };
        let (granted, granted_ms) = match granted {
            0 => (0, 0),
            granted => duration_limit::within(self.left_ms(*now, index), granted),
        };
        let Some((_, entry, _)) = self.allocation(index) else { return self.fail(context, 437) };
        // RFC 8656 section 8.2: a family that the allocation does not have is a mismatch (443).
        if family.is_some_and(|family| !entry.has(family)) {
            return self.fail(context, 443);
        }
        // Must be the last check, so that a request refused for another reason may be resent unchanged.
        if spent.is_some()
            && let Err(answer) = self.grant_once(context, Once::Move)
        {
            return answer;
        }
        let Some((id, entry, state)) = self.allocation(index) else { return self.fail(context, 437) };
        // A newer token replaces the previous one and may name another key.
        if let Some(grant) = &who.grant {
            state.grant = Some(grant.clone());
            state.username.clone_from(&who.username);
        }
        if granted == 0 {
            match family {
                Some(family) if entry.relays.iter().flatten().count() > 1 => {
                    // If the Refresh had a ticket, `presented` handles its retransmissions.
                    if spent.is_none() {
                        self.remember_deletion(context);
                    }
                    self.close_relay(*now, RelayId { allocation: id, family });
                }
                _ => {
                    self.remember_deletion(context);
                    self.close(*now, index, ClosedReason::Deleted);
                    return self.refreshed(context, 0, None);
                }
            }
        } else {
            let expires_ms = now.ms + granted_ms;
            self.data.emit(*now, Effect::Renewed { allocation: id, family, expires_ms });
        }
        let mut ticket = None;
        if let Some(spent) = spent {
            self.arrive(context, index, granted, spent);
            ticket = self.ticket(*now, index);
        }
        self.refreshed(context, granted, ticket)
    }

    fn remember_deletion(&mut self, context: &Context<'_>) {
        let transaction = context.request.transaction();
        let deletion =
            self.tombstones.insert(context.now.ms, context.client(), transaction, &context.who.username);
        if let Delivery::Forwarded { via, .. } = context.delivery {
            self.data.effects.push_back(Effect::Deleted { via, deletion });
        }
    }

    pub(crate) fn refreshed(
        &mut self,
        context: &Context<'_>,
        granted: u32,
        ticket: Option<[u8; ticket::LEN]>,
    ) -> Disposition {
        self.data.stats.successes[Method::Refresh as usize] += 1;
        let mut response = context.envelope.success(&mut self.reply);
        response.number(kind::LIFETIME, duration_limit::answered(granted));
        if let Some(ticket) = ticket {
            response.attribute(kind::MOBILITY_TICKET, &ticket);
        }
        context.envelope.sign(response, self.config.software.as_deref());
        Disposition::Reply
    }
}
