//! `[events]`: events for applications, and the webhooks that receive them.

use std::path::PathBuf;

use strum::{IntoStaticStr, VariantArray};
use turnpike_convert::toml_text::{list, quoted};
use turnpike_strict::{ValueNode, find};
use turnpike_wire::secret::MASK;

use super::{Secret, Settings, key::ValueKind, read::ValueReader};

/// Minimum length in characters. A shorter secret could be guessed from a signature.
const SHORTEST_SECRET: usize = 16;
pub(crate) const MOST_WEBHOOKS: usize = 16;

#[derive(Clone, Debug, PartialEq)]
pub struct EventSettings {
    pub webhooks: Vec<WebhookSettings>,
    /// Maximum size in bytes of the undelivered events of each webhook.
    pub spool: u64,
    /// Webhooks may reach private and loopback addresses, and use plain HTTP.
    pub allow_private: bool,
}

impl Default for EventSettings {
    fn default() -> Self {
        Self { webhooks: Vec::new(), spool: 64 << 20, allow_private: false }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct WebhookSettings {
    pub url: String,
    pub secret: Secret,
    /// Types to send; empty for all.
    pub types: Vec<EventType>,
    /// Several events per request.
    pub batch: bool,
}

/// Types of events. Only their names are used in APIs and configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
pub enum EventType {
    #[strum(serialize = "allocation.begin")]
    AllocationBegin,
    #[strum(serialize = "allocation.end")]
    AllocationEnd,
    #[strum(serialize = "refusal")]
    Refusal,
    #[strum(serialize = "quota")]
    Quota,
    #[strum(serialize = "certificate.renewed")]
    CertificateRenewed,
    #[strum(serialize = "certificate.failed")]
    CertificateFailed,
    #[strum(serialize = "certificate.expiring")]
    CertificateExpiring,
    #[strum(serialize = "drain.begin")]
    DrainBegin,
    #[strum(serialize = "drain.end")]
    DrainEnd,
    #[strum(serialize = "node.joined")]
    NodeJoined,
    #[strum(serialize = "node.left")]
    NodeLeft,
}

impl EventType {
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Finds a type by its name.
    pub fn parse(name: &str) -> Result<Self, String> {
        let found = Self::VARIANTS.iter().copied().find(|kind| kind.name() == name);
        found.ok_or_else(|| {
            let names: Vec<&str> = Self::VARIANTS.iter().map(|kind| kind.name()).collect();
            format!("{name:?} is not a type of event: use {}", names.join(", "))
        })
    }
}

/// Directory of undelivered events; `None` without a state directory.
pub fn event_directory(settings: &Settings) -> Option<PathBuf> {
    settings.store.state.directory().map(|state| state.join("events"))
}

pub(super) const WEBHOOKS: ValueKind<Vec<WebhookSettings>> = ValueKind::list(
    "[[events.webhook]] with a url (https://...) and a secret of 16 characters or more; optionally types (a list) and batch (true or \
               false)",
    |reader, node| reader.list(node, webhook),
    |webhooks| {
        list(webhooks.iter().map(|webhook| {
            let types = list(webhook.types.iter().map(|kind| quoted(kind.name())));
            format!(
                "{{ url = {}, secret = {}, types = {types}, batch = {} }}",
                quoted(MASK),
                quoted(MASK),
                webhook.batch
            )
        }))
    },
)
.secret();

fn webhook(reader: &mut ValueReader<'_>, node: &ValueNode) -> Option<WebhookSettings> {
    let entries = reader.table(node, &["url", "secret", "types", "batch"])?;
    let find = |wanted| find(entries, wanted);
    let (Some(url_node), Some(secret_node)) = (find("url"), find("secret")) else {
        return reader.refuse(node, Some("it needs a url and a secret".to_owned()));
    };
    let url = reader.text(url_node)?;
    if let Err(why) = is_url(&url) {
        return reader.refuse(url_node, Some(why.to_owned()));
    }
    let secret = reader.secret(secret_node)?;
    if secret.reveal().chars().count() < SHORTEST_SECRET {
        return reader.refuse(secret_node, Some("it is too short".to_owned()));
    }
    let types = match find("types") {
        Some(node) => reader.list(node, |reader, node| reader.parsed(node, EventType::parse))?,
        None => Vec::new(),
    };
    let batch = match find("batch") {
        Some(node) => reader.boolean(node)?,
        None => false,
    };
    Some(WebhookSettings { url, secret, types, batch })
}

/// Accepts `http://` too, which needs `allow_private`.
pub(crate) fn is_url(url: &str) -> Result<(), &'static str> {
    let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    let rest = rest.ok_or("it does not begin with https://")?;
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if host.is_empty() {
        return Err("it has no host");
    }
    if host.contains('@') {
        return Err("it contains a user name, which would not be sent");
    }
    let is_plain = url.chars().all(|c| c.is_ascii_graphic() && !"\"<>\\^`{|}#".contains(c));
    if is_plain && url.len() <= 1024 { Ok(()) } else { Err("it contains characters that URLs must escape") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_https_with_a_host() {
        for url in ["https://a.example", "https://[2001:db8::1]:8443/x?y=z", "http://127.0.0.1:80/"] {
            assert_eq!(is_url(url), Ok(()), "{url}");
        }
        for url in
            ["ftp://a", "https://", "https:///x", "https://u:p@a/", "https://a/ b", "https://a/#b", "a"]
        {
            assert!(is_url(url).is_err(), "{url}");
        }
    }

    #[test]
    fn types_have_unique_names_that_parse() {
        for kind in EventType::VARIANTS {
            assert_eq!(EventType::parse(kind.name()), Ok(*kind));
        }
        assert!(EventType::parse("allocation").expect_err("no type").contains("allocation.begin, "));
    }
}
