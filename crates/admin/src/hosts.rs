//! Validates `Host` to prevent DNS rebinding: even if an attacker's domain resolves to our address, the
//! browser sends that domain as `Host`.

use std::net::IpAddr;

use axum::http::{HeaderMap, StatusCode, Uri, Version, header, uri::Authority};

use crate::problem::Problem;

/// Checks the target of a request. `names` are allowed besides addresses and `localhost`; `key` is their
/// configuration key. `*.` matches one label, as in certificates.
pub(crate) fn check(
    names: &[String],
    (section, key): (&str, &str),
    version: Version,
    target: &Uri,
    headers: &HeaderMap,
) -> Result<(), Problem> {
    let mut named = headers.get_all(header::HOST).iter();
    // RFC 9112 section 3.2: HTTP/1.1 requires exactly one Host header. HTTP/1.0 does not, but browsers do
    // not use it.
    let host = match (named.next(), named.next()) {
        (Some(host), None) => host,
        (None, _) if version == Version::HTTP_10 => return Ok(()),
        (None, _) => return Err(Problem::bad_request("an HTTP/1.1 request needs a Host header")),
        (Some(_), Some(_)) => return Err(Problem::bad_request("a request must have only one Host header")),
    };
    let Ok(host) = Authority::try_from(host.as_bytes()) else {
        return Err(Problem::bad_request("the Host header is not HOST or HOST:PORT"));
    };
    // Section 3.2.2: the authority in the request line overrides the header.
    for named in [Some(&host), target.authority()].into_iter().flatten() {
        if !allows(names, named.host()) {
            let why = format!(
                "the host name {:?} is not allowed: use an IP address or localhost, or add the name to \
                 {key} in the section [{section}] of the configuration",
                named.host()
            );
            return Err(Problem::new(StatusCode::MISDIRECTED_REQUEST, "unknown_host", why));
        }
    }
    Ok(())
}

/// Every address is allowed, not only ours: rebinding needs a name, and clients may reach us through the
/// address of a NAT.
fn allows(names: &[String], host: &str) -> bool {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    if bare.parse::<IpAddr>().is_ok() {
        return true;
    }
    let name = host.strip_suffix('.').unwrap_or(host);
    let is_it = |own: &String| match (own.strip_prefix("*."), name.split_once('.')) {
        (Some(own), Some((_, rest))) => own.eq_ignore_ascii_case(rest),
        _ => own.eq_ignore_ascii_case(name),
    };
    name.eq_ignore_ascii_case("localhost") || names.iter().any(is_it)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn status(version: Version, target: &str, hosts: &[&str]) -> u16 {
        let mut headers = HeaderMap::new();
        for host in hosts {
            headers.append(header::HOST, HeaderValue::from_bytes(host.as_bytes()).unwrap());
        }
        let own = ["turn.example.org".to_owned()];
        let own = [&own[..], &["*.wild.example".to_owned()]].concat();
        check(&own, ("admin", "hosts"), version, &target.parse().unwrap(), &headers)
            .map_or_else(|problem| problem.status, |()| 200)
    }

    #[test]
    fn only_addresses_localhost_and_configured_hosts_are_allowed() {
        for host in [
            "127.0.0.1:9641",
            "127.0.0.1",
            "192.0.2.7:80",
            "[::1]:9641",
            "[2001:db8::7]",
            "localhost:9641",
            "LocalHost.",
            "turn.example.org:9641",
            "Turn.Example.ORG.",
            "a.Wild.example:443",
        ] {
            assert_eq!(status(Version::HTTP_11, "/metrics", &[host]), 200, "{host}");
        }
        for host in [
            "evil.example:9641",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "turn.example.org.evil.example",
            "example.org",
            "wild.example",
            "a.b.wild.example",
            "2130706433",
            "0x7f.1",
        ] {
            assert_eq!(status(Version::HTTP_11, "/metrics", &[host]), 421, "{host}");
            assert_eq!(status(Version::HTTP_10, "/metrics", &[host]), 421, "{host}");
        }
        for host in ["", "a b", "[::1", "evil.example/", "\u{e9}"] {
            let status = status(Version::HTTP_11, "/", &[host]);
            assert!(matches!(status, 400 | 421), "{host:?}: {status}");
        }
    }

    #[test]
    fn missing_or_repeated_host_is_refused_except_http_1_0() {
        assert_eq!(status(Version::HTTP_10, "/", &[]), 200);
        assert_eq!(status(Version::HTTP_11, "/", &[]), 400);
        assert_eq!(status(Version::HTTP_11, "/", &["localhost", "localhost"]), 400);
        assert_eq!(status(Version::HTTP_11, "/", &["localhost", "evil.example"]), 400);
    }

    #[test]
    fn host_in_the_request_line_is_checked() {
        assert_eq!(status(Version::HTTP_11, "http://localhost:9641/metrics", &["localhost"]), 200);
        assert_eq!(status(Version::HTTP_11, "http://evil.example/metrics", &["localhost"]), 421);
        assert_eq!(status(Version::HTTP_11, "http://localhost/metrics", &["evil.example"]), 421);
    }
}
