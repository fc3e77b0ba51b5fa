//! Where the interface listens: Unix sockets with a file of mode 0600, loopback in the clear, anything else by TLS.

use std::{
    env,
    fs::DirBuilder,
    io,
    net::{SocketAddr, TcpListener as StdTcpListener},
    os::{
        fd::AsFd as _,
        unix::{fs::DirBuilderExt as _, net::UnixListener as StdUnixListener},
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use turnpike_config::{AdminAccess, AdminAddress, AdminSettings};
use turnpike_net::{SocketFile, UnixName};

use crate::{
    connections::{self, Limits},
    model::Job,
    program::Program,
    questions, routes,
    tls::{Tls, TlsError},
};

/// This user and root.
const MODE: u32 = 0o600;

/// Why there is no interface where somebody has asked for one; each message says what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// An address cannot be had.
    #[error(
        "cannot serve the admin interface on {address}: {source}; choose another with --admin ADDRESS, or --admin off"
    )]
    Address {
        /// As it was configured.
        address: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The environment does not say where.
    #[error(
        "no place for the socket of the admin interface: neither RUNTIME_DIRECTORY nor XDG_RUNTIME_DIR is set; name one with --admin unix:/PATH"
    )]
    NoPlace,
    /// A certificate or an authority.
    #[error("cannot serve the admin interface by TLS: {0}")]
    Tls(#[from] TlsError),
}

/// An interface that listens, and answers nobody yet.
pub struct Interface {
    bound: Vec<Bound>,
    /// What it was at the start, for the log.
    loopback: AdminAccess,
}

/// One of its listeners.
struct Bound {
    listener: Listener,
    /// As people write it.
    shown: String,
}

/// What clients connect to.
pub(crate) enum Listener {
    /// With its file, which goes when this does.
    Unix(UnixListener, #[expect(dead_code, reason = "what counts is its end")] SocketFile),
    Tcp(TcpListener, Option<Arc<Tls>>),
}

/// What they have connected.
pub(crate) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream, SocketAddr, Option<Arc<Tls>>),
}

impl Listener {
    pub(crate) async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Unix(listener, _) => listener.accept().await.map(|(stream, _)| Stream::Unix(stream)),
            Self::Tcp(listener, tls) => {
                let (stream, from) = listener.accept().await?;
                Ok(Stream::Tcp(stream, from, tls.clone()))
            }
        }
    }
}

impl Interface {
    /// Listens, within a runtime. What nobody has asked for (not `explicit`) and cannot be had is left out and said.
    ///
    /// # Errors
    /// Of addresses that somebody has asked for.
    pub fn listen(job: Job, settings: &AdminSettings, explicit: bool) -> Result<Self, ListenError> {
        let tls = Tls::new(settings)?.map(Arc::new);
        let mut bound = Vec::new();
        for address in &settings.listen {
            match Bound::new(job, address, tls.as_ref()) {
                Ok(one) => bound.push(one),
                Err(error) if explicit => return Err(error),
                Err(ListenError::NoPlace) => tracing::info!("{}", ListenError::NoPlace),
                Err(error) => tracing::warn!("{error}"),
            }
        }
        Ok(Self { bound, loopback: settings.loopback })
    }

    /// Where it listens by TCP, with real ports.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let tcp = self.bound.iter().filter_map(|bound| match &bound.listener {
            Listener::Tcp(listener, _) => listener.local_addr().ok(),
            Listener::Unix(..) => None,
        });
        tcp.collect()
    }

    /// Says where it is.
    pub fn say_where(&self) {
        if self.bound.is_empty() {
            tracing::info!("no admin interface");
        }
        for Bound { listener, shown } in &self.bound {
            let for_whom = match (listener, self.loopback) {
                (Listener::Unix(..), _) => "for this user and root",
                (Listener::Tcp(_, Some(_)), _) => "with a token or a client certificate",
                (Listener::Tcp(_, None), AdminAccess::Full) => "for everybody on this machine",
                (Listener::Tcp(_, None), AdminAccess::Read) => "to look at; changes need a token",
                (Listener::Tcp(_, None), AdminAccess::None) => "with a token",
            };
            tracing::info!("admin interface on {shown}, {for_whom}");
        }
    }

    /// Answers from now on, for as long as the runtime lives.
    pub fn serve(self, program: Arc<dyn Program>) {
        let limits = Limits::of_one(self.bound.len());
        let others = program.fleet();
        let router = routes::router(program);
        if let Some(fleet) = others {
            tokio::spawn(questions::answer(fleet, router.clone()));
        }
        for Bound { listener, .. } in self.bound {
            tokio::spawn(connections::serve(listener, router.clone(), limits));
        }
    }
}

impl Bound {
    fn new(job: Job, address: &AdminAddress, tls: Option<&Arc<Tls>>) -> Result<Self, ListenError> {
        let failed = |address: String| |source| ListenError::Address { address, source };
        match address {
            AdminAddress::DefaultSocket => {
                let path = default_socket(job, &Environment::of_process()).ok_or(ListenError::NoPlace)?;
                let shown = format!("unix:{}", path.display());
                make_directory(&path).map_err(failed(shown.clone()))?;
                let name = path.to_str().ok_or(ListenError::NoPlace)?;
                let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidInput, why);
                let name = UnixName::new(name).map_err(|why| failed(shown.clone())(invalid(why)))?;
                Self::unix(&name, shown.clone()).map_err(failed(shown))
            }
            AdminAddress::Unix(name) => {
                let shown = address.to_string();
                Self::unix(name, shown.clone()).map_err(failed(shown))
            }
            AdminAddress::Tcp(at) => {
                // On loopback nobody listens in, and whoever asks there by curl should not have to trust a certificate first.
                let tls = (!address.is_local()).then_some(tls).flatten().cloned();
                Self::tcp(*at, tls).map_err(failed(format!("tcp {at}")))
            }
        }
    }

    fn unix(name: &UnixName, shown: String) -> io::Result<Self> {
        let (listener, file) = turnpike_net::UnixListener::bind(name, Some(MODE))?;
        let listener = StdUnixListener::from(listener.as_fd().try_clone_to_owned()?);
        Ok(Self { listener: Listener::Unix(UnixListener::from_std(listener)?, file), shown })
    }

    fn tcp(address: SocketAddr, tls: Option<Arc<Tls>>) -> io::Result<Self> {
        let listener = StdTcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        let shown = format!("{scheme}://{}/", listener.local_addr()?);
        Ok(Self { listener: Listener::Tcp(TcpListener::from_std(listener)?, tls), shown })
    }
}

/// What the environment says about places for sockets.
#[derive(Clone, Debug, Default)]
pub(crate) struct Environment {
    /// systemd's RuntimeDirectory, several separated by colons.
    runtime_directory: Option<String>,
    /// Of a user who is logged in.
    xdg_runtime_dir: Option<String>,
}

impl Environment {
    pub(crate) fn of_process() -> Self {
        let get = |name| env::var(name).ok().filter(|value| value.starts_with('/'));
        Self { runtime_directory: get("RUNTIME_DIRECTORY"), xdg_runtime_dir: get("XDG_RUNTIME_DIR") }
    }
}

/// Where a program listens if nobody says where.
pub(crate) fn default_socket(job: Job, environment: &Environment) -> Option<PathBuf> {
    let (of_service, of_user) = match job {
        Job::Serve => ("turnpike.sock", "turnpike/admin.sock"),
        Job::Forward => ("forward.sock", "turnpike/forward.sock"),
    };
    let Environment { runtime_directory, xdg_runtime_dir } = environment;
    let service = runtime_directory.as_ref().and_then(|all| all.split(':').next());
    let service = service.map(|directory| Path::new(directory).join(of_service));
    service.or_else(|| xdg_runtime_dir.as_ref().map(|directory| Path::new(directory).join(of_user)))
}

/// Where the commands look for a server, in this order: where one of this user would be, and where systemd's would.
pub(crate) fn candidates(environment: &Environment) -> Vec<PathBuf> {
    let systemd = PathBuf::from("/run/turnpike/turnpike.sock");
    let user = Environment { runtime_directory: None, ..environment.clone() };
    let mut found: Vec<PathBuf> = Vec::new();
    for path in [default_socket(Job::Serve, environment), default_socket(Job::Serve, &user), Some(systemd)] {
        found.extend(path.filter(|path| !found.contains(path)));
    }
    found
}

/// That of the socket, for this user alone; the directories above it are the system's.
fn make_directory(socket: &Path) -> io::Result<()> {
    let Some(directory) = socket.parent() else { return Ok(()) };
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(runtime: Option<&str>, xdg: Option<&str>) -> Environment {
        Environment { runtime_directory: runtime.map(Into::into), xdg_runtime_dir: xdg.map(Into::into) }
    }

    #[test]
    fn the_services_directory_comes_before_the_users_and_each_program_has_its_own_socket() {
        let (run, user) = (Some("/run/turnpike:/run/more"), Some("/run/user/7"));
        for (job, environment, path) in [
            (Job::Serve, environment(run, user), Some("/run/turnpike/turnpike.sock")),
            (Job::Forward, environment(run, None), Some("/run/turnpike/forward.sock")),
            (Job::Serve, environment(None, user), Some("/run/user/7/turnpike/admin.sock")),
            (Job::Forward, environment(None, user), Some("/run/user/7/turnpike/forward.sock")),
            (Job::Serve, environment(None, None), None),
        ] {
            assert_eq!(default_socket(job, &environment).as_deref(), path.map(Path::new), "{environment:?}");
        }
    }

    #[test]
    fn the_commands_look_where_a_server_of_this_user_or_of_systemd_listens() {
        let look = |environment| {
            candidates(&environment).iter().map(|path| path.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(look(environment(None, None)), ["/run/turnpike/turnpike.sock"]);
        assert_eq!(
            look(environment(None, Some("/run/user/7"))),
            ["/run/user/7/turnpike/admin.sock", "/run/turnpike/turnpike.sock"]
        );
        assert_eq!(look(environment(Some("/run/turnpike"), None)), ["/run/turnpike/turnpike.sock"]);
    }
}
