//! `[[realm]]`: settings of a realm other than `server.realm`, and the table of its keys.

use std::{net::SocketAddr, ops::RangeInclusive};

use turnpike_wire::names::server_name;

use super::{
    ConfiguredUser,
    key::{self, KeyChange, ValueKind, list_of, settings},
    keys,
    limit_keys::{REALM_MAX_ALLOCATION_DURATION, REALM_RATE},
    tables::KeyPosition,
};
use crate::{Origin, Secret};

settings! {
    RealmSettings by REALM_KEYS {
        name: String = String::new(), reload "realm.name" keys::REALM;
        users: Vec<ConfiguredUser> = Vec::new(), reload "realm.users" keys::USERS;
        secrets: Vec<Secret> = Vec::new(), reload "realm.secrets" keys::SECRETS;
        /// Listeners of this realm; they serve no realm that does not name them. If empty, all listeners that
        /// no realm names.
        listen: Vec<SocketAddr> = Vec::new(), reload "realm.listen" keys::ADDRESSES
            => "a list of addresses that the server listens on, such as [\"0.0.0.0:3478\"]";
        /// Server names (SNI) of TLS and DTLS clients that select this realm, in lower case.
        server_names: Vec<String> = Vec::new(), reload "realm.server_names" SERVER_NAMES;
        /// Maximum number of allocations of all users together.
        allocations: Option<usize> = None, reload "realm.allocations" LIMIT;
        allocations_per_user: Option<usize> = None, reload "realm.allocations_per_user" LIMIT;
        /// Bits per second of the whole realm, in each direction.
        bits_per_second: Option<Option<u64>> = None, reload "realm.bits_per_second" REALM_RATE;
        /// Bits per second of each user.
        bits_per_second_per_user: Option<Option<u64>> = None, reload "realm.bits_per_second_per_user" REALM_RATE;
        /// Bits per second of each allocation.
        bits_per_second_per_allocation: Option<Option<u64>> = None,
            reload "realm.bits_per_second_per_allocation" REALM_RATE;
        /// Maximum duration of an allocation in seconds.
        max_allocation_duration: Option<Option<u32>> = None, reload "realm.max_allocation_duration" REALM_MAX_ALLOCATION_DURATION;
        relay_ports: Option<RangeInclusive<u16>> = None, reload "realm.relay_ports" RELAY_PORTS;
        place: KeyPosition = KeyPosition::default();
    }
}

impl RealmSettings {
    pub fn limits(&self) -> impl Iterator<Item = (&'static str, bool)> + use<> {
        let set = [
            ("realm.allocations", self.allocations.is_some()),
            ("realm.allocations_per_user", self.allocations_per_user.is_some()),
            ("realm.bits_per_second_per_allocation", self.bits_per_second_per_allocation.is_some()),
        ];
        set.into_iter()
    }

    /// Returns true for a `[[realm]]` in the configuration. A realm from a store has only a name and limits.
    pub fn is_configured(&self) -> bool {
        let has_more = !(self.users.is_empty()
            && self.secrets.is_empty()
            && self.listen.is_empty()
            && self.server_names.is_empty());
        has_more || !matches!(self.place.0, Origin::Default)
    }

    pub fn changed(&self, new: &Self) -> Vec<KeyChange> {
        key::changes(REALM_KEYS, self, new)
    }
}

const SERVER_NAMES: ValueKind<Vec<String>> =
    list_of!("a list of host names that TLS clients request, such as [\"turn.example.org\"]", server_name);

/// `None` inherits the limit of the whole server.
const LIMIT: ValueKind<Option<usize>> = ValueKind::one(
    "a number, 1 to 1000000",
    |reader, node| reader.integer(node, &(1..=1_000_000)).map(Some),
    |most| most.map_or_else(String::new, |most| most.to_string()),
);

/// `None` uses the ports that no realm owns.
const RELAY_PORTS: ValueKind<Option<RangeInclusive<u16>>> = ValueKind::one(
    keys::PORTS.expected,
    |reader, node| (keys::PORTS.read)(reader, node).map(Some),
    |ports| ports.as_ref().map_or_else(String::new, keys::PORTS.show),
);
