//! Filter and page length for lists of allocations.

use turnpike_api::AllocationQuery;
use turnpike_relay::allocations::{AddressFilter, AllocationFilter};
use turnpike_turn::server::Transport;

use crate::problem::Problem;

const PAGE: usize = 100;
const LONGEST_PAGE: usize = 1000;

pub(super) fn filter(query: &AllocationQuery) -> Result<AllocationFilter, Problem> {
    let address = |name: &str, text: &Option<String>| {
        let parsed = text.as_ref().map(|text| text.parse::<AddressFilter>()).transpose();
        parsed.map_err(|why| Problem::bad_request(format!("{name}: {why}, or ADDR:PORT")))
    };
    let transport = query.transport.as_ref().map(|text| text.parse::<Transport>()).transpose();
    Ok(AllocationFilter {
        user: query.user.clone(),
        realm: query.realm.clone(),
        client: address("client", &query.client)?,
        transport: transport.map_err(|_| Problem::bad_request("transport must be udp, tcp, tls or dtls"))?,
        relayed: address("relayed", &query.relayed)?,
        id: None,
    })
}

pub(super) fn limit(query: &AllocationQuery) -> Result<usize, Problem> {
    match query.limit.unwrap_or(PAGE) {
        limit @ 1..=LONGEST_PAGE => Ok(limit),
        _ => Err(Problem::bad_request(format!("limit must be 1 to {LONGEST_PAGE}"))),
    }
}
