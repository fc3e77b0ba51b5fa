//! Checks the credential and, if the server refuses it, determines the most likely reason.

use std::{
    io,
    time::{SystemTime, UNIX_EPOCH},
};

use turnpike_client::Login;
use turnpike_measure::units::span;
use turnpike_wire::{
    escape::name,
    stun::{Writer, kind, method},
};

use crate::{
    connection::describe_error,
    report::{FindingLevel, ProbeReport},
    session::{ProbeSession, ServerAnswer},
};

const AREA: &str = "credentials";

/// Attributes of a plain allocation: REQUESTED-TRANSPORT UDP.
pub(crate) fn wanted(message: &mut Writer<'_>) {
    message.attribute(kind::REQUESTED_TRANSPORT, &[17, 0, 0, 0]);
}

pub(crate) fn is_bad(report: &ProbeReport) -> bool {
    report.findings.iter().any(|line| line.area == AREA && line.level == FindingLevel::Bad)
}

pub(crate) enum CredentialOutcome {
    Granted(ServerAnswer),
    Redirected,
    /// The credential is valid, but the server relays no IPv4, the default family of an Allocate request.
    NoIpv4,
    Nothing,
}

pub(crate) fn allocate(
    report: &mut ProbeReport,
    session: &mut ProbeSession,
    credentials: Option<&Login>,
    now: SystemTime,
) -> CredentialOutcome {
    let first = match session.ask(method::ALLOCATE, &wanted) {
        Ok(answer) => answer,
        Err(error) => return silent(report, error),
    };
    match first.code() {
        None => {
            report.bad(AREA,
                "grants allocations without a credential: an open relay",
                "enable authentication (turnpike: --user or --secret; coturn: lt-cred-mech or use-auth-secret, no no-auth)",
            );
            return CredentialOutcome::Granted(first);
        }
        Some(401) => {}
        Some(300) => return redirected(report, &first),
        Some(_) => {
            return bad(
                report,
                format!("refuses Allocate before asking for a credential: {}", first.describe()),
                "if this is a STUN server, write stun:HOST; otherwise see the server's log",
            );
        }
    }
    let realm = first.text(kind::REALM);
    report.realm.clone_from(&realm);
    if realm.is_none() || first.value(kind::NONCE).is_none() {
        return bad(
            report,
            "asks for a credential without sending a realm and nonce, so no client can authenticate (RFC 8489 section 9.2.4)",
            "configure a realm (turnpike: --realm; coturn: realm=)",
        );
    }
    let Some(credentials) = credentials else {
        let realm = realm.unwrap_or_default();
        report.advise(
            FindingLevel::Note,
            AREA,
            format!("asks for a credential in realm {realm:?}; relaying was not tested"),
            "give one with --user NAME:PASSWORD",
        );
        return CredentialOutcome::Nothing;
    };
    session.accept_challenge(&first);
    let outcome = signed(report, session, credentials, now);
    report.credentials_accepted = Some(!matches!(outcome, CredentialOutcome::Nothing));
    outcome
}

fn signed(
    report: &mut ProbeReport,
    session: &mut ProbeSession,
    credentials: &Login,
    now: SystemTime,
) -> CredentialOutcome {
    /// Maximum number of nonces to try. A nonce may be stale, but not when the server has only just issued
    /// it.
    const NONCES: usize = 3;
    let user = &credentials.name;
    for _ in 0..NONCES {
        let realm = session.challenge.as_ref().map(|challenge| challenge.realm.clone()).unwrap_or_default();
        let answer = match session.signed(method::ALLOCATE, &wanted) {
            Ok(answer) => answer,
            Err(error) => return silent(report, error),
        };
        match answer.code() {
            None | Some(300) if answer.verified => {
                report.ok(AREA, format!("accepts {user:?} in realm {realm:?}"));
                return if answer.is_success() {
                    CredentialOutcome::Granted(answer)
                } else {
                    redirected(report, &answer)
                };
            }
            None => {
                report.bad(AREA,
                    "grants an allocation, but the response is not signed with this user's key, so clients discard it",
                    "something on the path modifies messages, or another server answered",
                );
                return CredentialOutcome::Granted(answer);
            }
            Some(300) => {
                return bad(
                    report,
                    format!(
                        "redirects {user:?} to {} (300 Try Alternate), but the response is not signed with this user's key, so \
                         clients ignore it (RFC 8489 section 10)",
                        alternate(&answer)
                    ),
                    "something on the path modifies messages, or another server answered",
                );
            }
            Some(438) => {
                session.accept_challenge(&answer);
            }
            Some(401) => return refused(report, credentials, &realm, answer.text(kind::REALM), now),
            Some(440) => {
                report.ok(AREA, format!("accepts {user:?} in realm {realm:?}"));
                report.bad("relay",
                    format!("answers {} to a request without an address family, which is what browsers send", answer.describe()),
                    "also relay on an IPv4 address (turnpike: --relay-ip; coturn: relay-ip=): IPv4 is the default family",
                );
                return CredentialOutcome::NoIpv4;
            }
            Some(code) => {
                return bad(
                    report,
                    format!("accepts {user:?} but answers {}", answer.describe()),
                    hint(code),
                );
            }
        }
    }
    bad(
        report,
        "rejects every nonce as stale (438), even a fresh one",
        "requests reach different servers (a load balancer without affinity), the client's address changes between requests, or the \
         server's clock jumps: send each client to one server only, and check the server's clock",
    )
}

fn refused(
    report: &mut ProbeReport,
    credentials: &Login,
    realm: &str,
    asks: Option<String>,
    now: SystemTime,
) -> CredentialOutcome {
    let (what, remedy) = match asks.filter(|asks| asks != realm) {
        Some(other) => (
            format!("asks for realm {realm:?} and then for {other:?}, so no key is valid for both"),
            "a server with several realms must choose one per listener or user before it sends the challenge; check its configuration"
                .to_owned(),
        ),
        None => refusal(credentials, realm, now),
    };
    bad(report, what, remedy)
}

fn bad(report: &mut ProbeReport, what: impl Into<String>, remedy: impl Into<String>) -> CredentialOutcome {
    report.bad(AREA, what, remedy);
    CredentialOutcome::Nothing
}

fn redirected(report: &mut ProbeReport, answer: &ServerAnswer) -> CredentialOutcome {
    if answer.address(kind::ALTERNATE_SERVER).is_none() {
        return bad(
            report,
            "redirects clients without naming a server (300 without ALTERNATE-SERVER, RFC 8489 section 14.15)",
            "configure the address of the other server (turnpike: [[alternate]]; coturn: alternate-server=)",
        );
    }
    let to = alternate(answer);
    report.note(AREA, format!("redirects clients to {to} (300 Try Alternate): probe that server"));
    CredentialOutcome::Redirected
}

fn alternate(answer: &ServerAnswer) -> String {
    let to = answer.address(kind::ALTERNATE_SERVER);
    let to = to.map_or_else(|| "nowhere".to_owned(), |address| address.to_string());
    match answer.text(kind::ALTERNATE_DOMAIN) {
        Some(domain) => format!("{to}, {}", name(&domain)),
        None => to,
    }
}

fn refusal(credentials: &Login, realm: &str, now: SystemTime) -> (String, String) {
    let user = &credentials.name;
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    match expiry(user) {
        Some(expiry) if expiry > now.saturating_add(TEN_YEARS) => (
            format!("refuses {user:?}: it expires in {}", span(expiry - now)),
            "the time in a username is in seconds since 1970; this looks like milliseconds".to_owned(),
        ),
        Some(expiry) if expiry <= now => (
            format!("refuses {user:?}: by this machine's clock the credential expired {} ago", span(now - expiry)),
            "get a new one; if it is fresh, compare the clocks of its issuer, of the server and of this machine".to_owned(),
        ),
        Some(expiry) => (
            format!(
                "refuses {user:?} in realm {realm:?}, although by this machine's clock it is valid for another {}",
                span(expiry - now)
            ),
            "check that the issuer and the server have the same secret, and that the server's clock is right".to_owned(),
        ),
        None => (
            format!("refuses {user:?} in realm {realm:?} (401): unknown user or wrong password"),
            format!("check name and password; a stored key (turnpike credentials) is only valid for its own realm, here {realm:?}"),
        ),
    }
}

/// Expiry time in a time-limited username, in any form that servers accept: `TIME:ID`, `ID:TIME` or `:TIME`.
fn expiry(user: &str) -> Option<u64> {
    let (first, rest) = user.split_once(':')?;
    first.parse().ok().or_else(|| rest.parse().ok().filter(|_| rest.len() >= 10))
}

const TEN_YEARS: u64 = 10 * 366 * 86_400;

fn hint(code: u16) -> &'static str {
    match code {
        403 => "the server does not allow this user to allocate; check its access rules",
        437 => "an earlier client's allocation still exists on this port; try again",
        441 => "the allocation on this port belongs to another user; try again",
        442 => "the server does not relay UDP",
        486 => "the user's quota is used up: wait until allocations expire, or raise it",
        508 => {
            "the server's relay ports or allocations are used up, its relay address is currently missing (`turnpike health` on the server lists \
             each), or it is shutting down"
        }
        _ => "see the server's log",
    }
}

fn silent(report: &mut ProbeReport, error: io::Error) -> CredentialOutcome {
    bad(
        report,
        format!("answers Binding but not Allocate: {}", describe_error(error)),
        "a STUN server without TURN, or a firewall that passes only small packets",
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_refused_time_limited_username_points_to_the_clock() {
        let now = UNIX_EPOCH + Duration::from_secs(1_000);
        let told = |user: &str| {
            let credentials = Login { name: user.to_owned(), password: String::new() };
            refusal(&credentials, "example.org", now).0
        };
        assert!(told("900:alice").contains("expired 1 min 40 s ago"));
        assert!(told("1500:alice").contains("another 8 min 20 s"));
        assert!(told("alice").contains("wrong password"));
        assert!(told("1500").contains("wrong password"));
        assert!(told("1700000000000:alice").contains(": it expires in 5"));
        assert!(told("alice:1700000000000").contains(": it expires in 5"));
    }
}
