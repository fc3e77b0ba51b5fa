//! HTTP server that answers requests by their bodies, for clients of an application's endpoint.

use std::{
    collections::HashMap,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

pub struct HttpStub {
    pub address: SocketAddr,
    state: Arc<State>,
    accepting: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    ends: AtomicBool,
    /// Response bodies by request body.
    answers: Mutex<HashMap<String, String>>,
    /// Status line and body of all other responses.
    otherwise: Mutex<(String, String)>,
    /// Value of Authorization in the last request.
    authorization: Mutex<String>,
    requests: AtomicUsize,
    connections: AtomicUsize,
    open: Mutex<Vec<TcpStream>>,
}

impl HttpStub {
    pub fn new() -> Self {
        let state = Arc::<State>::default();
        *lock(&state.otherwise) = ("200 OK".to_owned(), "{}".to_owned());
        let address = (Ipv4Addr::LOCALHOST, 0).into();
        let mut stub = Self { address, state, accepting: None };
        stub.start();
        stub
    }

    pub fn answer(&self, request: &str, response: &str) {
        lock(&self.state.answers).insert(request.to_owned(), response.to_owned());
    }

    /// Answers all other requests like this; by default with `200 OK` and `{}`.
    pub fn otherwise(&self, status: &str, body: &str) {
        *lock(&self.state.otherwise) = (status.to_owned(), body.to_owned());
    }

    pub fn authorization(&self) -> String {
        lock(&self.state.authorization).clone()
    }

    pub fn requests(&self) -> usize {
        self.state.requests.load(Ordering::Relaxed)
    }

    /// Connections so far.
    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::Relaxed)
    }

    /// Closes all connections and refuses new ones.
    pub fn stop(&mut self) {
        self.state.ends.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
        if let Some(accepting) = self.accepting.take() {
            accepting.join().expect("the thread does not panic");
        }
        lock(&self.state.open).drain(..).for_each(|stream| _ = stream.shutdown(std::net::Shutdown::Both));
    }

    pub fn start(&mut self) {
        let listener = TcpListener::bind(self.address).expect("a free port");
        self.address = listener.local_addr().expect("the socket is bound");
        self.state.ends.store(false, Ordering::Relaxed);
        let state = Arc::clone(&self.state);
        self.accepting = Some(thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if state.ends.load(Ordering::Relaxed) {
                    return;
                }
                state.connections.fetch_add(1, Ordering::Relaxed);
                lock(&state.open).push(stream.try_clone().expect("a descriptor"));
                let state = Arc::clone(&state);
                thread::spawn(move || _ = state.serve(stream));
            }
        }));
    }
}

impl Default for HttpStub {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for HttpStub {
    fn drop(&mut self) {
        self.stop();
    }
}

impl State {
    /// Returns when the client has closed the connection.
    fn serve(&self, stream: TcpStream) -> Option<()> {
        stream.set_nodelay(true).ok()?;
        let mut input = BufReader::new(stream);
        loop {
            let body = self.request(&mut input)?;
            self.requests.fetch_add(1, Ordering::Relaxed);
            let answer = lock(&self.answers).get(&body).cloned();
            let (status, body) = match answer {
                Some(answer) => ("200 OK".to_owned(), answer),
                None => lock(&self.otherwise).clone(),
            };
            let length = body.len();
            let response = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{body}");
            input.get_mut().write_all(response.as_bytes()).ok()?;
        }
    }

    fn request(&self, input: &mut BufReader<TcpStream>) -> Option<String> {
        let (mut length, mut authorization) = (0, String::new());
        loop {
            let mut line = String::new();
            if input.read_line(&mut line).ok()? == 0 {
                return None;
            }
            match line.trim().split_once(": ") {
                Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                    length = value.parse().ok()?;
                }
                Some((name, value)) if name.eq_ignore_ascii_case("authorization") => {
                    value.clone_into(&mut authorization);
                }
                _ if line.trim().is_empty() => break,
                _ => {}
            }
        }
        *lock(&self.authorization) = authorization;
        let mut body = vec![0; length];
        input.read_exact(&mut body).ok()?;
        String::from_utf8(body).ok()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
