//! A line per session: what it names, and that nobody fills a disk with them.

use turnpike_trials::{Certificate, Load, Reflect, SOON, Serve, USER, V4, eventually};

fn field(line: &str, name: &str) -> Option<String> {
    let (_, rest) = line.split_once(&format!(" {name}="))?;
    Some(rest.split(' ').next()?.trim_matches('"').to_owned())
}

fn number(line: &str, name: &str) -> u64 {
    field(line, name).and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("no {name} in {line}"))
}

#[test]
fn the_end_of_a_session_names_relayed_address_and_transports() {
    let certificate = Certificate::new(&["localhost"]);
    let reflect = Reflect::start(V4, &[]);
    for transport in ["udp", "tcp", "tls", "dtls"] {
        let mut serve = Serve::start_secured(&certificate, &["--relay-ports", "50000-50999"]);
        let run = Load::new(serve.address_of(transport, V4))
            .to(reflect.address)
            .with(&["--transport", transport, "--insecure", "--rate", "50", "--duration", "1"])
            .run();
        assert_eq!(run.code, Some(0), "{}", run.output());
        let line = serve.program.line_with("session ended");
        assert_eq!(field(&line, "transport").as_deref(), Some(transport), "{line}");
        assert_eq!(field(&line, "relayed_transport").as_deref(), Some("udp"), "{line}");
        let relayed = field(&line, "relayed").expect("a relayed address");
        let port = relayed.strip_prefix("127.0.0.1:").and_then(|port| port.parse().ok());
        assert!(port.is_some_and(|port: u16| (50_000..51_000).contains(&port)), "{line}");
    }
}

#[test]
fn a_user_who_opens_and_ends_thousands_is_told_of_in_sum() {
    let serve = Serve::start(&["--user", "bob:secret"]);
    let churn = Load::new(serve.address(V4))
        .with(&["--mode", "allocate", "--clients", "50", "--rate", "max", "--duration", "3"])
        .start();
    eventually("a thousand are over", || (closed(&serve) > 1000).then_some(()));
    // Somebody else's are told one by one meanwhile.
    let other = Load::as_user(serve.address(V4), "bob:secret")
        .with(&["--mode", "allocate", "--rate", "5", "--duration", "1"])
        .run();
    assert_eq!(other.code, Some(0), "{}", other.output());
    assert_eq!(churn.wait(SOON).code, Some(0));
    let told = |user: &str| {
        let line =
            |line: &&String| line.contains("session ended") && line.contains(&format!("user=\"{user}\""));
        serve.program.lines().iter().filter(line).count() as u64
    };
    let in_sum = || {
        let lines = serve.program.lines();
        let more = lines.iter().filter(|line| line.contains("more sessions ended") && line.contains(USER));
        more.map(|line| number(line, "sessions")).sum::<u64>()
    };
    let metric = || serve.metrics().sum("turnpike_log_lines_suppressed_total", "kind=\"end\"");
    eventually("every session is told, alone or in sum", || {
        let (alone, bobs) = (told(USER), told("bob"));
        (alone + bobs + in_sum() == closed(&serve)).then_some(())
    });
    assert!(told("bob") >= 4, "{}", told("bob"));
    assert!(told(USER) < 400, "{}", told(USER));
    assert!(in_sum() > 500 && metric() == in_sum(), "{} and {}", in_sum(), metric());
    let lines = serve.program.lines();
    let more = lines.iter().find(|line| line.contains("more sessions ended")).expect("it was counted");
    for name in ["to_peer_bytes", "to_client_bytes"] {
        number(more, name);
    }
}

#[test]
fn a_stop_tells_the_end_of_every_session_of_one_user() {
    let serve = Serve::start(&["--workers", "2"]);
    let load = Load::new(serve.address(V4))
        .to(Reflect::start(V4, &[]).address)
        .with(&["--clients", "600", "--rate", "100", "--duration", "60"])
        .start();
    serve.wait_for_allocations(600);
    serve.program.signal("TERM");
    eventually("it drains", || (serve.health() == Some(503)).then_some(()));
    serve.program.signal("TERM");
    let Serve { program, .. } = serve;
    let ended = program.wait(SOON);
    let lines = ended.stderr.lines().filter(|line| line.contains("session ended")).count();
    assert_eq!(lines, 600);
    drop(load);
}

fn closed(serve: &Serve) -> u64 {
    serve.metrics().sum("turnpike_allocations_closed_total", "")
}
