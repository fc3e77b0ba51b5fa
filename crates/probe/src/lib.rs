//! Probe of a STUN or TURN server from a client's point of view: finds supported features and problems.
//!
//! ```text
//! name ─▶ addresses ─▶ each transport: open, certificate, Bindings ─▶ NAT behaviour
//!                          └─ the best of them: credential ─▶ relayed address ─▶ peers, features
//! ```
//!
//! The probe sends only requests, and no data to peers. Every wait has a timeout, and so does the whole run. Allocations are deleted
//! afterwards.
#![forbid(unsafe_code)]

pub mod attack;
mod certificate;
pub mod connection;
mod credentials;
mod nat;
mod peers;
mod reach;
mod relay;
mod report;
mod session;

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::mpsc,
    thread,
    time::{Duration, Instant, SystemTime},
};

use connection::{ProbeConnection, Trust, describe_error};
use credentials::CredentialOutcome;
use report::TransportFacts;
pub use report::{Finding, FindingLevel, ProbeReport};
use session::ProbeSession;
use turnpike_client::{
    ClientTransport, InvalidSetting, Login, NameServers, ServerUri, TlsOptions,
    discovery::{self, Targets},
};
use turnpike_wire::stun::{kind, method};

#[derive(Clone, Debug)]
pub struct ProbeConfig {
    pub server: ServerUri,
    pub user: Option<Login>,
    /// TLS and DTLS settings. [`TlsOptions::insecure`] affects the verdict "usable", but not the findings about a certificate.
    pub tls: TlsOptions,
    /// Time limit of the whole probe. Default 30 s.
    pub timeout: Duration,
    /// Number of Binding requests per transport to measure the round-trip time, 1 to 1000. Default 5.
    pub count: usize,
    /// If set, an attack replaces the ordinary probe. Contains the peer ports to attack; if empty, the
    /// server's own port is attacked.
    pub attack: Option<Vec<u16>>,
    /// Second user, who tries to take over the first user's allocations. Default `None`.
    pub attack_user: Option<Login>,
}

impl ProbeConfig {
    pub fn new(server: ServerUri) -> Self {
        let timeout = Duration::from_secs(30);
        let tls = TlsOptions::default();
        Self { server, user: None, tls, timeout, count: 5, attack: None, attack_user: None }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error(transparent)]
    Setting(#[from] InvalidSetting),
    #[error("cannot find the server {host}: {source}")]
    Name { host: String, source: io::Error },
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

fn invalid(what: String) -> ProbeError {
    InvalidSetting(what).into()
}

const PATIENCE: Duration = Duration::from_secs(3);
/// Time for which DNS records are awaited.
const RECORDS: Duration = Duration::from_secs(5);

/// Probes a server within about [`ProbeConfig::timeout`]. Errors concern the settings, not the server.
pub fn run(config: &ProbeConfig) -> Result<ProbeReport, ProbeError> {
    if !(1..=1_000).contains(&config.count) {
        return Err(invalid(format!("--count is {}, but must be 1 to 1000", config.count)));
    }
    if config.timeout.is_zero() {
        return Err(invalid("--timeout is 0, but must be above 0".to_owned()));
    }
    let Some(deadline) = Instant::now().checked_add(config.timeout) else {
        return Err(invalid("--timeout is too long".to_owned()));
    };
    run_at(config, resolve(&config.server, deadline)?, deadline)
}

fn run_at(
    config: &ProbeConfig,
    Located { addresses, targets, by_record }: Located,
    deadline: Instant,
) -> Result<ProbeReport, ProbeError> {
    let addresses = one_of_each_family(&addresses);
    let trust = trust(config, &addresses)?;
    let (servers, report) = (HashMap::new(), ProbeReport::default());
    let mut probe = ProbeRun { config, deadline, addresses, by_record, trust, servers, report };
    probe.report.server = config.server.to_string();
    probe.records(targets);
    probe.transports();
    if let Some(ports) = &config.attack {
        probe.attack(ports);
        probe.report.usable = probe.requested_transport_works();
        return Ok(probe.ended());
    }
    probe.nat();
    if config.server.is_turn() {
        probe.turn();
    } else {
        probe.report.usable = probe.requested_transport_works();
    }
    Ok(probe.ended())
}

struct ProbeRun<'a> {
    config: &'a ProbeConfig,
    deadline: Instant,
    addresses: Vec<IpAddr>,
    /// Servers of a transport by DNS records, instead of the default ports of `addresses`.
    by_record: HashMap<ClientTransport, Vec<SocketAddr>>,
    /// Trust settings for TLS and DTLS, or the reason why these are unavailable.
    trust: Result<Trust, String>,
    servers: HashMap<ClientTransport, SocketAddr>,
    report: ProbeReport,
}

impl ProbeRun<'_> {
    fn ended(mut self) -> ProbeReport {
        if Instant::now() >= self.deadline {
            let seconds = self.config.timeout.as_secs_f64();
            self.report.warn(
                "probe",
                format!("the time limit of {seconds} s ended the probe early"),
                "raise it with --timeout",
            );
        }
        self.report
    }

    /// Reports servers found through NAPTR and SRV records (RFC 5928).
    fn records(&mut self, targets: Targets) {
        for (transport, targets) in targets {
            let shown = |(host, port): &discovery::Target| format!("{host}:{port}");
            let shown: Vec<String> = targets.iter().map(shown).collect();
            if shown.is_empty() {
                let what = format!("its SRV record states that there is no server for {transport}");
                self.report.note("dns", what);
            } else {
                self.report.ok("dns", format!("{transport}: {} by DNS records", shown.join(", ")));
            }
            self.report.records.insert(transport.to_string(), shown);
        }
    }

    fn nat(&mut self) {
        let Some(server) = self.servers.get(&ClientTransport::Udp).copied() else { return };
        match nat::discover(server, self.deadline) {
            Ok(Some(facts)) => {
                let what = format!(
                    "mapping {}, filtering {} (RFC 5780, with {})",
                    facts.mapping, facts.filtering, facts.other_address
                );
                self.report.features.insert("nat_discovery".to_owned(), true);
                if facts.mapping.ends_with("dependent") && facts.mapping != "endpoint-independent" {
                    self.report.warn(
                        "nat",
                        what,
                        "this NAT uses a different external port for each peer, so calls from here will need the relay",
                    );
                } else {
                    self.report.ok("nat", what);
                }
                self.report.nat = Some(facts);
            }
            Ok(None) => {
                self.report.features.insert("nat_discovery".to_owned(), false);
                self.report.note("nat",
                    "behaviour discovery is not supported (RFC 5780: no OTHER-ADDRESS), so the type of the local NAT is unknown",
                );
            }
            Err(error) => {
                self.report.note("nat", format!("behaviour discovery failed: {}", describe_error(error)));
            }
        }
    }

    fn turn(&mut self) {
        let Some((transport, server)) = self.reached() else { return };
        let Some(mut session) = self.session(transport) else { return };
        let credentials = self.config.user.clone();
        let outcome =
            credentials::allocate(&mut self.report, &mut session, credentials.as_ref(), SystemTime::now());
        if let Some(challenge) = &session.challenge {
            let offers = [("sha256", challenge.is_sha256()), ("userhash", challenge.anonymous)];
            self.report.features.extend(offers.map(|(name, offered)| (name.to_owned(), offered)));
        }
        // If no credential was given, the server passes if it requires one.
        let asks = credentials.is_none() && self.report.realm.is_some() && !credentials::is_bad(&self.report);
        self.report.usable = self.requested_transport_works()
            && match outcome {
                CredentialOutcome::Granted(_) | CredentialOutcome::Redirected => true,
                CredentialOutcome::Nothing => asks,
                CredentialOutcome::NoIpv4 => false,
            };
        let granted = match outcome {
            CredentialOutcome::Granted(granted) => granted,
            CredentialOutcome::NoIpv4 => return self.features(transport, server.ip()),
            CredentialOutcome::Redirected | CredentialOutcome::Nothing => return,
        };
        relay::judge_mapped(&mut self.report, session.local_addr(), &granted);
        let relayed = granted.addresses(kind::XOR_RELAYED_ADDRESS);
        if relayed.is_empty() {
            self.report.bad(
                "relay",
                "grants an allocation without a relayed address (XOR-RELAYED-ADDRESS)",
                "no client can use it: see the server's log",
            );
        }
        for address in &relayed {
            relay::judge_address(&mut self.report, server.ip(), *address);
        }
        let renew = || {
            let mut fresh = self.session(transport)?;
            let granted = fresh.request(method::ALLOCATE, &credentials::wanted).ok()?;
            granted.is_success().then_some(fresh)
        };
        let is_v6 = relayed.first().is_some_and(SocketAddr::is_ipv6);
        let asked = peers::ask(&mut session, is_v6, &renew);
        peers::judge(&mut self.report, asked);
        session.delete();
        drop(session);
        self.features(transport, server.ip());
    }

    fn features(&mut self, transport: ClientTransport, server: IpAddr) {
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
            let found = relay::ask(&mut session, feature);
            let is_granted = matches!(found, relay::RelayFound::Less(_));
            match found {
                relay::RelayFound::Yes(addresses) => {
                    yes.push(feature.title().to_owned());
                    self.report.features.insert(feature.name().to_owned(), true);
                    if feature == relay::Feature::Ipv6 {
                        for address in addresses {
                            relay::judge_address(&mut self.report, server, address);
                        }
                        let renew = || {
                            let mut fresh = self.session(over)?;
                            matches!(relay::ask(&mut fresh, feature), relay::RelayFound::Yes(_))
                                .then_some(fresh)
                        };
                        let asked = peers::ask(&mut session, true, &renew);
                        peers::judge(&mut self.report, asked);
                    }
                    session.delete();
                }
                relay::RelayFound::No(why) | relay::RelayFound::Less(why) => {
                    no.push(format!("{} ({why})", feature.title()));
                    self.report.features.insert(feature.name().to_owned(), false);
                    if is_granted {
                        session.delete();
                    }
                }
                relay::RelayFound::Unknown(why) => unknown.push(format!("{} ({why})", feature.title())),
            }
        }
        for (level, label, list) in [
            (FindingLevel::Ok, "supports", yes),
            (FindingLevel::Note, "does not support", no),
            (FindingLevel::Note, "could not be tested:", unknown),
        ] {
            if !list.is_empty() {
                self.report.line(level, "features", format!("{label} {}", list.join(", ")));
            }
        }
    }

    fn session(&self, transport: ClientTransport) -> Option<ProbeSession> {
        self.session_of(self.config.user.clone(), transport)
    }

    fn session_of(&self, credentials: Option<Login>, transport: ClientTransport) -> Option<ProbeSession> {
        let server = self.servers.get(&transport)?;
        let trust = self.trust(transport).ok()?;
        let (connection, _) = ProbeConnection::open(transport, *server, trust, self.short_deadline()).ok()?;
        Some(ProbeSession::new(connection, credentials, PATIENCE, self.deadline))
    }

    fn reached(&self) -> Option<(ClientTransport, SocketAddr)> {
        let wanted = self.config.server.transport();
        std::iter::once(wanted)
            .chain(ClientTransport::ALL)
            .find_map(|transport| self.servers.get(&transport).map(|server| (transport, *server)))
    }

    /// True if clients can use the requested transport. Browsers refuse a certificate that cannot be verified, whereas `--insecure` is for
    /// clients that skip the check.
    fn requested_transport_works(&self) -> bool {
        let wanted = self.config.server.transport();
        let facts = self.report.transports.get(&wanted.to_string());
        let is_trusted = |facts: &TransportFacts| {
            self.config.tls.insecure || facts.certificate.as_ref().is_some_and(|shown| shown.verifies)
        };
        facts.is_some_and(|facts| facts.reachable && (!wanted.is_secure() || is_trusted(facts)))
    }

    fn stream(&self) -> Option<ClientTransport> {
        [ClientTransport::Tcp, ClientTransport::Tls]
            .into_iter()
            .find(|transport| self.servers.contains_key(transport))
    }

    fn trust(&self, transport: ClientTransport) -> Result<Option<&Trust>, String> {
        if !transport.is_secure() {
            return Ok(None);
        }
        self.trust.as_ref().map(Some).map_err(Clone::clone)
    }

    fn short_deadline(&self) -> Instant {
        self.deadline.min(Instant::now() + PATIENCE)
    }
}

/// Trust settings. A host name that no certificate can contain disables TLS and DTLS; it is an error only if the URI requires one of them.
fn trust(config: &ProbeConfig, addresses: &[IpAddr]) -> Result<Result<Trust, String>, InvalidSetting> {
    let (uri, tls) = (&config.server, &config.tls);
    if !ClientTransport::ALL.into_iter().any(|transport| transport.is_secure() && uri.allows(transport)) {
        return Ok(Err("certificates cannot be verified for this server".to_owned()));
    }
    let ip = addresses.first().copied().unwrap_or(IpAddr::from([0; 4]));
    match Trust::new(tls, uri.name(), (ip, 0).into()) {
        Err(error) if uri.is_secure() || tls.ca.is_some() || tls.server_name.is_some() => Err(error),
        made => Ok(made.map_err(|error| error.to_string())),
    }
}

/// First address of each family in the resolver's order, with reachable families first.
fn one_of_each_family(found: &[SocketAddr]) -> Vec<IpAddr> {
    let mut addresses: Vec<IpAddr> = Vec::new();
    for ip in found.iter().map(SocketAddr::ip) {
        if addresses.iter().all(|known| known.is_ipv4() != ip.is_ipv4()) {
            addresses.push(ip);
        }
    }
    addresses.sort_by_key(|ip| !reach::has_route(*ip));
    addresses
}

struct Located {
    addresses: Vec<SocketAddr>,
    targets: Targets,
    by_record: HashMap<ClientTransport, Vec<SocketAddr>>,
}

/// Finds the servers of all transports. A name with records needs no address of its own.
fn locate(uri: &ServerUri, deadline: Instant) -> io::Result<Located> {
    let all: Vec<_> = ClientTransport::ALL.into_iter().filter(|transport| uri.allows(*transport)).collect();
    let targets = discovery::discover(uri, &all, &NameServers::of_system(deadline));
    let by_record: HashMap<_, _> = targets
        .iter()
        .filter_map(|(transport, targets)| Some((*transport, discovery::addresses(targets).ok()?)))
        .collect();
    let addresses = match discovery::addresses(&[(uri.host.clone(), uri.port_for(uri.transport()))]) {
        Err(_) if !by_record.is_empty() => by_record.values().flatten().copied().collect(),
        own => own?,
    };
    Ok(Located { addresses, targets, by_record })
}

fn resolve(uri: &ServerUri, deadline: Instant) -> Result<Located, ProbeError> {
    let (sender, receiver) = mpsc::channel();
    let asked = uri.clone();
    let lookup = thread::Builder::new().name("resolve".to_owned()).spawn(move || {
        let records = deadline.min(Instant::now() + RECORDS);
        let _ = sender.send(locate(&asked, records));
    });
    lookup.map_err(ProbeError::Thread)?;
    let host = uri.host.clone();
    match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        Ok(found) => found.map_err(|source| ProbeError::Name { host, source }),
        Err(_) => Err(ProbeError::Name { host, source: io::ErrorKind::TimedOut.into() }),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::{Ipv4Addr, Ipv6Addr, TcpListener},
    };

    use super::*;

    const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const V6: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

    /// Server that responds to Binding requests over TCP and closes the connection on anything else; returns
    /// its port.
    fn stun_server() -> u16 {
        let listener = TcpListener::bind((V4, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut request = [0; 20];
                while stream.read_exact(&mut request).is_ok() && request[..4] == [0, 1, 0, 0] {
                    request[0] = 1;
                    stream.write_all(&request).unwrap();
                    request[0] = 0;
                }
            }
        });
        port
    }

    fn probe(addresses: &[IpAddr], port: u16) -> ProbeReport {
        let uri: ServerUri = format!("turn:turn.example.org:{port}?transport=tcp").parse().unwrap();
        let config = ProbeConfig { timeout: Duration::from_secs(20), ..ProbeConfig::new(uri) };
        let addresses = addresses.iter().map(|ip| (*ip, 0).into()).collect();
        let located = Located { addresses, targets: Targets::new(), by_record: HashMap::new() };
        run_at(&config, located, Instant::now() + config.timeout).unwrap()
    }

    #[test]
    fn both_address_families_are_probed() {
        if !reach::has_route(V6) {
            println!("SKIPPED: no IPv6 loopback address");
            return;
        }
        let port = stun_server();
        for addresses in [[V6, V4], [V4, V6]] {
            let report = probe(&addresses, port);
            // The remaining checks use the address that works, whichever address the resolver prefers.
            assert_eq!(report.transports["tcp"].address, format!("127.0.0.1:{port}"), "{report:?}");
            assert!(report.transports["tcp"].reachable, "{report:?}");
            assert!(!report.other_family["tcp"].reachable, "{report:?}");
            let told = report.findings.iter().find(|line| line.what.contains("listed for this name"));
            let told = told.expect("a finding about the other address");
            assert!(told.level == FindingLevel::Warn && told.what.contains("[::1]"), "{told:?}");
        }
        let report = probe(&[V4], port);
        assert!(report.other_family.is_empty(), "{report:?}");
        // If neither address works, only one finding reports it.
        let report = probe(&[V4, V6], 1);
        let lines = report.findings.iter().filter(|line| line.area == "tcp").count();
        assert_eq!((lines, report.usable), (1, false), "{report:?}");
    }

    #[test]
    fn one_address_of_each_family_is_kept() {
        let found = ["192.0.2.1:1", "[2001:db8::1]:1", "192.0.2.2:1", "[2001:db8::2]:1"];
        let mut kept = one_of_each_family(&found.map(|address| address.parse().unwrap()));
        // The order depends on which families this machine can reach.
        kept.sort();
        assert_eq!(kept, ["192.0.2.1", "2001:db8::1"].map(|ip| ip.parse::<IpAddr>().unwrap()));
    }

    #[test]
    fn invalid_flags_are_errors_instead_of_findings() {
        let config = ProbeConfig::new("turn:127.0.0.1:1".parse().unwrap());
        for (config, word) in [
            (ProbeConfig { timeout: Duration::MAX, ..config.clone() }, "--timeout"),
            (
                ProbeConfig {
                    tls: TlsOptions { ca: Some("/nowhere/ca.pem".into()), ..TlsOptions::default() },
                    ..config.clone()
                },
                "--ca",
            ),
            (
                ProbeConfig {
                    tls: TlsOptions { server_name: Some("a b".to_owned()), ..TlsOptions::default() },
                    ..config
                },
                "--server-name",
            ),
        ] {
            match run(&config) {
                Err(ProbeError::Setting(what)) => assert!(what.0.contains(word), "{what}"),
                other => panic!("{word}: {other:?}"),
            }
        }
    }
}
