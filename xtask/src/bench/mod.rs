//! `cargo xtask bench`: relays side by side in network namespaces. docs/benchmarks.md says what is measured and why.

mod counters;
mod finding;
mod machine;
mod netns;
mod options;
mod probe;
mod report;
mod stats;
mod subject;
mod trial;
mod workload;

use std::{
    fs,
    io::{IsTerminal, Write as _},
    path::{Path, PathBuf},
    process::{self, ExitCode},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

pub(crate) use self::{machine::repository, options::Command};
use self::{
    netns::Network,
    options::Options,
    report::{Comparison, Results, Round},
    stats::Random,
    subject::{Generator, Subject},
    trial::Bench,
    workload::Workload,
};
use crate::Failure;

/// An asked-for limit was exceeded, as turnpike's own exit code says it.
const LIMIT_EXCEEDED: u8 = 3;

/// Workloads that show what the generator can do.
const GENERATOR_WORKLOADS: [&str; 4] = ["flood-1", "flood-8", "burst-64", "thin-1000"];

/// Runs the command to its end.
pub(crate) fn run(command: Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Relay(options) if options.clean => {
            let removed = netns::remove_stale()?;
            println!("removed {removed} namespaces of earlier runs");
            Ok(ExitCode::SUCCESS)
        }
        Command::Relay(options) if options.list => {
            for workload in workload::all() {
                println!("{:<16} {}", workload.name, workload.title);
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Relay(options) => bench_relay(&options),
        Command::Generator(options) => bench_generator(&options),
        Command::Guardian { prefix } => netns::guard(&prefix).map(|()| ExitCode::SUCCESS),
        Command::Probe { address } => probe::until_answered(address).map(|()| ExitCode::SUCCESS),
    }
}

fn bench_relay(options: &Options) -> Result<ExitCode, Failure> {
    let workloads = workload::chosen(&options.workload)?;
    let turnpike = options.turnpike_binary()?;
    let subjects = options.subjects(turnpike.as_deref())?;
    let baseline = options.baseline(&subjects)?;
    let lab = Lab::set_up(options, turnpike, "relay", &subjects)?;
    let results = lab.measure(&workloads, &subjects)?;

    let mut all_met = true;
    for subject in subjects.iter().filter(|subject| subject.name != baseline) {
        let comparison = Comparison::of(&subject.name, &baseline, &results, lab.seed);
        all_met &= comparison.all_met();
        println!("\n{}", comparison.markdown());
        let by_process = Comparison::by_process_time(&subject.name, &baseline, &results, lab.seed);
        if !by_process.is_empty() {
            println!("By the time of the process in place of its core:\n\n{}", by_process.markdown());
        }
    }
    let names: Vec<String> = subjects.iter().map(|subject| subject.name.clone()).collect();
    println!("Medians behind the ratios:\n\n{}", report::details(&results, &names));
    lab.print_origin();
    Ok(if options.check && !all_met { ExitCode::from(LIMIT_EXCEEDED) } else { ExitCode::SUCCESS })
}

fn bench_generator(options: &Options) -> Result<ExitCode, Failure> {
    let names = match &options.workload[..] {
        [] => GENERATOR_WORKLOADS.map(str::to_owned).to_vec(),
        named => named.to_vec(),
    };
    let workloads = workload::chosen(&names)?;
    let turnpike =
        options.turnpike_binary()?.ok_or("the generator is turnpike's: --generator uclient has none")?;
    let subject = Subject::turnpike("turnpike", &turnpike, &options.datapath);
    let subjects = [subject];
    let lab = Lab::set_up(options, Some(turnpike), "generator", &subjects)?;
    let results = lab.measure(&workloads, &subjects)?;
    println!("\n{}", report::generator_table(&results, "turnpike"));
    println!("{}", report::details(&results, &["turnpike".to_owned()]));
    lab.print_origin();
    Ok(ExitCode::SUCCESS)
}

/// A benchmark ready to run.
struct Lab {
    bench: Bench,
    seed: u64,
    warmup_rounds: u32,
    rounds: u32,
    origin: serde_json::Value,
    /// The JSON file with every round.
    file: PathBuf,
}

impl Lab {
    fn set_up(
        options: &Options,
        turnpike: Option<PathBuf>,
        kind: &str,
        subjects: &[Subject],
    ) -> Result<Self, Failure> {
        machine::demand_root_and_tools(subjects)?;
        machine::raise_open_files_limit()?;
        for namespace in netns::stale_namespaces()? {
            eprintln!("note: {namespace} was left behind by an earlier run; --clean removes it");
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let seed = options.seed.unwrap_or_else(|| now.as_secs() ^ u64::from(process::id()) << 32);
        let results = machine::repository()?.join("target/bench");
        let directory = results.join(format!("logs-{}", process::id()));
        fs::create_dir_all(&directory)?;
        let generator = match (options.generator.as_str(), turnpike) {
            ("turnpike", Some(binary)) => Generator::Turnpike(binary),
            _ => Generator::Uclient,
        };
        let bench = Bench {
            network: Network::up()?,
            generator,
            relay_core: options.relay_cpu,
            load_core: options.load_cpu,
            nice: options.nice,
            seconds: options.seconds(),
            profile: options.profile,
            burst: options.burst,
            directory,
        };
        let origin = machine::describe(&bench, subjects, seed);
        for (name, value) in origin.as_object().into_iter().flatten() {
            eprintln!("{name}: {value}");
        }
        Ok(Self {
            bench,
            seed,
            warmup_rounds: options.warmup_rounds(),
            rounds: options.rounds(),
            origin,
            file: results.join(format!("{kind}-{}.json", now.as_secs())),
        })
    }

    /// All rounds of all workloads. A trial that fails is said and leaves a gap, so that an hour of measurements
    /// does not go down with one of them; the file is written after each round for the same reason.
    fn measure(&self, workloads: &[Workload], subjects: &[Subject]) -> Result<Vec<Results>, Failure> {
        let mut random = Random::from_seed(self.seed);
        let mut progress = Progress::new(workloads.len(), self.rounds + self.warmup_rounds, subjects.len());
        let mut all = Vec::new();
        for workload in workloads {
            all.push(Results { workload: workload.clone(), rounds: Vec::new() });
            for round in 0..self.rounds + self.warmup_rounds {
                let mut order: Vec<&Subject> = subjects.iter().collect();
                random.shuffle(&mut order);
                let mut runs = Vec::new();
                for subject in order {
                    progress.begin(workload, subject, round + 1);
                    let label = format!("{}-{}-{}", workload.name, round + 1, subject.name);
                    match self.bench.run(workload, subject, &label) {
                        Ok(finding) => {
                            progress.end(&finding.summary());
                            runs.push((subject.name.clone(), finding));
                        }
                        Err(failure) => progress.end(&format!("FAILED: {failure}")),
                    }
                }
                if let Some(results) = all.last_mut() {
                    results.rounds.push(Round { warmup: round < self.warmup_rounds, runs });
                }
                self.write(&all)?;
            }
        }
        Ok(all)
    }

    fn write(&self, all: &[Results]) -> Result<(), Failure> {
        let json = serde_json::json!({
            "origin": self.origin,
            "seed": self.seed,
            "window_s": self.bench.seconds,
            "workloads": all.iter().map(Results::to_json).collect::<Vec<_>>(),
        });
        // Written beside and renamed, so that an interrupted run leaves the last whole file.
        let beside = self.file.with_extension("partial");
        fs::write(&beside, serde_json::to_string_pretty(&json)?)?;
        fs::rename(&beside, &self.file)?;
        Ok(())
    }

    fn print_origin(&self) {
        println!(
            "{} measured rounds after {} thrown away, {} s each, seed {}; every round: {}",
            self.rounds,
            self.warmup_rounds,
            self.bench.seconds,
            self.seed,
            shorten(&self.file)
        );
        println!("`{}`", machine::command_line());
    }
}

/// The path below the repository, where it is below it.
fn shorten(path: &Path) -> String {
    let repository = machine::repository().unwrap_or_default();
    path.strip_prefix(repository).unwrap_or(path).display().to_string()
}

/// What runs, how far, and how long still: one line a trial on standard error.
struct Progress {
    done: u32,
    total: u32,
    rounds: u32,
    started: Instant,
}

impl Progress {
    fn new(workloads: usize, rounds: u32, subjects: usize) -> Self {
        let trials = u32::try_from(workloads * subjects).unwrap_or(u32::MAX);
        Self { done: 0, total: trials.saturating_mul(rounds), rounds, started: Instant::now() }
    }

    fn begin(&self, workload: &Workload, subject: &Subject, round: u32) {
        let left = match self.done {
            0 => "?".to_owned(),
            done => minutes(self.started.elapsed() / done * (self.total - done)),
        };
        let line = format!(
            "[{}/{}, {left} left] {} round {round}/{} {}: ",
            self.done + 1,
            self.total,
            workload.name,
            self.rounds,
            subject.name
        );
        let mut out = std::io::stderr();
        // Progress is a courtesy: a closed standard error must not end the benchmark.
        let _ = write!(out, "{line}").and_then(|()| out.flush());
    }

    fn end(&mut self, result: &str) {
        self.done += 1;
        let separator = if std::io::stderr().is_terminal() { "\n    " } else { "" };
        let _ = writeln!(std::io::stderr(), "{separator}{result}");
    }
}

fn minutes(duration: Duration) -> String {
    format!("{}:{:02}", duration.as_secs() / 60, duration.as_secs() % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generators_workloads_exist() {
        let names = GENERATOR_WORKLOADS.map(str::to_owned);
        assert_eq!(workload::chosen(&names).unwrap().len(), names.len());
    }
}
