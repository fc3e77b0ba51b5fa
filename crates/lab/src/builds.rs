//! The builds that were measured: every file named in a command, with its path, size, modification time and SHA-256, because a path alone
//! does not identify a build.
//!
//! Programs are not run with `--version`, because a server that does not know the flag might start. Versions are known only for this
//! program, and for services with a `version` command in the experiment.

use std::{
    collections::BTreeMap,
    env,
    fs::{self, File},
    io::{self, BufRead as _, Read},
    path::{Path, PathBuf},
};

use jiff::Timestamp;
use sha2::{Digest, Sha256};

use crate::{
    environment,
    experiment::{Experiment, ServiceSpec, fill::Variables},
    record::BuildFile,
    tools,
};

const MOST: usize = 8;
/// Maximum size of files that are hashed; larger ones are identified by size and modification time.
const LONGEST: u64 = 1 << 30;
const SHORT: usize = 12;

/// Name of the workload in the list of programs. It contains a space, so no service can have this name.
pub(crate) const WORKLOAD: &str = "the workload";

pub(crate) fn identify(
    experiment: &Experiment,
    variables: &Variables,
    versions: &BTreeMap<String, String>,
) -> Vec<BuildFile> {
    let mut seen = BTreeMap::new();
    let mut builds = Vec::new();
    let mut add = |name: &str, command: &[String]| {
        let mut files = 0;
        for (word, text) in command.iter().enumerate() {
            let Some(path) = file_of(text, word == 0) else { continue };
            if files == MOST {
                break;
            }
            files += 1;
            let build = seen.entry(path.clone()).or_insert_with(|| of_file(&path)).clone();
            let said = versions.get(name).filter(|_| word == 0).cloned();
            let version = said.or_else(|| own_version(&path));
            builds.push(BuildFile { name: name.to_owned(), word, version, ..build });
        }
    };
    let subjects_first = experiment.subject.iter().chain(&experiment.helper);
    for service in subjects_first {
        for ServiceSpec { name, command, .. } in service.processes(variables).unwrap_or_default() {
            if let Ok(command) = command.words() {
                add(&name, &command);
            }
        }
    }
    if let Ok(command) = experiment.workload_of_first(variables) {
        add(WORKLOAD, &command);
    }
    builds
}

/// Files that were replaced or removed after they were recorded.
pub(crate) fn changes_since(builds: &[BuildFile]) -> Vec<String> {
    let change = |build: &BuildFile| {
        let path = Path::new(&build.path);
        if !path.is_file() {
            return Some(format!("{}: {} no longer exists", build.name, build.path));
        }
        let now = of_file(path);
        let is_same = match (&build.sha256, &now.sha256) {
            (Some(then), Some(now)) => then == now,
            _ => (build.size, &build.modified) == (now.size, &now.modified),
        };
        let change = || format!("then {}, now {}", short(build), short(&now));
        (!is_same).then(|| format!("{}: {} has changed: {}", build.name, build.path, change()))
    };
    builds.iter().filter_map(change).collect()
}

pub(crate) fn describe(build: &BuildFile) -> String {
    let version = build.version.as_ref().map_or_else(String::new, |version| format!(" ({version})"));
    format!("{}: {}{version}, {}", build.name, build.path, short(build))
}

fn short(build: &BuildFile) -> String {
    let hash = build.short_hash().map_or_else(|| "no hash".to_owned(), |hash| format!("SHA-256 {hash}"));
    format!("{hash}, {} bytes, modified {}", build.size, build.modified)
}

impl BuildFile {
    pub(crate) fn short_hash(&self) -> Option<&str> {
        self.sha256.as_ref().map(|hash| hash.get(..SHORT).unwrap_or(hash))
    }
}

/// File that a word of a command refers to. The first word is looked up as a shell would; the others may be paths or contain a path after
/// `=`.
fn file_of(word: &str, is_program: bool) -> Option<PathBuf> {
    let path = match is_program {
        true => tools::find(word)?,
        false if word.starts_with('-') => PathBuf::from(word.split_once('=')?.1),
        false => PathBuf::from(word),
    };
    // Reading a device, a pipe, or some files below /proc (which report a size of 0) might never end.
    let is_file = fs::metadata(&path).is_ok_and(|file| file.is_file() && file.len() > 0);
    is_file.then(|| path.canonicalize().unwrap_or(path))
}

fn of_file(path: &Path) -> BuildFile {
    let metadata = fs::metadata(path).ok();
    let size = metadata.as_ref().map_or(0, fs::Metadata::len);
    let modified = metadata.and_then(|metadata| Timestamp::try_from(metadata.modified().ok()?).ok());
    BuildFile {
        path: path.display().to_string(),
        size,
        modified: modified.map_or_else(|| "unknown".to_owned(), environment::show_time),
        sha256: if size <= LONGEST { hash(path).ok() } else { None },
        ..BuildFile::default()
    }
}

fn hash(path: &Path) -> io::Result<String> {
    let mut file = io::BufReader::new(File::open(path)?.take(LONGEST));
    let mut hasher = Sha256::new();
    loop {
        let part = file.fill_buf()?;
        if part.is_empty() {
            break;
        }
        hasher.update(part);
        let len = part.len();
        file.consume(len);
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Version of this program. The lab is part of it, and all crates of the workspace share one version.
fn own_version(path: &Path) -> Option<String> {
    let own = env::current_exe().ok()?.canonicalize().ok()?;
    (own == path).then(|| format!("turnpike {}", env!("CARGO_PKG_VERSION")))
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::Dir;

    use super::*;

    fn experiment(directory: &Path) -> Vec<BuildFile> {
        for (name, text) in [("first", "#!/bin/sh\nsleep 1\n"), ("second", "sleep 2\n"), ("list.conf", "x\n")]
        {
            fs::write(directory.join(name), text).unwrap();
        }
        let text = format!(
            "name = 'x'\nmetric = 'delivered_pps'\ntopology = 'host'\n\
             [[subject]]\nname = 'a'\ncommand = '{0}/first --config={0}/list.conf {0}'\n\
             [[subject]]\nname = 'b'\ncommand = 'sh {0}/second -x'\nversion = 'echo 2.0'\n\
             [workload]\ncommand = 'sleep 1 /dev/zero /proc/kmsg'\n",
            directory.display()
        );
        let experiment = Experiment::parse(Path::new("x.toml"), &text).unwrap();
        let variables = experiment.variables(&BTreeMap::new(), &experiment.points()[0], Path::new("."));
        identify(&experiment, &variables, &[("b".to_owned(), "2.0".to_owned())].into())
    }

    #[test]
    fn a_command_is_identified_by_its_program_and_files() {
        let directory = Dir::new();
        let builds = experiment(directory.path());
        let found: Vec<_> = builds
            .iter()
            .map(|build| (build.name.as_str(), build.word, build.path.rsplit('/').next().unwrap()))
            .collect();
        assert_eq!((found[0], found[1]), (("a", 0, "first"), ("a", 1, "list.conf")));
        assert_eq!((found[2].0, found[2].1, found[3]), ("b", 0, ("b", 1, "second")));
        assert_eq!(
            (found.len(), found[4].0, found[4].1),
            (5, WORKLOAD, 0),
            "devices and the kernel log are not read"
        );
        let first = &builds[0];
        // sha256sum of "#!/bin/sh
        // sleep 1
        // ".
        assert_eq!(
            first.sha256.as_deref(),
            Some("d23f1849a683336f0a4ce761fc165107eb112772742136292f00ef1f0a70f6ea")
        );
        assert_eq!(first.size, 18);
        assert!(first.modified.len() == 20 && first.modified.ends_with('Z'), "{first:?}");
        assert_eq!((&first.version, builds[2].version.as_deref()), (&None, Some("2.0")));
        assert_eq!(builds[3].version, None, "a script does not get the version of the program");
    }

    #[test]
    fn replaced_builds_are_noticed() {
        let directory = Dir::new();
        let then = experiment(directory.path());
        assert_eq!(changes_since(&then), Vec::<String>::new());

        let second = directory.at("second");
        fs::write(&second, "sleep 3\n").unwrap();
        let [told] = &changes_since(&then)[..] else { panic!("not one changed file") };
        assert!(told.starts_with("b: /") && told.contains("/second has changed: then SHA-256 "), "{told}");
        fs::remove_file(&second).unwrap();
        assert!(changes_since(&then)[0].ends_with("/second no longer exists"));
    }

    #[test]
    fn the_version_of_this_program_is_known_without_running_it() {
        let own = env::current_exe().unwrap().canonicalize().unwrap();
        assert_eq!(own_version(&own).unwrap(), format!("turnpike {}", env!("CARGO_PKG_VERSION")));
        assert_eq!(own_version(Path::new("/bin/sh")), None);
    }
}
