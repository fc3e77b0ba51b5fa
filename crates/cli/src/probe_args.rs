//! Flags of `turnpike probe`.

use std::time::Duration;

use clap::Args;
use turnpike_client::{Login, ServerUri, TlsOptions};
use turnpike_load::options::seconds;
use turnpike_probe::{FindingLevel, ProbeConfig};

#[derive(Args)]
pub(crate) struct ProbeArgs {
    /// Server: turn:HOST[:PORT][?transport=udp|tcp], turns:… (TLS, or DTLS with ?transport=udp), stun:…, stuns:…, or
    /// HOST[:PORT]. Without PORT, DNS records (NAPTR, SRV) of HOST come first
    #[arg(value_name = "SERVER")]
    server: ServerUri,

    /// Long-term credential; without it, checks that need an allocation are skipped
    #[arg(long, value_name = "NAME:PASSWORD", env = "TURNPIKE_PROBE_USER", hide_env_values = true)]
    user: Option<Login>,

    #[command(flatten)]
    tls: TlsOptions,

    /// Time limit in seconds; checks that are not done by then are skipped
    #[arg(long, value_name = "S", default_value = "30", value_parser = seconds)]
    timeout: Duration,

    /// Binding requests per transport for the round-trip time, 1 to 1000
    #[arg(long, value_name = "N", default_value_t = 5)]
    count: usize,

    /// Test the server's defences: forbidden peers in every notation and over every transport, and amplification towards third parties.
    /// Without --i-own-this-server, only prints the planned requests
    #[arg(long)]
    attack: bool,

    /// Confirm that the server is yours or its owner has agreed, and run --attack
    #[arg(long, requires = "attack")]
    i_own_this_server: bool,

    /// Port on which the server's machine answers STUN, as a peer for --attack; repeat for several [default: the server's port]
    #[arg(long, value_name = "PORT", requires = "attack")]
    attack_port: Vec<u16>,

    /// Second user for --attack, which tries to take over and delete the first user's allocations with their mobility tickets
    #[arg(long, value_name = "NAME:PASSWORD", requires = "attack")]
    attack_user: Option<Login>,

    /// Print the result as one JSON object
    #[arg(long)]
    json: bool,

    /// Exit with code 3 if any finding has this level or worse: warn or bad
    #[arg(long, value_name = "LEVEL")]
    fail_on: Option<FindingLevel>,
}

/// Output options.
pub(crate) struct ProbeOutput {
    pub(crate) json: bool,
    pub(crate) fail_on: Option<FindingLevel>,
    /// Prints the plan without running it.
    pub(crate) only_say: bool,
}

impl ProbeArgs {
    pub(crate) fn into_config(self) -> (ProbeConfig, ProbeOutput) {
        let config = ProbeConfig {
            user: self.user,
            tls: TlsOptions { resumption: false, ..self.tls },
            timeout: self.timeout,
            count: self.count,
            attack: self.attack.then_some(self.attack_port),
            attack_user: self.attack_user,
            ..ProbeConfig::new(self.server)
        };
        let only_say = self.attack && !self.i_own_this_server;
        (config, ProbeOutput { json: self.json, fail_on: self.fail_on, only_say })
    }
}

pub(crate) const PROBE: &str = "\
Check the features of a STUN or TURN server and report problems, from a client's point of view.

Tries every transport that the URI allows (for a plain name: UDP and TCP on its port, TLS and DTLS on 5349 or else on its port), and \
port 443 of TURN servers, on one address of each family. Checks the certificate, the credential and the reason for a refusal, the \
relayed address, round-trip times, NATs on the path, optional features, and whether users can reach peers that should be blocked: \
loopback, cloud metadata, private networks and their IPv6 forms. Each line starts with ok, note, warn or bad, followed by the remedy. \
With --insecure, a bad certificate is still reported as bad, but the server counts as usable. In the JSON, a peer's `allowed` is null if \
the server refused for another reason, such as a full server.

The probe sends no data to peers, deletes its allocations, and finishes within --timeout.";

pub(crate) const PROBE_EXAMPLES: &str = "\
Examples:
  turnpike probe turn:turn.example.org --user alice:wonderland
  turnpike probe turns:turn.example.org:443 --user alice:wonderland --fail-on bad
  turnpike probe stun:stun.example.org --json
  turnpike probe turn:turn.example.org --user alice:wonderland --attack --i-own-this-server --timeout 300

Exit codes: 0 the server is usable, 1 it is not, 2 bad usage, 3 it is usable but a finding reaches --fail-on.";
