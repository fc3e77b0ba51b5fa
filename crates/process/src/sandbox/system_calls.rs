//! System calls, by seccomp: a list of those that turnpike, its libraries and the start of a new program make. A call that is not in it
//! ends the process in builds for development, so that no test overlooks one; in a release it is refused with EPERM.
//!
//! Calls that this version has never heard of are answered with ENOSYS in both: that is how a library which is newer than this program
//! learns to do without.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen::Dword, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};
use turnpike_net::{
    system_calls::{self, Instruction},
    tcp::SIOCATMARK,
};

use super::Layers;

/// What becomes of other calls, for the log.
pub(super) const OTHERS: &str =
    if cfg!(debug_assertions) { "any other ends the process" } else { "any other is refused" };

/// What becomes of other calls.
const OTHER: SeccompAction = if cfg!(debug_assertions) {
    SeccompAction::KillProcess
} else {
    SeccompAction::Errno(libc::EPERM as u32)
};

/// Restricts this process; how many calls are left. `bpf` is for whoever has programs in the kernel.
pub(super) fn restrict(bpf: bool, layers: &mut Layers) -> Result<u64, String> {
    let (count, programs) = programs(bpf, OTHER)?;
    install(&programs, layers)?;
    Ok(count as u64)
}

fn install(programs: &[BpfProgram], layers: &mut Layers) -> Result<(), String> {
    for program in programs {
        let program: Vec<Instruction> = program.iter().map(|it| (it.code, it.jt, it.jf, it.k)).collect();
        layers
            .add(&program, || system_calls::filter(&program))
            .map_err(|error| format!("the kernel does not do it ({error})"))?;
    }
    Ok(())
}

/// Which calls may be made, and what becomes of those that nobody knows. Of two programs the stricter one wins, and of two that refuse the
/// one that came later. The kernel remembers which calls both always allow (Linux 5.11), and asks neither about them again: those of the
/// data path are among these.
fn programs(bpf: bool, other: SeccompAction) -> Result<(usize, [BpfProgram; 2]), String> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)
        .map_err(|_| format!("there is no list for {}", std::env::consts::ARCH))?;
    let compile = || -> Result<_, BackendError> {
        let allowed = allowed(bpf)?;
        // Those that get ENOSYS in a moment are not made.
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

/// Calls of kernels that are newer than this list, on all architectures alike: Linux 6.18 has none of them.
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
    // No namespaces. Of clone3 the kernel cannot look at the arguments; told that there is none, libraries use this one.
    allowed.insert(libc::SYS_clone, vec![only_if(0, SeccompCmpOp::MaskedEq(NAMESPACES.into()), 0)?]);
    // No memory that is written and then run.
    let (write, run) = (libc::PROT_WRITE as u32, libc::PROT_EXEC as u32);
    let without = |bit: u32| only_if(2, SeccompCmpOp::MaskedEq(bit.into()), 0);
    allowed.insert(libc::SYS_mmap, vec![without(run)?, without(write)?]);
    // On ARM the loader marks what is run once more, for the branches that may lead there.
    let is_arm = cfg!(target_arch = "aarch64");
    allowed.insert(libc::SYS_mprotect, if is_arm { Vec::new() } else { vec![without(run)?] });
    Ok(allowed)
}

fn only_if(argument: u8, compare: SeccompCmpOp, value: u32) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(argument, Dword, compare, value.into())?])
}

/// Of socket(2).
const FAMILIES: &[u32] =
    &[libc::AF_UNIX as u32, libc::AF_INET as u32, libc::AF_INET6 as u32, libc::AF_NETLINK as u32];

/// Of ioctl(2): whether a socket waits, what is queued, whether an urgent byte is next, whether a file is closed with execve(2), what a
/// terminal is, names and numbers of interfaces. Not what puts words into a terminal.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a request has 32 bits, in whichever type a C library has it"
)]
const REQUESTS: &[u32] = &[
    libc::FIONBIO as u32,
    libc::FIONREAD as u32,
    libc::TIOCOUTQ as u32,
    SIOCATMARK as u32,
    libc::FIOCLEX as u32,
    libc::FIONCLEX as u32,
    libc::TCGETS as u32,
    // TCGETS2, by which newer libraries ask for the same.
    0x802C_542A,
    libc::TIOCGWINSZ as u32,
    libc::TIOCGPGRP as u32,
    libc::SIOCGIFNAME as u32,
    libc::SIOCGIFINDEX as u32,
    libc::SIOCGIFFLAGS as u32,
];

/// Of clone(2), as unshare(2) takes them.
const NAMESPACES: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32;

/// Calls that not all C libraries have names for.
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
    // What the process is, and its limits.
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
    // The process that goes on in its place, and the sandbox that this one adds.
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

/// What C libraries call there in place of newer calls.
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

    /// Set where this program was started by a test to end by what it does.
    const DOES: &str = "TURNPIKE_TEST_SYSTEM_CALL";

    fn enter(other: SeccompAction) {
        let (_, programs) = programs(false, other).expect("there is a list for this architecture");
        install(&programs, &mut Layers::default()).expect("the kernel has seccomp");
    }

    /// Makes a call that is in no list, and says what came of it.
    fn forbidden() -> Result<(), Errno> {
        // It would change nothing, whoever asks.
        let name = system::uname();
        system::sethostname(name.nodename().to_bytes())
    }

    #[test]
    fn builds_for_development_end_and_releases_refuse() {
        let refuses = SeccompAction::Errno(libc::EPERM as u32);
        assert_eq!(OTHER, if cfg!(debug_assertions) { SeccompAction::KillProcess } else { refuses });
    }

    #[test]
    fn a_call_that_is_not_in_the_list_ends_the_process() {
        if env::var_os(DOES).is_some() {
            enter(SeccompAction::KillProcess);
            let came_of_it = forbidden();
            panic!("it goes on: {came_of_it:?}");
        }
        let own = env::current_exe().expect("it runs");
        let status = Command::new(own)
            .args(["--exact", turnpike_testkit::this_test!(), "--test-threads=1"])
            .env(DOES, "")
            .output();
        let status = status.expect("it can be started").status;
        assert_eq!(status.signal(), Some(libc::SIGSYS), "{status}");
    }

    #[test]
    fn in_a_release_it_is_refused_in_each_thread() {
        alone::in_own_process(turnpike_testkit::this_test!(), || {
            let (sender, receiver) = std::sync::mpsc::channel::<()>();
            // One that is there before, too.
            let before = thread::spawn(move || {
                let _ = receiver.recv();
                forbidden()
            });
            enter(SeccompAction::Errno(libc::EPERM as u32));
            drop(sender);
            assert_eq!(before.join().expect("it does not panic"), Err(Errno::PERM));
            assert_eq!(thread::spawn(forbidden).join().expect("it does not panic"), Err(Errno::PERM));
        });
    }

    #[test]
    fn what_the_programs_need_is_left_and_what_it_could_be_turned_to_is_not() {
        alone::in_own_process(turnpike_testkit::this_test!(), || {
            enter(SeccompAction::Errno(libc::EPERM as u32));
            let socket = |family| rustix::net::socket(family, SocketType::DGRAM, None).map(drop);
            assert_eq!(socket(AddressFamily::INET), Ok(()));
            // The kernel's cryptography, which has been a way in more than once.
            assert_eq!(socket(AddressFamily::from_raw(38)), Err(Errno::PERM));
            assert_eq!(socket(AddressFamily::VSOCK), Err(Errno::PERM));
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("listeners are opened by reloads");
            UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("so are relayed addresses");
            fs::read_to_string("/proc/self/status").expect("the kernel tells");
            // A new process may restrict itself further.
            enter(SeccompAction::Errno(libc::EPERM as u32));
            let started = Command::new("/bin/true").status().expect("a new program may be started");
            assert!(started.success());
        });
    }

    #[test]
    fn programs_in_the_kernel_are_for_whoever_is_to_have_them() {
        let has = |bpf: bool| allowed(bpf).expect("it compiles").contains_key(&libc::SYS_bpf);
        assert!(has(true) && !has(false));
    }

    #[test]
    fn no_call_is_known_and_unknown() {
        assert!(COMMON.iter().chain(OF_ARCHITECTURE).all(|call| !UNKNOWN.contains(call)));
    }
}
