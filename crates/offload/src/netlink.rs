//! rtnetlink(7): interfaces, their addresses, routes, and notifications of changes. Driver features are read
//! through generic netlink.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    io::{Errno, read, write},
    net::{
        AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, bind,
        netlink::{self, SocketAddrNetlink},
        recv, socket_with,
    },
};

const ERROR: u16 = 2;
const DONE: u16 = 3;
const NEW_LINK: u16 = 16;
const GET_LINK: u16 = 18;
const NEW_ADDRESS: u16 = 20;
const GET_ADDRESS: u16 = 22;
const NEW_ROUTE: u16 = 24;
const GET_ROUTE: u16 = 26;
const NEW_NEIGHBOUR: u16 = 28;
const DELETE_NEIGHBOUR: u16 = 29;
const GET_NEIGHBOUR: u16 = 30;

/// Message types of generic netlink: the controller (GENL_ID_CTRL, CTRL_CMD_GETFAMILY), and a request to the
/// family netdev (NETDEV_CMD_DEV_GET).
const CONTROLLER: u16 = 16;
const GET_FAMILY: u8 = 3;
const GET_DEVICE: u8 = 1;
/// Feature flag NETDEV_XDP_ACT_NDO_XMIT.
const TAKES_REDIRECTED: u64 = 4;

const REQUEST: u16 = 1;
const MULTI: u16 = 2;
const ACKNOWLEDGE: u16 = 4;
const DUMP: u16 = 0x300;
const CREATE: u16 = 0x400;

/// Multicast groups for links, next hops, and the addresses, routes, rules and settings (rp_filter) of both
/// families.
const GROUPS: u32 = 0x1 | 0x10 | 0x40 | 0x80 | 0x100 | 0x400 | 1 << 18 | 1 << 23 | 1 << 31;
/// Multicast group for queueing disciplines and filters (RTNLGRP_TC).
const FILTERS: u32 = 0x8;
/// Multicast group for neighbours of both families.
const NEIGHBOURS: u32 = 0x4;

/// ARPHRD_ETHER.
const ETHERNET: u16 = 1;
/// IFF_UP, IFF_LOOPBACK.
const UP: u32 = 0x1;
const LOOPBACK: u32 = 0x8;

/// RTN_UNICAST.
const UNICAST: u8 = 1;

/// UDP, in RTA_IP_PROTO.
const UDP: u8 = 17;

/// States in which a neighbour's link address is usable (NUD_VALID, except NUD_NOARP).
const USABLE: u16 = 0x02 | 0x04 | 0x08 | 0x10 | 0x80;
/// NTF_USE: treats the neighbour as if a packet had been sent to it.
const USE: u8 = 1;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Interface {
    pub(crate) number: u32,
    pub(crate) mtu: u32,
    pub(crate) name: String,
    /// True if the interface is a member of a bridge, bond or the like, on which its traffic appears again.
    pub(crate) is_port: bool,
    pub(crate) is_up: bool,
    pub(crate) is_ethernet: bool,
    pub(crate) is_loopback: bool,
    /// Kind of a virtual interface, such as `veth` or `vlan`; `None` for hardware.
    pub(crate) kind: Option<String>,
    pub(crate) address: Option<LinkAddress>,
}

pub(crate) type LinkAddress = [u8; 6];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NextHop {
    pub(crate) interface: u32,
    /// Gateway, or the destination itself if there is none.
    pub(crate) neighbour: IpAddr,
}

/// Name of the interface for datagrams from a local address to a remote one. `None` if there is no route.
pub fn interface_of_route(from: IpAddr, to: IpAddr) -> io::Result<Option<String>> {
    let mut netlink = Netlink::new()?;
    let Some(next) = netlink.route(from, to)? else { return Ok(None) };
    let interfaces = netlink.interfaces()?;
    Ok(interfaces.into_iter().find(|it| it.number == next.interface).map(|it| it.name))
}

pub(crate) struct Netlink {
    socket: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Netlink {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { socket: socket(None, 0)?, sequence: 0, buffer: vec![0; 64 << 10] })
    }

    pub(crate) fn of_protocol(protocol: Protocol) -> io::Result<Self> {
        Ok(Self { socket: socket(Some(protocol), 0)?, sequence: 0, buffer: vec![0; 64 << 10] })
    }

    /// Requests a list of all objects of one kind.
    pub(crate) fn dump(&mut self, kind: u16, body: &[u8], each: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.ask(kind, DUMP, body, each)
    }

    #[cfg(test)]
    pub(crate) fn of(socket: OwnedFd) -> Self {
        Self { socket, sequence: 0, buffer: vec![0; 64 << 10] }
    }

    /// True if the driver accepts packets redirected by XDP. `None` before Linux 6.3, which does not report
    /// it.
    pub(crate) fn takes_redirected(interface: u32) -> Option<bool> {
        let socket = socket(Some(netlink::GENERIC), 0).ok()?;
        let mut generic = Self { socket, sequence: 0, buffer: vec![0; 8 << 10] };
        let mut found = None;
        let mut body = vec![GET_FAMILY, 1, 0, 0];
        put(&mut body, 2, b"netdev\0");
        generic.ask(CONTROLLER, 0, &body, |_, body| found = attribute(body.get(4..), 1)).ok()?;
        let family = u16::from_ne_bytes(found?);
        let mut found = None;
        let mut body = vec![GET_DEVICE, 1, 0, 0];
        put(&mut body, 1, &interface.to_ne_bytes());
        generic.ask(family, 0, &body, |_, body| found = attribute(body.get(4..), 3)).ok()?;
        Some(u64::from_ne_bytes(found?) & TAKES_REDIRECTED != 0)
    }

    pub(crate) fn interfaces(&mut self) -> io::Result<BTreeSet<Interface>> {
        let mut found = BTreeSet::new();
        self.ask(GET_LINK, DUMP, &[0; 16], |kind, body| {
            if kind != NEW_LINK || body.len() < 16 {
                return;
            }
            let mut interface = Interface {
                number: u32_at(body, 4),
                mtu: 0,
                name: String::new(),
                is_port: false,
                is_up: u32_at(body, 8) & UP != 0,
                is_ethernet: u16_at(body, 2) == ETHERNET && u32_at(body, 8) & LOOPBACK == 0,
                is_loopback: u32_at(body, 8) & LOOPBACK != 0,
                kind: None,
                address: None,
            };
            for (kind, value) in attributes(&body[16..]) {
                match kind {
                    3 => interface.name = text(value),
                    4 if value.len() == 4 => interface.mtu = u32_at(value, 0),
                    10 => interface.is_port = true,
                    1 => interface.address = value.try_into().ok(),
                    18 => interface.kind = kind_of(value),
                    _ => {}
                }
            }
            found.insert(interface);
        })?;
        Ok(found)
    }

    pub(crate) fn with_addresses(&mut self) -> io::Result<BTreeSet<u32>> {
        let mut found = BTreeSet::new();
        self.ask(GET_ADDRESS, DUMP, &[0; 8], |kind, body| {
            if kind == NEW_ADDRESS && body.len() >= 8 {
                found.insert(u32_at(body, 4));
            }
        })?;
        Ok(found)
    }

    /// Next hop for datagrams from a local address to a remote one. `None` if there is no route, or if the
    /// route leads to this machine, to several hops, or nowhere.
    pub(crate) fn route(&mut self, from: IpAddr, to: IpAddr) -> io::Result<Option<NextHop>> {
        let mut body = Vec::with_capacity(64);
        let bits = if to.is_ipv4() { 32 } else { 128 };
        body.extend([family_of(to), bits, bits, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        put_ip(&mut body, 1, to);
        put_ip(&mut body, 2, from);
        put(&mut body, 27, &[UDP]);
        let mut next = None;
        let asked = self.ask(GET_ROUTE, 0, &body, |kind, body| {
            if kind != NEW_ROUTE || body.len() < 12 || body[7] != UNICAST {
                return;
            }
            let (mut interface, mut neighbour) = (None, to);
            for (kind, value) in attributes(&body[12..]) {
                match kind {
                    4 if value.len() == 4 => interface = Some(u32_at(value, 0)),
                    // RTA_GATEWAY (same family), and RTA_VIA (other family), in which two bytes precede the
                    // address.
                    5 => neighbour = ip_of(value).unwrap_or(to),
                    18 => neighbour = value.get(2..).and_then(ip_of).unwrap_or(to),
                    _ => {}
                }
            }
            next = interface.map(|interface| NextHop { interface, neighbour });
        });
        answered(asked).map(|()| next)
    }

    pub(crate) fn neighbour(&mut self, hop: NextHop) -> io::Result<Option<LinkAddress>> {
        let mut found = None;
        let asked = self.ask(GET_NEIGHBOUR, 0, &about(hop, 0), |kind, body| {
            if let Some((of, address)) = Some(body).filter(|_| kind == NEW_NEIGHBOUR).and_then(told)
                && of == hop
            {
                found = address;
            }
        });
        answered(asked).map(|()| found)
    }

    /// Makes the kernel confirm or resolve this neighbour, as if it sent a packet there.
    pub(crate) fn use_neighbour(&mut self, hop: NextHop) -> io::Result<()> {
        answered(self.ask(NEW_NEIGHBOUR, CREATE | ACKNOWLEDGE, &about(hop, USE), |_, _| {}))
    }

    fn ask(
        &mut self,
        kind: u16,
        flags: u16,
        body: &[u8],
        mut each: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut message = Vec::with_capacity(16 + body.len());
        #[expect(clippy::cast_possible_truncation, reason = "our requests are short")]
        message.extend(((16 + body.len()) as u32).to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend((REQUEST | flags).to_ne_bytes());
        message.extend(self.sequence.to_ne_bytes());
        message.extend(0_u32.to_ne_bytes());
        message.extend(body);
        write(&self.socket, &message)?;
        loop {
            let length = match read(&self.socket, &mut self.buffer[..]) {
                Err(Errno::INTR) => continue,
                done => done?,
            };
            let mut rest = &self.buffer[..length];
            while rest.len() >= 16 {
                let (len, kind) = (u32_at(rest, 0) as usize, u16_at(rest, 4));
                let (flags, sequence) = (u16_at(rest, 6), u32_at(rest, 8));
                let Some(body) = rest.get(16..len) else { return Err(io::ErrorKind::InvalidData.into()) };
                rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
                // This is the end of an earlier response that was abandoned.
                if sequence != self.sequence {
                    continue;
                }
                match kind {
                    ERROR if body.len() >= 4 => {
                        let errno = u32_at(body, 0).cast_signed();
                        return if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-errno)) };
                    }
                    DONE => return Ok(()),
                    _ => each(kind, body),
                }
                if flags & MULTI == 0 {
                    return Ok(());
                }
            }
        }
    }
}

fn kind_of(info: &[u8]) -> Option<String> {
    attributes(info).find(|(kind, _)| *kind == 1).map(|(_, name)| text(name))
}

/// Treats errors that are valid answers as success: no route to host, network unreachable, forbidden, not our
/// address, or no such neighbour.
fn answered(asked: io::Result<()>) -> io::Result<()> {
    match asked {
        Err(error) if error.raw_os_error().is_some_and(|errno| errno != Errno::NOBUFS.raw_os_error()) => {
            Ok(())
        }
        other => other,
    }
}

fn about(hop: NextHop, flags: u8) -> Vec<u8> {
    let mut body = vec![family_of(hop.neighbour), 0, 0, 0];
    body.extend(hop.interface.to_ne_bytes());
    body.extend([0, 0, flags, 0]);
    put_ip(&mut body, 1, hop.neighbour);
    body
}

fn told(body: &[u8]) -> Option<(NextHop, Option<LinkAddress>)> {
    let (interface, state) = (u32_at(body.get(4..8)?, 0), u16_at(body.get(8..10)?, 0));
    let (mut neighbour, mut address) = (None, None);
    for (kind, value) in attributes(body.get(12..)?) {
        match kind {
            1 => neighbour = ip_of(value),
            2 => address = value.try_into().ok(),
            _ => {}
        }
    }
    let hop = NextHop { interface, neighbour: neighbour? };
    Some((hop, address.filter(|_| state & USABLE != 0)))
}

pub(crate) struct News {
    socket: OwnedFd,
}

impl News {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { socket: socket(None, GROUPS)? })
    }

    /// Notifications about rules that may prevent leases: tc filters, nf_tables (NFNLGRP_NFTABLES) and IPsec
    /// policies (XFRMNLGRP_POLICY), as far as the kernel supports them.
    pub(crate) fn of_rules() -> Vec<Self> {
        let of = [(None, FILTERS), (Some(netlink::NETFILTER), 1 << 6), (Some(netlink::XFRM), 1 << 3)];
        let open = |(protocol, groups)| socket(protocol, groups).ok().map(|socket| Self { socket });
        of.into_iter().filter_map(open).collect()
    }

    /// True if something has changed since the last call. Details of the change do not matter, because
    /// everything is read again.
    pub(crate) fn heard(&self) -> bool {
        let (mut heard, mut buffer) = (false, [0; 4096]);
        loop {
            match recv(&self.socket, &mut buffer[..], RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                Ok(_) | Err(Errno::NOBUFS) => heard = true,
                Err(_) => return heard,
            }
        }
    }
}

impl AsFd for News {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

pub(crate) struct NeighbourNews {
    socket: OwnedFd,
}

impl NeighbourNews {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { socket: socket(None, NEIGHBOURS)? })
    }

    /// Neighbours that have changed since the last call, and whether each is reachable; `None` if
    /// notifications were lost.
    pub(crate) fn heard(&self) -> Option<BTreeMap<NextHop, bool>> {
        let (mut changed, mut all, mut buffer) = (BTreeMap::new(), true, [0; 8192]);
        loop {
            let length = match recv(&self.socket, &mut buffer[..], RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => continue,
                Err(Errno::NOBUFS) => {
                    all = false;
                    continue;
                }
                Err(_) => return all.then_some(changed),
                Ok((length, _)) => length,
            };
            let mut rest = &buffer[..length];
            while rest.len() >= 16 {
                let (len, kind) = (u32_at(rest, 0) as usize, u16_at(rest, 4));
                if let Some(body) = rest.get(16..len)
                    && matches!(kind, NEW_NEIGHBOUR | DELETE_NEIGHBOUR)
                    && let Some((hop, address)) = told(body)
                {
                    changed.insert(hop, address.is_some());
                }
                // Avoids an endless loop if the length is 0.
                rest = rest.get(len.max(16).next_multiple_of(4)..).unwrap_or_default();
            }
        }
    }
}

impl AsFd for NeighbourNews {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn socket(protocol: Option<Protocol>, groups: u32) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
    bind(&socket, &SocketAddrNetlink::new(0, groups))?;
    Ok(socket)
}

/// ```text
/// │ length (2) │ kind (2) │ value │ padding to 4 │ …
/// ```
pub(crate) fn attributes(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        if rest.len() < 4 {
            return None;
        }
        let (len, kind) = (usize::from(u16_at(rest, 0)), u16_at(rest, 2));
        let value = rest.get(4..len)?;
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

fn attribute<const LEN: usize>(attributes_of: Option<&[u8]>, kind: u16) -> Option<[u8; LEN]> {
    attributes(attributes_of?).find(|(it, _)| *it == kind)?.1.try_into().ok()
}

fn put(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    #[expect(clippy::cast_possible_truncation, reason = "at most an address")]
    body.extend(((4 + value.len()) as u16).to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

fn put_ip(body: &mut Vec<u8>, kind: u16, ip: IpAddr) {
    match ip {
        IpAddr::V4(ip) => put(body, kind, &ip.octets()),
        IpAddr::V6(ip) => put(body, kind, &ip.octets()),
    }
}

fn ip_of(octets: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(octets).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(octets).map(IpAddr::from)).ok()
}

#[expect(clippy::cast_possible_truncation, reason = "2 and 10")]
fn family_of(ip: IpAddr) -> u8 {
    let family = if ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    family.as_raw() as u8
}

pub(crate) fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value.strip_suffix(&[0]).unwrap_or(value)).into_owned()
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn u32_be(value: &[u8]) -> Option<u32> {
    value.try_into().ok().map(u32::from_be_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests {
    use std::{env, fs, process};

    use turnpike_testkit::alone;

    use super::*;

    #[test]
    fn loopback_has_an_address_and_is_not_ethernet() {
        let mut netlink = Netlink::new().expect("no privilege is needed");
        let interfaces = netlink.interfaces().expect("the kernel responds");
        let loopback = interfaces.iter().find(|interface| interface.name == "lo").expect("loopback exists");
        assert!(!loopback.is_ethernet && !loopback.is_port, "{loopback:?}");
        let addressed = netlink.with_addresses().expect("the kernel responds");
        assert_eq!(addressed.contains(&loopback.number), loopback.is_up);
    }

    #[test]
    fn lost_neighbour_notifications_differ_from_no_notifications() {
        alone::in_network_namespace(turnpike_testkit::this_test!(), || {
            alone::run("ip", &["link", "add", "one", "type", "veth", "peer", "name", "other"]);
            for device in ["one", "other"] {
                alone::run("ip", &["link", "set", device, "addrgenmode", "none", "up"]);
            }
            let news = NeighbourNews::new().expect("no privilege is needed");
            news.heard();
            let replace = |last: u32, number: u32| {
                let [high, low] = [number / 256, number % 256];
                format!(
                    "neigh replace 10.78.0.{last} lladdr 02:00:00:00:{high:02x}:{low:02x} dev one nud stale\n"
                )
            };
            let told = |lines: String| {
                let file = env::temp_dir().join(format!("turnpike-news-{}", process::id()));
                fs::write(&file, lines).expect("the table has room");
                alone::run("ip", &["-batch", file.to_str().expect("a name")]);
                fs::remove_file(&file).expect("the file exists");
                news.heard()
            };
            let few = told(replace(7, 1)).expect("one notification is not lost");
            assert_eq!(few.values().collect::<Vec<_>>(), [&true]);
            assert!(told((0..20_000).map(|n| replace(n % 100, n)).collect()).is_none());
            assert_eq!(told(replace(7, 2)).map(|few| few.len()), Some(1), "notifications continue");
        });
    }

    #[test]
    fn a_route_to_this_machine_is_not_usable() {
        let mut netlink = Netlink::new().expect("no privilege is needed");
        let here = IpAddr::from([127, 0, 0, 1]);
        assert_eq!(netlink.route(here, here).expect("the kernel responds"), None);
        // An address of another machine is not a valid source.
        let elsewhere = IpAddr::from([192, 0, 2, 1]);
        assert_eq!(netlink.route(elsewhere, here).expect("the kernel responds"), None);
    }
}
