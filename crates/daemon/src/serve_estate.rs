//! What a TURN server gives to the process that takes its place, and what that one makes of it.

use std::{collections::HashMap, io, os::fd::OwnedFd, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use turnpike_admin::{Lent, Serving};
use turnpike_api::Reloaded;
use turnpike_config::{DatapathChoice, Secret, Settings, User, UserSecret};
use turnpike_net::{Channel, Datapath, PassedSockets};
use turnpike_relay::{
    Layout, Relay, RelayAddress, TicketKeys,
    upgrade::{Inheritance, Offer},
};
use turnpike_stores::StoredSecret;
use turnpike_turn::server::NonceKey;
use zeroize::{ZeroizeOnDrop, Zeroizing};

use crate::{
    admin::MetricsPage,
    control,
    error::DaemonError,
    fleet::{FleetEstate, FleetOffer},
    plan,
    store::Store,
    upgrade::{Estate, Heir, Names, Offered},
};

/// The offer as a whole.
#[derive(Serialize, Deserialize)]
struct ServeOffer {
    relay: Offer,
    /// The user that was made up, where there was no other and no store to keep it.
    generated: Option<OfferedUser>,
    tickets: Option<TicketKeys>,
    /// Secrets of the store that have come to their end: sessions that began with their credentials go on.
    #[serde(default)]
    ended_secrets: Vec<OfferedSecret>,
    /// Who is banned, and which node of a fleet it is.
    #[serde(default)]
    fleet: FleetOffer,
    names: Names,
}

/// Overwritten when it is dropped.
#[derive(Serialize, Deserialize, ZeroizeOnDrop)]
struct OfferedUser {
    name: String,
    password: String,
}

/// Overwritten when it is dropped.
#[derive(Serialize, Deserialize, ZeroizeOnDrop)]
struct OfferedSecret {
    realm: String,
    value: String,
    since: u64,
    until: Option<u64>,
}

/// Of a server that runs.
pub(crate) struct ServeEstate {
    pub(crate) relay: Arc<Relay>,
    pub(crate) fleet: FleetEstate,
    pub(crate) generated: Option<User>,
    pub(crate) tickets: Option<TicketKeys>,
    pub(crate) store: Option<Store>,
    /// The admin interface, and what answers beside it.
    pub(crate) pages: [Arc<Serving>; 2],
    pub(crate) passed: Arc<PassedSockets>,
    pub(crate) metrics: MetricsPage,
}

impl Estate for ServeEstate {
    fn service(&self) -> &'static str {
        "serve"
    }

    fn offer(&self) -> io::Result<Offered> {
        let (relay, mut descriptors, heirs) = self.relay.offer()?;
        let [applications, page] = &self.pages;
        let mut pages = applications.lend()?;
        pages.extend(page.lend()?);
        let names = Names::lend(pages, &self.passed, &mut descriptors)?;
        let generated = self.generated.as_ref().and_then(|user| match &user.secret {
            UserSecret::Password(password) => {
                Some(OfferedUser { name: user.name.clone(), password: password.reveal().to_owned() })
            }
            UserSecret::Keys(_) => None,
        });
        let (tickets, fleet) = (self.tickets.clone(), self.fleet.offer());
        let ended = self.store.as_ref().map(Store::all_ended_secrets).unwrap_or_default();
        let ended_secrets = ended.iter().flat_map(|(realm, secrets)| {
            secrets.iter().map(|secret| OfferedSecret {
                realm: realm.to_string(),
                value: secret.value.to_string(),
                since: secret.since,
                until: secret.until,
            })
        });
        let ended_secrets = ended_secrets.collect();
        let offer = ServeOffer { relay, generated, tickets, ended_secrets, fleet, names };
        Offered::new(&offer, descriptors, heirs)
    }

    fn freeze(&self, heir_keeps_flows: bool) -> io::Result<()> {
        self.relay.freeze(heir_keeps_flows)
    }

    fn hand_over(&self, heirs: Vec<Channel>, patience: Duration) -> io::Result<usize> {
        self.relay.hand_over(heirs, patience)
    }

    fn thaw(&self) {
        self.relay.thaw();
    }

    fn release(&self) {
        // First, so that nothing is told of sessions that end here by going.
        self.fleet.release();
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
    page: Vec<Lent>,
    datapath: Datapath,
}

impl ServeInheritance {
    /// With the sockets that a service manager had passed to the process before.
    pub(crate) fn new(heir: &mut Heir) -> Result<(Self, PassedSockets), DaemonError> {
        let (mut offer, mut descriptors) = heir.offer::<ServeOffer>()?;
        let (page, passed) = std::mem::take(&mut offer.names).take_from(&mut descriptors)?;
        let datapath = offer.relay.datapath().ok_or_else(|| {
            DaemonError::Upgrade("this version does not have the old one's data path".to_owned())
        })?;
        Ok((Self { offer, descriptors, page, datapath }, passed))
    }

    /// Sockets are bound to workers, and what waits in them is of one data path: these stay, whatever is configured.
    pub(crate) fn keep(&self, settings: &mut Settings) {
        let workers = self.offer.relay.workers;
        let mut kept = Vec::new();
        if plan::workers(settings) != workers {
            kept.push("server.workers");
        }
        let (datapath, stays) = self.kept_datapath(settings.datapath);
        if !stays {
            kept.push("server.datapath");
        }
        control::need_restart(&mut Reloaded::default(), &kept);
        settings.workers = Some(workers);
        settings.datapath = datapath;
    }

    /// The data path that there will be where this one is configured, and whether that is it.
    pub(crate) fn kept_datapath(&self, configured: DatapathChoice) -> (DatapathChoice, bool) {
        let (step, kernel) = (DatapathChoice::Step(self.datapath), self.offer.relay.kernel);
        // Where in the kernel its program is, each process has for itself.
        match configured {
            it @ (DatapathChoice::Kernel | DatapathChoice::Xdp | DatapathChoice::XdpGeneric) => {
                (if kernel { it } else { step }, kernel)
            }
            _ if kernel => (DatapathChoice::Kernel, false),
            it => (step, it == DatapathChoice::Auto || it == step),
        }
    }

    /// The numbers of listeners so far.
    pub(crate) fn layout(&self) -> &Layout {
        self.offer.relay.layout()
    }

    /// Relay addresses in force.
    pub(crate) fn relay_addresses(&self) -> &[RelayAddress] {
        self.offer.relay.relay()
    }

    /// The step of the ladder, with which the kernel's path may go.
    pub(crate) fn datapath(&self) -> Datapath {
        self.datapath
    }

    pub(crate) fn own_key(&self) -> NonceKey {
        self.offer.relay.own_key()
    }

    pub(crate) fn fleet(&self) -> &FleetOffer {
        &self.offer.fleet
    }

    pub(crate) fn tickets(&self) -> Option<&TicketKeys> {
        self.offer.tickets.as_ref()
    }

    /// Has a store remember the secrets that have come to their end.
    pub(crate) fn remember_ended_secrets(&self, store: &Store) {
        let mut ended: HashMap<Box<str>, Vec<StoredSecret>> = HashMap::new();
        for OfferedSecret { realm, value, since, until } in &self.offer.ended_secrets {
            let secret = StoredSecret { value: Zeroizing::new(value.clone()), since: *since, until: *until };
            ended.entry(realm.as_str().into()).or_default().push(secret);
        }
        store.remember_ended_secrets(ended.into_iter().map(|(realm, secrets)| (realm, secrets.into())));
    }

    /// The user that was made up.
    pub(crate) fn generated(&self) -> Option<User> {
        let user = self.offer.generated.as_ref()?;
        let secret = UserSecret::Password(Secret::new(&*user.password));
        Some(User { name: user.name.clone(), secret })
    }

    /// The sockets of the admin interface, and of applications.
    pub(crate) fn page(&mut self) -> Vec<Lent> {
        std::mem::take(&mut self.page)
    }

    pub(crate) fn into_relay(self) -> Inheritance {
        Inheritance::new(self.offer.relay, self.descriptors)
    }
}
