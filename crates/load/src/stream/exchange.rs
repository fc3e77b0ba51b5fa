//! Requests and responses on connections that stay open, with one outstanding request per connection.

use std::{
    io::{self, Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use turnpike_net::{Event, Interest, Poller};

use super::{StreamShared, Workload, dial, starts::Starts};
use crate::{
    LoadError, pattern,
    run::{ErrorCounts, Heartbeat, RunTallies, ThreadResult},
};

const READ: usize = 64 << 10;

pub(super) fn run(shared: &StreamShared<'_>, thread: usize) -> Result<ThreadResult, LoadError> {
    let Workload::Exchange(options) = shared.config.workload else {
        return Ok(ThreadResult::default());
    };
    let (count, first) = shared.share(options.clients, thread);
    let mut poller = Poller::new().map_err(LoadError::system("cannot create an epoll instance"))?;
    let connections = dial::all(shared, &mut poller, &vec![shared.config.mode(first); count])?;
    shared.thread_is_ready();
    let schedule = shared.wait_for_start()?;
    let clients = connections.into_iter().map(|stream| ExchangeClient {
        stream,
        due: 0,
        unsent: 0,
        missing: 0,
        moved: 0,
    });
    let mut exchange = Exchange {
        shared,
        thread,
        first,
        poller,
        clients: clients.collect(),
        starts: Starts::new(shared, schedule, count, first),
        request: pattern::at(0, options.size),
        response: options.response(),
        buffer: vec![0; READ],
        tallies: RunTallies::default(),
        errors: ErrorCounts::new(),
    };
    let cpu = exchange.run()?;
    exchange.tallies.publish(&shared.slots[thread], 0);
    Ok(ThreadResult { errors: exchange.errors, cpu, ..ThreadResult::default() })
}

struct Exchange<'a> {
    shared: &'a StreamShared<'a>,
    thread: usize,
    first: usize,
    poller: Poller,
    clients: Vec<ExchangeClient>,
    starts: Starts,
    request: &'static [u8],
    response: usize,
    buffer: Vec<u8>,
    tallies: RunTallies,
    errors: ErrorCounts,
}

struct ExchangeClient {
    stream: TcpStream,
    due: u64,
    unsent: usize,
    missing: usize,
    moved: u64,
}

impl Exchange<'_> {
    fn run(&mut self) -> Result<Option<Duration>, LoadError> {
        let mut heartbeat = Heartbeat::new(self.shared, self.thread, self.starts.schedule);
        let mut ready: Vec<Event> = Vec::new();
        loop {
            let mut now = self.shared.clock.ns();
            let under_way = self.starts.busy() as u64;
            heartbeat.beat(now, &mut self.tallies, &mut self.starts.schedule, || under_way)?;
            while let Some((index, due)) = self.starts.next(now, &mut self.tallies) {
                self.begin(index, due)?;
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
        let unanswered = self.starts.busy();
        if unanswered > 0 {
            self.errors.insert("unanswered", unanswered as u64);
        }
        Ok(heartbeat.cpu())
    }

    fn begin(&mut self, index: usize, due: u64) -> Result<(), LoadError> {
        let tally = self.tallies.of(due >= self.starts.schedule.measure);
        tally.sent += 1;
        tally.sent_bytes += self.request.len() as u64;
        let client = &mut self.clients[index];
        (client.due, client.unsent, client.missing) = (due, self.request.len(), self.response);
        self.send(index)?;
        if self.clients[index].unsent > 0 {
            self.watch_writing(index, true)?;
        }
        Ok(())
    }

    fn send(&mut self, index: usize) -> Result<(), LoadError> {
        let client = &mut self.clients[index];
        while client.unsent > 0 {
            match client.stream.write(&self.request[self.request.len() - client.unsent..]) {
                Ok(len) => {
                    client.unsent -= len;
                    client.moved += len as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.lost(index, &error)),
            }
        }
        Ok(())
    }

    fn watch_writing(&self, index: usize, on: bool) -> Result<(), LoadError> {
        self.poller
            .set(&self.clients[index].stream, index as u64, Interest::Level { read: true, write: on })
            .map_err(LoadError::system("cannot watch a connection"))
    }

    fn serve(&mut self, event: Event) -> Result<(), LoadError> {
        let Some(index) = usize::try_from(event.token).ok().filter(|index| *index < self.clients.len())
        else {
            return Ok(());
        };
        if event.writable && self.clients[index].unsent > 0 {
            self.send(index)?;
            if self.clients[index].unsent == 0 {
                self.watch_writing(index, false)?;
            }
        }
        if event.readable || event.error {
            self.receive(index)?;
        }
        Ok(())
    }

    fn receive(&mut self, index: usize) -> Result<(), LoadError> {
        let client = &mut self.clients[index];
        loop {
            // Allow one byte more than expected, to detect excess data.
            let room = (client.missing + 1).min(READ);
            match client.stream.read(&mut self.buffer[..room]) {
                Ok(0) => return Err(self.lost(index, &io::ErrorKind::UnexpectedEof.into())),
                Ok(len) if len > client.missing => {
                    return Err(self.lost(index, &io::Error::other("more bytes than requested")));
                }
                Ok(len) => {
                    client.missing -= len;
                    client.moved += len as u64;
                    if client.missing == 0 {
                        break;
                    }
                    if len < room {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.lost(index, &error)),
            }
        }
        let (now, due) = (self.shared.clock.ns(), client.due);
        let tally = self.tallies.of(due >= self.starts.schedule.measure);
        tally.received += 1;
        tally.received_bytes += self.response as u64;
        tally.record_rtt((now - due) / 1_000);
        match self.starts.go_on(index, now, &mut self.tallies) {
            Some(due) => self.begin(index, due),
            None => Ok(()),
        }
    }

    fn lost(&self, index: usize, error: &io::Error) -> LoadError {
        let server = self.shared.config.target.server;
        LoadError::lost(server, error, self.first + index, self.clients[index].moved)
    }
}
