//! Serves the page of the browser calls (tests/interop/browser) and receives its report.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

use serde_json::Value;

use crate::SOON;

const HTML: &str = include_str!("../../../../tests/interop/browser/page.html");
/// Document that contains the script that requests credentials.
const DOCUMENT: &str = include_str!("../../../../docs/credentials.md");

const LONGEST: usize = 1 << 20;

/// Page served on loopback; its thread runs until the test program exits.
pub struct Page {
    address: SocketAddr,
    report: Arc<Mutex<Option<Value>>>,
}

impl Page {
    pub fn serve(settings: Value) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("loopback has a free port");
        Self::serve_at(listener, settings)
    }

    pub fn serve_at(listener: TcpListener, settings: Value) -> Self {
        let address = listener.local_addr().expect("a bound socket has an address");
        let report = Arc::new(Mutex::new(None));
        let page = Self { address, report: Arc::clone(&report) };
        let settings = Arc::new(settings.to_string());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (settings, report) = (Arc::clone(&settings), Arc::clone(&report));
                // Each connection gets its own thread, because browsers open connections that they never use, which would block the others.
                thread::spawn(move || {
                    let _ = answer(stream, &settings, &report);
                });
            }
        });
        page
    }

    /// Loopback URL. Browsers treat it as secure and therefore allow the use of the camera without TLS.
    pub fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    pub fn report(&self) -> Option<Value> {
        self.report.lock().expect("no thread panics while holding the lock").clone()
    }
}

fn answer(stream: TcpStream, settings: &str, report: &Mutex<Option<Value>>) -> io::Result<()> {
    stream.set_read_timeout(Some(SOON))?;
    let mut reader = BufReader::new(&stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let request = line.clone();
    let mut length = 0;
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().unwrap_or(0).min(LONGEST);
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let mut words = request.split(' ');
    let (status, kind, text) = match (words.next(), words.next()) {
        (Some("GET"), Some("/")) => ("200 OK", "text/html", HTML),
        (Some("GET"), Some("/settings")) => ("200 OK", "application/json", settings),
        (Some("GET"), Some("/documented.js")) => ("200 OK", "text/javascript", documented()),
        (Some("POST"), Some("/report")) => {
            *report.lock().expect("no thread panics while holding the lock") =
                serde_json::from_slice(&body).ok();
            ("200 OK", "text/plain", "")
        }
        _ => ("404 Not Found", "text/plain", ""),
    };
    write!(
        &stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.len()
    )
}

/// Script for web pages, from docs/credentials.md.
fn documented() -> &'static str {
    let (_, rest) = DOCUMENT.split_once("```js\n").expect("the document contains the script");
    rest.split_once("```").expect("the code block ends").0
}
