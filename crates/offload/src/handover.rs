//! Kernel path passed to another process in an upgrade: the links of the programs, so that one is always
//! attached, and the maps with all flows, which the new process uses if its layout is the same.

use std::{io, os::fd::OwnedFd};

use serde::{Deserialize, Serialize};

use crate::{
    claim::Claim,
    layout::LAYOUT,
    links::{Filter, HookDirection},
    settings::{Attachment, KernelSettings},
};

/// Names of the maps that are passed, in the order of their descriptors. Each process has its own counters of
/// reasons.
pub(crate) const MAPS: [&str; 9] =
    ["flows", "states", "drained", "routes", "gateways", "hops", "ports", "departures", "streams"];

/// Result of [`crate::Kernel::export_fds`]. The descriptors are passed separately: first that of the claim, if
/// any, then those of the maps and of the links.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PassedKernel {
    layout: u64,
    /// [`MAPS`] of the sender's version; empty if that version did not send them.
    #[serde(default)]
    maps: Vec<String>,
    pub(crate) flows: u32,
    pub(crate) sockets: u32,
    pub(crate) by_xdp: bool,
    #[serde(default)]
    leases: bool,
    #[serde(default)]
    measures: bool,
    #[serde(default)]
    has_claim: bool,
    pub(crate) links: Vec<PassedLink>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PassedLink {
    pub(crate) number: u32,
    /// `None` for loopback.
    pub(crate) told: Option<Attachment>,
    pub(crate) way: PassedWay,
    #[serde(default)]
    pub(crate) direction: HookDirection,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PassedWay {
    Tcx,
    Xdp,
    Filter(Filter),
}

#[derive(Default)]
pub(crate) struct ReceivedKernel {
    pub(crate) claim: Option<Claim>,
    pub(crate) maps: Option<Vec<OwnedFd>>,
    pub(crate) links: Vec<(PassedLink, Option<OwnedFd>)>,
}

impl PassedKernel {
    pub(crate) fn new(settings: &KernelSettings, links: Vec<PassedLink>, has_claim: bool) -> Self {
        let KernelSettings { flows, sockets, hook, leases, measures, .. } = *settings;
        let maps = MAPS.map(str::to_owned).to_vec();
        Self {
            layout: LAYOUT,
            maps,
            flows,
            sockets,
            by_xdp: hook.is_xdp(),
            leases,
            measures,
            has_claim,
            links,
        }
    }

    /// True if flows of the previous process needed leases.
    #[must_use]
    pub fn has_leases(&self) -> bool {
        self.leases
    }

    /// Drops the maps, so that the previous process's flows end before this process serves clients.
    #[must_use]
    pub fn without_flows(self) -> Self {
        Self { layout: 0, ..self }
    }

    fn fits(&self, count: usize, settings: &KernelSettings) -> bool {
        let Self { layout, flows, sockets, by_xdp, leases, .. } = *self;
        (layout, flows, by_xdp, leases) == (LAYOUT, settings.flows, settings.hook.is_xdp(), settings.leases)
            && self.measures == settings.measures
            && sockets >= settings.sockets
            && count == MAPS.len()
            && (self.maps.is_empty() || self.maps == MAPS)
    }

    /// Splits the descriptors. Versions differ in the number of maps, which come first; each link always has
    /// one descriptor.
    pub(crate) fn open(
        self,
        descriptors: Vec<OwnedFd>,
        settings: &KernelSettings,
    ) -> io::Result<ReceivedKernel> {
        let mut descriptors = descriptors.into_iter();
        let claim = if self.has_claim { descriptors.next().map(Claim::from_previous) } else { None };
        let mut maps: Vec<OwnedFd> = descriptors.collect();
        let of_links = self.links.iter().filter(|link| link.way.has_descriptor()).count();
        let count = maps.len().checked_sub(of_links).ok_or(io::ErrorKind::UnexpectedEof)?;
        let mut of_links = maps.split_off(count).into_iter();
        let fits = self.fits(count, settings);
        let with_descriptor = |link: PassedLink| {
            let descriptor = if link.way.has_descriptor() { of_links.next() } else { None };
            (link, descriptor)
        };
        Ok(ReceivedKernel {
            claim,
            links: self.links.into_iter().map(with_descriptor).collect(),
            maps: fits.then_some(maps),
        })
    }
}

impl PassedWay {
    /// True for links; filters have names instead.
    fn has_descriptor(&self) -> bool {
        !matches!(self, Self::Filter(_))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::Hook;

    fn settings() -> KernelSettings {
        let (listeners, relay_ports) = (Vec::new(), 49_152..=65_535);
        KernelSettings {
            listeners,
            relay_ports,
            flows: 64,
            sockets: 8,
            hook: Hook::Tcx,
            leases: false,
            measures: false,
        }
    }

    fn offered(links: u32) -> PassedKernel {
        let link = |number| PassedLink {
            number,
            told: None,
            way: PassedWay::Tcx,
            direction: HookDirection::Ingress,
        };
        PassedKernel::new(&settings(), (0..links).map(link).collect(), false)
    }

    fn descriptors(count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| File::open("/dev/null").unwrap().into()).collect()
    }

    fn opened(passed: PassedKernel, count: usize) -> Option<(Option<usize>, usize)> {
        let received = passed.open(descriptors(count), &settings()).ok()?;
        let links = received.links.iter().filter(|(_, descriptor)| descriptor.is_some()).count();
        Some((received.maps.map(|maps| maps.len()), links))
    }

    #[test]
    fn links_are_taken_over_from_versions_with_more_or_fewer_maps() {
        let from = |maps: usize| opened(offered(2), maps + 2);
        assert_eq!(from(MAPS.len()), Some((Some(MAPS.len()), 2)));
        assert_eq!(from(MAPS.len() - 1), Some((None, 2)));
        assert_eq!(from(MAPS.len() + 1), Some((None, 2)));
        assert_eq!(from(0), Some((None, 2)));
        assert_eq!(opened(offered(2), 1), None);
    }

    #[test]
    fn maps_are_used_if_their_layout_and_names_match() {
        let all = MAPS.len();
        assert_eq!(opened(offered(0), all), Some((Some(all), 0)));
        // The first version did not send names.
        assert_eq!(opened(PassedKernel { maps: Vec::new(), ..offered(0) }, all), Some((Some(all), 0)));
        let mut other = offered(0);
        other.maps.swap(0, 1);
        assert_eq!(opened(other, all), Some((None, 0)));
        assert_eq!(opened(offered(0).without_flows(), all), Some((None, 0)));
        assert_eq!(opened(PassedKernel { flows: 128, ..offered(0) }, all), Some((None, 0)));
        assert_eq!(opened(PassedKernel { leases: true, ..offered(0) }, all), Some((None, 0)));
        assert_eq!(opened(PassedKernel { measures: true, ..offered(0) }, all), Some((None, 0)));
        assert_eq!(opened(PassedKernel { sockets: 7, ..offered(0) }, all), Some((None, 0)));
    }
}
