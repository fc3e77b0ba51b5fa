//! Why a client was refused: what is remembered of the last refusals.

use std::net::SocketAddr;

use axum::{extract::State, http::Uri};
use jiff::Timestamp;
use serde::Deserialize;
use turnpike_turn::server::Cidr;
use utoipa::IntoParams;

use super::{App, Json, query};
use crate::{
    model::{Problem, Refusal, Refusals},
    program::{self, RefusalFilter},
};

/// Refusals that are told, if nobody says how many.
const USUAL: usize = 100;
/// The most that are told at a time.
const MOST: usize = 1000;

/// Filter of refusals: all conditions must hold.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct RefusalQuery {
    /// The client: an address, or a prefix such as `192.0.2.0/24`.
    client: Option<String>,
    /// The username, or a part of it.
    user: Option<String>,
    /// Length of the list; default 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
}

/// Lists recent refusals, the latest first. Refusals of one client for one reason are one entry. Memory bounds their number.
#[utoipa::path(
    get,
    path = "/v1/refusals",
    tag = "sessions",
    params(RefusalQuery),
    responses(
        (status = 200, description = "Matching refusals.", body = Refusals),
    ),
)]
pub(super) async fn refusals(State(app): State<App>, uri: Uri) -> Result<Json<Refusals>, Problem> {
    let RefusalQuery { client, user, limit } = query(&uri)?;
    let limit = limit.unwrap_or(USUAL);
    if !(1..=MOST).contains(&limit) {
        return Err(Problem::bad_request(format!("limit is expected to be 1 to {MOST}")));
    }
    let client = client.map(|text| prefix(text.trim()));
    let wanted = RefusalFilter { client: client.transpose()?, user };
    let found = app.program.refusals(&wanted, limit).ok_or_else(Problem::no_server)?;
    Ok(Json(Refusals { refusals: found.into_iter().map(Refusal::from).collect() }))
}

/// A port says nothing: a client that tries again comes from another one.
fn prefix(text: &str) -> Result<Cidr, Problem> {
    let address = text.parse::<SocketAddr>().map_or_else(|_| text.to_owned(), |at| at.ip().to_string());
    address.parse().map_err(|why| Problem::bad_request(format!("client: {why}")))
}

impl From<program::Refusal> for Refusal {
    fn from(found: program::Refusal) -> Self {
        Self {
            first_at: at(found.first_ms),
            last_at: at(found.last_ms),
            count: found.count,
            client: found.client.to_string(),
            user: Some(found.user).filter(|user| !user.is_empty()),
            realm: found.realm,
            asked: found.asked.to_owned(),
            code: found.code,
            reason: found.reason,
            remedy: found.remedy.to_owned(),
            keys: found.keys.iter().map(|key| (*key).to_owned()).collect(),
            others: u64::try_from(found.others).unwrap_or(u64::MAX),
            other_users: found.other_users,
            other_peers: found.other_peers,
        }
    }
}

fn at(unix_ms: u64) -> String {
    let at = i64::try_from(unix_ms).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
    at.unwrap_or(Timestamp::MAX).to_string()
}
