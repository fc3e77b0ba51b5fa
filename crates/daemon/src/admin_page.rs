//! The admin page as a part of a service that can go on in another process.

use std::{
    net::SocketAddr,
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use tokio::{net::TcpListener, task::AbortHandle};
use turnpike_config::AdminListen;

use crate::admin::{self, AdminError, AdminState};

/// A page that has a place, and perhaps is served already.
pub(crate) struct AdminPage {
    /// As the configuration has it: the port may be 0.
    configured: SocketAddr,
    address: SocketAddr,
    /// The same for another process.
    socket: Arc<OwnedFd>,
    /// Until it is served.
    listener: Option<TcpListener>,
    task: Option<AbortHandle>,
}

impl AdminPage {
    /// Listens, unless another process has done so: with `inherited`. See [`admin::bind`].
    pub(crate) async fn bind(
        listen: AdminListen,
        explicit: bool,
        inherited: Option<OwnedFd>,
    ) -> Result<Option<Self>, AdminError> {
        let AdminListen::On(configured) = listen else { return Ok(None) };
        let failed = |source| AdminError { address: configured, source };
        let listener = match inherited {
            Some(socket) => Some(TcpListener::from_std(socket.into()).map_err(failed)?),
            None => admin::bind(listen, explicit).await?,
        };
        let Some(listener) = listener else { return Ok(None) };
        Ok(Some(Self {
            configured,
            address: listener.local_addr().map_err(failed)?,
            socket: Arc::new(listener.as_fd().try_clone_to_owned().map_err(failed)?),
            listener: Some(listener),
            task: None,
        }))
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves it from now on.
    pub(crate) fn begin(&mut self, state: AdminState) {
        self.task = self.listener.take().map(|listener| admin::spawn(listener, state));
    }

    /// What another process needs to go on with it.
    pub(crate) fn lend(&self) -> (SocketAddr, Arc<OwnedFd>) {
        (self.configured, Arc::clone(&self.socket))
    }

    /// Another process has it. What was asked for by now is answered.
    pub(crate) fn leave(self) {
        if let Some(task) = self.task {
            task.abort();
        }
    }
}
