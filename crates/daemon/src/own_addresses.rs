//! The addresses of this machine, kept current for the peer rules: netlink tells when one comes or goes (rtnetlink(7)), and then all
//! are read anew.

use std::{
    collections::BTreeSet,
    io,
    net::IpAddr,
    os::fd::{AsRawFd as _, OwnedFd},
    sync::Weak,
    time::Duration,
};

use nix::{
    errno::Errno,
    ifaddrs::getifaddrs,
    libc::{RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR},
    sys::socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, SockaddrLike as _, bind,
        recv, socket,
    },
};
use tokio::time::sleep;
use turnpike_relay::Relay;
use turnpike_wire::address::canonical_ip;

/// How often news are looked for.
const LOOK: Duration = Duration::from_secs(1);

/// What this machine has, and who tells of changes.
pub(crate) struct OwnAddresses {
    /// `None` where such a socket cannot be had (seccomp, RestrictAddressFamilies of systemd): all is read anew each time.
    news: Option<OwnedFd>,
    known: BTreeSet<IpAddr>,
    /// The last reading failed, and the log has told so.
    failed: bool,
}

impl OwnAddresses {
    /// Reads them; where that cannot be, nobody can know what is ours, and the log says so.
    pub(crate) fn find() -> Option<Self> {
        let found = Self::new().inspect_err(|error| {
            tracing::warn!(
                "cannot read the addresses of this machine ({error}): of its services, peers are kept away only from those \
                 on loopback, on relay addresses and where turnpike listens; let the process open AF_NETLINK sockets"
            );
        });
        found.ok()
    }

    fn new() -> io::Result<Self> {
        // First: what changes in between is then seen once more, and not missed.
        let news = subscribe().ok();
        Ok(Self { news, known: read()?, failed: false })
    }

    pub(crate) fn list(&self) -> Vec<IpAddr> {
        self.known.iter().copied().collect()
    }

    /// Tells the relay of each change, until it is gone.
    pub(crate) async fn keep_current(mut self, relay: Weak<Relay>) {
        loop {
            sleep(LOOK).await;
            let Some(relay) = relay.upgrade() else { return };
            if !self.has_news() && !self.failed {
                continue;
            }
            let found = match read() {
                Ok(found) => found,
                Err(error) => {
                    if !self.failed {
                        tracing::warn!(
                            "cannot read the addresses of this machine ({error}): the peer rules keep those of before"
                        );
                    }
                    self.failed = true;
                    continue;
                }
            };
            self.failed = false;
            if found != self.known {
                let named = |of: &BTreeSet<IpAddr>, other: &BTreeSet<IpAddr>| {
                    of.difference(other).map(ToString::to_string).collect::<Vec<_>>().join(", ")
                };
                tracing::info!(
                    added = named(&found, &self.known),
                    removed = named(&self.known, &found),
                    "addresses of this machine have changed: the peer rules follow"
                );
                self.known = found;
                relay.set_addresses(self.list());
            }
        }
    }

    /// Whether anything may have changed since the last time.
    fn has_news(&mut self) -> bool {
        let Some(socket) = &self.news else { return true };
        let (mut heard, mut buffer) = (false, [0; 4096]);
        loop {
            // What it says does not matter, nor that some was lost (ENOBUFS): all are read anew.
            match recv(socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(1..) | Err(Errno::ENOBUFS) => heard = true,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return heard,
                Ok(0) | Err(_) => break,
            }
        }
        self.news = None;
        true
    }
}

fn subscribe() -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
    let groups = (RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR).unsigned_abs();
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
    Ok(socket)
}

/// Reads them.
pub(crate) fn read() -> io::Result<BTreeSet<IpAddr>> {
    let ip = |address: &nix::sys::socket::SockaddrStorage| match address.family()? {
        AddressFamily::Inet => address.as_sockaddr_in().map(|address| IpAddr::from(address.ip())),
        AddressFamily::Inet6 => address.as_sockaddr_in6().map(|address| IpAddr::from(address.ip())),
        _ => None,
    };
    let interfaces = getifaddrs()?;
    Ok(interfaces.filter_map(|interface| ip(interface.address.as_ref()?)).map(canonical_ip).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_addresses_of_this_machine_include_what_loopback_has() {
        assert!(read().expect("getifaddrs works here").contains(&IpAddr::from([127, 0, 0, 1])));
    }
}
