//! What every page of metrics has: the OpenMetrics text, numbers of this process and of the program, and families with a series
//! for each of several things that count alike.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, NoLabelSet, text},
    metrics::MetricType,
    registry::Registry,
};

use crate::{admin, log_limit::LogCounts, process::ProcessUsage};

/// Media type of [`encode`]'s text.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Makes the text of a page, anew at each scrape.
pub(crate) type Page = Arc<dyn Fn() -> Result<String, fmt::Error> + Send + Sync>;

/// The page of what `scrape` collects.
pub(crate) fn page<C: Collector>(
    scrape: impl Fn(Common) -> C + Send + Sync + 'static,
    draining: Arc<AtomicBool>,
    log: Arc<LogCounts>,
) -> Page {
    Arc::new(move || {
        encode(scrape(Common {
            process: ProcessUsage::read(),
            draining: draining.load(Ordering::Relaxed),
            log_lost: log.lost.load(Ordering::Relaxed),
            log_suppressed: [&log.refusals, &log.ends].map(|count| count.load(Ordering::Relaxed)),
        }))
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
        let mut metric = self.encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (of, snapshot) in self.snapshots {
            metric
                .encode_family(&[(self.label, of.as_str())])?
                .encode_counter::<NoLabelSet, _, f64>(&value(snapshot), None)?;
        }
        Ok(())
    }

    /// Several counters per snapshot, told apart by `label`.
    pub(crate) fn by(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl Fn(&S) -> Vec<(&'static str, u64)>,
    ) -> fmt::Result {
        let mut metric = self.encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (of, snapshot) in self.snapshots {
            for (kind, value) in values(snapshot) {
                metric
                    .encode_family(&[(self.label, of.as_str()), (label, kind)])?
                    .encode_counter::<NoLabelSet, _, f64>(&value, None)?;
            }
        }
        Ok(())
    }
}

/// What a program says beside its own numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Common {
    /// This process.
    pub(crate) process: ProcessUsage,
    /// Whether it is about to stop.
    pub(crate) draining: bool,
    /// Log lines lost because the control thread lagged behind.
    pub(crate) log_lost: u64,
    /// Log lines not written because there were too many: of refusals, of ends.
    pub(crate) log_suppressed: [u64; 2],
}

impl Common {
    pub(crate) fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        self.process(encoder)?;
        let mut metric = encoder.encode_descriptor(
            "admin_connections_closed",
            "Connections to the admin page that ended without an answer, or before it was taken, by reason.",
            None,
            MetricType::Counter,
        )?;
        for (reason, count) in admin::closed() {
            metric
                .encode_family(&[("reason", reason)])?
                .encode_counter::<NoLabelSet, _, f64>(&count, None)?;
        }
        let draining = f64::from(u8::from(self.draining));
        gauge(encoder, "draining", "1 while the server takes nothing new.", draining)?;
        encoder
            .encode_descriptor(
                "log_lines_lost",
                "Log lines of sessions and connections lost because the log was too slow.",
                None,
                MetricType::Counter,
            )?
            .encode_counter::<NoLabelSet, _, f64>(&self.log_lost, None)?;
        let mut suppressed = encoder.encode_descriptor(
            "log_lines_suppressed",
            "Refusals, and ends of sessions or connections, that have no log line of their own, by kind.",
            None,
            MetricType::Counter,
        )?;
        for (kind, count) in ["refusal", "end"].into_iter().zip(self.log_suppressed) {
            suppressed
                .encode_family(&[("kind", kind)])?
                .encode_counter::<NoLabelSet, _, f64>(&count, None)?;
        }
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

fn gauge(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: f64) -> fmt::Result {
    encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)
}
