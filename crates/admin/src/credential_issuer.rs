//! Issues time-limited credentials (draft-uberti-behave-turn-rest) and tokens (RFC 7635); none are stored.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use turnpike_api::CredentialsRequest;
use turnpike_config::{
    Secret, Settings, TokenKeySettings,
    access_tokens::{self, MadeToken},
    realms, restapi_credentials,
};
use turnpike_stores::{ApiKey, credential_id};

use crate::{
    access::Audit,
    accounts::{AccountStore, signing_secret},
    client_uris::ClientUris,
    problem::Problem,
    program::ServerView,
};

/// USERNAME also contains the time and a colon, and is at most 508 bytes long (RFC 8489 section 14.3).
const LONGEST_USER: usize = 256;
const LONGEST_IDENTIFIER: usize = 128;
/// Maximum length of USERNAME in bytes (RFC 8489 section 14.3).
const LONGEST_USERNAME: usize = 508;

pub(crate) struct Issued {
    pub(crate) realm: String,
    /// Lifetime in seconds.
    pub(crate) ttl: u32,
    /// Last Unix second in which the credential is valid.
    pub(crate) expiry: u64,
    pub(crate) uris: Vec<String>,
    pub(crate) grant: IssuedSecret,
    /// Owner of the credential, as named by the application.
    user: String,
}

pub(crate) enum IssuedSecret {
    Password { username: String, password: Secret },
    Token { kid: String, token: MadeToken },
}

impl IssuedSecret {
    /// Username and password. A token, which such requests cannot ask for, has only its kid.
    pub(crate) fn into_password(self) -> (String, String) {
        match self {
            Self::Password { username, password } => (username, password.reveal().to_owned()),
            Self::Token { kid, .. } => (kid, String::new()),
        }
    }
}

impl Issued {
    /// Audit text with the owner and the key's name, but no secrets.
    pub(crate) fn audit(&self, key: Option<&ApiKey>) -> Audit {
        let Self { realm, ttl, user, .. } = self;
        let what = match &self.grant {
            IssuedSecret::Password { .. } => "a credential".to_owned(),
            IssuedSecret::Token { kid, .. } => format!("a token under key {kid:?}"),
        };
        let by = key.map_or_else(String::new, |key| format!(", by key {:?}", key.name));
        // Names are untrusted input and must not forge log lines.
        Audit(format!("{what} for {user:?} in realm {realm:?}, valid for {ttl} s{by}"))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RefusalReason {
    NoKey,
    WrongKey,
    Rate,
    Origin,
    Host,
    Realm,
    BadRequest,
    NoSecret,
    Unavailable,
}

const REASONS: [(&str, RefusalReason); 9] = [
    ("no_key", RefusalReason::NoKey),
    ("wrong_key", RefusalReason::WrongKey),
    ("rate", RefusalReason::Rate),
    ("origin", RefusalReason::Origin),
    ("host", RefusalReason::Host),
    ("realm", RefusalReason::Realm),
    ("bad_request", RefusalReason::BadRequest),
    ("no_secret", RefusalReason::NoSecret),
    ("unavailable", RefusalReason::Unavailable),
];

pub(crate) struct IssuedCounts {
    issued: [AtomicU64; 2],
    refused: [AtomicU64; REASONS.len()],
}

pub(crate) static COUNTS: IssuedCounts = IssuedCounts {
    issued: [const { AtomicU64::new(0) }; 2],
    refused: [const { AtomicU64::new(0) }; REASONS.len()],
};

impl IssuedCounts {
    pub(crate) fn issued(&self) -> [(&'static str, u64); 2] {
        [("password", 0), ("token", 1)]
            .map(|(kind, index)| (kind, self.issued[index].load(Ordering::Relaxed)))
    }

    pub(crate) fn refused(&self) -> [(&'static str, u64); REASONS.len()] {
        REASONS.map(|(name, reason)| (name, self.refused[reason as usize].load(Ordering::Relaxed)))
    }
}

pub(crate) struct CredentialRefusal {
    pub(crate) reason: RefusalReason,
    problem: Box<Problem>,
    retry_after: Option<Duration>,
}

impl CredentialRefusal {
    pub(crate) fn new(
        reason: RefusalReason,
        status: StatusCode,
        code: &str,
        detail: impl Into<String>,
    ) -> Self {
        Self::of(reason, Problem::new(status, code, detail))
    }

    pub(crate) fn of(reason: RefusalReason, problem: Problem) -> Self {
        Self { reason, problem: Box::new(problem), retry_after: None }
    }

    fn bad_request(detail: impl Into<String>) -> Self {
        Self::of(RefusalReason::BadRequest, Problem::bad_request(detail))
    }

    pub(crate) fn unavailable(code: &str, detail: impl Into<String>) -> Self {
        let refusal = Self::new(RefusalReason::Unavailable, StatusCode::SERVICE_UNAVAILABLE, code, detail);
        refusal.after(Duration::from_secs(5))
    }

    pub(crate) fn after(self, pause: Duration) -> Self {
        Self { retry_after: Some(pause), ..self }
    }

    pub(crate) fn answer(self) -> Response {
        COUNTS.refused[self.reason as usize].fetch_add(1, Ordering::Relaxed);
        let mut response = (*self.problem).into_response();
        if let Some(pause) = self.retry_after {
            // Whole seconds, at least one (RFC 9110 section 10.2.3).
            let seconds = pause.as_millis().div_ceil(1000).max(1).to_string();
            if let Ok(value) = HeaderValue::from_str(&seconds) {
                response.headers_mut().insert(header::RETRY_AFTER, value);
            }
        }
        response
    }
}

impl From<Problem> for CredentialRefusal {
    fn from(problem: Problem) -> Self {
        let reason =
            if problem.status >= 500 { RefusalReason::Unavailable } else { RefusalReason::BadRequest };
        Self::of(reason, problem)
    }
}

/// Issues a credential to an application (with `key`) or to an administrator (without); `unix` is the
/// current Unix time in seconds.
pub(crate) fn issue(
    server: &ServerView,
    key: Option<&ApiKey>,
    wanted: CredentialsRequest,
    unix: u64,
) -> Result<Issued, CredentialRefusal> {
    let CredentialsRequest { user, identifier, ttl, realm, kid } = wanted;
    let settings = &*server.settings;
    let realm = realm_of(settings, key, realm)?;
    if let Some(user) = &user
        && (user.is_empty() || user.len() > LONGEST_USER || user.contains(char::is_control))
    {
        let why = format!("user must be 1 to {LONGEST_USER} bytes long and contain no control characters");
        return Err(CredentialRefusal::bad_request(why));
    }
    if let Some(identifier) = &identifier
        && (identifier.is_empty()
            || identifier.len() > LONGEST_IDENTIFIER
            || identifier.contains(char::is_control)
            || kid.is_some())
    {
        let why = format!(
            "identifier must be 1 to {LONGEST_IDENTIFIER} bytes long, contain no control characters, and not be \
             combined with kid"
        );
        return Err(CredentialRefusal::bad_request(why));
    }
    // A random name, so that each anonymous owner has a separate quota.
    let user =
        user.unwrap_or_else(|| restapi_credentials::new_secret(rand::random()).reveal()[..16].to_owned());
    let token_key = kid.map(|kid| token_key(settings, &realm, kid)).transpose()?;
    let ttl = ttl_of(settings, key, token_key.map(|key| key.max_lifetime), ttl)?;
    let addresses: Vec<_> =
        server.addresses.iter().filter(|state| state.is_up).map(|state| state.address).collect();
    let uris = ClientUris {
        settings,
        listeners: &server.relay.listeners(),
        certificates: &server.certificates,
        addresses: &addresses,
    }
    .to(&realm);
    if uris.is_empty() {
        let why = format!("no listener serves realm {realm:?}, and credentials.uris is empty");
        return Err(CredentialRefusal::new(RefusalReason::Realm, StatusCode::CONFLICT, "no_listener", why));
    }
    let expiry = unix.saturating_add(ttl.into());
    let (grant, kind) = match token_key {
        Some(TokenKeySettings { kid, key, .. }) => {
            let name = realms::third_party(settings).server_name;
            (
                IssuedSecret::Token {
                    kid: kid.clone(),
                    token: access_tokens::make(key, &name, unix, ttl, rand::random()),
                },
                1,
            )
        }
        None => {
            let Some(secret) = signing_secret(settings, server.store.as_ref(), &realm) else {
                return Err(no_secret(&realm, server.store.as_ref()));
            };
            let username = username(settings, key, expiry, &user, identifier.as_deref())?;
            let password = restapi_credentials::password(&secret, &username);
            (IssuedSecret::Password { username, password }, 0)
        }
    };
    COUNTS.issued[kind].fetch_add(1, Ordering::Relaxed);
    Ok(Issued { realm, ttl, expiry, uris, grant, user })
}

/// USERNAME of a credential: with the API key, if usage is recorded, and with the application's name for its
/// customer.
fn username(
    settings: &Settings,
    key: Option<&ApiKey>,
    expiry: u64,
    user: &str,
    identifier: Option<&str>,
) -> Result<String, CredentialRefusal> {
    let key = key.map(|key| key.name.as_str()).filter(|_| settings.usage.days > 0);
    let username = restapi_credentials::username(expiry, &credential_id(user, key, identifier));
    if username.len() > LONGEST_USERNAME {
        let why =
            format!("user and identifier are too long: the username would exceed {LONGEST_USERNAME} bytes");
        return Err(CredentialRefusal::bad_request(why));
    }
    Ok(username)
}

/// Returns the requested realm, if the key is valid for it and the server serves it.
pub(crate) fn realm_of(
    settings: &Settings,
    key: Option<&ApiKey>,
    wanted: Option<String>,
) -> Result<String, CredentialRefusal> {
    let all = realms::all(settings);
    let only = key.and_then(|key| key.realm.clone());
    let realm = match (only, wanted) {
        (Some(only), Some(wanted)) if only != wanted => {
            // A restricted key must not reveal other realms.
            let why = format!("this key is only valid for realm {only:?}");
            return Err(CredentialRefusal::new(
                RefusalReason::Realm,
                StatusCode::FORBIDDEN,
                "other_realm",
                why,
            ));
        }
        (Some(only), _) => only,
        (None, Some(wanted)) => wanted,
        (None, None) => all.first().map_or_else(|| settings.realm.clone(), |first| first.name.to_owned()),
    };
    if all.iter().any(|view| view.name == realm) {
        return Ok(realm);
    }
    let why = format!("realm {realm:?} is not served here");
    Err(CredentialRefusal::new(RefusalReason::Realm, StatusCode::BAD_REQUEST, "unknown_realm", why))
}

fn token_key<'a>(
    settings: &'a Settings,
    realm: &str,
    wanted: String,
) -> Result<&'a TokenKeySettings, CredentialRefusal> {
    let is_it = |key: &&TokenKeySettings| {
        key.kid == wanted && key.realm.as_deref().unwrap_or(&settings.realm) == realm
    };
    settings.oauth.keys.iter().find(is_it).ok_or_else(|| {
        let why = format!("there is no token key {wanted:?} in realm {realm:?}");
        CredentialRefusal::new(RefusalReason::BadRequest, StatusCode::BAD_REQUEST, "unknown_kid", why)
    })
}

/// Lifetime in seconds, which must not exceed any of the limits.
fn ttl_of(
    settings: &Settings,
    key: Option<&ApiKey>,
    of_token: Option<u32>,
    wanted: Option<u32>,
) -> Result<u32, CredentialRefusal> {
    let limits = [key.and_then(|key| key.max_ttl), of_token];
    let most = limits.into_iter().flatten().fold(settings.credentials.max_ttl, u32::min);
    match wanted.unwrap_or_else(|| settings.credentials.ttl.min(most)) {
        ttl if !(1..=most).contains(&ttl) => {
            Err(CredentialRefusal::bad_request(format!("ttl must be 1 to {most}, not {ttl}")))
        }
        ttl => Ok(ttl),
    }
}

fn no_secret(realm: &str, store: Option<&AccountStore>) -> CredentialRefusal {
    if store.is_some_and(|store| store.rules().is_none()) {
        return CredentialRefusal::unavailable(
            "store_unavailable",
            "the store with the secrets has not answered yet",
        );
    }
    let why =
        format!("realm {realm:?} has no secret to sign credentials with: run turnpike secret rotate {realm}");
    CredentialRefusal::new(RefusalReason::NoSecret, StatusCode::CONFLICT, "no_secret", why)
}

#[cfg(test)]
mod tests {
    use turnpike_config::{AuthSettings, RealmSettings};

    use super::*;

    fn settings() -> Settings {
        let realm = RealmSettings {
            name: "tenant".to_owned(),
            secrets: vec![Secret::new("t")],
            ..RealmSettings::default()
        };
        Settings {
            auth: AuthSettings {
                secrets: vec![Secret::new("first"), Secret::new("second")],
                ..AuthSettings::default()
            },
            realms: vec![realm],
            ..Settings::default()
        }
    }

    fn key(realm: Option<&str>, max_ttl: Option<u32>) -> ApiKey {
        let realm = realm.map(str::to_owned);
        ApiKey { name: "shop".to_owned(), hash: [0; 32], realm, max_ttl, rate: None }
    }

    #[test]
    fn credential_realm_must_be_served_and_match_a_restricted_key() {
        let settings = settings();
        let of = |key: Option<&ApiKey>, wanted: Option<&str>| {
            realm_of(&settings, key, wanted.map(str::to_owned)).map_err(|refusal| refusal.problem.code)
        };
        let (free, bound, lost) = (key(None, None), key(Some("tenant"), None), key(Some("gone"), None));
        for (key, wanted, found) in [
            (None, None, Ok("turnpike")),
            (None, Some("tenant"), Ok("tenant")),
            (Some(&free), None, Ok("turnpike")),
            (Some(&free), Some("tenant"), Ok("tenant")),
            (Some(&free), Some("gone"), Err("unknown_realm")),
            (Some(&bound), None, Ok("tenant")),
            (Some(&bound), Some("tenant"), Ok("tenant")),
            (Some(&bound), Some("turnpike"), Err("other_realm")),
            (Some(&bound), Some("gone"), Err("other_realm")),
            (Some(&lost), None, Err("unknown_realm")),
        ] {
            let expected = found.map(str::to_owned).map_err(Box::from);
            assert_eq!(of(key, wanted), expected, "{key:?} {wanted:?}");
        }
    }

    #[test]
    fn ttl_is_bounded_by_configuration_key_and_token_key() {
        let mut settings = settings();
        (settings.credentials.ttl, settings.credentials.max_ttl) = (600, 3600);
        let of = |key: Option<&ApiKey>, of_token, wanted| ttl_of(&settings, key, of_token, wanted).ok();
        let short = key(None, Some(60));
        for (key, of_token, wanted, found) in [
            (None, None, None, Some(600)),
            (None, None, Some(3600), Some(3600)),
            (None, None, Some(3601), None),
            (None, None, Some(0), None),
            (Some(&short), None, None, Some(60)),
            (Some(&short), None, Some(60), Some(60)),
            (Some(&short), None, Some(61), None),
            (None, Some(30), None, Some(30)),
            (Some(&short), Some(30), Some(31), None),
            (None, Some(u32::MAX), Some(1), Some(1)),
        ] {
            assert_eq!(of(key, of_token, wanted), found, "{key:?} {of_token:?} {wanted:?}");
        }
    }

    #[test]
    fn first_configured_secret_signs_without_a_store() {
        let settings = settings();
        let signs =
            |realm: &str| signing_secret(&settings, None, realm).map(|secret| secret.reveal().to_owned());
        assert_eq!(["turnpike", "tenant", "gone"].map(signs), [Some("first".into()), Some("t".into()), None]);
    }

    #[test]
    fn retry_after_is_in_whole_seconds() {
        for (pause, told) in
            [(Duration::ZERO, "1"), (Duration::from_millis(1001), "2"), (Duration::from_secs(5), "5")]
        {
            let refusal = CredentialRefusal::new(
                RefusalReason::Rate,
                StatusCode::TOO_MANY_REQUESTS,
                "rate_exceeded",
                "too often",
            );
            let response = refusal.after(pause).answer();
            assert_eq!(response.headers()[header::RETRY_AFTER], told);
        }
    }
}
