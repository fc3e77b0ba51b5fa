//! Networks of clients, from the databases in `geoip.files`.

use std::fmt;

use serde::{Deserialize, Serialize};
use turnpike_turn::server::ClientNetwork;
use utoipa::ToSchema;

/// Country and autonomous system of an address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Network)]
#[serde(deny_unknown_fields)]
pub struct NetworkInfo {
    /// Country code (ISO 3166-1); null if unknown.
    #[schema(min_length = 2, max_length = 2, pattern = "^[A-Z]{2}$")]
    pub country: Option<String>,
    /// Number of the autonomous system; null if unknown.
    pub asn: Option<u32>,
}

impl NetworkInfo {
    /// `None` if both are unknown.
    #[must_use]
    pub fn of(network: ClientNetwork) -> Option<Self> {
        let ClientNetwork { country, asn } = network;
        let country = country.map(|country| country.to_string());
        (country.is_some() || asn.is_some()).then_some(Self { country, asn })
    }
}

/// For example `DE AS64500`.
impl fmt::Display for NetworkInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let country = self.country.as_deref().unwrap_or_default();
        let gap = if self.country.is_some() && self.asn.is_some() { " " } else { "" };
        write!(f, "{country}{gap}")?;
        self.asn.map_or(Ok(()), |asn| write!(f, "AS{asn}"))
    }
}
