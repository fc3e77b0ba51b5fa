//! Wire formats between TURN clients, servers and peers.
//!
//! [`stun`] is the codec of STUN messages. ChannelData and the Send/Data indications are separate because
//! they are the data path, and [`integrity`] because keys come from many places. The tests compare with
//! `stun-types` and `turn-types`.
#![forbid(unsafe_code)]

pub mod address;
pub mod channel_data;
pub mod demux;
pub mod escape;
pub mod frame;
pub mod indication;
pub mod integrity;
pub mod names;
pub mod pem;
pub mod precis;
pub mod proxy_protocol;
pub mod stun;
