//! The command line: every subcommand with its flags.

use clap::{Parser, Subcommand};

use crate::{
    admin_args::{
        DRAIN_EXAMPLES, DrainArgs, FLEET_EXAMPLES, FleetCommand, HEALTH_EXAMPLES, HealthArgs,
        RELOAD_EXAMPLES, ReloadArgs, SESSION_EXAMPLES, SESSIONS_EXAMPLES, SessionCommand, SessionsArgs,
        TOP_EXAMPLES, TopArgs,
    },
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
};

/// A TURN/STUN relay for Linux, and the tools that measure it.
#[derive(Parser)]
#[command(name = "turnpike", version, propagate_version = true, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Run a TURN/STUN server over UDP, TCP, TLS and DTLS (RFC 8656, RFC 8489)
    #[command(long_about = SERVE, after_help = SERVE_EXAMPLES)]
    Serve(Box<ServeCommand>),
    /// Forward TCP and UDP ports: instead of rinetd, oxidinetd, realm or socat
    #[command(long_about = FORWARD, after_help = FORWARD_EXAMPLES)]
    Forward(Box<ForwardArgs>),
    /// Have a running `serve` or `forward` go on in a new process, of a new version perhaps, without losing a client over UDP
    #[command(long_about = UPGRADE, after_help = UPGRADE_EXAMPLES)]
    Upgrade(UpgradeArgs),
    /// Check the configuration that `serve` would use with the same flags, or `forward` a file; print the effective settings
    #[command(long_about = CHECK_CONFIG, after_help = CHECK_CONFIG_EXAMPLES)]
    CheckConfig(Box<CheckConfigArgs>),
    /// Make time-limited credentials from a shared secret, access tokens (RFC 7635), or stored keys from a password
    #[command(long_about = CREDENTIALS, after_help = CREDENTIALS_EXAMPLES)]
    Credentials(CredentialsArgs),
    /// List, make and remove the users of a store; a server that runs sees it
    #[command(long_about = USER, after_help = USER_EXAMPLES)]
    User {
        /// What to do.
        #[command(subcommand)]
        command: UserCommand,
    },
    /// List, make, rotate and remove a store's shared secrets of time-limited credentials
    #[command(after_help = SECRET_EXAMPLES)]
    Secret {
        /// What to do.
        #[command(subcommand)]
        command: SecretCommand,
    },
    /// List, make and remove the realms that a store has beside server.realm
    #[command(after_help = REALM_EXAMPLES)]
    Realm {
        /// What to do.
        #[command(subcommand)]
        command: RealmCommand,
    },
    /// List, make and remove the keys by which applications ask a server for credentials
    #[command(long_about = KEY, after_help = KEY_EXAMPLES)]
    Key {
        /// What to do.
        #[command(subcommand)]
        command: KeyCommand,
    },
    /// Translate another server's configuration
    Import {
        /// Whose.
        #[command(subcommand)]
        command: ImportCommand,
    },
    /// Send datagrams back to where they came from, and be the far end of TCP load: the peer that `load` needs
    #[command(after_help = REFLECT_EXAMPLES)]
    Reflect(turnpike_load::reflect::Config),
    /// Generate load and measure what comes back
    Load {
        /// Which generator.
        #[command(subcommand)]
        command: LoadCommand,
    },
    /// Say what a STUN or TURN server supports, and what is wrong with it
    #[command(long_about = PROBE, after_help = PROBE_EXAMPLES)]
    Probe(ProbeArgs),
    /// List the sessions of a running server
    #[command(after_help = SESSIONS_EXAMPLES)]
    Sessions(Box<SessionsArgs>),
    /// Show or end one session of a running server
    #[command(after_help = SESSION_EXAMPLES)]
    Session {
        /// What to do with it.
        #[command(subcommand)]
        command: SessionCommand,
    },
    /// Have a running server take nobody new and end with its last session
    #[command(after_help = DRAIN_EXAMPLES)]
    Drain(DrainArgs),
    /// Say whether a running program takes clients, or runs at all, by the exit code: for probes
    #[command(after_help = HEALTH_EXAMPLES)]
    Health(HealthArgs),
    /// List the servers that are one service, and have one of them take nobody new
    #[command(after_help = FLEET_EXAMPLES)]
    Fleet {
        /// What to do.
        #[command(subcommand)]
        command: FleetCommand,
    },
    /// Have a running server read its configuration and certificates again, and say what has changed
    #[command(after_help = RELOAD_EXAMPLES)]
    Reload(ReloadArgs),
    /// Show what a running program does, again each second, in a terminal or as JSON
    #[command(after_help = TOP_EXAMPLES)]
    Top(TopArgs),
    /// Compare programs in network namespaces: is it faster, by how much, how sure, and where does the time go
    #[cfg(feature = "tools")]
    Lab(Box<turnpike_lab::LabArgs>),
    /// Compare programs in network namespaces: this build cannot
    #[cfg(not(feature = "tools"))]
    #[command(disable_help_flag = true)]
    Lab {
        /// Command of the lab
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<std::ffi::OsString>,
    },
    /// Say what a firewall has to let in, in its own words: the listeners and relay ports of the configuration
    #[command(long_about = PRINT_FIREWALL, after_help = PRINT_FIREWALL_EXAMPLES)]
    PrintFirewall(Box<FirewallArgs>),
    /// Say where this machine is reached from outside: ask the cloud, or Kubernetes
    #[command(long_about = PUBLIC_ADDRESS, after_help = PUBLIC_ADDRESS_EXAMPLES)]
    PublicAddress(PublicAddressArgs),
    /// Print a script that completes commands and flags in a shell
    #[command(after_help = COMPLETIONS_EXAMPLES)]
    Completions(CompletionsArgs),
    /// Print the manual page, or write those of all commands to a directory
    #[command(after_help = MAN_EXAMPLES)]
    Man(ManArgs),
}

const EXIT_CODES: &str = "\
Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 3 an asked-for limit (--max-loss, --max-p99, --fail-on) was exceeded.";

const SERVE: &str = "\
Run a TURN/STUN server for clients over UDP, TCP, TLS and DTLS (RFC 8656, RFC 8489), which relays UDP, and TCP for clients over TCP \
and TLS (RFC 6062).

With no flag at all it works: it listens on UDP and TCP port 3478 of all addresses, relays on the addresses of the default routes, \
makes up a user, keeps it in the embedded store and prints its password once on standard output, and serves metrics and its admin \
interface on loopback. Log lines go to standard error. \
With --tls-cert and --tls-key the TCP port takes TLS clients too; --tls-listen and --dtls-listen add ports.

Precedence, key by key: flags, environment (TURNPIKE_SECTION_KEY; TURNPIKE_SECTION_KEY_FILE, such as TURNPIKE_AUTH_SECRETS_FILE, names \
files), configuration file, defaults. A flag that may be repeated replaces the whole list of a weaker source.

With --fleet URL on each, several servers are one service: clients go to the one that has room, and quotas and bans hold on all of them \
(docs/fleet.md).

Other programs, and `turnpike sessions`, `session`, `user`, `secret`, `realm`, `key`, `fleet`, `drain` and `reload`, speak to it over its \
admin interface: a Unix socket and HTTP on loopback (docs/admin.md). Applications ask for credentials on listeners of their own, by HTTP \
with a key ([credentials], docs/credentials.md).

Signals: SIGTERM and SIGINT stop taking allocations and wait for the sessions to end, at most shutdown.deadline seconds (30); a \
second signal, or Ctrl-C on a terminal, ends at once. SIGHUP reads the configuration and the certificates again; certificates are \
also read when their files change. A file with a mistake changes nothing, a bad certificate only leaves the \
old one in place, and the log says why. SIGUSR2 has the server go on in a new process, as `turnpike upgrade` does.

systemd: readiness, reload, stop, status and watchdog are told by NOTIFY_SOCKET (Type=notify-reload); listeners of a .socket unit are \
taken over by LISTEN_FDS, those named tls and dtls as such. docs/install.md has units.";

const SERVE_EXAMPLES: &str = "\
Examples:
  turnpike serve
  turnpike serve --realm example.org --user alice:wonderland --relay-ip 10.0.0.5=203.0.113.5
  turnpike serve -c turnpike.toml --workers 2 --log debug
  turnpike serve --secret S --tls-cert fullchain.pem --tls-key privkey.pem --listen 0.0.0.0:3478 --listen 0.0.0.0:443    (TCP and TLS on 443)
  turnpike serve --secret S --tls-cert fullchain.pem --tls-key privkey.pem --tls-listen 0.0.0.0:5349 --dtls-listen 0.0.0.0:5349
  TURNPIKE_FLEET_SECRET_FILE=fleet.key turnpike serve --secret S --fleet redis://valkey.internal        (on each machine)
  turnpike serve --user a:b --listen 127.0.0.1:3478 --relay-ip 127.0.0.1 --allow-peer 127.0.0.0/8    (everything on loopback)";

const FORWARD: &str = "\
Forward TCP and UDP ports.

Rules stand on the command line, in a TOML file of ours (examples/forward.toml), in an unchanged rinetd.conf, or in an unchanged \
oxidinetd TOML or .conf. A rule is SCHEME://LISTEN=TARGET[,TARGET...][?KEY=VALUE&...]: the scheme is tcp, udp, udptotcp, \
tcptoudp or unix; a port may be a range, FIRST-LAST; IPv6 stands in brackets; host names are resolved again and again, and each address \
of a name is a target; *WEIGHT behind a target, 0 to 256, is its share.

Options of a rule, as in [[rule]] of the TOML file: name, framed, balance=round-robin|least-connections|failover|source, health=SECONDS, \
health_send=BYTES, health_expect=BYTES, source=IP, device=NAME, mark=N, transparent, proxy_protocol_from=PREFIX[,...], \
proxy=v1|v2, allow=PATTERN[,...], deny=PATTERN[,...], idle=SECONDS, half_close_timeout=SECONDS, \
connect_timeout=SECONDS, keepalive=BOOL, keepalive_idle=SECONDS, keepalive_interval=SECONDS, keepalive_count=N, \
user_timeout=SECONDS, nodelay=BOOL, ipv6_only=BOOL, freebind=BOOL, any_port=BOOL, socket_mode=OCTAL, max_connections=N, \
max_connections_per_client=N, new_connections_per_client=N, max_bytes_per_second=N, \
max_bytes_per_second_per_connection=N, copy=auto|splice|buffer|kernel, kernel=BOOL.

Precedence of settings, key by key: flags, environment (TURNPIKE_SECTION_KEY), file, defaults.

Signals: SIGTERM and SIGINT close the listeners and wait for the connections to end, at most shutdown.deadline seconds (30), \
but not for a UDP session without a datagram for 2 seconds; a second signal, or Ctrl-C on a terminal, ends at once. SIGHUP reads the file again; connections of unchanged rules live on, and a \
broken file changes nothing. SIGUSR2 has the forwarder go on in a new process, as `turnpike upgrade` does.

systemd: readiness, reload, stop, status and watchdog are told by NOTIFY_SOCKET (Type=notify-reload); listeners of a .socket unit are \
taken over by LISTEN_FDS, for the rules that listen at their addresses. docs/install.md has units.";

const FORWARD_EXAMPLES: &str = "\
Examples:
  turnpike forward tcp://0.0.0.0:9000=10.0.0.2:9001
  turnpike forward 'udp://0.0.0.0:53=10.0.0.3:53?idle=30' 'tcp://[::]:80=10.0.0.4:80,10.0.0.5:80?balance=failover&health=5'
  turnpike forward 'tcp://0.0.0.0:9000-9010=10.0.0.2:9000-9010?proxy=v2'
  turnpike forward -c /etc/rinetd.conf --workers 2
  turnpike forward -c /etc/rinetd.conf --check        (prints the rules as TOML)";

const UPGRADE: &str = "\
Have a running `serve` or `forward` go on in a new process, of a new version perhaps (docs/upgrade.md).

The running process starts the new one with its own arguments and environment; that reads the configuration, takes the sockets and the \
sessions of clients over UDP, and serves. Nothing is lost and nothing reordered meanwhile; whoever comes over TCP, TLS or DTLS from then \
on comes to the new one. Connections that exist live on in the old process until they end, at most shutdown.upgrade_deadline seconds (3600). \
A new process that does not start, or cannot take over, changes nothing.

Each step stands on standard error, what has come of it on standard output; the exit code is 1 where the process serves as before, with \
the reason. SIGUSR2 to the process does the same, with the steps in its log.";

const UPGRADE_EXAMPLES: &str = "\
Examples:
  turnpike upgrade
  turnpike upgrade --pid \"$(systemctl show --value -p MainPID turnpike)\"
  turnpike upgrade --binary /opt/turnpike-2/bin/turnpike";

const CHECK_CONFIG: &str = "\
Check the configuration that `serve` would use with the same flags, or with --forward a file with forwarding rules.

Prints \"ok\" and the effective settings as TOML, each with its origin, secrets masked; or every mistake with file, line, column, \
key and what was expected, and exits with 2. Finds what `serve` would fail on: addresses of other machines, and files, certificates and \
databases that are missing. Opens no listener; a port in use shows when `serve` starts. `serve --check` does the same.";

const CHECK_CONFIG_EXAMPLES: &str = "\
Example:
  turnpike check-config -c turnpike.toml --relay-ports 50000-50999
  turnpike check-config --forward /etc/rinetd.conf";

const CREDENTIALS: &str = "\
Make time-limited credentials from a shared secret, access tokens (RFC 7635), or stored keys from a password.

With --secret: prints username and password that a server with the same secret accepts until the time is over \
(username = expiry:id, password = base64(HMAC-SHA1(secret, username))).

With --token-key: prints what an authorization server gives to a client for a server with the same key in oauth.key: USERNAME \
(the key's kid), the mac_key to sign with, and the token, both base64.

With --password: prints an entry of auth.users that holds the user's long-term keys (MD5 and SHA-256 of \
\"name:realm:password\") instead of the password.";

const CREDENTIALS_EXAMPLES: &str = "\
Examples:
  turnpike credentials --secret-file /etc/turnpike/secret --user alice --ttl 86400
  turnpike credentials --user alice --realm example.org --password-file -        (reads the password from standard input)
  turnpike credentials --token-key-file /etc/turnpike/north.key --user north --server-name turn.example.org --ttl 600";

const USER: &str = "\
List, make and remove the users of a store.

A running server is asked, with which the change counts at once; where none runs, the embedded store that `turnpike serve` would have. \
-c, --store and --state name another store: a server that has it open sees the change within a second (SQLite), or when the user is \
looked up again (store.cache_lifetime, 60 s). What was done in which store is said. `secret`, `realm` and `key` do the same.";

const USER_EXAMPLES: &str = "\
Examples:
  turnpike user add alice                                          (makes a password up and prints it)
  turnpike user add alice --realm example.org --password-file -    (reads it from standard input)
  turnpike user list --json
  turnpike user remove alice -c turnpike.toml                      (in the store of that file)
  turnpike user list --admin 127.0.0.1:9641 --token-file token     (of the server there)";

const SECRET_EXAMPLES: &str = "\
Examples:
  turnpike secret add                            (makes one up and prints it)
  turnpike secret add --secret-file new.txt      (beside those that there are)
  turnpike secret list
  turnpike secret rotate example.org             (another one signs; the others count a day longer, and are removed then)
  turnpike secret rotate example.org --overlap 0 (a secret has leaked: what was made with the others is refused at once)
  turnpike secret remove 5f2c19e0a4d1b3c7";

const KEY: &str = "\
List, make and remove the keys by which applications ask a server for credentials (docs/credentials.md).

A key is printed once, when it is made; the store has its hash alone. It is good on the listeners of credentials.listen, for all realms \
or for --realm. A server that is asked knows it at once, others that have the same store within store.refresh seconds (10).";

const KEY_EXAMPLES: &str = "\
Examples:
  turnpike key add shop                                            (makes it and prints it)
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
Print what a firewall has to let in: the listeners and relay ports that `serve` would have with the same flags, or the listeners of a file \
with forwarding rules.

Changes nothing and opens no socket. nftables and iptables get a chain named turnpike, to be jumped to from the chain that drops; aws and \
gcp are commands for their command lines. What only listens on loopback, and the admin page, stay closed; comments say so.";

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
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_says_what_it_does_and_every_subcommand_has_an_example() {
        for command in Cli::command().get_subcommands() {
            for argument in command
                .get_arguments()
                .filter(|argument| !matches!(argument.get_id().as_str(), "help" | "version"))
            {
                let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
                assert!(help.len() > 15, "{} {}", command.get_name(), argument.get_id());
            }
        }
        for path in [
            &["serve"][..],
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
            &["sessions"],
            &["session"],
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
    fn every_subcommand_tells_the_version() {
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
            let told = Cli::try_parse_from(asked).map(drop).expect_err("told in place of what is to be done");
            assert_eq!(told.kind(), clap::error::ErrorKind::DisplayVersion, "{path:?}: {told}");
            assert!(told.to_string().contains(env!("CARGO_PKG_VERSION")), "{path:?}: {told}");
        }
    }

    /// The words of all help texts and documents that look like a variable of ours.
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
            assert!(documented.iter().any(|found| found == name), "{name} is in no help");
        }
        // Those stand for all keys.
        let of_any = ["TURNPIKE_SECTION_KEY", "TURNPIKE_SECTION_KEY_FILE"];
        for name in documented.iter().filter(|name| !of_any.contains(&name.as_str())) {
            assert!(known.contains(name), "{name}");
        }
    }

    /// A shell takes ? for a character of a file name, and & for the end of a command.
    #[test]
    fn rules_with_options_stand_in_quotes_wherever_a_shell_may_see_them() {
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

    /// The example has every key of a rule; a test of the configuration holds that.
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
            assert!(options.contains(&key), "{key} is not in the help of forward");
        }
    }
}
