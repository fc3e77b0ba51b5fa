//! State of a forwarder that is passed to a new process: export and import.

use std::{io, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use turnpike_admin::Serving;
use turnpike_forward::{
    Forwarder,
    upgrade::{ForwarderHandover, ForwarderOffer},
};
use turnpike_net::{Datapath, PassedSockets};
use turnpike_process::{
    ProcessError,
    upgrade::{DescriptorNames, HandoverOffer, HandoverState, NamedSocket, PreviousProcess},
};
use turnpike_worker::Channel;

#[derive(Serialize, Deserialize)]
struct ForwardOffer {
    forwarder: ForwarderOffer,
    names: DescriptorNames,
}

pub(crate) struct ForwardHandover {
    pub(crate) forwarder: Arc<Forwarder>,
    pub(crate) page: Arc<Serving>,
    pub(crate) passed: Arc<PassedSockets>,
}

impl HandoverState for ForwardHandover {
    fn offer(&self) -> io::Result<HandoverOffer> {
        let (forwarder, mut descriptors, channels) = self.forwarder.offer()?;
        let names = DescriptorNames::export(self.page.lend()?, &self.passed, &mut descriptors)?;
        HandoverOffer::new(&ForwardOffer { forwarder, names }, descriptors, channels)
    }

    fn pause(&self, _: bool) -> io::Result<()> {
        self.forwarder.pause()
    }

    fn export(&self, channels: Vec<Channel>, patience: Duration) -> io::Result<usize> {
        self.forwarder.export(channels, patience)
    }

    fn resume(&self) {
        self.forwarder.resume();
    }

    fn forget(&self) {
        self.forwarder.forget();
    }
}

pub(crate) struct PreviousForwarder {
    forwarder: ForwarderHandover,
    workers: usize,
    datapath: Datapath,
    page: Vec<NamedSocket>,
}

impl PreviousForwarder {
    /// Reads the offer. Also returns sockets that a service manager passed to the previous process.
    pub(crate) fn new(previous: &mut PreviousProcess) -> Result<(Self, PassedSockets), ProcessError> {
        let (ForwardOffer { forwarder, names }, mut descriptors) = previous.offer::<ForwardOffer>()?;
        let (page, passed) = names.import(&mut descriptors)?;
        let datapath = forwarder.datapath().ok_or_else(|| {
            ProcessError::Upgrade(
                "the new version does not support the data path of the old one: restart instead".to_owned(),
            )
        })?;
        let workers = forwarder.workers;
        let forwarder = ForwarderHandover::new(forwarder, descriptors);
        Ok((Self { forwarder, workers, datapath, page }, passed))
    }

    /// Number of workers and data path, which must stay the same: each worker has its own listeners, and the
    /// data path determines how waiting packets were coalesced.
    pub(crate) fn kept(&self) -> (usize, Datapath) {
        (self.workers, self.datapath)
    }

    pub(crate) fn page(&mut self) -> Vec<NamedSocket> {
        std::mem::take(&mut self.page)
    }

    pub(crate) fn into_forwarder(self) -> ForwarderHandover {
        self.forwarder
    }
}
