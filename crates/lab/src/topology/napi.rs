//! NAPI threads: a device receives packets in kernel threads pinned to a chosen CPU, instead of in the sender's context, where the sending
//! side of a veth would be charged for the receiving side's work.

use std::{collections::BTreeSet, thread, time::Duration};

use procfs::process::{Process, all_processes};

use super::{
    spec::{Mitigation, Spec},
    userns,
};
use crate::{
    error::LabError,
    tools::{self, output_in},
};

/// Priority under SCHED_FIFO, ahead of all programs. A thread that only had a lower nice value would wait for the end of a time slice, and
/// by then a veth's ring of 256 packets would have overflowed.
const PRIORITY: &str = "1";
const LOOKS: usize = 200;
const LOOK: Duration = Duration::from_millis(5);

pub(super) fn require(spec: &Spec) -> Result<(), LabError> {
    if !userns::is_root() {
        return Err(LabError::usage(
            "this topology pins kernel threads, which requires root: run as root, or use another topology \
             (--topology veth)",
        ));
    }
    tools::require("ethtool", "for the offloads of this topology")?;
    tools::require("taskset", "to pin kernel threads")?;
    tools::require("chrt", "to prioritize kernel threads")?;
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    match spec.ends().filter_map(|end| end.napi_cpu).find(|cpu| *cpu >= cpus) {
        Some(cpu) => Err(LabError::usage(format!(
            "this topology receives on CPU {cpu}, but this machine has {cpus}: use another topology (--topology veth)"
        ))),
        None => Ok(()),
    }
}

pub(super) fn pin(entry: &[String], device: &str, cpu: usize) -> Result<Vec<u32>, LabError> {
    let before = threads(device);
    // /sys shows the devices of the namespace in which it was mounted.
    let script = "mount -t sysfs none /sys && echo 1 >\"/sys/class/net/$1/threaded\"";
    output_in(entry, &["unshare", "--mount", "sh", "-c", script, "sh", device])?;
    let mut ours = BTreeSet::new();
    for _ in 0..LOOKS {
        // Only new threads belong to this device, because another lab's device may have the same name.
        ours = &threads(device) - &before;
        if !ours.is_empty() {
            break;
        }
        thread::sleep(LOOK);
    }
    if ours.is_empty() {
        return Err(LabError::failed(format!(
            "{device} has no NAPI threads: the kernel does not support them (older than 5.12), or they are not visible here, as in a container"
        )));
    }
    for pid in ours.iter().map(i32::to_string) {
        tools::output(["taskset", "-pc", &cpu.to_string(), &pid])?;
        tools::output(["chrt", "--fifo", "--pid", PRIORITY, &pid])?;
    }
    let is_pinned = |pid: &i32| {
        let allowed = Process::new(*pid).and_then(|thread| thread.status()).ok()?.cpus_allowed_list?;
        Some(allowed.iter().all(|(first, last)| *first as usize == cpu && *last as usize == cpu))
    };
    match ours.iter().find(|pid| is_pinned(pid) != Some(true)) {
        Some(pid) => Err(LabError::failed(format!("thread {pid} of {device} is not pinned to CPU {cpu}"))),
        None => Ok(ours.iter().filter_map(|pid| u32::try_from(*pid).ok()).collect()),
    }
}

pub(super) fn mitigate(entry: &[String], device: &str, mitigation: &Mitigation) -> Result<(), LabError> {
    let Mitigation { gro_flush_timeout_us, napi_defer_hard_irqs } = mitigation;
    // The timeout is in nanoseconds. Both values are read back, because the kernel ignores invalid ones.
    let (timeout, looks) = (format!("{gro_flush_timeout_us}000"), napi_defer_hard_irqs.to_string());
    let script = "mount -t sysfs none /sys && cd \"/sys/class/net/$1\" && echo \"$2\" >gro_flush_timeout && \
                  echo \"$3\" >napi_defer_hard_irqs && cat gro_flush_timeout napi_defer_hard_irqs";
    let held = output_in(entry, &["unshare", "--mount", "sh", "-c", script, "sh", device, &timeout, &looks])?;
    if held.split_whitespace().eq([timeout.as_str(), looks.as_str()]) {
        return Ok(());
    }
    Err(LabError::failed(format!(
        "{device} does not accept gro_flush_timeout {timeout} and napi_defer_hard_irqs {looks}"
    )))
}

/// IDs of the device's threads, which the kernel names `napi/DEVICE-ID`.
fn threads(device: &str) -> BTreeSet<i32> {
    let prefix = format!("napi/{device}-");
    let all = all_processes().into_iter().flatten().flatten();
    all.filter(|process| process.stat().is_ok_and(|stat| stat.comm.starts_with(&prefix)))
        .map(|process| process.pid())
        .collect()
}
