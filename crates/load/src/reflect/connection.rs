//! One TCP connection of the reflector: what it was told to do by its first bytes (see [`crate::greeting`]), and how far
//! it has got. Holds counters instead of buffers, but for an echo that its peer does not read.

use std::{
    io::{self, Read as _, Write as _},
    mem::MaybeUninit,
    net::{Shutdown, TcpStream},
    os::fd::{AsFd, BorrowedFd},
    time::Instant,
};

use socket2::SockRef;

use crate::{
    greeting::{self, Beginning, GREETING_LEN, MAX_SIZE, Mode, RECORD_LEN, Record},
    pattern,
};

/// recv(2) on TCP: the kernel counts bytes as read without copying them (tcp(7), since Linux 2.4). The same on every
/// architecture.
pub(crate) const MSG_TRUNC: i32 = 0x20;
/// Bytes of a receive call.
const READ: usize = 256 << 10;
/// Bytes that one connection may move before the others have their turn.
const BUDGET: usize = 1 << 20;

/// What all connections of a worker share.
pub(super) struct Buffers {
    bytes: Vec<u8>,
    discarded: Vec<MaybeUninit<u8>>,
    /// Bytes received and sent by all.
    pub(super) received: u64,
    pub(super) sent: u64,
}

impl Buffers {
    pub(super) fn new() -> Self {
        Self { bytes: vec![0; READ], discarded: vec![MaybeUninit::uninit(); READ], received: 0, sent: 0 }
    }
}

/// What the worker must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Wait,
    /// [`Connection::tell`] is wanted, and was not before.
    News,
    Close,
}

pub(super) struct Connection {
    stream: TcpStream,
    role: Role,
    pub(super) watched_for_writing: bool,
}

enum Role {
    Greeting {
        bytes: [u8; GREETING_LEN],
        len: usize,
    },
    Echo {
        pending: Vec<u8>,
        written: usize,
    },
    Sink(Sink),
    Source(Source),
    Exchange(Exchange),
    /// All is said; the peer closes.
    Lingering,
}

struct Sink {
    verify: bool,
    discard: bool,
    record: Record,
    since: Instant,
    /// Whether the worker knows that there is something to tell.
    news: bool,
    told: u64,
    /// A record that the kernel took only a part of.
    rest: Rest,
}

struct Source {
    block: usize,
    /// Commands received: the first starts, the second stops.
    commands: usize,
    total: u64,
    since: Instant,
    rest: Rest,
}

struct Exchange {
    request: usize,
    response: usize,
    /// Bytes of the request that are still to come.
    missing: usize,
    /// Bytes of responses that are still to be sent.
    owed: u64,
    once: Option<Once>,
}

/// Who closes after one exchange.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Once {
    Server,
    Client,
}

/// A record on its way.
struct Rest {
    bytes: [u8; RECORD_LEN],
    written: usize,
}

impl Rest {
    const NONE: Self = Self { bytes: [0; RECORD_LEN], written: RECORD_LEN };

    fn of(record: Record) -> Self {
        Self { bytes: record.to_bytes(), written: 0 }
    }

    /// True once all is written.
    fn write(&mut self, stream: &mut TcpStream, buffers: &mut Buffers) -> io::Result<bool> {
        if self.written < RECORD_LEN {
            self.written += write(stream, &self.bytes[self.written..], buffers)?;
        }
        Ok(self.written == RECORD_LEN)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Connection {
    pub(super) fn new(stream: TcpStream) -> Self {
        let role = Role::Greeting { bytes: [0; GREETING_LEN], len: 0 };
        Self { stream, role, watched_for_writing: false }
    }

    /// Whether it must write before it reads on.
    pub(super) fn blocked(&self) -> bool {
        match &self.role {
            Role::Echo { pending, written } => *written < pending.len(),
            Role::Exchange(exchange) => exchange.owed > 0,
            Role::Greeting { .. } | Role::Sink(_) | Role::Source(_) | Role::Lingering => false,
        }
    }

    /// Whether it writes as long as there is room.
    pub(super) fn streams(&self) -> bool {
        matches!(&self.role, Role::Source(source) if source.commands > 0)
    }

    /// Reads and writes what can be.
    pub(super) fn advance(
        &mut self,
        readable: bool,
        buffers: &mut Buffers,
        now: Instant,
    ) -> io::Result<Next> {
        if self.write(buffers)? == Next::Close {
            return Ok(Next::Close);
        }
        let mut budget = if readable { BUDGET } else { 0 };
        while budget > 0 && !self.blocked() {
            let (len, asked) = match self.read(buffers) {
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if len == 0 {
                return Ok(Next::Close);
            }
            buffers.received += len as u64;
            budget = budget.saturating_sub(len);
            if self.take(len, buffers, now)? == Next::Close || self.write(buffers)? == Next::Close {
                return Ok(Next::Close);
            }
            // A short read has emptied the socket; the poller tells when there is more.
            if len < asked {
                break;
            }
        }
        match &mut self.role {
            Role::Sink(sink) if !sink.news && sink.record.total != sink.told => {
                sink.news = true;
                Ok(Next::News)
            }
            _ => Ok(Next::Wait),
        }
    }

    /// A sink's record. False when there is nothing more to tell, or nobody to tell it to.
    pub(super) fn tell(&mut self, buffers: &mut Buffers, now: Instant) -> bool {
        let Role::Sink(sink) = &mut self.role else { return false };
        // An error shows at the next read as well.
        if matches!(sink.rest.write(&mut self.stream, buffers), Ok(true)) && sink.record.total != sink.told {
            sink.record.elapsed = now.saturating_duration_since(sink.since);
            sink.rest = Rest::of(sink.record);
            sink.told = sink.record.total;
            let _ = sink.rest.write(&mut self.stream, buffers);
        }
        sink.news = sink.rest.written < RECORD_LEN;
        sink.news
    }

    /// One receive call: bytes received, and bytes that there was room for.
    fn read(&mut self, buffers: &mut Buffers) -> io::Result<(usize, usize)> {
        if let Role::Sink(Sink { discard: true, .. }) = self.role {
            let len = SockRef::from(&self.stream).recv_with_flags(&mut buffers.discarded, MSG_TRUNC)?;
            return Ok((len, READ));
        }
        // What comes behind a greeting is small, or its role reads it: nothing of it may be discarded or doubled.
        let room = if let Role::Greeting { .. } = self.role { MAX_GREETING_READ } else { READ };
        Ok((self.stream.read(&mut buffers.bytes[..room])?, room))
    }

    /// Takes the first `len` bytes of the buffer.
    fn take(&mut self, len: usize, buffers: &mut Buffers, now: Instant) -> io::Result<Next> {
        let data = &buffers.bytes[..len];
        match &mut self.role {
            Role::Greeting { .. } => return self.choose_role(len, buffers, now),
            Role::Echo { pending, written } => {
                // Only called when all of the last is written.
                pending.clear();
                *written = 0;
                pending.extend_from_slice(data);
            }
            Role::Sink(sink) => {
                if sink.verify && !sink.discard {
                    sink.record.wrong += pattern::wrong(sink.record.total, data);
                }
                sink.record.total += len as u64;
            }
            Role::Source(source) => source.commands = source.commands.saturating_add(len),
            Role::Exchange(exchange) => exchange.take(len),
            Role::Lingering => {}
        }
        Ok(Next::Wait)
    }

    fn choose_role(&mut self, len: usize, buffers: &mut Buffers, now: Instant) -> io::Result<Next> {
        let Role::Greeting { bytes, len: had } = &mut self.role else { return Ok(Next::Wait) };
        let part = len.min(GREETING_LEN - *had);
        bytes[*had..*had + part].copy_from_slice(&buffers.bytes[..part]);
        *had += part;
        match Beginning::read(&bytes[..*had]) {
            Beginning::Incomplete => return Ok(Next::Wait),
            Beginning::Unknown => {
                // It is told why, if it listens.
                let _ = write(&mut self.stream, &greeting::ack(false), buffers);
                return Ok(Next::Close);
            }
            Beginning::Foreign => {
                let mut pending = bytes[..*had].to_vec();
                pending.extend_from_slice(&buffers.bytes[part..len]);
                self.role = Role::Echo { pending, written: 0 };
                return Ok(Next::Wait);
            }
            Beginning::Greeting(mode) => {
                // An empty send buffer takes a few bytes at once.
                if !matches!(mode, Mode::Connect { .. }) {
                    let ack = greeting::ack(true);
                    if write(&mut self.stream, &ack, buffers)? < ack.len() {
                        return Ok(Next::Close);
                    }
                }
                self.role = Role::of(mode, now);
            }
        }
        if len > part {
            buffers.bytes.copy_within(part..len, 0);
            return self.take(len - part, buffers, now);
        }
        Ok(Next::Wait)
    }

    /// Writes what is due.
    fn write(&mut self, buffers: &mut Buffers) -> io::Result<Next> {
        match &mut self.role {
            Role::Echo { pending, written } => {
                while *written < pending.len() {
                    match write(&mut self.stream, &pending[*written..], buffers)? {
                        0 => return Ok(Next::Wait),
                        len => *written += len,
                    }
                }
                pending.clear();
                *written = 0;
            }
            Role::Source(source) => {
                if source.write(&mut self.stream, buffers)? {
                    self.stream.shutdown(Shutdown::Write)?;
                    self.role = Role::Lingering;
                }
            }
            Role::Exchange(_) => return self.answer(buffers),
            Role::Greeting { .. } | Role::Sink(_) | Role::Lingering => {}
        }
        Ok(Next::Wait)
    }

    fn answer(&mut self, buffers: &mut Buffers) -> io::Result<Next> {
        let Role::Exchange(exchange) = &mut self.role else { return Ok(Next::Wait) };
        if exchange.owed == 0 {
            return Ok(Next::Wait);
        }
        while exchange.owed > 0 {
            let len = usize::try_from(exchange.owed).unwrap_or(MAX_SIZE).min(MAX_SIZE);
            match write(&mut self.stream, pattern::at(0, len), buffers)? {
                0 => return Ok(Next::Wait),
                len => exchange.owed -= len as u64,
            }
        }
        match exchange.once {
            None => Ok(Next::Wait),
            Some(Once::Server) => Ok(Next::Close),
            Some(Once::Client) => {
                self.role = Role::Lingering;
                Ok(Next::Wait)
            }
        }
    }
}

/// A greeting, and a small request behind it.
const MAX_GREETING_READ: usize = 4 << 10;

impl Role {
    fn of(mode: Mode, now: Instant) -> Self {
        let exchange = |request, response, once| {
            Self::Exchange(Exchange { request, response, missing: request, owed: 0, once })
        };
        match mode {
            Mode::Sink { verify, discard } => Self::Sink(Sink {
                verify,
                discard,
                record: Record::default(),
                since: now,
                news: false,
                told: 0,
                rest: Rest::NONE,
            }),
            Mode::Source { block } => {
                Self::Source(Source { block, commands: 0, total: 0, since: now, rest: Rest::NONE })
            }
            Mode::Exchange { request, response } => exchange(request, response, None),
            Mode::Connect { request, response, client_closes } => {
                let once = if client_closes { Once::Client } else { Once::Server };
                exchange(request, response, Some(once))
            }
        }
    }
}

impl Exchange {
    fn take(&mut self, len: usize) {
        let mut len = len;
        while len >= self.missing {
            len -= self.missing;
            self.missing = self.request;
            self.owed = self.owed.saturating_add(self.response as u64);
        }
        self.missing -= len;
    }
}

impl Source {
    /// True when it has stopped and said how much it was.
    fn write(&mut self, stream: &mut TcpStream, buffers: &mut Buffers) -> io::Result<bool> {
        if self.commands == 0 {
            return Ok(false);
        }
        let mut budget = BUDGET;
        while self.commands == 1 && budget > 0 {
            let written = write(stream, pattern::at(self.total, self.block), buffers)?;
            self.total += written as u64;
            budget = budget.saturating_sub(written);
            if written < self.block {
                break;
            }
        }
        if self.commands == 1 {
            return Ok(false);
        }
        if self.commands != STOPPED {
            self.commands = STOPPED;
            let record = Record { total: self.total, elapsed: self.since.elapsed(), wrong: 0 };
            self.rest = Rest::of(record);
        }
        self.rest.write(stream, buffers)
    }
}

/// More commands than are counted.
const STOPPED: usize = usize::MAX;

/// Bytes written, 0 when there is no room.
fn write(stream: &mut TcpStream, bytes: &[u8], buffers: &mut Buffers) -> io::Result<usize> {
    match stream.write(bytes) {
        Ok(len) => {
            buffers.sent += len as u64;
            Ok(len)
        }
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(error),
    }
}
