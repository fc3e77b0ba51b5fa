//! `[usage]`: the usage ledger, and volume quotas.

use std::ops::RangeInclusive;

use strum::{IntoStaticStr, VariantArray};
use turnpike_convert::toml_text::{list, quoted};
use turnpike_strict::{Value, ValueNode, find};
use turnpike_turn::server::Bandwidth;

use super::{
    key::ValueKind,
    limit_keys::{rate, scaled},
    read::ValueReader,
};

const BYTES: RangeInclusive<u64> = 1_000..=1_000_000_000_000_000_000;
pub(crate) const MOST_QUOTAS: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageSettings {
    /// Days for which daily sums are kept; 0 records no usage.
    pub days: u32,
    /// Days for which hourly sums are kept.
    pub hour_days: u32,
    pub quotas: Vec<VolumeQuota>,
}

impl Default for UsageSettings {
    fn default() -> Self {
        Self { days: 0, hour_days: 35, quotas: Vec::new() }
    }
}

/// Maximum traffic of each user, API key or realm in a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeQuota {
    pub by: QuotaBy,
    /// Payload of both directions.
    pub bytes: u64,
    pub per: QuotaPeriod,
    pub then: QuotaAction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum QuotaBy {
    User,
    Key,
    Realm,
}

/// Calendar period in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum QuotaPeriod {
    Day,
    Month,
}

impl QuotaPeriod {
    /// Maximum number of days.
    pub(crate) fn days(self) -> u32 {
        match self {
            Self::Day => 1,
            Self::Month => 31,
        }
    }
}

/// Consequence of a used-up quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaAction {
    /// Refuses new allocations.
    Refuse,
    /// Limits each user to this number of bits per second in each direction.
    Slow(u64),
}

pub(super) const QUOTAS: ValueKind<Vec<VolumeQuota>> = ValueKind::list(
    "[[usage.quota]] with by (\"user\", \"key\" or \"realm\") and bytes (1000 to 10^18, optionally with k, M, G or T, such as \"10G\"); \
     optionally per (\"day\" or \"month\") and then (\"refuse\", or bits per second such as \"1M\")",
    |reader, node| reader.list(node, quota),
    |quotas| {
        list(quotas.iter().map(|VolumeQuota { by, bytes, per, then }| {
            let (by, per) = (quoted(by.into()), quoted(per.into()));
            let then = match then {
                QuotaAction::Refuse => quoted("refuse"),
                QuotaAction::Slow(rate) => rate.to_string(),
            };
            format!("{{ by = {by}, bytes = {bytes}, per = {per}, then = {then} }}")
        }))
    },
);

fn quota(reader: &mut ValueReader<'_>, node: &ValueNode) -> Option<VolumeQuota> {
    let entries = reader.table(node, &["by", "bytes", "per", "then"])?;
    let find = |wanted| find(entries, wanted);
    let (Some(by), Some(bytes)) = (find("by"), find("bytes")) else {
        return reader.refuse(node, Some("it needs by and bytes".to_owned()));
    };
    let by = reader.parsed(by, named)?;
    let bytes = match &bytes.value {
        Value::Text(_) => reader.parsed(bytes, |text| {
            let number = scaled(text)?;
            if BYTES.contains(&number) { Ok(number) } else { Err("out of range") }
        })?,
        _ => reader.integer(bytes, &BYTES)?,
    };
    let per = match find("per") {
        Some(node) => reader.parsed(node, named)?,
        None => QuotaPeriod::Month,
    };
    let then = match find("then") {
        Some(node) => action(reader, node)?,
        None => QuotaAction::Refuse,
    };
    Some(VolumeQuota { by, bytes, per, then })
}

fn action(reader: &mut ValueReader<'_>, node: &ValueNode) -> Option<QuotaAction> {
    match &node.value {
        Value::Text(text) if **text == "refuse" => Some(QuotaAction::Refuse),
        Value::Text(_) => reader
            .parsed(node, |text| rate(text)?.map(QuotaAction::Slow).ok_or("a quota without a consequence")),
        _ => reader.integer(node, &Bandwidth::RATES).map(QuotaAction::Slow),
    }
}

fn named<T: Copy + VariantArray + Into<&'static str>>(text: &str) -> Result<T, &'static str> {
    T::VARIANTS.iter().copied().find(|variant| (*variant).into() == text).ok_or("")
}
