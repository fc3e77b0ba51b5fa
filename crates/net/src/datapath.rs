//! The ladder of data paths: how datagrams enter and leave.

use std::{fmt, str::FromStr};

/// A step of the ladder. `--datapath auto` takes the highest that works, see [`Datapath::best`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Datapath {
    /// recvmsg, sendmsg: one datagram a call.
    Basic,
    /// recvmmsg, sendmmsg: several datagrams a call, each still walks the stack alone.
    Mmsg,
    /// recvmmsg of GRO buffers, sendmmsg of GSO super-packets.
    Gso,
}

impl Datapath {
    /// The highest step that this kernel supports, and in one sentence why none above it.
    #[must_use]
    pub fn best() -> (Self, String) {
        todo!()
    }
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

/// The name is none of `auto`, `basic`, `mmsg`, `gso`.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown data path {0:?}: expected auto, basic, mmsg or gso")]
pub struct UnknownDatapath(String);

impl FromStr for Datapath {
    type Err = UnknownDatapath;

    /// `auto` gives [`Datapath::best`].
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "auto" => Ok(Self::best().0),
            "basic" => Ok(Self::Basic),
            "mmsg" => Ok(Self::Mmsg),
            "gso" => Ok(Self::Gso),
            other => Err(UnknownDatapath(other.to_owned())),
        }
    }
}
