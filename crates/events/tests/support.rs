//! A receiver of webhooks, with its own HTTP parser, that fails as the test wants.

use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use serde_json::Value;
use turnpike_events::{Events, Options, Timing, WebhookOptions};
use turnpike_wire::secret::Secret;

pub(crate) const SECRET: &str = "0123456789abcdef";

/// Behaviour for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Accept,
    /// Responds with this status without reading the events.
    Refuse(u16),
    /// Closes the connection without reading the events.
    Close,
    /// Takes the events, then closes the connection.
    AcceptAndClose,
    /// Never responds.
    Hang,
}

pub(crate) struct Request {
    pub(crate) headers: HashMap<String, String>,
    pub(crate) body: Vec<u8>,
}

#[derive(Clone)]
pub(crate) struct Receiver {
    pub(crate) at: SocketAddr,
    state: Arc<State>,
}

struct State {
    /// Takes the number of the request.
    act: Box<dyn Fn(u64) -> Act + Send + Sync>,
    requests: AtomicU64,
    hanging: AtomicBool,
    accepts_all: AtomicBool,
    /// Requests whose events were taken; only their number if `keeps` is false.
    taken: Mutex<Vec<Request>>,
    /// Number of times that each event, by its sequence number, was taken.
    counts: Mutex<Vec<u8>>,
    keeps: bool,
}

impl Receiver {
    pub(crate) fn new(act: impl Fn(u64) -> Act + Send + Sync + 'static) -> Self {
        Self::start(act, true)
    }

    /// Does not keep the requests.
    pub(crate) fn counting(act: impl Fn(u64) -> Act + Send + Sync + 'static) -> Self {
        Self::start(act, false)
    }

    fn start(act: impl Fn(u64) -> Act + Send + Sync + 'static, keeps: bool) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let at = listener.local_addr().expect("bound");
        let state = State {
            act: Box::new(act),
            requests: AtomicU64::new(0),
            hanging: AtomicBool::new(true),
            accepts_all: AtomicBool::new(false),
            taken: Mutex::default(),
            counts: Mutex::default(),
            keeps,
        };
        let receiver = Self { at, state: Arc::new(state) };
        let served = receiver.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let receiver = served.clone();
                thread::spawn(move || receiver.serve(stream));
            }
        });
        receiver
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/hook?a=b", self.at)
    }

    pub(crate) fn requests(&self) -> u64 {
        self.state.requests.load(Ordering::Relaxed)
    }

    pub(crate) fn stop_hanging(&self) {
        self.state.hanging.store(false, Ordering::Relaxed);
    }

    /// Ends the failures.
    pub(crate) fn accept_all(&self) {
        self.state.accepts_all.store(true, Ordering::Relaxed);
    }

    pub(crate) fn taken(&self) -> MutexGuard<'_, Vec<Request>> {
        self.state.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All events taken, in order.
    pub(crate) fn events(&self) -> Vec<Value> {
        self.taken().iter().flat_map(|request| events_of(&request.body)).collect()
    }

    /// Number of times that the event with each sequence number, from 1, was taken.
    pub(crate) fn counts(&self) -> Vec<u8> {
        self.state.counts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn serve(&self, stream: TcpStream) {
        let mut input = BufReader::new(stream);
        while let Some(request) = read(&mut input) {
            let number = self.state.requests.fetch_add(1, Ordering::Relaxed);
            let accepts = self.state.accepts_all.load(Ordering::Relaxed);
            let act = if accepts { Act::Accept } else { (self.state.act)(number) };
            if matches!(act, Act::Accept | Act::AcceptAndClose) {
                self.take(request);
            }
            let status = match act {
                Act::Accept => 204,
                Act::Refuse(status) => status,
                Act::Close | Act::AcceptAndClose => return,
                Act::Hang => {
                    while self.state.hanging.load(Ordering::Relaxed) {
                        thread::sleep(Duration::from_millis(5));
                    }
                    return;
                }
            };
            let response =
                format!("HTTP/1.1 {status} Status\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n");
            if input.get_mut().write_all(response.as_bytes()).is_err() {
                return;
            }
        }
    }

    fn take(&self, request: Request) {
        {
            let mut counts = self.state.counts.lock().unwrap_or_else(PoisonError::into_inner);
            for event in events_of(&request.body) {
                let sequence = sequence(&event);
                if counts.len() < sequence {
                    counts.resize(sequence, 0);
                }
                counts[sequence - 1] += 1;
            }
        }
        if self.state.keeps {
            self.taken().push(request);
        }
    }
}

pub(crate) fn sequence(event: &Value) -> usize {
    event["sequence"].as_str().expect("text").parse().expect("a number")
}

fn events_of(body: &[u8]) -> Vec<Value> {
    match serde_json::from_slice(body).expect("JSON") {
        Value::Array(events) => events,
        event => vec![event],
    }
}

fn read(input: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if input.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if line.trim().is_empty() {
            break;
        }
        lines.push(line.trim().to_owned());
    }
    assert_eq!(lines[0], "POST /hook?a=b HTTP/1.1");
    let headers = lines[1..].iter().filter_map(|line| line.split_once(": "));
    let headers: HashMap<String, String> =
        headers.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect();
    let mut body = vec![0; headers["content-length"].parse().expect("a length")];
    input.read_exact(&mut body).ok()?;
    Some(Request { headers, body })
}

pub(crate) fn webhook(url: String, batch: bool) -> WebhookOptions {
    WebhookOptions { url, secret: Secret::new(SECRET), types: Vec::new(), batch }
}

/// Pauses are short, so that tests with many failures are.
pub(crate) fn options(dir: &Path, webhooks: Vec<WebhookOptions>) -> Options {
    let ms = Duration::from_millis;
    let timing = Timing { first: ms(1), most: ms(4), request: Duration::from_secs(30) };
    Options { webhooks, dir: dir.to_owned(), spool: 256 << 20, refuses: None, timing }
}

pub(crate) fn started(options: Options) -> Arc<Events> {
    let events = Arc::new(Events::new("/turnpike/test"));
    events.set(options);
    events
}

/// Polls until `is_so`, for at most a minute without progress.
pub(crate) async fn until(what: &str, mut progress: impl FnMut() -> u64, is_so: impl Fn(u64) -> bool) {
    let (mut last, mut since) = (0, tokio::time::Instant::now());
    loop {
        let now = progress();
        if is_so(now) {
            return;
        }
        if now != last {
            (last, since) = (now, tokio::time::Instant::now());
        }
        assert!(since.elapsed() < turnpike_testkit::PATIENCE, "{what}: stuck at {now}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
