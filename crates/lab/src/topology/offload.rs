//! Offloads of the devices. They are set explicitly, read back and recorded, because they decide whether super-packets cross a veth
//! unsegmented.

use std::collections::BTreeMap;

use crate::{
    error::LabError,
    tools::{self, output_in},
};

const SHOWN: [(&str, &str); 8] = [
    ("rx-checksumming", "rx"),
    ("tx-checksumming", "tx"),
    ("scatter-gather", "sg"),
    ("tcp-segmentation-offload", "tso"),
    ("generic-segmentation-offload", "gso"),
    ("generic-receive-offload", "gro"),
    ("tx-udp-segmentation", "tx-udp-segmentation"),
    ("rx-udp-gro-forwarding", "rx-udp-gro-forwarding"),
];

pub(crate) const UNKNOWN: &str = "kernel defaults, not read: `ethtool` is missing (apt-get install ethtool)";

/// Sets offloads and returns the resulting features, or no features if `ethtool` is missing. `entry` is the prefix command that enters the
/// namespace.
pub(crate) fn apply(
    entry: &[String],
    device: &str,
    wanted: &BTreeMap<String, bool>,
) -> Result<BTreeMap<String, bool>, LabError> {
    if tools::find("ethtool").is_none() {
        return Ok(BTreeMap::new());
    }
    let run = |arguments: &[&str]| output_in(entry, arguments);
    let held = parse(&run(&["ethtool", "-k", device])?);
    for (name, on) in wanted {
        // One call per feature, because ethtool stops at the first one that cannot be changed.
        if held.get(name) != Some(on) {
            let switch = if *on { "on" } else { "off" };
            run(&["ethtool", "-K", device, name, switch]).map_err(|error| {
                LabError::usage(format!(
                    "offload {name} cannot be turned {switch} on {device} ({error}): check [offloads]"
                ))
            })?;
        }
    }
    let mut held = parse(&run(&["ethtool", "-k", device])?);
    held.retain(|name, _| SHOWN.iter().any(|(_, short)| short == name));
    Ok(held)
}

fn parse(text: &str) -> BTreeMap<String, bool> {
    text.lines()
        .filter_map(|line| {
            let (name, value) = line.trim().split_once(':')?;
            let name = SHOWN.iter().find(|(long, _)| *long == name).map_or(name, |(_, short)| short);
            let value = value.split_whitespace().next()?;
            Some((name.to_owned(), value == "on"))
        })
        .collect()
}

pub(crate) fn describe(held: &BTreeMap<String, bool>) -> String {
    if held.is_empty() {
        return UNKNOWN.to_owned();
    }
    let shown: Vec<String> = SHOWN
        .iter()
        .filter_map(|(_, short)| {
            held.get(*short).map(|on| format!("{short} {}", if *on { "on" } else { "off" }))
        })
        .collect();
    shown.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_read_under_their_short_names() {
        let text = "Features for r-p:\nrx-checksumming: on\ntx-checksumming: on\n\ttx-checksum-ipv4: off [fixed]\n\
                    generic-receive-offload: off\ntx-udp-segmentation: on\nrx-udp-gro-forwarding: off\n";
        let held = parse(text);
        assert_eq!(held.get("gro"), Some(&false));
        assert_eq!(held.get("tx-udp-segmentation"), Some(&true));
        assert_eq!(held.get("tx-checksum-ipv4"), Some(&false));
        assert_eq!(
            describe(&held),
            "rx on, tx on, gro off, tx-udp-segmentation on, rx-udp-gro-forwarding off"
        );
    }
}
