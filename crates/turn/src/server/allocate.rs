//! Allocate (RFC 8656 section 7): everything that can be refused is refused before a relay socket is opened.

use std::sync::Arc;

use super::{
    AllocationId, Answer, Client, DropReason, Effect, Family, Gate, OpenRelay, OpenRequest, OpenResult,
    PortWish, QuotaRefusal, RelayTransport, Server,
    allocation::{Allocation, Channels, Pending, Permissions, Relay},
    alternate::Occasion,
    attribute,
    auth::Who,
    granted::Noted,
    nonce,
    request::{Method, Request, read_family},
    response::{Response, Signer, reason_phrase},
};
use crate::time::Now;

/// REQUESTED-TRANSPORT holds a protocol number (RFC 8656 section 18.7).
const UDP: u8 = 17;
const TCP: u8 = 6;

/// Which relayed transport addresses a request wants.
struct Wish {
    first: OpenRelay,
    second: Option<Family>,
    /// A family of a dual-stack request that is not configured, with its code.
    address_error: Option<(Family, u16)>,
}

impl<G: Gate> Server<G> {
    pub(super) fn allocate(&mut self, now: Now, client: &Client, request: &Request<'_>, who: Who) -> Answer {
        // Section 7.2: "The server checks if the 5-tuple is currently in use by an existing allocation. If yes, the
        // server rejects the request with a 437 (Allocation Mismatch) error." But section 5: "the server may receive two
        // (or more) requests with the same 5-tuple and same transaction id. STUN requires that the server recognize this
        // case and treat the request as idempotent".
        if let Some(index) = self.table.find(client) {
            return self.allocate_again(index, request, &who);
        }
        let signer = who.signer.as_ref();
        // So too where it is about to become that of a mobile allocation; that of another worker may have ended since.
        match self.arriving(now, client) {
            Ok(None) => {}
            Ok(Some(_)) => return self.fail(request, signer, 437),
            Err(answer) => return answer,
        }
        let lifetime = match request.get(attribute::LIFETIME).map(<[u8; 4]>::try_from) {
            None => None,
            Some(Ok(seconds)) => Some(u32::from_be_bytes(seconds)),
            Some(Err(_)) => return self.fail(request, signer, 400),
        };
        let wish = self.wish(client, request);
        let (wish, mobile) = match wish.and_then(|wish| Ok((wish, self.wants_mobility(request)?))) {
            Ok(wanted) => wanted,
            Err(code) => return self.fail(request, signer, code),
        };
        let transport = wish.first.transport;
        let occasion = if self.draining { Occasion::Draining } else { Occasion::None };
        if let Some(answer) = self.redirect(client, request, signer, occasion) {
            return answer;
        }
        if self.draining {
            self.stats.drain_refusals += 1;
            return self.fail(request, signer, 508);
        }
        // "At any point, the server MAY choose to reject the request with a 486 (Allocation Quota Reached) error". Section
        // 19: 486 is about "this username", 508 says that the server is "unable to carry out the request due to some
        // capacity limit", and so that another one may do.
        if let Err(refusal) = self.gate.acquire(&who.realm, &who.identity) {
            self.stats.quota(refusal);
            let code = match refusal {
                QuotaRefusal::User => 486,
                QuotaRefusal::Total => {
                    if let Some(answer) = self.redirect(client, request, signer, Occasion::Full) {
                        return answer;
                    }
                    508
                }
            };
            return self.fail(request, signer, code);
        }
        // Last of all, so that what was refused for another reason may be sent again as it is.
        let noted = match self.note_granted(now, client, request, &who) {
            Ok(noted) => noted,
            Err(stale) => {
                self.gate.release(&who.realm, &who.identity);
                return stale;
            }
        };

        let reservation = match wish.first.port {
            PortWish::EvenAndReserveNext(token) => Some(token),
            _ => None,
        };
        let granted = who.limit(now, self.granted(lifetime));
        let id = self.table.insert(Allocation {
            client: *client,
            realm: who.realm,
            identity: (who.identity != who.username).then_some(who.identity),
            username: who.username,
            opened_ms: now.ms,
            transaction: request.transaction,
            granted,
            grant: who.grant,
            reservation,
            address_error: wish.address_error,
            relays: [None; 2],
            former: None,
            channels: Channels::default(),
            permissions: Permissions::default(),
            to_peer: (0, 0),
            to_client: (0, 0),
            pending: Some(Box::new(Pending {
                signer: who.signer,
                fingerprint: request.fingerprint,
                first: wish.first.family,
                second: wish.second,
                mobile,
                noted,
            })),
            tcp: (transport == RelayTransport::Tcp).then(Box::default),
            mobility: None,
            away: false,
        });
        Answer::Open(OpenRequest {
            allocation: id,
            first: wish.first,
            second: wish.second.map(|family| OpenRelay { family, transport, port: PortWish::Any }),
        })
    }

    /// Carries on where [`Server::allocate`] asked for relay sockets. `None` if the allocation does not wait for them.
    pub(super) fn finish_allocate(
        &mut self,
        now: Now,
        id: AllocationId,
        first: OpenResult,
        second: Option<OpenResult>,
    ) -> Option<Client> {
        let allocation = self.table.get(id)?;
        let pending = *allocation.pending.take()?;
        let client = allocation.client;
        let transaction = allocation.transaction;
        let expires_ms = now.ms + u64::from(allocation.granted) * 1000;
        let second = pending.second.map(|family| (family, second.unwrap_or(OpenResult::NoCapacity)));
        let mut relayed = [None; 2];
        for (slot, (family, result)) in
            relayed.iter_mut().zip([Some((pending.first, first)), second].into_iter().flatten())
        {
            if let OpenResult::Opened { relayed } = result {
                *slot = Some(relayed);
                *allocation.relay(family) = Some(Relay { address: relayed, expires_ms });
            } else {
                allocation.address_error = Some((family, code_of(result)));
            }
        }
        let (relayed, also) = match relayed {
            [Some(first), second] => (first, second),
            [None, Some(second)] => (second, None),
            [None, None] => {
                if let Some((_, allocation)) = self.table.remove(id.index) {
                    self.gate.release(&allocation.realm, allocation.identity());
                }
                if let Some(noted) = pending.noted {
                    self.granted.withdraw(noted);
                }
                let signer = pending.signer.as_ref();
                if first == OpenResult::NoCapacity
                    && self.write_redirect(&client, transaction, signer, pending.fingerprint, Occasion::Full)
                {
                    return Some(client);
                }
                self.write_failure(
                    Method::Allocate,
                    transaction,
                    signer,
                    pending.fingerprint,
                    code_of(first),
                );
                return Some(client);
            }
        };
        allocation.opened_ms = now.ms;
        let (realm, username) = (Arc::clone(&allocation.realm), allocation.username.clone());
        self.timers.set(now.ms, id.index, expires_ms);
        self.stats.allocations_opened += 1;
        self.effects.push_back(Effect::Opened {
            allocation: id,
            client,
            realm,
            username,
            relayed: (relayed, also),
        });
        if pending.mobile {
            self.enrol(id.index);
        }
        self.write_success(id.index, transaction, pending.signer.as_ref(), pending.fingerprint);
        Some(client)
    }

    /// Section 7.2: "The server computes [...] the minimum of the client's proposed lifetime and the server's maximum
    /// allowed lifetime. If this [...] is greater than the default lifetime, then the server uses [it]. Otherwise, the
    /// server uses the default lifetime."
    pub(super) fn granted(&self, proposed: Option<u32>) -> u32 {
        let default = self.config.default_lifetime;
        proposed.map_or(default, |seconds| seconds.min(self.config.max_lifetime).max(default))
    }

    /// Notes that an Allocate is granted. The answer, if it is a copy of one whose allocation is not on this 5-tuple, or no more:
    /// its nonce is no good for it any longer.
    fn note_granted(
        &mut self,
        now: Now,
        client: &Client,
        request: &Request<'_>,
        who: &Who,
    ) -> Result<Option<Noted>, Answer> {
        // Without nonces there is no telling.
        let issued = request.nonce.filter(|_| who.signer.is_some()).and_then(nonce::issued);
        let Some(issued) = issued else { return Ok(None) };
        let noted = self.granted.note(request.transaction, issued, nonce::truncate(now.unix));
        if noted.is_some() {
            return Ok(noted);
        }
        let realm = self.realms.find(&self.config, client.listener, who.realm.as_bytes()).cloned();
        Err(match realm {
            Some(realm) => self.challenge(now, client, request, &realm, 438),
            None => self.fail(request, who.signer.as_ref(), 437),
        })
    }

    fn allocate_again(&mut self, index: u32, request: &Request<'_>, who: &Who) -> Answer {
        let Some((_, allocation)) = self.table.at(index) else {
            return self.fail(request, who.signer.as_ref(), 437);
        };
        if allocation.transaction != request.transaction
            || allocation.username != who.username
            || allocation.realm != who.realm
        {
            return self.fail(request, who.signer.as_ref(), 437);
        }
        if allocation.pending.is_some() {
            return Answer::Drop(DropReason::OpenPending);
        }
        self.stats.retransmits += 1;
        self.write_success(index, request.transaction, who.signer.as_ref(), request.fingerprint);
        Answer::Reply
    }

    /// Section 7.2, steps 3 to 9.
    fn wish(&self, client: &Client, request: &Request<'_>) -> Result<Wish, u16> {
        // "The server checks if the request contains a REQUESTED-TRANSPORT attribute. If the attribute is not included or
        // is malformed, the server rejects the request with a 400 (Bad Request) error. Otherwise, if [...] the server
        // does not support that transport protocol [...] 442 (Unsupported Transport Protocol)".
        let transport = match request.get(attribute::REQUESTED_TRANSPORT) {
            Some([UDP, _, _, _]) => RelayTransport::Udp,
            Some([TCP, _, _, _]) => {
                self.may_relay_tcp(client, request)?;
                RelayTransport::Tcp
            }
            Some([_, _, _, _]) => return Err(442),
            _ => return Err(400),
        };
        if request.get(attribute::DONT_FRAGMENT).is_some_and(|value| !value.is_empty()) {
            return Err(400);
        }
        let even_port = match request.get(attribute::EVEN_PORT) {
            None => None,
            Some([flags]) => Some(flags & 0x80 != 0),
            Some(_) => return Err(400),
        };
        let requested = family_attribute(request, attribute::REQUESTED_ADDRESS_FAMILY)?;
        let additional = match family_attribute(request, attribute::ADDITIONAL_ADDRESS_FAMILY)? {
            None => family_attribute(request, attribute::DRAFT_ADDITIONAL_ADDRESS_FAMILY)?,
            found => found,
        };

        if let Some(token) = request.get(attribute::RESERVATION_TOKEN) {
            // "If yes, and the request also contains an EVEN-PORT or REQUESTED-ADDRESS-FAMILY or
            // ADDITIONAL-ADDRESS-FAMILY attribute, the server rejects the request with a 400 (Bad Request) error."
            let token: [u8; 8] = token.try_into().map_err(|_| 400_u16)?;
            if even_port.is_some() || requested.is_some() || additional.is_some() {
                return Err(400);
            }
            let first =
                OpenRelay { family: family_of_token(token), transport, port: PortWish::Reserved(token) };
            return Ok(Wish { first, second: None, address_error: None });
        }
        // "The server checks if the request contains both REQUESTED-ADDRESS-FAMILY and ADDITIONAL-ADDRESS-FAMILY
        // attributes. If yes, then the server rejects the request with a 400 (Bad Request) error."
        if requested.is_some() && additional.is_some() {
            return Err(400);
        }
        let has = |family| match family {
            Family::V4 => self.config.relay_v4,
            Family::V6 => self.config.relay_v6,
        };
        let (mut family, mut second, mut address_error) = (Family::V4, None, None);
        match (requested, additional) {
            // "If the server does not support the address family requested by the client in REQUESTED-ADDRESS-FAMILY [...]
            // it MUST generate an Allocate error response, and it MUST include an ERROR-CODE attribute with the 440
            // (Address Family not Supported)". Without the attribute, IPv4.
            (requested, None) => {
                family = requested.unwrap_or(Ok(Family::V4)).map_err(|_| 440_u16)?;
                if !has(family) {
                    return Err(440);
                }
            }
            // EVEN-PORT with R = 1: "If yes, and the request also contains an ADDITIONAL-ADDRESS-FAMILY attribute, the
            // server rejects the request with a 400 (Bad Request) error." ADDITIONAL-ADDRESS-FAMILY: "If yes, and the
            // attribute value is 0x01 (IPv4 address family), then the server rejects the request with a 400".
            (_, Some(additional)) => {
                if even_port == Some(true) || additional != Ok(Family::V6) {
                    return Err(400);
                }
                // "If the server can partially meet the request, i.e., if it can only allocate one relayed transport address
                // of a specific address type, then it includes ADDRESS-ERROR-CODE attribute in the success response".
                match (has(Family::V4), has(Family::V6)) {
                    (true, true) => second = Some(Family::V6),
                    (true, false) => address_error = Some((Family::V6, 440)),
                    (false, true) => {
                        family = Family::V6;
                        address_error = Some((Family::V4, 440));
                    }
                    (false, false) => return Err(440),
                }
            }
        }
        let port = match even_port {
            None => PortWish::Any,
            Some(false) => PortWish::Even,
            Some(true) => PortWish::EvenAndReserveNext(new_token(family)),
        };
        Ok(Wish { first: OpenRelay { family, transport, port }, second, address_error })
    }

    /// Section 7.2: XOR-RELAYED-ADDRESS, LIFETIME, RESERVATION-TOKEN, XOR-MAPPED-ADDRESS; of a dual-stack allocation
    /// both addresses, or the reason why not.
    fn write_success(
        &mut self,
        index: u32,
        transaction: [u8; 12],
        signer: Option<&Signer>,
        fingerprint: bool,
    ) {
        let ticket = self.ticket(index);
        let Some((_, allocation)) = self.table.at(index) else { return };
        self.stats.successes[Method::Allocate as usize] += 1;
        let mut response = Response::success(&mut self.reply, Method::Allocate, transaction);
        for relay in allocation.relays.iter().flatten() {
            response.xor_address(attribute::XOR_RELAYED_ADDRESS, relay.address);
        }
        response.number(attribute::LIFETIME, allocation.granted);
        if let Some(token) = allocation.reservation {
            response.attribute(attribute::RESERVATION_TOKEN, &token);
        }
        if let Some(ticket) = ticket {
            response.attribute(attribute::MOBILITY_TICKET, &ticket);
        }
        response.xor_address(attribute::XOR_MAPPED_ADDRESS, allocation.client.address);
        if let Some((family, code)) = allocation.address_error {
            response.code(attribute::ADDRESS_ERROR_CODE, family_number(family), code, reason_phrase(code));
        }
        response.sign(signer, self.config.software.as_deref(), fingerprint);
    }
}

fn family_attribute(request: &Request<'_>, kind: u16) -> Result<Option<Result<Family, u8>>, u16> {
    match request.get(kind) {
        None => Ok(None),
        Some(value) => read_family(value).map(Some).ok_or(400),
    }
}

const fn family_number(family: Family) -> u8 {
    match family {
        Family::V4 => 1,
        Family::V6 => 2,
    }
}

const fn code_of(result: OpenResult) -> u16 {
    match result {
        OpenResult::UnsupportedFamily => 440,
        OpenResult::NoCapacity | OpenResult::Opened { .. } => 508,
    }
}

/// A token that nobody guesses. Its last bit holds the family of the port that it stands for, since a request with a
/// token may not name the family, and may reach another worker.
fn new_token(family: Family) -> [u8; 8] {
    let mut token: [u8; 8] = rand::random();
    token[7] = token[7] & !1 | (family as u8);
    token
}

const fn family_of_token(token: [u8; 8]) -> Family {
    if token[7] & 1 == 0 { Family::V4 } else { Family::V6 }
}
