//! Sockets that a service manager has passed: what they say about settings, and whether something listens on each.

use std::{net::SocketAddr, thread};

use turnpike_config::{Flags, Origin};
use turnpike_net::{PassedSocket, PassedSockets, passed::Transport};

use crate::error::DaemonError;

/// The variable that they are known by (sd_listen_fds(3)).
const VARIABLE: &str = "LISTEN_FDS";

/// What `serve` shall do where nobody says anything: listen on all of them, with one worker for each socket of an address.
pub(crate) fn settings_of_serve(passed: &PassedSockets) -> Flags {
    let mut flags = settings_of_forward(passed);
    for key in ["server.listen", "tls.listen", "dtls.listen"] {
        let mut addresses: Vec<String> = Vec::new();
        for socket in passed.iter().filter(|socket| key_of(socket) == key) {
            let address = socket.address.to_string();
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        flags.set(key, VARIABLE, addresses);
    }
    flags
}

/// The same of `forward`, whose rules name their listeners.
pub(crate) fn settings_of_forward(passed: &PassedSockets) -> Flags {
    let mut flags = Flags::new();
    let workers = passed.fewest().map(|sockets| sockets.to_string());
    for key in ["server.workers", "forward.workers"] {
        flags.set(key, VARIABLE, workers.clone());
    }
    flags
}

/// Tells where cores stay idle because a unit passes fewer sockets of each address.
pub(crate) fn say_few_workers(passed: &PassedSockets, origin: &Origin, workers: usize) {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    if let Some(line) = few_workers(passed, origin, (workers, cores)) {
        tracing::info!("{line}");
    }
}

fn few_workers(passed: &PassedSockets, origin: &Origin, (workers, cores): (usize, usize)) -> Option<String> {
    let sockets = passed.fewest()?;
    let is_derived = matches!(origin, Origin::Environment(name) if name == VARIABLE);
    (is_derived && workers < cores).then(|| {
        format!(
            "{workers} of {cores} cores relay, because the .socket unit passes each address {sockets} times; repeat its lines once for each \
             worker, with ReusePort=yes"
        )
    })
}

/// Names the first of them that nobody will read from. Clients would wait in its queue for ever: of several sockets of one address the
/// kernel gives each its share.
pub(crate) fn check(
    passed: &PassedSockets,
    workers: usize,
    listens: impl Fn(Transport, SocketAddr) -> bool,
) -> Result<(), DaemonError> {
    for PassedSocket { name, transport, address, .. } in passed.iter() {
        let sockets = passed.count(*transport, *address);
        let problem = if !listens(*transport, *address) {
            "nothing in the configuration listens there; name that address in the configuration, or take it out of the .socket unit"
                .to_owned()
        } else if sockets > workers {
            format!(
                "{sockets} sockets of it for {workers} workers; name each address in the .socket unit once for each worker, or configure \
                 {sockets} workers"
            )
        } else {
            continue;
        };
        let (transport, address): (&str, _) = (transport.into(), *address);
        return Err(DaemonError::Unserved { transport, address, name: name.clone(), problem });
    }
    Ok(())
}

/// The names of a socket tell what one of TCP or UDP alone does not.
fn key_of(socket: &PassedSocket) -> &'static str {
    match (socket.name.as_str(), socket.transport) {
        ("tls", Transport::Tcp) => "tls.listen",
        ("dtls", Transport::Udp) => "dtls.listen",
        _ => "server.listen",
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};

    use turnpike_config::Sources;

    use super::*;

    fn passed(sockets: Vec<(std::os::fd::OwnedFd, &str)>) -> PassedSockets {
        let named = sockets.into_iter().map(|(socket, name)| (socket, name.to_owned()));
        PassedSockets::new(named).expect("sockets")
    }

    #[test]
    fn names_tell_tls_from_tcp_and_one_worker_suffices_for_one_socket_each() {
        let tcp = || TcpListener::bind("127.0.0.1:0").expect("loopback");
        let udp = || UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let (plain, tls, datagrams, dtls) = (tcp(), tcp(), udp(), udp());
        let at = |address: std::io::Result<SocketAddr>| address.expect("bound").to_string();
        let (of_plain, of_tls) = (at(plain.local_addr()), at(tls.local_addr()));
        let (of_datagrams, of_dtls) = (at(datagrams.local_addr()), at(dtls.local_addr()));
        let passed = passed(vec![
            (plain.into(), "turnpike.socket"),
            (tls.into(), "tls"),
            (datagrams.into(), "tls"),
            (dtls.into(), "dtls"),
        ]);
        let problems = Sources::new(None, Vec::new(), Flags::new())
            .with_fallback(settings_of_serve(&passed))
            .load()
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
        assert_eq!(passed.fewest(), Some(1));
    }

    #[test]
    fn workers_that_a_unit_keeps_few_are_explained() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let passed = passed(vec![(socket.into(), "a")]);
        let line = |origin, cores| few_workers(&passed, &origin, (1, cores));
        let derived = || Origin::Environment(VARIABLE.to_owned());
        assert!(line(derived(), 4).is_some_and(|line| line.starts_with("1 of 4 cores relay")));
        assert_eq!(line(derived(), 1), None);
        assert_eq!(line(Origin::Flag("--workers"), 4), None, "as somebody wants it");
    }

    #[test]
    fn a_socket_that_nothing_listens_on_is_named() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let at = socket.local_addr().expect("bound");
        let passed = passed(vec![(socket.into(), "odd.socket")]);
        assert!(check(&passed, 1, |transport, address| (transport, address) == (Transport::Udp, at)).is_ok());
        let error =
            check(&passed, 1, |transport, _| transport == Transport::Tcp).expect_err("it is UDP").to_string();
        assert!(error.contains(&format!("udp {at}")) && error.contains("odd.socket"), "{error}");
    }

    #[test]
    fn more_sockets_of_an_address_than_workers_are_too_many() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let again = socket.try_clone().expect("a descriptor");
        let passed = passed(vec![(socket.into(), "a"), (again.into(), "a")]);
        assert!(check(&passed, 2, |_, _| true).is_ok());
        let error = check(&passed, 1, |_, _| true).expect_err("nobody reads from the second").to_string();
        assert!(error.contains("2 sockets of it for 1 workers"), "{error}");
    }
}
