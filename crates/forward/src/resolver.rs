//! Host names: looked up by threads of their own, since getaddrinfo(3) blocks, and looked up again when an answer is old.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, ToSocketAddrs as _},
    sync::{Arc, Mutex, PoisonError, RwLock, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Lookups under way at a time: a name server that does not answer holds up no more than these.
const IN_FLIGHT: usize = 8;
/// A name that could not be resolved is tried again after this, or when its answer would be old, whichever is sooner.
const RETRY: Duration = Duration::from_secs(5);

/// A name that some rule uses.
pub(crate) struct Name {
    host: String,
    /// `None` until the first lookup has ended; the last good answer after that, empty if there was none.
    pub(crate) answer: RwLock<Option<Vec<IpAddr>>>,
}

type Lookup = dyn Fn(&str) -> io::Result<Vec<IpAddr>> + Send + Sync;

struct Entry {
    name: Arc<Name>,
    due: Instant,
    in_flight: bool,
}

type Names = Arc<Mutex<HashMap<String, Entry>>>;

enum Message {
    Added,
    Answered(String, bool),
    Stop,
}

/// Keeps names resolved. Dropping it stops its thread; lookups under way end by themselves.
pub(crate) struct Resolver {
    names: Names,
    /// A sender is not `Sync` for all that is shared with the control thread.
    inbox: Mutex<mpsc::Sender<Message>>,
    thread: Option<JoinHandle<()>>,
}

impl Resolver {
    /// `lookup` answers for a name, `changed` is called from another thread after a name got its answer.
    pub(crate) fn start(
        every: Duration,
        lookup: impl Fn(&str) -> io::Result<Vec<IpAddr>> + Send + Sync + 'static,
        changed: impl Fn() + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let names: Names = Names::default();
        let (inbox, messages) = mpsc::channel();
        let keeper = Keeper {
            names: Arc::clone(&names),
            // An answer that is always old would keep a thread busy for ever.
            every: every.max(Duration::from_millis(10)),
            lookup: Arc::new(lookup),
            messages,
            answers: inbox.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("forward-names".to_owned())
            .spawn(move || keeper.run(&changed))?;
        Ok(Self { names, inbox: Mutex::new(inbox), thread: Some(thread) })
    }

    /// A name, looked up from now on and as long as somebody holds it.
    pub(crate) fn name(&self, host: &str) -> Arc<Name> {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = names.entry(host.to_owned()).or_insert_with(|| Entry {
            name: Arc::new(Name { host: host.to_owned(), answer: RwLock::new(None) }),
            due: Instant::now(),
            in_flight: false,
        });
        let name = Arc::clone(&entry.name);
        drop(names);
        self.send(Message::Added);
        name
    }

    fn send(&self, message: Message) {
        let _ = self.inbox.lock().unwrap_or_else(PoisonError::into_inner).send(message);
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        self.send(Message::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The addresses of a name, by getaddrinfo(3), in its order (RFC 6724), each once.
pub(crate) fn system_lookup(host: &str) -> io::Result<Vec<IpAddr>> {
    let mut addresses: Vec<IpAddr> = Vec::new();
    for address in (host, 0).to_socket_addrs()? {
        if !addresses.contains(&address.ip()) {
            addresses.push(address.ip());
        }
    }
    Ok(addresses)
}

struct Keeper {
    names: Names,
    every: Duration,
    lookup: Arc<Lookup>,
    messages: mpsc::Receiver<Message>,
    answers: mpsc::Sender<Message>,
}

impl Keeper {
    fn run(self, changed: &(impl Fn() + Send + Sync)) {
        let mut in_flight = 0;
        loop {
            let wait = self.start_due(&mut in_flight);
            match self.messages.recv_timeout(wait) {
                Ok(Message::Answered(host, good)) => {
                    in_flight -= 1;
                    let after = if good { self.every } else { self.every.min(RETRY) };
                    let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(entry) = names.get_mut(&host) {
                        entry.in_flight = false;
                        entry.due = Instant::now() + after;
                    }
                    drop(names);
                    changed();
                }
                Ok(Message::Added) | Err(mpsc::RecvTimeoutError::Timeout) => {}
                Ok(Message::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Starts the lookups that are due and says how long until the next one is.
    fn start_due(&self, in_flight: &mut usize) -> Duration {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        // Only the table holds it: no rule does any more.
        names.retain(|_, entry| entry.in_flight || Arc::strong_count(&entry.name) > 1);
        let now = Instant::now();
        let mut next = Duration::from_secs(3600);
        for entry in names.values_mut().filter(|entry| !entry.in_flight) {
            let left = entry.due.saturating_duration_since(now);
            if !left.is_zero() {
                next = next.min(left);
                continue;
            }
            if *in_flight >= IN_FLIGHT {
                // An answer makes room, and brings us back here.
                continue;
            }
            if self.start_one(&entry.name) {
                entry.in_flight = true;
                *in_flight += 1;
            } else {
                entry.due = now + RETRY;
                next = next.min(RETRY);
            }
        }
        next
    }

    fn start_one(&self, name: &Arc<Name>) -> bool {
        let (name, lookup, answers) = (Arc::clone(name), Arc::clone(&self.lookup), self.answers.clone());
        let work = move || {
            let found = lookup(&name.host);
            let good = matches!(&found, Ok(addresses) if !addresses.is_empty());
            let mut answer = name.answer.write().unwrap_or_else(PoisonError::into_inner);
            match found {
                Ok(addresses) if good => {
                    if answer.as_ref() != Some(&addresses) {
                        let shown: Vec<String> = addresses.iter().map(ToString::to_string).collect();
                        tracing::info!(name = name.host, addresses = shown.join(", "), "resolved");
                        *answer = Some(addresses);
                    }
                }
                // A name server that is down is no reason to forget where the target was.
                Ok(_) => {
                    answer.get_or_insert_default();
                }
                Err(error) => {
                    tracing::warn!(name = name.host, %error, "cannot resolve; the last answer stays");
                    answer.get_or_insert_default();
                }
            }
            drop(answer);
            let _ = answers.send(Message::Answered(name.host.clone(), good));
        };
        std::thread::Builder::new().name("forward-lookup".to_owned()).spawn(work).is_ok()
    }
}
