//! Detects errors that would abort the startup of `serve`, without opening its sockets: addresses that
//! the machine does not have, missing databases, and unusable GeoIP files.

use std::net::IpAddr;

use turnpike_config::{Mistake, RelayPlace, Settings};
use turnpike_relay::RelayAddress;
use turnpike_stores::{SqliteUse, StoreAddress};

use crate::{fleet, geoip, own_addresses, store};

pub fn check_start(settings: &Settings) -> Vec<Mistake> {
    let mut mistakes = Vec::new();
    match store::checked_address(settings) {
        Ok(address) => mistakes.extend(address.and_then(|address| missing_database(settings, &address))),
        Err(errors) => mistakes.extend(errors.0),
    }
    if let Err(errors) = fleet::address(settings) {
        mistakes.extend(errors.0);
    }
    mistakes.extend(geoip::read(settings).err().into_iter().flatten());
    let foreign = foreign_addresses(settings).into_iter().filter(|foreign| foreign.local.is_some());
    mistakes.extend(foreign.map(|foreign| foreign.mistake(settings)));
    mistakes
}

fn missing_database(settings: &Settings, address: &(StoreAddress, SqliteUse)) -> Option<Mistake> {
    let (StoreAddress::Sqlite(path), SqliteUse::Foreign) = address else { return None };
    let problem = format!("no database {}", path.display());
    (!path.exists()).then(|| {
        Mistake::new(settings.origin("store.url"), "store.url", problem, "the path of an existing database")
    })
}

pub fn waited_for(settings: &Settings) -> Vec<String> {
    let addresses = foreign_addresses(settings).into_iter();
    addresses
        .filter(|foreign| foreign.local.is_none())
        .map(|foreign| foreign.mistake(settings).to_string())
        .collect()
}

struct Foreign {
    key: &'static str,
    ip: IpAddr,
    /// Local address, if the configured pair is swapped, which aborts startup.
    local: Option<IpAddr>,
}

impl Foreign {
    fn mistake(&self, settings: &Settings) -> Mistake {
        let Self { key, ip, local } = *self;
        let expected = match local {
            // coturn's option has the public address first.
            Some(local) => format!("{local}={ip}: this machine has {local}, so it must come first"),
            None if key == "relay.addresses" => {
                "an address of this machine; behind a NAT, LOCAL=PUBLIC with the public address last"
                    .to_owned()
            }
            None => "an address of this machine".to_owned(),
        };
        let waits = if local.is_some() { "" } else { "; serve starts without it and waits for it" };
        let problem = format!("this machine does not have the address {ip}{waits}");
        Mistake::new(settings.origin(key), key, problem, expected)
    }
}

/// All configured addresses that the machine does not have; empty if its addresses cannot be read.
fn foreign_addresses(settings: &Settings) -> Vec<Foreign> {
    let Ok(own) = own_addresses::read() else { return Vec::new() };
    let listeners = [
        ("server.listen", &settings.listen),
        ("tls.listen", &settings.tls.listen),
        ("dtls.listen", &settings.dtls.listen),
        ("credentials.listen", &settings.credentials.listen),
    ];
    let listeners = listeners.into_iter().flat_map(|(key, all)| all.iter().map(move |at| (key, at.ip())));
    let admin = settings.admin.tcp().map(|at| ("admin.listen", at.ip()));
    let fixed: Vec<RelayAddress> = settings.relay.addresses.iter().filter_map(RelayPlace::fixed).collect();
    let relays = fixed.iter().map(|relay| ("relay.addresses", relay.bind));
    let discovery =
        settings.discovery.addresses.iter().map(|address| ("nat_discovery.addresses", address.bind));
    let lacks = |ip: IpAddr| !own_addresses::has(&own, ip);
    let named = listeners.chain(admin).chain(relays).chain(discovery);
    let foreign = named.filter(|(_, ip)| lacks(*ip)).map(|(key, ip)| {
        let pair = fixed.iter().find(|relay| key == "relay.addresses" && relay.bind == ip);
        let local = pair.and_then(|relay| relay.external).filter(|external| !lacks(*external));
        Foreign { key, ip, local }
    });
    foreign.collect()
}

#[cfg(test)]
mod tests {
    use turnpike_config::{AdminAddress, RelaySettings, Secret};

    use super::*;

    #[test]
    fn addresses_of_other_machines_and_missing_databases_are_named() {
        let mut settings = Settings {
            listen: vec![
                ([203, 0, 113, 8], 3478).into(),
                ([0, 0, 0, 0], 3479).into(),
                ([127, 0, 0, 9], 1).into(),
            ],
            relay: RelaySettings {
                addresses: vec![
                    RelayPlace::At(RelayAddress {
                        bind: [203, 0, 113, 5].into(),
                        external: Some([127, 0, 0, 1].into()),
                    }),
                    RelayPlace::At(RelayAddress { bind: [203, 0, 113, 6].into(), external: None }),
                ],
                ..RelaySettings::default()
            },
            ..Settings::default()
        };
        settings.store.url = Some(Secret::new("sqlite:///nowhere/turn.sqlite"));
        settings.credentials.listen = vec![([203, 0, 113, 7], 443).into()];
        settings.admin.listen = vec![AdminAddress::Tcp(([203, 0, 113, 9], 9641).into())];
        let mistakes: Vec<String> = check_start(&settings).iter().map(ToString::to_string).collect();
        let warnings = waited_for(&settings);
        for (told, words) in [
            (&mistakes, "store.url: no database /nowhere/turn.sqlite"),
            (&mistakes, "127.0.0.1=203.0.113.5: this machine has 127.0.0.1, so it must come first"),
            (
                &warnings,
                "server.listen: this machine does not have the address 203.0.113.8; serve starts without it",
            ),
            (&warnings, "relay.addresses: this machine does not have the address 203.0.113.6; serve starts"),
            (
                &warnings,
                "credentials.listen: this machine does not have the address 203.0.113.7; serve starts without it",
            ),
            (&warnings, "admin.listen: this machine does not have the address 203.0.113.9; serve starts"),
        ] {
            assert!(told.iter().any(|line| line.contains(words)), "{words}: {told:?}");
        }
        assert_eq!((mistakes.len(), warnings.len()), (2, 4), "{mistakes:?} {warnings:?}");
        assert_eq!(check_start(&Settings::default()), []);
    }
}
