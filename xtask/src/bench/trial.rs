//! One run of one subject under one workload: start everything, wait until traffic flows, read all counters at
//! both ends of a window, stop everything. Each trial starts the relay anew, so that the luck of one start (hash
//! seeds, memory layout) is part of the spread and not of the result.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::{
    counters::{self, Arrivals, CoreTime, Memory, ProcessTime, Snapshot},
    finding::{Finding, Idle, Traffic},
    netns::{Network, PEER_IP, Place, Process, RELAY_LISTEN_IP, Seat},
    subject::{ECHO_PORT, Generator, Load, NO_QUOTAS, Subject, TURN_PORT},
    workload::{Shape, Workload},
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
            format!("{} under {}: {failure}{}", subject.name, workload.name, logs.tails()).into()
        })
    }

    fn run_once(&self, workload: &Workload, subject: &Subject, logs: &Logs<'_>) -> Result<Finding, Failure> {
        let relay = Seat { place: Place::Relay, core: self.relay_core, nice: self.nice };
        let mut relay = self.network.spawn(relay, &subject.command, &NO_QUOTAS, &logs.path("relay.log"))?;
        self.await_relay(&mut relay)?;
        let reflector = Seat { place: Place::Peer, core: self.load_core, nice: self.nice };
        let mut reflector =
            self.network.spawn(reflector, &self.generator.reflector(), &[], &logs.path("reflector.log"))?;
        self.await_echo(&mut reflector)?;
        match workload.shape {
            Shape::Traffic { clients, rate, size, burst } => {
                let load = self.load(clients, rate, size, self.burst.unwrap_or(burst), false);
                self.run_traffic(&load, &relay, &reflector, logs)
                    .map(|traffic| Finding::Traffic(Box::new(traffic)))
            }
            Shape::Churn { clients } => {
                let load = self.load(clients, None, 120, 1, true);
                self.run_traffic(&load, &relay, &reflector, logs)
                    .map(|traffic| Finding::Traffic(Box::new(traffic)))
            }
            Shape::Idle { allocations } => {
                // One datagram a second over all of them: idle, yet the generator keeps them.
                let mut load = self.load(allocations, Some(1), 120, 1, false);
                load.seconds = 600.0;
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
        let profile = if self.profile { Some(self.start_profile(logs)?) } else { None };
        let opened = self.snapshot(relay, &generator, reflector)?;
        thread::sleep(Duration::from_secs_f64(self.seconds));
        let closed = self.snapshot(relay, &generator, reflector)?;
        if let Some(profile) = profile {
            finish_profile(profile, logs)?;
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
        Ok(Traffic {
            elapsed: closed.since(&opened).as_secs_f64(),
            to_client: closed.client - opened.client,
            to_relay: closed.relay - opened.relay,
            to_peer: closed.peer - opened.peer,
            core: closed.core - opened.core,
            load_core: closed.load_core - opened.load_core,
            subject: closed.subject - opened.subject,
            generator: closed.generator - opened.generator,
            reflector: closed.reflector - opened.reflector,
            backlog_drops: closed.backlog_drops - opened.backlog_drops,
            asked: load.rate,
            report,
        })
    }

    fn run_idle(
        &self,
        allocations: u32,
        load: &Load,
        relay: &Process,
        logs: &Logs<'_>,
    ) -> Result<Idle, Failure> {
        let anchor = self.network.pid_in(Place::Relay);
        let before = (settled_memory(relay.pid())?, counters::udp_sockets(anchor)?);
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
        let after = settled_memory(relay.pid())?;
        Ok(Idle {
            allocations,
            before: before.0,
            after,
            sockets: counters::udp_sockets(anchor)? - before.1,
            kernel_bytes_per_socket: counters::kernel_bytes_per_socket(),
        })
    }

    fn start_profile(&self, logs: &Logs<'_>) -> Result<Process, Failure> {
        let mut perf = Command::new("taskset");
        perf.args(["-c", &self.load_core.to_string(), "perf", "record", "-q", "-F", "999", "-g", "-o"])
            .arg(logs.path("relay-core.perf"))
            .args(["-C", &self.relay_core.to_string(), "--", "sleep", &self.seconds.to_string()])
            .stdout(Stdio::null())
            .stderr(File::create(logs.path("perf.log"))?);
        Process::start(&mut perf)
    }

    fn load(&self, clients: u32, rate: Option<u32>, size: u32, burst: u32, churn: bool) -> Load {
        Load { clients, rate, size, burst, churn, seconds: self.seconds + MARGIN, warmup: WARMUP / 2.0 }
    }

    fn start_generator(&self, load: &Load, result: &Path, logs: &Logs<'_>) -> Result<Process, Failure> {
        let seat = Seat { place: Place::Client, core: self.load_core, nice: self.nice };
        self.network.spawn(seat, &self.generator.command(load, result)?, &[], &logs.path("load.log"))
    }

    fn snapshot(
        &self,
        relay: &Process,
        generator: &Process,
        reflector: &Process,
    ) -> Result<Snapshot, Failure> {
        let arrivals = |place| Arrivals::read(self.network.pid_in(place));
        Ok(Snapshot {
            taken: Instant::now(),
            core: CoreTime::read(self.relay_core)?,
            client: arrivals(Place::Client)?,
            peer: arrivals(Place::Peer)?,
            relay: arrivals(Place::Relay)?,
            load_core: CoreTime::read(self.load_core)?,
            subject: ProcessTime::read(relay.pid())?,
            generator: ProcessTime::read(generator.pid())
                .map_err(|error| format!("the generator ended before the window did: {error}"))?,
            reflector: ProcessTime::read(reflector.pid())?,
            backlog_drops: counters::backlog_drops()?,
        })
    }

    /// A STUN Binding from the client's namespace tells that the relay serves, not only that it has a socket.
    fn await_relay(&self, relay: &mut Process) -> Result<(), Failure> {
        let probe = std::env::current_exe()?.display().to_string();
        let address = format!("{RELAY_LISTEN_IP}:{TURN_PORT}");
        let command = [probe, "bench".to_owned(), "probe".to_owned(), address];
        if self.network.succeeds(Place::Client, &command)? && relay.is_running()? {
            return Ok(());
        }
        Err("the relay does not answer a STUN Binding request".into())
    }

    fn await_echo(&self, reflector: &mut Process) -> Result<(), Failure> {
        let anchor = self.network.pid_in(Place::Peer);
        let deadline = Instant::now() + Duration::from_secs(10);
        while !counters::udp_port_is_bound(anchor, ECHO_PORT) {
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

/// Writes what `perf` saw as text beside its data.
fn finish_profile(mut profile: Process, logs: &Logs<'_>) -> Result<(), Failure> {
    if !profile.ends_before(Instant::now() + Duration::from_secs(20))? {
        return Err("perf does not end".into());
    }
    let text = logs.path("relay-core.txt");
    let status = Command::new("perf")
        .args(["report", "--stdio", "--no-children", "-g", "none", "--percent-limit", "0.3", "-i"])
        .arg(logs.path("relay-core.perf"))
        .stdin(Stdio::null())
        .stdout(File::create(&text)?)
        .stderr(Stdio::null())
        .status()?;
    if !status.success() {
        return Err(format!("perf report failed; see {}", logs.path("perf.log").display()).into());
    }
    eprint!("(profile: {}) ", text.display());
    Ok(())
}

/// Memory once it no longer moves by more than 0.5 % in half a second.
fn settled_memory(pid: u32) -> Result<Memory, Failure> {
    let deadline = Instant::now() + Duration::from_secs(15);
    let mut last = Memory::read(pid)?;
    loop {
        thread::sleep(Duration::from_millis(500));
        let now = Memory::read(pid)?;
        if now.resident.abs_diff(last.resident) * 200 <= last.resident || Instant::now() > deadline {
            return Ok(now);
        }
        last = now;
    }
}

/// Output of the programs of one trial.
struct Logs<'a> {
    directory: &'a Path,
    label: &'a str,
}

impl Logs<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{}-{name}", self.label))
    }

    /// The last lines of each log, for an error message.
    fn tails(&self) -> String {
        let mut tails = String::new();
        for name in ["relay.log", "reflector.log", "load.log"] {
            let text = fs::read_to_string(self.path(name)).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            for line in &lines[lines.len().saturating_sub(5)..] {
                tails.push_str(&format!("\n  {name}: {line}"));
            }
        }
        tails
    }
}
