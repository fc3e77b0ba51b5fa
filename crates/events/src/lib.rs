//! Events for applications, as a stream and as signed webhooks. Knows neither TURN nor the admin interface.
//!
//! ```text
//!  emit ─▶ Event ─┬─▶ buffer (memory) ─▶ subscriptions, resumed by sequence number
//!                 └─▶ queue (memory) ─▶ spool (disk) ─▶ delivery: one request at a time per webhook, repeated until it succeeds
//! ```
//!
//! All queues are bounded. A full one drops its oldest events, and a `lost` event reports their number. Emitting never waits.
#![forbid(unsafe_code)]

mod back_off;
mod buffer;
mod delivery;
mod event;
mod hub;
mod post;
mod progress;
mod queue;
mod signature;
mod spool;
mod spool_directory;
mod webhook;

pub use buffer::{SUBSCRIBERS, Subscription};
pub use event::LOST;
pub use hub::{Events, Options};
pub use webhook::{Timing, WebhookCounts, WebhookOptions};
