//! Loads the compiled object with maps of the configured sizes, and takes programs and maps out of it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Map, MapData, MapError},
    programs::Xdp,
    util::KernelVersion,
};

use crate::{
    error::OffloadError,
    handover::MAPS,
    links,
    mapped_array::MappedArray,
    settings::KernelSettings,
    verification::{classifier, load_classifier, load_program},
    xdp,
};

static OBJECT: &[u8] = aya::include_bytes_aligned!("../bpf/relay.o");

/// Name of the TC program, also used to find leftovers.
pub(crate) const PROGRAM: &str = "turnpike";
/// Name of the program at TC egress, which grants leases.
pub(crate) const LEAVES: &str = "turnpike_leaves";
const XDP_PROGRAM: &str = "turnpike_xdp";

const TELLS_MTU: KernelVersion = KernelVersion::new(5, 12, 0);

/// True if programs can ask the kernel for the MTU of an interface (bpf_check_mtu). Otherwise
/// [`crate::routes::Routes`] provides the MTU, but learns of changes a moment later.
fn tells_mtu() -> bool {
    KernelVersion::current().is_ok_and(|it| it >= TELLS_MTU)
}

/// Loads and verifies the programs without attaching them. The maps in `passed` replace those with the same
/// names.
pub(crate) fn load_object(
    settings: &KernelSettings,
    passed: Option<Vec<OwnedFd>>,
) -> Result<Ebpf, OffloadError> {
    let mut object = EbpfLoader::new()
        .btf(None)
        .override_global("kernel_tells_mtu", &u32::from(tells_mtu()), true)
        .override_global("leases", &u32::from(settings.leases), true)
        .map_max_entries("departures", settings.departures())
        .map_max_entries("flows", settings.flows.saturating_add(settings.flows / 2))
        .map_max_entries("states", settings.states())
        .map_max_entries("streams", settings.streams())
        .map_max_entries("drained", settings.sockets)
        .map_max_entries("routes", settings.flows)
        .map_max_entries("gateways", settings.flows)
        .map_max_entries("hops", settings.hops())
        .load(OBJECT)
        .map_err(OffloadError::load)?;
    for (name, passed) in MAPS.iter().zip(passed.iter().flatten()) {
        let what = "replaceable map descriptors (dup3)";
        let kernel = |source| OffloadError::Kernel { what, source };
        links::stand_for(descriptor(&object, name)?, passed).map_err(kernel)?;
    }
    drop(passed);
    load_classifier(&mut object, PROGRAM)?;
    if settings.leases {
        load_classifier(&mut object, LEAVES)?;
    }
    if settings.hook.is_xdp() {
        xdp::check_kernel()?;
        let program = xdp_program(&mut object)?;
        load_program(|| program.load())?;
    }
    Ok(object)
}

fn xdp_program(object: &mut Ebpf) -> Result<&mut Xdp, OffloadError> {
    let program =
        object.program_mut(XDP_PROGRAM).ok_or_else(|| OffloadError::Object(format!("no {XDP_PROGRAM}")))?;
    program.try_into().map_err(OffloadError::program)
}

pub(crate) fn tc_descriptor<'o>(object: &'o mut Ebpf, name: &str) -> Result<BorrowedFd<'o>, OffloadError> {
    Ok(classifier(object, name)?.fd().map_err(OffloadError::program)?.as_fd())
}

pub(crate) fn xdp_descriptor(object: &mut Ebpf) -> Result<BorrowedFd<'_>, OffloadError> {
    Ok(xdp_program(object)?.fd().map_err(OffloadError::program)?.as_fd())
}

pub(crate) fn descriptor<'o>(object: &'o Ebpf, name: &str) -> Result<BorrowedFd<'o>, OffloadError> {
    match object.map(name) {
        Some(Map::HashMap(data) | Map::Array(data)) => Ok(data.fd().as_fd()),
        _ => Err(OffloadError::Object(format!("no map {name}"))),
    }
}

pub(crate) fn take(object: &mut Ebpf, name: &'static str) -> Result<Map, OffloadError> {
    object.take_map(name).ok_or_else(|| OffloadError::Object(format!("no map {name}")))
}

pub(crate) fn data(map: Map) -> Result<MapData, OffloadError> {
    match map {
        Map::HashMap(data) | Map::Array(data) => Ok(data),
        _ => Err(OffloadError::Object("a map of another type".to_owned())),
    }
}

pub(crate) fn array(object: &mut Ebpf, name: &'static str, len: usize) -> Result<MappedArray, OffloadError> {
    let data = data(take(object, name)?)?;
    MappedArray::map(data.fd().as_fd(), len)
        .map_err(|source| OffloadError::Kernel { what: "memory-mapped maps (BPF_F_MMAPABLE)", source })
}

pub(crate) fn map_error(error: MapError) -> OffloadError {
    OffloadError::load(error.into())
}
