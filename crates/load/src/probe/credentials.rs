//! Whether the credential is good, and if not, as far as a client can tell, why.

use std::{
    io,
    time::{SystemTime, UNIX_EPOCH},
};

use super::{
    connection::words,
    report::{Level, Report},
    session::{Answer, Credentials, Session, attribute, method},
};

const AREA: &str = "credentials";
/// REQUESTED-TRANSPORT: UDP.
pub(super) const UDP: (u16, [u8; 4]) = (attribute::REQUESTED_TRANSPORT, [17, 0, 0, 0]);

/// Allocates, one step at a time. The answer that granted an allocation, or `None` with the reason in the report.
pub(super) fn allocate(
    report: &mut Report,
    session: &mut Session,
    credentials: Option<&Credentials>,
    now: SystemTime,
) -> Option<Answer> {
    let wanted = [(UDP.0, UDP.1.to_vec())];
    let first = match session.ask(method::ALLOCATE, &wanted) {
        Ok(answer) => answer,
        Err(error) => {
            silent(report, &error);
            return None;
        }
    };
    match first.code() {
        None => {
            report.advise(
                Level::Bad,
                AREA,
                "gives allocations to everybody, without any credential: an open relay",
                "turn authentication on (turnpike: --user or --secret; coturn: lt-cred-mech or use-auth-secret, no no-auth)",
            );
            return Some(first);
        }
        Some(401) => {}
        Some(300) => {
            let to = first.address(attribute::ALTERNATE_SERVER);
            let to = to.map_or_else(|| "another server".to_owned(), |address| address.to_string());
            report.line(
                Level::Note,
                AREA,
                format!("sends its clients on to {to} (300 Try Alternate); probe that one"),
            );
            return None;
        }
        Some(_) => {
            report.advise(
                Level::Bad,
                AREA,
                format!("refuses to allocate before it asks who is there: {}", first.told()),
                "if this is a STUN server, name it as stun:HOST; else see the server's log",
            );
            return None;
        }
    }
    let realm = first.text(attribute::REALM);
    report.realm.clone_from(&realm);
    if realm.is_none() || first.value(attribute::NONCE).is_none() {
        report.advise(
            Level::Bad,
            AREA,
            "asks for a credential but sends no realm or no nonce, so that no client can answer (RFC 8489 section 9.2.4)",
            "give the server a realm (turnpike: --realm; coturn: realm=)",
        );
        return None;
    }
    let Some(credentials) = credentials else {
        let realm = realm.unwrap_or_default();
        report.advise(
            Level::Note,
            AREA,
            format!("wants a credential of realm {realm:?}: nothing behind it was checked"),
            "give one with --user NAME:PASSWORD",
        );
        return None;
    };
    session.accept_challenge(&first);
    let granted = signed(report, session, &wanted, credentials, now);
    report.credentials_accepted = Some(granted.is_some());
    granted
}

fn signed(
    report: &mut Report,
    session: &mut Session,
    wanted: &[(u16, Vec<u8>)],
    credentials: &Credentials,
    now: SystemTime,
) -> Option<Answer> {
    /// A nonce may be stale once; one that the server has just made is not.
    const NONCES: usize = 3;
    let user = &credentials.user;
    for _ in 0..NONCES {
        let realm = session.challenge.as_ref().map(|challenge| challenge.realm.clone()).unwrap_or_default();
        let answer = match session.signed(method::ALLOCATE, wanted) {
            Ok(answer) => answer,
            Err(error) => {
                silent(report, &error);
                return None;
            }
        };
        match answer.code() {
            None if answer.verified => {
                report.line(Level::Ok, AREA, format!("accepts {user:?} in realm {realm:?}"));
                return Some(answer);
            }
            None => {
                report.advise(
                    Level::Bad,
                    AREA,
                    "grants an allocation, but its answer is not signed with this user's key, so that clients throw it away",
                    "something on the way changes messages, or this is not the server that knows the user",
                );
                return Some(answer);
            }
            Some(438) => {
                session.accept_challenge(&answer);
            }
            Some(401) => {
                let asked = answer.text(attribute::REALM);
                if asked.as_ref().is_some_and(|asked| *asked != realm) {
                    report.advise(
                        Level::Bad,
                        AREA,
                        format!(
                            "asks for realm {realm:?} and then for {:?}, so that no key is right",
                            asked.unwrap_or_default()
                        ),
                        "servers with several realms must choose one per listener or user before they ask; see its configuration",
                    );
                } else {
                    let (what, remedy) = refusal(credentials, &realm, now);
                    report.advise(Level::Bad, AREA, what, remedy);
                }
                return None;
            }
            Some(code) => {
                report.advise(
                    Level::Bad,
                    AREA,
                    format!("knows {user:?} but answers {}", answer.told()),
                    hint(code),
                );
                return None;
            }
        }
    }
    report.advise(
        Level::Bad,
        AREA,
        "calls every nonce stale (438), the one that it has just made too",
        "requests reach different servers (a load balancer without affinity), this side's address changes between them, or the \
         server's clock jumps: keep one client on one server, and check its clock",
    );
    None
}

/// Why a 401 came back: what can be told from this side.
fn refusal(credentials: &Credentials, realm: &str, now: SystemTime) -> (String, String) {
    let user = &credentials.user;
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let expiry =
        user.split(':').next().and_then(|digits| digits.parse::<u64>().ok()).filter(|_| user.contains(':'));
    match expiry {
        Some(expiry) if expiry <= now => (
            format!("refuses {user:?}: by this machine's clock the credential expired {} s ago", now - expiry),
            "fetch a new one; if it is fresh, compare the clocks of whoever made it, of the server, and of this machine".to_owned(),
        ),
        Some(expiry) => (
            format!(
                "refuses {user:?} in realm {realm:?}, though by this machine's clock it is good for another {} s",
                expiry - now
            ),
            "its maker and the server must have the same shared secret, and the server's clock must be right".to_owned(),
        ),
        None => (
            format!("refuses {user:?} in realm {realm:?} (401): no such user there, or another password"),
            format!("check name and password; a stored key (turnpike credentials) is good for its own realm only, here {realm:?}"),
        ),
    }
}

fn hint(code: u16) -> &'static str {
    match code {
        403 => "the server forbids this user to allocate; see its access rules",
        437 => "an allocation of an earlier client still exists on this port; try again",
        441 => "the user differs from the one that owns this connection; try again",
        442 => "the server does not relay UDP",
        486 => "the user's quota is used up: wait until allocations expire, or raise it",
        508 => "the server's relay ports or allocations are used up, or it is about to stop",
        _ => "see the server's log",
    }
}

fn silent(report: &mut Report, error: &io::Error) {
    report.advise(
        Level::Bad,
        AREA,
        format!("answers Binding but not Allocate: {}", words(error)),
        "a STUN server without TURN, or a firewall that lets small packets through only",
    );
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_refusal_names_the_clock_where_the_name_has_a_time() {
        let now = UNIX_EPOCH + Duration::from_secs(1_000);
        let told = |user: &str| {
            let credentials = Credentials { user: user.to_owned(), password: String::new() };
            refusal(&credentials, "example.org", now).0
        };
        assert!(told("900:alice").contains("expired 100 s ago"));
        assert!(told("1500:alice").contains("another 500 s"));
        assert!(told("alice").contains("another password"));
        assert!(told("1500").contains("another password"));
    }
}
