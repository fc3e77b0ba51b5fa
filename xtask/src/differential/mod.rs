//! `cargo xtask differential`: sends random sequences of STUN and TURN messages to turnpike, coturn and pion. Each difference is either
//! known, with its RFC section, or reported with the shortest sequence that shows it.
//!
//! ```text
//! generate ─▶ session, one for each server ─▶ compare ─▶ known ─▶ repeat with longer timeouts ─▶ reduce ─▶ report
//! ```

mod case;
mod compare;
mod generate;
mod hearing;
mod known;
mod message;
mod reduce;
mod report;
mod seen;
mod servers;
mod session;
mod spoil;
mod step;

use std::{
    collections::BTreeMap,
    env, fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use clap::{Args, ValueEnum};
use turnpike_client::ClientTransport;

use self::{
    compare::{Difference, differences, from_rules},
    known::known,
    report::Report,
    seen::Seen,
    servers::{Name, Programs, Server},
    session::{Patience, run as run_session},
    step::{Dialect, Request, Sequence, Step},
};
use crate::{Failure, INCOMPLETE, cargo, repository, target};

/// Environment variable that passes the path of the turnpike under test to the process in the namespace.
const INSIDE: &str = "TURNPIKE_DIFFERENTIAL";
const LANES: usize = 6;
/// Number of sequences kept per unknown difference, to be repeated.
const KEPT: usize = 3;
const MOST: usize = 24;
/// Rate at which the flood keeps a server busy, in datagrams per second.
const FLOOD: u64 = 1_000;

#[derive(Args)]
pub(crate) struct Options {
    /// Seed of all sequences
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Sequences per transport and kind
    #[arg(long, default_value_t = 1_000)]
    sequences: u64,

    /// Client transports
    #[arg(long, value_delimiter = ',', default_value = "udp,tcp,tls,dtls")]
    transport: Vec<ClientTransport>,

    /// Kinds of sequences; `time` takes a quarter of an hour
    #[arg(long, value_delimiter = ',', default_value = "requests,overload,shared")]
    only: Vec<Kind>,

    /// The turnpike to test [default: a debug build of this repository]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,

    /// The turnserver to compare with [default: Debian's]
    #[arg(long, value_name = "FILE")]
    coturn: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Requests, data and retransmissions of one or two clients
    Requests,
    /// Expiry of nonces, permissions, channels and allocations; all sequences run in parallel
    Time,
    /// Quotas and a flood of other requests; clients over several transports
    Overload,
    /// Several clients over several transports on one shared relay port of turnpike
    Shared,
}

struct Compared {
    found: Vec<Difference>,
    failed: Vec<String>,
}

struct Unknown {
    difference: Difference,
    sequences: Vec<Sequence>,
    count: u64,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let repository = repository()?;
    let Some(turnpike) = env::var_os(INSIDE) else { return outside(options, &repository) };
    let dir = target(&repository).join("differential");
    fs::create_dir_all(&dir)?;
    let dir = dir.canonicalize()?;
    let interop = target(&repository).join("interop");
    let programs = Programs {
        turnpike: turnpike.into(),
        coturn: options.coturn.clone().or_else(|| installed("turnserver")),
        pion: Some(interop.join("pion-server")).filter(|program| program.exists()),
    };
    let mut report = Report::default();
    for (name, is_there) in [(Name::Coturn, programs.coturn.is_some()), (Name::Pion, programs.pion.is_some())]
    {
        if !is_there {
            report.skipped.insert(format!("{name} is not installed"));
        }
    }
    for kind in &options.only {
        let transports: Vec<Vec<ClientTransport>> = match kind {
            Kind::Requests => options.transport.iter().map(|transport| vec![*transport]).collect(),
            Kind::Time | Kind::Overload | Kind::Shared => vec![options.transport.clone()],
        };
        let mut servers = servers::start(&programs, *kind, &dir)?;
        if !servers[0].has_ipv6 {
            report.skipped.insert("relayed IPv6: not supported by this kernel".to_owned());
        }
        for transports in transports {
            campaign(options, *kind, &transports, &servers, &mut report)?;
        }
        report.ended.extend(servers.iter_mut().filter_map(Server::ended));
    }
    Ok(report.finish())
}

/// Builds and installs everything, then continues in a network namespace.
fn outside(options: &Options, repository: &Path) -> Result<ExitCode, Failure> {
    let program = match &options.program {
        Some(program) => program.canonicalize()?,
        None => {
            // Builds with the features that cargo unifies for tests, so that nothing is compiled twice.
            let arguments =
                ["test", "--quiet", "--workspace", "--locked", "--no-run", "--test", "command_line"];
            if !cargo(repository).args(arguments).status()?.success() {
                return Err("the build failed".into());
            }
            target(repository).join("debug/turnpike").canonicalize()?
        }
    };
    let mut missing = false;
    for name in ["namespaces", "coturn", "pion"] {
        let done = Command::new("./test").args(["--need", name]).current_dir(repository).output()?;
        if !done.status.success() {
            missing = true;
            let said = String::from_utf8_lossy(&done.stdout).into_owned();
            println!("skipped: {}", said.lines().last().unwrap_or(name));
        }
    }
    let addresses: String =
        [six_with_length(Name::Turnpike), six_with_length(Name::Coturn), six_with_length(Name::Pion)]
            .into_iter()
            .chain([format!("{}/128", session::SIX)])
            .map(|address| format!("ip addr add {address} dev lo nodad 2>/dev/null; "))
            .collect();
    let script = format!("ip link set lo up && {{ {addresses} exec \"$0\" \"$@\"; }}");
    // The servers are killed when this command ends, for whatever reason.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "unshare"]);
    if fs::metadata("/proc/self")?.uid() != 0 {
        command.arg("--map-root-user");
    }
    let status = command
        .args(["--net", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", &script])
        .arg(env::current_exe()?)
        .args(env::args_os().skip(1))
        .env(INSIDE, program)
        .status()?;
    Ok(match status.code() {
        Some(0) if missing => ExitCode::from(INCOMPLETE),
        Some(code) => ExitCode::from(u8::try_from(code)?),
        None => ExitCode::FAILURE,
    })
}

fn six_with_length(name: Name) -> String {
    format!("{}/128", servers::six(name))
}

fn installed(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|dir| dir.join(program)).find(|path| path.is_file())
}

fn campaign(
    options: &Options,
    kind: Kind,
    transports: &[ClientTransport],
    servers: &[Server],
    report: &mut Report,
) -> Result<(), Failure> {
    let numbers = AtomicU64::new(0);
    let lanes = match kind {
        Kind::Requests | Kind::Shared | Kind::Overload => LANES,
        Kind::Time => usize::try_from(options.sequences)?,
    };
    let patience = if kind == Kind::Time { Patience::LONG } else { Patience::SHORT };
    let flood = Flood::start(kind, servers)?;
    let found: Vec<Report> = thread::scope(|scope| {
        let work = |lane| {
            let mut report = Report::default();
            if kind == Kind::Time {
                // Lanes start one after the other, because coturn handles all first requests in one thread.
                thread::sleep(Duration::from_millis(20) * u32::try_from(lane).unwrap_or_default());
            }
            loop {
                let number = numbers.fetch_add(1, Ordering::Relaxed);
                if number >= options.sequences {
                    return report;
                }
                let sequence = generate::sequence(options.seed, number, kind, transports);
                match compared(&sequence, servers, lane, patience) {
                    Ok(compared) => report.add(&sequence, compared),
                    Err(error) => report.ended.push(error.to_string()),
                }
            }
        };
        let threads: Vec<_> = (0..lanes).map(|lane| scope.spawn(move || work(lane))).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let mut all = Report::default();
    found.into_iter().for_each(|found| all.merge(found));
    let unknown = std::mem::take(&mut all.unknown);
    // Sequences that wait for expiry take as long as the whole run, so there is only one round of them.
    let rounds = if kind == Kind::Time { 1 } else { 200 };
    for (signature, unknown) in unknown.iter().take(MOST) {
        println!("repeating: {signature}");
        if kind == Kind::Time {
            println!("{}", unknown.sequences[0]);
        }
    }
    let unknown: Vec<Unknown> = unknown.into_values().take(MOST).collect();
    let reduced: Vec<Option<Sequence>> = thread::scope(|scope| {
        let reduce = |(index, unknown)| scope.spawn(move || shortest(unknown, servers, index * 32, rounds));
        let threads: Vec<_> = unknown.iter().enumerate().map(reduce).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_default()).collect()
    });
    for (unknown, sequence) in unknown.iter().zip(reduced) {
        match sequence {
            Some(sequence) => all.faults.push(report::fault(unknown, &sequence)),
            None => all.fleeting += unknown.count,
        }
    }
    drop(flood);
    let names: Vec<String> = transports.iter().map(ToString::to_string).collect();
    all.print(&format!("{kind:?} over {}", names.join(", ")));
    report.merge(all);
    Ok(())
}

fn compared(
    sequence: &Sequence,
    servers: &[Server],
    lane: usize,
    patience: Patience,
) -> io::Result<Compared> {
    let seen: Vec<io::Result<Vec<Vec<Seen>>>> = thread::scope(|scope| {
        let run = |server| scope.spawn(move || run_session(sequence, server, lane, patience));
        let threads: Vec<_> = servers.iter().map(run).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("a panic"))))
            .collect()
    });
    let seen = seen.into_iter().collect::<io::Result<Vec<_>>>()?;
    let mut found = from_rules(sequence, &seen[0]);
    for (server, theirs) in servers.iter().zip(&seen).skip(1) {
        found.extend(differences(sequence, server.name, &seen[0], theirs));
    }
    let failed = servers.iter().zip(&seen).skip(1).filter_map(|(server, seen)| {
        let why = seen.iter().flatten().find_map(|seen| match seen {
            Seen::Failed(client, why) => Some((sequence.transports[client.0], why)),
            _ => None,
        });
        why.map(|(transport, why)| format!("{} over {transport}: {why}", server.name))
    });
    Ok(Compared { found, failed: failed.collect() })
}

/// Finds the shortest sequence that shows a difference; `None` if the difference does not recur.
fn shortest(unknown: &Unknown, servers: &[Server], lane: usize, rounds: usize) -> Option<Sequence> {
    let signature = report::signature(&unknown.sequences[0], &unknown.difference);
    let shows = |sequence: &Sequence, lane: usize| {
        let compared = compared(sequence, servers, lane, Patience::LONG).ok()?;
        compared
            .found
            .iter()
            .any(|it| report::signature(sequence, it) == signature && known(sequence, it).is_none())
            .then_some(())
    };
    let repeats = |sequence: &&Sequence| shows(sequence, lane).is_some() && shows(sequence, lane).is_some();
    let sequence = unknown.sequences.iter().find(repeats)?.clone();
    let first_failing = |candidates: &[Sequence]| {
        let failing: Vec<bool> = thread::scope(|scope| {
            let ask = |(index, candidate)| scope.spawn(move || shows(candidate, lane + index).is_some());
            let threads: Vec<_> = candidates.iter().enumerate().map(ask).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or(false)).collect()
        });
        failing.iter().position(|fails| *fails)
    };
    let with = |steps: &[Step]| Sequence { steps: steps.to_vec(), ..sequence.clone() };
    let steps = reduce::reduce(sequence.steps.clone(), rounds, &mut |candidates| {
        first_failing(&candidates.iter().map(|steps| with(steps)).collect::<Vec<_>>())
    });
    let mut sequence = with(&steps);
    for _ in 0..rounds {
        let mut candidates = simpler(&sequence);
        let Some(failing) = first_failing(&candidates) else { break };
        sequence = candidates.swap_remove(failing);
    }
    Some(sequence)
}

fn simpler(sequence: &Sequence) -> Vec<Sequence> {
    let mut found = Vec::new();
    if sequence.dialect != Dialect::Classic {
        found.push(Sequence { dialect: Dialect::Classic, ..sequence.clone() });
    }
    for (at, step) in sequence.steps.iter().enumerate() {
        let Step::Request(client, request) = step else { continue };
        let mut push = |request| {
            let mut sequence = sequence.clone();
            sequence.steps[at] = Step::Request(*client, request);
            found.push(sequence);
        };
        if request.fingerprint {
            push(Request { fingerprint: false, ..request.clone() });
        }
        for field in 0..request.fields.len() {
            let mut request = request.clone();
            request.fields.remove(field);
            push(request);
        }
    }
    found
}

/// Keeps the servers busy with unauthenticated packets until dropped.
struct Flood {
    is_over: &'static AtomicBool,
}

impl Flood {
    fn start(kind: Kind, servers: &[Server]) -> io::Result<Self> {
        let is_over: &'static AtomicBool = Box::leak(Box::new(AtomicBool::new(kind != Kind::Overload)));
        for server in servers {
            let socket = server.socket()?;
            thread::spawn(move || {
                // An empty Allocate, a Binding request, and garbage.
                let header = [0x21, 0x12, 0xA4, 0x42, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
                let messages = [
                    [&[0, 3, 0, 0], &header[..]].concat(),
                    [&[0, 1, 0, 0], &header[..]].concat(),
                    vec![0xFF; 40],
                ];
                for message in messages.iter().cycle() {
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                    let _ = socket.send(message);
                    thread::sleep(Duration::from_micros(1_000_000 / FLOOD));
                }
            });
        }
        Ok(Self { is_over })
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

type Unknowns = BTreeMap<String, Unknown>;
