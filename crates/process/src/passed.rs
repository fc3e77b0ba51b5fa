//! Sockets passed by a service manager: the settings they imply, and a check that each is used.

use std::{net::SocketAddr, thread};

use turnpike_config::{Flags, Origin};
use turnpike_net::{PassedSocket, PassedSockets, SocketProtocol};

use crate::error::ProcessError;

/// Environment variable that announces passed sockets (sd_listen_fds(3)); shown as the origin of settings.
pub const VARIABLE: &str = "LISTEN_FDS";

/// Default settings for these sockets: as many workers as there are sockets per address.
#[must_use]
pub fn settings(passed: &PassedSockets) -> Flags {
    let mut flags = Flags::new();
    let workers = fewest(passed).map(|sockets| sockets.to_string());
    for key in ["server.workers", "forward.workers"] {
        flags.set(key, VARIABLE, workers.clone());
    }
    flags
}

/// Smallest number of sockets per address; `None` if no sockets were passed. With that many workers, no
/// additional sockets are needed.
fn fewest(passed: &PassedSockets) -> Option<usize> {
    passed.iter().map(|one| passed.count(one.transport, one.address)).min()
}

/// Logs that some cores stay idle if a unit passes too few sockets for each address.
pub fn log_few_workers(passed: &PassedSockets, origin: &Origin, workers: usize) {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    if let Some(line) = few_workers(passed, origin, (workers, cores)) {
        tracing::info!("{line}");
    }
}

fn few_workers(passed: &PassedSockets, origin: &Origin, (workers, cores): (usize, usize)) -> Option<String> {
    let sockets = fewest(passed)?;
    let is_derived = matches!(origin, Origin::Environment(name) if name == VARIABLE);
    (is_derived && workers < cores).then(|| {
        format!(
            "turnpike uses only {workers} of {cores} cores (sockets per address: {sockets}); list each address in the .socket unit once \
             per core, with ReusePort=yes"
        )
    })
}

/// Checks that each socket is read. The kernel distributes clients over all sockets of an address, so
/// clients of an unread socket would wait forever.
pub fn check(
    passed: &PassedSockets,
    workers: usize,
    listens: impl Fn(SocketProtocol, SocketAddr) -> bool,
) -> Result<(), ProcessError> {
    for PassedSocket { name, transport, address, .. } in passed.iter() {
        let sockets = passed.count(*transport, *address);
        let problem = if !listens(*transport, *address) {
            "no listener is configured there; add the address to the configuration, or remove it from the .socket unit"
                .to_owned()
        } else if sockets > workers {
            format!(
                "there are more sockets for this address ({sockets}) than workers ({workers}); list each address in the .socket \
                 unit once per worker, or configure {sockets} workers"
            )
        } else {
            continue;
        };
        let (transport, address): (&str, _) = (transport.into(), *address);
        return Err(ProcessError::Unserved { transport, address, name: name.clone(), problem });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    fn passed(sockets: Vec<(std::os::fd::OwnedFd, &str)>) -> PassedSockets {
        let named = sockets.into_iter().map(|(socket, name)| (socket, name.to_owned()));
        PassedSockets::new(named).expect("sockets")
    }

    #[test]
    fn idle_cores_are_explained() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let passed = passed(vec![(socket.into(), "a")]);
        let line = |origin, cores| few_workers(&passed, &origin, (1, cores));
        let derived = || Origin::Environment(VARIABLE.to_owned());
        assert!(line(derived(), 4).is_some_and(|line| line.starts_with("turnpike uses only 1 of 4 cores")));
        assert_eq!(fewest(&passed), Some(1));
        assert_eq!(line(derived(), 1), None);
        assert_eq!(line(Origin::Flag("--workers"), 4), None, "as configured");
    }

    #[test]
    fn an_unused_socket_is_named() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let at = socket.local_addr().expect("bound");
        let passed = passed(vec![(socket.into(), "odd.socket")]);
        assert!(
            check(&passed, 1, |transport, address| (transport, address) == (SocketProtocol::Udp, at)).is_ok()
        );
        let error = check(&passed, 1, |transport, _| transport == SocketProtocol::Tcp)
            .expect_err("a UDP socket")
            .to_string();
        assert!(error.contains(&format!("udp {at}")) && error.contains("odd.socket"), "{error}");
    }

    #[test]
    fn more_sockets_per_address_than_workers_are_refused() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let again = socket.try_clone().expect("a descriptor");
        let passed = passed(vec![(socket.into(), "a"), (again.into(), "a")]);
        assert!(check(&passed, 2, |_, _| true).is_ok());
        let error = check(&passed, 1, |_, _| true).expect_err("the second socket is not read").to_string();
        assert!(error.contains("more sockets for this address (2) than workers (1)"), "{error}");
    }
}
