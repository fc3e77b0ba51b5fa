//! The clients of docs/clients.md, and both ends of a call that a client makes with itself.

use super::{call_length, credential};
use crate::credentials::{Credential, Server};
use crate::prelude::*;
use turnpike_trials::browsers::Browser as _;

const START: Duration = Duration::from_secs(60);

/// A client with both ends of a call in one program. The program takes TRANSPORT HOST PORT USERNAME PASSWORD SECONDS and prints
/// `version NAMES`, then a line per [`Sample`].
pub(super) struct Client {
    pub(super) name: &'static str,
    /// Path below `target/interop`.
    program: &'static str,
    /// Path below `tests/interop`.
    script: Option<&'static str>,
    arguments: &'static [&'static str],
    /// Working directory, as a path below `target/interop`.
    directory: &'static str,
    pub(super) transports: &'static [(&'static str, Outcome)],
}

/// Expected outcome of a call. docs/clients.md explains exceptions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    Holds,
    Unencrypted,
    NeverRefreshes,
    NeverStarts,
}

use Outcome::{Holds, NeverRefreshes, NeverStarts, Unencrypted};

const PROGRAM: Client =
    Client { name: "", program: "", script: None, arguments: &[], directory: "", transports: &[] };

pub(super) const GSTREAMER: Client = Client {
    name: "GStreamer",
    program: "gstreamer-python",
    script: Some("gstreamer/call.py"),
    transports: &[("udp", Holds), ("tcp", Holds), ("tls", Unencrypted)],
    ..PROGRAM
};

const CHROMIUM: Client =
    Client { name: "Chromium", transports: &[("udp", Holds), ("tcp", Holds), ("tls", Holds)], ..PROGRAM };

const TURN_CLIENT_PROTO: &str = "turn-client-proto/debug/turnpike-interop-turn-client-proto";

pub(super) const CLIENTS: [Client; 10] = [
    Client {
        name: "aioice",
        program: "venv/bin/python",
        script: Some("aioice/call.py"),
        transports: &[("udp", Holds), ("tcp", Holds), ("tls", Holds)],
        ..PROGRAM
    },
    Client {
        name: "baresip",
        program: "baresip-python",
        script: Some("baresip/call.py"),
        transports: &[("udp", Holds)],
        ..PROGRAM
    },
    CHROMIUM,
    GSTREAMER,
    Client { name: "ice4j", program: "ice4j/call", transports: &[("udp", NeverRefreshes)], ..PROGRAM },
    Client {
        name: "node-datachannel",
        program: "node-command",
        script: Some("node/call.mjs"),
        directory: "node-modules",
        transports: &[("udp", Holds)],
        ..PROGRAM
    },
    Client {
        name: "PJSIP",
        program: "pjsip/bin/python",
        script: Some("pjsip/call.py"),
        transports: &[("udp", Holds), ("tcp", Holds), ("tls", Holds)],
        ..PROGRAM
    },
    Client {
        name: "turn-client-proto",
        program: TURN_CLIENT_PROTO,
        arguments: &["openssl"],
        transports: &[("udp", Holds), ("tcp", Holds), ("tls", Holds), ("dtls", Holds)],
        ..PROGRAM
    },
    Client {
        name: "turn-client-dimpl",
        program: TURN_CLIENT_PROTO,
        arguments: &["dimpl"],
        transports: &[("dtls", NeverStarts)],
        ..PROGRAM
    },
    Client {
        name: "webrtc-rs",
        program: "webrtc-rs/debug/turnpike-interop-webrtc-rs",
        transports: &[("udp", Holds)],
        ..PROGRAM
    },
];

pub(super) struct Call {
    client: &'static str,
    pub(super) transport: &'static str,
    pub(super) expected: Outcome,
    user: String,
    ends: Ends,
}

enum Ends {
    Program(Program),
    Chromium { browser: Chromium, page: Page },
}

/// Message counts of both ends at one point in the call.
pub(super) struct Sample {
    at: Duration,
    pub(super) sent: [u64; 2],
    pub(super) received: [u64; 2],
}

impl Call {
    pub(super) fn start(
        client: &Client,
        (transport, expected): (&'static str, Outcome),
        server: &Server,
        certificate: &Certificate,
    ) -> Result<Self, String> {
        let user = format!("{}-{transport}", client.name);
        let credential = &credential(&user, server);
        let ends = if client.name == CHROMIUM.name {
            Ends::in_chromium(transport, server, credential, certificate)?
        } else {
            Ends::in_program(client, transport, server, credential, certificate)?
        };
        Ok(Self { client: client.name, transport, expected, user, ends })
    }

    /// Transports of the client's allocations, according to the server.
    pub(super) fn spoken(&self, server: &Server) -> BTreeSet<String> {
        let (_, allocations) =
            fetch(server.serve.admin(), "/v1/allocations?limit=1000").expect("the server responds");
        let allocations: Value = serde_json::from_str(&allocations).expect("JSON");
        let text = |allocation: &Value, name: &str| allocation[name].as_str().unwrap_or_default().to_owned();
        let allocations = allocations["allocations"].as_array().into_iter().flatten();
        let own =
            allocations.filter(|allocation| text(allocation, "user").ends_with(&format!(":{}", self.user)));
        own.map(|allocation| text(allocation, "transport")).collect()
    }

    pub(super) fn speaks(&self) -> Option<&'static str> {
        match self.expected {
            Holds | NeverRefreshes => Some(self.transport),
            Unencrypted => Some("tcp"),
            NeverStarts => None,
        }
    }

    pub(super) fn samples(&self) -> Vec<Sample> {
        self.ends.lines().iter().filter_map(|line| Sample::parse(line)).collect()
    }

    pub(super) fn version(&self) -> String {
        match &self.ends {
            Ends::Program(program) => {
                let lines = program.lines();
                let found = lines.iter().find_map(|line| line.strip_prefix("version "));
                found.unwrap_or(self.client).to_owned()
            }
            Ends::Chromium { .. } => chromium_version(),
        }
    }

    pub(super) fn has_ended(&mut self) -> bool {
        match &mut self.ends {
            Ends::Program(program) => program.has_ended(),
            Ends::Chromium { browser, .. } => browser.program().has_ended(),
        }
    }

    pub(super) fn is_over(&mut self) -> bool {
        let last = self.samples().pop().map(|sample| sample.at);
        last >= Some(call_length()) || self.has_ended()
    }

    /// Returns true if both ends receive data before [`START`] has passed.
    pub(super) fn starts(&mut self, since: Instant) -> bool {
        while self.samples().is_empty() {
            if since.elapsed() > START || self.has_ended() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        true
    }

    pub(super) fn close(self) {
        if let Ends::Chromium { browser, .. } = self.ends {
            browser.close();
        }
    }
}

impl Ends {
    fn in_program(
        client: &Client,
        transport: &str,
        server: &Server,
        credential: &Credential,
        certificate: &Certificate,
    ) -> Result<Self, String> {
        let program = interop_program("calls", client.program)?;
        let mut command = Command::new(&program);
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/interop");
        command.args(client.script.map(|script| scripts.join(script))).args(client.arguments);
        let address = server.serve.address_of(transport, V4);
        let (host, port) = (address.ip().to_string(), address.port().to_string());
        command.args([transport, &host, &port, &credential.username, &credential.password]);
        command.arg(call_length().as_secs().to_string());
        let interop = program.ancestors().find(|path| path.ends_with("interop")).expect("a path in interop");
        command.current_dir(interop.join(client.directory)).env("SSL_CERT_FILE", certificate.authority());
        Ok(Self::Program(Program::start(&mut command)))
    }

    fn in_chromium(
        transport: &str,
        server: &Server,
        credential: &Credential,
        certificate: &Certificate,
    ) -> Result<Self, String> {
        Chromium::available(false)?;
        let address = server.serve.address_of(transport, V4);
        let (scheme, over) = if transport == "tls" { ("turns", "tcp") } else { ("turn", transport) };
        let page = Page::serve(json!({
            "urls": [format!("{scheme}:{address}?transport={over}")],
            "username": credential.username,
            "credential": credential.password,
            "seconds": call_length().as_secs(),
        }));
        let browser = Chromium::open(&page.url(), certificate);
        Ok(Self::Chromium { browser, page })
    }

    fn lines(&self) -> Vec<String> {
        match self {
            Self::Program(program) => program.lines(),
            Self::Chromium { page, .. } => {
                let report = page.report().unwrap_or_default();
                assert!(report.get("error").is_none(), "{report:#}");
                let lines = report["lines"].as_array().into_iter().flatten();
                lines.filter_map(Value::as_str).map(str::to_owned).collect()
            }
        }
    }
}

fn chromium_version() -> String {
    let Finished { stdout, .. } = Program::run(Command::new("chromium").arg("--version"));
    let words: Vec<&str> = stdout.split(' ').take(2).collect();
    words.join(" ")
}

impl Sample {
    /// Parses a line `MS SENT RECEIVED SENT RECEIVED`; libraries print lines of their own.
    fn parse(line: &str) -> Option<Self> {
        let numbers: Vec<u64> = line.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
        let [ms, sent_a, received_a, sent_b, received_b] = numbers[..] else { return None };
        Some(Self {
            at: Duration::from_millis(ms),
            sent: [sent_a, sent_b],
            received: [received_a, received_b],
        })
    }
}

pub(super) fn longest_gap(samples: &[Sample]) -> Duration {
    let of_end = |end: usize| {
        let (mut heard, mut at, mut longest) = (0, Duration::ZERO, Duration::ZERO);
        for sample in samples {
            if sample.received[end] > heard {
                longest = longest.max(sample.at.saturating_sub(at));
                (heard, at) = (sample.received[end], sample.at);
            }
        }
        longest.max(call_length().saturating_sub(at))
    };
    of_end(0).max(of_end(1))
}
