//! Connection to the server that has the fleet's keys. That server is found through sentinels or cluster
//! redirects.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use redis::{AsyncConnectionConfig, Cmd, Pipeline, RedisError, Value, aio::MultiplexedConnection};

use super::{
    FleetAddress,
    address::RedisKind,
    reply::{list, text},
};
use crate::{
    ServerAddress, StoreError, StoreFault,
    redis::{client, told},
};

pub(super) struct Link {
    finder: Finder,
    patience: Duration,
    held: tokio::sync::Mutex<Option<MultiplexedConnection>>,
}

impl Link {
    pub(super) fn new(address: FleetAddress, patience: Duration) -> Self {
        Self { finder: Finder::new(address), patience, held: tokio::sync::Mutex::default() }
    }

    pub(super) fn name(&self) -> &str {
        &self.finder.name
    }

    pub(super) fn address(&self) -> &FleetAddress {
        &self.finder.address
    }

    pub(super) async fn ask(&self, command: &Cmd) -> Result<Value, StoreError> {
        let mut again = true;
        loop {
            let (mut connection, was_held) = self.connected().await?;
            match command.query_async::<Value>(&mut connection).await {
                Ok(value) => return Ok(value),
                Err(error) => {
                    let is_elsewhere = self.finder.learn(&error);
                    if is_elsewhere || is_over(&error) {
                        *self.held.lock().await = None;
                        if again && !error.is_timeout() && (is_elsewhere || was_held) {
                            again = false;
                            continue;
                        }
                    }
                    return Err(self.finder.told(&error));
                }
            }
        }
    }

    pub(super) async fn tell(&self, commands: &[Cmd]) -> Result<(), StoreError> {
        let (mut connection, _) = self.connected().await?;
        let mut pipeline = Pipeline::with_capacity(commands.len());
        for command in commands {
            pipeline.add_command(command.clone()).ignore();
        }
        let sent = pipeline.query_async::<Value>(&mut connection).await;
        if let Err(error) = &sent
            && (self.finder.learn(error) || is_over(error))
        {
            *self.held.lock().await = None;
        }
        sent.map(drop).map_err(|error| self.finder.told(&error))
    }

    /// Returns the connection, and true if it existed before. Concurrent callers wait for one connection
    /// attempt.
    async fn connected(&self) -> Result<(MultiplexedConnection, bool), StoreError> {
        let mut held = self.held.lock().await;
        if let Some(connection) = &*held {
            return Ok((connection.clone(), true));
        }
        let made = self.finder.connect(self.patience, self.patience).await?;
        *held = Some(made.clone());
        Ok((made, false))
    }
}

pub(super) struct Finder {
    address: FleetAddress,
    name: String,
    /// Index of the address that last answered, and the server that a cluster last redirected to.
    known: Mutex<(usize, Option<ServerAddress>)>,
}

impl Finder {
    pub(super) fn new(address: FleetAddress) -> Self {
        let name = address.to_string();
        Self { address, name, known: Mutex::default() }
    }

    /// Connects to the server that currently holds the keys, with `patience` as the deadline for each
    /// step.
    pub(super) async fn connect(
        &self,
        patience: Duration,
        for_answers: Duration,
    ) -> Result<MultiplexedConnection, StoreError> {
        let (first, moved) = self.known.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(server) = moved {
            match self.open(&server, patience, for_answers).await {
                Ok(connection) => return Ok(connection),
                // Forgets the last redirect: any configured server can name the current one.
                Err(_) => self.known.lock().unwrap_or_else(PoisonError::into_inner).1 = None,
            }
        }
        let mut trouble = StoreError::new(&self.name, StoreFault::Unreachable, "no address");
        let count = self.address.servers.len();
        for at in (0..count).map(|step| (first + step) % count) {
            let server = &self.address.servers[at];
            let found = match &self.address.kind {
                RedisKind::Alone | RedisKind::Cluster => self.open(server, patience, for_answers).await,
                RedisKind::Sentinels { master, password } => {
                    let sentinel = ServerAddress {
                        user: None,
                        password: password.clone(),
                        database: None,
                        ..server.clone()
                    };
                    match self.master(&sentinel, master, patience).await {
                        Ok((host, port)) => {
                            let port = Some(port);
                            let found = ServerAddress { host, port, socket: None, ..server.clone() };
                            self.open_master(&found, patience, for_answers).await
                        }
                        Err(error) => Err(error),
                    }
                }
            };
            match found {
                Ok(connection) => {
                    self.known.lock().unwrap_or_else(PoisonError::into_inner).0 = at;
                    return Ok(connection);
                }
                Err(error) => trouble = error,
            }
        }
        Err(trouble.of_fleet())
    }

    /// Records the target if the error redirects to another server, and returns true.
    pub(super) fn learn(&self, error: &RedisError) -> bool {
        let Some((at, _)) = error.redirect_node() else { return false };
        // An empty host means the server that sent the answer.
        let Some((host, port)) = at.rsplit_once(':') else { return false };
        let Ok(port) = port.parse() else { return false };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let before = known.1.as_ref().unwrap_or(&self.address.servers[known.0]);
        let host = if host.is_empty() { before.host.as_str() } else { host.trim_matches(['[', ']']) };
        let server =
            ServerAddress { host: host.to_owned(), port: Some(port), socket: None, ..before.clone() };
        known.1 = Some(server);
        true
    }

    pub(super) fn told(&self, error: &RedisError) -> StoreError {
        let told = told(&self.name, error).of_fleet();
        match told.fault {
            // coturn's schema does not apply to a fleet's store.
            StoreFault::Schema => StoreError { fault: StoreFault::Row, detail: error.to_string(), ..told },
            _ => told,
        }
    }

    async fn open(
        &self,
        server: &ServerAddress,
        patience: Duration,
        for_answers: Duration,
    ) -> Result<MultiplexedConnection, StoreError> {
        let client = client(server).map_err(|(fault, why)| StoreError::new(&self.name, fault, why))?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(patience))
            .set_response_timeout(Some(for_answers));
        let made = client.get_multiplexed_async_connection_with_config(&config).await;
        made.map_err(|error| told(&self.name, &error))
    }

    async fn master(
        &self,
        sentinel: &ServerAddress,
        master: &str,
        patience: Duration,
    ) -> Result<(String, u16), StoreError> {
        let sentinel = ServerAddress { port: sentinel.port.or(Some(26379)), ..sentinel.clone() };
        let mut connection = self.open(&sentinel, patience, patience).await?;
        let mut command = redis::cmd("SENTINEL");
        command.arg("get-master-addr-by-name").arg(master);
        let answer = command.query_async::<Value>(&mut connection).await;
        let answer = list(answer.map_err(|error| told(&self.name, &error))?);
        let found = answer
            .first()
            .and_then(text)
            .zip(answer.get(1).and_then(text).and_then(|port| port.parse().ok()));
        let unknown = || {
            StoreError::new(&self.name, StoreFault::Unreachable, format_args!("no sentinel knows {master:?}"))
        };
        found.ok_or_else(unknown)
    }

    /// Connects to the master that a sentinel named, and checks its role, because it may have been
    /// demoted since.
    async fn open_master(
        &self,
        server: &ServerAddress,
        patience: Duration,
        for_answers: Duration,
    ) -> Result<MultiplexedConnection, StoreError> {
        let mut connection = self.open(server, patience, for_answers).await?;
        let role = redis::cmd("ROLE").query_async::<Value>(&mut connection).await;
        let role = list(role.map_err(|error| told(&self.name, &error))?);
        match role.first().and_then(text).as_deref() {
            Some("master") => Ok(connection),
            role => {
                let role = role.unwrap_or("nothing");
                let why = format!("{} is {role}, not master", server.host);
                Err(StoreError::new(&self.name, StoreFault::Unreachable, why))
            }
        }
    }
}

/// Returns true if the connection is unusable: broken, unresponsive, or to a server that has become
/// read-only.
pub(super) fn is_over(error: &RedisError) -> bool {
    let code = error.code().unwrap_or_default();
    error.is_io_error()
        || error.is_connection_dropped()
        || error.is_unrecoverable_error()
        || matches!(code, "READONLY" | "MASTERDOWN" | "CLUSTERDOWN" | "LOADING")
}
