//! Common imports.

pub(crate) use crate::common::{self, DATAPATHS, Sender, V4, V6, bind, filled_arena, in_namespace, receive};
pub(crate) use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};
pub(crate) use turnpike_net::{
    ArenaSpan, ConnectOptions, Datapath, Interest, ListenOptions, Poller, Route, Rx, Sockets, TcpListener,
    TcpSocket, Tx, UdpOptions, UdpSocket, rlimit,
};
pub(crate) use turnpike_testkit::{eventually, loopback_keeps_super_packets};
