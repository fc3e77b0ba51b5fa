//! Long-term credentials (RFC 8489 section 9.2.4). The user store is asked only about requests whose nonce we gave to
//! that very address, or who show that they do not forge theirs (a stream, a mobility ticket), so that a flood from forged
//! addresses never reaches it.

use std::{str, sync::Arc};

use turnpike_wire::integrity::{self, KeyAlgorithm};

use super::{
    Answer, Client, CredentialRefusal, Effect, Gate, Lookup, Server, Transport, User, attribute,
    nonce::{self, Standing},
    realm::Terms,
    request::Request,
    response::{Response, Signer},
    third_party::{Grant, Proof},
};
use crate::time::Now;

/// Bytes, by RFC 8489 section 14.3: USERNAME has fewer than 509.
const MAX_USERNAME_LEN: usize = 508;

/// Bytes of a header and an attribute of four: REQUESTED-TRANSPORT, LIFETIME, CONNECTION-ID. All other requests need more.
const SHORTEST_REQUEST: usize = 28;

/// Effects that wait: a runtime that does not drain them gets no more of those that anybody can cause.
pub(super) const MAX_QUEUED: usize = 1024;

/// Who sent a request, as proven.
pub(super) struct Who {
    /// Users of the same name in two realms are two users.
    pub(super) realm: Arc<str>,
    pub(super) username: Box<str>,
    pub(super) identity: Box<str>,
    /// `None` where no credentials are asked for.
    pub(super) signer: Option<Signer>,
    /// Of a client that authenticates with a token.
    pub(super) grant: Option<Box<Grant>>,
}

impl Who {
    /// So many seconds, but no longer than the token lives.
    pub(super) fn limit(&self, now: Now, seconds: u32) -> u32 {
        self.grant.as_ref().map_or(seconds, |grant| grant.limit(now, seconds))
    }
}

impl<G: Gate> Server<G> {
    pub(super) fn authenticate(
        &mut self,
        now: Now,
        client: &Client,
        request: &Request<'_>,
    ) -> Result<Who, Answer> {
        let first = self.realms.first(&self.config, client.listener);
        if !self.config.authenticate {
            // Without names, quotas count addresses.
            let identity = client.address.ip().to_string().into_boxed_str();
            let realm = Arc::clone(&first.name);
            return Ok(Who { realm, username: Box::default(), identity, signer: None, grant: None });
        }
        let first = Arc::clone(first);
        // "If the message does not contain a MESSAGE-INTEGRITY or MESSAGE-INTEGRITY-SHA256 attribute, the server MUST
        // generate an error response with an error code of 401 (Unauthenticated)."
        let Some(mac) = request.mac else {
            return Err(self.challenge(now, client, request, &first, 401));
        };
        // "If the message contains a MESSAGE-INTEGRITY or a MESSAGE-INTEGRITY-SHA256 attribute but is missing either
        // the USERNAME or USERHASH, REALM, or NONCE attribute, the server MUST generate an error response with an
        // error code of 400 (Bad Request)."
        let (Some(user), Some(realm), Some(nonce)) = (user_of(request), request.realm, request.nonce) else {
            return Err(self.fail(request, None, 400));
        };
        // A key holds for one realm; the challenge tells which. A user of another realm that is served here names that, and
        // gets a nonce for it by the 438 below.
        let Some(realm) = self.realms.find(&self.config, client.listener, realm).cloned() else {
            self.refused_before(now, client, request, &first, user, CredentialRefusal::WrongRealm);
            return Err(self.challenge(now, client, request, &first, 401));
        };
        // A nonce that we never gave to this address cannot have become "no longer valid"; 438 hands out one that can be
        // used, before anything expensive is done.
        let standing = self.standing(now, client, request, &realm, nonce);
        if standing == Standing::Foreign {
            return Err(self.challenge(now, client, request, &realm, 438));
        }
        if let Some(checked) = self.check_token(now, client, request, &realm, user, mac, standing)? {
            return match checked {
                Ok(_) if standing == Standing::Stale => {
                    Err(self.challenge(now, client, request, &realm, 438))
                }
                Ok(Proof { key, identity, grant }) => Ok(Who {
                    realm: Arc::clone(&realm.name),
                    username: name_of(user).into(),
                    identity,
                    signer: Some(Signer { key, mac }),
                    grant: Some(grant),
                }),
                Err(why) => Err(self.deny(now, client, request, &realm, standing, user, why)),
            };
        }
        let Some(algorithm) = password_algorithm(&realm, request) else {
            return Err(self.fail(request, None, 400));
        };
        if algorithm == KeyAlgorithm::Md5 && !self.config.allow_md5 {
            return Err(self.challenge(now, client, request, &realm, 401));
        }

        let mut key = None;
        let lookup = self.gate.check(user, &realm.name, algorithm, now.unix, &mut |candidate| {
            let verified = integrity::verify(request.bytes, candidate, mac).is_ok();
            if verified {
                key = Some(candidate.clone());
            }
            verified
        });
        // "If the value of the USERNAME or USERHASH attribute is not valid" and "if the resulting value does not match"
        // MESSAGE-INTEGRITY: 401. A gate that accepts without a key that verified would be a bug in it; believe the MAC.
        let (named, why) = match (lookup, key) {
            (Lookup::Accepted { username, identity }, Some(key)) => {
                // "If the NONCE is no longer valid, the server MUST generate an error response with an error code of 438 (Stale
                // Nonce)": the last check of the list, after the integrity.
                if standing == Standing::Stale {
                    return Err(self.challenge(now, client, request, &realm, 438));
                }
                let realm = Arc::clone(&realm.name);
                return Ok(Who { realm, username, identity, signer: Some(Signer { key, mac }), grant: None });
            }
            (Lookup::NoSuchUser, _) => (None, CredentialRefusal::NoSuchUser),
            (Lookup::Expired { ago }, _) => (None, CredentialRefusal::Expired { ago }),
            (Lookup::WrongKey { username } | Lookup::Accepted { username, .. }, _) => {
                (Some(username), CredentialRefusal::WrongKey)
            }
        };
        let user = named.as_deref().map_or(user, User::Name);
        Err(self.deny(now, client, request, &realm, standing, user, why))
    }

    /// The answer to credentials that are not good.
    #[expect(clippy::too_many_arguments, reason = "what is known of a request that failed")]
    fn deny(
        &mut self,
        now: Now,
        client: &Client,
        request: &Request<'_>,
        realm: &Terms,
        standing: Standing,
        user: User<'_>,
        why: CredentialRefusal,
    ) -> Answer {
        // Who it was is not known before the nonce is: nothing to tell of.
        if standing == Standing::ForOwner {
            return self.challenge(now, client, request, realm, 438);
        }
        self.refused_before(now, client, request, realm, user, why);
        self.challenge(now, client, request, realm, 401)
    }

    /// Counts a credential that is refused before its owner has proved anything, and tells of it if the client's address is its own:
    /// the line names that address, and must not accuse another's. Whoever forges one over UDP never sees the nonce that we give to
    /// it; elsewhere a handshake has proved it.
    fn refused_before(
        &mut self,
        now: Now,
        client: &Client,
        request: &Request<'_>,
        realm: &Terms,
        user: User<'_>,
        why: CredentialRefusal,
    ) {
        let is_udp = self.config.listener(client.listener).transport == Transport::Udp;
        let nonce = request.nonce.unwrap_or_default();
        if is_udp && self.judge(now, client.address.ip(), realm, nonce) == Standing::Foreign {
            self.stats.refused(why);
        } else {
            self.refused(now, client, user, why);
        }
    }

    /// Counts a refused credential and, at a bounded rate, tells of it.
    pub(super) fn refused(&mut self, now: Now, client: &Client, user: User<'_>, why: CredentialRefusal) {
        self.stats.refused(why);
        if self.effects.len() < MAX_QUEUED
            && let Some(suppressed) = self.refusals.admit(now.ms, client.address.ip())
        {
            let username = match user {
                User::Name(name) => printable(name),
                User::Hash(_) => "(userhash)".into(),
            };
            self.effects.push_back(Effect::Refused { client: *client, username, why, suppressed });
        }
    }

    /// 401 or 438 with what the client needs to try again: "The response MUST include a REALM value [...] MUST include a
    /// NONCE [...] PASSWORD-ALGORITHMS". Neither SOFTWARE nor a reason phrase: it answers unauthenticated packets, so
    /// every byte serves amplification. With the realm `turnpike` it has 84 bytes, three times the shortest Allocate that can be
    /// granted: 20 of header, 8 of ERROR-CODE, 12 of REALM, 32 of NONCE, 12 of PASSWORD-ALGORITHMS. A longer realm adds its
    /// length; a name for third-party authorization, at most 255 bytes, its length and 4.
    ///
    /// What has no room for an attribute is nobody's request. Its answer has 48 bytes: the nonce is good for nothing but a 438 with
    /// the real one, since one without the bits of RFC 8489 that counted would let whoever sits between make any client's
    /// credentials weaker (section 9.2.1).
    pub(super) fn challenge(
        &mut self,
        now: Now,
        client: &Client,
        request: &Request<'_>,
        realm: &Terms,
        code: u16,
    ) -> Answer {
        let whole = request.len_without_fingerprint() >= SHORTEST_REQUEST;
        let nonce = whole.then(|| self.nonce_scope(client.address.ip(), realm).issue(now.unix));
        self.stats.error(code);
        self.stats.nonces += u64::from(whole);
        let mut response = Response::error(&mut self.reply, request.method, request.transaction, code, "");
        response.attribute(attribute::REALM, realm.name.as_bytes());
        match nonce {
            None => response.attribute(attribute::NONCE, nonce::NONE),
            Some(nonce) => {
                response.attribute(attribute::NONCE, &nonce);
                response.attribute(attribute::PASSWORD_ALGORITHMS, realm.algorithms);
                if realm.third_party {
                    let name = self.config.third_party.server_name.as_bytes();
                    response.attribute(attribute::THIRD_PARTY_AUTHORIZATION, name);
                }
            }
        }
        response.finish(request.fingerprint);
        Answer::Reply
    }
}

/// "If the request contains neither the PASSWORD-ALGORITHMS nor the PASSWORD-ALGORITHM [...] as though
/// PASSWORD-ALGORITHM were MD5. Otherwise, unless (1) PASSWORD-ALGORITHM and PASSWORD-ALGORITHMS are both present,
/// (2) PASSWORD-ALGORITHMS matches the value sent in the response that sent this NONCE, and (3) PASSWORD-ALGORITHM
/// matches one of the entries in PASSWORD-ALGORITHMS, the server MUST generate [...] 400 (Bad Request)." Whoever
/// strips SHA-256 from our challenge on its way is found out here.
fn password_algorithm(realm: &Terms, request: &Request<'_>) -> Option<KeyAlgorithm> {
    match (request.password_algorithm, request.password_algorithms) {
        (None, None) => Some(KeyAlgorithm::Md5),
        (Some(chosen), Some(echoed)) if echoed == realm.algorithms => realm.announced(chosen),
        _ => None,
    }
}

fn user_of<'a>(request: &Request<'a>) -> Option<User<'a>> {
    match (request.username, request.userhash) {
        (Some(name), _) if name.len() <= MAX_USERNAME_LEN => str::from_utf8(name).ok().map(User::Name),
        (None, Some(hash)) => hash.try_into().ok().map(User::Hash),
        _ => None,
    }
}

fn name_of(user: User<'_>) -> &str {
    match user {
        User::Name(name) => name,
        User::Hash(_) => "",
    }
}

/// A username for a log line.
pub(super) fn printable(name: &str) -> Box<str> {
    name.chars().filter(|character| !character.is_control()).take(64).collect::<String>().into_boxed_str()
}
