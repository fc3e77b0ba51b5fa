//! File access, restricted by Landlock: directories whose files can be read, and directories whose files can
//! be written. All other files are inaccessible, even to root. Network sockets and connections to Unix
//! sockets are not restricted.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use landlock::{
    ABI, Access as _, AccessFs, BitFlags, CompatLevel, Compatible as _, Ruleset, RulesetAttr as _,
    RulesetCreatedAttr as _, RulesetError, RulesetStatus, Scope, path_beneath_rules,
};

use super::{Layers, Needs};

/// Needed by any program: libraries, name services, certificates, time zones, /proc and /sys; also the likely
/// locations of a new version. Lists whole directories, because files in them are replaced at run time.
const SYSTEM: &[&str] = &[
    "/bin",
    "/etc",
    "/gnu",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix",
    "/opt",
    "/proc",
    "/run",
    "/sbin",
    "/sys",
    "/usr",
    "/var/lib/ca-certificates",
];
const DEVICES: &[&str] = &["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"];
/// Latest Landlock version whose access rights are restricted; older kernels restrict fewer.
const KNOWN: ABI = ABI::V6;

pub(super) fn restrict(needs: &Needs, layers: &mut Layers) -> Result<(Vec<String>, Vec<String>), String> {
    let read = directories(needs);
    let written: BTreeSet<PathBuf> = needs.written.iter().filter(|path| path.is_dir()).cloned().collect();
    layers.add(&(&read, &written), || match apply(&read, &written) {
        Ok(RulesetStatus::NotEnforced) => {
            Err("this kernel does not support Landlock, or it is disabled (Linux 5.13, lsm=landlock,…)"
                .to_owned())
        }
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    })?;
    let text = |paths: BTreeSet<PathBuf>| paths.iter().map(|path| path.display().to_string()).collect();
    Ok((text(read), text(written)))
}

fn apply(read: &BTreeSet<PathBuf>, written: &BTreeSet<PathBuf>) -> Result<RulesetStatus, RulesetError> {
    let to_write = (AccessFs::from_all(KNOWN) & !AccessFs::Execute)
        & !(AccessFs::MakeBlock | AccessFs::MakeChar | AccessFs::IoctlDev);
    let devices: BitFlags<AccessFs> = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate;
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(KNOWN))?
        .scope(Scope::Signal)?
        .create()?
        .add_rules(path_beneath_rules(read, AccessFs::from_read(KNOWN)))?
        .add_rules(path_beneath_rules(written, to_write))?
        .add_rules(path_beneath_rules(DEVICES, devices))?
        .restrict_self()?;
    Ok(status.ruleset)
}

fn directories(needs: &Needs) -> BTreeSet<PathBuf> {
    let system = SYSTEM.iter().map(PathBuf::from);
    let named = needs.files.iter().flat_map(|file| places(file));
    let mut all: BTreeSet<PathBuf> =
        system.chain(named).chain(needs.read.iter().cloned()).filter(|path| path.is_dir()).collect();
    let within: Vec<PathBuf> = all
        .iter()
        .filter(|path| path.ancestors().skip(1).any(|above| all.contains(above)))
        .cloned()
        .collect();
    within.iter().for_each(|path| _ = all.remove(path));
    all
}

fn places(file: &Path) -> Vec<PathBuf> {
    let absolute = std::path::absolute(file).ok();
    let leads_to = fs::canonicalize(file).ok();
    [absolute, leads_to].into_iter().flatten().filter_map(|path| path.parent().map(Path::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io, os::unix::fs::symlink, thread};

    use turnpike_testkit::{Dir, alone};

    use super::*;

    #[test]
    fn a_file_is_readable_at_its_name_and_its_link_target() {
        let dir = Dir::new();
        for made in ["live", "archive"] {
            fs::create_dir(dir.at(made)).expect("the directory is writable");
        }
        fs::write(dir.at("archive/cert1.pem"), "").expect("the directory is writable");
        symlink("../archive/cert1.pem", dir.at("live/cert.pem")).expect("the directory is writable");
        let needs = Needs { files: vec![dir.at("live/cert.pem")], ..Needs::default() };
        let found = directories(&needs);
        let real = fs::canonicalize(dir.path()).expect("the directory exists");
        assert!(found.contains(&dir.at("live")) && found.contains(&real.join("archive")), "{found:?}");
        assert!(!found.contains(dir.path()) && !found.contains(Path::new("/home")));
        let needs = Needs { read: vec![dir.path().to_owned(), dir.at("nothing")], ..needs };
        let found = directories(&needs);
        assert!(found.contains(dir.path()) && !found.contains(&dir.at("live")), "{found:?}");
    }

    #[test]
    fn other_files_are_inaccessible_to_this_thread_and_its_children() {
        alone::in_own_process(turnpike_testkit::this_test!(), || {
            let dir = Dir::new();
            for made in ["read", "written", "other"] {
                fs::create_dir(dir.at(made)).expect("the directory is writable");
                fs::write(dir.at(&format!("{made}/file")), "text").expect("the directory is writable");
            }
            let needs = Needs {
                files: vec![dir.at("read/file")],
                written: vec![dir.at("written")],
                ..Needs::default()
            };
            match restrict(&needs, &mut Layers::default()) {
                Ok((_, written)) => assert_eq!(written, [dir.at("written").display().to_string()]),
                Err(why) => return alone::skip(&why),
            }
            let look = || {
                let denied = |result: io::Result<()>| {
                    result.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
                };
                let read = |path: &str| fs::read(dir.at(path)).map(drop);
                let write = |path: &str| fs::write(dir.at(path), "other");
                read("read/file").expect("allowed by the needs");
                read("written/file").expect("writable files are readable");
                write("written/new").expect("allowed by the needs");
                fs::remove_file(dir.at("written/new")).expect("the directory is writable");
                assert!(
                    denied(read("other/file")) && denied(write("other/new")) && denied(write("read/file"))
                );
                File::open("/proc/self/status").expect("/proc is readable");
            };
            look();
            thread::scope(|scope| scope.spawn(look).join().expect("the thread is restricted too"));
        });
    }
}
