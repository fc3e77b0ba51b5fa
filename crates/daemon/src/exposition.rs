//! What every page of metrics has: the OpenMetrics text, numbers of this process and of the program, and families with a series
//! for each of several things that count alike.

use std::{
    fmt,
    sync::{Arc, atomic::Ordering},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text},
    metrics::MetricType,
    registry::Registry,
};
use strum::VariantArray;

use crate::{admin::MetricsPage, control::Status, log_limit::LogCounts, logging, process::ProcessUsage};

/// The page of what `scrape` collects.
pub(crate) fn page<C: Collector>(
    scrape: impl Fn(Common) -> C + Send + Sync + 'static,
    status: Arc<Status>,
    log: Arc<LogCounts>,
) -> MetricsPage {
    Arc::new(move || {
        let text = encode(scrape(Common {
            process: ProcessUsage::read(),
            draining: status.is_draining(),
            reloads: status.reloads(),
            upgrades: status.upgrades(),
            log_lost: log.lost.load(Ordering::Relaxed) + logging::unwritten(),
            log_suppressed: [&log.refusals, &log.ends].map(|count| count.load(Ordering::Relaxed)),
        }))?;
        Ok(status.carried().add_to(text))
    })
}

/// The exposition text; names get the prefix `turnpike_`.
pub(crate) fn encode(collector: impl Collector) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("turnpike");
    registry.register_collector(Box::new(collector));
    let mut output = String::new();
    text::encode(&mut output, &registry)?;
    Ok(output)
}

/// Writes families of which each has a series, or several, per snapshot.
pub(crate) struct Families<'e, 's, S> {
    pub(crate) encoder: DescriptorEncoder<'e>,
    /// The name of the label that tells the snapshots apart.
    pub(crate) label: &'static str,
    /// With the label's values.
    pub(crate) snapshots: &'s [(String, S)],
}

impl<S> Families<'_, '_, S> {
    /// One gauge per snapshot.
    pub(crate) fn gauge(&mut self, name: &str, help: &str, value: impl Fn(&S) -> u64) -> fmt::Result {
        let mut metric = self.encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (of, snapshot) in self.snapshots {
            metric.encode_family(&[(self.label, of.as_str())])?.encode_gauge(&value(snapshot))?;
        }
        Ok(())
    }

    /// One counter per snapshot.
    pub(crate) fn each(&mut self, name: &str, help: &str, value: impl Fn(&S) -> u64) -> fmt::Result {
        let mut metric = counter(&mut self.encoder, name, help)?;
        self.snapshots
            .iter()
            .try_for_each(|(of, snapshot)| count(&mut metric, &[(self.label, of.as_str())], value(snapshot)))
    }

    /// Several counters per snapshot, told apart by `label`.
    pub(crate) fn by(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl Fn(&S) -> Vec<(&'static str, u64)>,
    ) -> fmt::Result {
        let mut metric = counter(&mut self.encoder, name, help)?;
        for (of, snapshot) in self.snapshots {
            for (kind, value) in values(snapshot) {
                count(&mut metric, &[(self.label, of.as_str()), (label, kind)], value)?;
            }
        }
        Ok(())
    }
}

/// What a program says beside its own numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Common {
    pub(crate) process: ProcessUsage,
    /// Whether it is about to stop.
    pub(crate) draining: bool,
    /// Times that the configuration was read again, by result.
    pub(crate) reloads: [(&'static str, u64); 2],
    /// Times that a new process was to take over, by result.
    pub(crate) upgrades: [(&'static str, u64); 2],
    /// Log lines lost because the control thread lagged behind, or nothing took them.
    pub(crate) log_lost: u64,
    /// Log lines not written because there were too many: of refusals, of ends.
    pub(crate) log_suppressed: [u64; 2],
}

impl Common {
    pub(crate) fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        self.process(encoder)?;
        counts(
            encoder,
            "config_reloads",
            "Times that the configuration was read again, by result; after a failure the old one stays in force.",
            "result",
            self.reloads,
        )?;
        counts(
            encoder,
            "upgrades",
            "Times that a new process was to take this one's place, by result; after a failure this one serves as before.",
            "result",
            self.upgrades,
        )?;
        let draining = f64::from(u8::from(self.draining));
        gauge(encoder, "draining", "1 while the server takes nothing new.", draining)?;
        encoder
            .encode_descriptor(
                "log_lines_lost",
                "Log lines lost because the log was too slow or could not be written, to a full disk for instance.",
                None,
                MetricType::Counter,
            )?
            .encode_counter::<NoLabelSet, _, f64>(&self.log_lost, None)?;
        counts(
            encoder,
            "log_lines_suppressed",
            "Refusals, and ends of sessions or connections, that have no log line of their own, by kind.",
            "kind",
            ["refusal", "end"].into_iter().zip(self.log_suppressed),
        )?;
        encoder
            .encode_descriptor("build", "This program.", None, MetricType::Info)?
            .encode_info(&[("version", env!("CARGO_PKG_VERSION"))])
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "gauges are floats by format, and these are far below 2^53"
    )]
    fn process(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let usage = &self.process;
        if let Some(seconds) = usage.cpu_seconds {
            encoder
                .encode_descriptor(
                    "process_cpu_seconds",
                    "User and system CPU time.",
                    None,
                    MetricType::Counter,
                )?
                .encode_counter::<NoLabelSet, _, f64>(&seconds, None)?;
        }
        let gauges = [
            (
                "process_resident_memory_bytes",
                "Resident memory.",
                usage.resident_bytes.map(|bytes| bytes as f64),
            ),
            ("process_open_fds", "Open file descriptors.", usage.open_fds.map(|fds| fds as f64)),
            ("process_max_fds", "Limit of open file descriptors.", usage.max_fds.map(|fds| fds as f64)),
            ("process_start_time_seconds", "Start of the process, Unix time.", usage.start_time_seconds),
        ];
        for (name, help, value) in gauges {
            if let Some(value) = value {
                gauge(encoder, name, help, value)?;
            }
        }
        Ok(())
    }
}

/// A family of counters, for [`count`].
pub(crate) fn counter<'e>(
    encoder: &'e mut DescriptorEncoder<'_>,
    name: &'e str,
    help: &'e str,
) -> Result<MetricEncoder<'e>, fmt::Error> {
    encoder.encode_descriptor(name, help, None, MetricType::Counter)
}

/// One series of it.
pub(crate) fn count(metric: &mut MetricEncoder<'_>, labels: &[(&str, &str)], value: u64) -> fmt::Result {
    metric.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&value, None)
}

/// What is counted for each member of an enumeration, with its name.
pub(crate) fn by_name<T>(count: impl Fn(T) -> u64) -> Vec<(&'static str, u64)>
where
    T: VariantArray + Copy + Into<&'static str>,
{
    T::VARIANTS.iter().map(|one| ((*one).into(), count(*one))).collect()
}

/// A family of counters told apart by one label.
pub(crate) fn counts<'v>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &str,
    values: impl IntoIterator<Item = (&'v str, u64)>,
) -> fmt::Result {
    let mut metric = counter(encoder, name, help)?;
    values.into_iter().try_for_each(|(kind, value)| count(&mut metric, &[(label, kind)], value))
}

/// A family of one gauge.
pub(crate) fn gauge(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: f64) -> fmt::Result {
    encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)
}
