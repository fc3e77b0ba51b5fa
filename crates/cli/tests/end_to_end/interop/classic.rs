//! RFC 3489 clients against `serve`: Debian's `stun` and pystun3. Both get answers and finish.

use crate::prelude::*;

#[test]
fn debians_stun_learns_its_address() {
    let stun = need!(installed("stun"));
    let serve = Serve::start(&[]);
    let run = Program::start(Command::new(stun).arg(serve.address(V4).to_string()).arg("-v")).wait(SOON * 2);
    let said = run.output();
    assert!(said.contains("MappedAddress = 127.0.0.1:"), "{said}");
    // The most precise verdict for a server with one address; an answer to CHANGE-REQUEST would mean "Open".
    assert!(said.contains("Primary: Firewall"), "{said}");
}

#[test]
fn pystun3_gets_answers_and_exits() {
    let pystun3 = need!(interop_program("interop-rfc3489", "pystun3/bin/pystun3"));
    let serve = Serve::start(&[]);
    let (at, port) = (serve.address(V4), free_port(V4).to_string());
    let arguments = ["-H", "127.0.0.1", "-P", &at.port().to_string(), "-i", "127.0.0.1", "-p", &port];
    let run = Program::start(Command::new(pystun3).args(arguments)).wait(SOON * 4);
    // Without an answer to the first request, the verdict would be "Blocked".
    assert!(run.stdout.contains("NAT Type: Symmetric UDP Firewall"), "{}", run.output());
}
