//! The certificates in use: shown by TLS and DTLS, exchanged while clients are served, watched for changed files and for their end.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use turnpike_config::{
    Certificate, Mistake, Settings,
    certificates::{self, Found},
};
use turnpike_relay::{DtlsContext, TlsContext};

use crate::{
    certificate_expiry::CertificateExpiry, certificate_watch::CertificateWatch, changes,
    control::say_warnings, error::DaemonError,
};

/// Of TLS and DTLS.
pub(crate) type Contexts = (Option<Arc<TlsContext>>, Option<Arc<DtlsContext>>);

/// Of the control thread.
pub(crate) struct Certificates {
    pub(crate) tls: Option<Arc<TlsContext>>,
    pub(crate) dtls: Option<Arc<DtlsContext>>,
    in_use: Vec<Certificate>,
    watch: CertificateWatch,
    told: Arc<Told>,
}

/// What the metrics tell of them.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) expiry: CertificateExpiry,
    loaded: AtomicU64,
    failed: AtomicU64,
}

impl Told {
    /// How often they were read again, by result.
    pub(crate) fn reloads(&self) -> [(&'static str, u64); 2] {
        [("loaded", &self.loaded), ("failed", &self.failed)]
            .map(|(result, count)| (result, count.load(Ordering::Relaxed)))
    }
}

impl Certificates {
    /// What TLS and DTLS show from the start.
    pub(crate) fn new(settings: &Settings, loaded: Vec<Certificate>) -> Result<Self, DaemonError> {
        let (watch, told) = (CertificateWatch::new(settings), Arc::<Told>::default());
        let mut new = Self { tls: None, dtls: None, in_use: loaded, watch, told };
        (new.tls, new.dtls) = new.contexts(settings, &new.in_use, &[])?;
        Ok(new)
    }

    /// What TLS and DTLS have, or are to have where they begin with these settings. Certificates with problems are nobody's.
    ///
    /// # Errors
    /// These certificates cannot be used.
    pub(crate) fn contexts(
        &self,
        settings: &Settings,
        loaded: &[Certificate],
        problems: &[Mistake],
    ) -> Result<Contexts, DaemonError> {
        let usable = if problems.is_empty() { loaded } else { &self.in_use };
        let identities = certificates::identities(usable);
        let tls = match &self.tls {
            Some(tls) => Some(Arc::clone(tls)),
            None if identities.is_empty() => None,
            None => {
                let context = TlsContext::new(&identities);
                Some(Arc::new(context.map_err(|error| DaemonError::Tls(error.to_string()))?))
            }
        };
        let dtls = match &self.dtls {
            Some(dtls) => Some(Arc::clone(dtls)),
            None if settings.dtls_listen.is_empty() => None,
            None => {
                let handshake = Duration::from_secs(u64::from(settings.first_message_timeout));
                Some(Arc::new(DtlsContext::new(&identities, handshake)?))
            }
        };
        Ok((tls, dtls))
    }

    /// Says which they are, and has the metrics tell it.
    pub(crate) fn say(&self) {
        self.told.expiry.show(&self.in_use);
    }

    pub(crate) fn told(&self) -> Arc<Told> {
        Arc::clone(&self.told)
    }

    /// Reads them again if one of their files has changed, and warns of ends that have come nearer.
    pub(crate) fn look(&mut self, settings: &Settings) {
        if self.watch.has_changed() {
            let Found { certificates, problems, warnings } = certificates::load(settings);
            say_warnings(&warnings);
            self.take(certificates, &problems);
        }
        self.told.expiry.look();
    }

    /// As a new configuration names them; its `problems` are those of certificates.
    pub(crate) fn reload(&mut self, settings: &Settings, loaded: Vec<Certificate>, problems: &[Mistake]) {
        self.watch = CertificateWatch::new(settings);
        self.take(loaded, problems);
    }

    /// Shows them, if all of them can be used.
    fn take(&mut self, loaded: Vec<Certificate>, problems: &[Mistake]) {
        if !problems.is_empty() {
            for problem in problems {
                tracing::error!("{problem}");
            }
            tracing::error!("certificates not reloaded: the old ones stay in force");
            self.told.failed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        match (&self.tls, &loaded[..]) {
            (None, _) => {}
            (Some(_), []) => {
                tracing::warn!("no certificate is configured any more: the old ones stay in force");
            }
            (Some(tls), _) => {
                let identities = certificates::identities(&loaded);
                tls.replace(&identities);
                // A file that no longer has dtls.listen may name certificates that DTLS cannot use.
                if let Some(Err(error)) = self.dtls.as_ref().map(|dtls| dtls.replace(&identities)) {
                    tracing::warn!("{error}: DTLS keeps the old one until a restart");
                }
                self.told.expiry.show(&loaded);
                self.told.loaded.fetch_add(1, Ordering::Relaxed);
                changes::say_certificates(&self.in_use, &loaded);
                self.in_use = loaded;
            }
        }
    }
}
