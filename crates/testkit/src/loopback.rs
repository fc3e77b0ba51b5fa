//! Properties of loopback that differ between kernels.

use std::process::Command;

/// True if loopback delivers a super-packet whole, as since Linux 5.11; earlier kernels segment it at the sender. Assumed true without
/// ethtool(8).
pub fn loopback_keeps_super_packets() -> bool {
    let Ok(output) = Command::new("ethtool").args(["-k", "lo"]).output() else { return true };
    !String::from_utf8_lossy(&output.stdout).contains("tx-udp-segmentation: off")
}
