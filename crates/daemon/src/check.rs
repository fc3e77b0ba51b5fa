//! Finds what would end `serve` at its start, without opening a socket of the server: addresses of other machines, databases that do not exist.

use std::{collections::BTreeSet, fs, net::IpAddr};

use turnpike_config::{Mistake, RelayPlace, Settings};
use turnpike_relay::RelayAddress;
use turnpike_stores::{SqliteUse, StoreAddress};
use turnpike_wire::address::canonical_ip;

use crate::{fleet, own_addresses, store};

/// All of it, each with the place that names it.
pub fn check_start(settings: &Settings) -> Vec<Mistake> {
    let mut mistakes = Vec::new();
    match store::address(settings) {
        Ok(address) => mistakes.extend(address.and_then(|address| missing_database(settings, &address))),
        Err(errors) => mistakes.extend(errors.0),
    }
    if let Err(errors) = fleet::address(settings) {
        mistakes.extend(errors.0);
    }
    // With this any address can be bound (ip(7)).
    let any_can_be_bound = ["ipv4", "ipv6"].into_iter().any(|family| {
        let path = format!("/proc/sys/net/{family}/ip_nonlocal_bind");
        fs::read_to_string(path).is_ok_and(|value| value.trim() == "1")
    });
    if let Ok(own) = own_addresses::read()
        && !any_can_be_bound
    {
        mistakes.extend(foreign_addresses(settings, &own));
    }
    mistakes
}

fn missing_database(settings: &Settings, address: &(StoreAddress, SqliteUse)) -> Option<Mistake> {
    let (StoreAddress::Sqlite(path), SqliteUse::Foreign) = address else { return None };
    let problem = format!("there is no database {}", path.display());
    (!path.exists()).then(|| {
        Mistake::new(settings.origin("store.url"), "store.url", problem, "the path of a database that exists")
    })
}

fn foreign_addresses(settings: &Settings, own: &BTreeSet<IpAddr>) -> Vec<Mistake> {
    let listeners = [
        ("server.listen", &settings.listen),
        ("tls.listen", &settings.tls_listen),
        ("dtls.listen", &settings.dtls_listen),
        ("credentials.listen", &settings.credentials.listen),
    ];
    let listeners = listeners.into_iter().flat_map(|(key, all)| all.iter().map(move |at| (key, at.ip())));
    let admin = settings.admin.tcp().map(|at| ("admin.listen", at.ip()));
    let fixed: Vec<RelayAddress> = settings.relay_addresses.iter().filter_map(RelayPlace::fixed).collect();
    let relays = fixed.iter().map(|relay| ("relay.addresses", relay.bind));
    let discovery =
        settings.discovery.addresses.iter().map(|address| ("nat_discovery.addresses", address.bind));
    let is_foreign = |ip: IpAddr| {
        let ip = canonical_ip(ip);
        !ip.is_unspecified() && !ip.is_loopback() && !own.contains(&ip)
    };
    let mistake = |(key, ip): (&str, IpAddr)| {
        // coturn writes the public address first.
        let swapped = fixed.iter().find(|relay| {
            key == "relay.addresses"
                && relay.bind == ip
                && relay.external.is_some_and(|external| own.contains(&canonical_ip(external)))
        });
        let expected = match swapped.and_then(|relay| relay.external) {
            Some(local) => format!("{local}={ip}: this machine has {local}, which comes first"),
            None if key == "relay.addresses" => {
                "an address of this machine; behind a NAT LOCAL=PUBLIC, with the public address last"
                    .to_owned()
            }
            None => "an address of this machine".to_owned(),
        };
        Mistake::new(
            settings.origin(key),
            key,
            format!("this machine does not have the address {ip}"),
            expected,
        )
    };
    let all = listeners.chain(admin).chain(relays).chain(discovery);
    all.filter(|(_, ip)| is_foreign(*ip)).map(mistake).collect()
}

#[cfg(test)]
mod tests {
    use turnpike_config::Secret;

    use super::*;

    #[test]
    fn foreign_addresses_and_missing_databases_are_named() {
        let mut settings = Settings {
            listen: vec![
                ([192, 0, 2, 1], 3478).into(),
                ([0, 0, 0, 0], 3479).into(),
                ([127, 0, 0, 9], 1).into(),
            ],
            relay_addresses: vec![
                RelayPlace::At(RelayAddress {
                    bind: [203, 0, 113, 5].into(),
                    external: Some([127, 0, 0, 1].into()),
                }),
                RelayPlace::At(RelayAddress { bind: [203, 0, 113, 6].into(), external: None }),
            ],
            ..Settings::default()
        };
        settings.store.url = Some(Secret::new("sqlite:///nowhere/turn.sqlite"));
        let told: Vec<String> = check_start(&settings).iter().map(ToString::to_string).collect();
        for words in [
            "store.url: there is no database /nowhere/turn.sqlite",
            "server.listen: this machine does not have the address 192.0.2.1",
            "127.0.0.1=203.0.113.5: this machine has 127.0.0.1, which comes first",
            "relay.addresses: this machine does not have the address 203.0.113.6",
        ] {
            assert!(told.iter().any(|line| line.contains(words)), "{words}: {told:?}");
        }
        assert_eq!(told.len(), 4, "{told:?}");
        assert_eq!(check_start(&Settings::default()), []);
    }
}
