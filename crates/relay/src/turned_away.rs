//! Connections and DTLS handshakes that came to nothing, with the addresses they came from: for whoever asks why a client could not come
//! in. Only addresses that are proved are kept: by TCP's handshake, or by DTLS's cookie.

use std::net::SocketAddr;

use turnpike_turn::server::Transport;

/// What one worker keeps between two publications; beyond that it is only counted.
const MOST: usize = 64;

/// Clients of one address that were turned away for one reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnedAway {
    /// The last of them.
    pub client: SocketAddr,
    /// How they came.
    pub transport: Transport,
    /// What was being done: `connection`, `tls_handshake`, `dtls_handshake`.
    pub stage: &'static str,
    /// Why, as `/metrics` calls it.
    pub reason: &'static str,
    /// How many.
    pub count: u64,
}

/// Those of some tenths of a second. One noisy address takes one place for each reason.
#[derive(Default)]
pub(crate) struct Noted(Vec<TurnedAway>);

impl Noted {
    pub(crate) fn note(
        &mut self,
        client: SocketAddr,
        transport: Transport,
        stage: &'static str,
        reason: &'static str,
    ) {
        let same = |noted: &&mut TurnedAway| {
            noted.client.ip() == client.ip() && (noted.stage, noted.reason) == (stage, reason)
        };
        if let Some(noted) = self.0.iter_mut().find(same) {
            (noted.client, noted.count) = (client, noted.count + 1);
        } else if self.0.len() < MOST {
            self.0.push(TurnedAway { client, transport, stage, reason, count: 1 });
        }
    }

    /// All of them, once.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = TurnedAway> + '_ {
        self.0.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_takes_one_place_for_each_reason_and_there_is_an_end_to_places() {
        let mut noted = Noted::default();
        let mut note = |client: &str, reason| {
            noted.note(client.parse().unwrap(), Transport::Tls, "tls_handshake", reason);
        };
        for port in 1..=1000 {
            note(&format!("192.0.2.1:{port}"), "alert");
            note(&format!("192.0.2.1:{port}"), "garbage");
        }
        for host in 1..=200 {
            note(&format!("198.51.100.{host}:1"), "alert");
        }
        let told: Vec<TurnedAway> = noted.drain().collect();
        assert_eq!(told.len(), MOST);
        assert_eq!((told[0].client.port(), told[0].count, told[0].reason), (1000, 1000, "alert"));
        assert_eq!((told[1].count, told[1].reason), (1000, "garbage"));
        assert_eq!(noted.drain().count(), 0, "they are told once");
    }
}
