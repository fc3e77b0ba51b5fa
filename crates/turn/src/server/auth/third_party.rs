//! Third-party authorization (RFC 7635): a client presents a token from an authorization server instead of a
//! password. USERNAME names the key that the token is encrypted with, and the token contains the key that the
//! request is signed with.
//!
//! Clients send a token only in Allocate and Refresh (section 9); other requests are verified with the
//! allocation's last token.

use std::{fmt::Write as _, sync::Arc};

use sha2::{Digest as _, Sha256};
use turnpike_wire::{
    integrity::{Key, Mac},
    stun::kind,
};

use crate::{
    access_token::{AccessToken, TokenError, TokenKey},
    server::{
        Client, CredentialRefusal, Disposition, Policy, Server, TokenProblem, User,
        auth::{
            claim::{Checked, SignedClaim, TokenGrant, VerifiedUser},
            nonce::Standing,
            realm::RealmTerms,
        },
        request::{Method, Request, context::Context},
    },
    time::Now,
};

#[derive(Clone, Debug, Default)]
pub struct ThirdParty {
    /// THIRD-PARTY-AUTHORIZATION, 1 to 255 bytes. Keep it short: challenges may go to forged addresses.
    pub server_name: String,
    /// Allowed clock difference in seconds. RFC 7635 recommends 5.
    pub skew: u32,
    pub keys: Vec<IssuerKey>,
}

#[derive(Clone, Debug)]
pub struct IssuerKey {
    /// Key name, which clients send in USERNAME.
    pub kid: String,
    pub key: TokenKey,
    pub realm: String,
    /// Maximum lifetime accepted in a token, in seconds.
    pub max_lifetime: u32,
}

impl ThirdParty {
    pub(crate) fn serves(&self, realm: &str) -> bool {
        self.keys.iter().any(|key| key.realm == realm)
    }

    fn issuer(&self, kid: &str, realm: &RealmTerms) -> Option<&IssuerKey> {
        self.keys.iter().find(|key| key.kid == kid && *key.realm == *realm.name)
    }
}

impl<P: Policy> Server<P> {
    /// Returns `None` if the user has a password. Decrypts a token only if the nonce was issued to the
    /// client.
    pub(crate) fn check_token(
        &mut self,
        context: &Context<'_>,
        claim: &SignedClaim<'_>,
    ) -> Result<Option<Checked>, Disposition> {
        let SignedClaim { user, realm, mac, standing } = claim;
        let User::Name(kid) = *user else { return Ok(None) };
        let (now, request) = (context.now, context.request);
        let config = Arc::clone(&self.config);
        let settings = &config.third_party;
        if *standing == Standing::Foreign {
            let shows = realm.third_party && request.get(kind::ACCESS_TOKEN).is_some();
            let by_token =
                shows || settings.issuer(kid, realm).is_some() || self.has_grant(context.client(), kid);
            return if by_token { Err(self.foreign_nonce(context, realm)) } else { Ok(None) };
        }
        if let Some(token) = request.get(kind::ACCESS_TOKEN) {
            let shown = || check_shown(settings, now, request, claim, kid, token).map_err(|why| (None, why));
            return Ok(realm.third_party.then(shown));
        }
        // Key names are public, so only a valid nonce may cause a request to another worker.
        let by_token = *standing != Standing::ForOwner && settings.issuer(kid, realm).is_some();
        let index = self.holder(context, by_token)?;
        let found = index.and_then(|index| self.states.get(index));
        let Some((state, grant)) = found.and_then(|it| Some((&*it, it.grant.as_ref()?))) else {
            return Ok(None);
        };
        if *state.username != *kid || !state.is_in(&realm.name) {
            return Ok(None);
        }
        let (grant, identity) = (grant.clone(), state.identity().into());
        let over = now.unix.saturating_sub(grant.until_unix);
        Ok(Some(if over >= u64::from(config.third_party.skew).max(1) {
            Err((None, CredentialRefusal::Expired { ago: over }))
        } else if request.view.verify(&grant.key, *mac).is_err() {
            Err((None, CredentialRefusal::WrongKey))
        } else {
            let (key, username) = (grant.key.clone(), kid.into());
            Ok(VerifiedUser { key, username, identity, grant: Some(grant), until_unix: None })
        }))
    }

    fn has_grant(&mut self, client: &Client, kid: &str) -> bool {
        let state = self.data.forwarding.find(client).and_then(|index| self.states.get(index));
        state.is_some_and(|state| state.grant.is_some() && *state.username == *kid)
    }

    /// Finds the client's allocation. If another worker has it, passes the request or the client's stream to
    /// that worker.
    fn holder(&mut self, context: &Context<'_>, by_token: bool) -> Result<Option<u32>, Disposition> {
        if context.request.method == Method::ConnectionBind {
            let Ok(connection) = self.connection_to_bind(context) else { return Ok(None) };
            return match self.connections.owner(connection) {
                None if by_token => self.hand_over(context, connection).map_or(Ok(None), Err),
                owner => Ok(owner),
            };
        }
        let client = context.client();
        if let Some(index) = self.data.forwarding.find(client) {
            return Ok(Some(index));
        }
        let own = self.worker_id.number();
        match self.pending_moves.get(client) {
            Some(expected) if expected.owner == own || by_token => self.arriving(context),
            _ => Ok(None),
        }
    }
}

fn check_shown(
    settings: &ThirdParty,
    now: Now,
    request: &Request<'_>,
    claim: &SignedClaim<'_>,
    kid: &str,
    token: &[u8],
) -> Result<VerifiedUser, CredentialRefusal> {
    let SignedClaim { realm, mac, .. } = claim;
    let issuer = settings.issuer(kid, realm).ok_or(CredentialRefusal::Token(TokenProblem::UnknownKey))?;
    let token = AccessToken::open(&issuer.key, &settings.server_name, token).map_err(|error| {
        CredentialRefusal::Token(match error {
            TokenError::Malformed => TokenProblem::Malformed,
            TokenError::NotAuthentic => TokenProblem::NotAuthentic,
        })
    })?;
    // Section 7 accepts a difference of up to lifetime + skew between now and the token's time, in either
    // direction. That would double the lifetime of a token whose time is in the future, so here that time may
    // be ahead only by the skew.
    let skew = u64::from(settings.skew);
    let made = token.made_unix();
    if made > now.unix.saturating_add(skew) {
        return Err(CredentialRefusal::Token(TokenProblem::Future { ahead: made - now.unix }));
    }
    let until_unix = made.min(now.unix) + u64::from(token.lifetime.min(issuer.max_lifetime));
    if now.unix >= until_unix + skew {
        return Err(CredentialRefusal::Expired { ago: now.unix - until_unix });
    }
    let key = signing_key(request, &token, *mac).ok_or(CredentialRefusal::WrongKey)?;
    let grant = Some(Box::new(TokenGrant { key: key.clone(), until_unix }));
    let identity = identity(kid, &token);
    Ok(VerifiedUser { key, username: kid.into(), identity, grant, until_unix: None })
}

/// Key that signed the request. coturn's clients and server use only the first 16 bytes of `mac_key` for
/// HMAC-SHA1, the length of an MD5 key; those 16 bytes are secret too.
fn signing_key(request: &Request<'_>, token: &AccessToken, mac: Mac) -> Option<Key> {
    const COTURN_LEN: usize = 16;
    let verifies = |key: &Key| request.view.verify(key, mac).is_ok();
    let whole = token.key();
    if verifies(&whole) {
        return Some(whole);
    }
    let shorter = token.mac_key().get(..COTURN_LEN).filter(|_| mac == Mac::Sha1)?;
    Some(Key::from_bytes(shorter)).filter(verifies)
}

/// Tokens name no user, so the quota applies per token, identified by a hash of its secret key.
fn identity(kid: &str, token: &AccessToken) -> Box<str> {
    let mut name = format!("{kid}/");
    for byte in &Sha256::digest(token.mac_key())[..8] {
        let _ = write!(name, "{byte:02x}");
    }
    name.into_boxed_str()
}
