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

/// Which refusals are wanted: all that is named must fit.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct RefusalQuery {
    /// The client: an address, or a prefix such as `192.0.2.0/24`.
    client: Option<String>,
    /// The username, or a part of it.
    user: Option<String>,
    /// How many, 1 to 1000; 100 if it is not there.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
}

/// Clients that were refused lately, the last ones first: a client that is refused for one reason again and again is told once. Kept in
/// memory, as many as fit.
#[utoipa::path(
    get,
    path = "/v1/refusals",
    tag = "sessions",
    params(RefusalQuery),
    responses(
        (status = 200, description = "Those that fit.", body = Refusals),
        (status = "default", description = "It was not done.", body = Problem, content_type = "application/problem+json"),
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
        let program::Refusal { first_ms, last_ms, count, client, user, realm, asked, code, reason, remedy } =
            found;
        Self {
            first_at: at(first_ms),
            last_at: at(last_ms),
            count,
            client: client.to_string(),
            user: Some(user).filter(|user| !user.is_empty()),
            realm,
            asked: asked.to_owned(),
            code,
            reason,
            remedy: remedy.to_owned(),
        }
    }
}

fn at(unix_ms: u64) -> String {
    let at = i64::try_from(unix_ms).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
    at.unwrap_or(Timestamp::MAX).to_string()
}
