//! Parsers for the parts of forwarding rules: hosts, ports, targets and client patterns. All file formats share
//! them, so all accept the same text. An error contains only the reason; the caller adds the position to form a
//! [`Mistake`](turnpike_strict::Mistake).

use std::{
    fmt::Write as _,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use turnpike_rules::{Bind, Endpoint, Host, MOST_WEIGHT, Pattern, PortRange, Proxy, UnixName};
use turnpike_turn::server::Cidr;
use turnpike_wire::address::split_zone;

use crate::toml_text::quoted;

/// Completes "expected ..." for [`endpoint`].
pub const TARGET_FORM: &str = "HOST:PORT or HOST:FIRST-LAST, IPv6 in brackets, or unix:/PATH, followed by *WEIGHT if that is not 1, \
                                      such as \"10.0.0.2:9001\", \"[2001:db8::2]:80\" or \"db.example.org:5432*3\"";
/// Completes "expected ..." for [`listener`].
pub const LISTEN_FORM: &str = "ADDR:PORT or ADDR:FIRST-LAST, IPv6 in brackets, such as \"0.0.0.0:9000\" or \
                                      \"[::]:9000-9010\", or unix:/PATH";
/// Completes "expected ..." for [`pattern`].
pub const PATTERN_FORM: &str =
    "an address with * and ? such as \"192.168.*\" or \"fe80:*\", or a prefix such as \"10.0.0.0/8\"";

/// Completes "expected ..." for [`proxy`].
pub const PROXY_FORM: &str = "addresses or prefixes such as \"10.0.0.2\" or \"10.0.0.0/8\", one or a list of them; \
                                     \"unix:\" for all clients of the Unix socket";
/// Completes "expected ..." for [`payload`].
pub const PAYLOAD_FORM: &str =
    "at most 1024 bytes, as text, or as 0x and two hexadecimal digits per byte, such as \"0x00010000\"";

/// Rejects an address with a zone: addresses on the network and in patterns have no zone.
pub fn without_zone(text: &str) -> Result<&str, String> {
    let address = text.split(['/', ']']).next().unwrap_or_default().trim_start_matches('[');
    if let Some((address, zone)) = split_zone(address) {
        return Err(format!("the interface %{zone} is local to this machine: write {address} without it"));
    }
    Ok(text)
}

pub fn port_range(text: &str) -> Result<PortRange, String> {
    let (first, last) = match text.split_once('-') {
        Some((first, last)) => (port(first)?, port(last)?),
        None => (port(text)?, port(text)?),
    };
    if first > last {
        return Err(format!("the first port of {text} is above the last"));
    }
    if first == 0 && last != 0 {
        return Err("a range of ports must start at 1 or above".to_owned());
    }
    Ok(PortRange { first, last })
}

fn port(text: &str) -> Result<u16, String> {
    // `parse` alone would accept "+80".
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse()
        .ok()
        .filter(|_| digits)
        .ok_or_else(|| format!("{text:?} is not a port: a port is a number, 0 to 65535"))
}

/// An address, with or without brackets around IPv6, or a host name.
pub fn host(text: &str) -> Result<Host, String> {
    if let Some(inner) = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return match inner.parse::<IpAddr>() {
            Ok(address @ IpAddr::V6(_)) => Ok(Host::Ip(address)),
            _ if split_zone(inner).is_some() => Ok(Host::Name(inner.to_owned())),
            _ => Err(format!("{text} is not an IPv6 address in brackets")),
        };
    }
    if let Ok(address) = text.parse() {
        return Ok(Host::Ip(address));
    }
    if split_zone(text).is_some() {
        return Ok(Host::Name(text.to_owned()));
    }
    if is_host_name(text) {
        return Ok(Host::Name(text.to_ascii_lowercase()));
    }
    Err(format!("{text:?} is neither an address nor a host name"))
}

/// RFC 1123 section 2.1, plus underscores. The last label must not be all digits, so `10.0.0.256` is not a
/// name.
fn is_host_name(text: &str) -> bool {
    let name = text.strip_suffix('.').unwrap_or(text);
    let label_is_good = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let last = name.rsplit('.').next().unwrap_or(name);
    name.len() <= 253 && name.split('.').all(label_is_good) && !last.bytes().all(|byte| byte.is_ascii_digit())
}

const NO_PORT: PortRange = PortRange { first: 0, last: 0 };

/// Parses a name that starts with `unix:`, in upper or lower case.
fn unix(text: &str) -> Option<Result<UnixName, String>> {
    let (scheme, name) = text.split_at_checked("unix:".len())?;
    scheme.eq_ignore_ascii_case("unix:").then(|| name.parse::<UnixName>().map_err(str::to_owned))
}

/// `HOST:PORT`, `HOST:FIRST-LAST` or `unix:NAME`, with or without `*WEIGHT`.
pub fn endpoint(text: &str) -> Result<Endpoint, String> {
    let (text, weight) = match text.rsplit_once('*') {
        Some((text, weight)) => (text, self::weight(weight)?),
        None => (text, 1),
    };
    if let Some(name) = unix(text) {
        return Ok(Endpoint { host: Host::Unix(name?), ports: NO_PORT, weight });
    }
    let (host_text, ports) = split_port(text)?;
    let ports = port_range(ports)?;
    if ports.first == 0 {
        return Err("port 0 cannot be a target".to_owned());
    }
    Ok(Endpoint { host: host(host_text)?, ports, weight })
}

fn weight(text: &str) -> Result<u16, String> {
    // `parse` alone would accept "+3".
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let weight = text.parse().ok().filter(|weight| digits && *weight <= MOST_WEIGHT);
    weight.ok_or_else(|| format!("{text:?} is not a weight: a weight is a number, 0 to {MOST_WEIGHT}"))
}

/// `ADDR:PORT`, `ADDR:FIRST-LAST` or `unix:NAME` to listen on. Names are resolved when the rule is bound.
pub fn listener(text: &str) -> Result<(Bind, PortRange), String> {
    if let Some(name) = unix(text) {
        return Ok((Bind::Unix(name?), NO_PORT));
    }
    let (host, ports) = split_port(text)?;
    let ports = port_range(ports)?;
    Ok((self::host(host)?.into(), ports))
}

/// Suggests a listener for `:8080`, `*:8080` or `8080`.
pub fn meant_listener(text: &str) -> Option<String> {
    let ports = text.strip_prefix("*:").or_else(|| text.strip_prefix(':')).unwrap_or(text);
    port_range(ports).is_ok().then(|| format!("0.0.0.0:{ports}"))
}

fn split_port(text: &str) -> Result<(&str, &str), String> {
    if let Some((protocol, _)) = text.split_once("://") {
        return Err(format!(
            "{protocol}:// is for the command line; in a file, the protocol is a separate key"
        ));
    }
    let (host, port) = text.rsplit_once(':').ok_or("it has no port")?;
    if host.contains(':') && !host.starts_with('[') {
        return Err("the IPv6 address needs brackets".to_owned());
    }
    if host.is_empty() {
        return Err("the address before the port is missing".to_owned());
    }
    Ok((host, port))
}

pub type Resolve = fn(&str) -> io::Result<Option<IpAddr>>;

/// An address of this machine. For a name, the resolver's first address, as in rinetd.
pub fn local_address(text: &str, resolve: Resolve) -> Result<IpAddr, String> {
    match host(text)? {
        Host::Ip(address) => Ok(address),
        // Unreachable: the text before a port never parses as a Unix socket.
        Host::Unix(_) => Err("a Unix socket has no port".to_owned()),
        Host::Name(name) => {
            let first = resolve(&name).map_err(|error| format!("{name:?} cannot be resolved: {error}"))?;
            first.ok_or_else(|| format!("{name:?} resolves to no address"))
        }
    }
}

pub fn pattern(text: &str) -> Result<Pattern, String> {
    without_zone(text)?;
    if text.contains('/') {
        return text.parse::<Cidr>().map(|cidr| Pattern::Prefix(cidr.base, cidr.bits));
    }
    let known = |byte: u8| byte.is_ascii_hexdigit() || b".:*?".contains(&byte);
    if text.is_empty() || !text.bytes().all(known) {
        return Err("it is not an address pattern".to_owned());
    }
    // Canonical text, so that "2001:DB8:0::1" matches the text of the address.
    Ok(match text.parse::<IpAddr>() {
        Ok(address) => Pattern::Wildcard(address.to_canonical().to_string()),
        Err(_) => Pattern::Wildcard(text.to_ascii_lowercase()),
    })
}

/// Suggests a replacement for a pattern that matches no address.
pub fn meant_pattern(text: &str) -> Option<String> {
    let text = text.to_ascii_lowercase();
    let text = without_mapping(&text);
    if text.contains(':') {
        return meant_prefix(text);
    }
    let plain = |part: &str| match part.trim_start_matches('0') {
        "" if !part.is_empty() => "0".to_owned(),
        digits => digits.to_owned(),
    };
    let parts: Vec<String> = text.trim_end_matches('.').split('.').map(plain).collect();
    let whole = parts.join(".");
    let open = format!("{whole}.*");
    let fewer = (1..parts.len()).rev().map(|count| parts[..count].join("."));
    let mut candidates = [whole, open].into_iter().chain(fewer.filter(|fewer| fewer.contains('*')));
    candidates.find(|candidate| pattern(candidate).is_ok_and(|pattern| pattern.fits_some_address()))
}

/// Converts a pattern for IPv4-mapped addresses to IPv4, because such clients are treated as IPv4.
pub fn without_mapping(text: &str) -> &str {
    text.strip_prefix("::ffff:").filter(|rest| rest.contains('.') && !rest.contains('/')).unwrap_or(text)
}

/// The first groups of an IPv6 address as a prefix, because `::` can replace any zero group in the text.
pub fn meant_prefix(text: &str) -> Option<String> {
    let groups: Vec<&str> = text.trim_end_matches('*').trim_end_matches(':').split(':').collect();
    let read = |group: &&str| u16::from_str_radix(group, 16).ok();
    let mut address = [0; 8];
    for (group, read) in address.iter_mut().zip(groups.iter().map(read)) {
        *group = read?;
    }
    (1..8).contains(&groups.len()).then(|| format!("{}/{}", Ipv6Addr::from(address), 16 * groups.len()))
}

/// Returns true if a pattern such as `2001:db8:0:*` misses most of the intended addresses: for example,
/// `2001:db8::1` does not match. Zeros in a row become `::` (RFC 5952 section 4.2), so a zero group appears
/// only between nonzero ones.
pub fn misses_zeros(pattern: &Pattern) -> bool {
    let Pattern::Wildcard(text) = pattern else { return false };
    if !text.contains(':') || text.contains("::") || !text.contains(['*', '?']) {
        return false;
    }
    let groups: Vec<&str> = text.split(':').collect();
    let is_other = |at: usize| {
        groups
            .get(at)
            .is_none_or(|group| !group.is_empty() && !group.starts_with('0') && !group.contains(['*', '?']))
    };
    groups.iter().enumerate().any(|(at, group)| {
        let is_alone = *group == "0" && is_other(at.wrapping_sub(1)) && is_other(at + 1);
        group.starts_with('0') && !is_alone
    })
}

pub fn did_you_mean(meant: Option<impl std::fmt::Display>) -> String {
    meant.map_or_else(String::new, |meant| format!("; did you mean \"{meant}\"?"))
}

pub fn proxy(text: &str) -> Result<Proxy, String> {
    match text.trim() {
        "unix:" => Ok(Proxy::Unix),
        text => without_zone(text)?
            .parse::<Cidr>()
            .map(|cidr| Proxy::Network(Pattern::Prefix(cidr.base, cidr.bits))),
    }
}

pub fn show_proxy(proxy: &Proxy) -> String {
    match proxy {
        Proxy::Network(pattern) => show_pattern(pattern),
        Proxy::Unix => "unix:".to_owned(),
    }
}

pub fn payload(text: &str) -> Result<Vec<u8>, String> {
    let bytes = match text.strip_prefix("0x") {
        None => text.as_bytes().to_vec(),
        Some(digits) => {
            let pair = |pair: &[u8]| {
                let [high, low] = pair else { return None };
                let digit = |digit: &u8| char::from(*digit).to_digit(16);
                u8::try_from(digit(high)? << 4 | digit(low)?).ok()
            };
            digits
                .as_bytes()
                .chunks(2)
                .map(pair)
                .collect::<Option<_>>()
                .ok_or("the hexadecimal digits are not complete pairs")?
        }
    };
    if bytes.len() > 1024 {
        return Err(format!("it has {} bytes", bytes.len()));
    }
    Ok(bytes)
}

/// rinetd writes `0` for all addresses.
pub fn or_zero(text: &str) -> &str {
    const ANY: &str = "0.0.0.0";
    debug_assert_eq!(Ok(Ipv4Addr::UNSPECIFIED), ANY.parse());
    if text == "0" { ANY } else { text }
}

pub fn show_target(endpoint: &Endpoint) -> String {
    match endpoint.weight {
        1 => endpoint.to_string(),
        weight => format!("{endpoint}*{weight}"),
    }
}

pub fn show_listener(bind: &Bind, ports: PortRange) -> String {
    match bind {
        Bind::Ip(_) | Bind::Name(_) => format!("{bind}:{ports}"),
        Bind::Unix(_) => bind.to_string(),
    }
}

pub fn show_pattern(pattern: &Pattern) -> String {
    match pattern {
        Pattern::Wildcard(text) => text.clone(),
        Pattern::Prefix(base, bits) => format!("{base}/{bits}"),
    }
}

/// Inverse of [`payload`], as TOML; `None` is shown like an empty payload.
pub fn show_payload(payload: Option<&[u8]>) -> String {
    let payload = payload.unwrap_or_default();
    let plain = |byte: &u8| (b' '..=b'~').contains(byte) && !b"\"\\".contains(byte);
    if payload.iter().all(plain) && !payload.starts_with(b"0x") {
        return quoted(&String::from_utf8_lossy(payload));
    }
    let digits = payload.iter().fold("0x".to_owned(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    });
    quoted(&digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_on_the_network_have_no_zone() {
        let told = "the interface %eth0 is local to this machine: write fe80::1 without it".to_owned();
        for text in ["fe80::1%eth0", "[fe80::1%eth0]:3478", "fe80::1%eth0/64"] {
            assert_eq!(without_zone(text), Err(told.clone()), "{text}");
        }
        for text in ["fe80::1", "[2001:db8::1]:3478", "10.0.0.0/8", "100%"] {
            assert_eq!(without_zone(text), Ok(text));
        }
    }

    #[test]
    fn payloads_are_text_or_hexadecimal_and_round_trip() {
        for (text, bytes) in [
            ("PING", &b"PING"[..]),
            ("", b""),
            ("0x0001ff", b"\x00\x01\xff"),
            ("0x3078", b"0x"),
            ("0xc3a9220a", "\u{e9}\"\n".as_bytes()),
        ] {
            assert_eq!(payload(text), Ok(bytes.to_vec()), "{text}");
            assert_eq!(show_payload(Some(bytes)), format!("\"{text}\""));
        }
        assert_eq!(payload("h\u{e9}"), Ok("h\u{e9}".as_bytes().to_vec()));
        for text in ["0x1", "0x1g", "0x+1", &"x".repeat(1025), &format!("0x{}", "00".repeat(1025))] {
            assert!(payload(text).is_err(), "{text}");
        }
    }

    #[test]
    fn endpoints_round_trip() {
        for text in [
            "10.0.0.2:9001",
            "[2001:db8::2]:80*0",
            "db-1.example.org:5000-5010*256",
            "_sip.example:5060",
            "a:1",
            "unix:/run/app.sock",
            "unix:@app*3",
            "[fe80::2%eth0]:80",
        ] {
            assert_eq!(endpoint(text).map(|endpoint| show_target(&endpoint)), Ok(text.to_owned()));
        }
    }

    #[test]
    fn bad_endpoints_have_specific_errors() {
        for (text, problem) in [
            ("10.0.0.2", "it has no port"),
            ("10.0.0.2:", "\"\" is not a port: a port is a number, 0 to 65535"),
            ("10.0.0.2:65536", "\"65536\" is not a port: a port is a number, 0 to 65535"),
            ("10.0.0.2:+80", "\"+80\" is not a port: a port is a number, 0 to 65535"),
            ("10.0.0.2:9-5", "the first port of 9-5 is above the last"),
            ("10.0.0.2:0", "port 0 cannot be a target"),
            ("10.0.0.2:0-5", "a range of ports must start at 1 or above"),
            ("10.0.0.256:80", "\"10.0.0.256\" is neither an address nor a host name"),
            ("2001:db8::2:80", "the IPv6 address needs brackets"),
            ("[10.0.0.2]:80", "[10.0.0.2] is not an IPv6 address in brackets"),
            (":80", "the address before the port is missing"),
            (
                "tcp://10.0.0.2:80",
                "tcp:// is for the command line; in a file, the protocol is a separate key",
            ),
            ("-a:80", "\"-a\" is neither an address nor a host name"),
            ("a:80*257", "\"257\" is not a weight: a weight is a number, 0 to 256"),
            ("a:80*+3", "\"+3\" is not a weight: a weight is a number, 0 to 256"),
            ("a:80*", "\"\" is not a weight: a weight is a number, 0 to 256"),
            ("unix:app.sock", "a Unix socket is an absolute path, or @ and a name"),
            ("unix:", "a Unix socket is an absolute path, or @ and a name"),
            ("uniX:1", "a Unix socket is an absolute path, or @ and a name"),
            ("a b:80", "\"a b\" is neither an address nor a host name"),
        ] {
            assert_eq!(endpoint(text), Err(problem.to_owned()), "{text}");
        }
    }

    #[test]
    fn listener_may_be_a_host_name() {
        let (bind, ports) = listener("localhost:80-82").expect("a listener");
        assert_eq!((&bind, ports), (&Bind::Name("localhost".to_owned()), PortRange { first: 80, last: 82 }));
        assert_eq!(show_listener(&bind, ports), "localhost:80-82");
    }

    #[test]
    fn patterns_are_wildcards_or_prefixes() {
        for (text, shown) in [
            ("192.168.*", "192.168.*"),
            ("10.0.0.?", "10.0.0.?"),
            ("FE80:*", "fe80:*"),
            ("2001:DB8:0::1", "2001:db8::1"),
            ("*", "*"),
            ("10.0.0.0/8", "10.0.0.0/8"),
        ] {
            assert_eq!(pattern(text).map(|pattern| show_pattern(&pattern)), Ok(shown.to_owned()), "{text}");
        }
        let zoned = pattern("fe80::1%eth0").expect_err("clients have no zone");
        assert!(zoned.ends_with("write fe80::1 without it"), "{zoned}");
        for text in ["", "example.org", "10.0.0.1/8", "10.0.0.0/33", "10.0.0.1 "] {
            assert!(pattern(text).is_err(), "{text}");
        }
    }

    #[test]
    fn pattern_with_a_zero_group_suggests_a_prefix() {
        for (text, meant) in [
            ("2001:db8:0:*", Some("2001:db8::/48")),
            ("2001:db8:0:0:*", Some("2001:db8::/64")),
            ("2001:db8:0*", Some("2001:db8::/48")),
            ("2001:db8:0:0:1:*", Some("2001:db8:0:0:1::/80")),
        ] {
            assert!(misses_zeros(&pattern(text).expect("a pattern")), "{text}");
            assert_eq!(meant_prefix(text).as_deref(), meant, "{text}");
        }
        for text in ["*:0:*", "?001:db8:0:*", "2001:db8:?:0:*", "*:0:0:1", "2001:db8:0?*"] {
            assert!(misses_zeros(&pattern(text).expect("a pattern")), "{text}");
        }
        for text in [
            "2001:db8:*",
            "2001:db8::*",
            "10.0.*",
            "*",
            "2001:db8:0:1:*",
            "*:1:0",
            "2001:db8:0:1:2:3:4:5",
            "fe80:*0",
        ] {
            assert!(!misses_zeros(&pattern(text).expect("a pattern")), "{text}");
        }
    }

    #[test]
    fn impossible_pattern_suggests_a_working_one() {
        for (text, meant) in [
            ("127.0.0", Some("127.0.0.*")),
            ("127", Some("127.*")),
            ("127.0.0.", Some("127.0.0.*")),
            ("127.0.0.*.*", Some("127.0.0.*")),
            ("127.0.0.01", Some("127.0.0.1")),
            ("010.*", Some("10.*")),
            ("0000:*", Some("::/16")),
            ("2001:0DB8:*", Some("2001:db8::/32")),
            ("2001:db8", Some("2001:db8::/32")),
            ("2001:db8::1::*", None),
            ("::ffff:127.*", Some("127.*")),
            ("999.0.0.1", None),
        ] {
            assert_eq!(pattern(text).map(|pattern| pattern.fits_some_address()), Ok(false), "{text}");
            assert_eq!(meant_pattern(text).as_deref(), meant, "{text}");
        }
    }
}
