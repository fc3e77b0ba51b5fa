//! System call filter of this process (seccomp(2)).

use std::io;

/// Installs a filter for all threads, permanently. Also sets no_new_privs, without which unprivileged
/// processes may not install filters. `InvalidInput` if the program is empty or exceeds the kernel's limit.
/// Instructions (linux/filter.h): code, jump offsets if true and if false, constant.
pub fn filter(program: &[(u16, u8, u8, u32)]) -> io::Result<()> {
    let mut instructions: Vec<libc::sock_filter> =
        program.iter().map(|&(code, jt, jf, k)| libc::sock_filter { code, jt, jf, k }).collect();
    let len = u16::try_from(instructions.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = libc::sock_fprog { len, filter: instructions.as_mut_ptr() };
    rustix::thread::set_no_new_privs(true)?;
    // The process runs no untrusted code that could exploit speculation, so it opts out of the mitigation
    // that Linux before 5.16 enables along with a filter. Linux before 4.17 does not have the flag.
    let as_fast = libc::SECCOMP_FILTER_FLAG_TSYNC | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    match seccomp(&program, as_fast) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            seccomp(&program, libc::SECCOMP_FILTER_FLAG_TSYNC)
        }
        result => result,
    }
}

fn seccomp(program: &libc::sock_fprog, flags: libc::c_ulong) -> io::Result<()> {
    let mode = libc::SECCOMP_SET_MODE_FILTER;
    // SAFETY: the program and its instructions live until the call returns, and the kernel copies them.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, std::ptr::from_ref(program)) };
    match result {
        0 => Ok(()),
        // A positive result with TSYNC is the ID of a thread that has a different filter.
        1.. => Err(io::Error::other("a thread has a different filter")),
        _ => Err(io::Error::last_os_error()),
    }
}
