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
    let mut add = |name: &str, command: &[String], directory: Option<&Path>| {
        let mut files = 0;
        for (word, text) in command.iter().enumerate() {
            let Some(path) = file_of(text, word == 0, directory) else { continue };
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
        for ServiceSpec { name, cwd, command, .. } in service.processes(variables).unwrap_or_default() {
            if let Ok(command) = command.words() {
                add(&name, &command, cwd.as_deref());
            }
        }
    }
    if let Ok(command) = experiment.workload_of_first(variables) {
        add(WORKLOAD, &command, experiment.workload.cwd.as_deref());
    }
    builds
}

pub(crate) fn differences(then: &[BuildFile], now: &[BuildFile]) -> Vec<String> {
    let of_now =
        |before: &BuildFile| now.iter().find(|now| (&now.name, now.word) == (&before.name, before.word));
    then.iter()
        .filter_map(|before| {
            let Some(after) = of_now(before) else {
                return Some(format!("{}: {} was measured but no longer exists", before.name, before.path));
            };
            (!before.is_same_as(after)).then(|| {
                format!(
                    "{}: {} differs from the measured build: {}",
                    after.name,
                    after.path,
                    both(before, after)
                )
            })
        })
        .collect()
}

pub(crate) fn changes_since(builds: &[BuildFile]) -> Vec<String> {
    let mut told = Vec::new();
    for build in builds {
        let path = Path::new(&build.path);
        let sentence = if path.is_file() {
            let now = of_file(path);
            if build.is_same_as(&now) {
                continue;
            }
            format!("{}: {} has changed: {}", build.name, build.path, both(build, &now))
        } else {
            format!("{}: {} no longer exists", build.name, build.path)
        };
        told.push(sentence);
    }
    told
}

pub(crate) fn describe(build: &BuildFile) -> String {
    let version = build.version.as_ref().map_or_else(String::new, |version| format!(" ({version})"));
    format!("{}: {}{version}, {}", build.name, build.path, short(build))
}

fn both(then: &BuildFile, now: &BuildFile) -> String {
    format!("then {}, now {}", short(then), short(now))
}

fn short(build: &BuildFile) -> String {
    let hash = build.short_hash().map_or_else(|| "no hash".to_owned(), |hash| format!("SHA-256 {hash}"));
    format!("{hash}, {} bytes, modified {}", build.size, build.modified)
}

impl BuildFile {
    pub(crate) fn short_hash(&self) -> Option<&str> {
        self.sha256.as_ref().map(|hash| hash.get(..SHORT).unwrap_or(hash))
    }

    fn is_same_as(&self, other: &Self) -> bool {
        match (&self.sha256, &other.sha256) {
            (Some(this), Some(that)) => this == that,
            _ => (self.size, &self.modified) == (other.size, &other.modified),
        }
    }
}

/// File that a word of a command refers to. The first word is looked up as a shell would; the others may be paths or contain a path after
/// `=`.
fn file_of(word: &str, is_program: bool, directory: Option<&Path>) -> Option<PathBuf> {
    let at = |text: &str| {
        let path = directory.map_or_else(|| PathBuf::from(text), |directory| directory.join(text));
        // Reading a device, a pipe, or some files below /proc (which report a size of 0) might never end.
        fs::metadata(&path).is_ok_and(|file| file.is_file() && file.len() > 0).then_some(path)
    };
    let path = if is_program {
        if word.contains('/') { at(word) } else { tools::find(word) }
    } else if word.starts_with('-') {
        at(word.split_once('=')?.1)
    } else {
        at(word)
    }?;
    Some(path.canonicalize().unwrap_or(path))
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
        look_at(directory)
    }

    fn look_at(directory: &Path) -> Vec<BuildFile> {
        let text = format!(
            "name = 'x'\nmetric = 'delivered_pps'\ntopology = 'host'\n\
             [[subject]]\nname = 'a'\ncommand = '{0}/first --config={0}/list.conf {0}'\n\
             [[subject]]\nname = 'b'\ncommand = 'sh ./second -x'\ncwd = '{0}'\nversion = 'echo 2.0'\n\
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
    fn replaced_builds_are_noticed_and_copies_are_not() {
        let directory = Dir::new();
        let then = experiment(directory.path());
        assert_eq!((changes_since(&then), differences(&then, &look_at(directory.path()))), (vec![], vec![]));

        let second = directory.at("second");
        fs::write(&second, "sleep 3\n").unwrap();
        let [told] = &changes_since(&then)[..] else { panic!("not one changed file") };
        assert!(told.starts_with("b: /") && told.contains("/second has changed: then SHA-256 "), "{told}");
        let [told] = &differences(&then, &look_at(directory.path()))[..] else {
            panic!("not one changed build")
        };
        assert!(told.contains("/second differs from the measured build: then SHA-256 "), "{told}");

        let elsewhere = Dir::new();
        assert_eq!(differences(&then, &experiment(elsewhere.path())), Vec::<String>::new());

        fs::remove_file(&second).unwrap();
        assert!(changes_since(&then)[0].ends_with("/second no longer exists"));
        assert!(differences(&then, &look_at(directory.path()))[0].ends_with("no longer exists"));
    }

    #[test]
    fn the_version_of_this_program_is_known_without_running_it() {
        let own = env::current_exe().unwrap().canonicalize().unwrap();
        assert_eq!(own_version(&own).unwrap(), format!("turnpike {}", env!("CARGO_PKG_VERSION")));
        assert_eq!(own_version(Path::new("/bin/sh")), None);
    }
}
