//! What every page of metrics has: the OpenMetrics text, numbers of this process and of the program.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, NoLabelSet, text},
    metrics::MetricType,
    registry::Registry,
};

use crate::process::ProcessUsage;

/// Media type of [`encode`]'s text.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The exposition text; names get the prefix `turnpike_`.
pub(crate) fn encode(collector: impl Collector) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("turnpike");
    registry.register_collector(Box::new(collector));
    let mut output = String::new();
    text::encode(&mut output, &registry)?;
    Ok(output)
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
}

impl Common {
    pub(crate) fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        self.process(encoder)?;
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
