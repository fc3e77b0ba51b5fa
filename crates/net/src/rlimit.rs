//! Descriptor limits and timer slack of the process.

use std::{
    fs::File,
    io,
    num::NonZeroU64,
    os::fd::{AsFd, AsRawFd, RawFd},
    sync::atomic::{AtomicBool, AtomicI32, Ordering},
};

use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::set_current_timer_slack,
};

/// Raises RLIMIT_NOFILE (getrlimit(2)) to at least `needed`, including the hard limit if permitted. Returns
/// the soft limit in effect, which may be below `needed`.
pub fn raise_open_files(needed: u64) -> u64 {
    let limit = getrlimit(Resource::Nofile);
    // `None` means unlimited.
    let (current, maximum) = (limit.current.unwrap_or(u64::MAX), limit.maximum.unwrap_or(u64::MAX));
    if current >= needed {
        return current;
    }
    let all = Rlimit { current: Some(needed), maximum: Some(maximum.max(needed)) };
    let soft = Rlimit { current: Some(needed.min(maximum)), maximum: limit.maximum };
    let raised = [all, soft].into_iter().find(|wanted| setrlimit(Resource::Nofile, *wanted).is_ok());
    raised.and_then(|limit| limit.current).unwrap_or(current)
}

/// Makes the kernel allocate a descriptor table for `most` descriptors (limited by RLIMIT_NOFILE), 8 bytes
/// each. Otherwise the table doubles when full, and in a multi-threaded process each doubling waits for an
/// RCU grace period (`expand_fdtable`), 16 ms on an idle machine, during which no thread can open a
/// descriptor. Fails with EMFILE if no descriptor is free, or with ENOMEM.
pub fn make_room(most: u64) -> io::Result<()> {
    let limit = raise_open_files(0);
    let last = RawFd::try_from(most.min(limit).saturating_sub(1)).unwrap_or(RawFd::MAX);
    rustix::io::fcntl_dupfd_cloexec(File::open("/dev/null")?, last)?;
    Ok(())
}

/// First reserved descriptor. This crate's sockets and pipes use only lower numbers.
static FIRST_SET_APART: AtomicI32 = AtomicI32::new(RawFd::MAX);
/// True if the last request for a descriptor got a reserved one.
static FULL: AtomicBool = AtomicBool::new(false);

/// Reserves the `wanted` highest descriptors below RLIMIT_NOFILE, but at most an eighth of them, permanently
/// for the whole process. The kernel always returns the lowest free number; if this crate gets a reserved
/// one, the call fails with EMFILE. Returns the number of reserved descriptors.
pub fn set_apart(wanted: u64) -> u64 {
    // Reads the limit without raising it.
    let limit = raise_open_files(0);
    let apart = wanted.min(limit / 8);
    FIRST_SET_APART.store(RawFd::try_from(limit - apart).unwrap_or(RawFd::MAX), Ordering::Relaxed);
    apart
}

/// Returns the descriptor, but closes a reserved one and returns EMFILE. Every socket and pipe for a client
/// goes through this function.
pub fn unreserved<T: AsFd>(descriptor: T) -> io::Result<T> {
    let full = descriptor.as_fd().as_raw_fd() >= FIRST_SET_APART.load(Ordering::Relaxed);
    if full || FULL.load(Ordering::Relaxed) {
        FULL.store(full, Ordering::Relaxed);
    }
    if full { Err(io::Error::from_raw_os_error(libc::EMFILE)) } else { Ok(descriptor) }
}

/// Checks for a free descriptor before accept(2), which would otherwise lose the connection. Costs a system
/// call only while descriptors have run out.
pub(crate) fn room_for_one(any: impl AsFd) -> io::Result<()> {
    if FULL.load(Ordering::Relaxed) {
        unreserved(any.as_fd().try_clone_to_owned()?)?;
    }
    Ok(())
}

/// Sets the timer slack of this thread to the minimum (PR_SET_TIMERSLACK, prctl(2)). By default, timed waits
/// end up to 50 us late.
pub fn exact_timers() -> io::Result<()> {
    Ok(set_current_timer_slack(NonZeroU64::new(1))?)
}
