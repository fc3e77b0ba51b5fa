//! The task that orders certificates, one name after another, so that a server has only one challenge at
//! a time.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use instant_acme::CertificateIdentifier;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use turnpike_config::{AcmeSettings, CertificateName};
use turnpike_measure::units::span;

use crate::{
    AcmeStatus, NameStatus,
    certificate_id::certificate_id,
    challenge,
    error::OrderError,
    files::{OrderFiles, OrderLock, validity},
    http::Https,
    order,
    schedule::{RenewalSchedule, RenewalStep},
    shared::{SharedFailure, SharedOrder, SharedStorage, changed, now},
    wanted::Wanted,
};

/// Maximum sleep in seconds, so that clock changes and removed files are noticed.
const LONGEST_SLEEP: u64 = 60;
const ORDER: Duration = Duration::from_secs(600);
/// Time until the next query for a renewal window if the last one failed or the CA does not offer
/// windows.
const ASK_AGAIN: Duration = Duration::from_secs(6 * 3600);

/// Maximum length of a URL in the log.
const LONGEST_URL: usize = 200;

/// Handle of the ordering task, which runs until this is dropped.
#[derive(Debug)]
pub struct Acme {
    wanted: watch::Sender<Wanted>,
    status: Arc<AcmeStatus>,
}

impl Acme {
    /// Must be called on a tokio runtime.
    #[must_use]
    pub fn start(wanted: Wanted) -> Self {
        let status = Arc::<AcmeStatus>::default();
        let (sender, receiver) = watch::channel(wanted);
        tokio::spawn(challenge::follow(receiver.clone()));
        tokio::spawn(run(receiver, Arc::clone(&status)));
        Self { wanted: sender, status }
    }

    pub fn set(&self, wanted: Wanted) {
        self.wanted.send_if_modified(|current| {
            let has_changed = !wanted.is_same(current)
                || wanted.names != current.names
                || wanted.tls.is_some() != current.tls.is_some();
            *current = wanted;
            has_changed
        });
    }

    /// Stops ordering, because this process no longer accepts new clients.
    pub fn stop(&self) {
        self.wanted.send_modify(|wanted| wanted.names.clear());
    }

    #[must_use]
    pub fn status(&self) -> Arc<AcmeStatus> {
        Arc::clone(&self.status)
    }
}

async fn run(mut receiver: watch::Receiver<Wanted>, status: Arc<AcmeStatus>) {
    let mut schedules = BTreeMap::<CertificateName, RenewalSchedule>::new();
    let mut lock = None;
    let mut before = receiver.borrow().clone();
    let mut changes = before.shared().map(|shared| shared.changes());
    loop {
        let wanted = receiver.borrow_and_update().clone();
        if !wanted.is_same(&before) {
            // After a change of settings, try again immediately.
            schedules.clear();
            lock = None;
        }
        schedules.retain(|name, _| wanted.names.contains(name));
        status.keep(|name| wanted.names.iter().any(|wanted| wanted.to_string() == name));
        before = wanted.clone();
        if let Some(changes) = &mut changes {
            changes.mark_unchanged();
        }
        let pause = match (&wanted.directory, wanted.names.is_empty()) {
            (Some(directory), false) => {
                let files = OrderFiles::new(directory.clone());
                tokio::select! {
                    pause = pass(&wanted, &files, &mut lock, &mut schedules, &status) => pause,
                    changed = receiver.changed() => {
                        if changed.is_err() {
                            return;
                        }
                        continue;
                    }
                }
            }
            _ => {
                lock = None;
                u64::MAX
            }
        };
        tokio::select! {
            () = sleep(Duration::from_secs(pause.min(LONGEST_SLEEP))) => {}
            () = changed(&mut changes) => {}
            changed = receiver.changed() => {
                if changed.is_err() {
                    return;
                }
            }
        }
    }
}

/// Does everything that is due; returns the number of seconds until the next task is due.
async fn pass(
    wanted: &Wanted,
    files: &OrderFiles,
    lock: &mut Option<OrderLock>,
    schedules: &mut BTreeMap<CertificateName, RenewalSchedule>,
    status: &AcmeStatus,
) -> u64 {
    if lock.is_none() {
        match files.lock() {
            Ok(locked) => *lock = Some(locked),
            Err(error) => {
                wanted.names.iter().for_each(|name| hold_up(name, &error, status));
                return LONGEST_SLEEP;
            }
        }
    }
    let shared = wanted.shared();
    let orders = match &shared {
        Some(shared) => match shared.orders(&wanted.names).await {
            Ok(orders) => orders,
            Err(why) => {
                let error = OrderError::Shared(why);
                wanted.names.iter().for_each(|name| hold_up(name, &error, status));
                return LONGEST_SLEEP;
            }
        },
        None => vec![SharedOrder::default(); wanted.names.len()],
    };
    let mut next = u64::MAX;
    for (name, order) in wanted.names.iter().zip(orders) {
        let schedule = schedules.entry(name.clone()).or_insert_with(|| RenewalSchedule::new(rand::random()));
        let mut one = OneName { wanted, files, name, schedule, status };
        next = next.min(one.pass(shared.as_ref(), order).await);
    }
    // Wait one second or more, so that a bug in a schedule cannot cause a busy loop.
    next.saturating_sub(now()).max(1)
}

/// Reports an error that prevents orders; repetitions of the same error are not logged.
fn hold_up(name: &CertificateName, error: &OrderError, status: &AcmeStatus) {
    let text = error.to_string();
    if status.hold_up(name.to_string(), &text, now() + LONGEST_SLEEP) {
        tracing::warn!("{name}: {text}");
    }
}

struct OneName<'a> {
    wanted: &'a Wanted,
    files: &'a OrderFiles,
    name: &'a CertificateName,
    schedule: &'a mut RenewalSchedule,
    status: &'a AcmeStatus,
}

impl OneName<'_> {
    /// Does everything due for this name; returns the Unix second at which the next task is due.
    async fn pass(&mut self, shared: Option<&SharedStorage>, order: SharedOrder) -> u64 {
        self.status.free(&self.name.to_string());
        if let Some(shared) = shared {
            self.take(shared, &order).await;
        }
        let mut id = self.look();
        if self.schedule.step(now()) == RenewalStep::AskWindow {
            self.ask(id.as_ref()).await;
        }
        let is_due = self.schedule.step(now()) == RenewalStep::Order;
        match shared {
            None if is_due => _ = self.attempt(id.as_ref()).await,
            Some(shared) if is_due || self.is_ahead_of(&order) => {
                match self.reserved(shared, &mut id).await {
                    Ok(true) => {}
                    Ok(false) => return now() + LONGEST_SLEEP,
                    Err(why) => {
                        hold_up(self.name, &OrderError::Shared(why), self.status);
                        return now() + LONGEST_SLEEP;
                    }
                }
            }
            _ => {}
        }
        let due = match self.schedule.step(now()) {
            RenewalStep::Wait(until) => until,
            RenewalStep::Order | RenewalStep::AskWindow => now(),
        };
        if self.schedule.failures() == 0 {
            let next = self.schedule.renewal().unwrap_or(due);
            self.status.show(self.name.to_string(), NameStatus { next, ..NameStatus::default() });
        }
        due
    }

    /// Reads the certificate file, because a previous process, another server or the operator may have
    /// changed it.
    fn look(&mut self) -> Option<CertificateIdentifier<'static>> {
        let identity = self.files.certificate(self.name);
        let is_foreign = self.files.is_foreign(self.name, &self.wanted.settings.directory);
        self.schedule.found(identity.as_ref().map(validity), is_foreign);
        identity.as_ref().filter(|_| !is_foreign).and_then(certificate_id)
    }

    /// Takes over another server's newer certificate, and its backoff.
    async fn take(&mut self, shared: &SharedStorage, order: &SharedOrder) {
        let name = self.name;
        let directory = &self.wanted.settings.directory;
        let own = self.files.certificate(name).map(|identity| validity(&identity));
        let is_foreign = self.files.is_foreign(name, directory);
        if let Some(theirs) = order.certificate
            && own.is_none_or(|own| is_foreign || own.first < theirs.first)
            && let Ok(Some(text)) = shared.certificate(name).await
        {
            match self.files.put_certificate_text(name, &text) {
                Ok(validity) => {
                    let left = span(validity.last.saturating_sub(now()));
                    tracing::info!(
                        "took over the certificate for {name} from another server of the fleet: valid for {left}"
                    );
                }
                Err(error) => {
                    tracing::error!(
                        "cannot use the certificate for {name} from another server of the fleet: {error}"
                    );
                }
            }
        }
        self.look();
        if let Some(SharedFailure { server, at, next, failures, error }) = &order.failure
            && self.schedule.failed_elsewhere(now(), *at, *next, *failures)
        {
            let error = Some(format!("{server}: {error}"));
            let failures = self.schedule.failures();
            let status = NameStatus { next: *next, failures, error, held_up: None };
            self.status.show(name.to_string(), status);
        }
    }

    /// True if this server's certificate is newer than the one in the storage, for example because the
    /// storage has lost it.
    fn is_ahead_of(&self, order: &SharedOrder) -> bool {
        let own = self.schedule.certificate();
        own.is_some_and(|own| order.certificate.is_none_or(|theirs| theirs.first < own.first))
            && !self.schedule.is_foreign()
    }

    /// Orders the certificate and publishes the result. Returns false if another server has the
    /// reservation.
    async fn reserved(
        &mut self,
        shared: &SharedStorage,
        id: &mut Option<CertificateIdentifier<'static>>,
    ) -> Result<bool, String> {
        if !shared.reserve().await? {
            return Ok(false);
        }
        let result = async {
            // Another server may have finished an order just before this reservation.
            let names = std::slice::from_ref(self.name);
            let order = shared.orders(names).await?.pop().unwrap_or_default();
            self.take(shared, &order).await;
            *id = self.look();
            let failure = match self.schedule.step(now()) {
                RenewalStep::Order => self.attempt(id.as_ref()).await,
                _ if self.is_ahead_of(&order) => order.failure,
                _ => return Ok(()),
            };
            let failure =
                failure.map(|failure| SharedFailure { server: shared.server().to_owned(), ..failure });
            let certificate = self.schedule.certificate().filter(|_| !self.schedule.is_foreign());
            let text = certificate.and_then(|_| self.files.certificate_text(self.name));
            shared.put_order(self.name, &SharedOrder { certificate, failure }, text).await
        };
        let result = result.await;
        shared.release().await;
        result.map(|()| true)
    }

    async fn ask(&mut self, id: Option<&CertificateIdentifier<'static>>) {
        let asked = async {
            let id = id?;
            let https = Https::new(self.wanted.settings.authority.clone());
            let account = order::existing_account(self.wanted, self.files, &https).await.ok()??;
            account.renewal_info(id).await.ok()
        };
        match asked.await {
            Some((info, again)) => {
                let unix = |time: i64| u64::try_from(time).unwrap_or(0);
                let window = info.suggested_window;
                let window = (unix(window.start.unix_timestamp()), unix(window.end.unix_timestamp()));
                self.schedule.suggested(now(), window, again);
                if let Some(url) = info.explanation_url {
                    let url: String = url.chars().filter(|one| !one.is_control()).take(LONGEST_URL).collect();
                    tracing::info!("the authority suggests a different renewal time: {url}");
                }
            }
            None => self.schedule.ask_again(now(), ASK_AGAIN),
        }
    }

    async fn attempt(&mut self, id: Option<&CertificateIdentifier<'static>>) -> Option<SharedFailure> {
        let Self { wanted, files, name, schedule, status } = self;
        let AcmeSettings { directory, authority, .. } = &wanted.settings;
        let (_, challenge) = challenge::kind(wanted.challenge);
        if schedule.failures() == 0 {
            tracing::info!("ordering a certificate for {name} from {directory} with {challenge}");
        }
        let https = Https::new(authority.clone());
        let replaced = id.filter(|_| schedule.has_window());
        let ordered = timeout(ORDER, order::order(wanted, files, &https, name, replaced)).await;
        match ordered.unwrap_or(Err(OrderError::Timeout(ORDER.as_secs()))) {
            Ok(validity) => {
                schedule.issued(now(), validity);
                let next = schedule.renewal().unwrap_or(0);
                let left = span(validity.last.saturating_sub(now()));
                let until = span(next.saturating_sub(now()));
                tracing::info!("new certificate for {name}: valid for {left}, renewal in {until}");
                status.count(true);
                None
            }
            Err(error) => {
                let at = now();
                let next = schedule.failed(at, https.pause(), rand::random());
                let wait = span(next.saturating_sub(at));
                let current = match files.certificate(name).map(|identity| identity.not_after()) {
                    None => "TLS and DTLS for this name start once the certificate is issued".to_owned(),
                    Some(end) if end < at => "the old certificate has expired".to_owned(),
                    Some(end) => {
                        format!("the old certificate stays in use, for {} at most", span(end - at))
                    }
                };
                tracing::error!("no new certificate for {name}: {error}; next attempt in {wait}; {current}");
                let (failures, error) = (schedule.failures(), error.to_string());
                status.count(false);
                let shown = NameStatus { next, failures, error: Some(error.clone()), held_up: None };
                status.show(name.to_string(), shown);
                Some(SharedFailure { server: String::new(), at, next, failures, error })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, net::Ipv4Addr};

    use http_body_util::Full;
    use hyper::{
        Request, Response,
        body::{Bytes, Incoming},
        server::conn::http1,
        service::service_fn,
    };
    use hyper_util::rt::TokioIo;
    use rustls::{
        ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    };
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;
    use turnpike_config::{Settings, StateDir};
    use turnpike_testkit::{Dir, certificates::Certificate};

    use super::*;

    /// A CA that responds to every request for a new account with this status and problem, and with
    /// Retry-After 7200.
    async fn refusing_authority(certificate: &Certificate, status: u16, kind: &'static str) -> String {
        let chain = vec![CertificateDer::from_pem_slice(certificate.pem.as_bytes()).expect("PEM")];
        let key = PrivateKeyDer::from_pem_slice(certificate.key.as_bytes()).expect("PEM");
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .expect("usable");
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let base = format!("https://{}", listener.local_addr().expect("bound"));
        let directory = format!("{base}/dir");
        let answer = move |request: Request<Incoming>| {
            let response = Response::builder().header("replay-nonce", "abc");
            let (response, body) = match request.uri().path() {
                "/dir" => {
                    let url = |path: &str| format!("{base}/{path}");
                    let urls = serde_json::json!({
                        "newNonce": url("nonce"), "newAccount": url("account"), "newOrder": url("order"),
                        "revokeCert": url("revoke"), "keyChange": url("key"),
                    });
                    (response, urls.to_string())
                }
                "/nonce" => (response, String::new()),
                _ => {
                    let kind = format!("urn:ietf:params:acme:error:{kind}");
                    let problem = serde_json::json!({ "type": kind, "detail": "too many new accounts", "status": status });
                    (response.status(status).header("retry-after", "7200"), problem.to_string())
                }
            };
            let response = response.body(Full::new(Bytes::from(body))).expect("a response");
            async move { Ok::<_, Infallible>(response) }
        };
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let Ok(stream) = acceptor.accept(stream).await else { continue };
                let service = service_fn(answer.clone());
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        directory
    }

    #[tokio::test]
    async fn refusing_authority_gets_no_request_until_its_retry_after_has_passed() {
        for (status, kind) in [(429, "rateLimited"), (503, "serverInternal")] {
            let certificate = Certificate::new(&["127.0.0.1"]);
            let dir = Dir::new();
            let mut settings = Settings::default();
            settings.tls.acme = vec!["turn.example.org".parse().expect("a name")];
            settings.acme.directory = refusing_authority(&certificate, status, kind).await;
            settings.acme.authority = Some(dir.file("ca.pem", &certificate.pem));
            settings.store.state = StateDir::At(dir.path().join("state"));
            let before = now();
            let acme = Acme::start(Wanted::new(&settings, None, None));
            let failed = async {
                loop {
                    let names = acme.status().names();
                    match names.into_values().find(|name| name.failures > 0) {
                        Some(failed) => break failed,
                        None => sleep(Duration::from_millis(10)).await,
                    }
                }
            };
            let failed = timeout(Duration::from_secs(20), failed).await.expect("the order fails");
            let error = failed.error.expect("with a reason");
            assert!(error.contains(kind) && error.contains("too many new accounts"), "{error}");
            assert!((before + 7200..=now() + 7200).contains(&failed.next), "{} s", failed.next - before);
        }
    }
}
