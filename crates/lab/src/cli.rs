//! Command line of `turnpike lab`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::{adhoc::AdhocOptions, request::Overrides, search::SearchOptions};

const AB: &str = "\
Variables in commands: {client}, {relay} and {peer} are the addresses of the namespaces
(client - relay - peer), {relay-peer} is the relay's address on its link to the peer, and {turnpike}
(or a leading `turnpike`) is this program.

With `turnpike load MODE TARGET` as the workload, the lab completes the rest: it adds --duration,
--warmup and --json, a subject is ready when it answers at TARGET, `turnpike reflect` runs at the
--peer of `load turn` (default {peer}:3480), and subjects are pinned to CPU 0 and the load to CPU 1.
The completed experiment is printed first; every option overrides the part that it sets.

Example: is the relay faster with this change?
  turnpike lab ab \\
    --a './old/turnpike serve --listen {relay}:3478 --relay-ip {relay-peer} --user u:p --allow-peer {peer}/32 --workers 1' \\
    --b './new/turnpike serve --listen {relay}:3478 --relay-ip {relay-peer} --user u:p --allow-peer {peer}/32 --workers 1' \\
    -- turnpike load turn {relay}:3478 --user u:p --clients 8 --rate max

Example: a forwarder with a backend server
  turnpike lab ab --helper 'peer:iperf3 -s' --ready-tcp-port 5000 \\
    --a 'socat TCP-LISTEN:5000,fork,reuseaddr TCP:{peer}:5201' --b 'turnpike forward tcp://{relay}:5000={peer}:5201' \\
    -- iperf3 -c {relay} -p 5000";

const SUITE: &str = "\
Ctrl-C keeps finished rows; --resume runs the remaining ones, starting with the one that was
interrupted.
Exit codes: 0 done, 1 a row could not be measured or the suite was interrupted, 2 bad usage, 3 a
`must` is missed.

Examples:
  turnpike lab suite relay                           turnpike, coturn, and other installed relays
  turnpike lab suite forward --only bulk --rounds 6
  turnpike lab suite --resume lab-runs/suite-relay-20261122-160000";

const PROFILE: &str = "\
Build with frame pointers to get complete stacks: `cargo profiling` in this repository
(target/profiling/turnpike).

Example:
  turnpike lab profile 'target/profiling/turnpike serve --listen {relay}:3478 --relay-ip {relay-peer} --user u:p \\
    --allow-peer {peer}/32 --workers 1' -- turnpike load turn {relay}:3478 --user u:p --clients 8 --rate max
  turnpike lab profile --diff lab-runs/profile-A lab-runs/profile-B";

#[derive(Debug, Args)]
pub struct LabArgs {
    #[command(subcommand)]
    pub(crate) command: LabCommand,
}

/// Parser of [`crate::main`].
#[derive(Debug, Parser)]
#[command(name = "turnpike lab", about = "Reliable performance experiments", arg_required_else_help = true)]
pub(crate) struct Lab {
    #[command(flatten)]
    pub(crate) args: LabArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LabCommand {
    /// Create network namespaces joined by veth pairs, by default client, relay and peer
    Up {
        /// `veth`, `wire`, or a topology file
        #[arg(default_value = "veth")]
        topology: String,
        #[command(flatten)]
        id: Id,
    },
    /// Run a command inside a namespace
    Exec {
        #[command(flatten)]
        id: Id,
        /// Namespace
        name: String,
        /// Command
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Remove the namespaces, and what crashed runs left behind
    Down {
        #[command(flatten)]
        id: Id,
    },
    /// Run an experiment file, or one from `lab list`
    Run {
        #[command(flatten)]
        file: ExperimentFile,
    },
    /// List the built-in experiments and suites
    List,
    /// Run a table of experiments, one record each, and check the results against its thresholds
    #[command(after_long_help = SUITE)]
    Suite {
        /// Suite file, or the name of one in experiments/suites/
        #[arg(required_unless_present = "resume")]
        suite: Option<PathBuf>,
        /// Continue an interrupted suite in this directory
        #[arg(long, value_name = "DIR", conflicts_with_all = ["suite", "only", "set", "topology"])]
        resume: Option<PathBuf>,
        /// Run only rows with this text in their title or experiment; may be repeated
        #[arg(long, value_name = "TEXT")]
        only: Vec<String>,
        #[command(flatten)]
        options: RunOptions,
    },
    /// Compare two commands under a workload, without a file
    #[command(after_long_help = AB)]
    Ab {
        /// Baseline
        #[arg(long, value_name = "CMD")]
        a: String,
        /// Candidate
        #[arg(long, value_name = "CMD")]
        b: String,
        #[command(flatten)]
        setting: AdhocOptions,
        #[command(flatten)]
        changes: Overrides,
        #[command(flatten)]
        out: OutputDirectory,
        /// Workload
        #[arg(last = true, required = true)]
        workload: Vec<String>,
    },
    /// Offer several rates to each subject of an experiment
    Sweep {
        #[command(flatten)]
        file: ExperimentFile,
        /// Rates in datagrams per second
        #[arg(long, value_name = "PPS,...", value_delimiter = ',', required = true)]
        rates: Vec<u64>,
    },
    /// Find the highest sustainable rate of each subject, and its latency at 30, 60 and 80 % of that rate
    FindMax {
        #[command(flatten)]
        file: ExperimentFile,
        #[command(flatten)]
        search: SearchOptions,
    },
    /// Flame graph, hottest symbols and syscalls of a command under a workload, or the difference between two
    /// profiles
    #[command(after_long_help = PROFILE)]
    Profile {
        /// Command to profile
        #[arg(required_unless_present = "diff", value_name = "CMD")]
        subject: Option<String>,
        /// Compare two profiles
        #[arg(long, num_args = 2, value_names = ["DIR", "DIR"], conflicts_with_all = ["subject", "workload"])]
        diff: Vec<PathBuf>,
        #[command(flatten)]
        setting: AdhocOptions,
        #[command(flatten)]
        changes: Overrides,
        #[command(flatten)]
        out: OutputDirectory,
        /// Workload
        #[arg(last = true, required_unless_present = "diff")]
        workload: Vec<String>,
    },
    /// Show records, or compare records from different days
    Report {
        /// Directories of records
        #[arg(required = true)]
        directories: Vec<PathBuf>,
    },
    /// Repeat a run with the same experiment, values and seed
    Rerun {
        /// Directory of the record
        directory: PathBuf,
        #[command(flatten)]
        out: OutputDirectory,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Id {
    /// Name of the topology, if several exist at once
    #[arg(long, value_name = "NAME", default_value = "up")]
    pub(crate) id: String,
}

#[derive(Debug, Args)]
pub(crate) struct ExperimentFile {
    /// File, or a name from `lab list`
    pub(crate) experiment: PathBuf,
    #[command(flatten)]
    pub(crate) options: RunOptions,
}

#[derive(Debug, Default, Args)]
pub(crate) struct RunOptions {
    /// Set a variable (which is then no longer swept), or replace `turnpike` with another build
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) set: Vec<String>,
    /// `wire`, `veth`, `host`, or a topology file, instead of the experiment's own
    #[arg(long, value_name = "T")]
    pub(crate) topology: Option<String>,
    #[command(flatten)]
    pub(crate) changes: Overrides,
    #[command(flatten)]
    pub(crate) out: OutputDirectory,
}

#[derive(Debug, Default, Args)]
pub(crate) struct OutputDirectory {
    /// Parent of the new directory for the results
    #[arg(long = "out", value_name = "DIR", default_value = "lab-runs")]
    pub(crate) path: PathBuf,
}
