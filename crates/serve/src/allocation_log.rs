//! Allocation log: one line per ended allocation and refused credential. Workers send effects over a bounded
//! channel and never wait; the control thread writes the lines.

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use turnpike_events::Events;
use turnpike_process::{
    log_limit::{EndLimit, LineSummary, RefusalLineLimit, Sum},
    log_queue::{BACKLOG, LogCounts, LogReceiver, LogSender, log_queue},
    logging::seconds,
};
use turnpike_rates::{Rate, Rates};
use turnpike_relay::{AllocationLog, TurnedAway};
use turnpike_turn::server::{ClientNetwork, ClientNetworks as _, ClosedReason, Effect};

use crate::{
    ended_allocations::EndedAllocations,
    events::{EventWriter, ServerEvents},
    geoip::GeoIp,
    refusals::{
        Refusals, Why,
        reasons::{
            connection_reason, credentials_reason, is_misconfiguration, peer_name, peer_reason,
            request_reason,
        },
    },
};

pub(crate) struct AllocationLogger {
    lines: LogSender<LogEntry>,
    events: Arc<Events>,
    totals: Arc<EndedAllocations>,
}

pub(crate) struct AllocationLogWriter {
    entries: LogReceiver<LogEntry>,
    /// Recent refusals for the admin interface, independent of log limits.
    refusals: Arc<Refusals>,
    events: EventWriter,
    geoip: Arc<GeoIp>,
}

enum LogEntry {
    Effect(usize, Effect),
    TurnedAway(TurnedAway),
}

pub(crate) fn allocation_log(
    refusals: Arc<Refusals>,
    events: &Arc<ServerEvents>,
    geoip: Arc<GeoIp>,
) -> (AllocationLogger, AllocationLogWriter) {
    let (sender, entries) = log_queue(BACKLOG);
    let (hub, counts) = (Arc::clone(&events.hub), entries.counts());
    let events = EventWriter::new(Arc::clone(events), counts);
    let logger = AllocationLogger { lines: sender, events: hub, totals: Arc::default() };
    (logger, AllocationLogWriter { entries, refusals, events, geoip })
}

impl AllocationLogger {
    pub(crate) fn counts(&self) -> Arc<LogCounts> {
        self.lines.counts()
    }

    pub(crate) fn totals(&self) -> Arc<EndedAllocations> {
        Arc::clone(&self.totals)
    }
}

impl AllocationLog for AllocationLogger {
    fn effect(&self, worker: usize, effect: &Effect) {
        self.totals.effect(effect);
        let wanted = match effect {
            Effect::Opened { .. } => self.events.is_wanted() || is_debugged(),
            Effect::Closed { .. }
            | Effect::Refused { .. }
            | Effect::PeerRefused { .. }
            | Effect::RequestRefused { .. } => true,
            _ => false,
        };
        if wanted {
            self.lines.send(LogEntry::Effect(worker, effect.clone()));
        }
    }

    fn turned_away(&self, _: usize, turned: &TurnedAway) {
        self.lines.send(LogEntry::TurnedAway(turned.clone()));
    }
}

fn is_debugged() -> bool {
    tracing::enabled!(target: "turnpike::allocation", tracing::Level::DEBUG)
}

/// Realm, and the name under which the user's quotas are kept.
type QuotaUser = (Arc<str>, Box<str>);

struct AllocationLogLimits {
    /// Limit for the refusals of all workers together; each worker also limits its own.
    credentials: RefusalLineLimit,
    peers: RefusalLineLimit,
    requests: RefusalLineLimit,
    connections: RefusalLineLimit,
    allocations: EndLimit<QuotaUser>,
}

impl AllocationLogLimits {
    /// Limit for ended allocations of one user: enough for a few clients that share a username, but not for
    /// a flood.
    const EACH: Rate = Rate::new(200, 100);
    /// Limit for all ended allocations: the burst equals the default allocation limit, so that every end is
    /// logged if a link fails.
    const TOTAL: Rate = Rate::new(16_384, 10);
    const MOST: usize = 16_384;

    fn new(counts: &Arc<LogCounts>) -> Self {
        let rates = Rates::new(Self::EACH, Self::TOTAL, Self::MOST);
        Self {
            credentials: RefusalLineLimit::new(Arc::clone(counts)),
            peers: RefusalLineLimit::new(Arc::clone(counts)),
            requests: RefusalLineLimit::new(Arc::clone(counts)),
            connections: RefusalLineLimit::new(Arc::clone(counts)),
            allocations: EndLimit::new(rates, Arc::clone(counts)),
        }
    }

    fn admit(&mut self, now: Duration, effect: &mut Effect) -> bool {
        match effect {
            Effect::Refused { client, suppressed, .. } => {
                self.credentials.admit(now, client.address.ip(), suppressed)
            }
            // Lines below the log level are not counted as suppressed.
            Effect::PeerRefused { .. } | Effect::RequestRefused { .. } if !is_debugged() => false,
            Effect::PeerRefused { client, suppressed, .. } => {
                self.peers.admit(now, client.address.ip(), suppressed)
            }
            Effect::RequestRefused { client, suppressed, .. } => {
                self.requests.admit(now, client.address.ip(), suppressed)
            }
            // All allocations are logged when the server stops.
            Effect::Closed { reason: ClosedReason::Shutdown, .. } => true,
            Effect::Closed { realm, username, identity, to_peer, to_client, .. } => {
                let name = identity.as_ref().unwrap_or(username);
                let ask = |rates: &mut Rates, now| rates.admit(now, (&**realm, &**name));
                let whose = || (Arc::clone(realm), name.clone());
                self.allocations.admit(now, Sum::one(to_peer.1, to_client.1), ask, whose)
            }
            _ => true,
        }
    }
}

impl AllocationLogLimits {
    /// Number of lines suppressed before this one, or `None` to drop it. Connections without a user appear
    /// only with `-v`, except for configuration errors.
    fn admit_closed(&mut self, now: Duration, turned: &TurnedAway) -> Option<u64> {
        if turned.user.is_none() && !is_misconfiguration(turned.reason) && !is_debugged() {
            return None;
        }
        let mut suppressed = 0;
        self.connections.admit(now, turned.client.ip(), &mut suppressed).then_some(suppressed)
    }
}

impl AllocationLogWriter {
    pub(crate) async fn run(self) {
        let start = Instant::now();
        let Self { entries, refusals, mut events, geoip } = self;
        let mut limits = AllocationLogLimits::new(&entries.counts());
        entries
            .run(|batch, lost| {
                let unix_ms = unix_ms();
                for entry in batch.drain(..) {
                    match entry {
                        LogEntry::Effect(worker, mut effect) => {
                            let network =
                                client_of(&effect).map_or_else(Default::default, |ip| geoip.network(ip));
                            refusals.hear(unix_ms, &effect, network);
                            events.hear(start.elapsed(), unix_ms, &effect, network);
                            if limits.admit(start.elapsed(), &mut effect) {
                                write(worker, &effect, network);
                            }
                        }
                        LogEntry::TurnedAway(turned) => {
                            let network = geoip.network(turned.client.ip());
                            refusals.turned_away(unix_ms, &turned, network);
                            events.turned_away(start.elapsed(), unix_ms, &turned, network);
                            if let Some(suppressed) = limits.admit_closed(start.elapsed(), &turned) {
                                write_closed(&turned, suppressed, network);
                            }
                        }
                    }
                }
                events.due(start.elapsed());
                limits.allocations.due(start.elapsed()).iter().for_each(write_sums);
                if lost > 0 {
                    tracing::warn!(target: "turnpike::allocation", lines = lost, "log lines lost");
                }
            })
            .await;
        limits.allocations.take().iter().for_each(write_sums);
    }
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn write_sums(summary: &LineSummary<QuotaUser>) {
    let each = summary.of.iter().map(|((realm, user), sum)| (Some(&**realm), Some(&**user), sum));
    for (realm, user, sum) in each.chain(summary.others.iter().map(|sum| (None, None, sum))) {
        tracing::info!(
            target: "turnpike::allocation",
            realm, user, allocations = sum.count, to_peer_bytes = sum.out_bytes, to_client_bytes = sum.in_bytes,
            "too many allocations ended to log each one"
        );
    }
}

fn write_closed(turned: &TurnedAway, suppressed: u64, network: ClientNetwork) {
    let (country, asn) = (network.country.map(tracing::field::display), network.asn);
    let TurnedAway { client, transport, user, stage, reason: label, count } = turned;
    let keys = keys_of(Why::Connection(stage, label));
    let (transport, reason) = (<&str>::from(*transport), connection_reason(label));
    match user {
        Some((realm, user)) => tracing::warn!(
            target: "turnpike::allocation",
            realm = &**realm, user = &**user, %client, transport, reason, keys, count, suppressed, country, asn,
            "connection closed by the server"
        ),
        None if is_misconfiguration(label) => tracing::warn!(
            target: "turnpike::allocation",
            %client, transport, stage, reason, keys, count, suppressed, country, asn,
            "connection closed by the server"
        ),
        None => tracing::debug!(
            target: "turnpike::allocation",
            %client, transport, stage, reason, keys, count, suppressed, country, asn,
            "connection closed by the server"
        ),
    }
}

fn client_of(effect: &Effect) -> Option<IpAddr> {
    match effect {
        Effect::Opened { client, .. }
        | Effect::Closed { client, .. }
        | Effect::Refused { client, .. }
        | Effect::PeerRefused { client, .. }
        | Effect::RequestRefused { client, .. } => Some(client.address.ip()),
        _ => None,
    }
}

fn keys_of(why: Why) -> Option<String> {
    let keys = why.keys();
    (!keys.is_empty()).then(|| keys.join(", "))
}

fn write(worker: usize, effect: &Effect, network: ClientNetwork) {
    let (country, asn) = (network.country.map(tracing::field::display), network.asn);
    match effect {
        Effect::Opened { id, client, realm, username, relayed, .. } => {
            let second = relayed.1.map(tracing::field::display);
            tracing::debug!(
                target: "turnpike::allocation",
                realm = &**realm, user = &**username, client = %client.address,
                relayed = %relayed.0, relayed2 = second, worker, allocation = %id, country, asn,
                "allocation opened"
            );
        }
        Effect::Closed {
            id,
            client,
            realm,
            username,
            relayed,
            transport,
            relay_transport,
            reason,
            lived_ms,
            to_peer,
            to_client,
            ..
        } => {
            let mut addresses = relayed.iter().flatten().map(tracing::field::display);
            let (relayed, relayed2) = (addresses.next(), addresses.next());
            tracing::info!(
                target: "turnpike::allocation",
                realm = &**realm, user = &**username, client = %client.address, transport = <&str>::from(*transport),
                relayed, relayed2, relayed_transport = <&str>::from(*relay_transport),
                reason = closed_reason(*reason), seconds = seconds(Duration::from_millis(*lived_ms)),
                to_peer_datagrams = to_peer.0, to_peer_bytes = to_peer.1,
                to_client_datagrams = to_client.0, to_client_bytes = to_client.1,
                worker, allocation = %id, country, asn,
                "allocation ended"
            );
        }
        Effect::Refused { client, username, why, suppressed } => {
            tracing::warn!(
                target: "turnpike::auth",
                user = &**username, client = %client.address, reason = credentials_reason(*why), suppressed, worker, country, asn,
                "credential refused"
            );
        }
        Effect::PeerRefused { client, realm, username, peer, others, by, suppressed } => {
            tracing::debug!(
                target: "turnpike::allocation",
                realm = &**realm, user = &**username, client = %client.address, peer = peer_name(*peer),
                other_peers = (*others > 0).then_some(others), by = peer_reason(*by),
                keys = keys_of(Why::Peer(*peer, *by, *others)), suppressed, worker, country, asn,
                "peer refused"
            );
        }
        Effect::RequestRefused { client, realm, username, proved, method, code, why, suppressed } => {
            tracing::debug!(
                target: "turnpike::allocation",
                realm = &**realm, user = &**username, proved = (!proved).then_some(false), client = %client.address,
                request = <&str>::from(*method), code = (*code > 0).then_some(code),
                reason = &*request_reason(*code, *why), keys = keys_of(Why::Request(*method, *code, *why)), suppressed, worker, country, asn,
                "request refused"
            );
        }
        _ => {}
    }
}

fn closed_reason(reason: ClosedReason) -> &'static str {
    match reason {
        ClosedReason::Deleted => "deleted by the client",
        ClosedReason::Expired => "not refreshed in time",
        ClosedReason::Shutdown => "server stopped",
        ClosedReason::Administrator => "ended by an administrator",
        ClosedReason::Disconnected => "the client's connection was closed",
        ClosedReason::MaxAge => "maximum duration reached",
        ClosedReason::Banned => "banned",
        ClosedReason::Credential => "its credential expired",
        ClosedReason::AddressGone => "the machine lost its relay address",
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Mutex, PoisonError},
    };

    use turnpike_turn::server::{
        AllocationSlot, BadRequest, Client, CredentialRefusal, DropReason, Fault, ListenerId, Method,
        PeerDenial, RelayTransport, RequestRefusal, TokenProblem, Transport,
    };

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn lines_of(effects: &[Effect]) -> String {
        lines(|| effects.iter().for_each(|effect| write(0, effect, ClientNetwork::default())))
    }

    fn lines(work: impl FnOnce()) -> String {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .without_time()
            .with_max_level(tracing::Level::DEBUG)
            .finish();
        tracing::subscriber::with_default(subscriber, work);
        let bytes = lines.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        String::from_utf8(bytes).expect("log lines are UTF-8")
    }

    fn client() -> Client {
        Client {
            listener: ListenerId(0),
            address: "192.0.2.9:50000".parse().expect("an address"),
            local: "192.0.2.1:3478".parse().expect("an address"),
        }
    }

    fn refused(why: CredentialRefusal) -> Effect {
        Effect::Refused { client: client(), username: "al\"ice".into(), why, suppressed: 7 }
    }

    fn ended(identity: &str, reason: ClosedReason) -> Effect {
        Effect::Closed {
            allocation: AllocationSlot { index: 1, generation: 2 },
            id: "00112233445566778899aabbccddeeff".parse().expect("a name"),
            client: client(),
            realm: "example.org".into(),
            username: format!("1800000000:{identity}").into(),
            identity: Some(identity.into()),
            relayed: ["198.41.0.4:50000", "[2001:db8::4]:50000"].map(|text| text.parse().ok()),
            transport: Transport::Tls,
            relay_transport: RelayTransport::Udp,
            away: false,
            reason,
            lived_ms: 61_999,
            to_peer: (10, 1200),
            to_client: (9, 1080),
            reported: None,
        }
    }

    #[test]
    fn an_ended_allocation_gets_one_line() {
        let line = lines_of(&[ended("alice", ClosedReason::Expired)]);
        assert_eq!(
            line.trim(),
            "INFO turnpike::allocation: allocation ended realm=\"example.org\" user=\"1800000000:alice\" \
             client=192.0.2.9:50000 transport=\"tls\" relayed=198.41.0.4:50000 relayed2=[2001:db8::4]:50000 \
             relayed_transport=\"udp\" reason=\"not refreshed in time\" seconds=61.999 to_peer_datagrams=10 \
             to_peer_bytes=1200 to_client_datagrams=9 to_client_bytes=1080 worker=0 \
             allocation=00112233445566778899aabbccddeeff"
        );
    }

    #[test]
    fn allocations_are_counted_by_realm_listener_and_duration() {
        let events = Arc::new(ServerEvents::start(&turnpike_config::Settings::default()));
        let (logger, _writer) = allocation_log(Arc::default(), &events, Arc::default());
        for reason in [ClosedReason::Expired, ClosedReason::Deleted] {
            logger.effect(0, &ended("alice", reason));
        }
        logger.effect(0, &refused(CredentialRefusal::WrongKey));
        let totals = logger.totals().get();
        assert_eq!(totals.ended, [(("example.org".into(), "tls", 3478), 2)].into());
        assert_eq!(totals.bytes, [("example.org".into(), [2400, 2160])].into());
        assert_eq!((totals.lengths, totals.lived_ms), ([0, 0, 0, 2, 0, 0, 0, 0, 0], 123_998));
    }

    #[test]
    fn ended_allocations_above_a_users_rate_are_summarized_except_at_shutdown() {
        let mut limits = AllocationLogLimits::new(&Arc::default());
        let mut told = |user: &str, reason, count: usize| {
            (0..count).filter(|_| limits.admit(Duration::from_secs(1), &mut ended(user, reason))).count()
        };
        assert_eq!(told("alice", ClosedReason::Deleted, 20_000), 200);
        assert_eq!(told("bob", ClosedReason::Disconnected, 150), 150);
        assert_eq!(told("alice", ClosedReason::Shutdown, 5000), 5000);
        let singly: usize = (0..5000).map(|n| told(&n.to_string(), ClosedReason::Expired, 3)).sum();
        assert_eq!(singly, 15_000, "thousands of users at once");
        let summary = limits.allocations.take().expect("alice's");
        let [((_, user), sum)] = &summary.of[..] else { panic!("{summary:?}") };
        assert_eq!((&**user, sum.count, sum.out_bytes), ("alice", 19_800, 19_800 * 1200));
    }

    #[test]
    fn a_refused_peer_line_names_the_deciding_rule() {
        let by = |by, peer: &str| {
            lines_of(&[Effect::PeerRefused {
                client: client(),
                realm: "example.org".into(),
                username: "alice".into(),
                peer: peer.parse().expect("an address"),
                others: usize::from(peer.starts_with("10.1.2.4")) * 2,
                by,
                suppressed: 3,
            }])
        };
        let line = by(PeerDenial::Rule("10.1.0.0/16".parse().expect("a prefix")), "10.1.2.3:0");
        assert_eq!(
            line.trim(),
            "DEBUG turnpike::allocation: peer refused realm=\"example.org\" user=\"alice\" client=192.0.2.9:50000 \
             peer=\"10.1.2.3\" by=\"peers.deny 10.1.0.0/16\" keys=\"peers.deny\" suppressed=3 worker=0"
        );
        assert!(by(PeerDenial::Special, "10.1.2.3:9").contains("by=\"default: "));
        assert!(by(PeerDenial::Special, "10.1.2.4:0").contains("peer=\"10.1.2.4\" other_peers=2 by="));
        assert!(by(PeerDenial::Own, "10.1.2.3:9").contains("by=\"default: "));
    }

    #[test]
    fn a_refused_request_line_has_code_and_reason() {
        let line = |proved, code, why| {
            lines_of(&[Effect::RequestRefused {
                client: client(),
                realm: "example.org".into(),
                username: "alice".into(),
                proved,
                method: Method::Allocate,
                code,
                why,
                suppressed: 0,
            }])
        };
        let missing = BadRequest { attribute: 0x0019, fault: Fault::Missing };
        let line_of_bad = line(false, 400, RequestRefusal::BadRequest(missing));
        assert!(line_of_bad.contains("user=\"alice\" proved=false client="), "{line_of_bad}");
        assert!(line_of_bad.contains("code=400 reason=\"REQUESTED-TRANSPORT is missing\""), "{line_of_bad}");
        assert_eq!(
            line(true, 486, RequestRefusal::UserQuota).trim(),
            "DEBUG turnpike::allocation: request refused realm=\"example.org\" user=\"alice\" client=192.0.2.9:50000 \
             request=\"allocate\" code=486 reason=\"the user has reached the allocation limit\" \
             keys=\"limits.allocations_per_user\" suppressed=0 worker=0"
        );
    }

    #[test]
    fn a_dropped_request_line_names_the_limit_instead_of_a_code() {
        let line = lines_of(&[Effect::RequestRefused {
            client: client(),
            realm: Arc::default(),
            username: Box::default(),
            proved: false,
            method: Method::Allocate,
            code: 0,
            why: RequestRefusal::Unanswered(DropReason::RefusalLimit),
            suppressed: 0,
        }]);
        assert!(
            line.contains("reason=\"no answer: ") && line.contains("keys=\"limits.refusals_per_prefix\""),
            "{line}"
        );
        assert!(!line.contains("code="), "{line}");
    }

    #[test]
    fn a_closed_connection_line_names_user_and_reason() {
        let closed = |user: Option<&str>, reason| {
            let (client, transport) = (client().address, Transport::Tls);
            let user = user.map(|user| ("example.org".into(), user.into()));
            let turned = TurnedAway { client, transport, user, stage: "connection", reason, count: 1 };
            lines(|| write_closed(&turned, 0, ClientNetwork::default()))
        };
        assert_eq!(
            closed(Some("alice"), "not_stun").trim(),
            "WARN turnpike::allocation: connection closed by the server realm=\"example.org\" user=\"alice\" \
             client=192.0.2.9:50000 transport=\"tls\" reason=\"received data is neither STUN nor ChannelData\" count=1 suppressed=0"
        );
        assert!(
            closed(None, "not_stun")
                .trim()
                .starts_with("DEBUG turnpike::allocation: connection closed by the server client=")
        );
        let words = ["WARN ", "reason=\"a STUN request without TLS", "keys=\"tls.only\""];
        let line = closed(None, "plain_stun");
        assert!(words.iter().all(|word| line.contains(word)), "{line}");
    }

    #[test]
    fn credential_refusals_have_a_reason_and_a_suppressed_count() {
        for (why, text) in [
            (CredentialRefusal::NoSuchUser, "no such user"),
            (CredentialRefusal::Expired { ago: 42 }, "expired 42 s ago"),
            (CredentialRefusal::WrongKey, "wrong key"),
            (CredentialRefusal::WrongRealm, "wrong realm"),
            (CredentialRefusal::WrongUser, "wrong user"),
            (CredentialRefusal::Token(TokenProblem::Malformed), "access token malformed"),
        ] {
            let line = lines_of(&[refused(why)]);
            assert_eq!(
                line.trim(),
                format!(
                    "WARN turnpike::auth: credential refused user=\"al\\\"ice\" client=192.0.2.9:50000 \
                     reason=\"{text}\" suppressed=7 worker=0"
                )
            );
        }
    }
}
