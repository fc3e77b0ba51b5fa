//! Reachability of each transport on the server's addresses and ports.

use std::{
    collections::HashSet,
    net::{IpAddr, SocketAddr},
    thread,
    time::{Duration, Instant, SystemTime},
};

use turnpike_client::{ClientTransport, ServerUri};
use turnpike_wire::{
    escape::name,
    stun::{kind, method},
};

use crate::{
    PATIENCE, ProbeRun, certificate,
    connection::{self, ProbeConnection, WEB_SERVER, describe_error},
    report::{FindingLevel, RoundTrip, TransportFacts},
    session::{ProbeSession, ServerAnswer},
};

/// The only port on which strict firewalls allow TLS.
const HTTPS: u16 = 443;

struct ReachAttempt {
    transport: ClientTransport,
    server: SocketAddr,
    facts: TransportFacts,
    software: Option<String>,
}

struct ReachTried {
    named: ReachAttempt,
    https: Option<ReachAttempt>,
}

impl ReachTried {
    fn transport(&self) -> ClientTransport {
        self.named.transport
    }

    fn works(&self) -> bool {
        self.named.facts.reachable
    }

    fn works_on_https(&self) -> Option<SocketAddr> {
        self.https.as_ref().filter(|attempt| attempt.facts.reachable).map(|attempt| attempt.server)
    }
}

pub(crate) fn has_route(ip: IpAddr) -> bool {
    // Connecting a UDP socket sends no packets, so the port does not matter.
    connection::udp(SocketAddr::new(ip, 9)).is_ok()
}

impl ProbeRun<'_> {
    pub(crate) fn transports(&mut self) {
        let Some((first, others)) = self.addresses.split_first() else { return };
        let wanted = self.config.server.transport();
        let all: Vec<_> = ClientTransport::ALL
            .into_iter()
            .filter(|transport| self.config.server.allows(*transport))
            .collect();
        let mut chosen = self.attempts(*first, &all);
        let mut other = Vec::new();
        match others.first() {
            Some(ip) if !has_route(*ip) => {
                let what = format!("skipped the name's other address, {ip}: no route to it");
                self.report.note("probe", what);
            }
            Some(ip) if Instant::now() < self.deadline => {
                let works = works(&chosen, wanted);
                let asked: Vec<_> =
                    all.into_iter().filter(|transport| !works || self::works(&chosen, *transport)).collect();
                other = self.attempts(*ip, &asked);
            }
            _ => {}
        }
        if !works(&chosen, wanted) && works(&other, wanted) {
            std::mem::swap(&mut chosen, &mut other);
        }
        self.tell_other(&chosen, other);
        let over_tls = self.advice_on_https(&chosen);
        for tried in chosen {
            self.tell(tried, over_tls);
        }
    }

    /// Tries all transports in parallel, because each attempt takes the full timeout if a firewall drops
    /// packets.
    fn attempts(&self, ip: IpAddr, transports: &[ClientTransport]) -> Vec<ReachTried> {
        thread::scope(|scope| {
            let try_at =
                |transport: ClientTransport, server| scope.spawn(move || self.try_at(transport, server));
            let try_all = |transport: &ClientTransport| {
                let servers = self.places(*transport, ip).into_iter();
                servers.map(|server| try_at(*transport, server)).collect::<Vec<_>>()
            };
            let threads: Vec<_> = transports.iter().map(try_all).collect();
            let join =
                |thread: thread::ScopedJoinHandle<'_, _>| thread.join().expect("an attempt does not panic");
            threads.into_iter().map(|threads| self.choose(threads.into_iter().map(join).collect())).collect()
        })
    }

    fn choose(&self, mut attempts: Vec<ReachAttempt>) -> ReachTried {
        let is_named = attempts[0].transport.is_secure() == self.config.server.is_secure();
        let works = attempts.iter().position(|attempt| attempt.facts.reachable);
        let mut named = attempts.remove(works.filter(|_| !is_named).unwrap_or(0));
        if let Some(what) = &mut named.facts.failure
            && !is_named
        {
            for ReachAttempt { server, facts, .. } in &attempts {
                if let Some(more) = &facts.failure {
                    *what += &format!("; on port {}: {more}", server.port());
                }
            }
        }
        ReachTried { named, https: attempts.into_iter().find(|attempt| attempt.server.port() == HTTPS) }
    }

    /// Addresses to try: by DNS records if there are some for this family, otherwise by default ports.
    fn places(&self, transport: ClientTransport, ip: IpAddr) -> Vec<SocketAddr> {
        let of_family = |server: &&SocketAddr| server.is_ipv4() == ip.is_ipv4();
        let by_record = self.by_record.get(&transport).and_then(|servers| servers.iter().find(of_family));
        match by_record {
            Some(server) => vec![*server],
            None => self.ports(transport).into_iter().map(|port| (ip, port).into()).collect(),
        }
    }

    /// Ports to try. A server may also offer TLS and DTLS on its plain port and recognize them by the first
    /// byte.
    fn ports(&self, transport: ClientTransport) -> Vec<u16> {
        let uri = &self.config.server;
        let mut ports = match (transport.is_secure(), uri.is_secure()) {
            (true, false) => vec![transport.default_port(), uri.port_for(uri.transport())],
            _ => vec![uri.port_for(transport)],
        };
        if uri.is_turn() && transport != ClientTransport::Dtls {
            ports.push(HTTPS);
        }
        let mut seen = HashSet::new();
        ports.retain(|port| seen.insert(*port));
        ports
    }

    fn try_at(&self, transport: ClientTransport, server: SocketAddr) -> ReachAttempt {
        let mut facts = TransportFacts { address: server.to_string(), ..TransportFacts::default() };
        let tried = self.try_transport(transport, server, &mut facts);
        facts.reachable = tried.is_ok();
        let software = tried.unwrap_or_else(|what| {
            facts.failure = Some(what);
            None
        });
        ReachAttempt { transport, server, facts, software }
    }

    fn try_transport(
        &self,
        transport: ClientTransport,
        server: SocketAddr,
        facts: &mut TransportFacts,
    ) -> Result<Option<String>, String> {
        let trust = self.trust(transport)?;
        let (connection, opened) = ProbeConnection::open(transport, server, trust, self.short_deadline())?;
        if opening_takes_packets(transport) {
            facts.open_ms = Some(opened.took.as_secs_f64() * 1_000.0);
        }
        facts.version = opened.version;
        facts.group = opened.group;
        facts.alpn = opened.alpn;
        if transport.is_secure() {
            facts.certificate = certificate::read(&opened.chain, opened.distrust, SystemTime::now());
        }
        let mut session = ProbeSession::new(connection, None, PATIENCE, self.deadline);
        let mut times = Vec::new();
        let mut last: Option<ServerAnswer> = None;
        for _ in 0..self.config.count {
            match session.ask(method::BINDING, &|_| ()) {
                Ok(answer) => {
                    if answer.sent == 1 {
                        times.push(u64::try_from(answer.took.as_micros()).unwrap_or(u64::MAX));
                    }
                    last = Some(answer);
                }
                Err(error) if last.is_none() => return Err(describe_error(error)),
                Err(_) => break,
            }
        }
        let Some(answer) = last else { return Err("no answer in time".to_owned()) };
        if !answer.is_success() {
            return Err(format!("answers a Binding request with {}", answer.describe()));
        }
        times.sort_unstable();
        facts.rtt_us = times.first().map(|min| RoundTrip {
            min: *min,
            median: times[times.len() / 2],
            asked: self.config.count,
            answered: times.len(),
        });
        let mapped =
            answer.address(kind::XOR_MAPPED_ADDRESS).or_else(|| answer.address(kind::MAPPED_ADDRESS));
        facts.mapped = mapped.map(|address| address.to_string());
        Ok(answer.text(kind::SOFTWARE))
    }

    fn tell(&mut self, tried: ReachTried, over_tls: &'static str) {
        let transport = tried.transport();
        let (level, remedy) = self.unreachable(&tried, over_tls);
        let ReachTried { named: ReachAttempt { server, facts, software, .. }, https } = tried;
        match &facts.failure {
            None => {
                self.servers.insert(transport, server);
                self.report.software = self.report.software.take().or(software);
                self.report.ok(transport, answers(&facts));
            }
            Some(what) => self.report.advise(level, transport, format!("{server}: {what}"), remedy),
        }
        if let Some(certificate) = &facts.certificate {
            certificate::judge(&mut self.report, transport, certificate);
        }
        if let Some(https) = https {
            self.tell_https(https, &facts, over_tls);
        }
        self.report.transports.insert(transport.to_string(), facts);
    }

    fn tell_https(&mut self, https: ReachAttempt, named: &TransportFacts, over_tls: &'static str) {
        let ReachAttempt { transport, server, facts, software } = https;
        match &facts.failure {
            None => {
                self.servers.entry(transport).or_insert(server);
                self.report.software = self.report.software.take().or(software);
                self.report.ok(transport, answers(&facts));
                if let Some(shown) =
                    facts.certificate.as_ref().filter(|shown| Some(*shown) != named.certificate.as_ref())
                {
                    certificate::judge(&mut self.report, transport, shown);
                }
            }
            Some(what) if transport == ClientTransport::Tls && named.reachable => {
                self.report.advise(FindingLevel::Note, transport, format!("{server}: {what}"), over_tls);
            }
            Some(_) => {}
        }
        self.report.port_443.insert(transport.to_string(), facts);
    }

    fn tell_other(&mut self, chosen: &[ReachTried], other: Vec<ReachTried>) {
        for ReachTried { named: ReachAttempt { transport, server, facts, .. }, .. } in other {
            let at_chosen = chosen.iter().find(|tried| tried.transport() == transport);
            match &facts.failure {
                None => self.report.ok(transport, answers(&facts)),
                Some(what) if at_chosen.is_some_and(ReachTried::works) => self.report.warn(
                    transport,
                    format!("{server}: {what}, although this address is listed for this name"),
                    "clients that choose this address fail: listen there and open the firewall, or remove \
                     the address from DNS",
                ),
                Some(_) => {}
            }
            let known = at_chosen.and_then(|tried| tried.named.facts.certificate.as_ref());
            if let Some(certificate) = facts.certificate.as_ref().filter(|shown| Some(*shown) != known) {
                certificate::judge(&mut self.report, transport, certificate);
            }
            self.report.other_family.insert(transport.to_string(), facts);
        }
    }

    fn unreachable(&self, tried: &ReachTried, over_tls: &'static str) -> (FindingLevel, String) {
        let uri = &self.config.server;
        let transport = tried.transport();
        let elsewhere = tried.works_on_https().map(|_| {
            let tcp = (transport != uri.transport()).then_some(transport.is_stream()).or(uri.tcp);
            ServerUri { port: Some(HTTPS), tcp, ..uri.clone() }
        });
        let is_web_server =
            tried.named.facts.failure.as_ref().is_some_and(|what| what.starts_with(WEB_SERVER));
        match (transport, elsewhere) {
            (_, None) if is_web_server => {
                let level = if transport == uri.transport() { FindingLevel::Bad } else { FindingLevel::Warn };
                let remedy = "use the port on which TURN listens, or free this one for TURN: give the web server another port, give TURN its own \
                              address, or use a proxy that routes by SNI";
                (level, remedy.to_owned())
            }
            (_, Some(there)) if transport == uri.transport() => {
                (FindingLevel::Bad, format!("it works on port 443: give clients {there}, or listen here too"))
            }
            (_, None) if transport == uri.transport() && transport.is_secure() => {
                (FindingLevel::Bad, "check the address, the TLS listener and the firewall".to_owned())
            }
            (_, None) if transport == uri.transport() => {
                (FindingLevel::Bad, "check the address, listeners and firewall".to_owned())
            }
            (ClientTransport::Udp | ClientTransport::Tcp, Some(there)) => {
                (FindingLevel::Warn, format!("give clients {there}, where it works, or listen here too"))
            }
            (ClientTransport::Udp | ClientTransport::Tcp, None) => (
                FindingLevel::Warn,
                "clients behind firewalls that block UDP need TCP: listen on it, and open the port"
                    .to_owned(),
            ),
            (ClientTransport::Tls, _) => (FindingLevel::Note, over_tls.to_owned()),
            (ClientTransport::Dtls, _) => {
                (FindingLevel::Note, "few clients use DTLS; browsers never do".to_owned())
            }
        }
    }

    fn advice_on_https(&self, chosen: &[ReachTried]) -> &'static str {
        let tcp = chosen.iter().find(|tried| tried.transport() == ClientTransport::Tcp);
        let https = tcp.and_then(|tried| {
            [tried.https.as_ref(), Some(&tried.named)]
                .into_iter()
                .flatten()
                .find(|at| at.server.port() == HTTPS)
        });
        match https.map(|attempt| &attempt.facts) {
            Some(facts) if facts.reachable => {
                "clients behind strict firewalls need TLS on port 443: give the listener there a certificate"
            }
            Some(facts) if facts.open_ms.is_some() => {
                "clients behind strict firewalls need TLS on port 443, where another service answers: give TURN its own address, \
                 or use a proxy that routes by SNI"
            }
            _ if !self.config.server.is_turn() => "few clients use STUN over TLS",
            _ => "clients behind strict firewalls need TLS on port 443: listen there, with a certificate",
        }
    }
}

fn works(tried: &[ReachTried], transport: ClientTransport) -> bool {
    tried.iter().any(|tried| tried.transport() == transport && tried.works())
}

fn opening_takes_packets(transport: ClientTransport) -> bool {
    transport != ClientTransport::Udp
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
    for more in [&facts.version, &facts.group, &facts.alpn].into_iter().flatten() {
        what += &format!(", {}", name(more));
    }
    what
}
