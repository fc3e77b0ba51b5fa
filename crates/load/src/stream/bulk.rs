//! Bulk transfer: streams send as fast as they can for the duration of the run. Afterwards, every byte is accounted for.

use std::{
    collections::BTreeMap,
    io::{self, Read as _, Write as _},
    mem::MaybeUninit,
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use socket2::SockRef;
use turnpike_net::{Event, Interest, Poller};

use super::{LONGEST_SLEEP_NS, StreamLoadConfig, StreamShared, Workload, dial, is_not_now};
use crate::{
    LoadError,
    clock::nanos,
    greeting::{RECORD_LEN, StreamMode, StreamRecord},
    pattern,
    reflect::MSG_TRUNC,
    run::{ErrorCounts, Heartbeat, RunTallies, RunTimes, ThreadResult},
};

pub(super) const TO_SERVER_BPS: &str = "to_server_bps";
pub(super) const TO_CLIENT_BPS: &str = "to_client_bps";

const READ: usize = 256 << 10;
const BUDGET: usize = 1 << 20;

pub(super) fn run(shared: &StreamShared<'_>, thread: usize) -> Result<ThreadResult, LoadError> {
    let (count, first) = shared.share(shared.config.connections(), thread);
    let modes: Vec<StreamMode> = (first..first + count).map(|number| shared.config.mode(number)).collect();
    let mut poller = Poller::new().map_err(LoadError::system("cannot create an epoll instance"))?;
    let connections = dial::all(shared, &mut poller, &modes)?;
    shared.thread_is_ready();
    let schedule = shared.wait_for_start()?;
    let mut bulk = Bulk::new(shared.config, schedule, poller);
    for (index, (connection, mode)) in connections.into_iter().zip(modes).enumerate() {
        bulk.streams.push(BulkStream::new(connection, mode, first + index));
    }
    bulk.run(shared, thread)
}

struct Bulk<'a> {
    config: &'a StreamLoadConfig,
    schedule: RunTimes,
    poller: Poller,
    streams: Vec<BulkStream>,
    buffers: ReceiveBuffers,
    tallies: RunTallies,
}

struct ReceiveBuffers {
    bytes: Vec<u8>,
    discarded: Vec<MaybeUninit<u8>>,
    verify: bool,
    discard: bool,
}

impl<'a> Bulk<'a> {
    fn new(config: &'a StreamLoadConfig, schedule: RunTimes, poller: Poller) -> Self {
        let (verify, discard) = match config.workload {
            Workload::Bulk(bulk) => (bulk.verify, bulk.skip_rx_copy),
            Workload::Exchange(_) | Workload::Connect(_) => (false, false),
        };
        let (bytes, discarded) = (vec![0; READ], vec![MaybeUninit::uninit(); READ]);
        let buffers = ReceiveBuffers { bytes, discarded, verify, discard };
        Self { config, schedule, poller, streams: Vec::new(), buffers, tallies: RunTallies::default() }
    }

    fn run(&mut self, shared: &StreamShared<'_>, thread: usize) -> Result<ThreadResult, LoadError> {
        let server = self.config.target.server;
        let now = shared.clock.ns();
        std::thread::sleep(Duration::from_nanos(self.schedule.start.saturating_sub(now)));
        for (index, stream) in self.streams.iter_mut().enumerate() {
            stream.start(&self.poller, index).map_err(|error| stream.lost(server, &error))?;
            stream.last_ns = shared.clock.ns();
        }
        let (mut heartbeat, mut stopped) = (Heartbeat::new(shared, thread, self.schedule), false);
        let mut ready: Vec<Event> = Vec::new();
        while !self.streams.iter().all(BulkStream::is_done) {
            let now = shared.clock.ns();
            if heartbeat.beat(now, &mut self.tallies, &mut self.schedule, || 0)? {
                self.check_progress(now)?;
            }
            if now >= self.schedule.end && !stopped {
                stopped = true;
                for (index, stream) in self.streams.iter_mut().enumerate() {
                    stream.stop(&self.poller, index).map_err(|error| stream.lost(server, &error))?;
                }
                continue;
            }
            let remaining = if stopped { LONGEST_SLEEP_NS } else { self.schedule.end.saturating_sub(now) };
            super::wait(&mut self.poller, &mut ready, remaining)?;
            let now = shared.clock.ns();
            for event in &ready {
                self.serve(*event, now)?;
            }
        }
        let cpu = heartbeat.cpu();
        self.tallies.publish(&shared.slots[thread], 0);
        Ok(ThreadResult { errors: ErrorCounts::new(), cpu, sums: self.rates(), ..ThreadResult::default() })
    }

    fn serve(&mut self, event: Event, now: u64) -> Result<(), LoadError> {
        let Some(stream) = usize::try_from(event.token).ok().and_then(|index| self.streams.get_mut(index))
        else {
            return Ok(());
        };
        let server = self.config.target.server;
        let at = BulkMoment { now, schedule: self.schedule };
        if event.readable || event.error {
            let read = stream.read(&mut self.buffers, at, &mut self.tallies);
            read.map_err(|error| stream.lost(server, &error))?;
            if stream.is_done() {
                stream.check(server)?;
                return self
                    .poller
                    .remove(&stream.socket)
                    .map_err(LoadError::system("cannot stop watching a connection"));
            }
        }
        if event.writable {
            let written = stream.write(self.config.size(), at, &mut self.tallies);
            written.map_err(|error| stream.lost(server, &error))?;
        }
        Ok(())
    }

    fn check_progress(&self, now: u64) -> Result<(), LoadError> {
        let server = self.config.target.server;
        let mut open = self.streams.iter().filter(|stream| !stream.is_done());
        let stalled = open.find(|stream| now.saturating_sub(stream.last_ns) > nanos(self.config.timeout));
        stalled.map_or(Ok(()), |stream| {
            let seconds = self.config.timeout.as_secs();
            Err(LoadError::Stalled { server, seconds, connection: stream.number, bytes: stream.moved() })
        })
    }

    fn rates(&self) -> BTreeMap<&'static str, f64> {
        let (mut rates, measured) = (BTreeMap::new(), self.schedule.measured());
        for stream in &self.streams {
            let (name, rate) = match &stream.way {
                BulkWay::ToServer(sending) => (TO_SERVER_BPS, sending.rate(measured)),
                BulkWay::ToClient(receiving) => (TO_CLIENT_BPS, receiving.rate(measured)),
            };
            *rates.entry(name).or_default() += rate;
        }
        rates
    }
}

#[derive(Clone, Copy)]
struct BulkMoment {
    now: u64,
    schedule: RunTimes,
}

impl BulkMoment {
    fn is_measured(self) -> bool {
        self.now >= self.schedule.measure
    }

    fn is_in_window(self) -> bool {
        self.is_measured() && self.now < self.schedule.end
    }
}

struct BulkStream {
    socket: TcpStream,
    number: usize,
    way: BulkWay,
    last_ns: u64,
}

enum BulkWay {
    ToServer(Sending),
    ToClient(Receiving),
}

impl BulkStream {
    fn new(socket: TcpStream, mode: StreamMode, number: usize) -> Self {
        let way = match mode {
            StreamMode::Source { .. } => BulkWay::ToClient(Receiving::default()),
            _ => BulkWay::ToServer(Sending::default()),
        };
        Self { socket, number, way, last_ns: 0 }
    }

    fn start(&mut self, poller: &Poller, index: usize) -> io::Result<()> {
        match self.way {
            BulkWay::ToServer(_) => {
                poller.set(&self.socket, index as u64, Interest::Level { read: true, write: true })
            }
            BulkWay::ToClient(_) => self.socket.write_all(b"g"),
        }
    }

    fn stop(&mut self, poller: &Poller, index: usize) -> io::Result<()> {
        match &mut self.way {
            BulkWay::ToServer(sending) => {
                sending.stopped = true;
                poller.set(&self.socket, index as u64, Interest::Level { read: true, write: false })
            }
            BulkWay::ToClient(receiving) => {
                receiving.stopped = true;
                self.socket.write_all(b"s")
            }
        }
    }

    fn is_done(&self) -> bool {
        match &self.way {
            BulkWay::ToServer(sending) => sending.stopped && sending.latest.total >= sending.sent,
            BulkWay::ToClient(receiving) => receiving.ended,
        }
    }

    fn moved(&self) -> u64 {
        match &self.way {
            BulkWay::ToServer(sending) => sending.sent,
            BulkWay::ToClient(receiving) => receiving.received,
        }
    }

    fn write(&mut self, block: usize, at: BulkMoment, tallies: &mut RunTallies) -> io::Result<()> {
        let BulkWay::ToServer(sending) = &mut self.way else { return Ok(()) };
        let mut budget = BUDGET;
        while budget > 0 && !sending.stopped {
            match self.socket.write(pattern::at(sending.sent, block)) {
                Ok(len) => {
                    sending.sent += len as u64;
                    if !at.is_measured() {
                        sending.warmup = sending.sent;
                    }
                    tallies.of(at.is_measured()).sent += len as u64;
                    self.last_ns = at.now;
                    budget = budget.saturating_sub(len);
                    if len < block {
                        break;
                    }
                }
                Err(error) if is_not_now(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn read(
        &mut self,
        buffers: &mut ReceiveBuffers,
        at: BulkMoment,
        tallies: &mut RunTallies,
    ) -> io::Result<()> {
        let (socket, last_ns) = (&mut self.socket, &mut self.last_ns);
        match &mut self.way {
            BulkWay::ToServer(sending) => sending.read_records(socket, last_ns, at, tallies),
            BulkWay::ToClient(receiving) => receiving.read(socket, last_ns, buffers, at, tallies),
        }
    }

    fn check(&self, server: SocketAddr) -> Result<(), LoadError> {
        let (sent, received, wrong) = match &self.way {
            BulkWay::ToServer(sending) => (sending.sent, sending.latest.total, sending.latest.wrong),
            BulkWay::ToClient(receiving) => (receiving.sent(), receiving.received, receiving.wrong),
        };
        if sent == received && wrong == 0 {
            return Ok(());
        }
        Err(LoadError::Inexact { server, connection: self.number, sent, received, wrong })
    }

    fn lost(&self, server: SocketAddr, error: &io::Error) -> LoadError {
        LoadError::lost(server, error, self.number, self.moved())
    }
}

#[derive(Default)]
struct Sending {
    sent: u64,
    warmup: u64,
    stopped: bool,
    partial: [u8; RECORD_LEN],
    partial_len: usize,
    latest: StreamRecord,
    window: Option<(StreamRecord, StreamRecord)>,
}

impl Sending {
    fn read_records(
        &mut self,
        socket: &mut TcpStream,
        last_ns: &mut u64,
        at: BulkMoment,
        tallies: &mut RunTallies,
    ) -> io::Result<()> {
        loop {
            match socket.read(&mut self.partial[self.partial_len..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(len) => self.partial_len += len,
                Err(error) if is_not_now(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
            if self.partial_len < RECORD_LEN {
                return Ok(());
            }
            self.partial_len = 0;
            self.note(StreamRecord::from_bytes(self.partial), at, tallies);
            *last_ns = at.now;
            if self.stopped && self.latest.total >= self.sent {
                return Ok(());
            }
        }
    }

    fn note(&mut self, record: StreamRecord, at: BulkMoment, tallies: &mut RunTallies) {
        // Streams are ordered, so the first bytes belong to the warm-up, whenever they arrive.
        let before = self.latest.total;
        let measured = record.total.saturating_sub(before.max(self.warmup));
        let warmup = record.total.saturating_sub(before).saturating_sub(measured);
        for (is_measured, bytes) in [(false, warmup), (true, measured)] {
            let tally = tallies.of(is_measured);
            tally.received += bytes;
            tally.received_bytes += bytes;
        }
        self.latest = record;
        if at.is_in_window() {
            let first = self.window.map_or(record, |(first, _)| first);
            self.window = Some((first, record));
        }
    }

    /// Rate according to the reflector's clock, so that bytes still in buffers are not counted. If no record has arrived, uses the
    /// number of bytes sent.
    fn rate(&self, duration: Duration) -> f64 {
        let between = self.window.and_then(|(first, last)| {
            let time = last.elapsed.checked_sub(first.elapsed)?;
            (time >= duration / 2).then(|| turnpike_measure::per_second(last.total - first.total, time))
        });
        let sent = || turnpike_measure::per_second(self.sent - self.warmup, duration);
        between.unwrap_or_else(sent) * 8.0
    }
}

/// State of a download: the reflector sends, and finally appends a record of the total.
#[derive(Default)]
struct Receiving {
    received: u64,
    in_window: u64,
    wrong: u64,
    stopped: bool,
    ended: bool,
    tail: Tail,
}

impl Receiving {
    fn read(
        &mut self,
        socket: &mut TcpStream,
        last_ns: &mut u64,
        buffers: &mut ReceiveBuffers,
        at: BulkMoment,
        tallies: &mut RunTallies,
    ) -> io::Result<()> {
        let mut budget = BUDGET;
        while budget > 0 {
            // The record comes only after the stop command, so bytes before that may be discarded.
            let discard = buffers.discard && !self.stopped;
            let read = if discard {
                SockRef::from(&*socket).recv_with_flags(&mut buffers.discarded, MSG_TRUNC)
            } else {
                socket.read(&mut buffers.bytes)
            };
            let len = match read {
                Ok(0) => return self.end(),
                Ok(len) => len,
                Err(error) if is_not_now(&error) => return Ok(()),
                Err(error) => return Err(error),
            };
            *last_ns = at.now;
            budget = budget.saturating_sub(len);
            let payload = if discard { len as u64 } else { self.take(&buffers.bytes[..len], buffers.verify) };
            if discard {
                self.received += payload;
            }
            if at.is_in_window() {
                self.in_window += payload;
            }
            let tally = tallies.of(at.is_measured());
            tally.sent += payload;
            tally.received += payload;
            tally.received_bytes += payload;
            if len < READ {
                return Ok(());
            }
        }
        Ok(())
    }

    fn take(&mut self, data: &[u8], verify: bool) -> u64 {
        let before = self.received;
        let (received, wrong) = (&mut self.received, &mut self.wrong);
        self.tail.push(data, |payload| {
            if verify {
                *wrong += pattern::wrong(*received, payload);
            }
            *received += payload.len() as u64;
        });
        self.received - before
    }

    fn end(&mut self) -> io::Result<()> {
        if !self.stopped || self.tail.len < RECORD_LEN {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.ended = true;
        Ok(())
    }

    fn sent(&self) -> u64 {
        StreamRecord::from_bytes(self.tail.bytes).total
    }

    fn rate(&self, duration: Duration) -> f64 {
        turnpike_measure::per_second(self.in_window, duration) * 8.0
    }
}

/// Last bytes of a stream so far, kept back because they may be the record rather than payload.
#[derive(Default)]
struct Tail {
    bytes: [u8; RECORD_LEN],
    len: usize,
}

impl Tail {
    fn push(&mut self, data: &[u8], mut payload: impl FnMut(&[u8])) {
        if let Some((rest, last)) = data.split_last_chunk::<RECORD_LEN>() {
            payload(&self.bytes[..self.len]);
            payload(rest);
            (self.bytes, self.len) = (*last, RECORD_LEN);
            return;
        }
        let over = (self.len + data.len()).saturating_sub(RECORD_LEN);
        payload(&self.bytes[..over]);
        self.bytes.copy_within(over..self.len, 0);
        let kept = self.len - over;
        self.bytes[kept..kept + data.len()].copy_from_slice(data);
        self.len = kept + data.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_holds_back_exactly_the_last_record() {
        let whole: Vec<u8> = (0..=255).cycle().take(1_000).collect();
        for size in [1, 2, 5, 23, 24, 25, 47, 48, 49, 300, 1_000] {
            let (mut tail, mut payload) = (Tail::default(), Vec::new());
            for piece in whole.chunks(size) {
                tail.push(piece, |bytes| payload.extend_from_slice(bytes));
            }
            assert_eq!(payload, whole[..1_000 - RECORD_LEN], "pieces of {size}");
            assert_eq!(tail.bytes, whole[1_000 - RECORD_LEN..], "pieces of {size}");
        }
    }

    #[test]
    fn late_bytes_of_the_warm_up_count_as_warm_up() {
        let schedule = RunTimes { start: 0, measure: 100, end: 200 };
        let (mut tallies, mut sending) =
            (RunTallies::default(), Sending { sent: 1_000, warmup: 300, ..Sending::default() });
        for (now, total) in [(50, 100), (150, 400), (250, 1_000)] {
            sending.note(
                StreamRecord { total, ..StreamRecord::default() },
                BulkMoment { now, schedule },
                &mut tallies,
            );
        }
        assert_eq!((tallies.warmup.received, tallies.measured.received), (300, 700));
    }
}
