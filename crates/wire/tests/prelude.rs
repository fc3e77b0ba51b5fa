//! Common imports of this suite.

pub(crate) use crate::support::{fingerprinted, has_fingerprint, mac_of, signed, verify};
pub(crate) use std::net::SocketAddr;
pub(crate) use stun_types::{
    attribute::Software,
    message::{Message, MessageWriteVec},
};
pub(crate) use turnpike_testkit::fuzz;
pub(crate) use turnpike_wire::{
    channel_data::{ChannelData, ChannelNumber},
    demux, frame,
    indication::{self, Indication, MAX_HEADER_LEN},
    integrity::{IntegrityError, Key, KeyAlgorithm, Mac},
    stun::{self, Class, Header, Invalid, View, Writer, kind},
};
