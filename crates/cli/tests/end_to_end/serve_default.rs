//! `serve` without configuration: a working server with a generated credential, closed to internal peers.

use crate::prelude::*;

#[test]
fn generated_credential_works_and_is_printed_once() {
    let serve = Serve::start_bare(&[]);
    let credential = generated_credential(&serve);
    Load::as_user(serve.address(V4), &credential).with("--mode allocate --duration 1").run().ended(0);
    eventually("allocations are counted", || {
        serve.metrics().sum("turnpike_allocations_opened_total", "") > 0
    });

    let (_, password) = credential.split_once(':').expect("a colon between user and password");
    let mentions = serve.program.lines().iter().filter(|line| line.contains(password)).count();
    assert_eq!(mentions, 1, "only the printed credential contains the password");
}

#[test]
fn each_start_generates_another_password() {
    assert_ne!(generated_credential(&Serve::start_bare(&[])), generated_credential(&Serve::start_bare(&[])));
}

#[test]
fn loopback_peers_are_refused_unless_allowed() {
    let serve = Serve::start_bare(&["--relay-ip", "127.0.0.1"]);
    let reflect = Reflect::start(V4, &[]);
    let load = Load::as_user(serve.address(V4), &generated_credential(&serve))
        .to(reflect.address)
        .with("--duration 1 --rate 100")
        .run()
        .ended(1);
    assert!(load.output().contains("403"), "{}", load.output());
    let metrics = eventually("the refusal is counted", || {
        let metrics = serve.metrics();
        (metrics.sum("turnpike_error_responses_total", "code=\"403\"") > 0).then_some(metrics)
    });
    assert_eq!(metrics.sum("turnpike_relayed_datagrams_total", ""), 0);
}

#[test]
fn startup_logs_the_data_path_with_the_reason() {
    let mut serve = Serve::start_bare(&["--datapath", "auto"]);
    let line = serve.program.line_with("data path ");
    assert!(
        ["basic", "mmsg", "gso"].iter().any(|step| line.contains(&format!("data path {step}: "))),
        "{line}"
    );
}

#[test]
fn metrics_and_health_are_served() {
    let serve = Serve::start_bare(&[]);
    assert_eq!(serve.health(), Some(200));
    let metrics = serve.metrics();
    assert_eq!(metrics.sum("turnpike_allocations", ""), 0);
    assert_eq!(metrics.sum("turnpike_draining", ""), 0);
    assert_no_foreign_series(&metrics);
}

#[test]
fn requested_admin_address_must_be_free() {
    let holder = TcpListener::bind((V4, 0)).expect("loopback has a free port");
    let taken = holder.local_addr().expect("the port is bound").to_string();
    let ended = Program::start(&mut turnpike(&["serve", "--listen", "127.0.0.1:0", "--admin", &taken]))
        .wait(SOON)
        .ended(1);
    assert!(ended.stderr.contains(&taken) && ended.stderr.contains("--admin"), "{}", ended.stderr);
}

#[test]
fn missing_relay_address_is_logged_with_the_remedy() {
    // TEST-NET-3 (RFC 5737) belongs to no machine.
    let serve = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--user", "a:b"];
    let mut program = Program::start(&mut turnpike(&[&serve[..], &["--relay-ip", "203.0.113.1"]].concat()));
    let line = program.line_with("does not have the relay address 203.0.113.1: waiting for it");
    assert!(line.contains("LOCAL=PUBLIC") || line.contains("name an address of this machine"), "{line}");
}

fn generated_credential(serve: &Serve) -> String {
    // Printed on standard output, not in the log.
    let line = eventually("the credential is printed", || {
        serve.program.lines().into_iter().find(|line| line.contains("No user configured"))
    });
    let words: Vec<&str> = line.split_whitespace().collect();
    let after = |label| {
        let at =
            words.iter().rposition(|word| *word == label).unwrap_or_else(|| panic!("no {label} in {line:?}"));
        words[at + 1]
    };
    format!("{}:{}", after("user"), after("password"))
}

fn assert_no_foreign_series(metrics: &Metrics) {
    for line in metrics.text().lines().filter(|line| !line.starts_with('#')) {
        assert!(line.starts_with("turnpike_"), "{line}");
    }
}
