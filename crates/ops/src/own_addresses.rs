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
use tokio::{io::unix::AsyncFd, time::sleep};
use turnpike_relay::Relay;
use turnpike_wire::address::canonical_ip;

/// How often the addresses are read where netlink tells nothing.
const WITHOUT_NEWS: Duration = Duration::from_secs(1);
/// Changes come in bursts, when an interface or a container starts: no more than ten readings a second.
const BETWEEN_READINGS: Duration = Duration::from_millis(100);

/// What this machine has, and who tells of changes.
pub(crate) struct OwnAddresses {
    /// `None` where such a socket cannot be had (seccomp, RestrictAddressFamilies of systemd).
    news: Option<AsyncFd<OwnedFd>>,
    known: BTreeSet<IpAddr>,
}

impl OwnAddresses {
    /// Reads them. Within a tokio runtime.
    ///
    /// # Errors
    /// The kernel's answer; nobody can know then what is ours.
    pub(crate) fn new() -> io::Result<Self> {
        // First: what changes in between is then seen once more, and not missed.
        let news = subscribe().and_then(AsyncFd::new).ok();
        Ok(Self { news, known: read()? })
    }

    pub(crate) fn list(&self) -> Vec<IpAddr> {
        self.known.iter().copied().collect()
    }

    /// Tells the relay of each change, until it is gone.
    pub(crate) async fn keep_current(mut self, relay: Weak<Relay>) {
        loop {
            self.changed().await;
            let Some(relay) = relay.upgrade() else { return };
            match read() {
                Ok(found) if found != self.known => {
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
                Ok(_) => {}
                Err(error) => tracing::warn!(
                    "cannot read the addresses of this machine ({error}): the peer rules keep those of before"
                ),
            }
            drop(relay);
            sleep(BETWEEN_READINGS).await;
        }
    }

    /// Waits for news, or for the time to look without.
    async fn changed(&mut self) {
        let Some(news) = &self.news else { return sleep(WITHOUT_NEWS).await };
        let Ok(mut ready) = news.readable().await else {
            self.news = None;
            return;
        };
        // What it says does not matter, nor that some was lost (ENOBUFS): all are read anew.
        let mut buffer = [0; 4096];
        loop {
            match recv(news.get_ref().as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Err(Errno::EAGAIN) => return ready.clear_ready(),
                Ok(_) | Err(Errno::ENOBUFS | Errno::EINTR) => {}
                Err(_) => break,
            }
        }
        drop(ready);
        self.news = None;
    }
}

fn subscribe() -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
    let groups = (RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR).unsigned_abs();
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
    Ok(socket)
}

fn read() -> io::Result<BTreeSet<IpAddr>> {
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
