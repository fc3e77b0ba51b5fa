//! Setup and teardown: allocations, permissions, channels and, with TCP relaying, the peer connections.

use std::{sync::atomic::Ordering::Relaxed, time::Duration};

use turnpike_turn::client::{Event, Failure, Relayed, Request};

use super::{
    TurnLoadConfig, TurnShared,
    engine::{TurnEndpoint, TurnEngine},
    redirect_history::is_taken_port,
};
use crate::{
    LoadError,
    clock::nanos,
    traffic::{Carrier as _, NoData},
};

const OUTSTANDING: usize = 256;

fn outstanding(shared: &TurnShared<'_>) -> usize {
    (OUTSTANDING / shared.frame.threads).max(1)
}

pub(super) fn set_up(engine: &mut TurnEngine, shared: &TurnShared<'_>) -> Result<(), LoadError> {
    let config = shared.config;
    let TurnLoadConfig { setup_timeout, .. } = *config;
    let limit = outstanding(shared);
    let total = engine.endpoints.len();
    let (mut started, mut ready) = (0, 0);
    let mut last_answer = shared.clock.ns();
    while ready < total {
        shared.check()?;
        while started < total && started - ready < limit {
            let now = engine.now_ms();
            let _ = engine.endpoints[started].client.allocate(now);
            engine.pump(started);
            started += 1;
        }
        engine.sweep();
        engine.flush();
        if engine.drive(Duration::from_millis(10), &mut NoData)? > 0 {
            last_answer = shared.clock.ns();
        } else if let Some(failure) = engine.setup_failure(config) {
            return Err(failure);
        } else if shared.clock.ns() - last_answer > nanos(setup_timeout) {
            return Err(engine.no_answer(config, (ready, total)));
        }
        let mut done = 0;
        for (index, event) in std::mem::take(&mut engine.events) {
            match event {
                Event::Allocated(_) => {
                    if config.migrate.is_some() && !engine.endpoints[index].client.can_migrate() {
                        let server = engine.endpoints[index].history.server;
                        return Err(engine.blame(index, LoadError::NoMobility { server }));
                    }
                    begin(engine, index);
                }
                Event::Permitted(_) if config.relayed == Relayed::Tcp => {
                    let now = engine.now_ms();
                    let endpoint = &mut engine.endpoints[index];
                    let _ = endpoint.client.connect(now, endpoint.peer);
                    engine.pump(index);
                }
                Event::Connected { connection, .. } => engine.bind_connection(index, connection),
                Event::Bound(..) | Event::Permitted(_) => done += 1,
                Event::Failed {
                    request: Request::Allocate,
                    failure: Failure::TryAlternate { server, domain },
                } => {
                    engine.follow(index, server, domain.as_deref())?;
                }
                Event::Failed { request, failure } => {
                    if is_taken_port(request, &failure) && engine.take_another_port(index)? {
                        continue;
                    }
                    return Err(engine.failure(config, index, request, failure, (ready, total)));
                }
                _ => {}
            }
        }
        for (index, bound) in std::mem::take(&mut engine.bound) {
            if let Err(failure) = bound {
                let request = Request::Connect(engine.endpoints[index].peer);
                return Err(engine.failure(config, index, request, failure, (ready, total)));
            }
            done += 1;
        }
        ready += done;
        shared.ready_clients.fetch_add(done, Relaxed);
    }
    Ok(())
}

pub(super) fn begin(engine: &mut TurnEngine, index: usize) {
    engine.has_a_port(index);
    let now = engine.now_ms();
    let TurnEndpoint { peer, client, .. } = &mut engine.endpoints[index];
    let peer = *peer;
    match engine.binds {
        true => _ = client.bind_channel(now, peer),
        false => _ = client.permit(now, peer.ip()),
    }
    engine.pump(index);
}

/// Deletes all allocations, so that the next run finds the server in the same state. Gives up after 3 s.
pub(super) fn take_down(engine: &mut TurnEngine, shared: &TurnShared<'_>) -> Result<(), LoadError> {
    const LONGEST_NS: u64 = 3_000_000_000;
    engine.close_peer_connections();
    let limit = outstanding(shared);
    let total = engine.endpoints.len();
    let (mut started, mut done) = (0, 0);
    let deadline = shared.clock.ns() + LONGEST_NS;
    while done < total && shared.clock.ns() < deadline {
        while started < total && started - done < limit {
            let now = engine.now_ms();
            if engine.endpoints[started].client.delete(now).is_err() {
                done += 1;
            }
            engine.pump(started);
            started += 1;
        }
        engine.sweep();
        engine.flush();
        engine.drive(Duration::from_millis(10), &mut NoData)?;
        for (_, event) in engine.events.drain(..) {
            done += usize::from(matches!(event, Event::Deleted | Event::Failed { .. }));
        }
    }
    if done < total {
        engine.errors.insert("not_deleted", (total - done) as u64);
    }
    Ok(())
}
