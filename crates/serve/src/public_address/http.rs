//! One HTTP/1.0 request whose response ends when the connection is closed, which is enough for metadata
//! services and Kubernetes.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

/// Timeout for connecting and for each read and write.
const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum size of a response in bytes; a Kubernetes Node object is about ten thousand bytes long.
const LONGEST: u64 = 4 << 20;

#[derive(Debug, thiserror::Error)]
pub(super) enum HttpRequestError {
    #[error("no answer from {0}: {1}")]
    Silent(String, io::Error),
    #[error("{0} answered with status {1}: {2}")]
    Refused(String, u16, String),
    #[error("invalid answer from {0}: {1}")]
    Strange(String, String),
    #[error("{0}")]
    Missing(String),
}

pub(super) struct HttpRequest<'a> {
    pub(super) method: &'static str,
    pub(super) host: &'a str,
    pub(super) path: &'a str,
    pub(super) headers: &'a [(&'a str, &'a str)],
}

pub(super) fn connect(server: SocketAddr) -> Result<TcpStream, HttpRequestError> {
    let silent = |error| HttpRequestError::Silent(server.to_string(), error);
    let stream = TcpStream::connect_timeout(&server, PATIENCE).map_err(silent)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(silent)?;
    stream.set_write_timeout(Some(PATIENCE)).map_err(silent)?;
    Ok(stream)
}

pub(super) fn ask(
    mut stream: impl Read + Write,
    question: &HttpRequest<'_>,
) -> Result<String, HttpRequestError> {
    let HttpRequest { method, host, path, headers } = question;
    let silent = |error| HttpRequestError::Silent((*host).to_owned(), error);
    let more: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let head = format!("{method} {path} HTTP/1.0\r\nHost: {host}\r\nContent-Length: 0\r\n{more}\r\n");
    stream.write_all(head.as_bytes()).map_err(silent)?;
    let mut answer = Vec::new();
    match stream.take(LONGEST).read_to_end(&mut answer) {
        // A server may close TLS without close_notify: Content-Length shows whether the body is complete.
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => return Err(silent(error)),
        _ => {}
    }
    understand(host, &answer)
}

fn understand(host: &str, answer: &[u8]) -> Result<String, HttpRequestError> {
    let strange = |why: &str| HttpRequestError::Strange(host.to_owned(), why.to_owned());
    let text = str::from_utf8(answer).map_err(|_| strange("not UTF-8"))?;
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(|| strange("no headers"))?;
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
    let status: u16 = status.ok_or_else(|| strange("no status"))?;
    let mut headers = lines.filter_map(|line| line.split_once(':'));
    let length = headers.find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    if length.is_some_and(|(_, length)| length.trim().parse() != Ok(body.len())) {
        return Err(strange("shorter than its Content-Length"));
    }
    if status == 200 {
        return Ok(body.to_owned());
    }
    let first = body.lines().next().unwrap_or_default().chars().take(200).collect();
    Err(HttpRequestError::Refused(host.to_owned(), status, first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_complete_successful_answers_have_a_body() {
        let read = |answer: &str| understand("h", answer.as_bytes());
        assert_eq!(read("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").expect("a good answer"), "ok");
        assert_eq!(read("HTTP/1.0 200 OK\r\n\r\nok").expect("a good answer"), "ok");
        assert!(matches!(
            read("HTTP/1.1 404 Not Found\r\n\r\nno"),
            Err(HttpRequestError::Refused(_, 404, _))
        ));
        for bad in ["", "HTTP/1.1 200 OK\r\n", "x\r\n\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok"]
        {
            assert!(matches!(read(bad), Err(HttpRequestError::Strange(..))), "{bad}");
        }
    }
}
