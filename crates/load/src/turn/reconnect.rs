//! Clients that come back (`--reconnect`): one that hears nothing for a while takes another socket and asks the first server for an
//! allocation anew, and goes where it is sent from there (300).
//!
//! As a call does whose path has failed: ICE notices the silence and gathers its candidates again (RFC 8445 section 2.4). What a client
//! would have sent while it has no allocation is lost, and counted so. Told at the end are how many allocations were lost, how long it took
//! until their clients had another one, and the silence that each client bore longest: how long a fault lasts for those who use the server.

use std::sync::Arc;

use turnpike_turn::client::{Event, Failure, Request};

use super::{allocate, course::is_taken_port, engine::TurnEngine, set_up};
use crate::traffic::Carrier as _;

impl TurnEngine {
    /// Has those come back that have heard nothing for too long.
    pub(super) fn come_back(&mut self, now_ns: u64) {
        self.returns.look(now_ns);
        let mut from = 0;
        while let Some(index) = self.returns.next_due(from, now_ns) {
            from = index + 1;
            // Nothing may be queued for a socket that is closed.
            if self.queued() > 0 {
                self.flush();
            }
            self.returns.leave(index, now_ns);
            self.return_home(index);
            if let Err(error) = self.reopen(index, 0) {
                self.returns.failed(|| format!("no new socket: {error}"));
                continue;
            }
            self.allocate_anew(index, Arc::clone(&self.endpoints[index].settings));
        }
    }

    /// Takes what a client that comes back was told; false if it is none.
    pub(super) fn returning(&mut self, index: usize, event: &Event) -> bool {
        if !self.returns.is_away(index) {
            return false;
        }
        match event {
            Event::Allocated(_) => set_up::begin(self, index),
            Event::Bound(..) | Event::Permitted(_) => {
                self.endpoints[index].forget_header();
                self.returns.has_come_back(index, self.now_ns());
            }
            Event::Failed {
                request: Request::Allocate,
                failure: Failure::TryAlternate { server, domain },
            } => {
                if let Err(error) = self.follow(index, *server, domain.as_deref()) {
                    self.returns.failed(|| error.to_string());
                }
            }
            Event::Failed { request, failure } if is_taken_port(*request, failure) => {
                match self.take_another_port(index) {
                    Ok(true) => {}
                    Ok(false) => self.stay_away(*request, failure),
                    Err(error) => self.returns.failed(|| error.to_string()),
                }
            }
            Event::Failed { request, failure } => self.stay_away(*request, failure),
            _ => {}
        }
        true
    }

    /// It asks again when its patience is over.
    fn stay_away(&mut self, request: Request, failure: &Failure) {
        allocate::count(&mut self.errors, request, failure);
        self.returns.failed(|| failure.to_string());
    }
}
