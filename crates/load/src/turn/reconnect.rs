//! Reconnecting clients (`--reconnect`): a client that has received nothing for a while opens another socket,
//! allocates again at the first server and follows redirects (300) from there.
//!
//! This models a call whose path has failed: ICE notices that no packets arrive and gathers candidates again
//! (RFC 8445 section 2.4). Packets due while a client has no allocation count as lost. The report contains
//! the number of lost allocations, the time until they are replaced, and each client's longest time without
//! packets: the duration of the fault as its user sees it.

use std::sync::Arc;

use turnpike_turn::client::{Event, Failure, Request};

use super::{allocate, engine::TurnEngine, redirect_history::is_taken_port, set_up};
use crate::traffic::Carrier as _;

impl TurnEngine {
    pub(super) fn reconnect_silent_clients(&mut self, now_ns: u64) {
        self.reconnects.look(now_ns);
        let mut from = 0;
        while let Some(index) = self.reconnects.next_due(from, now_ns) {
            from = index + 1;
            // No messages may be queued for a socket that is closed.
            if self.queued() > 0 {
                self.flush();
            }
            self.reconnects.leave(index, now_ns);
            self.return_home(index);
            if let Err(error) = self.reopen(index, 0) {
                self.reconnects.failed(|| format!("cannot open a new socket: {error}"));
                continue;
            }
            self.allocate_again(index, Arc::clone(&self.endpoints[index].settings));
        }
    }

    pub(super) fn returning(&mut self, index: usize, event: &Event) -> bool {
        if !self.reconnects.is_away(index) {
            return false;
        }
        match event {
            Event::Allocated(_) => set_up::begin(self, index),
            Event::Bound(..) | Event::Permitted(_) => {
                self.endpoints[index].forget_header();
                self.reconnects.has_reconnected(index, self.now_ns());
            }
            Event::Failed {
                request: Request::Allocate,
                failure: Failure::TryAlternate { server, domain },
            } => {
                if let Err(error) = self.follow(index, *server, domain.as_deref()) {
                    self.reconnects.failed(|| error.to_string());
                }
            }
            Event::Failed { request, failure } if is_taken_port(*request, failure) => {
                match self.take_another_port(index) {
                    Ok(true) => {}
                    Ok(false) => self.stay_away(*request, failure),
                    Err(error) => self.reconnects.failed(|| error.to_string()),
                }
            }
            Event::Failed { request, failure } => self.stay_away(*request, failure),
            _ => {}
        }
        true
    }

    fn stay_away(&mut self, request: Request, failure: &Failure) {
        allocate::count(&mut self.errors, request, failure);
        self.reconnects.failed(|| failure.to_string());
    }
}
