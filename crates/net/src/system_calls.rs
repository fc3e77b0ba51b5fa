//! Which system calls this process may make from now on (seccomp(2)).

use std::io;

/// One instruction of a classic BPF program (linux/filter.h): code, jumps if true and if false, and a constant.
pub type Instruction = (u16, u8, u8, u32);

/// Has the kernel ask a program about each system call of all threads, now and for good. It sets no_new_privs, without which only root may.
///
/// # Errors
/// Those of prctl(2) and seccomp(2); `InvalidInput` for a program without instructions, or with more than the kernel takes.
pub fn filter(program: &[Instruction]) -> io::Result<()> {
    let mut instructions: Vec<libc::sock_filter> =
        program.iter().map(|&(code, jt, jf, k)| libc::sock_filter { code, jt, jf, k }).collect();
    let len = u16::try_from(instructions.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = libc::sock_fprog { len, filter: instructions.as_mut_ptr() };
    rustix::thread::set_no_new_privs(true)?;
    // No stranger's code runs in this process that could look for what speculation leaves behind, so that Linux before 5.16 need not make
    // all of it slower. Linux before 4.17 knows no such wish.
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
    // SAFETY: the program and its instructions live; the kernel copies them.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, std::ptr::from_ref(program)) };
    match result {
        0 => Ok(()),
        // With TSYNC a thread that has a filter of its own is named.
        1.. => Err(io::Error::other("a thread has another filter")),
        _ => Err(io::Error::last_os_error()),
    }
}
