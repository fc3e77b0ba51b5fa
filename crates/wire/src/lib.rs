//! Bytes: what stands on the wire between a TURN client, a TURN server and a peer.
//!
//! ChannelData and the Send/Data indications are apart from other messages, because they are the data path; message integrity is, because
//! keys come from many places. [`stun_types`] and [`turn_types`] are the oracle of this crate's tests.
#![forbid(unsafe_code)]

pub mod address;
pub mod channel_data;
pub mod demux;
pub mod frame;
pub mod indication;
pub mod integrity;
pub mod proxy_protocol;
pub mod stun;

pub use stun_types;
pub use turn_types;
