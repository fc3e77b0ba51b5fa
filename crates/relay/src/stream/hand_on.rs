//! Recognises connections for a web server by their first bytes ([`crate::handed_on`]).

use turnpike_net::Poller;
use turnpike_rules::HandOnRule;
use turnpike_wire::{
    client_hello::{self, Parsed},
    proxy_protocol,
    stun::COOKIE,
};

use super::{CloseReason, Streams};
use crate::{
    handed_on::{HandedOnBy, Leaving},
    link::LinkSlot,
};

/// Number of bytes needed to tell whether a message is STUN.
const STUN_PREFIX: usize = 8;

pub(super) enum HandOnChoice {
    Turn,
    Incomplete { wanted: usize },
    HandOn,
}

/// A connection selected by a rule. The bytes received so far are in its framer.
pub(super) struct Chosen {
    place: LinkSlot,
    by: HandedOnBy,
    rule: HandOnRule,
}

impl Streams {
    /// Looks for a matching rule, based on the bytes received so far after any PROXY header.
    pub(super) fn choose(&mut self, slot: usize, bytes: &[u8]) -> HandOnChoice {
        let Some(first) = bytes.first() else { return HandOnChoice::Turn };
        let (by, rule) = if *first == client_hello::HANDSHAKE {
            if !self.config.hands_on_tls() {
                return HandOnChoice::Turn;
            }
            match client_hello::parse(bytes, &mut self.hello) {
                Parsed::Incomplete { wanted } => return HandOnChoice::Incomplete { wanted },
                // rustls will respond with an alert.
                Parsed::Malformed => return HandOnChoice::Turn,
                Parsed::Hello(hello) => {
                    let is_own = |name: &str| self.config.is_own_name(name);
                    (HandedOnBy::Tls, HandOnRule::for_tls(&self.config.hand_on, &hello, is_own))
                }
            }
        } else {
            let Some(rule) = HandOnRule::for_plain(&self.config.hand_on) else { return HandOnChoice::Turn };
            // Wait until it is clear that the bytes do not start a PROXY header, which must not be mistaken for
            // the client's data.
            if proxy_protocol::is_begun(bytes).is_none() || may_be_stun(bytes) && bytes.len() < STUN_PREFIX {
                return HandOnChoice::Incomplete { wanted: bytes.len() + 1 };
            }
            (HandedOnBy::Plain, Some(rule).filter(|_| !is_stun(bytes)))
        };
        let Some(rule) = rule else { return HandOnChoice::Turn };
        let place = LinkSlot { slot, generation: self.connections[slot].generation };
        self.chosen.push(Chosen { place, by, rule: rule.clone() });
        HandOnChoice::HandOn
    }

    pub(crate) fn next_handed_on(&mut self, poller: &Poller) -> Option<Leaving> {
        while let Some(Chosen { place, by, rule }) = self.chosen.pop() {
            let Some(slot) = self.slot_at(place) else { continue };
            if self.connections[slot].closing.is_some() {
                continue;
            }
            if poller.remove(&self.connections[slot].socket).is_err() {
                self.close(slot, CloseReason::Broken);
                continue;
            }
            self.uncount(slot);
            self.stats.closed[CloseReason::HandedOn as usize] += 1;
            let connection = self.connections.remove(slot);
            return Some(Leaving {
                received: connection.framer.held().to_vec(),
                by,
                client: connection.client.address,
                local: connection.client.local,
                socket: connection.socket,
                to: rule.to,
                proxy_protocol: rule.proxy_protocol,
            });
        }
        None
    }
}

/// Recognises the start of a STUN message by its magic cookie (RFC 8489 section 5).
pub(super) fn is_stun(bytes: &[u8]) -> bool {
    bytes.len() >= STUN_PREFIX && may_be_stun(bytes)
}

/// Returns false once it is clear that the bytes do not start a STUN message. ChannelData, which may start with
/// the same byte as `GET`, is never the first message of a connection.
fn may_be_stun(bytes: &[u8]) -> bool {
    let cookie = bytes.get(4..).unwrap_or_default();
    let shared = cookie.len().min(COOKIE.len());
    bytes.first().is_none_or(|first| first & 0xC0 == 0) && cookie[..shared] == COOKIE[..shared]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_byte_that_differs_from_stun_is_enough() {
        let stun = [0, 1, 0, 0, 0x21, 0x12, 0xA4, 0x42];
        for end in 0..=stun.len() {
            assert!(may_be_stun(&stun[..end]));
        }
        for other in [&b"G"[..], b"\r\n\r\n\0", b"@", &[0x80], &[0, 1, 0, 0, 0x21, 0x12, 0xA4, 0x43]] {
            assert!(!may_be_stun(other), "{}", other.escape_ascii());
        }
    }
}
