//! The flags of `forward`. They are text here; `config` judges them together with the file and the environment, so that every
//! mistake is reported at once.

use std::path::PathBuf;

use clap::Args;
use turnpike_config::{Flags, forward::ForwardSources};

use crate::{CHECKS, log_args::LogArgs};

/// Flags of `forward`.
#[derive(Args)]
pub(crate) struct ForwardArgs {
    /// Rules on the command line, beside those of the file: tcp, udp, udptotcp, tcptoudp or unix, listener, targets, options;
    /// docs/forward.md has many
    #[arg(value_name = "SCHEME://LISTEN=TARGET[,TARGET...][?KEY=VALUE&...]")]
    rules: Vec<String>,

    /// File with rules: ours (TOML, examples/forward.toml documents every key), an unchanged rinetd.conf, or an unchanged
    /// oxidinetd TOML or .conf; the content tells which [default: none]
    #[arg(short, long, value_name = "FILE", env = "TURNPIKE_FORWARD_CONFIG")]
    config: Option<PathBuf>,

    /// Threads, 1 to 1024, or "auto" for one per core [default: auto]
    #[arg(long, value_name = "N")]
    workers: Option<String>,

    /// How datagrams enter and leave: auto, basic, mmsg, gso or kernel [default: auto, the highest that works but kernel]. With kernel, an
    /// eBPF program forwards lone datagrams without waking turnpike; they do not meet this machine's firewall
    #[arg(long, value_name = "D")]
    datapath: Option<String>,

    /// Microseconds for which a worker that has just had something to do looks for more before it sleeps, 0 to 1000: less
    /// latency for more CPU [default: 0]
    #[arg(long, value_name = "US")]
    busy_poll_us: Option<String>,

    /// How TCP moves bytes in rules that do not say: auto, splice, buffer or kernel [default: auto]. With kernel, chatter goes from socket to
    /// socket in the kernel (Linux 6.16), everything else as with auto
    #[arg(long, value_name = "MODE")]
    copy: Option<String>,

    /// Address of the admin interface (metrics, health, HTTP API): unix for the socket where the commands look, unix:/PATH, ADDR:PORT, or
    /// "off"; beyond loopback with admin.tls_cert only; repeat for several [default: unix and 127.0.0.1:9642]
    #[arg(long, value_name = "ADDRESS|off")]
    admin: Vec<String>,

    /// Whether the process gives up at its start what it does not need: on or off. On, it has no other capabilities, files and system
    /// calls than its work takes, as far as the kernel has these; what it names is said in the log [default: on]
    #[arg(long, value_name = "on|off")]
    sandbox: Option<String>,

    #[command(flatten)]
    log: LogArgs,

    /// Run although some rules cannot be bound: a port in use, an address that is not ours
    #[arg(long)]
    keep_going: bool,

    /// Nothing: turnpike is always in the foreground. For command lines of rinetd
    #[arg(short = 'f', long = "foreground", hide = true)]
    _foreground: bool,

    /// Only check: print "ok" and the effective settings and rules as TOML, or every mistake, and open no listener
    #[arg(long)]
    pub(crate) check: bool,
}

impl ForwardArgs {
    /// Only a file, as `check-config --forward` has it.
    pub(crate) fn of_file(file: PathBuf) -> ForwardSources {
        ForwardSources::from_process(Some(file), Vec::new(), Flags::new(), CHECKS)
    }

    /// These rules and flags, the file they name and this process's environment.
    pub(crate) fn into_sources(self) -> ForwardSources {
        let mut flags = Flags::new();
        flags.set("forward.workers", "--workers", self.workers);
        flags.set("forward.datapath", "--datapath", self.datapath);
        flags.set("forward.busy_poll_us", "--busy-poll-us", self.busy_poll_us);
        flags.set("forward.copy", "--copy", self.copy);
        flags.set("admin.listen", "--admin", self.admin);
        flags.set("sandbox.mode", "--sandbox", self.sandbox);
        self.log.put(&mut flags);
        flags.set("forward.keep_going", "--keep-going", self.keep_going.then(|| "true".to_owned()));
        ForwardSources::from_process(self.config, self.rules, flags, CHECKS)
    }
}
