//! Credentials in the forms of Cloudflare's and Twilio's TURN services. Access and limits are those of
//! `/v1/credentials`.

use axum::{
    Extension,
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use jiff::Timestamp;
use serde::Deserialize;
use turnpike_api::{
    CloudflareCredentials, CloudflareIceServer, CloudflareIceServers, CloudflareRequest, CredentialsRequest,
    TwilioIceServer, TwilioToken,
};
use turnpike_config::{Secret, restapi_credentials};
use turnpike_fleet::{Ban, Bans, LONGEST_BAN_S};
use turnpike_stores::ApiKey;
use utoipa::ToSchema;

use super::{
    Json, bans, body, bytes,
    credentials::{CredentialService, is_form, unix},
    form,
    input::PathPart,
    path_part, server_of,
};
use crate::{
    access::Audit,
    credential_issuer::{CredentialRefusal, Issued, RefusalReason, realm_of},
    problem::Problem,
    via::Via,
};

/// Revocations are bans, and may use half of their table.
const MOST_REVOKED: usize = Bans::MOST / 2;

/// Issues a credential in the form of Cloudflare's TURN service: STUN and TURN as separate ICE servers.
#[utoipa::path(
    post,
    path = "/v1/turn/keys/{key}/credentials/generate-ice-servers",
    tag = "credentials",
    params(("key" = String, Path, description = "The key's name; ignored on the admin interface.")),
    request_body(content = Option<CloudflareRequest>),
    responses(
        (status = 201, description = "The credential and all URIs of this server.", body = CloudflareIceServers),
    ),
)]
pub(crate) async fn cloudflare_ice_servers(
    State(service): State<CredentialService>,
    Extension(via): Extension<Via>,
    key: PathPart,
    request: Request,
) -> Response {
    let issued = service.issue_as_cloudflare(&via, key, request).await;
    let shape = |VendorParts { stun, uris, username, password, .. }| {
        let stun = (!stun.is_empty()).then(|| CloudflareIceServer { urls: stun, ..Default::default() });
        let turn = CloudflareIceServer { urls: uris, username: Some(username), credential: Some(password) };
        CloudflareIceServers { ice_servers: stun.into_iter().chain([turn]).collect() }
    };
    issued.map_or_else(CredentialRefusal::answer, |parts| created(parts, shape))
}

/// Issues a credential in the form of Cloudflare's TURN service: all URIs in one ICE server.
#[utoipa::path(
    post,
    path = "/v1/turn/keys/{key}/credentials/generate",
    tag = "credentials",
    params(("key" = String, Path, description = "The key's name; ignored on the admin interface.")),
    request_body(content = Option<CloudflareRequest>),
    responses(
        (status = 201, description = "The credential and all URIs of this server.", body = CloudflareCredentials),
    ),
)]
pub(crate) async fn cloudflare_credentials(
    State(service): State<CredentialService>,
    Extension(via): Extension<Via>,
    key: PathPart,
    request: Request,
) -> Response {
    let issued = service.issue_as_cloudflare(&via, key, request).await;
    let shape = |VendorParts { stun, uris, username, password, .. }| CloudflareCredentials {
        ice_servers: CloudflareIceServer {
            urls: stun.into_iter().chain(uris).collect(),
            username: Some(username),
            credential: Some(password),
        },
    };
    issued.map_or_else(CredentialRefusal::answer, |parts| created(parts, shape))
}

/// Revokes a credential before it expires, and ends its allocations: bans its username on all nodes until
/// then.
#[utoipa::path(
    post,
    path = "/v1/turn/keys/{key}/credentials/{username}/revoke",
    tag = "credentials",
    params(
        ("key" = String, Path, description = "The key's name; ignored on the admin interface."),
        ("username" = String, Path, description = "The credential's username."),
    ),
    responses(
        (status = 204, description = "The credential is no longer valid."),
    ),
)]
pub(crate) async fn cloudflare_revoke(
    State(service): State<CredentialService>,
    Extension(via): Extension<Via>,
    parts: PathPart<(String, String)>,
    request: Request,
) -> Response {
    service.revoke(&via, parts, request).await.unwrap_or_else(CredentialRefusal::answer)
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "Ttl": 3600 }))]
pub(crate) struct TwilioForm {
    /// Lifetime in seconds, at most `credentials.max_ttl`; default `credentials.ttl`.
    #[serde(rename = "Ttl")]
    #[schema(minimum = 1, maximum = 31536000)]
    ttl: Option<u32>,
}

/// Issues a credential in the form of Twilio's Network Traversal Service. The key is the password of HTTP
/// Basic authentication; any username works.
#[utoipa::path(
    post,
    path = "/2010-04-01/Accounts/{sid}/Tokens.json",
    tag = "credentials",
    params(("sid" = String, Path, description = "Any account: 1 to 64 letters and digits.")),
    request_body(content = Option<TwilioForm>, content_type = "application/x-www-form-urlencoded"),
    responses(
        (status = 201, description = "The credential and all URIs of this server.", body = TwilioToken),
    ),
)]
pub(crate) async fn twilio_token(
    State(service): State<CredentialService>,
    Extension(via): Extension<Via>,
    sid: PathPart,
    request: Request,
) -> Response {
    match service.issue_as_twilio(&via, sid, request).await {
        Ok((sid, parts)) => created(parts, |parts| as_twilio(sid, parts)),
        Err(refusal) => refusal.answer(),
    }
}

struct VendorParts {
    /// `stun:` URIs of the UDP listeners.
    stun: Vec<String>,
    uris: Vec<String>,
    username: String,
    password: String,
    ttl: u32,
    expiry: u64,
    audit: Audit,
}

impl VendorParts {
    fn new(issued: Issued, key: Option<&ApiKey>) -> Self {
        let audit = issued.audit(key);
        let Issued { ttl, expiry, uris, grant, .. } = issued;
        let (username, password) = grant.into_password();
        Self {
            stun: uris.iter().filter_map(|uri| stun(uri)).collect(),
            uris,
            username,
            password,
            ttl,
            expiry,
            audit,
        }
    }
}

/// `stun:` URI (RFC 7064) of a `turn:` URI over UDP.
fn stun(uri: &str) -> Option<String> {
    let rest = uri.strip_prefix("turn:")?;
    let (place, query) = rest.split_once('?').unwrap_or((rest, "transport=udp"));
    (query == "transport=udp").then(|| format!("stun:{place}"))
}

fn created<T: serde::Serialize>(mut parts: VendorParts, shape: impl FnOnce(VendorParts) -> T) -> Response {
    let audit = std::mem::replace(&mut parts.audit, Audit(String::new()));
    (StatusCode::CREATED, Extension(audit), Json(shape(parts))).into_response()
}

fn as_twilio(account_sid: String, parts: VendorParts) -> TwilioToken {
    let VendorParts { stun, uris, username, password, ttl, expiry, .. } = parts;
    let began = i64::try_from(expiry.saturating_sub(ttl.into())).unwrap_or_default();
    let date = Timestamp::from_second(began).unwrap_or_default().strftime("%a, %d %b %Y %H:%M:%S +0000");
    let one = |uri: String, credential: Option<(&String, &String)>| {
        let (username, credential) = credential.map(|(name, word)| (name.clone(), word.clone())).unzip();
        TwilioIceServer { url: uri.clone(), urls: uri, username, credential }
    };
    let plain = stun.into_iter().map(|uri| one(uri, None));
    let secured = uris.into_iter().map(|uri| one(uri, Some((&username, &password))));
    let ice_servers = plain.chain(secured).collect();
    let date = date.to_string();
    let (date_created, date_updated, ttl) = (date.clone(), date, ttl.to_string());
    TwilioToken { account_sid, date_created, date_updated, ice_servers, password, ttl, username }
}

impl CredentialService {
    async fn issue_as_cloudflare(
        &self,
        via: &Via,
        key: PathPart,
        request: Request,
    ) -> Result<VendorParts, CredentialRefusal> {
        let named = path_part(key)?;
        let key = self.judge_named(via, &named, request.headers()).await?;
        let CloudflareRequest { ttl, custom_identifier } = body(request).await?.unwrap_or_default();
        let wanted =
            CredentialsRequest { user: custom_identifier, identifier: None, ttl, realm: None, kid: None };
        Ok(VendorParts::new(self.issue(key.as_ref(), wanted)?, key.as_ref()))
    }

    /// The key of the Authorization header, whose name must also be in the path.
    async fn judge_named(
        &self,
        via: &Via,
        named: &str,
        headers: &HeaderMap,
    ) -> Result<Option<ApiKey>, CredentialRefusal> {
        let key = self.judge(via, self.shown(headers)?).await?;
        if key.as_ref().is_some_and(|key| key.name != named) {
            let detail = "the path names another key than the Authorization header";
            let (reason, status) = (RefusalReason::WrongKey, StatusCode::UNAUTHORIZED);
            return Err(CredentialRefusal::new(reason, status, "wrong_key", detail));
        }
        Ok(key)
    }

    async fn revoke(
        &self,
        via: &Via,
        parts: PathPart<(String, String)>,
        request: Request,
    ) -> Result<Response, CredentialRefusal> {
        let (named, username) = path_part(parts)?;
        let key = self.judge_named(via, &named, request.headers()).await?;
        let realm = realm_of(&server_of(&*self.program)?.settings, key.as_ref(), None)?;
        let (expiry, id) = restapi_credentials::parse(&username).unwrap_or_default();
        if restapi_credentials::username(expiry, id) != username {
            let detail = "username must be that of a time-limited credential: EXPIRY:USER";
            return Err(Problem::bad_request(detail).into());
        }
        let (subject, until) = (bans::user_subject(realm, username)?, expiry.saturating_add(1));
        let by = key.map_or_else(String::new, |key| format!(", by key {:?}", key.name));
        let audit = Audit(format!("{:?} is revoked{by}", subject.to_string()));
        let left = until.saturating_sub(unix());
        if left > LONGEST_BAN_S {
            let detail =
                format!("only credentials that expire within {LONGEST_BAN_S} seconds can be revoked");
            return Err(Problem::bad_request(detail).into());
        }
        if left > 0 {
            let fleet = self.program.fleet().ok_or_else(Problem::no_server)?;
            if fleet.bans().len() >= MOST_REVOKED {
                let detail = format!("{MOST_REVOKED} users and clients are banned already");
                let (reason, status) = (RefusalReason::Rate, StatusCode::TOO_MANY_REQUESTS);
                return Err(CredentialRefusal::new(reason, status, "rate_exceeded", detail));
            }
            let ban = Ban::new(subject, until, "credential revoked".to_owned());
            fleet.ban(ban).await.map_err(Problem::from)?;
        }
        Ok((StatusCode::NO_CONTENT, Extension(audit)).into_response())
    }

    async fn issue_as_twilio(
        &self,
        via: &Via,
        sid: PathPart,
        request: Request,
    ) -> Result<(String, VendorParts), CredentialRefusal> {
        let sid = path_part(sid)?;
        if !(1..=64).contains(&sid.len()) || !sid.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(Problem::bad_request("the account must be 1 to 64 letters and digits").into());
        }
        // On the admin interface, the header contains a token.
        let shown = if self.needs_key() { password(request.headers())? } else { None };
        let key = self.judge(via, shown).await?;
        let (headers, bytes) = bytes(request).await?;
        if !bytes.is_empty() && !is_form(&headers) {
            return Err(Problem::no_form().into());
        }
        let TwilioForm { ttl } = form(&bytes)?;
        let wanted = CredentialsRequest { user: None, identifier: None, ttl, realm: None, kid: None };
        Ok((sid, VendorParts::new(self.issue(key.as_ref(), wanted)?, key.as_ref())))
    }
}

/// Password of HTTP Basic authentication (RFC 7617).
fn password(headers: &HeaderMap) -> Result<Option<Secret>, Problem> {
    let Some(value) = headers.get(header::AUTHORIZATION) else { return Ok(None) };
    let basic = || {
        let (scheme, encoded) = value.to_str().ok()?.split_once(' ')?;
        let decoded =
            STANDARD.decode(encoded.trim()).ok().filter(|_| scheme.eq_ignore_ascii_case("basic"))?;
        let text = String::from_utf8(decoded).ok()?;
        text.split_once(':').map(|(_, password)| Secret::new(password))
    };
    let malformed = "the Authorization header must be HTTP Basic, with the key as the password";
    basic().map(Some).ok_or_else(|| Problem::bad_request(malformed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_udp_uris_have_a_stun_uri() {
        for (uri, expected) in [
            ("turn:turn.example.org:3478?transport=udp", Some("stun:turn.example.org:3478")),
            ("turn:[2001:db8::1]:3478", Some("stun:[2001:db8::1]:3478")),
            ("turn:turn.example.org:3478?transport=tcp", None),
            ("turns:turn.example.org:5349?transport=udp", None),
        ] {
            assert_eq!(stun(uri).as_deref(), expected, "{uri}");
        }
    }
}
