//! Whether a server lets its users reach what only the server should: CreatePermission and ChannelBind for addresses that
//! belong to nobody's peer. No data is sent.

use std::{io, net::SocketAddr};

use super::{
    report::{Level, PeerFacts, Report},
    session::{Session, attribute, method, peer},
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

/// Asks for each address that the allocation's family can reach. Ends early when the server no longer answers.
pub(super) fn check(report: &mut Report, session: &mut Session, is_v6: bool) {
    // With an IPv4 allocation the mapped forms are asked for as well: some servers take them for what they embed.
    let mapped = V6.iter().filter(|target| !is_v6 && target.address.starts_with("::ffff:"));
    let targets = if is_v6 { V6 } else { V4 };
    let mut let_in: Vec<&Forbidden> = Vec::new();
    let mut refused = 0;
    for (number, target) in (FIRST_CHANNEL..).zip(targets.iter().chain(mapped)) {
        let Ok(ip) = target.address.parse() else { continue };
        match ask(session, SocketAddr::new(ip, PORT), number) {
            Ok((allowed, answer)) => {
                report.peers.push(PeerFacts {
                    peer: target.address.to_owned(),
                    kind: target.kind.to_owned(),
                    allowed,
                    answer,
                });
                if allowed {
                    let_in.push(target);
                } else {
                    refused += 1;
                }
            }
            Err(error) => {
                let what = format!("{}: {}", target.address, super::connection::words(&error));
                report.line(Level::Note, "peers", format!("the check ended early: {what}"));
                break;
            }
        }
    }
    for level in [Level::Bad, Level::Warn] {
        let these: Vec<_> = let_in.iter().filter(|target| target.level == level).collect();
        if these.is_empty() {
            continue;
        }
        let list: Vec<_> =
            these.iter().map(|target| format!("{} ({})", target.address, target.kind)).collect();
        let remedy = if level == Level::Bad {
            "any user can reach services that trust the server's own machine or network: refuse these peers (turnpike does so \
             unless --allow-peer names them; coturn: denied-peer-ip, no allow-loopback-peers)"
        } else {
            "users can reach the network behind the server: refuse private ranges unless peers do live there (--deny-peer; \
             coturn: denied-peer-ip)"
        };
        report.advise(level, "peers", format!("lets users send to {}", list.join(", ")), remedy);
    }
    if refused > 0 {
        let family = if is_v6 { "IPv6" } else { "IPv4" };
        report.line(
            Level::Ok,
            "peers",
            format!("refuses {refused} {family} addresses that nobody's peer should have (loopback, metadata, private …)"),
        );
    }
}

/// Whether one of the two ways in is open, and what the server said to them.
fn ask(session: &mut Session, address: SocketAddr, channel: u16) -> io::Result<(bool, String)> {
    let permission = session.request(method::CREATE_PERMISSION, &[peer(address)])?;
    let number = channel.to_be_bytes();
    let channel = (attribute::CHANNEL_NUMBER, vec![number[0], number[1], 0, 0]);
    let bound = session.request(method::CHANNEL_BIND, &[channel, peer(address)])?;
    let allowed = permission.is_success() || bound.is_success();
    let told = match (permission.is_success(), bound.is_success()) {
        (true, true) => "by permission and by channel".to_owned(),
        (true, false) => "by permission".to_owned(),
        (false, true) => "by channel".to_owned(),
        (false, false) => permission.told(),
    };
    Ok((allowed, told))
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

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
