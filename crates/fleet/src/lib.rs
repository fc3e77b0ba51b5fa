//! Rules of a fleet, many servers that act as one service. This crate uses no sockets, clocks or threads;
//! time and random numbers are arguments. `stores` keeps the shared state, and `serve` connects the two.
//!
//! ```text
//!  records of all nodes ──▶ Members ──▶ FleetView ──▶ where a client goes               (placement)
//!  allocations that start and end ──▶ Ledger ──▶ asks ──▶ the store: [`grant`] ──▶ Ledger  (lease)
//!  a store that has lost something ──▶ Recovery ──▶ no grants until all nodes have reported  (store_epoch)
//!  keys of all nodes ──▶ KeyRing · notices between nodes ──▶ Bans, questions · all of it sealed
//! ```
#![forbid(unsafe_code)]

mod bans;
mod keyring;
mod lease;
mod members;
mod node;
mod notice;
mod orphaned_quota;
mod placement;
mod poll_interval;
mod recent_redirects;
mod seal;
mod store_epoch;

pub use bans::{Ban, Bans, LONGEST_BAN_S, Ordered, Subject, Unbanned};
pub use keyring::{Key, KeyRing};
pub use lease::{
    Ask, Books, Denial, LeaseTerms, Ledger, Levels, QuotaBucket, QuotaGrant, QuotaLevel, Told, grant, reclaim,
};
pub use members::{
    BEAT_MS, FleetMember, FleetMembers, GONE_MS, MemberChange, NameConflict, NameVerdict, NodeRecord,
};
pub use node::{Beat, Card, Entrance, Load, MOST_NODES, NodeName};
pub use notice::{ForwardedRequest, Message, Notice, OpenedMessages, PeerAnswer, Refused, Rights};
pub use orphaned_quota::OrphanedQuota;
pub use placement::{Charges, FleetView, Need, RedirectTarget};
pub use poll_interval::{Backoff, exchange_period_ms, look_period_ms};
pub use recent_redirects::RecentRedirects;
pub use seal::Sealer;
pub use store_epoch::{
    Chronicle, EpochChange, EpochProgress, EpochState, LONGEST_MS, NodeReport, Recovery, SETTLE_MS,
    SHORTEST_MS, StoreEpoch, TELLING_MS,
};
