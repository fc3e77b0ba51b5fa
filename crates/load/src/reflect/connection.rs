//! State machine of one TCP connection to the reflector; its first bytes select the workload (see
//! [`crate::greeting`]). A connection keeps a buffer only if it echoes data to a peer that does not read.

use std::{
    io::{self, Read as _, Write as _},
    mem::MaybeUninit,
    net::{Shutdown, TcpStream},
    os::fd::{AsFd, BorrowedFd},
    time::Instant,
};

use socket2::SockRef;

use crate::{
    greeting::{self, GREETING_LEN, GreetingBytes, MAX_SIZE, RECORD_LEN, StreamMode, StreamRecord},
    pattern,
};

/// Flag for recv(2) that discards the bytes read instead of copying them (tcp(7), since Linux 2.4). The value is the same on all
/// architectures.
pub(crate) const MSG_TRUNC: i32 = 0x20;
const READ: usize = 256 << 10;
const BUDGET: usize = 1 << 20;

pub(super) struct Buffers {
    bytes: Vec<u8>,
    discarded: Vec<MaybeUninit<u8>>,
    pub(super) received: u64,
    pub(super) sent: u64,
}

impl Buffers {
    pub(super) fn new() -> Self {
        Self { bytes: vec![0; READ], discarded: vec![MaybeUninit::uninit(); READ], received: 0, sent: 0 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextStep {
    Wait,
    /// There is something to report, so the worker must call [`ReflectedConnection::tell`]. Not returned again before that call.
    News,
    Close,
}

pub(super) struct ReflectedConnection {
    stream: TcpStream,
    role: ReflectRole,
    pub(super) watched_for_writing: bool,
}

enum ReflectRole {
    Greeting { bytes: [u8; GREETING_LEN], len: usize },
    Echo { pending: Vec<u8>, written: usize },
    Sink(SinkState),
    Source(SourceState),
    Exchange(ExchangeState),
    Lingering,
}

struct SinkState {
    verify: bool,
    discard: bool,
    record: StreamRecord,
    since: Instant,
    /// True if the worker has been asked to call `tell` and has not called it yet.
    news: bool,
    told: u64,
    rest: Rest,
}

struct SourceState {
    block: usize,
    /// Number of commands received: the first starts sending, the second stops it.
    commands: usize,
    total: u64,
    since: Instant,
    rest: Rest,
}

struct ExchangeState {
    request: usize,
    response: usize,
    missing: usize,
    owed: u64,
    once: Option<ConnectState>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ConnectState {
    Server,
    Client,
}

struct Rest {
    bytes: [u8; RECORD_LEN],
    written: usize,
}

impl Rest {
    const NONE: Self = Self { bytes: [0; RECORD_LEN], written: RECORD_LEN };

    fn of(record: StreamRecord) -> Self {
        Self { bytes: record.to_bytes(), written: 0 }
    }

    fn write(&mut self, stream: &mut TcpStream, buffers: &mut Buffers) -> io::Result<bool> {
        if self.written < RECORD_LEN {
            self.written += write(stream, &self.bytes[self.written..], buffers)?;
        }
        Ok(self.written == RECORD_LEN)
    }
}

impl AsFd for ReflectedConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl ReflectedConnection {
    pub(super) fn new(stream: TcpStream) -> Self {
        let role = ReflectRole::Greeting { bytes: [0; GREETING_LEN], len: 0 };
        Self { stream, role, watched_for_writing: false }
    }

    pub(super) fn blocked(&self) -> bool {
        match &self.role {
            ReflectRole::Echo { pending, written } => *written < pending.len(),
            ReflectRole::Exchange(exchange) => exchange.owed > 0,
            ReflectRole::Greeting { .. }
            | ReflectRole::Sink(_)
            | ReflectRole::Source(_)
            | ReflectRole::Lingering => false,
        }
    }

    pub(super) fn streams(&self) -> bool {
        matches!(&self.role, ReflectRole::Source(source) if source.commands > 0)
    }

    pub(super) fn advance(
        &mut self,
        readable: bool,
        buffers: &mut Buffers,
        now: Instant,
    ) -> io::Result<NextStep> {
        if self.write(buffers)? == NextStep::Close {
            return Ok(NextStep::Close);
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
                return Ok(NextStep::Close);
            }
            buffers.received += len as u64;
            budget = budget.saturating_sub(len);
            if self.take(len, buffers, now)? == NextStep::Close || self.write(buffers)? == NextStep::Close {
                return Ok(NextStep::Close);
            }
            // A short read means that the socket is empty, so wait until the poller reports new data.
            if len < asked {
                break;
            }
        }
        match &mut self.role {
            ReflectRole::Sink(sink) if !sink.news && sink.record.total != sink.told => {
                sink.news = true;
                Ok(NextStep::News)
            }
            _ => Ok(NextStep::Wait),
        }
    }

    /// Sends a sink's record. Returns false if there is nothing left to send or the peer has closed the
    /// connection.
    pub(super) fn tell(&mut self, buffers: &mut Buffers, now: Instant) -> bool {
        let ReflectRole::Sink(sink) = &mut self.role else { return false };
        if matches!(sink.rest.write(&mut self.stream, buffers), Ok(true)) && sink.record.total != sink.told {
            sink.record.elapsed = now.saturating_duration_since(sink.since);
            sink.rest = Rest::of(sink.record);
            sink.told = sink.record.total;
            let _ = sink.rest.write(&mut self.stream, buffers);
        }
        sink.news = sink.rest.written < RECORD_LEN;
        sink.news
    }

    fn read(&mut self, buffers: &mut Buffers) -> io::Result<(usize, usize)> {
        if let ReflectRole::Sink(SinkState { discard: true, .. }) = self.role {
            let len = SockRef::from(&self.stream).recv_with_flags(&mut buffers.discarded, MSG_TRUNC)?;
            return Ok((len, READ));
        }
        let room = if let ReflectRole::Greeting { .. } = self.role { MAX_GREETING_READ } else { READ };
        Ok((self.stream.read(&mut buffers.bytes[..room])?, room))
    }

    fn take(&mut self, len: usize, buffers: &mut Buffers, now: Instant) -> io::Result<NextStep> {
        let data = &buffers.bytes[..len];
        match &mut self.role {
            ReflectRole::Greeting { .. } => return self.choose_role(len, buffers, now),
            ReflectRole::Echo { pending, written } => {
                pending.clear();
                *written = 0;
                pending.extend_from_slice(data);
            }
            ReflectRole::Sink(sink) => {
                if sink.verify && !sink.discard {
                    sink.record.wrong += pattern::wrong(sink.record.total, data);
                }
                sink.record.total += len as u64;
            }
            ReflectRole::Source(source) => source.commands = source.commands.saturating_add(len),
            ReflectRole::Exchange(exchange) => exchange.take(len),
            ReflectRole::Lingering => {}
        }
        Ok(NextStep::Wait)
    }

    fn choose_role(&mut self, len: usize, buffers: &mut Buffers, now: Instant) -> io::Result<NextStep> {
        let ReflectRole::Greeting { bytes, len: had } = &mut self.role else { return Ok(NextStep::Wait) };
        let part = len.min(GREETING_LEN - *had);
        bytes[*had..*had + part].copy_from_slice(&buffers.bytes[..part]);
        *had += part;
        match GreetingBytes::read(&bytes[..*had]) {
            GreetingBytes::Incomplete => return Ok(NextStep::Wait),
            GreetingBytes::Unknown => {
                let _ = write(&mut self.stream, &greeting::ack(false), buffers);
                return Ok(NextStep::Close);
            }
            GreetingBytes::Foreign => {
                let mut pending = bytes[..*had].to_vec();
                pending.extend_from_slice(&buffers.bytes[part..len]);
                self.role = ReflectRole::Echo { pending, written: 0 };
                return Ok(NextStep::Wait);
            }
            GreetingBytes::Greeting(mode) => {
                // An empty send buffer always accepts a few bytes.
                if !matches!(mode, StreamMode::Connect { .. }) {
                    let ack = greeting::ack(true);
                    if write(&mut self.stream, &ack, buffers)? < ack.len() {
                        return Ok(NextStep::Close);
                    }
                }
                self.role = ReflectRole::of(mode, now);
            }
        }
        if len > part {
            buffers.bytes.copy_within(part..len, 0);
            return self.take(len - part, buffers, now);
        }
        Ok(NextStep::Wait)
    }

    fn write(&mut self, buffers: &mut Buffers) -> io::Result<NextStep> {
        match &mut self.role {
            ReflectRole::Echo { pending, written } => {
                while *written < pending.len() {
                    match write(&mut self.stream, &pending[*written..], buffers)? {
                        0 => return Ok(NextStep::Wait),
                        len => *written += len,
                    }
                }
                pending.clear();
                *written = 0;
            }
            ReflectRole::Source(source) => {
                if source.write(&mut self.stream, buffers)? {
                    self.stream.shutdown(Shutdown::Write)?;
                    self.role = ReflectRole::Lingering;
                }
            }
            ReflectRole::Exchange(_) => return self.answer(buffers),
            ReflectRole::Greeting { .. } | ReflectRole::Sink(_) | ReflectRole::Lingering => {}
        }
        Ok(NextStep::Wait)
    }

    fn answer(&mut self, buffers: &mut Buffers) -> io::Result<NextStep> {
        let ReflectRole::Exchange(exchange) = &mut self.role else { return Ok(NextStep::Wait) };
        if exchange.owed == 0 {
            return Ok(NextStep::Wait);
        }
        while exchange.owed > 0 {
            let len = usize::try_from(exchange.owed).unwrap_or(MAX_SIZE).min(MAX_SIZE);
            match write(&mut self.stream, pattern::at(0, len), buffers)? {
                0 => return Ok(NextStep::Wait),
                len => exchange.owed -= len as u64,
            }
        }
        match exchange.once {
            None => Ok(NextStep::Wait),
            Some(ConnectState::Server) => Ok(NextStep::Close),
            Some(ConnectState::Client) => {
                self.role = ReflectRole::Lingering;
                Ok(NextStep::Wait)
            }
        }
    }
}

/// Bytes per read until the greeting is complete: enough for the greeting and a small request that follows it.
const MAX_GREETING_READ: usize = 4 << 10;

impl ReflectRole {
    fn of(mode: StreamMode, now: Instant) -> Self {
        let exchange = |request, response, once| {
            Self::Exchange(ExchangeState { request, response, missing: request, owed: 0, once })
        };
        match mode {
            StreamMode::Sink { verify, discard } => Self::Sink(SinkState {
                verify,
                discard,
                record: StreamRecord::default(),
                since: now,
                news: false,
                told: 0,
                rest: Rest::NONE,
            }),
            StreamMode::Source { block } => {
                Self::Source(SourceState { block, commands: 0, total: 0, since: now, rest: Rest::NONE })
            }
            StreamMode::Exchange { request, response } => exchange(request, response, None),
            StreamMode::Connect { request, response, client_closes } => {
                let once = if client_closes { ConnectState::Client } else { ConnectState::Server };
                exchange(request, response, Some(once))
            }
        }
    }
}

impl ExchangeState {
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

impl SourceState {
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
            let record = StreamRecord { total: self.total, elapsed: self.since.elapsed(), wrong: 0 };
            self.rest = Rest::of(record);
        }
        self.rest.write(stream, buffers)
    }
}

const STOPPED: usize = usize::MAX;

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
