//! Common imports.

pub(crate) use crate::{
    support::{
        self, PATIENCE, Reports, Running, accept, chat, eventually, free_address, greeter, kernel_passes_on,
        listener, patient, pattern, read_all, read_exactly, reset, rule, serve_greetings, settings,
    },
    udp_common::{self, DATAPATHS, Echo, KEY, LOCALHOST, Worker, client, expect_echo, payload, receive},
};
pub(crate) use std::{
    collections::HashSet,
    fs,
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::unix::net::UnixStream,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
pub(crate) use turnpike_forward::{
    Access, Balance, Bind, CopyMode, EndReason, Endpoint, Forwarder, Host, Limits, Pattern, PortRange,
    Protocol, Proxy, ProxyVersion, Rule, RuleSnapshot, Settings, TargetFailure, UnixName, udp::RuleKey,
};
pub(crate) use turnpike_net::Datapath;
pub(crate) use turnpike_testkit::{
    Dir,
    alone::{self, run},
    process::{Thread, grown, settles, take_descriptors},
};
