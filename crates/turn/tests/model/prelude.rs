//! Common imports of the model.

pub(crate) use crate::common::{REALM, Scheme, TestPolicy, password};
pub(crate) use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};
pub(crate) use turnpike_turn::server::{
    AllocationSlot, Client, ClosedReason, ConnectError, ConnectionId, ConnectionRefusal, DropReason, Effect,
    Family, Link, LookupId, OpenResult, PortRequest, RelayId, RelayTransport, Server, ServerConfig, Source,
    Stats,
    stats::{ConnectionEvent, MobilityEvent},
};
