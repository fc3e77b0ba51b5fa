//! Processors that a guest can have, in the words of Debian, Rust and QEMU.

/// A processor architecture. QEMU emulates it on every host.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Architecture {
    /// As in names of packages.
    pub(super) debian: &'static str,
    /// Target triple of the programs of its guests.
    pub(super) target: &'static str,
    /// Emulates a machine: program, package and options.
    pub(super) machine: (&'static str, &'static str, &'static [&'static str]),
    /// Parameters of the kernel.
    pub(super) parameters: &'static str,
    /// Suite of the guests' file system; otherwise that of this machine, whose C library the programs were linked with.
    pub(super) suite: Option<&'static str>,
}

pub(super) const AMD64: Architecture = Architecture {
    debian: "amd64",
    target: "x86_64-unknown-linux-gnu",
    machine: ("qemu-system-x86_64", "qemu-system-x86", &["-machine", "q35", "-cpu", "max"]),
    // Where the host is busy, Linux takes the emulated timer for broken.
    parameters: "console=ttyS0 no_timer_check",
    suite: None,
};

pub(super) const ARM64: Architecture = Architecture {
    debian: "arm64",
    target: "aarch64-unknown-linux-gnu",
    // Pointer authentication by the architecture's own cipher takes half of an emulated processor.
    machine: ("qemu-system-aarch64", "qemu-system-arm", &["-machine", "virt", "-cpu", "max,pauth-impdef=on"]),
    parameters: "console=ttyAMA0",
    suite: Some("sid"),
};
