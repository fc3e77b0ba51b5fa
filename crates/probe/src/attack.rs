//! Attack mode, with which operators test their own servers: sends requests as an attacker would.
//!
//! If a credential is given, the attack requests forbidden peers, in every notation of their addresses and with every method, and tries to
//! take over other users' allocations. It also looks for unauthenticated requests whose responses are larger than the requests.
//!
//! The data sent towards a forbidden peer is a Binding request to a port on which, by default, the server
//! itself listens. A response through the relay proves that the peer was reachable. The lack of a response
//! proves nothing ([`AttackOutcome::Silent`]): check the server's own counters.

pub(crate) mod facts;
mod forms;
mod strangers;

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use turnpike_client::{ClientTransport, Login};
use turnpike_wire::stun::{Class, FAMILY_IPV6, Header, View, Writer, kind, method};

pub(crate) use self::facts::{AttackEntry, AttackFacts, AttackOutcome, AttackReply, Attempt};
use self::forms::Form;
use crate::{
    ProbeRun,
    connection::describe_error,
    report::FindingLevel,
    session::{ProbeSession, ServerAnswer},
};

const RETURN: Duration = Duration::from_millis(700);
const FIRST_CHANNEL: u16 = 0x4000;
/// Made-up connection IDs, some of which a careless server might accept.
const MADE_UP_IDS: [u32; 4] = [0, 1, 0x7A6B_5C4D, u32::MAX];

#[derive(Clone, Copy)]
struct Entries {
    permission: AttackEntry,
    channel: AttackEntry,
    send: AttackEntry,
}

const AT_HOME: Entries = Entries {
    permission: AttackEntry::CreatePermission,
    channel: AttackEntry::ChannelBind,
    send: AttackEntry::Send,
};
const AFTER_A_MOVE: Entries = Entries {
    permission: AttackEntry::Mobility,
    channel: AttackEntry::MobilityChannelBind,
    send: AttackEntry::MobilitySend,
};

/// Acceptable ratio of response bytes to request bytes for clients without credentials.
const MOST_AMPLIFICATION: f64 = 4.0;

pub fn plan(config: &crate::ProbeConfig) -> Vec<String> {
    let forms = forms::special().count();
    let mut lines = vec![format!(
        "{}: over each available transport (UDP, TCP, TLS, DTLS), the probe would",
        config.server
    )];
    if let Some(Login { name: user, .. }) = &config.user {
        lines.extend([
            format!("- allocate as {user}, and ask for {forms} forbidden peer addresses (loopback, metadata, private, the"),
            "  server's own, and their IPv6 notations) with CreatePermission, ChannelBind, Send and Connect, and again after a move (RFC 8016)".to_owned(),
            "- send one datagram to a port of the server itself through each of them; it comes back if the server lets it through".to_owned(),
            "- bind to unknown connections, and present forged mobility tickets".to_owned(),
        ]);
        if let Some(Login { name: other, .. }) = &config.attack_user {
            lines.push(format!(
                "- as {other}, try to take over and to delete those allocations with their tickets"
            ));
        }
    } else {
        lines.push("- request no peers (this needs --user)".to_owned());
    }
    lines.push(format!(
        "- send {} messages without a credential, and count the bytes that come back per byte sent",
        strangers::COUNT
    ));
    lines.push("Allocations are deleted afterwards. Run this attack only on your own servers, or with the owner's consent: add --i-own-this-server.".to_owned());
    lines
}

impl ProbeRun<'_> {
    pub(crate) fn attack(&mut self, ports: &[u16]) {
        let mut facts = AttackFacts::default();
        let reached: Vec<(ClientTransport, SocketAddr)> =
            ClientTransport::ALL.iter().filter_map(|it| Some((*it, *self.servers.get(it)?))).collect();
        if self.config.user.is_none() {
            self.report.note("attack", "forbidden peers were not tested: give a credential with --user");
        }
        for (transport, server) in reached {
            let own = [server.port()];
            let ports = if ports.is_empty() { &own[..] } else { ports };
            if self.config.user.is_some() {
                let mut asker = AttackSession { transport, ports, found: &mut facts.peers };
                let mut public = Vec::new();
                for is_v6 in [false, true] {
                    let asked = self.peers_of(&mut asker, server, is_v6, &mut public);
                    self.note(transport, asked);
                }
            }
            if transport == ClientTransport::Udp || transport == ClientTransport::Dtls {
                let security = self.trust(transport).ok().flatten();
                let asked = strangers::ask(transport, server, security, &mut facts.strangers);
                self.note(transport, asked.map_err(describe_error));
            }
        }
        self.judge_attack(&facts);
        self.report.attack = Some(facts);
    }

    fn note(&mut self, transport: ClientTransport, asked: Result<(), String>) {
        if let Err(what) = asked {
            self.report.note("attack", format!("{transport}: incomplete: {what}"));
        }
    }

    fn peers_of(
        &self,
        asker: &mut AttackSession<'_>,
        server: SocketAddr,
        is_v6: bool,
        public: &mut Vec<IpAddr>,
    ) -> Result<(), String> {
        let transport = asker.transport;
        let Some((mut session, granted)) = self.allocation(transport, is_v6, RelayedByAttack::Udp)? else {
            return Ok(());
        };
        public.extend(granted.addresses(kind::XOR_RELAYED_ADDRESS).iter().map(SocketAddr::ip));
        let forms: Vec<Form> = forms::all(is_v6, server.ip(), public).collect();
        let renew = || {
            self.allocation(transport, is_v6, RelayedByAttack::Udp).ok().flatten().map(|(session, _)| session)
        };
        asker.datagrams(AT_HOME, &mut session, &forms, &renew)?;
        session.delete();
        self.moved(asker, is_v6, &forms)?;
        if matches!(transport, ClientTransport::Tcp | ClientTransport::Tls) {
            self.connections(asker, is_v6, &forms)?;
        }
        Ok(())
    }

    /// Requests the same peers again after the allocation has moved to another client address.
    fn moved(&self, asker: &mut AttackSession<'_>, is_v6: bool, forms: &[Form]) -> Result<(), String> {
        let transport = asker.transport;
        let Some((old, ticket)) = self.mobile(transport, is_v6)? else { return Ok(()) };
        let Some(mut session) = self.session(transport) else { return Ok(()) };
        let mut broken = ticket.clone();
        if let Some(last) = broken.last_mut() {
            *last ^= 1;
        }
        let zeros = vec![0; ticket.len()];
        for (form, made_up) in [("a changed ticket", &broken), ("a ticket of zeros", &zeros)] {
            let answer = shows(&mut session, made_up).map_err(describe_error)?;
            asker.note_id(AttackEntry::Mobility, form, &answer);
        }
        self.stolen(asker, &ticket)?;
        let answer = shows(&mut session, &ticket).map_err(describe_error)?;
        if answer.is_success() {
            let renew = || {
                let (_old, ticket) = self.mobile(transport, is_v6).ok().flatten()?;
                let mut session = self.session(transport)?;
                shows(&mut session, &ticket).ok()?.is_success().then_some(session)
            };
            asker.datagrams(AFTER_A_MOVE, &mut session, forms, &renew)?;
        }
        drop(old);
        session.delete();
        Ok(())
    }

    fn stolen(&self, asker: &mut AttackSession<'_>, ticket: &[u8]) -> Result<(), String> {
        let Some(thief) = self.config.attack_user.clone() else { return Ok(()) };
        let Some(mut session) = self.session_of(Some(thief), asker.transport) else { return Ok(()) };
        let answer = shows(&mut session, ticket).map_err(describe_error)?;
        asker.note_theft("another user's ticket", &answer);
        let answer = session.request(method::REFRESH, &|message| {
            message.attribute(kind::MOBILITY_TICKET, ticket).number(kind::LIFETIME, 0);
        });
        asker.note_theft("another user's ticket, to delete the allocation", &answer.map_err(describe_error)?);
        Ok(())
    }

    fn mobile(
        &self,
        transport: ClientTransport,
        is_v6: bool,
    ) -> Result<Option<(ProbeSession, Vec<u8>)>, String> {
        let Some((mut session, granted)) = self.allocation(transport, is_v6, RelayedByAttack::Mobile)? else {
            return Ok(None);
        };
        match granted.value(kind::MOBILITY_TICKET).filter(|ticket| !ticket.is_empty()) {
            Some(ticket) => Ok(Some((session, ticket.to_vec()))),
            None => {
                session.delete();
                Ok(None)
            }
        }
    }

    fn connections(&self, asker: &mut AttackSession<'_>, is_v6: bool, forms: &[Form]) -> Result<(), String> {
        let transport = asker.transport;
        let Some((mut session, _)) = self.allocation(transport, is_v6, RelayedByAttack::Tcp)? else {
            return Ok(());
        };
        for form in forms {
            for port in asker.ports {
                let peer = SocketAddr::new(form.ip, *port);
                let answer = session
                    .request(method::CONNECT, &|message| {
                        message.xor_address(kind::XOR_PEER_ADDRESS, peer);
                    })
                    .map_err(describe_error)?;
                asker.note(AttackEntry::Connect, form, *port, &answer);
            }
        }
        for id in MADE_UP_IDS {
            let Some(mut other) = self.session(transport) else { return Ok(()) };
            let bound = other.request(method::CONNECTION_BIND, &|message| {
                message.attribute(kind::CONNECTION_ID, &id.to_be_bytes());
            });
            if let Ok(answer) = bound {
                asker.note_id(AttackEntry::ConnectionBind, "an unknown connection ID", &answer);
            }
        }
        session.delete();
        Ok(())
    }

    fn allocation(
        &self,
        transport: ClientTransport,
        is_v6: bool,
        relayed: RelayedByAttack,
    ) -> Result<Option<(ProbeSession, ServerAnswer)>, String> {
        let Some(mut session) = self.session(transport) else { return Ok(None) };
        let granted = session.request(method::ALLOCATE, &|message| {
            let protocol = if relayed == RelayedByAttack::Tcp { 6 } else { 17 };
            message.attribute(kind::REQUESTED_TRANSPORT, &[protocol, 0, 0, 0]);
            if is_v6 {
                message.attribute(kind::REQUESTED_ADDRESS_FAMILY, &[FAMILY_IPV6, 0, 0, 0]);
            }
            if relayed == RelayedByAttack::Mobile {
                message.attribute(kind::MOBILITY_TICKET, &[]);
            }
        });
        let granted = granted.map_err(describe_error)?;
        match granted.code() {
            None => Ok(Some((session, granted))),
            // These codes mean that the server does not support the address family, the transport or mobility.
            Some(400 | 405 | 420 | 440 | 442) => Ok(None),
            Some(_) => Err(format!("no allocation: {}", granted.describe())),
        }
    }

    fn judge_attack(&mut self, facts: &AttackFacts) {
        let open = facts.peers.iter().filter(|attempt| attempt.outcome == AttackOutcome::Open);
        let mut by_entry: HashMap<(AttackEntry, &str), Vec<&str>> = HashMap::new();
        for attempt in open {
            by_entry.entry((attempt.entry, attempt.form.as_str())).or_default().push(&attempt.transport);
        }
        let mut open: Vec<_> = by_entry.into_iter().collect();
        open.sort();
        for ((entry, form), mut transports) in open {
            transports.dedup();
            let remedy = if form.contains("ticket") || form.contains("connection ID") {
                "users can take over allocations and connections of others: make the server refuse such requests"
            } else {
                "any user can reach services that trust the server's own machine or network: make the server refuse such peers"
            };
            let what = format!("{entry} lets users reach {form} (over {})", transports.join(", "));
            self.report.bad("attack", what, remedy);
        }
        let count = |wanted: fn(AttackOutcome) -> bool| {
            facts.peers.iter().filter(|attempt| wanted(attempt.outcome)).count()
        };
        let asked = facts.peers.len();
        let (closed, silent) =
            (count(|it| it != AttackOutcome::Open), count(|it| it == AttackOutcome::Silent));
        if asked > 0 {
            let level = if closed == asked { FindingLevel::Ok } else { FindingLevel::Note };
            let mut what = format!("{closed} of {asked} attempts to reach forbidden peers failed");
            if silent > 0 {
                what += &format!(
                    ", but {silent} of these (Send) are uncertain, because a peer that does not reply looks the same"
                );
            }
            self.report.line(level, "attack", what);
        }
        let worst = facts.strangers.iter().max_by(|one, other| one.ratio.total_cmp(&other.ratio));
        if let Some(AttackReply { message, ratio, sent, received, .. }) = worst {
            let what = format!(
                "sends unauthenticated clients at most {ratio:.1} bytes per byte received ({message}: {received} for {sent})"
            );
            if *ratio > MOST_AMPLIFICATION {
                let remedy = "an attacker with forged source addresses can amplify a flood through this server: shorten the realm, or omit SOFTWARE";
                self.report.warn("attack", what, remedy);
            } else {
                self.report.ok("attack", what);
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum RelayedByAttack {
    Udp,
    Tcp,
    Mobile,
}

struct AttackSession<'a> {
    transport: ClientTransport,
    ports: &'a [u16],
    found: &'a mut Vec<Attempt>,
}

impl AttackSession<'_> {
    fn datagrams(
        &mut self,
        entries: Entries,
        session: &mut ProbeSession,
        forms: &[Form],
        renew: &dyn Fn() -> Option<ProbeSession>,
    ) -> Result<(), String> {
        let mut number = FIRST_CHANNEL;
        for form in forms {
            for &port in self.ports {
                let peer = SocketAddr::new(form.ip, port);
                let mut permitted = permission(session, peer).map_err(describe_error)?;
                if permitted.code() == Some(508) {
                    // The peers granted so far have used up the allocation's permissions or channels.
                    session.delete();
                    let Some(next) = renew() else {
                        return Err("the server granted no more allocations".to_owned());
                    };
                    *session = next;
                    permitted = permission(session, peer).map_err(describe_error)?;
                }
                self.note(entries.permission, form, port, &permitted);
                let [high, low] = number.to_be_bytes();
                let bound = session.request(method::CHANNEL_BIND, &|message| {
                    let channel = message.attribute(kind::CHANNEL_NUMBER, &[high, low, 0, 0]);
                    channel.xor_address(kind::XOR_PEER_ADDRESS, peer);
                });
                let bound = bound.map_err(describe_error)?;
                number += u16::from(bound.is_success());
                self.note(entries.channel, form, port, &bound);
                self.send(entries.send, session, form, port)?;
            }
        }
        self.returned(session)
    }

    fn send(
        &mut self,
        entry: AttackEntry,
        session: &mut ProbeSession,
        form: &Form,
        port: u16,
    ) -> Result<(), String> {
        let peer = SocketAddr::new(form.ip, port);
        let payload = binding(self.found.len());
        let sent = session.indicate(method::SEND, &|message| {
            message.xor_address(kind::XOR_PEER_ADDRESS, peer).attribute(kind::DATA, &payload);
        });
        sent.map_err(describe_error)?;
        self.add(entry, &form.name, Some(peer), AttackOutcome::Silent, "no reply".to_owned());
        Ok(())
    }

    fn returned(&mut self, session: &mut ProbeSession) -> Result<(), String> {
        let until = Instant::now() + RETURN;
        loop {
            match session.receive_unsolicited(until) {
                Ok(message) => {
                    if let Some(place) = place_in(&message)
                        && let Some(attempt) = self.found.get_mut(place)
                    {
                        attempt.outcome = AttackOutcome::Open;
                        attempt.answer = "the server replied through the relay".to_owned();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::TimedOut => return Ok(()),
                Err(error) => return Err(describe_error(error)),
            }
        }
    }

    fn note(&mut self, entry: AttackEntry, form: &Form, port: u16, answer: &ServerAnswer) {
        let outcome = match answer.code() {
            None if form.is_own && matches!(entry, AttackEntry::CreatePermission | AttackEntry::Mobility) => {
                AttackOutcome::AddressOnly
            }
            None => AttackOutcome::Open,
            Some(403 | 443) => AttackOutcome::Refused,
            // 447 (Connection Timeout or Failure) means that the server tried to connect.
            Some(447) if entry == AttackEntry::Connect => AttackOutcome::Open,
            Some(_) => AttackOutcome::Unknown,
        };
        let peer = SocketAddr::new(form.ip, port);
        self.add(entry, &form.name, Some(peer), outcome, answer.describe());
    }

    fn note_id(&mut self, entry: AttackEntry, form: &str, answer: &ServerAnswer) {
        let outcome = match answer.code() {
            None => AttackOutcome::Open,
            // Authentication failed, so the server did not get as far as checking the peer.
            Some(401 | 438) => AttackOutcome::Unknown,
            Some(_) => AttackOutcome::Refused,
        };
        self.add(entry, form, None, outcome, answer.describe());
    }

    /// Records an attempt to use another user's allocation. Only a 441 (RFC 8656 section 19) means that it was refused for that reason.
    fn note_theft(&mut self, form: &str, answer: &ServerAnswer) {
        let outcome = match answer.code() {
            None => AttackOutcome::Open,
            Some(441) => AttackOutcome::Refused,
            Some(_) => AttackOutcome::Unknown,
        };
        self.add(AttackEntry::Mobility, form, None, outcome, answer.describe());
    }

    fn add(
        &mut self,
        entry: AttackEntry,
        form: &str,
        peer: Option<SocketAddr>,
        outcome: AttackOutcome,
        answer: String,
    ) {
        let (transport, form) = (self.transport.to_string(), form.to_owned());
        let peer = peer.map_or_else(String::new, |peer| peer.to_string());
        self.found.push(Attempt { transport, entry, form, peer, outcome, answer });
    }
}

fn shows(session: &mut ProbeSession, ticket: &[u8]) -> io::Result<ServerAnswer> {
    session.request(method::REFRESH, &|message| _ = message.attribute(kind::MOBILITY_TICKET, ticket))
}

fn permission(session: &mut ProbeSession, peer: SocketAddr) -> io::Result<ServerAnswer> {
    session
        .request(method::CREATE_PERMISSION, &|message| _ = message.xor_address(kind::XOR_PEER_ADDRESS, peer))
}

const MARK: [u8; 4] = *b"tpat";

/// Binding request that contains the index of the attempt in its transaction ID.
fn binding(place: usize) -> Vec<u8> {
    let mut transaction = [0; 12];
    transaction[..4].copy_from_slice(&MARK);
    transaction[4..].copy_from_slice(&(place as u64).to_be_bytes());
    let mut buffer = Vec::new();
    Writer::begin(&mut buffer, Header { class: Class::Request, method: method::BINDING, transaction })
        .finish(false);
    buffer
}

/// Index of the attempt to which this Data indication or ChannelData message responds.
fn place_in(message: &[u8]) -> Option<usize> {
    let data = match message {
        [0x40..=0x4F, _, high, low, rest @ ..] => {
            rest.get(..usize::from(u16::from_be_bytes([*high, *low])))?
        }
        _ => View::new_checked(message).ok()?.get(kind::DATA)?,
    };
    let answer = View::new_checked(data).ok()?;
    let transaction = answer.header().transaction;
    let place = transaction[..].strip_prefix(&MARK)?.try_into().ok()?;
    usize::try_from(u64::from_be_bytes(place)).ok()
}

fn unsigned(method: u16, attributes: &dyn Fn(&mut Writer<'_>)) -> Vec<u8> {
    let mut buffer = Vec::new();
    let header = Header { class: Class::Request, method, transaction: rand::random() };
    let mut message = Writer::begin(&mut buffer, header);
    attributes(&mut message);
    message.finish(false);
    buffer
}
