//! Log level and format: `-v`, `-q`, `--log-format`, and colours on terminals.

use crate::prelude::*;

#[test]
fn v_logs_more_and_q_logs_less() {
    let mut serve = Serve::start(&["-v"]);
    Load::new(serve.address(V4)).with("--mode allocate --rate 5 --duration 1").run().ended(0);
    serve.program.line_with("allocation opened");

    let target = tcp_echo();
    let rule = format!("tcp://127.0.0.1:19201={target}?name=a&deny=127.0.0.2");
    for (flags, ended) in [(&["-q"][..], false), (&["-qq"], false), (&[], true)] {
        let forward =
            Program::start(turnpike_trials::turnpike(&["forward", "--admin", "off", &rule]).args(flags));
        let mut stream =
            eventually("the server listens", || std::net::TcpStream::connect("127.0.0.1:19201").ok());
        assert_eq!(say(&mut stream, "hello"), "hello");
        drop(stream);
        forward.signal("INT");
        let forward = forward.wait(turnpike_trials::SOON);
        assert_eq!(forward.stderr.contains("connection ended"), ended, "{flags:?}: {}", forward.stderr);
        assert_eq!(forward.stderr.contains("listening"), ended, "{flags:?}: {}", forward.stderr);
    }
}

#[test]
fn log_level_flags_conflict() {
    for command in ["serve", "forward"] {
        for flags in [&["-v", "-q"][..], &["-v", "--log", "info"], &["-q", "--log", "info"]] {
            let mut program = turnpike_trials::turnpike(&[command]);
            let run = Program::run(program.args(flags));
            assert_eq!(run.code, Some(2), "{command} {flags:?}: {}", run.output());
            assert!(run.stderr.contains("cannot be used with"), "{}", run.output());
        }
        let run = Program::run(&mut turnpike_trials::turnpike(&[command, "--log-format", "xml"])).ended(2);
        assert!(run.stderr.contains("--log-format") && run.stderr.contains("json"), "{}", run.output());
    }
}

#[test]
fn log_format_flag_sets_the_format() {
    let mut forward =
        Forward::start(&[&format!("tcp://127.0.0.1:0={}?name=a", tcp_echo()), "--log-format", "json"]);
    let address = forward.address("rule a");
    assert_eq!(say(&mut connect(address), "hello"), "hello");
    let line = forward.program.line_with("connection ended");
    assert!(line.starts_with('{') && line.ends_with('}'), "{line}");
}

/// Output of a command on a terminal, which script(1) provides; `None` without script(1).
fn on_terminal(command: &str, no_color: Option<&str>) -> Option<String> {
    let shell = format!("{} {command}", env!("CARGO_BIN_EXE_turnpike"));
    let mut script = Command::new(installed("script").ok()?);
    script.args(["-qfec", &shell, "/dev/null"]).env_clear().env("SHELL", "/bin/sh").env("TERM", "xterm");
    if let Some(value) = no_color {
        script.env("NO_COLOR", value);
    }
    Some(Program::run(&mut script).stdout)
}

#[test]
fn log_has_colours_on_terminals_without_no_color() {
    let taken = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("its address").port();
    let serve = format!("serve --listen 127.0.0.1:{port} --admin off --user a:b --relay-ip 127.0.0.1");
    let said = |no_color: Option<&str>| {
        let output = on_terminal(&serve, no_color)?;
        let first = output.lines().find(|line| line.contains("INFO")).map(str::to_owned);
        Some(first.unwrap_or_else(|| panic!("no line in {output}")))
    };
    let coloured = need!(said(None).ok_or("script(1), which provides a terminal, is not installed"));
    assert!(coloured.contains('\u{1b}'), "not coloured on a terminal");
    assert!(said(Some("")).is_some_and(|line| line.contains('\u{1b}')), "an empty value is treated as unset");
    let plain = said(Some("1")).unwrap_or_default();
    assert!(!plain.contains('\u{1b}'), "{plain:?}");
}

#[test]
fn help_and_errors_have_colours_only_on_terminals() {
    for (command, coloured) in [
        ("--help", true),
        ("serve --help", true),
        ("serve --no-such-flag", true),
        ("check-config --relay-ports 50000-50999", false),
        ("print-firewall", false),
        ("completions bash", false),
        ("lab list", false),
    ] {
        let words: Vec<&str> = command.split(' ').collect();
        let piped = Program::run(&mut turnpike_trials::turnpike(&words)).output();
        assert!(!piped.contains('\u{1b}'), "{command}: {piped:?}");
        let Some(shown) = on_terminal(command, None) else { continue };
        assert_eq!(shown.contains('\u{1b}'), coloured, "{command}: {shown:?}");
        let plain = on_terminal(command, Some("1")).unwrap_or_default();
        assert!(!plain.contains('\u{1b}'), "{command}: {plain:?}");
    }
}
