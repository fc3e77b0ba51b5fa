//! Reasons why the kernel path is unavailable, with remedies.

use std::{fs, io};

use aya::{EbpfError, programs::ProgramError};
use rustix::io::Errno;

/// Each message states a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OffloadError {
    #[error(
        "the kernel refused to load the program ({source}): the process lacks {missing}; grant it (AmbientCapabilities= of systemd, or \
         setcap cap_net_admin,cap_bpf,cap_perfmon+ep), and allow bpf(2) in seccomp filters"
    )]
    Capability { missing: String, source: io::Error },
    /// On every attempt, the verifier gave up without a result.
    #[error(
        "the kernel's verifier did not finish ({source}): free memory, or stop sending signals to this process"
    )]
    Unfinished { source: io::Error },
    #[error(
        "the kernel's verifier refused the program: {said}; this needs Linux 5.10 or later (xdp: 5.18); 6.6 or later is recommended"
    )]
    Verifier {
        /// Last line of the verifier's log.
        said: String,
    },
    #[error(
        "the kernel lacks {what} ({source}): this needs Linux 5.10 or later with CONFIG_BPF_SYSCALL, CONFIG_NET_CLS_BPF and \
             CONFIG_NET_SCH_INGRESS; 6.6 or later is recommended"
    )]
    Kernel { what: &'static str, source: io::Error },
    #[error(
        "the kernel would interpret the program, which is slower than user space: enable the JIT compiler (sysctl net.core.bpf_jit_enable=1)"
    )]
    Interpreted,
    #[error(
        "before Linux 6.16 the kernel sends bytes twice to slow readers (sockmap), so copy = \"kernel\" would corrupt streams: \
         use a newer kernel, or copy = \"auto\""
    )]
    Unsound,
    #[error(
        "another turnpike process uses the kernel path, and before Linux 6.6 only one per machine can: stop that process, \
         choose --datapath gso for one of them, or use a newer kernel"
    )]
    Taken,
    #[error(
        "the previous process did not use the kernel path, and an upgrade cannot change the data path: restart instead"
    )]
    Kept,
    #[error("cannot attach the program to {interface}: {said}; this needs CAP_NET_ADMIN")]
    Attach { interface: String, said: String },
    #[error(
        "no interface can run the program in its driver ({said}): use --datapath kernel, which works with every driver, or --datapath xdp-generic \
         for tests"
    )]
    Xdp { said: String },
    #[error("the program is damaged: {0}; rebuild turnpike")]
    Object(String),
    #[error("the program is attached in a different way and must be attached again")]
    OtherHook,
    /// The previous process passed fewer descriptors than announced.
    #[error("the previous process passed its kernel path incompletely ({0}): restart turnpike instead")]
    Handover(#[source] io::Error),
    /// An error of netlink, threads or memory.
    #[error("cannot follow the interfaces and routes of this machine: {0}; allow AF_NETLINK sockets")]
    Netlink(#[from] io::Error),
}

impl OffloadError {
    pub(crate) fn load(error: EbpfError) -> Self {
        match error {
            EbpfError::ProgramError(error) => Self::program(error),
            EbpfError::MapError(error) => match errno_of(&error) {
                Some(source) => Self::kernel("maps for programs", source),
                None => Self::Object(chain(&error)),
            },
            other => match errno_of(&other) {
                Some(source) => Self::kernel("BTF", source),
                None => Self::Object(chain(&other)),
            },
        }
    }

    pub(crate) fn program(error: ProgramError) -> Self {
        match error {
            ProgramError::LoadError { io_error, verifier_log } => {
                const STATISTICS: [&str; 3] = ["processed", "stack depth", "verification time"];
                let log = verifier_log.to_string();
                let said =
                    log.lines().rev().map(str::trim).find(|line| {
                        !line.is_empty() && !STATISTICS.iter().any(|word| line.starts_with(word))
                    });
                match said {
                    _ if is_passing(&io_error) => Self::Unfinished { source: io_error },
                    Some(said) if !is_forbidden(&io_error) => Self::Verifier { said: said.to_owned() },
                    _ => Self::kernel("support for BPF programs of this type", io_error),
                }
            }
            other => match errno_of(&other) {
                Some(source) => Self::kernel("support for BPF programs of this type", source),
                None => Self::Object(chain(&other)),
            },
        }
    }

    fn kernel(what: &'static str, source: io::Error) -> Self {
        if is_forbidden(&source) {
            let missing = missing_capabilities();
            let missing =
                if missing.is_empty() { "a permission other than a capability".to_owned() } else { missing };
            Self::Capability { missing, source }
        } else {
            Self::Kernel { what, source }
        }
    }
}

/// Returns true for temporary errors, which do not concern the program itself.
pub(crate) fn is_passing(error: &io::Error) -> bool {
    [Errno::AGAIN, Errno::INTR, Errno::NOMEM, Errno::NOSPC]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// EPERM. The verifier uses EACCES for programs that it rejects.
fn is_forbidden(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::PERM.raw_os_error())
}

fn errno_of(error: &(dyn std::error::Error + 'static)) -> Option<io::Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(errno) = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
            return Some(io::Error::from_raw_os_error(errno));
        }
        next = error.source();
    }
    None
}

pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        let cause = error.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        next = error.source();
    }
    text
}

fn missing_capabilities() -> String {
    const NEEDED: [(u32, &str); 3] = [(12, "CAP_NET_ADMIN"), (39, "CAP_BPF"), (38, "CAP_PERFMON")];
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or_default();
    let missing = NEEDED.iter().filter(|(bit, _)| effective >> bit & 1 == 0).map(|(_, name)| *name);
    missing.collect::<Vec<_>>().join(", ")
}
