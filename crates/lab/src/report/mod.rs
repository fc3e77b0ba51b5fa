//! Presentation of records: an HTML page, and a comparison of several records.
//!
//! The page is a single file without scripts, fonts or external resources.

mod compare;
mod page;
mod plots;
mod tables;

use std::path::Path;

pub(crate) use compare::compare;
pub(crate) use page::page;

use crate::error::LabError;
use crate::metric::{self, Preference};
use crate::record::{RunRecord, write_whole};
use crate::verdict::{MetricVerdict, judge};

pub(crate) const FILE: &str = "report.html";

pub(crate) fn save(dir: &Path, record: &RunRecord) -> Result<(), LabError> {
    write_whole(&dir.join(FILE), page(record).as_bytes())
}

pub(crate) fn verdicts(record: &RunRecord) -> Vec<MetricVerdict> {
    record.candidates().map(|subject| judge(record, subject, &record.experiment.metric)).collect()
}

pub(crate) fn other_verdicts(record: &RunRecord, subject: &str) -> Vec<MetricVerdict> {
    let mut names: Vec<&str> =
        record.metrics().into_iter().filter(|&name| name != record.experiment.metric).collect();
    names.sort_by_key(|name| (metric::direction(name) == Preference::Neither, *name));
    names.into_iter().map(|name| judge(record, subject, name)).collect()
}
