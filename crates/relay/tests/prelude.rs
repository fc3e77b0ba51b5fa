//! Names used by most modules of this suite.

pub(crate) use crate::support::{
    self, Client, MOBILITY_TICKET, Message, SOON, World, allocate, bind, binding, channel_data, connect,
    dtls::{DtlsClient, Kind, hellos, wait_for_no_allocation, world, world_with},
    eventually, heard, padded, peer, plain, refresh, stun, tls_config, tls_connect,
    witness::Witness,
    xored,
};
pub(crate) use rcgen::KeyPair;
pub(crate) use rustls::{ClientConfig, ClientConnection, HandshakeKind, StreamOwned, pki_types::ServerName};
pub(crate) use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};
pub(crate) use turnpike_net::{ConnectOptions, Datapath, TcpSocket};
pub(crate) use turnpike_relay::{
    AllocationLog, CloseReason, Config, CredentialStore, DtlsDrop, DtlsEnd, DtlsFailure, HandshakeFailure,
    Relay, RelayAddress, StartError,
};
pub(crate) use turnpike_testkit::{
    alone,
    certificates::Certificate,
    process::{Thread, grown, settles},
};
pub(crate) use turnpike_turn::{
    client::Event,
    server::{AllocationLimits, Bandwidth, ClientRules, Effect, Rates, Transport},
};
pub(crate) use turnpike_wire::proxy_protocol::{ProxyVersion, encode};
