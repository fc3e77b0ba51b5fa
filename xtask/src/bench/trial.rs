//! One run of one subject under one workload: start everything, wait until traffic flows, read all counters at
//! both ends of a window, stop everything. Each trial starts the relay anew, so that the luck of one start (hash
//! seeds, memory layout) is part of the spread and not of the result.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use turnpike_measure::kernel;

use super::{
    certificate::Certificate,
    counters::{self, Arrivals, Memory, Snapshot},
    finding::{Finding, Idle, Traffic},
    logs::{Logs, Profile},
    netns::{Network, PEER_IP, Place, Process, RELAY_LISTEN_IP, Seat},
    subject::{ECHO_PORT, Generator, Load, NO_QUOTAS, Subject, TLS_PORT, TURN_PORT},
    workload::{Shape, Transport, Workload},
};
use crate::Failure;

/// Seconds of traffic before the window opens.
const WARMUP: f64 = 1.0;
/// Seconds by which the generator's own window is longer than ours, so that ours lies within.
const MARGIN: f64 = 1.0;
/// For the slowest subject to make 10,000 allocations.
const SETUP_LIMIT: Duration = Duration::from_secs(120);
/// Datagrams at which traffic is taken to flow; the exchange of setting up is not yet among them.
const FLOWING: u64 = 100;

/// Where and how trials run; the same for all subjects.
pub(crate) struct Bench {
    pub(crate) network: Network,
    pub(crate) generator: Generator,
    pub(crate) relay_core: usize,
    pub(crate) load_core: usize,
    pub(crate) nice: i8,
    /// Length of the window.
    pub(crate) seconds: f64,
    /// Whether `perf` samples the relay's core during the window.
    pub(crate) profile: bool,
    /// Overrides the workload's burst.
    pub(crate) burst: Option<u32>,
    /// The same for all subjects.
    pub(crate) certificate: Certificate,
    /// Logs and results of the programs.
    pub(crate) directory: PathBuf,
}

impl Bench {
    /// Runs `subject` under `workload` once; `label` names its logs.
    pub(crate) fn run(
        &self,
        workload: &Workload,
        subject: &Subject,
        label: &str,
    ) -> Result<Finding, Failure> {
        let logs = Logs { directory: &self.directory, label };
        self.run_once(workload, subject, &logs).map_err(|failure| {
            format!(
                "{} under {}: {failure}{}",
                subject.name,
                workload.name,
                logs.tails(&["relay.log", "reflector.log", "load.log"])
            )
            .into()
        })
    }

    fn run_once(&self, workload: &Workload, subject: &Subject, logs: &Logs<'_>) -> Result<Finding, Failure> {
        let relay = Seat { place: Place::Relay, core: self.relay_core, nice: self.nice };
        let transport = workload.shape.transport();
        let command = self.certificate.fill_in(subject.command(transport));
        let mut relay = self.network.spawn(relay, &command, &NO_QUOTAS, &logs.path("relay.log"))?;
        self.await_relay(transport, &mut relay)?;
        let reflector = Seat { place: Place::Peer, core: self.load_core, nice: self.nice };
        let mut reflector =
            self.network.spawn(reflector, &self.generator.reflector(), &[], &logs.path("reflector.log"))?;
        self.await_echo(&mut reflector)?;
        match workload.shape {
            Shape::Traffic { transport, clients, rate, size, burst, window } => {
                let burst = self.burst.unwrap_or(burst);
                let load = Load { transport, rate, size, burst, window, ..self.load(clients) };
                self.run_traffic(&load, &relay, &reflector, logs)
                    .map(|traffic| Finding::Traffic(Box::new(traffic)))
            }
            Shape::Churn { transport, clients } => {
                let load = Load { transport, churn: true, ..self.load(clients) };
                self.run_traffic(&load, &relay, &reflector, logs)
                    .map(|traffic| Finding::Traffic(Box::new(traffic)))
            }
            Shape::Idle { allocations } => {
                // One datagram a second over all of them: idle, yet the generator keeps them.
                let load = Load { rate: Some(1), seconds: 600.0, ..self.load(allocations) };
                self.run_idle(allocations, &load, &relay, logs).map(Finding::Idle)
            }
        }
    }

    fn run_traffic(
        &self,
        load: &Load,
        relay: &Process,
        reflector: &Process,
        logs: &Logs<'_>,
    ) -> Result<Traffic, Failure> {
        let result = logs.path("result.json");
        // A result of an earlier run of the same label must not pass for this one's.
        let _ = fs::remove_file(&result);
        let mut generator = self.start_generator(load, &result, logs)?;
        // Churn never reaches the peer.
        let far_end = if load.churn { Place::Client } else { Place::Peer };
        self.await_arrivals(far_end, FLOWING, &mut generator)?;
        thread::sleep(Duration::from_secs_f64(WARMUP));
        let profile = if self.profile {
            Some(Profile::start(logs, self.relay_core, self.load_core, self.seconds)?)
        } else {
            None
        };
        let opened = self.snapshot(relay, &generator, reflector)?;
        thread::sleep(Duration::from_secs_f64(self.seconds));
        let closed = self.snapshot(relay, &generator, reflector)?;
        if let Some(profile) = profile {
            profile.finish(logs)?;
        }
        let report = if self.generator.reports() {
            let patience = Duration::from_secs_f64(MARGIN + WARMUP) + Duration::from_secs(20);
            if !generator.ends_before(Instant::now() + patience)? {
                return Err("the generator does not end".into());
            }
            let text = fs::read_to_string(&result)
                .map_err(|error| format!("the generator left no result: {error}"))?;
            Some(serde_json::from_str(&text)?)
        } else {
            None
        };
        let traffic = Traffic { window: closed - opened, load: *load, report };
        match traffic.void() {
            Some(reason) => Err(reason.into()),
            None => Ok(traffic),
        }
    }

    fn run_idle(
        &self,
        allocations: u32,
        load: &Load,
        relay: &Process,
        logs: &Logs<'_>,
    ) -> Result<Idle, Failure> {
        let anchor = self.network.pid_in(Place::Relay);
        let before = (Memory::settled(relay.pid())?, counters::udp_sockets(anchor)?);
        let mut generator = self.start_generator(load, &logs.path("result.json"), logs)?;
        let deadline = Instant::now() + SETUP_LIMIT;
        let wanted = before.1 + u64::from(allocations);
        loop {
            let open = counters::udp_sockets(anchor)?;
            if open >= wanted {
                break;
            }
            if !generator.is_running()? || Instant::now() > deadline {
                let made = open - before.1;
                return Err(format!("only {made} of {allocations} relay sockets were opened").into());
            }
            thread::sleep(Duration::from_millis(50));
        }
        // The last socket is open; permissions and channels of the last clients may not be there yet.
        self.await_arrivals(Place::Peer, 1, &mut generator)?;
        let after = Memory::settled(relay.pid())?;
        Ok(Idle {
            allocations,
            before: before.0,
            after,
            sockets: counters::udp_sockets(anchor)? - before.1,
            kernel_bytes_per_socket: counters::kernel_bytes_per_socket(),
        })
    }

    /// Saturation by UDP, one datagram of 120 bytes at a time.
    fn load(&self, clients: u32) -> Load {
        Load {
            transport: Transport::Udp,
            clients,
            rate: None,
            size: 120,
            burst: 1,
            window: None,
            churn: false,
            seconds: self.seconds + MARGIN,
            warmup: WARMUP / 2.0,
        }
    }

    fn start_generator(&self, load: &Load, result: &Path, logs: &Logs<'_>) -> Result<Process, Failure> {
        let seat = Seat { place: Place::Client, core: self.load_core, nice: self.nice };
        let command = self.certificate.fill_in(self.generator.command(load, result)?);
        self.network.spawn(seat, &command, &[], &logs.path("load.log"))
    }

    fn snapshot(
        &self,
        relay: &Process,
        generator: &Process,
        reflector: &Process,
    ) -> Result<Snapshot, Failure> {
        let programs = [relay.pid(), generator.pid(), reflector.pid()];
        Snapshot::take(&self.network, [self.relay_core, self.load_core], programs)
    }

    /// A STUN Binding from the client's namespace tells that the relay serves, not only that it has a socket. Its listener
    /// for streams need not be there yet.
    fn await_relay(&self, transport: Transport, relay: &mut Process) -> Result<(), Failure> {
        let probe = std::env::current_exe()?.display().to_string();
        let address = format!("{RELAY_LISTEN_IP}:{TURN_PORT}");
        let command = [probe, "bench".to_owned(), "probe".to_owned(), address];
        if !self.network.succeeds(Place::Client, &command)? || !relay.is_running()? {
            return Err("the relay does not answer a STUN Binding request".into());
        }
        let port = match transport {
            Transport::Udp => return Ok(()),
            Transport::Tcp => TURN_PORT,
            Transport::Tls => TLS_PORT,
        };
        let anchor = self.network.pid_in(Place::Relay);
        let deadline = Instant::now() + Duration::from_secs(10);
        while !kernel::tcp_port_listens(anchor, port) {
            if !relay.is_running()? || Instant::now() > deadline {
                return Err(format!("the relay does not listen on TCP port {port}").into());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    fn await_echo(&self, reflector: &mut Process) -> Result<(), Failure> {
        let anchor = self.network.pid_in(Place::Peer);
        let deadline = Instant::now() + Duration::from_secs(10);
        while !kernel::udp_port_is_bound(anchor, ECHO_PORT) {
            if !reflector.is_running()? || Instant::now() > deadline {
                return Err(format!("the reflector does not listen on {PEER_IP}:{ECHO_PORT}").into());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    fn await_arrivals(&self, place: Place, count: u64, generator: &mut Process) -> Result<(), Failure> {
        let pid = self.network.pid_in(place);
        let start = Arrivals::read(pid)?;
        let deadline = Instant::now() + SETUP_LIMIT;
        while (Arrivals::read(pid)? - start).packets < count {
            if !generator.is_running()? {
                return Err("the generator ended before traffic flowed".into());
            }
            if Instant::now() > deadline {
                return Err("no traffic flows".into());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}
