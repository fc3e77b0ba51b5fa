//! A virtual machine without a disk or network card: a kernel, and an initramfs with the programs to run.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::{architecture::Architecture, report::Report};
use crate::{
    Failure,
    debian::{Mirror, Suite, said},
};

/// QEMU with an emulated CPU, because nested virtualisation hangs on too many hosts.
fn qemu(architecture: &Architecture) -> Command {
    let (program, _, options) = architecture.machine;
    // The guest powers off when it is done; `timeout` ends QEMU if the guest hangs.
    let mut command = Command::new("timeout");
    command.args(["7200", program, "-accel", "tcg,thread=multi"]).args(options);
    command.args(["-m", "4096", "-smp", "2", "-nic", "none", "-nographic", "-no-reboot", "-append"]);
    command.arg(format!("{} panic=-1 quiet loglevel=1", architecture.parameters));
    command
}

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

pub(super) struct Root {
    pub(super) folder: PathBuf,
    archive: PathBuf,
}

/// Creates the file system, or reuses the one from an earlier run.
pub(super) fn root(dir: &Path, mirror: &Mirror, architecture: &Architecture) -> Result<Root, Failure> {
    let (suite, name) = (architecture.suite.unwrap_or(&mirror.codename), architecture.debian);
    let root = dir.join(format!("root-{suite}-{name}"));
    let archive = root.with_extension("cpio");
    if archive.exists() {
        return Ok(Root { folder: root, archive });
    }
    let packages = Suite::open(root.with_extension("apt"), mirror, suite, &[name])?;
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
    Ok(Root { folder: root, archive })
}

pub(super) struct Kernel {
    architecture: &'static Architecture,
    image: PathBuf,
    modules: PathBuf,
}

impl Kernel {
    pub(super) fn of(
        dir: &Path,
        mirror: &Mirror,
        suite: &str,
        architecture: &'static Architecture,
    ) -> Result<Self, Failure> {
        let name = architecture.debian;
        let dir = dir.join(format!("kernel-{suite}-{name}"));
        let (image, modules) = (dir.join("vmlinuz"), dir.join("modules.cpio"));
        if image.exists() && modules.exists() {
            return Ok(Self { architecture, image, modules });
        }
        let packages = Suite::open(dir.join("apt"), mirror, suite, &[name])?;
        let needed = packages.needed_by(&format!("linux-image-cloud-{name}"))?;
        // Newer suites have separate packages for image, modules and the rest.
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
        let version =
            fs::read_dir(&modules_of)?.next().ok_or("the package does not contain modules")??.file_name();
        let places = [
            modules_of.join(&version).join("vmlinuz"),
            unpacked.join("boot").join(format!("vmlinuz-{}", version.display())),
        ];
        let found =
            places.iter().find(|place| place.exists()).ok_or("the package does not contain a kernel")?;
        fs::copy(found, &image)?;
        fs::remove_file(found)?;
        said(Command::new("depmod").arg("-b").arg(&unpacked).arg(&version))?;
        pack(&unpacked, &modules)?;
        Ok(Self { architecture, image, modules })
    }

    /// Runs the guest with `root` and `programs` until it powers off. The console goes to `log`; `dir` is for a temporary file.
    pub(super) fn boot(
        &self,
        root: &Root,
        programs: &Path,
        dir: &Path,
        log: &mut fs::File,
        report: &mut Report,
    ) -> Result<(), Failure> {
        let initrd = dir.join("initrd");
        let mut all = fs::File::create(&initrd)?;
        for archive in [&root.archive, programs, &self.modules] {
            std::io::copy(&mut fs::File::open(archive)?, &mut all)?;
        }
        let mut guest = qemu(self.architecture);
        guest.arg("-kernel").arg(&self.image).arg("-initrd").arg(&initrd).stdin(Stdio::null());
        report.read(&mut guest, log)?;
        fs::remove_file(&initrd)?;
        Ok(())
    }
}

/// Packs a folder as an initramfs archive; the kernel accepts several archives in a row.
pub(super) fn pack(folder: &Path, archive: &Path) -> Result<(), Failure> {
    let unfinished = archive.with_extension("unfinished");
    let script =
        "set -o pipefail; cd \"$0\" && find . | cpio --create --format newc --quiet --owner 0:0 >\"$1\"";
    said(Command::new("bash").args(["-c", script]).arg(folder).arg(&unfinished))?;
    Ok(fs::rename(unfinished, archive)?)
}
