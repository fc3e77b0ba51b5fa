//! The command line of `cargo xtask bench forward`.

use std::path::{Path, PathBuf};

use clap::Args;

use super::{
    super::options::Run,
    subject::{OURS, Peer, Program, Subject, name_and_value, words},
};
use crate::Failure;

#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) run: Run,
    /// Where a peer's program is, if not on the PATH: oxidinetd, rinetd, haproxy or nginx (repeatable)
    #[arg(long, value_name = "NAME=FILE")]
    peer: Vec<String>,
    /// One more forwarder to compare with: NAME=BINARY for another build of turnpike, or NAME="COMMAND ..." with {listen},
    /// {target}, {scheme} (repeatable)
    #[arg(long, value_name = "NAME=COMMAND")]
    subject: Vec<String>,
    /// Leave a subject out (repeatable)
    #[arg(long, value_name = "NAME")]
    without: Vec<String>,
    /// More arguments for a subject, such as 'turnpike=--copy splice' (repeatable)
    #[arg(long, value_name = "NAME=ARGUMENTS")]
    set: Vec<String>,
    /// More arguments for the generator, such as --skip-rx-copy with the bulk workloads
    #[arg(long, value_name = "ARGUMENTS", default_value = "", allow_hyphen_values = true)]
    load: String,
}

/// Who takes part, and who does not.
#[derive(Debug)]
pub(crate) struct Field {
    pub(crate) subjects: Vec<Subject>,
    /// A peer's name and why it is left out.
    pub(crate) missing: Vec<(String, String)>,
}

impl Options {
    /// The subjects in a fixed order: ours, peers, further ones, references.
    pub(crate) fn field(&self, turnpike: &Path) -> Result<Field, Failure> {
        let given = self.given()?;
        let mut subjects = vec![Subject::new(OURS, Program::Turnpike(turnpike.into()))];
        let mut missing = Vec::new();
        for peer in Peer::ALL {
            let name = peer.name();
            if self.leaves_out(name) {
                missing.push((name.to_owned(), "--without".to_owned()));
                continue;
            }
            let path =
                given.iter().find(|(other, _)| other == peer.program()).map(|(_, path)| path.as_path());
            match peer.find(path) {
                Ok(program) => subjects.push(Subject::new(name, Program::Peer(peer, program))),
                Err(reason) => missing.push((name.to_owned(), reason)),
            }
        }
        for text in &self.subject {
            subjects.push(Subject::parse(text)?);
        }
        subjects.push(Subject::new("direct", Program::Direct));
        subjects.push(Subject::new("turnpike-sleepless", Program::Sleepless(turnpike.into())));
        subjects.retain(|subject| !self.leaves_out(&subject.name));
        for (index, subject) in subjects.iter().enumerate() {
            if subjects[..index].iter().any(|other| other.name == subject.name) {
                return Err(format!("two subjects are called {:?}", subject.name).into());
            }
        }
        for text in &self.set {
            let (name, arguments) = name_and_value("--set", text)?;
            let subject = subjects
                .iter_mut()
                .find(|subject| subject.name == name)
                .ok_or_else(|| format!("--set {text:?}: no such subject"))?;
            subject.arguments.extend(words(arguments));
        }
        Ok(Field { subjects, missing })
    }

    /// More arguments of the generator.
    pub(crate) fn load(&self) -> Vec<String> {
        words(&self.load)
    }

    /// The programs of `--peer`.
    fn given(&self) -> Result<Vec<(String, PathBuf)>, Failure> {
        self.peer
            .iter()
            .map(|text| {
                let (name, path) = name_and_value("--peer", text)?;
                if !Peer::ALL.iter().any(|peer| peer.program() == name) {
                    let known = "oxidinetd, rinetd, haproxy, nginx";
                    return Err(format!("--peer {text:?}: the peers are {known}").into());
                }
                Ok((name.to_owned(), path.into()))
            })
            .collect()
    }

    fn leaves_out(&self, name: &str) -> bool {
        self.without.iter().any(|other| other == name)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn field(line: &[&str]) -> Result<Field, Failure> {
        let line =
            Line::try_parse_from(std::iter::once(&"bench").chain(line)).map_err(|error| error.to_string())?;
        line.options.field(Path::new("/tmp/turnpike"))
    }

    /// Whatever is installed where the test runs.
    const NO_PEERS: [&str; 5] = ["oxidinetd", "rinetd", "haproxy", "haproxy-splice", "nginx"];

    fn names(line: &[&str]) -> Vec<String> {
        let without = NO_PEERS.iter().flat_map(|name| ["--without", name]);
        let line: Vec<&str> = without.chain(line.iter().copied()).collect();
        field(&line).unwrap().subjects.into_iter().map(|subject| subject.name).collect()
    }

    #[test]
    fn references_stand_last_and_can_be_left_out() {
        assert_eq!(
            names(&["--subject", "old=/tmp/old"]),
            ["turnpike", "old", "direct", "turnpike-sleepless"]
        );
        assert_eq!(names(&["--without", "direct", "--without", "turnpike-sleepless"]), ["turnpike"]);
    }

    #[test]
    fn a_peer_that_is_not_there_is_missing_with_its_reason() {
        let field = field(&["--peer", "rinetd=/no/such/rinetd"]).unwrap();
        let (_, reason) = field.missing.iter().find(|(name, _)| name == "rinetd").unwrap();
        assert!(reason.contains("/no/such/rinetd"), "{reason}");
        assert!(field.subjects.iter().all(|subject| subject.name != "rinetd"));
    }

    #[test]
    fn arguments_are_set_by_name() {
        let field = field(&["--set", "turnpike=--copy splice", "--set", "turnpike=--datapath gso"]).unwrap();
        assert_eq!(field.subjects[0].arguments, ["--copy", "splice", "--datapath", "gso"]);
    }

    #[test]
    fn unknown_names_are_refused() {
        for line in
            [["--peer", "socat=/bin/socat"], ["--set", "nobody=--x"], ["--subject", "turnpike=/tmp/x"]]
        {
            assert!(field(&line).is_err(), "{line:?}");
        }
    }
}
