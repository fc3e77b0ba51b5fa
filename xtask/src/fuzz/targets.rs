//! The fuzz targets: each is a test of a crate, so that it may know what is private there.

/// A fuzz target.
pub(super) struct Target {
    pub(super) name: &'static str,
    /// Of the test's crate, without the prefix that all have.
    package: &'static str,
    program: Program,
    /// The test, with its modules.
    pub(super) test: &'static str,
    /// Bytes of an input at most.
    pub(super) max_len: u32,
    /// What it is about: its coverage is counted in these files and directories.
    pub(super) about: &'static [&'static str],
    /// What is fed and what must hold, for the report.
    pub(super) holds: &'static str,
}

/// Which of a crate's test programs.
enum Program {
    /// Tests beside the modules.
    Unit,
    /// `tests/main.rs`.
    Integration,
}

impl Target {
    pub(super) fn package(&self) -> String {
        format!("turnpike-{}", self.package)
    }

    /// Has cargo build the test program.
    pub(super) fn cargo_option(&self) -> String {
        match self.program {
            Program::Unit => "--lib".to_owned(),
            Program::Integration => format!("--test={}", self.package),
        }
    }

    /// What cargo calls the program, and its kind.
    pub(super) fn artifact(&self) -> (String, &'static str) {
        match self.program {
            Program::Unit => (format!("turnpike_{}", self.package), "lib"),
            Program::Integration => (self.package.to_owned(), "test"),
        }
    }
}

/// A target of this name.
pub(super) fn named(name: &str) -> Result<&'static Target, String> {
    let found = TARGETS.iter().find(|target| target.name == name);
    found.ok_or_else(|| {
        let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
        format!("no target is called {name}; there are {}", names.join(", "))
    })
}

pub(super) const TARGETS: &[Target] = &[
    Target {
        name: "stun",
        package: "wire",
        program: Program::Integration,
        test: "fuzz_stun::stun",
        max_len: 1500,
        about: &["crates/wire/src/stun/", "crates/wire/src/integrity.rs"],
        holds: "any bytes as a message: read without allocation, as `stun-types` reads them, the same when written anew; no forged MAC",
    },
    Target {
        name: "indication",
        package: "wire",
        program: Program::Integration,
        test: "fuzz_indication::indication",
        max_len: 600,
        about: &["crates/wire/src/indication.rs"],
        holds: "any bytes as a Send or Data indication: as `turn-types` reads them, the same when written anew",
    },
    Target {
        name: "channel_data",
        package: "wire",
        program: Program::Integration,
        test: "fuzz_channel_data::channel_data",
        max_len: 300,
        about: &["crates/wire/src/channel_data.rs"],
        holds: "any bytes as ChannelData: as `turn-types` reads them, within the datagram",
    },
    Target {
        name: "frames",
        package: "wire",
        program: Program::Integration,
        test: "fuzz_frames::frames",
        max_len: 2000,
        about: &["crates/wire/src/frame.rs", "crates/wire/src/demux.rs"],
        holds: "any bytes as a stream: the same messages however it is cut, held bytes bounded",
    },
    Target {
        name: "proxy_protocol",
        package: "wire",
        program: Program::Integration,
        test: "fuzz_proxy_protocol::proxy_protocol",
        max_len: 400,
        about: &["crates/wire/src/proxy_protocol.rs"],
        holds: "any bytes as PROXY header: the same however it is cut, written as it is read, bounded",
    },
    Target {
        name: "dtls_hello",
        package: "relay",
        program: Program::Unit,
        test: "dtls::hello::fuzz::dtls_hello",
        max_len: 1500,
        about: &["crates/relay/src/dtls/hello.rs", "crates/relay/src/dtls/cookie.rs"],
        holds: "any bytes as ClientHello: no forged cookie; a cookie of ours is good for its client, its time and the same ClientHello",
    },
    Target {
        name: "access_token",
        package: "turn",
        program: Program::Integration,
        test: "fuzz_access_token::access_token",
        max_len: 300,
        about: &["crates/turn/src/access_token.rs"],
        holds: "any bytes as ACCESS-TOKEN, altered ones, and what an issuer makes that keeps to no rule: nothing forged, memory bounded",
    },
    Target {
        name: "tickets",
        package: "turn",
        program: Program::Integration,
        test: "fuzz_tickets::tickets",
        max_len: 400,
        about: &[
            "crates/turn/src/server/mobility/ticket.rs",
            "crates/turn/src/server/mobility.rs",
            "crates/turn/src/server/mobility/pending_moves.rs",
            "crates/turn/src/server/mobility/moved.rs",
        ],
        holds: "tickets at three workers, altered, old, of somebody else: good for their user alone; one owner, counted once",
    },
    Target {
        name: "server",
        package: "turn",
        program: Program::Integration,
        test: "fuzz_server::server",
        max_len: 2000,
        about: &["crates/turn/src/server/"],
        holds: "`turn::server` by sequences of events: data only where a table kept from its effects allows it, answers to strangers at most \
                three times as long, books agree, nothing stays",
    },
    Target {
        name: "config",
        package: "config",
        program: Program::Unit,
        test: "sources::fuzz::config",
        max_len: 2000,
        about: &[
            "crates/config/src/sources.rs",
            "crates/config/src/source.rs",
            "crates/strict/src/tree.rs",
            "crates/config/src/read.rs",
            "crates/config/src/keys.rs",
            "crates/config/src/check.rs",
            "crates/config/src/tables.rs",
            "crates/convert/src/wrong_format.rs",
        ],
        holds: "any text as configuration of `serve`: mistakes bounded and in their place, no secret shown, what is shown reads the same",
    },
    Target {
        name: "forward_config",
        package: "config",
        program: Program::Unit,
        test: "forward::fuzz::forward_config",
        max_len: 2000,
        about: &[
            "crates/config/src/forward/mod.rs",
            "crates/config/src/forward/rule_keys.rs",
            "crates/config/src/forward/check.rs",
        ],
        holds: "any text as a file of `forward`, in whichever format: shown as ours it means the same",
    },
    Target {
        name: "rule_argument",
        package: "config",
        program: Program::Unit,
        test: "forward::fuzz::rule_argument",
        max_len: 300,
        about: &["crates/config/src/forward/argument.rs", "crates/convert/src/forward/parts.rs"],
        holds: "any text as a rule of the command line: shown as TOML it means the same",
    },
    Target {
        name: "rinetd_conf",
        package: "config",
        program: Program::Unit,
        test: "forward::fuzz::rinetd_conf",
        max_len: 600,
        about: &["crates/convert/src/forward/rinetd.rs"],
        holds: "any text as rinetd.conf: shown as TOML it means the same",
    },
    Target {
        name: "oxidinetd_toml",
        package: "config",
        program: Program::Unit,
        test: "forward::fuzz::oxidinetd_toml",
        max_len: 1000,
        about: &["crates/convert/src/forward/oxidinetd.rs"],
        holds: "any text as oxidinetd's TOML: shown as ours it means the same",
    },
    Target {
        name: "turnserver_conf",
        package: "convert",
        program: Program::Unit,
        test: "coturn::fuzz::turnserver_conf",
        max_len: 1500,
        about: &["crates/convert/src/coturn"],
        holds: "any text as coturn's turnserver.conf: the result is a configuration or is told to be none, denies what coturn denies, and no \
                comment in it is more than one",
    },
    Target {
        name: "sql_rows",
        package: "stores",
        program: Program::Unit,
        test: "tables::fuzz::sql_rows",
        max_len: 1200,
        about: &["crates/stores/src/tables.rs", "crates/stores/src/rules.rs", "crates/stores/src/keys.rs"],
        holds: "any rows in coturn's tables and ours: in whichever order they mean the same, none that denies is lost, nothing secret is told, \
                and what is written is read",
    },
    Target {
        name: "redis_keys",
        package: "stores",
        program: Program::Unit,
        test: "redis::fuzz::redis_keys",
        max_len: 1200,
        about: &["crates/stores/src/redis.rs"],
        holds: "any keys of whichever type in a Redis: the same",
    },
    Target {
        name: "admin_requests",
        package: "admin",
        program: Program::Unit,
        test: "connections::fuzz::admin_requests",
        max_len: 1500,
        about: &[
            "crates/admin/src/access.rs",
            "crates/admin/src/accounts.rs",
            "crates/admin/src/applications.rs",
            "crates/admin/src/hosts.rs",
            "crates/admin/src/credential_issuer.rs",
            "crates/admin/src/routes.rs",
            "crates/admin/src/routes/",
        ],
        holds: "any bytes as a request by each way to the API: an answer as described, no secret in it, nothing changes for whom it may not",
    },
    // Root alone may load a program into the kernel.
    Target {
        name: "offload_mirror",
        package: "offload",
        program: Program::Integration,
        test: "agreement::offload_mirror",
        max_len: 1100,
        about: &["crates/offload/src/mirror.rs"],
        holds: "packets and tables drawn by any bytes: the programs in the kernel (BPF_PROG_TEST_RUN) and their mirror decide the same, to the byte",
    },
];
