//! Connects without blocking and, for connections that stay open, waits for the reflector's acknowledgement.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::atomic::Ordering::Relaxed,
};

pub(super) use turnpike_client::sockets::connect as start;
use turnpike_net::{Event, Interest, Poller};

use super::StreamShared;
use crate::{
    LoadError,
    clock::nanos,
    greeting::{self, ACK_LEN, StreamMode},
};

const OUTSTANDING: usize = 256;

const LOOK_NS: u64 = 10_000_000;

pub(super) fn finish(stream: &TcpStream) -> io::Result<()> {
    stream.take_error()?.map_or(Ok(()), Err)
}

pub(super) fn all(
    shared: &StreamShared<'_>,
    poller: &mut Poller,
    modes: &[StreamMode],
) -> Result<Vec<TcpStream>, LoadError> {
    let server = shared.config.target.server;
    let limit = (OUTSTANDING / shared.frame.threads).max(1);
    let mut dials: Vec<Dial> = Vec::with_capacity(modes.len());
    let (mut ready, mut ready_events) = (0, Vec::new());
    let mut last_progress = shared.clock.ns();
    while ready < modes.len() {
        shared.check()?;
        while dials.len() < modes.len() && dials.len() - ready < limit {
            dials.push(Dial::new(server, poller, dials.len())?);
        }
        super::wait(poller, &mut ready_events, LOOK_NS)?;
        for event in &ready_events {
            let Some((index, dial)) =
                usize::try_from(event.token).ok().and_then(|index| Some((index, dials.get_mut(index)?)))
            else {
                continue;
            };
            last_progress = shared.clock.ns();
            if dial.advance(server, poller, index, modes[index], *event)? {
                ready += 1;
                shared.ready_clients.fetch_add(1, Relaxed);
            }
        }
        if shared.clock.ns() - last_progress > nanos(shared.config.timeout) {
            let greeted = dials.iter().any(|dial| matches!(dial.state, DialState::Greeted { .. }));
            return Err(if greeted {
                LoadError::NotReflector { server, what: "does not respond" }
            } else {
                LoadError::Connect { server, source: io::ErrorKind::TimedOut.into() }
            });
        }
    }
    Ok(dials.into_iter().map(|dial| dial.stream).collect())
}

struct Dial {
    stream: TcpStream,
    state: DialState,
}

enum DialState {
    Connecting,
    Greeted { ack: [u8; ACK_LEN], len: usize },
    Ready,
}

impl Dial {
    fn new(server: SocketAddr, poller: &Poller, index: usize) -> Result<Self, LoadError> {
        let stream = start(server).map_err(|source| LoadError::Connect { server, source })?;
        let watched = poller.add_with(&stream, index as u64, Interest::Level { read: true, write: true });
        watched.map_err(LoadError::system("cannot watch a connection"))?;
        Ok(Self { stream, state: DialState::Connecting })
    }

    fn advance(
        &mut self,
        server: SocketAddr,
        poller: &Poller,
        index: usize,
        mode: StreamMode,
        event: Event,
    ) -> Result<bool, LoadError> {
        let refused = |what| LoadError::NotReflector { server, what };
        match &mut self.state {
            DialState::Connecting => {
                finish(&self.stream).map_err(|source| LoadError::Connect { server, source })?;
                if !event.writable {
                    return Ok(false);
                }
                poller
                    .set(&self.stream, index as u64, Interest::Level { read: true, write: false })
                    .map_err(LoadError::system("cannot watch a connection"))?;
                self.stream
                    .write_all(&mode.to_bytes())
                    .map_err(|_| refused("closed the connection immediately"))?;
                self.state = DialState::Greeted { ack: [0; ACK_LEN], len: 0 };
                Ok(false)
            }
            DialState::Greeted { ack, len } => {
                match self.stream.read(&mut ack[*len..]) {
                    Ok(0) => return Err(refused("closed the connection without a response")),
                    Ok(read) => *len += read,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                    Err(_) => return Err(refused("reset the connection without a response")),
                }
                if *ack == greeting::ack(true) {
                    self.state = DialState::Ready;
                    return Ok(true);
                }
                if *len < ACK_LEN {
                    return Ok(false);
                }
                Err(refused(if *ack == greeting::ack(false) {
                    "is a reflector of a different version"
                } else {
                    "does not respond like a reflector"
                }))
            }
            // The server sends nothing unsolicited, so a readable connection has been closed.
            DialState::Ready => Err(refused("closed the connection before the run began")),
        }
    }
}
