//! Handles ClientHello messages: either replies without keeping state, or admits the client.

use std::sync::Arc;

use turnpike_net::Tx;
use turnpike_turn::server::{Client, PrefixLengths, Transport};

use super::{
    Associations,
    association::{self, Association, AssociationStage},
    hello::Cookie,
    hello::{self, Fragment, Hello, HelloError, Version},
    record::{self, ALERT, Sifted},
    stats::{DtlsDrop, DtlsEnd, DtlsFailure},
};

const FATAL: u8 = 2;
const HANDSHAKE_FAILURE: u8 = 40;
const PROTOCOL_VERSION: u8 = 70;

impl Associations {
    pub(super) fn take_hello(
        &mut self,
        now_ms: u64,
        client: Client,
        datagram: &[u8],
        tx: &mut Tx,
    ) -> Option<usize> {
        if !self.config.clients.admits(client.address.ip()) {
            self.count_drop(DtlsDrop::ClientRefused);
            return None;
        }
        let hello = match Hello::parse(datagram) {
            Ok(hello) => hello,
            Err(HelloError::Fragmented) => return self.take_fragments(now_ms, client, datagram, tx),
            Err(HelloError::Malformed) => {
                self.count_drop(DtlsDrop::Malformed);
                return None;
            }
            Err(HelloError::TooLong) => {
                self.count_drop(DtlsDrop::TooLong);
                return None;
            }
            Err(HelloError::Version) => {
                self.refuse_hello(&client, datagram, DtlsFailure::Version, tx);
                return None;
            }
            Err(HelloError::KeyShare) => {
                self.refuse_hello(&client, datagram, DtlsFailure::KeyShare, tx);
                return None;
            }
        };
        let context = self.config.context.as_ref()?;
        if !hello.is_compatible() || !context.has_certificate_for(&hello) {
            self.refuse_hello(&client, datagram, DtlsFailure::Incompatible, tx);
            return None;
        }
        if hello.cookie.is_none() {
            self.answer(now_ms, client, &hello, datagram, tx);
            return None;
        }
        if let Some(slot) = self.slot_of(&client)
            && self.table[slot].random == hello.random
        {
            // This is a retransmission: our reply was lost or delayed.
            return self.feed(now_ms, &client, datagram);
        }
        self.admit(now_ms, client, &hello, datagram, tx)
    }

    /// Handles the fragments of a ClientHello in a datagram. Without a cookie, they get a DTLS 1.2 reply;
    /// with a valid cookie, they are kept until the message is complete. A DTLS 1.3 cookie is computed from
    /// the complete ClientHello, so clients that support both versions get DTLS 1.2.
    fn take_fragments(&mut self, now_ms: u64, client: Client, datagram: &[u8], tx: &mut Tx) -> Option<usize> {
        let now_unix = self.unix(now_ms);
        for record in record::records(datagram).filter(|record| hello::is_hello(record)) {
            let Ok(fragment) = Fragment::parse(record) else {
                self.count_drop(DtlsDrop::Malformed);
                return None;
            };
            let kept = match fragment.beginning() {
                Some((before_cookie, [])) => {
                    let cookie = self.cookies.make_for_fragment(now_unix, &client, before_cookie);
                    self.send_cookie(&client, fragment.sequence, &cookie, datagram.len(), tx);
                    return None;
                }
                Some((before_cookie, cookie)) => {
                    if !self.cookies.check_fragment(now_unix, &client, before_cookie, cookie) {
                        self.count_drop(DtlsDrop::BadCookie);
                        return None;
                    }
                    self.fragments.begin(&client, &fragment, now_ms, self.config.limits.first_message_ms())
                }
                None => self.fragments.append(&client, &fragment, now_ms),
            };
            if !kept {
                self.count_drop(DtlsDrop::Fragmented);
                return None;
            }
            if let Some(body) = self.fragments.take_whole(&client) {
                let mut whole = Vec::new();
                hello::write_packet(fragment.sequence, fragment.message, &body, &mut whole);
                return self.take_hello(now_ms, client, &whole, tx);
            }
        }
        None
    }

    fn send_cookie(&mut self, client: &Client, sequence: u64, cookie: &Cookie, asked: usize, tx: &mut Tx) {
        hello::write_verify_request(sequence, cookie, &mut self.answer);
        if self.answer.len() > asked {
            return self.count_drop(DtlsDrop::Amplification);
        }
        self.stats.cookies += 1;
        tx.push_bytes(&self.route(self.place(client), client), &self.answer);
    }

    /// Sends a cookie without keeping state.
    fn answer(&mut self, now_ms: u64, client: Client, hello: &Hello<'_>, datagram: &[u8], tx: &mut Tx) {
        let (now, now_unix) = (self.instant(now_ms), self.unix(now_ms));
        let Some(context) = &self.config.context else { return };
        let [body, packet] = &mut self.hello;
        let cookie = self.cookies.make(now_unix, &client, hello, body);
        hello::write_packet(hello.sequence, 0, body, packet);
        let begun = context.begin(now, hello, packet, cookie, &mut self.answer);
        let why = begun.err().map(|error| association::failure(&error));
        if let Some(why) = why {
            return self.refuse(&client, datagram, why, tx);
        }
        // dimpl ignores messages that it cannot parse.
        if self.answer.is_empty() {
            return self.count_drop(DtlsDrop::Malformed);
        }
        // The client's address is not verified yet, so the reply must not amplify.
        if self.answer.len() > datagram.len() {
            return self.count_drop(DtlsDrop::Amplification);
        }
        self.stats.cookies += 1;
        tx.push_bytes(&self.route(self.place(&client), &client), &self.answer);
    }

    fn refuse_hello(&mut self, client: &Client, datagram: &[u8], why: DtlsFailure, tx: &mut Tx) {
        self.noted.note_unproved(client.address, Transport::Dtls, "dtls_hello", why.into());
        self.refuse(client, datagram, why, tx);
    }

    /// Refuses a client with an alert, which is shorter than any ClientHello and saves the client a timeout.
    fn refuse(&mut self, client: &Client, datagram: &[u8], why: DtlsFailure, tx: &mut Tx) {
        self.stats.failed[why as usize] += 1;
        let description = match why {
            DtlsFailure::Version => PROTOCOL_VERSION,
            _ => HANDSHAKE_FAILURE,
        };
        let mut alert = [0; 15];
        alert[0] = ALERT;
        // Old clients expect the version that they sent.
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
            // DTLS 1.2 clients may get another cookie; for DTLS 1.3 clients a second HelloRetryRequest is an
            // error.
            if hello.version == Version::V12 && !self.by_client.contains_key(&client) {
                self.answer(now_ms, client, hello, datagram, tx);
            }
            self.count_drop(DtlsDrop::BadCookie);
            return None;
        };
        let network = PrefixLengths::SITE.of(client.address.ip());
        let crowded = self.half_open.is_crowded(network, now_ms) || self.idle.is_crowded(network, now_ms);
        if self.admissions_left == 0 || crowded && !self.by_client.contains_key(&client) {
            self.count_drop(DtlsDrop::Busy);
            self.noted.note(client.address, Transport::Dtls, None, ("dtls_handshake", DtlsDrop::Busy.into()));
            return None;
        }
        self.admissions_left -= 1;
        hello::write_packet(hello.sequence.saturating_sub(1), 0, body, packet);
        let (Sifted::Whole(second) | Sifted::Rest(second)) =
            record::without_plain_alerts(datagram, &mut self.sifted);
        let accepted = context.accept(now, hello, [packet, second], cookie, &mut self.answer);
        let dtls = match accepted {
            Ok(Some(dtls)) => dtls,
            Ok(None) => {
                self.count_drop(DtlsDrop::Malformed);
                return None;
            }
            Err(error) => {
                let why = association::failure(&error);
                self.noted.note(client.address, Transport::Dtls, None, ("dtls_handshake", why.into()));
                self.refuse(&client, datagram, why, tx);
                return None;
            }
        };
        // RFC 6347 section 4.2.8: a client that starts over and proves its address replaces its association.
        if let Some(slot) = self.slot_of(&client) {
            if self.table[slot].is_open() {
                self.remove(slot, DtlsEnd::Replaced);
            } else {
                self.fail(slot, DtlsFailure::Other);
            }
        }
        if let Some(slot) = self.half_open.in_the_way(network) {
            self.fail(slot, DtlsFailure::Evicted);
        }
        let deadline_ms = now_ms + self.config.limits.first_message_ms();
        let place = self.place(&client);
        let slot = self.table.insert(Association {
            dtls,
            client,
            place,
            generation: self.generations.draw(),
            listener: self.layout.number(Transport::Dtls, place, hello.server_name),
            random: hello.random,
            stage: AssociationStage::HalfOpen(0),
            alerted: false,
            deadline_ms,
            timer_ms: u64::MAX,
            armed_ms: u64::MAX,
        });
        let number = self.half_open.enter(slot, Some(network), now_ms);
        self.table[slot].stage = AssociationStage::HalfOpen(number);
        self.by_client.insert(client, slot);
        self.last = None;
        self.arm(slot);
        Some(slot)
    }
}
