//! Browsers: two peer connections of one page that can only connect through `serve`, with audio, video and a data channel.

mod admin_page;

use crate::prelude::*;

use turnpike_trials::browsers::{Browser, Firefox, Over};

/// A browser calls itself through `serve`; compares its report with the server's counters.
fn calls_itself<B: Browser>(over: Over, family: IpAddr) {
    need!(loopback_of(family));
    need!(B::available(over == Over::Tls));
    let certificate = Certificate::of_authority(&["localhost", "127.0.0.1", "::1"]);
    let serve = Serve::start(&certificate.flags());
    let page = Page::serve(json!({
        "urls": [over.uri::<B>(&serve, family)],
        "username": USER,
        "credential": PASSWORD,
    }));
    let (browser, report) = shown::<B>(&page, &certificate, || serve.metrics());
    let received = audio_heard(&report, over);

    // Both ends are allocations, so each datagram is counted in both directions.
    let metrics = serve.metrics();
    let relayed =
        |direction| metrics.sum("turnpike_relayed_datagrams_total", &format!("direction=\"{direction}\""));
    assert!(relayed("to_peer") > received && relayed("to_client") > received, "{}", metrics.text());
    let of_streams =
        ["turnpike_stream_received_total", "turnpike_stream_sent_total"].map(|name| metrics.sum(name, ""));
    let handshakes = metrics.sum("turnpike_tls_handshakes_total", "");
    let plain = metrics.sum("turnpike_connections_plain_total", "");
    match over {
        Over::Udp => assert_eq!((of_streams, handshakes, plain), ([0, 0], 0, 0)),
        Over::Tcp | Over::Tls => {
            // Over TCP the counters include one message from each client, plus requests and responses.
            assert!(of_streams[0] > relayed("to_peer"), "{}", metrics.text());
            assert!(of_streams[1] > relayed("to_client"), "{}", metrics.text());
            let (of_this, of_other) =
                if over == Over::Tls { (handshakes, plain) } else { (plain, handshakes) };
            assert!(of_this >= 2 && of_other == 0, "{}", metrics.text());
            let post_quantum =
                metrics.sum("turnpike_tls_handshakes_by_group_total", "group=\"X25519MLKEM768\"");
            assert!(!B::POST_QUANTUM || post_quantum == handshakes, "{}", metrics.text());
        }
    }
    serve.wait_for_allocations(0);
    browser.close();
}

/// Asserts that both ends connected through relayed addresses and received media; returns the number of audio packets.
pub(super) fn audio_heard(report: &Value, over: Over) -> u64 {
    let number = |value: &Value| value.as_u64().unwrap_or_default();
    let mut received = 0;
    for end in report["ends"].as_array().expect("a list of both ends") {
        assert_eq!((&end["local"], &end["remote"]), (&json!("relay"), &json!("relay")), "{report:#}");
        assert_eq!(end["relay_protocol"], over.name(), "{report:#}");
        assert!(number(&end["frames"]) >= 10 && number(&end["video_bytes"]) > 1_000, "{report:#}");
        assert!(number(&end["audio_packets"]) >= 10 && number(&end["audio_bytes"]) > 0, "{report:#}");
        received += number(&end["audio_packets"]);
    }
    received
}

/// Like `calls_itself`, but on veth links, where the kernel relays channel data between the two allocations. `channels` is true if
/// the browser binds channels.
fn calls_itself_in_the_kernel<B: Browser>(test: &str, channels: bool) {
    need!(B::available(false));
    on_links(test, |links| {
        // Firefox only uses the address of the default route.
        run("ip", &["route", "add", "default", "via", &SERVER[0].to_string()]);
        let server = links.serve(&["--realm", REALM, "--user", &format!("{USER}:{PASSWORD}")]);
        let certificate = Certificate::of_authority(&["localhost"]);
        let page = Page::serve(json!({
            "urls": [format!("turn:{}:3478?transport=udp", SERVER[0])],
            "username": USER,
            "credential": PASSWORD,
        }));
        let (browser, report) = shown::<B>(&page, &certificate, || server.metrics());
        let received = audio_heard(&report, Over::Udp);
        if channels {
            eventually("the kernel relayed most", || server.across() > received);
        } else {
            assert_eq!(server.across(), 0);
        }
        browser.close();
    });
}

fn shown<B: Browser>(page: &Page, certificate: &Certificate, metrics: impl Fn() -> Metrics) -> (B, Value) {
    let mut browser = B::open(&page.url(), certificate);
    let report = report_of(&mut browser, page, metrics);
    (browser, report)
}

pub(super) fn report_of(browser: &mut impl Browser, page: &Page, metrics: impl Fn() -> Metrics) -> Value {
    let report = eventually("the page reports", || {
        if browser.program().has_ended() {
            return Some(json!({"error": "the browser exited before the page had sent its report"}));
        }
        page.report()
    });
    assert!(report.get("error").is_none(), "{report:#}\n{}", metrics().text());
    assert_eq!(report["echoed"], report["messages"], "{report:#}");
    assert!(report["echoed"].as_u64() > Some(10), "{report:#}");
    report
}

/// A page from another origin gets credentials with the script in docs/credentials.md and calls itself over one of the listed
/// transports.
fn gets_its_credentials<B: Browser>() {
    need!(B::available(true));
    let certificate = Certificate::of_authority(&["localhost", "127.0.0.1", "::1"]);
    let dir = Dir::new();
    let state = dir.at("state").display().to_string();
    let run = |arguments: &[&str]| {
        let ended = Program::run(&mut turnpike(&[arguments, &["--json", "--state", &state]].concat()));
        assert_eq!(ended.code, Some(0), "{arguments:?}: {}", ended.output());
        ended.result()
    };
    run(&["secret", "rotate", REALM]);
    let key = run(&["key", "add", "page", "--ttl-max", "600"])["key"].clone();
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("loopback has a free port");
    let origin = format!("http://{}", listener.local_addr().expect("a bound socket has an address"));
    let api = format!("127.0.0.1:{}", free_port(V4));
    let text = format!("[credentials]\nlisten = [\"{api}\"]\norigins = [\"{origin}\"]\n");
    let file = dir.file("turnpike.toml", &text);
    let arguments = ["--state", &state, "-c", file.to_str().expect("the test's path is UTF-8")];
    let serve = Serve::start_secured(&certificate, &arguments);
    let settings = json!({ "api": format!("http://{api}"), "key": key, "user": "carol" });
    let page = Page::serve_at(listener, settings);
    let (browser, report) = shown::<B>(&page, &certificate, || serve.metrics());
    for end in report["ends"].as_array().expect("a list of both ends") {
        assert_eq!((&end["local"], &end["remote"]), (&json!("relay"), &json!("relay")), "{report:#}");
    }
    // A browser accepts the whole list, including transports that it does not support.
    let urls: Vec<&str> =
        report["urls"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    for (scheme, transport) in [("turn", "udp"), ("turn", "tcp"), ("turns", "tcp"), ("turns", "udp")] {
        let (begin, end) = (format!("{scheme}:localhost:"), format!("?transport={transport}"));
        assert!(urls.iter().any(|url| url.starts_with(&begin) && url.ends_with(&end)), "{report:#}");
    }
    let metrics = serve.metrics();
    assert_eq!(metrics.sum("turnpike_credentials_api_issued_total", "kind=\"password\""), 1);
    browser.close();
}

tests! {
    chromium_gets_its_credentials: gets_its_credentials::<Chromium>();
    firefox_gets_its_credentials: gets_its_credentials::<Firefox>();
    chromium_over_udp: calls_itself::<Chromium>(Over::Udp, V4);
    chromium_over_udp_and_ipv6: calls_itself::<Chromium>(Over::Udp, V6);
    chromium_over_tcp: calls_itself::<Chromium>(Over::Tcp, V4);
    chromium_over_tcp_and_ipv6: calls_itself::<Chromium>(Over::Tcp, V6);
    chromium_over_tls: calls_itself::<Chromium>(Over::Tls, V4);
    chromium_over_tls_and_ipv6: calls_itself::<Chromium>(Over::Tls, V6);
    firefox_over_udp: calls_itself::<Firefox>(Over::Udp, V4);
    firefox_over_udp_and_ipv6: calls_itself::<Firefox>(Over::Udp, V6);
    firefox_over_tcp: calls_itself::<Firefox>(Over::Tcp, V4);
    firefox_over_tcp_and_ipv6: calls_itself::<Firefox>(Over::Tcp, V6);
    firefox_over_tls: calls_itself::<Firefox>(Over::Tls, V4);
    chromium_in_the_kernel: calls_itself_in_the_kernel::<Chromium>("interop::browsers::chromium_in_the_kernel", true);
    /// Firefox only sends Send indications.
    firefox_in_the_kernel: calls_itself_in_the_kernel::<Firefox>("interop::browsers::firefox_in_the_kernel", false);
    firefox_over_tls_and_ipv6: calls_itself::<Firefox>(Over::Tls, V6);
}
