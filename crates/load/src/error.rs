//! Why a load run or a reflector did not work, each with what to do about it.

use std::{io, net::SocketAddr};

use turnpike_turn::client::{Failure, Request};

/// Each message is one sentence for the user.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// An impossible setting.
    #[error("{0}")]
    Config(String),
    /// Too few file descriptors for so many clients.
    #[error(
        "{clients} clients need {needed} open files but only {limit} are allowed; raise the limit (ulimit -n {needed}) or use fewer clients"
    )]
    OpenFiles {
        /// Clients asked for.
        clients: usize,
        /// Descriptors needed.
        needed: u64,
        /// Descriptors allowed.
        limit: u64,
    },
    /// A socket could not be made.
    #[error("cannot open a UDP socket towards {server}: {source}")]
    Socket {
        /// The server.
        server: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The reflector's address is taken or not ours.
    #[error("cannot listen on udp {address}: {source}; {}", listen_hint(source))]
    Listen {
        /// Which.
        address: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Nobody listens there (ICMP port unreachable).
    #[error(
        "nothing listens on udp {server} (port unreachable); is the server running, and is this its address?"
    )]
    Unreachable {
        /// The server.
        server: SocketAddr,
    },
    /// No answer at all.
    #[error(
        "udp {server} does not answer {request} ({ready} of {clients} clients were ready); check its address, its listeners and any firewall between"
    )]
    NoAnswer {
        /// The server.
        server: SocketAddr,
        /// What was asked.
        request: Request,
        /// Clients that had come through.
        ready: usize,
        /// Clients in all (of one thread).
        clients: usize,
    },
    /// Wrong user or password.
    #[error("{server} refused user {user:?} in realm {realm:?}: check --user and the server's credentials")]
    Credentials {
        /// The server.
        server: SocketAddr,
        /// The user.
        user: String,
        /// The server's realm.
        realm: String,
    },
    /// The server asks for a credential, and there is none.
    #[error("{server} wants a credential of realm {realm:?}: give one with --user NAME:PASSWORD")]
    CredentialsNeeded {
        /// The server.
        server: SocketAddr,
        /// The server's realm.
        realm: String,
    },
    /// A request was refused.
    #[error("{server} refused {request} of client {client}: {code} {reason}{}", hint(*code))]
    Refused {
        /// The server.
        server: SocketAddr,
        /// What was asked.
        request: Request,
        /// Which client.
        client: usize,
        /// STUN error code.
        code: u16,
        /// The server's reason phrase.
        reason: String,
    },
    /// The server's answer makes no sense, or the request cannot be written.
    #[error("{request} to {server} failed: {failure}")]
    Protocol {
        /// The server.
        server: SocketAddr,
        /// What was asked.
        request: Request,
        /// How it failed.
        failure: Failure,
    },
    /// Threads, epoll and the like.
    #[error("{what}: {source}")]
    System {
        /// What was being done.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Another thread failed, and its error is the one to show.
    #[error("stopped")]
    Stopped,
}

impl LoadError {
    pub(crate) fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }

    /// What a client's failed request means for the run.
    pub(crate) fn from_failure(
        server: SocketAddr,
        client: usize,
        request: Request,
        failure: Failure,
        (ready, clients): (usize, usize),
    ) -> Self {
        match failure {
            Failure::Refused { code, reason } => Self::Refused { server, request, client, code, reason },
            Failure::Credentials { username, realm } => Self::Credentials { server, user: username, realm },
            Failure::CredentialsNeeded { realm } => Self::CredentialsNeeded { server, realm },
            Failure::Timeout { unverified: None, .. } => Self::NoAnswer { server, request, ready, clients },
            failure => Self::Protocol { server, request, failure },
        }
    }
}

/// What to do about an address that cannot be bound.
fn listen_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another program has this port: stop it, or choose another with --listen ADDR:PORT"
        }
        io::ErrorKind::PermissionDenied => {
            "ports below 1024 need CAP_NET_BIND_SERVICE: grant it (setcap cap_net_bind_service=ep), or choose a higher port with --listen"
        }
        io::ErrorKind::AddrNotAvailable => "choose an address of this machine (ip address) with --listen",
        _ => "choose another with --listen ADDR:PORT",
    }
}

/// What to do about an error code.
fn hint(code: u16) -> &'static str {
    match code {
        403 => "; the server does not relay to this peer: allow its range there (serve --allow-peer CIDR)",
        437 => "; an allocation of an earlier run still exists on this port: wait until it expires",
        440 | 443 => "; server and peer are of different address families",
        486 => "; the user's allocation quota is reached: raise it on the server or use fewer clients",
        508 => {
            "; the server's port range, file descriptors or total allocations are exhausted, or it is about to stop"
        }
        _ => "",
    }
}
