//! Bytes: what stands on the wire between a TURN client, a TURN server and a peer.
//!
//! ChannelData and the Send/Data indications are ours, because they are the data path and must neither
//! allocate nor copy; message integrity is ours, because keys come from many places and secrets are compared in
//! constant time. Every other message goes through [`stun_types`] and [`turn_types`], which also serve as the
//! oracle of this crate's tests.
#![forbid(unsafe_code)]

pub mod address;
mod attributes;
pub mod channel_data;
pub mod demux;
pub mod frame;
pub mod indication;
pub mod integrity;
pub mod proxy_protocol;

pub use stun_types;
pub use turn_types;
