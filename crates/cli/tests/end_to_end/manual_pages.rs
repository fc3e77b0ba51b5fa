//! Output of `turnpike man` and `turnpike completions` works with groff and the shells.

use crate::prelude::*;

fn printed(arguments: &[&str]) -> String {
    let run = Program::run(&mut turnpike(arguments));
    assert_eq!(run.code, Some(0), "{arguments:?}: {}", run.output());
    run.stdout
}

fn pages(dir: &Path) -> Vec<String> {
    Program::run(turnpike(&["man", "pages"]).current_dir(dir)).ended(0);
    let names = fs::read_dir(dir.join("pages"))
        .expect("the directory was created")
        .map(|entry| entry.expect("readable").file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().expect("ASCII")).collect();
    names.sort();
    names
}

#[test]
fn every_command_has_a_page_with_its_flags() {
    let dir = Dir::new();
    let names = pages(dir.path());
    for page in
        ["turnpike.1", "turnpike-serve.1", "turnpike-forward.1", "turnpike-load-turn.1", "turnpike-lab-ab.1"]
    {
        assert!(names.iter().any(|name| name == page), "no {page} in {names:?}");
    }
    let serve = fs::read_to_string(dir.path().join("pages/turnpike-serve.1")).expect("the file was written");
    for text in [".TH turnpike-serve 1", "\\-\\-relay\\-ports", ".SH EXAMPLES", "TURNPIKE_CONFIG", "49152"] {
        assert!(serve.contains(text), "no {text} in {serve}");
    }
    assert_eq!(
        printed(&["man"]),
        fs::read_to_string(dir.path().join("pages/turnpike.1")).unwrap_or_default().trim_end()
    );
}

#[test]
fn groff_renders_every_page_without_a_warning() {
    need!(installed("groff"));
    let dir = Dir::new();
    for page in pages(dir.path()) {
        let mut command = Command::new("groff");
        let output = command
            .args(["-man", "-ww", "-K", "utf8", "-T", "utf8", "-P", "-cbu"])
            .arg(dir.path().join("pages").join(&page));
        let output = output.output().expect("the program is installed");
        let (text, complaints) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && complaints.is_empty(), "{page}: {complaints}");
        assert!(text.contains("NAME") && text.contains("SYNOPSIS"), "{page}: {text}");
    }
}

#[test]
fn man_shows_examples_verbatim() {
    need!(installed("man").and(installed("groff")));
    let dir = Dir::new();
    pages(dir.path());
    let mut man = Command::new("man");
    man.args(["-l", "pages/turnpike-forward.1"]).env("MANWIDTH", "200").env("MAN_KEEP_FORMATTING", "");
    let output = man.current_dir(dir.path()).output().expect("the program is installed");
    let text = String::from_utf8_lossy(&output.stdout);
    let example = "turnpike forward -c /etc/rinetd.conf --workers 2";
    assert!(text.lines().any(|line| line.trim() == example), "{text}");
}

#[test]
fn bash_completes_commands_flags_and_their_values() {
    need!(installed("bash"));
    let dir = Dir::new();
    let file = dir.file("turnpike.bash", printed(&["completions", "bash"]));
    let complete = |words: &[&str]| {
        let (last, before) = (words.last().expect("a word"), words[words.len() - 2]);
        let script = format!(
            "source {}; COMP_WORDS=({}); COMP_CWORD={}; _turnpike turnpike {last:?} {before:?}; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            file.display(),
            words.join(" "),
            words.len() - 1,
        );
        let output =
            Command::new("bash").args(["--norc", "-c", &script]).output().expect("the program is installed");
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(complete(&["turnpike", "ser"]), ["serve"]);
    assert_eq!(complete(&["turnpike", "serve", "--relay-p"]), ["--relay-ports"]);
    assert_eq!(complete(&["turnpike", "print-firewall", "--format", "n"]), ["nftables"]);
}

#[test]
fn other_shells_accept_their_scripts() {
    let dir = Dir::new();
    let mut tried = 0;
    for (shell, argument) in [("zsh", "-n"), ("fish", "-n")] {
        let script = dir.file(shell, printed(&["completions", shell]));
        let Ok(program) = installed(shell) else { continue };
        tried += 1;
        let output =
            Command::new(program).arg(argument).arg(script).output().expect("the program is installed");
        assert!(output.status.success(), "{shell}: {}", String::from_utf8_lossy(&output.stderr));
    }
    for shell in ["elvish", "powershell"] {
        assert!(printed(&["completions", shell]).contains("print-firewall"));
    }
    if tried == 0 {
        skip("neither zsh nor fish is installed");
    }
}
