//! Rate and time limits, for all realms and for one, and their conversion for the TURN server.

use std::collections::HashMap;

use turnpike_convert::toml_text::quoted;
use turnpike_strict::{Value, ValueNode};
use turnpike_turn::server::{Bandwidth, MaxAllocationDuration, PrefixLengths, Rates, RefusalLimit};

use super::{
    key::{ValueKind, number_or_none},
    read::ValueReader,
};
use crate::{RealmSettings, Settings, realms};

/// Bits per second; `None` for no limit.
pub(super) const RATE: ValueKind<Option<u64>> = ValueKind::one(
    "bits per second, 1000 to 1000000000000, optionally with k, M or G, such as \"2M\", or \"none\"",
    read_rate,
    show_rate,
);

/// [`RATE`] of one realm; `None` inherits the setting for all realms.
pub(super) const REALM_RATE: ValueKind<Option<Option<u64>>> = ValueKind::one(
    RATE.expected,
    |reader, node| read_rate(reader, node).map(Some),
    |rate| rate.as_ref().map_or_else(String::new, show_rate),
);

/// Maximum duration of an allocation in seconds; `None` for no limit.
pub(super) const MAX_ALLOCATION_DURATION: ValueKind<Option<u32>> =
    number_or_none!(u32, "seconds", 60..=31_536_000);

/// [`MAX_ALLOCATION_DURATION`] of one realm; `None` inherits the setting for all realms.
pub(super) const REALM_MAX_ALLOCATION_DURATION: ValueKind<Option<Option<u32>>> = ValueKind::one(
    MAX_ALLOCATION_DURATION.expected,
    |reader, node| (MAX_ALLOCATION_DURATION.read)(reader, node).map(Some),
    |length| length.as_ref().map_or_else(String::new, MAX_ALLOCATION_DURATION.show),
);

fn read_rate(reader: &mut ValueReader<'_>, node: &ValueNode) -> Option<Option<u64>> {
    match &node.value {
        Value::Text(_) => reader.parsed(node, rate),
        _ => reader.integer(node, &Bandwidth::RATES).map(Some),
    }
}

/// Parses a rate such as `2M` or `none`.
pub fn rate(text: &str) -> Result<Option<u64>, &'static str> {
    if text == "none" {
        return Ok(None);
    }
    let rate = scaled(text)?;
    if Bandwidth::RATES.contains(&rate) { Ok(Some(rate)) } else { Err("out of range") }
}

/// Parses a whole number, optionally with a decimal unit such as `10G`.
pub(super) fn scaled(text: &str) -> Result<u64, &'static str> {
    let (digits, factor) = match text.char_indices().next_back() {
        Some((at, 'k')) => (&text[..at], 1_000),
        Some((at, 'M')) => (&text[..at], 1_000_000),
        Some((at, 'G')) => (&text[..at], 1_000_000_000),
        Some((at, 'T')) => (&text[..at], 1_000_000_000_000),
        _ => (text, 1),
    };
    let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    number.ok_or("not a whole number")
}

fn show_rate(rate: &Option<u64>) -> String {
    rate.map_or_else(|| quoted("none"), |rate| rate.to_string())
}

pub(super) fn rates_of(settings: &Settings, realm: &RealmSettings) -> Rates {
    Rates {
        per_allocation: realm
            .bits_per_second_per_allocation
            .unwrap_or(settings.rates.bits_per_second_per_allocation),
        per_user: realm.bits_per_second_per_user.unwrap_or(settings.rates.bits_per_second_per_user),
        per_realm: realm.bits_per_second.unwrap_or(settings.rates.bits_per_second_per_realm),
    }
}

pub fn rates(settings: &Settings, realm: &str) -> Rates {
    let everywhere = Rates {
        per_allocation: settings.rates.bits_per_second_per_allocation,
        per_user: settings.rates.bits_per_second_per_user,
        per_realm: settings.rates.bits_per_second_per_realm,
    };
    if realm == settings.realm {
        let per_allocation = settings.stored.rate_per_allocation.or(everywhere.per_allocation);
        return Rates { per_allocation, ..everywhere };
    }
    let own = settings.realms.iter().find(|own| own.name == realm);
    own.map_or(everywhere, |own| rates_of(settings, own))
}

pub fn bandwidth(settings: &Settings) -> Bandwidth {
    let rates = Rates {
        per_allocation: settings.rates.bits_per_second_per_allocation,
        per_user: settings.rates.bits_per_second_per_user,
        per_realm: settings.rates.bits_per_second_per_realm,
    };
    let tenants = settings.realms.iter().map(|realm| (realm.name.as_str(), rates_of(settings, realm)));
    let main = (settings.realm.as_str(), self::rates(settings, &settings.realm));
    let own = tenants.chain([main]).filter(|(_, own)| *own != rates);
    let realms = own.map(|(realm, own)| (realm.into(), own)).collect();
    Bandwidth { rates, total: settings.rates.bits_per_second, burst_ms: settings.rates.burst, realms }
}

pub fn max_allocation_duration(settings: &Settings) -> MaxAllocationDuration {
    let own = settings
        .realms
        .iter()
        .filter_map(|realm| Some((realm.name.as_str().into(), realm.max_allocation_duration?)));
    MaxAllocationDuration {
        seconds: settings.max_allocation_duration,
        realms: own.collect::<HashMap<_, _>>(),
    }
}

pub fn prefixes(settings: &Settings) -> PrefixLengths {
    PrefixLengths { v4: settings.prefix_v4, v6: settings.prefix_v6 }
}

/// Value of [`turnpike_turn::server::ServerConfig::refusals`]: one worker's share of the limit.
pub fn refusals(settings: &Settings, workers: usize) -> Option<RefusalLimit> {
    let workers = u32::try_from(workers).unwrap_or(u32::MAX).max(1);
    settings.refusals_per_prefix.map(|rate| RefusalLimit { per_second: rate.div_ceil(workers) })
}

/// Returns a realm that has no ports, because other realms own them all.
pub(super) fn without_ports(settings: &Settings) -> Option<&str> {
    let mut owned = vec![false; 1 << 16];
    for range in settings.realms.iter().filter_map(|realm| realm.relay_ports.as_ref()) {
        owned[usize::from(*range.start())..=usize::from(*range.end())].fill(true);
    }
    if !settings.relay.ports.clone().all(|port| owned[usize::from(port)]) {
        return None;
    }
    let tenant = settings.realms.iter().find(|realm| realm.relay_ports.is_none());
    let main = realms::serves_main(settings).then_some(settings.realm.as_str());
    main.or(tenant.map(|realm| realm.name.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RateSettings;

    #[test]
    fn rates_may_have_a_unit() {
        for (text, bits) in [
            ("1000", Some(1000)),
            ("64k", Some(64_000)),
            ("2M", Some(2_000_000)),
            ("1000G", Some(Bandwidth::MOST)),
            ("none", None),
        ] {
            assert_eq!(rate(text), Ok(bits), "{text}");
        }
        for text in ["", "k", "999", "0", "1001G", "2m", "2 M", "1.5M", "-1", "99999999999G"] {
            assert!(rate(text).is_err(), "{text}");
        }
    }

    #[test]
    fn store_rate_of_the_main_realm_is_in_bytes() {
        for (bytes, bits) in [(1, 1000), (125, 1000), (64_000, 512_000), (u64::MAX, Bandwidth::MOST)] {
            assert_eq!(Bandwidth::from_bytes(bytes), bits);
        }
        let mut settings = Settings {
            rates: RateSettings {
                bits_per_second_per_allocation: Some(1_000_000),
                ..RateSettings::default()
            },
            realms: vec![RealmSettings { name: "red".to_owned(), ..RealmSettings::default() }],
            ..Settings::default()
        };
        assert!(bandwidth(&settings).realms.is_empty());
        settings.stored.rate_per_allocation = Some(512_000);
        let Bandwidth { rates, realms, .. } = bandwidth(&settings);
        assert_eq!(rates.per_allocation, Some(1_000_000));
        let main = Rates { per_allocation: Some(512_000), ..Rates::default() };
        assert_eq!(realms, [("turnpike".into(), main)].into());
        assert_eq!(super::rates(&settings, "red").per_allocation, Some(1_000_000));
    }

    #[test]
    fn realm_inherits_limits_it_does_not_set() {
        let realm = |name: &str| RealmSettings { name: name.to_owned(), ..RealmSettings::default() };
        let settings = Settings {
            rates: RateSettings {
                bits_per_second: Some(9_000_000),
                bits_per_second_per_user: Some(2_000_000),
                bits_per_second_per_allocation: Some(1_000_000),
                ..RateSettings::default()
            },
            max_allocation_duration: Some(3600),
            realms: vec![
                RealmSettings {
                    bits_per_second: Some(Some(5_000_000)),
                    bits_per_second_per_allocation: Some(None),
                    max_allocation_duration: Some(None),
                    ..realm("blue")
                },
                realm("red"),
            ],
            ..Settings::default()
        };
        let Bandwidth { rates, total, realms, .. } = bandwidth(&settings);
        assert_eq!((total, rates.per_realm, rates.per_user), (Some(9_000_000), None, Some(2_000_000)));
        let blue = Rates { per_allocation: None, per_user: Some(2_000_000), per_realm: Some(5_000_000) };
        assert_eq!((realms.len(), realms.get("blue")), (1, Some(&blue)));
        assert_eq!(super::rates(&settings, "blue"), blue);
        let max_allocation_duration = max_allocation_duration(&settings);
        assert_eq!((max_allocation_duration.seconds, max_allocation_duration.realms.len()), (Some(3600), 1));
        assert_eq!(max_allocation_duration.realms.get("blue"), Some(&None));
        assert_eq!(
            refusals(&Settings { refusals_per_prefix: Some(100), ..settings }, 3).unwrap().per_second,
            34
        );
    }
}
