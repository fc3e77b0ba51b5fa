//! Tests of include files on disk.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};
use turnpike_strict::file_text;

use super::super::{ForwardLoaded, ForwardSources};
use crate::{Flags, Mistakes, Sources};

struct Dir(PathBuf, turnpike_testkit::Dir);

impl Dir {
    fn new() -> Self {
        let dir = turnpike_testkit::Dir::new();
        Self(dir.at("[1]"), dir)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        self.1.file(&format!("[1]/{name}"), text)
    }

    fn load(&self) -> Result<ForwardLoaded, Mistakes> {
        let main = self.0.join("main.toml");
        let sources = Sources::new(None, Vec::new(), Flags::new());
        let sources = ForwardSources { sources, arguments: Vec::new() };
        let mut problems = Vec::new();
        let text = file_text(&main, &mut problems).expect("a main file");
        sources.merge(Some((&main, &text)), problems)
    }

    fn mistakes(&self) -> Vec<String> {
        let text = self.load().expect_err("a mistake").to_string();
        text.lines().map(|line| self.short(line)).collect()
    }

    fn short(&self, text: &str) -> String {
        text.replace(&format!("{}/", self.0.display()), "")
    }
}

fn rule(port: u16) -> String {
    format!("[[rule]]\nlisten = \"127.0.0.1:{port}\"\ntarget = \"10.0.0.1:80\"\n")
}

fn ports(loaded: &ForwardLoaded) -> Vec<u16> {
    loaded.settings.rules.iter().map(|rule| rule.ports.first).collect()
}

#[test]
fn included_files_are_read_in_order_of_their_names() {
    let dir = Dir::new();
    dir.write("main.toml", &format!("include = [\"rules.d/*.toml\", \"more/x.toml\"]\n{}", rule(1)));
    dir.write("rules.d/20-b.toml", &rule(3));
    dir.write("rules.d/10-a.toml", &rule(2));
    dir.write("rules.d/.10-a.toml.swp", "\0");
    dir.write("rules.d/.hidden.toml", "nonsense");
    dir.write("rules.d/README", "not a rule");
    fs::create_dir(dir.0.join("rules.d/old.toml")).expect("a directory");
    dir.write("more/x.toml", &format!("include = \"y.toml\"\n{}", rule(4)));
    dir.write("more/y.toml", &format!("{}\n# comment\n", rule(5)));
    let loaded = dir.load().expect("valid");
    assert_eq!(ports(&loaded), [1, 2, 3, 4, 5]);
    let names: Vec<String> =
        loaded.included.iter().map(|path| dir.short(&path.display().to_string())).collect();
    assert_eq!(names, ["rules.d/10-a.toml", "rules.d/20-b.toml", "more/x.toml", "more/y.toml"]);
    assert_eq!(loaded.warnings, [""; 0]);
    let whole = loaded.settings.to_toml();
    assert!(!whole.contains("include"), "{whole}");
    let again = Dir::new();
    again.write("main.toml", &whole);
    assert_eq!(again.load().expect("valid").settings.rules, loaded.settings.rules);
}

#[test]
fn mistakes_name_the_included_file_and_line() {
    let dir = Dir::new();
    dir.write("main.toml", &format!("include = [\"a.toml\", \"b.toml\"]\n{}[log]\nlevl = 3\n", rule(1)));
    dir.write("a.toml", &format!("\n{}idel = 5\n", rule(2)));
    dir.write("b.toml", "[[rule]\n");
    let found = dir.mistakes();
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found[0].starts_with("main.toml:6:1: log.levl: unknown key"), "{found:?}");
    assert!(found[1].starts_with("a.toml:5:1: rule.idel: unknown key"), "{found:?}");
    assert!(found[2].starts_with("b.toml:1:") && found[2].contains("invalid TOML"), "{found:?}");
}

#[test]
fn duplicate_listener_names_both_files() {
    let dir = Dir::new();
    dir.write("main.toml", "include = \"*.d/*\"\n");
    dir.write("x.d/a.toml", &rule(7));
    dir.write("y.d/b.toml", &format!("\n\n{}", rule(7)));
    assert_eq!(
        dir.mistakes(),
        ["y.d/b.toml:4:10: rule.listen: 127.0.0.1:7 is already used by the rule at x.d/a.toml:1:1; \
          expected each address and port once per protocol"]
    );
}

#[test]
fn circular_includes_are_refused() {
    let dir = Dir::new();
    dir.write("main.toml", &format!("include = [\"a.toml\"]\n{}", rule(1)));
    dir.write("a.toml", "include = [\n  \"b.toml\",\n]\n");
    dir.write("b.toml", "include = [\"a.toml\", \"link.toml\"]\n");
    symlink("main.toml", dir.0.join("link.toml")).expect("a link");
    let found = dir.mistakes();
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[0].starts_with("b.toml:1:12: include: a.toml includes itself, directly or through other files"),
        "{found:?}"
    );
    assert!(found[1].starts_with("b.toml:1:22: include: link.toml includes itself"), "{found:?}");
    dir.write("main.toml", &format!("include = [\"*.toml\"]\n{}", rule(1)));
    assert!(dir.mistakes().iter().any(|mistake| mistake.contains("include: main.toml includes itself")));
}

#[test]
fn file_matched_by_two_patterns_is_read_once() {
    let dir = Dir::new();
    dir.write("main.toml", "include = [\"d/*.toml\", \"d/a.toml\", \"l/*\"]\n");
    dir.write("d/a.toml", &rule(7));
    fs::create_dir(dir.0.join("l")).expect("a directory");
    symlink("../d/a.toml", dir.0.join("l/same.toml")).expect("a link");
    let loaded = dir.load().expect("valid");
    assert_eq!((ports(&loaded), loaded.included.len()), (vec![7], 1));
}

#[test]
fn empty_pattern_warns_and_missing_file_is_an_error() {
    let dir = Dir::new();
    dir.write("main.toml", &format!("include = [\"rules.d/*.toml\"]\n{}", rule(1)));
    let warnings = dir.load().expect("valid").warnings;
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert_eq!(dir.short(&warnings[0]), "main.toml:1:12: include \"rules.d/*.toml\" matches no file");

    dir.write("main.toml", &format!("include = [\"rules.d/a.toml\", 5, \"\", \"a[.toml\"]\n{}", rule(1)));
    let found = dir.mistakes();
    assert_eq!(found.len(), 4, "{found:?}");
    assert!(
        found[0].starts_with("main.toml:1:12: include: cannot read rules.d/a.toml: No such file"),
        "{found:?}"
    );
    assert!(
        found[1].starts_with("main.toml:1:30: include: found the integer 5; expected paths of TOML"),
        "{found:?}"
    );
    assert!(found[2].starts_with("main.toml:1:33: include: found the string \"\"; expected"), "{found:?}");
    assert!(found[3].starts_with("main.toml:1:37: include: found \"a[.toml\": "), "{found:?}");
}

#[test]
fn included_files_may_contain_only_rules() {
    let dir = Dir::new();
    dir.write("main.toml", "include = [\"a.toml\", \"b.conf\", \"c.toml\"]\n");
    dir.write("a.toml", &format!("{}[forward]\nworkers = 2\n[[rules]]\n", rule(1)));
    dir.write("b.conf", "0.0.0.0 80 10.0.0.1 80\n");
    dir.write("c.toml", "[[forwarding_rules]]\n");
    let found = dir.mistakes();
    assert_eq!(found.len(), 4, "{found:?}");
    assert!(
        found[0]
            .starts_with("a.toml:4:2: forward: an included file cannot contain settings; expected [[rule]]"),
        "{found:?}"
    );
    assert!(found[1].starts_with("a.toml:6:3: rules: unknown section"), "{found:?}");
    assert!(found[2].starts_with("b.conf: include: only turnpike's own rules can be included"), "{found:?}");
    assert!(found[2].ends_with("turnpike check-config --forward b.conf converts it"), "{found:?}");
    assert!(found[3].starts_with("c.toml: include: only turnpike's own rules"), "{found:?}");
}

#[test]
fn include_depth_and_file_count_are_limited() {
    let dir = Dir::new();
    dir.write("main.toml", "include = \"f0.toml\"\n");
    for number in 0..20 {
        let next = number + 1;
        dir.write(&format!("f{number}.toml"), &format!("include = \"f{next}.toml\"\n{}", rule(next)));
    }
    let found = dir.mistakes();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("f7.toml:1:11: include: f8.toml is nested too deeply"), "{found:?}");

    let crowd = Dir::new();
    crowd.write("main.toml", "include = [\"d/*\", \"e/*\"]\n");
    for number in 0..1005 {
        crowd.write(&format!("d/{number}"), "");
        crowd.write(&format!("e/{number}"), "");
    }
    let found = crowd.mistakes();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].contains("exceeds the maximum number of files; expected at most 1000 files"),
        "{found:?}"
    );
}

#[test]
fn include_paths_are_relative_to_the_including_file() {
    let dir = Dir::new();
    dir.write("main.toml", "include = \"a.toml\"\n");
    dir.write("a.toml", &rule(9));
    assert!(!Path::new("a.toml").exists());
    assert_eq!(ports(&dir.load().expect("valid")), [9]);
}
