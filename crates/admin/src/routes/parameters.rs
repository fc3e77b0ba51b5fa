//! The parameters that each path takes, as the OpenAPI document says: any other one is an error. One that is ignored may do harm: a
//! rotation with the realm in the query instead of the body would rotate the secret of another realm.

use std::{collections::HashMap, sync::Arc};

use axum::{
    extract::{MatchedPath, Request, State},
    http::Method,
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use utoipa::{
    OpenApi as _,
    openapi::path::{Operation, ParameterIn},
};

use super::{Document, input};
use crate::model::Problem;

/// Asked by programs that may add parameters against caches, and the answer is the same with them.
const HEALTH: [&str; 3] = ["/livez", "/readyz", "/healthz"];
/// What another node takes, that node says.
const OF_NODE: &str = "/v1/fleet/nodes/{node}/v1/{path}";

/// Names by method and path.
#[derive(Clone)]
pub(super) struct Parameters(Arc<HashMap<(Method, String), Vec<String>>>);

impl Parameters {
    pub(super) fn of_document() -> Self {
        let mut all = HashMap::new();
        for (path, item) in Document::openapi().paths.paths {
            let operations = [
                (Method::GET, item.get),
                (Method::POST, item.post),
                (Method::PUT, item.put),
                (Method::DELETE, item.delete),
            ];
            for (method, operation) in operations {
                if let Some(operation) = operation {
                    all.insert((method, path.clone()), names(operation));
                }
            }
        }
        Self(Arc::new(all))
    }

    fn check(&self, method: &Method, path: &str, query: &str) -> Result<(), Problem> {
        let path = path.replace("{*", "{");
        if HEALTH.contains(&&*path) || path == OF_NODE {
            return Ok(());
        }
        let method = if *method == Method::HEAD { Method::GET } else { method.clone() };
        let Some(known) = self.0.get(&(method.clone(), path.clone())) else { return Ok(()) };
        let unknown = input::check_form(query.as_bytes())?.into_iter().find(|name| !known.contains(name));
        let Some(unknown) = unknown else { return Ok(()) };
        let takes = if known.is_empty() { "none in its query".to_owned() } else { known.join(", ") };
        let detail = format!("{method} {path} has no parameter {unknown:?}: it takes {takes}");
        Err(Problem::bad_request(detail))
    }
}

fn names(operation: Operation) -> Vec<String> {
    let parameters = operation.parameters.unwrap_or_default().into_iter();
    parameters.filter(|one| matches!(one.parameter_in, ParameterIn::Query)).map(|one| one.name).collect()
}

/// Refuses requests with parameters that their path does not take.
pub(super) async fn check(
    State(parameters): State<Parameters>,
    path: Option<MatchedPath>,
    request: Request,
    next: Next,
) -> Response {
    if let (Some(query), Some(path)) = (request.uri().query(), path)
        && let Err(problem) = parameters.check(request.method(), path.as_str(), query)
    {
        return problem.into_response();
    }
    next.run(request).await
}
