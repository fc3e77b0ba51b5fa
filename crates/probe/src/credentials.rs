//! Whether the credential is good, and if not, as far as a client can tell, why.

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
    connection::words,
    report::{Level, ProbeReport},
    session::{ProbeSession, ServerAnswer},
};

const AREA: &str = "credentials";

/// What a plain allocation asks for: REQUESTED-TRANSPORT, UDP.
pub(crate) fn wanted(message: &mut Writer<'_>) {
    message.attribute(kind::REQUESTED_TRANSPORT, &[17, 0, 0, 0]);
}

/// Whether the report finds credentials handled wrongly.
pub(crate) fn is_bad(report: &ProbeReport) -> bool {
    report.findings.iter().any(|line| line.area == AREA && line.level == Level::Bad)
}

/// What came of it.
pub(crate) enum CredentialOutcome {
    /// The answer that granted an allocation.
    Granted(ServerAnswer),
    /// The server works, and sends its clients to another one.
    SentOn,
    /// The credential is good, but the server relays no IPv4, which is the family of a request that names none.
    NoIpv4,
    /// With the reason in the report.
    Nothing,
}

/// Allocates, one step at a time.
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
            report.advise(
                Level::Bad,
                AREA,
                "gives allocations to everybody, without any credential: an open relay",
                "turn authentication on (turnpike: --user or --secret; coturn: lt-cred-mech or use-auth-secret, no no-auth)",
            );
            return CredentialOutcome::Granted(first);
        }
        Some(401) => {}
        Some(300) => return sent_on(report, &first),
        Some(_) => {
            return bad(
                report,
                format!("refuses to allocate before it asks who is there: {}", first.told()),
                "if this is a STUN server, name it as stun:HOST; else see the server's log",
            );
        }
    }
    let realm = first.text(kind::REALM);
    report.realm.clone_from(&realm);
    if realm.is_none() || first.value(kind::NONCE).is_none() {
        return bad(
            report,
            "asks for a credential but sends no realm or no nonce, so that no client can answer (RFC 8489 section 9.2.4)",
            "give the server a realm (turnpike: --realm; coturn: realm=)",
        );
    }
    let Some(credentials) = credentials else {
        let realm = realm.unwrap_or_default();
        report.advise(
            Level::Note,
            AREA,
            format!("wants a credential of realm {realm:?}: nothing behind it was checked"),
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
    /// A nonce may be stale once; one that the server has just made is not.
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
                report.line(Level::Ok, AREA, format!("accepts {user:?} in realm {realm:?}"));
                return if answer.is_success() {
                    CredentialOutcome::Granted(answer)
                } else {
                    sent_on(report, &answer)
                };
            }
            None => {
                report.advise(
                    Level::Bad,
                    AREA,
                    "grants an allocation, but its answer is not signed with this user's key, so that clients throw it away",
                    "something on the way changes messages, or this is not the server that knows the user",
                );
                return CredentialOutcome::Granted(answer);
            }
            Some(300) => {
                return bad(
                    report,
                    format!(
                        "sends {user:?} on to {} (300 Try Alternate), but does not sign that with this user's key, so that \
                         clients do not go there (RFC 8489 section 10)",
                        alternate(&answer)
                    ),
                    "something on the way changes messages, or this is not the server that knows the user",
                );
            }
            Some(438) => {
                session.accept_challenge(&answer);
            }
            Some(401) => return refused(report, credentials, &realm, answer.text(kind::REALM), now),
            Some(440) => {
                report.line(Level::Ok, AREA, format!("accepts {user:?} in realm {realm:?}"));
                report.advise(
                    Level::Bad,
                    "relay",
                    format!("answers {} to a request that names no family, as browsers send it", answer.told()),
                    "relay on an IPv4 address too (turnpike: --relay-ip; coturn: relay-ip=): a family that is not named is IPv4",
                );
                return CredentialOutcome::NoIpv4;
            }
            Some(code) => {
                return bad(report, format!("knows {user:?} but answers {}", answer.told()), hint(code));
            }
        }
    }
    bad(
        report,
        "calls every nonce stale (438), the one that it has just made too",
        "requests reach different servers (a load balancer without affinity), this side's address changes between them, or the \
         server's clock jumps: keep one client on one server, and check its clock",
    )
}

/// A 401 in answer to a signed request, which `asks` for a realm once more.
fn refused(
    report: &mut ProbeReport,
    credentials: &Login,
    realm: &str,
    asks: Option<String>,
    now: SystemTime,
) -> CredentialOutcome {
    let (what, remedy) = match asks.filter(|asks| asks != realm) {
        Some(other) => (
            format!("asks for realm {realm:?} and then for {other:?}, so that no key is right"),
            "servers with several realms must choose one per listener or user before they ask; see its configuration"
                .to_owned(),
        ),
        None => refusal(credentials, realm, now),
    };
    bad(report, what, remedy)
}

fn bad(report: &mut ProbeReport, what: impl Into<String>, remedy: impl Into<String>) -> CredentialOutcome {
    report.advise(Level::Bad, AREA, what, remedy);
    CredentialOutcome::Nothing
}

/// A client asks the other server again, from the start (RFC 8489 section 10): what it finds there is that server's, and for
/// another probe.
fn sent_on(report: &mut ProbeReport, answer: &ServerAnswer) -> CredentialOutcome {
    if answer.address(kind::ALTERNATE_SERVER).is_none() {
        return bad(
            report,
            "sends its clients on without saying where to (300 without ALTERNATE-SERVER, RFC 8489 section 14.15)",
            "name the other server in this one's configuration (turnpike: [[alternate]]; coturn: alternate-server=)",
        );
    }
    let to = alternate(answer);
    report.line(
        Level::Note,
        AREA,
        format!("sends its clients on to {to} (300 Try Alternate): probe that one"),
    );
    CredentialOutcome::SentOn
}

/// Where a 300 leads, with the name that the other server's certificate has.
fn alternate(answer: &ServerAnswer) -> String {
    let to = answer.address(kind::ALTERNATE_SERVER);
    let to = to.map_or_else(|| "nowhere".to_owned(), |address| address.to_string());
    match answer.text(kind::ALTERNATE_DOMAIN) {
        Some(domain) => format!("{to}, {}", name(&domain)),
        None => to,
    }
}

/// Why a 401 came back: what can be told from this side.
fn refusal(credentials: &Login, realm: &str, now: SystemTime) -> (String, String) {
    let user = &credentials.name;
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    match expiry(user) {
        Some(expiry) if expiry > now.saturating_add(TEN_YEARS) => (
            format!("refuses {user:?}: it expires in {}", span(expiry - now)),
            "the time in a username is in seconds since 1970; this one looks like milliseconds".to_owned(),
        ),
        Some(expiry) if expiry <= now => (
            format!("refuses {user:?}: by this machine's clock the credential expired {} ago", span(now - expiry)),
            "fetch a new one; if it is fresh, compare the clocks of whoever made it, of the server, and of this machine".to_owned(),
        ),
        Some(expiry) => (
            format!(
                "refuses {user:?} in realm {realm:?}, though by this machine's clock it is good for another {}",
                span(expiry - now)
            ),
            "its maker and the server must have the same shared secret, and the server's clock must be right".to_owned(),
        ),
        None => (
            format!("refuses {user:?} in realm {realm:?} (401): no such user there, or another password"),
            format!("check name and password; a stored key (turnpike credentials) is good for its own realm only, here {realm:?}"),
        ),
    }
}

/// The time in a time-limited username: `TIME:ID`, `ID:TIME` or `:TIME`, as servers take it.
fn expiry(user: &str) -> Option<u64> {
    let (first, rest) = user.split_once(':')?;
    first.parse().ok().or_else(|| rest.parse().ok().filter(|_| rest.len() >= 10))
}

const TEN_YEARS: u64 = 10 * 366 * 86_400;

fn hint(code: u16) -> &'static str {
    match code {
        403 => "the server forbids this user to allocate; see its access rules",
        437 => "an allocation of an earlier client still exists on this port; try again",
        441 => "the user differs from the one that owns this connection; try again",
        442 => "the server does not relay UDP",
        486 => "the user's quota is used up: wait until allocations expire, or raise it",
        508 => {
            "the server's relay ports or allocations are used up, its machine lacks the relay address at the moment (turnpike health there lists \
             each), or it is about to stop"
        }
        _ => "see the server's log",
    }
}

fn silent(report: &mut ProbeReport, error: io::Error) -> CredentialOutcome {
    bad(
        report,
        format!("answers Binding but not Allocate: {}", words(error)),
        "a STUN server without TURN, or a firewall that lets small packets through only",
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_refusal_names_the_clock_where_the_name_has_a_time() {
        let now = UNIX_EPOCH + Duration::from_secs(1_000);
        let told = |user: &str| {
            let credentials = Login { name: user.to_owned(), password: String::new() };
            refusal(&credentials, "example.org", now).0
        };
        assert!(told("900:alice").contains("expired 1 min 40 s ago"));
        assert!(told("1500:alice").contains("another 8 min 20 s"));
        assert!(told("alice").contains("another password"));
        assert!(told("1500").contains("another password"));
        assert!(told("1700000000000:alice").contains(": it expires in 5"));
        assert!(told("alice:1700000000000").contains(": it expires in 5"));
    }
}
