//! Limits that the kernel puts on a process.

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

/// Raises the soft limit of open files (RLIMIT_NOFILE, getrlimit(2)) to at least `needed`, and the hard limit too
/// where the process may. Returns the soft limit in force afterwards, which may be below `needed`.
pub fn raise_open_files(needed: u64) -> u64 {
    let limit = getrlimit(Resource::Nofile);
    // `None` is without a limit.
    let (current, maximum) = (limit.current.unwrap_or(u64::MAX), limit.maximum.unwrap_or(u64::MAX));
    if current >= needed {
        return current;
    }
    let all = Rlimit { current: Some(needed), maximum: Some(maximum.max(needed)) };
    let soft = Rlimit { current: Some(needed.min(maximum)), maximum: limit.maximum };
    let raised = [all, soft].into_iter().find(|wanted| setrlimit(Resource::Nofile, *wanted).is_ok());
    raised.and_then(|limit| limit.current).unwrap_or(current)
}

/// Has the kernel make its table of this process's descriptors large enough for `most` of them (at most as many as RLIMIT_NOFILE
/// allows), 8 bytes each. By itself it doubles whenever it is full, and in a process of several threads waits each time until all
/// processors have passed a certain point (`expand_fdtable`): 16 ms on an idle machine, in which no thread gets a descriptor.
///
/// # Errors
/// Those of fcntl(2) with F_DUPFD_CLOEXEC: EMFILE without a descriptor for a moment, ENOMEM.
pub fn make_room(most: u64) -> io::Result<()> {
    let limit = raise_open_files(0);
    let last = RawFd::try_from(most.min(limit).saturating_sub(1)).unwrap_or(RawFd::MAX);
    rustix::io::fcntl_dupfd_cloexec(File::open("/dev/null")?, last)?;
    Ok(())
}

/// Descriptors from here on are not for this crate's sockets and pipes.
static FIRST_SET_APART: AtomicI32 = AtomicI32::new(RawFd::MAX);
/// Whether those before were all in use when one was last asked for.
static FULL: AtomicBool = AtomicBool::new(false);

/// Keeps `wanted` descriptors free of this crate's sockets and pipes, from now on and for the whole process: those with the highest
/// numbers that RLIMIT_NOFILE allows, for the kernel always gives the lowest that is free. At most an eighth of the limit. A
/// call that would get one of them fails with EMFILE, as if the limit were that much lower. Returns how many are set apart.
pub fn set_apart(wanted: u64) -> u64 {
    // It need not be raised to be known.
    let limit = raise_open_files(0);
    let apart = wanted.min(limit / 8);
    FIRST_SET_APART.store(RawFd::try_from(limit - apart).unwrap_or(RawFd::MAX), Ordering::Relaxed);
    apart
}

/// Closes a descriptor that is none of ours.
///
/// # Errors
/// EMFILE.
pub(crate) fn ours<T: AsFd>(descriptor: T) -> io::Result<T> {
    let full = descriptor.as_fd().as_raw_fd() >= FIRST_SET_APART.load(Ordering::Relaxed);
    if full || FULL.load(Ordering::Relaxed) {
        FULL.store(full, Ordering::Relaxed);
    }
    if full { Err(io::Error::from_raw_os_error(libc::EMFILE)) } else { Ok(descriptor) }
}

/// Asked before a connection is accepted, which would be lost if there were no descriptor for it. Costs a system call only while
/// there were none lately.
///
/// # Errors
/// EMFILE, and what dup(2) says.
pub(crate) fn room_for_one(any: impl AsFd) -> io::Result<()> {
    if FULL.load(Ordering::Relaxed) {
        ours(any.as_fd().try_clone_to_owned()?)?;
    }
    Ok(())
}

/// Lets this thread's timed waits end when asked for rather than up to 50 us later, for generators that keep a pace
/// (PR_SET_TIMERSLACK, prctl(2)).
///
/// # Errors
/// Those of prctl(2).
pub fn exact_timers() -> io::Result<()> {
    Ok(set_current_timer_slack(NonZeroU64::new(1))?)
}
