//! Programs at interfaces: attached, replaced by others without a moment in between, and given to another process.

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

/// Since when programs are attached to TC by links.
const REACH_TC: KernelVersion = KernelVersion::new(6, 6, 0);

/// Commands of bpf(2).
const LINK_CREATE: c_long = 28;
const LINK_UPDATE: c_long = 29;
const LINK_DETACH: c_long = 34;

/// How a link attaches a program to an interface.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// At TC ingress, behind what others have there: a firewall comes first (Linux 6.6).
    Tcx,
    /// By the driver.
    Driver,
    /// By any driver, behind it.
    Generic,
}

impl Kind {
    /// What BPF_LINK_CREATE calls it: kind of attachment and flags (linux/bpf.h, linux/if_link.h).
    fn words(self) -> [u32; 2] {
        match self {
            // BPF_TCX_INGRESS, BPF_F_AFTER.
            Self::Tcx => [46, 1 << 4],
            // BPF_XDP, XDP_FLAGS_DRV_MODE.
            Self::Driver => [37, 1 << 2],
            // XDP_FLAGS_SKB_MODE.
            Self::Generic => [37, 1 << 1],
        }
    }
}

/// A program at an interface. Those with a descriptor end when the last one of them is closed.
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

/// Whether this kernel attaches to TC by links.
pub(crate) fn reach_tc() -> bool {
    KernelVersion::current().is_ok_and(|it| it >= REACH_TC)
}

/// Attaches the program of this `name` to an interface's TC ingress; by a link, or as a filter.
pub(crate) fn attach_to_tc(
    program: &mut SchedClassifier,
    name: &str,
    interface: &Interface,
    by_link: bool,
) -> Result<Link, OffloadError> {
    let refused = |said| OffloadError::Attach { interface: interface.name.clone(), said };
    if by_link {
        let program = program.fd().map_err(OffloadError::program)?.as_fd();
        let link = create(program, interface.number, Kind::Tcx);
        link.map(Link::Tcx).map_err(|error| refused(error.to_string()))
    } else {
        let filter = Filter::attach(program, &interface.name, name);
        filter.map(Link::Filter).map_err(|error| refused(chain(&error)))
    }
}

/// Attaches a program to an interface for as long as somebody has a descriptor of the link.
pub(crate) fn create(program: BorrowedFd<'_>, interface: u32, kind: Kind) -> io::Result<OwnedFd> {
    let [attach_type, flags] = kind.words();
    let link = bpf(LINK_CREATE, [number(program), interface, attach_type, flags, 0, 0, 0, 0])?;
    // SAFETY: it has just been opened, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(link) })
}

/// Has this program take the place of the one of a link: each packet is seen by the one or the other.
pub(crate) fn update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    bpf(LINK_UPDATE, [number(link), number(program), 0, 0, 0, 0, 0, 0]).map(drop)
}

/// Takes the program of a link from its interface now, whoever else has a descriptor of it: a process that is just being made has one until
/// it runs its program.
pub(crate) fn detach(link: &OwnedFd) {
    // Where the kernel cannot (Linux 5.9), the last descriptor that is closed does it.
    let _ = bpf(LINK_DETACH, [number(link.as_fd()), 0, 0, 0, 0, 0, 0, 0]);
}

/// Calls bpf(2) with the first words of `union bpf_attr`, as far as links have any.
fn bpf(command: c_long, words: [u32; 8]) -> io::Result<RawFd> {
    // SAFETY: for these commands the kernel reads so many bytes from there, and writes nothing.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, words.as_ptr(), size_of_val(&words)) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    c_int::try_from(result).map_err(io::Error::other)
}

fn number(descriptor: BorrowedFd<'_>) -> u32 {
    // One that is open is not negative.
    descriptor.as_raw_fd().cast_unsigned()
}

/// Has the descriptor of a map stand for another map, so that programs that name it by this descriptor, and are still to be loaded, have that
/// one.
pub(crate) fn stand_for(map: BorrowedFd<'_>, other: &OwnedFd) -> io::Result<()> {
    // SAFETY: it is open, and whoever owns it closes it: here it is not dropped.
    let mut target = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(map.as_raw_fd()) });
    Ok(rustix::io::dup3(other.as_fd(), &mut target, rustix::io::DupFlags::CLOEXEC)?)
}

/// A filter of an interface (clsact): it stays until it is detached, also when its process ends.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Filter {
    interface: String,
    priority: u16,
    handle: u32,
}

impl Filter {
    /// Attaches a program; one of this `name` that is there already goes.
    pub(crate) fn attach(
        program: &mut SchedClassifier,
        interface: &str,
        name: &str,
    ) -> Result<Self, ProgramError> {
        // An error means that there is one already.
        let _ = aya::programs::tc::qdisc_add_clsact(interface);
        // What a process left that was killed.
        let _ = aya::programs::tc::qdisc_detach_program(interface, TcAttachType::Ingress, name);
        let options = TcAttachOptions::Netlink(NlOptions::default());
        let link = program.attach_with_options(interface, TcAttachType::Ingress, options)?;
        Self::of(program, link, interface)
    }

    /// Has this program take the place of the one that is there, as [`update`] does.
    pub(crate) fn replace(self, program: &mut SchedClassifier) -> Result<Self, ProgramError> {
        let Self { interface, priority, handle } = self;
        let there = attached(&interface, priority, handle).map_err(ProgramError::IOError)?;
        let link = program.attach_to_link(there)?;
        Self::of(program, link, &interface)
    }

    /// Of an interface that is no more, the kernel has removed it.
    pub(crate) fn detach(self) {
        drop(attached(&self.interface, self.priority, self.handle));
    }

    fn of(
        program: &mut SchedClassifier,
        link: SchedClassifierLinkId,
        interface: &str,
    ) -> Result<Self, ProgramError> {
        // Dropped, it would be detached.
        let link = ManuallyDrop::new(program.take_link(link)?);
        Ok(Self {
            interface: interface.to_owned(),
            priority: link.priority()?,
            handle: link.handle()?.into(),
        })
    }
}

fn attached(interface: &str, priority: u16, handle: u32) -> io::Result<SchedClassifierLink> {
    let handle = TcHandle::from(handle);
    SchedClassifierLink::attached(interface, TcAttachType::Ingress, priority, handle, None)
}
