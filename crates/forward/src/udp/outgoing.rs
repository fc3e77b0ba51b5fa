//! Sockets towards targets, with the options of a rule.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::OwnedFd,
};

use socket2::SockRef;
use turnpike_net::{Datapath, Interest, TcpSocket, UdpOptions, UdpSocket};

use super::{UdpTick, rule_state::RuleState, sessions::Arrival};
use crate::{Rule, circles::Link};

/// Buffer size per direction, enough for a few super-packets of 64 KiB; the kernel uses memory only for
/// queued data.
pub(super) const BUFFER: usize = 1 << 20;

/// UDP socket connected to the target, so that the kernel looks up the route once and drops datagrams from
/// other sources. The socket is not connected if the target may respond from any port.
pub(super) fn datagrams(
    rule: &Rule,
    client: SocketAddr,
    target: SocketAddr,
    datapath: Datapath,
) -> io::Result<UdpSocket> {
    let options = UdpOptions {
        // If a client of a transparent rule uses two of our ports, its address must be bound twice.
        reuse_port: rule.transparent,
        recv_buffer: Some(BUFFER),
        send_buffer: Some(BUFFER),
        gro: datapath == Datapath::Gso,
        // Without this, an ICMP error that arrives between two sends would be lost.
        errors: true,
        ..route_options(rule)
    };
    let socket = UdpSocket::bind(source(rule, client, target)?, &options)?;
    if !rule.any_port {
        socket.connect(target)?;
    }
    Ok(socket)
}

/// UDP socket connected to a target for a health check, with the rule's options but without a client's
/// address.
pub(crate) fn to_check(rule: &Rule, target: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let rule = Rule { transparent: false, ..rule.clone() };
    // The client's address matters only for a transparent rule.
    let socket = UdpSocket::bind(source(&rule, target, target)?, &route_options(&rule))?;
    socket.connect(target)?;
    Ok(OwnedFd::from(socket).into())
}

pub(super) fn source_of(socket: &UdpSocket, rule: &Rule, target: SocketAddr) -> io::Result<SocketAddr> {
    let source = socket.source()?;
    if !source.ip().is_unspecified() {
        return Ok(source);
    }
    // An unconnected socket sends from the address that the route selects.
    let route = to_check(rule, target)?.local_addr()?;
    Ok(SocketAddr::new(route.ip(), source.port()))
}

pub(super) fn stream(rule: &Rule, client: SocketAddr, target: SocketAddr) -> io::Result<TcpSocket> {
    let mut options = rule.connect_options();
    if rule.transparent {
        options.source = Some(SocketAddr::new(client.ip(), 0));
    }
    let socket = TcpSocket::connect(target, &options)?;
    let options = SockRef::from(&socket);
    options.set_tcp_nodelay(rule.nodelay)?;
    options.set_keepalive(rule.keepalive)?;
    socket.set_timers(&rule.timers)?;
    Ok(socket)
}

/// Returns a TCP socket that is connecting and watched, with its link if it leads to a rule of this process.
pub(super) fn watched_stream(
    state: &RuleState,
    arrival: Arrival,
    target: SocketAddr,
    token: u64,
    tick: &mut UdpTick<'_>,
) -> io::Result<(TcpSocket, Option<Box<Link>>)> {
    // The rule's own listener uses UDP, so the client's destination address is irrelevant.
    let leads_here = tick.worker.approach(state.key, target, None, tick.now)?;
    let begin = || stream(&state.rule, arrival.client, target);
    let (socket, link) = if leads_here {
        let (socket, link) = tick.worker.circles().connect(arrival.hops, begin)?;
        (socket, Some(link))
    } else {
        (begin()?, None)
    };
    tick.poller.add_with(&socket, token, Interest::Level { read: true, write: true })?;
    Ok((socket, link))
}

/// True if only this target is unreachable, so another one may work.
pub(super) fn is_unreachable(error: &io::Error) -> bool {
    use io::ErrorKind::{AddrNotAvailable, ConnectionRefused, HostUnreachable, NetworkUnreachable};
    matches!(error.kind(), AddrNotAvailable | ConnectionRefused | HostUnreachable | NetworkUnreachable)
}

fn route_options(rule: &Rule) -> UdpOptions {
    UdpOptions {
        device: rule.device.clone(),
        mark: rule.mark,
        transparent: rule.transparent,
        ..UdpOptions::default()
    }
}

/// Address to bind, which is the client's, the rule's, or chosen by the kernel.
fn source(rule: &Rule, client: SocketAddr, target: SocketAddr) -> io::Result<SocketAddr> {
    let address = match (rule.transparent, rule.source) {
        (true, _) => client,
        (false, Some(ip)) => ip.at(0),
        (false, None) if target.is_ipv6() => SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0),
        (false, None) => SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
    };
    if address.is_ipv6() == target.is_ipv6() {
        return Ok(address);
    }
    Err(io::Error::new(
        io::ErrorKind::AddrNotAvailable,
        "the source address and the target have different address families",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rule;

    #[test]
    fn link_local_source_is_bound_on_its_interface() {
        let to = SocketAddr::from(([0xfe80, 0, 0, 0, 0, 0, 0, 2], 9));
        let rule = Rule { source: "fe80::1%lo".parse().ok(), ..Rule::new("rule", to, to.into()) };
        let Ok(SocketAddr::V6(from)) = source(&rule, to, to) else { panic!("not an IPv6 address") };
        assert_eq!((from.ip().segments()[7], from.scope_id()), (1, 1));
    }
}
