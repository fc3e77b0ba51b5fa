//! Properties of loopback that differ between kernels.

use std::process::Command;

/// True if loopback delivers super-packets unsegmented, as it has done since Linux 5.11; earlier kernels segment them at the sender.
/// Assumed to be true if ethtool(8) is missing.
pub fn loopback_keeps_super_packets() -> bool {
    let Ok(output) = Command::new("ethtool").args(["-k", "lo"]).output() else { return true };
    !String::from_utf8_lossy(&output.stdout).contains("tx-udp-segmentation: off")
}
