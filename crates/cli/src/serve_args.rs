//! Flags that set configuration, shared by `serve`, `check-config` and `print-firewall`. They remain text here; `config` checks
//! them together with the file and the environment, so that one run reports every error.

use std::path::PathBuf;

use clap::Args;
use turnpike_config::{Flags, Sources};

use crate::{config_checks::CHECKS, log_args::LogArgs};

const LISTENERS: &str = "Listeners";
const CREDENTIALS: &str = "Credentials";
const RELAY: &str = "Relay addresses and peers";
const OPERATION: &str = "Performance and operation";

#[derive(Args)]
pub(crate) struct ServeArgs {
    /// Configuration file (TOML)
    ///
    /// examples/turnpike.toml documents every key. Flags and TURNPIKE_... environment variables override the file [default: none; every
    /// key has a default]
    #[arg(short, long, value_name = "FILE", env = "TURNPIKE_CONFIG")]
    config: Option<PathBuf>,

    /// Listen on this address over UDP and TCP
    ///
    /// With a certificate, the TCP port also accepts TLS: the first byte decides. Repeat for several addresses [default: 0.0.0.0:3478 and
    /// [::]:3478]
    #[arg(long, value_name = "ADDR:PORT", help_heading = LISTENERS)]
    listen: Vec<String>,

    /// Listen on this address over TLS
    ///
    /// TLS 1.2 and 1.3; requires --tls-cert and --tls-key. Also accepts plain TCP unless tls.only is set. Repeat for several addresses
    /// [default: none]
    #[arg(long, value_name = "ADDR:PORT", help_heading = LISTENERS)]
    tls_listen: Vec<String>,

    /// Listen on this address over DTLS
    ///
    /// DTLS 1.2 and 1.3; requires --tls-cert and an ECDSA --tls-key. An address that is also in --listen serves plain UDP and DTLS: the
    /// first byte decides. Repeat for several addresses [default: none]
    #[arg(long, value_name = "ADDR:PORT", help_heading = LISTENERS)]
    dtls_listen: Vec<String>,

    /// Certificate chain (PEM)
    ///
    /// The server's own certificate comes first. The server reloads the file when it changes and keeps the old certificate if the new one
    /// is unusable. The configuration file can list additional certificates, which are chosen by server name [default: none]
    #[arg(long, value_name = "FILE", help_heading = LISTENERS)]
    tls_cert: Option<String>,

    /// Private key of --tls-cert (PEM)
    #[arg(long, value_name = "FILE", help_heading = LISTENERS)]
    tls_key: Option<String>,

    /// Obtain and renew a certificate for this name or IP address
    ///
    /// Uses Let's Encrypt (by using this flag, you accept its terms of service) or the CA set as acme.directory in the configuration file.
    /// The name must resolve to this server, and the CA must be able to reach it on port 443 (if there is a TCP listener on it) or 80. TLS
    /// and DTLS start once the certificate has been issued. Repeat for several [default: none]
    #[arg(long, value_name = "NAME", help_heading = LISTENERS)]
    acme: Vec<String>,

    /// Realm of the long-term credentials [default: turnpike]
    ///
    /// 1 to 127 characters
    #[arg(long, value_name = "R", help_heading = CREDENTIALS)]
    realm: Option<String>,

    /// Add a user with a password
    ///
    /// Repeat for several users. Other users on this machine can see the password in the process list: prefer the configuration file,
    /// TURNPIKE_AUTH_USERS or TURNPIKE_AUTH_USERS_FILE [default: user turnpike with a random password, which is printed]
    #[arg(long, value_name = "NAME:PASSWORD", help_heading = CREDENTIALS)]
    user: Vec<String>,

    /// Shared secret for time-limited credentials
    ///
    /// `turnpike credentials` creates such credentials. Repeat to rotate secrets. Visible in the process list like --user: prefer
    /// TURNPIKE_AUTH_SECRETS_FILE
    #[arg(long, value_name = "S", help_heading = CREDENTIALS)]
    secret: Vec<String>,

    /// Database with users, secrets and realms
    ///
    /// Contains users, secrets, realms and peer rules in coturn's schema: postgres://, mysql://, redis://, rediss:// or sqlite:///PATH.
    /// Visible in the process list like --user: prefer TURNPIKE_STORE_URL_FILE [default: the embedded store of --state]
    #[arg(long, value_name = "URL", help_heading = CREDENTIALS)]
    store: Option<String>,

    /// Directory of the embedded store, or "off"
    ///
    /// `turnpike user`, `secret` and `realm` write to this store [default: $STATE_DIRECTORY, $XDG_STATE_HOME/turnpike or
    /// ~/.local/state/turnpike]
    #[arg(long, value_name = "DIR|off", help_heading = CREDENTIALS)]
    state: Option<String>,

    /// Relay on this address of the machine
    ///
    /// EXTERNAL is the public address if a NAT is in front. Repeat for several addresses [default: the source addresses of the default
    /// routes]
    #[arg(long, value_name = "IP[=EXTERNAL]", help_heading = RELAY)]
    relay_ip: Vec<String>,

    /// First and last relay port [default: 49152-65535]
    ///
    /// For UDP, and for TCP with RFC 6062; 1 to 65535, at least two ports
    #[arg(long, value_name = "A-B", help_heading = RELAY)]
    relay_ports: Option<String>,

    /// Relay ports shared by the allocations of a worker
    ///
    /// Number of shared ports on each relay address of each worker, 0 to 1024. Saves ports and sockets for many clients whose peers have
    /// different addresses: on a shared port, each peer address belongs to one client, and other clients cannot use it [default: 0, a
    /// port for each allocation]
    #[arg(long, value_name = "N", help_heading = RELAY)]
    shared_ports: Option<String>,

    /// Allow private, loopback or other special peers
    ///
    /// A prefix, a host name, or ADDR:PORT[-PORT]. To allow a service on one of the machine's own addresses, give its exact ADDR or ADDR:PORT, or a
    /// prefix within 127.0.0.0/8. Repeat for several [default: none]
    #[arg(long, value_name = "CIDR", help_heading = RELAY)]
    allow_peer: Vec<String>,

    /// Refuse these peers; overrides --allow-peer
    ///
    /// Repeat for several [default: none]
    #[arg(long, value_name = "CIDR", help_heading = RELAY)]
    deny_peer: Vec<String>,

    /// Refuse every peer that --allow-peer does not list
    ///
    /// Applies to public peers too [default: off]
    #[arg(long, help_heading = RELAY)]
    allow_peers_only: bool,

    /// Threads, or "auto" for one per core [default: auto]
    ///
    /// 1 to 1024
    #[arg(long, value_name = "N", help_heading = OPERATION)]
    workers: Option<String>,

    /// Packet I/O: auto, basic, mmsg, gso, kernel, xdp
    ///
    /// auto, basic, mmsg, gso, kernel, xdp or xdp-generic. With kernel, an eBPF program relays single datagrams between bound channels
    /// without waking the server; these bypass the machine's firewall. xdp runs the same program in the network drivers that support it;
    /// xdp-generic is for tests. auto uses the kernel only for flows that the firewall leaves unchanged [default: auto]
    #[arg(long, value_name = "D", help_heading = OPERATION)]
    datapath: Option<String>,

    /// Busy-poll before sleeping, in microseconds [default: 0]
    ///
    /// A worker that has just been busy keeps polling for this long, 0 to 1000: lower latency at the cost of more CPU
    #[arg(long, value_name = "US", help_heading = OPERATION)]
    busy_poll_us: Option<String>,

    /// Delay wake-ups to batch datagrams, in microseconds [default: 0]
    ///
    /// A worker may delay a datagram for this long so that its next wake-up handles more, 0 to 1000: less CPU at the cost of latency. Takes
    /// effect only at packet rates that fill such a batch. Conflicts with --busy-poll-us
    #[arg(long, value_name = "US", help_heading = OPERATION)]
    coalesce_us: Option<String>,

    /// Form a fleet with other servers through this store
    ///
    /// All servers with this store and the same fleet.secret form one service. The store is Redis or Valkey: redis://, rediss://,
    /// redis+sentinel:// or redis+cluster:// (docs/fleet.md). Visible in the process list like --user: prefer TURNPIKE_FLEET_URL_FILE
    /// [default: none]
    #[arg(long, value_name = "URL", help_heading = OPERATION)]
    fleet: Option<String>,

    /// Address of the admin interface, or "off"
    ///
    /// Serves metrics, health and the HTTP API: unix (the socket that turnpike's commands use by default), unix:/PATH, ADDR:PORT, or "off".
    /// A non-loopback address requires admin.tls_cert. Repeat for several [default: unix and 127.0.0.1:9641]
    #[arg(long, value_name = "ADDRESS|off", help_heading = OPERATION)]
    admin: Vec<String>,

    /// Drop unneeded privileges at startup [default: on]
    ///
    /// With on, the process keeps only the capabilities, files and system calls that it needs, as far as the kernel supports this; the log
    /// lists the restrictions
    #[arg(long, value_name = "on|off", help_heading = OPERATION)]
    sandbox: Option<String>,

    #[command(flatten)]
    log: LogArgs,
}

#[derive(Args)]
pub(crate) struct ServeCommand {
    /// Only check the configuration
    ///
    /// Like `check-config`: prints "ok" and the effective settings as TOML, or every error, and opens no listener
    #[arg(long)]
    pub(crate) check: bool,

    #[command(flatten)]
    pub(crate) serve: ServeArgs,
}

#[derive(Args)]
pub(crate) struct CheckConfigArgs {
    /// Check this file of forwarding rules instead: turnpike's own format, rinetd.conf or oxidinetd's
    #[arg(long, value_name = "FILE", exclusive = true)]
    pub(crate) forward: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) serve: ServeArgs,
}

impl ServeArgs {
    pub(crate) fn into_sources(self) -> Sources {
        let mut flags = Flags::new();
        flags.set("server.listen", "--listen", self.listen);
        flags.set("tls.listen", "--tls-listen", self.tls_listen);
        flags.set("dtls.listen", "--dtls-listen", self.dtls_listen);
        flags.set("tls.cert", "--tls-cert", self.tls_cert);
        flags.set("tls.key", "--tls-key", self.tls_key);
        flags.set("tls.acme", "--acme", self.acme);
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
