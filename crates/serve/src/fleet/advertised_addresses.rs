//! Addresses that clients of other nodes are redirected to: configured, or derived from listeners and relay
//! addresses.

use std::net::{IpAddr, SocketAddr};

use turnpike_config::FleetSettings;
use turnpike_fleet::Entrance;
use turnpike_relay::{Config, Listeners, RelayAddress};
use turnpike_turn::server::Transport;

/// Advertised addresses, and the local addresses at which requests to them arrive.
pub(super) struct Entrances {
    pub(super) all: Vec<Entrance>,
    pub(super) own: Vec<SocketAddr>,
}

pub(super) fn of(config: &Config, listeners: &Listeners, settings: &FleetSettings) -> Entrances {
    let all = if settings.addresses.is_empty() {
        found(config, listeners, &settings.balancer_ports)
    } else {
        settings.addresses.clone()
    };
    if all.is_empty() {
        tracing::warn!(
            "other nodes cannot redirect clients here: no listener has an address that clients can reach; set fleet.addresses"
        );
    }
    let mut own: Vec<SocketAddr> = all.iter().map(|entrance| entrance.address).collect();
    // Behind a 1:1 NAT, requests arrive at the inner address.
    for RelayAddress { bind, external } in &config.relay {
        let inner = all.iter().map(|entrance| entrance.address).filter(|at| Some(at.ip()) == *external);
        own.extend(inner.map(|at| SocketAddr::new(*bind, at.port())));
    }
    Entrances { all, own }
}

/// Replaces wildcards with the relay addresses, which must be reachable by clients anyway.
fn found(config: &Config, listeners: &Listeners, balancer_ports: &[u16]) -> Vec<Entrance> {
    let Listeners { udp, tcp, tls, dtls } = listeners;
    let has_tls = config.streams.tls.is_some();
    let mut all = Vec::new();
    let mut put = |transport: Transport, listeners: &[SocketAddr]| {
        for listener in listeners.iter().filter(|listener| !balancer_ports.contains(&listener.port())) {
            for address in reached(config, *listener) {
                let entrance = Entrance { transport, address };
                if !all.contains(&entrance) {
                    all.push(entrance);
                }
            }
        }
    };
    put(Transport::Udp, udp);
    put(Transport::Tcp, tcp);
    if has_tls {
        // Dedicated TLS ports first, because clients are configured with them.
        put(Transport::Tls, tls);
        put(Transport::Tls, tcp);
    }
    if !config.streams.tls_only {
        put(Transport::Tcp, tls);
    }
    put(Transport::Dtls, dtls);
    all
}

fn reached(config: &Config, listener: SocketAddr) -> Vec<SocketAddr> {
    let outer = |ip: IpAddr| {
        let relay = config.relay.iter().find(|relay| relay.bind == ip);
        relay.and_then(|relay| relay.external).unwrap_or(ip)
    };
    let ips: Vec<IpAddr> = if listener.ip().is_unspecified() {
        let same = config.relays_up().filter(|relay| relay.bind.is_ipv4() == listener.is_ipv4());
        same.map(|relay| relay.external.unwrap_or(relay.bind)).collect()
    } else {
        vec![outer(listener.ip())]
    };
    ips.into_iter().map(|ip| SocketAddr::new(ip, listener.port())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        let relay = |bind: &str, external: Option<&str>| RelayAddress {
            bind: bind.parse().expect("an address"),
            external: external.map(|external| external.parse().expect("an address")),
        };
        Config {
            relay: vec![relay("10.0.0.5", Some("203.0.113.5")), relay("2001:db8::5", None)],
            ..Config::default()
        }
    }

    fn listeners(udp: &[&str], tcp: &[&str], tls: &[&str], dtls: &[&str]) -> Listeners {
        let addresses =
            |all: &[&str]| all.iter().map(|address| address.parse().expect("an address")).collect::<Vec<_>>();
        Listeners { udp: addresses(udp), tcp: addresses(tcp), tls: addresses(tls), dtls: addresses(dtls) }
    }

    fn shown(entrances: &Entrances) -> Vec<String> {
        entrances.all.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn wildcard_listeners_are_advertised_at_the_relay_addresses() {
        let listeners = listeners(
            &["0.0.0.0:3478", "[::]:3478"],
            &["10.0.0.5:3478"],
            &["10.0.0.5:5349"],
            &["192.0.2.9:5349"],
        );
        let entrances = of(&config(), &listeners, &FleetSettings::default());
        assert_eq!(
            shown(&entrances),
            [
                "udp://203.0.113.5:3478",
                "udp://[2001:db8::5]:3478",
                "tcp://203.0.113.5:3478",
                "tcp://203.0.113.5:5349",
                "dtls://192.0.2.9:5349",
            ]
        );
        assert!(
            entrances.own.contains(&"10.0.0.5:3478".parse().expect("an address")),
            "inner address behind the NAT"
        );
    }

    #[test]
    fn ports_behind_a_balancer_are_not_advertised() {
        let settings = FleetSettings { balancer_ports: vec![13_478], ..FleetSettings::default() };
        let listeners = listeners(&["0.0.0.0:3478", "0.0.0.0:13478"], &[], &[], &[]);
        let entrances = of(&config(), &listeners, &settings);
        assert_eq!(shown(&entrances), ["udp://203.0.113.5:3478"]);
        assert!(!entrances.own.contains(&"10.0.0.5:13478".parse().expect("an address")));
    }

    #[test]
    fn configured_addresses_replace_derived_ones() {
        let named: Entrance = "tls://198.51.100.1:443".parse().expect("an entrance");
        let settings = FleetSettings { addresses: vec![named], ..FleetSettings::default() };
        let entrances = of(&config(), &listeners(&["0.0.0.0:3478"], &[], &[], &[]), &settings);
        assert_eq!(shown(&entrances), ["tls://198.51.100.1:443"]);
        assert_eq!(entrances.own, [named.address]);
    }
}
