//! The log line of each allocation: its fields, and a bound on the number of lines.

use crate::prelude::*;

fn field(line: &str, name: &str) -> Option<String> {
    let (_, rest) = line.split_once(&format!(" {name}="))?;
    Some(rest.split(' ').next()?.trim_matches('"').to_owned())
}

#[test]
fn allocation_end_line_names_relayed_address_and_transports() {
    let certificate = Certificate::new(&["localhost"]);
    let reflect = Reflect::start(V4, &[]);
    for transport in ["udp", "tcp", "tls", "dtls"] {
        let mut serve = Serve::start_secured(&certificate, &["--relay-ports", "50000-50999"]);
        Load::new(serve.address_of(transport, V4))
            .to(reflect.address)
            .with(&format!("--transport {transport} --insecure --rate 50 --duration 1"))
            .run()
            .ended(0);
        let line = serve.program.line_with("allocation ended");
        assert_eq!(field(&line, "transport").as_deref(), Some(transport), "{line}");
        assert_eq!(field(&line, "relayed_transport").as_deref(), Some("udp"), "{line}");
        let relayed = field(&line, "relayed").expect("a relayed address");
        let port = relayed.strip_prefix("127.0.0.1:").and_then(|port| port.parse().ok());
        assert!(port.is_some_and(|port: u16| (50_000..51_000).contains(&port)), "{line}");
    }
}
