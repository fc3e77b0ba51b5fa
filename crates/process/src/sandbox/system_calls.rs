//! Restricts system calls with seccomp to a list: those that turnpike and its libraries make, and those
//! needed to start a new program. Other calls kill the process in development builds, so that tests notice
//! them; in a release build they fail with EPERM.
//!
//! Calls newer than this version fail with ENOSYS in both builds, so that newer libraries fall back to older
//! calls.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen::Dword, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};
use turnpike_net::{SIOCATMARK, system_calls};

use super::Layers;

pub(super) const OTHERS: &str =
    if cfg!(debug_assertions) { "any other kills the process" } else { "any other is refused" };

const OTHER: SeccompAction = if cfg!(debug_assertions) {
    SeccompAction::KillProcess
} else {
    SeccompAction::Errno(libc::EPERM as u32)
};

/// Restricts this process, and returns the number of allowed calls. `bpf` also allows bpf(2), for loading
/// eBPF programs.
pub(super) fn restrict(bpf: bool, layers: &mut Layers) -> Result<u64, String> {
    let (count, programs) = programs(bpf, OTHER)?;
    install(&programs, layers)?;
    Ok(count as u64)
}

fn install(programs: &[BpfProgram], layers: &mut Layers) -> Result<(), String> {
    for program in programs {
        let program: Vec<_> = program.iter().map(|it| (it.code, it.jt, it.jf, it.k)).collect();
        layers
            .add(&program, || system_calls::filter(&program))
            .map_err(|error| format!("the kernel refused the filter ({error})"))?;
    }
    Ok(())
}

/// Compiles two filters: the allowed calls, and the response to unknown ones. The kernel applies the stricter
/// result; if both filters return an error, that of the filter installed last. Calls that both always allow,
/// such as those of the data path, skip the filters (Linux 5.11).
fn programs(bpf: bool, other: SeccompAction) -> Result<(usize, [BpfProgram; 2]), String> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)
        .map_err(|_| format!("no list of system calls for {}", std::env::consts::ARCH))?;
    let compile = || -> Result<_, BackendError> {
        let allowed = allowed(bpf)?;
        // Excludes calls that get ENOSYS from the second filter.
        let count =
            allowed.keys().filter(|call| !UNKNOWN.contains(call) && **call != libc::SYS_clone3).count();
        let known = SeccompFilter::new(allowed, other, SeccompAction::Allow, arch)?;
        let unknown =
            UNKNOWN.chain([libc::SYS_clone3]).map(|call| (call, Vec::new())).collect::<BTreeMap<_, _>>();
        let missing = SeccompAction::Errno(libc::ENOSYS as u32);
        let unknown = SeccompFilter::new(unknown, SeccompAction::Allow, missing, arch)?;
        Ok((count, [BpfProgram::try_from(known)?, BpfProgram::try_from(unknown)?]))
    };
    compile().map_err(|error| error.to_string())
}

/// Numbers of calls newer than this list, the same on all architectures: Linux 6.18 has none of them.
const UNKNOWN: std::ops::Range<libc::c_long> = 470..700;

fn allowed(bpf: bool) -> Result<BTreeMap<libc::c_long, Vec<SeccompRule>>, BackendError> {
    let always = COMMON.iter().chain(OF_ARCHITECTURE).copied().chain(UNKNOWN).chain([libc::SYS_clone3]);
    let bpf = bpf.then_some(libc::SYS_bpf);
    let mut allowed: BTreeMap<_, Vec<SeccompRule>> =
        always.chain(bpf).map(|call| (call, Vec::new())).collect();
    let any_of = |argument: u8, values: &[u32]| -> Result<Vec<SeccompRule>, BackendError> {
        values.iter().map(|value| only_if(argument, SeccompCmpOp::Eq, *value)).collect()
    };
    allowed.insert(libc::SYS_socket, any_of(0, FAMILIES)?);
    allowed.insert(libc::SYS_ioctl, any_of(1, REQUESTS)?);
    // Forbids namespaces. The kernel cannot inspect the arguments of clone3; on ENOSYS libraries use clone.
    allowed.insert(libc::SYS_clone, vec![only_if(0, SeccompCmpOp::MaskedEq(NAMESPACES.into()), 0)?]);
    // Forbids memory that is both writable and executable.
    let (write, run) = (libc::PROT_WRITE as u32, libc::PROT_EXEC as u32);
    let without = |bit: u32| only_if(2, SeccompCmpOp::MaskedEq(bit.into()), 0);
    allowed.insert(libc::SYS_mmap, vec![without(run)?, without(write)?]);
    // On ARM the loader marks executable memory a second time, for branch target identification.
    let is_arm = cfg!(target_arch = "aarch64");
    allowed.insert(libc::SYS_mprotect, if is_arm { Vec::new() } else { vec![without(run)?] });
    Ok(allowed)
}

fn only_if(argument: u8, compare: SeccompCmpOp, value: u32) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(argument, Dword, compare, value.into())?])
}

const FAMILIES: &[u32] =
    &[libc::AF_UNIX as u32, libc::AF_INET as u32, libc::AF_INET6 as u32, libc::AF_NETLINK as u32];

/// Allowed requests of ioctl(2): non-blocking mode, queue sizes, urgent data, close-on-exec, terminal
/// attributes, names and numbers of interfaces. Not TIOCSTI, which types into a terminal.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a request has 32 bits, whatever its type is in the C library"
)]
const REQUESTS: &[u32] = &[
    libc::FIONBIO as u32,
    libc::FIONREAD as u32,
    libc::TIOCOUTQ as u32,
    SIOCATMARK as u32,
    libc::FIOCLEX as u32,
    libc::FIONCLEX as u32,
    libc::TCGETS as u32,
    // TCGETS2, which newer libraries use instead of TCGETS.
    0x802C_542A,
    libc::TIOCGWINSZ as u32,
    libc::TIOCGPGRP as u32,
    libc::SIOCGIFNAME as u32,
    libc::SIOCGIFINDEX as u32,
    libc::SIOCGIFFLAGS as u32,
];

const NAMESPACES: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32;

/// Calls that have no constant in some C libraries.
const FCHMODAT2: libc::c_long = 452;
const MSEAL: libc::c_long = 462;

const COMMON: &[libc::c_long] = &[
    // Datagrams, streams, and waiting for them.
    libc::SYS_recvmmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_splice,
    libc::SYS_tee,
    libc::SYS_sendfile,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_eventfd2,
    libc::SYS_signalfd4,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_pipe2,
    libc::SYS_socketpair,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_setsockopt,
    libc::SYS_getsockopt,
    // Descriptors and files.
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_lseek,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_copy_file_range,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_getdents64,
    libc::SYS_readlinkat,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_getcwd,
    libc::SYS_chdir,
    libc::SYS_fchdir,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fadvise64,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    FCHMODAT2,
    libc::SYS_fchown,
    libc::SYS_utimensat,
    libc::SYS_umask,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_rm_watch,
    // Memory.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_mincore,
    libc::SYS_membarrier,
    MSEAL,
    // Threads, time and signals.
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_rseq,
    libc::SYS_set_tid_address,
    libc::SYS_gettid,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_getcpu,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_times,
    libc::SYS_getrusage,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_tgkill,
    libc::SYS_getrandom,
    // Process information and limits.
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getpgid,
    libc::SYS_getsid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getgroups,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_getpriority,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_prlimit64,
    libc::SYS_capget,
    // Starting the next process, and its additional sandbox.
    libc::SYS_execve,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_prctl,
    libc::SYS_capset,
    libc::SYS_seccomp,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_restrict_self,
];

#[cfg(target_arch = "x86_64")]
const OF_ARCHITECTURE: &[libc::c_long] = &[
    libc::SYS_arch_prctl,
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_chmod,
    libc::SYS_getdents,
    libc::SYS_utimes,
    libc::SYS_pipe,
    libc::SYS_dup2,
    libc::SYS_select,
    libc::SYS_poll,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd,
    libc::SYS_signalfd,
    libc::SYS_inotify_init,
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_getpgrp,
    libc::SYS_time,
    libc::SYS_alarm,
    libc::SYS_pause,
    libc::SYS_getrlimit,
    libc::SYS_setrlimit,
];
#[cfg(target_arch = "aarch64")]
const OF_ARCHITECTURE: &[libc::c_long] = &[libc::SYS_renameat, libc::SYS_getrlimit, libc::SYS_setrlimit];
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const OF_ARCHITECTURE: &[libc::c_long] = &[];

#[cfg(test)]
mod tests {
    use std::{
        env, fs,
        net::{Ipv4Addr, TcpListener, UdpSocket},
        os::unix::process::ExitStatusExt as _,
        process::Command,
        thread,
    };

    use rustix::{
        io::Errno,
        net::{AddressFamily, SocketType},
        system,
    };
    use turnpike_testkit::alone;

    use super::*;

    const DOES: &str = "TURNPIKE_TEST_SYSTEM_CALL";

    fn enter(other: SeccompAction) {
        let (_, programs) = programs(false, other).expect("there is a list for this architecture");
        install(&programs, &mut Layers::default()).expect("the kernel has seccomp");
    }

    fn forbidden() -> Result<(), Errno> {
        // Sets the current name, so it changes nothing.
        let name = system::uname();
        system::sethostname(name.nodename().to_bytes())
    }

    #[test]
    fn development_builds_kill_and_release_builds_refuse() {
        let refuses = SeccompAction::Errno(libc::EPERM as u32);
        assert_eq!(OTHER, if cfg!(debug_assertions) { SeccompAction::KillProcess } else { refuses });
    }

    #[test]
    fn an_unlisted_call_kills_the_process() {
        if env::var_os(DOES).is_some() {
            enter(SeccompAction::KillProcess);
            let came_of_it = forbidden();
            panic!("still running: {came_of_it:?}");
        }
        let own = env::current_exe().expect("the test runs");
        let status = Command::new(own)
            .args(["--exact", turnpike_testkit::this_test!(), "--test-threads=1"])
            .env(DOES, "")
            .output();
        let status = status.expect("the program can be started").status;
        assert_eq!(status.signal(), Some(libc::SIGSYS), "{status}");
    }

    #[test]
    fn in_a_release_an_unlisted_call_is_refused_in_each_thread() {
        alone::in_own_process(turnpike_testkit::this_test!(), || {
            let (sender, receiver) = std::sync::mpsc::channel::<()>();
            let before = thread::spawn(move || {
                let _ = receiver.recv();
                forbidden()
            });
            enter(SeccompAction::Errno(libc::EPERM as u32));
            drop(sender);
            assert_eq!(before.join().expect("the thread does not panic"), Err(Errno::PERM));
            assert_eq!(thread::spawn(forbidden).join().expect("the thread does not panic"), Err(Errno::PERM));
        });
    }

    #[test]
    fn needed_calls_work_and_dangerous_ones_are_refused() {
        alone::in_own_process(turnpike_testkit::this_test!(), || {
            enter(SeccompAction::Errno(libc::EPERM as u32));
            let socket = |family| rustix::net::socket(family, SocketType::DGRAM, None).map(drop);
            assert_eq!(socket(AddressFamily::INET), Ok(()));
            // AF_ALG, the interface to the kernel's crypto API, which has had several vulnerabilities.
            assert_eq!(socket(AddressFamily::from_raw(38)), Err(Errno::PERM));
            assert_eq!(socket(AddressFamily::VSOCK), Err(Errno::PERM));
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("reloads open listeners");
            UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("allocations open sockets");
            fs::read_to_string("/proc/self/status").expect("/proc is readable");
            enter(SeccompAction::Errno(libc::EPERM as u32));
            let started = Command::new("/bin/true").status().expect("a new program may be started");
            assert!(started.success());
        });
    }

    #[test]
    fn the_bpf_call_is_allowed_only_with_kernel_programs() {
        let has = |bpf: bool| allowed(bpf).expect("the filter compiles").contains_key(&libc::SYS_bpf);
        assert!(has(true) && !has(false));
    }

    #[test]
    fn no_listed_call_is_in_the_unknown_range() {
        assert!(COMMON.iter().chain(OF_ARCHITECTURE).all(|call| !UNKNOWN.contains(call)));
    }
}
