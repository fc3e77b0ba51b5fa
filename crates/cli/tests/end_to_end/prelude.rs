//! Names that most modules of this suite use.

pub(crate) use hmac::Hmac;
pub(crate) use serde_json::{Value, json};
pub(crate) use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};
pub(crate) use turnpike_testkit::{
    alone::{self, run},
    databases::{Proxy, Server},
    names::CORPUS,
    stun, tests,
};
pub(crate) use turnpike_trials::{
    Certificate, Dir, Finished, Forward, Load, Metrics, PASSWORD, Program, REALM, Reflect, SOON, Serve, USER,
    Upgraded, V4, V6, address_after,
    browsers::{Chromium, Page},
    connect, copies, ends, eventually, fetch, free_address, free_port, get_unix, has_ipv6, installed,
    interop_program,
    links::{SERVER, on_links},
    lives, loopback_of, namespace, need, post, say, say_udp, shown_by, skip, tcp_echo, turnpike, udp_echo,
    words,
};
pub(crate) use turnpike_wire::escape;
