//! UDP sockets that carry plain payloads, one per client.

use std::{net::SocketAddr, time::Duration};

use turnpike_client::{Datagrams, ErrorCounts};
use turnpike_net::{Datapath, Event, Poller};

use crate::{
    LoadError,
    clock::Clock,
    traffic::{Carrier, PEER, Sink},
};

pub(crate) struct UdpClients {
    datagrams: Datagrams,
    poller: Poller,
    ready: Vec<Event>,
    clock: Clock,
    pub(crate) errors: ErrorCounts,
    pub(super) unreachable: bool,
}

impl UdpClients {
    /// Opens `count` sockets; `clients` is the number of clients in the whole run.
    pub(crate) fn new(
        server: SocketAddr,
        datapath: Datapath,
        clients: usize,
        count: usize,
        clock: Clock,
    ) -> Result<Self, LoadError> {
        let poller = Poller::new().map_err(LoadError::system("cannot create an epoll instance"))?;
        let mut datagrams = Datagrams::new(datapath, clients);
        for _ in 0..count {
            datagrams.add(server, &poller).map_err(|source| LoadError::Socket { server, source })?;
        }
        Ok(Self {
            datagrams,
            poller,
            ready: Vec::new(),
            clock,
            errors: ErrorCounts::new(),
            unreachable: false,
        })
    }
}

impl Carrier for UdpClients {
    #[inline]
    fn push(&mut self, client: usize, count: usize, len: usize, fill: impl FnMut(&mut [u8])) {
        self.datagrams.push_run(client, None, (count, len), fill);
    }

    #[inline]
    fn queued(&self) -> usize {
        self.datagrams.queued()
    }

    fn flush(&mut self) -> u64 {
        self.datagrams.flush(&mut self.errors)
    }

    fn receive(&mut self, timeout: Duration, sink: &mut impl Sink) -> Result<usize, LoadError> {
        self.ready.clear();
        let events = self.poller.wait(Some(timeout)).map_err(LoadError::system("epoll_wait"))?;
        self.ready.extend_from_slice(events);
        let mut received = 0;
        for event in &self.ready {
            if event.token == PEER {
                sink.peer_is_ready();
                continue;
            }
            let Ok(client) = usize::try_from(event.token) else { continue };
            let (clock, mut now_ns) = (self.clock, 0);
            self.unreachable |= self.datagrams.receive(client, &mut self.errors, |datagram| match datagram {
                // The clock is read once per batch, because all its datagrams had arrived when the receive call returned.
                None => now_ns = clock.ns(),
                Some((payload, _)) => {
                    received += 1;
                    sink.payload(client, now_ns, payload);
                }
            });
        }
        Ok(received)
    }

    fn poller(&self) -> &Poller {
        &self.poller
    }

    fn errors(&mut self) -> &mut ErrorCounts {
        &mut self.errors
    }
}
