//! Polls the members, load and addresses of all nodes. Releases the quota of nodes that are gone.

use std::{sync::Arc, time::Duration};

use tokio::time::sleep;
use turnpike_fleet::{Backoff, Card, FleetMember, FleetView, MemberChange, NodeName, Notice, look_period_ms};
use turnpike_stores::{StoreError, StoreView};

use super::{
    node::{CARD, OwnNode, Sight},
    unix,
};

const CARDS: usize = 200;
const TOLD: usize = 20;
const SILENT: usize = 1000;

pub(super) async fn keep_watching(node: Arc<OwnNode>) {
    let mut backoff = Backoff::default();
    while !node.is_over() {
        let pause = match look(&node).await {
            Ok(()) => {
                backoff.reset();
                // Jitter keeps nodes from reading at the same time.
                let period = look_period_ms(node.members().len());
                period * 9 / 10 + rand::random::<u64>() % (period / 5)
            }
            Err(error) => {
                node.failed(&error);
                backoff.next_ms(rand::random())
            }
        };
        sleep(Duration::from_millis(pause)).await;
    }
}

pub(super) async fn look(node: &OwnNode) -> Result<(), StoreError> {
    let StoreView { store_ms, records } = node.store.look().await?;
    let (now_ms, steady_ms) = (node.now_ms(), node.health.steady_ms(node.now_ms()));
    node.answered();
    let abandoned = node.orphaned_quota().look(now_ms, store_ms, steady_ms, &records);
    let (mut changes, missing) = {
        let mut members = node.members();
        let changes = members.look(now_ms, store_ms, steady_ms, records);
        (changes, members.without_card())
    };
    let silent: Vec<(NodeName, u64)> = changes.iter().filter_map(silent).collect();
    for nodes in silent.chunks(SILENT) {
        node.say(Notice::Silent { nodes: nodes.to_vec() }).await?;
    }
    for names in missing.chunks(CARDS) {
        let cards = node.store.cards(names).await?;
        let mut members = node.members();
        let read = cards.iter().filter_map(|sealed| read_card(node, sealed));
        changes.extend(read.filter_map(|card| members.put_card(card)));
    }
    say(node, &changes);
    let others = node.members().iter().filter(|(name, it)| **name != node.name && it.is_heard()).count();
    node.recovery.looked(others + 1);
    take_in(node);
    let nodes = u64::from(node.nodes());
    for (name, number) in abandoned {
        // All nodes notice a departed node, but it is enough if one of them releases its quota.
        if rand::random::<u64>().is_multiple_of(nodes) {
            tracing::info!(node = %name, "releasing the quota of a node that is gone");
            while node.store.reap(&name, number, false).await? {}
        }
    }
    for subject in node.banned.expire(unix()) {
        if rand::random::<u64>() % nodes < 3 {
            node.store.remove_ban(&subject).await?;
        }
    }
    Ok(())
}

pub(super) fn take_in(node: &OwnNode) {
    let (view, own) = view_of(node);
    node.set_sight(Sight { charges: view.charges(), view, own, at_ms: node.now_ms() });
}

/// Removes departed nodes from the workers' view without changing its timestamp.
pub(super) fn leave_out(node: &OwnNode) {
    let (view, own) = view_of(node);
    let before = node.sight();
    let charges = view.charges_after(&before.view, &before.charges);
    node.set_sight(Sight { charges, view, own, at_ms: before.at_ms });
}

fn view_of(node: &OwnNode) -> (FleetView, u16) {
    let zone = node.setting(|settings| settings.zone.clone());
    let members = node.members();
    let zone = zone.as_ref().map_or("", NodeName::as_str);
    let view = FleetView::new(zone, &members);
    node.set_nodes(members.iter().filter(|(name, _)| **name != node.name).count() + 1);
    let own = members.get(&node.name).filter(|member| member.beat.incarnation == node.incarnation);
    let own = own.map_or_else(|| node.number(), |member| member.beat.number);
    drop(members);
    (view, own)
}

fn silent(change: &MemberChange) -> Option<(NodeName, u64)> {
    let MemberChange::Silent { name, incarnation } = change else { return None };
    Some((name.clone(), *incarnation))
}

fn read_card(node: &OwnNode, sealed: &[u8]) -> Option<Card> {
    let text = node.sealer.open(CARD, sealed);
    if text.is_none() {
        tracing::debug!("ignoring a node in the fleet store that uses another fleet.secret");
    }
    serde_json::from_slice(&text?).ok()
}

fn say(node: &OwnNode, changes: &[MemberChange]) {
    let members = node.members();
    if changes.len() > TOLD {
        tracing::info!(
            changes = changes.len(),
            nodes = members.len(),
            "many nodes have joined or left the fleet"
        );
        return;
    }
    for change in changes {
        match change {
            MemberChange::Joined(name) if *name != node.name => {
                let number = members.get(name).map(|FleetMember { beat, .. }| beat.number);
                tracing::info!(node = %name, number, "another node has joined the fleet");
            }
            MemberChange::Silent { name, .. } if *name != node.name => {
                tracing::info!(node = %name, "node unreachable: not redirecting clients to it");
            }
            MemberChange::Gone { name, .. } if *name != node.name => {
                tracing::warn!(node = %name, "node gone: no heartbeat for 10 s");
            }
            _ => {}
        }
    }
}
