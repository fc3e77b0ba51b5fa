//! TURN URIs (RFC 7065) for clients, derived from the listeners and the public names.

use std::net::{IpAddr, SocketAddr};

use turnpike_client::{ServerUri, uri::Scheme};
use turnpike_config::{Settings, realms};
use turnpike_relay::{Listeners, RelayAddress, certificates::Certificate};
use turnpike_turn::server::Transport;

pub(crate) struct ClientUris<'a> {
    pub(crate) settings: &'a Settings,
    /// Contains the actual ports.
    pub(crate) listeners: &'a Listeners,
    pub(crate) certificates: &'a [Certificate],
    /// Relay addresses. Their external addresses are assumed to be those of the listeners too.
    pub(crate) addresses: &'a [RelayAddress],
}

impl ClientUris<'_> {
    /// URIs for clients of a realm. Prefers listeners that challenge with this realm, for clients that
    /// know only the URI; if there are none, uses all listeners that serve it.
    pub(crate) fn to(&self, realm: &str) -> Vec<String> {
        if !self.settings.credentials.uris.is_empty() {
            return self.settings.credentials.uris.clone();
        }
        let all = realms::all(self.settings);
        let (mut named, mut served) = (Vec::new(), Vec::new());
        for (transport, address) in self.doors() {
            for host in self.hosts(transport, address, realm) {
                let server_name =
                    Some(&*host).filter(|host| is_secure(transport) && host.parse::<IpAddr>().is_err());
                let ids = realms::served_at(&all, self.configured(transport, address), server_name);
                let mut names = ids.iter().filter_map(|id| all.get(usize::from(id.0))).map(|view| view.name);
                let uris = match names.position(|name| name == realm) {
                    Some(0) => &mut named,
                    Some(_) => &mut served,
                    None => continue,
                };
                let uri = uri(transport, host, address.port());
                if !uris.contains(&uri) {
                    uris.push(uri);
                }
            }
        }
        if named.is_empty() { served } else { named }
    }

    fn doors(&self) -> Vec<(Transport, SocketAddr)> {
        let Listeners { udp, tcp, tls, dtls } = self.listeners;
        let with = |transport: Transport, addresses: &[SocketAddr]| {
            addresses.iter().map(|address| (transport, *address)).collect::<Vec<_>>()
        };
        let plain: &[SocketAddr] = if self.settings.tls.only { &[] } else { tls };
        let mut all =
            [with(Transport::Udp, udp), with(Transport::Tcp, tcp), with(Transport::Tcp, plain)].concat();
        if !self.certificates.is_empty() {
            all.extend([with(Transport::Tls, tcp), with(Transport::Tls, tls)].concat());
        }
        all.extend(with(Transport::Dtls, dtls));
        let is_public = |(_, address): &(Transport, SocketAddr)| !address.ip().to_canonical().is_loopback();
        if all.iter().any(is_public) {
            all.retain(is_public);
        }
        all
    }

    /// External names of a listener in this realm.
    fn hosts(&self, transport: Transport, address: SocketAddr, realm: &str) -> Vec<String> {
        let own = self.settings.realms.iter().find(|own| own.name == realm);
        if let Some(own) = own.filter(|own| is_secure(transport) && !own.server_names.is_empty()) {
            return own.server_names.clone();
        }
        let names = &self.settings.credentials.names;
        if !names.is_empty() {
            let is_of_the_other =
                |name: &str| name.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv4() != address.is_ipv4());
            return names.iter().filter(|name| !is_of_the_other(name)).cloned().collect();
        }
        let certified = || self.certificates.iter().flat_map(|certificate| certificate.identity.names());
        match certified().find(|name| !name.starts_with("*.")) {
            Some(name) => vec![name.clone()],
            // A certificate for names is not valid for addresses, so there is no URI for this listener.
            None if is_secure(transport) && certified().next().is_some() => Vec::new(),
            None => self.public(address).iter().map(ToString::to_string).collect(),
        }
    }

    fn public(&self, address: SocketAddr) -> Vec<IpAddr> {
        let outside = |relay: &RelayAddress| relay.external.unwrap_or(relay.bind);
        let ip = address.ip();
        if ip.is_unspecified() {
            let of_family = self.addresses.iter().filter(|relay| relay.bind.is_ipv4() == ip.is_ipv4());
            return of_family.map(outside).collect();
        }
        vec![self.addresses.iter().find(|relay| relay.bind == ip).map_or(ip, outside)]
    }

    /// Configured address of a listener; the kernel may have chosen the actual port.
    fn configured(&self, transport: Transport, address: SocketAddr) -> SocketAddr {
        let settings = self.settings;
        let configured = match transport {
            Transport::Udp => settings.listen.clone(),
            Transport::Tcp | Transport::Tls => [&settings.listen[..], &settings.tls.listen].concat(),
            Transport::Dtls => settings.dtls.listen.clone(),
        };
        let any_port = SocketAddr::new(address.ip(), 0);
        if !configured.contains(&address) && configured.contains(&any_port) { any_port } else { address }
    }
}

fn is_secure(transport: Transport) -> bool {
    matches!(transport, Transport::Tls | Transport::Dtls)
}

/// Includes even parts that have a default, because programs differ in their defaults.
fn uri(transport: Transport, host: String, port: u16) -> String {
    let scheme = if is_secure(transport) { Scheme::Turns } else { Scheme::Turn };
    let tcp = Some(matches!(transport, Transport::Tcp | Transport::Tls));
    ServerUri { scheme, host, port: Some(port), tcp }.to_string()
}

#[cfg(test)]
mod tests {
    use turnpike_config::{AuthSettings, RealmSettings, Secret};
    use turnpike_testkit::{Dir, certificates::Certificate as Made};

    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn listeners(udp: &[&str], tcp: &[&str], tls: &[&str], dtls: &[&str]) -> Listeners {
        let all = |list: &[&str]| list.iter().map(|text| at(text)).collect();
        Listeners { udp: all(udp), tcp: all(tcp), tls: all(tls), dtls: all(dtls) }
    }

    fn certificate(names: &[&str]) -> Vec<Certificate> {
        let (dir, made) = (Dir::new(), Made::new(names));
        let (cert, key) = (dir.file("cert.pem", &made.pem), dir.file("key.pem", &made.key));
        let identity = turnpike_relay::certificates::read(&cert, &key).expect("a certificate");
        vec![Certificate { file: cert, identity }]
    }

    fn relay(bind: &str, external: Option<&str>) -> RelayAddress {
        let ip = |text: &str| text.parse().unwrap();
        RelayAddress { bind: ip(bind), external: external.map(ip) }
    }

    fn settings() -> Settings {
        Settings {
            auth: AuthSettings { secrets: vec![Secret::new("north")], ..AuthSettings::default() },
            ..Settings::default()
        }
    }

    #[test]
    fn all_listeners_have_uris_with_the_configured_name() {
        let mut settings = settings();
        settings.credentials.names = vec!["turn.example.org".to_owned()];
        let listeners = listeners(
            &["0.0.0.0:3478", "[::]:3478", "127.0.0.1:9"],
            &["0.0.0.0:3478", "[::]:3478"],
            &["0.0.0.0:5349"],
            &["0.0.0.0:5349"],
        );
        let certificates = certificate(&["other.example.org"]);
        let told = |settings: &Settings, certificates: &[Certificate]| {
            ClientUris { settings, listeners: &listeners, certificates, addresses: &[] }.to("turnpike")
        };
        let plain = [
            "turn:turn.example.org:3478?transport=udp",
            "turn:turn.example.org:3478?transport=tcp",
            "turn:turn.example.org:5349?transport=tcp",
        ];
        let dtls = "turns:turn.example.org:5349?transport=udp";
        assert_eq!(told(&settings, &[]), [&plain[..], &[dtls]].concat());
        let tls =
            ["turns:turn.example.org:3478?transport=tcp", "turns:turn.example.org:5349?transport=tcp", dtls];
        assert_eq!(told(&settings, &certificates), [plain, tls].concat());
        settings.tls.only = true;
        assert_eq!(told(&settings, &certificates), [&plain[..2], &tls].concat());
        // Configured URIs are used unchanged.
        settings.credentials.uris = vec!["turns:lb.example.org:443?transport=tcp".to_owned()];
        assert_eq!(told(&settings, &certificates), settings.credentials.uris);
    }

    #[test]
    fn certificate_name_or_external_address_is_the_default_host() {
        let (listeners, settings) =
            (listeners(&["0.0.0.0:3478", "[::]:3478"], &["10.0.0.6:443"], &[], &[]), settings());
        let addresses = [relay("10.0.0.5", Some("203.0.113.5")), relay("2001:db8::5", None)];
        let told = |certificates: &[Certificate]| {
            ClientUris { settings: &settings, listeners: &listeners, certificates, addresses: &addresses }
                .to("turnpike")
        };
        let by_address = [
            "turn:203.0.113.5:3478?transport=udp",
            "turn:[2001:db8::5]:3478?transport=udp",
            "turn:10.0.0.6:443?transport=tcp",
        ];
        assert_eq!(told(&[]), by_address);
        assert_eq!(
            told(&certificate(&["*.example.org", "turn.example.org", "b.example.org"])),
            [
                "turn:turn.example.org:3478?transport=udp",
                "turn:turn.example.org:443?transport=tcp",
                "turns:turn.example.org:443?transport=tcp",
            ]
        );
        // A wildcard name covers no address, and is not a host that clients can connect to.
        assert_eq!(told(&certificate(&["*.example.org"])), by_address);
        let with_address = certificate(&["10.0.0.6"]);
        assert_eq!(told(&with_address), [&by_address[..], &["turns:10.0.0.6:443?transport=tcp"]].concat());
    }

    #[test]
    fn configured_address_is_used_for_listeners_of_its_family() {
        let mut settings = settings();
        settings.credentials.names =
            ["203.0.113.5", "2001:db8::5", "turn.example.org"].map(str::to_owned).into();
        let listeners = listeners(&["[::]:3478"], &[], &[], &[]);
        let ways =
            ClientUris { settings: &settings, listeners: &listeners, certificates: &[], addresses: &[] };
        assert_eq!(
            ways.to("turnpike"),
            ["turn:[2001:db8::5]:3478?transport=udp", "turn:turn.example.org:3478?transport=udp"]
        );
    }

    #[test]
    fn loopback_is_used_only_without_other_listeners() {
        let (settings, listeners) = (settings(), listeners(&["127.0.0.1:50000"], &["[::1]:50001"], &[], &[]));
        let ways =
            ClientUris { settings: &settings, listeners: &listeners, certificates: &[], addresses: &[] };
        assert_eq!(
            ways.to("turnpike"),
            ["turn:127.0.0.1:50000?transport=udp", "turn:[::1]:50001?transport=tcp"]
        );
    }

    #[test]
    fn realm_uris_prefer_listeners_that_challenge_with_that_realm() {
        let mut settings = settings();
        settings.credentials.names = vec!["turn.example.org".to_owned()];
        // A listener whose port the kernel chose still belongs to its realm.
        settings.listen = vec![at("10.0.0.1:0"), at("10.0.0.2:3478")];
        let realm = |name: &str, listen: &[&str], server_names: &[&str]| RealmSettings {
            name: name.to_owned(),
            secrets: vec![Secret::new("s")],
            listen: listen.iter().map(|text| at(text)).collect(),
            server_names: server_names.iter().map(|name| (*name).to_owned()).collect(),
            ..RealmSettings::default()
        };
        settings.realms = vec![
            realm("own", &["10.0.0.1:0"], &[]),
            realm("beside", &[], &[]),
            realm("named", &[], &["turn.named.example"]),
        ];
        let listeners =
            listeners(&["10.0.0.1:40000", "10.0.0.2:3478"], &["10.0.0.1:40000", "10.0.0.2:3478"], &[], &[]);
        let certificates = certificate(&["turn.example.org", "turn.named.example"]);
        let ways = ClientUris {
            settings: &settings,
            listeners: &listeners,
            certificates: &certificates,
            addresses: &[],
        };
        let at_port = |port: u16| {
            [
                format!("turn:turn.example.org:{port}?transport=udp"),
                format!("turn:turn.example.org:{port}?transport=tcp"),
                format!("turns:turn.example.org:{port}?transport=tcp"),
            ]
        };
        assert_eq!(ways.to("own"), at_port(40_000));
        assert_eq!(ways.to("turnpike"), at_port(3478));
        assert_eq!(ways.to("beside"), at_port(3478), "for clients that know the realm");
        assert_eq!(
            ways.to("named"),
            ["turns:turn.named.example:40000?transport=tcp", "turns:turn.named.example:3478?transport=tcp"]
        );
        assert!(ways.to("nowhere").is_empty());
    }
}
