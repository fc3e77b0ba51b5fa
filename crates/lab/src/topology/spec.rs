//! Topology files: namespaces, the links between them, and offloads. They are validated when they are read.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
};

use serde::Deserialize;

use turnpike_strict::{Document, nearest};

use crate::error::LabError;

/// Built-in topologies: name, text, and changes to the text. The first one is the default.
const KNOWN: [(&str, &str, &[LinkChange]); 8] = [
    ("veth", include_str!("veth.toml"), &[]),
    ("wire", WIRE, &[]),
    // Most network cards lack UDP segmentation, so the kernel splits super-packets before they reach the device.
    ("wire-without-uso", WIRE, &[LinkChange::Offload(&["relay"], "tx-udp-segmentation", false)]),
    // XDP sees only checksums that are in the packet, and a veth normally leaves them out. If packets contain checksums, the relay's cost
    // is higher here than with a network card that verifies them.
    ("wire-with-sums", WIRE, &[WITH_SUMS]),
    (
        "wire-mitigated",
        WIRE,
        &[LinkChange::Mitigation(
            &["relay"],
            Mitigation { gro_flush_timeout_us: 100, napi_defer_hard_irqs: 2 },
        )],
    ),
    // Interrupt mitigation at `client` and `peer`: as on a real link, the relay is not charged for waking them.
    ("wire-far-mitigated", WIRE, &[FAR_MITIGATED]),
    // Packets also arrive with complete checksums, as on a real link.
    ("wire-far-mitigated-with-sums", WIRE, &[FAR_MITIGATED, WITH_SUMS]),
    ("fleet", include_str!("fleet.toml"), &[]),
];
const FAR: &[&str] = &["client", "peer"];
const WITH_SUMS: LinkChange = LinkChange::Offload(FAR, "tx", false);
const FAR_MITIGATED: LinkChange =
    LinkChange::Mitigation(FAR, Mitigation { gro_flush_timeout_us: 200, napi_defer_hard_irqs: 2 });
const WIRE: &str = include_str!("wire.toml");

enum LinkChange {
    Offload(&'static [&'static str], &'static str, bool),
    Mitigation(&'static [&'static str], Mitigation),
}

impl LinkChange {
    fn apply(&self, spec: &mut Spec) {
        let (Self::Offload(namespaces, ..) | Self::Mitigation(namespaces, _)) = self;
        let ends = spec.link.iter_mut().flat_map(|link| &mut link.ends);
        for end in ends.filter(|end| namespaces.contains(&end.namespace.as_str())) {
            match self {
                Self::Offload(_, feature, on) => _ = end.offloads.insert((*feature).to_owned(), *on),
                Self::Mitigation(_, mitigation) => end.mitigation = Some(*mitigation),
            }
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Spec {
    pub(crate) namespace: Vec<Namespace>,
    #[serde(default)]
    pub(crate) link: Vec<VethLink>,
    #[serde(default)]
    pub(crate) offloads: BTreeMap<String, bool>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Namespace {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) forward: bool,
    #[serde(default)]
    pub(crate) gateways: Vec<IpAddr>,
    /// Prefixes whose addresses are all local to the namespace, without being assigned to a device.
    #[serde(default)]
    pub(crate) local: Vec<String>,
    #[serde(default)]
    pub(crate) routes: BTreeMap<String, IpAddr>,
    /// Keys below `/proc/sys/net`, such as `"ipv4/ip_local_port_range" = "1024 65535"`.
    #[serde(default)]
    pub(crate) sysctl: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VethLink {
    pub(crate) ends: [VethEnd; 2],
    #[serde(default = "ethernet")]
    pub(crate) mtu: u32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VethEnd {
    pub(crate) namespace: String,
    pub(crate) device: String,
    pub(crate) addresses: Vec<String>,
    #[serde(default)]
    pub(crate) offloads: BTreeMap<String, bool>,
    pub(crate) napi_cpu: Option<usize>,
    /// Interrupt mitigation; requires `napi_cpu`.
    pub(crate) mitigation: Option<Mitigation>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Mitigation {
    /// Polling interval in microseconds while packets arrive.
    pub(crate) gro_flush_timeout_us: u32,
    pub(crate) napi_defer_hard_irqs: u32,
}

impl Spec {
    pub(crate) fn load(path: &str, base: &Path) -> Result<Self, LabError> {
        let file = base.join(path);
        let (spec, mut document): (Self, _) = match KNOWN.iter().find(|(name, ..)| *name == path) {
            Some((name, text, changes)) => {
                let (mut spec, document): (Self, _) =
                    Document::parse(Path::new(&format!("topology {name}")), text)?;
                changes.iter().for_each(|change| change.apply(&mut spec));
                (spec, document)
            }
            None if !path.contains('.') && !file.exists() => {
                let names = KNOWN.map(|(name, ..)| name).join(", ");
                return Err(LabError::usage(match nearest(path, KNOWN.map(|(name, ..)| name)) {
                    Some(meant) => format!("no topology \"{path}\"; did you mean \"{meant}\"?"),
                    None => format!("no topology \"{path}\": expected host, {names}, or a file"),
                }));
            }
            None => Document::parse(&file, &LabError::read(&file)?)?,
        };
        spec.check(&mut document);
        document.finish()?;
        Ok(spec)
    }

    /// True if devices receive in kernel threads, which only root may pin.
    pub(crate) fn has_napi_threads(&self) -> bool {
        self.ends().any(|end| end.napi_cpu.is_some())
    }

    fn check(&self, document: &mut Document) {
        let names: BTreeSet<&str> = self.namespace.iter().map(|space| space.name.as_str()).collect();
        if names.len() != self.namespace.len() || names.is_empty() {
            document.problem("namespace", "namespaces need unique names");
        }
        for (index, space) in self.namespace.iter().enumerate() {
            let path = format!("namespace[{index}]");
            let name = &space.name;
            if !is_plain(name, 16) {
                document.problem(
                    &format!("{path}.name"),
                    format!(
                        "namespace \"{name}\": expected 1 to 16 lower-case letters, digits or hyphens, starting with a letter"
                    ),
                );
            }
            let prefixes = space.local.iter().chain(space.routes.keys());
            for prefix in prefixes.filter(|prefix| parse_address(prefix).is_none()) {
                document.problem(&path, format!("\"{prefix}\": expected a prefix such as 10.78.0.0/16"));
            }
            for key in space.sysctl.keys().filter(|key| key.contains("..") || key.starts_with('/')) {
                document.problem(
                    &format!("{path}.sysctl.{key}"),
                    format!("sysctl \"{key}\": expected a path below /proc/sys/net"),
                );
            }
        }
        let mut devices = BTreeSet::new();
        for (index, link) in self.link.iter().enumerate() {
            for (side, end) in link.ends.iter().enumerate() {
                check_end(end, &format!("link[{index}].ends[{side}]"), &names, document);
                if !devices.insert((&end.namespace, &end.device)) {
                    document.problem(
                        &format!("link[{index}].ends[{side}].device"),
                        format!("device \"{}\" is used twice in namespace {}", end.device, end.namespace),
                    );
                }
            }
            if !(68..=65_535).contains(&link.mtu) {
                document.problem(
                    &format!("link[{index}].mtu"),
                    format!("mtu {}: expected 68 to 65535", link.mtu),
                );
            }
        }
    }

    pub(crate) fn ends(&self) -> impl Iterator<Item = &VethEnd> {
        self.link.iter().flat_map(|link| &link.ends)
    }

    /// Variables with addresses: `client` and `client6` are the first IPv4 and IPv6 addresses of `client`, `relay-peer` is `relay`'s
    /// address on its link to `peer`, and `peer-prefix` is the first local prefix of `peer`.
    pub(crate) fn addresses(&self) -> BTreeMap<String, String> {
        let mut names = BTreeMap::new();
        for link in &self.link {
            for (end, far) in [(&link.ends[0], &link.ends[1]), (&link.ends[1], &link.ends[0])] {
                for address in end.addresses.iter().filter_map(|text| parse_address(text)) {
                    let family = if address.is_ipv4() { "" } else { "6" };
                    for name in [
                        format!("{}{family}", end.namespace),
                        format!("{}-{}{family}", end.namespace, far.namespace),
                    ] {
                        names.entry(name).or_insert_with(|| address.to_string());
                    }
                }
            }
        }
        for space in &self.namespace {
            for prefix in &space.local {
                let family = if prefix.contains(':') { "6" } else { "" };
                names.entry(format!("{}-prefix{family}", space.name)).or_insert_with(|| prefix.clone());
            }
        }
        names
    }
}

fn check_end(end: &VethEnd, path: &str, names: &BTreeSet<&str>, document: &mut Document) {
    if !names.contains(end.namespace.as_str()) {
        let hint = match nearest(&end.namespace, names.iter().copied()) {
            Some(meant) => format!("; did you mean \"{meant}\"?"),
            None => String::new(),
        };
        document.problem(
            &format!("{path}.namespace"),
            format!("a link ends in \"{}\", which is not a namespace{hint}", end.namespace),
        );
    }
    // Interface names are at most 15 bytes long (IFNAMSIZ).
    if !is_plain(&end.device, 15) {
        document.problem(
            &format!("{path}.device"),
            format!("device \"{}\": expected 1 to 15 lower-case letters, digits or hyphens, starting with a letter", end.device),
        );
    }
    if end.mitigation.is_some() && end.napi_cpu.is_none() {
        document.problem(&format!("{path}.mitigation"), "mitigation: needs napi_cpu");
    }
    for (index, address) in end.addresses.iter().enumerate() {
        if parse_address(address).is_none() {
            document.problem(
                &format!("{path}.addresses[{index}]"),
                format!("\"{address}\": expected ADDRESS/PREFIX such as 10.77.1.2/24"),
            );
        }
    }
}

pub(crate) fn parse_address(text: &str) -> Option<IpAddr> {
    let (address, prefix) = text.split_once('/')?;
    let address: IpAddr = address.parse().ok()?;
    let bits = if address.is_ipv4() { 32 } else { 128 };
    prefix.parse::<u32>().is_ok_and(|prefix| prefix <= bits).then_some(address)
}

pub(crate) const PLAIN: &str = "lower-case letters, digits and hyphens, starting with a letter";

/// Returns true if a name is safe in a file name, a command and an interface list.
pub(crate) fn is_plain(name: &str, longest: usize) -> bool {
    (1..=longest).contains(&name.len())
        && name.starts_with(|first: char| first.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
}

impl VethEnd {
    pub(crate) fn wanted(&self, all: &BTreeMap<String, bool>) -> BTreeMap<String, bool> {
        let mut wanted = all.clone();
        wanted.extend(self.offloads.clone());
        wanted
    }
}

fn ethernet() -> u32 {
    1500
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        let (spec, mut document): (Spec, _) = Document::parse(Path::new("t.toml"), text).unwrap();
        spec.check(&mut document);
        document.finish().unwrap_err().to_string()
    }

    #[test]
    fn an_unknown_name_lists_the_known_topologies() {
        let told = |name: &str| Spec::load(name, Path::new(".")).unwrap_err().to_string();
        assert_eq!(told("wirre"), "no topology \"wirre\"; did you mean \"wire\"?");
        assert_eq!(
            told("something"),
            "no topology \"something\": expected host, veth, wire, wire-without-uso, wire-with-sums, wire-mitigated, wire-far-mitigated, wire-far-mitigated-with-sums, fleet, or a file"
        );
        assert!(told("some.toml").contains("cannot read ./some.toml"), "{}", told("some.toml"));
    }

    #[test]
    fn a_wire_has_pinned_receivers_and_the_addresses_of_veth() {
        let (veth, wire) =
            (Spec::load("veth", Path::new(".")).unwrap(), Spec::load("wire", Path::new(".")).unwrap());
        assert_eq!(wire.addresses(), veth.addresses());
        assert!(wire.has_napi_threads() && !veth.has_napi_threads());
        for end in wire.ends() {
            let is_relay = end.namespace == "relay";
            assert_eq!(end.napi_cpu, Some(usize::from(!is_relay)), "{}", end.device);
            let wanted = end.wanted(&wire.offloads);
            assert_eq!(wanted["tx-udp-segmentation"], is_relay, "{}", end.device);
            assert!(wanted["gro"] && !wanted["tso"], "{}", end.device);
        }
        let mitigated = Spec::load("wire-mitigated", Path::new(".")).unwrap();
        for (end, plain) in mitigated.ends().zip(wire.ends()) {
            assert_eq!(end.mitigation.is_some(), end.namespace == "relay", "{}", end.device);
            assert_eq!(plain.mitigation, None);
        }
        for (name, is_mitigated, has_sums) in [
            ("wire-far-mitigated", true, false),
            ("wire-with-sums", false, true),
            ("wire-far-mitigated-with-sums", true, true),
        ] {
            let far = Spec::load(name, Path::new(".")).unwrap();
            for end in far.ends() {
                let is_far = end.namespace != "relay";
                assert_eq!(end.mitigation.is_some(), is_mitigated && is_far, "{name}: {}", end.device);
                assert_eq!(end.wanted(&far.offloads)["tx"], !(has_sums && is_far), "{name}: {}", end.device);
            }
        }
        let without = Spec::load("wire-without-uso", Path::new(".")).unwrap();
        assert!(
            without.has_napi_threads()
                && without.ends().all(|end| !end.wanted(&without.offloads)["tx-udp-segmentation"])
        );
    }

    #[test]
    fn a_fleet_has_two_relays_with_wire_links() {
        let (fleet, wire) =
            (Spec::load("fleet", Path::new(".")).unwrap(), Spec::load("wire", Path::new(".")).unwrap());
        assert_eq!(fleet.offloads, wire.offloads);
        let addresses = fleet.addresses();
        for name in ["client", "relay", "relay-peer", "peer", "peer-prefix"] {
            assert_eq!(addresses[name], wire.addresses()[name], "{name}");
        }
        let of_twin = ["twin", "twin-peer", "store-relay", "store-twin"].map(|name| &*addresses[name]);
        assert_eq!(of_twin, ["10.77.3.1", "10.77.4.1", "10.77.5.2", "10.77.6.2"]);
        for end in fleet.ends() {
            let is_relay = ["relay", "twin"].contains(&&*end.namespace);
            assert_eq!(end.napi_cpu, Some(usize::from(!is_relay)), "{}", end.device);
            let segments_late = end.wanted(&fleet.offloads)["tx-udp-segmentation"];
            assert_eq!(segments_late, is_relay || end.namespace == "store", "{}", end.device);
        }
    }

    #[test]
    fn the_default_is_client_relay_peer_with_both_families() {
        let spec = Spec::load(KNOWN[0].0, Path::new(".")).unwrap();
        let names: Vec<&str> = spec.namespace.iter().map(|space| space.name.as_str()).collect();
        assert_eq!(names, ["client", "relay", "peer"]);
        let addresses = spec.addresses();
        assert_eq!(addresses["client"], "10.77.1.2");
        assert_eq!(addresses["relay"], "10.77.1.1");
        assert_eq!(addresses["relay-peer"], "10.77.2.1");
        assert_eq!(addresses["peer"], "10.77.2.2");
        assert_eq!(addresses["peer6"], "fd77:2::2");
        assert_eq!(addresses["peer-prefix"], "10.78.0.0/16");
    }

    #[test]
    fn errors_in_topology_files_are_reported() {
        let end = |namespace: &str| {
            format!(
                "[[namespace]]\nname = 'left'\n[[link]]\nends = [{{ namespace = 'left', device = 'a', addresses = [] }}, \
                 {{ namespace = '{namespace}', device = 'b', addresses = [] }}]\n"
            )
        };
        assert_eq!(
            refusal(&end("lefd")),
            "t.toml:4:77: a link ends in \"lefd\", which is not a namespace; did you mean \"left\"?"
        );
        assert!(refusal("[[namespace]]\nname = 'A b'\n").contains("lower-case"));
        assert!(refusal("[[namespace]]\nname = 'a'\nsysctl = { '../kernel/x' = '1' }\n").contains("below"));
        assert!(
            refusal(&end("left").replace("'b', addresses = []", "'b', addresses = ['10.0.0.1/33']"))
                .contains("ADDRESS")
        );
        assert!(refusal(&end("left").replace("'b'", "'a'")).contains("twice"));
        assert!(refusal("[[namespace]]\nname = 'a'\nlocal = ['10.78.0.0']\n").contains("a prefix such as"));
        let mitigated = "'b', mitigation = { gro_flush_timeout_us = 100, napi_defer_hard_irqs = 2 }";
        assert!(refusal(&end("left").replace("'b'", mitigated)).contains("needs napi_cpu"));
    }
}
