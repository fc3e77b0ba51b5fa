//! `[credentials]`: listeners of the credential API, its limits, and the addresses it gives to applications.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
};

use turnpike_convert::toml_text::strings;

use turnpike_wire::names::server_name;

use crate::{
    CertificateFiles, Mistake, Settings, StateDir,
    key::{ValueKind, list_of},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialsSettings {
    pub listen: Vec<SocketAddr>,
    pub tls_cert: Option<PathBuf>,
    pub tls_key: Option<PathBuf>,
    /// Host names accepted besides IP addresses, `localhost`, the public names and those in the certificate.
    pub hosts: Vec<String>,
    pub origins: Vec<String>,
    /// Names or addresses by which clients reach the TURN server.
    pub names: Vec<String>,
    /// URIs given to clients instead of those derived from listeners and names.
    pub uris: Vec<String>,
    /// Default lifetime of a credential in seconds.
    pub ttl: u32,
    /// Maximum lifetime of a credential in seconds.
    pub max_ttl: u32,
    /// Requests per second for API keys without a rate of their own.
    pub rate: u32,
}

impl Default for CredentialsSettings {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            tls_cert: None,
            tls_key: None,
            hosts: Vec::new(),
            origins: Vec::new(),
            names: Vec::new(),
            uris: Vec::new(),
            ttl: 86_400,
            max_ttl: 86_400,
            rate: 50,
        }
    }
}

pub(crate) const ORIGINS: ValueKind<Vec<String>> = list_of!(
    "a list of origins as browsers write them, such as [\"https://app.example.org\", \"http://localhost:8080\"]",
    origin
);

pub(crate) const NAMES: ValueKind<Vec<String>> = list_of!(
    "a list of host names or addresses by which clients reach this server, such as [\"turn.example.org\"], or [] to detect them",
    |text| match text.parse::<IpAddr>() {
        Ok(ip) if ip.is_unspecified() || ip.is_multicast() => Err("clients cannot connect to it"),
        Ok(ip) => Ok(ip.to_string()),
        Err(_) => server_name(text.strip_suffix('.').unwrap_or(text)),
    }
);

pub(crate) const URIS: ValueKind<Vec<String>> = ValueKind::list(
    "a list of TURN URIs (RFC 7065), such as [\"turn:turn.example.org:3478?transport=udp\"], or [] to derive them",
    |reader, node| {
        let check = reader.checks.turn_uri;
        reader.list(node, |reader, node| reader.parsed(node, check))
    },
    |uris| strings(uris),
);

/// Normalizes an origin to the form that browsers send (RFC 6454 section 6.2).
fn origin(text: &str) -> Result<String, &'static str> {
    let text = text.trim().to_ascii_lowercase();
    let (scheme, authority) = text.split_once("://").ok_or("http:// or https:// is missing")?;
    let own_port = match scheme {
        "http" => 80,
        "https" => 443,
        _ => return Err("the scheme is neither http nor https"),
    };
    let authority = authority.strip_suffix('/').unwrap_or(authority);
    // Colons inside brackets belong to an IPv6 address.
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (authority, None),
    };
    let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(address) => {
            format!("[{}]", address.parse::<Ipv6Addr>().map_err(|_| "the host is not an IPv6 address")?)
        }
        None => match host.parse::<Ipv4Addr>() {
            Ok(address) => address.to_string(),
            Err(_) => server_name(host)?,
        },
    };
    let port =
        port.map(str::parse::<u16>).transpose().map_err(|_| "the port is not a number from 0 to 65535")?;
    Ok(match port.filter(|port| *port != own_port) {
        Some(port) => format!("{scheme}://{host}:{port}"),
        None => format!("{scheme}://{host}"),
    })
}

impl Settings {
    pub fn credentials_certificate(&self) -> Option<CertificateFiles> {
        let pair = |cert: &Option<PathBuf>, key: &Option<PathBuf>| {
            let (cert, key) = (cert.clone()?, key.clone()?);
            Some(CertificateFiles { cert, key })
        };
        let CredentialsSettings { tls_cert, tls_key, .. } = &self.credentials;
        pair(tls_cert, tls_key)
            .or_else(|| pair(&self.tls.cert, &self.tls.key))
            .or_else(|| self.tls.certificates.first().cloned())
    }
}

impl CredentialsSettings {
    pub(crate) fn check(settings: &Settings, problems: &mut Vec<Mistake>) {
        let mut refuse = |key: &'static str, problem: String, expected: &str| {
            problems.push(Mistake::new(settings.origin(key), key, problem, expected));
        };
        let Self { listen, tls_cert, tls_key, ttl, max_ttl, .. } = &settings.credentials;
        let both = "both a certificate and its key, or neither";
        match (tls_cert, tls_key) {
            (Some(_), None) => {
                refuse("credentials.tls_cert", "there is no credentials.tls_key for it".to_owned(), both);
            }
            (None, Some(_)) => {
                refuse("credentials.tls_key", "there is no credentials.tls_cert for it".to_owned(), both);
            }
            _ => {}
        }
        let beyond = listen.iter().find(|address| !address.ip().to_canonical().is_loopback());
        if let Some(address) = beyond.filter(|_| settings.credentials_certificate().is_none()) {
            refuse(
                "credentials.listen",
                format!("{address} is not on loopback, and there is no certificate"),
                "loopback behind a TLS proxy, or credentials.tls_cert and credentials.tls_key, or tls.cert and tls.key",
            );
        }
        if !listen.is_empty() && settings.store.url.is_none() && settings.store.state == StateDir::Off {
            refuse(
                "credentials.listen",
                "there is no store for API keys".to_owned(),
                "store.url or store.state as well, and a key created with `turnpike key add`",
            );
        }
        // Without an explicit value, the default is capped by `max_ttl`.
        if ttl > max_ttl && settings.is_explicit("credentials.ttl") {
            let problem = format!("{ttl} is above credentials.max_ttl {max_ttl}");
            refuse("credentials.ttl", problem, "at most credentials.max_ttl (both in seconds)");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Origin;

    proptest! {
        #[test]
        fn origin_round_trips_through_text(
            text in "(?i:https?://)?[a-z0-9.:\\[\\]/@-]{0,30}(:[0-9]{1,6})?/?",
        ) {
            if let Ok(shown) = origin(&text) {
                prop_assert_eq!(origin(&shown), Ok(shown));
            }
        }

        #[test]
        fn origin_parser_accepts_any_text_without_panic(text in ".*") {
            let _ = origin(&text);
        }
    }

    #[test]
    fn origin_is_normalized_to_the_browser_form() {
        for (text, sent) in [
            ("https://app.example.org", "https://app.example.org"),
            ("HTTPS://App.Example.ORG:443/", "https://app.example.org"),
            ("http://localhost:8080", "http://localhost:8080"),
            ("http://127.0.0.1", "http://127.0.0.1"),
            ("http://[::1]:3000/", "http://[::1]:3000"),
            ("https://[2001:DB8:0::1]:443", "https://[2001:db8::1]"),
            ("http://localhost:0080", "http://localhost"),
            ("http://localhost:443", "http://localhost:443"),
        ] {
            assert_eq!(origin(text).as_deref(), Ok(sent), "{text}");
        }
        for bad in [
            "",
            "*",
            "null",
            "app.example.org",
            "ftp://app.example.org",
            "https://",
            "https://app.example.org/page",
            "https://user@app.example.org",
            "https://app.example.org:http",
            "https://*.example.org",
            "https://[::1",
            "https://::1",
            "https://localhost:",
            "https://localhost:80:80",
            "https://localhost:65536",
        ] {
            assert!(origin(bad).is_err(), "{bad}");
        }
    }

    fn problems(change: impl FnOnce(&mut Settings)) -> Vec<String> {
        let mut settings = Settings::default();
        change(&mut settings);
        let mut problems = Vec::new();
        CredentialsSettings::check(&settings, &mut problems);
        problems.iter().map(ToString::to_string).collect()
    }

    fn listen(settings: &mut Settings, address: &str) {
        settings.credentials.listen = vec![address.parse().unwrap()];
    }

    #[test]
    fn non_loopback_credential_api_needs_a_certificate() {
        for local in ["127.0.0.1:8443", "[::1]:0", "[::ffff:127.0.0.1]:1"] {
            assert!(problems(|settings| listen(settings, local)).is_empty(), "{local}");
        }
        let told = problems(|settings| listen(settings, "0.0.0.0:8443"));
        assert!(told.len() == 1 && told[0].contains("no certificate"), "{told:?}");
        let pair = || (Some("cert.pem".into()), Some("key.pem".into()));
        let own = |settings: &mut Settings| {
            listen(settings, "0.0.0.0:8443");
            (settings.credentials.tls_cert, settings.credentials.tls_key) = pair();
        };
        let of_clients = |settings: &mut Settings| {
            listen(settings, "0.0.0.0:8443");
            (settings.tls.cert, settings.tls.key) = pair();
        };
        assert!(problems(own).is_empty() && problems(of_clients).is_empty());
    }

    #[test]
    fn default_ttl_above_the_maximum_is_valid() {
        assert!(problems(|settings| settings.credentials.max_ttl = 60).is_empty());
    }

    #[test]
    fn contradictory_settings_are_refused() {
        for (change, told) in [
            (
                (|settings| settings.credentials.tls_cert = Some("a".into())) as fn(&mut Settings),
                "no credentials.tls_key for it",
            ),
            (|settings| settings.credentials.tls_key = Some("a".into()), "no credentials.tls_cert for it"),
            (
                |settings| {
                    settings.credentials.ttl = 86_401;
                    settings.origins.insert("credentials.ttl", Origin::Default);
                },
                "86401 is above credentials.max_ttl 86400",
            ),
            (
                |settings| {
                    listen(settings, "127.0.0.1:8443");
                    settings.store.state = StateDir::Off;
                },
                "there is no store for API keys",
            ),
        ] {
            let problems = problems(change);
            assert!(problems.len() == 1 && problems[0].contains(told), "{problems:?}");
        }
    }
}
