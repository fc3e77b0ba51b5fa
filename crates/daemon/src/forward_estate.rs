//! What a forwarder gives to the process that takes its place, and what that one makes of it.

use std::{io, net::SocketAddr, os::fd::OwnedFd, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use turnpike_config::AdminListen;
use turnpike_forward::{
    Forwarder,
    upgrade::{Inheritance, Offer},
};
use turnpike_net::{Channel, Datapath};

use crate::{
    admin::MetricsPage,
    error::DaemonError,
    upgrade::{Estate, Heir, Offered},
};

/// The offer as a whole.
#[derive(Serialize, Deserialize)]
struct ForwardOffer {
    forwarder: Offer,
    /// Where the admin page was to be; its socket is the last one.
    page: Option<SocketAddr>,
}

/// Of a forwarder that runs.
pub(crate) struct ForwardEstate {
    pub(crate) forwarder: Arc<Forwarder>,
    pub(crate) page: Option<(SocketAddr, Arc<OwnedFd>)>,
    pub(crate) metrics: MetricsPage,
}

impl Estate for ForwardEstate {
    fn service(&self) -> &'static str {
        "forward"
    }

    fn offer(&self) -> io::Result<Offered> {
        let (forwarder, mut descriptors, heirs) = self.forwarder.offer()?;
        if let Some((_, socket)) = &self.page {
            descriptors.push(socket.try_clone()?);
        }
        let page = self.page.as_ref().map(|(configured, _)| *configured);
        Offered::new(&ForwardOffer { forwarder, page }, descriptors, heirs)
    }

    fn freeze(&self) -> io::Result<()> {
        self.forwarder.freeze()
    }

    fn hand_over(&self, heirs: Vec<Channel>, patience: Duration) -> io::Result<usize> {
        self.forwarder.hand_over(heirs, patience)
    }

    fn thaw(&self) {
        self.forwarder.thaw();
    }

    fn release(&self) {
        self.forwarder.release();
    }

    fn metrics(&self) -> String {
        (self.metrics)().unwrap_or_default()
    }
}

/// What a forwarder begins with that takes another one's place.
pub(crate) struct ForwardInheritance {
    forwarder: Inheritance,
    workers: usize,
    datapath: Datapath,
    page: Option<(SocketAddr, OwnedFd)>,
}

impl ForwardInheritance {
    pub(crate) fn new(heir: &mut Heir) -> Result<Self, DaemonError> {
        let (ForwardOffer { forwarder, page }, mut descriptors) = heir.offer::<ForwardOffer>()?;
        let page = page.and_then(|configured| Some((configured, descriptors.pop()?)));
        let datapath = forwarder.datapath().ok_or_else(|| {
            DaemonError::Upgrade("this version does not have the old one's data path".to_owned())
        })?;
        let workers = forwarder.workers;
        Ok(Self { forwarder: Inheritance::new(forwarder, descriptors), workers, datapath, page })
    }

    /// Listeners are bound to workers, and what waits in them is of one data path: these stay, whatever is configured.
    pub(crate) fn kept(&self) -> (usize, Datapath) {
        (self.workers, self.datapath)
    }

    /// The socket of the admin page, if that is where it was.
    pub(crate) fn page(&mut self, listen: AdminListen) -> Option<OwnedFd> {
        let (configured, socket) = self.page.take()?;
        (listen == AdminListen::On(configured)).then_some(socket)
    }

    pub(crate) fn into_forwarder(self) -> Inheritance {
        self.forwarder
    }
}
