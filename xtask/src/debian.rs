//! Downloads and unpacks packages of any Debian suite and architecture from this machine's mirror, with a private apt configuration,
//! without installing them or running their scripts.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::Failure;

const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mirror {
    uri: String,
    pub(crate) codename: String,
}

impl Mirror {
    pub(crate) fn of_this_machine() -> Result<Self, Failure> {
        if let Some(mirror) = Self::configured()? {
            return Ok(mirror);
        }
        // apt lists its index targets only after it has fetched them.
        said(Command::new("apt-get").args(["update", "-qq"]))?;
        Self::configured()?.ok_or_else(|| "apt's sources do not contain a Debian mirror".into())
    }

    fn configured() -> Result<Option<Self>, Failure> {
        let format = "$(ORIGIN)|$(LABEL)|$(CODENAME)|$(REPO_URI)";
        let targets =
            said(Command::new("apt-get").args(["indextargets", "--format", format, "Created-By: Packages"]))?;
        Ok(Self::among(&targets))
    }

    /// Chooses the main suite, because the separate suites for updates and security lack some packages.
    fn among(targets: &str) -> Option<Self> {
        targets.lines().find_map(|line| {
            let ["Debian", "Debian", codename, uri] = line.split('|').collect::<Vec<_>>()[..] else {
                return None;
            };
            (!codename.contains('-')).then(|| Self { uri: uri.to_owned(), codename: codename.to_owned() })
        })
    }
}

pub(crate) struct Suite {
    dir: PathBuf,
}

impl Suite {
    /// Reads the package lists of a suite into `dir`.
    pub(crate) fn open(
        dir: PathBuf,
        mirror: &Mirror,
        suite: &str,
        architectures: &[&str],
    ) -> Result<Self, Failure> {
        for folder in ["lists/partial", "archives/partial", "none"] {
            fs::create_dir_all(dir.join(folder))?;
        }
        let [native, ..] = architectures else { return Err("a suite needs an architecture".into()) };
        let at = dir.display();
        let listed: String = architectures.iter().map(|name| format!("\"{name}\"; ")).collect();
        let configuration = format!(
            "Dir::State \"{at}\";\nDir::State::status \"{at}/status\";\nDir::Cache \"{at}\";\n\
             Dir::Etc::sourcelist \"{at}/sources.list\";\nDir::Etc::sourceparts \"{at}/none\";\n\
             Dir::Etc::preferencesparts \"{at}/none\";\nAPT::Architecture \"{native}\";\n\
             APT::Architectures {{ {listed}}};\nAPT::Sandbox::User \"\";\nAcquire::Languages \"none\";\n"
        );
        fs::write(dir.join("apt.conf"), configuration)?;
        fs::write(dir.join("sources.list"), format!("deb [signed-by={KEYS}] {} {suite} main\n", mirror.uri))?;
        // The list of installed packages is empty, so that apt downloads every dependency.
        fs::write(dir.join("status"), "")?;
        let suite = Self { dir };
        said(suite.apt("apt-get").args(["update", "-qq"]))?;
        Ok(suite)
    }

    /// All transitive dependencies of `package`, and the package itself.
    pub(crate) fn needed_by(&self, package: &str) -> Result<BTreeSet<String>, Failure> {
        let listed = said(self.apt("apt-cache").args([
            "depends",
            "--recurse",
            "--important",
            "--no-recommends",
            "--no-suggests",
            package,
        ]))?;
        Ok(listed.lines().filter(|line| line.starts_with(char::is_alphanumeric)).map(str::to_owned).collect())
    }

    pub(crate) fn unpack(&self, packages: &[&str], root: &Path) -> Result<(), Failure> {
        let into = self.fresh_folder()?;
        said(self.apt("apt-get").args(["download", "-qq"]).args(packages).current_dir(&into))?;
        unpack_all(&into, root)
    }

    pub(crate) fn unpack_with_dependencies(&self, packages: &[&str], root: &Path) -> Result<(), Failure> {
        let into = self.fresh_folder()?;
        let archives = format!("Dir::Cache::archives={}", into.display());
        fs::create_dir_all(into.join("partial"))?;
        let words =
            ["install", "-qq", "--yes", "--download-only", "--no-install-recommends", "-o", &archives];
        said(self.apt("apt-get").args(words).args(packages))?;
        unpack_all(&into, root)
    }

    fn fresh_folder(&self) -> Result<PathBuf, Failure> {
        let into = self.dir.join("packages");
        if into.exists() {
            fs::remove_dir_all(&into)?;
        }
        fs::create_dir_all(&into)?;
        Ok(into)
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", self.dir.join("apt.conf")).env("DEBIAN_FRONTEND", "noninteractive");
        command
    }
}

/// Unpacks the packages in a folder into `root`, which has a merged /usr, unlike some packages of older suites.
fn unpack_all(from: &Path, root: &Path) -> Result<(), Failure> {
    for folder in ["bin", "sbin", "lib", "lib64"] {
        fs::create_dir_all(root.join("usr").join(folder))?;
        let link = root.join(folder);
        if !link.is_symlink() {
            std::os::unix::fs::symlink(Path::new("usr").join(folder), link)?;
        }
    }
    for entry in fs::read_dir(from)? {
        let package = entry?.path();
        if package.extension().is_some_and(|extension| extension == "deb") {
            let mut contents = Command::new("dpkg-deb")
                .arg("--fsys-tarfile")
                .arg(&package)
                .stdout(Stdio::piped())
                .spawn()?;
            let stream = contents.stdout.take().ok_or("dpkg-deb has no output")?;
            let unpacked = Command::new("tar")
                .args(["--extract", "--keep-directory-symlink", "--directory"])
                .arg(root)
                .stdin(stream)
                .status()?;
            if !contents.wait()?.success() || !unpacked.success() {
                return Err(format!("cannot unpack {}", package.display()).into());
            }
        }
    }
    Ok(())
}

pub(crate) fn said(command: &mut Command) -> Result<String, Failure> {
    let output = command.stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(format!("failed ({}): {command:?}", output.status).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Ensures that programs exist on this machine; as root, installs the packages of missing ones.
pub(crate) fn need(programs: &[(&str, &str)]) -> Result<(), Failure> {
    let is_there = |program: &str| {
        Command::new("sh")
            .args(["-c", "command -v \"$0\" >/dev/null", program])
            .status()
            .is_ok_and(|it| it.success())
    };
    let missing: BTreeSet<&str> =
        programs.iter().filter(|(program, _)| !is_there(program)).map(|(_, package)| *package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    println!("installing {}", missing.iter().copied().collect::<Vec<_>>().join(", "));
    said(Command::new("apt-get").args(["update", "-qq"]))?;
    said(
        Command::new("apt-get")
            .args(["install", "-qq", "--yes", "--no-install-recommends"])
            .args(missing)
            .env("DEBIAN_FRONTEND", "noninteractive"),
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_of_the_main_suite_is_chosen() {
        let targets = "Debian|Debian-Security|bookworm-security|http://one.test/security/\n\
                       Other|Other|stable|http://two.test/\n\
                       Debian|Debian|bookworm-updates|http://three.test/debian/\n\
                       Debian|Debian|bookworm|http://three.test/debian/\n";
        let mirror = Mirror::among(targets).expect("one of them is Debian's");
        assert_eq!((&mirror.uri[..], &mirror.codename[..]), ("http://three.test/debian/", "bookworm"));
        assert_eq!(Mirror::among("Other|Other|stable|http://two.test/\n"), None);
    }
}
