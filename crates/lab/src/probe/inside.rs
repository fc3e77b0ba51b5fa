//! Network probes sent from inside a network namespace, by a thread that has entered it.

use std::{
    fs::File,
    io::{Read, Write},
    net::{SocketAddr, TcpStream, UdpSocket},
    os::fd::AsFd,
    thread,
    time::Duration,
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use turnpike_wire::stun::{Class, Header, Writer, method};

use crate::error::LabError;

const PATIENCE: Duration = Duration::from_millis(200);
const BINDING_REQUEST: Header =
    Header { class: Class::Request, method: method::BINDING, transaction: *b"turnpike-lab" };
/// Maximum size of an HTTP response; the metrics of many workers are large.
const LONGEST_ANSWER: u64 = 4 << 20;

/// Runs `ask` on a thread inside the network namespace of `pid`, or on this thread for the host.
pub(crate) fn inside<T: Send>(
    pid: Option<u32>,
    ask: impl FnOnce() -> Option<T> + Send,
) -> Result<Option<T>, LabError> {
    let Some(pid) = pid else { return Ok(ask()) };
    thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let path = format!("/proc/{pid}/ns/net");
            let cannot = |what: &str| LabError::io(format!("cannot {what} {path}"));
            let space = File::open(&path).map_err(cannot("open"))?;
            // Only this thread enters the namespace, and it exits after the probe.
            move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))
                .map_err(|error| cannot("enter")(error.into()))?;
            Ok(ask())
        });
        asking.join().unwrap_or_else(|_| Err(LabError::failed("a probe inside a namespace panicked")))
    })
}

pub(crate) fn answers_stun(address: SocketAddr) -> Option<()> {
    let any: SocketAddr = if address.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = UdpSocket::bind(any).ok()?;
    // A connected socket is notified of a closed port immediately.
    socket.connect(address).ok()?;
    socket.set_read_timeout(Some(PATIENCE)).ok()?;
    socket.send(Writer::begin(&mut Vec::new(), BINDING_REQUEST).finish(false)).ok()?;
    let mut answer = [0; 1500];
    let length = socket.recv(&mut answer).ok()?;
    is_binding_success(&answer[..length]).then_some(())
}

pub(crate) fn http_get(address: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE).ok()?;
    stream.set_read_timeout(Some(10 * PATIENCE)).ok()?;
    // HTTP/1.0: the response ends with the connection and is never chunked.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n").ok()?;
    let mut answer = Vec::new();
    stream.take(LONGEST_ANSWER).read_to_end(&mut answer).ok()?;
    parse_http(&String::from_utf8_lossy(&answer)).map(str::to_owned)
}

fn parse_http(answer: &str) -> Option<&str> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split_whitespace().nth(1)?;
    (status == "200").then_some(body)
}

fn is_binding_success(bytes: &[u8]) -> bool {
    Header::new_checked(bytes) == Ok(BINDING_REQUEST.answered(Class::Success))
}

pub(crate) fn parse_url(url: &str) -> Result<(SocketAddr, String), LabError> {
    let refuse = || LabError::usage(format!("\"{url}\": expected http://ADDRESS:PORT/PATH"));
    let rest = url.strip_prefix("http://").ok_or_else(refuse)?;
    let (address, path) = rest.split_once('/').unwrap_or((rest, ""));
    Ok((address.parse().map_err(|_| refuse())?, format!("/{path}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_success_response_to_our_request_is_accepted() {
        let mut answer = Vec::new();
        Writer::begin(&mut answer, BINDING_REQUEST).finish(false);
        assert!(!is_binding_success(&answer), "our own request echoed");
        answer[0] = 1;
        assert!(is_binding_success(&answer));
        answer[19] ^= 1;
        assert!(!is_binding_success(&answer), "another transaction");
        assert!(!is_binding_success(&[1, 1]));
    }

    #[test]
    fn only_status_200_has_a_body() {
        assert_eq!(parse_http("HTTP/1.0 200 OK\r\nA: b\r\n\r\nx 1\n"), Some("x 1\n"));
        assert_eq!(parse_http("HTTP/1.0 503 No\r\n\r\nx"), None);
        assert_eq!(parse_http("nonsense"), None);
    }

    #[test]
    fn a_metrics_url_has_an_address_a_port_and_a_path() {
        let (address, path) = parse_url("http://127.0.0.1:9641/metrics").unwrap();
        assert_eq!((address.port(), path.as_str()), (9641, "/metrics"));
        assert!(parse_url("https://127.0.0.1/").is_err());
    }
}
