//! Bans: users and client addresses that get nothing for a while, on this server or on all nodes of its fleet.

use axum::{
    Extension,
    extract::{Request, State},
    http::{StatusCode, Uri},
    response::{IntoResponse, Response},
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use turnpike_fleet::{self as fleet, Ordered, Subject};
use turnpike_measure::units::span;
use utoipa::IntoParams;

use super::{App, Json, body, query, running::seconds};
use crate::{
    access::Audit,
    model::{Ban, Banned, Bans, NewBan, Problem, Unbanned},
};

/// Bytes of a username (RFC 8489 section 14.3).
const LONGEST_USER: usize = 508;
/// Characters that a reason may have.
const LONGEST_REASON: usize = 200;

/// Who is meant: a user, or a client.
#[derive(Clone, Debug, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct BanQuery {
    /// The username, or the id of a time-limited one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) user: Option<String>,
    /// The realm of that user; `server.realm` if it is not there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) realm: Option<String>,
    /// An address, or a prefix such as `192.0.2.0/24`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) client: Option<String>,
}

/// Who is banned, those first whose ban ends first.
#[utoipa::path(
    get,
    path = "/v1/bans",
    tag = "bans",
    responses(
        (status = 200, description = "All bans.", body = Bans),
    ),
)]
pub(super) async fn bans(State(app): State<App>) -> Result<Json<Bans>, Problem> {
    let bans = app.fleet()?.bans().iter().map(shown).collect();
    Ok(Json(Bans { bans }))
}

/// Bans a user, or whoever comes from some addresses, on all nodes of a fleet within a second: sessions end, and requests are refused (403) until the
/// time is over. In a fleet, bans are kept in its store; else for as long as the server runs.
#[utoipa::path(
    post,
    path = "/v1/bans",
    tag = "bans",
    request_body = NewBan,
    responses(
        (status = 201, description = "The ban is in force on all nodes.", body = Banned),
        (status = 202, description = "The ban is in force on the node that was asked; the others are told when the fleet's store answers again.", body = Banned),
    ),
)]
pub(super) async fn put_ban(State(app): State<App>, request: Request) -> Result<Response, Problem> {
    let example = "a body is missing, such as {\"user\": \"alice\", \"seconds\": 3600}";
    let new: NewBan = body(request).await?.ok_or_else(|| Problem::bad_request(example))?;
    let NewBan { user, realm, client, seconds, reason } = new;
    if reason.chars().count() > LONGEST_REASON || reason.contains(char::is_control) {
        let detail =
            format!("reason is expected to have {LONGEST_REASON} characters at most, and no line ends");
        return Err(Problem::bad_request(detail));
    }
    let subject = app.subject(BanQuery { user, realm, client })?;
    let now = u64::try_from(Timestamp::now().as_second()).unwrap_or_default();
    let ban = fleet::Ban::new(subject, now.saturating_add(seconds), reason);
    let Ordered { here: ended, is_announced: announced } = app.fleet()?.ban(ban.clone()).await?;
    let audit = Audit(format!(
        "{:?} is banned for {}; sessions ended here: {ended}{}",
        ban.subject.to_string(),
        span(seconds),
        later(announced)
    ));
    let status = if announced { StatusCode::CREATED } else { StatusCode::ACCEPTED };
    Ok((status, Extension(audit), Json(Banned { ban: shown(&ban), ended, announced })).into_response())
}

/// Ends a ban before its time.
#[utoipa::path(
    delete,
    path = "/v1/bans",
    tag = "bans",
    params(BanQuery),
    responses(
        (status = 200, description = "The ban is over on all nodes.", body = Unbanned),
        (status = 202, description = "The ban is over on the node that was asked; the others are told when the fleet's store answers again.", body = Unbanned),
    ),
)]
pub(super) async fn remove_ban(State(app): State<App>, uri: Uri) -> Result<Response, Problem> {
    let subject = app.subject(query(&uri)?)?;
    let fleet = app.fleet()?;
    let Ordered { here: existed, is_announced: announced } = fleet.unban(subject.clone()).await?;
    if announced && !existed {
        let detail = format!("{:?} is not banned", subject.to_string());
        return Err(Problem::new(StatusCode::NOT_FOUND, "no_such_ban", detail));
    }
    let audit = Audit(format!("{:?} is banned no more{}", subject.to_string(), later(announced)));
    let bans = fleet.bans().iter().map(shown).collect();
    let status = if announced { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, Extension(audit), Json(Unbanned { bans, announced })).into_response())
}

/// For the log, where the other nodes do not know yet.
const fn later(announced: bool) -> &'static str {
    if announced { "" } else { "; the other nodes are told when the fleet's store answers again" }
}

impl App {
    fn subject(&self, BanQuery { user, realm, client }: BanQuery) -> Result<Subject, Problem> {
        let subject = match (user, client) {
            (Some(name), None) => {
                if !(1..=LONGEST_USER).contains(&name.len()) || name.contains(char::is_control) {
                    let why = format!(
                        "user is expected to have 1 to {LONGEST_USER} bytes and no control characters"
                    );
                    return Err(Problem::bad_request(why));
                }
                let realm = match realm {
                    Some(realm) => realm,
                    None => self.server()?.settings.realm.clone(),
                };
                Subject::User { realm, name }
            }
            (None, Some(client)) if realm.is_none() => {
                let prefix = client.parse().map_err(|why| Problem::bad_request(format!("client: {why}")))?;
                Subject::Client(prefix)
            }
            _ => return Err(Problem::bad_request("expected is a user, with its realm perhaps, or a client")),
        };
        // As other nodes read it.
        match subject.to_string().parse() {
            Ok(read) if subject == read => Ok(subject),
            _ => Err(Problem::bad_request("user or realm has characters that no name has")),
        }
    }
}

fn shown(ban: &fleet::Ban) -> Ban {
    let fleet::Ban { subject, until, reason, .. } = ban;
    let (user, realm, client) = match subject {
        Subject::User { realm, name } => (Some(name.clone()), Some(realm.clone()), None),
        Subject::Client(prefix) => (None, None, Some(prefix.to_string())),
    };
    let until = i64::try_from(*until).ok().and_then(|until| Timestamp::from_second(until).ok());
    Ban { user, realm, client, until: until.map_or_else(String::new, seconds), reason: reason.clone() }
}
