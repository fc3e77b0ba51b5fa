//! Short connections: each is opened, carries one request and one response, and is closed.

use std::{
    io::{self, Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use socket2::SockRef;
use turnpike_net::{Event, Interest, Poller};

use super::{Close, ConnectLoad, StreamShared, Workload, dial, is_not_now, starts::Starts};
use crate::{
    LoadError,
    clock::nanos,
    greeting::StreamMode,
    pattern,
    run::{ErrorCounts, Heartbeat, RunTallies, ThreadResult},
};

pub(super) const NO_LOCAL_PORT: &str = "no_local_port";

/// Pause of a client whose connection has failed, because its next attempt would probably fail too.
const REST_NS: u64 = 10_000_000;
const GONE_NS: u64 = 1_500_000_000;
const READ: usize = 64 << 10;

pub(super) fn run(shared: &StreamShared<'_>, thread: usize) -> Result<ThreadResult, LoadError> {
    let Workload::Connect(options) = shared.config.workload else {
        return Ok(ThreadResult::default());
    };
    let ConnectLoad { size: request, response, close, .. } = options;
    let (count, first) = shared.share(options.clients, thread);
    let mut poller = Poller::new().map_err(LoadError::system("cannot create an epoll instance"))?;
    // Check first that a reflector responds; otherwise, the run would only measure refusals.
    drop(dial::all(shared, &mut poller, &[StreamMode::Exchange { request, response }])?);
    shared.thread_is_ready();
    let schedule = shared.wait_for_start()?;
    let mut message = shared.config.mode(first).to_bytes().to_vec();
    message.extend_from_slice(pattern::at(0, request));
    let idle = || ConnectSlot {
        stream: None,
        state: SlotState::Connecting,
        due: 0,
        began: 0,
        unsent: 0,
        missing: 0,
    };
    let mut connect = Connect {
        shared,
        thread,
        poller,
        slots: std::iter::repeat_with(idle).take(count).collect(),
        starts: Starts::new(shared, schedule, count, first),
        message,
        response,
        close,
        buffer: vec![0; READ],
        tallies: RunTallies::default(),
        errors: ErrorCounts::new(),
        last_success: schedule.start,
    };
    let cpu = connect.run()?;
    connect.tallies.publish(&shared.slots[thread], 0);
    Ok(ThreadResult { errors: connect.errors, cpu, ..ThreadResult::default() })
}

struct Connect<'a> {
    shared: &'a StreamShared<'a>,
    thread: usize,
    poller: Poller,
    slots: Vec<ConnectSlot>,
    starts: Starts,
    message: Vec<u8>,
    response: usize,
    close: Close,
    buffer: Vec<u8>,
    tallies: RunTallies,
    errors: ErrorCounts,
    last_success: u64,
}

struct ConnectSlot {
    stream: Option<TcpStream>,
    state: SlotState,
    due: u64,
    began: u64,
    unsent: usize,
    missing: usize,
}

impl ConnectSlot {
    fn is_unanswered(&self) -> bool {
        self.stream.is_some() && self.state != SlotState::Closing
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SlotState {
    Connecting,
    Sending,
    Waiting,
    Closing,
}

impl Connect<'_> {
    fn run(&mut self) -> Result<Option<Duration>, LoadError> {
        let mut heartbeat = Heartbeat::new(self.shared, self.thread, self.starts.schedule);
        let mut ready: Vec<Event> = Vec::new();
        loop {
            let mut now = self.shared.clock.ns();
            let under_way = || self.slots.iter().filter(|slot| slot.is_unanswered()).count() as u64;
            if heartbeat.beat(now, &mut self.tallies, &mut self.starts.schedule, under_way)? {
                self.expire(now)?;
            }
            while let Some((index, due)) = self.starts.next(now, &mut self.tallies) {
                self.begin(index, due, now)?;
                now = self.shared.clock.ns();
            }
            if self.starts.is_over(now) {
                break;
            }
            super::wait(&mut self.poller, &mut ready, self.starts.pause(now))?;
            for event in &ready {
                self.serve(*event)?;
            }
        }
        self.starts.end(&mut self.errors);
        let unanswered = self.slots.iter().filter(|slot| slot.is_unanswered()).count() as u64;
        if unanswered > 0 {
            *self.errors.entry("unanswered").or_default() += unanswered;
        }
        Ok(heartbeat.cpu())
    }

    fn begin(&mut self, index: usize, due: u64, now: u64) -> Result<(), LoadError> {
        let tally = self.tallies.of(due >= self.starts.schedule.measure);
        tally.sent += 1;
        tally.sent_bytes += (self.message.len()) as u64;
        let opened = dial::start(self.shared.config.target.server).and_then(|stream| {
            self.poller.add_with(&stream, index as u64, Interest::Level { read: true, write: true })?;
            Ok(stream)
        });
        let slot = &mut self.slots[index];
        slot.stream = None;
        (slot.state, slot.due, slot.began) = (SlotState::Connecting, due, now);
        (slot.unsent, slot.missing) = (self.message.len(), self.response);
        match opened {
            Ok(stream) => {
                slot.stream = Some(stream);
                Ok(())
            }
            Err(error) => self.fail(index, &error),
        }
    }

    fn serve(&mut self, event: Event) -> Result<(), LoadError> {
        let Some(index) = usize::try_from(event.token).ok().filter(|index| *index < self.slots.len()) else {
            return Ok(());
        };
        match self.advance(index, event) {
            Ok(()) => Ok(()),
            Err(error) => self.fail(index, &error),
        }
    }

    fn advance(&mut self, index: usize, event: Event) -> io::Result<()> {
        let slot = &mut self.slots[index];
        let Some(stream) = &mut slot.stream else { return Ok(()) };
        if slot.state == SlotState::Connecting {
            dial::finish(stream)?;
            if !event.writable {
                return Ok(());
            }
            slot.state = SlotState::Sending;
        }
        if slot.state == SlotState::Sending && event.writable {
            match stream.write(&self.message[self.message.len() - slot.unsent..]) {
                Ok(len) => slot.unsent -= len,
                Err(error) if is_not_now(&error) => {}
                Err(error) => return Err(error),
            }
            if slot.unsent == 0 {
                slot.state = SlotState::Waiting;
                self.poller.set(stream, index as u64, Interest::Level { read: true, write: false })?;
            }
        }
        if event.readable || event.error { self.receive(index) } else { Ok(()) }
    }

    fn receive(&mut self, index: usize) -> io::Result<()> {
        let slot = &mut self.slots[index];
        let Some(stream) = &mut slot.stream else { return Ok(()) };
        loop {
            let room = (slot.missing + 1).min(READ);
            match stream.read(&mut self.buffer[..room]) {
                Ok(0) if slot.state == SlotState::Closing => break,
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(len) if len > slot.missing => {
                    return Err(io::Error::other("more bytes than requested"));
                }
                Ok(len) => slot.missing -= len,
                Err(error) if is_not_now(&error) => return Ok(()),
                Err(_) if slot.state == SlotState::Closing => break,
                Err(error) => return Err(error),
            }
            if slot.missing > 0 {
                continue;
            }
            slot.state = SlotState::Closing;
            let (now, due) = (self.shared.clock.ns(), slot.due);
            self.last_success = now;
            let tally = self.tallies.of(due >= self.starts.schedule.measure);
            tally.received += 1;
            tally.received_bytes += self.response as u64;
            tally.record_rtt((now - due) / 1_000);
            match self.close {
                Close::Server => continue,
                Close::Client => {}
                Close::Reset => SockRef::from(&*stream).set_linger(Some(Duration::ZERO))?,
            }
            break;
        }
        slot.stream = None;
        self.starts.free(index, self.shared.clock.ns());
        Ok(())
    }

    /// Counts a failed connection. Fails the run if connections no longer succeed at all.
    fn fail(&mut self, index: usize, error: &io::Error) -> Result<(), LoadError> {
        let what = match error.kind() {
            io::ErrorKind::ConnectionRefused => "refused",
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => "reset",
            io::ErrorKind::UnexpectedEof => "closed",
            io::ErrorKind::TimedOut => "timeout",
            io::ErrorKind::AddrNotAvailable => NO_LOCAL_PORT,
            io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable => "unreachable",
            _ => "failed",
        };
        *self.errors.entry(what).or_default() += 1;
        let now = self.shared.clock.ns();
        self.slots[index].stream = None;
        self.starts.free(index, now + REST_NS);
        let silent = now.saturating_sub(self.last_success);
        if what != NO_LOCAL_PORT && silent > GONE_NS {
            let server = self.shared.config.target.server;
            return Err(LoadError::Gone { server, seconds: silent.div_ceil(1_000_000_000), what });
        }
        Ok(())
    }

    fn expire(&mut self, now: u64) -> Result<(), LoadError> {
        let limit = nanos(self.shared.config.timeout);
        for index in 0..self.slots.len() {
            let slot = &self.slots[index];
            if slot.stream.is_none() || now.saturating_sub(slot.began) <= limit {
                continue;
            }
            if slot.state == SlotState::Closing {
                *self.errors.entry("not_closed").or_default() += 1;
                self.slots[index].stream = None;
                self.starts.free(index, now);
            } else {
                self.fail(index, &io::ErrorKind::TimedOut.into())?;
            }
        }
        Ok(())
    }
}
