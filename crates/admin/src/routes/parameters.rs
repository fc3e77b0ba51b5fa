//! Rejects parameters and bodies that are not in the OpenAPI document. If they were ignored, a rotation
//! with the realm in the query instead of the body would rotate another realm's secret.

use std::{collections::HashMap, sync::Arc};

use axum::{
    body::HttpBody as _,
    extract::{MatchedPath, Request, State},
    http::Method,
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use serde::{Deserialize, de::IgnoredAny};

use super::{deprecated, health::DOCUMENT, input};
use crate::problem::Problem;

/// Health checks may have arbitrary parameters, which monitoring programs add to bypass caches.
const HEALTH: [&str; 3] = ["/livez", "/readyz", "/healthz"];
/// Path of forwarded requests, which are checked by the node that answers them.
const OF_NODE: &str = "/v1/fleet/nodes/{node}/v1/{path}";
/// Files of the page, which are not in the document.
const FILES: &str = "/web/{name}";

/// Operations by method and path.
#[derive(Clone)]
pub(super) struct Parameters(Arc<HashMap<(Method, String), Takes>>);

#[derive(Default)]
struct Takes {
    query: Vec<String>,
    has_body: bool,
}

/// Members of the OpenAPI document that are read here.
#[derive(Deserialize)]
struct Document {
    paths: HashMap<String, HashMap<String, Operation>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Operation {
    #[serde(default)]
    parameters: Vec<Parameter>,
    request_body: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Parameter {
    name: String,
    r#in: String,
}

impl Parameters {
    pub(super) fn of_document() -> Self {
        let document: Document = serde_json::from_str(DOCUMENT).expect("tests read the same file");
        let mut all = HashMap::from([((Method::GET, FILES.to_owned()), Takes::default())]);
        for (path, operations) in document.paths {
            for (method, operation) in operations {
                let method = method.to_uppercase().parse().expect("a method of HTTP");
                all.insert((method, path.clone()), Takes::of(operation));
            }
        }
        Self(Arc::new(all))
    }

    fn check(&self, path: &str, request: &Request) -> Result<(), Problem> {
        let path = deprecated::current(path).replace("{*", "{");
        if HEALTH.contains(&&*path) || path == OF_NODE {
            return Ok(());
        }
        let method = if *request.method() == Method::HEAD { &Method::GET } else { request.method() };
        let Some(takes) = self.0.get(&(method.clone(), path.clone())) else { return Ok(()) };
        let query = request.uri().query().unwrap_or_default();
        if let Some(name) =
            input::check_form(query.as_bytes())?.into_iter().find(|name| !takes.query.contains(name))
        {
            let known = if takes.query.is_empty() { "none".to_owned() } else { takes.query.join(", ") };
            let detail = format!("{method} {path} has no parameter {name:?}; query parameters: {known}");
            return Err(Problem::bad_request(detail));
        }
        if !takes.has_body && !request.body().is_end_stream() {
            let detail = format!("{method} {path} accepts no body: leave it out");
            return Err(Problem::bad_request(detail));
        }
        Ok(())
    }
}

impl Takes {
    fn of(operation: Operation) -> Self {
        let in_query = operation.parameters.into_iter().filter(|one| one.r#in == "query");
        Self { query: in_query.map(|one| one.name).collect(), has_body: operation.request_body.is_some() }
    }
}

/// Refuses requests with parameters or a body that their operation does not have.
pub(super) async fn check(
    State(parameters): State<Parameters>,
    path: Option<MatchedPath>,
    request: Request,
    next: Next,
) -> Response {
    if let Some(path) = path
        && let Err(problem) = parameters.check(path.as_str(), &request)
    {
        return problem.into_response();
    }
    next.run(request).await
}
