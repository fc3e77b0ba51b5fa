//! Fuzz targets: each is a test inside a crate, with access to private items.

pub(super) struct Target {
    pub(super) name: &'static str,
    package: &'static str,
    program: Program,
    pub(super) test: &'static str,
    pub(super) max_len: u32,
    pub(super) about: &'static [&'static str],
    pub(super) holds: &'static str,
}

enum Program {
    Unit,
    Integration,
}

impl Target {
    pub(super) fn package(&self) -> String {
        format!("turnpike-{}", self.package)
    }

    pub(super) fn cargo_option(&self) -> String {
        match self.program {
            Program::Unit => "--lib".to_owned(),
            Program::Integration => format!("--test={}", self.package),
        }
    }

    pub(super) fn artifact(&self) -> (String, &'static str) {
        match self.program {
            Program::Unit => (format!("turnpike_{}", self.package), "lib"),
            Program::Integration => (self.package.to_owned(), "test"),
        }
    }
}

pub(super) fn named(name: &str) -> Result<&'static Target, String> {
    let found = TARGETS.iter().find(|target| target.name == name);
    found.ok_or_else(|| {
        let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
        format!("unknown target {name}; known: {}", names.join(", "))
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
        holds: "messages: parsing allocates nothing, agrees with `stun-types` and round-trips; no MAC can be forged",
    },
    Target {
        name: "indication",
        package: "wire",
        program: Program::Integration,
        test: "fuzz_indication::indication",
        max_len: 600,
        about: &["crates/wire/src/indication.rs"],
        holds: "Send and Data indications: parsing agrees with `turn-types` and round-trips",
    },
    Target {
        name: "channel_data",
        package: "wire",
        program: Program::Integration,
        test: "fuzz_channel_data::channel_data",
        max_len: 300,
        about: &["crates/wire/src/channel_data.rs"],
        holds: "ChannelData: parsing agrees with `turn-types` and stays inside the datagram",
    },
    Target {
        name: "frames",
        package: "wire",
        program: Program::Integration,
        test: "fuzz_frames::frames",
        max_len: 2000,
        about: &["crates/wire/src/frame.rs", "crates/wire/src/demux.rs"],
        holds: "streams: any split gives the same messages; buffers are bounded",
    },
    Target {
        name: "proxy_protocol",
        package: "wire",
        program: Program::Integration,
        test: "fuzz_proxy_protocol::proxy_protocol",
        max_len: 400,
        about: &["crates/wire/src/proxy_protocol.rs"],
        holds: "PROXY headers: any split gives the same result; headers round-trip and are bounded in length",
    },
    Target {
        name: "client_hello",
        package: "wire",
        program: Program::Integration,
        test: "fuzz_client_hello::client_hello",
        max_len: 600,
        about: &["crates/wire/src/client_hello.rs"],
        holds: "TLS ClientHellos: any split gives the same result, nothing is read twice, memory is bounded",
    },
    Target {
        name: "dtls_hello",
        package: "relay",
        program: Program::Unit,
        test: "dtls::hello::fuzz::dtls_hello",
        max_len: 1500,
        about: &["crates/relay/src/dtls/hello.rs", "crates/relay/src/dtls/cookie.rs"],
        holds: "ClientHellos: no cookie can be forged; ours is valid only for its client, time and ClientHello",
    },
    Target {
        name: "access_token",
        package: "turn",
        program: Program::Integration,
        test: "fuzz_access_token::access_token",
        max_len: 300,
        about: &["crates/turn/src/access_token.rs"],
        holds: "ACCESS-TOKEN, altered tokens and misbehaving issuers: nothing can be forged, memory is bounded",
    },
    Target {
        name: "quality",
        package: "turn",
        program: Program::Unit,
        test: "server::data::quality::fuzz::quality",
        max_len: 4000,
        about: &["crates/turn/src/server/data/quality"],
        holds: "quality of media: any traffic gives consistent totals in bounded memory",
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
        holds: "mobility tickets (also altered, old or another user's) at three workers: valid only for their user; an allocation has one owner and is counted once",
    },
    Target {
        name: "server",
        package: "turn",
        program: Program::Integration,
        test: "fuzz_server::server",
        max_len: 2000,
        about: &["crates/turn/src/server/"],
        holds: "event sequences: data is relayed only if an independent table allows it, replies to unauthenticated clients are at most 3 times as long as the request, counters agree, no state is left",
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
        holds: "configurations of `serve`: the number of errors is limited, each error has a position, no secret is printed, the printed form parses to the same configuration",
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
        holds: "files of `forward` in each format: the printed form parses to the same rules",
    },
    Target {
        name: "rule_argument",
        package: "config",
        program: Program::Unit,
        test: "forward::fuzz::rule_argument",
        max_len: 300,
        about: &["crates/config/src/forward/argument.rs", "crates/convert/src/forward/parts.rs"],
        holds: "rules on the command line: the printed TOML parses to the same rules",
    },
    Target {
        name: "rinetd_conf",
        package: "config",
        program: Program::Unit,
        test: "forward::fuzz::rinetd_conf",
        max_len: 600,
        about: &["crates/convert/src/forward/rinetd.rs"],
        holds: "rinetd.conf: the printed TOML parses to the same rules",
    },
    Target {
        name: "oxidinetd_toml",
        package: "config",
        program: Program::Unit,
        test: "forward::fuzz::oxidinetd_toml",
        max_len: 1000,
        about: &["crates/convert/src/forward/oxidinetd.rs"],
        holds: "oxidinetd's TOML: the printed form parses to the same rules",
    },
    Target {
        name: "turnserver_conf",
        package: "convert",
        program: Program::Unit,
        test: "coturn::fuzz::turnserver_conf",
        max_len: 1500,
        about: &["crates/convert/src/coturn"],
        holds: "coturn's turnserver.conf: the result is valid or reported as invalid, denies everything that coturn denies, and contains no duplicate comment",
    },
    Target {
        name: "sql_rows",
        package: "stores",
        program: Program::Unit,
        test: "tables::fuzz::sql_rows",
        max_len: 1200,
        about: &["crates/stores/src/tables.rs", "crates/stores/src/rules.rs", "crates/stores/src/keys.rs"],
        holds: "rows of coturn's tables and ours: order does not matter, no denial is lost, no secret is printed, exported rows can be read back",
    },
    Target {
        name: "redis_keys",
        package: "stores",
        program: Program::Unit,
        test: "redis::fuzz::redis_keys",
        max_len: 1200,
        about: &["crates/stores/src/redis.rs"],
        holds: "keys of any type in Redis: as `sql_rows`",
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
        holds: "requests on each API listener: replies match the description, contain no secret and change nothing without permission",
    },
    // Only root may load eBPF programs.
    Target {
        name: "offload_mirror",
        package: "offload",
        program: Program::Integration,
        test: "agreement::offload_mirror",
        max_len: 1100,
        about: &["crates/offload/src/mirror.rs"],
        holds: "packets and tables: the BPF programs (BPF_PROG_TEST_RUN) and their Rust mirror make the same decisions, byte for byte",
    },
];
