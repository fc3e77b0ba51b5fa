//! Checks whether the process at an occupied address is a draining turnpike.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    time::Duration,
};

use turnpike_wire::address::UnixName;

/// Timeout for the local response.
const PATIENCE: Duration = Duration::from_millis(500);
/// Maximum number of response bytes to read; no `/readyz` response is longer.
const LONGEST: u64 = 4096;

pub(crate) fn drains_at_unix(name: &UnixName) -> bool {
    let ask = || {
        let path = name.path().ok_or(io::ErrorKind::Unsupported)?;
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        ready(stream)
    };
    ask().is_ok_and(|answer| is_draining(&answer))
}

/// Returns true if the turnpike at this address is draining. Works only with plain HTTP on loopback.
pub(crate) fn drains_at(address: SocketAddr) -> bool {
    let ask = || {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        ready(stream)
    };
    address.ip().is_loopback() && ask().is_ok_and(|answer| is_draining(&answer))
}

fn ready(mut stream: impl Read + Write) -> io::Result<String> {
    stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(LONGEST).read_to_string(&mut answer)?;
    Ok(answer)
}

fn is_draining(answer: &str) -> bool {
    answer.starts_with("HTTP/1.1 503 ") && answer.ends_with("\r\n\r\ndraining\n")
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, os::unix::net::UnixListener, thread};

    use super::*;

    const DRAINING: &str = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 9\r\n\r\ndraining\n";

    fn answer(mut stream: impl Read + Write, text: &str) {
        let mut request = [0; 512];
        let read = stream.read(&mut request).expect("a request");
        assert!(request[..read].starts_with(b"GET /readyz "));
        stream.write_all(text.as_bytes()).expect("the client reads");
    }

    #[test]
    fn draining_process_is_detected() {
        for (text, drains) in [
            (DRAINING, true),
            ("HTTP/1.1 200 OK\r\n\r\nok\n", false),
            ("HTTP/1.1 503 Service Unavailable\r\n\r\n<html>", false),
            ("SSH-2.0-OpenSSH_9.7\r\n", false),
        ] {
            let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
            let at = listener.local_addr().expect("bound");
            let server = thread::spawn(move || answer(listener.accept().expect("a client").0, text));
            assert_eq!(drains_at(at), drains, "{text:?}");
            server.join().expect("no panic");
        }
        let dir = turnpike_testkit::Dir::new();
        let path = dir.at("admin.sock");
        let listener = UnixListener::bind(&path).expect("the directory is writable");
        let server = thread::spawn(move || answer(listener.accept().expect("a client").0, DRAINING));
        assert!(drains_at_unix(&path.to_str().expect("UTF-8").parse::<UnixName>().expect("a path")));
        server.join().expect("no panic");
    }
}
