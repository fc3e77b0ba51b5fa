//! Why a load run or a reflector did not work, each with what to do about it.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use turnpike_client::{InvalidSetting, Transport};
use turnpike_offload::OffloadError;
use turnpike_turn::client::{Failure, Request};
use turnpike_wire::escape::name;

use crate::turn;

/// Each message is one sentence for the user.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    #[error("{0}")]
    Config(String),
    #[error(
        "{clients} clients need {needed} open files but only {limit} are allowed; raise the limit (ulimit -n {needed}) or use fewer clients"
    )]
    OpenFiles { clients: usize, needed: u64, limit: u64 },
    #[error("cannot find the server {host}: {source}")]
    Name { host: String, source: io::Error },
    #[error("cannot open a UDP socket towards {server}: {source}")]
    Socket { server: SocketAddr, source: io::Error },
    #[error(
        "cannot send from {address} (--client-prefix): {source}; make all addresses of the prefix this machine's: ip route add local CIDR dev lo"
    )]
    ClientAddress { address: IpAddr, source: io::Error },
    #[error("cannot listen on {transport} {address}: {source}; {}", listen_hint(transport, source))]
    Listen { transport: &'static str, address: SocketAddr, source: io::Error },
    #[error("--datapath kernel cannot be had: {0}")]
    Kernel(#[from] OffloadError),
    #[error(
        "--datapath kernel: no Ethernet interface is up and has an address; name another data path, such as auto"
    )]
    NoEthernet,
    #[error(
        "cannot listen for the peers of --profile on udp {address}: {source}; they are the generator's own: name an address of this \
         machine, with a port that is free, with --peer"
    )]
    Peers { address: SocketAddr, source: io::Error },
    #[error(
        "nothing listens on udp {server} (port unreachable); is the server running, and is this its address?"
    )]
    Unreachable { server: SocketAddr },
    #[error(
        "nothing listens on udp {server} (port unreachable); start `turnpike reflect --listen {server}` there, or name the address of one"
    )]
    NoReflector { server: SocketAddr },
    #[error(
        "nothing comes back from udp {server} ({ready} of {clients} clients had an answer); is `turnpike reflect` running there, or behind the forwarder, and does no firewall stand between?"
    )]
    NoReflection { server: SocketAddr, ready: usize, clients: usize },
    #[error("cannot connect to tcp {server}: {source}; is `turnpike reflect --tcp` running there?")]
    Connect { server: SocketAddr, source: io::Error },
    #[error(
        "tcp {server} took the connection but {what}; is `turnpike reflect --tcp` running there, or behind the forwarder?"
    )]
    NotReflector { server: SocketAddr, what: &'static str },
    #[error(
        "tcp {server} {how} in mid-run, connection {connection} after {bytes} bytes; is the reflector, and any forwarder to it, still running?"
    )]
    Lost { server: SocketAddr, how: String, connection: usize, bytes: u64 },
    #[error(
        "tcp {server} has moved nothing for {seconds} s, connection {connection} after {bytes} bytes; is it, and all on the way to it, still running?"
    )]
    Stalled { server: SocketAddr, seconds: u64, connection: usize, bytes: u64 },
    #[error(
        "connection {connection} to tcp {server} did not arrive as it was sent: {sent} bytes sent, {received} received, {wrong} of them wrong"
    )]
    Inexact { server: SocketAddr, connection: usize, sent: u64, received: u64, wrong: u64 },
    #[error("tcp {server} has taken no connection for {seconds} s ({what}); is it still running?")]
    Gone { server: SocketAddr, seconds: u64, what: &'static str },
    #[error("{transport} {server}: {what}{}", link_hint(*transport, *during_setup, what))]
    Link { transport: Transport, server: SocketAddr, what: String, during_setup: bool },
    #[error(
        "{transport} {server} does not answer {request} ({ready} of {clients} clients were ready); check its address, its listeners and any firewall between"
    )]
    NoAnswer { transport: Transport, server: SocketAddr, request: Request, ready: usize, clients: usize },
    #[error("{server} refused user {user:?} in realm {realm:?}: check --user and the server's credentials")]
    Credentials { server: SocketAddr, user: String, realm: String },
    #[error(
        "{server} refused the access token of key {kid:?} in realm {realm:?} (401): it has expired, or the server has no such \
         key (oauth.key), another key of that name, another name of its own (oauth.server_name) or no tokens in this realm; its log \
         says which. Make another with `turnpike credentials --token-key`"
    )]
    AccessToken { server: SocketAddr, kid: String, realm: String },
    #[error("{server} wants a credential of realm {realm:?}: give one with --user NAME:PASSWORD")]
    CredentialsNeeded { server: SocketAddr, realm: String },
    #[error("{server} refused {request} of client {client}: {code} {}{}", name(reason).cut(127), hint(*code))]
    Refused { server: SocketAddr, request: Request, client: usize, code: u16, reason: String },
    #[error(
        "{server} gave no mobility ticket (RFC 8016), so that no client can take its allocation along; let it give some \
         (turnpike: relay.mobility = true; coturn: --mobility), or leave out --migrate"
    )]
    NoMobility { server: SocketAddr },
    #[error("{from} sent its clients on to {to} (300 Try Alternate), {why}")]
    Redirected { from: SocketAddr, to: SocketAddr, why: &'static str },
    #[error("{from} sent its clients on (300 Try Alternate), and there: {source}")]
    Alternate { from: SocketAddr, source: Box<LoadError> },
    #[error("{request} to {server} failed: {failure}")]
    Protocol { server: SocketAddr, request: Request, failure: Box<Failure> },
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error("interrupted {during}: nothing was measured")]
    Interrupted { during: &'static str },
    #[error("stopped")]
    Stopped,
}

impl From<InvalidSetting> for LoadError {
    fn from(InvalidSetting(what): InvalidSetting) -> Self {
        Self::Config(what)
    }
}

impl LoadError {
    pub(crate) fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }

    /// A connection that ended in mid-run.
    pub(crate) fn lost(server: SocketAddr, error: &io::Error, connection: usize, bytes: u64) -> Self {
        let how = match error.kind() {
            io::ErrorKind::UnexpectedEof => "closed a connection".to_owned(),
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => "reset a connection".to_owned(),
            _ => format!("broke a connection ({error})"),
        };
        Self::Lost { server, how, connection, bytes }
    }

    /// What a client's failed request means for the run.
    pub(crate) fn from_failure(
        config: &turn::Config,
        server: SocketAddr,
        client: usize,
        request: Request,
        failure: Failure,
        (ready, clients): (usize, usize),
    ) -> Self {
        let transport = config.transport();
        match failure {
            Failure::Refused { code, reason } => Self::Refused { server, request, client, code, reason },
            Failure::Credentials { username: kid, realm } if config.access_token.is_some() => {
                Self::AccessToken { server, kid, realm }
            }
            Failure::Credentials { username, realm } => Self::Credentials { server, user: username, realm },
            Failure::CredentialsNeeded { realm } => Self::CredentialsNeeded { server, realm },
            Failure::Timeout { unverified: None, .. } => {
                Self::NoAnswer { transport, server, request, ready, clients }
            }
            failure => Self::Protocol { server, request, failure: Box::new(failure) },
        }
    }
}

/// What to do about an address that cannot be bound.
fn listen_hint(transport: &str, error: &io::Error) -> String {
    let flag = if transport == "tcp" { "--tcp" } else { "--listen" };
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            format!("another program has this port: stop it, or choose another with {flag} ADDR:PORT")
        }
        io::ErrorKind::PermissionDenied => format!(
            "ports below 1024 need CAP_NET_BIND_SERVICE: grant it (setcap cap_net_bind_service=ep), or choose a higher \
             port with {flag}"
        ),
        io::ErrorKind::AddrNotAvailable => {
            format!("choose an address of this machine (ip address) with {flag}")
        }
        _ => format!("choose another with {flag} ADDR:PORT"),
    }
}

/// What to do about a connection that failed.
fn link_hint(transport: Transport, during_setup: bool, what: &str) -> &'static str {
    let certificate = what.contains("certificate");
    match transport {
        _ if certificate => {
            "; name its authority with --ca FILE, another name with --server-name, or for a test take any with --insecure"
        }
        _ if !during_setup => "; is the server still running?",
        Transport::Tls if !what.contains("refused") => {
            "; does TLS really listen on this port (5349 by default)?"
        }
        Transport::Dtls => "; does DTLS listen on this port (5349 by default), with an ECDSA certificate?",
        _ => "; is the server running, and is this one of its listeners?",
    }
}

/// What to do about an error code.
fn hint(code: u16) -> &'static str {
    match code {
        403 => {
            "; the server does not relay to this peer: allow its range there (serve --allow-peer CIDR), or, if the peer is on \
             the server's own machine, its address (--allow-peer ADDR:PORT)"
        }
        405 => {
            "; allow mobility there (turnpike: relay.mobility = true; coturn: --mobility), or leave out --migrate"
        }
        437 => {
            "; allocations of an earlier run still exist on this port and on those tried after it: wait until they expire"
        }
        440 | 443 => "; server and peer are of different address families",
        486 => "; the user's allocation quota is reached: raise it on the server or use fewer clients",
        508 => {
            "; the server's port range, file descriptors or total allocations are exhausted, or it is about to stop; or its relay \
             ports are shared (relay.shared_ports), and another client has the peer: give each its own (--peer-prefix)"
        }
        _ => "",
    }
}
