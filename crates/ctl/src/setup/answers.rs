//! Answers to the questions of `turnpike setup`, with one text form for flags and the dialogue.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};

use turnpike_config::{Secret, settings_of};
use turnpike_convert::toml_text::quoted;
use turnpike_wire::names::{is_username, server_name};

pub(crate) const HTTPS: u16 = 443;

/// A value, or `none`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OrNone<T>(pub(crate) Option<T>);

impl<T: FromStr> FromStr for OrNone<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "none" { Ok(Self(None)) } else { text.parse().map(|value| Self(Some(value))) }
    }
}

impl<T: fmt::Display> fmt::Display for OrNone<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(value) => value.fmt(f),
            None => f.write_str("none"),
        }
    }
}

/// DNS name in lower case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostName(String);

impl FromStr for HostName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let name = server_name(text.strip_suffix('.').unwrap_or(text));
        name.map(Self).map_err(|_| "expected a DNS name, such as turn.example.org, or none")
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CertificateSource {
    /// Ordered by the server (`tls.acme`).
    Automatic,
    None,
    /// Certificate chain that another program renews.
    File(PathBuf),
}

impl FromStr for CertificateSource {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "automatic" => Ok(Self::Automatic),
            "none" => Ok(Self::None),
            path if path.contains(['/', '.']) => Ok(Self::File(path.into())),
            _ => Err("expected automatic, none, or the path of a certificate chain (PEM)"),
        }
    }
}

impl fmt::Display for CertificateSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Automatic => f.write_str("automatic"),
            Self::None => f.write_str("none"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ClientAccess {
    /// The application derives credentials from a shared secret.
    Secret,
    /// The application requests credentials over HTTP.
    Api,
    /// A single user with a password.
    User(String),
}

impl FromStr for ClientAccess {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            None if text == "secret" => Ok(Self::Secret),
            None if text == "api" => Ok(Self::Api),
            Some(("user", name)) if is_username(name) => Ok(Self::User(name.to_owned())),
            _ => Err("expected secret, api, or user:NAME (1 to 508 bytes without a colon)"),
        }
    }
}

impl fmt::Display for ClientAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Secret => f.write_str("secret"),
            Self::Api => f.write_str("api"),
            Self::User(name) => write!(f, "user:{name}"),
        }
    }
}

/// Use of TCP and UDP port 443.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HttpsPort {
    Yes,
    No,
    /// Shared with this web server, which gets the connections for other names.
    Shared(SocketAddr),
}

impl FromStr for HttpsPort {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "yes" => Ok(Self::Yes),
            "no" => Ok(Self::No),
            address => match address.parse::<SocketAddr>() {
                Ok(address) if address.port() != 0 && !address.ip().is_unspecified() => {
                    Ok(Self::Shared(address))
                }
                _ => Err("expected yes, no, or the address of a web server, such as 127.0.0.1:8443"),
            },
        }
    }
}

impl fmt::Display for HttpsPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Yes => f.write_str("yes"),
            Self::No => f.write_str("no"),
            Self::Shared(address) => address.fmt(f),
        }
    }
}

/// First and last relay port, as `relay.ports` accepts them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RelayPorts(pub(crate) String);

impl FromStr for RelayPorts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let read = settings_of(&format!("[relay]\nports = {}\n", quoted(text)));
        let expected = |mistake: &turnpike_config::Mistake| format!("expected {}", mistake.expected);
        read.map(|_| Self(text.to_owned()))
            .map_err(|mistakes| mistakes.0.iter().map(expected).collect::<Vec<_>>().join("; "))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Certificate {
    None,
    Automatic { contact: Option<String> },
    Files { cert: PathBuf, key: PathBuf },
}

/// All answers, with the generated secret.
#[derive(Clone, Debug)]
pub(crate) struct Answers {
    pub(crate) name: Option<HostName>,
    pub(crate) certificate: Certificate,
    pub(crate) access: ClientAccess,
    pub(crate) https: HttpsPort,
    /// Public address of a NAT in front of this machine.
    pub(crate) public: Option<IpAddr>,
    pub(crate) relay_ports: Option<RelayPorts>,
    /// Listeners, without those on port 443.
    pub(crate) listen: Vec<SocketAddr>,
    /// Shared secret, or the password of the user.
    pub(crate) secret: Secret,
}

impl Answers {
    /// Addresses for UDP and TCP, those on port 443 last.
    pub(crate) fn listeners(&self) -> Vec<SocketAddr> {
        let mut all = self.listen.clone();
        if self.https != HttpsPort::No {
            for address in &self.listen {
                let address = SocketAddr::new(address.ip(), HTTPS);
                if !all.contains(&address) {
                    all.push(address);
                }
            }
        }
        all
    }

    pub(crate) fn port(&self) -> u16 {
        self.listen.first().map_or(0, SocketAddr::port)
    }

    /// Port for TLS; `None` without a certificate.
    pub(crate) fn tls_port(&self) -> Option<u16> {
        let port = if self.https == HttpsPort::No { self.port() } else { HTTPS };
        (self.certificate != Certificate::None).then_some(port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_round_trip() {
        fn same<T: FromStr + fmt::Display>(text: &str) {
            let Ok(read) = text.parse::<T>() else { panic!("{text} is refused") };
            assert_eq!(read.to_string(), text);
        }
        same::<OrNone<HostName>>("turn.example.org");
        same::<OrNone<HostName>>("none");
        same::<OrNone<IpAddr>>("203.0.113.5");
        ["automatic", "none", "/etc/tls/fullchain.pem", "cert.pem"]
            .iter()
            .for_each(|text| same::<CertificateSource>(text));
        ["secret", "api", "user:alice"].iter().for_each(|text| same::<ClientAccess>(text));
        ["yes", "no", "127.0.0.1:8443", "[::1]:8443"].iter().for_each(|text| same::<HttpsPort>(text));
    }

    #[test]
    fn wrong_answers_are_refused_with_the_expected_form() {
        fn refused<T: FromStr<Err: fmt::Display>>(text: &str, words: &str) {
            let why = text.parse::<T>().err().map(|why| why.to_string());
            assert!(why.as_ref().is_some_and(|why| why.contains(words)), "{text}: {why:?}");
        }
        refused::<OrNone<HostName>>("a b", "turn.example.org");
        refused::<OrNone<HostName>>("203.0.113.5", "DNS name");
        refused::<CertificateSource>("automtic", "automatic, none, or the path");
        refused::<ClientAccess>("user:", "user:NAME");
        refused::<ClientAccess>("alice", "secret, api");
        refused::<HttpsPort>("8443", "127.0.0.1:8443");
        refused::<HttpsPort>("0.0.0.0:8443", "127.0.0.1:8443");
        for ports in ["9-1", "50000", "0-70000", "5\"\nx"] {
            refused::<RelayPorts>(ports, "expected");
        }
    }
}
