//! Receives from readable sockets, and produces complete messages in the worker's arena.

use std::io;

use turnpike_net::{ArenaSpan, Rx};
use turnpike_tls::KeyExchangeGroup;
use turnpike_turn::server::{Source, Transport};
use turnpike_wire::{
    client_hello::HANDSHAKE as TLS_HANDSHAKE,
    frame::{self, Frame, FrameError},
    proxy_protocol::{self, MAX_HEADER, Parsed},
};

use super::{
    CloseReason, Connection, ConnectionStage, HandshakeFailure, OVERHEAD, Streams,
    channel::{self, Channel, Fed, is_nothing},
    connection::PORTION,
    hand_on::{HandOnChoice, is_stun},
    tls,
};

pub(crate) struct Incoming {
    pub(crate) slot: usize,
    pub(crate) source: Source,
    pub(crate) rest: ArenaSpan,
}

impl Streams {
    /// Arena space required by [`Streams::receive`].
    pub(crate) const ROOM: usize = 3 << 16;

    /// Reads once; returns `None` if there is no complete message. Once the tick's share is used up, it reads
    /// nothing, and the poller reports the socket again.
    pub(crate) fn receive(&mut self, slot: usize, now_ms: u64, rx: &mut Rx) -> Option<Incoming> {
        if self.share_left == 0 {
            self.first_put_off.get_or_insert(slot);
            return None;
        }
        self.share_left -= 1;
        let connection = self.connections.get_mut(slot).filter(|connection| connection.closing.is_none())?;
        let read = match (&connection.channel, connection.stage) {
            (Channel::Tls(_), _) => self.read_tls(slot, rx),
            (Channel::Plain, ConnectionStage::Open) => self.read_plain(slot, rx),
            (Channel::Plain, _) => self.read_first(slot, now_ms, rx),
        };
        match read {
            Ok(Some(rest)) => Some(Incoming { slot, source: self.connections.get(slot)?.source(slot), rest }),
            Ok(None) => {
                self.close_if_ended(slot);
                None
            }
            Err(reason) => {
                self.close(slot, reason);
                None
            }
        }
    }

    #[inline]
    pub(crate) fn next(&mut self, incoming: &mut Incoming, now_ms: u64, rx: &Rx) -> Option<ArenaSpan> {
        let connection = self.connections.get_mut(incoming.slot)?;
        if connection.closing.is_some() {
            return None;
        }
        let bytes = rx.bytes(incoming.rest);
        match frame::first(bytes, connection.limit()) {
            #[expect(clippy::cast_possible_truncation, reason = "within the arena")]
            Ok(Frame::Message { len, next }) => {
                let message = ArenaSpan { offset: incoming.rest.offset, len: len as u32 };
                incoming.rest.offset += next as u32;
                incoming.rest.len -= next as u32;
                connection.spoke = true;
                self.share_left = self.share_left.saturating_sub(1);
                if !connection.allocated {
                    connection.deadline_ms = now_ms + self.config.limits.idle_ms();
                }
                self.stats.received += 1;
                Some(message)
            }
            Ok(Frame::Unfinished { wanted }) => {
                connection.framer.hold(bytes, wanted);
                self.close_if_ended(incoming.slot);
                None
            }
            Err(error) => {
                self.close(incoming.slot, reason_of(error));
                None
            }
        }
    }

    fn read_plain(&mut self, slot: usize, rx: &mut Rx) -> Result<Option<ArenaSpan>, CloseReason> {
        let connection = &mut self.connections[slot];
        self.stats.reads += 1;
        let held = connection.framer.held().len();
        let portion = connection.portion();
        let read = rx.fill(held, |room| {
            let most = room.len().min(portion);
            connection.socket.read(&mut room[..most])
        });
        let Some(span) = received(read)? else { return Ok(None) };
        self.stats.read_bytes += u64::from(span.len);
        Ok(connection.together(span, rx))
    }

    fn read_first(
        &mut self,
        slot: usize,
        now_ms: u64,
        rx: &mut Rx,
    ) -> Result<Option<ArenaSpan>, CloseReason> {
        let connection = &mut self.connections[slot];
        // The next bytes may be a ClientHello, perhaps after a PROXY header, so reading has to wait.
        if self.handshakes_left == 0 {
            self.first_put_off.get_or_insert(slot);
            return Ok(None);
        }
        self.stats.reads += 1;
        let held = connection.framer.held().len();
        let portion = connection.portion();
        let read = rx.fill(held, |room| {
            let most = room.len().min(portion);
            connection.socket.read(&mut room[..most])
        });
        let Some(mut span) = received(read)? else { return Ok(None) };
        self.stats.read_bytes += u64::from(span.len);
        let Some(joined) = connection.together(span, rx) else { return Ok(None) };
        span = joined;
        if connection.stage == ConnectionStage::Proxied {
            let Some(rest) = self.read_proxy_header(slot, now_ms, span, rx)? else { return Ok(None) };
            span = rest;
        } else if proxy_protocol::is_begun(rx.bytes(span)) == Some(true) {
            return Err(CloseReason::UntrustedProxy);
        }
        match self.choose(slot, rx.bytes(span)) {
            HandOnChoice::Turn => {}
            HandOnChoice::Incomplete { wanted } => {
                self.connections[slot].framer.hold(rx.bytes(span), wanted);
                return Ok(None);
            }
            HandOnChoice::HandOn => {
                self.connections[slot].framer.hold(rx.bytes(span), 0);
                return Ok(None);
            }
        }
        let connection = &mut self.connections[slot];
        let listener = &self.listeners[connection.listener];
        match rx.bytes(span).first() {
            None => {
                connection.framer.hold(&[], 0);
                Ok(None)
            }
            Some(&TLS_HANDSHAKE) => {
                let tls = self.config.tls.as_ref().ok_or(CloseReason::NoCertificate)?;
                let tls = tls.connect().map_err(|_| CloseReason::Handshake)?;
                connection.channel = Channel::Tls(Box::new(tls));
                connection.stage = ConnectionStage::Handshake;
                connection.framer.hold(&[], 0);
                let hello = rx.bytes(span);
                self.scratch.resize(PORTION, 0);
                self.scratch[..hello.len()].copy_from_slice(hello);
                self.decrypt(slot, hello.len(), rx)
            }
            Some(_) if listener.tls_only => {
                let is_stun = is_stun(rx.bytes(span));
                Err(if is_stun { CloseReason::PlainStun } else { CloseReason::PlainRefused })
            }
            Some(_) => {
                connection.framer.hold(&[], 0);
                let supersedes = self.open(slot)?;
                self.stats.plain += 1;
                if supersedes {
                    self.postpone(slot, span, rx);
                    return Ok(None);
                }
                Ok(Some(span))
            }
        }
    }

    fn read_proxy_header(
        &mut self,
        slot: usize,
        now_ms: u64,
        span: ArenaSpan,
        rx: &Rx,
    ) -> Result<Option<ArenaSpan>, CloseReason> {
        let connection = &mut self.connections[slot];
        let bytes = rx.bytes(span);
        match proxy_protocol::parse(bytes) {
            Parsed::Incomplete if bytes.len() < MAX_HEADER => {
                connection.framer.hold(bytes, 0);
                Ok(None)
            }
            Parsed::Incomplete | Parsed::Malformed => Err(CloseReason::ProxyHeader),
            Parsed::Header(len, addresses) => {
                if let Some((source, destination)) = addresses {
                    connection.client.address = source;
                    connection.client.local = destination;
                    connection.proxied = true;
                }
                connection.stage = ConnectionStage::Unknown;
                let address = connection.client.address.ip();
                if connection.proxied && !self.config.clients.admits(address) {
                    return Err(CloseReason::ClientRefused);
                }
                self.count_for(slot, address, now_ms)?;
                #[expect(clippy::cast_possible_truncation, reason = "at most MAX_HEADER")]
                let len = len as u32;
                Ok(Some(ArenaSpan { offset: span.offset + len, len: span.len - len }))
            }
        }
    }

    fn read_tls(&mut self, slot: usize, rx: &mut Rx) -> Result<Option<ArenaSpan>, CloseReason> {
        let connection = &mut self.connections[slot];
        if connection.stage == ConnectionStage::Handshake && self.handshakes_left == 0 {
            self.first_put_off.get_or_insert(slot);
            return Ok(None);
        }
        self.stats.reads += 1;
        self.scratch.resize(PORTION, 0);
        let portion = connection.portion();
        let read = match connection.socket.read(&mut self.scratch[..portion]) {
            Ok(0) => return Err(CloseReason::Client),
            Ok(len) => len,
            Err(error) if is_nothing(&error) => return Ok(None),
            Err(_) => return Err(CloseReason::Broken),
        };
        self.stats.read_bytes += read as u64;
        self.decrypt(slot, read, rx)
    }

    fn decrypt(&mut self, slot: usize, len: usize, rx: &mut Rx) -> Result<Option<ArenaSpan>, CloseReason> {
        let connection = &mut self.connections[slot];
        let Channel::Tls(tls) = &mut connection.channel else { return Ok(None) };
        let mut fed = Fed::default();
        let filled = rx.fill(connection.framer.held().len(), |room| {
            fed = channel::feed(tls, &self.scratch[..len], room);
            Ok(fed.plain)
        });
        let overhead = len.saturating_sub(fed.plain) / OVERHEAD;
        self.share_left = self.share_left.saturating_sub(overhead);
        connection.ended = fed.ended;
        connection.barren = if fed.plain > 0 { 0 } else { connection.barren } + fed.barren;
        let wants_write = tls.wants_write();
        let mut opened = None;
        if connection.stage == ConnectionStage::Handshake {
            self.handshakes_left = self.handshakes_left.saturating_sub(1);
            if fed.error.is_none() && !tls.is_handshaking() && tls::is_challenge(tls) {
                return Err(CloseReason::Challenge);
            }
            let own = self.config.tls.as_ref().filter(|_| fed.error.is_none() && !tls.is_handshaking());
            if own.is_some_and(|own| own.lacks_certificate(tls)) {
                return Err(self.handshake_failed(slot, HandshakeFailure::ClientCertificate));
            }
            opened = (!tls.is_handshaking()).then(|| {
                (
                    channel::was_resumed(tls),
                    KeyExchangeGroup::of(tls),
                    self.layout.number(Transport::Tls, connection.listener, tls.server_name()),
                )
            });
        }
        if wants_write {
            self.touch(slot);
        }
        if let Some(error) = fed.error {
            if self.connections[slot].stage != ConnectionStage::Handshake {
                return Err(CloseReason::Tls);
            }
            return Err(self.handshake_failed(slot, channel::failure(&error)));
        }
        let connection = &mut self.connections[slot];
        if opened.is_none() && connection.barren > channel::BARREN_LIMIT {
            if connection.stage != ConnectionStage::Handshake {
                return Err(CloseReason::Tls);
            }
            return Err(self.handshake_failed(slot, HandshakeFailure::TooLong));
        }
        if let Some((resumed, group, listener)) = opened {
            connection.barren = 0;
            connection.client.listener = listener;
            let supersedes = self.open(slot)?;
            if resumed {
                self.stats.handshakes_resumed += 1;
            } else {
                self.stats.handshakes_full += 1;
            }
            if let Some(group) = group {
                self.stats.handshakes_by_group[group as usize] += 1;
            }
            if supersedes {
                self.postpone(slot, filled.map_err(|_| CloseReason::Tls)?, rx);
                return Ok(None);
            }
        }
        let span = filled.map_err(|_| CloseReason::Tls)?;
        if span.len == 0 {
            return Ok(None);
        }
        Ok(self.connections[slot].together(span, rx))
    }

    fn handshake_failed(&mut self, slot: usize, why: HandshakeFailure) -> CloseReason {
        self.stats.handshakes_failed[why as usize] += 1;
        self.connections[slot].failure = Some(why);
        CloseReason::Handshake
    }

    /// Registers a client's connection. Returns true if it replaces one with the same 5-tuple; the state
    /// machine must first handle the end of the older connection.
    fn open(&mut self, slot: usize) -> Result<bool, CloseReason> {
        let connection = &self.connections[slot];
        let client = connection.client;
        let older = self.slot_of(&client);
        if let Some(older) = older {
            if connection.proxied && !self.connections[older].has_ended() {
                if connection.stage == ConnectionStage::Handshake {
                    self.stats.handshakes_failed[HandshakeFailure::Other as usize] += 1;
                }
                return Err(CloseReason::Duplicate);
            }
            self.supersede(older);
        }
        self.by_client.insert(client, slot);
        self.connections[slot].stage = ConnectionStage::Open;
        // Connections that ended in this tick have already been removed.
        Ok(older.is_some() || self.gone.iter().any(|gone| gone.client == client))
    }

    /// Holds the received bytes until the end of the tick, when the state machine has handled ended
    /// connections.
    fn postpone(&mut self, slot: usize, span: ArenaSpan, rx: &Rx) {
        let connection = &mut self.connections[slot];
        connection.framer.hold(rx.bytes(span), 0);
        connection.paused = true;
        self.paused.insert((0, slot, connection.generation));
    }

    pub(crate) fn close_if_ended(&mut self, slot: usize) {
        if self.connections.get(slot).is_some_and(|connection| connection.ended) {
            self.close(slot, CloseReason::Client);
        }
    }
}

impl Connection {
    /// Joins held and received bytes; returns them if they contain a complete message or an error.
    pub(super) fn together(&mut self, span: ArenaSpan, rx: &mut Rx) -> Option<ArenaSpan> {
        if !self.framer.completes(rx.bytes(span)) {
            return None;
        }
        Some(rx.join(self.framer.held(), span))
    }
}

fn received(read: io::Result<ArenaSpan>) -> Result<Option<ArenaSpan>, CloseReason> {
    match read {
        Ok(span) if span.len == 0 => Err(CloseReason::Client),
        Ok(span) => Ok(Some(span)),
        Err(error) if is_nothing(&error) => Ok(None),
        Err(_) => Err(CloseReason::Broken),
    }
}

fn reason_of(error: FrameError) -> CloseReason {
    match error {
        FrameError::NotStun => CloseReason::NotStun,
        FrameError::Length => CloseReason::Length,
        FrameError::TooLong => CloseReason::TooLong,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        net::{Ipv4Addr, SocketAddr, TcpStream},
        sync::Arc,
        time::{Duration, Instant},
    };

    use hashbrown::HashMap;
    use turnpike_net::{Datapath, Event, Poller, TcpListener};

    use super::*;
    use crate::{
        Layout, StreamConfig,
        link::ClientLinkKind,
        stream::{Gone, SHARE, StreamToken, listen_options},
    };

    const BINDING: [u8; 20] = [0, 1, 0, 0, 0x21, 0x12, 0xA4, 0x42, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7];

    fn ready(token: u64) -> Event {
        Event { token, readable: true, writable: false, error: false, closed: false, priority: false }
    }

    struct Bench {
        streams: Streams,
        poller: Poller,
        rx: Rx,
        at: SocketAddr,
    }

    fn bench(change: impl FnOnce(&mut StreamConfig)) -> Bench {
        let any = (Ipv4Addr::LOCALHOST, 0).into();
        let mut config = StreamConfig { listen: vec![any], ..StreamConfig::default() };
        change(&mut config);
        let socket = TcpListener::bind(any, &listen_options()).unwrap();
        let at = socket.local_addr();
        let poller = Poller::new().unwrap();
        let layout = Arc::new(Layout::new(&[], &[], &config));
        let mut streams = Streams::new(layout, Arc::new(config), 1);
        streams.listen(0, socket, &poller).unwrap();
        Bench { streams, poller, rx: Rx::new(Datapath::Mmsg), at }
    }

    impl Bench {
        fn clients(&mut self, count: usize, words: &[u8]) -> (Vec<TcpStream>, Vec<usize>) {
            let clients: Vec<TcpStream> = (0..count)
                .map(|_| {
                    let mut client = TcpStream::connect(self.at).unwrap();
                    client.write_all(words).unwrap();
                    client
                })
                .collect();
            let (mut slots, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(20));
            while slots.len() < count {
                assert!(Instant::now() < deadline, "{} of {count} were accepted", slots.len());
                self.poller.wait(Some(Duration::from_millis(10))).unwrap();
                self.streams.accept(0, 0, &self.poller);
                slots.extend(std::iter::from_fn(|| self.streams.next_accepted()));
            }
            (clients, slots)
        }

        fn read(&mut self, slot: usize) -> usize {
            self.rx.reset();
            let Some(mut incoming) = self.streams.receive(slot, 0, &mut self.rx) else { return 0 };
            std::iter::from_fn(|| self.streams.next(&mut incoming, 0, &self.rx)).count()
        }
    }

    #[test]
    fn next_tick_continues_with_the_remaining_connections() {
        let mut bench = bench(|_| {});
        let (_clients, slots) = bench.clients(40, &BINDING.repeat(2000));
        // Relay sockets are always ready too, and their events come first.
        let relays = (0..200).map(ready);
        let streams = slots.iter().map(|slot| ready(StreamToken::Connection(*slot).get()));
        let events: Vec<Event> = relays.chain(streams).collect();
        let mut total = HashMap::new();
        for tick in 0..5 {
            let mut events = events.clone();
            let first = bench.streams.begin_tick(&events);
            events.rotate_left(first);
            let mut taken = 0;
            for event in events {
                let Some(StreamToken::Connection(slot)) = StreamToken::of(event.token) else { continue };
                // Allows more handshakes, as the flush at the end of a tick does.
                bench.streams.handshakes_left = 4;
                let messages = bench.read(slot);
                *total.entry(slot).or_insert(0) += messages;
                taken += messages;
            }
            let most = SHARE + 4096 / BINDING.len();
            assert!(taken > 1000 && taken <= most, "{taken} messages in tick {tick}");
        }
        assert!(slots.iter().all(|slot| total[slot] > 0), "{total:?}");
    }

    #[test]
    fn link_of_a_closed_connection_never_reaches_a_later_one() {
        let mut bench = bench(|_| {});
        let (_clients, slots) = bench.clients(1, &BINDING);
        bench.read(slots[0]);
        let place = |bench: &Bench| match ClientLinkKind::of(
            bench.streams.connections[slots[0]].source(slots[0]).link,
        ) {
            ClientLinkKind::Stream(place) => place,
            other => panic!("{other:?}"),
        };
        let gone = place(&bench);
        assert!(bench.streams.serves(gone));
        bench.streams.remove(slots[0], CloseReason::Client);
        assert!(!bench.streams.serves(gone));
        let (_others, again) = bench.clients(1, &BINDING);
        assert_eq!(again, slots, "the slot is reused");
        assert!(!bench.streams.serves(gone) && bench.streams.serves(place(&bench)));
        bench.streams.reply(gone, &BINDING);
        assert_eq!(bench.streams.stats.sent, 0);
    }

    fn client_from(local: SocketAddr, to: SocketAddr) -> TcpStream {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.set_linger(Some(Duration::ZERO)).unwrap();
        socket.bind(&local.into()).unwrap();
        socket.connect(&to.into()).unwrap();
        socket.into()
    }

    fn accepted(bench: &mut Bench, local: SocketAddr, words: &[u8]) -> (TcpStream, usize) {
        let mut client = client_from(local, bench.at);
        client.write_all(words).unwrap();
        let slot = turnpike_testkit::eventually("the connection is accepted", || {
            bench.streams.accept(0, 0, &bench.poller);
            bench.streams.next_accepted()
        });
        (client, slot)
    }

    #[test]
    fn connection_replaces_one_that_its_client_has_reset() {
        let mut bench = bench(|_| {});
        let (older, slot) = accepted(&mut bench, (Ipv4Addr::LOCALHOST, 0).into(), &BINDING);
        assert_eq!(bench.read(slot), 1);
        let local = older.local_addr().unwrap();
        drop(older);
        let (_newer, newer_slot) = accepted(&mut bench, local, &BINDING);
        assert_eq!(
            bench.read(newer_slot),
            0,
            "the state machine must handle the end of the old connection first"
        );
        assert_eq!(bench.streams.connections[newer_slot].closing, None);
        assert_eq!(bench.streams.connections[slot].closing, Some(CloseReason::Broken));
        let client = bench.streams.connections[newer_slot].client;
        let gone = Gone { client, closed: None };
        assert_eq!((bench.streams.next_gone(), bench.streams.next_gone()), (Some(gone), None));
        assert_eq!(bench.streams.poll_timeout(), Some(0));
        assert_eq!(bench.streams.next_resumed(0), Some(newer_slot));
        bench.rx.reset();
        let mut incoming = bench.streams.go_on(newer_slot, &mut bench.rx).unwrap();
        assert!(bench.streams.next(&mut incoming, 0, &bench.rx).is_some());
        bench.streams.remove(slot, CloseReason::Broken);
        assert_eq!(bench.streams.next_gone(), None);
        assert_eq!(bench.streams.slot_of(&client), Some(newer_slot));
    }

    #[test]
    fn end_of_a_connection_is_reported_before_its_replacement() {
        let mut bench = bench(|_| {});
        let (older, slot) = accepted(&mut bench, (Ipv4Addr::LOCALHOST, 0).into(), &BINDING);
        assert_eq!(bench.read(slot), 1);
        let local = older.local_addr().unwrap();
        drop(older);
        bench.streams.remove(slot, CloseReason::Broken);
        let (_newer, newer_slot) = accepted(&mut bench, local, &BINDING);
        assert_eq!(bench.read(newer_slot), 0);
        assert!(bench.streams.next_gone().is_some());
        assert_eq!(bench.streams.next_resumed(0), Some(newer_slot));
    }

    #[test]
    fn proxied_connection_replaces_only_an_ended_one() {
        let mut bench = bench(|config| config.proxies = vec!["127.0.0.0/8".parse().unwrap()]);
        let words = [&b"PROXY TCP4 192.0.2.1 198.51.100.1 4000 443\r\n"[..], &BINDING].concat();
        let any = (Ipv4Addr::LOCALHOST, 0).into();
        let (older, slot) = accepted(&mut bench, any, &words);
        assert_eq!(bench.read(slot), 1);
        let (_second, second_slot) = accepted(&mut bench, any, &words);
        bench.read(second_slot);
        assert_eq!(bench.streams.connections[second_slot].closing, Some(CloseReason::Duplicate));
        drop(older);
        let (_third, third_slot) = accepted(&mut bench, any, &words);
        bench.read(third_slot);
        assert_eq!(bench.streams.connections[third_slot].closing, None);
        assert_eq!(bench.streams.connections[slot].closing, Some(CloseReason::Broken));
    }

    #[test]
    fn tick_without_deferred_connections_starts_with_the_first_event() {
        let mut bench = bench(|_| {});
        let (_clients, slots) = bench.clients(2, &BINDING);
        let events = [0, 1].map(|index| ready(StreamToken::Connection(slots[index]).get()));
        for _ in 0..3 {
            assert_eq!(bench.streams.begin_tick(&events), 0);
            bench.read(slots[0]);
        }
    }

    #[test]
    fn handshakes_behind_a_proxy_header_are_limited_per_tick() {
        let mut bench = bench(|config| config.proxies = vec!["127.0.0.0/8".parse().unwrap()]);
        let header = b"PROXY TCP4 192.0.2.1 198.51.100.1 4000 443\r\n";
        let (_clients, slots) = bench.clients(1, &[&header[..], &[TLS_HANDSHAKE, 3, 1, 0, 5]].concat());
        bench.streams.begin_tick(&[]);
        bench.streams.handshakes_left = 0;
        bench.read(slots[0]);
        assert_eq!(bench.streams.stats.reads, 0);
        let events = [3, StreamToken::Connection(slots[0]).get()].map(ready);
        assert_eq!(bench.streams.begin_tick(&events), 1, "the next tick starts with the deferred connection");
        bench.streams.handshakes_left = 1;
        bench.read(slots[0]);
        assert_eq!(bench.streams.stats.reads, 1);
        let connection = &bench.streams.connections[slots[0]];
        assert_eq!(connection.closing, Some(CloseReason::NoCertificate), "the connection was handled");
    }

    #[test]
    fn only_connections_without_an_allocation_are_swept() {
        let mut bench = bench(|_| {});
        let (_clients, slots) = bench.clients(2, &BINDING);
        for slot in &slots {
            bench.read(*slot);
        }
        let client = bench.streams.connections[slots[0]].client;
        bench.streams.allocated(&client);
        assert_eq!(bench.streams.idle.slots().collect::<Vec<_>>(), [slots[1]]);
        bench.streams.released(0, &client);
        assert_eq!(bench.streams.idle.slots().collect::<Vec<_>>(), [slots[1], slots[0]]);
        for slot in slots {
            bench.streams.remove(slot, CloseReason::Client);
        }
        assert!(bench.streams.idle.is_empty());
    }
}
