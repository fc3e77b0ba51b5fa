//! Tests of oxidinetd's TOML: a valid file, and each error with its message.

use std::{path::Path, time::Duration};

use turnpike_strict::parse_file;

use super::*;

const SAMPLE: &str = r#"
log_file = "/var/log/oi.log"
pid_file = "/run/oi.pid"
log_format = "common"

# Everywhere
[[global_rules]]
type = "allow"
pattern = "192.168.1.*"

[[global_rules]]
type = "deny"
pattern = "192.168.1.50"

[[forwarding_rules]]
bind_address = "0.0.0.0"
bind_port = 8080
connect_address = "192.168.1.2"
connect_port = 80

[[forwarding_rules]]
bind_address = "0.0.0.0"
bind_port = 53
connect_address = "dns.example.org"
connect_port = 53
protocol = "udp"
timeout = 1200
source_address = "192.168.1.1"

[[forwarding_rules.rules]]
type = "allow"
pattern = "192.168.1.0/24"

[[forwarding_rules.rules]]
type = "deny"
pattern = "192.168.1.9"

[[forwarding_rules]]
bind_address = "::1"
bind_port = 8081
connect_address = "::1"
connect_port = 9090
protocol = "udptotcp"

[[forwarding_rules]]
bind_address = "127.0.0.1"
bind_port = 8082
connect_address = "127.0.0.1"
connect_port = 9091
protocol = "tcptoudp"
"#;

fn parse(text: &str) -> Result<ForeignRules, Vec<String>> {
    let mut problems = Vec::new();
    let entries = parse_file(Path::new("o.toml"), text, &mut problems);
    let file = read(&entries, &super::super::tests::machine(""), &mut problems);
    if problems.is_empty() { Ok(file) } else { Err(problems.iter().map(ToString::to_string).collect()) }
}

#[test]
fn unchanged_oxidinetd_file_is_accepted() {
    let file = parse(SAMPLE).expect("valid");
    assert!(file.warnings.is_empty(), "{:?}", file.warnings);
    let shown: Vec<String> =
        file.drafts.iter().map(|draft| format!("{}={}", draft.rule.id.0, draft.rule.targets[0])).collect();
    assert_eq!(
        shown,
        [
            "tcp://0.0.0.0:8080=192.168.1.2:80",
            "udp://0.0.0.0:53=dns.example.org:53",
            "udptotcp://[::1]:8081=[::1]:9090",
            "tcptoudp://127.0.0.1:8082=127.0.0.1:9091",
        ]
    );
    assert_eq!(file.drafts[0].rule.idle, None);
    assert_eq!(file.drafts[2].rule.protocol, Protocol::UdpToTcp { framed: false });
    assert_eq!(file.drafts[2].rule.idle, Some(Duration::from_secs(72)), "its default");
    let udp = &file.drafts[1].rule;
    assert_eq!(udp.idle, Some(Duration::from_secs(1200)));
    assert_eq!(udp.source, Some("192.168.1.1".parse().expect("an address")));
    assert_eq!(parts::show_pattern(&udp.access.allow[0]), "192.168.1.0/24");
    assert_eq!(parts::show_pattern(&udp.access.deny[0]), "192.168.1.9");
    assert_eq!((file.access.allow.len(), file.access.deny.len()), (1, 1));
    let log = file.connection_file.expect("a log file");
    assert_eq!((log.path, log.format), (PathBuf::from("/var/log/oi.log"), LineFormat::Common));
    assert_eq!(file.pid_file, Some(PathBuf::from("/run/oi.pid")));
}

#[test]
fn unknown_keys_and_useless_timeouts_are_warnings() {
    let file = parse(
        "verbos = true\n[[forwarding_rules]]\nbind_address = \"0.0.0.0\"\nbind_port = 1\nconnect_address = \"a\"\nconnect_port = 2\n\
         timeout = 5\nsource_addres = \"x\"\n",
    )
    .expect("oxidinetd accepts the file");
    assert_eq!(
        file.warnings,
        [
            "o.toml:1:1: verbos: unknown key, ignored as in oxidinetd",
            "o.toml:8:1: forwarding_rules.source_addres: unknown key, ignored as in oxidinetd; did you mean \
             \"source_address\"?",
            "o.toml:7:11: timeout has no effect on TCP, as in oxidinetd",
        ]
    );
}

/// Keys of one rule, each on its own line, and the messages.
const WRONG: &[(&str, &[&str])] = &[
    (
        "bind_address = \"0.0.0.0\"\nbind_port = 80\n",
        &[
            "o.toml:1:1: connect_address: it is missing; expected a value",
            "o.toml:1:1: connect_port: it is missing; expected a value",
        ],
    ),
    (
        "bind_address = \"0.0.0.256\"\nbind_port = 80\nconnect_address = \"a b\"\nconnect_port = 0\n",
        &[
            "o.toml:2:16: bind_address: found the string \"0.0.0.256\": \"0.0.0.256\" is neither an address nor a host name; \
             expected an address of this machine",
            "o.toml:4:19: connect_address: found the string \"a b\": \"a b\" is neither an address nor a host name; expected \
             an address or a host name",
            "o.toml:5:16: connect_port: found the integer 0; expected a port, 1 to 65535",
        ],
    ),
    (
        "bind_address = 5\nbind_port = \"80\"\nconnect_address = \"a\"\nconnect_port = 1\nprotocol = \"sctp\"\n",
        &[
            "o.toml:2:16: bind_address: found the integer 5; expected a string",
            "o.toml:3:13: bind_port: found the string \"80\"; expected a port, 1 to 65535",
            "o.toml:6:12: protocol: found the string \"sctp\"; expected \"tcp\", \"udp\", \"udptotcp\" or \"tcptoudp\"",
        ],
    ),
    (
        "bind_address = \"::\"\nbind_port = 1\nconnect_address = \"a\"\nconnect_port = 1\nprotocol = \"udp\"\ntimeout = -1\n\
         rules = [{ type = \"permit\", pattern = \"*\" }, { type = \"deny\", pattern = \"host\" }]\n",
        &[
            "o.toml:8:19: type: found the string \"permit\"; expected \"allow\" or \"deny\"",
            "o.toml:8:73: pattern: found the string \"host\": it is not an address pattern; expected an address with * and \
             ? such as \"192.168.*\" or \"fe80:*\", or a prefix such as \"10.0.0.0/8\"",
            "o.toml:7:11: timeout: found the integer -1; expected seconds, 1 to 31536000",
        ],
    ),
];

#[test]
fn each_mistake_names_line_column_key_and_form() {
    for (keys, messages) in WRONG {
        let found = parse(&format!("[[forwarding_rules]]\n{keys}")).expect_err(keys);
        assert_eq!(found, *messages);
    }
    assert_eq!(
        parse("forwarding_rules = 5").expect_err("no array"),
        [
            "o.toml:1:20: forwarding_rules: found the integer 5; expected an array of tables, [[forwarding_rules]]"
        ]
    );
    assert_eq!(
        parse("log_format = \"xml\"\nforwarding_rules = []").expect_err("not a format"),
        ["o.toml:1:14: log_format: found the string \"xml\"; expected \"rinetd\" or \"common\""]
    );
}
