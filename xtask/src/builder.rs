//! Debian's newest compilers in a directory, for targets whose standard library is not installed here: ARM64, and static programs with musl.

use std::{
    env, fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    Failure, cargo,
    debian::{Mirror, Suite, need, said},
    target,
};

const SUITE: &str = "sid";

/// Compilers for both architectures and C libraries, with the programs that they, cargo and deploy/build start.
const PACKAGES: [&str; 16] = [
    "bash",
    "binutils",
    "cargo",
    "coreutils",
    "dash",
    "gcc",
    "gcc-aarch64-linux-gnu",
    "libc6-dev",
    "libc6-dev-arm64-cross",
    "libstd-rust-dev:arm64",
    "lld",
    "musl-dev:amd64",
    "musl-dev:arm64",
    "rust-src",
    "rustc",
    "sed",
];

/// The specifications with which gcc uses musl. Both packages contain the same program, which is not used.
const MUSL_SPECS: [&str; 2] = ["musl-tools:amd64", "musl-tools:arm64"];

/// Sources of the standard library, which is compiled for musl.
const LIBRARY: &str = "usr/lib/rustlib/src/rust/library";

/// Runs the program after `--` in the root `$0`. Everything before `--` is a folder to bind-mount from outside; the first is the working
/// directory. The mounts disappear with the program.
const INSIDE: &str = r#"
folder=$1
while [ "$1" != -- ]; do
  mkdir -p "$0$1"
  mount --bind "$1" "$0$1"
  shift
done
shift
for kernel in /proc /dev; do
  mkdir -p "$0$kernel"
  mount --bind "$kernel" "$0$kernel"
done
exec chroot "$0" /usr/bin/env --chdir="$folder" "$@"
"#;

/// Makes rustup's libunwind.a in the folder `$2` from that of gcc in `$1`, for the compiler `$0`. gcc's asks glibc for unwind tables; with
/// musl, the answer is that there are none, as in every release.
const UNWINDER: &str = r#"
cp "$1/libgcc_eh.a" "$2/libunwind.a"
echo 'int _dl_find_object(void *address, void *result) { return -1; }' | "$0-gcc" -x c -O2 -c -o /tmp/find.o -
"$0-ar" rs "$2/libunwind.a" /tmp/find.o
"#;

/// A target that links the C library musl statically.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Musl {
    /// First part of the target, and the name in `uname`.
    pub(crate) architecture: &'static str,
    pub(crate) target: &'static str,
    /// Directory of gcc's start files and libraries, without the version.
    gcc: &'static str,
}

pub(crate) const MUSL: [Musl; 2] = [
    Musl { architecture: "x86_64", target: "x86_64-unknown-linux-musl", gcc: "usr/lib/gcc/x86_64-linux-gnu" },
    Musl {
        architecture: "aarch64",
        target: "aarch64-unknown-linux-musl",
        gcc: "usr/lib/gcc-cross/aarch64-linux-gnu",
    },
];

pub(crate) struct Builder {
    root: PathBuf,
}

impl Builder {
    /// Downloads and unpacks the compilers, or reuses those of an earlier run, and downloads the crates of `repository`.
    pub(crate) fn prepare(repository: &Path) -> Result<Self, Failure> {
        let root = target(repository).join("builder");
        let is_unpacked = root.join("unpacked");
        if !is_unpacked.exists() {
            need(&[("dpkg-deb", "dpkg"), ("unshare", "util-linux")])?;
            fs::create_dir_all(&root)?;
            let mirror = Mirror::of_this_machine()?;
            let suite = Suite::open(root.with_extension("apt"), &mirror, SUITE, &["amd64", "arm64"])?;
            suite.unpack_with_dependencies(&PACKAGES, &root)?;
            for package in MUSL_SPECS {
                suite.unpack(&[package], &root)?;
            }
            fs::write(is_unpacked, "")?;
        }
        fs::create_dir_all(root.join("tmp"))?;
        // The packages' installation scripts would create this link, but they are not run.
        let linker = root.join("usr/bin/cc");
        if !linker.is_symlink() {
            symlink("gcc", linker)?;
        }
        let builder = Self { root: root.canonicalize()? };
        for musl in &MUSL {
            builder.link_start_files(musl)?;
        }
        said(cargo(repository).args(["fetch", "--locked"]))?;
        let library = builder.root.join(LIBRARY).join("Cargo.toml");
        // Its manifest uses unstable features of cargo.
        let mut fetch = cargo(repository);
        fetch.args(["fetch", "--locked", "--manifest-path"]).arg(library).env("RUSTC_BOOTSTRAP", "1");
        said(&mut fetch)?;
        Ok(builder)
    }

    /// Command that runs inside, in the first of the `shared` folders. Its environment contains only PATH and cargo's settings.
    pub(crate) fn command(&self, shared: &[&Path], program: impl AsRef<Path>) -> Result<Command, Failure> {
        let cargo_home = match env::var_os("CARGO_HOME") {
            Some(home) => home.into(),
            None => env::home_dir().ok_or("there is no home directory")?.join(".cargo"),
        };
        let mut command = Command::new("unshare");
        command.args(["--mount", "bash", "-euc", INSIDE]).arg(&self.root);
        command.args(shared).arg(&cargo_home).arg("--").arg(program.as_ref());
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("CARGO_HOME", cargo_home).env("CARGO_NET_OFFLINE", "true").env("HOME", "/tmp");
        Ok(command)
    }

    /// Adds the variables with which cargo builds for `musl`, together with the standard library, which Debian does not package for it.
    pub(crate) fn set_musl(command: &mut Command, musl: &Musl) {
        let architecture = musl.architecture;
        let compiler = format!("{architecture}-linux-gnu-gcc");
        let upper = musl.target.to_uppercase().replace('-', "_");
        let specs = format!("/usr/lib/{architecture}-linux-musl/musl-gcc.specs");
        command
            .env(format!("CARGO_TARGET_{upper}_LINKER"), &compiler)
            .env(format!("CC_{}", musl.target.replace('-', "_")), format!("{compiler} -specs={specs}"))
            // `-Z build-std` is unstable.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_UNSTABLE_BUILD_STD", "std,panic_abort");
    }

    /// Puts musl and gcc's start files where rustc looks for those that rustup would install.
    fn link_start_files(&self, musl: &Musl) -> Result<(), Failure> {
        let folder = Path::new("usr/lib/rustlib").join(musl.target).join("lib/self-contained");
        fs::create_dir_all(self.root.join(&folder))?;
        let libc = PathBuf::from(format!("usr/lib/{}-linux-musl", musl.architecture));
        let versions = fs::read_dir(self.root.join(musl.gcc))?.collect::<Result<Vec<_>, _>>()?;
        let [version] = &versions[..] else {
            return Err(format!("several versions of gcc in {}", musl.gcc).into());
        };
        let gcc = Path::new(musl.gcc).join(version.file_name());
        let of_libc =
            ["crt1.o", "rcrt1.o", "Scrt1.o", "crti.o", "crtn.o", "libc.a"].map(|name| (&libc, name));
        let of_gcc = ["crtbegin.o", "crtbeginS.o", "crtend.o", "crtendS.o"].map(|name| (&gcc, name));
        for (from, name) in of_libc.into_iter().chain(of_gcc) {
            let from = from.join(name);
            if !self.root.join(&from).exists() {
                return Err(format!("the builder has no {}", from.display()).into());
            }
            let link = self.root.join(&folder).join(name);
            if !link.is_symlink() {
                symlink(Path::new("/").join(from), link)?;
            }
        }
        let prefix = format!("{}-linux-gnu", musl.architecture);
        let mut unwinder = self.command(&[], "bash")?;
        unwinder
            .args(["-euc", UNWINDER, &prefix])
            .arg(Path::new("/").join(gcc))
            .arg(Path::new("/").join(folder));
        said(&mut unwinder).map(drop)
    }
}
