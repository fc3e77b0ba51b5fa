//! Programs on interfaces: attached, replaced without a gap, and passed to another process.

use std::{
    ffi::{c_int, c_long},
    io,
    mem::ManuallyDrop,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

use aya::{
    programs::{
        ProgramError, SchedClassifier, TcAttachType,
        tc::{NlOptions, SchedClassifierLink, SchedClassifierLinkId, TcAttachOptions, TcHandle},
    },
    util::KernelVersion,
};
use serde::{Deserialize, Serialize};

use crate::{
    error::{OffloadError, chain},
    netlink::Interface,
};

const REACH_TC: KernelVersion = KernelVersion::new(6, 6, 0);

/// Commands of bpf(2).
const LINK_CREATE: c_long = 28;
const LINK_UPDATE: c_long = 29;
const LINK_DETACH: c_long = 34;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// Link at TC, after other programs (Linux 6.6). A firewall at ingress comes first, and the program sees
    /// changes made at egress.
    Tcx(HookDirection),
    Driver,
    /// Generic XDP, after the driver; works with any driver.
    Generic,
}

impl Kind {
    /// Attach type and flags for BPF_LINK_CREATE (linux/bpf.h, linux/if_link.h).
    fn words(self) -> [u32; 2] {
        match self {
            // BPF_TCX_INGRESS, BPF_F_AFTER.
            Self::Tcx(HookDirection::Ingress) => [46, 1 << 4],
            // BPF_TCX_EGRESS.
            Self::Tcx(HookDirection::Egress) => [47, 1 << 4],
            // BPF_XDP, XDP_FLAGS_DRV_MODE.
            Self::Driver => [37, 1 << 2],
            // XDP_FLAGS_SKB_MODE.
            Self::Generic => [37, 1 << 1],
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum HookDirection {
    #[default]
    Ingress,
    Egress,
}

impl HookDirection {
    fn attach_type(self) -> TcAttachType {
        match self {
            Self::Ingress => TcAttachType::Ingress,
            Self::Egress => TcAttachType::Egress,
        }
    }
}

/// A program on an interface. A link with a descriptor is detached when the last copy of the descriptor
/// closes.
pub(crate) enum Link {
    Tcx(OwnedFd),
    Xdp(OwnedFd),
    Filter(Filter),
}

impl Link {
    pub(crate) fn detach(self) {
        match self {
            Self::Tcx(link) | Self::Xdp(link) => drop(link),
            Self::Filter(filter) => filter.detach(),
        }
    }
}

pub(crate) fn reach_tc() -> bool {
    KernelVersion::current().is_ok_and(|it| it >= REACH_TC)
}

pub(crate) fn attach_to_tc(
    program: &mut SchedClassifier,
    name: &str,
    (interface, direction): (&Interface, HookDirection),
    by_link: bool,
) -> Result<Link, OffloadError> {
    let refused = |said| OffloadError::Attach { interface: interface.name.clone(), said };
    if by_link {
        let program = program.fd().map_err(OffloadError::program)?.as_fd();
        let link = create(program, interface.number, Kind::Tcx(direction));
        link.map(Link::Tcx).map_err(|error| refused(error.to_string()))
    } else {
        let filter = Filter::attach(program, (&interface.name, direction), name);
        filter.map(Link::Filter).map_err(|error| refused(chain(&error)))
    }
}

pub(crate) fn create(program: BorrowedFd<'_>, interface: u32, kind: Kind) -> io::Result<OwnedFd> {
    let [attach_type, flags] = kind.words();
    let link = bpf(LINK_CREATE, [number(program), interface, attach_type, flags, 0, 0, 0, 0])?;
    // SAFETY: a new descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(link) })
}

/// Atomically replaces the program of a link: each packet is seen by one of the two.
pub(crate) fn update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    bpf(LINK_UPDATE, [number(link), number(program), 0, 0, 0, 0, 0, 0]).map(drop)
}

/// Detaches a link's program immediately, even if other descriptors are open: a forked process has copies
/// until it calls exec.
pub(crate) fn detach(link: &OwnedFd) {
    // Linux before 5.9 detaches the link when its last descriptor is closed.
    let _ = bpf(LINK_DETACH, [number(link.as_fd()), 0, 0, 0, 0, 0, 0, 0]);
}

/// Calls bpf(2) with the leading words of `union bpf_attr`, as many as links use.
fn bpf(command: c_long, words: [u32; 8]) -> io::Result<RawFd> {
    // SAFETY: for these commands, the kernel reads that many bytes at the pointer and writes nothing.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, words.as_ptr(), size_of_val(&words)) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    c_int::try_from(result).map_err(io::Error::other)
}

fn number(descriptor: BorrowedFd<'_>) -> u32 {
    descriptor.as_raw_fd().cast_unsigned()
}

/// Makes a map's descriptor refer to another map, so that programs loaded later use that one.
pub(crate) fn stand_for(map: BorrowedFd<'_>, other: &OwnedFd) -> io::Result<()> {
    // SAFETY: the descriptor is open, and only its owner closes it, because it is not dropped here.
    let mut target = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(map.as_raw_fd()) });
    Ok(rustix::io::dup3(other.as_fd(), &mut target, rustix::io::DupFlags::CLOEXEC)?)
}

/// A filter on an interface (clsact): stays until detached, even after its process ends.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Filter {
    interface: String,
    priority: u16,
    handle: u32,
    #[serde(default)]
    direction: HookDirection,
}

impl Filter {
    pub(crate) fn attach(
        program: &mut SchedClassifier,
        (interface, direction): (&str, HookDirection),
        name: &str,
    ) -> Result<Self, ProgramError> {
        // An error means that the qdisc exists already.
        let _ = aya::programs::tc::qdisc_add_clsact(interface);
        // Removes the filter of a killed process.
        let _ = aya::programs::tc::qdisc_detach_program(interface, direction.attach_type(), name);
        let options = TcAttachOptions::Netlink(NlOptions::default());
        let link = program.attach_with_options(interface, direction.attach_type(), options)?;
        Self::of(program, link, (interface, direction))
    }

    pub(crate) fn replace(self, program: &mut SchedClassifier) -> Result<Self, ProgramError> {
        let there = self.attached().map_err(ProgramError::IOError)?;
        let link = program.attach_to_link(there)?;
        Self::of(program, link, (&self.interface, self.direction))
    }

    /// If the interface is gone, the kernel has already removed it.
    pub(crate) fn detach(self) {
        drop(self.attached());
    }

    fn of(
        program: &mut SchedClassifier,
        link: SchedClassifierLinkId,
        (interface, direction): (&str, HookDirection),
    ) -> Result<Self, ProgramError> {
        // Dropping the link would detach the program.
        let link = ManuallyDrop::new(program.take_link(link)?);
        Ok(Self {
            interface: interface.to_owned(),
            priority: link.priority()?,
            handle: link.handle()?.into(),
            direction,
        })
    }

    fn attached(&self) -> io::Result<SchedClassifierLink> {
        let handle = TcHandle::from(self.handle);
        let at = self.direction.attach_type();
        SchedClassifierLink::attached(&self.interface, at, self.priority, handle, None)
    }
}
