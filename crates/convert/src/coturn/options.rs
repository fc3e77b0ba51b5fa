//! coturn's options and their handling. A test compares them with docs/from-coturn.md.

use std::{net::IpAddr, str::FromStr};

use turnpike_turn::{ip_range::IpRange, server::Bandwidth};
use turnpike_wire::{address::is_swapped, names::is_username};

use super::draft::{AlternateClients, CoturnDraft};
use crate::toml_text::{quoted, strings};

/// Handling of an option. An error becomes a note for the operator, even if the function has set a value in the
/// draft.
pub(super) enum Handling {
    /// A number. coturn ignores everything after the leading digits (atoi(3)).
    Number(fn(&mut CoturnDraft, &str) -> Result<(), String>),
    /// A word, an address or a path, without a trailing comment.
    Value(fn(&mut CoturnDraft, &str) -> Result<(), String>),
    /// Free text up to the end of the line.
    Text(fn(&mut CoturnDraft, &str) -> Result<(), String>),
    Switch(fn(&mut CoturnDraft, bool)),
    /// An option that is on regardless of its value.
    Flag(fn(&mut CoturnDraft)),
    /// No translation needed; contains the reason.
    Needless(&'static str),
    /// No translation available; contains an alternative.
    Instead(&'static str),
}

use Handling::{Flag, Instead, Needless, Number, Switch, Text, Value};

/// Options with an optional number.
const OPTIONAL: [&str; 2] = ["stale-nonce", "max-allocate-lifetime"];

/// Options without a translation that take a value.
const WITH_VALUE: &str = "listening-device alt-tls-listening-port tcp-proxy-port relay-device mongo-userdb redis-statsdb \
    prometheus-path prometheus-cert prometheus-key log-file new-log-timestamp-format drain-min-allocations cipher-list \
    pidfile dh-file proc-user proc-group cli-ip cli-port cli-password web-admin-ip web-admin-port cli-max-output-sessions \
    ec-curve-name secret-key-file acme-redirect multiplex-peer-port multiplex-peer-max-peers syslog-facility \
    stateless-nonce-secret";

/// Returns true if the next word on a command line is this option's value.
pub(super) fn needs_value(name: &str) -> bool {
    match OPTIONS.iter().find(|(known, _)| *known == name) {
        Some((_, Value(_) | Text(_))) => true,
        Some((_, Number(_))) => !OPTIONAL.contains(&name),
        Some((_, Needless(_) | Instead(_))) => WITH_VALUE.split(' ').any(|known| known == name),
        Some((_, Switch(_) | Flag(_))) | None => false,
    }
}

/// Returns true if coturn has this option; `name` is without dashes.
#[must_use]
pub fn is_option(name: &str) -> bool {
    OPTIONS.iter().any(|(known, _)| *known == name)
}

const METRICS_BY_TLS: &str = "a non-loopback admin.listen uses TLS (admin.tls_cert, admin.tls_key) and needs a token (admin.read_tokens)";

/// Sorted like coturn's own list, followed by the options of older versions.
pub(super) const OPTIONS: &[(&str, Handling)] = &[
    ("listening-device", Instead("list the addresses of that device in server.listen")),
    ("listening-port", Number(|draft, value| set(&mut draft.listening_port, value, PORT))),
    ("tls-listening-port", Number(|draft, value| set(&mut draft.tls_listening_port, value, PORT))),
    ("alt-listening-port", Number(|draft, value| set(&mut draft.alt_listening_port, value, PORT))),
    ("alt-tls-listening-port", Needless("NAT discovery uses only UDP; add another port to tls.listen")),
    (
        "tcp-proxy-port",
        Instead(
            "list the load balancers in server.proxy_protocol_from, such as [\"10.0.0.0/8\"]: their connections then start with a PROXY header on \
             every TCP and TLS listener, and server.listen may have this port",
        ),
    ),
    ("listening-ip", Value(|draft, value| push(&mut draft.listening_ips, value, IP))),
    ("relay-device", Instead("list the addresses of that device in relay.addresses")),
    ("relay-ip", Value(|draft, value| push(&mut draft.relay_ips, value, IP))),
    ("external-ip", Value(external_ip)),
    ("relay-threads", Number(|draft, value| set(&mut draft.relay_threads, value, NUMBER))),
    ("min-port", Number(|draft, value| set(&mut draft.min_port, value, PORT))),
    ("max-port", Number(|draft, value| set(&mut draft.max_port, value, PORT))),
    ("sock-buf-size", Number(|draft, value| set(&mut draft.buffer, value, NUMBER))),
    ("lt-cred-mech", Switch(|draft, on| draft.lt_cred_mech = on)),
    ("no-auth", Switch(|draft, on| draft.no_auth = on)),
    ("user", Text(user)),
    ("userdb", Value(userdb)),
    ("db", Value(userdb)),
    ("psql-userdb", Value(|draft, value| store(draft, "psql-userdb", value))),
    ("sql-userdb", Value(|draft, value| store(draft, "psql-userdb", value))),
    ("mysql-userdb", Value(|draft, value| store(draft, "mysql-userdb", value))),
    (
        "mongo-userdb",
        Instead("MongoDB is not supported: copy users and secrets to a supported store (docs/stores.md)"),
    ),
    ("redis-userdb", Value(|draft, value| store(draft, "redis-userdb", value))),
    (
        "redis-statsdb",
        Instead(
            "fleet.url with fleet.coturn_status = true publishes the same data (docs/fleet.md); or use /metrics (admin.listen) and the log line of each allocation (log.format = \"json\")",
        ),
    ),
    ("prometheus", Flag(|draft| draft.prometheus = true)),
    ("prometheus-port", Number(|draft, value| set(&mut draft.prometheus_port, value, PORT))),
    ("prometheus-address", Value(prometheus_address)),
    ("prometheus-path", Instead("the path is /metrics: change it in the configuration of Prometheus")),
    (
        "prometheus-username-labels",
        Instead("no metric has a username label; the log line of each allocation contains the username"),
    ),
    ("prometheus-tls", Instead(METRICS_BY_TLS)),
    ("prometheus-cert", Instead(METRICS_BY_TLS)),
    ("prometheus-key", Instead(METRICS_BY_TLS)),
    ("use-auth-secret", Flag(|draft| draft.use_auth_secret = true)),
    ("static-auth-secret", Text(|draft, value| push(&mut draft.secrets, value, "a text"))),
    ("no-auth-pings", Needless("databases are not pinged; a lost connection is reopened")),
    (
        "no-dynamic-ip-list",
        Instead("peer rules in a database are always used: empty its allowed_peer_ip and denied_peer_ip"),
    ),
    (
        "no-dynamic-realms",
        Instead("realms in a database are always used: empty its turn_origin_to_realm and turn_realm_option"),
    ),
    ("realm", Text(|draft, value| set(&mut draft.realm, value, "a text"))),
    ("server-name", Text(|draft, value| set(&mut draft.server_name, value, "a text"))),
    ("oauth", Switch(|draft, on| draft.oauth = on)),
    ("user-quota", Number(|draft, value| set(&mut draft.user_quota, value, NUMBER))),
    ("total-quota", Number(|draft, value| set(&mut draft.total_quota, value, NUMBER))),
    ("max-bps", Number(|draft, value| rate(&mut draft.max_bps, value))),
    ("bps-capacity", Number(|draft, value| rate(&mut draft.bps_capacity, value))),
    ("verbose", Switch(|draft, on| draft.log_level = on.then_some("debug").or(draft.log_level))),
    ("Verbose", Switch(|draft, on| draft.log_level = on.then_some("trace").or(draft.log_level))),
    ("daemon", Needless("a service manager starts and supervises turnpike")),
    ("no-software-attribute", Switch(|draft, on| draft.software = Some(!on))),
    ("software-attribute", Switch(|draft, on| draft.software = Some(on))),
    ("fingerprint", Needless("a response has a FINGERPRINT if the request has one")),
    ("check-origin-consistency", Needless("ORIGIN only selects the realm of the challenge")),
    ("no-udp", Switch(|draft, on| draft.no_udp = on)),
    ("no-tcp", Switch(|draft, on| draft.no_tcp = on)),
    ("no-tls", Switch(|draft, on| draft.no_tls = on)),
    ("dtls", Switch(|draft, on| draft.dtls = Some(on))),
    ("no-dtls", Switch(|draft, on| draft.dtls = Some(!on))),
    ("no-udp-relay", Instead("UDP is always relayed: block UDP to peers in a firewall")),
    ("no-tcp-relay", Switch(|draft, on| draft.no_tcp_relay = on)),
    ("stale-nonce", Number(stale_nonce)),
    ("max-allocate-lifetime", Number(max_allocate_lifetime)),
    ("channel-lifetime", Number(|draft, value| within(&mut draft.channel_lifetime, value, 600, 86_400))),
    (
        "permission-lifetime",
        Number(|draft, value| within(&mut draft.permission_lifetime, value, 300, 86_400)),
    ),
    ("stun-only", Switch(|draft, on| draft.stun_only = on)),
    ("no-stun", Instead("Binding requests are always answered")),
    ("cert", Value(|draft, value| set(&mut draft.cert, value, "a path"))),
    ("raw-public-keys", Instead("only certificates are supported")),
    ("pkey", Value(|draft, value| set(&mut draft.pkey, value, "a path"))),
    ("pkey-pwd", Text(|draft, value| set(&mut draft.pkey_pwd, value, "a text"))),
    (
        "log-file",
        Needless(
            "the log goes to standard error, and from there to the journal or another log of the service manager",
        ),
    ),
    ("no-stdout-log", Needless("the log goes only to standard error")),
    ("syslog", Needless("the log goes to standard error, and from there to the journal")),
    ("simple-log", Needless("there is no log file to rotate")),
    ("log-min-level", Value(log_min_level)),
    ("new-log-timestamp", Needless("log lines contain the time in UTC (RFC 3339)")),
    ("new-log-timestamp-format", Needless("log lines contain the time in UTC (RFC 3339)")),
    (
        "aux-server",
        Value(|draft, value| {
            push(&mut draft.aux_servers, value, "an address with a port, such as 192.0.2.1:3478")
        }),
    ),
    ("udp-self-balance", Needless("the kernel distributes clients over the workers")),
    ("alternate-server", Value(|draft, value| alternate(draft, value, AlternateClients::Plain))),
    ("tls-alternate-server", Value(|draft, value| alternate(draft, value, AlternateClients::Secure))),
    ("tcp-alternate-server", Value(|draft, value| alternate(draft, value, AlternateClients::Tcp))),
    ("udp-alternate-server", Value(|draft, value| alternate(draft, value, AlternateClients::Udp))),
    ("rest-api-separator", Value(separator)),
    ("max-allocate-timeout", Number(|draft, value| within(&mut draft.idle, value, 1, 86_400))),
    ("drain-min-allocations", Instead("turnpike drain --until N does not wait for the last N allocations")),
    ("no-multicast-peers", Needless("multicast peers are always refused")),
    ("allow-loopback-peers", Switch(|draft, on| draft.peers.allow_loopback = on)),
    ("allowed-peer-ip", Value(|draft, value| peer(&mut draft.peers.allowed, value))),
    ("denied-peer-ip", Value(|draft, value| peer(&mut draft.peers.denied, value))),
    ("cipher-list", Needless("the secure ciphers of TLS 1.2 and 1.3 are always used")),
    ("pidfile", Needless("a service manager tracks the process")),
    ("secure-stun", Switch(|draft, on| draft.secure_stun = on)),
    ("CA-file", Value(|draft, value| set(&mut draft.ca_file, value, "a path"))),
    ("dh-file", Needless("key exchange uses elliptic curves")),
    ("proc-user", Instead("use User= in the systemd unit, or DynamicUser=yes")),
    ("proc-group", Instead("use Group= in the systemd unit")),
    ("mobility", Switch(|draft, on| draft.mobility = Some(on))),
    ("no-cli", Needless("there is no telnet console")),
    ("cli", Instead("there is no telnet console: use turnpike top, allocations and allocation end")),
    ("cli-ip", Needless("there is no telnet console")),
    ("cli-port", Needless("there is no telnet console")),
    ("cli-password", Needless("there is no telnet console")),
    (
        "web-admin",
        Instead("use the web page on admin.listen; turnpike user, secret and realm change the store"),
    ),
    ("web-admin-ip", Needless("the web page is on admin.listen")),
    ("web-admin-port", Needless("the web page is on admin.listen")),
    ("web-admin-listen-on-workers", Needless("the web page is on admin.listen")),
    ("server-relay", Instead("peers always need a permission")),
    ("cli-max-output-sessions", Needless("there is no telnet console")),
    ("ec-curve-name", Needless("X25519MLKEM768, X25519, P-256 and P-384 are offered")),
    ("dh566", Needless("key exchange uses elliptic curves")),
    ("dh1066", Needless("key exchange uses elliptic curves")),
    ("tlsv1", Instead("only TLS 1.2 and 1.3 are supported")),
    ("tlsv1_1", Instead("only TLS 1.2 and 1.3 are supported")),
    ("no-tlsv1_2", Instead("TLS 1.2 is always offered along with 1.3")),
    (
        "secret-key-file",
        Instead(
            "put the store URL with the unencrypted password into a private file and set TURNPIKE_STORE_URL_FILE to its path",
        ),
    ),
    ("keep-address-family", Instead("an Allocate without REQUESTED-ADDRESS-FAMILY gets IPv4 (RFC 8656)")),
    ("allocation-default-address-family", Value(default_family)),
    ("acme-redirect", Instead("HTTP is not served: use ACME over DNS, or a separate web server")),
    ("log-binding", Instead("Binding requests are counted (turnpike_requests_total), not logged")),
    ("no-rfc5780", Switch(|draft, on| draft.rfc5780 = draft.rfc5780 && !on)),
    ("rfc5780", Flag(|draft| draft.rfc5780 = true)),
    (
        "stun-backward-compatibility",
        Needless("MAPPED-ADDRESS is sent if NAT discovery is on and the request is large enough"),
    ),
    ("rfc5766-channel-numbers", Switch(|draft, on| draft.old_channels = Some(on))),
    (
        "rfc3489-compatibility",
        Instead("RFC 3489 clients learn their address through Binding requests over UDP"),
    ),
    ("response-origin-only-with-rfc5780", Needless("RESPONSE-ORIGIN is sent if NAT discovery is on")),
    (
        "respond-http-unsupported",
        Needless("connections that use protocols other than TLS and STUN are closed"),
    ),
    ("drop-invalid-packets", Needless("malformed packets are dropped and counted")),
    (
        "drop-invalid-packets-log",
        Instead("malformed packets are counted by reason (turnpike_dropped_datagrams_total), not logged"),
    ),
    ("udp-recvmmsg", Needless("server.datapath uses the best method that the machine supports")),
    ("udp-recvmmsg-log", Needless("/metrics contains the batch sizes")),
    ("udp-sendmmsg-log", Needless("/metrics contains the batch sizes")),
    ("udp-gso", Needless("server.datapath uses the best method that the machine supports")),
    ("include-reason-string", Needless("the log contains the reasons")),
    ("multiplex-peer", Flag(|draft| draft.multiplex_peer = true)),
    (
        "multiplex-peer-port",
        Instead(
            "shared relay ports are chosen from relay.ports (min-port to max-port): open those in the firewall",
        ),
    ),
    (
        "multiplex-peer-max-peers",
        Instead("limits.permissions and limits.channels limit the number of peers of an allocation"),
    ),
    ("version", Needless("turnpike --version")),
    ("syslog-facility", Needless("the log goes to standard error, and from there to the journal")),
    ("cpus", Number(|draft, value| set(&mut draft.cpus, value, NUMBER))),
    (
        "unauthorized-ratelimit",
        Instead(
            "limits.refusals_per_prefix limits error responses to a network; it is off by default, because many clients can share a network",
        ),
    ),
    ("unauthorized-ratelimit-rps", Instead("use limits.refusals_per_prefix with the same number")),
    ("stateless-nonce", Needless("nonces are always stateless")),
    ("stateless-nonce-secret", Instead("nonces are valid on a single server until it restarts")),
    ("dh2066", Needless("key exchange uses elliptic curves")),
    ("no-tlsv1", Needless("only TLS 1.2 and 1.3 are supported")),
    ("no-tlsv1_1", Needless("only TLS 1.2 and 1.3 are supported")),
    ("no-sslv2", Needless("only TLS 1.2 and 1.3 are supported")),
    ("no-sslv3", Needless("only TLS 1.2 and 1.3 are supported")),
    ("no-loopback-peers", Needless("loopback peers are refused unless peers.allow lists them")),
    ("no-stun-backward-compatibility", Needless("MAPPED-ADDRESS is sent if NAT discovery is on")),
    ("no-http", Needless("HTTP is not served on the listeners")),
    ("ne", Needless("server.datapath uses the best method that the machine supports")),
    ("st-cred-mech", Instead("TURN no longer has short-term credentials (RFC 8656): use long-term ones")),
    ("sha256", Needless("SHA-256 is offered if every user has a SHA-256 key")),
];

const NUMBER: &str = "a number";
const PORT: &str = "a port, 0 to 65535";
const IP: &str = "an IP address";

fn parse<T: FromStr>(value: &str, noun: &str) -> Result<T, String> {
    value.trim().parse().map_err(|_| format!("{value:?} is not {noun}"))
}

fn set<T: FromStr>(place: &mut Option<T>, value: &str, noun: &str) -> Result<(), String> {
    *place = Some(parse(value, noun)?);
    Ok(())
}

fn push<T: FromStr>(list: &mut Vec<T>, value: &str, noun: &str) -> Result<(), String> {
    list.push(parse(value, noun)?);
    Ok(())
}

fn within(place: &mut Option<u32>, value: &str, least: u32, most: u32) -> Result<(), String> {
    let number: u32 = parse(value, NUMBER)?;
    *place = Some(number.clamp(least, most));
    if (least..=most).contains(&number) {
        Ok(())
    } else {
        Err(format!("{number} is outside {least} to {most}: the nearest limit is used"))
    }
}

/// Bytes per second, 0 for no limit.
fn rate(place: &mut Option<u64>, value: &str) -> Result<(), String> {
    let bytes: u64 = parse(value, NUMBER)?;
    let bits = Bandwidth::from_bytes(bytes);
    *place = Some(bits).filter(|_| bytes > 0);
    if bytes == 0 || bytes.checked_mul(8) == Some(bits) {
        Ok(())
    } else {
        Err(format!("{bytes} bytes a second is out of range: {bits} bits a second is used"))
    }
}

/// `PUBLIC` or `PUBLIC/LOCAL`.
fn external_ip(draft: &mut CoturnDraft, value: &str) -> Result<(), String> {
    if value.contains(['$', '`']) {
        return Err(format!(
            "{value:?} is a shell command: turnpike public-address finds the address (docs/nat.md)"
        ));
    }
    let (public, local) =
        value.split_once('/').map_or((value, None), |(public, local)| (public, Some(local)));
    let local: Option<IpAddr> = local.map(|local| parse(local, IP)).transpose()?;
    let public = parse(public, IP)?;
    match local {
        Some(local) if is_swapped(local, public) => {
            draft.external_ips.push((local, Some(public)));
            Err(format!(
                "{value} is in the wrong order, even for coturn, which expects PUBLIC/LOCAL: {public} is private, so it is used as the \
                 local address"
            ))
        }
        local => {
            draft.external_ips.push((public, local));
            Ok(())
        }
    }
}

/// `NAME:PASSWORD`, or `NAME:0x` and a key.
fn user(draft: &mut CoturnDraft, value: &str) -> Result<(), String> {
    let (name, secret) = value.split_once(':').ok_or("the colon and the password are missing")?;
    if !is_username(name) || secret.is_empty() {
        return Err("the name or the password is missing".to_owned());
    }
    let secret = match secret.strip_prefix("0x").or_else(|| secret.strip_prefix("0X")) {
        Some(key) if matches!(key.len(), 32 | 64) && key.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
            format!("key = {}", strings(&[key]))
        }
        Some(_) => return Err("the key needs 32 or 64 hex digits".to_owned()),
        None => format!("password = {}", quoted(secret)),
    };
    draft.users.push(format!("{{ name = {}, {secret} }}", quoted(name)));
    Ok(())
}

fn userdb(draft: &mut CoturnDraft, value: &str) -> Result<(), String> {
    if !value.starts_with('/') {
        return Err(format!("{value:?} is not an absolute path: set store.url = \"sqlite:///PATH\""));
    }
    draft.store = Some(format!("sqlite://{value}"));
    Ok(())
}

/// Keeps coturn's format, which the store can parse.
fn store(draft: &mut CoturnDraft, option: &str, value: &str) -> Result<(), String> {
    let again = draft.store.is_some();
    draft.store = Some(format!("{option}={value}"));
    if again { Err("only one store is used; this is the last one".to_owned()) } else { Ok(()) }
}

fn prometheus_address(draft: &mut CoturnDraft, value: &str) -> Result<(), String> {
    let value = if value == "any" { "0.0.0.0" } else { value };
    set(&mut draft.prometheus_address, value, IP)
}

/// Lifetime of a nonce: 600 s if there is no value; 0 means forever.
fn stale_nonce(draft: &mut CoturnDraft, value: &str) -> Result<(), String> {
    match value {
        "" => within(&mut draft.nonce_lifetime, "600", 60, 86_400),
        "0" => within(&mut draft.nonce_lifetime, "86400", 60, 86_400),
        _ => within(&mut draft.nonce_lifetime, value, 60, 86_400),
    }
}

/// Maximum lifetime of an allocation: one hour if there is no value.
fn max_allocate_lifetime(draft: &mut CoturnDraft, value: &str) -> Result<(), String> {
    within(&mut draft.max_lifetime, if value.is_empty() { "3600" } else { value }, 60, 86_400)
}

fn log_min_level(draft: &mut CoturnDraft, value: &str) -> Result<(), String> {
    draft.log_level = Some(match value.to_ascii_lowercase().as_str() {
        "debug" => "debug",
        "info" | "control" => "info",
        "warning" | "warn" => "warn",
        "error" => "error",
        _ => return Err(format!("{value:?} is not one of turnpike's log levels: see log.level")),
    });
    Ok(())
}

/// `IP` or `IP:PORT`, with the default port of the transport.
fn alternate(draft: &mut CoturnDraft, value: &str, of: AlternateClients) -> Result<(), String> {
    let port = if of == AlternateClients::Secure { 5349 } else { 3478 };
    let address = match value
        .parse()
        .or_else(|_| value.trim_matches(['[', ']']).parse().map(|ip: IpAddr| (ip, port).into()))
    {
        Ok(address) => address,
        Err(_) => {
            return Err(format!(
                "{value:?} is not an address, and host names are not supported in this place"
            ));
        }
    };
    draft.alternates.push((address, of));
    Ok(())
}

fn separator(_: &mut CoturnDraft, value: &str) -> Result<(), String> {
    match value {
        ":" => Ok(()),
        _ => Err("time-limited usernames have a colon between time and id: change the separator in the program that creates credentials"
            .to_owned()),
    }
}

fn default_family(_: &mut CoturnDraft, value: &str) -> Result<(), String> {
    match value {
        "ipv4" => Ok(()),
        _ => Err("an Allocate without REQUESTED-ADDRESS-FAMILY gets IPv4 (RFC 8656)".to_owned()),
    }
}

/// IPv4-mapped peers are always refused, so a range of them has no effect.
fn peer(list: &mut Vec<IpRange>, value: &str) -> Result<(), String> {
    list.push(value.parse::<IpRange>()?);
    Ok(())
}
