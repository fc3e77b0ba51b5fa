//! The command line of `cargo xtask bench`.

use std::{net::SocketAddr, path::PathBuf, process::Command as Program};

use clap::{Args, Subcommand, builder::PossibleValuesParser};

use super::{forward, machine, subject::Subject};
use crate::Failure;

#[derive(Subcommand)]
pub(crate) enum Command {
    /// turnpike against Debian's coturn: the table of docs/performance-log.md
    Relay(Options),
    /// The load generator's packets per core-second against the relay's
    Generator(Options),
    /// `turnpike forward` against oxidinetd, rinetd, HAProxy and nginx
    Forward(forward::Options),
    /// Removes the namespaces of its parent when that is gone
    #[command(hide = true)]
    Guardian { prefix: String },
    /// Waits for the answer to a STUN Binding request
    #[command(hide = true)]
    Probe { address: SocketAddr },
}

/// What every benchmark asks for.
#[derive(Args, Clone, Debug)]
pub(crate) struct Run {
    /// Only this workload (repeatable; `flood*` for all that begin so)
    #[arg(long, value_name = "NAME")]
    pub(crate) workload: Vec<String>,
    /// List the workloads
    #[arg(long)]
    pub(crate) list: bool,
    /// Measured rounds [default: 6, with --quick 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Rounds thrown away before them [default: 1, with --quick 0]
    #[arg(long, value_name = "N")]
    warmup_rounds: Option<u32>,
    /// Seconds of a window [default: 5, with --quick 2]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(1..=600))]
    duration: Option<u32>,
    /// Two short rounds, for development: no result to quote
    #[arg(long)]
    quick: bool,
    /// Order of the runs within a round [default: from the clock; printed]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Core of the relay, or of the forwarder
    #[arg(long, value_name = "CPU", default_value_t = 0)]
    pub(crate) relay_cpu: usize,
    /// Core of generator and reflector
    #[arg(long, value_name = "CPU", default_value_t = 1)]
    pub(crate) load_cpu: usize,
    /// Niceness of subject, generator and reflector alike, for machines that are not quiet (-20..19)
    #[arg(long, value_name = "N", default_value_t = 0, allow_hyphen_values = true)]
    pub(crate) nice: i8,
    /// A turnpike binary in place of a fresh release build
    #[arg(long, value_name = "FILE")]
    turnpike: Option<PathBuf>,
    /// Datagrams sent back to back, in place of the workload's own
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) burst: Option<u32>,
    /// Sample the subject's core with `perf` during each window; costs a few percent, so no result to quote
    #[arg(long)]
    pub(crate) profile: bool,
    /// Exit with 3 if a requirement is missed
    #[arg(long)]
    pub(crate) check: bool,
    /// Remove what killed runs left behind, and nothing else
    #[arg(long)]
    pub(crate) clean: bool,
}

impl Run {
    pub(crate) fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 2 } else { 6 })
    }

    pub(crate) fn warmup_rounds(&self) -> u32 {
        self.warmup_rounds.unwrap_or(u32::from(!self.quick))
    }

    /// Length of the window.
    pub(crate) fn seconds(&self) -> f64 {
        f64::from(self.duration.unwrap_or(if self.quick { 2 } else { 5 }))
    }

    /// The given binary or a fresh release build.
    pub(crate) fn turnpike_binary(&self) -> Result<PathBuf, Failure> {
        if let Some(binary) = &self.turnpike {
            return Ok(binary.canonicalize().map_err(|error| format!("{}: {error}", binary.display()))?);
        }
        let repository = machine::repository()?;
        let built = Program::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["build", "--release", "--package", "turnpike-cli"])
            .current_dir(&repository)
            .status()?;
        if !built.success() {
            return Err("the release build failed".into());
        }
        let target =
            std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository.join("target"), PathBuf::from);
        Ok(target.join("release/turnpike"))
    }
}

#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) run: Run,
    /// One more relay: NAME=BINARY for another build of turnpike, or NAME="COMMAND ..." with {listen}, {relay_ip},
    /// {user}, {password}, {realm} (repeatable)
    #[arg(long, value_name = "NAME=COMMAND")]
    subject: Vec<String>,
    /// Leave a relay out: coturn or turnpike (repeatable)
    #[arg(long, value_name = "NAME")]
    without: Vec<String>,
    /// What the ratios are against [default: coturn, or else the first subject]
    #[arg(long, value_name = "NAME")]
    baseline: Option<String>,
    /// Datapath of turnpike
    #[arg(long, value_name = "D", default_value = "gso")]
    pub(crate) datapath: String,
    /// Who makes the load; `uclient` is coturn's, without latencies
    #[arg(long, default_value = "turnpike", value_parser = PossibleValuesParser::new(["turnpike", "uclient"]))]
    pub(crate) generator: String,
}

impl Options {
    /// The turnpike to use; `None` if nobody needs one.
    pub(crate) fn turnpike_binary(&self) -> Result<Option<PathBuf>, Failure> {
        if self.generator != "turnpike" && self.leaves_out("turnpike") {
            return Ok(None);
        }
        self.run.turnpike_binary().map(Some)
    }

    /// Who is compared, in a fixed order.
    pub(crate) fn subjects(&self, turnpike: Option<&std::path::Path>) -> Result<Vec<Subject>, Failure> {
        let mut subjects = Vec::new();
        if !self.leaves_out("coturn") {
            subjects.push(Subject::coturn());
        }
        if let Some(binary) = turnpike
            && !self.leaves_out("turnpike")
        {
            subjects.push(Subject::turnpike("turnpike", binary, &self.datapath));
        }
        for text in &self.subject {
            let subject = Subject::parse(text, &self.datapath)?;
            if subjects.iter().any(|other| other.name == subject.name) {
                return Err(format!("two subjects are called {:?}", subject.name).into());
            }
            subjects.push(subject);
        }
        if subjects.is_empty() {
            return Err("no subject is left".into());
        }
        Ok(subjects)
    }

    /// The subject that ratios are against.
    pub(crate) fn baseline(&self, subjects: &[Subject]) -> Result<String, Failure> {
        match &self.baseline {
            Some(name) if subjects.iter().any(|subject| subject.name == *name) => Ok(name.clone()),
            Some(name) => Err(format!("--baseline {name:?}: no such subject").into()),
            None => Ok(subjects.first().ok_or("no subject is left")?.name.clone()),
        }
    }

    fn leaves_out(&self, name: &str) -> bool {
        self.without.iter().any(|other| other == name)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn options(line: &[&str]) -> Options {
        Line::try_parse_from(std::iter::once(&"bench").chain(line))
            .map_err(|error| error.to_string())
            .unwrap()
            .options
    }

    fn names(line: &[&str]) -> Vec<String> {
        let subjects = options(line).subjects(Some("/tmp/turnpike".as_ref())).unwrap();
        subjects.into_iter().map(|subject| subject.name).collect()
    }

    #[test]
    fn coturn_and_turnpike_are_the_default_subjects() {
        assert_eq!(names(&[]), ["coturn", "turnpike"]);
        assert_eq!(names(&["--without", "coturn", "--subject", "old=/tmp/old"]), ["turnpike", "old"]);
    }

    #[test]
    fn two_subjects_of_one_name_are_refused() {
        assert!(options(&["--subject", "coturn=/tmp/x"]).subjects(None).is_err());
        assert!(options(&["--without", "coturn"]).subjects(None).is_err());
    }

    #[test]
    fn ratios_are_against_the_first_subject_unless_one_is_named() {
        let options = options(&["--subject", "old=/tmp/old"]);
        let subjects = options.subjects(Some("/tmp/turnpike".as_ref())).unwrap();
        assert_eq!(options.baseline(&subjects).unwrap(), "coturn");
        let named = Options { baseline: Some("old".to_owned()), ..options.clone() };
        assert_eq!(named.baseline(&subjects).unwrap(), "old");
        let unknown = Options { baseline: Some("new".to_owned()), ..options };
        assert!(unknown.baseline(&subjects).is_err());
    }

    #[test]
    fn quick_shortens_what_is_not_said() {
        let quick = options(&["--quick"]).run;
        assert_eq!((quick.rounds(), quick.warmup_rounds(), quick.seconds()), (2, 0, 2.0));
        let mixed = options(&["--quick", "--rounds", "4"]).run;
        assert_eq!((mixed.rounds(), mixed.seconds()), (4, 2.0));
        let full = options(&["--nice", "-15"]).run;
        assert_eq!((full.rounds(), full.warmup_rounds(), full.nice), (6, 1, -15));
    }
}
