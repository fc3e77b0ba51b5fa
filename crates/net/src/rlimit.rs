//! Limits that the kernel puts on a process.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, RawFd},
    sync::atomic::{AtomicBool, AtomicI32, Ordering},
};

use crate::sys;

/// Raises the soft limit of open files (RLIMIT_NOFILE, getrlimit(2)) to at least `needed`, and the hard limit too
/// where the process may. Returns the soft limit in force afterwards, which may be below `needed`.
///
/// # Errors
/// Those of getrlimit(2).
pub fn raise_open_files(needed: u64) -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a live `rlimit`.
    sys::check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) })?;
    if limit.rlim_cur >= needed {
        return Ok(limit.rlim_cur);
    }
    let all = libc::rlimit { rlim_cur: needed, rlim_max: limit.rlim_max.max(needed) };
    let soft = libc::rlimit { rlim_cur: needed.min(limit.rlim_max), rlim_max: limit.rlim_max };
    for wanted in [all, soft] {
        // SAFETY: the pointer is to a live `rlimit`.
        if sys::check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const wanted) }).is_ok() {
            return Ok(wanted.rlim_cur);
        }
    }
    Ok(limit.rlim_cur)
}

/// Descriptors from here on are not for this crate's sockets and pipes.
static FIRST_SET_APART: AtomicI32 = AtomicI32::new(RawFd::MAX);
/// Whether those before were all in use when one was last asked for.
static FULL: AtomicBool = AtomicBool::new(false);

/// Keeps `wanted` descriptors free of this crate's sockets and pipes, from now on and for the whole process: those with the highest
/// numbers that RLIMIT_NOFILE allows, for the kernel always gives the lowest that is free. At most an eighth of the limit. Whoever
/// would get one of them is told EMFILE, as if the limit were that much lower. Returns how many are set apart.
///
/// # Errors
/// Those of getrlimit(2).
pub fn set_apart(wanted: u64) -> io::Result<u64> {
    // It need not be raised to be known.
    let limit = raise_open_files(0)?;
    let apart = wanted.min(limit / 8);
    FIRST_SET_APART.store(RawFd::try_from(limit - apart).unwrap_or(RawFd::MAX), Ordering::Relaxed);
    Ok(apart)
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
    // SAFETY: no pointers.
    sys::check(unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) }).map(|_| ())
}
