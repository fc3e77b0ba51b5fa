//! dns-01, where a program provided by the operator sets and removes the TXT record.
//!
//! ```text
//! HOOK set    _acme-challenge.turn.example.org VALUE      returns when the record is visible
//! HOOK remove _acme-challenge.turn.example.org VALUE
//! ```

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use tokio::{process::Command, time::timeout};
use turnpike_config::CertificateName;

use crate::{error::OrderError, proof::ChallengeResponse};

const DEADLINE: Duration = Duration::from_secs(180);
/// Maximum bytes of the program's error output in a message.
const LONGEST: usize = 300;

pub(crate) struct DnsRecord {
    hook: PathBuf,
    name: String,
    value: String,
}

impl DnsRecord {
    pub(crate) async fn set(
        hook: Option<&Path>,
        name: &CertificateName,
        proof: &ChallengeResponse,
    ) -> Result<Self, OrderError> {
        let hook =
            hook.ok_or_else(|| OrderError::Hook { hook: PathBuf::new(), why: "not set".to_owned() })?;
        let (CertificateName::Dns(domain) | CertificateName::Wildcard(domain)) = name else {
            return Err(OrderError::Hook { hook: hook.to_owned(), why: format!("{name} is not a DNS name") });
        };
        let (name, value) = (format!("_acme-challenge.{domain}"), proof.record());
        let record = Self { hook: hook.to_owned(), name, value };
        record.run("set").await?;
        Ok(record)
    }

    pub(crate) async fn remove(self) {
        if let Err(error) = self.run("remove").await {
            tracing::warn!("{error}; the record {} may still be in the DNS", self.name);
        }
    }

    async fn run(&self, action: &str) -> Result<(), OrderError> {
        let failed = |why: String| OrderError::Hook { hook: self.hook.clone(), why };
        let mut command = Command::new(&self.hook);
        command.args([action, &self.name, &self.value]).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(Stdio::piped()).kill_on_drop(true);
        let child = command.spawn().map_err(|error| failed(format!("cannot be started: {error}")))?;
        let ended = timeout(DEADLINE, child.wait_with_output()).await;
        let ended = ended
            .map_err(|_| failed(format!("{action} did not end within {} s", DEADLINE.as_secs())))?
            .map_err(|error| failed(error.to_string()))?;
        if ended.status.success() {
            return Ok(());
        }
        let said = &ended.stderr[..ended.stderr.len().min(LONGEST)];
        let said = String::from_utf8_lossy(said).replace(char::is_control, " ");
        Err(failed(format!("{action} ended with {}: {}", ended.status, said.trim())))
    }
}
