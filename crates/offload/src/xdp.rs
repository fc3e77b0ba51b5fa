//! Checks which interfaces support XDP in their driver.

use std::{
    fs,
    os::fd::{BorrowedFd, OwnedFd},
};

use aya::util::KernelVersion;

use crate::{
    error::OffloadError,
    links::{self, Kind},
    netlink::{Interface, Netlink},
    settings::Hook,
};

/// First kernel with bpf_xdp_load_bytes, which the program needs.
const SINCE: KernelVersion = KernelVersion::new(5, 18, 0);

/// Drivers that load programs but do not support bpf_xdp_adjust_head, which the program needs for each
/// packet.
const NO_HEADROOM: [&str; 1] = ["gve"];

/// Virtual interfaces with native XDP; others only pass on traffic of the interfaces below.
const NATIVE_KINDS: [&str; 1] = ["veth"];

pub(crate) fn check_kernel() -> Result<(), OffloadError> {
    if KernelVersion::current().is_ok_and(|it| it < SINCE) {
        return Err(OffloadError::Xdp { said: "this kernel is older than Linux 5.18".to_owned() });
    }
    Ok(())
}

pub(crate) fn attach(program: BorrowedFd<'_>, interface: &Interface, hook: Hook) -> Result<OwnedFd, String> {
    let is_generic = hook == Hook::XdpGeneric;
    if !is_generic && let Some(why) = unfit(interface.kind.as_deref(), driver(&interface.name).as_deref()) {
        return Err(why);
    }
    let kind = if is_generic { Kind::Generic } else { Kind::Driver };
    let link = links::create(program, interface.number, kind).map_err(|error| {
        let driver = driver(&interface.name).or_else(|| interface.kind.clone());
        format!(
            "its driver {} does not accept the program ({error})",
            driver.as_deref().unwrap_or("(unknown)")
        )
    })?;
    // Many drivers accept redirected packets only with a program attached.
    if !is_generic && Netlink::takes_redirected(interface.number) == Some(false) {
        return Err(takes_none(interface.kind.as_deref()));
    }
    Ok(link)
}

fn takes_none(kind: Option<&str>) -> String {
    let why = "its driver does not accept redirected packets (NETDEV_XDP_ACT_NDO_XMIT)";
    match kind {
        Some("veth") => format!(
            "{why}: a veth accepts them only if both ends are up and the far end uses NAPI; run `ethtool -K DEVICE gro off` \
             and then `gro on` there"
        ),
        _ => why.to_owned(),
    }
}

fn unfit(kind: Option<&str>, driver: Option<&str>) -> Option<String> {
    if let Some(kind) = kind {
        // In another namespace, sysfs may show a different interface's driver.
        let why = format!("a virtual interface ({kind}) without a driver that could run the program");
        return (!NATIVE_KINDS.contains(&kind)).then_some(why);
    }
    let driver = driver.filter(|driver| NO_HEADROOM.contains(driver))?;
    Some(format!("its driver {driver} cannot move the start of a packet (XDP head adjustment)"))
}

fn driver(interface: &str) -> Option<String> {
    let link = fs::read_link(format!("/sys/class/net/{interface}/device/driver")).ok()?;
    Some(link.file_name()?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsuitable_interfaces_are_refused_with_their_kind_or_driver() {
        assert_eq!(unfit(None, None), None);
        assert_eq!(unfit(None, Some("virtio_net")), None);
        assert_eq!(unfit(Some("veth"), None), None);
        let said = unfit(None, Some("gve")).expect("unsuitable for XDP");
        assert!(said.contains("gve") && said.contains("head adjustment"), "{said}");
        let said = unfit(Some("vlan"), Some("gve")).expect("unsuitable for XDP");
        assert!(said.contains("vlan"), "{said}");
    }

    #[test]
    fn a_refused_veth_gets_a_remedy() {
        assert!(takes_none(Some("veth")).contains("gro on") && !takes_none(None).contains("gro on"));
    }
}
