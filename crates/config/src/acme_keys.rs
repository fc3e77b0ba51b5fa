//! `tls.acme` and `[acme]`: names whose certificates the server orders from a certificate authority (RFC 8555).

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine as _};
use turnpike_convert::toml_text::quoted;
use turnpike_strict::Value;
use turnpike_wire::names::server_name;
use turnpike_wire::secret::MASK;
use zeroize::Zeroizing;

use crate::{
    Secret, Settings,
    key::{ValueKind, list_of, named, text},
};

/// Maximum number of names in `tls.acme`.
pub(crate) const MOST_NAMES: usize = 100;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcmeSettings {
    pub directory: String,
    /// Email address for notices from the CA; empty for none.
    pub contact: String,
    pub challenge: AcmeChallenge,
    /// Listeners for http-01, open while a challenge is pending.
    pub http_listen: Vec<SocketAddr>,
    /// Program that sets and removes the TXT record for dns-01.
    pub hook: Option<PathBuf>,
    /// CA certificate that verifies the ACME server itself, if the machine does not trust it.
    pub authority: Option<PathBuf>,
    /// Identifier of an account created beforehand with the CA (external account binding); empty for none.
    pub eab_key_id: String,
    pub eab_key: Option<BindingKey>,
    /// Certificate profile to request; empty to let the CA choose.
    pub profile: String,
}

impl Default for AcmeSettings {
    fn default() -> Self {
        Self {
            directory: "https://acme-v02.api.letsencrypt.org/directory".to_owned(),
            contact: String::new(),
            challenge: AcmeChallenge::Auto,
            http_listen: vec![SocketAddr::from(([0, 0, 0, 0], 80)), SocketAddr::from(([0u16; 8], 80))],
            hook: None,
            authority: None,
            eab_key_id: String::new(),
            eab_key: None,
            profile: String::new(),
        }
    }
}

/// Key of an external account binding (RFC 8555 section 7.3.4): base64url, padded or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindingKey(Secret);

impl BindingKey {
    #[must_use]
    pub fn bytes(&self) -> Zeroizing<Vec<u8>> {
        Zeroizing::new(decoded(self.0.reveal()).unwrap_or_default())
    }
}

fn decoded(text: &str) -> Option<Vec<u8>> {
    BASE64_URL_SAFE_NO_PAD.decode(text.trim_end_matches('=')).ok()
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AcmeChallenge {
    /// `TlsAlpn` if there is a TCP listener on port 443, otherwise `Http`.
    #[default]
    Auto,
    TlsAlpn,
    Http,
    Dns,
}

impl Settings {
    /// Challenge in use, with [`AcmeChallenge::Auto`] resolved.
    #[must_use]
    pub fn acme_challenge(&self) -> AcmeChallenge {
        let tcp = self.listen.iter().filter(|_| self.tcp);
        let has_https_port = tcp.chain(&self.tls.listen).any(|listener| listener.port() == 443);
        match self.acme.challenge {
            AcmeChallenge::Auto if has_https_port => AcmeChallenge::TlsAlpn,
            AcmeChallenge::Auto => AcmeChallenge::Http,
            chosen => chosen,
        }
    }

    /// Listeners for http-01; none if it is not in use.
    pub fn http_challenge_listeners(&self) -> &[SocketAddr] {
        let is_used = !self.tls.acme.is_empty() && self.acme_challenge() == AcmeChallenge::Http;
        if is_used { &self.acme.http_listen } else { &[] }
    }
}

/// Subject of an ordered certificate.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CertificateName {
    /// DNS name in lower case.
    Dns(String),
    /// Domain after the `*.`, in lower case.
    Wildcard(String),
    Ip(IpAddr),
}

impl CertificateName {
    /// Name of its file, without `*`, which shells expand.
    #[must_use]
    pub fn file_name(&self) -> String {
        match self {
            Self::Wildcard(parent) => format!("_.{parent}.pem"),
            name => format!("{name}.pem"),
        }
    }
}

impl fmt::Display for CertificateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dns(name) => f.write_str(name),
            Self::Wildcard(parent) => write!(f, "*.{parent}"),
            Self::Ip(ip) => ip.fmt(f),
        }
    }
}

impl FromStr for CertificateName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(ip) = text.parse::<IpAddr>() {
            return if ip.is_unspecified() || ip.is_multicast() {
                Err("no certificate can name this address")
            } else {
                Ok(Self::Ip(ip))
            };
        }
        let (is_wildcard, name) = match text.strip_prefix("*.") {
            Some(parent) => (true, parent),
            None => (false, text),
        };
        let name = server_name(name.strip_suffix('.').unwrap_or(name))?;
        if !name.contains('.') {
            return Err(
                "certificate authorities accept only fully qualified names, such as turn.example.org",
            );
        }
        Ok(if is_wildcard { Self::Wildcard(name) } else { Self::Dns(name) })
    }
}

pub(super) const NAMES: ValueKind<Vec<CertificateName>> = list_of!(
    "a list of names and IP addresses under which clients reach this server, such as [\"turn.example.org\"], or [] for none",
    |text| text.parse::<CertificateName>()
);

pub(super) const DIRECTORY: ValueKind<String> =
    text!("the https:// URL of the directory of a certificate authority (RFC 8555)", |url| url.len() <= 1024
        && url.strip_prefix("https://").is_some_and(|rest| {
            rest.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '[')
                && rest.bytes().all(|byte| byte.is_ascii_graphic())
        }));

pub(super) const CONTACT: ValueKind<String> =
    text!("an email address, such as \"admin@example.org\", or \"\"", |mail| {
        let is_part = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_graphic());
        mail.is_empty()
            || mail.len() <= 254
                && mail
                    .split_once('@')
                    .is_some_and(|(user, host)| is_part(user) && is_part(host) && !host.contains('@'))
    });

pub(super) const CHALLENGE: ValueKind<AcmeChallenge> = named!(
    "\"auto\", \"tls-alpn-01\", \"http-01\" or \"dns-01\"",
    "auto" => AcmeChallenge::Auto,
    "tls-alpn-01" => AcmeChallenge::TlsAlpn,
    "http-01" => AcmeChallenge::Http,
    "dns-01" => AcmeChallenge::Dns,
);

pub(super) const HOOK: ValueKind<Option<PathBuf>> = ValueKind::one(
    "the absolute path of a program, or \"\" for none",
    |reader, node| {
        reader.parsed(node, |text| match text {
            "" => Ok(None),
            path if path.starts_with('/') => Ok(Some(PathBuf::from(path))),
            _ => Err("it does not begin with /"),
        })
    },
    |path| quoted(&path.as_ref().map_or_else(String::new, |path| path.display().to_string())),
);

pub(super) const EAB_KEY_ID: ValueKind<String> =
    text!("the key identifier of an account created beforehand with the authority, or \"\"", |id| id.len()
        <= 256
        && id.bytes().all(|byte| byte.is_ascii_graphic()));

pub(super) const EAB_KEY: ValueKind<Option<BindingKey>> = ValueKind::one(
    "the key of an account created beforehand with the authority, 16 bytes or more in base64url, or \"\"",
    |reader, node| {
        let key = match &node.value {
            Value::List(lines) if lines.len() == 1 => reader.secret(&lines[0])?,
            _ => reader.secret(node)?,
        };
        match decoded(key.reveal()).map(|bytes| bytes.len()) {
            Some(0) => Some(None),
            Some(16..=256) => Some(Some(BindingKey(key))),
            Some(length) => reader.refuse(node, Some(format!("its length in bytes is {length}"))),
            None => reader.refuse(node, Some("it is not base64url".to_owned())),
        }
    },
    |key| quoted(key.as_ref().map_or("", |_| MASK)),
)
.secret();

pub(super) const PROFILE: ValueKind<String> =
    text!("the name of a profile of the certificate authority, such as \"shortlived\", or \"\"", |name| name
        .len()
        <= 64
        && name.bytes().all(|byte| byte.is_ascii_graphic()));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificate_names_round_trip_and_other_text_is_refused() {
        for (text, shown, file) in [
            ("Turn.Example.org", "turn.example.org", "turn.example.org.pem"),
            ("turn.example.org.", "turn.example.org", "turn.example.org.pem"),
            ("*.example.org", "*.example.org", "_.example.org.pem"),
            ("192.0.2.1", "192.0.2.1", "192.0.2.1.pem"),
            ("2001:db8::1", "2001:db8::1", "2001:db8::1.pem"),
        ] {
            let name: CertificateName = text.parse().expect(text);
            assert_eq!((name.to_string().as_str(), name.file_name().as_str()), (shown, file));
            assert_eq!(name.to_string().parse(), Ok(name));
        }
        for text in
            ["", "localhost", "a/b.example", "../x.example", "*.*.example", "0.0.0.0", "224.0.0.1", "a..b"]
        {
            assert!(text.parse::<CertificateName>().is_err(), "{text}");
        }
    }
}
