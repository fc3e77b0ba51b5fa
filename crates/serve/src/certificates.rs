//! The certificates in use: shown by TLS and DTLS, exchanged while clients are served, watched for changed files and for their end.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use turnpike_api::Reloaded;
use turnpike_config::{Mistake, Settings, certificates::ReadCertificates};
use turnpike_process::{log_warnings, sandbox, warn};
use turnpike_relay::{
    DtlsContext, TlsContext,
    certificates::{self, Certificate},
};

use crate::{
    certificate_expiry::CertificateExpiry, certificate_files, certificate_watch::CertificateWatch,
    changes::CertificateChanges, error::ServeError,
};

/// Of TLS and DTLS.
pub(crate) type Contexts = (Option<Arc<TlsContext>>, Option<Arc<DtlsContext>>);

/// Of the control thread.
pub(crate) struct Certificates {
    pub(crate) tls: Option<Arc<TlsContext>>,
    pub(crate) dtls: Option<Arc<DtlsContext>>,
    watch: CertificateWatch,
    /// Time of the last attempt to read certificates that could not be used: one may become valid, or readable, while its file stays.
    refused: Option<Instant>,
    told: Arc<Told>,
}

/// Pause between attempts to read certificates that could not be used.
const RETRY: Duration = Duration::from_secs(60);

/// What others tell of them.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) expiry: CertificateExpiry,
    in_use: Mutex<Arc<[Certificate]>>,
    loaded: AtomicU64,
    failed: AtomicU64,
}

impl Told {
    /// Those that clients are shown.
    pub(crate) fn in_use(&self) -> Arc<[Certificate]> {
        Arc::clone(&self.in_use.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Clients are shown these from now on.
    fn show(&self, certificates: Vec<Certificate>) {
        self.expiry.show(&certificates);
        *self.in_use.lock().unwrap_or_else(PoisonError::into_inner) = certificates.into();
    }

    /// How often they were read again, by result.
    pub(crate) fn reloads(&self) -> [(&'static str, u64); 2] {
        [("loaded", &self.loaded), ("failed", &self.failed)]
            .map(|(result, count)| (result, count.load(Ordering::Relaxed)))
    }
}

impl Certificates {
    /// What TLS and DTLS show from the start.
    pub(crate) fn new(settings: &Settings, loaded: Vec<Certificate>) -> Result<Self, ServeError> {
        let told = Arc::new(Told { in_use: Mutex::new(loaded.into()), ..Told::default() });
        let mut new =
            Self { tls: None, dtls: None, watch: CertificateWatch::new(settings), refused: None, told };
        (new.tls, new.dtls) = new.contexts(settings, &new.told.in_use(), &[])?;
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
    ) -> Result<Contexts, ServeError> {
        let in_use = self.told.in_use();
        let identities = certificates::identities(if problems.is_empty() { loaded } else { &in_use });
        let tls = match &self.tls {
            Some(tls) => Some(Arc::clone(tls)),
            None if identities.is_empty() => None,
            None => {
                let context = TlsContext::new(&identities);
                Some(Arc::new(context.map_err(|error| ServeError::Tls(error.to_string()))?))
            }
        };
        let dtls = match &self.dtls {
            Some(dtls) => Some(Arc::clone(dtls)),
            None if settings.dtls_listen.is_empty() => None,
            None => {
                let handshake = settings.connection_limits.first_message;
                Some(Arc::new(DtlsContext::new(&identities, handshake)?))
            }
        };
        Ok((tls, dtls))
    }

    /// Logs them, and shows them in the metrics.
    pub(crate) fn log(&self) {
        self.told.expiry.show(&self.told.in_use());
    }

    pub(crate) fn told(&self) -> Arc<Told> {
        Arc::clone(&self.told)
    }

    /// Reads them again if one of their files has changed, or could not be used a while ago, and warns of ends that have come nearer.
    pub(crate) fn look(&mut self, settings: &Settings) {
        let has_changed = self.watch.has_changed();
        if has_changed || self.refused.is_some_and(|at| at.elapsed() >= RETRY) {
            let ReadCertificates { certificates, problems, warnings } = certificate_files::read(settings);
            if has_changed || problems.is_empty() {
                log_warnings(&warnings);
                self.take(certificates, &problems, &mut Reloaded::default());
            } else {
                self.refused = Some(Instant::now());
            }
        }
        self.told.expiry.look();
    }

    /// As a new configuration names them; its `problems` are those of certificates.
    pub(crate) fn reload(
        &mut self,
        settings: &Settings,
        loaded: Vec<Certificate>,
        problems: &[Mistake],
        reloaded: &mut Reloaded,
    ) {
        self.watch = CertificateWatch::new(settings);
        self.take(loaded, problems, reloaded);
    }

    /// Shows them, if all of them can be used.
    fn take(&mut self, loaded: Vec<Certificate>, problems: &[Mistake], reloaded: &mut Reloaded) {
        self.refused = (!problems.is_empty()).then(Instant::now);
        if !problems.is_empty() {
            let kept = "certificates not reloaded: the old ones stay in force";
            let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
            let remedy = sandbox::remedy(&lines.join("\n"));
            for line in lines.into_iter().chain(remedy).chain([kept.to_owned()]) {
                tracing::error!("{line}");
                reloaded.warnings.push(line);
            }
            self.told.failed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        match (&self.tls, &loaded[..]) {
            (None, _) => {}
            (Some(_), []) => {
                warn(reloaded, "no certificate is configured any more: the old ones stay in force");
            }
            (Some(tls), _) => {
                let identities = certificates::identities(&loaded);
                tls.replace(&identities);
                // A file that no longer has dtls.listen may name certificates that DTLS cannot use.
                if let Some(Err(error)) = self.dtls.as_ref().map(|dtls| dtls.replace(&identities)) {
                    warn(reloaded, format!("{error}: DTLS keeps the old one until a restart"));
                }
                self.told.loaded.fetch_add(1, Ordering::Relaxed);
                let changes = CertificateChanges::new(&self.told.in_use(), &loaded);
                self.told.show(loaded);
                changes.log();
                reloaded.changed.extend(changes.lines());
            }
        }
    }
}
