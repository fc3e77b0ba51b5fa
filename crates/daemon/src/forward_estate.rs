//! What a forwarder gives to the process that takes its place, and what that one makes of it.

use std::{io, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use turnpike_admin::{Lent, Serving};
use turnpike_forward::{
    Forwarder,
    upgrade::{Inheritance, Offer},
};
use turnpike_net::{Channel, Datapath, PassedSockets};

use crate::{
    admin::MetricsPage,
    error::DaemonError,
    upgrade::{Estate, Heir, Names, Offered},
};

/// The offer as a whole.
#[derive(Serialize, Deserialize)]
struct ForwardOffer {
    forwarder: Offer,
    names: Names,
}

/// Of a forwarder that runs.
pub(crate) struct ForwardEstate {
    pub(crate) forwarder: Arc<Forwarder>,
    pub(crate) page: Arc<Serving>,
    pub(crate) passed: Arc<PassedSockets>,
    pub(crate) metrics: MetricsPage,
}

impl Estate for ForwardEstate {
    fn service(&self) -> &'static str {
        "forward"
    }

    fn offer(&self) -> io::Result<Offered> {
        let (forwarder, mut descriptors, heirs) = self.forwarder.offer()?;
        let names = Names::lend(self.page.lend()?, &self.passed, &mut descriptors)?;
        Offered::new(&ForwardOffer { forwarder, names }, descriptors, heirs)
    }

    fn freeze(&self, _: bool) -> io::Result<()> {
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
    page: Vec<Lent>,
}

impl ForwardInheritance {
    /// With the sockets that a service manager had passed to the process before.
    pub(crate) fn new(heir: &mut Heir) -> Result<(Self, PassedSockets), DaemonError> {
        let (ForwardOffer { forwarder, names }, mut descriptors) = heir.offer::<ForwardOffer>()?;
        let (page, passed) = names.take_from(&mut descriptors)?;
        let datapath = forwarder.datapath().ok_or_else(|| {
            DaemonError::Upgrade("this version does not have the old one's data path".to_owned())
        })?;
        let workers = forwarder.workers;
        let forwarder = Inheritance::new(forwarder, descriptors);
        Ok((Self { forwarder, workers, datapath, page }, passed))
    }

    /// Listeners are bound to workers, and what waits in them is of one data path: these stay, whatever is configured.
    pub(crate) fn kept(&self) -> (usize, Datapath) {
        (self.workers, self.datapath)
    }

    /// The sockets of the admin interface.
    pub(crate) fn page(&mut self) -> Vec<Lent> {
        std::mem::take(&mut self.page)
    }

    pub(crate) fn into_forwarder(self) -> Inheritance {
        self.forwarder
    }
}
