//! One order (RFC 8555 section 7.4): account, proof of control, signed certificate. Only the account is stored before
//! the CA has issued the certificate.

use std::time::Duration;

use instant_acme::{
    Account, AccountCredentials, AuthorizationStatus, CertificateIdentifier, ChallengeStatus, Error,
    ExternalAccountKey, Identifier, NewAccount, NewOrder, Order, OrderStatus, RetryPolicy,
};
use rcgen::{CertificateParams, DistinguishedName, KeyPair};
use turnpike_config::{AcmeChallenge, AcmeSettings, CertificateName};
use zeroize::Zeroizing;

use crate::{
    challenge::{self, PublishedProof},
    error::{self, OrderError},
    files::OrderFiles,
    http::{HttpError, Https},
    proof::ChallengeResponse,
    schedule::Validity,
    wanted::Wanted,
};

/// Polling intervals and time limit while the CA validates a name, and again while it issues the certificate.
const POLL: RetryPolicy = RetryPolicy::new()
    .initial_delay(Duration::from_millis(500))
    .backoff(1.5)
    .timeout(Duration::from_secs(120));
/// The only Let's Encrypt profile that allows IP addresses (draft-aaron-acme-profiles).
const PROFILE_OF_ADDRESSES: &str = "shortlived";

/// Orders a certificate and writes it to its file. `replaced` identifies the current certificate if the CA offers
/// renewal windows.
pub(crate) async fn order(
    wanted: &Wanted,
    files: &OrderFiles,
    https: &Https,
    name: &CertificateName,
    replaced: Option<&CertificateIdentifier<'_>>,
) -> Result<Validity, OrderError> {
    files.check_room()?;
    let account = match existing_account(wanted, files, https).await? {
        Some(account) => account,
        None => new_account(wanted, files, https).await?,
    };
    let begun = match begin(&account, wanted, name, replaced).await {
        // A certificate can be replaced only once, and an earlier, failed order may have counted as that
        // replacement.
        Err(error) if replaced.is_some() && may_be_of_replaced(&error) => {
            begin(&account, wanted, name, None).await
        }
        begun => begun,
    };
    if let Err(Error::Api(problem)) = &begun
        && is_kind(problem, "accountDoesNotExist")
    {
        files.forget_account(&wanted.settings.directory);
        if let Some(shared) = wanted.shared() {
            shared.put_account(b"").await.map_err(OrderError::Shared)?;
        }
    }
    let mut order = begun?;
    prove(&mut order, wanted, name).await?;

    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new([name.to_string()])?;
    params.distinguished_name = DistinguishedName::new();
    order.finalize_csr(params.serialize_request(&key)?.der()).await?;
    let chain = order.poll_certificate(&POLL).await?;
    let key = Zeroizing::new(key.serialize_pem());
    files.put_certificate(name, &wanted.settings.directory, &chain, &key)
}

/// True if the CA may accept the order when it is sent again without naming a replaced certificate.
fn may_be_of_replaced(error: &Error) -> bool {
    match error {
        Error::Api(problem) => {
            !["rateLimited", "accountDoesNotExist", "badNonce"].iter().any(|kind| is_kind(problem, kind))
        }
        Error::Other(inner) => !inner.is::<HttpError>(),
        _ => true,
    }
}

/// Restores the account that cooperating servers share or, if there is none, this server's own account.
pub(crate) async fn existing_account(
    wanted: &Wanted,
    files: &OrderFiles,
    https: &Https,
) -> Result<Option<Account>, OrderError> {
    let directory = &wanted.settings.directory;
    let shared = match wanted.shared() {
        Some(shared) => shared.account().await.map_err(OrderError::Shared)?,
        None => None,
    };
    let parsed = |json: &[u8]| serde_json::from_slice::<AccountCredentials>(json).ok();
    let kept = match shared.as_deref().and_then(|json| parsed(json)) {
        Some(kept) => Some(kept),
        None => files.account(directory).and_then(|json| parsed(&json)),
    };
    let builder = Account::builder_with_http(Box::new(https.clone()));
    match kept {
        Some(kept) => Ok(Some(builder.from_credentials(kept).await?)),
        None => Ok(None),
    }
}

async fn new_account(wanted: &Wanted, files: &OrderFiles, https: &Https) -> Result<Account, OrderError> {
    let AcmeSettings { directory, eab_key_id, eab_key, .. } = &wanted.settings;
    let builder = Account::builder_with_http(Box::new(https.clone()));
    let binding = eab_key.as_ref().map(|key| ExternalAccountKey::new(eab_key_id.clone(), &key.bytes()));
    let contact = format!("mailto:{}", wanted.settings.contact);
    let contact: &[&str] = if wanted.settings.contact.is_empty() { &[] } else { &[&contact] };
    let new = NewAccount { contact, terms_of_service_agreed: true, only_return_existing: false };
    let (account, credentials) = builder.create(&new, directory.clone(), binding.as_ref()).await?;
    let json = Zeroizing::new(serde_json::to_vec(&credentials).map_err(Error::from)?);
    files.put_account(directory, &json)?;
    if let Some(shared) = wanted.shared() {
        shared.put_account(&json).await.map_err(OrderError::Shared)?;
    }
    Ok(account)
}

async fn begin(
    account: &Account,
    wanted: &Wanted,
    name: &CertificateName,
    replaced: Option<&CertificateIdentifier<'_>>,
) -> Result<Order, Error> {
    let identifier = match name {
        CertificateName::Ip(ip) => Identifier::Ip(*ip),
        name => Identifier::Dns(name.to_string()),
    };
    let identifiers = [identifier];
    let mut new = NewOrder::new(&identifiers);
    let is_address = matches!(name, CertificateName::Ip(_));
    if !wanted.settings.profile.is_empty() {
        new = new.profile(&wanted.settings.profile);
    } else if is_address && account.profiles().any(|profile| profile.name == PROFILE_OF_ADDRESSES) {
        new = new.profile(PROFILE_OF_ADDRESSES);
    }
    if let Some(replaced) = replaced {
        new = new.replaces(replaced.clone());
    }
    account.new_order(&new).await
}

/// Proves control over the order's name; returns once the CA has accepted or rejected the proof.
async fn prove(order: &mut Order, wanted: &Wanted, name: &CertificateName) -> Result<(), OrderError> {
    let (kind, shown_kind) = challenge::kind(wanted.challenge);
    let mut proofs = Vec::new();
    let shared = wanted.shared();
    let validated = async {
        let mut authorizations = order.authorizations();
        while let Some(authorization) = authorizations.next().await {
            let mut authorization = authorization?;
            if authorization.status == AuthorizationStatus::Valid {
                continue;
            }
            let offered: Vec<String> =
                authorization.challenges.iter().map(|one| format!("{:?}", one.r#type)).collect();
            let Some(mut challenge) = authorization.challenge(kind.clone()) else {
                return Err(OrderError::NotOffered(shown_kind, offered.join(", ")));
            };
            let token = challenge.token.clone();
            if !is_token(&token) {
                return Err(OrderError::Invalid { challenge: shown_kind, why: "malformed token".to_owned() });
            }
            let text = challenge.key_authorization().as_str().to_owned();
            let proof = ChallengeResponse { token, text };
            proofs.push(PublishedProof::new(wanted, name, &proof).await?);
            if let Some(shared) = shared.as_ref().filter(|_| wanted.challenge != AcmeChallenge::Dns) {
                shared.put_challenge(name, &proof).await?;
            }
            challenge.set_ready().await?;
        }
        let invalid = |why| Err(OrderError::Invalid { challenge: shown_kind, why });
        match order.poll_ready(&POLL).await {
            Ok(OrderStatus::Invalid) => invalid(fault(order).await),
            Ok(_) => Ok(()),
            // Some CAs copy the reason into the order.
            Err(Error::Api(problem)) => invalid(error::describe(&problem)),
            Err(error) => Err(error.into()),
        }
    }
    .await;
    for proof in proofs {
        proof.hide().await;
        if let Some(shared) = &shared {
            shared.remove_challenge().await;
        }
    }
    validated
}

/// The CA's reason for rejecting the order.
async fn fault(order: &mut Order) -> String {
    let mut authorizations = order.authorizations();
    while let Some(Ok(mut authorization)) = authorizations.next().await {
        let Ok(state) = authorization.refresh().await else { continue };
        let failed = state.challenges.iter().filter(|one| one.status == ChallengeStatus::Invalid);
        if let Some(problem) = failed.filter_map(|one| one.error.as_ref()).next() {
            return error::describe(problem);
        }
    }
    "no reason given".to_owned()
}

fn is_kind(problem: &instant_acme::Problem, kind: &str) -> bool {
    problem.r#type.as_deref().and_then(|full| full.rsplit(':').next()) == Some(kind)
}

/// Checks for base64url (RFC 8555 section 8.3), because the token becomes part of a path and a command-line argument.
fn is_token(token: &str) -> bool {
    (1..=256).contains(&token.len())
        && token.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}
