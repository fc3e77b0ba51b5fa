//! `[admin]`: listeners and access rules of the admin interface, shared by `serve` and `forward`.

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};

use turnpike_convert::toml_text::{list, quoted, strings};
use turnpike_strict::Value;
use turnpike_wire::address::UnixName;
use turnpike_wire::secret::MASK;

use crate::{
    Mistake, Origin, Secret,
    key::{ValueKind, named},
    keys,
};

/// Minimum length in characters. Shorter tokens can be guessed even with rate limits.
const SHORTEST_TOKEN: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminSettings {
    pub listen: Vec<AdminAddress>,
    /// Host names accepted besides IP addresses and `localhost`, in lower case.
    pub hosts: Vec<String>,
    pub loopback: AdminAccess,
    pub tokens: Vec<Secret>,
    pub read_tokens: Vec<Secret>,
    /// Tokens with read access that may also capture the traffic of allocations.
    pub capture_tokens: Vec<Secret>,
    /// PEM file with the certificate chain for non-loopback addresses.
    pub tls_cert: Option<PathBuf>,
    pub tls_key: Option<PathBuf>,
    /// PEM file of the CAs whose clients have full access.
    pub client_ca: Option<PathBuf>,
    /// PEM file of the CAs whose clients have read access.
    pub read_client_ca: Option<PathBuf>,
}

impl AdminSettings {
    /// Listens on the default Unix socket and on `port` on loopback.
    pub(crate) fn on_port(port: u16) -> Self {
        Self {
            listen: vec![AdminAddress::DefaultSocket, AdminAddress::Tcp((Ipv4Addr::LOCALHOST, port).into())],
            hosts: Vec::new(),
            loopback: AdminAccess::Read,
            tokens: Vec::new(),
            read_tokens: Vec::new(),
            capture_tokens: Vec::new(),
            tls_cert: None,
            tls_key: None,
            client_ca: None,
            read_client_ca: None,
        }
    }

    pub fn tcp(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        self.listen.iter().filter_map(|address| match address {
            AdminAddress::Tcp(address) => Some(*address),
            _ => None,
        })
    }

    pub(crate) fn check(&self, origin: impl Fn(&str) -> Origin, problems: &mut Vec<Mistake>) {
        let mut refuse = |key: &'static str, problem: String, expected: &str| {
            problems.push(Mistake::new(&origin(key), key, problem, expected));
        };
        let beyond = self.tcp().find(|address| !is_loopback(address));
        let has_certificate = self.tls_cert.is_some() && self.tls_key.is_some();
        let knows_somebody = !self.tokens.is_empty()
            || !self.read_tokens.is_empty()
            || !self.capture_tokens.is_empty()
            || self.client_ca.is_some()
            || self.read_client_ca.is_some();
        match beyond {
            Some(address) if !has_certificate => refuse(
                "admin.listen",
                format!("{address} is not on loopback, and there is no certificate"),
                "loopback, unix:PATH, or admin.tls_cert and admin.tls_key as well",
            ),
            Some(address) if !knows_somebody => refuse(
                "admin.listen",
                format!("{address} is not on loopback, but neither tokens nor client CAs are configured"),
                "loopback, unix:PATH, or admin.tokens, admin.read_tokens, admin.client_ca or admin.read_client_ca as well",
            ),
            _ => {}
        }
        match (&self.tls_cert, &self.tls_key) {
            (Some(_), None) => refuse(
                "admin.tls_cert",
                "there is no admin.tls_key for it".to_owned(),
                "both admin.tls_cert and admin.tls_key, or neither",
            ),
            (None, Some(_)) => refuse(
                "admin.tls_key",
                "there is no admin.tls_cert for it".to_owned(),
                "both admin.tls_cert and admin.tls_key, or neither",
            ),
            _ => {}
        }
        if let Some(address) = repeated(&self.listen) {
            refuse("admin.listen", format!("{address} is listed twice"), "each address once");
        }
        if self.tokens.iter().any(|token| self.read_tokens.contains(token)) {
            refuse(
                "admin.read_tokens",
                "one of them is in admin.tokens too".to_owned(),
                "each token in only one list: full access or read access",
            );
        }
    }
}

fn is_loopback(address: &SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

fn repeated(all: &[AdminAddress]) -> Option<&AdminAddress> {
    let has_port = |address: &AdminAddress| !matches!(address, AdminAddress::Tcp(at) if at.port() == 0);
    let again = |(place, address): &(usize, &AdminAddress)| all[..*place].contains(address);
    all.iter().enumerate().filter(|(_, address)| has_port(address)).find(again).map(|(_, address)| address)
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminAddress {
    DefaultSocket,
    /// A Unix socket with a path.
    Unix(UnixName),
    Tcp(SocketAddr),
}

impl AdminAddress {
    /// Returns true if only this machine can connect.
    #[must_use]
    pub fn is_local(&self) -> bool {
        match self {
            Self::Tcp(address) => is_loopback(address),
            _ => true,
        }
    }
}

impl fmt::Display for AdminAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DefaultSocket => f.write_str("unix"),
            Self::Unix(name) => write!(f, "unix:{name}"),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

impl FromStr for AdminAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix("unix") {
            Some("") => Ok(Self::DefaultSocket),
            Some(rest) => {
                let name = rest.strip_prefix(':').ok_or("")?.parse::<UnixName>()?;
                // Only a socket with a path has permissions.
                if name.path().is_some() {
                    Ok(Self::Unix(name))
                } else {
                    Err("an abstract socket has no permissions, so every local user could connect")
                }
            }
            None => keys::address(text).map(Self::Tcp),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AdminAccess {
    /// Liveness and readiness checks only.
    None,
    Read,
    Full,
}

pub(crate) const LISTEN: ValueKind<Vec<AdminAddress>> = ValueKind::list(
    "\"off\", or a list of \"unix\" (the socket that turnpike's commands use by default), \"unix:/PATH\" and \"ADDR:PORT\", such as \
     [\"unix\", \"127.0.0.1:9641\"]",
    |reader, node| {
        let is_off = |value: &Value| matches!(value, Value::Text(text) if **text == "off");
        match &node.value {
            Value::List(nodes) if matches!(&nodes[..], [only] if is_off(&only.value)) => Some(Vec::new()),
            Value::List(_) => {
                reader.list(node, |reader, node| reader.parsed(node, |text| text.trim().parse()))
            }
            value if is_off(value) => Some(Vec::new()),
            _ => reader.parsed(node, |text| text.trim().parse()).map(|address| vec![address]),
        }
    },
    |listen| if listen.is_empty() { quoted("off") } else { strings(listen) },
);

pub(crate) const ACCESS: ValueKind<AdminAccess> = named!(
    "\"full\", \"read\" or \"none\"",
    "full" => AdminAccess::Full,
    "read" => AdminAccess::Read,
    "none" => AdminAccess::None,
);

pub(crate) const TOKENS: ValueKind<Vec<Secret>> = ValueKind::list(
    "a list of tokens, each of at least 16 characters without spaces (openssl rand -hex 32 generates one)",
    |reader, node| {
        reader.list(node, |reader, node| {
            let token = reader.secret(node)?;
            let text = token.reveal();
            if text.len() < SHORTEST_TOKEN {
                return reader.refuse(node, Some(format!("its length is {}", text.chars().count())));
            }
            // Characters that are valid in a header. RFC 6750 section 2.1 allows fewer.
            if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
                return reader.refuse(
                    node,
                    Some("it contains a space, or a character that is not printable ASCII".to_owned()),
                );
            }
            Some(token)
        })
    },
    |tokens| list(tokens.iter().map(|_| quoted(MASK))),
)
.secret();

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(change: impl FnOnce(&mut AdminSettings)) -> Vec<String> {
        let mut settings = AdminSettings::on_port(9641);
        change(&mut settings);
        let mut problems = Vec::new();
        settings.check(|_| Origin::Default, &mut problems);
        problems.iter().map(ToString::to_string).collect()
    }

    fn at(address: &str) -> Vec<AdminAddress> {
        vec![address.parse().unwrap()]
    }

    fn token() -> Vec<Secret> {
        vec![Secret::new("0123456789abcdef")]
    }

    #[test]
    fn admin_addresses_round_trip_through_text() {
        for good in ["unix", "unix:/run/turnpike/turnpike.sock", "127.0.0.1:9641", "[::1]:0"] {
            assert_eq!(good.parse::<AdminAddress>().unwrap().to_string(), good);
        }
        for bad in ["", "unix:", "unix:run.sock", "unix:@turnpike", "unixx", "localhost", "127.0.0.1", "off"]
        {
            assert!(bad.parse::<AdminAddress>().is_err(), "{bad}");
        }
    }

    #[test]
    fn non_loopback_admin_needs_a_certificate_and_tokens() {
        let secured = |settings: &mut AdminSettings| {
            settings.listen = at("0.0.0.0:9641");
            settings.tls_cert = Some("cert.pem".into());
            settings.tls_key = Some("key.pem".into());
        };
        for local in ["127.0.0.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1", "unix", "unix:/a"] {
            assert!(problems(|settings| settings.listen = at(local)).is_empty(), "{local}");
        }
        for open in ["0.0.0.0:9641", "[::]:1", "192.0.2.1:1"] {
            let told = problems(|settings| settings.listen = at(open));
            assert!(told.len() == 1 && told[0].contains("no certificate"), "{told:?}");
        }
        let told = problems(secured);
        assert!(told.len() == 1 && told[0].contains("neither tokens nor client CAs"), "{told:?}");
        for known in [
            (|settings| settings.tokens = token()) as fn(&mut AdminSettings),
            |settings| settings.read_tokens = token(),
            |settings| settings.client_ca = Some("ca.pem".into()),
            |settings| settings.read_client_ca = Some("ca.pem".into()),
        ] {
            let told = problems(|settings| {
                secured(settings);
                known(settings);
            });
            assert!(told.is_empty(), "{told:?}");
        }
    }

    #[test]
    fn contradictory_settings_are_refused() {
        for (change, told) in [
            (
                (|settings| settings.tls_cert = Some("a".into())) as fn(&mut AdminSettings),
                "no admin.tls_key for it",
            ),
            (|settings| settings.tls_key = Some("a".into()), "no admin.tls_cert for it"),
            (|settings| settings.listen.extend(at("unix")), "unix is listed twice"),
            (
                |settings| (settings.tokens, settings.read_tokens) = (token(), token()),
                "one of them is in admin.tokens too",
            ),
        ] {
            let problems = problems(change);
            assert!(problems.len() == 1 && problems[0].contains(told), "{problems:?}");
        }
        assert!(problems(|settings| settings.listen = [at("[::1]:0"), at("[::1]:0")].concat()).is_empty());
    }
}
