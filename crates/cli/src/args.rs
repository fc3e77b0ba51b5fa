//! The command line: every subcommand with its flags.

use clap::{Parser, Subcommand};
use turnpike_ctl::setup::SetupArgs;

use crate::{
    admin_args::{
        ALLOCATION_EXAMPLES, ALLOCATIONS_EXAMPLES, AllocationCommand, AllocationsArgs, DRAIN_EXAMPLES,
        DrainArgs, FLEET_EXAMPLES, FleetCommand, HEALTH_EXAMPLES, HealthArgs, RELOAD_EXAMPLES, ReloadArgs,
        TOP_EXAMPLES, TopArgs,
    },
    capture_args::{CAPTURE, CAPTURE_EXAMPLES, CaptureArgs},
    credentials_args::CredentialsArgs,
    firewall_args::FirewallArgs,
    forward_args::ForwardArgs,
    import_args::ImportCommand,
    load_args::LoadCommand,
    manage_args::{KeyCommand, RealmCommand, SecretCommand, UserCommand},
    probe_args::{PROBE, PROBE_EXAMPLES, ProbeArgs},
    public_address_args::{PUBLIC_ADDRESS, PUBLIC_ADDRESS_EXAMPLES, PublicAddressArgs},
    serve_args::{CheckConfigArgs, ServeCommand},
    shell_args::{CompletionsArgs, ManArgs},
    upgrade_args::UpgradeArgs,
    usage_args::{USAGE_EXAMPLES, UsageArgs},
};

/// A TURN/STUN relay for Linux, and the tools that measure it.
#[derive(Parser)]
#[command(name = "turnpike", version, propagate_version = true, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Write the configuration of a server, start it and probe it
    #[command(long_about = SETUP, after_help = SETUP_EXAMPLES)]
    Setup(Box<SetupArgs>),
    /// Run a TURN/STUN server over UDP, TCP, TLS and DTLS (RFC 8656, RFC 8489)
    #[command(long_about = SERVE, after_help = SERVE_HINT, after_long_help = SERVE_EXAMPLES)]
    Serve(Box<ServeCommand>),
    /// Forward TCP and UDP ports; replaces rinetd, oxidinetd, realm and socat
    #[command(long_about = FORWARD, after_help = FORWARD_HINT, after_long_help = FORWARD_EXAMPLES)]
    Forward(Box<ForwardArgs>),
    /// Upgrade a running `serve` or `forward` to a new binary without dropping UDP clients
    #[command(long_about = UPGRADE, after_help = UPGRADE_EXAMPLES)]
    Upgrade(UpgradeArgs),
    /// Check the configuration of `serve` or `forward` and print the effective settings
    #[command(long_about = CHECK_CONFIG, after_help = CHECK_CONFIG_EXAMPLES)]
    CheckConfig(Box<CheckConfigArgs>),
    /// Create time-limited credentials, access tokens (RFC 7635) or stored keys
    #[command(long_about = CREDENTIALS, after_help = CREDENTIALS_EXAMPLES)]
    Credentials(CredentialsArgs),
    /// Add, list and remove users
    #[command(long_about = USER, after_help = USER_EXAMPLES)]
    User {
        #[command(subcommand)]
        command: UserCommand,
    },
    /// Add, list, rotate and remove shared secrets for time-limited credentials
    #[command(after_help = SECRET_EXAMPLES)]
    Secret {
        #[command(subcommand)]
        command: SecretCommand,
    },
    /// Add, list and remove realms besides server.realm
    #[command(after_help = REALM_EXAMPLES)]
    Realm {
        #[command(subcommand)]
        command: RealmCommand,
    },
    /// Add, list and remove API keys for applications that request credentials
    #[command(long_about = KEY, after_help = KEY_EXAMPLES)]
    Key {
        #[command(subcommand)]
        command: KeyCommand,
    },
    /// Translate another server's configuration
    Import {
        #[command(subcommand)]
        command: ImportCommand,
    },
    /// Echo datagrams and serve TCP load: the peer for `load`
    #[command(after_help = REFLECT_EXAMPLES)]
    Reflect(turnpike_load::reflect::ReflectConfig),
    /// Generate load and measure throughput, loss and latency
    Load {
        #[command(subcommand)]
        command: LoadCommand,
    },
    /// Check the features of a STUN or TURN server and report problems
    #[command(long_about = PROBE, after_help = PROBE_EXAMPLES)]
    Probe(ProbeArgs),
    /// List the allocations of a running server
    #[command(after_help = ALLOCATIONS_EXAMPLES)]
    Allocations(Box<AllocationsArgs>),
    /// Show or end one allocation of a running server
    #[command(after_help = ALLOCATION_EXAMPLES)]
    Allocation {
        #[command(subcommand)]
        command: AllocationCommand,
    },
    /// Capture the datagrams of one allocation as a pcapng file
    #[command(long_about = CAPTURE, after_help = CAPTURE_EXAMPLES)]
    Capture(CaptureArgs),
    /// Show what users, API keys, customers, realms or nodes have relayed
    #[command(after_help = USAGE_EXAMPLES)]
    Usage(Box<UsageArgs>),
    /// Stop accepting clients and exit after the last allocation or connection
    #[command(after_help = DRAIN_EXAMPLES)]
    Drain(DrainArgs),
    /// Report readiness or liveness through the exit code
    #[command(after_help = HEALTH_EXAMPLES)]
    Health(HealthArgs),
    /// List the nodes of a fleet; cordon or uncordon a node
    #[command(after_help = FLEET_EXAMPLES)]
    Fleet {
        #[command(subcommand)]
        command: FleetCommand,
    },
    /// Reload configuration and certificates and print the changes
    #[command(after_help = RELOAD_EXAMPLES)]
    Reload(ReloadArgs),
    /// Watch a running program in a terminal, or print JSON
    #[command(after_help = TOP_EXAMPLES)]
    Top(TopArgs),
    /// Compare the performance of programs in network namespaces
    #[cfg(feature = "tools")]
    Lab(Box<turnpike_lab::LabArgs>),
    /// Compare the performance of programs in network namespaces (not in this build)
    #[cfg(not(feature = "tools"))]
    #[command(disable_help_flag = true)]
    Lab {
        /// Arguments of the lab
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<std::ffi::OsString>,
    },
    /// Print firewall rules for the listeners and relay ports
    #[command(long_about = PRINT_FIREWALL, after_help = PRINT_FIREWALL_EXAMPLES)]
    PrintFirewall(Box<FirewallArgs>),
    /// Print this machine's public address, as reported by the cloud or Kubernetes
    #[command(long_about = PUBLIC_ADDRESS, after_help = PUBLIC_ADDRESS_EXAMPLES)]
    PublicAddress(PublicAddressArgs),
    /// Print a completion script for a shell
    #[command(after_help = COMPLETIONS_EXAMPLES)]
    Completions(CompletionsArgs),
    /// Print the manual page, or write all pages to a directory
    #[command(after_help = MAN_EXAMPLES)]
    Man(ManArgs),
}

const EXIT_CODES: &str = "\
Exit codes: 0 success, 1 failure, 2 bad usage or configuration, 3 a requested limit (--max-loss, --max-p99, --fail-on) was exceeded.";

const SETUP: &str = "\
Write the configuration of a TURN server, start it and probe it (docs/first-hour.md).

Asks five questions: the DNS name, the certificate, the users, port 443, and the public address. Each has a default and a flag; without a \
terminal, the defaults apply. Checks the answers on this machine and the file with `check-config`, then writes it, and prints the firewall \
rules and the settings for Nextcloud Talk, Synapse, Jitsi Meet and others. An edited file is only replaced with --force.

With the Debian package, as root: adds the drop-ins that turnpike.service needs here, starts it after a yes or with --start, and probes it. \
Otherwise a server with the new file runs for the probe only.";

const SETUP_EXAMPLES: &str = "\
Examples:
  sudo turnpike setup
  sudo turnpike setup --name turn.example.org --start
  sudo turnpike setup --name turn.example.org --port-443 127.0.0.1:8443 --start      (shares port 443 with a web server)
  sudo turnpike setup --name turn.example.org --start --helper admin@198.51.100.7    (also probes from that machine)
  turnpike setup --certificate none --access user:alice --dry-run

Exit codes: 0 no probe found anything bad, or the server was not started; 1 a probe or the start failed; 2 bad usage.";

const SERVE: &str = "\
Run a TURN/STUN server (RFC 8656, RFC 8489) for clients over UDP, TCP, TLS and DTLS. It relays UDP, and TCP for clients over TCP and TLS \
(RFC 6062).

Every flag is optional. By default the server listens on UDP and TCP port 3478 of all addresses, relays on the addresses of the default \
routes, creates a user in the embedded store and prints the password once on standard output, and serves metrics and its admin interface \
on loopback. The log goes to standard error. With --tls-cert and --tls-key the TCP port also accepts TLS; --tls-listen and --dtls-listen \
add ports.

Precedence of each setting: flags, environment (TURNPIKE_SECTION_KEY; TURNPIKE_SECTION_KEY_FILE, such as TURNPIKE_AUTH_SECRETS_FILE, names \
a file), configuration file, defaults. A repeatable flag replaces the whole list from a source of lower precedence.

Fleet: with --fleet URL, several servers form one service. The fleet redirects clients to servers with free capacity and enforces quotas and bans \
across all of them (docs/fleet.md).

Administration: `turnpike allocations`, `allocation`, `user`, `secret`, `realm`, `key`, `fleet`, `drain`, `reload` and other programs use the \
admin interface, a Unix socket and HTTP on loopback (docs/admin.md). Applications request credentials with a key, over HTTP on separate \
listeners ([credentials], docs/credentials.md).

Signals: SIGTERM and SIGINT stop new allocations and wait for the existing ones to end, at most shutdown.deadline seconds (30); a second \
signal, or Ctrl-C on a terminal, exits immediately. SIGHUP reloads the configuration and the certificates; a certificate is also reloaded when \
its file changes. If a file contains an error, nothing changes; if a certificate is unusable, the old one stays in use. The reason is in the log. \
SIGUSR2 upgrades to a new process, like `turnpike upgrade`.

systemd: the server reports readiness, reload, stop, status and watchdog through NOTIFY_SOCKET (Type=notify-reload) and accepts listeners from \
a .socket unit through LISTEN_FDS, including those named tls and dtls. docs/install.md has units.";

const SERVE_HINT: &str = "\
Example: turnpike serve --realm example.org --user alice:wonderland --relay-ip 10.0.0.5=203.0.113.5
`turnpike serve --help` explains each flag; examples/turnpike.toml documents every setting.";

const SERVE_EXAMPLES: &str = "\
Examples:
  turnpike serve
  turnpike serve --realm example.org --user alice:wonderland --relay-ip 10.0.0.5=203.0.113.5
  turnpike serve -c turnpike.toml --workers 2 --log debug
  turnpike serve --secret S --tls-cert fullchain.pem --tls-key privkey.pem --listen 0.0.0.0:3478 --listen 0.0.0.0:443    (TCP and TLS on 443)
  turnpike serve --secret S --tls-cert fullchain.pem --tls-key privkey.pem --tls-listen 0.0.0.0:5349 --dtls-listen 0.0.0.0:5349
  TURNPIKE_FLEET_SECRET_FILE=fleet.key turnpike serve --secret S --fleet redis://valkey.internal        (on each machine)
  turnpike serve --user a:b --listen 127.0.0.1:3478 --relay-ip 127.0.0.1 --allow-peer 127.0.0.0/8    (loopback only)";

const FORWARD: &str = "\
Forward TCP and UDP ports.

Rules come from the command line, a TOML file (examples/forward.toml), an unchanged rinetd.conf, or an unchanged oxidinetd TOML or .conf. \
The form of a rule is SCHEME://LISTEN=TARGET[,TARGET...][?KEY=VALUE&...]. The scheme is tcp, udp, udptotcp, tcptoudp or unix. A port may be \
a range, FIRST-LAST. IPv6 addresses need brackets. Host names are resolved periodically, and each address of a name is a target. *WEIGHT \
after a target, 0 to 256, sets its share.

Options of a rule, as in [[rule]] of the TOML file: name, framed, balance=round-robin|least-connections|failover|source, health=SECONDS, \
health_send=BYTES, health_expect=BYTES, source=IP, device=NAME, mark=N, transparent, proxy_protocol_from=PREFIX[,...], \
proxy=v1|v2, allow=PATTERN[,...], deny=PATTERN[,...], idle=SECONDS, half_close_timeout=SECONDS, \
connect_timeout=SECONDS, keepalive=BOOL, keepalive_idle=SECONDS, keepalive_interval=SECONDS, keepalive_count=N, \
user_timeout=SECONDS, nodelay=BOOL, ipv6_only=BOOL, freebind=BOOL, any_port=BOOL, socket_mode=OCTAL, max_connections=N, \
max_connections_per_client=N, new_connections_per_client=N, max_bytes_per_second=N, \
max_bytes_per_second_per_connection=N, copy=auto|splice|buffer|kernel, kernel=BOOL.

Precedence of each setting: flags, environment (TURNPIKE_SECTION_KEY), file, defaults.

Signals: SIGTERM and SIGINT close the listeners and wait for the connections to end, at most shutdown.deadline seconds (30); UDP sessions \
idle for 2 seconds do not count. A second signal, or Ctrl-C on a terminal, exits immediately. SIGHUP reloads the file; connections of unchanged \
rules continue, and a file with errors changes nothing. SIGUSR2 upgrades to a new process, like `turnpike upgrade`.

systemd: the forwarder reports readiness, reload, stop, status and watchdog through NOTIFY_SOCKET (Type=notify-reload) and accepts listeners \
from a .socket unit through LISTEN_FDS, matched to rules by address. docs/install.md has units.";

const FORWARD_HINT: &str = "\
Example: turnpike forward tcp://0.0.0.0:9000=10.0.0.2:9001
`turnpike forward --help` explains rules and flags; docs/forward.md has examples.";

const FORWARD_EXAMPLES: &str = "\
Examples:
  turnpike forward tcp://0.0.0.0:9000=10.0.0.2:9001
  turnpike forward 'udp://0.0.0.0:53=10.0.0.3:53?idle=30' 'tcp://[::]:80=10.0.0.4:80,10.0.0.5:80?balance=failover&health=5'
  turnpike forward 'tcp://0.0.0.0:9000-9010=10.0.0.2:9000-9010?proxy=v2'
  turnpike forward -c /etc/rinetd.conf --workers 2
  turnpike forward -c /etc/rinetd.conf --check        (prints the rules as TOML)";

const UPGRADE: &str = "\
Upgrade a running `serve` or `forward` to a new process, usually of a new version (docs/upgrade.md).

The running process starts the new one with the same arguments and environment. The new process reads the configuration, takes over the \
sockets and the sessions of UDP clients, and serves them, without loss or reordering. New TCP, TLS and DTLS clients reach the new process; \
existing connections stay in the old process until they end, at most shutdown.upgrade_deadline seconds (3600). If the new process fails to \
start or to take over, the old one keeps serving.

Progress is printed on standard error and the outcome on standard output. If the upgrade fails, the exit code is 1 and the reason is \
printed. SIGUSR2 to the process does the same and logs the steps.";

const UPGRADE_EXAMPLES: &str = "\
Examples:
  turnpike upgrade
  turnpike upgrade --pid \"$(systemctl show --value -p MainPID turnpike)\"
  turnpike upgrade --binary /opt/turnpike-2/bin/turnpike";

const CHECK_CONFIG: &str = "\
Check the configuration that `serve` would use with the same flags, or a file of forwarding rules with --forward.

If the configuration is valid, prints \"ok\" and the effective settings as TOML, each with its origin and with secrets masked. \
Otherwise, lists every error with file, line, column, key and the expected value, and exits with code 2. Also finds addresses that are \
not on this machine, and missing files, certificates and databases. Opens no listener, so a port in use is noticed only when `serve` \
starts. `serve --check` does the same.";

const CHECK_CONFIG_EXAMPLES: &str = "\
Example:
  turnpike check-config -c turnpike.toml --relay-ports 50000-50999
  turnpike check-config --forward /etc/rinetd.conf";

const CREDENTIALS: &str = "\
Create time-limited credentials from a shared secret, access tokens (RFC 7635), or stored keys from a password.

With --secret: prints a username and password that a server with the same secret accepts until they expire \
(username = expiry:id, password = base64(HMAC-SHA1(secret, username))).

With --token-key: prints the values that an authorization server issues to a client of a server with the same oauth.key: USERNAME \
(the kid of the key), the mac_key for signing, and the token, both base64.

With --password: prints an entry for auth.users with the user's long-term keys (MD5 and SHA-256 of \
\"name:realm:password\") instead of the password.";

const CREDENTIALS_EXAMPLES: &str = "\
Examples:
  turnpike credentials --secret-file /etc/turnpike/secret --user alice --ttl 86400
  turnpike credentials --user alice --realm example.org --password-file -        (reads the password from standard input)
  turnpike credentials --token-key-file /etc/turnpike/north.key --user north --server-name turn.example.org --ttl 600";

const USER: &str = "\
Add, list and remove the users of a store.

If a server is running, the command goes to it and takes effect immediately; otherwise it changes the embedded store of `turnpike serve`. \
-c, --store and --state select another store: a server that uses it sees the change within a second (SQLite), or at the next lookup of the user \
(store.cache_lifetime, 60 s). The output names the change and the store. `secret`, `realm` and `key` work the same way.";

const USER_EXAMPLES: &str = "\
Examples:
  turnpike user add alice                                          (generates a password and prints it)
  turnpike user add alice --realm example.org --password-file -    (reads the password from standard input)
  turnpike user list --json
  turnpike user remove alice -c turnpike.toml                      (in the store of that file)
  turnpike user list --admin 127.0.0.1:9641 --token-file token     (on the server at that address)";

const SECRET_EXAMPLES: &str = "\
Examples:
  turnpike secret add                            (generates a secret and prints it)
  turnpike secret add --secret-file new.txt      (in addition to the existing secrets)
  turnpike secret list
  turnpike secret rotate example.org             (a new secret signs; the old ones stay valid for a day)
  turnpike secret rotate example.org --overlap 0 (after a leak: credentials made with the old secrets are refused immediately)
  turnpike secret remove 5f2c19e0a4d1b3c7";

const KEY: &str = "\
Add, list and remove API keys for applications that request credentials from a server (docs/credentials.md).

A key is printed once, when it is created; the store keeps only its hash. The key is valid on the listeners of credentials.listen, for all \
realms or for --realm. The server that handles the command accepts it immediately; other servers that use the same store accept it \
within store.refresh seconds (10).";

const KEY_EXAMPLES: &str = "\
Examples:
  turnpike key add shop                                            (creates the key and prints it)
  turnpike key add page --realm example.org --ttl-max 600 --rate 5
  turnpike key list --json
  turnpike key remove shop";

const REALM_EXAMPLES: &str = "\
Examples:
  turnpike realm add blue.example --allocations 1000 --allocations-per-user 10
  turnpike realm list
  turnpike realm remove blue.example";

const REFLECT_EXAMPLES: &str = "\
Examples:
  turnpike reflect
  turnpike reflect --listen 127.0.0.1:3480 --workers 2
  turnpike reflect --tcp 10.0.0.2:9001 --listen 10.0.0.2:9001
  turnpike reflect --listen 10.0.0.2:9001 --datapath kernel";

const PRINT_FIREWALL: &str = "\
Print firewall rules for the listeners and relay ports that `serve` would use with the same flags, or for the listeners of a file of \
forwarding rules.

Changes nothing and opens no socket. nftables and iptables rules are in a chain named turnpike; jump to it from your input chain. aws and \
gcp print commands for those command-line tools. Loopback listeners and the admin page stay closed; comments in the output list them.";

const PRINT_FIREWALL_EXAMPLES: &str = "\
Examples:
  turnpike print-firewall -c /etc/turnpike/turnpike.toml | nft -f -
  turnpike print-firewall --relay-ports 50000-50999 --format ufw | sh
  turnpike print-firewall --forward /etc/turnpike/forward.toml --format iptables
  turnpike print-firewall -c turnpike.toml --format aws | GROUP_ID=sg-0123456789abcdef0 sh";

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  turnpike completions bash > /usr/share/bash-completion/completions/turnpike
  turnpike completions zsh > /usr/share/zsh/vendor-completions/_turnpike
  turnpike completions fish > ~/.config/fish/completions/turnpike.fish";

const MAN_EXAMPLES: &str = "\
Examples:
  turnpike man | man -l -
  turnpike man /usr/local/share/man/man1";

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn help_of(path: &[&str]) -> String {
        let mut command = Cli::command();
        command.build();
        let mut command = &mut command;
        for name in path {
            command = command.find_subcommand_mut(name).expect("a subcommand");
        }
        command.render_long_help().to_string()
    }

    #[test]
    fn clap_accepts_the_definitions() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_has_help_and_every_subcommand_has_an_example() {
        for command in Cli::command().get_subcommands() {
            for argument in command
                .get_arguments()
                .filter(|argument| !matches!(argument.get_id().as_str(), "help" | "version"))
            {
                let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
                assert!(help.len() > 8, "{} {}", command.get_name(), argument.get_id());
            }
        }
        for path in [
            &["setup"][..],
            &["serve"],
            &["forward"],
            &["upgrade"],
            &["check-config"],
            &["credentials"],
            &["user"],
            &["secret"],
            &["realm"],
            &["key"],
            &["import", "coturn"],
            &["reflect"],
            &["load", "turn"],
            &["load", "tcp"],
            &["load", "rr"],
            &["load", "connect"],
            &["load", "udp"],
            &["probe"],
            &["allocations"],
            &["allocation"],
            &["drain"],
            &["health"],
            &["fleet"],
            &["reload"],
            &["print-firewall"],
            &["public-address"],
            &["completions"],
            &["man"],
        ] {
            let help = help_of(path);
            let example = format!("turnpike {}", path.join(" "));
            assert!(help.contains("Example") && help.contains(&example), "{help}");
        }
    }

    #[test]
    fn every_subcommand_has_a_version_flag() {
        fn paths(command: &clap::Command, path: &[String], found: &mut Vec<Vec<String>>) {
            let path = [path, &[command.get_name().to_owned()]].concat();
            command.get_subcommands().for_each(|command| paths(command, &path, found));
            found.push(path);
        }
        let mut found = Vec::new();
        paths(&Cli::command(), &[], &mut found);
        assert!(found.len() > 15, "{found:?}");
        for path in found {
            let asked = path.iter().map(String::as_str).chain(["--version"]);
            let told = Cli::try_parse_from(asked).map(drop).expect_err("--version ends parsing");
            assert_eq!(told.kind(), clap::error::ErrorKind::DisplayVersion, "{path:?}: {told}");
            assert!(told.to_string().contains(env!("CARGO_PKG_VERSION")), "{path:?}: {told}");
        }
    }

    /// Words in help texts and documents that look like a TURNPIKE_ variable.
    fn documented_variables() -> Vec<String> {
        let mut command = Cli::command();
        command.build();
        let mut texts: Vec<String> = [
            include_str!("../../../README.md"),
            include_str!("../../../docs/serve.md"),
            include_str!("../../../examples/turnpike.toml"),
            include_str!("../../../examples/forward.toml"),
        ]
        .map(str::to_owned)
        .to_vec();
        fn help(command: &mut clap::Command, texts: &mut Vec<String>) {
            texts.push(command.render_long_help().to_string());
            command.get_subcommands_mut().for_each(|command| help(command, texts));
        }
        help(&mut command, &mut texts);
        let is_name = |c: char| c.is_ascii_uppercase() || c == '_';
        let words = texts.iter().flat_map(|text| text.split(|c| !is_name(c)));
        words.filter(|word| word.len() > 9 && word.starts_with("TURNPIKE_")).map(str::to_owned).collect()
    }

    #[test]
    fn every_documented_variable_is_known_to_all_subcommands() {
        let known = turnpike_config::known_variables();
        let documented = documented_variables();
        for name in ["TURNPIKE_LOAD_ACCESS_TOKEN", "TURNPIKE_PROBE_USER", "TURNPIKE_FORWARD_CONFIG"] {
            assert!(documented.iter().any(|found| found == name), "{name} is missing from the help texts");
        }
        // Placeholders that stand for any key.
        let of_any = ["TURNPIKE_SECTION_KEY", "TURNPIKE_SECTION_KEY_FILE"];
        for name in documented.iter().filter(|name| !of_any.contains(&name.as_str())) {
            assert!(known.contains(name), "{name}");
        }
    }

    /// A shell would expand `?` and end the command at `&`.
    #[test]
    fn rules_with_options_are_quoted_in_shell_examples() {
        let documents = [
            include_str!("../../../README.md"),
            include_str!("../../../examples/forward.toml"),
            include_str!("../../../docs/serve.md"),
            FORWARD_EXAMPLES,
        ];
        let mut found = 0;
        for word in documents.iter().flat_map(|text| text.split_whitespace()) {
            let is_rule = word
                .split_once("://")
                .is_some_and(|(scheme, _)| scheme.ends_with("tcp") || scheme.ends_with("udp"));
            if is_rule && word.contains('?') && word.contains('=') && !word.contains("[?") {
                found += 1;
                assert!(word.starts_with('\'') || word.starts_with("`'"), "{word}");
            }
        }
        assert!(found >= 5, "{found}");
    }

    /// examples/forward.toml contains every key of a rule, which a test in `config` checks.
    #[test]
    fn forward_help_names_every_option_of_a_rule() {
        let example = include_str!("../../../examples/forward.toml");
        let (_, rules) = example.split_once("\n[[rule]]\n").expect("rules");
        let keys = rules
            .lines()
            .filter_map(|line| line.strip_prefix('#').unwrap_or(line).split_once(" = "))
            .map(|(key, _)| key)
            .filter(|key| !key.contains(' ') && !["protocol", "listen", "target"].contains(key));
        let options: Vec<&str> = FORWARD.split([' ', ',', '=', '.', '\n']).collect();
        for key in keys {
            assert!(options.contains(&key), "{key} is missing from the help of forward");
        }
    }
}
