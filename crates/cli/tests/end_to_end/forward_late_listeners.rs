//! `forward --keep-going`: rules whose address or name appears later.

use crate::prelude::*;
use turnpike_testkit::alone;

const HOSTS: &str = "/etc/hosts";
/// RFC 5737: no machine has these addresses.
const FIRST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const SECOND: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

#[test]
fn rules_are_bound_when_their_address_or_name_appears() {
    let test = turnpike_testkit::this_test!();
    alone::in_namespaces(test, "nm", &["mount", "--bind", HOSTS, HOSTS], appear);
}

fn appear() {
    run("ip", &["link", "set", "lo", "up"]);
    let dir = Dir::new();
    let hosts = dir.file("hosts", "127.0.0.1 localhost\n");
    run("mount", &["--bind", hosts.to_str().expect("UTF-8"), HOSTS]);
    let echo = tcp_echo();
    let by_address = format!("tcp://{FIRST}:8080={echo}?name=address");
    let by_name = format!("tcp://late.test:8081={echo}?name=name");
    let mut forward = Forward::start(&[&by_address, &by_name, "--keep-going"]);
    let state = |forward: &Forward| {
        let admin = forward.admin.to_string();
        let health = Program::start(&mut turnpike(&["health", "--admin", &admin])).wait(SOON);
        let listening = ["address", "name"]
            .map(|rule| forward.metrics().sum("turnpike_forward_listening", &format!("rule=\"{rule}\"")));
        (health.code, listening)
    };
    let top = |forward: &Forward| {
        let admin = forward.admin.to_string();
        Program::start(turnpike(&["top", "--once", "--admin", &admin]).env("COLUMNS", "250"))
            .wait(SOON)
            .stdout
    };
    assert_eq!(state(&forward), (Some(1), [0, 0]));
    eventually("top shows the reason", || top(&forward).contains("cannot listen on late.test:8081"));

    run("ip", &["address", "add", &format!("{FIRST}/32"), "dev", "lo"]);
    forward.address("rule address");
    assert_eq!(say(&mut connect(SocketAddr::from((FIRST, 8080))), "here"), "here");
    assert_eq!(state(&forward), (Some(0), [1, 0]));

    fs::write(&hosts, format!("127.0.0.1 localhost\n{SECOND} late.test\n")).expect("the file is writable");
    eventually("another reason", || top(&forward).contains("cannot listen on 192.0.2.2:8081"));
    run("ip", &["address", "add", &format!("{SECOND}/32"), "dev", "lo"]);
    forward.address("rule name");
    assert_eq!(say(&mut connect(SocketAddr::from((SECOND, 8081))), "here"), "here");
    assert_eq!(state(&forward), (Some(0), [1, 1]));

    let mut old = connect(SocketAddr::from((SECOND, 8081)));
    forward.reload("rules reloaded");
    assert_eq!(say(&mut old, "still here"), "still here");
    for (text, lines) in [("cannot listen on", 2), ("listening on tcp", 2), ("cannot resolve", 1)] {
        let found: Vec<_> = forward.program.lines().into_iter().filter(|line| line.contains(text)).collect();
        assert_eq!(found.len(), lines, "{found:?}");
    }
}
