//! Redirects and ports that are taken. After a 300 (Try Alternate, RFC 8489 section 10), a client switches to another server, up to a limit
//! and never twice to the same one. After a 437 (Allocation Mismatch, RFC 8656 section 5), it tries other ports, also up to a limit.

use std::{net::SocketAddr, sync::Arc};

use turnpike_turn::client::{Failure, Request};

use super::{TurnLoadConfig, engine::TurnEngine, redirect_history::RedirectHistory};
use crate::LoadError;

const MAX_PORTS: usize = 5;

impl TurnEngine {
    /// Follows a redirect with the same transport and credentials; `domain` is the certificate name given in
    /// the redirect.
    pub(super) fn follow(
        &mut self,
        index: usize,
        to: SocketAddr,
        domain: Option<&str>,
    ) -> Result<(), LoadError> {
        let from = self.endpoints[index].history.server;
        self.endpoints[index].history.advance(to)?;
        self.redirects += 1;
        let why = "with a domain that no certificate can match";
        let moved = self
            .redirect(index, to, domain)
            .map_err(|_| LoadError::Redirected { from, to, why })
            .and_then(|()| self.reopen(index, 0).map_err(|source| LoadError::Socket { server: to, source }));
        moved.map_err(|error| self.blame(index, error))?;
        self.allocate_again(index, Arc::clone(&self.endpoints[index].settings));
        Ok(())
    }

    /// Switches to another port, because the server may still have an allocation for the current one. Returns
    /// false if the limit has been reached.
    pub(super) fn take_another_port(&mut self, index: usize) -> Result<bool, LoadError> {
        let history = &mut self.endpoints[index].history;
        let server = history.server;
        if history.taken_ports == MAX_PORTS {
            return Ok(false);
        }
        history.taken_ports += 1;
        self.reopen(index, 0).map_err(|source| self.blame(index, LoadError::Socket { server, source }))?;
        self.allocate_again(index, Arc::clone(&self.endpoints[index].settings));
        Ok(true)
    }

    pub(super) fn has_a_port(&mut self, index: usize) {
        self.endpoints[index].history.taken_ports = 0;
    }

    pub(super) fn return_home(&mut self, index: usize) {
        let history = &mut self.endpoints[index].history;
        let Some(home) = history.left.first() else { return };
        *history = RedirectHistory::new(*home);
        self.restore_server(index);
    }

    pub(super) fn failure(
        &self,
        config: &TurnLoadConfig,
        index: usize,
        request: Request,
        failure: Failure,
        ready: (usize, usize),
    ) -> LoadError {
        let server = self.endpoints[index].history.server;
        self.blame(index, LoadError::from_failure(config, server, index, request, failure, ready))
    }

    pub(super) fn no_answer(&self, config: &TurnLoadConfig, (ready, clients): (usize, usize)) -> LoadError {
        let waits = |index: &usize| self.endpoints[*index].client.allocation().is_none();
        let was_sent_on = |index: &usize| !self.endpoints[*index].history.left.is_empty();
        let mut waiting = (0..self.endpoints.len()).filter(waits);
        let index = waiting.clone().find(was_sent_on).or_else(|| waiting.next());
        let server = index.map_or(config.server_of(0), |index| self.endpoints[index].history.server);
        let transport = config.transport();
        let error = LoadError::NoAnswer { transport, server, request: Request::Allocate, ready, clients };
        match index {
            Some(index) => self.blame(index, error),
            None => error,
        }
    }

    pub(super) fn blame(&self, index: usize, error: LoadError) -> LoadError {
        match self.endpoints[index].history.left.last() {
            Some(from) => LoadError::Alternate { from: *from, source: Box::new(error) },
            None => error,
        }
    }
}
