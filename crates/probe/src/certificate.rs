//! Facts and verdicts about a server certificate.

use std::{
    net::IpAddr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use turnpike_client::ClientTransport;
use turnpike_wire::escape;
use x509_cert::{
    Certificate,
    der::Decode as _,
    ext::pkix::{SubjectAltName, name::GeneralName},
};

use crate::report::{CertificateFacts, ProbeReport};

/// Certificates that expire sooner than this are reported; automatic renewal usually starts 30 days before expiry.
const SOON: Duration = Duration::from_secs(14 * DAY);
const DAY: u64 = 86_400;

pub(crate) fn read(chain: &[Vec<u8>], distrust: Option<String>, now: SystemTime) -> Option<CertificateFacts> {
    let certificate = match Certificate::from_der(chain.first()?) {
        Ok(certificate) => certificate,
        Err(error) => {
            return Some(CertificateFacts {
                chain: chain.len(),
                unreadable: Some(error.to_string()),
                verifies: distrust.is_none(),
                distrust,
                ..CertificateFacts::default()
            });
        }
    };
    let content = certificate.tbs_certificate();
    let validity = content.validity();
    let (first, last) = (validity.not_before.to_unix_duration(), validity.not_after.to_unix_duration());
    let names = content.get_extension::<SubjectAltName>().ok().flatten();
    let names = names.map(|(_, names)| names.0.iter().filter_map(name).collect()).unwrap_or_default();
    Some(CertificateFacts {
        subject: named(content.subject().to_string()),
        issuer: named(content.issuer().to_string()),
        names,
        not_before: validity.not_before.to_string(),
        not_after: validity.not_after.to_string(),
        days_left: days_between(now, last),
        ends_soon: ends_soon(now, first, last),
        chain: chain.len(),
        unreadable: None,
        verifies: distrust.is_none(),
        distrust,
    })
}

pub(crate) fn judge(report: &mut ProbeReport, transport: ClientTransport, facts: &CertificateFacts) {
    let area = "certificate";
    if let Some(why) = &facts.unreadable {
        let distrust = facts.distrust.iter().map(|why| format!("; {why}")).collect::<String>();
        report.bad(
            area,
            format!("{transport}: the certificate cannot be parsed ({why}){distrust}"),
            "install a valid X.509 certificate on the server",
        );
        return;
    }
    let shown = |text: &String| escape::name(text).cut(255).to_string();
    let names = facts.names.iter().map(shown).collect::<Vec<_>>().join(", ");
    let names = if names.is_empty() { "no name at all".to_owned() } else { names };
    let days = if facts.days_left == 1 { "1 day".to_owned() } else { format!("{} days", facts.days_left) };
    let what = format!(
        "{transport}: {} for {names}, by {}, until {} ({days})",
        shown(&facts.subject),
        shown(&facts.issuer),
        facts.not_after
    );
    match &facts.distrust {
        None => report.ok(area, what),
        Some(why) => report.bad(area, format!("{what}; {why}"), remedy(why)),
    }
    if facts.days_left >= 0 && facts.ends_soon {
        report.warn(
            area,
            format!("{transport}: expires in {days}"),
            "renew it now, and check why automatic renewal failed",
        );
    }
    if facts.names.is_empty() {
        report.bad(
            area,
            format!("{transport}: has no subject alternative name, which is the only name clients check"),
            "reissue it with the server's host name as a DNS name",
        );
    }
    if transport == ClientTransport::Tls
        && facts.distrust.is_some()
        && facts.chain == 1
        && facts.subject != facts.issuer
    {
        report.warn(
            area,
            "tls: the server sends only its own certificate, without the intermediates",
            "configure the full chain (with certbot: fullchain.pem), not only the leaf certificate",
        );
    }
}

fn remedy(why: &str) -> &'static str {
    if why.contains("expired") {
        "renew it, then reload the server"
    } else if why.contains("not valid yet") {
        "check the clocks of this machine and of the issuer"
    } else if why.contains("is for ") {
        "connect with a name that is in the certificate, or reissue it to include this one; use --server-name to check for a different name"
    } else {
        "browsers will refuse it: use a certificate from a public CA, or give your own CA certificate with --ca FILE"
    }
}

fn name(name: &GeneralName) -> Option<String> {
    match name {
        GeneralName::DnsName(name) => Some(named(name.to_string())),
        GeneralName::IpAddress(bytes) => {
            let bytes = bytes.as_bytes();
            let v4 = <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from);
            v4.or_else(|| <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from)).map(|ip| ip.to_string())
        }
        _ => None,
    }
}

fn named(text: String) -> String {
    if text.is_empty() { "(no name)".to_owned() } else { text }
}

/// True within the last 14 days of the validity period or its last sixth, whichever is shorter: six-day certificates are renewed two days
/// before expiry.
fn ends_soon(now: SystemTime, first: Duration, last: Duration) -> bool {
    let left = last.saturating_sub(now.duration_since(UNIX_EPOCH).unwrap_or_default());
    left < SOON.min(last.saturating_sub(first) / 6)
}

/// Whole days from now until a Unix time; negative if that time has passed.
fn days_between(now: SystemTime, until: Duration) -> i64 {
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let days = |span: Duration| i64::try_from(span.as_secs() / DAY).unwrap_or(i64::MAX);
    match until.checked_sub(now) {
        Some(left) => days(left),
        None => -days(now - until) - 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::FindingLevel;

    #[test]
    fn names_and_expiry_are_read_from_a_certificate() {
        let names = ["turn.example.org".to_owned(), "192.0.2.7".to_owned()];
        let made = rcgen::generate_simple_self_signed(names.to_vec()).unwrap();
        let facts = read(&[made.cert.der().to_vec()], None, SystemTime::now()).unwrap();
        assert_eq!(facts.names, names);
        assert!(facts.days_left > 1_000 && facts.verifies, "{facts:?}");
        assert_eq!(facts.chain, 1);
        let mut report = ProbeReport::default();
        judge(&mut report, ClientTransport::Tls, &facts);
        assert_eq!(report.worst(), FindingLevel::Ok, "{report:?}");
    }

    #[test]
    fn each_problem_comes_with_a_remedy() {
        let facts = CertificateFacts {
            subject: "CN=a".to_owned(),
            issuer: "CN=b".to_owned(),
            days_left: 3,
            ends_soon: true,
            chain: 1,
            distrust: Some(
                "the certificate was issued by an authority that this machine does not trust".to_owned(),
            ),
            ..CertificateFacts::default()
        };
        let mut report = ProbeReport::default();
        judge(&mut report, ClientTransport::Tls, &facts);
        assert_eq!(report.findings.len(), 4);
        assert!(report.findings.iter().all(|line| line.remedy.is_some()), "{report:?}");
    }

    #[test]
    fn an_unreadable_certificate_is_not_trusted() {
        let why = "the certificate is not valid (BadEncoding)".to_owned();
        let facts = read(&[vec![0x30, 0]], Some(why.clone()), SystemTime::now()).unwrap();
        assert_eq!((facts.verifies, facts.distrust.as_ref()), (false, Some(&why)));
        let mut report = ProbeReport::default();
        judge(&mut report, ClientTransport::Tls, &facts);
        assert_eq!(report.findings.len(), 1, "{report:?}");
        assert!(report.worst() == FindingLevel::Bad && report.findings[0].what.contains(&why), "{report:?}");
        assert!(read(&[], None, SystemTime::now()).is_none());
    }

    #[test]
    fn renewal_is_overdue_in_the_last_sixth_of_a_short_validity() {
        let at = |days: u64| Duration::from_secs(days * DAY);
        let soon =
            |length: u64, left: u64| ends_soon(UNIX_EPOCH + at(1000 - left), at(1000 - length), at(1000));
        assert_eq!([soon(90, 14), soon(90, 13), soon(365, 14), soon(365, 13)], [false, true, false, true]);
        assert_eq!([soon(6, 2), soon(6, 1), soon(6, 0)], [false, false, true]);
    }

    #[test]
    fn days_are_counted_from_now() {
        let now = UNIX_EPOCH + Duration::from_secs(10 * DAY);
        assert_eq!(days_between(now, Duration::from_secs(11 * DAY + 5)), 1);
        assert_eq!(days_between(now, Duration::from_secs(10 * DAY)), 0);
        assert_eq!(days_between(now, Duration::from_secs(10 * DAY - 1)), -1);
        assert_eq!(days_between(now, Duration::from_secs(9 * DAY - 1)), -2);
    }

    #[test]
    fn arbitrary_bytes_do_not_panic() {
        let made = rcgen::generate_simple_self_signed(vec!["a".to_owned()]).unwrap();
        let der = made.cert.der().to_vec();
        for length in 0..der.len() {
            let facts = read(&[der[..length].to_vec()], None, SystemTime::now()).unwrap();
            assert!(facts.unreadable.is_some());
        }
        for position in 0..der.len() {
            let mut broken = der.clone();
            broken[position] ^= 0x81;
            let _ = read(&[broken], None, SystemTime::now());
        }
    }
}
