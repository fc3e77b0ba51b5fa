//! State of a TURN server passed to a new process: export and import.

use std::{collections::HashMap, io, os::fd::OwnedFd, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use turnpike_admin::Serving;
use turnpike_api::Reloaded;
use turnpike_config::{ConfiguredUser, DatapathChoice, Secret, Settings, UserSecret};
use turnpike_net::{Datapath, PassedSockets};
use turnpike_process::{
    ProcessError, need_restart,
    upgrade::{DescriptorNames, HandoverOffer, HandoverState, NamedSocket, PreviousProcess},
};
use turnpike_relay::{
    Layout, Relay, RelayAddress, TicketKeys,
    upgrade::{RelayHandover, RelayOffer},
};
use turnpike_stores::StoredSecret;
use turnpike_turn::server::NonceKey;
use turnpike_worker::Channel;
use zeroize::ZeroizeOnDrop;

use crate::{
    fleet::{FleetHandover, FleetOffer},
    plan,
    store::UserStore,
};

#[derive(Serialize, Deserialize)]
struct ServeOffer {
    relay: RelayOffer,
    /// Generated user, if no users and no store were configured.
    generated: Option<OfferedUser>,
    tickets: Option<TicketKeys>,
    /// Secrets removed from the store, on which running allocations still depend.
    #[serde(default)]
    ended_secrets: Vec<OfferedSecret>,
    #[serde(default)]
    fleet: FleetOffer,
    names: DescriptorNames,
}

/// Overwritten on drop.
#[derive(Serialize, Deserialize, ZeroizeOnDrop)]
struct OfferedUser {
    name: String,
    password: String,
}

/// Overwritten on drop.
#[derive(Serialize, Deserialize, ZeroizeOnDrop)]
struct OfferedSecret {
    realm: String,
    value: String,
    since: u64,
    until: Option<u64>,
}

pub(crate) struct ServeHandover {
    pub(crate) relay: Arc<Relay>,
    pub(crate) fleet: FleetHandover,
    pub(crate) generated: Option<ConfiguredUser>,
    pub(crate) tickets: Option<TicketKeys>,
    pub(crate) store: Option<UserStore>,
    /// Sockets of the credential service and the admin interface.
    pub(crate) pages: [Arc<Serving>; 2],
    pub(crate) passed: Arc<PassedSockets>,
}

impl HandoverState for ServeHandover {
    fn offer(&self) -> io::Result<HandoverOffer> {
        let (relay, mut descriptors, channels) = self.relay.offer()?;
        let mut page = Vec::new();
        for serving in &self.pages {
            page.extend(serving.lend()?);
        }
        let names = DescriptorNames::export(page, &self.passed, &mut descriptors)?;
        let generated = self.generated.as_ref().and_then(|user| match &user.secret {
            UserSecret::Password(password) => {
                Some(OfferedUser { name: user.name.clone(), password: password.reveal().to_owned() })
            }
            UserSecret::Keys(_) => None,
        });
        let (tickets, fleet) = (self.tickets.clone(), self.fleet.offer());
        let ended = self.store.as_ref().map(UserStore::all_ended_secrets).unwrap_or_default();
        let ended_secrets = ended.iter().flat_map(|(realm, secrets)| {
            secrets.iter().map(|secret| OfferedSecret {
                realm: realm.to_string(),
                value: secret.value.reveal().to_owned(),
                since: secret.since,
                until: secret.until,
            })
        });
        let ended_secrets = ended_secrets.collect();
        let offer = ServeOffer { relay, generated, tickets, ended_secrets, fleet, names };
        HandoverOffer::new(&offer, descriptors, channels)
    }

    fn pause(&self, successor_keeps_flows: bool) -> io::Result<()> {
        self.relay.pause(successor_keeps_flows)
    }

    fn export(&self, channels: Vec<Channel>, patience: Duration) -> io::Result<usize> {
        self.relay.export(channels, patience)
    }

    fn resume(&self) {
        self.relay.resume();
    }

    fn forget(&self) {
        // Leaves the fleet first, so that moved allocations are not published as ended.
        self.fleet.forget();
        self.relay.forget();
    }
}

pub(crate) struct PreviousServer {
    offer: ServeOffer,
    descriptors: Vec<OwnedFd>,
    page: Vec<NamedSocket>,
    datapath: Datapath,
}

impl PreviousServer {
    /// Reads the offer. Also returns the sockets that a service manager passed to the previous process.
    pub(crate) fn new(previous: &mut PreviousProcess) -> Result<(Self, PassedSockets), ProcessError> {
        let (mut offer, mut descriptors) = previous.offer::<ServeOffer>()?;
        let (page, passed) = std::mem::take(&mut offer.names).import(&mut descriptors)?;
        let datapath = offer.relay.datapath().ok_or_else(|| {
            ProcessError::Upgrade(
                "the new version does not support the data path of the old one: restart instead".to_owned(),
            )
        })?;
        Ok((Self { offer, descriptors, page, datapath }, passed))
    }

    /// Keeps the number of workers, because sockets are bound to them, and the data path, because queued
    /// packets depend on it.
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
        need_restart(&mut Reloaded::default(), &kept);
        settings.workers = Some(workers);
        settings.datapath = datapath;
    }

    /// The data path to use, and true if it equals the configured one.
    pub(crate) fn kept_datapath(&self, configured: DatapathChoice) -> (DatapathChoice, bool) {
        use DatapathChoice::{Auto, Kernel, Step};
        let (step, kernel) = (Step(self.datapath), self.offer.relay.kernel);
        // Each process attaches its own program, so the hook may differ. If the previous process did not use the kernel
        // path, it may have dropped the privileges for it.
        match configured {
            Auto => (if kernel { Auto } else { step }, true),
            it @ Step(_) if !kernel => (step, it == step),
            Step(_) => (if self.offer.relay.has_leases() { Auto } else { Kernel }, false),
            it => (if kernel { it } else { step }, kernel),
        }
    }

    pub(crate) fn layout(&self) -> &Layout {
        self.offer.relay.layout()
    }

    pub(crate) fn relay_addresses(&self) -> &[RelayAddress] {
        self.offer.relay.relay()
    }

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

    pub(crate) fn remember_ended_secrets(&self, store: &UserStore) {
        let mut ended: HashMap<Box<str>, Vec<StoredSecret>> = HashMap::new();
        for OfferedSecret { realm, value, since, until } in &self.offer.ended_secrets {
            let secret = StoredSecret { value: Secret::new(value), since: *since, until: *until };
            ended.entry(realm.as_str().into()).or_default().push(secret);
        }
        store.remember_ended_secrets(ended.into_iter().map(|(realm, secrets)| (realm, secrets.into())));
    }

    pub(crate) fn generated(&self) -> Option<ConfiguredUser> {
        let user = self.offer.generated.as_ref()?;
        let secret = UserSecret::Password(Secret::new(&*user.password));
        Some(ConfiguredUser { name: user.name.clone(), secret })
    }

    pub(crate) fn page(&mut self) -> Vec<NamedSocket> {
        std::mem::take(&mut self.page)
    }

    pub(crate) fn into_relay(self) -> RelayHandover {
        RelayHandover::new(self.offer.relay, self.descriptors)
    }
}
