//! Guest architectures with their names in Debian, Rust and QEMU.

/// A processor architecture, which QEMU emulates on every host.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Architecture {
    pub(super) debian: &'static str,
    pub(super) target: &'static str,
    /// QEMU program, its package, and machine options.
    pub(super) machine: (&'static str, &'static str, &'static [&'static str]),
    pub(super) parameters: &'static str,
    /// Debian suite of the guests' file system; `None` for this machine's suite, because the programs are linked to its C library.
    pub(super) suite: Option<&'static str>,
}

pub(super) const AMD64: Architecture = Architecture {
    debian: "amd64",
    target: "x86_64-unknown-linux-gnu",
    machine: ("qemu-system-x86_64", "qemu-system-x86", &["-machine", "q35", "-cpu", "max"]),
    // Without `no_timer_check`, Linux may consider the emulated timer broken if the host is busy.
    parameters: "console=ttyS0 no_timer_check",
    suite: None,
};

pub(super) const ARM64: Architecture = Architecture {
    debian: "arm64",
    target: "aarch64-unknown-linux-gnu",
    // The standard algorithm for pointer authentication would take half of the emulated CPU's time.
    machine: ("qemu-system-aarch64", "qemu-system-arm", &["-machine", "virt", "-cpu", "max,pauth-impdef=on"]),
    parameters: "console=ttyAMA0",
    suite: Some("sid"),
};
