//! The rounds of a benchmark: every subject runs once a round, in an order drawn from the seed, and each round is kept
//! in a file as soon as it is done. What a trial is and what it finds is the benchmark's own business.

use std::{
    fs,
    io::{IsTerminal, Write as _},
    path::{Path, PathBuf},
    process,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde_json::{Map, Value, json};

use super::{machine, options::Run, stats::Random};
use crate::Failure;

/// What is measured: one or several rows of a table.
pub(crate) trait Named {
    /// As chosen by `--workload`.
    fn name(&self) -> &str;
    /// As it stands in the table.
    fn title(&self) -> &str;
}

/// What one trial found.
pub(crate) trait Found {
    /// One line for the person who watches.
    fn summary(&self) -> String;
    /// Everything, for the file.
    fn to_json(&self) -> Value;
}

/// All rounds of one workload.
pub(crate) struct Results<W, F> {
    pub(crate) workload: W,
    pub(crate) rounds: Vec<Round<F>>,
}

/// One round: every subject once, in the order they ran.
pub(crate) struct Round<F> {
    /// Thrown away: caches, clocks and the page cache warm up in it.
    pub(crate) warmup: bool,
    /// Subject's name and what it reached.
    pub(crate) runs: Vec<(String, F)>,
    /// Subject's name and why its trial is void.
    pub(crate) void: Vec<(String, String)>,
}

impl<W, F> Results<W, F> {
    pub(crate) fn measured(&self) -> impl Iterator<Item = &Round<F>> {
        self.rounds.iter().filter(|round| !round.warmup)
    }

    /// Trials without a result, those of thrown-away rounds too: subject and reason.
    pub(crate) fn void(&self) -> impl Iterator<Item = &(String, String)> {
        self.rounds.iter().flat_map(|round| &round.void)
    }
}

impl<W: Named, F: Found> Results<W, F> {
    pub(crate) fn to_json(&self) -> Value {
        let numbered = || self.rounds.iter().enumerate();
        let runs: Vec<Value> = numbered()
            .flat_map(|(index, round)| {
                round.runs.iter().enumerate().map(move |(order, (subject, finding))| {
                    let mut run = finding.to_json();
                    run["round"] = json!(index + 1);
                    run["warmup"] = json!(round.warmup);
                    run["order"] = json!(order + 1);
                    run["subject"] = json!(subject);
                    run
                })
            })
            .collect();
        let void: Vec<Value> = numbered()
            .flat_map(|(index, round)| {
                round.void.iter().map(move |(subject, reason)| {
                    json!({ "round": index + 1, "subject": subject, "reason": reason })
                })
            })
            .collect();
        json!({ "workload": self.workload.name(), "title": self.workload.title(), "runs": runs, "void": void })
    }
}

impl<F> Round<F> {
    pub(crate) fn find(&self, subject: &str) -> Option<&F> {
        self.runs.iter().find(|(name, _)| name == subject).map(|(_, finding)| finding)
    }
}

/// How many rounds, in which order, and where they are kept.
pub(crate) struct Plan {
    pub(crate) seed: u64,
    warmup_rounds: u32,
    rounds: u32,
    seconds: f64,
    origin: Map<String, Value>,
    /// The JSON file with every round.
    file: PathBuf,
}

impl Plan {
    /// States the origin on standard error and keeps it with the results; `kind` begins the file's name.
    pub(crate) fn new(run: &Run, kind: &str, mut origin: Map<String, Value>) -> Result<Self, Failure> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        let seed = run.seed.unwrap_or_else(|| now ^ u64::from(process::id()) << 32);
        origin.insert("seed".to_owned(), json!(seed));
        for (name, value) in &origin {
            eprintln!("{name}: {value}");
        }
        Ok(Self {
            seed,
            warmup_rounds: run.warmup_rounds(),
            rounds: run.rounds(),
            seconds: run.seconds(),
            origin,
            file: directory()?.join(format!("{kind}-{now}.json")),
        })
    }

    /// All rounds of all workloads; `subjects` names those of a workload, `trial` runs one of them under a label for
    /// its logs. A trial that fails is said and leaves a gap, so that an hour of measurements does not go down with
    /// one of them; the file is written after each round for the same reason.
    pub(crate) fn measure<W: Named + Clone, F: Found>(
        &self,
        workloads: &[W],
        subjects: impl Fn(&W) -> Vec<String>,
        trial: impl Fn(&W, &str, &str) -> Result<F, Failure>,
    ) -> Result<Vec<Results<W, F>>, Failure> {
        let rounds = self.rounds + self.warmup_rounds;
        let mut random = Random::from_seed(self.seed);
        let mut progress = Progress::new(workloads.iter().map(|w| subjects(w).len()).sum(), rounds);
        let mut all = Vec::new();
        for workload in workloads {
            all.push(Results { workload: workload.clone(), rounds: Vec::new() });
            for round in 0..rounds {
                let mut order = subjects(workload);
                random.shuffle(&mut order);
                let (mut runs, mut void) = (Vec::new(), Vec::new());
                for subject in order {
                    progress.begin(workload.name(), &subject, round + 1);
                    let label = format!("{}-{}-{subject}", workload.name(), round + 1);
                    match trial(workload, &subject, &label) {
                        Ok(finding) => {
                            progress.end(&finding.summary());
                            runs.push((subject, finding));
                        }
                        Err(failure) => {
                            progress.end(&format!("FAILED: {failure}"));
                            void.push((subject, failure.to_string()));
                        }
                    }
                }
                if let Some(results) = all.last_mut() {
                    results.rounds.push(Round { warmup: round < self.warmup_rounds, runs, void });
                }
                self.write(&all)?;
            }
        }
        Ok(all)
    }

    /// Where the printed figures come from.
    pub(crate) fn print_origin(&self) {
        println!(
            "{} measured rounds after {} thrown away, {} s each, seed {}; every round: {}",
            self.rounds,
            self.warmup_rounds,
            self.seconds,
            self.seed,
            shorten(&self.file)
        );
        println!("`{}`", machine::command_line());
    }

    fn write<W: Named, F: Found>(&self, all: &[Results<W, F>]) -> Result<(), Failure> {
        let json = json!({
            "origin": self.origin,
            "seed": self.seed,
            "window_s": self.seconds,
            "workloads": all.iter().map(Results::to_json).collect::<Vec<_>>(),
        });
        // Written beside and renamed, so that an interrupted run leaves the last whole file.
        let beside = self.file.with_extension("partial");
        fs::write(&beside, serde_json::to_string_pretty(&json)?)?;
        fs::rename(&beside, &self.file)?;
        Ok(())
    }
}

/// Where results are kept.
fn directory() -> Result<PathBuf, Failure> {
    Ok(machine::repository()?.join("target/bench"))
}

/// Makes the directory for this run's logs.
pub(crate) fn make_log_directory() -> Result<PathBuf, Failure> {
    let logs = directory()?.join(format!("logs-{}", process::id()));
    fs::create_dir_all(&logs)?;
    Ok(logs)
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
    /// `trials` a round, all workloads together.
    fn new(trials: usize, rounds: u32) -> Self {
        let trials = u32::try_from(trials).unwrap_or(u32::MAX);
        Self { done: 0, total: trials.saturating_mul(rounds), rounds, started: Instant::now() }
    }

    fn begin(&self, workload: &str, subject: &str, round: u32) {
        let left = match self.done {
            0 => "?".to_owned(),
            done => minutes(self.started.elapsed() / done * (self.total - done)),
        };
        let line = format!(
            "[{}/{}, {left} left] {workload} round {round}/{} {subject}: ",
            self.done + 1,
            self.total,
            self.rounds,
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

    struct Kind;
    struct Figure(u64);

    impl Named for Kind {
        fn name(&self) -> &str {
            "kind"
        }

        fn title(&self) -> &str {
            "a kind"
        }
    }

    impl Found for Figure {
        fn summary(&self) -> String {
            self.0.to_string()
        }

        fn to_json(&self) -> Value {
            json!({ "figure": self.0 })
        }
    }

    fn results() -> Results<Kind, Figure> {
        let round = |warmup, figure| Round {
            warmup,
            runs: vec![("one".to_owned(), Figure(figure)), ("other".to_owned(), Figure(figure + 1))],
            void: vec![("third".to_owned(), format!("no luck {figure}"))],
        };
        Results { workload: Kind, rounds: vec![round(true, 1), round(false, 5)] }
    }

    #[test]
    fn the_json_keeps_every_round_and_marks_the_warm_up() {
        let json = results().to_json();
        let runs = json["runs"].as_array().unwrap();
        assert_eq!(runs.len(), 4);
        assert_eq!((&runs[0]["warmup"], &runs[3]["warmup"]), (&json!(true), &json!(false)));
        assert_eq!((&runs[3]["round"], &runs[3]["order"]), (&json!(2), &json!(2)));
        assert_eq!(json["void"][1], json!({ "round": 2, "subject": "third", "reason": "no luck 5" }));
    }

    #[test]
    fn the_warm_up_round_is_not_measured_but_its_failures_are_told() {
        let results = results();
        assert_eq!(results.measured().count(), 1);
        assert_eq!(results.measured().next().unwrap().find("other").unwrap().0, 6);
        assert_eq!(results.void().count(), 2);
    }
}
