//! Listeners for applications that request credentials.

use std::{net::SocketAddr, sync::Arc};

use turnpike_config::Settings;
use turnpike_net::BindError;

use crate::{
    application_access::ApplicationGate,
    changes::Changes,
    connections::{self, ConnectionLimits},
    http_listener::HttpListener,
    listen::{BoundListener, LentSocket, ListenError, Serving, take_lent},
    program::Owner,
    routes,
    tls::ListenerTls,
};

/// Bound listeners that do not answer requests yet.
pub struct Applications {
    bound: Vec<BoundListener>,
    tls: Option<Arc<ListenerTls>>,
}

impl Applications {
    /// Listens on the configured addresses, if any. Must be called within a runtime. Sockets in `lent`
    /// come from another process.
    pub fn listen(settings: &Settings, mut lent: Vec<LentSocket>) -> Result<Self, ListenError> {
        let addresses = &settings.credentials.listen;
        let certificate = settings.credentials_certificate().filter(|_| !addresses.is_empty());
        let tls = certificate
            .map(ListenerTls::for_applications)
            .transpose()
            .map_err(ListenError::ApplicationsTls)?;
        let tls = tls.map(Arc::new);
        let bind = |address: &SocketAddr| {
            let bound = BoundListener::tcp(*address, tls.as_ref(), take_lent(&mut lent, address));
            bound.map_err(|source| {
                let place = format_args!("tcp {address}");
                ListenError::Applications(BindError::ip(place, source, "in credentials.listen"))
            })
        };
        let bound = addresses.iter().map(bind).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { bound, tls })
    }

    /// Addresses with the actual ports.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.bound.iter().filter_map(BoundListener::address).collect()
    }

    /// Logs the addresses.
    pub fn say_where(&self) {
        for BoundListener { listener, shown, .. } in &self.bound {
            let how = if matches!(listener, HttpListener::Tcp(_, Some(_))) { "" } else { ", without TLS" };
            tracing::info!("applications with a key get credentials on {shown}{how}");
        }
    }

    #[must_use = "its sockets may have to be passed to another process"]
    pub fn serve(self, program: Arc<dyn Owner>) -> Serving {
        let limits = ConnectionLimits::of_one_for_applications(self.bound.len());
        let router = routes::for_applications(Arc::clone(&program), ApplicationGate::new(program, self.tls));
        Serving::new(self.bound, &router, limits, &connections::APPLICATIONS, Changes::default(), None)
    }
}
