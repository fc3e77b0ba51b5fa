//! Minimal HTTP client for the admin interface and credentials API, and a reader of the metrics format.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    path::Path,
};

use serde_json::Value;

use super::SOON;

pub fn post(server: SocketAddr, path: &str, key: &str, body: &Value) -> io::Result<(u16, Value)> {
    change(server, "POST", path, key, &body.to_string())
}

pub fn delete(server: SocketAddr, path: &str, key: &str) -> io::Result<(u16, Value)> {
    change(server, "DELETE", path, key, "")
}

fn change(server: SocketAddr, method: &str, path: &str, key: &str, body: &str) -> io::Result<(u16, Value)> {
    let mut stream = TcpStream::connect_timeout(&server, SOON)?;
    stream.set_read_timeout(Some(SOON))?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.0\r\nHost: {server}\r\nAuthorization: Bearer {key}\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )?;
    let (status, body) = answer(stream)?;
    Ok((status, serde_json::from_str(&body)?))
}

pub fn get(server: SocketAddr, path: &str) -> io::Result<(u16, String)> {
    get_as(server, path, &server.to_string())
}

pub fn get_as(server: SocketAddr, path: &str, host: &str) -> io::Result<(u16, String)> {
    let stream = TcpStream::connect_timeout(&server, SOON)?;
    stream.set_read_timeout(Some(SOON))?;
    ask(stream, path, host)
}

pub fn get_unix(socket: &Path, path: &str) -> io::Result<(u16, String)> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(SOON))?;
    ask(stream, path, "localhost")
}

fn ask(mut stream: impl Read + Write, path: &str, host: &str) -> io::Result<(u16, String)> {
    // HTTP/1.0: the response ends with the connection and is never chunked.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n")?;
    answer(stream)
}

fn answer(mut stream: impl Read) -> io::Result<(u16, String)> {
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(io::ErrorKind::InvalidData)?;
    let status =
        head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or(io::ErrorKind::InvalidData)?;
    Ok((status, body.to_owned()))
}

pub struct Metrics(String);

impl Metrics {
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// Sum of all series of `name` whose labels contain `label` (such as `reason="expired"`; empty for all).
    ///
    /// # Panics
    /// If no series matches, so that a misspelt name is not taken for zero.
    pub fn sum(&self, name: &str, label: &str) -> u64 {
        let mut found = false;
        let mut sum = 0.0;
        for line in self.0.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let (family, labels) = series.split_once('{').unwrap_or((series, ""));
            if family == name && labels.contains(label) {
                found = true;
                sum += value.parse::<f64>().expect("a sample is a number");
            }
        }
        assert!(found, "there is no series {name}{{{label}}} in\n{}", self.0);
        #[expect(clippy::cast_possible_truncation, reason = "counters, far below 2^53")]
        {
            sum as u64
        }
    }

    pub fn maybe(&self, name: &str) -> Option<u64> {
        let there = |line: &str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']));
        self.0.lines().any(there).then(|| self.sum(name, ""))
    }

    pub fn text(&self) -> &str {
        &self.0
    }
}
