//! Wire formats between TURN clients, servers and peers, and addresses in text. The tests compare the formats
//! with `stun-types` and `turn-types`.
#![forbid(unsafe_code)]

pub mod address;
pub mod channel_data;
pub mod client_hello;
pub mod demux;
pub mod escape;
pub mod frame;
pub mod indication;
pub mod integrity;
pub mod names;
pub mod pem;
pub mod precis;
pub mod proxy_protocol;
pub mod secret;
pub mod stun;
