//! One run of one forwarder under one workload. As with relays (`super::super::trial`): everything starts anew, the window opens
//! once traffic flows, all counters are read at both its ends. Every wait has a deadline.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use turnpike_measure::kernel;

use super::{
    super::{
        counters::{self, Arrivals, Memory, ProcessTime, Snapshot},
        logs::{Logs, Profile},
        netns::{Network, PEER_IP, Place, Process, Seat},
    },
    finding::{Finding, Idle, Traffic},
    subject::{LISTEN_PORT, Program, Subject, TARGET_PORT, words},
    workload::{Shape, Transport},
};
use crate::Failure;

/// Seconds of one trial's traffic.
struct Timing {
    /// Before the window opens.
    warmup: f64,
    window: f64,
    /// By which the generator's own window is longer than ours, so that ours lies within.
    margin: f64,
}

/// For a program to listen, and for traffic to flow.
const START_LIMIT: Duration = Duration::from_secs(15);
/// For the slowest forwarder to take all idle connections.
const IDLE_LIMIT: Duration = Duration::from_secs(60);
/// Packets at the server from which on traffic is taken to flow.
const FLOWING: u64 = 20;
const LOGS: [&str; 3] = ["forwarder.log", "reflector.log", "load.log"];

/// Where and how trials run; the same for all subjects.
pub(crate) struct Bench {
    pub(crate) network: Network,
    /// Generator and reflector.
    pub(crate) turnpike: PathBuf,
    pub(crate) forwarder_core: usize,
    pub(crate) load_core: usize,
    pub(crate) nice: i8,
    /// Length of the window.
    pub(crate) seconds: f64,
    pub(crate) profile: bool,
    /// Overrides the workload's burst.
    pub(crate) burst: Option<u32>,
    /// More arguments of the generator.
    pub(crate) load: Vec<String>,
    /// The softirq thread of the forwarder's core.
    pub(crate) ksoftirqd: Option<u32>,
    /// Logs, results and configurations.
    pub(crate) directory: PathBuf,
}

impl Bench {
    /// Runs `subject` under a workload of this shape once; `label` names its logs.
    pub(crate) fn run(&self, shape: Shape, subject: &Subject, label: &str) -> Result<Finding, Failure> {
        let logs = Logs { directory: &self.directory, label };
        self.run_once(shape, subject, &logs)
            .map_err(|failure| format!("{failure}{}", logs.tails(&LOGS)).into())
    }

    fn run_once(&self, shape: Shape, subject: &Subject, logs: &Logs<'_>) -> Result<Finding, Failure> {
        let transport = shape.transport();
        let _spinner = match subject.program {
            Program::Sleepless(_) => Some(self.keep_awake(logs)?),
            _ => None,
        };
        let command = subject.command(transport, &self.directory)?;
        let mut forwarder = self.spawn(
            Place::Relay,
            self.forwarder_core,
            // Something must be there to be read from.
            &command.clone().unwrap_or_else(|| words("sleep infinity")),
            &logs.path("forwarder.log"),
        )?;
        if command.is_some() {
            self.await_port(Place::Relay, transport, LISTEN_PORT, &mut forwarder)
                .map_err(|error| format!("the forwarder {error}"))?;
        }
        let option = match transport {
            Transport::Tcp => "--tcp",
            Transport::Udp => "--listen",
        };
        let mut reflect = vec![self.turnpike.display().to_string()];
        reflect.extend(words(&format!("reflect {option} {PEER_IP}:{TARGET_PORT} --workers 1")));
        let mut reflector = self.spawn(Place::Peer, self.load_core, &reflect, &logs.path("reflector.log"))?;
        self.await_port(Place::Peer, transport, TARGET_PORT, &mut reflector)
            .map_err(|error| format!("the reflector {error}"))?;
        match shape {
            Shape::Idle { connections } => {
                self.run_idle(shape, connections, subject, &forwarder, logs).map(Finding::Idle)
            }
            _ => self
                .run_traffic(shape, subject, &forwarder, &reflector, logs)
                .map(|traffic| Finding::Traffic(Box::new(traffic))),
        }
    }

    fn run_traffic(
        &self,
        shape: Shape,
        subject: &Subject,
        forwarder: &Process,
        reflector: &Process,
        logs: &Logs<'_>,
    ) -> Result<Traffic, Failure> {
        let result = logs.path("result.json");
        // A result of an earlier run of the same label must not pass for this one's.
        let _ = fs::remove_file(&result);
        let load = self.load(shape, subject, &result);
        let mut generator = self.spawn(Place::Client, self.load_core, &load, &logs.path("load.log"))?;
        self.await_flow(&mut generator)?;
        let timing = self.timing(shape);
        thread::sleep(Duration::from_secs_f64(timing.warmup));
        let profile = if self.profile {
            Some(Profile::start(logs, self.forwarder_core, self.load_core, timing.window)?)
        } else {
            None
        };
        let programs = [forwarder.pid(), generator.pid(), reflector.pid()];
        let opened = self.read(programs)?;
        thread::sleep(Duration::from_secs_f64(timing.window));
        let closed = self.read(programs)?;
        if let Some(profile) = profile {
            profile.finish(logs)?;
        }
        if !generator.ends_before(Instant::now() + START_LIMIT)? {
            return Err("the generator does not end".into());
        }
        let text =
            fs::read_to_string(&result).map_err(|error| format!("the generator left no result: {error}"))?;
        let report: Value = serde_json::from_str(&text)?;
        Ok(Traffic { shape, window: closed.0 - opened.0, ksoftirqd: closed.1 - opened.1, report })
    }

    fn run_idle(
        &self,
        shape: Shape,
        connections: u32,
        subject: &Subject,
        forwarder: &Process,
        logs: &Logs<'_>,
    ) -> Result<Idle, Failure> {
        let anchor = self.network.pid_in(Place::Relay);
        let before = Memory::settled(forwarder.pid())?;
        let sockets_before = counters::tcp_sockets(anchor)?;
        let load = self.load(shape, subject, &logs.path("result.json"));
        let mut generator = self.spawn(Place::Client, self.load_core, &load, &logs.path("load.log"))?;
        let deadline = Instant::now() + IDLE_LIMIT;
        // One towards the client and one towards the server.
        let wanted = u64::from(connections) * 2;
        loop {
            let open = counters::tcp_sockets(anchor)?.saturating_sub(sockets_before);
            if open >= wanted {
                break;
            }
            if !generator.is_running()? || Instant::now() > deadline {
                return Err(format!("only {open} of {wanted} sockets were opened").into());
            }
            thread::sleep(Duration::from_millis(50));
        }
        let after = Memory::settled(forwarder.pid())?;
        let sockets = counters::tcp_sockets(anchor)?.saturating_sub(sockets_before);
        if sockets < wanted {
            return Err(format!("{sockets} of {wanted} sockets are left: connections were lost").into());
        }
        Ok(Idle { connections, before, after, sockets })
    }

    /// The generator's command line; its result goes to `result`.
    fn load(&self, shape: Shape, subject: &Subject, result: &Path) -> Vec<String> {
        let kind = match shape {
            Shape::Bulk { streams } => format!("tcp -P {streams}"),
            Shape::Exchange { connections } => format!("rr --size 32 --clients {connections}"),
            Shape::Connect { at_once, reset } => {
                let close = if reset { "reset" } else { "client" };
                format!("connect --clients {at_once} --close {close}")
            }
            Shape::Datagrams { flows, burst } => {
                format!("udp --rate max --size 120 --clients {flows} --burst {}", self.burst.unwrap_or(burst))
            }
            // One request a second over all of them: idle, yet the generator keeps them.
            Shape::Idle { connections } => format!("rr --rate 1 --clients {connections}"),
        };
        let (seconds, warmup) = match shape {
            // Ended by us.
            Shape::Idle { .. } => (600.0, 0.0),
            _ => {
                let timing = self.timing(shape);
                (timing.window + timing.margin, timing.warmup / 2.0)
            }
        };
        let mut command = vec![self.turnpike.display().to_string(), "load".to_owned()];
        command.extend(words(&kind));
        command.push(subject.address());
        command.extend(words(&format!("--duration {seconds} --warmup {warmup} --threads 1")));
        command.extend_from_slice(&self.load);
        command.extend(["--json".to_owned(), result.display().to_string()]);
        command
    }

    fn timing(&self, shape: Shape) -> Timing {
        match shape {
            // oxidinetd keeps every connection that is closed in the usual way: two files each, until it has none left and
            // stops to listen. So all are measured for no longer than 20,000 files last it at 13,000 connections a second.
            Shape::Connect { reset: false, .. } => {
                Timing { warmup: 0.1, window: self.seconds.min(0.5), margin: 0.1 }
            }
            _ => Timing { warmup: 1.0, window: self.seconds, margin: 1.0 },
        }
    }

    fn spawn(&self, place: Place, core: usize, command: &[String], log: &Path) -> Result<Process, Failure> {
        self.network.spawn(Seat { place, core, nice: self.nice }, command, &[], log)
    }

    /// A loop that runs whenever nobody else wants the forwarder's core, which therefore never sleeps. What it leaves
    /// in a latency is what a forwarder that polls without sleeping would have, but for one switch of threads.
    fn keep_awake(&self, logs: &Logs<'_>) -> Result<Process, Failure> {
        let mut command = words("chrt --idle 0 sh -c");
        command.push("while :; do :; done".to_owned());
        // A session of the lowest rank: where the kernel groups by session, the class counts only within it.
        let seat = Seat { place: Place::Relay, core: self.forwarder_core, nice: 19 };
        self.network.spawn(seat, &command, &[], &logs.path("spinner.log"))
    }

    fn read(&self, programs: [u32; 3]) -> Result<(Snapshot, ProcessTime), Failure> {
        let ksoftirqd = self.ksoftirqd.map(ProcessTime::read).transpose()?.unwrap_or_default();
        let snapshot = Snapshot::take(&self.network, [self.forwarder_core, self.load_core], programs)?;
        Ok((snapshot, ksoftirqd))
    }

    fn await_port(
        &self,
        place: Place,
        transport: Transport,
        port: u16,
        program: &mut Process,
    ) -> Result<(), Failure> {
        let anchor = self.network.pid_in(place);
        let serves = match transport {
            Transport::Tcp => kernel::tcp_port_listens,
            Transport::Udp => kernel::udp_port_is_bound,
        };
        let deadline = Instant::now() + START_LIMIT;
        while !serves(anchor, port) {
            if !program.is_running()? {
                return Err("has ended".into());
            }
            if Instant::now() > deadline {
                return Err(format!("does not listen on port {port}").into());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    fn await_flow(&self, generator: &mut Process) -> Result<(), Failure> {
        let pid = self.network.pid_in(Place::Peer);
        let start = Arrivals::read(pid)?;
        let deadline = Instant::now() + START_LIMIT;
        while (Arrivals::read(pid)? - start).packets < FLOWING {
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
