//! Findings of `turnpike probe` on a `turnpike serve` with every listener: transports, certificates, credentials, relayed
//! address, NAT behaviour, and peers that should be blocked.

use crate::prelude::*;

const NAME: &str = "turn.example.org";

fn probe(uri: &str, more: &[&str]) -> Finished {
    let user = format!("{USER}:{PASSWORD}");
    Program::run(&mut turnpike(&[&["probe", uri, "--user", &user, "--json"], more].concat()))
}

fn lines<'a>(report: &'a Value, area: &str) -> Vec<&'a Value> {
    let lines = report["findings"].as_array().expect("a list of lines");
    lines.iter().filter(|line| line["area"] == area).collect()
}

fn finds(report: &Value, area: &str, level: &str, what: &str, remedy: &str) {
    let found = lines(report, area).into_iter().any(|line| {
        let says = |key: &str, text: &str| {
            text.is_empty() || line[key].as_str().is_some_and(|said| said.contains(text))
        };
        line["level"] == level && says("what", what) && says("remedy", remedy)
    });
    assert!(found, "no {level} finding of {area} with {what:?} and {remedy:?} in {report:#}");
}

#[test]
fn probe_reaches_every_transport_and_deletes_its_allocations() {
    let certificate = Certificate::of_authority(&[NAME, "127.0.0.1", "::1"]);
    let user = format!("{USER}:{PASSWORD}");
    let mut arguments = vec!["--realm", REALM, "--user", &user, "--relay-ip", "127.0.0.1"];
    arguments.extend(certificate.flags());
    arguments.extend(["--dtls-listen", "127.0.0.1:0"]);
    if has_ipv6() {
        arguments.extend(["--dtls-listen", "[::1]:0", "--relay-ip", "::1"]);
    }
    let serve = Serve::start_bare(&arguments);
    let trust = certificate.authority().display().to_string();
    for family in if has_ipv6() { vec![V4, V6] } else { vec![V4] } {
        // The probe also finds TLS and DTLS on that port.
        let plain =
            probe(&format!("turn:{}", serve.address(family)), &["--ca", &trust, "--fail-on", "bad"]).ended(0);
        let secure =
            probe(&format!("turns:{}", serve.address(family)), &["--ca", &trust, "--fail-on", "bad"])
                .ended(0);
        for (run, transports) in [(plain, ["udp", "tcp"]), (secure, ["tls", "dtls"])] {
            let report = run.result();
            assert_eq!(report["usable"], true, "{report}");
            assert_eq!(report["credentials_accepted"], true, "{report}");
            assert_eq!(report["realm"], REALM, "{report}");
            for transport in transports {
                let facts = &report["transports"][transport];
                assert_eq!(facts["reachable"], true, "{transport}: {report}");
                assert!(facts["rtt_us"]["median"].as_u64() > Some(0), "{transport}: {report}");
                assert!(
                    facts["mapped"].as_str().is_some_and(|mapped| mapped.contains(&family.to_string())),
                    "{report}"
                );
                finds(&report, transport, "ok", "answers", "");
            }
            for feature in ["sha256", "userhash", "even_port", "mobility", "tcp_relaying"] {
                assert_eq!(report["features"][feature], true, "{feature}: {report}");
            }
            for feature in ["ipv6", "dual_stack"] {
                assert_eq!(report["features"][feature], has_ipv6(), "{feature}: {report}");
            }
            assert!(!report["peers"].as_array().expect("a list").is_empty(), "{report}");
            for peer in report["peers"].as_array().expect("a list") {
                assert_eq!(peer["allowed"], false, "{peer}");
            }
            let relayed = report["relayed"].as_array().expect("a list");
            assert!(relayed.len() >= if has_ipv6() { 2 } else { 1 }, "{report}");
            if transports[0] == "tls" {
                for (transport, version, alpn) in
                    [("tls", "TLS 1.3", Value::from("stun.turn")), ("dtls", "DTLS 1.3", Value::Null)]
                {
                    let facts = &report["transports"][transport];
                    assert_eq!(facts["version"], version, "{report}");
                    assert_eq!(facts["alpn"], alpn, "{report}");
                    let group = (transport == "tls").then_some("X25519MLKEM768");
                    assert_eq!(facts["group"].as_str(), group, "{report}");
                    assert_eq!(facts["certificate"]["verifies"], true, "{report}");
                    assert_eq!(facts["certificate"]["names"][0], NAME, "{report}");
                    assert!(facts["certificate"]["days_left"].as_i64() > Some(30), "{report}");
                    finds(&report, "certificate", "ok", &format!("{transport}: "), "");
                }
            }
        }
    }
    serve.wait_for_allocations(0);
    eventually("all connections are closed", || {
        let metrics = serve.metrics();
        let left = metrics.sum("turnpike_connections", "") + metrics.sum("turnpike_dtls_associations", "");
        left == 0
    });
}

#[test]
fn missing_dual_stack_family_is_reported_with_the_reason() {
    let user = format!("{USER}:{PASSWORD}");
    let serve = Serve::start_bare(&["--realm", REALM, "--user", &user, "--relay-ip", "127.0.0.1"]);
    let report = probe(&format!("turn:{}", serve.address(V4)), &[]).result();
    assert_eq!(report["features"]["dual_stack"], false, "{report}");
    finds(&report, "features", "note", "dual-stack allocations (440 Address Family not Supported)", "");
    serve.wait_for_allocations(0);
}

#[test]
fn ipv6_only_relay_finding_names_the_effect_on_browsers() {
    if !has_ipv6() {
        return println!("SKIPPED: no IPv6 on loopback");
    }
    let user = format!("{USER}:{PASSWORD}");
    let mut serve = Serve::start_bare(&["--realm", REALM, "--user", &user, "--relay-ip", "::1"]);
    serve.program.line_with("all relay addresses are IPv6");
    let report = probe(&format!("turn:{}", serve.address(V4)), &[]).result();
    finds(&report, "relay", "bad", "answers 440", "also relay on an IPv4 address");
    finds(&report, "features", "ok", "IPv6 relaying", "");
    assert_eq!((&report["usable"], &report["features"]["ipv6"]), (&false.into(), &true.into()), "{report}");
    serve.wait_for_allocations(0);
}

#[test]
fn certificate_findings_cover_trust_name_and_expiry() {
    let own = Certificate::new(&[NAME, "127.0.0.1"]);
    let serve = Serve::start_secured(&own, &[]);
    let uri = format!("turns:{}", serve.address(V4));
    let trust = |certificate: &Certificate| certificate.cert().display().to_string();
    let other = Certificate::of_authority(&["other.example"]);
    let distrusted = probe(&uri, &["--ca", &other.authority().display().to_string()]);
    let misnamed = probe(&uri, &["--ca", &trust(&own), "--server-name", "turn.example.net"]);
    for (run, what, remedy) in [
        (distrusted, "was issued by an authority that this machine does not trust", "--ca FILE"),
        (misnamed, "not for turn.example.net", "--server-name"),
    ] {
        assert_eq!(run.code, Some(1), "{}", run.output());
        let report = run.result();
        assert_eq!(report["usable"], false, "{report}");
        assert_eq!(report["credentials_accepted"], true, "{report}");
        for transport in ["tls", "dtls"] {
            let facts = &report["transports"][transport];
            assert_eq!(facts["reachable"], true, "{report}");
            assert_eq!(facts["certificate"]["verifies"], false, "{report}");
            assert!(
                facts["certificate"]["distrust"].as_str().is_some_and(|why| why.contains(what)),
                "{report}"
            );
            finds(&report, "certificate", "bad", &format!("{transport}: "), remedy);
        }
    }
    probe(&uri, &["--ca", &trust(&own)]).ended(0);

    let expiring = Certificate::expiring(&[NAME, "127.0.0.1"], 5);
    let serve = Serve::start_secured(&expiring, &[]);
    let uri = format!("turns:{}", serve.address(V4));
    let report = probe(&uri, &["--ca", &trust(&expiring), "--fail-on", "warn"]).ended(3).result();
    for transport in ["tls", "dtls"] {
        assert_eq!(report["transports"][transport]["certificate"]["days_left"], 5, "{report}");
        finds(&report, "certificate", "warn", &format!("{transport}: expires in 5 days"), "renew it");
    }
}

#[test]
fn refused_credentials_have_the_same_reason_on_each_transport() {
    let certificate = Certificate::of_authority(&["127.0.0.1"]);
    let serve = Serve::start_secured(&certificate, &[]);
    let trust = certificate.authority().display().to_string();
    let address = serve.address(V4);
    for uri in [
        format!("turn:{address}?transport=udp"),
        format!("turn:{address}?transport=tcp"),
        format!("turns:{address}?transport=tcp"),
        format!("turns:{address}?transport=udp"),
    ] {
        let user = format!("{USER}:looking-glass");
        let run = Program::run(&mut turnpike(&["probe", &uri, "--user", &user, "--ca", &trust, "--json"]));
        assert_eq!(run.code, Some(1), "{uri}: {}", run.output());
        let report = run.result();
        assert_eq!(report["credentials_accepted"], false, "{uri}: {report}");
        assert_eq!(report["usable"], false, "{uri}: {report}");
        finds(&report, "credentials", "bad", "wrong password", REALM);
        assert!(!run.output().contains("looking-glass"), "{}", run.output());
    }
    eventually("four refusals are counted", || {
        serve.metrics().sum("turnpike_credentials_refused_total", "") == 4
    });
}

#[test]
fn nat_behaviour_needs_a_server_with_two_addresses() {
    let dir = Dir::new();
    let ports = [free_port(V4), free_port(V4)];
    let text = format!("[nat_discovery]\naddresses = [\"127.0.0.1\", \"127.0.0.2\"]\nports = {ports:?}\n");
    let config = dir.file("turnpike.toml", &text);
    let serve = Serve::start(&["-c", config.to_str().expect("UTF-8"), "--workers", "2"]);
    let report = probe(&format!("stun:127.0.0.1:{}", ports[0]), &[]).ended(0).result();
    assert_eq!(report["features"]["nat_discovery"], true, "{report}");
    let facts = &report["nat"];
    assert_eq!(facts["mapping"], "none", "{report}");
    assert_eq!(facts["filtering"], "endpoint-independent", "{report}");
    assert_eq!(facts["other_address"], format!("127.0.0.2:{}", ports[1]), "{report}");
    finds(&report, "nat", "ok", "mapping none, filtering endpoint-independent", "");

    let report = probe(&format!("stun:{}", serve.address(V4)), &[]).ended(0).result();
    assert_eq!(report["features"]["nat_discovery"], false, "{report}");
    finds(&report, "nat", "note", "RFC 5780", "");
}

#[test]
fn reachable_internal_peers_are_reported_by_severity() {
    let serve = Serve::start(&["--allow-peer", "10.0.0.0/8", "--allow-peer", "169.254.0.0/16"]);
    let report =
        probe(&format!("turn:{}?transport=tcp", serve.address(V4)), &["--fail-on", "bad"]).ended(3).result();
    for (level, peer) in [
        ("bad", "127.0.0.1 (loopback)"),
        ("bad", "169.254.169.254 (cloud metadata)"),
        ("bad", "169.254.1.1 (link-local)"),
        ("warn", "10.0.0.1 (private)"),
    ] {
        finds(&report, "peers", level, peer, if level == "bad" { "--allow-peer" } else { "--deny-peer" });
    }
    let peers = report["peers"].as_array().expect("a list");
    let allowed = |peer: &str| {
        let facts = peers.iter().find(|facts| facts["peer"] == peer);
        facts.unwrap_or_else(|| panic!("{peer} was not requested: {report}"))["allowed"] == true
    };
    for (peer, expected) in [
        ("127.0.0.1", true),
        ("127.255.255.254", true),
        ("10.0.0.1", true),
        ("192.168.0.1", false),
        ("172.16.0.1", false),
        ("100.64.0.1", false),
        ("0.0.0.0", false),
        ("224.0.0.1", false),
        ("255.255.255.255", false),
    ] {
        assert_eq!(allowed(peer), expected, "{peer}: {report}");
    }
    if has_ipv6() {
        // `Serve::start` also allows ::1, and an address that embeds an allowed IPv4 address is allowed.
        assert!(allowed("::1"));
        for refused in ["::", "fe80::1", "fd00:ec2::254", "fc00::1", "ff02::1"] {
            assert!(!allowed(refused), "{refused}: {report}");
        }
    }
}

/// Public addresses in a namespace, where the private relayed address is unreachable.
#[test]
fn private_relayed_address_remedy_names_the_public_address() {
    let inside = need!(namespace("ip addr add 203.0.113.5/32 dev lo && ip addr add 10.9.8.7/32 dev lo"));
    let binary = env!("CARGO_BIN_EXE_turnpike");
    let user = format!("{USER}:{PASSWORD}");
    for (relay_ip, level, what, remedy) in [
        ("10.9.8.7", "bad", "private address 10.9.8.7:", "--relay-ip 10.9.8.7=PUBLIC"),
        ("10.9.8.7=203.0.113.5", "ok", "relays on 203.0.113.5:", ""),
        ("10.9.8.7=203.0.113.6", "note", "relays on 203.0.113.6:", "several addresses"),
    ] {
        let script = format!(
            "{{ {binary} serve --admin off --user {user} --relay-ip {relay_ip} >&2 & \
             for try in $(seq 300); do {binary} probe stun:203.0.113.5 >&2 && break; sleep 0.1; done; \
             {binary} probe turn:203.0.113.5 --user {user} --json; }}"
        );
        let run = Program::run(&mut inside(&script));
        let report = run.result();
        finds(&report, "relay", level, what, remedy);
        let text = report["relayed"][0].as_str().expect("an address");
        assert!(relay_ip.ends_with(text.split(':').next().expect("an address")), "{report}");
    }
}

#[test]
fn probe_does_not_suppress_log_lines_of_other_refusals() {
    let serve = Serve::start_bare(&[
        "--realm",
        REALM,
        "--user",
        &format!("{USER}:{PASSWORD}"),
        "--relay-ip",
        "127.0.0.1",
    ]);
    let stranger = stun::Client::new(serve.address(V4));
    let (_, _, challenge) = stranger.challenge();
    assert_eq!(stranger.forge("mallory", REALM.as_bytes(), &challenge.nonce), Some(401));
    let run = probe(&format!("turn:{}", serve.address(V4)), &[]);
    assert!(run.result()["peers"].as_array().is_some_and(|peers| peers.len() > 10), "{}", run.output());
    let found = eventually("the probe's peers are logged", || {
        let (_, text) = fetch(serve.admin(), "/v1/refusals").ok()?;
        let found: Value = serde_json::from_str(&text).expect("JSON");
        let rows = found["refusals"].as_array().expect("a list").clone();
        rows.iter()
            .any(|row| row["other_peers"].as_array().is_some_and(|peers| peers.len() > 5))
            .then_some(rows)
    });
    assert!(found.len() <= 6, "{found:#?}");
    let real = found.iter().find(|row| row["user"] == "mallory").unwrap_or_else(|| panic!("{found:#?}"));
    assert_eq!((&real["reason"], &real["keys"][0]), (&"no such user".into(), &"auth.users".into()), "{real}");
    let peers = found.iter().find(|row| row["asked"] == "peer").unwrap_or_else(|| panic!("{found:#?}"));
    assert_eq!(
        (&peers["user"], &peers["keys"]),
        (&USER.into(), &serde_json::json!(["peers.allow"])),
        "{peers}"
    );
    assert!(peers["count"].as_u64() > peers["others"].as_u64(), "{peers}");
}

#[test]
fn probe_tries_port_443_before_recommending_it() {
    const LISTEN: &str = "clients behind strict firewalls need TLS on port 443: listen there";
    let inside = need!(namespace("true"));
    let binary = env!("CARGO_BIN_EXE_turnpike");
    let user = format!("{USER}:{PASSWORD}");
    let certificate = Certificate::of_authority(&["127.0.0.1"]);
    let [cert, tls] = [certificate.authority().display().to_string(), certificate.flags().join(" ")];
    let report = |server: &str, ready: &str, uri: &str| {
        let script = format!(
            "{{ {binary} serve --realm {REALM} --user {user} --relay-ip 127.0.0.1 {server} >&2 & \
             for try in $(seq 300); do {binary} probe {ready} --timeout 0.5 >&2 && break; sleep 0.1; done; \
             {binary} probe {uri} --user {user} --ca {cert} --json; }}"
        );
        Program::run(&mut inside(&script)).result()
    };
    let advised = |report: &Value| report["findings"].to_string().contains(LISTEN);

    let both = format!("--admin off --listen 127.0.0.1:3478 --listen 127.0.0.1:443 {tls}");
    let found = report(&both, "stun:127.0.0.1", "turn:127.0.0.1");
    finds(&found, "tls", "ok", "127.0.0.1:3478 answers", "");
    for transport in ["udp", "tcp", "tls"] {
        assert_eq!(found["port_443"][transport]["reachable"], true, "{found:#}");
        finds(&found, transport, "ok", "127.0.0.1:443 answers", "");
    }
    assert!(!advised(&found), "{found:#}");

    // TLS only on port 443: the default port of the URI is closed, and the other checks use 443.
    let https = format!("--admin off --listen 127.0.0.1:443 {tls}");
    for (uri, there) in [
        ("turn:127.0.0.1", "turn:127.0.0.1:443"),
        ("turn:127.0.0.1?transport=tcp", "turn:127.0.0.1:443?transport=tcp"),
        ("turns:127.0.0.1", "turns:127.0.0.1:443"),
    ] {
        let found = report(&https, "stun:127.0.0.1:443", &format!("'{uri}'"));
        let wanted = ["udp", "tcp", "tls"]
            .into_iter()
            .find(|transport| lines(&found, transport).iter().any(|line| line["level"] == "bad"))
            .unwrap_or_else(|| panic!("{uri}: {found:#}"));
        finds(&found, wanted, "bad", "refused", &format!("give clients {there},"));
        assert_eq!(
            (&found["usable"], &found["credentials_accepted"]),
            (&false.into(), &true.into()),
            "{found:#}"
        );
        finds(&found, "tls", "ok", "127.0.0.1:443 answers", "");
        assert!(!advised(&found), "{found:#}");
    }

    // Port 443 closed, then plain TURN without TLS, then a web server.
    let plain = "--admin off --listen 127.0.0.1:3478";
    for (server, remedy) in [
        (plain.to_owned(), LISTEN),
        (format!("{plain} --listen 127.0.0.1:443"), "give the listener there a certificate"),
        ("--admin 127.0.0.1:443 --listen 127.0.0.1:3478".to_owned(), "where another service answers"),
    ] {
        let found = report(&server, "stun:127.0.0.1", "turn:127.0.0.1");
        finds(&found, "tls", "note", "; on port 443: ", remedy);
    }
    // TLS on another port does not get through a strict firewall.
    let found = report(&format!("{plain} {tls}"), "stun:127.0.0.1", "turn:127.0.0.1");
    finds(&found, "tls", "note", "127.0.0.1:443: ", LISTEN);
}
