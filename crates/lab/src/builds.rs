//! Which builds were measured: each file that a command names, by path, size, time and SHA-256. A path alone says nothing:
//! the next build stands at the same one.
//!
//! No program is run to learn its version: asked for `--version`, a server that does not know it may start. The hash
//! tells builds apart; a version is known of this program itself and of what has a `version` command in its experiment.

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

/// Files of one command: the program, and what it is given, such as a script or a configuration.
const MOST: usize = 8;
/// Of a longer file, in bytes, only size and time are kept.
const LONGEST: u64 = 1 << 30;
/// Hexadecimal digits of a hash in a sentence.
const SHORT: usize = 12;

/// The name of the workload's files; no service can have it, for the blank.
pub(crate) const WORKLOAD: &str = "the workload";

/// Looks at the files of all commands of an experiment. `versions` are those that were asked for.
pub(crate) fn look(
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

/// In what the programs of now differ from those of a record, as sentences.
pub(crate) fn differences(then: &[BuildFile], now: &[BuildFile]) -> Vec<String> {
    let of_now =
        |before: &BuildFile| now.iter().find(|now| (&now.name, now.word) == (&before.name, before.word));
    then.iter()
        .filter_map(|before| {
            let Some(after) = of_now(before) else {
                return Some(format!("{}: {} was measured, and is not there now", before.name, before.path));
            };
            (!before.is_same_as(after)).then(|| {
                format!(
                    "{}: {} is another build than the one measured: {}",
                    after.name,
                    after.path,
                    both(before, after)
                )
            })
        })
        .collect()
}

/// What has become of the files that a record names, as sentences; none while all are as they were.
pub(crate) fn since(builds: &[BuildFile]) -> Vec<String> {
    let mut told = Vec::new();
    for build in builds {
        let path = Path::new(&build.path);
        let sentence = if path.is_file() {
            let now = of_file(path);
            if build.is_same_as(&now) {
                continue;
            }
            format!("{}: at {} is another build now: {}", build.name, build.path, both(build, &now))
        } else {
            format!("{}: {} is no longer there", build.name, build.path)
        };
        told.push(sentence);
    }
    told
}

/// One line for a person.
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
    /// Enough of the hash for a sentence.
    pub(crate) fn short_hash(&self) -> Option<&str> {
        self.sha256.as_ref().map(|hash| hash.get(..SHORT).unwrap_or(hash))
    }

    /// By the hash; where there is none, by size and time.
    fn is_same_as(&self, other: &Self) -> bool {
        match (&self.sha256, &other.sha256) {
            (Some(this), Some(that)) => this == that,
            _ => (self.size, &self.modified) == (other.size, &other.modified),
        }
    }
}

/// The file that a word of a command names, if it does: the first word as a shell would find it; another one as a path,
/// also behind `=`.
fn file_of(word: &str, is_program: bool, directory: Option<&Path>) -> Option<PathBuf> {
    let at = |text: &str| {
        let path = directory.map_or_else(|| PathBuf::from(text), |directory| directory.join(text));
        // A device or a pipe would be read for ever. So would some files below /proc, all of which say that they are empty.
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
    // It may grow while it is read.
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

/// All crates of this workspace have one version, and the lab is part of the program.
fn own_version(path: &Path) -> Option<String> {
    let own = env::current_exe().ok()?.canonicalize().ok()?;
    (own == path).then(|| format!("turnpike {}", env!("CARGO_PKG_VERSION")))
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::Dir;

    use super::*;

    /// An experiment whose subjects are `first` and `second`, scripts of `directory`.
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
        look(&experiment, &variables, &[("b".to_owned(), "2.0".to_owned())].into())
    }

    #[test]
    fn a_command_is_known_by_its_program_and_the_files_that_it_is_given() {
        let directory = Dir::new();
        let builds = experiment(directory.path());
        let found: Vec<_> = builds
            .iter()
            .map(|build| (build.name.as_str(), build.word, build.path.rsplit('/').next().unwrap()))
            .collect();
        // `sh` and `sleep` may be links to whatever the system has for them.
        assert_eq!((found[0], found[1]), (("a", 0, "first"), ("a", 1, "list.conf")));
        assert_eq!((found[2].0, found[2].1, found[3]), ("b", 0, ("b", 1, "second")));
        assert_eq!(
            (found.len(), found[4].0, found[4].1),
            (5, WORKLOAD, 0),
            "neither a device nor the kernel's log is read"
        );
        let first = &builds[0];
        // sha256sum of "#!/bin/sh\nsleep 1\n".
        assert_eq!(
            first.sha256.as_deref(),
            Some("d23f1849a683336f0a4ce761fc165107eb112772742136292f00ef1f0a70f6ea")
        );
        assert_eq!(first.size, 18);
        assert!(first.modified.len() == 20 && first.modified.ends_with('Z'), "{first:?}");
        assert_eq!((&first.version, builds[2].version.as_deref()), (&None, Some("2.0")));
        assert_eq!(builds[3].version, None, "the script has not the version of the program");
    }

    #[test]
    fn another_build_at_the_same_path_is_noticed_and_a_copy_of_the_same_is_not() {
        let directory = Dir::new();
        let then = experiment(directory.path());
        assert_eq!((since(&then), differences(&then, &look_at(directory.path()))), (vec![], vec![]));

        let second = directory.at("second");
        fs::write(&second, "sleep 3\n").unwrap();
        let [told] = &since(&then)[..] else { panic!("one file has changed") };
        assert!(
            told.starts_with("b: at ") && told.contains("/second is another build now: then SHA-256 "),
            "{told}"
        );
        let [told] = &differences(&then, &look_at(directory.path()))[..] else { panic!("one has changed") };
        assert!(told.contains("/second is another build than the one measured: then SHA-256 "), "{told}");

        let elsewhere = Dir::new();
        assert_eq!(differences(&then, &experiment(elsewhere.path())), Vec::<String>::new());

        fs::remove_file(&second).unwrap();
        assert!(since(&then)[0].ends_with("/second is no longer there"));
        assert!(differences(&then, &look_at(directory.path()))[0].ends_with("is not there now"));
    }

    #[test]
    fn this_program_knows_its_own_version_without_being_run() {
        let own = env::current_exe().unwrap().canonicalize().unwrap();
        assert_eq!(own_version(&own).unwrap(), format!("turnpike {}", env!("CARGO_PKG_VERSION")));
        assert_eq!(own_version(Path::new("/bin/sh")), None);
    }
}
