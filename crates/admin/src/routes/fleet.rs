//! The other servers of a fleet: status, draining, and forwarded requests.

use std::{collections::VecDeque, sync::Arc};

use axum::{
    Extension,
    extract::State,
    http::{HeaderValue, Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use serde::de::DeserializeOwned;
use tokio::task::JoinSet;
use turnpike_api::{
    AllocationPage, AllocationQuery, FleetAdmin, FleetAllocations, FleetError, FleetStatus, NodeOrder,
    PeerRequest, with_new_fields,
};
use turnpike_config::AdminAccess;
use turnpike_fleet::{PeerAnswer, Rights};

use super::{
    App, Json, PathPart,
    allocation_query::{filter, limit},
    deprecated, path_part, query,
};
use crate::{
    access::{Audit, RequestRights},
    peer_requests::{HEADERS, path_at_node},
    problem::{PROBLEM_JSON, Problem},
};

/// Maximum number of concurrent requests to nodes.
const AT_A_TIME: usize = 8;
/// Separator between a node's name and its cursor; not allowed in names.
const CURSOR: char = '~';

impl From<FleetError> for Problem {
    fn from(error: FleetError) -> Self {
        let (status, code) = match error {
            FleetError::NoFleet => (StatusCode::NOT_FOUND, "no_fleet"),
            FleetError::NoSuchNode(_) => (StatusCode::NOT_FOUND, "no_such_node"),
            FleetError::Silent(_) => (StatusCode::GATEWAY_TIMEOUT, "node_silent"),
            FleetError::Store(_) => (StatusCode::SERVICE_UNAVAILABLE, "fleet_store_unavailable"),
            FleetError::Length => (StatusCode::BAD_REQUEST, "bad_request"),
        };
        Self::new(status, code, error.to_string())
    }
}

/// Shows the fleet as this node sees it.
#[utoipa::path(
    get,
    path = "/v1/fleet",
    tag = "fleet",
    responses(
        (status = 200, description = "All nodes.", body = FleetStatus),
    ),
)]
pub(super) async fn fleet(State(app): State<App>) -> Result<Json<FleetStatus>, Problem> {
    app.fleet_status().map(Json)
}

/// Redirects new clients of a node to other nodes. The node keeps running; restarting it undoes this.
#[utoipa::path(
    post,
    path = "/v1/fleet/nodes/{node}/drain",
    tag = "fleet",
    params(("node" = String, Path, description = "The name.")),
    responses(
        (status = 202, description = "The command was sent.", body = NodeOrder),
    ),
)]
pub(super) async fn drain_node(State(app): State<App>, node: PathPart) -> Result<Response, Problem> {
    app.order(node, true).await
}

/// Lets a node accept new clients again.
#[utoipa::path(
    post,
    path = "/v1/fleet/nodes/{node}/uncordon",
    tag = "fleet",
    params(("node" = String, Path, description = "The name.")),
    responses(
        (status = 202, description = "The command was sent.", body = NodeOrder),
    ),
)]
pub(super) async fn uncordon_node(State(app): State<App>, node: PathPart) -> Result<Response, Problem> {
    app.order(node, false).await
}

/// Forwards a request to a node, and returns its response.
#[utoipa::path(
    get,
    path = "/v1/fleet/nodes/{node}/v1/{path}",
    tag = "fleet",
    params(
        ("node" = String, Path, description = "The name."),
        ("path" = String, Path, description = "Such as `allocations`, `workers` or `status`."),
    ),
    responses(
        (status = 200, description = "The response of that node.", body = Object),
    ),
)]
pub(super) async fn of_node(
    State(app): State<App>,
    Extension(grant): Extension<RequestRights>,
    method: Method,
    uri: Uri,
    node: PathPart<(String, String)>,
) -> Result<Response, Problem> {
    let (node, _) = path_part(node)?;
    let asker = app.asker(&grant);
    if asker.grant.via().is_node() {
        return Err(Problem::bad_request("a request from another node cannot be forwarded again"));
    }
    // Percent-encoding is kept as received.
    let path = path_at_node(uri.path()).unwrap_or_default();
    let ends_one = [deprecated::ALLOCATIONS, "/v1/allocations"]
        .iter()
        .any(|list| path.strip_prefix(list).is_some_and(|id| id.starts_with('/')));
    if method == Method::DELETE && !ends_one {
        let detail = format!(
            "only allocations can be deleted through another node: send DELETE {path} to {node} itself"
        );
        let problem = Problem::new(StatusCode::METHOD_NOT_ALLOWED, "no_such_method", detail);
        return Ok(([(header::ALLOW, "GET")], problem).into_response());
    }
    let query = uri.query().map_or_else(String::new, |query| format!("?{query}"));
    let path = format!("{path}{query}");
    let answer = app.ask(asker, node.clone(), &method, path.clone()).await?;
    let audit = Audit(format!("node {node:?}: {method} {path:?} is {}", answer.status));
    Ok((Extension(audit), passed_on(answer)).into_response())
}

/// Ends an allocation on a node. No other path supports DELETE through another node.
#[utoipa::path(
    delete,
    path = "/v1/fleet/nodes/{node}/v1/{path}",
    tag = "fleet",
    params(
        ("node" = String, Path, description = "The name."),
        ("path" = String, Path, description = "Such as `allocations/5f2c9a7be01d4c3f8a6b1e2d3c4f5a69`."),
    ),
    responses(
        (status = 200, description = "The response of that node.", body = Object),
    ),
)]
#[expect(dead_code, reason = "describes a method that another handler serves")]
pub(super) fn end_of_node() {}

/// Lists the allocations of all nodes in pages, node by node in the order of their names.
#[utoipa::path(
    get,
    path = "/v1/fleet/allocations",
    tag = "fleet",
    params(AllocationQuery),
    responses(
        (status = 200, description = "A page. `next` is null on the last page.", body = FleetAllocations),
    ),
)]
pub(super) async fn fleet_allocations(
    State(app): State<App>,
    Extension(grant): Extension<RequestRights>,
    uri: Uri,
) -> Result<Json<FleetAllocations>, Problem> {
    let asker = app.asker(&grant);
    if asker.grant.via().is_node() {
        return Err(Problem::bad_request("a request from another node cannot be forwarded again"));
    }
    let mut wanted: AllocationQuery = query(&uri)?;
    filter(&wanted)?;
    let most = limit(&wanted)?;
    let cursor = wanted.cursor.take();
    let (from, mut within) = match cursor.as_deref().map(|cursor| cursor.split_once(CURSOR)) {
        None => (String::new(), None),
        Some(Some((node, within))) => (node.to_owned(), Some(within.to_owned()).filter(|at| !at.is_empty())),
        Some(None) => return Err(Problem::bad_request("cursor must be the `next` of another page")),
    };
    let mut page = FleetAllocations::default();
    let FleetStatus { node: own, nodes, .. } = app.fleet_status()?;
    for node in nodes.into_iter().map(|node| node.name).filter(|name| *name >= from) {
        let left = most - page.allocations.len();
        if left == 0 {
            page.next = Some(format!("{node}{CURSOR}"));
            return Ok(Json(page));
        }
        // If the node has left since the previous page, continues with the next node.
        let cursor = within.take().filter(|_| node == from);
        let asked = AllocationQuery { limit: Some(left), cursor, ..wanted.clone() };
        let found = if node == own {
            app.page(asker.grant, &asked).await.map_err(|problem| problem.detail)
        } else {
            app.page_of(asker, &node, &asked).await
        };
        match found {
            Ok(AllocationPage { allocations, next, silent }) => {
                page.silent.extend(silent.into_iter().map(|why| format!("{node}: {why}")));
                page.allocations.extend(allocations.into_iter().map(|allocation| allocation.of_node(&node)));
                if let Some(next) = next {
                    page.next = Some(format!("{node}{CURSOR}{next}"));
                    return Ok(Json(page));
                }
            }
            Err(why) => page.silent.push(format!("{node}: {why}")),
        }
    }
    Ok(Json(page))
}

/// A client and its rights.
#[derive(Clone, Copy)]
pub(super) struct Asker<'a> {
    pub(super) grant: &'a RequestRights,
    access: AdminAccess,
}

impl App {
    pub(super) fn asker<'a>(&self, grant: &'a RequestRights) -> Asker<'a> {
        Asker { grant, access: grant.access(&self.program.settings()) }
    }

    pub(super) fn fleet(&self) -> Result<Arc<dyn FleetAdmin>, Problem> {
        self.program.fleet().ok_or_else(Problem::no_server)
    }

    fn fleet_status(&self) -> Result<FleetStatus, Problem> {
        Ok(self.fleet()?.status().ok_or(FleetError::NoFleet)?)
    }

    async fn order(&self, node: PathPart, drains: bool) -> Result<Response, Problem> {
        let node = path_part(node)?;
        self.fleet()?.set_draining(&node, drains).await?;
        let done = if drains { "is draining" } else { "accepts clients again" };
        let audit = Audit(format!("node {node:?} {done}"));
        Ok((StatusCode::ACCEPTED, Extension(audit), Json(NodeOrder { node, drains })).into_response())
    }

    async fn ask(
        &self,
        asker: Asker<'_>,
        node: String,
        method: &Method,
        path: String,
    ) -> Result<PeerAnswer, Problem> {
        let fleet = self.fleet()?;
        let own = fleet.node().unwrap_or_default();
        let by = format!("{} on node {own}", asker.grant);
        let rights = if asker.access == AdminAccess::Full { Rights::Full } else { Rights::Read };
        Ok(fleet.ask(PeerRequest { node, method: method.to_string(), path, rights, by }).await?)
    }

    async fn page_of(
        &self,
        asker: Asker<'_>,
        node: &str,
        asked: &AllocationQuery,
    ) -> Result<AllocationPage, String> {
        let words = serde_urlencoded::to_string(asked).unwrap_or_default();
        let path = format!("{}?{words}", deprecated::ALLOCATIONS);
        let answer = self.ask(asker, node.to_owned(), &Method::GET, path).await;
        answer.map_err(|problem| problem.detail).and_then(|answer| read(&answer))
    }

    /// Sends a request to the other nodes. Returns the first successful response with its node, and the
    /// number of nodes that did not answer.
    pub(super) async fn ask_others(
        &self,
        asker: Asker<'_>,
        method: &Method,
        path: &str,
    ) -> (Option<(String, PeerAnswer)>, usize) {
        let Ok(status) = self.fleet_status() else { return (None, 0) };
        if asker.grant.via().is_node() {
            return (None, 0);
        }
        let others = status.nodes.into_iter().map(|node| node.name).filter(|name| *name != status.node);
        let mut others: VecDeque<String> = others.collect();
        let (mut asking, mut silent) = (JoinSet::new(), 0);
        loop {
            while asking.len() < AT_A_TIME
                && let Some(node) = others.pop_front()
            {
                let Asker { grant, access } = asker;
                let (app, grant, method, path) =
                    (self.clone(), grant.clone(), method.clone(), path.to_owned());
                asking.spawn(async move {
                    let answer = app.ask(Asker { grant: &grant, access }, node.clone(), &method, path).await;
                    (node, answer)
                });
            }
            match asking.join_next().await {
                None => return (None, silent),
                Some(Ok((node, Ok(answer)))) if answer.status == 200 => {
                    return (Some((node, answer)), silent);
                }
                Some(Ok((_, Ok(answer)))) if answer.status == 404 => {}
                Some(_) => silent += 1,
            }
        }
    }
}

pub(super) fn read<T: DeserializeOwned>(answer: &PeerAnswer) -> Result<T, String> {
    if (200..300).contains(&answer.status) {
        return serde_json::from_str(&with_new_fields(&answer.body)).map_err(|error| error.to_string());
    }
    let problem = serde_json::from_str::<Problem>(&answer.body);
    Err(problem.map_or_else(|_| format!("status {}", answer.status), |problem| problem.detail))
}

fn passed_on(PeerAnswer { status, media_type, body, headers }: PeerAnswer) -> Response {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
    let usual = if status.is_success() { "application/json" } else { PROBLEM_JSON };
    let media_type = HeaderValue::from_str(&media_type).ok().filter(|media_type| !media_type.is_empty());
    let media_type = media_type.unwrap_or(HeaderValue::from_static(usual));
    let mut response = (status, [(header::CONTENT_TYPE, media_type)], body).into_response();
    for name in HEADERS {
        let value = headers.iter().find(|(known, _)| *known == name.as_str());
        if let Some(value) = value.and_then(|(_, value)| HeaderValue::from_str(value).ok()) {
            response.headers_mut().insert(name, value);
        }
    }
    response
}
