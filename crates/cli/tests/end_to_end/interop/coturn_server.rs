//! `load turn` against Debian's `turnserver`.

mod transports;

use crate::prelude::*;

struct Turnserver {
    address: SocketAddr,
    _program: Program,
    _dir: Dir,
}

impl Turnserver {
    fn start(family: IpAddr) -> Result<Self, String> {
        installed("turnserver")?;
        loopback_of(family)?;
        let dir = Dir::new();
        let file = |name: &str| dir.path().join(name).display().to_string();
        let address = SocketAddr::new(family, free_port(family));
        let mut command = Command::new("turnserver");
        // All of turnserver's files are in the test directory, so no installed server's files are read or
        // changed.
        command.args([
            "-n",
            "--no-cli",
            "--no-tls",
            "--no-dtls",
            "--no-tcp",
            "--no-stdout-log",
            "--simple-log",
        ]);
        command.args(["--log-file", &file("log"), "--pidfile", &file("pid"), "--userdb", &file("db")]);
        command.args([
            "-L",
            &family.to_string(),
            "-E",
            &family.to_string(),
            "-p",
            &address.port().to_string(),
        ]);
        command.args(["--lt-cred-mech", "-r", REALM, "-u", &format!("{USER}:{PASSWORD}")]);
        command.args(["--allow-loopback-peers", "-m", "1"]);
        let program = Program::start(command.current_dir(dir.path()));
        let stun = stun::Client::new(address);
        eventually("turnserver answers", || stun.is_answered());
        Ok(Self { address, _program: program, _dir: dir })
    }
}

fn relays_all(family: IpAddr, via: &str) {
    let server = need!(Turnserver::start(family));
    let reflect = Reflect::start(family, &[]);
    let result = Load::new(server.address)
        .to(reflect.address)
        .with(&format!("--via {via} --clients 4 --rate 500 --duration 2"))
        .run()
        .ended(0)
        .result();
    assert!(result["sent"].as_u64() >= Some(300), "{result}");
    assert_eq!(result["received"], result["sent"], "{result}");
    assert_eq!(result["lost"], 0, "{result}");
}

tests! {
    load_by_channel_over_ipv4: relays_all(V4, "channel");
    load_by_send_over_ipv4: relays_all(V4, "send");
    load_by_channel_over_ipv6: relays_all(V6, "channel");
    load_by_send_over_ipv6: relays_all(V6, "send");
}

#[test]
fn load_churns_allocations() {
    let server = need!(Turnserver::start(V4));
    let run = Load::new(server.address).with("--mode allocate --clients 2 --duration 1").run().ended(0);
    assert!(run.result()["received"].as_u64() > Some(0), "{}", run.output());
}

#[test]
fn load_with_a_wrong_password_is_refused() {
    let server = need!(Turnserver::start(V4));
    let reflect = Reflect::start(V4, &[]);
    Load::as_user(server.address, &format!("{USER}:wrong"))
        .to(reflect.address)
        .with("--rate 10 --duration 1")
        .run()
        .ended(1)
        .says("refused user");
}

/// turnserver allows loopback peers here; the probe detects this from granted requests and from returned
/// data.
#[test]
fn attack_probe_detects_coturns_loopback_peers() {
    let server = need!(Turnserver::start(V4));
    let user = format!("{USER}:{PASSWORD}");
    let uri = format!("turn:{}?transport=udp", server.address);
    let flags = [
        "--attack",
        "--i-own-this-server",
        "--json",
        "--timeout",
        "200",
        "--fail-on",
        "bad",
        "--user",
        &user,
    ];
    let report = Program::start(&mut turnpike(&[&["probe", &uri], &flags[..]].concat()))
        .wait(SOON * 5)
        .ended(3)
        .result();
    let attempts = report["attack"]["peers"].as_array().expect("a list");
    let is_open = |entry: &str, form: &str| {
        let is_it = |attempt: &&Value| attempt["entry"] == entry && attempt["form"] == form;
        attempts.iter().find(is_it).map(|attempt| attempt["outcome"] == "open")
    };
    for entry in ["create_permission", "channel_bind", "send"] {
        assert_eq!(is_open(entry, "loopback"), Some(true), "{entry}: {report}");
    }
    assert_eq!(is_open("create_permission", "unspecified"), Some(false), "{report}");
    let replies = report["attack"]["strangers"].as_array().expect("a list");
    assert!(replies.iter().any(|reply| reply["ratio"].as_f64() > Some(1.0)), "{report}");
}
