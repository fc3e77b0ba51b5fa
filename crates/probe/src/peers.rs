//! Check for forbidden peers: CreatePermission and ChannelBind for addresses to which a server must not
//! relay. No data is sent.

use std::{io, net::SocketAddr};

use turnpike_wire::stun::{kind, method};

use crate::{
    report::{FindingLevel, PeerFacts, ProbeReport},
    session::ProbeSession,
};

struct Forbidden {
    address: &'static str,
    kind: &'static str,
    level: FindingLevel,
}

const fn forbidden(address: &'static str, kind: &'static str, level: FindingLevel) -> Forbidden {
    Forbidden { address, kind, level }
}

const V4: &[Forbidden] = &[
    forbidden("127.0.0.1", "loopback", FindingLevel::Bad),
    forbidden("127.255.255.254", "loopback", FindingLevel::Bad),
    forbidden("0.0.0.0", "unspecified (reaches loopback on Linux)", FindingLevel::Bad),
    forbidden("169.254.169.254", "cloud metadata", FindingLevel::Bad),
    forbidden("169.254.1.1", "link-local", FindingLevel::Bad),
    forbidden("10.0.0.1", "private", FindingLevel::Warn),
    forbidden("172.16.0.1", "private", FindingLevel::Warn),
    forbidden("192.168.0.1", "private", FindingLevel::Warn),
    forbidden("100.64.0.1", "shared (carrier NAT)", FindingLevel::Warn),
    forbidden("224.0.0.1", "multicast", FindingLevel::Bad),
    forbidden("255.255.255.255", "broadcast", FindingLevel::Bad),
];

/// Targets for an allocation with an IPv6 address. Those starting with `::ffff:` are also tried with an IPv4
/// allocation.
const V6: &[Forbidden] = &[
    forbidden("::1", "loopback", FindingLevel::Bad),
    forbidden("::", "unspecified (reaches loopback on Linux)", FindingLevel::Bad),
    forbidden("::127.0.0.1", "loopback in an IPv4-compatible address", FindingLevel::Bad),
    forbidden("::ffff:127.0.0.1", "loopback in an IPv4-mapped address", FindingLevel::Bad),
    forbidden("::ffff:169.254.169.254", "cloud metadata in an IPv4-mapped address", FindingLevel::Bad),
    forbidden("64:ff9b::7f00:1", "loopback behind NAT64", FindingLevel::Bad),
    forbidden("64:ff9b::a9fe:a9fe", "cloud metadata behind NAT64", FindingLevel::Bad),
    forbidden("2002:7f00:1::1", "loopback in a 6to4 address", FindingLevel::Bad),
    forbidden("fe80::1", "link-local", FindingLevel::Bad),
    forbidden("fd00:ec2::254", "cloud metadata", FindingLevel::Bad),
    forbidden("fc00::1", "unique local (private)", FindingLevel::Warn),
    forbidden("ff02::1", "multicast", FindingLevel::Bad),
];
/// The discard port (RFC 863): if the server relays by mistake, the data goes to a port that ignores it.
const PORT: u16 = 9;
/// First channel number, within the ranges of both RFC 8656 and RFC 5766.
const FIRST_CHANNEL: u16 = 0x4000;

pub(crate) struct PeerQuestion {
    is_v6: bool,
    answers: Vec<(&'static Forbidden, PeerAccess, String)>,
    ended: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerAccess {
    Allowed,
    Refused,
    /// Refused for a reason unrelated to the peer's address.
    Unknown,
}

/// Requests all forbidden peers. If the allocation has no room for more peers, `renew` creates a new one, which stays in `session`.
pub(crate) fn ask(
    session: &mut ProbeSession,
    is_v6: bool,
    renew: &dyn Fn() -> Option<ProbeSession>,
) -> PeerQuestion {
    // Some servers treat a mapped address as the embedded IPv4 address.
    let mapped = V6.iter().filter(|target| !is_v6 && target.address.starts_with("::ffff:"));
    let targets = if is_v6 { V6 } else { V4 };
    let mut asked = PeerQuestion { is_v6, answers: Vec::new(), ended: None };
    let mut is_fresh = true;
    for (number, target) in (FIRST_CHANNEL..).zip(targets.iter().chain(mapped)) {
        let Ok(ip) = target.address.parse() else { continue };
        let address = SocketAddr::new(ip, PORT);
        let mut answer = ask_for(session, address, number);
        if !is_fresh && matches!(answer, Ok((PeerAccess::Unknown, _))) {
            // Delete the allocation first, so that the user's quota has room for the next one.
            session.delete();
            let Some(next) = renew() else {
                asked.ended = Some(format!("{}: the server granted no more allocations", target.address));
                break;
            };
            *session = next;
            is_fresh = true;
            answer = ask_for(session, address, number);
        }
        match answer {
            Ok((verdict, told)) => {
                // Only allowed peers use up room in the allocation.
                is_fresh &= verdict != PeerAccess::Allowed;
                asked.answers.push((target, verdict, told));
            }
            Err(error) => {
                asked.ended =
                    Some(format!("{}: {}", target.address, crate::connection::describe_error(error)));
                break;
            }
        }
    }
    asked
}

pub(crate) fn judge(report: &mut ProbeReport, asked: PeerQuestion) {
    let PeerQuestion { is_v6, answers, ended } = asked;
    let family = if is_v6 { "IPv6" } else { "IPv4" };
    if let Some(what) = ended {
        report.note("peers", format!("the check ended early: {what}"));
    }
    let of = |verdict: PeerAccess| answers.iter().filter(move |(_, it, _)| *it == verdict);
    for level in [FindingLevel::Bad, FindingLevel::Warn] {
        let these = of(PeerAccess::Allowed).filter(|(target, ..)| target.level == level);
        let list: Vec<_> =
            these.map(|(target, ..)| format!("{} ({})", target.address, target.kind)).collect();
        if list.is_empty() {
            continue;
        }
        let remedy = if level == FindingLevel::Bad {
            "any user can reach services that trust the server's own machine or network: refuse these peers (turnpike does so \
             unless --allow-peer allows them; coturn: denied-peer-ip, no allow-loopback-peers)"
        } else {
            "users can reach the network behind the server: refuse private ranges unless peers are there (--deny-peer; \
             coturn: denied-peer-ip)"
        };
        report.advise(level, "peers", format!("lets users send to {}", list.join(", ")), remedy);
    }
    let unknown: Vec<_> = of(PeerAccess::Unknown).collect();
    if let Some((_, _, told)) = unknown.first() {
        let list: Vec<_> = unknown.iter().map(|(target, ..)| target.address).collect();
        report.advise(
            FindingLevel::Note,
            "peers",
            format!("no verdict on {}: the server answers {told}", list.join(", ")),
            "see the server's log: users may or may not be able to reach these peers",
        );
    }
    let refused = of(PeerAccess::Refused).count();
    if refused > 0 {
        report.ok(
            "peers",
            format!("refuses {refused} forbidden {family} peer addresses (loopback, metadata, private …)"),
        );
    }
    report.peers.extend(answers.into_iter().map(|(target, verdict, answer)| PeerFacts {
        peer: target.address.to_owned(),
        kind: target.kind.to_owned(),
        allowed: match verdict {
            PeerAccess::Allowed => Some(true),
            PeerAccess::Refused => Some(false),
            PeerAccess::Unknown => None,
        },
        answer,
    }));
}

fn ask_for(
    session: &mut ProbeSession,
    address: SocketAddr,
    channel: u16,
) -> io::Result<(PeerAccess, String)> {
    let permission = session.request(method::CREATE_PERMISSION, &|message| {
        message.xor_address(kind::XOR_PEER_ADDRESS, address);
    })?;
    let [high, low] = channel.to_be_bytes();
    let bound = session.request(method::CHANNEL_BIND, &|message| {
        message
            .attribute(kind::CHANNEL_NUMBER, &[high, low, 0, 0])
            .xor_address(kind::XOR_PEER_ADDRESS, address);
    })?;
    let told = match (permission.is_success(), bound.is_success()) {
        (true, true) => "with a permission and with a channel".to_owned(),
        (true, false) => "by permission".to_owned(),
        (false, true) => "by channel".to_owned(),
        (false, false) if is_refusal(permission.code()) => bound.describe(),
        (false, false) => permission.describe(),
    };
    Ok((access(permission.code(), bound.code()), told))
}

/// A peer counts as allowed after one success, and as refused only after two refusals.
fn access(permission: Option<u16>, channel: Option<u16>) -> PeerAccess {
    if permission.is_none() || channel.is_none() {
        PeerAccess::Allowed
    } else if is_refusal(permission) && is_refusal(channel) {
        PeerAccess::Refused
    } else {
        PeerAccess::Unknown
    }
}

/// True if the server refused the peer. Other codes, such as 508, are not about the peer (RFC 8656 sections 10.2 and 12.2).
fn is_refusal(code: Option<u16>) -> bool {
    matches!(code, Some(403 | 443))
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn only_403_and_443_count_as_refusals() {
        for (permission, channel, expected) in [
            (Some(403), Some(403), PeerAccess::Refused),
            (Some(443), Some(403), PeerAccess::Refused),
            (None, Some(403), PeerAccess::Allowed),
            (Some(508), None, PeerAccess::Allowed),
            (Some(508), Some(508), PeerAccess::Unknown),
            (Some(403), Some(508), PeerAccess::Unknown),
            (Some(437), Some(437), PeerAccess::Unknown),
            (Some(0), Some(400), PeerAccess::Unknown),
        ] {
            assert_eq!(access(permission, channel), expected, "{permission:?} {channel:?}");
        }
    }

    #[test]
    fn an_inconclusive_answer_is_not_a_refusal() {
        let mut report = ProbeReport::default();
        let answers = vec![
            (&V4[0], PeerAccess::Refused, "403 Forbidden".to_owned()),
            (&V4[5], PeerAccess::Unknown, "508 Insufficient Capacity".to_owned()),
        ];
        judge(&mut report, PeerQuestion { is_v6: false, answers, ended: None });
        let allowed: Vec<_> = report.peers.iter().map(|facts| facts.allowed).collect();
        assert_eq!(allowed, [Some(false), None]);
        let told: Vec<_> = report.findings.iter().map(|line| (line.level, line.what.as_str())).collect();
        assert!(
            told[0].0 == FindingLevel::Note && told[0].1.contains("10.0.0.1: the server answers 508"),
            "{told:?}"
        );
        assert!(
            told[1].0 == FindingLevel::Ok && told[1].1.starts_with("refuses 1 forbidden IPv4"),
            "{told:?}"
        );
    }

    #[test]
    fn every_target_is_in_the_list_of_its_family_and_has_a_kind() {
        for (targets, is_v6) in [(V4, false), (V6, true)] {
            for target in targets {
                let ip: IpAddr = target.address.parse().unwrap();
                assert_eq!(ip.is_ipv6(), is_v6, "{}", target.address);
                assert!(target.level >= FindingLevel::Warn && !target.kind.is_empty());
            }
        }
    }
}
