//! Names that need certificates, and the settings for ordering them.

use std::{path::PathBuf, sync::Arc};

use turnpike_config::{
    AcmeChallenge, AcmeSettings, CertificateName, Settings, certificates::order_directory,
};
use turnpike_relay::TlsContext;

use crate::shared::{SharedOrders, SharedStorage};

#[derive(Clone, Debug)]
pub struct Wanted {
    pub(crate) names: Vec<CertificateName>,
    pub(crate) settings: AcmeSettings,
    pub(crate) challenge: AcmeChallenge,
    pub(crate) directory: Option<PathBuf>,
    /// Presents challenges; `None` without TLS.
    pub(crate) tls: Option<Arc<TlsContext>>,
    /// Storage shared with other servers that order the same certificates; `None` if this server orders
    /// alone.
    storage: Option<Arc<dyn SharedOrders>>,
}

impl Wanted {
    #[must_use]
    pub fn new(
        settings: &Settings,
        tls: Option<Arc<TlsContext>>,
        storage: Option<Arc<dyn SharedOrders>>,
    ) -> Self {
        Self {
            names: settings.tls.acme.clone(),
            settings: settings.acme.clone(),
            challenge: settings.acme_challenge(),
            directory: order_directory(settings),
            tls,
            storage,
        }
    }

    pub(crate) fn shared(&self) -> Option<SharedStorage> {
        let storage = Arc::clone(self.storage.as_ref()?);
        Some(SharedStorage::new(storage, &self.settings.directory))
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.settings == other.settings
            && self.challenge == other.challenge
            && self.directory == other.directory
    }
}
