//! The connections of one thread: TCP, TLS or DTLS, opened when there is data to send.
//!
//! ```text
//! push_with ─▶ out ──flush──▶ [TLS records | DTLS records] ──▶ kernel   data that the kernel does not accept waits in `out`
//! kernel ─▶ [TLS | DTLS] ─▶ scratch ─▶ whole messages ─▶ caller         a partial message waits in `partial`
//! ```

use std::{
    collections::HashMap,
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream, UdpSocket},
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

use rustls::{ClientConnection, HandshakeKind, pki_types::ServerName};
use socket2::Socket;
use turnpike_net::{Event, Interest, Poller};
use turnpike_wire::frame::{self, Frame, MAX_MESSAGE_LEN};

use crate::{
    ClientTransport, ErrorCounts, InvalidSetting, Security, dtls, explain,
    sockets::{connect, connect_udp, quiet, refusal},
};

/// Maximum number of bytes waiting to be sent on a link. Messages beyond this limit count as not sent, as with a full socket
/// buffer.
const MAX_WAITING: usize = 256 << 10;
const SCRATCH: usize = 4 * MAX_MESSAGE_LEN;
const CALLS: usize = 4;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Framing {
    #[default]
    Turn,
    /// Raw bytes from a peer, split into chunks of this length, because there is no framing after a ConnectionBind (RFC 6062).
    Fixed(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no certificate can match this domain")]
pub struct InvalidDomain;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    pub link: usize,
    pub during_setup: bool,
    /// Description of the failure: a verb phrase whose subject is the server.
    pub what: String,
}

#[derive(Clone, Copy, Debug)]
pub struct LinkSettings<'a> {
    pub server: SocketAddr,
    pub transport: ClientTransport,
    pub security: Option<&'a Security>,
    pub patience: Duration,
    /// True to close connections with a reset, which leaves no port in TIME_WAIT.
    pub abortive: bool,
}

/// Connections by index, which is also their poller token.
pub struct ServerLinks {
    server: SocketAddr,
    /// Server and certificate name of each redirected link.
    elsewhere: HashMap<usize, (SocketAddr, Option<ServerName<'static>>)>,
    kind: LinkKind,
    links: Vec<ClientLink>,
    dirty: Vec<usize>,
    queued: usize,
    dropped: u64,
    abortive: bool,
    patience: Duration,
    scratch: Vec<u8>,
    pub full_handshakes: u64,
    pub resumed_handshakes: u64,
    pub broken: Option<Broken>,
}

enum LinkKind {
    Tcp,
    Tls(Security),
    Dtls(Box<dtls::DtlsSettings>),
}

#[derive(Default)]
struct ClientLink {
    channel: Option<LinkChannel>,
    since: Option<Instant>,
    state: LinkState,
    framing: Framing,
    out: Vec<u8>,
    /// Ends of the messages in `out`, for DTLS, which sends messages one by one.
    ends: Vec<usize>,
    left: usize,
    /// Number of bytes that TLS has encrypted but the kernel has not accepted yet.
    records: usize,
    partial: Vec<u8>,
    watched_for_writing: bool,
    dirty: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum LinkState {
    #[default]
    Idle,
    Connecting,
    Handshaking,
    Open,
    Broken,
}

enum LinkChannel {
    Tcp(TcpStream),
    Tls(TcpStream, Box<ClientConnection>),
    Dtls(UdpSocket, Box<dtls::ClientAssociation>),
}

impl AsFd for LinkChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) | Self::Tls(stream, _) => stream.as_fd(),
            Self::Dtls(socket, _) => socket.as_fd(),
        }
    }
}

impl ServerLinks {
    pub fn new(settings: &LinkSettings<'_>, count: usize) -> Result<Self, InvalidSetting> {
        let kind = match (settings.transport, settings.security) {
            (ClientTransport::Tls, Some(security)) => LinkKind::Tls(security.clone()),
            (ClientTransport::Dtls, Some(security)) => {
                LinkKind::Dtls(Box::new(dtls::DtlsSettings::new(security.clone(), settings.patience)?))
            }
            _ => LinkKind::Tcp,
        };
        Ok(Self {
            server: settings.server,
            elsewhere: HashMap::new(),
            kind,
            links: (0..count).map(|_| ClientLink::default()).collect(),
            dirty: Vec::new(),
            queued: 0,
            dropped: 0,
            abortive: settings.abortive,
            // Shorter than any response timeout, because the error of a link is more specific than that of a timed-out request.
            patience: settings.patience.mul_f64(0.9),
            scratch: vec![0; SCRATCH],
            full_handshakes: 0,
            resumed_handshakes: 0,
            broken: None,
        })
    }

    /// Sets server and certificate name for the next time this link is opened.
    pub fn redirect(
        &mut self,
        index: usize,
        server: SocketAddr,
        name: Option<&str>,
    ) -> Result<(), InvalidDomain> {
        let secure = !matches!(self.kind, LinkKind::Tcp);
        let name = name.filter(|_| secure).map(|name| ServerName::try_from(name.to_owned())).transpose();
        self.elsewhere.insert(index, (server, name.map_err(|_| InvalidDomain)?));
        Ok(())
    }

    pub fn restore_server(&mut self, index: usize) {
        self.elsewhere.remove(&index);
    }

    /// Returns true if the link has failed; it is not opened again.
    pub fn is_broken(&self, index: usize) -> bool {
        self.links[index].state == LinkState::Broken
    }

    pub fn has_room(&self, index: usize) -> bool {
        let link = &self.links[index];
        link.state != LinkState::Broken && link.waiting() < MAX_WAITING
    }

    /// Queues a message of `len` bytes, written by `fill`.
    pub fn push_with(&mut self, index: usize, len: usize, fill: impl FnOnce(&mut [u8])) {
        self.queued += 1;
        if !self.has_room(index) {
            self.dropped += 1;
            return;
        }
        let link = &mut self.links[index];
        let start = link.out.len();
        link.out.resize(start + len, 0);
        fill(&mut link.out[start..]);
        if matches!(self.kind, LinkKind::Dtls(_)) {
            link.ends.push(start + len);
        }
        if !std::mem::replace(&mut link.dirty, true) {
            self.dirty.push(index);
        }
    }

    pub fn queued(&self) -> usize {
        self.queued
    }

    pub fn flush(&mut self, poller: &Poller, errors: &mut ErrorCounts) -> u64 {
        self.queued = 0;
        let mut dirty = std::mem::take(&mut self.dirty);
        for index in dirty.drain(..) {
            self.links[index].dirty = false;
            let sent = match self.links[index].state {
                LinkState::Idle => self.open(index, poller),
                LinkState::Open => self.send(index, poller),
                LinkState::Connecting | LinkState::Handshaking | LinkState::Broken => Ok(()),
            };
            if let Err(what) = sent {
                self.fail(index, what, errors);
            }
        }
        self.dirty = dirty;
        let dropped = std::mem::take(&mut self.dropped);
        if dropped > 0 {
            *errors.entry("send_would_block").or_default() += dropped;
        }
        dropped
    }

    pub fn close(&mut self, index: usize) {
        let link = &mut self.links[index];
        let dirty = link.dirty;
        let old = std::mem::replace(link, ClientLink { dirty, ..ClientLink::default() });
        match old.channel {
            Some(LinkChannel::Dtls(socket, mut association)) => {
                association.close();
                // Sending the close_notify is best effort.
                let _ = association.drain(|packet| _ = socket.send(packet), |_| {});
            }
            Some(LinkChannel::Tcp(stream) | LinkChannel::Tls(stream, _)) if self.abortive => {
                let socket = Socket::from(stream);
                // If this fails, the connection is closed normally.
                let _ = socket.set_linger(Some(Duration::ZERO));
            }
            _ => {}
        }
    }

    pub fn close_from(&mut self, first: usize) {
        (first..self.links.len()).for_each(|index| self.close(index));
    }

    /// Runs the DTLS timers, and fails links that have not opened in time.
    pub fn sweep(&mut self, errors: &mut ErrorCounts) {
        self.give_up(errors);
        if !matches!(self.kind, LinkKind::Dtls(_)) {
            return;
        }
        let now = Instant::now();
        for index in 0..self.links.len() {
            let Some(LinkChannel::Dtls(socket, association)) = &mut self.links[index].channel else {
                continue;
            };
            if association.timeout().is_none_or(|at| at > now) {
                continue;
            }
            let woken = association
                .handle_timeout(now)
                .and_then(|()| association.drain(|packet| _ = socket.send(packet), |_| {}));
            if let Err(what) = woken {
                self.fail(index, what, errors);
            }
        }
    }

    /// Handles a poll event. `each` gets each message and returns the framing of the bytes that follow.
    pub fn serve(
        &mut self,
        event: Event,
        poller: &Poller,
        errors: &mut ErrorCounts,
        each: &mut dyn FnMut(&[u8]) -> Option<Framing>,
    ) {
        let Some(index) = usize::try_from(event.token).ok().filter(|index| *index < self.links.len()) else {
            return;
        };
        let mut served = Ok(());
        if self.links[index].state == LinkState::Connecting && (event.writable || event.error) {
            served = self.connected(index, poller);
        }
        if served.is_ok() && (event.readable || event.error || event.closed) {
            served = self.receive(index, poller, each);
        }
        if served.is_ok() && event.writable && self.links[index].state != LinkState::Connecting {
            served = self.send(index, poller);
        }
        if let Err(what) = served {
            self.fail(index, what, errors);
        }
    }

    fn give_up(&mut self, errors: &mut ErrorCounts) {
        let now = Instant::now();
        for index in 0..self.links.len() {
            let link = &self.links[index];
            if let Some(what) = link.silence().filter(|_| link.is_overdue(now, self.patience)) {
                self.fail(index, what.to_owned(), errors);
            }
        }
    }

    fn open(&mut self, index: usize, poller: &Poller) -> Result<(), String> {
        let now = Instant::now();
        let link = &mut self.links[index];
        let (server, name) = match self.elsewhere.get(&index) {
            Some((server, name)) => (*server, name.as_ref()),
            None => (self.server, None),
        };
        let channel = match &self.kind {
            LinkKind::Tcp => LinkChannel::Tcp(connect(server).map_err(|error| refusal(&error))?),
            LinkKind::Tls(security) => {
                let stream = connect(server).map_err(|error| refusal(&error))?;
                let name = name.unwrap_or(&security.name).clone();
                let mut tls = ClientConnection::new(security.config.clone(), name)
                    .map_err(|error| error.to_string())?;
                // The queue is limited by `waiting`, because the limit of rustls would split a burst.
                tls.set_buffer_limit(None);
                LinkChannel::Tls(stream, Box::new(tls))
            }
            LinkKind::Dtls(settings) => {
                let socket = connect_udp(server).map_err(|error| refusal(&error))?;
                let mut association = dtls::ClientAssociation::new(settings, name, now)?;
                association.drain(|packet| _ = socket.send(packet), |_| {})?;
                LinkChannel::Dtls(socket, Box::new(association))
            }
        };
        let dtls = matches!(channel, LinkChannel::Dtls(..));
        let interest = Interest::Level { read: true, write: !dtls };
        let watched = poller.add_with(&channel, index as u64, interest);
        watched.map_err(|error| format!("cannot be watched: {error}"))?;
        link.state = if dtls { LinkState::Handshaking } else { LinkState::Connecting };
        link.watched_for_writing = !dtls;
        link.channel = Some(channel);
        link.since = Some(now);
        Ok(())
    }

    fn connected(&mut self, index: usize, poller: &Poller) -> Result<(), String> {
        let link = &mut self.links[index];
        let stream = match &link.channel {
            Some(LinkChannel::Tcp(stream) | LinkChannel::Tls(stream, _)) => stream,
            _ => return Ok(()),
        };
        match stream.take_error() {
            Ok(None) => {}
            Ok(Some(error)) | Err(error) => return Err(refusal(&error)),
        }
        link.state = if matches!(link.channel, Some(LinkChannel::Tls(..))) {
            LinkState::Handshaking
        } else {
            LinkState::Open
        };
        self.send(index, poller)
    }

    fn send(&mut self, index: usize, poller: &Poller) -> Result<(), String> {
        let link = &mut self.links[index];
        let blocked = match &mut link.channel {
            None => return Ok(()),
            Some(LinkChannel::Tcp(stream)) => loop {
                if link.left == link.out.len() {
                    link.out.clear();
                    link.left = 0;
                    break false;
                }
                match stream.write(&link.out[link.left..]) {
                    Ok(written) => link.left += written,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break true,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(refusal(&error)),
                }
            },
            Some(LinkChannel::Tls(stream, tls)) => {
                if link.state == LinkState::Open && !link.out.is_empty() {
                    tls.writer().write_all(&link.out).map_err(|error| error.to_string())?;
                    link.records += link.out.len();
                    link.out.clear();
                }
                loop {
                    if !tls.wants_write() {
                        link.records = 0;
                        break false;
                    }
                    match tls.write_tls(stream) {
                        Ok(written) => link.records = link.records.saturating_sub(written),
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => break true,
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(error) => return Err(refusal(&error)),
                    }
                }
            }
            Some(LinkChannel::Dtls(socket, association)) => {
                if link.state == LinkState::Open {
                    let mut start = 0;
                    for end in link.ends.drain(..) {
                        association.send(&link.out[start..end])?;
                        start = end;
                        // Messages are flushed one by one, because dimpl would put several records into one
                        // datagram, of which coturn 4.6 reads only the first.
                        let dropped = &mut self.dropped;
                        association
                            .drain(|packet| *dropped += u64::from(socket.send(packet).is_err()), |_| {})?;
                    }
                    link.out.clear();
                }
                false
            }
        };
        if let Some(channel) = &link.channel
            && blocked != link.watched_for_writing
        {
            link.watched_for_writing = blocked;
            poller
                .set(channel, index as u64, Interest::Level { read: true, write: blocked })
                .map_err(|error| format!("cannot be watched: {error}"))?;
        }
        Ok(())
    }

    fn receive(
        &mut self,
        index: usize,
        poller: &Poller,
        each: &mut dyn FnMut(&[u8]) -> Option<Framing>,
    ) -> Result<(), String> {
        let link = &mut self.links[index];
        // Taking the channel out is safe, because `each` has no access to the links.
        let Some(mut channel) = link.channel.take() else { return Ok(()) };
        let scratch = &mut self.scratch;
        let read = match &mut channel {
            LinkChannel::Tcp(stream) => link.read_tcp(stream, scratch, each),
            LinkChannel::Tls(stream, tls) => link.read_tls(stream, tls, scratch, each),
            LinkChannel::Dtls(socket, association) => read_dtls(socket, association, scratch, each),
        };
        let secured = match &channel {
            LinkChannel::Tls(_, tls) if !tls.is_handshaking() => Some(tls.handshake_kind()),
            LinkChannel::Dtls(_, association) if association.is_connected() => Some(None),
            _ => None,
        };
        let wants_write = matches!(&channel, LinkChannel::Tls(_, tls) if tls.wants_write());
        link.channel = Some(channel);
        let read = read?;
        if link.state == LinkState::Handshaking
            && let Some(kind) = secured
        {
            link.state = LinkState::Open;
            match kind {
                Some(HandshakeKind::Resumed) => self.resumed_handshakes += 1,
                _ => self.full_handshakes += 1,
            }
            self.send(index, poller)?;
        } else if wants_write {
            self.send(index, poller)?;
        }
        if read == Read::Ended { Err("closed the connection".to_owned()) } else { Ok(()) }
    }

    fn fail(&mut self, index: usize, what: String, errors: &mut ErrorCounts) {
        let link = &mut self.links[index];
        let during_setup = link.state != LinkState::Open;
        *errors.entry(if during_setup { "connect_failed" } else { "connection_lost" }).or_default() += 1;
        self.close(index);
        self.links[index].state = LinkState::Broken;
        self.broken.get_or_insert(Broken { link: index, during_setup, what });
    }
}

/// Closes DTLS associations, which a server would otherwise keep until their idle timeout.
impl Drop for ServerLinks {
    fn drop(&mut self) {
        if matches!(self.kind, LinkKind::Dtls(_)) {
            self.close_from(0);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Read {
    Going,
    Ended,
}

impl ClientLink {
    fn is_overdue(&self, now: Instant, patience: Duration) -> bool {
        self.since.is_some_and(|since| now.saturating_duration_since(since) > patience)
    }

    /// Verb phrase about a server that did not respond while the link was being opened; `None` for an open link.
    fn silence(&self) -> Option<&'static str> {
        match (self.state, &self.channel) {
            (LinkState::Connecting, _) => Some("does not respond to the TCP handshake"),
            (LinkState::Handshaking, Some(LinkChannel::Dtls(..))) => {
                Some("does not respond to the DTLS handshake")
            }
            (LinkState::Handshaking, _) => {
                Some("accepts the connection but does not respond to the TLS handshake")
            }
            _ => None,
        }
    }

    fn waiting(&self) -> usize {
        self.out.len() - self.left + self.records
    }

    /// Moves the partial message to the start of `scratch`; returns its length.
    fn restore(&mut self, scratch: &mut [u8]) -> usize {
        let kept = self.partial.len();
        scratch[..kept].copy_from_slice(&self.partial);
        self.partial.clear();
        kept
    }

    fn keep(&mut self, bytes: &[u8]) {
        self.partial.clear();
        self.partial.extend_from_slice(bytes);
    }

    fn cut(
        &mut self,
        mut bytes: &[u8],
        each: &mut dyn FnMut(&[u8]) -> Option<Framing>,
    ) -> Result<(), String> {
        loop {
            let length = match self.framing {
                Framing::Fixed(length) => Some(length),
                Framing::Turn => match frame::first(bytes, MAX_MESSAGE_LEN) {
                    Ok(Frame::Message { next, .. }) => Some(next),
                    Ok(Frame::Unfinished { .. }) => None,
                    Err(error) => return Err(format!("sent data that is not STUN: {error}")),
                },
            };
            let Some((message, rest)) = length.and_then(|length| bytes.split_at_checked(length)) else {
                self.keep(bytes);
                return Ok(());
            };
            if let Some(framing) = each(message) {
                self.framing = framing;
            }
            bytes = rest;
        }
    }

    fn read_tcp(
        &mut self,
        stream: &mut TcpStream,
        scratch: &mut [u8],
        each: &mut dyn FnMut(&[u8]) -> Option<Framing>,
    ) -> Result<Read, String> {
        for _ in 0..CALLS {
            let kept = self.restore(scratch);
            match stream.read(&mut scratch[kept..]) {
                Ok(0) => return Ok(Read::Ended),
                Ok(read) => {
                    self.cut(&scratch[..kept + read], each)?;
                    if kept + read < scratch.len() {
                        break;
                    }
                }
                Err(error) => {
                    self.keep(&scratch[..kept]);
                    return quiet(error).map(|()| Read::Going);
                }
            }
        }
        Ok(Read::Going)
    }

    fn read_tls(
        &mut self,
        stream: &mut TcpStream,
        tls: &mut ClientConnection,
        scratch: &mut [u8],
        each: &mut dyn FnMut(&[u8]) -> Option<Framing>,
    ) -> Result<Read, String> {
        // Makes more calls than for TCP, because rustls reads only 4 KiB at a time.
        for _ in 0..CALLS * 8 {
            match tls.read_tls(stream) {
                Ok(0) => return Ok(Read::Ended),
                Ok(_) => {}
                Err(error) => return quiet(error).map(|()| Read::Going),
            }
            if let Err(error) = tls.process_new_packets() {
                let _ = tls.write_tls(stream);
                return Err(explain(&error));
            }
            self.read_plain(tls, scratch, each)?;
        }
        Ok(Read::Going)
    }

    fn read_plain(
        &mut self,
        tls: &mut ClientConnection,
        scratch: &mut [u8],
        each: &mut dyn FnMut(&[u8]) -> Option<Framing>,
    ) -> Result<(), String> {
        loop {
            let kept = self.restore(scratch);
            match tls.reader().read(&mut scratch[kept..]) {
                Ok(0) => return Err("closed the connection".to_owned()),
                Ok(read) => self.cut(&scratch[..kept + read], each)?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.keep(&scratch[..kept]);
                    return Ok(());
                }
                Err(error) => return Err(refusal(&error)),
            }
        }
    }
}

fn read_dtls(
    socket: &UdpSocket,
    association: &mut dtls::ClientAssociation,
    scratch: &mut [u8],
    each: &mut dyn FnMut(&[u8]) -> Option<Framing>,
) -> Result<Read, String> {
    for _ in 0..CALLS * 16 {
        let read = match socket.recv(scratch) {
            Ok(read) => read,
            Err(error) => return quiet(error).map(|()| Read::Going),
        };
        association.handle_datagram(&scratch[..read])?;
        association.drain(
            |packet| _ = socket.send(packet),
            |message| {
                each(message);
            },
        )?;
    }
    Ok(Read::Going)
}
