//! A virtual machine without disk and network card: its kernel, and a file system in memory with the programs to run.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::{
    debian::{Mirror, Suite, said},
    report::Report,
};
use crate::Failure;

/// Packages of this architecture, which is that of the programs.
const ARCHITECTURE: &str = "amd64";

/// QEMU, with an emulated processor: nested virtualisation hangs on too many hosts.
fn qemu() -> Command {
    // It ends by itself; a guest that hangs is ended.
    let mut command = Command::new("timeout");
    command.args([
        "7200",
        "qemu-system-x86_64",
        "-machine",
        "q35",
        "-accel",
        "tcg,thread=multi",
        "-cpu",
        "max",
    ]);
    command.args(["-m", "4096", "-smp", "2", "-nic", "none", "-nographic", "-no-reboot"]);
    // Where the host is busy, Linux takes the emulated timer for broken.
    command.args(["-append", "console=ttyS0 no_timer_check panic=-1 quiet loglevel=1"]);
    command
}

/// Programs of the guest beside ours.
const TOOLS: [&str; 20] = [
    "bash",
    "coreutils",
    "dash",
    "grep",
    "sed",
    "findutils",
    "hostname",
    "util-linux",
    "mount",
    "procps",
    "kmod",
    "iproute2",
    "ethtool",
    "nftables",
    "curl",
    "openssl",
    "base-files",
    "base-passwd",
    "libc-bin",
    "netbase",
];

/// The file system of all guests of a kind, without kernel and programs.
/// Programs that were built here need the C library of this machine.
pub(super) fn root(dir: &Path, mirror: &Mirror) -> Result<PathBuf, Failure> {
    let suite = &mirror.codename;
    let root = dir.join(format!("root-{suite}-{ARCHITECTURE}"));
    let archive = root.with_extension("cpio");
    if archive.exists() {
        return Ok(archive);
    }
    let packages = Suite::open(root.with_extension("apt"), mirror, suite, &[ARCHITECTURE])?;
    packages.unpack_with_dependencies(&TOOLS, &root)?;
    for useless in ["usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/i18n"] {
        let _ = fs::remove_dir_all(root.join(useless));
    }
    for (name, text) in [
        ("passwd", "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"),
        ("group", "root:x:0:\nnogroup:x:65534:\n"),
        ("hosts", "127.0.0.1 localhost\n::1 localhost\n"),
    ] {
        fs::write(root.join("etc").join(name), text)?;
    }
    for folder in ["proc", "sys", "dev", "run", "tmp", "root"] {
        fs::create_dir_all(root.join(folder))?;
    }
    pack(&root, &archive)?;
    Ok(archive)
}

/// A kernel of Debian's, as QEMU loads it, and an archive of its modules.
pub(super) struct Kernel {
    image: PathBuf,
    modules: PathBuf,
}

impl Kernel {
    /// The one that the metapackage of the suite depends on.
    pub(super) fn of(dir: &Path, mirror: &Mirror, suite: &str) -> Result<Self, Failure> {
        let dir = dir.join(format!("kernel-{suite}-{ARCHITECTURE}"));
        let (image, modules) = (dir.join("vmlinuz"), dir.join("modules.cpio"));
        if image.exists() && modules.exists() {
            return Ok(Self { image, modules });
        }
        let packages = Suite::open(dir.join("apt"), mirror, suite, &[ARCHITECTURE])?;
        let needed = packages.needed_by(&format!("linux-image-cloud-{ARCHITECTURE}"))?;
        // Newer suites have image, modules and the rest in packages of their own.
        let parts = ["linux-image-", "linux-binary-", "linux-modules-"];
        let is_part = |name: &&str| {
            parts
                .iter()
                .any(|part| name.strip_prefix(part).is_some_and(|rest| rest.starts_with(char::is_numeric)))
        };
        let needed: Vec<&str> = needed.iter().map(String::as_str).filter(is_part).collect();
        let unpacked = dir.join("unpacked");
        packages.unpack(&needed, &unpacked)?;
        let modules_of = unpacked.join("usr/lib/modules");
        let version = fs::read_dir(&modules_of)?.next().ok_or("the kernel has no modules")??.file_name();
        let places = [
            modules_of.join(&version).join("vmlinuz"),
            unpacked.join("boot").join(format!("vmlinuz-{}", version.display())),
        ];
        let found = places.iter().find(|place| place.exists()).ok_or("the package has no kernel")?;
        fs::copy(found, &image)?;
        fs::remove_file(found)?;
        said(Command::new("depmod").arg("-b").arg(&unpacked).arg(&version))?;
        pack(&unpacked, &modules)?;
        Ok(Self { image, modules })
    }

    /// Runs the guest to its end. Its console goes to `log`, and what it reports is returned.
    pub(super) fn boot(&self, archives: [&Path; 2], log: &Path) -> Result<Report, Failure> {
        let initrd = log.with_extension("initrd");
        let mut all = fs::File::create(&initrd)?;
        for archive in [archives[0], archives[1], &self.modules] {
            std::io::copy(&mut fs::File::open(archive)?, &mut all)?;
        }
        let mut child = qemu()
            .arg("-kernel")
            .arg(&self.image)
            .arg("-initrd")
            .arg(&initrd)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut console = BufReader::new(child.stdout.take().ok_or("QEMU has no output")?);
        let (mut log, mut report, mut line) = (fs::File::create(log)?, Report::default(), Vec::new());
        while console.read_until(b'\n', &mut line)? > 0 {
            log.write_all(&line)?;
            if let Some(news) = report.take(String::from_utf8_lossy(&line).trim_end()) {
                println!("  {news}");
            }
            line.clear();
        }
        child.wait()?;
        fs::remove_file(&initrd)?;
        Ok(report)
    }
}

/// An archive of a folder as the kernel unpacks it; several, one behind the other, are one.
pub(super) fn pack(folder: &Path, archive: &Path) -> Result<(), Failure> {
    let unfinished = archive.with_extension("unfinished");
    let script =
        "set -o pipefail; cd \"$0\" && find . | cpio --create --format newc --quiet --owner 0:0 >\"$1\"";
    said(Command::new("bash").args(["-c", script]).arg(folder).arg(&unfinished))?;
    Ok(fs::rename(unfinished, archive)?)
}
