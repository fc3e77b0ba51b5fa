//! Bytes: what stands on the wire between a TURN client, a TURN server and a peer.
//!
//! [`stun`] is the one codec of STUN messages. ChannelData and the Send/Data indications are apart from it, because they are the data path;
//! [`integrity`] is, because keys come from many places. What others have written for the same bytes, `stun-types` and `turn-types`, is
//! the oracle of the tests.
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
