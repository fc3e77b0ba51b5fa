//! Third-party clients on the kernel path: `./test interop-coturn-client`, `interop-aioice` and `interop-pion` prepare them.

use super::{Links, PEER, SERVER, Server, on_links};
use crate::prelude::*;

const COUNT: u64 = 120;

fn with_users<'l>(links: &'l Links) -> Server<'l> {
    links.serve(&["--realm", REALM, "--user", &format!("{USER}:{PASSWORD}")])
}

fn judge(ended: &Finished, server: &Server<'_>) {
    assert_eq!(ended.code, Some(0), "{}", ended.output());
    let last = ended.stdout.lines().last().unwrap_or_default();
    let report: serde_json::Value = serde_json::from_str(last).expect("a report");
    assert_eq!(report["echoed"], COUNT, "{report}");
    assert_eq!(report["heard_from"], serde_json::json!([report["relayed"]]), "{report}");
    eventually("every datagram is counted in both directions", || {
        server.metrics().sum("turnpike_relayed_datagrams_total", "") == 2 * COUNT
    });
}

#[test]
fn uclient_gets_every_message_back() {
    need!(installed("turnutils_uclient"));
    on_links(turnpike_testkit::this_test!(), |links| {
        let server = with_users(links);
        for family in [0, 1] {
            let before = server.across();
            let reflect = Reflect::start(PEER[family], &[]);
            let mut command = Command::new("turnutils_uclient");
            command.args(["-u", USER, "-w", PASSWORD, "-n", "100", "-m", "10", "-l", "120", "-z", "5", "-c"]);
            command.args(["-e", &PEER[family].to_string(), "-r", &reflect.address.port().to_string()]);
            command.args(if family == 1 { &["-x"][..] } else { &[] });
            let ended = Program::start(command.arg(SERVER[family].to_string())).wait(SOON * 2).ended(0);
            let said = ended.output();
            let line = said.lines().rev().find(|line| line.contains("tot_recv_msgs=")).expect("a total");
            assert!(line.contains("tot_send_msgs=1000, tot_recv_msgs=1000"), "{line}");
            eventually("the kernel relayed most", || server.across() > before + 1500);
        }
    });
}

#[test]
fn aioice_relays_an_echo() {
    let python = need!(interop_program("interop-aioice", "venv/bin/python"));
    on_links(turnpike_testkit::this_test!(), |links| {
        let server = with_users(links);
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/interop/aioice/echo.py");
        let mut command = Command::new(&python);
        command.arg(script).args([&SERVER[0].to_string(), "3478", USER, PASSWORD, &COUNT.to_string(), "udp"]);
        judge(&Program::run(command.env("PEER", PEER[0].to_string())), &server);
        eventually("the kernel relayed most", || server.across() > COUNT);
    });
}

#[test]
fn pion_relays_an_echo() {
    let pion = need!(interop_program("interop-pion", "pion-echo"));
    on_links(turnpike_testkit::this_test!(), |links| {
        let server = with_users(links);
        let at = SocketAddr::new(SERVER[0], 3478).to_string();
        let mut command = Command::new(&pion);
        command.args(["-server", &at, "-user", USER, "-password", PASSWORD, "-count", &COUNT.to_string()]);
        // Each datagram immediately follows the previous answer, starting with Send indications; such a flow
        // may stay in user space.
        judge(&Program::run(command.args(["-peer", &PEER[0].to_string()])), &server);
    });
}
