//! Data paths: system calls for receiving and sending datagrams, from basic to fast.

use std::{
    fmt, io,
    net::{Ipv4Addr, SocketAddr},
    os::fd::AsFd,
    str::FromStr,
};

use crate::{UdpOptions, UdpSocket, sys};

/// Data paths, slowest first. `--datapath auto` uses [`Datapath::best`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Datapath {
    /// recvmsg, sendmsg: one datagram per call.
    Basic,
    /// recvmmsg, sendmmsg: several datagrams per call, each passing through the network stack on its own.
    Mmsg,
    /// recvmmsg of GRO buffers, sendmmsg of GSO super-packets.
    Gso,
}

impl Datapath {
    /// Fastest data path that this kernel supports, and the reason in one sentence.
    pub fn best() -> (Self, String) {
        match probe_segmentation() {
            Ok(()) => (Self::Gso, "the kernel has UDP_GRO and UDP_SEGMENT".to_owned()),
            Err(error) => (Self::Mmsg, format!("the kernel refused UDP_GRO or UDP_SEGMENT: {error}")),
        }
    }
}

/// Fails unless the kernel has UDP_SEGMENT (Linux 4.18) and UDP_GRO (5.0; udp(7)). Binding the wildcard
/// address works even if no interface is up.
fn probe_segmentation() -> io::Result<()> {
    let anywhere = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let socket = UdpSocket::bind(anywhere, &UdpOptions { gro: true, ..UdpOptions::default() })?;
    sys::set_option(socket.as_fd(), sys::SOL_UDP, sys::UDP_SEGMENT, 1200)
}

impl fmt::Display for Datapath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Basic => "basic",
            Self::Mmsg => "mmsg",
            Self::Gso => "gso",
        })
    }
}

impl FromStr for Datapath {
    type Err = String;

    /// `auto` gives [`Datapath::best`].
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "auto" => Ok(Self::best().0),
            "basic" => Ok(Self::Basic),
            "mmsg" => Ok(Self::Mmsg),
            "gso" => Ok(Self::Gso),
            other => Err(format!("unknown data path {other:?}: expected auto, basic, mmsg or gso")),
        }
    }
}
