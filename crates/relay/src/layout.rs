//! Numbers of listeners. The state machine identifies a client's listener only by its number, which implies
//! the transport and the realms.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};
use turnpike_net::SocketId;
use turnpike_turn::server::{ListenerId, ListenerProfile, Transport};

use crate::StreamConfig;

/// The numbers of all listeners of a relay. Numbers never change: listeners and server names added by a
/// reload get new ones, and a removed listener keeps its numbers in case it is added again. A stream listener
/// has two (TCP and TLS). A DTLS listener has its own even if it shares the socket of a UDP listener.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout(Vec<Numbered>);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Numbered {
    transport: Transport,
    place: usize,
    address: SocketAddr,
    server_name: Option<String>,
    /// True if the listener accepts new clients.
    open: bool,
    /// For streams: true if listed in [`StreamConfig::tls_listen`].
    secure: bool,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) place: usize,
    pub(crate) address: SocketAddr,
    pub(crate) open: bool,
    pub(crate) secure: bool,
}

/// Transports of each kind of listener; each transport has its own number.
const KINDS: [&[Transport]; 3] = [&[Transport::Udp], &[Transport::Dtls], &[Transport::Tcp, Transport::Tls]];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayoutEntry<'a> {
    pub transport: Transport,
    pub address: SocketAddr,
    /// Server name in the ClientHello, if it selects its own realms.
    pub server_name: Option<&'a str>,
}

impl Layout {
    /// Numbers UDP listeners, then DTLS, then streams (TCP before TLS).
    pub fn new(udp: &[SocketAddr], dtls: &[SocketAddr], streams: &StreamConfig) -> Self {
        let mut layout = Self::default();
        layout.follow(udp, dtls, streams);
        layout
    }

    /// Replaces the listeners. Existing listeners keep their places and numbers; those that are no longer
    /// configured are closed.
    pub fn follow(&mut self, udp: &[SocketAddr], dtls: &[SocketAddr], streams: &StreamConfig) {
        let plain = |addresses: &[SocketAddr]| addresses.iter().map(|at| (*at, false)).collect::<Vec<_>>();
        let mut by_stream = plain(&streams.listen);
        by_stream.extend(streams.tls_listen.iter().map(|at| (*at, true)));
        for (kind, wanted) in KINDS.into_iter().zip([plain(udp), plain(dtls), by_stream]) {
            let mut placed: Vec<Placed> =
                self.placed(kind[0]).map(|it| Placed { open: false, ..it }).collect();
            for (address, secure) in wanted {
                // An address with port 0 may be configured several times.
                match placed.iter_mut().find(|it| it.address == address && !it.open) {
                    Some(known) => (known.open, known.secure) = (true, secure),
                    None => placed.push(Placed { place: placed.len(), address, open: true, secure }),
                }
            }
            self.place(kind, &placed);
        }
        let names: Vec<String> = self.0.iter().filter_map(|entry| entry.server_name.clone()).collect();
        self.add_server_names(names.iter().chain(&streams.server_names).map(String::as_str));
    }

    fn place(&mut self, kind: &[Transport], placed: &[Placed]) {
        for entry in self.0.iter_mut().filter(|entry| kind.contains(&entry.transport)) {
            (entry.open, entry.secure) = (placed[entry.place].open, placed[entry.place].secure);
        }
        let known = self.placed(kind[0]).count();
        for transport in kind {
            let entry = |it: &Placed| Numbered {
                transport: *transport,
                place: it.place,
                address: it.address,
                server_name: None,
                open: it.open,
                secure: it.secure,
            };
            self.0.extend(placed[known..].iter().map(entry));
        }
    }

    /// Listeners of a kind by place, open or closed. `Transport::Tcp` selects all stream listeners.
    pub(crate) fn placed(&self, transport: Transport) -> impl Iterator<Item = Placed> + '_ {
        let is_it = move |entry: &&Numbered| entry.transport == transport && entry.server_name.is_none();
        self.0.iter().filter(is_it).map(|entry| Placed {
            place: entry.place,
            address: entry.address,
            open: entry.open,
            secure: entry.secure,
        })
    }

    pub(crate) fn numbers(
        &self,
        transport: Transport,
        place: usize,
    ) -> impl Iterator<Item = ListenerId> + '_ {
        let numbered = (0..).zip(&self.0);
        numbered
            .filter(move |(_, entry)| (entry.transport, entry.place) == (transport, place))
            .map(|(number, _)| ListenerId(number))
    }

    pub fn add_server_names<'a>(&mut self, names: impl IntoIterator<Item = &'a str>) {
        for name in names {
            let name = name.to_ascii_lowercase();
            let has_name = |entry: &Numbered| {
                let is_it =
                    |other: &Numbered| (other.transport, other.place) == (entry.transport, entry.place);
                self.0.iter().any(|other| is_it(other) && other.server_name.as_ref() == Some(&name))
            };
            let nameable = |entry: &&Numbered| {
                matches!((entry.transport, &entry.server_name), (Transport::Tls | Transport::Dtls, None))
                    && !has_name(entry)
            };
            let named = |entry: &Numbered| Numbered { server_name: Some(name.clone()), ..entry.clone() };
            let named: Vec<_> = self.0.iter().filter(nameable).map(named).collect();
            self.0.extend(named);
        }
    }

    pub fn entries(&self) -> impl Iterator<Item = LayoutEntry<'_>> {
        self.0.iter().map(|entry| LayoutEntry {
            transport: entry.transport,
            address: entry.address,
            server_name: entry.server_name.as_deref(),
        })
    }

    /// For each number in the order of [`Layout::entries`]: the place of its listener among listeners of its
    /// kind, and true if that listener is open.
    pub(crate) fn places(&self) -> impl Iterator<Item = (usize, bool)> + '_ {
        self.0.iter().map(|entry| (entry.place, entry.open))
    }

    /// Profiles of all numbers for the state machine; realms come from `wanted`.
    pub(crate) fn profiles(&self, wanted: &[ListenerProfile]) -> Vec<ListenerProfile> {
        let profile = |(number, entry): (usize, &Numbered)| ListenerProfile {
            transport: entry.transport,
            closing: !entry.open,
            ..wanted.get(number).cloned().unwrap_or_default()
        };
        self.0.iter().enumerate().map(profile).collect()
    }

    pub(crate) fn dtls_place(&self, listener: ListenerId) -> Option<usize> {
        let entry = self.0.get(usize::from(listener.0))?;
        (entry.transport == Transport::Dtls).then_some(entry.place)
    }

    pub(crate) fn number(&self, transport: Transport, place: usize, server_name: Option<&str>) -> ListenerId {
        let find = |name: Option<&str>| {
            self.0.iter().position(|entry| {
                (entry.transport, entry.place) == (transport, place)
                    && match (&entry.server_name, name) {
                        (Some(known), Some(asked)) => known.eq_ignore_ascii_case(asked),
                        (known, asked) => known.is_none() && asked.is_none(),
                    }
            })
        };
        // A server name that has no realms of its own uses the listener's number. Numbers cannot overflow:
        // file descriptors run out first.
        let found = server_name.and_then(|name| find(Some(name))).or_else(|| find(None));
        ListenerId(found.and_then(|number| u16::try_from(number).ok()).unwrap_or(u16::MAX))
    }
}
pub(crate) struct Listener {
    pub(crate) socket: SocketId,
    pub(crate) bound: SocketAddr,
    /// For DTLS: the number for clients without a server name.
    pub(crate) number: ListenerId,
}

impl Listener {
    pub(crate) const NONE: Self = Self {
        socket: SocketId(u32::MAX),
        bound: SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
        number: ListenerId(u16::MAX),
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use turnpike_turn::server::RealmId;

    fn layout() -> Layout {
        let at = |text: &str| text.parse().unwrap();
        let streams = StreamConfig {
            listen: vec![at("10.0.0.1:3478")],
            tls_listen: vec![at("10.0.0.1:5349")],
            server_names: vec!["a.example".to_owned(), "B.example".to_owned()],
            ..StreamConfig::default()
        };
        let dtls = ["10.0.0.1:3478", "10.0.0.1:443"].map(at);
        Layout::new(&[at("10.0.0.1:3478")], &dtls, &streams)
    }

    #[test]
    fn every_number_matches_its_entry() {
        let layout = layout();
        let entries: Vec<_> = layout.entries().collect();
        assert_eq!(entries.len(), 1 + 2 + 2 * 2 + 2 * (2 + 2));
        assert_eq!(entries[0].transport, Transport::Udp);
        let (streams, associations) = (["10.0.0.1:3478", "10.0.0.1:5349"], ["10.0.0.1:3478", "10.0.0.1:443"]);
        for place in 0..2 {
            let of = |transport, name| layout.number(transport, place, name);
            let at = |text: &str| text.parse::<SocketAddr>().unwrap();
            let tcp = entries[usize::from(of(Transport::Tcp, None).0)];
            assert_eq!((tcp.transport, tcp.address), (Transport::Tcp, at(streams[place])));
            for (asked, found) in [
                (None, None),
                (Some("a.example"), Some("a.example")),
                (Some("b.EXAMPLE"), Some("b.example")),
                (Some("other.example"), None),
            ] {
                let tls = entries[usize::from(of(Transport::Tls, asked).0)];
                assert_eq!((tls.transport, tls.address), (Transport::Tls, at(streams[place])));
                assert_eq!(tls.server_name, found, "{asked:?}");
                let number = of(Transport::Dtls, asked);
                let dtls = entries[usize::from(number.0)];
                assert_eq!((dtls.transport, dtls.address), (Transport::Dtls, at(associations[place])));
                assert_eq!(dtls.server_name, found, "{asked:?}");
                assert_eq!(layout.dtls_place(number), Some(place), "{asked:?}");
            }
        }
        for (number, entry) in (0..).zip(&entries) {
            let is_dtls = layout.dtls_place(ListenerId(number)).is_some();
            assert_eq!(is_dtls, entry.transport == Transport::Dtls, "{number}");
        }
    }

    #[test]
    fn added_server_name_changes_no_number() {
        let (before, mut after) = (layout(), layout());
        after.add_server_names(["a.example", "c.example"]);
        let (old, new): (Vec<_>, Vec<_>) = (before.entries().collect(), after.entries().collect());
        assert_eq!(new[..old.len()], old);
        assert_eq!(new.len(), old.len() + 2 + 2);
    }

    #[test]
    fn listeners_keep_their_numbers_when_removed_and_added_again() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let mut now = layout();
        let before = now.clone();
        let streams = |listen: &[&str], tls: &[&str]| StreamConfig {
            listen: listen.iter().copied().map(at).collect(),
            tls_listen: tls.iter().copied().map(at).collect(),
            server_names: vec!["c.example".to_owned()],
            ..StreamConfig::default()
        };
        now.follow(&[at("10.0.0.9:3478")], &[at("10.0.0.1:443")], &streams(&["10.0.0.1:5349"], &[]));
        let (old, new): (Vec<_>, Vec<_>) = (before.entries().collect(), now.entries().collect());
        assert_eq!(new[..old.len()], old);
        let placed = |layout: &Layout, transport| {
            layout
                .placed(transport)
                .map(|it| (it.address.to_string(), it.open, it.secure))
                .collect::<Vec<_>>()
        };
        let listener = |address: &str, open, secure| (address.to_owned(), open, secure);
        assert_eq!(
            placed(&now, Transport::Udp),
            [listener("10.0.0.1:3478", false, false), listener("10.0.0.9:3478", true, false)]
        );
        assert_eq!(
            placed(&now, Transport::Tcp),
            [listener("10.0.0.1:3478", false, false), listener("10.0.0.1:5349", true, false)]
        );
        assert_eq!(
            placed(&now, Transport::Dtls),
            [listener("10.0.0.1:3478", false, false), listener("10.0.0.1:443", true, false)]
        );
        // The new server name has numbers on both old and new listeners.
        for (transport, place) in [(Transport::Dtls, 1), (Transport::Tls, 0), (Transport::Tls, 1)] {
            assert_eq!(now.numbers(transport, place).count(), 1 + 3, "{transport:?} {place}");
            let number = now.number(transport, place, Some("c.example"));
            assert_eq!(new[usize::from(number.0)].server_name, Some("c.example"));
        }
        assert!(
            now.profiles(&[])[0].closing
                && !now.profiles(&[])[usize::from(now.number(Transport::Udp, 1, None).0)].closing
        );
        let mut again = now.clone();
        let first = layout();
        let tls = streams(&["10.0.0.1:3478"], &["10.0.0.1:5349"]);
        again.follow(&[at("10.0.0.1:3478")], &["10.0.0.1:3478", "10.0.0.1:443"].map(at), &tls);
        assert_eq!(again.0.len(), now.0.len());
        assert_eq!(again.number(Transport::Udp, 0, None), first.number(Transport::Udp, 0, None));
        assert_eq!(placed(&again, Transport::Dtls), placed(&first, Transport::Dtls));
        assert_eq!(placed(&again, Transport::Tcp), placed(&first, Transport::Tcp));
    }

    #[test]
    fn profiles_take_realms_from_settings_and_transports_from_layout() {
        let wanted = [ListenerProfile { realms: vec![RealmId(3)], ..ListenerProfile::default() }];
        let profiles = layout().profiles(&wanted);
        assert_eq!(profiles[0].realms, [RealmId(3)]);
        assert_eq!(profiles[3].transport, Transport::Tcp);
        assert_eq!(profiles[3].realms, ListenerProfile::default().realms);
    }
}
