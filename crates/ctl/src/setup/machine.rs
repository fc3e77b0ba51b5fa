//! Facts about this machine that the questions offer as defaults, and checks of the answers against them.

use std::{
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs as _, UdpSocket},
};

use turnpike_config::Settings;
use turnpike_relay::{route_addresses, source_of_route};
use turnpike_wire::address::is_private;

use crate::setup::{
    answers::{HTTPS, HostName},
    error::SetupError,
};

const HTTP: u16 = 80;

pub(crate) struct Machine {
    /// Source addresses of the default routes.
    own: Vec<IpAddr>,
    /// Asks the cloud's metadata service.
    cloud_address: fn() -> Option<IpAddr>,
    /// The service is running, so its ports are in use.
    pub(crate) is_serving: bool,
}

impl Machine {
    pub(crate) fn new(cloud_address: fn() -> Option<IpAddr>, is_serving: bool) -> Self {
        Self { own: route_addresses(), cloud_address, is_serving }
    }

    /// IPv4 address of the default route, else loopback.
    pub(crate) fn address(&self) -> IpAddr {
        self.own.iter().copied().find(IpAddr::is_ipv4).unwrap_or(Ipv4Addr::LOCALHOST.into())
    }

    /// Public address of the NAT in front of this machine. `named` are the addresses of its DNS name.
    pub(crate) fn public(&self, named: &[IpAddr]) -> Option<IpAddr> {
        let is_outside = |ip: &IpAddr| ip.is_ipv4() && !is_private(*ip);
        let own = self.own.iter().find(|ip| ip.is_ipv4())?;
        if is_outside(own) {
            return None;
        }
        (self.cloud_address)().filter(is_outside).or_else(|| named.iter().copied().find(is_outside))
    }

    pub(crate) fn is_https_taken(&self) -> bool {
        let address = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), HTTPS);
        !self.is_serving && bind_error(address, false) == Some(ErrorKind::AddrInUse)
    }

    /// Fails if a port that the server needs is in use or needs root.
    pub(crate) fn check_ports(&self, settings: &Settings) -> Result<(), SetupError> {
        if self.is_serving {
            return Ok(());
        }
        let clients = settings.listen.iter().map(|address| (*address, true));
        let others = settings.credentials.listen.iter().chain(settings.http_challenge_listeners());
        for (address, has_udp) in clients.chain(others.map(|address| (*address, false))) {
            let port = address.port();
            match bind_error(address, has_udp) {
                Some(ErrorKind::AddrInUse) => {
                    return SetupError::answer(format!("port {port} is in use: {}", remedy(port)));
                }
                Some(ErrorKind::PermissionDenied) => {
                    return SetupError::answer(format!(
                        "port {port} needs root: run turnpike setup with sudo, or choose other answers"
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn remedy(port: u16) -> String {
    match port {
        HTTP => "the certificate authority checks the name on this port, so stop the program that uses it, or answer yes for port 443"
            .to_owned(),
        HTTPS => "move the web server to another address, such as 127.0.0.1:8443, and answer with that address, or answer no"
            .to_owned(),
        _ => format!("stop the program that uses it (ss -lntup 'sport = {port}'), or choose another port with --listen"),
    }
}

fn bind_error(address: SocketAddr, has_udp: bool) -> Option<ErrorKind> {
    let udp = || has_udp.then(|| UdpSocket::bind(address))?.err();
    TcpListener::bind(address).err().or_else(udp).map(|error| error.kind())
}

pub(crate) fn has_ipv6() -> bool {
    UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).is_ok()
}

pub(crate) fn is_own(ip: IpAddr) -> bool {
    ip.is_loopback() || source_of_route(SocketAddr::new(ip, 9)) == Some(ip)
}

/// Addresses of a DNS name; empty if it has none.
pub(crate) fn resolve(name: Option<&HostName>) -> Vec<IpAddr> {
    let found = name.map(|name| (name.to_string().as_str(), 0).to_socket_addrs());
    let found: io::Result<Vec<SocketAddr>> =
        found.map_or(Ok(Vec::new()), |found| found.map(Iterator::collect));
    let mut found: Vec<IpAddr> = found.unwrap_or_default().iter().map(SocketAddr::ip).collect();
    found.dedup();
    found
}

/// Warning about a DNS name that does not resolve to this machine.
pub(crate) fn name_warning(name: &HostName, named: &[IpAddr], here: IpAddr) -> Option<String> {
    let Some(other) = named.iter().find(|ip| **ip != here && !is_own(**ip)) else {
        return named.is_empty().then(|| {
            format!("{name} has no address: add a DNS record with {here}, so that clients find this server")
        });
    };
    Some(format!(
        "{name} resolves to {other}, which is neither an address of this machine nor its public address: correct the DNS record, or \
         give --public-address {other} if a NAT has it"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn machine(own: &[&str], cloud_address: fn() -> Option<IpAddr>) -> Machine {
        Machine { own: own.iter().map(|own| ip(own)).collect(), cloud_address, is_serving: false }
    }

    #[test]
    fn a_nat_is_detected_from_the_cloud_or_the_name() {
        let cloud = || Some(IpAddr::from([203, 0, 113, 5]));
        let private = ["10.0.0.5", "2001:db8::5"];
        for (own, cloud, named, public) in [
            (&private[..], cloud as fn() -> _, &[][..], Some("203.0.113.5")),
            (&private, cloud, &["198.51.100.7"], Some("203.0.113.5")),
            (&private, || None, &["2001:db8::5", "198.51.100.7"], Some("198.51.100.7")),
            (&private, || None, &["10.0.0.5"], None),
            (&private, || Some(IpAddr::from([10, 0, 0, 5])), &[], None),
            (&["203.0.113.9"], cloud, &["198.51.100.7"], None),
            (&["2001:db8::5"], cloud, &[], None),
            (&[], cloud, &[], None),
        ] {
            let named: Vec<IpAddr> = named.iter().map(|named| ip(named)).collect();
            assert_eq!(machine(own, cloud).public(&named), public.map(ip), "{own:?} {named:?}");
        }
    }

    #[test]
    fn a_name_that_does_not_resolve_to_this_machine_gets_a_warning() {
        let name: HostName = "turn.example.org".parse().expect("a name");
        let here = ip("203.0.113.5");
        let warning = |named: &[&str]| {
            name_warning(&name, &named.iter().map(|named| ip(named)).collect::<Vec<_>>(), here)
        };
        assert_eq!(warning(&["203.0.113.5", "127.0.0.1"]), None);
        for (named, words) in [
            (&[][..], "has no address: add a DNS record with 203.0.113.5"),
            (&["198.51.100.7"], "resolves to 198.51.100.7"),
            (&["203.0.113.5", "198.51.100.7"], "give --public-address 198.51.100.7"),
        ] {
            assert!(warning(named).is_some_and(|warning| warning.contains(words)), "{named:?}");
        }
    }
}
