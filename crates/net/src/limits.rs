//! Limits that the kernel puts on a process.

use std::io;

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

/// Lets this thread's timed waits end when asked for rather than up to 50 us later, for generators that keep a pace
/// (PR_SET_TIMERSLACK, prctl(2)).
///
/// # Errors
/// Those of prctl(2).
pub fn exact_timers() -> io::Result<()> {
    // SAFETY: no pointers.
    sys::check(unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) }).map(|_| ())
}
