//! Which transports work, on which of the name's addresses and ports, and with which certificate.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant, SystemTime},
};

use turnpike_client::Transport;
use turnpike_wire::{
    escape::name,
    stun::{kind, method},
};

use crate::{
    PATIENCE, Probe, certificate,
    connection::{self, Connection, words},
    report::{Level, RoundTrip, TransportFacts},
    session::{Answer, Session},
};

/// What came of one transport at one address.
struct Attempt {
    transport: Transport,
    server: SocketAddr,
    facts: TransportFacts,
    software: Option<String>,
}

/// Whether packets to an address would leave this machine.
pub(crate) fn has_route(ip: IpAddr) -> bool {
    // Connecting a UDP socket sends nothing; the port does not matter.
    connection::udp(SocketAddr::new(ip, 9)).is_ok()
}

impl Probe<'_> {
    /// Every transport that the name allows, at an address of each family. What is asked later goes to where the transport
    /// works by which the server is named.
    pub(crate) fn transports(&mut self) {
        let Some((first, others)) = self.addresses.split_first() else { return };
        let wanted = self.config.server.transport();
        let all: Vec<_> =
            Transport::ALL.into_iter().filter(|transport| self.config.server.allows(*transport)).collect();
        let mut chosen = self.attempts(*first, &all);
        let mut other = Vec::new();
        match others.first() {
            Some(ip) if !has_route(*ip) => {
                let what =
                    format!("the name's other address, {ip}, was not tried: there is no route from here");
                self.report.line(Level::Note, "probe", what);
            }
            Some(ip) if Instant::now() < self.deadline => {
                // What works at neither is told of once.
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
        for attempt in chosen {
            self.tell(attempt);
        }
    }

    fn attempts(&self, ip: IpAddr, transports: &[Transport]) -> Vec<Attempt> {
        transports.iter().map(|transport| self.attempt(*transport, ip)).collect()
    }

    /// TLS and DTLS at their usual port first, where the name is that of a plain server; its own port, as in `turn:HOST:443`,
    /// may have them too, told apart by what comes first.
    fn attempt(&self, transport: Transport, ip: IpAddr) -> Attempt {
        let uri = &self.config.server;
        let usual = transport.default_port();
        let (port, second) = match uri.port {
            Some(named) if transport.is_secure() && !uri.is_secure() => {
                (usual, Some(named).filter(|named| *named != usual))
            }
            named => (named.unwrap_or(usual), None),
        };
        let mut attempt = self.try_at(transport, (ip, port).into());
        let Some(port) = second.filter(|_| !attempt.facts.reachable) else { return attempt };
        let named = self.try_at(transport, (ip, port).into());
        if named.facts.reachable {
            return named;
        }
        if let (Some(what), Some(more)) = (&mut attempt.facts.failure, named.facts.failure) {
            *what += &format!("; on port {port}: {more}");
        }
        attempt
    }

    fn try_at(&self, transport: Transport, server: SocketAddr) -> Attempt {
        let mut facts = TransportFacts { address: server.to_string(), ..TransportFacts::default() };
        let tried = self.try_transport(transport, server, &mut facts);
        facts.reachable = tried.is_ok();
        let software = tried.unwrap_or_else(|what| {
            facts.failure = Some(what);
            None
        });
        Attempt { transport, server, facts, software }
    }

    /// Opens, asks, and returns SOFTWARE.
    fn try_transport(
        &self,
        transport: Transport,
        server: SocketAddr,
        facts: &mut TransportFacts,
    ) -> Result<Option<String>, String> {
        let trust = self.trust(transport)?;
        let (connection, opened) = Connection::open(transport, server, trust, self.soon())?;
        if opening_takes_packets(transport) {
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
            match session.ask(method::BINDING, &|_| ()) {
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
        if !answer.is_success() {
            return Err(format!("answers a Binding request with {}", answer.told()));
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

    fn tell(&mut self, attempt: Attempt) {
        let Attempt { transport, server, facts, software } = attempt;
        match &facts.failure {
            None => {
                self.servers.insert(transport, server);
                self.report.software = self.report.software.take().or(software);
                self.report.line(Level::Ok, transport, answers(&facts));
            }
            Some(what) => {
                let (level, remedy) = self.unreachable(transport);
                self.report.advise(level, transport, format!("{server}: {what}"), remedy);
            }
        }
        if let Some(certificate) = &facts.certificate {
            certificate::judge(&mut self.report, transport, certificate);
        }
        self.report.transports.insert(transport.to_string(), facts);
    }

    /// The address of the other family: clients choose either.
    fn tell_other(&mut self, chosen: &[Attempt], other: Vec<Attempt>) {
        for Attempt { transport, server, facts, .. } in other {
            let at_chosen = chosen.iter().find(|attempt| attempt.transport == transport);
            match &facts.failure {
                None => self.report.line(Level::Ok, transport, answers(&facts)),
                Some(what) if at_chosen.is_some_and(|attempt| attempt.facts.reachable) => self.report.advise(
                    Level::Warn,
                    transport,
                    format!("{server}: {what}, though the name has this address too"),
                    "clients that choose this address fail: have the server listen there and the firewall let them in, or take \
                     the address out of the name",
                ),
                Some(_) => {}
            }
            let known = at_chosen.and_then(|attempt| attempt.facts.certificate.as_ref());
            if let Some(certificate) = facts.certificate.as_ref().filter(|shown| Some(*shown) != known) {
                certificate::judge(&mut self.report, transport, certificate);
            }
            self.report.other_family.insert(transport.to_string(), facts);
        }
    }

    /// How bad it is that a transport does not work, and what to do.
    fn unreachable(&self, transport: Transport) -> (Level, &'static str) {
        let asked_for = transport == self.config.server.transport();
        match transport {
            _ if asked_for && transport.is_secure() => {
                (Level::Bad, "check the address, the TLS listener (port 5349 or 443) and firewall")
            }
            _ if asked_for => (Level::Bad, "check the address, listeners and firewall"),
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
}

fn works(attempts: &[Attempt], transport: Transport) -> bool {
    attempts.iter().any(|attempt| attempt.transport == transport && attempt.facts.reachable)
}

fn opening_takes_packets(transport: Transport) -> bool {
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
        what += &format!(", {}", name(more));
    }
    what
}
