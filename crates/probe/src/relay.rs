//! Checks of the relayed address and of allocation features. Each check creates an allocation and deletes it afterwards.

use std::net::{IpAddr, SocketAddr};

use turnpike_wire::{
    address::is_private,
    stun::{FAMILY_IPV6, Writer, kind, method},
};

use crate::{
    report::{FindingLevel, ProbeReport},
    session::{ProbeSession, ServerAnswer},
};

/// Range recommended for relay ports (RFC 8656 section 7.2).
const RELAY_PORTS: std::ops::RangeInclusive<u16> = 49152..=65535;

pub(crate) fn judge_address(report: &mut ProbeReport, server: IpAddr, relayed: SocketAddr) {
    let area = "relay";
    let ip = relayed.ip();
    report.relayed.push(relayed.to_string());
    if ip.is_unspecified() {
        report.bad(
            area,
            format!("hands out {relayed}, which is not a usable address"),
            "tell the server its address (turnpike: --relay-ip IP; coturn: relay-ip=)",
        );
    } else if ip.is_loopback() && !server.is_loopback() {
        report.bad(
            area,
            format!("hands out {relayed}, which only the server can reach"),
            "relay on an address that peers can reach (turnpike: --relay-ip; coturn: relay-ip=)",
        );
    } else if is_private(ip) && !is_private(server) {
        report.bad(area,
            format!("hands out the private address {relayed}: unreachable from outside its network"),
            format!(
                "the server is behind NAT: configure its public address (turnpike: --relay-ip {ip}=PUBLIC; coturn: \
                 external-ip=PUBLIC/{ip}), here probably {server}"
            ),
        );
    } else if ip != server && ip.is_ipv4() == server.is_ipv4() {
        report.advise(
            FindingLevel::Note,
            area,
            format!("relays on {relayed} instead of the server's address {server}"),
            "fine for a server with several addresses; otherwise check that peers can reach it, and check the firewall",
        );
    } else {
        report.ok(area, format!("relays on {relayed}"));
    }
    if !RELAY_PORTS.contains(&relayed.port()) {
        report.note(area, format!("port {} is outside 49152-65535 (RFC 8656 section 7.2)", relayed.port()));
    }
}

pub(crate) fn judge_mapped(report: &mut ProbeReport, local: Option<SocketAddr>, answer: &ServerAnswer) {
    let Some(mapped) = answer.address(kind::XOR_MAPPED_ADDRESS) else {
        report.line(
            FindingLevel::Warn,
            "relay",
            "does not tell clients their own address (XOR-MAPPED-ADDRESS)",
        );
        return;
    };
    match local {
        Some(local) if local == mapped => {}
        Some(local) => report.note(
            "nat",
            format!("this client has the address {local}, which the server sees as {mapped}: there is a NAT in between"),
        ),
        None => {}
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Feature {
    /// RFC 8656 section 7.1.
    Ipv6,
    DualStack,
    EvenPort,
    /// RFC 8016.
    Mobility,
    /// RFC 6062; requires TCP or TLS to the server.
    TcpRelaying,
}

impl Feature {
    pub(crate) const ALL: [Self; 5] =
        [Self::Ipv6, Self::DualStack, Self::EvenPort, Self::Mobility, Self::TcpRelaying];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ipv6 => "ipv6",
            Self::DualStack => "dual_stack",
            Self::EvenPort => "even_port",
            Self::Mobility => "mobility",
            Self::TcpRelaying => "tcp_relaying",
        }
    }

    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Ipv6 => "IPv6 relaying",
            Self::DualStack => "dual-stack allocations",
            Self::EvenPort => "EVEN-PORT",
            Self::Mobility => "mobility (RFC 8016)",
            Self::TcpRelaying => "TCP relaying (RFC 6062)",
        }
    }

    fn ask(self, message: &mut Writer<'_>) {
        const V6: [u8; 4] = [FAMILY_IPV6, 0, 0, 0];
        let transport = if self == Self::TcpRelaying { 6 } else { 17 };
        message.attribute(kind::REQUESTED_TRANSPORT, &[transport, 0, 0, 0]);
        match self {
            Self::Ipv6 => _ = message.attribute(kind::REQUESTED_ADDRESS_FAMILY, &V6),
            Self::DualStack => _ = message.attribute(kind::ADDITIONAL_ADDRESS_FAMILY, &V6),
            Self::EvenPort => _ = message.attribute(kind::EVEN_PORT, &[0]),
            Self::Mobility => _ = message.attribute(kind::MOBILITY_TICKET, &[]),
            Self::TcpRelaying => {}
        }
    }

    fn is_in(self, answer: &ServerAnswer) -> bool {
        let relayed = answer.addresses(kind::XOR_RELAYED_ADDRESS);
        match self {
            Self::Ipv6 => relayed.first().is_some_and(SocketAddr::is_ipv6),
            Self::DualStack => relayed.len() == 2,
            Self::EvenPort => relayed.first().is_some_and(|relayed| relayed.port().is_multiple_of(2)),
            Self::Mobility => answer.value(kind::MOBILITY_TICKET).is_some_and(|ticket| !ticket.is_empty()),
            Self::TcpRelaying => !relayed.is_empty(),
        }
    }
}

pub(crate) enum RelayFound {
    Yes(Vec<SocketAddr>),
    No(String),
    /// The server granted an allocation without the feature; contains a description of its response, if there was one.
    Less(String),
    /// Inconclusive because of a quota or a missing response.
    Unknown(String),
}

pub(crate) fn ask(session: &mut ProbeSession, feature: Feature) -> RelayFound {
    match session.request(method::ALLOCATE, &|message| feature.ask(message)) {
        Ok(answer) => match answer.code() {
            None if feature.is_in(&answer) => RelayFound::Yes(answer.addresses(kind::XOR_RELAYED_ADDRESS)),
            None => RelayFound::Less(answer.family_refused().unwrap_or_else(|| "ignored".to_owned())),
            Some(401 | 437 | 438 | 486 | 508) => RelayFound::Unknown(answer.describe()),
            Some(_) => RelayFound::No(answer.describe()),
        },
        Err(error) => RelayFound::Unknown(crate::connection::describe_error(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(server: &str, relayed: &str) -> FindingLevel {
        let mut report = ProbeReport::default();
        judge_address(&mut report, server.parse().unwrap(), relayed.parse().unwrap());
        report.worst()
    }

    fn remedy(server: &str, relayed: &str) -> String {
        let mut report = ProbeReport::default();
        judge_address(&mut report, server.parse().unwrap(), relayed.parse().unwrap());
        report.findings.remove(0).remedy.expect("a remedy")
    }

    #[test]
    fn a_private_relay_address_is_bad_only_on_a_public_server() {
        for relayed in
            ["10.0.0.5:50000", "192.168.1.1:50000", "100.100.1.1:50000", "127.0.0.1:50000", "0.0.0.0:50000"]
        {
            assert_eq!(level("203.0.113.5", relayed), FindingLevel::Bad, "{relayed}");
        }
        assert_eq!(level("10.0.0.5", "10.0.0.5:50000"), FindingLevel::Ok);
        assert_eq!(level("127.0.0.1", "127.0.0.1:50000"), FindingLevel::Ok);
        assert_eq!(level("10.0.0.5", "127.0.0.1:50000"), FindingLevel::Bad);
        assert!(
            remedy("203.0.113.5", "127.0.0.1:50000").starts_with("relay on an address that peers can reach")
        );
        assert!(remedy("203.0.113.5", "10.0.0.5:50000").contains("--relay-ip 10.0.0.5=PUBLIC"));
        assert_eq!(level("203.0.113.5", "203.0.113.5:50000"), FindingLevel::Ok);
        assert_eq!(level("203.0.113.5", "203.0.113.6:50000"), FindingLevel::Note);
        assert_eq!(level("203.0.113.5", "[2001:db8::1]:50000"), FindingLevel::Ok);
        assert_eq!(level("203.0.113.5", "203.0.113.5:3000"), FindingLevel::Note);
    }
}
