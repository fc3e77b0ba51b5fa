//! Names used by most modules of this suite.

pub(crate) use aya::programs::SchedClassifier;
pub(crate) use std::{cell::RefCell, fs, net::SocketAddr};
pub(crate) use turnpike_offload::{
    Count, Hook, Kind, NewFlow,
    layout::{Flow, FlowKey, HOP_WORDS, Lease, classes, mapped, route_by},
    mirror::{Action, Frame, Moment, Place, State, Summed, Tables, decide},
    now_ns,
};
pub(crate) use turnpike_testkit::alone::skip;
pub(crate) use turnpike_wire::channel_data::ChannelNumber;
