//! Allocations: listed in pages, shown, ended. Workers are queried slice by slice (`turnpike_relay::allocations`).

use std::sync::Arc;

use axum::{
    Extension,
    extract::State,
    http::{Method, StatusCode, Uri},
    response::{IntoResponse, Response},
};
use tokio::sync::oneshot;
use turnpike_api::{
    Allocation, AllocationPage, AllocationQuery, Channel, NetworkInfo, Permission, RelayedAddress, Traffic,
};
use turnpike_relay::allocations::{AllocationFilter, AllocationSnapshot as Found, Look, Looked, WorkerTally};
use turnpike_turn::server::{AllocationId, ClosedReason};

use super::{
    App, Json, PathPart,
    allocation_query::{filter, limit},
    deprecated,
    fleet::{self, Asker},
    path_part, query, server_of,
};
use crate::{
    access::{Audit, RequestRights},
    problem::Problem,
    program::ServerView,
};

/// Prefix of a cursor that belongs to the previous process.
const PREVIOUS: &str = "previous";
/// An allocation that moves to another worker during a search can be missed; repeated searches make that
/// unlikely.
const TRIES: usize = 3;

/// Position in a listing. Allocations that are created during the listing are on a later page; allocations that move to an earlier
/// worker are on no page.
enum PageStart {
    Here {
        worker: usize,
        slot: u32,
    },
    /// Position in the previous process, with its cursor.
    Previous(Option<String>),
}

impl Default for PageStart {
    fn default() -> Self {
        Self::Here { worker: 0, slot: 0 }
    }
}

fn place(query: &AllocationQuery) -> Result<PageStart, Problem> {
    let Some(cursor) = &query.cursor else { return Ok(PageStart::default()) };
    let place = match cursor.strip_prefix(PREVIOUS) {
        Some("") => Some(PageStart::Previous(None)),
        Some(within) => within.strip_prefix('.').map(|within| PageStart::Previous(Some(within.to_owned()))),
        None => cursor.split_once('.').and_then(|(worker, slot)| {
            Some(PageStart::Here { worker: worker.parse().ok()?, slot: slot.parse().ok()? })
        }),
    };
    place.ok_or_else(|| Problem::bad_request("cursor must be the `next` of another page"))
}

/// Lists allocations in pages. An allocation that exists during the whole listing and stays on its worker is on exactly one page.
#[utoipa::path(
    get,
    path = "/v1/allocations",
    tag = "allocations",
    params(AllocationQuery),
    responses(
        (status = 200, description = "A page. `next` is null on the last page.", body = AllocationPage),
    ),
)]
pub(super) async fn list(
    State(app): State<App>,
    Extension(grant): Extension<RequestRights>,
    uri: Uri,
) -> Result<Json<AllocationPage>, Problem> {
    app.page(&grant, &query(&uri)?).await.map(Json)
}

/// Shows an allocation with its permissions and channels, on any node of the fleet.
#[utoipa::path(
    get,
    path = "/v1/allocations/{id}",
    tag = "allocations",
    params(("id" = String, Path, description = "Its identifier: 32 hex digits.", min_length = 32, max_length = 32, pattern = "^[0-9a-fA-F]{32}$")),
    responses(
        (status = 200, description = "The allocation.", body = Allocation),
    ),
)]
pub(super) async fn one(
    State(app): State<App>,
    Extension(grant): Extension<RequestRights>,
    id: PathPart,
) -> Result<Json<Allocation>, Problem> {
    let id = read_id(id)?;
    for _ in 0..TRIES {
        if let Some(found) = app.find(id).await? {
            return Ok(Json(allocation_with_details(&app.server()?, found)));
        }
    }
    app.elsewhere(app.asker(&grant), &Method::GET, id).await.map(Json)
}

/// Ends an allocation on any node of the fleet. Its client may immediately create another one.
#[utoipa::path(
    delete,
    path = "/v1/allocations/{id}",
    tag = "allocations",
    params(("id" = String, Path, description = "Its identifier: 32 hex digits.", min_length = 32, max_length = 32, pattern = "^[0-9a-fA-F]{32}$")),
    responses(
        (status = 200, description = "The allocation as it was before it ended.", body = Allocation),
    ),
)]
pub(super) async fn end(
    State(app): State<App>,
    Extension(grant): Extension<RequestRights>,
    id: PathPart,
) -> Result<Response, Problem> {
    let id = read_id(id)?;
    for _ in 0..TRIES {
        if let Some(found) = app.find(id).await?
            && app.end(&found).await?
        {
            return Ok(ended(allocation_with_details(&app.server()?, found)));
        }
    }
    app.elsewhere(app.asker(&grant), &Method::DELETE, id).await.map(ended)
}

fn ended(allocation: Allocation) -> Response {
    let Allocation { id, user, realm, node, process, .. } = &allocation;
    let process = process.map_or_else(String::new, |pid| format!(" in process {pid}"));
    let node = node.as_ref().map_or_else(String::new, |node| format!(" on node {node:?}"));
    // Usernames are untrusted input and must not forge log lines.
    let audit = Audit(format!("allocation {id} of {user:?} in realm {realm:?}{process}{node} was ended"));
    (Extension(audit), Json(allocation)).into_response()
}

pub(super) fn read_id(id: PathPart) -> Result<AllocationId, Problem> {
    let text = path_part(id)?;
    text.parse().map_err(|error| Problem::bad_request(format!("{text:?}: {error}")))
}

pub(super) fn predecessor_silent(why: String) -> Problem {
    Problem::new(StatusCode::GATEWAY_TIMEOUT, "predecessor_silent", why)
}

fn no_such(id: AllocationId, silent: usize) -> Problem {
    let detail = match silent {
        0 => format!("there is no allocation {id}: it may have ended"),
        nodes => {
            format!(
                "there is no allocation {id} on the nodes that answered; nodes that did not answer: {nodes}"
            )
        }
    };
    Problem::new(StatusCode::NOT_FOUND, "no_such_allocation", detail)
}

impl App {
    /// The server. Must not be held across an await, because the server cannot stop while it exists.
    pub(super) fn server(&self) -> Result<ServerView, Problem> {
        server_of(&*self.program)
    }

    /// Allocations of this server, followed by those of the previous process.
    pub(super) async fn page(
        &self,
        by: &RequestRights,
        query: &AllocationQuery,
    ) -> Result<AllocationPage, Problem> {
        let (filter, limit, mut place) = (Arc::new(filter(query)?), limit(query)?, place(query)?);
        let workers = self.server()?.relay.workers();
        let mut page = AllocationPage::default();
        while let PageStart::Here { worker, slot } = place {
            if worker >= workers {
                place = PageStart::Previous(None);
                break;
            }
            let most = limit - page.allocations.len();
            if most == 0 {
                page.next = Some(format!("{worker}.{slot}"));
                return Ok(page);
            }
            let look = Look { from: slot, most, filter: Arc::clone(&filter), details: false };
            let looked = self.look(worker, look).await?;
            let server = self.server()?;
            page.allocations.extend(looked.allocations.into_iter().map(|found| allocation(&server, found)));
            place = match looked.next {
                Some(slot) => PageStart::Here { worker, slot },
                None => PageStart::Here { worker: worker + 1, slot: 0 },
            };
        }
        if let (PageStart::Previous(cursor), Some(predecessor)) = (place, &self.predecessor) {
            let left = limit - page.allocations.len();
            if left == 0 {
                page.next = Some(PREVIOUS.to_owned());
                return Ok(page);
            }
            let asked = AllocationQuery { limit: Some(left), cursor, ..query.clone() };
            let words = serde_urlencoded::to_string(asked).unwrap_or_default();
            let path = format!("{}?{words}", deprecated::ALLOCATIONS);
            let found = predecessor.ask(&Method::GET, path, String::new(), by.to_string()).await;
            let found = found.and_then(|found| {
                found.map(|(pid, answer)| Ok((pid, fleet::read::<AllocationPage>(&answer)?))).transpose()
            });
            match found {
                Ok(None) => {}
                Ok(Some((pid, AllocationPage { allocations, next, silent }))) => {
                    page.allocations
                        .extend(allocations.into_iter().map(|allocation| allocation.of_process(pid)));
                    page.next = next.map(|next| format!("{PREVIOUS}.{next}"));
                    page.silent = silent;
                }
                Err(why) => page.silent.push(why),
            }
        }
        Ok(page)
    }

    pub(super) async fn look(&self, worker: usize, look: Look) -> Result<Looked, Problem> {
        let (sender, answer) = oneshot::channel();
        self.server()?.relay.look(worker, look, move |looked| _ = sender.send(looked));
        answer.await.map_err(|_| Problem::stopping())
    }

    pub(super) async fn traffic(&self) -> Result<WorkerTally, Problem> {
        let workers = self.server()?.relay.workers();
        let mut sums = WorkerTally::default();
        for worker in 0..workers {
            let mut from = Some(0);
            while let Some(slot) = from {
                let (sender, answer) = oneshot::channel();
                self.server()?.relay.tally(worker, slot, move |tally| _ = sender.send(tally));
                let slice = answer.await.map_err(|_| Problem::stopping())?;
                sums.merge(&slice);
                from = slice.next;
            }
        }
        Ok(sums)
    }

    /// Shows or ends an allocation in the previous process or on another node.
    async fn elsewhere(
        &self,
        asker: Asker<'_>,
        method: &Method,
        id: AllocationId,
    ) -> Result<Allocation, Problem> {
        let path = format!("{}/{id}", deprecated::ALLOCATIONS);
        if let Some(predecessor) = &self.predecessor {
            let silent = predecessor_silent;
            let by = asker.grant.to_string();
            let answer = predecessor.ask(method, path.clone(), String::new(), by).await.map_err(silent)?;
            if let Some((pid, answer)) = answer.filter(|(_, answer)| answer.status != 404) {
                return match fleet::read::<Allocation>(&answer) {
                    Ok(allocation) => Ok(allocation.of_process(pid)),
                    Err(why) => Err(silent(format!("the previous process {pid}: {why}"))),
                };
            }
        }
        let (found, silent) = self.ask_others(asker, method, &path).await;
        let (node, answer) = found.ok_or_else(|| no_such(id, silent))?;
        let allocation = fleet::read::<Allocation>(&answer);
        let strange =
            |why| Problem::new(StatusCode::BAD_GATEWAY, "node_not_understood", format!("node {node}: {why}"));
        Ok(allocation.map_err(strange)?.of_node(&node))
    }

    async fn end(&self, found: &Found) -> Result<bool, Problem> {
        let (sender, answer) = oneshot::channel();
        let ended = move |ended| _ = sender.send(ended);
        let at = (found.worker, found.slot);
        self.server()?.relay.end(at, found.id, ClosedReason::Administrator, ended);
        answer.await.map_err(|_| Problem::stopping())
    }

    /// Finds an allocation of this process.
    pub(super) async fn find_here(&self, id: AllocationId) -> Result<Found, Problem> {
        for _ in 0..TRIES {
            if let Some(found) = self.find(id).await? {
                return Ok(found);
            }
        }
        Err(no_such(id, 0))
    }

    async fn find(&self, id: AllocationId) -> Result<Option<Found>, Problem> {
        let filter = Arc::new(AllocationFilter { id: Some(id), ..AllocationFilter::default() });
        for worker in 0..self.server()?.relay.workers() {
            let mut from = Some(0);
            while let Some(slot) = from {
                let look = Look { from: slot, most: 1, filter: Arc::clone(&filter), details: true };
                let mut looked = self.look(worker, look).await?;
                if let Some(found) = looked.allocations.pop() {
                    return Ok(Some(found));
                }
                from = looked.next;
            }
        }
        Ok(None)
    }
}

fn allocation(server: &ServerView, found: Found) -> Allocation {
    let traffic = |(datagrams, bytes)| Traffic { datagrams, bytes };
    #[expect(clippy::cast_precision_loss, reason = "2^53 ms are 285,000 years")]
    let age_s = found.age_ms as f64 / 1000.0;
    Allocation {
        id: found.id.to_string(),
        realm: found.realm.to_string(),
        user: found.username.into_string(),
        identity: found.identity.map(String::from),
        client: found.client.to_string(),
        network: NetworkInfo::of(server.network(found.client.ip())),
        server: found.server.to_string(),
        transport: <&str>::from(found.transport).to_owned(),
        relayed: found
            .relayed
            .iter()
            .map(|(address, left_ms)| RelayedAddress {
                address: address.to_string(),
                expires_in_s: left_ms / 1000,
            })
            .collect(),
        relayed_transport: <&str>::from(found.relay_transport).to_owned(),
        mobile: found.is_mobile,
        away: found.is_away,
        age_s,
        to_peer: traffic(found.to_peer),
        to_client: traffic(found.to_client),
        quality: server.quality(found.id),
        quality_problem: server.quality_problem(found.id),
        peer_connections: found.connections as u64,
        worker: found.worker as u64,
        process: None,
        node: None,
        permissions: None,
        channels: None,
    }
}

fn allocation_with_details(server: &ServerView, mut found: Found) -> Allocation {
    let permissions = std::mem::take(&mut found.permissions).into_iter();
    let channels = std::mem::take(&mut found.channels).into_iter();
    Allocation {
        permissions: Some(
            permissions
                .map(|(peer, left_ms)| Permission { peer: peer.to_string(), expires_in_s: left_ms / 1000 })
                .collect(),
        ),
        channels: Some(
            channels
                .map(|(number, peer, left_ms)| Channel {
                    number,
                    peer: peer.to_string(),
                    expires_in_s: left_ms / 1000,
                })
                .collect(),
        ),
        ..allocation(server, found)
    }
}
