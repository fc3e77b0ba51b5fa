//! Why the path through the kernel cannot be had, and what remedies it.

use std::{fs, io};

use aya::{EbpfError, programs::ProgramError};
use rustix::io::Errno;

/// Each message says what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// The kernel refused to load the program for want of capabilities.
    #[error(
        "the kernel lets this process load no program ({source}): it lacks {missing}; grant it (AmbientCapabilities= of systemd, or \
         setcap cap_net_admin,cap_bpf,cap_perfmon+ep), and let no seccomp filter forbid bpf(2)"
    )]
    Capability {
        /// Those that are missing, by name.
        missing: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The verifier gave up before it came to a judgement, each time that it was asked.
    #[error(
        "the kernel's verifier did not finish ({source}): is memory short, or does this process get signals all the time?"
    )]
    Unfinished {
        /// The kernel's last answer.
        source: io::Error,
    },
    /// The verifier did not take the program.
    #[error(
        "the kernel's verifier refused the program: {said}; this needs Linux 5.10 or later (xdp: 5.18), better 6.6"
    )]
    Verifier {
        /// The last line of its log.
        said: String,
    },
    /// Something else is missing.
    #[error(
        "the kernel has no {what} ({source}): this needs Linux 5.10 or later with CONFIG_BPF_SYSCALL, CONFIG_NET_CLS_BPF and \
             CONFIG_NET_SCH_INGRESS, better 6.6"
    )]
    Kernel {
        /// What for.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The program would be interpreted.
    #[error(
        "the kernel would interpret the program, which is slower than user space: turn the compiler on (sysctl net.core.bpf_jit_enable=1)"
    )]
    Interpreted,
    /// Passing a stream on is not sound in this kernel.
    #[error(
        "before Linux 6.16 the kernel sends bytes twice where a reader is slow (sockmap), so that copy = \"kernel\" would damage streams: \
         run a newer kernel, or leave copy at \"auto\""
    )]
    Unsound,
    /// The program could not be attached.
    #[error("the program cannot be attached to {interface}: {said}; it needs CAP_NET_ADMIN")]
    Attach {
        /// Where.
        interface: String,
        /// The kernel's answer.
        said: String,
    },
    /// No interface can have XDP.
    #[error(
        "no interface runs the program in its driver ({said}): use --datapath kernel, which every driver can, or --datapath xdp-generic \
         for a test"
    )]
    Xdp {
        /// Why each cannot.
        said: String,
    },
    /// The object is damaged.
    #[error("the program is damaged: {0}; build turnpike again")]
    Object(String),
    /// Of the process before there is not all that it said.
    #[error("what the process before has of the kernel path did not all come along ({0}): restart instead")]
    Handover(#[source] io::Error),
    /// Netlink, threads, memory.
    #[error(
        "cannot follow the interfaces and routes of this machine: {0}; let the process open AF_NETLINK sockets"
    )]
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
                /// What stands behind the reason.
                const STATISTICS: [&str; 3] = ["processed", "stack depth", "verification time"];
                let log = verifier_log.to_string();
                let said =
                    log.lines().rev().map(str::trim).find(|line| {
                        !line.is_empty() && !STATISTICS.iter().any(|word| line.starts_with(word))
                    });
                match said {
                    _ if is_passing(&io_error) => Self::Unfinished { source: io_error },
                    Some(said) if !is_forbidden(&io_error) => Self::Verifier { said: said.to_owned() },
                    _ => Self::kernel("programs of this type", io_error),
                }
            }
            other => match errno_of(&other) {
                Some(source) => Self::kernel("programs of this type", source),
                None => Self::Object(chain(&other)),
            },
        }
    }

    fn kernel(what: &'static str, source: io::Error) -> Self {
        if is_forbidden(&source) {
            let missing = missing_capabilities();
            let missing =
                if missing.is_empty() { "a permission beyond its capabilities".to_owned() } else { missing };
            Self::Capability { missing, source }
        } else {
            Self::Kernel { what, source }
        }
    }
}

/// No answer about the program itself.
pub(crate) fn is_passing(error: &io::Error) -> bool {
    [Errno::AGAIN, Errno::INTR, Errno::NOMEM, Errno::NOSPC]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// EPERM; EACCES is what the verifier says of programs that it does not like.
fn is_forbidden(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::PERM.raw_os_error())
}

/// The kernel's answer, wherever it is in the chain of causes.
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

/// An error and its causes in one line.
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

/// The capabilities that this needs (capabilities(7)) and the process has not.
fn missing_capabilities() -> String {
    const NEEDED: [(u32, &str); 3] = [(12, "CAP_NET_ADMIN"), (39, "CAP_BPF"), (38, "CAP_PERFMON")];
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or_default();
    let missing = NEEDED.iter().filter(|(bit, _)| effective >> bit & 1 == 0).map(|(_, name)| *name);
    missing.collect::<Vec<_>>().join(", ")
}
