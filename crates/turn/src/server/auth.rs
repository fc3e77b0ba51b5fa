//! Long-term credentials (RFC 8489 section 9.2.4). A slow store is queried only for requests whose source
//! address is verified: by a nonce issued to that address, by a stream, or by a mobility ticket. A flood from
//! forged addresses never reaches the store.

pub(crate) mod claim;
pub(crate) mod keyed_hash;
pub(crate) mod lookups;
pub(crate) mod masked;
pub(crate) mod nonce;
pub(crate) mod nonce_binding;
pub(crate) mod realm;
pub(crate) mod replay;
pub(crate) mod third_party;

use std::sync::Arc;

use turnpike_rates::{Rate, Rates};
use turnpike_wire::{
    integrity::{Key, KeyAlgorithm},
    stun::kind,
};

use super::{
    Client, CredentialCheck, CredentialQuery, CredentialRefusal, Disposition, DropReason, Effect,
    LookupResult, Policy, RequestRefusal, Server, StoreFailure, Transport, User,
    auth::{
        claim::{Checked, SignedClaim, VerifiedUser, Who, claimed, user_of},
        nonce::Standing,
        realm::RealmTerms,
    },
    data::MAX_QUEUED,
    request::{
        Request,
        bad_request::{Denied, Fault},
        context::Context,
        dispatch::Requester,
        response::ResponseSigner,
    },
};

/// Length of a header and one attribute with a four-byte value.
const SHORTEST_REQUEST: usize = 28;

const HEADER: usize = 20;

/// Maximum ratio between the lengths of a challenge and of a request shorter than [`SHORTEST_REQUEST`].
const MAX_AMPLIFICATION: usize = 4;

const fn attribute(len: usize) -> usize {
    4 + len.next_multiple_of(4)
}

/// Allows each host ten challenges per second after a burst of 50, and each worker a thousand per second.
pub(crate) fn short_request_rate() -> Rates {
    Rates::new(Rate::new(50, 100), Rate::new(1000, 1), 4096)
}

impl<P: Policy> Server<P> {
    pub(crate) fn authenticate(&mut self, context: &mut Context<'_>) -> Result<(), Disposition> {
        let listener = context.source.client.listener;
        let origin = if self.config.origins.is_empty() { None } else { context.request.get(kind::ORIGIN) };
        let first = self.realms.challenging(&self.config, listener, origin);
        if !self.config.authenticate {
            context.who.realm = Arc::clone(&first.name);
            context.who.identity = context.source.client.address.ip().to_string().into_boxed_str();
            return Ok(());
        }
        let first = Arc::clone(first);
        // The checks follow the order of RFC 8489 section 9.2.4. No message integrity: 401.
        let request = context.request;
        let Some(mac) = request.view.mac() else { return Err(self.challenge(context, &first, 401)) };
        // USERNAME, REALM or NONCE missing: 400.
        let (user, realm, nonce) = match named(request) {
            Ok(named) => named,
            Err(denied) => return Err(self.deny_request(context, denied)),
        };
        // For an unknown realm, the challenge names the listener's first realm. The 438 below provides a
        // nonce for any other realm.
        let Some(realm) = self.realms.find(&self.config, listener, realm).cloned() else {
            self.refused_before(context, &first, user, CredentialRefusal::WrongRealm);
            return Err(self.challenge(context, &first, 401));
        };
        context.nonce = self.judge(context.now, context.client().address.ip(), &realm, nonce);
        context.has_own_nonce.set(context.nonce != Standing::Foreign);
        context.envelope.is_address_proved |= context.nonce != Standing::Foreign;
        let standing = match context.nonce {
            Standing::Foreign => self.standing_elsewhere(context, &realm, nonce),
            standing => standing,
        };
        let claim = SignedClaim { user, realm, mac, standing };
        let proof = match self.check_token(context, &claim)? {
            Some(proof) => proof,
            None => self.check_password(context, &claim)?,
        };
        match proof {
            // User and key are checked first, because 401 takes precedence over 438.
            Ok(_) if standing == Standing::Foreign => Err(self.foreign_nonce(context, &claim.realm)),
            Ok(VerifiedUser { username, .. }) if standing == Standing::Stale => {
                let (client, realm, method) = (context.client(), &claim.realm.name, context.envelope.method);
                let asker = Requester { client, realm, username: &username, proved: true, method };
                self.tell_refused(context.now, &asker, 438, RequestRefusal::Code);
                Err(self.challenge(context, &claim.realm, 438))
            }
            Ok(VerifiedUser { key, username, identity, grant, until_unix }) => {
                let realm = Arc::clone(&claim.realm.name);
                context.who = Who { realm, username, identity, grant, until_unix };
                context.envelope.signer = Some(ResponseSigner { key, mac });
                Ok(())
            }
            Err((named, why)) => {
                let user = named.as_deref().map_or(user, User::Name);
                Err(self.deny(context, &claim, user, why))
            }
        }
    }

    pub(crate) fn foreign_nonce(&mut self, context: &Context<'_>, realm: &RealmTerms) -> Disposition {
        self.tell_of(context, 438, RequestRefusal::Code);
        self.challenge(context, realm, 438)
    }

    fn check_password(
        &mut self,
        context: &mut Context<'_>,
        claim: &SignedClaim<'_>,
    ) -> Result<Checked, Disposition> {
        let SignedClaim { user, realm, mac, standing } = claim;
        let Some(algorithm) = password_algorithm(realm, context.request) else {
            if *standing == Standing::Foreign {
                return Err(self.foreign_nonce(context, realm));
            }
            return Err(self.bad(context, kind::PASSWORD_ALGORITHMS, Fault::NotAnnounced));
        };
        if algorithm == KeyAlgorithm::Md5 && !self.config.allow_md5 {
            return Err(self.challenge(context, realm, 401));
        }
        let request = context.request;
        let mut key = None;
        let mut verify = |candidate: &Key| {
            let verified = request.view.verify(candidate, *mac).is_ok();
            if verified {
                key = Some(candidate.clone());
            }
            verified
        };
        let check = match context.lookup_result.take() {
            Some(LookupResult::Unavailable) => return Err(self.store_failed(context, *user, realm)),
            Some(result) => result.verify(context.now.unix, &mut verify),
            None => self.policy.check(*user, &realm.name, algorithm, context.now.unix, &mut verify),
        };
        // Use the result of the MAC check too, in case a policy accepts a user even though no key matched.
        Ok(match (check, key) {
            (CredentialCheck::Accepted { username, identity, until_unix }, Some(key)) => {
                Ok(VerifiedUser { key, username, identity, grant: None, until_unix })
            }
            (CredentialCheck::NoSuchUser, _) => Err((None, CredentialRefusal::NoSuchUser)),
            (CredentialCheck::Expired { ago }, _) => Err((None, CredentialRefusal::Expired { ago })),
            (CredentialCheck::TooFarAhead { ahead }, _) => {
                Err((None, CredentialRefusal::TooFarAhead { ahead }))
            }
            (CredentialCheck::WrongKey { username } | CredentialCheck::Accepted { username, .. }, _) => {
                Err((Some(username), CredentialRefusal::WrongKey))
            }
            // A request without a valid nonce gets a nonce instead of a slot in the lookup table.
            (CredentialCheck::NeedsLookup, _) if *standing == Standing::Foreign => {
                return Err(self.foreign_nonce(context, realm));
            }
            (CredentialCheck::NeedsLookup, _) if *standing != Standing::Fresh => {
                return Err(self.challenge(context, realm, 438));
            }
            (CredentialCheck::NeedsLookup, _) => return Err(self.look_up(context, *user, realm, algorithm)),
        })
    }

    fn look_up(
        &mut self,
        context: &Context<'_>,
        user: User<'_>,
        realm: &RealmTerms,
        algorithm: KeyAlgorithm,
    ) -> Disposition {
        let Context { now, source, delivery, request, .. } = *context;
        match self.lookups.keep(now.ms, source, delivery, request.transaction(), request.view.bytes()) {
            Ok(lookup) => {
                let (user, realm) = (user.into(), Arc::clone(&realm.name));
                self.data.effects.push_back(Effect::LookUp(CredentialQuery {
                    lookup,
                    user,
                    realm,
                    algorithm,
                }));
                Disposition::Later
            }
            // Clients on streams do not retransmit, so without a response they would wait a long time.
            Err(DropReason::LookupLimit)
                if self.is_stream(context.client()) && self.config.store_failure == StoreFailure::Answer =>
            {
                self.store_failed(context, user, realm)
            }
            Err(reason) => Disposition::Drop(reason),
        }
    }

    fn store_failed(&mut self, context: &Context<'_>, user: User<'_>, realm: &RealmTerms) -> Disposition {
        match self.config.store_failure {
            StoreFailure::Answer => {
                let (client, method) = (context.client(), context.envelope.method);
                let (realm, username) = (&realm.name, claimed(user));
                // The nonce has verified the client's address.
                let asker = Requester { client, realm, username, proved: true, method };
                self.tell_refused(context.now, &asker, 500, RequestRefusal::Store);
                self.write_failure(&context.envelope, 500);
                Disposition::Reply
            }
            StoreFailure::Drop => Disposition::Drop(DropReason::LookupOver),
        }
    }

    fn deny(
        &mut self,
        context: &Context<'_>,
        claim: &SignedClaim<'_>,
        user: User<'_>,
        why: CredentialRefusal,
    ) -> Disposition {
        // The nonce has not been verified yet.
        if claim.standing == Standing::ForOwner {
            return self.challenge(context, &claim.realm, 438);
        }
        self.refused_before(context, &claim.realm, user, why);
        self.challenge(context, &claim.realm, 401)
    }

    /// Logs only requests from verified addresses, because the log line names the address. A client that
    /// forges its UDP source never sees the nonce.
    fn refused_before(
        &mut self,
        context: &Context<'_>,
        realm: &RealmTerms,
        user: User<'_>,
        why: CredentialRefusal,
    ) {
        let client = context.client();
        let is_udp = self.config.listener(client.listener).transport == Transport::Udp;
        let nonce = context.request.get(kind::NONCE).unwrap_or_default();
        if is_udp && self.judge(context.now, client.address.ip(), realm, nonce) == Standing::Foreign {
            self.data.stats.refused(why);
        } else {
            self.refused(context, user, why);
        }
    }

    pub(crate) fn refuse_expired(&mut self, context: &Context<'_>, ago: u64) -> Disposition {
        let who = &context.who;
        self.refused(context, User::Name(&who.username), CredentialRefusal::Expired { ago });
        self.challenge_again(context, 401)
    }

    pub(crate) fn challenge_again(&mut self, context: &Context<'_>, code: u16) -> Disposition {
        let listener = context.source.client.listener;
        let realm = self.realms.find(&self.config, listener, context.who.realm.as_bytes()).cloned();
        match realm {
            Some(realm) => self.challenge(context, &realm, code),
            None => self.fail(context, 437),
        }
    }

    pub(crate) fn refused(&mut self, context: &Context<'_>, user: User<'_>, why: CredentialRefusal) {
        self.data.stats.refused(why);
        let client = *context.client();
        if self.data.effects.len() < MAX_QUEUED
            && let Some(suppressed) = self.refusals.admit(context.now.ms, client.address.ip())
        {
            let username = claimed(user).into();
            self.data.effects.push_back(Effect::Refused { client, username, why, suppressed });
        }
    }

    /// Builds a 401 or 438 with everything the next attempt needs: realm, nonce and algorithms (RFC 8489
    /// section 9.2.4). Browsers and pion give up after a 438 on Allocate, so the nonce in a challenge is
    /// always usable. A 401 repeats the nonce if it is still valid, since only the credential has to change.
    ///
    /// Omits SOFTWARE and the reason phrase if the source address may be forged. With the realm `turnpike`, a
    /// challenge is 80 bytes long, four times a bare header: 20 bytes for the header, 8 for ERROR-CODE, 12
    /// for REALM, 28 for NONCE and 12 for PASSWORD-ALGORITHMS. Realms of up to 40 bytes stay within four
    /// times the shortest Allocate. THIRD-PARTY-AUTHORIZATION (RFC 7635 section 6.1) adds up to 264 bytes.
    pub(crate) fn challenge(&mut self, context: &Context<'_>, realm: &RealmTerms, code: u16) -> Disposition {
        let server_name = realm.third_party.then(|| self.config.third_party.server_name.as_bytes());
        let len = HEADER
            + attribute(4)
            + attribute(realm.name.len())
            + attribute(nonce::LEN)
            + attribute(realm.algorithms.len())
            + server_name.map_or(0, |name| attribute(name.len()));
        let Client { listener, address, .. } = context.source.client;
        let asked = context.request.len_without_fingerprint();
        if asked < SHORTEST_REQUEST
            && len > MAX_AMPLIFICATION * asked
            && self.config.listener(listener).transport == Transport::Udp
        {
            // Reserve the memory now, so that a flood causes no allocations.
            self.short_request_rate.make_room_for_all();
            if !self.short_request_rate.admit_address(context.now.ms.saturating_mul(1000), address.ip()) {
                return Disposition::Drop(DropReason::RefusalRatio);
            }
        }
        let now = context.now.unix;
        let issued;
        let repeated =
            context.request.get(kind::NONCE).filter(|_| code == 401 && context.nonce == Standing::Fresh);
        let nonce = if let Some(nonce) = repeated {
            nonce
        } else {
            self.data.stats.nonces += 1;
            issued = self.nonce_scope(now, address.ip(), realm).issue(now, nonce::salt(address));
            &issued
        };
        self.data.stats.error(code);
        let mut response = context.envelope.error(&mut self.reply, code);
        response.attribute(kind::REALM, realm.name.as_bytes());
        response.attribute(kind::NONCE, nonce);
        response.attribute(kind::PASSWORD_ALGORITHMS, realm.algorithms);
        if let Some(name) = server_name {
            response.attribute(kind::THIRD_PARTY_AUTHORIZATION, name);
        }
        context.envelope.software(&mut response, self.config.software.as_deref());
        response.finish(context.envelope.fingerprint);
        Disposition::Reply
    }
}

impl LookupResult {
    fn verify(self, unix: u64, verify: &mut dyn FnMut(&Key) -> bool) -> CredentialCheck {
        let (username, identity, keys) = match self {
            Self::Keys { username, identity, keys } => (username, identity, keys),
            Self::TooFarAhead { ahead } => return CredentialCheck::TooFarAhead { ahead },
            Self::NoSuchUser | Self::Unavailable => return CredentialCheck::NoSuchUser,
        };
        if let Some((_, until_unix)) = keys.iter().find(|(key, _)| verify(key)) {
            return CredentialCheck::Accepted { username, identity, until_unix: *until_unix };
        }
        let latest = keys.iter().map(|(_, until_unix)| until_unix.unwrap_or(u64::MAX)).max();
        match latest.and_then(|until_unix| unix.checked_sub(until_unix)) {
            Some(ago @ 1..) => CredentialCheck::Expired { ago },
            _ => CredentialCheck::WrongKey { username },
        }
    }
}

/// Algorithm of the request; MD5 if it names none. A request that names one must repeat the challenge's list
/// and choose from it (RFC 8489 section 9.2.4; otherwise 400), which detects an attacker who removed SHA-256
/// from the challenge.
fn password_algorithm(realm: &RealmTerms, request: &Request<'_>) -> Option<KeyAlgorithm> {
    match (request.get(kind::PASSWORD_ALGORITHM), request.get(kind::PASSWORD_ALGORITHMS)) {
        (None, None) => Some(KeyAlgorithm::Md5),
        (Some(chosen), Some(echoed)) if echoed == realm.algorithms => realm.announced(chosen),
        _ => None,
    }
}

fn named<'a>(request: &Request<'a>) -> Result<(User<'a>, &'a [u8], &'a [u8]), Denied> {
    let Some(user) = user_of(request) else {
        let given = [kind::USERNAME, kind::USERHASH].into_iter().find(|kind| request.get(*kind).is_some());
        let fault = if given.is_some() { Fault::Malformed } else { Fault::Missing };
        return Err(Denied::bad(given.unwrap_or(kind::USERNAME), fault));
    };
    let get = |kind| request.get(kind).ok_or(Denied::bad(kind, Fault::Missing));
    Ok((user, get(kind::REALM)?, get(kind::NONCE)?))
}
