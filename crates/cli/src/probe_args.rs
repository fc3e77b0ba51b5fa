//! Flags of `turnpike probe`.

use std::time::Duration;

use clap::Args;
use turnpike_client::{Login, ServerUri, TlsOptions};
use turnpike_load::options::seconds;
use turnpike_probe::{Config, Level};

/// Flags of `probe`.
#[derive(Args)]
pub(crate) struct ProbeArgs {
    /// The server: turn:HOST[:PORT][?transport=udp|tcp], turns:… (TLS; with ?transport=udp DTLS), stun:…, stuns:…, or
    /// HOST[:PORT]
    #[arg(value_name = "SERVER")]
    server: ServerUri,

    /// Long-term credential; without it nothing behind an allocation is checked
    #[arg(long, value_name = "NAME:PASSWORD", env = "TURNPIKE_PROBE_USER", hide_env_values = true)]
    user: Option<Login>,

    #[command(flatten)]
    tls: TlsOptions,

    /// Seconds after which the probe ends, whatever has not been asked by then
    #[arg(long, value_name = "S", default_value = "30", value_parser = seconds)]
    timeout: Duration,

    /// Bindings of which the round trip is taken, 1 to 1000, over each transport
    #[arg(long, value_name = "N", default_value_t = 5)]
    count: usize,

    /// Ask what an attacker would: for peers that should be out of reach, in each spelling and by each way in, and what strangers are sent
    /// for a byte. Only says what it would do without --i-own-this-server
    #[arg(long)]
    attack: bool,

    /// The server is yours, or its owner has agreed: do what --attack says
    #[arg(long, requires = "attack")]
    i_own_this_server: bool,

    /// Port of the peers that --attack asks for, one where the server's machine answers STUN; repeat for several [default: the server's own]
    #[arg(long, value_name = "PORT", requires = "attack")]
    attack_port: Vec<u16>,

    /// Another user, as which --attack tries to take and to end the first one's allocations by their mobility tickets [default: nobody]
    #[arg(long, value_name = "NAME:PASSWORD", requires = "attack")]
    attack_user: Option<Login>,

    /// Print the result as one JSON object
    #[arg(long)]
    json: bool,

    /// Exit with 3 when a line is as bad as this or worse: warn or bad
    #[arg(long, value_name = "LEVEL")]
    fail_on: Option<Level>,
}

/// What is done with the result.
pub(crate) struct Asked {
    pub(crate) json: bool,
    pub(crate) fail_on: Option<Level>,
    /// Nothing at all: it is only to be said what would be asked.
    pub(crate) only_say: bool,
}

impl ProbeArgs {
    pub(crate) fn into_config(self) -> (Config, Asked) {
        let config = Config {
            user: self.user,
            tls: TlsOptions { resumption: false, ..self.tls },
            timeout: self.timeout,
            count: self.count,
            attack: self.attack.then_some(self.attack_port),
            attack_user: self.attack_user,
            ..Config::new(self.server)
        };
        let only_say = self.attack && !self.i_own_this_server;
        (config, Asked { json: self.json, fail_on: self.fail_on, only_say })
    }
}

pub(crate) const PROBE: &str = "\
Say what a STUN or TURN server supports, and what is wrong with it, as a client sees it.

Tries each transport that the name allows (a plain name: UDP and TCP on its port, TLS and DTLS on 5349 or else on its port too), and port 443 of \
TURN servers, at an address of each family that the name has, looks at the certificate, \
the credential and why it is refused, the relayed address, round trips, the NAT on the way, optional features, and whether users \
can reach peers that should be out of reach: loopback, cloud metadata, private networks, and IPv6 forms of them. Each line begins \
with ok, note, warn or bad; below it stands what to do. With --insecure a bad certificate is still called bad, but the server counts \
as one that can be used. In the JSON, `allowed` of a peer is null where the server refused for want of room or the like.

It sends requests only and no data to any peer, deletes its allocations, and ends in time.";

pub(crate) const PROBE_EXAMPLES: &str = "\
Examples:
  turnpike probe turn:turn.example.org --user alice:wonderland
  turnpike probe turns:turn.example.org:443 --user alice:wonderland --fail-on bad
  turnpike probe stun:stun.example.org --json
  turnpike probe turn:turn.example.org --user alice:wonderland --attack --i-own-this-server --timeout 300

Exit codes: 0 the server can be used, 1 it cannot, 2 bad usage, 3 it can but a line is as bad as --fail-on.";
