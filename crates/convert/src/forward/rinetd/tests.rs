//! Tests of rinetd.conf: valid files, and each error with its message.

use std::time::Duration;

use turnpike_rules::Bind;

use super::*;

const SERVICES: &str = "http 80/tcp www\ndomain 53/tcp\ndomain 53/udp\nsnmp-trap 162/udp\n";

fn parse(text: &str) -> std::result::Result<ForeignRules, Vec<String>> {
    let mut problems = Vec::new();
    let conf = read(Path::new("r.conf"), text, &super::super::tests::machine(SERVICES), &mut problems);
    if problems.is_empty() { Ok(conf) } else { Err(problems.iter().map(ToString::to_string).collect()) }
}

fn conf(text: &str) -> ForeignRules {
    parse(text).unwrap_or_else(|problems| panic!("{text}: {problems:?}"))
}

fn rule(line: &str) -> Rule {
    let mut drafts = conf(line).drafts;
    assert_eq!(drafts.len(), 1, "{line}");
    drafts.remove(0).rule
}

fn patterns(list: &[Pattern]) -> Vec<String> {
    list.iter().map(parts::show_pattern).collect()
}

#[test]
fn rules_are_parsed_as_in_rinetd() {
    for (line, protocol, listen, target) in [
        ("0.0.0.0 80 10.1.1.2 8080", Protocol::Tcp, "0.0.0.0:80", "10.1.1.2:8080"),
        ("  0\t80/tcp  10.1.1.2\t80   # note", Protocol::Tcp, "0.0.0.0:80", "10.1.1.2:80"),
        ("127.0.0.1 http db-1.example.org www", Protocol::Tcp, "127.0.0.1:80", "db-1.example.org:80"),
        ("127.0.0.1 domain/udp 10.0.0.1 domain/udp", Protocol::Udp, "127.0.0.1:53", "10.0.0.1:53"),
        (
            "127.0.0.1 snmp-trap/udp _a.example.org. 9/udp",
            Protocol::Udp,
            "127.0.0.1:162",
            "_a.example.org.:9",
        ),
        ("::1 80 fe80::1 80", Protocol::Tcp, "[::1]:80", "[fe80::1]:80"),
        ("[::1] 80 [::1] 81", Protocol::Tcp, "[::1]:80", "[::1]:81"),
        ("0.0.0.0 8000/udp 10.1.1.2 80", Protocol::UdpToTcp { framed: false }, "0.0.0.0:8000", "10.1.1.2:80"),
        ("0.0.0.0 8000 10.1.1.2 80/udp", Protocol::TcpToUdp { framed: false }, "0.0.0.0:8000", "10.1.1.2:80"),
        ("127.0.0.1 80 10.1.1.2 80[src=10.0.0.1]#note", Protocol::Tcp, "127.0.0.1:80", "10.1.1.2:80"),
        ("127.0.0.1 80 10.1.1.2 80\r", Protocol::Tcp, "127.0.0.1:80", "10.1.1.2:80"),
    ] {
        let rule = rule(line);
        assert_eq!(rule.protocol, protocol, "{line}");
        assert_eq!(parts::show_listener(&rule.bind, rule.ports), listen, "{line}");
        assert_eq!(rule.targets.iter().map(ToString::to_string).collect::<Vec<_>>(), [target], "{line}");
    }
    assert_eq!(rule("localhost 80 10.0.0.1 80").bind, Bind::Name("localhost".to_owned()));
    assert_eq!(rule("0.0.0.0 1 Host.Example 2").targets[0].host, Host::Name("host.example".to_owned()));
}

#[test]
fn options_are_parsed_with_and_without_spaces() {
    for line in [
        "0.0.0.0 1/udp 10.0.0.1 2/udp [timeout=1200,src=10.0.0.9,keepalive=off]",
        "0.0.0.0 1/udp 10.0.0.1 2/udp [ src = 10.0.0.9 , keepalive = off , timeout = 1200 ] # note",
    ] {
        let rule = rule(line);
        assert_eq!(rule.idle, Some(Duration::from_secs(1200)), "{line}");
        assert_eq!(rule.source, Some("10.0.0.9".parse().expect("an address")), "{line}");
        assert!(!rule.keepalive, "{line}");
    }
    assert_eq!(rule("0.0.0.0 1/udp 10.0.0.1 2/udp").idle, Some(Duration::from_secs(72)));
    assert_eq!(rule("0.0.0.0 1/udp 10.0.0.1 2/udp [timeout=0]").idle, Some(Duration::from_secs(72)));
    assert_eq!(rule("0.0.0.0 1 10.0.0.1 2 [src=0]").source, None);
}

#[test]
fn timeout_of_a_tcp_rule_is_ignored_with_a_warning() {
    let conf = conf("0.0.0.0 1 10.0.0.1 2 [timeout=5]");
    assert_eq!(conf.drafts[0].rule.idle, None);
    assert_eq!(conf.warnings, ["r.conf:1:23: timeout has no effect on TCP, as in rinetd"]);
}

#[test]
fn patterns_before_the_first_rule_are_global() {
    let conf = conf(
        "allow 192.168.*\ndeny 192.168.2.1?\n0.0.0.0 1 a 1\nallow 10.*\nallow FE80:*\n0.0.0.0 2 b 2\ndeny 10.0.0.66\nDENY 10.0.0.0/8\n",
    );
    assert_eq!(patterns(&conf.access.allow), ["192.168.*"]);
    assert_eq!(patterns(&conf.access.deny), ["192.168.2.1?"]);
    assert_eq!(patterns(&conf.drafts[0].rule.access.allow), ["10.*", "fe80:*"]);
    assert!(conf.drafts[0].rule.access.deny.is_empty());
    assert!(conf.drafts[1].rule.access.allow.is_empty());
    assert_eq!(patterns(&conf.drafts[1].rule.access.deny), ["10.0.0.66", "10.0.0.0/8"]);
}

#[test]
fn log_and_pid_files_are_parsed() {
    let conf =
        conf("logfile /var/log/r#1.log\nlogcommon # as Apache\npidlogfile \"/run/a b.pid\"\n0.0.0.0 1 a 1\n");
    let file = conf.connection_file.expect("a log file");
    assert_eq!((file.path, file.format), (PathBuf::from("/var/log/r#1.log"), LineFormat::Common));
    assert_eq!(conf.pid_file, Some(PathBuf::from("/run/a b.pid")));
    assert_eq!(parse("logcommon\n0.0.0.0 1 a 1").map(|conf| conf.connection_file), Ok(None));
}

const WRONG: &[(&str, &str)] = &[
    (
        "0.0.0.0 80 10.0.0.1",
        "r.conf:1:20: the line ends before connectport; expected bindaddress bindport connectaddress connectport [options], \
         such as 0.0.0.0 80 10.0.0.2 8080",
    ),
    (
        "0.0.0.0 80 # 10.0.0.1 80",
        "r.conf:1:12: the line ends before connectaddress; expected bindaddress bindport connectaddress connectport \
         [options], such as 0.0.0.0 80 10.0.0.2 8080",
    ),
    (
        "0.0.0.256 80 10.0.0.1 80",
        "r.conf:1:1: bindaddress 0.0.0.256: \"0.0.0.256\" is neither an address nor a host name; expected an IPv4 or IPv6 \
         address or a host name",
    ),
    (
        "0.0.0.0 65536 10.0.0.1 80",
        "r.conf:1:9: bindport 65536: not a port; expected a port from 1 to 65535 or a service name, optionally followed by /tcp or /udp (default: tcp)",
    ),
    (
        "0.0.0.0 80 10.0.0.1 htp",
        "r.conf:1:21: connectport htp: /etc/services has no tcp service of this name; expected a port from 1 to 65535 or a \
         service name, optionally followed by /tcp or /udp (default: tcp); did you mean \"http\"?",
    ),
    (
        "0.0.0.0 http/udp 10.0.0.1 80",
        "r.conf:1:9: bindport http/udp: /etc/services has no udp service of this name; expected a port from 1 to 65535 or a \
         service name, optionally followed by /tcp or /udp (default: tcp); did you mean \"http\"?",
    ),
    (
        "0.0.0.0 80/sctp 10.0.0.1 80",
        "r.conf:1:9: bindport 80/sctp: no such protocol; expected a port from 1 to 65535 or a service name, optionally followed by /tcp or /udp (default: tcp)",
    ),
    (
        "0.0.0.0 80 10.0.0.1 0",
        "r.conf:1:21: port 0 cannot be a target; expected a port from 1 to 65535 or a service name, optionally followed by /tcp or /udp (default: tcp)",
    ),
    (
        "0.0.0.0 0 10.0.0.1 80",
        "r.conf:1:9: bindport 0: the kernel would choose a random port; expected a port from 1 to 65535 or a service \
         name, optionally followed by /tcp or /udp (default: tcp)",
    ),
    (
        "0.0.0.0 80-90 10.0.0.1 80",
        "r.conf:1:9: bindport 80-90: not a port; expected a port from 1 to 65535 or a service name, optionally followed by /tcp or /udp (default: tcp)",
    ),
    (
        "0.0.0.0 80 10.0.0.1 80 fast",
        "r.conf:1:24: found \"fast\" after the end of the entry; expected the end of the line, or a # comment",
    ),
    (
        "0.0.0.0 80 10.0.0.1 80 [timeout=5",
        "r.conf:1:24: the options have no closing ]; expected [timeout=SECONDS, src=ADDRESS, keepalive=on|off], each at most \
         once",
    ),
    (
        "0.0.0.0 80 10.0.0.1 80 [src=10.0.0.9, timout=5]",
        "r.conf:1:39: unknown option \"timout\"; expected [timeout=SECONDS, src=ADDRESS, keepalive=on|off], each at most once; \
         did you mean \"timeout\"?",
    ),
    (
        "0.0.0.0 80/udp 10.0.0.1 80 [timeout=soon]",
        "r.conf:1:29: timeout \"soon\": not a number of seconds; expected [timeout=SECONDS, src=ADDRESS, keepalive=on|off], each \
         at most once",
    ),
    (
        "0.0.0.0 80 10.0.0.1 80 [keepalive=maybe]",
        "r.conf:1:25: keepalive \"maybe\": neither on nor off; expected [timeout=SECONDS, src=ADDRESS, keepalive=on|off], each \
         at most once",
    ),
    (
        "0.0.0.0 80 10.0.0.1 80 []",
        "r.conf:1:25: found the option \"\"; expected [timeout=SECONDS, src=ADDRESS, keepalive=on|off], each at most once",
    ),
    (
        "alow 10.*",
        "r.conf:1:1: found \"alow\"; expected bindaddress bindport connectaddress connectport [options], such as 0.0.0.0 80 \
         10.0.0.2 8080, or one of allow, deny, logfile, logcommon, pidlogfile; did you mean \"allow\"?",
    ),
    (
        "deny example.org",
        "r.conf:1:6: pattern \"example.org\": it is not an address pattern; expected an address with * and ? such as \
         \"192.168.*\" or \"fe80:*\", or a prefix such as \"10.0.0.0/8\"",
    ),
    (
        "allow",
        "r.conf:1:6: pattern \"\": it is not an address pattern; expected an address with * and ? such as \"192.168.*\" or \
         \"fe80:*\", or a prefix such as \"10.0.0.0/8\"",
    ),
    (
        "logfile",
        "r.conf:1:8: the file name is missing; expected the path of a file, in double quotes if it contains spaces",
    ),
    (
        "logfile \"/a b",
        "r.conf:1:9: the quotes are empty or not closed; expected the path of a file, in double quotes if it contains spaces",
    ),
    (
        "logcommon yes",
        "r.conf:1:11: found \"yes\" after the end of the entry; expected the end of the line, or a # comment",
    ),
];

#[test]
fn each_mistake_names_line_column_and_form() {
    for (line, message) in WRONG {
        assert_eq!(parse(line).expect_err(line), [*message]);
    }
}

#[test]
fn every_invalid_line_is_reported() {
    let problems = parse("0.0.0.0 80\n0.0.0.0 80 10.0.0.1 80\nallow x\n\n0.0.0.0 1 10.0.0.1 99999\n")
        .expect_err("wrong");
    let places: Vec<&str> = problems.iter().filter_map(|problem| problem.split(": ").next()).collect();
    assert_eq!(places, ["r.conf:1:11", "r.conf:3:7", "r.conf:5:20"]);
}

#[test]
fn impossible_pattern_is_a_warning_with_a_suggestion() {
    let conf = conf("allow 10.0\n0.0.0.0 80 10.0.0.1 80\ndeny 127.0.0\ndeny 999.0.0.1\ndeny 10.*\n");
    assert_eq!(
        conf.warnings,
        [
            "r.conf:1:7: no address matches the pattern \"10.0\", so it allows no client, as in rinetd; did you mean \"10.0.*\"?",
            "r.conf:3:6: no address matches the pattern \"127.0.0\", so it refuses no client, as in rinetd; did you mean \"127.0.0.*\"?",
            "r.conf:4:6: no address matches the pattern \"999.0.0.1\", so it refuses no client, as in rinetd",
        ]
    );
    assert_eq!(patterns(&conf.drafts[0].rule.access.deny), ["127.0.0", "999.0.0.1", "10.*"]);
}

#[test]
fn names_are_resolved_only_if_all_lines_are_valid() {
    let names = "0.0.0.0 80 10.0.0.1 80 [src=a.invalid]\n0.0.0.0 81 10.0.0.1 81 [src=b.invalid]\n\
                 0.0.0.0 82 10.0.0.1 82 [src=a.invalid]\n";
    let wrong = parse(&format!("{names}0.0.0.0 80 10.0.0.1\n")).expect_err("one line is invalid");
    assert_eq!(wrong.len(), 1, "{wrong:?}");
    assert!(wrong[0].starts_with("r.conf:4:20: "), "{wrong:?}");
    let unknown = parse(names).expect_err("RFC 2606 reserves these names");
    let places = ["r.conf:1:25: src a.invalid: ", "r.conf:2:25: src b.invalid: ", "r.conf:3:25: "];
    assert_eq!(unknown.len(), places.len(), "{unknown:?}");
    for (told, place) in unknown.iter().zip(places) {
        assert!(told.starts_with(place) && told.contains("cannot be resolved"), "{told}");
    }
    let known = conf("localhost 80 10.0.0.1 80 [src=localhost]\n").drafts.remove(0).rule;
    assert!(known.source.is_some_and(|source| source.ip().is_loopback()));
    assert_eq!(known.id.0, "tcp://localhost:80");
}

#[test]
fn file_without_a_valid_line_is_reported_once() {
    let told = parse("this is a letter to you\nand has no rule in it\n\nat all, at all\nis it?\n")
        .expect_err("no rules");
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].starts_with("r.conf:1:6: bindport is: /etc/services has no tcp service of this name; 3 more lines are invalid too"), "{told:?}");
    assert!(
        told[0].contains("expected a rinetd.conf with lines of the form bindaddress bindport"),
        "{told:?}"
    );
    // All errors are reported if one line is valid.
    assert_eq!(parse("a b c d\na b c d\na b c d\na b c d\n0 1 10.0.0.1 2\n").expect_err("wrong").len(), 4);
}

#[test]
fn unchanged_rinetd_sample_is_accepted() {
    let text = include_str!("../../../../../examples/rinetd.conf");
    let conf = conf(text);
    assert_eq!(conf.drafts.len(), 6);
    assert_eq!(patterns(&conf.access.allow), ["192.168.*", "127.0.0.1", "fe80:*"]);
    assert_eq!(patterns(&conf.drafts[3].rule.access.deny), ["192.168.7.66"]);
    assert_eq!(conf.drafts[2].rule.idle, Some(Duration::from_secs(1200)));
    assert!(conf.warnings.is_empty());
}

#[test]
fn mapped_address_pattern_becomes_ipv4() {
    let conf = conf(
        ":: 38003 10.0.0.1 80\ndeny ::FFFF:10.*\ndeny ::ffff:192.0.2.1\ndeny ::ffff:10.0\ndeny ::ffff:10.0.0.0/104\n",
    );
    assert_eq!(patterns(&conf.drafts[0].rule.access.deny), ["10.*", "192.0.2.1", "10.0", "10.0.0.0/8"]);
    assert_eq!(
        conf.warnings,
        [
            "r.conf:4:6: no address matches the pattern \"::ffff:10.0\", so it refuses no client, as in rinetd; did you mean \"10.0.*\"?"
        ]
    );
}
