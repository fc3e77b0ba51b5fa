//! The page of `/metrics`: OpenMetrics text, metrics that every program has, and helpers for families with a series for each of several
//! snapshots.

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

use crate::{log_queue::LogCounts, logging, request::Status, usage::ProcessUsage};

/// Renders the text of `/metrics`, in the format of OpenMetrics, at each scrape.
pub type MetricsPage = Arc<dyn Fn() -> String + Send + Sync>;

/// The page of the metrics that `scrape` collects, with those carried over from a previous process.
pub fn page<C: Collector>(
    scrape: impl Fn(Common) -> C + Send + Sync + 'static,
    status: Arc<Status>,
    log: Arc<LogCounts>,
) -> MetricsPage {
    Arc::new(move || {
        // Writing to a string cannot fail.
        let text = encode(scrape(Common {
            process: ProcessUsage::read(),
            draining: status.is_draining(),
            reloads: status.reloads(),
            upgrades: status.upgrades(),
            log_lost: log.lost.load(Ordering::Relaxed) + logging::unwritten(),
            log_suppressed: [&log.refusals, &log.ends].map(|count| count.load(Ordering::Relaxed)),
        }));
        status.carried().add_to(text.unwrap_or_default())
    })
}

/// The exposition text; names get the prefix `turnpike_`.
///
/// # Errors
/// Those of `collector`.
pub fn encode(collector: impl Collector) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("turnpike");
    registry.register_collector(Box::new(collector));
    let mut output = String::new();
    text::encode(&mut output, &registry)?;
    Ok(output)
}

/// Writes families with one or more series per snapshot.
pub struct Families<'e, 's, S> {
    /// Destination.
    pub encoder: DescriptorEncoder<'e>,
    /// Label that identifies the snapshot.
    pub label: &'static str,
    /// Snapshots with their values of the label.
    pub snapshots: &'s [(String, S)],
}

impl<S> Families<'_, '_, S> {
    /// One gauge per snapshot.
    ///
    /// # Errors
    /// Those of the encoder.
    pub fn gauge(&mut self, name: &str, help: &str, value: impl Fn(&S) -> u64) -> fmt::Result {
        let mut metric = self.encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (of, snapshot) in self.snapshots {
            metric.encode_family(&[(self.label, of.as_str())])?.encode_gauge(&value(snapshot))?;
        }
        Ok(())
    }

    /// One counter per snapshot.
    ///
    /// # Errors
    /// Those of the encoder.
    pub fn each(&mut self, name: &str, help: &str, value: impl Fn(&S) -> u64) -> fmt::Result {
        let mut metric = counter(&mut self.encoder, name, help)?;
        self.snapshots
            .iter()
            .try_for_each(|(of, snapshot)| count(&mut metric, &[(self.label, of.as_str())], value(snapshot)))
    }

    /// Several counters per snapshot, with different values of `label`.
    ///
    /// # Errors
    /// Those of the encoder.
    pub fn by(
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

/// Metrics that every program has.
#[derive(Clone, Debug, Default)]
pub struct Common {
    /// Usage of this process.
    pub process: ProcessUsage,
    /// The program is about to stop.
    pub draining: bool,
    /// Reloads by result.
    pub reloads: [(&'static str, u64); 2],
    /// Upgrades by result.
    pub upgrades: [(&'static str, u64); 2],
    /// Log lines lost because the control thread lagged behind, or that could not be written.
    pub log_lost: u64,
    /// Log lines suppressed by a limit: of refusals, of ends.
    pub log_suppressed: [u64; 2],
}

impl Common {
    /// Writes the metrics.
    ///
    /// # Errors
    /// Those of the encoder.
    pub fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
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
///
/// # Errors
/// Those of the encoder.
pub fn counter<'e>(
    encoder: &'e mut DescriptorEncoder<'_>,
    name: &'e str,
    help: &'e str,
) -> Result<MetricEncoder<'e>, fmt::Error> {
    encoder.encode_descriptor(name, help, None, MetricType::Counter)
}

/// Writes one series of a family of counters.
///
/// # Errors
/// Those of the encoder.
pub fn count(metric: &mut MetricEncoder<'_>, labels: &[(&str, &str)], value: u64) -> fmt::Result {
    metric.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&value, None)
}

/// Counts of all variants of an enumeration, with their names.
pub fn by_name<T>(count: impl Fn(T) -> u64) -> Vec<(&'static str, u64)>
where
    T: VariantArray + Copy + Into<&'static str>,
{
    T::VARIANTS.iter().map(|one| ((*one).into(), count(*one))).collect()
}

/// A family of counters with one label.
///
/// # Errors
/// Those of the encoder.
pub fn counts<'v>(
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
///
/// # Errors
/// Those of the encoder.
pub fn gauge(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: f64) -> fmt::Result {
    encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)
}
