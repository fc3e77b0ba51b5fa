//! The usage ledger.

use std::time::Duration;

use axum::{
    extract::State,
    http::{StatusCode, Uri},
};
use jiff::{Timestamp, civil::Date, tz::TimeZone};
use tokio::time::timeout;
use turnpike_api::{Traffic, UsageEntry, UsageFilter, UsageGapInfo, UsageGrouping, UsageList};
use turnpike_stores::{DAY, HOUR, StoreError, UsageBy, UsageGap, UsageQuery, UsageSum};

use super::{App, Json, query, server_of};
use crate::{accounts, problem::Problem, program::seconds};

/// Default length of a page.
const USUAL: usize = 100;
/// Maximum length of a page.
const MOST: usize = 1000;
const DEADLINE: Duration = Duration::from_secs(20);
/// Default length of the period.
const USUAL_PERIOD: u64 = 30 * DAY;

/// Sums usage by user, API key, identifier, realm, node, hour or day. Usage appears a few seconds after the traffic.
/// Whole days are kept for `usage.days`, hours for `usage.hour_days`; both are in UTC.
#[utoipa::path(
    get,
    path = "/v1/usage",
    tag = "usage",
    params(UsageFilter),
    responses(
        (status = 200, description = "Sums, and runs whose last seconds are missing.", body = UsageList),
    ),
)]
pub(super) async fn usage(State(app): State<App>, uri: Uri) -> Result<Json<UsageList>, Problem> {
    let wanted: UsageFilter = query(&uri)?;
    let ledger = server_of(&*app.program)?.usage.ok_or_else(|| {
        let detail = "usage is not recorded: set usage.days and restart the server";
        Problem::new(StatusCode::NOT_FOUND, "no_usage", detail)
    })?;
    let limit = wanted.limit.unwrap_or(USUAL);
    if !(1..=MOST).contains(&limit) {
        return Err(Problem::bad_request(format!("limit must be 1 to {MOST}")));
    }
    let from = wanted.cursor.as_deref().map_or(Ok(0), str::parse::<usize>);
    let from = from.map_err(|_| Problem::bad_request("cursor is not one of a previous page"))?;
    let now = unix(Timestamp::now());
    let until = wanted.until.as_deref().map(|text| time("until", text)).transpose()?.unwrap_or(now);
    let since = wanted.since.as_deref().map(|text| time("since", text)).transpose()?;
    let since = since.unwrap_or_else(|| until.saturating_sub(USUAL_PERIOD) / DAY * DAY);
    if since >= until {
        return Err(Problem::bad_request("since must be before until"));
    }
    let by = wanted.by.unwrap_or_default();
    let only = [wanted.realm, wanted.user, wanted.key, wanted.identifier, wanted.node];
    let only = only.map(Option::unwrap_or_default);
    // Today's sum is complete until now; hours would be read one by one.
    let end = if until < now { until } else { until.next_multiple_of(DAY) };
    let wanted = UsageQuery { by: stored(by), since, until: end, only };
    let read =
        async { Ok::<_, StoreError>((ledger.sums(&wanted).await?, ledger.gaps(since, until, now).await?)) };
    let (sums, gaps) = match timeout(DEADLINE, read).await {
        Ok(read) => read.map_err(accounts::told)?,
        Err(_) => {
            let detail = format!("{} does not answer within {} s", ledger.name(), DEADLINE.as_secs());
            return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "store_unavailable", detail));
        }
    };
    let next = (from.saturating_add(limit) < sums.len()).then(|| (from + limit).to_string());
    let page = sums.into_iter().skip(from).take(limit).map(|sum| entry(by, sum)).collect();
    let gaps = gaps.into_iter().map(gap).collect();
    let [since, until] = [since - since % HOUR, until.next_multiple_of(HOUR)].map(written);
    Ok(Json(UsageList { since, until, usage: page, gaps, next }))
}

/// Parses a time or a date, which is in UTC.
fn time(name: &str, text: &str) -> Result<u64, Problem> {
    let at = text.parse::<Timestamp>().ok();
    let at =
        at.or_else(|| text.parse::<Date>().ok()?.to_zoned(TimeZone::UTC).ok().map(|day| day.timestamp()));
    let latest = Timestamp::MAX.as_second() - 366 * 86_400;
    match at {
        Some(at) if (0..latest).contains(&at.as_second()) => Ok(unix(at)),
        _ => Err(Problem::bad_request(format!(
            "{name} must be a time such as 2026-11-30T18:00:00Z, or a date such as 2026-11-30"
        ))),
    }
}

fn unix(at: Timestamp) -> u64 {
    u64::try_from(at.as_second()).unwrap_or_default()
}

fn written(unix: u64) -> String {
    let at = i64::try_from(unix).ok().and_then(|unix| Timestamp::from_second(unix).ok());
    seconds(at.unwrap_or(Timestamp::MAX))
}

fn stored(by: UsageGrouping) -> UsageBy {
    match by {
        UsageGrouping::User => UsageBy::User,
        UsageGrouping::Key => UsageBy::Key,
        UsageGrouping::Identifier => UsageBy::Identifier,
        UsageGrouping::Realm => UsageBy::Realm,
        UsageGrouping::Node => UsageBy::Node,
        UsageGrouping::Hour => UsageBy::Hour,
        UsageGrouping::Day => UsageBy::Day,
    }
}

fn entry(by: UsageGrouping, sum: UsageSum) -> UsageEntry {
    let UsageSum { account, node, begins, amount } = sum;
    let of = |groupings: &[UsageGrouping], text: &str| groupings.contains(&by).then(|| text.to_owned());
    let traffic = |(datagrams, bytes): (u64, u64)| Traffic { datagrams, bytes };
    #[expect(clippy::cast_precision_loss, reason = "exact below 285,000 years")]
    let seconds = amount.lived_ms as f64 / 1000.0;
    UsageEntry {
        user: of(&[UsageGrouping::User], &account.user),
        realm: of(&[UsageGrouping::User, UsageGrouping::Realm], &account.realm),
        key: of(&[UsageGrouping::Key], &account.key),
        identifier: of(&[UsageGrouping::Identifier], &account.identifier),
        node: of(&[UsageGrouping::Node], &node),
        begins: begins.map(written),
        allocations: amount.allocations,
        seconds,
        to_peer: traffic(amount.to_peer),
        to_client: traffic(amount.to_client),
        peak_bits_per_second: amount.peak_bps,
    }
}

fn gap(gap: UsageGap) -> UsageGapInfo {
    UsageGapInfo { node: gap.node, started: written(gap.started), last: written(gap.last) }
}
