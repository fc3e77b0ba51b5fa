//! TCP side of the reflector: accepts connections and drives them; the workloads are in
//! [`super::connection`].
//!
//! Each worker has its own `SO_REUSEPORT` listener per address. The kernel distributes the connections, and each connection wakes only one
//! worker.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use slab::Slab;
use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};
use turnpike_net::{BindError, Event, Interest};
use turnpike_worker::INBOX;

use super::{
    ReflectFrame, ReflectStats, ReflectWorker,
    connection::{Buffers, NextStep, ReflectedConnection},
};
use crate::LoadError;

const BACKLOG: i32 = 4096;
const LISTENERS: u64 = 1 << 32;
/// Interval between the records of a sink.
const RECORDS: Duration = Duration::from_millis(50);
/// Time for which a connection is not polled if its peer sends without reading. Listeners pause for as long if descriptors run out.
const PAUSE: Duration = Duration::from_millis(5);

pub(super) struct ReflectListener {
    socket: TcpListener,
    address: SocketAddr,
    paused: bool,
}

impl ReflectListener {
    pub(super) fn local_addr(&self) -> SocketAddr {
        self.address
    }
}

impl AsFd for ReflectListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Binds a listener; port 0 means any port. `shared` sets SO_REUSEPORT.
pub(super) fn bind(address: SocketAddr, shared: bool) -> Result<ReflectListener, LoadError> {
    let open = || {
        let socket =
            Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
        if address.is_ipv6() {
            socket.set_only_v6(true)?;
        }
        socket.set_reuse_address(true)?;
        socket.set_reuse_port(shared)?;
        // Accepted sockets inherit these options (tcp_create_openreq_child clones the listener's state).
        socket.set_tcp_nodelay(true)?;
        let keepalive =
            TcpKeepalive::new().with_time(Duration::from_secs(30)).with_interval(Duration::from_secs(10));
        socket.set_tcp_keepalive(&keepalive)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        let socket = TcpListener::from(socket);
        let address = socket.local_addr()?;
        Ok(ReflectListener { socket, address, paused: false })
    };
    open().map_err(|source| BindError::ip(format_args!("tcp {address}"), source, "with --tcp").into())
}

pub(super) struct TcpReflectWorker {
    frame: ReflectFrame,
    listeners: Vec<ReflectListener>,
    connections: Slab<ReflectedConnection>,
    buffers: Buffers,
    ready: Vec<Event>,
    /// Indices of sinks that have bytes to report, each listed once.
    news: Vec<usize>,
    /// Time at which the next records of the sinks in `news` are due.
    tell: Option<Instant>,
    /// Indices of connections that are not polled until `unpark`.
    parked: Vec<usize>,
    unpark: Option<Instant>,
    accepted: u64,
}

impl TcpReflectWorker {
    pub(super) fn new(listeners: Vec<ReflectListener>) -> io::Result<Self> {
        /// Limit on open files: several times a generator's maximum number of clients.
        const FILES: u64 = 1 << 16;
        // If the limit stays lower, the listeners pause whenever descriptors run out.
        turnpike_net::rlimit::raise_open_files(FILES);
        let frame = ReflectFrame::new(0, Instant::now())?;
        for (index, listener) in listeners.iter().enumerate() {
            frame.poller.add(listener, LISTENERS + index as u64)?;
        }
        Ok(Self {
            frame,
            listeners,
            connections: Slab::new(),
            buffers: Buffers::new(),
            ready: Vec::new(),
            news: Vec::new(),
            tell: None,
            parked: Vec::new(),
            unpark: None,
            accepted: 0,
        })
    }

    fn accept(&mut self, number: usize, now: Instant) {
        /// Maximum number of connections to accept before existing connections get a turn.
        const MOST: usize = 64;
        let Some(listener) = self.listeners.get_mut(number) else { return };
        for _ in 0..MOST {
            match listener.socket.accept() {
                Ok((stream, _)) => {
                    self.accepted += 1;
                    if stream.set_nonblocking(true).is_err() {
                        continue;
                    }
                    let entry = self.connections.vacant_entry();
                    let index = entry.key();
                    let connection = entry.insert(ReflectedConnection::new(stream));
                    if self.frame.poller.add(connection, index as u64).is_err() {
                        self.connections.remove(index);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The client has already closed the connection.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted
                    ) => {}
                // Descriptors or memory have run out. Pause, because the accept queue stays non-empty.
                Err(_) => {
                    listener.paused = self.frame.poller.remove(listener).is_ok();
                    self.unpark.get_or_insert(now + PAUSE);
                    return;
                }
            }
        }
    }

    fn serve(&mut self, index: usize, event: Event, now: Instant) {
        let Some(connection) = self.connections.get_mut(index) else { return };
        let blocked = connection.blocked();
        match connection.advance(event.readable || event.error, &mut self.buffers, now) {
            Ok(NextStep::Close) | Err(_) => {
                self.connections.remove(index);
                return;
            }
            Ok(NextStep::Wait) => {}
            Ok(NextStep::News) => {
                self.news.push(index);
                self.tell.get_or_insert(now + RECORDS);
            }
        }
        let blocks = connection.blocked();
        let watched = if blocked && blocks && event.readable {
            // The peer sends without reading, so leave its bytes in the kernel for a while.
            self.parked.push(index);
            self.unpark.get_or_insert(now + PAUSE);
            self.frame.poller.remove(connection)
        } else if connection.watched_for_writing != (blocks || connection.streams()) {
            connection.watched_for_writing = !connection.watched_for_writing;
            self.frame.poller.set(
                connection,
                index as u64,
                Interest::Level { read: true, write: connection.watched_for_writing },
            )
        } else {
            Ok(())
        };
        if watched.is_err() {
            self.connections.remove(index);
        }
    }

    /// Writes one record per sink in `news`.
    fn tell(&mut self, now: Instant) {
        self.tell = None;
        let mut news = std::mem::take(&mut self.news);
        news.retain(|index| {
            let Some(connection) = self.connections.get_mut(*index) else { return false };
            connection.tell(&mut self.buffers, now)
        });
        if !news.is_empty() {
            self.tell = Some(now + RECORDS);
        }
        self.news = news;
    }

    fn unpark(&mut self) {
        self.unpark = None;
        for index in self.parked.drain(..) {
            let Some(connection) = self.connections.get_mut(index) else { continue };
            connection.watched_for_writing = true;
            let watched = self.frame.poller.add_with(
                connection,
                index as u64,
                Interest::Level { read: true, write: true },
            );
            if watched.is_err() {
                self.connections.remove(index);
            }
        }
        for (number, listener) in self.listeners.iter_mut().enumerate().filter(|(_, one)| one.paused) {
            listener.paused = self.frame.poller.add(listener, LISTENERS + number as u64).is_err();
        }
    }
}

impl ReflectWorker for TcpReflectWorker {
    fn frame(&mut self) -> &mut ReflectFrame {
        &mut self.frame
    }

    fn wake_up(&mut self) -> io::Result<()> {
        let due = [self.tell, self.unpark].into_iter().flatten().min();
        let timeout = due.map(|due| due.saturating_duration_since(Instant::now()));
        self.ready.clear();
        self.ready.extend(self.frame.poller.wait(timeout)?);
        let now = Instant::now();
        if self.tell.is_some_and(|due| due <= now) {
            self.tell(now);
        }
        if self.unpark.is_some_and(|due| due <= now) {
            self.unpark();
        }
        for position in 0..self.ready.len() {
            let event = self.ready[position];
            let listener = event.token.checked_sub(LISTENERS);
            match (listener, usize::try_from(listener.unwrap_or(event.token))) {
                _ if event.token == INBOX => _ = self.frame.command(),
                (Some(_), Ok(number)) => self.accept(number, now),
                (None, Ok(index)) => self.serve(index, event, now),
                (_, Err(_)) => {}
            }
        }
        Ok(())
    }

    fn stats(&self) -> ReflectStats {
        ReflectStats {
            connections: self.accepted,
            tcp_received_bytes: self.buffers.received,
            tcp_sent_bytes: self.buffers.sent,
            ..ReflectStats::default()
        }
    }
}
