//! The page that browsers call each other from (tests/interop/browser), and the web server it comes from and reports to.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

use serde_json::Value;

use crate::SOON;

const HTML: &str = include_str!("../../../../tests/interop/browser/page.html");
/// Has a piece of a page in it that asks for credentials.
const DOCUMENT: &str = include_str!("../../../../docs/credentials.md");

/// No report is as long.
const LONGEST: usize = 1 << 20;

/// A page on loopback, for as long as the test program runs: its thread ends with it.
pub struct Page {
    address: SocketAddr,
    report: Arc<Mutex<Option<Value>>>,
}

impl Page {
    /// Gives the page these settings.
    pub fn serve(settings: Value) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("loopback has a free port");
        Self::serve_at(listener, settings)
    }

    /// The same where somebody expects it.
    pub fn serve_at(listener: TcpListener, settings: Value) -> Self {
        let address = listener.local_addr().expect("a bound socket has an address");
        let report = Arc::new(Mutex::new(None));
        let page = Self { address, report: Arc::clone(&report) };
        let settings = Arc::new(settings.to_string());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (settings, report) = (Arc::clone(&settings), Arc::clone(&report));
                // Browsers open connections that they do not use: none may keep another waiting.
                thread::spawn(move || {
                    // A browser that goes away in the middle is no fault of the page.
                    let _ = answer(stream, &settings, &report);
                });
            }
        });
        page
    }

    /// On loopback, which browsers take for secure: there is no camera for other pages without TLS.
    pub fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    /// What the page said when it was done.
    pub fn report(&self) -> Option<Value> {
        self.report.lock().expect("nobody panics while holding this").clone()
    }
}

/// One request per connection.
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
            *report.lock().expect("nobody panics while holding this") = serde_json::from_slice(&body).ok();
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

/// What the document tells people to put into their pages.
fn documented() -> &'static str {
    let (_, rest) = DOCUMENT.split_once("```js\n").expect("the document has it");
    rest.split_once("```").expect("and an end of it").0
}
