//! What `serve` and `forward` tell alike of the path through the kernel: at the start, and on the page of metrics.

use std::fmt;

use prometheus_client::{
    encoding::{DescriptorEncoder, NoLabelSet},
    metrics::MetricType,
};
use strum::VariantArray as _;
use turnpike_net::Datapath;
use turnpike_relay::{Hook, Kernel, KernelCount, KernelSnapshot};

use crate::exposition::{counter, counts};

/// Says what the program was attached to; `datapath` is for all that it leaves to user space.
pub(crate) fn say(kernel: &Kernel, flows: u32, datapath: Datapath) {
    let how = if kernel.hook() == Hook::Tcx { "tcx" } else { "clsact" };
    let interfaces = kernel.interfaces();
    let where_to = if interfaces.is_empty() {
        "to no interface yet: none is Ethernet, up, and has an address".to_owned()
    } else {
        format!("to {} ({how})", interfaces.join(", "))
    };
    tracing::info!(
        "data path kernel: attached {where_to}; room for {flows} flows; everything else by {datapath}"
    );
}

/// Why datagrams went up, and how full the table of flows is.
pub(crate) fn encode(encoder: &mut DescriptorEncoder<'_>, kernel: &KernelSnapshot) -> fmt::Result {
    let counted = KernelCount::VARIANTS.iter().zip(kernel.counts);
    let passes = counted.filter(|(what, _)| what.is_pass()).map(|(what, value)| (<&str>::from(what), value));
    let help = "UDP datagrams and super-packets that the kernel left to user space, by reason.";
    counts(encoder, "kernel_passes", help, "reason", passes)?;
    let mut single = |name, help: &str, value: u64| {
        counter(encoder, name, help)?.encode_counter::<NoLabelSet, _, f64>(&value, None)
    };
    single(
        "kernel_dropped",
        "Datagrams that were dropped because the kernel refused to change them.",
        kernel.counts[KernelCount::Failed as usize],
    )?;
    single(
        "kernel_flows_refused",
        "Flows that stay in user space because the kernel's table was full.",
        kernel.refused,
    )?;
    for (name, help, value) in [
        ("kernel_flows", "Flows in the kernel's table, each in one direction.", kernel.flows),
        ("kernel_flows_limit", "Flows that the kernel's table holds at most.", kernel.most_flows),
    ] {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        metric.encode_gauge(&value)?;
    }
    Ok(())
}
