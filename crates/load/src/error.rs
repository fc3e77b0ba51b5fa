//! Errors of load runs and reflectors, each with a remedy.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use turnpike_client::{ClientTransport, InvalidSetting};
use turnpike_net::BindError;
use turnpike_offload::OffloadError;
use turnpike_turn::client::{Failure, Request};
use turnpike_wire::escape::name;

use crate::turn;

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
    #[error("cannot open a UDP socket to {server}: {source}")]
    Socket { server: SocketAddr, source: io::Error },
    #[error(
        "cannot send from {address} (--client-prefix): {source}; make the whole prefix local with: ip route add local CIDR dev lo"
    )]
    ClientAddress { address: IpAddr, source: io::Error },
    #[error(transparent)]
    Listen(#[from] BindError),
    #[error("--datapath kernel is not available: {0}")]
    Kernel(#[from] OffloadError),
    #[error(
        "--datapath kernel: no Ethernet interface is up and has an address; choose a different data path, such as auto"
    )]
    NoEthernet,
    #[error(
        "cannot listen for the peers of --profile on udp {address}: {source}; they run inside the generator: with --peer, choose an address of this \
         machine and a free port"
    )]
    Peers { address: SocketAddr, source: io::Error },
    #[error(
        "nothing listens on udp {server} (port unreachable); check that the server is running and that this is its address"
    )]
    Unreachable { server: SocketAddr },
    #[error(
        "nothing listens on udp {server} (port unreachable); start `turnpike reflect --listen {server}` there, or give the address of a running one"
    )]
    NoReflector { server: SocketAddr },
    #[error(
        "no replies from udp {server} ({ready} of {clients} clients got one); check that `turnpike reflect` is running there or behind the forwarder, and that no firewall blocks it"
    )]
    NoReflection { server: SocketAddr, ready: usize, clients: usize },
    #[error("cannot connect to tcp {server}: {source}; check that `turnpike reflect --tcp` is running there")]
    Connect { server: SocketAddr, source: io::Error },
    #[error(
        "tcp {server} {what}; check that `turnpike reflect --tcp` is running there or behind the forwarder"
    )]
    NotReflector { server: SocketAddr, what: &'static str },
    #[error(
        "tcp {server} {how} during the run, connection {connection} after {bytes} bytes; check that the reflector and any forwarder are still running"
    )]
    Lost { server: SocketAddr, how: String, connection: usize, bytes: u64 },
    #[error(
        "tcp {server} moved no data for {seconds} s, connection {connection} after {bytes} bytes; check that the server and any forwarder are still running"
    )]
    Stalled { server: SocketAddr, seconds: u64, connection: usize, bytes: u64 },
    #[error(
        "data on connection {connection} to tcp {server} was corrupted: {sent} bytes sent, {received} received, {wrong} of them wrong"
    )]
    Inexact { server: SocketAddr, connection: usize, sent: u64, received: u64, wrong: u64 },
    #[error("tcp {server} accepted no connection for {seconds} s ({what}); check that it is still running")]
    Gone { server: SocketAddr, seconds: u64, what: &'static str },
    #[error("{transport} {server}: {what}{}", link_hint(*transport, *during_setup, what))]
    Link { transport: ClientTransport, server: SocketAddr, what: String, during_setup: bool },
    #[error(
        "{transport} {server} does not respond to {request} ({ready} of {clients} clients were ready); check its address, its listeners and firewalls on the path"
    )]
    NoAnswer {
        transport: ClientTransport,
        server: SocketAddr,
        request: Request,
        ready: usize,
        clients: usize,
    },
    #[error("{server} refused user {user:?} in realm {realm:?}: check --user and the server's credentials")]
    Credentials { server: SocketAddr, user: String, realm: String },
    #[error(
        "{server} refused the access token of key {kid:?} in realm {realm:?} (401): the token has expired, or the server has no such key (oauth.key), has another key with this name, has a different oauth.server_name, or accepts no tokens in this realm; see its log. Make a new token with `turnpike credentials --token-key`"
    )]
    AccessToken { server: SocketAddr, kid: String, realm: String },
    #[error("{server} requires a credential in realm {realm:?}: give one with --user NAME:PASSWORD")]
    CredentialsNeeded { server: SocketAddr, realm: String },
    #[error("{server} refused {request} of client {client}: {code} {}{}", name(reason).cut(127), hint(*code))]
    Refused { server: SocketAddr, request: Request, client: usize, code: u16, reason: String },
    #[error(
        "{server} issued no mobility ticket (RFC 8016), so clients cannot move their allocations; enable mobility on the server \
         (turnpike: relay.mobility = true; coturn: --mobility), or omit --migrate"
    )]
    NoMobility { server: SocketAddr },
    #[error("{from} redirected a client to {to} (300 Try Alternate), {why}")]
    Redirected { from: SocketAddr, to: SocketAddr, why: &'static str },
    #[error("{from} redirected a client (300 Try Alternate), which then failed: {source}")]
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

    pub(crate) fn lost(server: SocketAddr, error: &io::Error, connection: usize, bytes: u64) -> Self {
        let how = match error.kind() {
            io::ErrorKind::UnexpectedEof => "closed a connection".to_owned(),
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => "reset a connection".to_owned(),
            _ => format!("broke a connection ({error})"),
        };
        Self::Lost { server, how, connection, bytes }
    }

    pub(crate) fn from_failure(
        config: &turn::TurnLoadConfig,
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

fn link_hint(transport: ClientTransport, during_setup: bool, what: &str) -> &'static str {
    let certificate = what.contains("certificate");
    match transport {
        _ if certificate => {
            "; give its CA certificate with --ca FILE or its name with --server-name; for a test, accept any with --insecure"
        }
        _ if !during_setup => "; check that the server is still running",
        ClientTransport::Tls if !what.contains("refused") => {
            "; check that this is a TLS port (5349 by default)"
        }
        ClientTransport::Dtls => {
            "; check that this is a DTLS port (5349 by default), with an ECDSA certificate"
        }
        _ => "; check that the server is running and that this is one of its listeners",
    }
}

fn hint(code: u16) -> &'static str {
    match code {
        403 => {
            "; the server does not relay to this peer: allow its range on the server (--allow-peer CIDR), or, if the peer is on \
             the server's own machine, its address (--allow-peer ADDR:PORT)"
        }
        405 => {
            "; enable mobility on the server (turnpike: relay.mobility = true; coturn: --mobility), or omit --migrate"
        }
        437 => {
            "; allocations of an earlier run still exist on this port and on the ones tried after it: wait until they expire"
        }
        440 | 443 => "; the server and the peer have different address families",
        486 => "; the user's allocation quota is used up: raise it on the server or use fewer clients",
        508 => {
            "; the server's port range, file descriptors or total allocations are exhausted, or it is shutting down; or its relay \
             ports are shared (relay.shared_ports) and another client uses this peer: give each client its own (--peer-prefix)"
        }
        _ => "",
    }
}
