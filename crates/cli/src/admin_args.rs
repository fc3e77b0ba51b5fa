//! Commands that talk to a running program: `allocations`, `allocation`, `drain`, `reload`, `health`, `top`, `fleet`.

use std::{
    env,
    io::{self, IsTerminal as _, Write},
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use clap::{Args, Subcommand};
use turnpike_api::Drain;
use turnpike_ctl::{
    client::{Client, Target},
    commands::{self, AllocationListFilter, CommandError, OutputFormat},
    top,
};
use turnpike_process::wait_for_stop;

#[derive(Args)]
pub(crate) struct ConnectArgs {
    /// Address of the running program: unix:/PATH, ADDR:PORT on loopback, or https://HOST:PORT
    ///
    /// [default: the first of $RUNTIME_DIRECTORY/turnpike.sock, $XDG_RUNTIME_DIR/turnpike/admin.sock and /run/turnpike/turnpike.sock;
    /// otherwise 127.0.0.1:9641, which is read-only; health and top also try the sockets of `turnpike
    /// forward`]
    #[arg(long, value_name = "ADDRESS", env = "TURNPIKE_ADMIN")]
    admin: Option<Target>,

    /// File whose first line is a token from admin.tokens or, for read-only commands, from admin.read_tokens, or for captures, from admin.capture_tokens;
    /// not needed for the Unix socket [default: none]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// PEM file with certificate authorities to trust, or the program's own certificate, for https:// [default: the system's authorities]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct AdminArgs {
    #[command(flatten)]
    connect: ConnectArgs,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct AllocationsArgs {
    /// Only allocations of this user: the username, or the name that quotas apply to
    #[arg(long, value_name = "NAME")]
    user: Option<String>,

    /// Only allocations of users in this realm
    #[arg(long, value_name = "R")]
    realm: Option<String>,

    /// Only allocations of this client: ADDR:PORT, ADDR, or a prefix such as 192.0.2.0/24
    #[arg(long, value_name = "ADDR|CIDR")]
    client: Option<String>,

    /// Only allocations whose client uses udp, tcp, tls or dtls
    #[arg(long, value_name = "T")]
    transport: Option<String>,

    /// Only allocations with this relayed address: ADDR:PORT, ADDR, or a prefix
    #[arg(long, value_name = "ADDR|CIDR")]
    relayed: Option<String>,

    /// Show at most this many allocations, 1 or more [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,

    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Subcommand)]
pub(crate) enum AllocationCommand {
    /// Show an allocation with its permissions and channels
    Show(AllocationArgs),
    /// End an allocation; the client may start a new one
    End(AllocationArgs),
}

#[derive(Args)]
pub(crate) struct AllocationArgs {
    /// Allocation ID, 32 hex digits, from `turnpike allocations` or the log
    id: String,

    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Args)]
pub(crate) struct DrainArgs {
    /// Seconds until remaining allocations are ended, 0 to 86400 [default: the program's shutdown.deadline]
    #[arg(long, value_name = "S")]
    deadline: Option<u32>,

    /// Do not wait for the last N allocations or connections [default: 0]
    #[arg(long, value_name = "N")]
    until: Option<u64>,

    /// Wait until the program has exited; for hooks, such as preStop, after which the program is killed
    #[arg(long)]
    wait: bool,

    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Args)]
pub(crate) struct HealthArgs {
    /// Check only that the program is running; a draining program passes
    #[arg(long)]
    live: bool,

    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Args)]
pub(crate) struct ReloadArgs {
    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Subcommand)]
pub(crate) enum FleetCommand {
    /// List all nodes with their load
    Status(FleetStatusArgs),
    /// Cordon a node: new clients go to the other nodes. The node keeps running; a restart uncordons it
    Drain(NodeArgs),
    /// Let a node accept new clients again
    Uncordon(UncordonArgs),
    /// List the allocations of all nodes
    Allocations(Box<AllocationsArgs>),
}

#[derive(Args)]
pub(crate) struct FleetStatusArgs {
    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Args)]
pub(crate) struct NodeArgs {
    /// Node name from `turnpike fleet status`
    node: String,

    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Args)]
pub(crate) struct UncordonArgs {
    /// Node name [default: the node that receives the command]
    node: Option<String>,

    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Args)]
pub(crate) struct TopArgs {
    /// Refresh interval in seconds, 0.2 to 60
    #[arg(long, value_name = "S", default_value = "1", value_parser = seconds)]
    interval: Duration,

    /// Print one update and exit
    #[arg(long)]
    once: bool,

    #[command(flatten)]
    admin: AdminArgs,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.2..=60.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "expected seconds, 0.2 to 60".to_owned())
}

impl ConnectArgs {
    pub(crate) fn client(&self) -> Result<Client, CommandError> {
        crate::warn_of_token(self.token_file.as_deref());
        let client = Client::new(self.admin.clone(), self.token_file.as_deref())?.trusting(self.ca.clone());
        Ok(if self.admin.is_none() { client.or_on_loopback() } else { client })
    }
}

impl AdminArgs {
    pub(crate) fn client(&self) -> Result<Client, CommandError> {
        self.connect.client()
    }

    /// Returns a client that also tries the sockets of a forwarder.
    fn client_of_either(&self) -> Result<Client, CommandError> {
        let client = self.client()?;
        Ok(if self.connect.admin.is_none() { client.or_a_forwarder() } else { client })
    }
}

impl AllocationsArgs {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<(), CommandError> {
        let (wanted, admin) = self.taken_apart();
        commands::list_allocations(&admin.client()?, wanted, OutputFormat::of_stdout(admin.json), out)
    }

    fn taken_apart(self) -> (AllocationListFilter, AdminArgs) {
        let Self { user, realm, client, transport, relayed, limit, admin } = self;
        let limit = limit.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX));
        (AllocationListFilter { user, realm, client, transport, relayed, limit }, admin)
    }
}

impl FleetCommand {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<(), CommandError> {
        let order = |admin: &AdminArgs, node: Option<&str>, drains, out: &mut dyn Write| {
            commands::order_node(&admin.client()?, node, drains, admin.json, out)
        };
        match self {
            Self::Status(FleetStatusArgs { admin }) => {
                commands::show_fleet(&admin.client()?, OutputFormat::of_stdout(admin.json), out)
            }
            Self::Drain(NodeArgs { node, admin }) => order(&admin, Some(&node), true, out),
            Self::Uncordon(UncordonArgs { node, admin }) => order(&admin, node.as_deref(), false, out),
            Self::Allocations(args) => {
                let (wanted, admin) = args.taken_apart();
                commands::list_fleet_allocations(
                    &admin.client()?,
                    wanted,
                    OutputFormat::of_stdout(admin.json),
                    out,
                )
            }
        }
    }
}

impl AllocationCommand {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<(), CommandError> {
        match self {
            Self::Show(AllocationArgs { id, admin }) => {
                commands::show_allocation(&admin.client()?, &id, OutputFormat::of_stdout(admin.json), out)
            }
            Self::End(AllocationArgs { id, admin }) => {
                commands::end_allocation(&admin.client()?, &id, OutputFormat::of_stdout(admin.json), out)
            }
        }
    }
}

impl DrainArgs {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<(), CommandError> {
        let client = self.admin.client()?;
        let wanted = Drain { deadline_s: self.deadline, until: self.until };
        commands::drain(&client, wanted, self.admin.json, out)?;
        if self.wait {
            out.flush()?;
            commands::wait_for_end(&client)?;
        }
        Ok(())
    }
}

impl HealthArgs {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<(), CommandError> {
        commands::health(&self.admin.client_of_either()?, self.live, self.admin.json, out)
    }
}

impl ReloadArgs {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<(), CommandError> {
        commands::reload(&self.admin.client()?, self.admin.json, out)
    }
}

impl TopArgs {
    /// Runs until interrupted; needs a terminal unless `--once` or `--json` is given.
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<(), CommandError> {
        static STOPPED: AtomicBool = AtomicBool::new(false);
        let Self { interval, once, admin } = self;
        let is_picture = !once && !admin.json;
        if is_picture && !(io::stdout().is_terminal() && io::stdin().is_terminal()) {
            return Err(CommandError::NoTerminal);
        }
        if is_picture {
            // Makes sure that the terminal is restored after a signal.
            let wait = || STOPPED.store(wait_for_stop().is_ok(), Ordering::Relaxed);
            thread::Builder::new().name("signals".to_owned()).spawn(wait)?;
        }
        let colours = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let columns = env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
        let options = top::Options { interval, once, json: admin.json, colours, columns };
        top::run(admin.client_of_either()?, &options, out, || STOPPED.load(Ordering::Relaxed))
    }
}

pub(crate) const TOP_EXAMPLES: &str = "\
Examples:
  turnpike top
  turnpike top --once
  turnpike top --json --interval 10 >>top.jsonl        (one line every ten seconds)
  turnpike top --admin 127.0.0.1:9641
  turnpike top --admin https://turn.example.org:9641 --token-file read.token
  turnpike top --admin unix:/run/turnpike/forward.sock        (a forwarder)

Keys: tab next table, up and down scroll, p pause, q quit. Without colours: NO_COLOR=1 turnpike top";

pub(crate) const ALLOCATIONS_EXAMPLES: &str = "\
Examples:
  turnpike allocations
  turnpike allocations --user alice --transport tls
  turnpike allocations --client 192.0.2.0/24 --json";

pub(crate) const ALLOCATION_EXAMPLES: &str = "\
Examples:
  turnpike allocation show 5f2c9a7be01d4c3f8a6b1e2d3c4f5a69
  turnpike allocation end 5f2c9a7be01d4c3f8a6b1e2d3c4f5a69";

pub(crate) const DRAIN_EXAMPLES: &str = "\
Examples:
  turnpike drain
  turnpike drain --deadline 3600        (existing allocations get an hour; repeating the command restarts the hour)
  turnpike drain --deadline 0           (ends all allocations immediately)
  turnpike drain --until 5              (stops once at most 5 allocations remain)
  turnpike drain --deadline 300 --wait  (a Kubernetes preStop hook)";

pub(crate) const HEALTH_EXAMPLES: &str = "\
Examples:
  turnpike health                       (readiness probe: exit code 0 if the program accepts clients, 1 if it is draining or not running)
  turnpike health --live                (liveness probe)";

pub(crate) const FLEET_EXAMPLES: &str = "\
Examples:
  turnpike fleet status
  turnpike fleet drain turn-3            (before an upgrade; `status` shows the remaining allocations)
  turnpike fleet uncordon turn-3
  turnpike fleet allocations --user alice   (on all nodes; `turnpike allocation end ID` ends an allocation on any node)";

pub(crate) const RELOAD_EXAMPLES: &str = "\
Examples:
  turnpike reload
  turnpike reload --admin unix:/run/turnpike/forward.sock        (a forwarder)";
