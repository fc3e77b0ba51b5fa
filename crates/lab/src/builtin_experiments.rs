//! Experiments compiled into the binary, so that they run without the repository. A file with the same name in `experiments/` takes
//! precedence.

use std::path::{Path, PathBuf};

use turnpike_strict::nearest;

use crate::error::LabError;

macro_rules! texts {
    ($folder:literal: $($name:literal)*) => {
        &[$(($name, include_str!(concat!("../../../experiments/", $folder, $name, ".toml")))),*]
    };
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct BuiltinTexts {
    kind: &'static str,
    folder: &'static str,
    texts: &'static [(&'static str, &'static str)],
}

pub(crate) const EXPERIMENTS: BuiltinTexts = BuiltinTexts {
    kind: "experiment",
    folder: "",
    texts: texts!["":
        "relay-thin" "relay-burst" "relay-flood" "relay-rate" "relay-stream" "relay-stream-rate" "relay-allocate"
        "relay-allocate-tls" "relay-memory" "relay-store" "relay-load" "relay-calls" "relay-shared" "relay-coalesce" "relay-quality" "relay-builds" "default-rate" "default-calls" "kernel-rate" "kernel-xdp"
        "kernel-calls" "kernel-burst" "kernel-flood" "kernel-mixed" "kernel-bind" "forward-throughput" "forward-rr" "forward-connect"
        "forward-udp" "forward-udp-thin" "forward-memory" "fleet" "fleet-allocate" "fleet-idle" "net-sockets" "net-spread" "net-zerocopy" "net-io-uring" "net-lookup"
    ],
};

pub(crate) const PARTS: BuiltinTexts = BuiltinTexts {
    kind: "part",
    folder: "parts",
    texts: texts!["parts/": "relays" "default" "datapaths" "forwarders" "datagram-forwarders" "nodes"],
};

pub(crate) const SUITES: BuiltinTexts = BuiltinTexts {
    kind: "suite",
    folder: "suites",
    texts: texts!["suites/": "relay" "default" "relay-thin-user-space" "quality" "builds" "kernel" "forward" "forward-kernel" "fleet" "net"],
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BuiltinText {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

impl BuiltinTexts {
    /// Looks for a file with this path, then in `experiments/`, then among the built-ins.
    pub(crate) fn find(&self, wanted: &Path, experiments: &Path) -> Result<BuiltinText, LabError> {
        let named = experiments.join(self.folder).join(wanted).with_extension("toml");
        if let Some(path) = [wanted.to_owned(), named].into_iter().find(|path| path.is_file()) {
            return Ok(BuiltinText { text: LabError::read(&path)?, path });
        }
        let name = wanted.display().to_string();
        match self.texts.iter().find(|(known, _)| *known == name) {
            Some((name, text)) => Ok(BuiltinText { path: built_in(name), text: (*text).to_owned() }),
            None => Err(self.unknown(&name)),
        }
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (&'static str, BuiltinText)> {
        self.texts
            .iter()
            .map(|(name, text)| (*name, BuiltinText { path: built_in(name), text: (*text).to_owned() }))
    }

    fn unknown(&self, wanted: &str) -> LabError {
        let kind = self.kind;
        LabError::usage(match nearest(wanted, self.texts.iter().map(|(name, _)| *name)) {
            Some(meant) => format!("no {kind} {wanted}; did you mean \"{meant}\"?"),
            None => format!("no {kind} {wanted}: give a file, or a name from `turnpike lab list`"),
        })
    }
}

fn built_in(name: &str) -> PathBuf {
    Path::new("built-in").join(name).with_extension("toml")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use turnpike_testkit::Dir;

    use super::*;
    use crate::{experiment::Experiment, suite::Suite};

    fn repository() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../experiments")
    }

    /// True if a built-in file is valid, or invalid only because the machine has too few CPUs.
    fn is_sound<T>(parsed: Result<T, LabError>) -> bool {
        match parsed {
            Ok(_) => true,
            Err(error) => error.to_string().lines().all(|line| line.contains("but this machine has")),
        }
    }

    #[test]
    fn built_in_texts_match_the_files() {
        for shelf in [EXPERIMENTS, PARTS, SUITES] {
            let mut files: Vec<String> = fs::read_dir(repository().join(shelf.folder))
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
                .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
                .collect();
            files.sort();
            let mut names: Vec<&str> = shelf.all().map(|(name, _)| name).collect();
            names.sort_unstable();
            assert_eq!(files, names);
        }
    }

    #[test]
    fn every_built_in_text_parses() {
        for (name, BuiltinText { path, text }) in EXPERIMENTS.all() {
            let parsed = Experiment::parse(&path, &text);
            assert!(is_sound(parsed), "{name}: {:?}", Experiment::parse(&path, &text).err());
            assert!(
                text.contains(&format!("name = \"{name}\"")),
                "{name} does not have the name of its file"
            );
        }
        for (name, BuiltinText { path, text }) in SUITES.all() {
            let suite = Suite::parse(&path, &text).unwrap();
            assert_eq!(suite.name, name);
            let requests = suite.requests(&Default::default());
            assert!(is_sound(requests), "{name}");
        }
    }

    #[test]
    fn a_file_takes_precedence_over_a_built_in() {
        let directory = Dir::new();
        let own = directory.at("relay-thin.toml");
        fs::write(&own, "x").unwrap();
        let found = EXPERIMENTS.find(Path::new("relay-thin"), directory.path()).unwrap();
        assert_eq!(found, BuiltinText { path: own.clone(), text: "x".to_owned() });
        assert_eq!(EXPERIMENTS.find(&own, Path::new("nowhere")).unwrap().path, own);
        let built_in = EXPERIMENTS.find(Path::new("relay-thin"), Path::new("nowhere")).unwrap();
        assert_eq!(built_in.path, Path::new("built-in/relay-thin.toml"));
        let error = EXPERIMENTS.find(Path::new("relay-thick"), Path::new("nowhere")).unwrap_err();
        assert_eq!(error.to_string(), "no experiment relay-thick; did you mean \"relay-thin\"?");
    }
}
