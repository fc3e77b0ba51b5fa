//! coturn's options, each with what becomes of it. docs/from-coturn.md is the same table for people; a test holds the two together.

use std::{net::IpAddr, str::FromStr};

use turnpike_turn::{ip_range::IpRange, server::Bandwidth};
use turnpike_wire::{address::is_swapped, names::is_username};

use super::draft::{Alternate, Draft};
use crate::toml_text::{quoted, strings};

/// Handling of an option. The error of a translation is a remark for the operator; the draft may hold a value all the same.
pub(super) enum Handling {
    /// A number. coturn takes the digits at its beginning (atoi(3)).
    Number(fn(&mut Draft, &str) -> Result<(), String>),
    /// A word, an address or a path, without the comment behind it.
    Value(fn(&mut Draft, &str) -> Result<(), String>),
    /// Free text, with everything on the line.
    Text(fn(&mut Draft, &str) -> Result<(), String>),
    /// On or off.
    Switch(fn(&mut Draft, bool)),
    /// On, whatever its value is.
    Flag(fn(&mut Draft)),
    /// Nothing to do, and the reason.
    Needless(&'static str),
    /// No translation, and what to do instead.
    Instead(&'static str),
}

use Handling::{Flag, Instead, Needless, Number, Switch, Text, Value};

/// Numbers that may be left out.
const OPTIONAL: [&str; 2] = ["stale-nonce", "max-allocate-lifetime"];

/// Options without a translation that have a value.
const WITH_VALUE: &str = "listening-device alt-tls-listening-port tcp-proxy-port relay-device mongo-userdb redis-statsdb \
    prometheus-path prometheus-cert prometheus-key pkey-pwd log-file new-log-timestamp-format drain-min-allocations cipher-list \
    pidfile CA-file dh-file proc-user proc-group cli-ip cli-port cli-password web-admin-ip web-admin-port cli-max-output-sessions \
    ec-curve-name secret-key-file acme-redirect multiplex-peer-port multiplex-peer-max-peers syslog-facility \
    stateless-nonce-secret";

/// The word behind this option on a command line is its value.
pub(super) fn needs_value(name: &str) -> bool {
    match OPTIONS.iter().find(|(known, _)| *known == name) {
        Some((_, Value(_) | Text(_))) => true,
        Some((_, Number(_))) => !OPTIONAL.contains(&name),
        Some((_, Needless(_) | Instead(_))) => WITH_VALUE.split(' ').any(|known| known == name),
        Some((_, Switch(_) | Flag(_))) | None => false,
    }
}

/// The name, without dashes, is that of an option of coturn.
#[must_use]
pub fn is_option(name: &str) -> bool {
    OPTIONS.iter().any(|(known, _)| *known == name)
}

const METRICS_BY_TLS: &str = "an admin.listen beyond loopback is TLS, by admin.tls_cert and admin.tls_key, and wants a token of admin.read_tokens";

/// In the order of coturn's own list, and behind it options that older versions had.
pub(super) const OPTIONS: &[(&str, Handling)] = &[
    ("listening-device", Instead("name the addresses of that device in server.listen")),
    ("listening-port", Number(|draft, value| set(&mut draft.listening_port, value, PORT))),
    ("tls-listening-port", Number(|draft, value| set(&mut draft.tls_listening_port, value, PORT))),
    ("alt-listening-port", Number(|draft, value| set(&mut draft.alt_listening_port, value, PORT))),
    (
        "alt-tls-listening-port",
        Needless("NAT discovery is over UDP alone; another port is one more address in tls.listen"),
    ),
    (
        "tcp-proxy-port",
        Instead(
            "name the load balancers in server.proxy_protocol_from, such as [\"10.0.0.0/8\"]: their connections have a PROXY header on \
             every TCP and TLS listener, and server.listen may have this port",
        ),
    ),
    ("listening-ip", Value(|draft, value| push(&mut draft.listening_ips, value, IP))),
    ("relay-device", Instead("name the addresses of that device in relay.addresses")),
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
        Instead("MongoDB is no store here: copy users and secrets into one that is (docs/stores.md)"),
    ),
    ("redis-userdb", Value(|draft, value| store(draft, "redis-userdb", value))),
    (
        "redis-statsdb",
        Instead(
            "fleet.url with fleet.coturn_status = true publishes the same (docs/fleet.md); or read /metrics (admin.listen), and the log line of each session (log.format = \"json\")",
        ),
    ),
    ("prometheus", Flag(|draft| draft.prometheus = true)),
    ("prometheus-port", Number(|draft, value| set(&mut draft.prometheus_port, value, PORT))),
    ("prometheus-address", Value(prometheus_address)),
    ("prometheus-path", Instead("the path is /metrics: change it in the configuration of Prometheus")),
    (
        "prometheus-username-labels",
        Instead("no metric has a name of a user; the log line of each session has it"),
    ),
    ("prometheus-tls", Instead(METRICS_BY_TLS)),
    ("prometheus-cert", Instead(METRICS_BY_TLS)),
    ("prometheus-key", Instead(METRICS_BY_TLS)),
    ("use-auth-secret", Flag(|draft| draft.use_auth_secret = true)),
    ("static-auth-secret", Text(|draft, value| push(&mut draft.secrets, value, "a text"))),
    ("no-auth-pings", Needless("databases are not pinged; an idle connection is made again")),
    (
        "no-dynamic-ip-list",
        Instead("peer rules of a database count: empty its allowed_peer_ip and denied_peer_ip"),
    ),
    (
        "no-dynamic-realms",
        Instead("realms of a database count: empty its turn_origin_to_realm and turn_realm_option"),
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
    ("daemon", Needless("a service manager starts it and keeps it")),
    ("no-software-attribute", Switch(|draft, on| draft.software = Some(!on))),
    ("software-attribute", Switch(|draft, on| draft.software = Some(on))),
    ("fingerprint", Needless("an answer has a FINGERPRINT where the request has one")),
    ("check-origin-consistency", Needless("ORIGIN chooses the realm of the challenge, and nothing else")),
    ("no-udp", Switch(|draft, on| draft.no_udp = on)),
    ("no-tcp", Switch(|draft, on| draft.no_tcp = on)),
    ("no-tls", Switch(|draft, on| draft.no_tls = on)),
    ("dtls", Switch(|draft, on| draft.dtls = Some(on))),
    ("no-dtls", Switch(|draft, on| draft.dtls = Some(!on))),
    ("no-udp-relay", Instead("UDP is always relayed: refuse all peers but those of TCP in a firewall")),
    ("no-tcp-relay", Switch(|draft, on| draft.no_tcp_relay = on)),
    ("stale-nonce", Number(stale_nonce)),
    ("max-allocate-lifetime", Number(max_allocate_lifetime)),
    ("channel-lifetime", Instead("a channel lives for 600 s, as RFC 8656 has it")),
    ("permission-lifetime", Instead("a permission lives for 300 s, as RFC 8656 has it")),
    (
        "stun-only",
        Instead(
            "there is no such mode: with one secret that nobody knows in auth.secrets nobody gets an allocation",
        ),
    ),
    ("no-stun", Instead("Binding requests are always answered")),
    ("cert", Value(|draft, value| set(&mut draft.cert, value, "a path"))),
    ("raw-public-keys", Instead("clients are shown certificates alone")),
    ("pkey", Value(|draft, value| set(&mut draft.pkey, value, "a path"))),
    (
        "pkey-pwd",
        Instead("tls.key must not be encrypted: openssl pkey -in KEY -out PLAIN, readable by nobody else"),
    ),
    (
        "log-file",
        Needless(
            "lines go to standard error, and from there to the journal or wherever the service manager has them",
        ),
    ),
    ("no-stdout-log", Needless("lines go to standard error alone")),
    ("syslog", Needless("lines go to standard error, and from there to the journal")),
    ("simple-log", Needless("there is no file to roll over")),
    ("log-min-level", Value(log_min_level)),
    ("new-log-timestamp", Needless("lines have the time in UTC (RFC 3339)")),
    ("new-log-timestamp-format", Needless("lines have the time in UTC (RFC 3339)")),
    (
        "aux-server",
        Value(|draft, value| {
            push(&mut draft.aux_servers, value, "an address with a port, such as 192.0.2.1:3478")
        }),
    ),
    ("udp-self-balance", Needless("the kernel spreads clients over the workers")),
    ("alternate-server", Value(|draft, value| alternate(draft, value, Alternate::Plain))),
    ("tls-alternate-server", Value(|draft, value| alternate(draft, value, Alternate::Secure))),
    ("tcp-alternate-server", Value(|draft, value| alternate(draft, value, Alternate::Tcp))),
    ("udp-alternate-server", Value(|draft, value| alternate(draft, value, Alternate::Udp))),
    ("rest-api-separator", Value(separator)),
    ("max-allocate-timeout", Number(|draft, value| within(&mut draft.idle, value, 1, 86_400))),
    (
        "drain-min-allocations",
        Instead("a drain ends with the last session, or after shutdown.deadline seconds"),
    ),
    ("no-multicast-peers", Needless("multicast peers are always refused")),
    ("allow-loopback-peers", Switch(|draft, on| draft.allow_loopback = on)),
    ("allowed-peer-ip", Value(|draft, value| peer(&mut draft.allowed, value))),
    ("denied-peer-ip", Value(|draft, value| peer(&mut draft.denied, value))),
    ("cipher-list", Needless("the ciphers are those of TLS 1.2 and 1.3 that are good, and cannot be chosen")),
    ("pidfile", Needless("a service manager knows its process")),
    (
        "secure-stun",
        Instead(
            "Binding requests are answered to everybody; the answer is never longer than 2.2 times the request",
        ),
    ),
    ("CA-file", Instead("clients show no certificates here: keep strangers out by their credentials")),
    ("dh-file", Needless("key exchange is by elliptic curves")),
    ("proc-user", Instead("User= of the systemd unit, or DynamicUser=yes")),
    ("proc-group", Instead("Group= of the systemd unit")),
    ("mobility", Switch(|draft, on| draft.mobility = Some(on))),
    ("no-cli", Needless("there is no telnet console")),
    ("cli", Instead("there is no telnet console: turnpike top, sessions and session end do its work")),
    ("cli-ip", Needless("there is no telnet console")),
    ("cli-port", Needless("there is no telnet console")),
    ("cli-password", Needless("there is no telnet console")),
    (
        "web-admin",
        Instead("the page on admin.listen shows it; turnpike user, secret and realm change the store"),
    ),
    ("web-admin-ip", Needless("the page is on admin.listen")),
    ("web-admin-port", Needless("the page is on admin.listen")),
    ("web-admin-listen-on-workers", Needless("the page is on admin.listen")),
    ("server-relay", Instead("peers need a permission, always")),
    ("cli-max-output-sessions", Needless("there is no telnet console")),
    ("ec-curve-name", Needless("X25519, P-256 and P-384 are offered")),
    ("dh566", Needless("key exchange is by elliptic curves")),
    ("dh1066", Needless("key exchange is by elliptic curves")),
    ("tlsv1", Instead("TLS 1.2 and 1.3 alone")),
    ("tlsv1_1", Instead("TLS 1.2 and 1.3 alone")),
    ("no-tlsv1_2", Instead("TLS 1.2 is always there beside 1.3")),
    (
        "secret-key-file",
        Instead(
            "write the password of MySQL as it is, into a file that TURNPIKE_STORE_URL_FILE names and nobody else reads",
        ),
    ),
    ("keep-address-family", Instead("an Allocate without REQUESTED-ADDRESS-FAMILY gets IPv4 (RFC 8656)")),
    ("allocation-default-address-family", Value(default_family)),
    ("acme-redirect", Instead("HTTP is not served: answer ACME by DNS, or on a web server of its own")),
    ("log-binding", Instead("Binding requests are counted (turnpike_requests_total), not logged")),
    ("no-rfc5780", Switch(|draft, on| draft.rfc5780 = draft.rfc5780 && !on)),
    ("rfc5780", Flag(|draft| draft.rfc5780 = true)),
    (
        "stun-backward-compatibility",
        Needless("MAPPED-ADDRESS is told where NAT discovery is on and the request has room for it"),
    ),
    ("rfc5766-channel-numbers", Switch(|draft, on| draft.old_channels = Some(on))),
    ("rfc3489-compatibility", Instead("clients of RFC 3489 learn their address by Binding over UDP")),
    ("response-origin-only-with-rfc5780", Needless("RESPONSE-ORIGIN is told where NAT discovery is on")),
    ("respond-http-unsupported", Needless("what is neither TLS nor STUN ends the connection")),
    ("drop-invalid-packets", Needless("malformed packets are dropped and counted")),
    (
        "drop-invalid-packets-log",
        Instead("malformed packets are counted by reason (turnpike_dropped_datagrams_total), not logged"),
    ),
    ("udp-recvmmsg", Needless("server.datapath takes the best that the machine has")),
    ("udp-recvmmsg-log", Needless("/metrics has the sizes of batches")),
    ("udp-sendmmsg-log", Needless("/metrics has the sizes of batches")),
    ("udp-gso", Needless("server.datapath takes the best that the machine has")),
    ("include-reason-string", Needless("reasons are in the log")),
    ("multiplex-peer", Flag(|draft| draft.multiplex_peer = true)),
    (
        "multiplex-peer-port",
        Instead(
            "shared relay ports are chosen from relay.ports (min-port to max-port): open those in the firewall",
        ),
    ),
    (
        "multiplex-peer-max-peers",
        Instead("limits.permissions and limits.channels bound the peers of an allocation"),
    ),
    ("version", Needless("turnpike --version")),
    ("syslog-facility", Needless("lines go to standard error, and from there to the journal")),
    ("cpus", Number(|draft, value| set(&mut draft.cpus, value, NUMBER))),
    (
        "unauthorized-ratelimit",
        Instead(
            "limits.refusals_per_prefix bounds refusals to one network; many clients can share one, so it is off by default",
        ),
    ),
    ("unauthorized-ratelimit-rps", Instead("its place is limits.refusals_per_prefix, with the same number")),
    ("stateless-nonce", Needless("nonces are stateless, always")),
    ("stateless-nonce-secret", Instead("nonces hold for one server until it is restarted")),
    // Of older versions.
    ("dh2066", Needless("key exchange is by elliptic curves")),
    ("no-tlsv1", Needless("TLS 1.2 and 1.3 alone")),
    ("no-tlsv1_1", Needless("TLS 1.2 and 1.3 alone")),
    ("no-sslv2", Needless("TLS 1.2 and 1.3 alone")),
    ("no-sslv3", Needless("TLS 1.2 and 1.3 alone")),
    ("no-loopback-peers", Needless("loopback peers are refused unless allowed by name")),
    ("no-stun-backward-compatibility", Needless("MAPPED-ADDRESS is told where NAT discovery is on")),
    ("no-http", Needless("HTTP is not served on the listeners")),
    ("ne", Needless("server.datapath takes the best that the machine has")),
    ("st-cred-mech", Instead("short-term credentials are no longer in TURN (RFC 8656): use long-term ones")),
    ("sha256", Needless("SHA-256 keys are offered where every user has one")),
];

const NUMBER: &str = "a number";
const PORT: &str = "a port, 0 to 65535";
const IP: &str = "an IP address";

/// `noun` names the expected kind of value.
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
        Err(format!("{number} is not within {least} to {most}: the nearest of them was taken"))
    }
}

/// Bytes a second, 0 for no limit.
fn rate(place: &mut Option<u64>, value: &str) -> Result<(), String> {
    let bytes: u64 = parse(value, NUMBER)?;
    let bits = Bandwidth::from_bytes(bytes);
    *place = Some(bits).filter(|_| bytes > 0);
    if bytes == 0 || bytes.checked_mul(8) == Some(bits) {
        Ok(())
    } else {
        Err(format!("{bytes} bytes a second are not within what can be limited: {bits} bits were taken"))
    }
}

/// `PUBLIC` or `PUBLIC/LOCAL`.
fn external_ip(draft: &mut Draft, value: &str) -> Result<(), String> {
    if value.contains(['$', '`']) {
        return Err(format!(
            "{value:?} is a command of a shell: turnpike public-address finds the address (docs/nat.md)"
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
                "{value} is the wrong way round for coturn too, which reads PUBLIC/LOCAL: {public} is private, so it was taken for the \
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
fn user(draft: &mut Draft, value: &str) -> Result<(), String> {
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

fn userdb(draft: &mut Draft, value: &str) -> Result<(), String> {
    if !value.starts_with('/') {
        return Err(format!("{value:?} is not an absolute path: write store.url = \"sqlite:///PATH\""));
    }
    draft.store = Some(format!("sqlite://{value}"));
    Ok(())
}

/// The address as coturn has it, which a store understands.
fn store(draft: &mut Draft, option: &str, value: &str) -> Result<(), String> {
    let again = draft.store.is_some();
    draft.store = Some(format!("{option}={value}"));
    if again { Err("one store is used, and this is the last of them".to_owned()) } else { Ok(()) }
}

fn prometheus_address(draft: &mut Draft, value: &str) -> Result<(), String> {
    let value = if value == "any" { "0.0.0.0" } else { value };
    set(&mut draft.prometheus_address, value, IP)
}

/// 600 s where nothing follows; 0 stands for ever.
fn stale_nonce(draft: &mut Draft, value: &str) -> Result<(), String> {
    match value {
        "" => within(&mut draft.nonce_lifetime, "600", 60, 86_400),
        "0" => within(&mut draft.nonce_lifetime, "86400", 60, 86_400),
        _ => within(&mut draft.nonce_lifetime, value, 60, 86_400),
    }
}

/// An hour where nothing follows.
fn max_allocate_lifetime(draft: &mut Draft, value: &str) -> Result<(), String> {
    within(&mut draft.max_lifetime, if value.is_empty() { "3600" } else { value }, 60, 86_400)
}

fn log_min_level(draft: &mut Draft, value: &str) -> Result<(), String> {
    draft.log_level = Some(match value.to_ascii_lowercase().as_str() {
        "debug" => "debug",
        "info" | "control" => "info",
        "warning" | "warn" => "warn",
        "error" => "error",
        _ => return Err(format!("{value:?} is not a level that turnpike knows: see log.level")),
    });
    Ok(())
}

/// `IP` or `IP:PORT`, with the port that the transport has otherwise.
fn alternate(draft: &mut Draft, value: &str, of: Alternate) -> Result<(), String> {
    let port = if of == Alternate::Secure { 5349 } else { 3478 };
    let address = match value
        .parse()
        .or_else(|_| value.trim_matches(['[', ']']).parse().map(|ip: IpAddr| (ip, port).into()))
    {
        Ok(address) => address,
        Err(_) => {
            return Err(format!("{value:?} is not an address, and turnpike takes no names of servers here"));
        }
    };
    draft.alternates.push((address, of));
    Ok(())
}

fn separator(_: &mut Draft, value: &str) -> Result<(), String> {
    match value {
        ":" => Ok(()),
        _ => Err("a time-limited name has a colon between time and id: change it where credentials are made"
            .to_owned()),
    }
}

fn default_family(_: &mut Draft, value: &str) -> Result<(), String> {
    match value {
        "ipv4" => Ok(()),
        _ => Err("an Allocate without REQUESTED-ADDRESS-FAMILY gets IPv4 (RFC 8656)".to_owned()),
    }
}

/// IPv4-mapped peers are refused, always; so a range of them changes nothing.
fn peer(list: &mut Vec<IpRange>, value: &str) -> Result<(), String> {
    list.push(value.parse::<IpRange>()?);
    Ok(())
}
