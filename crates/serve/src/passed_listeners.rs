//! Listeners of a TURN server passed by a service manager.

use turnpike_config::Flags;
use turnpike_net::{PassedSocket, PassedSockets, SocketProtocol};
use turnpike_process::passed;

/// Default settings for these sockets: they become the listeners, and there are as many workers as
/// sockets per address.
pub(crate) fn passed_listeners(passed: &PassedSockets) -> Flags {
    let mut flags = passed::settings(passed);
    for key in ["server.listen", "tls.listen", "dtls.listen"] {
        let mut addresses: Vec<String> = Vec::new();
        for socket in passed.iter().filter(|socket| key_of(socket) == key) {
            let address = socket.address.to_string();
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        flags.set(key, passed::VARIABLE, addresses);
    }
    flags
}

/// Configuration key of a socket. Its name distinguishes TLS from TCP and DTLS from UDP.
fn key_of(socket: &PassedSocket) -> &'static str {
    match (socket.name.as_str(), socket.transport) {
        ("tls", SocketProtocol::Tcp) => "tls.listen",
        ("dtls", SocketProtocol::Udp) => "dtls.listen",
        _ => "server.listen",
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener, UdpSocket};

    use turnpike_config::Sources;

    use super::*;

    #[test]
    fn names_distinguish_tls_from_tcp_and_the_socket_count_sets_the_workers() {
        let tcp = || TcpListener::bind("127.0.0.1:0").expect("loopback");
        let udp = || UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let (plain, tls, datagrams, dtls) = (tcp(), tcp(), udp(), udp());
        let at = |address: std::io::Result<SocketAddr>| address.expect("bound").to_string();
        let (of_plain, of_tls) = (at(plain.local_addr()), at(tls.local_addr()));
        let (of_datagrams, of_dtls) = (at(datagrams.local_addr()), at(dtls.local_addr()));
        let sockets = [
            (plain.into(), "turnpike.socket"),
            (tls.into(), "tls"),
            (datagrams.into(), "tls"),
            (dtls.into(), "dtls"),
        ];
        let named = sockets.map(|(socket, name)| (socket, name.to_owned()));
        let passed = PassedSockets::new(named).expect("sockets");
        let problems = Sources::new(None, Vec::new(), Flags::new())
            .with_fallback(passed_listeners(&passed))
            .settings()
            .expect_err("there is no certificate")
            .to_string();
        for key in ["tls.listen", "dtls.listen"] {
            assert!(problems.contains(&format!("environment variable LISTEN_FDS: {key}")), "{problems}");
        }
        let keys: Vec<(&str, String)> =
            passed.iter().map(|socket| (key_of(socket), socket.address.to_string())).collect();
        let expected = [
            ("server.listen", of_plain),
            ("tls.listen", of_tls),
            ("server.listen", of_datagrams),
            ("dtls.listen", of_dtls),
        ];
        assert_eq!(keys, expected);
    }
}
