//! What a TURN server gives to the process that takes its place, and what that one makes of it.

use std::{io, net::SocketAddr, os::fd::OwnedFd, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use turnpike_config::{AdminListen, DatapathChoice, Secret, Settings, User, UserSecret};
use turnpike_net::{Channel, Datapath};
use turnpike_relay::{
    Relay, TicketKeys,
    upgrade::{Inheritance, Offer},
};
use turnpike_turn::server::NonceKey;
use zeroize::ZeroizeOnDrop;

use crate::{
    admin::MetricsPage,
    control,
    error::DaemonError,
    plan,
    upgrade::{Estate, Heir, Offered},
};

/// The offer as a whole.
#[derive(Serialize, Deserialize)]
struct ServeOffer {
    relay: Offer,
    /// The user that was made up, where there was no other.
    generated: Option<OfferedUser>,
    tickets: Option<TicketKeys>,
    /// Where the admin page was to be; its socket is the last one.
    page: Option<SocketAddr>,
}

/// Overwritten when it is dropped.
#[derive(Serialize, Deserialize, ZeroizeOnDrop)]
struct OfferedUser {
    name: String,
    password: String,
}

/// Of a server that runs.
pub(crate) struct ServeEstate {
    pub(crate) relay: Arc<Relay>,
    pub(crate) generated: Option<User>,
    pub(crate) tickets: Option<TicketKeys>,
    pub(crate) page: Option<(SocketAddr, Arc<OwnedFd>)>,
    pub(crate) metrics: MetricsPage,
}

impl Estate for ServeEstate {
    fn service(&self) -> &'static str {
        "serve"
    }

    fn offer(&self) -> io::Result<Offered> {
        let (relay, mut descriptors, heirs) = self.relay.offer()?;
        if let Some((_, socket)) = &self.page {
            descriptors.push(socket.try_clone()?);
        }
        let generated = self.generated.as_ref().and_then(|user| match &user.secret {
            UserSecret::Password(password) => {
                Some(OfferedUser { name: user.name.clone(), password: password.reveal().to_owned() })
            }
            UserSecret::Keys(_) => None,
        });
        let page = self.page.as_ref().map(|(configured, _)| *configured);
        let offer = ServeOffer { relay, generated, tickets: self.tickets.clone(), page };
        Offered::new(&offer, descriptors, heirs)
    }

    fn freeze(&self) -> io::Result<()> {
        self.relay.freeze()
    }

    fn hand_over(&self, heirs: Vec<Channel>, patience: Duration) -> io::Result<usize> {
        self.relay.hand_over(heirs, patience)
    }

    fn thaw(&self) {
        self.relay.thaw();
    }

    fn release(&self) {
        self.relay.release();
    }

    fn metrics(&self) -> String {
        (self.metrics)().unwrap_or_default()
    }
}

/// What a server begins with that takes another one's place.
pub(crate) struct ServeInheritance {
    offer: ServeOffer,
    descriptors: Vec<OwnedFd>,
    page: Option<(SocketAddr, OwnedFd)>,
    datapath: Datapath,
}

impl ServeInheritance {
    pub(crate) fn new(heir: &mut Heir) -> Result<Self, DaemonError> {
        let (offer, mut descriptors) = heir.offer::<ServeOffer>()?;
        let page = offer.page.and_then(|configured| Some((configured, descriptors.pop()?)));
        let datapath = offer.relay.datapath().ok_or_else(|| {
            DaemonError::Upgrade("this version does not have the old one's data path".to_owned())
        })?;
        Ok(Self { offer, descriptors, page, datapath })
    }

    /// Sockets are bound to workers, and what waits in them is of one data path: these stay, whatever is configured.
    pub(crate) fn keep(&self, settings: &mut Settings) {
        let Offer { workers, kernel, .. } = self.offer.relay;
        let mut kept = Vec::new();
        if plan::workers(settings) != workers {
            kept.push("server.workers");
        }
        let stays = match settings.datapath {
            DatapathChoice::Kernel => kernel,
            DatapathChoice::Auto => !kernel,
            DatapathChoice::Step(step) => !kernel && step == self.datapath,
        };
        if !stays {
            kept.push("server.datapath");
        }
        control::say_unchangeable(&kept);
        settings.workers = Some(workers);
        settings.datapath = if kernel { DatapathChoice::Kernel } else { DatapathChoice::Step(self.datapath) };
    }

    /// The step of the ladder, with which the kernel's path may go.
    pub(crate) fn datapath(&self) -> Datapath {
        self.datapath
    }

    pub(crate) fn nonce_key(&self) -> NonceKey {
        self.offer.relay.nonce_key()
    }

    pub(crate) fn tickets(&self) -> Option<&TicketKeys> {
        self.offer.tickets.as_ref()
    }

    /// The user that was made up, where the configuration names none.
    pub(crate) fn generated(&self) -> Result<User, DaemonError> {
        let nobody =
            "the configuration names neither users nor secrets any more, so nobody could authenticate";
        let user = self.offer.generated.as_ref().ok_or_else(|| DaemonError::Upgrade(nobody.to_owned()))?;
        let secret = UserSecret::Password(Secret::new(&*user.password));
        Ok(User { name: user.name.clone(), secret })
    }

    /// The socket of the admin page, if that is where it was.
    pub(crate) fn page(&mut self, listen: AdminListen) -> Option<OwnedFd> {
        let (configured, socket) = self.page.take()?;
        (listen == AdminListen::On(configured)).then_some(socket)
    }

    pub(crate) fn into_relay(self) -> Inheritance {
        Inheritance::new(self.offer.relay, self.descriptors)
    }
}
