//! Messages from other nodes: quota levels, bans, departures, revoked users, requests.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::time::sleep;
use turnpike_fleet::{Backoff, Message, Notice, Refused, Subject};
use turnpike_stores::{NewsBatch, StoreError};

use super::{node::OwnNode, unix, watching};
use crate::store::{StoreInUse, shared};

/// Period over which nodes spread their reloads of user rules, in milliseconds.
const RULES_MS: u64 = 500;

/// Listens until the node has left, or until the last allocation that stayed here in an upgrade ends.
pub(super) async fn keep_listening(node: Arc<OwnNode>, users: StoreInUse) {
    let mut news = node.store.news();
    let mut backoff = Backoff::default();
    while !node.is_deaf() {
        let heard = match news.next().await {
            Ok(heard) => heard,
            Err(error) => {
                node.failed(&error);
                sleep(Duration::from_millis(backoff.next_ms(rand::random()))).await;
                continue;
            }
        };
        if node.is_alone() {
            node.recovery.speak_soon();
        }
        node.answered();
        backoff.reset();
        if let Err(error) = take(&node, &users, heard).await {
            node.failed(&error);
            node.rereads.store(true, Ordering::Relaxed);
        }
    }
}

async fn take(node: &Arc<OwnNode>, users: &StoreInUse, heard: NewsBatch) -> Result<(), StoreError> {
    let NewsBatch { anew, messages, levels } = heard;
    if node.is_to_reread() || anew {
        let all = node.store.levels().await?;
        // The state of the store decides whether these levels are complete.
        node.hear_era(node.store.era(node.recovery.era()).await?);
        node.quotas.set_levels(&all, node.recovery.books());
        node.read_bans().await?;
        node.orders_changed.send_replace(());
    }
    node.quotas.put_levels(&levels, node.recovery.books());
    let now = unix();
    let (mut unreadable, mut repeated) = (0, 0);
    let mut new: Vec<Message> = Vec::new();
    for sealed in &messages {
        match node.opened().open(&node.sealer, now, sealed) {
            Ok(message) => new.push(message),
            Err(Refused::Unreadable) => unreadable += 1,
            Err(Refused::Repeated) => repeated += 1,
        }
    }
    if repeated > 0 {
        // If the sender's clock is slow, this newer process rejects the sender's messages as replays. Reads
        // the sender's bans from the store.
        node.rereads.store(true, Ordering::Relaxed);
    }
    node.tallies.heard([new.len(), levels.len(), unreadable, repeated]);
    for message in new {
        if !node.is_handed_over() || concerns_allocations(&message.notice) {
            carry_out(node, users, message);
        }
    }
    Ok(())
}

/// Returns true if the message matters to a process that only serves the allocations left after an upgrade.
fn concerns_allocations(notice: &Notice) -> bool {
    matches!(
        notice,
        Notice::Ban { .. } | Notice::Unban { .. } | Notice::Revoked { .. } | Notice::RulesChanged
    )
}

fn carry_out(node: &Arc<OwnNode>, users: &StoreInUse, Message { from, notice, .. }: Message) {
    match notice {
        Notice::Left { incarnation } => {
            let left = node.members().left(&from, incarnation);
            if left.is_some() && from != node.name {
                tracing::info!(node = %from, "another node has left the fleet");
                watching::leave_out(node);
            }
        }
        Notice::Silent { nodes } => {
            let mut members = node.members();
            let others = nodes.iter().filter(|(name, _)| *name != node.name);
            let news = others.filter(|(name, incarnation)| members.doubt(name, *incarnation)).count();
            drop(members);
            if news > 0 {
                watching::leave_out(node);
            }
        }
        Notice::Card => node.members().has_new_card(&from),
        Notice::Drain { node: of, drains } if of == node.name => node.set_cordoned(drains),
        Notice::Ban { ban } => {
            let (node, subject) = (Arc::clone(node), ban.subject.clone());
            if !node.banned.hear(ban) {
                return;
            }
            tokio::spawn(async move {
                let ended = node.banned.end_allocations(&subject).await;
                say_banned(&from.to_string(), &subject, ended);
            });
        }
        Notice::Unban { subject } => node.banned.hear_lift(unix(), &subject),
        Notice::Revoked { realm, name } => {
            if let Some(store) = shared(users) {
                store.forget(&realm, &name);
            }
        }
        // The node that made the change has already read it.
        Notice::RulesChanged if from != node.name => {
            let users = Arc::clone(users);
            tokio::spawn(async move {
                sleep(Duration::from_millis(rand::random::<u64>() % RULES_MS)).await;
                let Some(store) = shared(&users) else { return };
                if let Err(error) = store.read().await {
                    tracing::warn!(
                        "{error}; another node changed the rules; the change applies once they can be read"
                    );
                }
            });
        }
        Notice::OrdersChanged if from != node.name => node.orders_changed.send_replace(()),
        Notice::Question(question) if question.to == node.name => node.answer(question),
        Notice::Drain { .. } | Notice::RulesChanged | Notice::OrdersChanged | Notice::Question(_) => {}
    }
}

/// Names come from clients, so they are escaped.
fn say_banned(from: &str, subject: &Subject, ended: u64) {
    let subject = subject.to_string();
    tracing::info!(node = from, ?subject, ended, "ban applied; allocations ended");
}
