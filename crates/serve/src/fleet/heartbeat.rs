//! Heartbeat: writes this node's load to the store once a second. The response shows whether the name, number
//! and keys are still valid.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::time::sleep;
use turnpike_fleet::{BEAT_MS, Backoff, Load, NameConflict, NameVerdict, Notice};
use turnpike_stores::{Beaten, Beating, StoreError, StoreFault};

use super::{
    load::LoadGauge,
    node::{CARD, OwnNode, ring::KeyError},
    watching,
};
use crate::ServeError;

/// Interval between attempts to claim a name that another process used recently.
const CLAIM: Duration = Duration::from_millis(500);
/// Number of heartbeats between two log lines about a refusal.
const TELL: u32 = 60;

#[derive(Default)]
pub(super) struct Beater {
    claim: NameConflict,
    take_over: Option<String>,
    /// Number of heartbeats since the last log line about a refusal.
    refused: u32,
    /// Node number in the record last written; 0 for none.
    number: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BeatAnswer {
    In,
    /// The outcome is pending, because the name may still be in use.
    Waits,
    Taken,
    Full,
}

/// Writes the card once, and again if it has changed or may have been lost.
async fn put_card(node: &OwnNode) -> Result<(), StoreError> {
    let Some(card) = node.card().filter(|_| !node.card_is_put.swap(true, Ordering::Relaxed)) else {
        return Ok(());
    };
    let text = serde_json::to_vec(&*card).unwrap_or_default();
    let put = async {
        node.store.put_card(&node.name, &node.seal(CARD, &text)).await?;
        node.say(Notice::Card).await
    };
    put.await.inspect_err(|_| node.card_is_put.store(false, Ordering::Relaxed))
}

/// Continues as the previous process's node. That process sends heartbeats until this one starts serving, so
/// this function only reads the members.
pub(super) async fn go_on(node: &OwnNode) -> Result<Beater, ServeError> {
    match watching::look(node).await {
        Err(error) if !error.may_pass() => return Err(ServeError::Store(error)),
        Err(error) => node.failed(&error),
        Ok(()) => {}
    }
    Ok(Beater::default())
}

/// Joins the fleet before clients are accepted. If the store is unreachable, the node starts alone. A refused
/// node leaves no record behind.
pub(super) async fn join(node: &OwnNode) -> Result<Beater, ServeError> {
    let mut beater = Beater::default();
    let name = || node.name.to_string();
    let mut checked = node.check_secret().await;
    loop {
        let heard = match std::mem::replace(&mut checked, Ok(())) {
            Ok(()) => beater.beat(node, &Load::default()).await,
            Err(error) => Err(error),
        };
        match heard {
            Ok(BeatAnswer::In) => {
                learn(node).await.unwrap_or_else(|error| node.failed(&error));
                return Ok(beater);
            }
            Ok(BeatAnswer::Waits) => sleep(CLAIM).await,
            Ok(BeatAnswer::Taken) => return Err(ServeError::NameTaken { name: name() }),
            Ok(BeatAnswer::Full) => return Err(ServeError::FleetFull),
            Err(KeyError::Sealed) => {
                beater.withdraw(node).await;
                let store = node.store.name().to_owned();
                return Err(ServeError::OtherSecret { store });
            }
            Err(KeyError::Store(error)) if !error.may_pass() => return Err(ServeError::Store(error)),
            Err(KeyError::Store(error)) => {
                node.unbeaten(&error);
                return Ok(beater);
            }
        }
    }
}

async fn learn(node: &OwnNode) -> Result<(), StoreError> {
    watching::look(node).await?;
    let levels = node.store.levels().await?;
    node.quotas.set_levels(&levels, node.recovery.books());
    Ok(())
}

pub(super) async fn keep_beating(node: Arc<OwnNode>, mut beater: Beater, mut gauge: LoadGauge) {
    let mut pauses = Backoff::default();
    let mut was_seen = false;
    while !node.is_over() {
        let most = node.setting(|settings| settings.bits_per_second);
        let (now_ms, allocations) = (node.now_ms(), node.allocations());
        let measured =
            node.relay().map(|relay| gauge.measure(&relay, now_ms, allocations, node.room(), most));
        let Some(load) = measured else { return };
        let pause = match beater.beat(&node, &load).await {
            Ok(heard) => {
                pauses.reset();
                beater.say(&node, heard);
                node.announcements.wake.notify_one();
                // Makes the fleet status current as soon as the first heartbeat is accepted.
                if heard == BeatAnswer::In && !std::mem::replace(&mut was_seen, true) {
                    watching::look(&node).await.unwrap_or_else(|error| node.failed(&error));
                }
                BEAT_MS
            }
            Err(KeyError::Store(error)) => {
                node.unbeaten(&error);
                pauses.next_ms(rand::random())
            }
            Err(error @ KeyError::Sealed) => {
                node.unbeaten(&StoreError {
                    store: node.store.name().to_owned(),
                    setting: "fleet.secret",
                    fault: StoreFault::Other,
                    detail: error.to_string(),
                });
                BEAT_MS
            }
        };
        node.recovery.wait(Duration::from_millis(pause)).await;
    }
}

impl Beater {
    async fn beat(&mut self, node: &OwnNode, load: &Load) -> Result<BeatAnswer, KeyError> {
        let (mut number, known, mut ring) = match self.ask(node, load).await? {
            Beaten::Written { number, known, ring, era } => {
                node.hear_era(era);
                self.number = number;
                (number, known, ring)
            }
            Beaten::Full => {
                node.beaten();
                node.lose_number();
                return Ok(BeatAnswer::Full);
            }
            Beaten::Taken(record) => {
                node.beaten();
                return Ok(match self.claim.refused(node.now_ms(), &record) {
                    NameVerdict::Wait => BeatAnswer::Waits,
                    NameVerdict::TakeOver(record) => {
                        self.take_over = Some(record);
                        BeatAnswer::Waits
                    }
                    NameVerdict::Taken => {
                        // The node that took the name also has the number, so clients redirected by number
                        // reach that node.
                        node.lose_number();
                        BeatAnswer::Taken
                    }
                });
            }
        };
        self.claim.granted();
        self.take_over = None;
        let era = node.recovery.era();
        let anew = !known || node.recovery.is_to_clear();
        if anew {
            // Releases quota held under this name by an earlier process, or by this process before the store
            // lost its record.
            while node.store.reap(&node.name, number, true).await? {}
            if let Beaten::Written { number: new, ring: now, era, .. } = self.ask(node, load).await? {
                node.hear_era(era);
                (number, ring) = (new, now);
            }
            node.card_is_put.store(false, Ordering::Relaxed);
        }
        put_card(node).await?;
        node.look_after_keys(ring).await?;
        node.beaten();
        let had = node.number();
        node.set_number(number);
        if anew {
            node.recovery.cleared(era);
        }
        if anew && had != 0 {
            if !known {
                tracing::warn!("the fleet store had lost this node's record; registering again");
            }
            node.tell_all_anew();
        }
        Ok(BeatAnswer::In)
    }

    async fn withdraw(&self, node: &OwnNode) {
        if self.number == 0 {
            return;
        }
        while matches!(node.store.reap(&node.name, self.number, true).await, Ok(true)) {}
    }

    async fn ask(&self, node: &OwnNode, load: &Load) -> Result<Beaten, StoreError> {
        let beating = Beating {
            name: &node.name,
            incarnation: node.incarnation,
            number: node.wanted_number(),
            draining: node.is_draining(),
            load,
            take_over: self.take_over.as_deref(),
            report: node.recovery.report(node.quotas.lost()),
        };
        node.store.beat(beating).await
    }

    fn say(&mut self, node: &OwnNode, heard: BeatAnswer) {
        let why = match heard {
            BeatAnswer::In | BeatAnswer::Waits => {
                self.refused = 0;
                return;
            }
            BeatAnswer::Taken => ServeError::NameTaken { name: node.name.to_string() },
            BeatAnswer::Full => ServeError::FleetFull,
        };
        if self.refused.is_multiple_of(TELL) {
            tracing::error!("{why}; until then, this node serves clients without the fleet");
        }
        self.refused = self.refused.saturating_add(1);
    }
}
