//! Listeners: Unix sockets with mode 0600, plain HTTP on loopback, TLS elsewhere.

use std::{
    io,
    net::{SocketAddr, TcpListener as StdTcpListener},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixListener as StdUnixListener,
    },
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use axum::Router;
use tokio::{
    net::{TcpListener, UnixListener},
    sync::Notify,
};
use turnpike_api::{FleetAdmin, Job};
use turnpike_config::{
    AdminAccess, AdminAddress, AdminSettings, Mistake, Settings,
    runtime_directory::{self, Origin, RuntimeDirectory},
};
use turnpike_net::{BindError, ListenOptions, SocketFile};
use turnpike_wire::address::UnixName;

use crate::{
    changes::Changes,
    connections::{self, CloseReasons, ConnectionLimits},
    http_listener::{HttpListener, UNSENT},
    occupant, peer_requests,
    predecessor::{self, Predecessor, SuccessorLink},
    program::Owner,
    routes,
    tls::{ListenerTls, TlsError},
};

/// Accessible to this user and root.
const MODE: u32 = 0o600;
/// Names the setting in errors about an address.
const SETTING: &str = "with --admin";
/// Remedy while a draining process still has the address.
const DRAINS: &str = "another turnpike is still draining here: wait until it exits, stop it, or choose another address with --admin";

/// Reason why an explicitly configured interface is missing; each message includes the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    #[error("admin interface: {0}")]
    Admin(BindError),
    #[error("credentials for applications: {0}")]
    Applications(BindError),
    #[error("cannot serve applications over TLS: {0}")]
    ApplicationsTls(TlsError),
    /// The directory for the socket cannot be used.
    #[error(
        "no admin socket, which reload, drain and other commands need: {} cannot be used ({source}); set RUNTIME_DIRECTORY, or set a \
         socket with --admin unix:/PATH",
        directory.display()
    )]
    NoPlace { directory: PathBuf, source: io::Error },
    /// A certificate or a CA cannot be used.
    #[error("cannot serve the admin interface over TLS: {0}")]
    Tls(#[from] TlsError),
}

/// Errors in certificates and CAs of both interfaces. Opens no socket.
pub fn check(settings: &Settings) -> Vec<Mistake> {
    let applications = settings.credentials_certificate().filter(|_| !settings.credentials.listen.is_empty());
    let found = [
        ("admin.tls_cert", ListenerTls::new(&settings.admin).map(drop)),
        (
            "credentials.tls_cert",
            applications.map_or(Ok(()), |files| ListenerTls::for_applications(files).map(drop)),
        ),
    ];
    let mistake = |(key, read): (&str, Result<(), TlsError>)| {
        let error = read.err()?;
        Some(Mistake::new(settings.origin(key), key, error.to_string(), "usable PEM files"))
    };
    found.into_iter().filter_map(mistake).collect()
}

/// A listening socket for another process, with its configured address.
pub type LentSocket = (String, OwnedFd);

/// A bound interface that does not answer requests yet.
pub struct AdminInterface {
    bound: Vec<BoundListener>,
    loopback: AdminAccess,
    predecessor: Option<Predecessor>,
}

pub(crate) struct BoundListener {
    pub(crate) listener: HttpListener,
    configured: String,
    pub(crate) shown: String,
    socket: OwnedFd,
    file: SocketOwner,
}

/// Owner of a Unix socket's file.
enum SocketOwner {
    None,
    /// The file belongs to this process, and is removed on drop.
    Own(SocketFile),
    /// The file belongs to another process until this one answers.
    Another(UnixName),
}

pub struct Serving {
    kept: Vec<Kept>,
    changes: Changes,
    successor: Option<SuccessorLink>,
}

struct Kept {
    configured: String,
    /// Notified when the listener must stop accepting.
    left: Arc<Notify>,
    /// Listening socket and its file; `None` after the handover to another process.
    socket: Mutex<Option<(OwnedFd, Option<SocketFile>)>>,
}

impl Serving {
    /// Starts answering on all listeners.
    pub(crate) fn new(
        bound: Vec<BoundListener>,
        router: &Router,
        limits: ConnectionLimits,
        close_reasons: &'static CloseReasons,
        changes: Changes,
        successor: Option<SuccessorLink>,
    ) -> Self {
        let serve = |BoundListener { listener, configured, socket, file, .. }: BoundListener| {
            let left = Arc::new(Notify::new());
            tokio::spawn(connections::serve(
                listener,
                router.clone(),
                limits,
                close_reasons,
                Arc::clone(&left),
            ));
            let file = match file {
                SocketOwner::None => None,
                SocketOwner::Own(file) => Some(file),
                // If the file is missing, it does not have to be removed.
                SocketOwner::Another(name) => name.address().and_then(|at| SocketFile::take_over(&at)).ok(),
            };
            Kept { configured, left, socket: Mutex::new(Some((socket, file))) }
        };
        Self { kept: bound.into_iter().map(serve).collect(), changes, successor }
    }

    /// Duplicates the sockets for [`AdminInterface::listen`] or [`crate::Applications::listen`] of another
    /// process.
    pub fn lend(&self) -> io::Result<Vec<LentSocket>> {
        let lend = |kept: &Kept| {
            let held = kept.socket.lock().unwrap_or_else(PoisonError::into_inner);
            let socket = held.as_ref().map(|(socket, _)| socket.try_clone()).transpose();
            socket.map(|socket| Some((kept.configured.clone(), socket?))).transpose()
        };
        let successor = self.successor.iter().map(|way| Ok((predecessor::NAME.to_owned(), way.lend()?)));
        self.kept.iter().filter_map(lend).chain(successor).collect()
    }

    pub fn settled(&self) -> impl Future<Output = ()> + Send + 'static {
        self.changes.settled()
    }

    pub fn close(&self) {
        for Kept { left, socket, .. } in &self.kept {
            left.notify_one();
            drop(socket.lock().unwrap_or_else(PoisonError::into_inner).take());
        }
    }

    /// Stops accepting, because another process now has the sockets; earlier requests, and requests from
    /// that process, are still answered. Must be called within a runtime.
    pub fn leave(&self) {
        self.successor.iter().for_each(SuccessorLink::answer);
        for Kept { left, socket, .. } in &self.kept {
            left.notify_one();
            if let Some((_, Some(file))) = socket.lock().unwrap_or_else(PoisonError::into_inner).take() {
                file.leave();
            }
        }
    }
}

impl AdminInterface {
    pub fn listen(
        job: Job,
        settings: &AdminSettings,
        explicit: bool,
        mut lent: Vec<LentSocket>,
    ) -> Result<Self, ListenError> {
        let tls = ListenerTls::new(settings)?.map(Arc::new);
        let mut bound = Vec::new();
        for address in &settings.listen {
            let lent = take_lent(&mut lent, address);
            match BoundListener::new(job, address, tls.as_ref(), lent) {
                Ok(one) => bound.push(one),
                Err(error) if explicit => return Err(error),
                Err(error) => tracing::warn!("{error}"),
            }
        }
        let predecessor = take_lent(&mut lent, &predecessor::NAME).map(Predecessor::new).transpose();
        let predecessor = predecessor.unwrap_or_else(|error| {
            tracing::warn!("allocations of the previous process cannot be listed: {error}");
            None
        });
        Ok(Self { bound, loopback: settings.loopback, predecessor })
    }

    /// TCP addresses with the actual ports.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.bound.iter().filter_map(BoundListener::address).collect()
    }

    pub fn say_where(&self) {
        if self.bound.is_empty() {
            tracing::info!("no admin interface");
        }
        for BoundListener { listener, shown, .. } in &self.bound {
            let for_whom = match (listener, self.loopback) {
                (HttpListener::Unix(_), _) => "for this user and root",
                (HttpListener::Tcp(_, Some(_)), _) => "with a token or a client certificate",
                (HttpListener::Tcp(_, None), AdminAccess::Full) => "for all local users",
                (HttpListener::Tcp(_, None), AdminAccess::Read) => "read-only; changes need a token",
                (HttpListener::Tcp(_, None), AdminAccess::None) => "with a token",
            };
            tracing::info!("admin interface on {shown} ({for_whom})");
        }
    }

    #[must_use = "it removes the files of its sockets when it is dropped"]
    pub fn serve(self, program: Arc<dyn Owner>) -> Serving {
        // Other nodes of a fleet send requests even if there is no listener here.
        let is_asked = |fleet: &Arc<dyn FleetAdmin>| !self.bound.is_empty() || fleet.node().is_some();
        let others = program.fleet().filter(is_asked);
        if self.bound.is_empty() && others.is_none() {
            return Serving { kept: Vec::new(), changes: Changes::default(), successor: None };
        }
        let limits = ConnectionLimits::of_one(self.bound.len());
        let changes = Changes::default();
        let is_server = program.job() == Job::Serve;
        let router = routes::router(program, changes.clone(), self.predecessor);
        let successor = is_server.then(|| SuccessorLink::new(router.clone()));
        if let Some(fleet) = others {
            tokio::spawn(peer_requests::answer(fleet, router.clone()));
        }
        Serving::new(self.bound, &router, limits, &connections::ADMIN, changes, successor)
    }
}

pub(crate) fn take_lent(lent: &mut Vec<LentSocket>, configured: &impl ToString) -> Option<OwnedFd> {
    let configured = configured.to_string();
    let at = lent.iter().position(|(name, _)| *name == configured)?;
    Some(lent.swap_remove(at).1)
}

impl BoundListener {
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        match &self.listener {
            HttpListener::Tcp(listener, _) => listener.local_addr().ok(),
            HttpListener::Unix(_) => None,
        }
    }

    fn new(
        job: Job,
        address: &AdminAddress,
        tls: Option<&Arc<ListenerTls>>,
        lent: Option<OwnedFd>,
    ) -> Result<Self, ListenError> {
        let configured = address.to_string();
        let failed = |mut error: BindError, drains: &dyn Fn() -> bool| {
            if error.source.kind() == io::ErrorKind::AddrInUse && drains() {
                error.remedy = DRAINS.to_owned();
            }
            ListenError::Admin(error.or("set --admin off"))
        };
        let unix = |name: &UnixName, shown: String, lent: Option<OwnedFd>| {
            let bound = Self::unix(name, (configured.clone(), shown.clone()), lent);
            bound.map_err(|source| {
                failed(BindError::unix(shown, source, SETTING), &|| occupant::drains_at_unix(name))
            })
        };
        match address {
            AdminAddress::DefaultSocket => {
                let directory = runtime_directory::own();
                let path = default_socket(job, &directory);
                let no_place = |source| ListenError::NoPlace { directory: directory.path.clone(), source };
                directory.prepare().map_err(no_place)?;
                let invalid = |why: &str| no_place(io::Error::new(io::ErrorKind::InvalidInput, why));
                let name = path.to_str().ok_or_else(|| invalid("not UTF-8"))?;
                let name = name.parse::<UnixName>().map_err(invalid)?;
                let shown = format!("unix:{}", path.display());
                unix(&name, shown, lent)
            }
            AdminAddress::Unix(name) => unix(name, configured.clone(), lent),
            AdminAddress::Tcp(at) => Self::tcp(*at, tls, lent).map_err(|source| {
                let error = BindError::ip(format_args!("tcp {at}"), source, SETTING);
                failed(error, &|| occupant::drains_at(*at))
            }),
        }
    }

    fn unix(
        name: &UnixName,
        (configured, shown): (String, String),
        lent: Option<OwnedFd>,
    ) -> io::Result<Self> {
        let (listener, file) = match lent {
            Some(lent) => (turnpike_net::UnixListener::take_over(lent)?, SocketOwner::Another(name.clone())),
            None => {
                let (listener, file) = turnpike_net::UnixListener::bind(&name.address()?, Some(MODE))?;
                (listener, SocketOwner::Own(file))
            }
        };
        let socket = listener.as_fd().try_clone_to_owned()?;
        let listener = StdUnixListener::from(listener.as_fd().try_clone_to_owned()?);
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener: HttpListener::Unix(UnixListener::from_std(listener)?),
            configured,
            shown,
            socket,
            file,
        })
    }

    /// Plain HTTP on loopback, so that curl works without trusting a certificate.
    pub(crate) fn tcp(
        address: SocketAddr,
        tls: Option<&Arc<ListenerTls>>,
        lent: Option<OwnedFd>,
    ) -> io::Result<Self> {
        let tls = tls.filter(|_| !AdminAddress::Tcp(address).is_local()).cloned();
        let listener = match lent {
            Some(lent) => turnpike_net::TcpListener::take_over(lent)?,
            None => bind(address)?,
        };
        let listener = StdTcpListener::from(listener.as_fd().try_clone_to_owned()?);
        listener.set_nonblocking(true)?;
        let socket = listener.as_fd().try_clone_to_owned()?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        let shown = format!("{scheme}://{}/", listener.local_addr()?);
        let listener = HttpListener::Tcp(TcpListener::from_std(listener)?, tls);
        Ok(Self { listener, configured: address.to_string(), shown, socket, file: SocketOwner::None })
    }
}

/// Binds an address, even if this machine does not have it yet (DHCP, VRRP, address detection).
fn bind(address: SocketAddr) -> io::Result<turnpike_net::TcpListener> {
    // Sets IPV6_V6ONLY, so that 0.0.0.0 and [::] can use the same port.
    let options = ListenOptions { unsent_limit: Some(UNSENT), ..ListenOptions::default() };
    let bound = turnpike_net::TcpListener::bind(address, &options);
    if bound.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable) {
        let ip = address.ip();
        tracing::warn!("this machine does not have the address {ip}: listening on {address} once it has");
        return turnpike_net::TcpListener::bind(address, &ListenOptions { freebind: true, ..options });
    }
    bound
}

/// Default path of a program's socket.
fn default_socket(job: Job, directory: &RuntimeDirectory) -> PathBuf {
    directory.path.join(match (job, directory.origin) {
        (Job::Serve, Origin::Session) => "admin.sock",
        (Job::Serve, _) => "turnpike.sock",
        (Job::Forward, _) => "forward.sock",
    })
}

/// Paths where turnpike's commands look for a program's socket, in this order.
#[must_use]
pub fn candidates(job: Job) -> Vec<PathBuf> {
    runtime_directory::all().iter().map(|directory| default_socket(job, directory)).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Mirrors the listeners of `serve`.
    #[tokio::test]
    async fn both_families_can_listen_on_one_port() {
        let any = |ip: &str, port| SocketAddr::new(ip.parse().expect("an address"), port);
        if let Err(error) = BoundListener::tcp(any("::", 0), None, None) {
            return println!("SKIPPED: no IPv6: {error}");
        }
        // Another program may be using the port on IPv4.
        let both = || {
            let v6 = BoundListener::tcp(any("::", 0), None, None).ok()?;
            let port = v6.address()?.port();
            BoundListener::tcp(any("0.0.0.0", port), None, None).ok()
        };
        assert!((0..8).any(|_| both().is_some()));
    }

    #[test]
    fn each_program_has_its_own_socket_in_each_directory() {
        for (job, origin, name) in [
            (Job::Serve, Origin::Service, "turnpike.sock"),
            (Job::Serve, Origin::Session, "admin.sock"),
            (Job::Serve, Origin::Fallback, "turnpike.sock"),
            (Job::Forward, Origin::Service, "forward.sock"),
            (Job::Forward, Origin::Session, "forward.sock"),
        ] {
            let directory = RuntimeDirectory { path: "/run/here".into(), origin };
            assert_eq!(default_socket(job, &directory), Path::new("/run/here").join(name));
        }
    }
}
