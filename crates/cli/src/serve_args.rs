//! The flags that set configuration, shared by `serve` and `check-config`. They are text here; `config` judges them
//! together with the file and the environment, so that every mistake is reported at once.

use std::path::PathBuf;

use clap::Args;
use turnpike_config::{Flags, Sources};

use crate::{CHECKS, log_args::LogArgs};

/// Flags of `serve` and `check-config`.
#[derive(Args)]
pub(crate) struct ServeArgs {
    /// Configuration file (TOML); examples/turnpike.toml documents every key. Flags and TURNPIKE_... environment
    /// variables win over it [default: none, all keys have defaults]
    #[arg(short, long, value_name = "FILE", env = "TURNPIKE_CONFIG")]
    config: Option<PathBuf>,

    /// Address to listen on by UDP and TCP; with a certificate TCP takes TLS too, told apart by the first byte; repeat for
    /// several [default: 0.0.0.0:3478 and [::]:3478]
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Vec<String>,

    /// Further address to listen on by TLS 1.2 and 1.3, with --tls-cert and --tls-key; takes plain TCP too unless tls.only is
    /// set; repeat for several [default: none]
    #[arg(long, value_name = "ADDR:PORT")]
    tls_listen: Vec<String>,

    /// UDP address to listen on by DTLS 1.2 and 1.3, with --tls-cert and --tls-key, whose key must be ECDSA; one that is in --listen
    /// too serves plain UDP and DTLS, told apart by the first byte; repeat for several [default: none]
    #[arg(long, value_name = "ADDR:PORT")]
    dtls_listen: Vec<String>,

    /// Certificate chain, PEM, the server's own first; read again when it changes, and a bad new one keeps the old. More of
    /// them, chosen by server name, can be named in the file [default: none]
    #[arg(long, value_name = "FILE")]
    tls_cert: Option<String>,

    /// Private key of --tls-cert, PEM, not encrypted [default: none]
    #[arg(long, value_name = "FILE")]
    tls_key: Option<String>,

    /// Realm of the long-term credentials, 1 to 127 characters [default: turnpike]
    #[arg(long, value_name = "R")]
    realm: Option<String>,

    /// A user with a password; repeat for several. Other users of this machine can see it in the process list: prefer
    /// the file, TURNPIKE_AUTH_USERS or TURNPIKE_AUTH_USERS_FILE [default: user turnpike, random password printed]
    #[arg(long, value_name = "NAME:PASSWORD")]
    user: Vec<String>,

    /// Shared secret of time-limited credentials, see `turnpike credentials`; repeat to rotate. As visible as --user:
    /// prefer TURNPIKE_AUTH_SECRETS_FILE
    #[arg(long, value_name = "S")]
    secret: Vec<String>,

    /// Database with users, secrets, realms and peer rules, in coturn's schema: postgres://, mysql://, redis://, rediss:// or
    /// sqlite:///PATH. As visible as --user: prefer TURNPIKE_STORE_URL_FILE [default: the embedded store of --state]
    #[arg(long, value_name = "URL")]
    store: Option<String>,

    /// Directory of the embedded store, where `turnpike user`, `secret` and `realm` write, or "off" for none [default:
    /// $STATE_DIRECTORY, $XDG_STATE_HOME/turnpike or ~/.local/state/turnpike]
    #[arg(long, value_name = "DIR|off")]
    state: Option<String>,

    /// Be one service with all other servers that have this store and the same fleet.secret: redis://, rediss://, redis+sentinel:// or
    /// redis+cluster://, valkey too; docs/fleet.md. As visible as --user: prefer TURNPIKE_FLEET_URL_FILE [default: none]
    #[arg(long, value_name = "URL")]
    fleet: Option<String>,

    /// Address of this machine to relay on, with the public one where a NAT stands in front; repeat for several
    /// [default: the source addresses of the default routes]
    #[arg(long, value_name = "IP[=EXTERNAL]")]
    relay_ip: Vec<String>,

    /// First and last port to relay on (UDP, and TCP with RFC 6062), 1 to 65535, at least two ports [default: 49152-65535]
    #[arg(long, value_name = "A-B")]
    relay_ports: Option<String>,

    /// Relay ports on each relay address that each worker's allocations share, 0 to 1024, for many clients whose peers have addresses of
    /// their own: on such a port an address of peers is one client's alone, and others are refused it [default: 0, a port for each
    /// allocation]
    #[arg(long, value_name = "N")]
    shared_ports: Option<String>,

    /// Peers that may be relayed to although they are private, loopback or otherwise special: a prefix, or ADDR:PORT[-PORT]. A service
    /// on this machine's own addresses needs its ADDR or ADDR:PORT, or a prefix within 127.0.0.0/8; repeat for several
    /// [default: none]
    #[arg(long, value_name = "CIDR")]
    allow_peer: Vec<String>,

    /// Peers that are refused; deny wins over allow; repeat for several [default: none]
    #[arg(long, value_name = "CIDR")]
    deny_peer: Vec<String>,

    /// Refuse all peers that no --allow-peer names, public ones too [default: off]
    #[arg(long)]
    allow_peers_only: bool,

    /// Threads, 1 to 1024, or "auto" for one per core [default: auto]
    #[arg(long, value_name = "N")]
    workers: Option<String>,

    /// How datagrams enter and leave: auto, basic, mmsg, gso, kernel, xdp or xdp-generic [default: auto, the highest that works in user
    /// space]. With kernel, an eBPF program relays lone datagrams between bound channels without waking the server; they do not meet
    /// this machine's firewall. With xdp it does so in the drivers that can; xdp-generic is for tests
    #[arg(long, value_name = "D")]
    datapath: Option<String>,

    /// Microseconds for which a worker that has just had something to do looks for more before it sleeps, 0 to 1000: less
    /// latency for more CPU [default: 0]
    #[arg(long, value_name = "US")]
    busy_poll_us: Option<String>,

    /// Microseconds by which a worker may delay a datagram so that its next wake-up carries more, 0 to 1000: less CPU for more latency,
    /// and only at rates at which that gathers some; the opposite of --busy-poll-us, not both [default: 0]
    #[arg(long, value_name = "US")]
    coalesce_us: Option<String>,

    /// Address of the admin interface (metrics, health, HTTP API): unix for the socket where the commands look, unix:/PATH, ADDR:PORT, or
    /// "off"; beyond loopback with admin.tls_cert only; repeat for several [default: unix and 127.0.0.1:9641]
    #[arg(long, value_name = "ADDRESS|off")]
    admin: Vec<String>,

    /// Whether the process gives up at its start what it does not need: on or off. On, it has no other capabilities, files and system
    /// calls than its work takes, as far as the kernel has these; what it names is said in the log [default: on]
    #[arg(long, value_name = "on|off")]
    sandbox: Option<String>,

    #[command(flatten)]
    log: LogArgs,
}

/// Flags of `serve` alone.
#[derive(Args)]
pub(crate) struct ServeCommand {
    /// Only check, as `check-config` does: print "ok" and the effective settings as TOML, or every mistake, and open no listener
    #[arg(long)]
    pub(crate) check: bool,

    #[command(flatten)]
    pub(crate) serve: ServeArgs,
}

/// Flags of `check-config`.
#[derive(Args)]
pub(crate) struct CheckConfigArgs {
    /// Check this file with forwarding rules instead: ours, rinetd.conf or oxidinetd's
    #[arg(long, value_name = "FILE", exclusive = true)]
    pub(crate) forward: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) serve: ServeArgs,
}

impl ServeArgs {
    /// These flags, the file they name and this process's environment.
    pub(crate) fn into_sources(self) -> Sources {
        let mut flags = Flags::new();
        flags.set("server.listen", "--listen", self.listen);
        flags.set("tls.listen", "--tls-listen", self.tls_listen);
        flags.set("dtls.listen", "--dtls-listen", self.dtls_listen);
        flags.set("tls.cert", "--tls-cert", self.tls_cert);
        flags.set("tls.key", "--tls-key", self.tls_key);
        flags.set("server.realm", "--realm", self.realm);
        flags.set("auth.users", "--user", self.user);
        flags.set("auth.secrets", "--secret", self.secret);
        flags.set("store.url", "--store", self.store);
        flags.set("store.state", "--state", self.state);
        flags.set("fleet.url", "--fleet", self.fleet);
        flags.set("relay.addresses", "--relay-ip", self.relay_ip);
        flags.set("relay.ports", "--relay-ports", self.relay_ports);
        flags.set("relay.shared_ports", "--shared-ports", self.shared_ports);
        flags.set("peers.allow", "--allow-peer", self.allow_peer);
        flags.set("peers.deny", "--deny-peer", self.deny_peer);
        flags.set("peers.allow_only", "--allow-peers-only", self.allow_peers_only.then(|| true.to_string()));
        flags.set("server.workers", "--workers", self.workers);
        flags.set("server.datapath", "--datapath", self.datapath);
        flags.set("server.busy_poll_us", "--busy-poll-us", self.busy_poll_us);
        flags.set("server.coalesce_us", "--coalesce-us", self.coalesce_us);
        flags.set("admin.listen", "--admin", self.admin);
        flags.set("sandbox.mode", "--sandbox", self.sandbox);
        self.log.put(&mut flags);
        Sources::from_process(self.config, flags, CHECKS)
    }
}
