//! Addresses of this machine, and notifications of their changes by rtnetlink(7).

use std::{
    collections::HashMap,
    fs, io,
    net::{IpAddr, Ipv6Addr, UdpSocket},
    os::fd::{AsRawFd as _, OwnedFd},
    time::Duration,
};

use nix::{
    ifaddrs::{InterfaceAddress, getifaddrs},
    libc::{
        ENOBUFS, RTMGRP_IPV4_IFADDR, RTMGRP_IPV4_ROUTE, RTMGRP_IPV4_RULE, RTMGRP_IPV6_IFADDR,
        RTMGRP_IPV6_ROUTE, RTMGRP_LINK,
    },
    sys::socket::{
        AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, SockaddrLike as _, SockaddrStorage,
        bind, socket,
    },
};
use tokio::{net::UnixDatagram, time::sleep};
use turnpike_relay::source_of_route;
use turnpike_wire::address::{canonical_ip, is_private};

/// Polling interval if there are no netlink notifications.
const LOOK: Duration = Duration::from_secs(1);
/// Minimum time between reads, since one change causes many messages.
const PAUSE: Duration = Duration::from_millis(100);
/// Flags of IPv6 addresses in `/proc/net/if_inet6` (`linux/if_addr.h`): IFA_F_TEMPORARY, IFA_F_DADFAILED,
/// IFA_F_DEPRECATED, IFA_F_TENTATIVE.
const TEMPORARY: u8 = 0x01;
const DAD_FAILED: u8 = 0x08;
const DEPRECATED: u8 = 0x20;
const TENTATIVE: u8 = 0x40;

/// Preference as a source address; earlier is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum AddressRank {
    Stable,
    /// Privacy extension address (RFC 8981), which expires.
    Temporary,
    /// About to expire (RFC 4862, section 5.5.4).
    Deprecated,
    /// Duplicate address detection is running or has failed.
    Unusable,
}

impl AddressRank {
    fn of(flags: u8) -> Self {
        match flags {
            _ if flags & (DAD_FAILED | TENTATIVE) != 0 => Self::Unusable,
            _ if flags & DEPRECATED != 0 => Self::Deprecated,
            _ if flags & TEMPORARY != 0 => Self::Temporary,
            _ => Self::Stable,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwnAddress {
    pub(crate) ip: IpAddr,
    pub(crate) interface: String,
    pub(crate) prefix: u32,
    pub(crate) standing: AddressRank,
}

impl OwnAddress {
    fn of(found: &InterfaceAddress, flags: &HashMap<(Ipv6Addr, String), u8>) -> Option<Self> {
        let (ip, interface) = (ip_of(found.address.as_ref()?)?, found.interface_name.clone());
        let prefix = match found.netmask.as_ref().and_then(ip_of) {
            Some(IpAddr::V4(mask)) => mask.to_bits().count_ones(),
            Some(IpAddr::V6(mask)) => mask.to_bits().count_ones(),
            None => u32::MAX,
        };
        let flags = match ip {
            IpAddr::V4(_) => None,
            IpAddr::V6(ip) => flags.get(&(ip, interface.clone())).copied(),
        };
        Some(Self { ip, interface, prefix, standing: AddressRank::of(flags.unwrap_or(0)) })
    }

    fn is_usable(&self) -> bool {
        let is_local = match self.ip {
            IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local(),
        };
        !is_local && self.standing != AddressRank::Unusable
    }

    fn is_beside(&self, other: &Self) -> bool {
        let (one, other) = match (self.ip, other.ip) {
            (IpAddr::V4(one), IpAddr::V4(other)) => {
                (u128::from(one.to_bits()) << 96, u128::from(other.to_bits()) << 96)
            }
            (IpAddr::V6(one), IpAddr::V6(other)) => (one.to_bits(), other.to_bits()),
            _ => return false,
        };
        (one ^ other).leading_zeros() >= self.prefix
    }
}

/// Relay address of one family. `source` is the source address of the default route. A stable address on the
/// same interface is preferred to a temporary one and, among stable addresses, one with the same prefix.
pub(crate) fn choose(source: Option<IpAddr>, own: &[OwnAddress]) -> Option<IpAddr> {
    let source = source?;
    // An address that the list lacks was added after the list was read.
    let Some(of_route) = own.iter().find(|address| address.ip == source) else { return Some(source) };
    let suits = |address: &&OwnAddress| {
        let is_same = address.interface == of_route.interface && address.ip.is_ipv4() == source.is_ipv4();
        is_same && address.is_usable()
    };
    let order =
        |address: &&OwnAddress| (address.standing, !of_route.is_beside(address), address.ip != of_route.ip);
    own.iter().filter(suits).min_by_key(order).map(|address| address.ip)
}

/// Relay address without a default route: public ones before private ones, then in interface order.
pub(crate) fn choose_without_route(is_v4: bool, own: &[OwnAddress]) -> Option<IpAddr> {
    let usable = own.iter().filter(|address| address.ip.is_ipv4() == is_v4 && address.is_usable());
    usable.min_by_key(|address| (address.standing, is_private(address.ip))).map(|address| address.ip)
}

/// True if the machine has the address, regardless of `ip_nonlocal_bind`.
pub(crate) fn has(own: &[OwnAddress], ip: IpAddr) -> bool {
    let ip = canonical_ip(ip);
    if ip.is_unspecified() || ip.is_loopback() {
        return true;
    }
    match own.iter().filter(|address| address.ip == ip).map(|address| address.standing).min() {
        Some(standing) => standing != AddressRank::Unusable,
        // A whole prefix may be local (`ip route add local PREFIX dev lo`).
        None => source_of_route((ip, 9).into()) == Some(ip) || !binds_any(ip) && can_bind(ip),
    }
}

pub(crate) fn can_bind(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

/// True if any address can be bound (ip(7), `ip_nonlocal_bind`).
fn binds_any(ip: IpAddr) -> bool {
    let family = if ip.is_ipv4() { "ipv4" } else { "ipv6" };
    let path = format!("/proc/sys/net/{family}/ip_nonlocal_bind");
    fs::read_to_string(path).is_ok_and(|value| value.trim() != "0")
}

pub(crate) fn read() -> io::Result<Vec<OwnAddress>> {
    // The flags are read first: an address added in between is considered stable until the next read.
    let flags = flags();
    Ok(getifaddrs()?.filter_map(|found| OwnAddress::of(&found, &flags)).collect())
}

fn flags() -> HashMap<(Ipv6Addr, String), u8> {
    let text = fs::read_to_string("/proc/self/net/if_inet6").unwrap_or_default();
    text.lines().filter_map(flags_of).collect()
}

/// Parses a line: address, interface number, prefix, scope, flags (all hexadecimal) and interface name.
fn flags_of(line: &str) -> Option<((Ipv6Addr, String), u8)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [ip, _, _, _, flags, interface] = words[..] else { return None };
    let ip = Ipv6Addr::from_bits(u128::from_str_radix(ip, 16).ok()?);
    Some(((ip, interface.to_owned()), u8::from_str_radix(flags, 16).ok()?))
}

fn ip_of(address: &SockaddrStorage) -> Option<IpAddr> {
    match address.family()? {
        AddressFamily::Inet => address.as_sockaddr_in().map(|address| IpAddr::from(address.ip())),
        AddressFamily::Inet6 => {
            address.as_sockaddr_in6().map(|address| canonical_ip(IpAddr::from(address.ip())))
        }
        _ => None,
    }
}

/// Notifications of possible address changes. tokio treats the netlink socket as a datagram socket.
pub(crate) struct AddressNotifications(Option<UnixDatagram>);

impl AddressNotifications {
    /// Subscribes to notifications. If netlink is forbidden (seccomp, RestrictAddressFamilies of systemd),
    /// reports a possible change every second.
    pub(crate) fn subscribe() -> Self {
        Self(subscribe().and_then(|socket| UnixDatagram::from_std(socket.into())).ok())
    }

    pub(crate) async fn next(&mut self) {
        sleep(PAUSE).await;
        let heard = match &self.0 {
            Some(socket) => heard(socket).await,
            None => return sleep(LOOK).await,
        };
        if heard.is_err() {
            self.0 = None;
        }
    }
}

/// Waits for messages and drains the socket. Their content is ignored, as are lost messages (ENOBUFS),
/// because the addresses are read afterwards.
async fn heard(socket: &UnixDatagram) -> io::Result<()> {
    let (mut heard, mut buffer) = (false, [0; 8192]);
    while !heard {
        socket.readable().await?;
        loop {
            match socket.try_recv(&mut buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => heard = true,
                Err(error) if error.raw_os_error() == Some(ENOBUFS) => heard = true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

fn subscribe() -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
    // RTMGRP_LINK, because a link that goes down removes its IPv4 routes without a message. libc has no
    // name for RTNLGRP_IPV6_RULE.
    let groups = (RTMGRP_LINK
        | RTMGRP_IPV4_IFADDR
        | RTMGRP_IPV6_IFADDR
        | RTMGRP_IPV4_ROUTE
        | RTMGRP_IPV6_ROUTE
        | RTMGRP_IPV4_RULE)
        .unsigned_abs()
        | 1 << 18;
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(text: &str) -> OwnAddress {
        let words: Vec<&str> = text.split_whitespace().collect();
        let [interface, address, flags] = words[..] else { panic!("{text}") };
        let (ip, prefix) = address.split_once('/').expect("a prefix");
        OwnAddress {
            ip: ip.parse().expect("an address"),
            interface: interface.to_owned(),
            prefix: prefix.parse().expect("a number"),
            standing: AddressRank::of(u8::from_str_radix(flags, 16).expect("hexadecimal")),
        }
    }

    #[test]
    fn the_default_route_decides_and_stable_addresses_come_first() {
        let (stable, temporary) = ("eth0 2001:db8::5/64 80", "eth0 2001:db8::abcd/64 01");
        for (source, all, chosen) in [
            (Some("10.0.0.5"), &["lo 127.0.0.1/8 80", "eth0 10.0.0.5/24 80"][..], Some("10.0.0.5")),
            (Some("10.0.1.5"), &["eth0 10.0.0.5/24 80", "eth1 10.0.1.5/24 80"], Some("10.0.1.5")),
            (None, &["eth0 10.0.0.5/24 80"], None),
            (Some("10.0.0.9"), &["eth0 10.0.0.5/24 80"], Some("10.0.0.9")),
            // The route's source wins over the interface's first address.
            (Some("10.0.0.6"), &["eth0 10.0.0.5/24 80", "eth0 10.0.0.6/24 80"], Some("10.0.0.6")),
            (Some("2001:db8::abcd"), &[temporary, stable], Some("2001:db8::5")),
            (Some("2001:db8::abcd"), &[temporary], Some("2001:db8::abcd")),
            (Some("2001:db8::abcd"), &[temporary, "eth1 2001:db8:1::5/64 80"], Some("2001:db8::abcd")),
            // An address with the same prefix is preferred to others, such as a local one (RFC 4193).
            (Some("2001:db8::abcd"), &[temporary, "eth0 fd00::5/64 80", stable], Some("2001:db8::5")),
            (Some("2001:db8::abcd"), &[temporary, "eth0 2001:db8::5/64 c0"], Some("2001:db8::abcd")),
            (Some("2001:db8::abcd"), &[temporary, "eth0 2001:db8::5/64 a0"], Some("2001:db8::abcd")),
            (Some("2001:db8::abcd"), &[temporary, "eth0 2001:db8::5/64 88"], Some("2001:db8::abcd")),
            (Some("2001:db8::5"), &["eth0 2001:db8::5/64 a0", temporary], Some("2001:db8::abcd")),
            (Some("2001:db8::5"), &["eth0 2001:db8::5/64 a0"], Some("2001:db8::5")),
            (Some("2001:db8::5"), &["eth0 2001:db8::5/64 c0"], None),
            (Some("fe80::5"), &["eth0 fe80::5/64 80", stable], Some("2001:db8::5")),
            (Some("::1"), &["lo ::1/128 80", "eth0 fe80::5/64 80"], None),
        ] {
            let all: Vec<OwnAddress> = all.iter().map(|text| own(text)).collect();
            let source = source.map(|ip| ip.parse().expect("an address"));
            let chosen = chosen.map(|ip| ip.parse::<IpAddr>().expect("an address"));
            assert_eq!(choose(source, &all), chosen, "{source:?} {all:?}");
        }
    }

    #[test]
    fn without_a_default_route_any_non_local_address_is_chosen() {
        let (v4, v6) = ("eth0 10.0.0.5/24 80", "eth1 2001:db8::5/64 80");
        for (all, chosen) in [
            (
                &["lo 127.0.0.1/8 80", "lo ::1/128 80", "eth0 169.254.3.4/16 80", "eth0 fe80::5/64 80"][..],
                [None; 2],
            ),
            (
                &["lo 127.0.0.1/8 80", v4, "docker0 172.17.0.1/16 80", v6],
                [Some("10.0.0.5"), Some("2001:db8::5")],
            ),
            (&[v4, "eth1 203.0.113.5/24 80"], [Some("203.0.113.5"), None]),
            (&["eth0 fd00::5/64 80", "eth0 2001:db8::abcd/64 01", v6], [None, Some("2001:db8::5")]),
            (&["eth0 fd00::5/64 80", "eth0 2001:db8::5/64 c0"], [None, Some("fd00::5")]),
        ] {
            let all: Vec<OwnAddress> = all.iter().map(|text| own(text)).collect();
            let chosen = chosen.map(|ip| ip.map(|ip: &str| ip.parse::<IpAddr>().expect("an address")));
            assert_eq!([true, false].map(|is_v4| choose_without_route(is_v4, &all)), chosen, "{all:?}");
        }
    }

    #[test]
    fn an_address_is_used_after_duplicate_address_detection() {
        let all = ["eth0 2001:db8::5/64 c0", "eth0 2001:db8::6/64 80", "eth0 2001:db8::7/64 20"].map(own);
        for (ip, here) in [
            ("2001:db8::5", false),
            ("2001:db8::6", true),
            ("2001:db8::7", true),
            ("192.0.2.1", false),
            ("127.0.0.9", true),
            ("::", true),
        ] {
            assert_eq!(has(&all, ip.parse().expect("an address")), here, "{ip}");
        }
    }

    #[test]
    fn lines_of_if_inet6_are_parsed() {
        let line = "20010db8000000000000000000000005 02 40 00 c1     eth0";
        let ip = "2001:db8::5".parse().expect("an address");
        assert_eq!(flags_of(line), Some(((ip, "eth0".to_owned()), 0xC1)));
        for wrong in ["", "20010db8 02", "z 02 40 00 80 eth0", "0 0 0 0 100 eth0"] {
            assert_eq!(flags_of(wrong), None, "{wrong}");
        }
        let all = read().expect("getifaddrs works here");
        let loopback = all.iter().find(|address| address.ip == IpAddr::from([127, 0, 0, 1]));
        assert_eq!(loopback.map(|it| (it.prefix, it.standing)), Some((8, AddressRank::Stable)));
    }
}
