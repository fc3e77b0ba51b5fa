//! Whether a server lets its users reach what only the server should: CreatePermission and ChannelBind for addresses that
//! belong to nobody's peer. No data is sent.

use std::{io, net::SocketAddr};

use turnpike_wire::stun::{kind, method};

use crate::{
    report::{Level, PeerFacts, ProbeReport},
    session::ProbeSession,
};

/// An address that a server must not relay to, and how bad it is if it does.
struct Forbidden {
    address: &'static str,
    kind: &'static str,
    level: Level,
}

const fn forbidden(address: &'static str, kind: &'static str, level: Level) -> Forbidden {
    Forbidden { address, kind, level }
}

/// For an allocation with an IPv4 address.
const V4: &[Forbidden] = &[
    forbidden("127.0.0.1", "loopback", Level::Bad),
    forbidden("127.255.255.254", "loopback", Level::Bad),
    forbidden("0.0.0.0", "unspecified (reaches loopback on Linux)", Level::Bad),
    forbidden("169.254.169.254", "cloud metadata", Level::Bad),
    forbidden("169.254.1.1", "link-local", Level::Bad),
    forbidden("10.0.0.1", "private", Level::Warn),
    forbidden("172.16.0.1", "private", Level::Warn),
    forbidden("192.168.0.1", "private", Level::Warn),
    forbidden("100.64.0.1", "shared (carrier NAT)", Level::Warn),
    forbidden("224.0.0.1", "multicast", Level::Bad),
    forbidden("255.255.255.255", "broadcast", Level::Bad),
];

/// For an allocation with an IPv6 address; what is written `::ffff:` is tried with IPv4 too.
const V6: &[Forbidden] = &[
    forbidden("::1", "loopback", Level::Bad),
    forbidden("::", "unspecified (reaches loopback on Linux)", Level::Bad),
    forbidden("::127.0.0.1", "loopback in an IPv4-compatible address", Level::Bad),
    forbidden("::ffff:127.0.0.1", "loopback in an IPv4-mapped address", Level::Bad),
    forbidden("::ffff:169.254.169.254", "cloud metadata in an IPv4-mapped address", Level::Bad),
    forbidden("64:ff9b::7f00:1", "loopback behind NAT64", Level::Bad),
    forbidden("64:ff9b::a9fe:a9fe", "cloud metadata behind NAT64", Level::Bad),
    forbidden("2002:7f00:1::1", "loopback in a 6to4 address", Level::Bad),
    forbidden("fe80::1", "link-local", Level::Bad),
    forbidden("fd00:ec2::254", "cloud metadata", Level::Bad),
    forbidden("fc00::1", "unique local (private)", Level::Warn),
    forbidden("ff02::1", "multicast", Level::Bad),
];
/// Discard (RFC 863): should a server misunderstand, whatever came would be thrown away.
const PORT: u16 = 9;
/// Of RFC 8656's range and RFC 5766's.
const FIRST_CHANNEL: u16 = 0x4000;

/// What a server said about the peers that one allocation could have.
pub(crate) struct PeerQuestion {
    is_v6: bool,
    answers: Vec<(&'static Forbidden, PeerAccess, String)>,
    /// Why not every address was asked for.
    ended: Option<String>,
}

/// What two answers mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerAccess {
    Allowed,
    Refused,
    /// The server refused for another reason than the peer's address.
    Unknown,
}

/// Asks for each address that the allocation's family can reach. Ends early when the server no longer answers. Where an
/// allocation has no room left for another permission or channel, `renew` is asked for a fresh one in its place, which stays
/// in `session`.
pub(crate) fn ask(
    session: &mut ProbeSession,
    is_v6: bool,
    renew: &dyn Fn() -> Option<ProbeSession>,
) -> PeerQuestion {
    // With an IPv4 allocation the mapped forms are asked for as well: some servers take them for what they embed.
    let mapped = V6.iter().filter(|target| !is_v6 && target.address.starts_with("::ffff:"));
    let targets = if is_v6 { V6 } else { V4 };
    let mut asked = PeerQuestion { is_v6, answers: Vec::new(), ended: None };
    let mut is_fresh = true;
    for (number, target) in (FIRST_CHANNEL..).zip(targets.iter().chain(mapped)) {
        let Ok(ip) = target.address.parse() else { continue };
        let address = SocketAddr::new(ip, PORT);
        let mut answer = ask_for(session, address, number);
        if !is_fresh && matches!(answer, Ok((PeerAccess::Unknown, _))) {
            // First, lest the user's quota be in the way of the next.
            session.delete();
            let Some(next) = renew() else {
                asked.ended = Some(format!("{}: no other allocation is granted", target.address));
                break;
            };
            *session = next;
            is_fresh = true;
            answer = ask_for(session, address, number);
        }
        match answer {
            Ok((verdict, told)) => {
                // A peer that is not let in takes no room.
                is_fresh &= verdict != PeerAccess::Allowed;
                asked.answers.push((target, verdict, told));
            }
            Err(error) => {
                asked.ended = Some(format!("{}: {}", target.address, crate::connection::words(error)));
                break;
            }
        }
    }
    asked
}

/// Says whom the server lets in.
pub(crate) fn judge(report: &mut ProbeReport, asked: PeerQuestion) {
    let PeerQuestion { is_v6, answers, ended } = asked;
    let family = if is_v6 { "IPv6" } else { "IPv4" };
    if let Some(what) = ended {
        report.line(Level::Note, "peers", format!("the check ended early: {what}"));
    }
    let of = |verdict: PeerAccess| answers.iter().filter(move |(_, it, _)| *it == verdict);
    for level in [Level::Bad, Level::Warn] {
        let these = of(PeerAccess::Allowed).filter(|(target, ..)| target.level == level);
        let list: Vec<_> =
            these.map(|(target, ..)| format!("{} ({})", target.address, target.kind)).collect();
        if list.is_empty() {
            continue;
        }
        let remedy = if level == Level::Bad {
            "any user can reach services that trust the server's own machine or network: refuse these peers (turnpike does so \
             unless --allow-peer names them; coturn: denied-peer-ip, no allow-loopback-peers)"
        } else {
            "users can reach the network behind the server: refuse private ranges unless peers do live there (--deny-peer; \
             coturn: denied-peer-ip)"
        };
        report.advise(level, "peers", format!("lets users send to {}", list.join(", ")), remedy);
    }
    let unknown: Vec<_> = of(PeerAccess::Unknown).collect();
    if let Some((_, _, told)) = unknown.first() {
        let list: Vec<_> = unknown.iter().map(|(target, ..)| target.address).collect();
        report.advise(
            Level::Note,
            "peers",
            format!("could not be asked about {}: answers {told}", list.join(", ")),
            "see the server's log: this says neither that users can reach these peers nor that they cannot",
        );
    }
    let refused = of(PeerAccess::Refused).count();
    if refused > 0 {
        report.line(
            Level::Ok,
            "peers",
            format!("refuses {refused} {family} addresses that nobody's peer should have (loopback, metadata, private …)"),
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

/// Whether one of the two ways in is open, and what the server said to them.
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
        (true, true) => "by permission and by channel".to_owned(),
        (true, false) => "by permission".to_owned(),
        (false, true) => "by channel".to_owned(),
        (false, false) if is_refusal(permission.code()) => bound.told(),
        (false, false) => permission.told(),
    };
    Ok((access(permission.code(), bound.code()), told))
}

/// Of the two answers' error codes, `None` for success. One way in is enough, and only two refusals shut the peer out.
fn access(permission: Option<u16>, channel: Option<u16>) -> PeerAccess {
    if permission.is_none() || channel.is_none() {
        PeerAccess::Allowed
    } else if is_refusal(permission) && is_refusal(channel) {
        PeerAccess::Refused
    } else {
        PeerAccess::Unknown
    }
}

/// Forbidden, or of a family that the allocation does not have (RFC 8656 sections 10.2 and 12.2). All else speaks of the
/// request or of the server's means (508: no room), and not of the peer.
fn is_refusal(code: Option<u16>) -> bool {
    matches!(code, Some(403 | 443))
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn only_what_speaks_of_the_peer_is_a_refusal() {
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
    fn what_could_not_be_asked_is_no_refusal() {
        let mut report = ProbeReport::default();
        let answers = vec![
            (&V4[0], PeerAccess::Refused, "403 Forbidden".to_owned()),
            (&V4[5], PeerAccess::Unknown, "508 Insufficient Capacity".to_owned()),
        ];
        judge(&mut report, PeerQuestion { is_v6: false, answers, ended: None });
        let allowed: Vec<_> = report.peers.iter().map(|facts| facts.allowed).collect();
        assert_eq!(allowed, [Some(false), None]);
        let told: Vec<_> = report.findings.iter().map(|line| (line.level, line.what.as_str())).collect();
        assert!(told[0].0 == Level::Note && told[0].1.contains("10.0.0.1: answers 508"), "{told:?}");
        assert!(told[1].0 == Level::Ok && told[1].1.starts_with("refuses 1 IPv4"), "{told:?}");
    }

    #[test]
    fn every_target_is_an_address_of_its_family_and_has_a_name() {
        for (targets, is_v6) in [(V4, false), (V6, true)] {
            for target in targets {
                let ip: IpAddr = target.address.parse().unwrap();
                assert_eq!(ip.is_ipv6(), is_v6, "{}", target.address);
                assert!(target.level >= Level::Warn && !target.kind.is_empty());
            }
        }
    }
}
