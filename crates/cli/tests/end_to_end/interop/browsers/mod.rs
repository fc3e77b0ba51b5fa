//! Browsers: two peer connections of one page that may only meet through `serve`, with audio, video and a data channel.

mod admin_page;
mod browser;
mod driver;
mod page;

use std::net::IpAddr;

use serde_json::json;

use turnpike_testkit::tests;

use crate::harness::{Certificate, PASSWORD, Serve, USER, V4, V6, eventually, loopback_of, need};

use browser::{Browser, Chromium, Firefox};
use page::Page;

/// How a browser reaches the server.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Over {
    Udp,
    Tcp,
    Tls,
}

impl Over {
    /// The server's URI (RFC 7065). `localhost` is both addresses, but the ports of the two families differ.
    fn uri<B: Browser>(self, serve: &Serve, family: IpAddr) -> String {
        let server = serve.address(family);
        match self {
            Self::Tls if B::TLS_WANTS_NAME => format!("turns:localhost:{}?transport=tcp", server.port()),
            Self::Udp => format!("turn:{server}?transport=udp"),
            Self::Tcp => format!("turn:{server}?transport=tcp"),
            Self::Tls => format!("turns:{server}?transport=tcp"),
        }
    }

    /// `relayProtocol` of W3C webrtc-stats.
    fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
            Self::Tls => "tls",
        }
    }
}

/// Has a browser call itself through `serve`, and holds what it saw against what the server counted.
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
    let mut browser = B::open(&page.url(), &certificate);
    let report = eventually("the page reports", || {
        if browser.program().has_ended() {
            return Some(json!({"error": "the browser ended before its page reported"}));
        }
        page.report()
    });
    assert!(report.get("error").is_none(), "{report:#}\n{}", serve.metrics().text());

    assert_eq!(report["echoed"], report["messages"], "{report:#}");
    assert!(report["echoed"].as_u64() > Some(10), "{report:#}");
    let number = |value: &serde_json::Value| value.as_u64().unwrap_or_default();
    let mut received = 0;
    for end in report["ends"].as_array().expect("two of them") {
        assert_eq!((&end["local"], &end["remote"]), (&json!("relay"), &json!("relay")), "{report:#}");
        assert_eq!(end["relay_protocol"], over.name(), "{report:#}");
        assert!(number(&end["frames"]) >= 10 && number(&end["video_bytes"]) > 1_000, "{report:#}");
        assert!(number(&end["audio_packets"]) >= 10 && number(&end["audio_bytes"]) > 0, "{report:#}");
        received += number(&end["audio_packets"]);
    }

    // What is sent to a peer, the other allocation, comes back from it: each datagram counts there and back.
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
            // All of it over streams: a client message each, and requests and replies besides.
            assert!(of_streams[0] > relayed("to_peer"), "{}", metrics.text());
            assert!(of_streams[1] > relayed("to_client"), "{}", metrics.text());
            let (of_this, of_other) =
                if over == Over::Tls { (handshakes, plain) } else { (plain, handshakes) };
            assert!(of_this >= 2 && of_other == 0, "{}", metrics.text());
        }
    }
    serve.wait_for_allocations(0);
    browser.close();
}

tests! {
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
    firefox_over_tls_and_ipv6: calls_itself::<Firefox>(Over::Tls, V6);
}
