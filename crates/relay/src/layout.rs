//! Which listener numbers there are, and what each stands for: the state machine knows a client's listener by its number alone,
//! and with it the transport and the realms that it serves.

use std::net::SocketAddr;

use turnpike_turn::server::{ListenerId, ListenerProfile, Transport};

use crate::{StreamConfig, runtime::Listeners};

/// The numbers of all listeners of a relay. A number means nothing but its entry here: server names that a reload adds get further ones,
/// and none ever changes. A stream listener has two, for TCP and TLS, and a DTLS listener has one of its own even where it shares
/// the socket of a UDP listener.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout(Vec<Numbered>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Numbered {
    transport: Transport,
    /// Among the UDP, DTLS or stream listeners.
    place: usize,
    address: SocketAddr,
    server_name: Option<String>,
}

/// One number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// How its clients come.
    pub transport: Transport,
    /// The listener as it is configured.
    pub address: SocketAddr,
    /// The name that its TLS or DTLS clients asked for, where that name leads to realms of its own.
    pub server_name: Option<&'a str>,
}

impl Layout {
    /// UDP listeners, those for DTLS, and those for streams: TCP before TLS.
    pub fn new(udp: &[SocketAddr], dtls: &[SocketAddr], streams: &StreamConfig) -> Self {
        let mut layout = Self::default();
        layout.add(Transport::Udp, udp);
        layout.add(Transport::Dtls, dtls);
        let all = [&streams.listen[..], &streams.tls_listen].concat();
        layout.add(Transport::Tcp, &all);
        layout.add(Transport::Tls, &all);
        layout.add_server_names(streams.server_names.iter().map(String::as_str));
        layout
    }

    fn add(&mut self, transport: Transport, addresses: &[SocketAddr]) {
        let entry = |(place, address): (usize, &SocketAddr)| Numbered {
            transport,
            place,
            address: *address,
            server_name: None,
        };
        self.0.extend(addresses.iter().enumerate().map(entry));
    }

    /// Gives numbers to server names that have none so far.
    pub fn add_server_names<'a>(&mut self, names: impl IntoIterator<Item = &'a str>) {
        for name in names {
            let name = name.to_ascii_lowercase();
            if self.0.iter().any(|entry| entry.server_name.as_ref() == Some(&name)) {
                continue;
            }
            let nameable = |entry: &&Numbered| {
                matches!((entry.transport, &entry.server_name), (Transport::Tls | Transport::Dtls, None))
            };
            let named = |entry: &Numbered| Numbered { server_name: Some(name.clone()), ..entry.clone() };
            let named: Vec<_> = self.0.iter().filter(nameable).map(named).collect();
            self.0.extend(named);
        }
    }

    /// All numbers, from 0 on.
    pub fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        self.0.iter().map(|entry| Entry {
            transport: entry.transport,
            address: entry.address,
            server_name: entry.server_name.as_deref(),
        })
    }

    /// Which of [`Listeners::all`] each number belongs to.
    pub(crate) fn places(&self, listeners: &Listeners) -> Vec<usize> {
        let streams = listeners.udp.len();
        let dtls = streams + listeners.tcp.len() + listeners.tls.len();
        let place = |entry: &Numbered| {
            let first = match entry.transport {
                Transport::Udp => 0,
                Transport::Tcp | Transport::Tls => streams,
                Transport::Dtls => dtls,
            };
            first + entry.place
        };
        self.0.iter().map(place).collect()
    }

    /// What all numbers are to the state machine: the realms are those of `wanted`, where it has this number.
    pub(crate) fn profiles(&self, wanted: &[ListenerProfile]) -> Vec<ListenerProfile> {
        let profile = |(number, entry): (usize, Entry<'_>)| ListenerProfile {
            transport: entry.transport,
            ..wanted.get(number).cloned().unwrap_or_default()
        };
        self.entries().enumerate().map(profile).collect()
    }

    /// Which DTLS listener this number belongs to, if it is one of theirs.
    pub(crate) fn dtls_place(&self, listener: ListenerId) -> Option<usize> {
        let entry = self.0.get(usize::from(listener.0))?;
        (entry.transport == Transport::Dtls).then_some(entry.place)
    }

    /// The number of a listener of this kind, for clients that asked for this name.
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
        // A name without realms of its own is none. More listeners than there are file descriptors would be needed for a number too large.
        let found = server_name.and_then(|name| find(Some(name))).or_else(|| find(None));
        ListenerId(found.and_then(|number| u16::try_from(number).ok()).unwrap_or(u16::MAX))
    }
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
    fn every_number_belongs_to_a_listener() {
        let at = |text: &str| vec![text.parse().unwrap()];
        let listeners = Listeners {
            udp: at("10.0.0.1:3478"),
            tcp: at("10.0.0.1:3478"),
            tls: at("10.0.0.1:5349"),
            dtls: [at("10.0.0.1:3478"), at("10.0.0.1:443")].concat(),
        };
        let all: Vec<_> = listeners.all().collect();
        let layout = layout();
        for (entry, place) in layout.entries().zip(layout.places(&listeners)) {
            let (transport, address) = all[place];
            let is_stream = |transport| matches!(transport, Transport::Tcp | Transport::Tls);
            assert_eq!(address, entry.address);
            assert!(transport == entry.transport || is_stream(transport) && is_stream(entry.transport));
        }
        assert_eq!(layout.places(&listeners).len(), layout.entries().count());
    }

    #[test]
    fn every_number_is_where_the_list_has_it() {
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
    fn a_name_that_comes_later_changes_no_number() {
        let (before, mut after) = (layout(), layout());
        after.add_server_names(["a.example", "c.example"]);
        let (old, new): (Vec<_>, Vec<_>) = (before.entries().collect(), after.entries().collect());
        assert_eq!(new[..old.len()], old);
        assert_eq!(new.len(), old.len() + 2 + 2);
    }

    #[test]
    fn realms_are_as_wanted_and_transports_as_they_are() {
        let wanted = [ListenerProfile { realms: vec![RealmId(3)], ..ListenerProfile::default() }];
        let profiles = layout().profiles(&wanted);
        assert_eq!(profiles[0].realms, [RealmId(3)]);
        assert_eq!(profiles[3].transport, Transport::Tcp);
        assert_eq!(profiles[3].realms, ListenerProfile::default().realms);
    }
}
