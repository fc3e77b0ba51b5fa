//! Unchanged files of rinetd and oxidinetd over real sockets: TCP, UDP, log file and process ID file.

use crate::prelude::*;

fn line_of(forward: &Forward, file: &str, text: &str) -> String {
    eventually(&format!("a line with {text:?} in {file}"), || {
        let lines = fs::read_to_string(forward.path(file)).ok()?;
        lines.lines().find(|line| line.contains(text)).map(str::to_owned)
    })
}

fn rinetd_conf(port: u16, tcp: SocketAddr, udp: SocketAddr, more: &str) -> String {
    let (tcp, udp) = (tcp.port(), udp.port());
    format!(
        "# global\nallow 127.*\n127.0.0.1 {port} localhost {tcp} # web\n127.0.0.1 {port}/udp 127.0.0.1 {udp}/udp \
         [timeout=5,src=127.0.0.1]\n\
         logfile connections.log\npidlogfile rinetd.pid\n{more}"
    )
}

#[test]
fn unchanged_rinetd_conf_forwards_tcp_and_udp_and_logs() {
    let mut forward =
        Forward::start_file("rinetd.conf", &rinetd_conf(free_port(V4), tcp_echo(), udp_echo(), ""));
    forward.program.line_with("rinetd.conf is read as rinetd.conf; rules: 2");
    let (tcp, udp) = (forward.address("(tcp, "), forward.address("(udp, "));

    let mut stream = connect(tcp);
    assert_eq!(say(&mut stream, "through TCP"), "through TCP");
    drop(stream);
    assert_eq!(say_udp(udp, "through UDP"), "through UDP");

    let pid = fs::read_to_string(forward.path("rinetd.pid")).expect("pidlogfile is written");
    assert_eq!(pid, format!("{}\n", forward.program.pid()));
    let line = line_of(&forward, "connections.log", "\tlocalhost\t");
    let fields: Vec<&str> = line.split('\t').skip(1).collect();
    assert_eq!(fields[..3], ["127.0.0.1", "127.0.0.1", &tcp.port().to_string()], "{line}");
    assert_eq!(fields[5..], ["11", "11", "done-remote-closed"], "{line}");

    let line = forward.program.line_with("connection ended");
    for text in
        ["client=127.0.0.1:", "to_target_bytes=11", "to_client_bytes=11", "reason=\"finished\"", "seconds="]
    {
        assert!(line.contains(text), "no {text} in {line}");
    }
    let pid_file = forward.path("rinetd.pid");
    forward.program.signal("TERM");
    let Forward { program, .. } = forward;
    assert_eq!(program.wait(SOON).code, Some(0));
    assert!(!pid_file.exists());
}

#[test]
fn logcommon_uses_the_common_log_format() {
    let mut forward = Forward::start_file(
        "rinetd.conf",
        &rinetd_conf(free_port(V4), tcp_echo(), udp_echo(), "logcommon\n"),
    );
    let tcp = forward.address("(tcp, ");
    assert_eq!(say(&mut connect(tcp), "hello"), "hello");
    let beginning = format!("GET /rinetd-services/127.0.0.1/{}/localhost/", tcp.port());
    let line = line_of(&forward, "connections.log", &beginning);
    assert!(line.starts_with("127.0.0.1 - - ["), "{line}");
    assert!(line.ends_with("/done-remote-closed HTTP/1.0\" 200 5 - - - 5"), "{line}");
}

#[test]
fn reload_reopens_the_log_file() {
    let mut forward =
        Forward::start_file("rinetd.conf", &rinetd_conf(free_port(V4), tcp_echo(), udp_echo(), ""));
    let tcp = forward.address("(tcp, ");
    fs::rename(forward.path("connections.log"), forward.path("old.log")).expect("the file exists");
    forward.reload("rules reloaded");
    assert_eq!(say(&mut connect(tcp), "hello"), "hello");
    line_of(&forward, "connections.log", "\tdone-remote-closed");
}

#[test]
fn unchanged_oxidinetd_file_forwards_all_four_protocols() {
    let (tcp, udp) = (tcp_echo().port(), udp_echo().port());
    let rule = |name: &str, port: u16| {
        format!(
            "[[forwarding_rules]]\nbind_address = \"127.0.0.1\"\nbind_port = 0\nconnect_address = \"127.0.0.1\"\n\
             connect_port = {port}\nprotocol = \"{name}\"\n"
        )
    };
    let text = [
        "[[global_rules]]\ntype = \"allow\"\npattern = \"127.0.0.*\"\n".to_owned(),
        rule("tcp", tcp),
        rule("udp", udp),
        rule("udptotcp", tcp),
        rule("tcptoudp", udp),
    ];
    let mut forward = Forward::start_file("oi.toml", &text.join("\n"));
    forward.program.line_with("oi.toml is read as oxidinetd's rules (TOML); rules: 4");
    for protocol in ["tcp", "tcptoudp"] {
        let address = forward.address(&format!("({protocol}, "));
        assert_eq!(say(&mut connect(address), "over TCP"), "over TCP", "{protocol}");
    }
    for protocol in ["udp", "udptotcp"] {
        let address = forward.address(&format!("({protocol}, "));
        assert_eq!(say_udp(address, "over UDP"), "over UDP", "{protocol}");
    }
}
