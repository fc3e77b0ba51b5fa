//! The command line of `turnpike lab`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::{adhoc::AdhocOptions, request::Overrides, search::SearchOptions};

const AB: &str = "\
Names in commands: {client}, {relay}, {peer} are the addresses of the namespaces (client - relay - peer),
{relay-peer} that of the relay on its link with the peer, {turnpike} (or a bare `turnpike` in front) this program.

With `turnpike load MODE TARGET` as workload the rest follows: --duration, --warmup and --json are added to it, a subject
is ready when it answers at TARGET, `turnpike reflect` runs at the --peer of `load turn` (by default {peer}:3480), subjects
are pinned to CPU 0 and the load to CPU 1. What that comes to is printed first; every option overrides its part.

Example: is the relay faster with this change?
  turnpike lab ab \\
    --a './old/turnpike serve --listen {relay}:3478 --relay-ip {relay-peer} --user u:p --allow-peer {peer}/32 --workers 1' \\
    --b './new/turnpike serve --listen {relay}:3478 --relay-ip {relay-peer} --user u:p --allow-peer {peer}/32 --workers 1' \\
    -- turnpike load turn {relay}:3478 --user u:p --clients 8 --rate max

Example: a forwarder, with a server of one's own behind it
  turnpike lab ab --helper 'peer:iperf3 -s' --ready-tcp-port 5000 \\
    --a 'socat TCP-LISTEN:5000,fork,reuseaddr TCP:{peer}:5201' --b 'turnpike forward tcp://{relay}:5000={peer}:5201' \\
    -- iperf3 -c {relay} -p 5000";

const SUITE: &str = "\
Ctrl-C keeps the rows that are done; --resume makes the others, beginning with the one that was interrupted.
Exit codes: 0 done, 1 a row could not be measured or the suite was interrupted, 2 bad usage, 3 a `must` is missed.

Examples:
  turnpike lab suite relay                           our relay, coturn, and others that are there
  turnpike lab suite forward --only bulk --rounds 6
  turnpike lab suite --resume lab-runs/suite-relay-20261122-160000 --markdown";

const PROFILE: &str = "\
For whole stacks build with frame pointers: `cargo profiling` in this repository (target/profiling/turnpike).

Example:
  turnpike lab profile 'target/profiling/turnpike serve --listen {relay}:3478 --relay-ip {relay-peer} --user u:p \\
    --allow-peer {peer}/32 --workers 1' -- turnpike load turn {relay}:3478 --user u:p --clients 8 --rate max
  turnpike lab profile --diff lab-runs/profile-A lab-runs/profile-B";

/// `turnpike lab ...`, for the binary's own parser.
#[derive(Debug, Args)]
pub struct LabArgs {
    #[command(subcommand)]
    pub(crate) command: LabCommand,
}

/// For [`crate::main`].
#[derive(Debug, Parser)]
#[command(name = "turnpike lab", about = "Experiments that can be believed", arg_required_else_help = true)]
pub(crate) struct Lab {
    #[command(flatten)]
    pub(crate) args: LabArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LabCommand {
    /// Make network namespaces joined by veth pairs, by default client, relay and peer
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
    /// Remove the namespaces, and all that crashed runs have left
    Down {
        #[command(flatten)]
        id: Id,
    },
    /// Run an experiment file, or one that `lab list` shows by its name
    Run {
        #[command(flatten)]
        file: ExperimentFile,
        #[command(flatten)]
        out: OutputOptions,
    },
    /// List the experiments and suites that need no file
    List,
    /// Run a table of experiments, one record each, and hold their figures against its bars
    #[command(after_long_help = SUITE)]
    Suite {
        /// Suite file, or one of experiments/suites/ by its name
        #[arg(required_unless_present = "resume")]
        suite: Option<PathBuf>,
        /// Go on with a suite that was interrupted, from its directory
        #[arg(long, value_name = "DIR", conflicts_with_all = ["suite", "only", "set", "topology"])]
        resume: Option<PathBuf>,
        /// Print the table in Markdown
        #[arg(long)]
        markdown: bool,
        /// Only rows in whose title or experiment this text stands; may be repeated
        #[arg(long, value_name = "TEXT")]
        only: Vec<String>,
        /// Give a variable of all rows a value, or `turnpike` another build
        #[arg(long, value_name = "NAME=VALUE")]
        set: Vec<String>,
        #[command(flatten)]
        place: TopologyOptions,
        #[command(flatten)]
        changes: Overrides,
        /// Directory below which the suite gets one of its own
        #[arg(long, value_name = "DIR", default_value = "lab-runs")]
        out: PathBuf,
    },
    /// Compare two commands under a workload, without a file
    #[command(after_long_help = AB)]
    Ab {
        /// The baseline
        #[arg(long, value_name = "CMD")]
        a: String,
        /// What is compared with it
        #[arg(long, value_name = "CMD")]
        b: String,
        #[command(flatten)]
        setting: AdhocOptions,
        #[command(flatten)]
        changes: Overrides,
        #[command(flatten)]
        out: OutputOptions,
        /// Workload
        #[arg(last = true, required = true)]
        workload: Vec<String>,
    },
    /// Offer several rates to each subject of an experiment
    Sweep {
        #[command(flatten)]
        file: ExperimentFile,
        /// Rates in datagrams a second
        #[arg(long, value_name = "PPS,...", value_delimiter = ',', required = true)]
        rates: Vec<u64>,
        #[command(flatten)]
        out: OutputOptions,
    },
    /// Search the highest rate that each subject bears, and its latency at 30, 60 and 80 % of it
    FindMax {
        #[command(flatten)]
        file: ExperimentFile,
        #[command(flatten)]
        search: SearchOptions,
        #[command(flatten)]
        out: OutputOptions,
    },
    /// Flame graph, hottest symbols and syscalls of a command under a workload; or the difference of two such
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
        out: OutputOptions,
        /// Workload
        #[arg(last = true, required_unless_present = "diff")]
        workload: Vec<String>,
    },
    /// Show records again, or compare those of different days
    Report {
        /// Directories of records
        #[arg(required = true)]
        directories: Vec<PathBuf>,
        #[command(flatten)]
        log: Log,
    },
    /// Repeat a run with the same experiment, values and seed
    Rerun {
        /// Directory of the record
        directory: PathBuf,
        #[command(flatten)]
        out: OutputOptions,
    },
}

/// Which topology.
#[derive(Debug, Args)]
pub(crate) struct Id {
    /// Name of the topology, where several are wanted at once
    #[arg(long, value_name = "NAME", default_value = "up")]
    pub(crate) id: String,
}

#[derive(Debug, Args)]
pub(crate) struct ExperimentFile {
    /// File, or a name that `lab list` shows
    pub(crate) experiment: PathBuf,
    /// Give a variable of the experiment a value (one that it sweeps is then not swept), or `turnpike` another build
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) set: Vec<String>,
    #[command(flatten)]
    pub(crate) place: TopologyOptions,
    #[command(flatten)]
    pub(crate) changes: Overrides,
}

#[derive(Debug, Args)]
pub(crate) struct TopologyOptions {
    /// `wire`, `veth`, `host`, or a topology file, in place of the experiment's
    #[arg(long, value_name = "T")]
    pub(crate) topology: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct OutputOptions {
    /// Directory below which the record gets one of its own
    #[arg(long, value_name = "DIR", default_value = "lab-runs")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) log: Log,
}

#[derive(Debug, Default, Args)]
pub(crate) struct Log {
    /// Add one row to a performance log (docs/dev/performance-log.md)
    #[arg(long, value_name = "FILE")]
    pub(crate) log: Option<PathBuf>,
    /// What was changed, for that row [default: the experiment's name]
    #[arg(long, value_name = "TEXT", requires = "log")]
    pub(crate) change: Option<String>,
    /// The gain predicted before measuring, for that row
    #[arg(long, value_name = "RATIO", requires = "log")]
    pub(crate) predicted: Option<String>,
}
