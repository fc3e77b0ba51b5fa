//! Webhooks and stream of this server, and the begin and end of its drain.

use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use turnpike_api::DrainEvent;
use turnpike_config::{EventType, Settings, WebhookSettings, event_directory};
use turnpike_events::{Events, Options, Timing, WebhookOptions};
use turnpike_turn::server::PeerRules;

/// Time at exit to deliver the last events. They are on disk by then.
const LAST_DELIVERIES: Duration = Duration::from_secs(3);

/// Events of this server, and its drain.
#[derive(Debug)]
pub(crate) struct ServerEvents {
    pub(crate) hub: Arc<Events>,
    is_draining: AtomicBool,
}

impl ServerEvents {
    /// Starts the configured webhooks.
    pub(crate) fn start(settings: &Settings) -> Self {
        let hub = Arc::new(Events::new(&source(settings)));
        hub.set(options(settings));
        Self { hub, is_draining: AtomicBool::new(false) }
    }

    pub(crate) fn set(&self, settings: &Settings) {
        self.hub.set(options(settings));
    }

    pub(crate) fn drain_begins(&self, allocations: u64, deadline: Option<Duration>) {
        if !self.is_draining.swap(true, Ordering::Relaxed) {
            let deadline_s = deadline.map(|deadline| deadline.as_secs());
            self.hub.emit(EventType::DrainBegin.name(), &DrainEvent { allocations, deadline_s });
        }
    }

    pub(crate) fn drain_ends(&self, allocations: u64) {
        if self.is_draining.swap(false, Ordering::Relaxed) {
            self.hub.emit(EventType::DrainEnd.name(), &DrainEvent { allocations, deadline_s: None });
        }
    }

    /// Called after the last allocation has ended.
    pub(crate) async fn close(&self) {
        self.drain_ends(0);
        self.hub.close(LAST_DELIVERIES).await;
    }
}

/// Node names and host names need no escapes in a URI.
fn source(settings: &Settings) -> String {
    let host = || std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let node = settings.fleet.node.as_ref().map_or_else(host, |node| node.as_str().to_owned());
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || "-._".contains(*c);
    format!("/turnpike/{}", node.trim().chars().filter(is_plain).collect::<String>())
}

fn options(settings: &Settings) -> Options {
    let events = &settings.events;
    let webhook = |webhook: &WebhookSettings| WebhookOptions {
        url: webhook.url.clone(),
        secret: webhook.secret.clone(),
        types: webhook.types.iter().map(|kind| kind.name()).collect(),
        batch: webhook.batch,
    };
    Options {
        webhooks: events.webhooks.iter().map(webhook).collect(),
        dir: event_directory(settings).unwrap_or_default(),
        spool: events.spool,
        refuses: (!events.allow_private).then_some(is_private as fn(IpAddr) -> bool),
        timing: Timing::default(),
    }
}

/// The addresses that clients cannot reach through the relay by default are those that webhooks must not reach either.
fn is_private(ip: IpAddr) -> bool {
    !PeerRules::default().permits(ip)
}
