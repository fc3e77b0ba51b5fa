//! Log lines and metrics of the kernel path, for the server and the forwarder.

use std::fmt;

use prometheus_client::encoding::DescriptorEncoder;
use strum::VariantArray as _;
use turnpike_net::Datapath;
use turnpike_offload::{Attachment, Count, Hook, Kernel, Snapshot, layout::LEASE_NS};

use crate::exposition::{counts, gauge, total};

/// Logs the attached interfaces; `datapath` handles everything that is left to user space.
pub fn log_attached(kernel: &Kernel, flows: u32, datapath: Datapath) {
    let attached = kernel.attached();
    let where_to = if attached.is_empty() {
        "to no interface yet: no Ethernet interface is up and has an address".to_owned()
    } else {
        format!("to {}", named_by_hook(&attached))
    };
    tracing::info!(
        "data path kernel: attached {where_to}; room for {flows} flows; {datapath} handles everything else"
    );
    if kernel.has_leases() {
        tracing::info!(
            "data path kernel: flows that this machine's firewall, routing or IPsec would treat differently stay in user space; conntrack and \
             packet counters see one datagram per flow every {} s, or every datagram with the data path {datapath}",
            LEASE_NS / 1_000_000_000
        );
    }
    for Attachment { interface, hook, why } in &attached {
        if let Some(why) = why {
            tracing::warn!(
                "data path kernel: attached to {interface} at {} instead of in the driver: {why}",
                hook.name()
            );
        }
    }
}

/// Logs the reason for staying in user space with the data path `auto`.
pub fn log_lack(reason: &str) {
    tracing::info!("no in-kernel data path, which would save CPU time for single datagrams: {reason}");
}

/// Text such as `eth0, eth1 (xdp), docker0 (tcx)`.
fn named_by_hook(attached: &[Attachment]) -> String {
    let mut hooks: Vec<Hook> = attached.iter().map(|it| it.hook).collect();
    hooks.sort_by_key(|hook| !hook.is_xdp());
    hooks.dedup();
    let named = hooks.into_iter().map(|hook| {
        let of_it = attached.iter().filter(|it| it.hook == hook).map(|it| &it.interface[..]);
        format!("{} ({})", of_it.collect::<Vec<_>>().join(", "), hook.name())
    });
    named.collect::<Vec<_>>().join(", ")
}

pub fn encode(encoder: &mut DescriptorEncoder<'_>, kernel: &Snapshot) -> fmt::Result {
    let counted = Count::VARIANTS.iter().zip(kernel.counts);
    let passes = counted.filter(|(what, _)| what.is_pass()).map(|(what, value)| (<&str>::from(what), value));
    let help = "UDP datagrams and super-packets that the eBPF program left to user space, by reason.";
    counts(encoder, "kernel_passes", help, "reason", passes)?;
    let counted = Count::VARIANTS.iter().zip(kernel.counts);
    let refusals = counted.filter_map(|(what, value)| {
        let name = <&str>::from(what);
        Some((name.strip_prefix("refused_").filter(|_| what.is_refusal())?, value))
    });
    let help =
        "Flows refused by the in-kernel data path because this machine changes their datagrams, by reason.";
    counts(encoder, "kernel_leases_refused", help, "reason", refusals)?;
    let dropped = [Count::Failed, Count::Behind];
    let dropped = dropped.into_iter().map(|what| (<&str>::from(what), kernel.counts[what as usize]));
    let help = "Datagrams dropped because the kernel refused to rewrite them (failed) or user space was overloaded (behind).";
    counts(encoder, "kernel_dropped", help, "reason", dropped)?;
    let help = "Flows kept in user space because the kernel path's flow table (kernel_flows) or socket table (sized at startup) was full.";
    total(encoder, "kernel_flows_refused", help, kernel.refused)?;
    let help = "Flows in the kernel's flow table, each in one direction.";
    gauge(encoder, "kernel_flows", help, kernel.flows)?;
    gauge(encoder, "kernel_flows_limit", "Size of the kernel's flow table.", kernel.most_flows)
}
