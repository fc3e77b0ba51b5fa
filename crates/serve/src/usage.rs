//! Usage ledger: traffic of each user, API key and customer, by hour and by day, in a SQL database.
//!
//! ```text
//!  workers ── report_usage every 5 s, ends of allocations ──▶ UsageRecorder: a table per worker
//!                                                                  │ taken by
//!  UsageStore ◀── batches, one transaction each ── UsageLedger ◀───┘ on the control thread; keeps unsaved rows
//! ```

mod account;
mod counts;
mod ledger;
mod quota_keeper;
mod quota_sums;
mod recorder;
mod unsaved;
mod used_quotas;

use std::{path::PathBuf, sync::Arc};

use turnpike_config::{Mistakes, Settings};
use turnpike_stores::UsageStore;

use crate::store;

pub(crate) use counts::{UsageCounts, UsageFigures};
pub(crate) use ledger::{UsageLedger, UsageTimes};
pub(crate) use quota_keeper::QuotaKeeper;
pub(crate) use recorder::UsageLog;
pub(crate) use used_quotas::UsedQuotas;

const FILE: &str = "usage.sqlite";

/// File of the ledger, if it is not in the users' database.
pub(crate) fn file(settings: &Settings) -> Option<PathBuf> {
    let dir = settings.store.state.directory().filter(|_| settings.usage.days > 0);
    dir.map(|dir| dir.join(FILE))
}

/// Opens the ledger; `None` if none is configured or there is no place for it. Does not connect yet.
pub(crate) fn open(settings: &Settings) -> Result<Option<Arc<UsageStore>>, Mistakes> {
    if settings.usage.days == 0 {
        return Ok(None);
    }
    let address = store::checked_address(settings)?.map(|(address, _)| address);
    let ledger = UsageStore::new(address.as_ref(), file(settings).as_deref()).map(Arc::new);
    match &ledger {
        Some(ledger) => tracing::info!("recording usage in {}", ledger.name()),
        None => tracing::warn!(
            "usage is not recorded although usage.days is set, and usage.quota has no effect: set store.state to a directory, or store.url to a \
             PostgreSQL or MySQL database"
        ),
    }
    Ok(ledger)
}
