//! Page of `/metrics`: OpenMetrics text, metrics common to all programs, and helpers for families with one
//! series per snapshot.

use std::{
    fmt,
    sync::{Arc, atomic::Ordering},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, MetricEncoder, NoLabelSet, text},
    metrics::MetricType,
    registry::Registry,
};
use strum::VariantArray;
use turnpike_telemetry::Exported;

use crate::{log_queue::LogCounts, logging, request::ControlStatus, usage::ProcessUsage};

pub use turnpike_telemetry::MetricsPage;

pub fn page<C: Collector>(
    scrape: impl Fn(ProcessMetrics) -> C + Send + Sync + 'static,
    status: Arc<ControlStatus>,
    log: Arc<LogCounts>,
) -> MetricsPage {
    Arc::new(move || {
        // Writing to a string cannot fail.
        let text = encode(scrape(ProcessMetrics {
            process: ProcessUsage::read(),
            draining: status.is_draining(),
            reloads: status.reloads(),
            upgrades: status.upgrades(),
            log_lost: log.lost.load(Ordering::Relaxed) + logging::unwritten(),
            exported: turnpike_telemetry::exported(),
            log_suppressed: [&log.refusals, &log.ends].map(|count| count.load(Ordering::Relaxed)),
        }));
        status.carried().add_to(text.unwrap_or_default())
    })
}

/// Encodes metrics as exposition text. Their names get the prefix `turnpike_`.
pub fn encode(collector: impl Collector) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("turnpike");
    registry.register_collector(Box::new(collector));
    let mut output = String::new();
    text::encode(&mut output, &registry)?;
    Ok(output)
}

pub struct MetricFamilies<'e, 's, S> {
    pub encoder: DescriptorEncoder<'e>,
    pub label: &'static str,
    pub snapshots: &'s [(String, S)],
}

impl<S> MetricFamilies<'_, '_, S> {
    pub fn gauge(&mut self, name: &str, help: &str, value: impl Fn(&S) -> u64) -> fmt::Result {
        let values = self.snapshots.iter().map(|(of, snapshot)| (of, value(snapshot)));
        gauges(&mut self.encoder, name, help, self.label, values)
    }

    pub fn each(&mut self, name: &str, help: &str, value: impl Fn(&S) -> u64) -> fmt::Result {
        let values = self.snapshots.iter().map(|(of, snapshot)| (of, value(snapshot)));
        counts(&mut self.encoder, name, help, self.label, values)
    }

    /// Writes several counters per snapshot, distinguished by `label`.
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

#[derive(Clone, Debug, Default)]
pub struct ProcessMetrics {
    pub process: ProcessUsage,
    pub draining: bool,
    pub reloads: [(&'static str, u64); 2],
    pub upgrades: [(&'static str, u64); 2],
    /// Log lines lost because the control thread lagged behind or could not write them.
    pub log_lost: u64,
    /// `None` if nothing is exported to a collector.
    pub exported: Option<Exported>,
    /// Log lines suppressed by limits: those about refusals, and those about ended sessions.
    pub log_suppressed: [u64; 2],
}

impl ProcessMetrics {
    pub fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        self.process(encoder)?;
        counts(
            encoder,
            "config_reloads",
            "Configuration reloads by result; after a failure the old configuration stays in use.",
            "result",
            self.reloads,
        )?;
        counts(
            encoder,
            "upgrades",
            "Upgrades to a new process by result; after a failure the old process keeps serving.",
            "result",
            self.upgrades,
        )?;
        let draining = f64::from(u8::from(self.draining));
        gauge(encoder, "draining", "1 while no new clients are accepted.", draining)?;
        total(
            encoder,
            "log_lines_lost",
            "Log lines lost because the log was too slow or could not be written (full disk).",
            self.log_lost,
        )?;
        counts(
            encoder,
            "log_lines_suppressed",
            "Refusals and ended allocations or connections that were not logged individually, by kind.",
            "kind",
            ["refusal", "end"].into_iter().zip(self.log_suppressed),
        )?;
        if let Some(Exported { requests, lost }) = self.exported {
            let help = "Requests to the OpenTelemetry collector by signal and result.";
            let mut metric = counter(encoder, "telemetry_requests", help)?;
            for (signal, counts) in ["metrics", "logs"].into_iter().zip(requests) {
                for (result, value) in ["ok", "error"].into_iter().zip(counts) {
                    count(&mut metric, &[("signal", signal), ("result", result)], value)?;
                }
            }
            let help = "Log records that did not reach the OpenTelemetry collector.";
            total(encoder, "telemetry_records_lost", help, lost)?;
        }
        encoder
            .encode_descriptor("build", "Version of this program.", None, MetricType::Info)?
            .encode_info(&[("version", env!("CARGO_PKG_VERSION"))])
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "the format defines gauges as floats, and these are far below 2^53"
    )]
    fn process(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let usage = &self.process;
        if let Some(seconds) = usage.cpu_seconds {
            total(encoder, "process_cpu_seconds", "User and system CPU time.", seconds)?;
        }
        let gauges = [
            (
                "process_resident_memory_bytes",
                "Resident memory.",
                usage.resident_bytes.map(|bytes| bytes as f64),
            ),
            ("process_open_fds", "Open file descriptors.", usage.open_fds.map(|fds| fds as f64)),
            ("process_max_fds", "Limit on open file descriptors.", usage.max_fds.map(|fds| fds as f64)),
            ("process_start_time_seconds", "Start of the process in Unix seconds.", usage.start_time_seconds),
        ];
        for (name, help, value) in gauges {
            if let Some(value) = value {
                gauge(encoder, name, help, value)?;
            }
        }
        Ok(())
    }
}

pub fn counter<'e>(
    encoder: &'e mut DescriptorEncoder<'_>,
    name: &'e str,
    help: &'e str,
) -> Result<MetricEncoder<'e>, fmt::Error> {
    encoder.encode_descriptor(name, help, None, MetricType::Counter)
}

pub fn count(metric: &mut MetricEncoder<'_>, labels: &[(&str, &str)], value: u64) -> fmt::Result {
    metric.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&value, None)
}

pub fn by_name<T>(count: impl Fn(T) -> u64) -> Vec<(&'static str, u64)>
where
    T: VariantArray + Copy + Into<&'static str>,
{
    T::VARIANTS.iter().map(|one| ((*one).into(), count(*one))).collect()
}

/// Writes counters that differ in one label.
pub fn counts(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &str,
    values: impl IntoIterator<Item = (impl AsRef<str>, u64)>,
) -> fmt::Result {
    let mut metric = counter(encoder, name, help)?;
    values.into_iter().try_for_each(|(kind, value)| count(&mut metric, &[(label, kind.as_ref())], value))
}

/// Writes a counter without labels.
pub fn total(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: impl EncodeCounterValue,
) -> fmt::Result {
    counter(encoder, name, help)?.encode_counter::<NoLabelSet, _, f64>(&value, None)
}

/// Writes gauges that differ in one label.
pub fn gauges(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &str,
    values: impl IntoIterator<Item = (impl AsRef<str>, impl EncodeGaugeValue)>,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    values
        .into_iter()
        .try_for_each(|(kind, value)| metric.encode_family(&[(label, kind.as_ref())])?.encode_gauge(&value))
}

/// Writes a gauge without labels.
pub fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: impl EncodeGaugeValue,
) -> fmt::Result {
    encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)
}
