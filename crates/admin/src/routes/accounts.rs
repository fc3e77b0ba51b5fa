//! Users, secrets, realms, and API keys. No response contains a password, a key or a secret.

use axum::{
    Extension,
    extract::{Request, State},
    http::{StatusCode, Uri},
    response::{IntoResponse, Response},
};
use serde::de::DeserializeOwned;
use turnpike_api::{
    AccountChange, KeyList, NewKey, NewRealm, NewSecret, NewUser, RealmInfo, RealmList, RealmQuery, Rotated,
    Rotation, SecretList, UserList, UserPage, UserQuery,
};
use turnpike_config::{limit_keys, realms};

use super::{App, Json, PathPart, body, path_part, query};
use crate::{access::Audit, accounts::Accounts, problem::Problem};

/// Lists users in pages: first those in the configuration, then those in the store.
#[utoipa::path(
    get,
    path = "/v1/users",
    tag = "accounts",
    params(UserQuery),
    responses(
        (status = 200, description = "Counts for all realms, and a page of users. `next` is null on the last page.", body = UserList),
    ),
)]
pub(super) async fn users(State(app): State<App>, uri: Uri) -> Result<Json<UserList>, Problem> {
    let UserQuery { realm, limit, cursor } = query(&uri)?;
    let (counts, accounts) = {
        let server = app.server()?;
        let realms = realms::all(&server.settings);
        let counts = UserList {
            with_allocations: server.relay.users() as u64,
            configured: realms.iter().map(|realm| realm.users.len() as u64).sum(),
            secrets: realms.iter().map(|realm| realm.secrets.len() as u64).sum(),
            token_keys: server.settings.oauth.keys.len() as u64,
            users: Vec::new(),
            next: None,
        };
        (counts, app.accounts()?)
    };
    let UserPage { users, next } = accounts.users(realm.as_deref(), limit, cursor.as_deref()).await?;
    Ok(Json(UserList { users, next, ..counts }))
}

/// Adds a user to the store, or changes the password of an existing one.
#[utoipa::path(
    post,
    path = "/v1/users",
    tag = "accounts",
    request_body = NewUser,
    responses(
        (status = 200, description = "The password was changed.", body = AccountChange),
        (status = 201, description = "The user was added.", body = AccountChange),
    ),
)]
pub(super) async fn put_user(State(app): State<App>, request: Request) -> Result<Response, Problem> {
    let new: NewUser = needed(request, "{\"name\": \"alice\", \"password\": \"...\"}").await?;
    let (name, realm) = (new.name.clone(), new.realm.clone());
    let change = app.accounts()?.put_user(new).await;
    app.tell_of_user(realm, name, &change).await;
    change.map(|change| put("user", change))
}

/// Removes a user from the store. The user's allocations can no longer be refreshed, and expire.
#[utoipa::path(
    delete,
    path = "/v1/users/{name}",
    tag = "accounts",
    params(("name" = String, Path, description = "The username."), RealmQuery),
    responses(
        (status = 200, description = "The user was removed.", body = AccountChange),
    ),
)]
pub(super) async fn remove_user(
    State(app): State<App>,
    uri: Uri,
    name: PathPart,
) -> Result<Response, Problem> {
    let RealmQuery { realm } = query(&uri)?;
    let name = path_part(name)?;
    let change = app.accounts()?.remove_user(realm.as_deref(), &name).await;
    app.tell_of_user(realm, name, &change).await;
    change.map(|change| removed("user", change))
}

/// Lists the secrets for time-limited credentials by fingerprint. This needs full access, because a
/// fingerprint can reveal a weak secret.
#[utoipa::path(
    get,
    path = "/v1/secrets",
    tag = "accounts",
    params(RealmQuery),
    responses(
        (status = 200, description = "Secrets in the configuration and in the store.", body = SecretList),
    ),
)]
pub(super) async fn secrets(State(app): State<App>, uri: Uri) -> Result<Json<SecretList>, Problem> {
    let RealmQuery { realm } = query(&uri)?;
    Ok(Json(app.accounts()?.secrets(realm.as_deref()).await?))
}

/// Adds a secret for time-limited credentials.
#[utoipa::path(
    post,
    path = "/v1/secrets",
    tag = "accounts",
    request_body = NewSecret,
    responses(
        (status = 200, description = "The store already had the secret.", body = AccountChange),
        (status = 201, description = "The secret was added.", body = AccountChange),
    ),
)]
pub(super) async fn put_secret(State(app): State<App>, request: Request) -> Result<Response, Problem> {
    let new = needed(request, "{\"secret\": \"...\"}").await?;
    let change = app.accounts()?.put_secret(new).await;
    Ok(put("secret", app.tell_of_rules(change).await?))
}

/// Removes a secret from the store. Credentials made with it are no longer accepted.
#[utoipa::path(
    delete,
    path = "/v1/secrets/{fingerprint}",
    tag = "accounts",
    params(("fingerprint" = String, Path, description = "As in the list."), RealmQuery),
    responses(
        (status = 200, description = "The secret was removed.", body = AccountChange),
    ),
)]
pub(super) async fn remove_secret(
    State(app): State<App>,
    uri: Uri,
    fingerprint: PathPart,
) -> Result<Response, Problem> {
    let RealmQuery { realm } = query(&uri)?;
    let fingerprint = path_part(fingerprint)?;
    let change = app.accounts()?.remove_secret(realm.as_deref(), &fingerprint).await;
    Ok(removed("secret", app.tell_of_rules(change).await?))
}

/// Replaces the secrets for time-limited credentials. The new secret signs all new credentials. The others stay
/// valid until credentials made with them have expired, and are then removed.
#[utoipa::path(
    post,
    path = "/v1/secrets/rotation",
    tag = "accounts",
    request_body(content = Option<Rotation>),
    responses(
        (status = 200, description = "The new secret now signs all new credentials.", body = Rotated),
    ),
)]
pub(super) async fn rotate_secret(State(app): State<App>, request: Request) -> Result<Response, Problem> {
    let rotation: Rotation = body(request).await?.unwrap_or_default();
    let rotated = app.accounts()?.rotate_secret(rotation).await;
    let rotated = app.tell_of_rules(rotated).await?;
    let Rotated { realm, fingerprint, store, until, .. } = &rotated;
    let others =
        until.as_ref().map_or_else(String::new, |until| format!(", the others stay valid until {until}"));
    let audit =
        Audit(format!("secret {fingerprint} now signs credentials in realm {realm:?}{others} ({store})"));
    Ok((Extension(audit), Json(rotated)).into_response())
}

/// Lists the names and limits of the applications' keys, but not the keys themselves.
#[utoipa::path(
    get,
    path = "/v1/keys",
    tag = "accounts",
    responses(
        (status = 200, description = "All keys.", body = KeyList),
    ),
)]
pub(super) async fn keys(State(app): State<App>) -> Result<Json<KeyList>, Problem> {
    Ok(Json(app.accounts()?.keys().await?))
}

/// Adds the hash of a key. If the name already exists, the request is refused, so that the owner of the
/// existing key does not lose it.
#[utoipa::path(
    post,
    path = "/v1/keys",
    tag = "accounts",
    request_body = NewKey,
    responses(
        (status = 201, description = "The key was added.", body = AccountChange),
    ),
)]
pub(super) async fn put_key(State(app): State<App>, request: Request) -> Result<Response, Problem> {
    let new = needed(request, "{\"name\": \"shop\", \"sha256\": \"...\"}").await?;
    let change = app.accounts()?.put_key(new).await;
    Ok(put("key", app.tell_of_rules(change).await?))
}

/// Removes a key. Credentials made with it stay valid until they expire.
#[utoipa::path(
    delete,
    path = "/v1/keys/{name}",
    tag = "accounts",
    params(("name" = String, Path, description = "As in the list.")),
    responses(
        (status = 200, description = "The key was removed.", body = AccountChange),
    ),
)]
pub(super) async fn remove_key(State(app): State<App>, name: PathPart) -> Result<Response, Problem> {
    let name = path_part(name)?;
    let change = app.accounts()?.remove_key(&name).await;
    Ok(removed("key", app.tell_of_rules(change).await?))
}

/// Lists the realms in use and the realms in the store.
#[utoipa::path(
    get,
    path = "/v1/realms",
    tag = "accounts",
    responses(
        (status = 200, description = "All realms.", body = RealmList),
    ),
)]
pub(super) async fn realms(State(app): State<App>) -> Result<Json<RealmList>, Problem> {
    let stored = app.accounts()?.realms().await?;
    let server = app.server()?;
    let (settings, held, limits) =
        (&server.settings, server.relay.realms(), realms::limits(&server.settings));
    let realms = realms::all(settings).into_iter().map(|realm| {
        let named = settings.realms.iter().find(|named| named.name == realm.name);
        let limit = limits.iter().find(|limit| limit.realm == realm.name);
        let rates = limit_keys::rates(settings, realm.name);
        let allocations = held.iter().find(|(name, _)| **name == *realm.name).map_or(0, |(_, count)| *count);
        RealmInfo {
            name: realm.name.to_owned(),
            allocations: allocations as u64,
            max_allocations: limit.and_then(|limit| limit.allocations).map(|most| most as u64),
            max_allocations_per_user: limit
                .and_then(|limit| limit.allocations_per_user)
                .unwrap_or(settings.allocation_limits.allocations_per_user)
                as u64,
            bits_per_second: rates.per_realm,
            bits_per_second_per_user: rates.per_user,
            bits_per_second_per_allocation: rates.per_allocation,
            max_allocation_duration: named
                .and_then(|named| named.max_allocation_duration)
                .unwrap_or(settings.max_allocation_duration),
            relay_ports: named
                .and_then(|named| named.relay_ports.as_ref())
                .map(|ports| format!("{}-{}", ports.start(), ports.end())),
            users: realm.users.len() as u64,
            secrets: realm.secrets.len() as u64,
            listen: named.iter().flat_map(|named| &named.listen).map(ToString::to_string).collect(),
            server_names: named.iter().flat_map(|named| &named.server_names).cloned().collect(),
        }
    });
    Ok(Json(RealmList { realms: realms.collect(), stored }))
}

/// Adds a realm to the store, in addition to those in the configuration, or changes the limits of an
/// existing one.
#[utoipa::path(
    post,
    path = "/v1/realms",
    tag = "accounts",
    request_body = NewRealm,
    responses(
        (status = 200, description = "The limits were changed.", body = AccountChange),
        (status = 201, description = "The realm was added, and will be served within a second.", body = AccountChange),
    ),
)]
pub(super) async fn put_realm(State(app): State<App>, request: Request) -> Result<Response, Problem> {
    let new = needed(request, "{\"name\": \"blue.example\", \"max_allocations\": 1000}").await?;
    let change = app.accounts()?.put_realm(new).await;
    Ok(put("realm", app.tell_of_rules(change).await?))
}

/// Removes a realm from the store and ends its allocations. Its users and secrets stay in the store.
#[utoipa::path(
    delete,
    path = "/v1/realms/{name}",
    tag = "accounts",
    params(("name" = String, Path, description = "The name.")),
    responses(
        (status = 200, description = "The realm was removed.", body = AccountChange),
    ),
)]
pub(super) async fn remove_realm(State(app): State<App>, name: PathPart) -> Result<Response, Problem> {
    let name = path_part(name)?;
    let change = app.accounts()?.remove_realm(&name).await;
    Ok(removed("realm", app.tell_of_rules(change).await?))
}

impl App {
    /// The result must not be held across an await, because the server cannot stop while it exists.
    fn accounts(&self) -> Result<Accounts, Problem> {
        let server = self.server()?;
        Ok(Accounts::new(server.settings, server.store))
    }

    /// Makes the other nodes of a fleet drop a user from their caches, unless the change was refused.
    async fn tell_of_user(
        &self,
        realm: Option<String>,
        name: String,
        change: &Result<AccountChange, Problem>,
    ) {
        if may_be_done(change)
            && let (Ok(fleet), Ok(server)) = (self.fleet(), self.server())
        {
            let realm = realm.unwrap_or_else(|| server.settings.realm.clone());
            drop(server);
            fleet.revoked(realm, name).await;
        }
    }

    /// Makes the other nodes of a fleet read the rules again, unless the change was refused.
    async fn tell_of_rules<T>(&self, change: Result<T, Problem>) -> Result<T, Problem> {
        if may_be_done(&change)
            && let Ok(fleet) = self.fleet()
        {
            fleet.rules_changed().await;
        }
        change
    }
}

/// Returns true if the store may have been changed, even if the answer was lost.
fn may_be_done<T>(change: &Result<T, Problem>) -> bool {
    change.as_ref().map_or_else(|problem| problem.status >= 500, |_| true)
}

async fn needed<T: DeserializeOwned>(request: Request, example: &str) -> Result<T, Problem> {
    let missing = || Problem::bad_request(format!("a body is missing, such as {example}"));
    body(request).await?.ok_or_else(missing)
}

fn put(what: &str, change: AccountChange) -> Response {
    let status = if change.existed { StatusCode::OK } else { StatusCode::CREATED };
    let audit = audit(what, &change, if change.existed { "changed" } else { "added" });
    (status, Extension(audit), Json(change)).into_response()
}

fn removed(what: &str, change: AccountChange) -> Response {
    let audit = audit(what, &change, "removed");
    (Extension(audit), Json(change)).into_response()
}

fn audit(what: &str, change: &AccountChange, done: &str) -> Audit {
    let AccountChange { name, realm, store, .. } = change;
    // Names are untrusted input and must not forge log lines.
    let place =
        if what == "realm" || realm.is_empty() { String::new() } else { format!(" in realm {realm:?}") };
    Audit(format!("{done} {what} {name:?}{place} ({store})"))
}
