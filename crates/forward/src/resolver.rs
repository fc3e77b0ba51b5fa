//! Resolves host names on separate threads, since getaddrinfo(3) blocks, and refreshes the results
//! periodically.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{Arc, Mutex, PoisonError, atomic::AtomicBool, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crate::{
    ZonedIp,
    sync::{
        RwLock, RwLockReadGuard,
        atomic::{AtomicU32, Ordering},
    },
};

/// Maximum number of concurrent lookups, so that a name server that does not respond blocks only
/// this many threads.
const IN_FLIGHT: usize = 8;
/// Retry interval after a failed lookup, unless the normal interval is shorter.
const RETRY: Duration = Duration::from_secs(5);
/// Minimum interval between lookups.
const SHORTEST: Duration = Duration::from_millis(10);

/// Maximum number of addresses used per name, because the name's owner must not control the number of sockets
/// and metric series.
pub(crate) const MOST_ADDRESSES: usize = 16;

pub(crate) struct ResolvedName {
    host: String,
    any_route: bool,
    answer: RwLock<Answer>,
    version: AtomicU32,
}

#[derive(Default)]
struct Answer {
    /// Addresses from the last successful lookup; empty if none has succeeded.
    addresses: Vec<ZonedIp>,
    /// Error of the last lookup, if it failed.
    error: Option<String>,
}

impl ResolvedName {
    pub(crate) fn new(host: &str, any_route: bool) -> Self {
        let (answer, version) = (RwLock::default(), AtomicU32::new(0));
        Self { host: host.to_owned(), any_route, answer, version }
    }

    /// Changes whenever the addresses change; 0 until the first lookup has ended.
    pub(crate) fn version(&self) -> u32 {
        self.version.load(Ordering::Acquire)
    }

    /// Returns at most [`MOST_ADDRESSES`] addresses.
    pub(crate) fn addresses(&self) -> Vec<ZonedIp> {
        self.read().addresses.clone()
    }

    pub(crate) fn error(&self) -> Option<String> {
        self.read().error.clone()
    }

    /// Waits until the first lookup has ended, the deadline has passed, or the program stops.
    pub(crate) fn wait(&self, deadline: Instant, stopping: &AtomicBool) {
        while self.version() == 0 && Instant::now() < deadline && !stopping.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Records the result of a lookup. Logs when addresses change, when lookups start to fail and when they
    /// succeed again.
    pub(crate) fn set(&self, found: io::Result<Vec<ZonedIp>>) {
        let mut answer = self.answer.write().unwrap_or_else(PoisonError::into_inner);
        let failed_before = answer.error.is_some();
        let is_new = match found {
            Err(error) => {
                if !failed_before {
                    tracing::warn!(name = self.host, %error, "cannot resolve; keeping the last known addresses, retrying");
                }
                answer.error = Some(error.to_string());
                false
            }
            Ok(found) => {
                answer.error = None;
                self.take(&mut answer.addresses, found, failed_before)
            }
        };
        if is_new || self.version() == 0 {
            // Wraps to 0 only after 4,000 years if there is one response every 30 seconds.
            self.version.fetch_add(1, Ordering::Release);
        }
    }

    /// Replaces the addresses with those found; returns true if they differ.
    fn take(&self, addresses: &mut Vec<ZonedIp>, found: Vec<ZonedIp>, failed_before: bool) -> bool {
        let all = found.len();
        let found = if self.any_route { found } else { reachable(found) };
        let next = settled(addresses, &found);
        let is_new = next != *addresses;
        if is_new || failed_before {
            let left_out = all - next.len();
            let shown: Vec<String> = next.iter().map(ToString::to_string).collect();
            tracing::info!(name = self.host, addresses = shown.join(", "), left_out, "resolved");
        }
        *addresses = next;
        is_new
    }

    fn read(&self) -> RwLockReadGuard<'_, Answer> {
        self.answer.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Merges a new response. Known addresses keep their positions: name servers shuffle addresses, but
/// that must not change the order of preference.
fn settled(before: &[ZonedIp], found: &[ZonedIp]) -> Vec<ZonedIp> {
    let stay = before.iter().filter(|ip| found.contains(ip));
    let come = found.iter().filter(|ip| !before.contains(ip));
    stay.chain(come).take(MOST_ADDRESSES).copied().collect()
}

/// Removes addresses that no host can have. DNS blocklists respond with the unspecified address,
/// which connect(2) treats as this machine.
fn of_hosts(mut found: Vec<ZonedIp>) -> io::Result<Vec<ZonedIp>> {
    found.retain(|address| match address.ip().to_canonical() {
        IpAddr::V4(ip) => !ip.is_unspecified() && !ip.is_multicast() && !ip.is_broadcast(),
        IpAddr::V6(ip) => !ip.is_unspecified() && !ip.is_multicast(),
    });
    if found.is_empty() {
        Err(io::Error::other("the answer contains no usable host address"))
    } else {
        Ok(found)
    }
}

/// Keeps the addresses with a route, or all if none has one. On a machine without IPv6, many names have
/// addresses that cannot be reached.
fn reachable(found: Vec<ZonedIp>) -> Vec<ZonedIp> {
    let routed: Vec<ZonedIp> = found.iter().copied().filter(|ip| has_route(*ip)).collect();
    if routed.is_empty() { found } else { routed }
}

/// Asks the kernel with connect(2) on a UDP socket, which sends nothing.
fn has_route(address: ZonedIp) -> bool {
    use io::ErrorKind::{AddrNotAvailable, HostUnreachable, NetworkUnreachable, Unsupported};
    let any = match address.ip() {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let port = 9;
    let tried = UdpSocket::bind(SocketAddr::new(any, 0)).and_then(|socket| socket.connect(address.at(port)));
    // Other errors, such as running out of file descriptors, prove nothing.
    !tried.is_err_and(|error| {
        matches!(error.kind(), AddrNotAvailable | HostUnreachable | NetworkUnreachable | Unsupported)
            // EAFNOSUPPORT, which has no `ErrorKind`: IPv6 is disabled in the kernel.
            || error.raw_os_error() == Some(97)
    })
}

type Lookup = dyn Fn(&str) -> io::Result<Vec<ZonedIp>> + Send + Sync;

struct ResolverEntry {
    name: Arc<ResolvedName>,
    due: Instant,
    in_flight: bool,
}

/// Host name, and true if addresses without a route are included.
type Key = (String, bool);
type Names = Arc<Mutex<HashMap<Key, ResolverEntry>>>;

enum Message {
    Added,
    /// Look up all names now, and then at this interval.
    Refresh(Duration),
    Answered(Key, bool),
    Stop,
}

/// Keeps names resolved. Dropping it stops its thread; lookups in progress end by themselves.
pub(crate) struct Resolver {
    names: Names,
    inbox: mpsc::Sender<Message>,
    thread: Option<JoinHandle<()>>,
}

impl Resolver {
    /// `lookup` resolves a name; `changed` is called from another thread after each lookup.
    pub(crate) fn start(
        every: Duration,
        lookup: impl Fn(&str) -> io::Result<Vec<ZonedIp>> + Send + Sync + 'static,
        changed: impl Fn() + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let names: Names = Names::default();
        let (inbox, messages) = mpsc::channel();
        let keeper = Keeper {
            names: Arc::clone(&names),
            every: every.max(SHORTEST),
            lookup: Arc::new(lookup),
            messages,
            answers: inbox.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("forward-names".to_owned())
            .spawn(move || keeper.run(&changed))?;
        Ok(Self { names, inbox, thread: Some(thread) })
    }

    /// Keeps a name resolved for as long as the returned value is held. Addresses without a route
    /// are left out unless `any_route`.
    pub(crate) fn name(&self, host: &str, any_route: bool) -> Arc<ResolvedName> {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = names.entry((host.to_owned(), any_route)).or_insert_with(|| ResolverEntry {
            name: Arc::new(ResolvedName::new(host, any_route)),
            due: Instant::now(),
            in_flight: false,
        });
        let name = Arc::clone(&entry.name);
        drop(names);
        // Fails only after the thread has ended.
        let _ = self.inbox.send(Message::Added);
        name
    }
}

impl Resolver {
    pub(crate) fn refresh(&self, every: Duration) {
        let _ = self.inbox.send(Message::Refresh(every.max(SHORTEST)));
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        let _ = self.inbox.send(Message::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Keeper {
    names: Names,
    every: Duration,
    lookup: Arc<Lookup>,
    messages: mpsc::Receiver<Message>,
    answers: mpsc::Sender<Message>,
}

impl Keeper {
    fn run(mut self, changed: &(impl Fn() + Send + Sync)) {
        let mut in_flight = 0;
        loop {
            let wait = self.start_due(&mut in_flight);
            match self.messages.recv_timeout(wait) {
                Ok(Message::Answered(key, good)) => {
                    in_flight -= 1;
                    let after = if good { self.every } else { self.every.min(RETRY) };
                    let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(entry) = names.get_mut(&key) {
                        entry.in_flight = false;
                        entry.due = Instant::now() + after;
                    }
                    drop(names);
                    changed();
                }
                Ok(Message::Refresh(every)) => {
                    self.every = every;
                    let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
                    names.values_mut().for_each(|entry| entry.due = Instant::now());
                }
                Ok(Message::Added) | Err(mpsc::RecvTimeoutError::Timeout) => {}
                Ok(Message::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Starts lookups that are due; returns the time until the next one.
    fn start_due(&self, in_flight: &mut usize) -> Duration {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        // Drops names that only this table still refers to, because no rule uses them.
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
                // The next result frees a slot, and this function runs again.
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

    fn start_one(&self, name: &Arc<ResolvedName>) -> bool {
        let (name, lookup, answers) = (Arc::clone(name), Arc::clone(&self.lookup), self.answers.clone());
        let work = move || {
            let found = lookup(&name.host).and_then(of_hosts);
            let good = found.is_ok();
            name.set(found);
            let _ = answers.send(Message::Answered((name.host.clone(), name.any_route), good));
        };
        std::thread::Builder::new().name("forward-lookup".to_owned()).spawn(work).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(all: &[&str]) -> Vec<ZonedIp> {
        all.iter().map(|ip| ip.parse().unwrap()).collect()
    }

    #[test]
    fn known_addresses_keep_their_place_in_a_shuffled_answer() {
        let before = addresses(&["10.0.0.1", "10.0.0.2", "2001:db8::1"]);
        let found = addresses(&["2001:db8::1", "10.0.0.9", "10.0.0.1"]);
        assert_eq!(settled(&before, &found), addresses(&["10.0.0.1", "2001:db8::1", "10.0.0.9"]));
        assert!(settled(&before, &[]).is_empty());
    }

    #[test]
    fn addresses_that_no_host_can_have_are_ignored() {
        let nobodies = ["0.0.0.0", "::", "::ffff:0.0.0.0", "224.0.0.1", "255.255.255.255", "ff02::1"];
        assert!(of_hosts(addresses(&nobodies)).is_err());
        let answer = of_hosts(addresses(&[nobodies[0], "10.0.0.2", nobodies[1], "::1"]));
        assert_eq!(answer.unwrap(), addresses(&["10.0.0.2", "::1"]));
    }

    #[test]
    fn address_limit_prefers_addresses_in_use() {
        let all: Vec<ZonedIp> = (0..100).map(|last| [10, 0, 0, last].into()).collect();
        assert_eq!(settled(&[], &all), all[..MOST_ADDRESSES]);
        let last = &all[99..];
        assert_eq!(settled(last, &all)[0], last[0]);
        assert_eq!(settled(last, &all).len(), MOST_ADDRESSES);
    }

    #[test]
    fn unroutable_address_is_left_out_if_another_is_routable() {
        // Discard prefix (RFC 6890), to which the kernel normally has no route.
        let nowhere: ZonedIp = "100::1".parse().unwrap();
        if has_route(nowhere) {
            // A default IPv6 route covers even this prefix. In that case, only test that the
            // address is kept.
            return assert_eq!(reachable(vec![nowhere]), [nowhere]);
        }
        let here: ZonedIp = "127.0.0.1".parse().unwrap();
        assert_eq!(reachable(vec![nowhere, here]), [here]);
        assert_eq!(reachable(vec![nowhere]), [nowhere]);
    }
}
