//! Reasons why an order failed, each with a remedy if there is one.

use std::{error::Error as _, io, path::PathBuf};

use instant_acme::{Error, Problem};
use turnpike_net::BindError;

/// Maximum length of text from a CA in an error message.
const LONGEST: usize = 500;

#[derive(Debug, thiserror::Error)]
pub(crate) enum OrderError {
    #[error("{}: {error}; the directory must exist, be writable and have free space (store.state)", file.display())]
    File { file: PathBuf, error: io::Error },
    #[error("another process orders certificates in {}: this process uses them and takes over when the other one exits", .0.display())]
    Locked(PathBuf),
    #[error("{}", authority(.0))]
    Authority(Error),
    #[error("the certificate authority cannot be reached: {0}")]
    Unreachable(String),
    #[error("the authority offers no {0} for this name: set acme.challenge to one of {1}")]
    NotOffered(&'static str, String),
    #[error("the authority cannot validate the name with {challenge}: {why}")]
    Invalid { challenge: &'static str, why: String },
    #[error("http-01: {0}")]
    Listen(BindError),
    #[error("tls-alpn-01 needs a TCP or TLS listener")]
    NoTls,
    #[error("acme.hook {}: {why}", hook.display())]
    Hook { hook: PathBuf, why: String },
    #[error("the authority sent an unusable certificate: {0}")]
    Certificate(String),
    #[error("cannot generate a key: {0}")]
    Key(String),
    #[error(
        "{0}; the nodes of a fleet coordinate orders through its store, so nothing is ordered until the store answers"
    )]
    Shared(String),
    #[error("the order did not finish within {0} s")]
    Timeout(u64),
}

impl From<Error> for OrderError {
    fn from(error: Error) -> Self {
        match error {
            Error::Other(inner) if inner.is::<crate::http::HttpError>() => {
                Self::Unreachable(inner.to_string())
            }
            error => Self::Authority(error),
        }
    }
}

impl From<rcgen::Error> for OrderError {
    fn from(error: rcgen::Error) -> Self {
        Self::Key(error.to_string())
    }
}

fn authority(error: &Error) -> String {
    match error {
        Error::Api(problem) => describe(problem),
        error => {
            let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
            printable(&format!("unexpected response from the authority: {error}{cause}"))
        }
    }
}

/// The CA's description of the problem, plus a remedy for common types (RFC 8555 section 6.7).
pub(crate) fn describe(problem: &Problem) -> String {
    let kind = problem.r#type.as_deref().unwrap_or_default();
    let kind = kind.strip_prefix("urn:ietf:params:acme:error:").unwrap_or(kind);
    let mut text = problem.detail.clone().unwrap_or_default();
    for sub in &problem.subproblems {
        text = format!("{text}; {sub}");
    }
    let remedy = match kind {
        "rateLimited" => {
            "the authority limits the rate of orders: turnpike tries again later; remove names that cannot be validated"
        }
        "dns" => "make the name resolve to this server",
        "connection" | "tls" | "unauthorized" => {
            "make the name resolve to this server only, and open port 443 (tls-alpn-01) or 80 (http-01) in the firewall"
        }
        "caa" => "a CAA record of the domain must permit this authority",
        "rejectedIdentifier" | "unsupportedIdentifier" => {
            "this authority does not issue certificates for this name: use another name or another acme.directory"
        }
        "externalAccountRequired" => {
            "set acme.eab_key_id and acme.eab_key to the values shown in your account with this authority"
        }
        "accountDoesNotExist" => "the next attempt creates a new account",
        "badNonce" => "the authority refused nonces that it had issued: turnpike tries again later",
        _ => "",
    };
    let separator = if remedy.is_empty() { "" } else { "; " };
    printable(&format!("{kind}: {text}{separator}{remedy}"))
}

fn printable(text: &str) -> String {
    let text: String = text.chars().map(|one| if one.is_control() { ' ' } else { one }).collect();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_the_authority_are_truncated_and_printable() {
        let detail = format!("\u{1b}[31mone\ntwo{}", "x".repeat(10_000));
        let problem = Problem {
            r#type: Some("urn:ietf:params:acme:error:rateLimited".to_owned()),
            detail: Some(detail),
            status: Some(429),
            subproblems: Vec::new(),
        };
        let text = describe(&problem);
        assert!(text.starts_with("rateLimited:  [31mone two"), "{text}");
        assert!(text.chars().count() <= LONGEST + 1 && !text.contains(char::is_control));
        let problem = Problem { detail: Some("slow down".to_owned()), ..problem };
        assert!(describe(&problem).contains("slow down; the authority limits the rate of orders"));
    }
}
