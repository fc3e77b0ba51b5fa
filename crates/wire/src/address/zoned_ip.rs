//! IP addresses, with a zone for link-local ones (RFC 4007 section 11): `192.0.2.1`, `fe80::1%eth0`.

use std::{
    fmt, io,
    net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, ToSocketAddrs as _},
    str::FromStr,
};

/// IP address and interface index; 0 without a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ZonedIp {
    ip: IpAddr,
    zone: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("not an address")]
    Form,
    #[error("this machine has no interface of that name")]
    NoSuchInterface,
}

impl ZonedIp {
    #[must_use]
    pub fn ip(self) -> IpAddr {
        self.ip
    }

    #[must_use]
    pub fn at(self, port: u16) -> SocketAddr {
        match self.ip {
            IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, self.zone).into(),
            ip => SocketAddr::new(ip, port),
        }
    }

    /// Resolves a host with getaddrinfo(3), in its order (RFC 6724), without duplicates. An address with a
    /// zone resolves to itself.
    pub fn look_up(host: &str) -> io::Result<Vec<Self>> {
        let mut addresses: Vec<Self> = Vec::new();
        for address in (host, 0).to_socket_addrs()? {
            let zone = if let SocketAddr::V6(v6) = address { v6.scope_id() } else { 0 };
            let address = Self { ip: address.ip(), zone };
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        Ok(addresses)
    }
}

/// Splits `ADDRESS%ZONE`; `None` without a zone.
#[must_use]
pub fn split_zone(text: &str) -> Option<(Ipv6Addr, &str)> {
    let (address, zone) = text.split_once('%')?;
    let is_name = !zone.is_empty() && !zone.contains(|c: char| c.is_whitespace() || "/[]%".contains(c));
    address.parse().ok().filter(|_| is_name).map(|address| (address, zone))
}

/// Parses `ADDR:PORT` with IPv6 in brackets and an optional zone: `[fe80::1%eth0]:3478`.
pub fn socket_address(text: &str) -> Result<SocketAddr, AddressError> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let zoned = text.strip_prefix('[').and_then(|rest| rest.split_once("]:")).ok_or(AddressError::Form)?;
    let port = zoned.1.parse().map_err(|_| AddressError::Form)?;
    Ok(zoned.0.parse::<ZonedIp>()?.at(port))
}

impl FromStr for ZonedIp {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        match split_zone(text) {
            None => text.parse::<IpAddr>().map(Self::from).map_err(|_| AddressError::Form),
            // getaddrinfo(3) understands interface names and sends no DNS query for an address.
            Some(_) => {
                let found = Self::look_up(text).ok().and_then(|found| found.first().copied());
                found.ok_or(AddressError::NoSuchInterface)
            }
        }
    }
}

impl fmt::Display for ZonedIp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ip.fmt(f)?;
        if self.zone == 0 { Ok(()) } else { write!(f, "%{}", self.zone) }
    }
}

impl<T: Into<IpAddr>> From<T> for ZonedIp {
    fn from(ip: T) -> Self {
        Self { ip: ip.into(), zone: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_may_name_the_interface_of_their_link() {
        let zone = |text: &str| match socket_address(text) {
            Ok(SocketAddr::V6(at)) => Ok((at.port(), at.scope_id())),
            other => Err(other),
        };
        assert_eq!(zone("[fe80::1%7]:3478"), Ok((3478, 7)));
        assert_eq!(zone("[fe80::1%lo]:0"), Ok((0, 1)));
        assert_eq!(zone("[fe80::1]:3478"), Ok((3478, 0)));
        assert_eq!(socket_address("127.0.0.1:9"), Ok(([127, 0, 0, 1], 9).into()));
        assert_eq!(socket_address("[fe80::1%nowhere9]:3478"), Err(AddressError::NoSuchInterface));
        for text in
            ["[fe80::1%lo]", "fe80::1%lo:3478", "[a%lo]:1", "[::1%lo]:70000", "[%lo]:1", "[fe80::1%]:1"]
        {
            assert_eq!(socket_address(text), Err(AddressError::Form), "{text}");
        }
    }

    #[test]
    fn addresses_without_a_port_are_read_and_shown() {
        for (text, shown) in [("192.0.2.1", "192.0.2.1"), ("::1", "::1"), ("fe80::1%lo", "fe80::1%1")] {
            assert_eq!(text.parse::<ZonedIp>().map(|ip| ip.to_string()), Ok(shown.to_owned()));
        }
        assert_eq!(split_zone("fe80::1%wg 0"), None);
        assert_eq!(split_zone("10.0.0.1%lo"), None);
    }
}
