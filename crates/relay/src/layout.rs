//! Which listener numbers there are, and what each stands for: the state machine knows a client's listener by its number alone,
//! and with it the transport and the realms that it serves.

use std::net::SocketAddr;

use turnpike_turn::server::{ListenerId, ListenerProfile, Transport};

use crate::StreamConfig;

/// The numbers of all listeners of a relay:
///
/// ```text
/// │ UDP │ DTLS │ first stream listener: TCP, TLS │ second: TCP, TLS │ … │ first server name: each TLS, each DTLS │ second: … │
/// ```
///
/// Server names that a reload adds get further numbers; no number ever changes. Plain UDP stands first, so that one comparison
/// tells whether a client is anything else. A DTLS listener has a number of its own even where it shares the socket of a UDP
/// listener.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    udp: Vec<SocketAddr>,
    dtls: Vec<SocketAddr>,
    streams: Vec<SocketAddr>,
    server_names: Vec<String>,
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
    #[must_use]
    pub fn new(udp: &[SocketAddr], dtls: &[SocketAddr], streams: &StreamConfig) -> Self {
        let mut layout = Self {
            udp: udp.to_vec(),
            dtls: dtls.to_vec(),
            streams: [&streams.listen[..], &streams.tls_listen].concat(),
            server_names: Vec::new(),
        };
        layout.add_server_names(streams.server_names.iter().map(String::as_str));
        layout
    }

    /// Gives numbers to server names that have none so far.
    pub fn add_server_names<'a>(&mut self, names: impl IntoIterator<Item = &'a str>) {
        for name in names {
            let name = name.to_ascii_lowercase();
            if !self.server_names.contains(&name) {
                self.server_names.push(name);
            }
        }
    }

    /// All numbers, from 0 on.
    pub fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        let of = |transport, address, server_name| Entry { transport, address, server_name };
        let udp = self.udp.iter().map(move |address| of(Transport::Udp, *address, None));
        let dtls = self.dtls.iter().map(move |address| of(Transport::Dtls, *address, None));
        let streams = self.streams.iter().flat_map(move |address| {
            [of(Transport::Tcp, *address, None), of(Transport::Tls, *address, None)]
        });
        let named = self.server_names.iter().flat_map(move |name| {
            let tls = self.streams.iter().map(move |address| of(Transport::Tls, *address, Some(name)));
            let dtls = self.dtls.iter().map(move |address| of(Transport::Dtls, *address, Some(name)));
            tls.chain(dtls)
        });
        udp.chain(dtls).chain(streams).chain(named)
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
    #[inline]
    pub(crate) fn dtls_place(&self, listener: ListenerId) -> Option<usize> {
        let number = usize::from(listener.0);
        if number < self.before_streams() {
            return number.checked_sub(self.udp.len());
        }
        let place = number.checked_sub(self.before_names())? % self.per_name().max(1);
        place.checked_sub(self.streams.len())
    }

    /// Whether this number is one of a stream listener.
    #[inline]
    pub(crate) fn is_stream(&self, listener: ListenerId) -> bool {
        usize::from(listener.0) >= self.before_streams() && self.dtls_place(listener).is_none()
    }

    /// The number of a DTLS listener for clients that asked for this name.
    pub(crate) fn dtls(&self, place: usize, server_name: Option<&str>) -> ListenerId {
        ListenerId(number(match self.name(server_name) {
            Some(name) => self.before_names() + name * self.per_name() + self.streams.len() + place,
            None => self.udp.len() + place,
        }))
    }

    /// The number of a stream listener for TCP clients.
    pub(crate) fn tcp(&self, place: usize) -> ListenerId {
        ListenerId(number(self.before_streams() + 2 * place))
    }

    /// The number of a stream listener for TLS clients that asked for this name.
    pub(crate) fn tls(&self, place: usize, server_name: Option<&str>) -> ListenerId {
        ListenerId(number(match self.name(server_name) {
            Some(name) => self.before_names() + name * self.per_name() + place,
            None => self.before_streams() + 2 * place + 1,
        }))
    }

    /// The place of a server name among those that have numbers.
    fn name(&self, server_name: Option<&str>) -> Option<usize> {
        let asked = server_name?;
        self.server_names.iter().position(|known| known.eq_ignore_ascii_case(asked))
    }

    fn before_names(&self) -> usize {
        self.before_streams() + 2 * self.streams.len()
    }

    fn per_name(&self) -> usize {
        self.streams.len() + self.dtls.len()
    }

    fn before_streams(&self) -> usize {
        self.udp.len() + self.dtls.len()
    }
}

/// More listeners than there are file descriptors would be needed for it to be too large.
fn number(count: usize) -> u16 {
    u16::try_from(count).unwrap_or(u16::MAX)
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
    fn every_number_is_where_the_list_has_it() {
        let layout = layout();
        let entries: Vec<_> = layout.entries().collect();
        assert_eq!(entries.len(), 1 + 2 + 2 * 2 + 2 * (2 + 2));
        assert_eq!(entries[0].transport, Transport::Udp);
        for place in 0..2 {
            let tcp = entries[usize::from(layout.tcp(place).0)];
            assert_eq!((tcp.transport, tcp.address), (Transport::Tcp, layout.streams[place]));
            for (asked, found) in [
                (None, None),
                (Some("a.example"), Some("a.example")),
                (Some("b.EXAMPLE"), Some("b.example")),
                (Some("other.example"), None),
            ] {
                let tls = entries[usize::from(layout.tls(place, asked).0)];
                assert_eq!((tls.transport, tls.address), (Transport::Tls, layout.streams[place]));
                assert_eq!(tls.server_name, found, "{asked:?}");
                let number = layout.dtls(place, asked);
                let dtls = entries[usize::from(number.0)];
                assert_eq!((dtls.transport, dtls.address), (Transport::Dtls, layout.dtls[place]));
                assert_eq!(dtls.server_name, found, "{asked:?}");
                assert_eq!(layout.dtls_place(number), Some(place), "{asked:?}");
            }
        }
        assert_eq!(layout.dtls(0, None), ListenerId(1));
        for (number, entry) in (0..).zip(&entries) {
            let is_dtls = layout.dtls_place(ListenerId(number)).is_some();
            assert_eq!(is_dtls, entry.transport == Transport::Dtls, "{number}");
            let is_stream = matches!(entry.transport, Transport::Tcp | Transport::Tls);
            assert_eq!(layout.is_stream(ListenerId(number)), is_stream, "{number}");
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
