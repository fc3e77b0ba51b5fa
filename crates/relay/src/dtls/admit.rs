//! ClientHello: answered without a trace, or admitted.

use std::sync::Arc;

use turnpike_net::Tx;
use turnpike_turn::server::{Client, Transport};

use super::{
    Associations,
    association::{self, Association, Stage},
    hello::{self, Hello, HelloError, Version},
    record::{self, ALERT, Sifted},
    stats::{DtlsDrop, DtlsEnd, DtlsFailure},
};

const FATAL: u8 = 2;
const HANDSHAKE_FAILURE: u8 = 40;
const PROTOCOL_VERSION: u8 = 70;

impl Associations {
    /// Takes a ClientHello. Where an association has something to say afterwards, its slot.
    pub(super) fn take_hello(
        &mut self,
        now_ms: u64,
        client: Client,
        datagram: &[u8],
        tx: &mut Tx,
    ) -> Option<usize> {
        let hello = match Hello::parse(datagram) {
            Ok(hello) => hello,
            Err(error) => {
                match error {
                    HelloError::Fragmented => self.count_drop(DtlsDrop::Fragmented),
                    HelloError::Malformed => self.count_drop(DtlsDrop::Malformed),
                    HelloError::TooLong => self.count_drop(DtlsDrop::TooLong),
                    HelloError::Version => self.refuse(&client, datagram, DtlsFailure::Version, tx),
                    HelloError::KeyShare => self.refuse(&client, datagram, DtlsFailure::KeyShare, tx),
                }
                return None;
            }
        };
        if hello.cookie.is_none() {
            self.answer(now_ms, client, &hello, datagram, tx);
            return None;
        }
        if let Some(slot) = self.slot_of(&client)
            && self.table[slot].random == hello.random
        {
            // Our answer was lost, or this was long on its way.
            return self.feed(now_ms, &client, datagram);
        }
        self.admit(now_ms, client, &hello, datagram, tx)
    }

    /// Sends a cookie and keeps nothing.
    fn answer(&mut self, now_ms: u64, client: Client, hello: &Hello<'_>, datagram: &[u8], tx: &mut Tx) {
        let (now, now_unix) = (self.instant(now_ms), self.unix(now_ms));
        let Some(context) = &self.config.context else { return };
        let [body, packet] = &mut self.hello;
        let cookie = self.cookies.make(now_unix, &client, hello, body);
        hello::write_packet(hello.sequence, body, packet);
        let begun = context.begin(now, hello, packet, cookie, &mut self.answer);
        let why = begun.err().map(|error| association::failure(&error));
        if let Some(why) = why {
            return self.refuse(&client, datagram, why, tx);
        }
        // dimpl says nothing to what it cannot read.
        if self.answer.is_empty() {
            return self.count_drop(DtlsDrop::Malformed);
        }
        // Nobody knows yet whether the client is where it says it is.
        if self.answer.len() > datagram.len() {
            return self.count_drop(DtlsDrop::Amplification);
        }
        self.stats.cookies += 1;
        tx.push_bytes(&self.route(self.place(&client), &client), &self.answer);
    }

    /// Tells a client that there is nothing in common, which it would find out by waiting otherwise. The alert is shorter than any
    /// ClientHello.
    fn refuse(&mut self, client: &Client, datagram: &[u8], why: DtlsFailure, tx: &mut Tx) {
        self.stats.failed[why as usize] += 1;
        let description = match why {
            DtlsFailure::Version => PROTOCOL_VERSION,
            _ => HANDSHAKE_FAILURE,
        };
        let mut alert = [0; 15];
        alert[0] = ALERT;
        // Old clients want to see their own version.
        alert[1..3].copy_from_slice(&datagram[1..3]);
        alert[12] = 2;
        alert[13] = FATAL;
        alert[14] = description;
        tx.push_bytes(&self.route(self.place(client), client), &alert);
    }

    fn admit(
        &mut self,
        now_ms: u64,
        client: Client,
        hello: &Hello<'_>,
        datagram: &[u8],
        tx: &mut Tx,
    ) -> Option<usize> {
        let (now, now_unix) = (self.instant(now_ms), self.unix(now_ms));
        let context = Arc::clone(self.config.context.as_ref()?);
        let [body, packet] = &mut self.hello;
        let Some(cookie) = self.cookies.check(now_unix, &client, hello, body) else {
            // DTLS 1.2 clients may be given another; to those of DTLS 1.3 a second HelloRetryRequest is an error.
            if hello.version == Version::V12 && !self.by_client.contains_key(&client) {
                self.answer(now_ms, client, hello, datagram, tx);
            }
            self.count_drop(DtlsDrop::BadCookie);
            return None;
        };
        if self.admissions_left == 0 {
            self.count_drop(DtlsDrop::Busy);
            return None;
        }
        self.admissions_left -= 1;
        hello::write_packet(hello.sequence.saturating_sub(1), body, packet);
        let (Sifted::Whole(second) | Sifted::Rest(second)) =
            record::without_plain_alerts(datagram, &mut self.sifted);
        let accepted = context.accept(now, hello, [packet, second], cookie, &mut self.answer);
        let dtls = match accepted {
            Ok(dtls) => dtls,
            Err(error) => {
                let why = association::failure(&error);
                self.noted.note(client.address, Transport::Dtls, "dtls_handshake", why.into());
                self.refuse(&client, datagram, why, tx);
                return None;
            }
        };
        // RFC 6347 section 4.2.8: whoever begins anew and shows that it hears us replaces what it had.
        if let Some(slot) = self.slot_of(&client) {
            if self.table[slot].is_open() {
                self.remove(slot, DtlsEnd::Replaced);
            } else {
                self.fail(slot, DtlsFailure::Other);
            }
        }
        let address = client.address.ip();
        if let Some(slot) = self.half_open.in_the_way(address) {
            self.fail(slot, DtlsFailure::Evicted);
        }
        let deadline_ms = now_ms + self.config.handshake_ms;
        let place = self.place(&client);
        let slot = self.table.insert(Association {
            dtls,
            client,
            place,
            generation: self.generations.draw(),
            listener: self.layout.number(Transport::Dtls, place, hello.server_name),
            random: hello.random,
            stage: Stage::HalfOpen(0),
            alerted: false,
            deadline_ms,
            timer_ms: u64::MAX,
            armed_ms: u64::MAX,
        });
        let number = self.half_open.enter(slot, address);
        self.table[slot].stage = Stage::HalfOpen(number);
        self.by_client.insert(client, slot);
        self.last = None;
        self.arm(slot);
        Some(slot)
    }
}
