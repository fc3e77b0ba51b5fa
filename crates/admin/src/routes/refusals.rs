//! Recently refused clients.

use std::net::SocketAddr;

use axum::{extract::State, http::Uri};
use serde::Deserialize;
use turnpike_api::{RefusalFilter, RefusalList};
use turnpike_turn::server::Cidr;
use utoipa::IntoParams;

use super::{App, Json, query};
use crate::problem::Problem;

/// Default length of the list.
const USUAL: usize = 100;
/// Maximum length of the list.
const MOST: usize = 1000;

/// Filter for refusals: all conditions must be met.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct RefusalQuery {
    /// The client: an address, or a prefix such as `192.0.2.0/24`.
    client: Option<String>,
    /// The username or part of it.
    user: Option<String>,
    /// Length of the list; default 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
}

/// Lists recent refusals, most recent first. Refusals of one client for the same reason form one entry.
/// The number of entries is bounded.
#[utoipa::path(
    get,
    path = "/v1/refusals",
    tag = "allocations",
    params(RefusalQuery),
    responses(
        (status = 200, description = "Matching refusals.", body = RefusalList),
    ),
)]
pub(super) async fn refusals(State(app): State<App>, uri: Uri) -> Result<Json<RefusalList>, Problem> {
    let RefusalQuery { client, user, limit } = query(&uri)?;
    let limit = limit.unwrap_or(USUAL);
    if !(1..=MOST).contains(&limit) {
        return Err(Problem::bad_request(format!("limit must be 1 to {MOST}")));
    }
    let client = client.map(|text| prefix(text.trim()));
    let wanted = RefusalFilter { client: client.transpose()?, user };
    let refusals = app.program.refusals(&wanted, limit).ok_or_else(Problem::no_server)?;
    Ok(Json(RefusalList { refusals }))
}

/// The port is ignored: a client uses a different port for each attempt.
fn prefix(text: &str) -> Result<Cidr, Problem> {
    let address = text.parse::<SocketAddr>().map_or_else(|_| text.to_owned(), |at| at.ip().to_string());
    address.parse().map_err(|why| Problem::bad_request(format!("client: {why}")))
}
