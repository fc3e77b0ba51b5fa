//! Flags of `forward`. They remain text here; `config` checks them together with the file and the environment, so that one run
//! reports every error.

use std::path::PathBuf;

use clap::Args;
use turnpike_config::{Flags, forward::ForwardSources};

use crate::{config_checks::CHECKS, log_args::LogArgs};

#[derive(Args)]
pub(crate) struct ForwardArgs {
    /// Rules, in addition to those in the file
    ///
    /// Scheme tcp, udp, udptotcp, tcptoudp or unix, then listener, targets and options; docs/forward.md has examples
    #[arg(value_name = "SCHEME://LISTEN=TARGET[,TARGET...][?KEY=VALUE&...]")]
    rules: Vec<String>,

    /// File with rules: TOML, rinetd.conf or oxidinetd's
    ///
    /// turnpike's own TOML (examples/forward.toml documents every key), an unchanged rinetd.conf, or an unchanged oxidinetd TOML or .conf;
    /// the content decides [default: none]
    #[arg(short, long, value_name = "FILE", env = "TURNPIKE_FORWARD_CONFIG")]
    config: Option<PathBuf>,

    /// Threads, or "auto" for one per core [default: auto]
    ///
    /// 1 to 1024
    #[arg(long, value_name = "N")]
    workers: Option<String>,

    /// Packet I/O: auto, basic, mmsg, gso or kernel
    ///
    /// With kernel, an eBPF program forwards single datagrams without waking turnpike; these bypass the machine's firewall. auto does so
    /// only for sessions that the firewall leaves unchanged [default: auto]
    #[arg(long, value_name = "D")]
    datapath: Option<String>,

    /// Busy-poll before sleeping, in microseconds [default: 0]
    ///
    /// A worker that has just been busy keeps polling for this long, 0 to 1000: lower latency at the cost of more CPU
    #[arg(long, value_name = "US")]
    busy_poll_us: Option<String>,

    /// TCP copy mode: auto, splice, buffer or kernel [default: auto]
    ///
    /// Applies to rules that have no copy option of their own. With kernel, interactive traffic moves from socket to socket in the kernel
    /// (Linux
    /// 6.16) and everything else as with auto
    #[arg(long, value_name = "MODE")]
    copy: Option<String>,

    /// Address of the admin interface, or "off"
    ///
    /// Serves metrics, health and the HTTP API: unix (the socket that turnpike's commands use by default), unix:/PATH, ADDR:PORT, or "off".
    /// A non-loopback address requires admin.tls_cert. Repeat for several [default: unix and 127.0.0.1:9642]
    #[arg(long, value_name = "ADDRESS|off")]
    admin: Vec<String>,

    /// Drop unneeded privileges at startup [default: on]
    ///
    /// With on, the process keeps only the capabilities, files and system calls that it needs, as far as the kernel supports this; the log
    /// lists the restrictions
    #[arg(long, value_name = "on|off")]
    sandbox: Option<String>,

    #[command(flatten)]
    log: LogArgs,

    /// Start even if some rules cannot be bound
    ///
    /// Skips rules whose port is in use or whose address is not on this machine
    #[arg(long)]
    keep_going: bool,

    /// Ignored: turnpike always runs in the foreground. Accepted so that command lines for rinetd work
    #[arg(short = 'f', long = "foreground", hide = true)]
    _foreground: bool,

    /// Only check the configuration
    ///
    /// Prints "ok" and the effective settings and rules as TOML, or every error, and opens no listener
    #[arg(long)]
    pub(crate) check: bool,
}

impl ForwardArgs {
    /// Sources of `check-config --forward FILE`.
    pub(crate) fn of_file(file: PathBuf) -> ForwardSources {
        ForwardSources::from_process(Some(file), Vec::new(), Flags::new(), CHECKS)
    }

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
