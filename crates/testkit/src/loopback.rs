//! Properties of loopback that differ between kernels.

use std::process::Command;

/// Whether loopback hands a super-packet to its receiver whole, as it does since Linux 5.11; before, the sender's kernel cuts it up. Without
/// ethtool(8) to ask, it is taken for granted.
pub fn loopback_keeps_super_packets() -> bool {
    let Ok(output) = Command::new("ethtool").args(["-k", "lo"]).output() else { return true };
    !String::from_utf8_lossy(&output.stdout).contains("tx-udp-segmentation: off")
}
