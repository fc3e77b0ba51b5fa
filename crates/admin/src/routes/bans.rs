//! Bans of users and client addresses, on this server or on all nodes of its fleet.

use axum::{
    Extension,
    extract::{Request, State},
    http::{Method, StatusCode, Uri},
    response::{IntoResponse, Response},
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use turnpike_api::{BanEntry, BanList, BanResult, NewBan, UnbanResult};
use turnpike_fleet::{self as fleet, Ordered, PeerAnswer, Subject};
use turnpike_measure::units::span;
use utoipa::IntoParams;

use super::{App, Json, allocations::predecessor_silent, body, fleet::read, query};
use crate::{
    access::{Audit, RequestRights},
    accounts::check_realm,
    problem::Problem,
    program::seconds,
};

/// Maximum length of a username in bytes (RFC 8489 section 14.3).
const LONGEST_USER: usize = 508;
/// Maximum number of characters in a reason.
const LONGEST_REASON: usize = 200;

/// A user or a client.
#[derive(Clone, Debug, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct BanQuery {
    /// The username, or the id of a time-limited username.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(min_length = 1, max_length = 508)]
    pub(crate) user: Option<String>,
    /// The realm of that user; default `server.realm`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(min_length = 1, max_length = 127)]
    pub(crate) realm: Option<String>,
    /// An address, or a prefix such as `192.0.2.0/24`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) client: Option<String>,
}

impl BanQuery {
    fn of(subject: &Subject) -> Self {
        match subject {
            Subject::User { realm, name } => {
                Self { user: Some(name.clone()), realm: Some(realm.clone()), client: None }
            }
            Subject::Client(prefix) => Self { user: None, realm: None, client: Some(prefix.to_string()) },
        }
    }
}

/// Lists active bans, sorted by expiry.
#[utoipa::path(
    get,
    path = "/v1/bans",
    tag = "bans",
    responses(
        (status = 200, description = "All bans.", body = BanList),
    ),
)]
pub(super) async fn bans(State(app): State<App>) -> Result<Json<BanList>, Problem> {
    let bans = app.fleet()?.bans().iter().map(shown).collect();
    Ok(Json(BanList { bans }))
}

/// Bans a user, or clients by their addresses; in a fleet, on all nodes within a second. Their allocations
/// end, and their requests get 403 until the ban ends. A fleet keeps bans in its store; a single server
/// keeps them as long as it runs, even across upgrades in place.
#[utoipa::path(
    post,
    path = "/v1/bans",
    tag = "bans",
    request_body = NewBan,
    responses(
        (status = 201, description = "The ban is active on all nodes.", body = BanResult),
        (status = 202, description = "The ban is active on the queried node. The others will be informed when the fleet's store answers again.", body = BanResult),
    ),
)]
pub(super) async fn put_ban(
    State(app): State<App>,
    Extension(grant): Extension<RequestRights>,
    request: Request,
) -> Result<Response, Problem> {
    let example = "a body is missing, such as {\"user\": \"alice\", \"seconds\": 3600}";
    let new: NewBan = body(request).await?.ok_or_else(|| Problem::bad_request(example))?;
    let NewBan { user, realm, client, seconds, reason } = new;
    if reason.chars().count() > LONGEST_REASON || reason.contains(char::is_control) {
        let detail =
            format!("reason must be at most {LONGEST_REASON} characters long and contain no line breaks");
        return Err(Problem::bad_request(detail));
    }
    if !(1..=fleet::LONGEST_BAN_S).contains(&seconds) {
        let detail = format!("seconds must be 1 to {}", fleet::LONGEST_BAN_S);
        return Err(Problem::bad_request(detail));
    }
    let subject = app.subject(BanQuery { user, realm, client })?;
    let now = u64::try_from(Timestamp::now().as_second()).unwrap_or_default();
    let ban = fleet::Ban::new(subject, now.saturating_add(seconds), reason);
    let Ordered { here: mut ended, is_announced: announced } = app.fleet()?.ban(ban.clone()).await?;
    let BanQuery { user, realm, client } = BanQuery::of(&ban.subject);
    let order = NewBan { user, realm, client, seconds, reason: ban.reason.clone() };
    let order = serde_json::to_string(&order).unwrap_or_default();
    if let Some(there) = app.order_predecessor(&grant, &Method::POST, "/v1/bans".to_owned(), order).await? {
        ended += read::<BanResult>(&there).map_err(predecessor_disobeys)?.ended;
    }
    let audit = Audit(format!(
        "{:?} is banned for {}; allocations ended here: {ended}{}",
        ban.subject.to_string(),
        span(seconds),
        later(announced)
    ));
    let status = if announced { StatusCode::CREATED } else { StatusCode::ACCEPTED };
    Ok((status, Extension(audit), Json(BanResult { ban: shown(&ban), ended, announced })).into_response())
}

/// Lifts a ban before it expires.
#[utoipa::path(
    delete,
    path = "/v1/bans",
    tag = "bans",
    params(BanQuery),
    responses(
        (status = 200, description = "The ban is lifted on all nodes.", body = UnbanResult),
        (status = 202, description = "The ban is lifted on the queried node. The others will be informed when the fleet's store answers again.", body = UnbanResult),
    ),
)]
pub(super) async fn remove_ban(
    State(app): State<App>,
    Extension(grant): Extension<RequestRights>,
    uri: Uri,
) -> Result<Response, Problem> {
    let subject = app.subject(query(&uri)?)?;
    let fleet = app.fleet()?;
    let mut unbanned = fleet.unban(subject.clone()).await?;
    let words = serde_urlencoded::to_string(BanQuery::of(&subject)).unwrap_or_default();
    let path = format!("/v1/bans?{words}");
    if let Some(there) = app.order_predecessor(&grant, &Method::DELETE, path, String::new()).await?
        && there.status != 404
    {
        read::<UnbanResult>(&there).map_err(predecessor_disobeys)?;
        if unbanned == fleet::Unbanned::NotBanned {
            unbanned = fleet::Unbanned::Everywhere;
        }
    }
    let announced = match unbanned {
        fleet::Unbanned::Everywhere => true,
        fleet::Unbanned::HereOnly => false,
        fleet::Unbanned::NotBanned => {
            let detail = format!("{:?} is not banned", subject.to_string());
            return Err(Problem::new(StatusCode::NOT_FOUND, "no_such_ban", detail));
        }
    };
    let audit = Audit(format!("{:?} is no longer banned{}", subject.to_string(), later(announced)));
    let bans = fleet.bans().iter().map(shown).collect();
    let status = if announced { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, Extension(audit), Json(UnbanResult { bans, announced })).into_response())
}

/// Suffix of the audit line if the other nodes have not been informed yet.
const fn later(announced: bool) -> &'static str {
    if announced { "" } else { "; the other nodes will be informed when the fleet's store answers again" }
}

/// Response if the previous process fails to execute a command.
fn predecessor_disobeys(why: String) -> Problem {
    predecessor_silent(format!("{why}; only this process has executed the command: try again"))
}

impl App {
    /// Forwards a command to the previous process, if it still exists. In a fleet, that process receives
    /// bans as a node would.
    async fn order_predecessor(
        &self,
        grant: &RequestRights,
        method: &Method,
        path: String,
        body: String,
    ) -> Result<Option<PeerAnswer>, Problem> {
        let Some(predecessor) = &self.predecessor else { return Ok(None) };
        if self.fleet()?.node().is_some() {
            return Ok(None);
        }
        let answer = predecessor.ask(method, path, body, grant.to_string()).await;
        Ok(answer.map_err(predecessor_disobeys)?.map(|(_, answer)| answer))
    }

    fn subject(&self, BanQuery { user, realm, client }: BanQuery) -> Result<Subject, Problem> {
        let subject = match (user, client) {
            (Some(name), None) => {
                let realm = match realm {
                    Some(realm) => realm,
                    None => self.server()?.settings.realm.clone(),
                };
                return user_subject(realm, name);
            }
            (None, Some(client)) if realm.is_none() => {
                let prefix = client.parse().map_err(|why| Problem::bad_request(format!("client: {why}")))?;
                Subject::Client(prefix)
            }
            _ => {
                return Err(Problem::bad_request("expected a user, optionally with a realm, or a client"));
            }
        };
        Ok(subject)
    }
}

pub(super) fn user_subject(realm: String, name: String) -> Result<Subject, Problem> {
    if !(1..=LONGEST_USER).contains(&name.len()) || name.contains(char::is_control) {
        let why = format!("user must be 1 to {LONGEST_USER} bytes long and contain no control characters");
        return Err(Problem::bad_request(why));
    }
    check_realm(&realm)?;
    let subject = Subject::User { realm, name };
    // Rejects subjects that other nodes could not parse.
    match subject.to_string().parse() {
        Ok(read) if subject == read => Ok(subject),
        _ => Err(Problem::bad_request(
            "users of a realm whose name contains @ cannot be banned by name: ban their addresses",
        )),
    }
}

fn shown(ban: &fleet::Ban) -> BanEntry {
    let fleet::Ban { subject, until, reason, .. } = ban;
    let BanQuery { user, realm, client } = BanQuery::of(subject);
    let until = i64::try_from(*until).ok().and_then(|until| Timestamp::from_second(until).ok());
    BanEntry { user, realm, client, until: until.map_or_else(String::new, seconds), reason: reason.clone() }
}
