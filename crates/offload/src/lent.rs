//! What one process gives another of the path through the kernel: the links of its programs, so that there is no moment without one, and the
//! maps with all flows, if the other one lays them out in the same way.

use std::{io, os::fd::OwnedFd};

use serde::{Deserialize, Serialize};

use crate::{
    kernel::{Attachment, Settings},
    layout::LAYOUT,
    links::Filter,
};

/// Maps that go along, in the order of their descriptors. What is counted by reason does not: each process has its own.
pub(crate) const MAPS: [&str; 7] = ["flows", "states", "drained", "routes", "gateways", "hops", "ports"];

/// What [`crate::Kernel::lend`] gives, without the descriptors that travel beside it: those of the maps, and then those of links.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Lent {
    /// [`LAYOUT`].
    layout: u64,
    /// As [`Settings`] had them.
    pub(crate) flows: u32,
    pub(crate) sockets: u32,
    /// Whether a program that sees packets before GRO is among them.
    pub(crate) by_xdp: bool,
    pub(crate) links: Vec<LentLink>,
}

/// A program at an interface.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LentLink {
    /// The interface's.
    pub(crate) number: u32,
    /// `None` for loopback.
    pub(crate) told: Option<Attachment>,
    pub(crate) way: LentWay,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LentWay {
    Tcx,
    Xdp,
    Filter(Filter),
}

/// What has come.
#[derive(Default)]
pub(crate) struct Inherited {
    /// In the order of [`MAPS`], if they can be gone on with.
    pub(crate) maps: Option<Vec<OwnedFd>>,
    /// With its descriptor, where it is a link.
    pub(crate) links: Vec<(LentLink, Option<OwnedFd>)>,
}

impl Lent {
    pub(crate) fn new(settings: &Settings, links: Vec<LentLink>) -> Self {
        let Settings { flows, sockets, hook, .. } = *settings;
        Self { layout: LAYOUT, flows, sockets, by_xdp: hook.is_xdp(), links }
    }

    /// Without the maps: the flows of the process before are no more when this one serves.
    #[must_use]
    pub fn without_flows(self) -> Self {
        Self { layout: 0, ..self }
    }

    /// Whether maps of these settings are just like those that were lent, or smaller.
    fn fits(&self, settings: &Settings) -> bool {
        let Self { layout, flows, sockets, by_xdp, .. } = *self;
        (layout, flows, by_xdp) == (LAYOUT, settings.flows, settings.hook.is_xdp())
            && sockets >= settings.sockets
    }

    pub(crate) fn open(self, descriptors: Vec<OwnedFd>, settings: &Settings) -> io::Result<Inherited> {
        let fits = self.fits(settings);
        let mut descriptors = descriptors.into_iter();
        let missing = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let maps: Vec<OwnedFd> = descriptors.by_ref().take(MAPS.len()).collect();
        if maps.len() < MAPS.len() {
            return Err(missing());
        }
        let mut links = Vec::with_capacity(self.links.len());
        for link in self.links {
            let is_filter = matches!(link.way, LentWay::Filter(_));
            let descriptor = if is_filter { None } else { Some(descriptors.next().ok_or_else(missing)?) };
            links.push((link, descriptor));
        }
        Ok(Inherited { maps: fits.then_some(maps), links })
    }
}
