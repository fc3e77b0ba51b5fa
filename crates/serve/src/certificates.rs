//! Certificates in use by TLS and DTLS: replaced at run time, and watched for changed files and expiry.

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
    DtlsContext, Identity, TlsContext,
    certificates::{self, Certificate},
};

use crate::{
    certificate_expiry::CertificateExpiry, certificate_files, changes::CertificateChanges, error::ServeError,
    file_watch::FileWatch,
};

pub(crate) type Contexts = (Option<Arc<TlsContext>>, Option<Arc<DtlsContext>>);

pub(crate) struct Certificates {
    pub(crate) tls: Option<Arc<TlsContext>>,
    pub(crate) dtls: Option<Arc<DtlsContext>>,
    watch: FileWatch,
    /// Time of the last failed attempt to read the files. A file can become valid or readable later without changing.
    refused: Option<Instant>,
    told: Arc<CertificateState>,
}

/// Pause between attempts to read unusable certificates.
const RETRY: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(crate) struct CertificateState {
    pub(crate) expiry: CertificateExpiry,
    in_use: Mutex<Arc<[Certificate]>>,
    loaded: AtomicU64,
    failed: AtomicU64,
}

impl CertificateState {
    pub(crate) fn in_use(&self) -> Arc<[Certificate]> {
        Arc::clone(&self.in_use.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn show(&self, certificates: Vec<Certificate>) {
        self.expiry.show(&certificates);
        *self.in_use.lock().unwrap_or_else(PoisonError::into_inner) = certificates.into();
    }

    pub(crate) fn failed_reloads(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    pub(crate) fn reloads(&self) -> [(&'static str, u64); 2] {
        [("loaded", &self.loaded), ("failed", &self.failed)]
            .map(|(result, count)| (result, count.load(Ordering::Relaxed)))
    }
}

impl Certificates {
    pub(crate) fn new(settings: &Settings, loaded: Vec<Certificate>) -> Result<Self, ServeError> {
        let told =
            Arc::new(CertificateState { in_use: Mutex::new(loaded.into()), ..CertificateState::default() });
        let mut new = Self { tls: None, dtls: None, watch: watch(settings), refused: None, told };
        (new.tls, new.dtls) = new.contexts(settings, &new.told.in_use(), &[])?;
        Ok(new)
    }

    /// Returns the current contexts, or new ones if these settings are the first to use TLS or DTLS.
    /// Certificates with problems are left out.
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
            None if identities.is_empty() && settings.tls.acme.is_empty() => None,
            None => {
                let context = TlsContext::new(&identities)
                    .map_err(|error| error.to_string())
                    .and_then(|context| require_clients(&context, settings).map(|()| context));
                Some(Arc::new(context.map_err(ServeError::Tls)?))
            }
        };
        let dtls = match &self.dtls {
            Some(dtls) => Some(Arc::clone(dtls)),
            None if settings.dtls.listen.is_empty() => None,
            None => {
                let handshake = settings.connection_limits.first_message;
                let is_awaited = !settings.tls.acme.is_empty() && !identities.iter().any(Identity::can_dtls);
                Some(Arc::new(if is_awaited {
                    DtlsContext::without_certificate(handshake)?
                } else {
                    DtlsContext::new(&identities, handshake)?
                }))
            }
        };
        Ok((tls, dtls))
    }

    pub(crate) fn log(&self) {
        self.told.expiry.show(&self.told.in_use());
    }

    pub(crate) fn told(&self) -> Arc<CertificateState> {
        Arc::clone(&self.told)
    }

    /// Reads the certificates again if a file has changed, or a minute after a failure, and warns about
    /// approaching expiry.
    pub(crate) fn look(&mut self, settings: &Settings) {
        let has_changed = self.watch.has_changed();
        if has_changed || self.refused.is_some_and(|at| at.elapsed() >= RETRY) {
            let ReadCertificates { certificates, problems, warnings } = certificate_files::read(settings);
            if has_changed || problems.is_empty() {
                log_warnings(&warnings);
                self.take(settings, certificates, &problems, &mut Reloaded::default());
            } else {
                self.refused = Some(Instant::now());
            }
        }
        self.told.expiry.look();
    }

    /// Applies the certificates of a new configuration; `problems` concern certificates only.
    pub(crate) fn reload(
        &mut self,
        settings: &Settings,
        loaded: Vec<Certificate>,
        problems: &[Mistake],
        reloaded: &mut Reloaded,
    ) {
        self.watch = watch(settings);
        self.take(settings, loaded, problems, reloaded);
    }

    fn take(
        &mut self,
        settings: &Settings,
        loaded: Vec<Certificate>,
        problems: &[Mistake],
        reloaded: &mut Reloaded,
    ) {
        self.refused = (!problems.is_empty()).then(Instant::now);
        if !problems.is_empty() {
            let kept = "certificates not reloaded: the old ones stay in use";
            let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
            let remedy = sandbox::remedy(&lines.join("\n"));
            for line in lines.into_iter().chain(remedy).chain([kept.to_owned()]) {
                tracing::error!("{line}");
                reloaded.warnings.push(line);
            }
            self.told.failed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if let Some(Err(problem)) = self.tls.as_ref().map(|tls| require_clients(tls, settings)) {
            warn(reloaded, format!("tls.client_ca: {problem}: the old authorities stay in use"));
        }
        match (&self.tls, &loaded[..]) {
            (None, _) => {}
            (Some(_), []) if self.told.in_use().is_empty() => {}
            (Some(_), []) => {
                warn(
                    reloaded,
                    "no certificate is configured any more: the old ones stay in use until a restart",
                );
            }
            (Some(tls), _) => {
                let identities = certificates::identities(&loaded);
                tls.replace(&identities);
                // If dtls.listen has been removed, the configuration may name certificates that DTLS
                // cannot use.
                if let Some(Err(error)) = self.dtls.as_ref().map(|dtls| dtls.replace(&identities)) {
                    warn(reloaded, format!("{error}: DTLS keeps the old certificate until a restart"));
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

fn watch(settings: &Settings) -> FileWatch {
    FileWatch::new(turnpike_config::certificates::files(settings))
}

/// Requires certificates from `tls.client_ca`, if set, of TLS clients.
fn require_clients(tls: &TlsContext, settings: &Settings) -> Result<(), String> {
    let authorities = settings.tls.client_ca.as_deref().map(certificates::authorities).transpose();
    let authorities = authorities.map_err(|(file, problem)| format!("{}: {problem}", file.display()))?;
    tls.require_client_certificates(authorities).map_err(|error| error.to_string())
}
