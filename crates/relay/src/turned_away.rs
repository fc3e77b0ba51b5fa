//! Log of refused connections and DTLS handshakes with their addresses, so that operators see why a client
//! could not connect. For most clients, the TCP handshake or the DTLS cookie proves the address. Other
//! addresses may be forged, so they have their own stage and fewer entries.

use std::{net::SocketAddr, sync::Arc};

use turnpike_turn::server::Transport;

/// Maximum entries per worker between two publications; further refusals are only counted.
const MOST: usize = 64;
const MOST_UNPROVED: usize = 8;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnedAway {
    /// The most recent client, with its port.
    pub client: SocketAddr,
    pub transport: Transport,
    pub user: Option<(Arc<str>, Box<str>)>,
    /// Stage of the refusal: `connection`, `tls_handshake`, `dtls_handshake` or `dtls_hello` (the address may
    /// be forged).
    pub stage: &'static str,
    /// Label of the refusal counter in `/metrics`.
    pub reason: &'static str,
    pub count: u64,
}

/// Refusals since the last publication. An address takes at most one entry per reason, however often it is
/// refused.
#[derive(Default)]
pub(crate) struct Noted(Vec<TurnedAway>);

impl Noted {
    pub(crate) fn note(
        &mut self,
        client: SocketAddr,
        transport: Transport,
        user: Option<(Arc<str>, Box<str>)>,
        (stage, reason): (&'static str, &'static str),
    ) {
        self.note_within(MOST, (client, transport), user, (stage, reason));
    }

    pub(crate) fn note_unproved(
        &mut self,
        client: SocketAddr,
        transport: Transport,
        stage: &'static str,
        reason: &'static str,
    ) {
        self.note_within(MOST_UNPROVED, (client, transport), None, (stage, reason));
    }

    fn note_within(
        &mut self,
        most: usize,
        (client, transport): (SocketAddr, Transport),
        user: Option<(Arc<str>, Box<str>)>,
        (stage, reason): (&'static str, &'static str),
    ) {
        let same = |noted: &&mut TurnedAway| {
            noted.client.ip() == client.ip()
                && (noted.stage, noted.reason) == (stage, reason)
                && noted.user == user
        };
        if let Some(noted) = self.0.iter_mut().find(same) {
            (noted.client, noted.count) = (client, noted.count + 1);
        } else if self.0.len() < most {
            self.0.push(TurnedAway { client, transport, user, stage, reason, count: 1 });
        }
    }

    pub(crate) fn drain(&mut self) -> impl Iterator<Item = TurnedAway> + '_ {
        self.0.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_takes_one_entry_per_reason_and_entries_are_bounded() {
        let mut noted = Noted::default();
        let mut note = |client: &str, reason| {
            noted.note(client.parse().unwrap(), Transport::Tls, None, ("tls_handshake", reason));
        };
        for port in 1..=1000 {
            note(&format!("192.0.2.1:{port}"), "alert");
            note(&format!("192.0.2.1:{port}"), "garbage");
        }
        for host in 1..=200 {
            note(&format!("198.51.100.{host}:1"), "alert");
        }
        noted.note_unproved("203.0.113.1:1".parse().unwrap(), Transport::Dtls, "dtls_hello", "version");
        let told: Vec<TurnedAway> = noted.drain().collect();
        assert_eq!(told.len(), MOST);
        assert!(told.iter().all(|noted| noted.stage != "dtls_hello"), "forged addresses cannot fill the log");
        assert_eq!((told[0].client.port(), told[0].count, told[0].reason), (1000, 1000, "alert"));
        assert_eq!((told[1].count, told[1].reason), (1000, "garbage"));
        assert_eq!(noted.drain().count(), 0, "each entry is reported once");
    }
}
