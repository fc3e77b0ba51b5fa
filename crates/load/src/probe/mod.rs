//! `probe`: what a STUN or TURN server supports, and what is wrong with it, as a client sees it.
//!
//! ```text
//! name ─▶ addresses ─▶ each transport: open, certificate, Bindings ─▶ NAT behaviour
//!                          └─ the best of them: credential ─▶ relayed address ─▶ peers, features
//! ```
//!
//! It sends requests only, never data to a peer; each wait and the whole run are bounded; allocations are deleted again.

mod certificate;
mod connection;
mod credentials;
mod nat;
mod peers;
mod relay;
mod report;
mod session;

use std::{
    net::{IpAddr, SocketAddr},
    sync::mpsc,
    thread,
    time::{Duration, Instant, SystemTime},
};

use connection::{Connection, Trust, words};
pub use report::{
    CertificateFacts, Finding, Level, NatFacts, PeerFacts, Report, RoundTrip, TransportFacts, UnknownLevel,
};
use session::{Answer, Credentials, Session, attribute, method};

use crate::{LoadError, TlsOptions, Transport, uri::ServerUri};

/// What to probe. [`Config::new`] holds the defaults.
#[derive(Clone, Debug)]
pub struct Config {
    /// Which server.
    pub server: ServerUri,
    /// Name and password.
    pub user: Option<(String, String)>,
    /// Whom to believe.
    pub tls: TlsOptions,
    /// When the whole probe is over. Default 30 s.
    pub timeout: Duration,
    /// Bindings of which the round trip is taken, 1 to 1000. Default 5.
    pub count: usize,
}

impl Config {
    /// The defaults.
    #[must_use]
    pub fn new(server: ServerUri) -> Self {
        Self { server, user: None, tls: TlsOptions::default(), timeout: Duration::from_secs(30), count: 5 }
    }
}

/// The longest wait for one answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// Probes a server. Never takes noticeably longer than [`Config::timeout`].
///
/// # Errors
/// When the settings are impossible or the name has no address. What is wrong with the server is in the report.
pub fn run(config: &Config) -> Result<Report, LoadError> {
    if !(1..=1_000).contains(&config.count) {
        return Err(LoadError::Config(format!("--count is {}, but must be 1 to 1000", config.count)));
    }
    if config.timeout.is_zero() {
        return Err(LoadError::Config("--timeout is 0, but must be above it".to_owned()));
    }
    let deadline = Instant::now() + config.timeout;
    let addresses = resolve(&config.server, deadline)?;
    let mut probe = Probe { config, deadline, addresses, report: Report::default() };
    probe.report.server = config.server.to_string();
    probe.transports();
    probe.nat();
    if config.server.is_turn() {
        probe.turn();
    } else {
        probe.report.usable = probe.wanted_works();
    }
    if Instant::now() >= deadline {
        let seconds = config.timeout.as_secs_f64();
        probe.report.advise(
            Level::Warn,
            "probe",
            format!("the time of {seconds} s was over before everything was asked"),
            "give it more with --timeout",
        );
    }
    Ok(probe.report)
}

struct Probe<'a> {
    config: &'a Config,
    deadline: Instant,
    /// Without a port of meaning.
    addresses: Vec<SocketAddr>,
    report: Report,
}

impl Probe<'_> {
    /// Every transport that the name allows.
    fn transports(&mut self) {
        for transport in Transport::ALL {
            if self.config.server.allows(transport) {
                self.transport(transport);
            }
        }
    }

    fn transport(&mut self, transport: Transport) {
        let server = self.address(transport);
        let mut facts = TransportFacts { address: server.to_string(), ..TransportFacts::default() };
        match self.try_transport(transport, server, &mut facts) {
            Ok(software) => {
                facts.reachable = true;
                self.report.software = self.report.software.take().or(software);
                self.report.line(Level::Ok, transport, answers(&facts));
            }
            Err(what) => {
                let (level, remedy) = self.unreachable(transport);
                self.report.advise(level, transport, format!("{server}: {what}"), remedy);
                facts.failure = Some(what);
            }
        }
        if let Some(certificate) = &facts.certificate {
            certificate::judge(&mut self.report, transport, certificate);
        }
        self.report.transports.insert(transport.to_string(), facts);
    }

    /// Opens, asks, and returns SOFTWARE.
    fn try_transport(
        &self,
        transport: Transport,
        server: SocketAddr,
        facts: &mut TransportFacts,
    ) -> Result<Option<String>, String> {
        let trust = self.trust(transport, server)?;
        let (connection, opened) = Connection::open(transport, server, trust.as_ref(), self.soon())?;
        if connection_is_more(transport) {
            facts.open_ms = Some(opened.took.as_secs_f64() * 1_000.0);
        }
        facts.version = opened.version;
        facts.alpn = opened.alpn;
        if transport.is_secure() {
            facts.certificate = certificate::read(&opened.chain, opened.distrust, SystemTime::now());
        }
        let mut session = Session::new(connection, None, PATIENCE, self.deadline);
        let mut times = Vec::new();
        let mut last: Option<Answer> = None;
        for _ in 0..self.config.count {
            match session.ask(method::BINDING, &[]) {
                Ok(answer) => {
                    if answer.sent == 1 {
                        times.push(u64::try_from(answer.took.as_micros()).unwrap_or(u64::MAX));
                    }
                    last = Some(answer);
                }
                // What answered once may lose a packet.
                Err(error) if last.is_none() => return Err(words(&error)),
                Err(_) => break,
            }
        }
        let Some(answer) = last else { return Err("no answer in time".to_owned()) };
        if let Some((code, reason)) = &answer.error {
            return Err(format!("answers a Binding request with {code} {reason}"));
        }
        times.sort_unstable();
        facts.rtt_us = times.first().map(|min| RoundTrip {
            min: *min,
            median: times[times.len() / 2],
            asked: self.config.count,
            answered: times.len(),
        });
        let mapped = answer
            .address(attribute::XOR_MAPPED_ADDRESS)
            .or_else(|| answer.address(attribute::MAPPED_ADDRESS));
        facts.mapped = mapped.map(|address| address.to_string());
        Ok(answer.text(attribute::SOFTWARE))
    }

    /// How bad it is that a transport does not work, and what to do.
    fn unreachable(&self, transport: Transport) -> (Level, &'static str) {
        let asked_for = transport == self.config.server.transport();
        match transport {
            _ if asked_for && transport.is_secure() => (
                Level::Bad,
                "the server was named so: check its TLS listener, its port (5349, or 443), and any firewall between",
            ),
            _ if asked_for => (
                Level::Bad,
                "the server was named so: check its address, its listeners, and any firewall between",
            ),
            Transport::Udp | Transport::Tcp => (
                Level::Warn,
                "clients behind firewalls that block UDP need TCP: listen there, and open the port",
            ),
            Transport::Tls => (
                Level::Note,
                "clients behind strict firewalls only get out by TLS on 443: listen there too, with a certificate",
            ),
            Transport::Dtls => (Level::Note, "few clients use DTLS; browsers never do"),
        }
    }

    fn nat(&mut self) {
        let reachable = self.report.transports.get("udp").is_some_and(|facts| facts.reachable);
        if !reachable {
            return;
        }
        let server = self.address(Transport::Udp);
        match nat::discover(server, self.deadline) {
            Ok(Some(facts)) => {
                let what = format!(
                    "mapping {}, filtering {} (RFC 5780, by {})",
                    facts.mapping, facts.filtering, facts.other_address
                );
                self.report.features.insert("nat_discovery".to_owned(), true);
                if facts.mapping.ends_with("dependent") && facts.mapping != "endpoint-independent" {
                    self.report.advise(
                        Level::Warn,
                        "nat",
                        what,
                        "this NAT gives each peer another port: calls from here will need the relay",
                    );
                } else {
                    self.report.line(Level::Ok, "nat", what);
                }
                self.report.nat = Some(facts);
            }
            Ok(None) => {
                self.report.features.insert("nat_discovery".to_owned(), false);
                self.report.line(
                    Level::Note,
                    "nat",
                    "behaviour discovery is not supported (RFC 5780: no OTHER-ADDRESS), so the NAT on this side is not known",
                );
            }
            Err(error) => self.report.line(Level::Note, "nat", format!("not found out: {}", words(&error))),
        }
    }

    /// Everything for which an allocation is needed.
    fn turn(&mut self) {
        let Some(transport) = self.reached() else { return };
        let server = self.address(transport);
        let Some(mut session) = self.session(transport) else { return };
        let credentials = self.credentials();
        let granted =
            credentials::allocate(&mut self.report, &mut session, credentials.as_ref(), SystemTime::now());
        if let Some(challenge) = &session.challenge {
            let offers = [("sha256", challenge.is_sha256()), ("userhash", challenge.anonymous)];
            self.report.features.extend(offers.map(|(name, offered)| (name.to_owned(), offered)));
        }
        // Without a credential the question is only whether the server asks for one.
        let asks = credentials.is_none() && self.report.realm.is_some() && self.report.worst() < Level::Bad;
        self.report.usable = self.wanted_works() && (granted.is_some() || asks);
        let Some(granted) = granted else { return };
        relay::judge_mapped(&mut self.report, session.local_addr(), &granted);
        let relayed = granted.addresses(attribute::XOR_RELAYED_ADDRESS);
        if relayed.is_empty() {
            self.report.advise(
                Level::Bad,
                "relay",
                "grants an allocation without an address (XOR-RELAYED-ADDRESS)",
                "no client can use that: see the server's log",
            );
        }
        for address in &relayed {
            relay::judge_address(&mut self.report, server.ip(), *address);
        }
        peers::check(&mut self.report, &mut session, relayed.first().is_some_and(SocketAddr::is_ipv6));
        session.delete();
        drop(session);
        self.features(transport);
    }

    fn features(&mut self, transport: Transport) {
        let (mut yes, mut no, mut unknown) = (Vec::new(), Vec::new(), Vec::new());
        for (name, title) in [("sha256", "SHA-256 passwords"), ("userhash", "USERHASH")] {
            match self.report.features.get(name) {
                Some(true) => yes.push(title.to_owned()),
                Some(false) => no.push(title.to_owned()),
                None => {}
            }
        }
        for feature in relay::Feature::ALL {
            let over = match feature {
                relay::Feature::TcpRelaying => match self.stream() {
                    Some(stream) => stream,
                    None => continue,
                },
                _ => transport,
            };
            let Some(mut session) = self.session(over) else { continue };
            match relay::ask(&mut session, feature) {
                relay::Found::Yes(addresses) => {
                    yes.push(feature.title().to_owned());
                    self.report.features.insert(feature.name().to_owned(), true);
                    if feature == relay::Feature::Ipv6 {
                        let server = self.address(over).ip();
                        for address in addresses {
                            relay::judge_address(&mut self.report, server, address);
                        }
                        peers::check(&mut self.report, &mut session, true);
                    }
                    session.delete();
                }
                relay::Found::No(why) => {
                    no.push(format!("{} ({why})", feature.title()));
                    self.report.features.insert(feature.name().to_owned(), false);
                    // Granted all the same, where the wish was only ignored.
                    if why == "ignored" {
                        session.delete();
                    }
                }
                relay::Found::Unknown(why) => unknown.push(format!("{} ({why})", feature.title())),
            }
        }
        for (level, label, list) in [
            (Level::Ok, "has", yes),
            (Level::Note, "has no", no),
            (Level::Note, "cannot be asked for", unknown),
        ] {
            if !list.is_empty() {
                self.report.line(level, "features", format!("{label} {}", list.join(", ")));
            }
        }
    }

    /// A session over a transport that was found to work; `None` when it no longer does.
    fn session(&self, transport: Transport) -> Option<Session> {
        let server = self.address(transport);
        let trust = self.trust(transport, server).ok()?;
        let (connection, _) = Connection::open(transport, server, trust.as_ref(), self.soon()).ok()?;
        Some(Session::new(connection, self.credentials(), PATIENCE, self.deadline))
    }

    /// The transport that the name asks for if it works, else the first that does.
    fn reached(&self) -> Option<Transport> {
        let wanted = self.config.server.transport();
        std::iter::once(wanted).chain(Transport::ALL).find(|transport| self.is_reachable(*transport))
    }

    /// Whether clients that are given the server's name get through: browsers try nothing else, and refuse a certificate that
    /// does not verify.
    fn wanted_works(&self) -> bool {
        let wanted = self.config.server.transport();
        let facts = self.report.transports.get(&wanted.to_string());
        facts.is_some_and(|facts| {
            facts.reachable && facts.certificate.as_ref().is_none_or(|shown| shown.verifies)
        })
    }

    fn stream(&self) -> Option<Transport> {
        [Transport::Tcp, Transport::Tls].into_iter().find(|transport| self.is_reachable(*transport))
    }

    fn is_reachable(&self, transport: Transport) -> bool {
        self.report.transports.get(&transport.to_string()).is_some_and(|facts| facts.reachable)
    }

    fn credentials(&self) -> Option<Credentials> {
        let (user, password) = self.config.user.clone()?;
        Some(Credentials { user, password })
    }

    fn trust(&self, transport: Transport, server: SocketAddr) -> Result<Option<Trust>, String> {
        if !transport.is_secure() {
            return Ok(None);
        }
        let trust = Trust::new(&self.config.tls, self.config.server.name(), server);
        trust.map(Some).map_err(|error| error.to_string())
    }

    /// The first address of the name, with the port for this transport: 5349 for TLS and DTLS where the name is that of a
    /// plain server, whatever its port.
    fn address(&self, transport: Transport) -> SocketAddr {
        let uri = &self.config.server;
        let plain = transport.is_secure() && !uri.is_secure();
        let port = if plain { transport.default_port() } else { uri.port_for(transport) };
        let ip = self.addresses.first().map_or(IpAddr::from([0; 4]), SocketAddr::ip);
        (ip, port).into()
    }

    fn soon(&self) -> Instant {
        self.deadline.min(Instant::now() + PATIENCE)
    }
}

/// Whether opening takes packets.
fn connection_is_more(transport: Transport) -> bool {
    transport != Transport::Udp
}

fn answers(facts: &TransportFacts) -> String {
    let mut what = format!("{} answers", facts.address);
    if let Some(rtt) = facts.rtt_us {
        let ms = |us: u64| Duration::from_micros(us).as_secs_f64() * 1_000.0;
        what += &format!(
            " in {:.2} ms (median of {}, fastest {:.2} ms)",
            ms(rtt.median),
            rtt.answered,
            ms(rtt.min)
        );
    }
    if let Some(open) = facts.open_ms {
        what += &format!(", opened in {open:.1} ms");
    }
    for more in [&facts.version, &facts.alpn].into_iter().flatten() {
        what += &format!(", {more}");
    }
    what
}

/// Asks for the name's addresses in a thread of its own: the resolver knows no deadline.
fn resolve(uri: &ServerUri, deadline: Instant) -> Result<Vec<SocketAddr>, LoadError> {
    let (sender, receiver) = mpsc::channel();
    let asked = uri.clone();
    let lookup = thread::Builder::new().name("resolve".to_owned()).spawn(move || {
        // Nobody listens once the time is over.
        let _ = sender.send(asked.resolve(asked.transport()));
    });
    lookup.map_err(LoadError::system("cannot start a thread"))?;
    let host = uri.host.clone();
    match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        Ok(found) => found.map_err(|source| LoadError::Name { host, source }),
        Err(_) => Err(LoadError::Name { host, source: std::io::ErrorKind::TimedOut.into() }),
    }
}
