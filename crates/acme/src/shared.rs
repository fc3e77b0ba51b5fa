//! Several servers that need certificates for the same names: one orders, and the others use its certificate, respond
//! to its challenge and observe its backoff. A server writes only while it holds the reservation.

use std::{
    fmt,
    future::{Future, pending},
    pin::Pin,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{sync::watch, time::sleep};
use turnpike_config::CertificateName;
use zeroize::Zeroizing;

use crate::{error::OrderError, proof::ChallengeResponse, schedule::Validity};

/// JSON or PEM, zeroized on drop.
pub type SecretText = Zeroizing<Vec<u8>>;

pub type Later<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Duration of a reservation: longer than an order and the subsequent writes. If the server exits during an order, the
/// others have to wait this long.
const RESERVED: Duration = Duration::from_secs(700);
/// Time until all servers that receive notifications present a challenge.
const SPREAD: Duration = Duration::from_secs(3);

/// Storage shared by servers that order the same certificates. Values are confidential, and only these servers can
/// write them.
pub trait SharedOrders: fmt::Debug + Send + Sync {
    /// Name of this server.
    fn server(&self) -> &str;
    /// Reserves ordering for this server, or extends its reservation; returns false if another server has a
    /// reservation.
    fn reserve(&self, duration: Duration) -> Later<'_, Result<bool, String>>;
    fn release(&self) -> Later<'_, ()>;
    /// Returns the values of these fields in the given order.
    fn read(&self, fields: Vec<String>) -> Later<'_, Result<Vec<Option<SecretText>>, String>>;
    /// Writes either all fields or none, and notifies the other servers.
    fn write(&self, fields: Vec<(String, SecretText)>) -> Later<'_, Result<(), String>>;
    /// Receiver that is notified whenever another server has written.
    fn changes(&self) -> watch::Receiver<()>;
}

/// Result of the last order for a name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SharedOrder {
    pub(crate) certificate: Option<Validity>,
    pub(crate) failure: Option<SharedFailure>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SharedFailure {
    pub(crate) server: String,
    /// Unix seconds.
    pub(crate) at: u64,
    pub(crate) next: u64,
    pub(crate) failures: u32,
    pub(crate) error: String,
}

/// Challenge of the order in progress; there is at most one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SharedChallenge {
    pub(crate) server: String,
    pub(crate) name: String,
    pub(crate) proof: ChallengeResponse,
    /// Unix second from which the challenge is ignored, in case its server exits before removing it.
    pub(crate) until: u64,
}

/// The storage, as used for orders from one CA.
#[derive(Clone, Debug)]
pub(crate) struct SharedStorage {
    storage: Arc<dyn SharedOrders>,
    directory: String,
}

impl SharedStorage {
    pub(crate) fn new(storage: Arc<dyn SharedOrders>, directory: &str) -> Self {
        Self { storage, directory: directory.to_owned() }
    }

    pub(crate) fn server(&self) -> &str {
        self.storage.server()
    }

    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.storage.changes()
    }

    pub(crate) async fn reserve(&self) -> Result<bool, String> {
        self.storage.reserve(RESERVED).await
    }

    pub(crate) async fn release(&self) {
        self.storage.release().await;
    }

    /// Results of the last orders for these names; values that cannot be parsed count as missing.
    pub(crate) async fn orders(&self, names: &[CertificateName]) -> Result<Vec<SharedOrder>, String> {
        let fields = names.iter().map(|name| self.field("order", &name.to_string())).collect();
        let found = self.storage.read(fields).await?;
        Ok(found.iter().map(|value| parsed(value.as_ref()).unwrap_or_default()).collect())
    }

    pub(crate) async fn certificate(&self, name: &CertificateName) -> Result<Option<SecretText>, String> {
        self.read(self.field("certificate", &name.to_string())).await
    }

    /// Publishes an issued certificate, or the reason for a failure.
    pub(crate) async fn put_order(
        &self,
        name: &CertificateName,
        order: &SharedOrder,
        certificate: Option<SecretText>,
    ) -> Result<(), String> {
        let name = name.to_string();
        let mut fields = vec![(self.field("order", &name), json(order))];
        fields.extend(certificate.map(|pem| (self.field("certificate", &name), pem)));
        self.storage.write(fields).await
    }

    pub(crate) async fn account(&self) -> Result<Option<SecretText>, String> {
        let account = self.read(self.field("account", "")).await?;
        Ok(account.filter(|json| !json.is_empty()))
    }

    /// Stores the account; empty `json` removes it.
    pub(crate) async fn put_account(&self, json: &[u8]) -> Result<(), String> {
        let json = Zeroizing::new(json.to_vec());
        self.storage.write(vec![(self.field("account", ""), json)]).await
    }

    /// Publishes the challenge, and returns after the other servers have had time to present it.
    pub(crate) async fn put_challenge(
        &self,
        name: &CertificateName,
        proof: &ChallengeResponse,
    ) -> Result<(), OrderError> {
        let challenge = SharedChallenge {
            server: self.server().to_owned(),
            name: name.to_string(),
            proof: proof.clone(),
            until: now() + RESERVED.as_secs(),
        };
        let field = self.field("challenge", "");
        self.storage.write(vec![(field, json(&challenge))]).await.map_err(OrderError::Shared)?;
        sleep(SPREAD).await;
        Ok(())
    }

    pub(crate) async fn remove_challenge(&self) {
        if let Err(why) = self.storage.write(vec![(self.field("challenge", ""), Zeroizing::default())]).await
        {
            tracing::debug!(
                "{why}; the other servers may present the challenge for another {} s",
                RESERVED.as_secs()
            );
        }
    }

    /// Challenge published by another server, if still valid.
    pub(crate) async fn challenge(&self) -> Result<Option<SharedChallenge>, String> {
        let found = self.read(self.field("challenge", "")).await?;
        let challenge = parsed::<SharedChallenge>(found.as_ref());
        Ok(challenge.filter(|challenge| challenge.server != self.server() && now() < challenge.until))
    }

    async fn read(&self, field: String) -> Result<Option<SecretText>, String> {
        Ok(self.storage.read(vec![field]).await?.pop().flatten())
    }

    fn field(&self, kind: &str, name: &str) -> String {
        format!("{kind} {} {name}", self.directory)
    }
}

fn json(value: &impl Serialize) -> SecretText {
    Zeroizing::new(serde_json::to_vec(value).unwrap_or_default())
}

fn parsed<T: DeserializeOwned>(value: Option<&SecretText>) -> Option<T> {
    serde_json::from_slice(value?).ok()
}

/// Waits until another server has written; waits forever if there is no shared storage.
pub(crate) async fn changed(changes: &mut Option<watch::Receiver<()>>) {
    let is_open = match changes {
        Some(changes) => changes.changed().await.is_ok(),
        None => false,
    };
    if !is_open {
        pending::<()>().await;
    }
}

pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        io::{Read as _, Write as _},
        net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
        path::Path,
        sync::Mutex,
    };

    use turnpike_config::{AcmeChallenge, Settings, StateDir};
    use turnpike_testkit::{Dir, certificates::Certificate};

    use super::*;
    use crate::{AcmeStatus, files::OrderFiles, task::Acme, wanted::Wanted};

    const NAME: &str = "turn.example.org";

    #[derive(Debug, Default)]
    struct Kept {
        fields: Mutex<BTreeMap<String, Vec<u8>>>,
        owner: Mutex<Option<String>>,
        changes: watch::Sender<()>,
    }

    #[derive(Clone, Debug)]
    struct Memory(&'static str, Arc<Kept>);

    impl SharedOrders for Memory {
        fn server(&self) -> &str {
            self.0
        }

        fn reserve(&self, _: Duration) -> Later<'_, Result<bool, String>> {
            let mut owner = self.1.owner.lock().expect("no panic");
            let is_ours = owner.get_or_insert_with(|| self.0.to_owned()) == self.0;
            Box::pin(async move { Ok(is_ours) })
        }

        fn release(&self) -> Later<'_, ()> {
            *self.1.owner.lock().expect("no panic") = None;
            Box::pin(async {})
        }

        fn read(&self, fields: Vec<String>) -> Later<'_, Result<Vec<Option<SecretText>>, String>> {
            let kept = self.1.fields.lock().expect("no panic");
            let found = fields.iter().map(|field| kept.get(field).cloned().map(Zeroizing::new)).collect();
            Box::pin(async { Ok(found) })
        }

        fn write(&self, fields: Vec<(String, SecretText)>) -> Later<'_, Result<(), String>> {
            let mut kept = self.1.fields.lock().expect("no panic");
            fields.into_iter().for_each(|(field, value)| _ = kept.insert(field, value.to_vec()));
            self.1.changes.send_replace(());
            Box::pin(async { Ok(()) })
        }

        fn changes(&self) -> watch::Receiver<()> {
            self.1.changes.subscribe()
        }
    }

    fn free_address() -> SocketAddr {
        let probe = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        probe.local_addr().expect("bound")
    }

    /// Settings with a CA that is down.
    fn settings(state: &Path) -> Settings {
        let mut settings = Settings::default();
        settings.tls.acme = vec![NAME.parse().expect("a name")];
        settings.acme.directory = "https://127.0.0.1:1/dir".to_owned();
        settings.acme.challenge = AcmeChallenge::Http;
        settings.store.state = StateDir::At(state.to_owned());
        settings
    }

    fn start(settings: &Settings, storage: &Memory) -> Acme {
        Acme::start(Wanted::new(settings, None, Some(Arc::new(storage.clone()))))
    }

    fn shared(storage: &Memory, settings: &Settings) -> SharedStorage {
        SharedStorage::new(Arc::new(storage.clone()), &settings.acme.directory)
    }

    async fn eventually(what: &str, is_so: impl AsyncFn() -> bool) {
        for _ in 0..2000 {
            if is_so().await {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("{what}: not within 20 s");
    }

    fn failures(status: &AcmeStatus) -> Option<(u32, String)> {
        let status = status.names().remove(NAME)?;
        Some((status.failures, status.error?))
    }

    fn failed(acme: &Acme) -> u64 {
        acme.status().orders()[1].1
    }

    #[tokio::test]
    async fn certificate_is_shared_through_the_storage_and_restored_if_lost() {
        let (dir, storage) = (Dir::new(), Memory("a", Arc::default()));
        let name: CertificateName = NAME.parse().expect("a name");
        let states = ["a", "b", "c"].map(|server| dir.path().join(server));
        let files = states.each_ref().map(|state| OrderFiles::new(state.join("acme")));
        let all = states.each_ref().map(|state| settings(state));
        drop(files[0].lock().expect("the directory is ours"));
        let made = Certificate::new(&[NAME]);
        let directory = &all[0].acme.directory;
        files[0].put_certificate(&name, directory, &made.pem, &made.key).expect("usable");
        let text = files[0].certificate_text(&name);
        let a = start(&all[0], &storage);
        let from = shared(&storage, &all[0]);
        eventually("the copy is stored", async || from.certificate(&name).await == Ok(text.clone())).await;
        let b = start(&all[1], &Memory("b", Arc::clone(&storage.1)));
        eventually("another server has a copy", async || files[1].certificate_text(&name) == text).await;
        drop(a);
        storage.1.fields.lock().expect("no panic").clear();
        storage.1.changes.send_replace(());
        eventually("the copy is stored again", async || from.certificate(&name).await == Ok(text.clone()))
            .await;
        let c = start(&all[2], &Memory("c", Arc::clone(&storage.1)));
        eventually("a third server has a copy", async || files[2].certificate_text(&name) == text).await;
        assert_eq!((failed(&b), failed(&c)), (0, 0), "nothing was ordered");
        eventually("the reservation ends", async || storage.1.owner.lock().expect("no panic").is_none())
            .await;
    }

    #[tokio::test]
    async fn one_server_orders_and_the_others_observe_its_backoff() {
        let (dir, storage) = (Dir::new(), Memory("a", Arc::default()));
        let all = ["a", "b"].map(|server| settings(&dir.path().join(server)));
        *storage.1.owner.lock().expect("no panic") = Some("c".to_owned());
        let a = start(&all[0], &storage);
        sleep(Duration::from_millis(200)).await;
        assert_eq!(failed(&a), 0, "another server orders");
        *storage.1.owner.lock().expect("no panic") = None;
        storage.1.changes.send_replace(());
        eventually("the order fails", async || failed(&a) == 1).await;
        let b = start(&all[1], &Memory("b", Arc::clone(&storage.1)));
        eventually("the other server learns of it", async || failures(&b.status()).is_some()).await;
        let (count, why) = failures(&b.status()).expect("the order failed");
        assert!(count == 1 && why.starts_with("a: ") && why.contains("cannot be reached"), "{why}");
        for _ in 0..10 {
            storage.1.changes.send_replace(());
            sleep(Duration::from_millis(20)).await;
        }
        assert_eq!((failed(&a), failed(&b)), (1, 0));
    }

    #[tokio::test]
    async fn challenge_of_another_server_is_answered_until_it_is_removed() {
        let (dir, storage) = (Dir::new(), Memory("a", Arc::default()));
        let mut settings = settings(&dir.path().join("a"));
        let address = free_address();
        settings.acme.http_listen = vec![address];
        // Another server has the reservation; only its challenge matters here.
        *storage.1.owner.lock().expect("no panic") = Some("b".to_owned());
        let _acme = start(&settings, &storage);
        let answer = move || {
            let mut stream = TcpStream::connect(address).ok()?;
            let path = "/.well-known/acme-challenge/TOKEN";
            write!(stream, "GET {path} HTTP/1.0\r\nHost: {NAME}\r\n\r\n").ok()?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).ok()?;
            Some(answer)
        };
        let ask = async || tokio::task::spawn_blocking(answer).await.expect("no panic");
        let b = shared(&Memory("b", Arc::clone(&storage.1)), &settings);
        let proof = ChallengeResponse { token: "TOKEN".to_owned(), text: "TOKEN.THUMB".to_owned() };
        for (name, is_ours) in [("other.example.org", false), (NAME, true)] {
            b.put_challenge(&name.parse().expect("a name"), &proof).await.expect("the challenge is kept");
            let found = ask().await;
            assert_eq!(found.is_some_and(|answer| answer.ends_with("TOKEN.THUMB")), is_ours, "{name}");
        }
        b.remove_challenge().await;
        eventually("the port is closed", async || ask().await.is_none()).await;
    }

    #[tokio::test]
    async fn garbage_in_the_storage_is_ignored() {
        let (dir, storage) = (Dir::new(), Memory("a", Arc::default()));
        let settings = settings(dir.path());
        let from = shared(&storage, &settings);
        let names = &settings.tls.acme;
        for text in ["", "{", "[]", "null", r#"{"certificate":{"first":1,"last":2},"failure":null}"#] {
            let fields = ["order", "certificate", "account"].map(|kind| {
                let name = if kind == "account" { "" } else { NAME };
                (from.field(kind, name), Zeroizing::new(text.as_bytes().to_vec()))
            });
            storage.write(fields.into()).await.expect("the fields are kept");
            storage
                .write(vec![(from.field("challenge", ""), Zeroizing::new(text.into()))])
                .await
                .expect("kept");
            assert_eq!(from.challenge().await, Ok(None));
            assert_eq!(from.orders(names).await.expect("the orders are read").len(), 1);
            let acme = start(&settings, &storage);
            eventually("the server orders on its own", async || failed(&acme) == 1).await;
            *storage.1.owner.lock().expect("no panic") = None;
        }
    }
}
