//! XDP: which interfaces can have it in their driver, and why others cannot.

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

/// The first that has what the program asks of it (bpf_xdp_load_bytes).
const SINCE: KernelVersion = KernelVersion::new(5, 18, 0);

/// Drivers that take a program but cannot move the start of a packet for it (bpf_xdp_adjust_head), which it does with each.
const NO_HEADROOM: [&str; 1] = ["gve"];

/// Interfaces made by software whose driver is native all the same; others only hand on what comes by the interfaces below.
const NATIVE_KINDS: [&str; 1] = ["veth"];

/// What is said of kernels that are too old.
pub(crate) fn check_kernel() -> Result<(), OffloadError> {
    if KernelVersion::current().is_ok_and(|it| it < SINCE) {
        return Err(OffloadError::Xdp { said: "the kernel is older than Linux 5.18".to_owned() });
    }
    Ok(())
}

/// Attaches the program to an interface, by a link that ends as it is dropped, or says why that cannot be.
pub(crate) fn attach(program: BorrowedFd<'_>, interface: &Interface, hook: Hook) -> Result<OwnedFd, String> {
    let is_generic = hook == Hook::XdpGeneric;
    if !is_generic && let Some(why) = unfit(interface.kind.as_deref(), driver(&interface.name).as_deref()) {
        return Err(why);
    }
    let kind = if is_generic { Kind::Generic } else { Kind::Driver };
    let link = links::create(program, interface.number, kind).map_err(|error| {
        let driver = driver(&interface.name).or_else(|| interface.kind.clone());
        format!("its driver {} takes no program ({error})", driver.as_deref().unwrap_or("(unknown)"))
    })?;
    // Many drivers do with a program only what they refuse without.
    if !is_generic && Netlink::takes_redirected(interface.number) == Some(false) {
        return Err(takes_none(interface.kind.as_deref()));
    }
    Ok(link)
}

/// Why nothing can be redirected to an interface of this kind.
fn takes_none(kind: Option<&str>) -> String {
    let why = "its driver takes no packets that are redirected to it (NETDEV_XDP_ACT_NDO_XMIT)";
    match kind {
        Some("veth") => format!(
            "{why}: a veth does while both ends are up and the far end receives by NAPI; say `ethtool -K DEVICE gro off` and then \
             `gro on` there"
        ),
        _ => why.to_owned(),
    }
}

/// Why an interface of this kind, of this driver, cannot have a program in its driver.
fn unfit(kind: Option<&str>, driver: Option<&str>) -> Option<String> {
    if let Some(kind) = kind {
        // And where sysfs shows the interfaces of another namespace, the driver would be another's.
        let why = format!("it is made by software ({kind}), and has no driver that could run the program");
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
    fn what_has_no_driver_or_the_wrong_one_is_refused_by_name() {
        assert_eq!(unfit(None, None), None);
        assert_eq!(unfit(None, Some("virtio_net")), None);
        assert_eq!(unfit(Some("veth"), None), None);
        let said = unfit(None, Some("gve")).expect("it cannot");
        assert!(said.contains("gve") && said.contains("head adjustment"), "{said}");
        let said = unfit(Some("vlan"), Some("gve")).expect("it cannot");
        assert!(said.contains("vlan"), "{said}");
    }

    #[test]
    fn of_a_veth_the_remedy_is_said() {
        assert!(takes_none(Some("veth")).contains("gro on") && !takes_none(None).contains("gro on"));
    }
}
