//! Tests of rules and settings as a whole: command line, our TOML, precedence, file formats, output.

use std::time::Duration;

use turnpike_convert::forward::{Services, parts};
use turnpike_rules::{Balance, CopyMode, Endpoint, Host, Pattern, PortRange, Protocol, ProxyVersion, Rule};
use turnpike_strict::parse_file;

use super::*;
use crate::{DatapathChoice, KeyChange};

mod docs;

const EXAMPLE: &str = include_str!("../../../../examples/forward.toml");
const RINETD: &str = include_str!("../../../../examples/rinetd.conf");

pub(super) fn machine() -> ForwardHost {
    let resolve = |name: &str| match name {
        "localhost" => Ok(Some(std::net::Ipv4Addr::LOCALHOST.into())),
        "nowhere" => Ok(None),
        _ => Err(std::io::Error::other("unknown name in tests")),
    };
    ForwardHost { services: Services::of_this_machine(), resolve }
}

fn load(
    file: Option<&str>,
    arguments: &[&str],
    environment: &[(&str, &str)],
    flags: Flags,
) -> Result<ForwardLoaded, Mistakes> {
    let environment =
        environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let sources = ForwardSources {
        sources: Sources::new(None, environment, flags),
        arguments: arguments.iter().map(|&argument| argument.to_owned()).collect(),
    };
    sources.merge(file.map(|text| (Path::new("f.conf"), text)), Vec::new())
}

fn from_arguments(arguments: &[&str]) -> Result<ForwardLoaded, Mistakes> {
    load(None, arguments, &[], Flags::new())
}

fn from_file(text: &str) -> Result<ForwardLoaded, Mistakes> {
    load(Some(text), &[], &[], Flags::new())
}

fn argument(text: &str) -> Rule {
    let mut rules = from_arguments(&[text]).expect("a valid rule").settings.rules;
    assert_eq!(rules.len(), 1);
    rules.remove(0)
}

fn ports(first: u16, last: u16) -> PortRange {
    PortRange { first, last }
}

fn ip(host: &str, port: u16) -> Endpoint {
    Endpoint { host: Host::Ip(host.parse().expect("an address")), ports: ports(port, port), weight: 1 }
}

#[test]
fn spellings_of_other_programs_get_suggestions() {
    for (options, end) in [
        ("&targets=a:1", "did you mean \"target\"?"),
        ("&timeout=60", "did you mean \"idle\"?"),
        ("&keepalive=on", "did you mean \"true\"?"),
        ("&nodelay=0", "did you mean \"false\"?"),
        ("&idle=5m", "did you mean \"300\"?"),
        ("&max_bytes_per_second=10M", "did you mean \"10000000\"?"),
        ("&max_bytes_per_second=10m", "did you mean \"10000000\"?"),
        ("&max_connections=10m", "1 to 1000000"),
        ("&balance=leastconn", "did you mean \"least-connections\"?"),
        ("&balance=roundrobin", "did you mean \"round-robin\"?"),
        ("&balance=sorce", "did you mean \"source\"?"),
        ("&mark=99999999999", "such as 0x10"),
    ] {
        let told = from_arguments(&[&format!("tcp://0.0.0.0:1=a:1?name=x{options}")])
            .expect_err(options)
            .to_string();
        assert!(told.ends_with(end), "{told}");
    }
    for (argument, meant) in [
        ("tcp://:8080=a:1", "0.0.0.0:8080"),
        ("tcp://*:8080-8090=a:1", "0.0.0.0:8080-8090"),
        ("tcp://8080=a:1", "0.0.0.0:8080"),
        ("/etc/rinetd.conf", "-c /etc/rinetd.conf"),
        ("forward.toml", "-c forward.toml"),
        ("udp+tcp://0.0.0.0:1=a:1", "tcp+udp"),
    ] {
        let told = from_arguments(&[argument]).expect_err(argument).to_string();
        assert!(told.ends_with(&format!("; did you mean \"{meant}\"?")), "{told}");
    }
    let realm =
        "[network]\nuse_udp = true\n[[endpoints]]\nlisten = \"0.0.0.0:5000\"\nremote = \"1.1.1.1:443\"\n";
    let told = from_file(realm).expect_err("another program's").to_string();
    assert_eq!(told.lines().count(), 1, "{told}");
    assert!(
        told.contains("this looks like a configuration file of the port forwarder realm")
            && told.contains("tcp+udp"),
        "{told}"
    );
}

#[test]
fn tcp_plus_udp_becomes_two_rules() {
    let ids = |loaded: ForwardLoaded| {
        loaded.settings.rules.iter().map(|rule| (rule.id.0.clone(), rule.protocol)).collect::<Vec<_>>()
    };
    let both = from_arguments(&["tcp+udp://0.0.0.0:53=10.0.0.2:53?idle=60"]).expect("two rules");
    assert_eq!(
        ids(both),
        [("tcp://0.0.0.0:53".to_owned(), Protocol::Tcp), ("udp://0.0.0.0:53".to_owned(), Protocol::Udp)]
    );
    let rule = "[[rule]]\nname = \"dns\"\nprotocol = \"tcp+udp\"\nlisten = \"0.0.0.0:53\"\ntarget = \"10.0.0.2:53\"\n";
    let both = from_file(rule).expect("two rules");
    assert_eq!(ids(both), [("dns-tcp".to_owned(), Protocol::Tcp), ("dns-udp".to_owned(), Protocol::Udp)]);
    let told = from_arguments(&["tcp+udp://0.0.0.0:53=10.0.0.2"]).expect_err("no port");
    assert_eq!(told.0.len(), 1, "{told}");
    let keys = "half_close_timeout=9&user_timeout=5&keepalive_count=3&copy=splice&any_port=true";
    let both = from_arguments(&[&format!("tcp+udp://0.0.0.0:53=10.0.0.2:53?{keys}")]).expect("two rules");
    let of_tcp = |rule: &Rule| rule.timers.user_timeout.is_some() && rule.half_close_timeout.is_some();
    let [tcp, udp] = &both.settings.rules[..] else { panic!("{both:?}") };
    assert!(of_tcp(tcp) && !tcp.any_port && !of_tcp(udp) && udp.any_port, "{both:?}");
    assert!(from_arguments(&["tcp+udp://0.0.0.0:53=a:53?user_timeout=x"]).is_err());
    assert!(from_arguments(&["tcp+udp://0.0.0.0:53=a:53?any_port=x"]).is_err());
}

#[test]
fn pattern_that_matches_no_address_is_refused() {
    for (text, meant) in [
        ("127.0.0", "; did you mean \"127.0.0.*\"?"),
        ("127.0.0.*.*", "; did you mean \"127.0.0.*\"?"),
        ("999.0.0.1", ""),
        ("0000:*", "; did you mean \"::/16\"?"),
    ] {
        for key in ["allow", "deny"] {
            let rule = format!("tcp://0.0.0.0:1=10.0.0.2:1?{key}={text}");
            let told = from_arguments(&[&rule]).expect_err(text).to_string();
            assert!(
                told.contains(&format!(
                    "rule.{key}: found {text:?}: no address matches it; expected an address with * "
                )),
                "{told}"
            );
            assert!(told.ends_with(&format!("\"10.0.0.0/8\"{meant}")), "{told}");
            let file = format!(
                "[forward]\n{key} = [\"10.*\", \"{text}\"]\n[[rule]]\nlisten = \"0.0.0.0:1\"\ntarget = \"a:1\"\n"
            );
            let told = from_file(&file).expect_err(text).to_string();
            assert!(
                told.contains(&format!("forward.{key}: found the string {text:?}: no address matches it")),
                "{told}"
            );
        }
    }
}

#[test]
fn minimal_rule_has_the_documented_defaults() {
    let rule = argument("tcp://0.0.0.0:9000=10.0.0.2:9001");
    assert_eq!(rule.id.0, "tcp://0.0.0.0:9000");
    assert_eq!((rule.protocol, rule.ports), (Protocol::Tcp, ports(9000, 9000)));
    assert_eq!(rule.targets, [ip("10.0.0.2", 9001)]);
    assert_eq!((rule.idle, rule.connect_timeout), (None, Duration::from_secs(10)));
    assert!(rule.keepalive && rule.nodelay && !rule.transparent);
    assert!(rule.proxy_protocol_from.is_empty() && rule.half_close_timeout.is_none());
    assert_eq!((rule.max_connections, rule.copy, rule.send_proxy), (16_384, CopyMode::Auto, None));
    assert_eq!(argument("udp://[::]:53=10.0.0.2:53").idle, Some(Duration::from_secs(72)), "as rinetd");
}

#[test]
fn ranges_targets_names_and_options_are_parsed() {
    let rule = argument(
        "tcp://[::1]:9000-9010=db-1.example.org:9000-9010,[2001:db8::2]:80?proxy=v2&copy=splice&idle=60&balance=failover\
         &health=5&source=2001:db8::1&device=eth0&mark=0x10&allow=10.*,192.168.0.0/16&deny=10.0.0.?&keepalive=false&nodelay\
         &proxy_protocol_from=10.0.0.2,192.168.0.0/16&half_close_timeout=30&connect_timeout=3&max_connections=7&name=web",
    );
    assert_eq!((rule.id.0.as_str(), rule.ports), ("web", ports(9000, 9010)));
    assert_eq!(rule.bind, "::1".parse::<std::net::IpAddr>().expect("an address").into());
    assert_eq!(
        rule.targets,
        [
            Endpoint { host: Host::Name("db-1.example.org".to_owned()), ports: ports(9000, 9010), weight: 1 },
            ip("2001:db8::2", 80)
        ]
    );
    assert_eq!((rule.send_proxy, rule.copy), (Some(ProxyVersion::V2), CopyMode::Splice));
    assert_eq!((rule.balance, rule.health), (Balance::Failover, Some(Duration::from_secs(5))));
    assert_eq!(rule.idle, Some(Duration::from_secs(60)));
    assert_eq!((rule.device.as_deref(), rule.mark), (Some("eth0"), Some(16)));
    assert_eq!(rule.access.allow[0], Pattern::Wildcard("10.*".to_owned()));
    assert_eq!(rule.access.allow[1], Pattern::Prefix("192.168.0.0".parse().expect("an address"), 16));
    assert_eq!(rule.access.deny, [Pattern::Wildcard("10.0.0.?".to_owned())]);
    assert!(!rule.keepalive && rule.nodelay);
    let proxies: Vec<String> = rule.proxy_protocol_from.iter().map(parts::show_proxy).collect();
    assert_eq!(proxies, ["10.0.0.2/32", "192.168.0.0/16"]);
    assert_eq!(rule.half_close_timeout, Some(Duration::from_secs(30)));
    assert_eq!((rule.connect_timeout, rule.max_connections), (Duration::from_secs(3), 7));
}

#[test]
fn weights_follow_the_target_or_are_in_a_table() {
    let rule = argument("tcp://0.0.0.0:1=10.0.0.1:80*3,[::1]:80,a.example:80*0?balance=source");
    let weights = |rule: &Rule| rule.targets.iter().map(|target| target.weight).collect::<Vec<_>>();
    assert_eq!((weights(&rule), rule.balance), (vec![3, 1, 0], Balance::Source));
    let file = "[[rule]]\nlisten = \"0.0.0.0:1\"\nbalance = \"source\"\n\
        target = [{ address = \"10.0.0.1:80\", weight = 3 }, \"[::1]:80\", { address = \"a.example:80*7\", weight = 0 }]\n";
    let from_table = from_file(file).expect("valid").settings;
    assert_eq!(from_table.rules[0].targets, rule.targets);
    let again = from_file(&from_table.to_toml()).expect("valid").settings;
    assert_eq!(again.rules[0].targets, rule.targets);
    let one = from_file("[[rule]]\nlisten = \"0.0.0.0:1\"\ntarget = { address = \"a:1\", weight = 2 }\n")
        .expect("valid");
    assert_eq!(weights(&one.settings.rules[0]), [2]);
}

#[test]
fn kernel_forwarding_is_set_for_all_rules_or_one() {
    let text = "[forward]\ndatapath = \"kernel\"\nkernel_flows = 20\ncopy = \"kernel\"\n\
        [[rule]]\nlisten = \"0.0.0.0:1\"\nprotocol = \"udp\"\ntarget = \"a:1\"\n\
        [[rule]]\nlisten = \"0.0.0.0:2\"\nprotocol = \"udp\"\ntarget = \"a:1\"\nkernel = false\nmark = 1\n\
        [[rule]]\nlisten = \"0.0.0.0:3\"\nprotocol = \"udp\"\ntarget = \"a:1\"\nkernel = true\n\
        [[rule]]\nlisten = \"0.0.0.0:4\"\ntarget = \"a:1\"\n\
        [[rule]]\nlisten = \"0.0.0.0:5\"\ntarget = \"a:1\"\ncopy = \"splice\"\n";
    let settings = from_file(text).expect("valid").settings;
    assert_eq!((settings.datapath, settings.kernel_flows), (DatapathChoice::Kernel, 20));
    let kernel: Vec<_> = settings.rules.iter().map(|rule| rule.kernel).collect();
    assert_eq!(kernel, [None, Some(false), Some(true), None, None]);
    assert_eq!(settings.rules[3].copy, CopyMode::Kernel);
    assert_eq!(settings.rules[4].copy, CopyMode::Splice);
    let mut again = from_file(&settings.to_toml()).expect("valid").settings;
    again.origins = settings.origins.clone();
    assert_eq!(again, settings);
    // `datapath` can select user space for all rules while one rule uses the kernel.
    let basic =
        from_file("[forward]\ndatapath = \"basic\"\n[[rule]]\nlisten = \"0.0.0.0:1\"\ntarget = \"a:1\"\n");
    let basic = basic.expect("valid").settings.datapath;
    assert_eq!(basic, DatapathChoice::Step(turnpike_net::Datapath::Basic));
    assert_eq!(argument("udp://0.0.0.0:53=a:53?kernel").kernel, Some(true));
}

#[test]
fn errors_in_a_target_table_name_their_position() {
    let told = |table: &str| {
        let text = format!("[[rule]]\nlisten = \"0.0.0.0:1\"\ntarget = [{{ {table} }}]\n");
        from_file(&text).expect_err("wrong").to_string()
    };
    assert!(told("weight = 3").starts_with("f.conf:3:11: rule.target: found a table: it has no address; "));
    let found = told("address = \"a:1\", weigth = 3");
    assert!(
        found.starts_with("f.conf:3:30: rule.target.weigth: unknown key; did you mean \"weight\"?"),
        "{found}"
    );
    let found = told("address = \"a:1\", weight = 300");
    assert!(
        found
            .starts_with("f.conf:3:39: rule.target: found the integer 300: a weight is a number, 0 to 256; "),
        "{found}"
    );
}

#[test]
fn four_protocols_have_schemes() {
    for (text, protocol) in [
        ("tcp://0.0.0.0:1=a:1", Protocol::Tcp),
        ("udp://0.0.0.0:1=a:1", Protocol::Udp),
        ("udptotcp://0.0.0.0:1=a:1", Protocol::UdpToTcp { framed: false }),
        ("tcptoudp://0.0.0.0:1=a:1?framed", Protocol::TcpToUdp { framed: true }),
    ] {
        assert_eq!(argument(text).protocol, protocol, "{text}");
    }
}

#[test]
fn limits_unix_sockets_and_ipv6_only_are_parsed() {
    let rule = argument(
        "tcp://[::]:80=10.0.0.2:80?ipv6_only=false&max_connections_per_client=20&new_connections_per_client=5\
         &max_bytes_per_second=1000000&max_bytes_per_second_per_connection=1000",
    );
    assert!(!rule.ipv6_only);
    let limits = turnpike_rules::Limits {
        max_connections_per_client: Some(20),
        new_connections_per_client: Some(5),
        max_bytes_per_second: Some(1_000_000),
        max_bytes_per_second_per_connection: Some(1000),
    };
    assert_eq!(rule.limits, limits);
    let plain = argument("tcp://[::]:80=10.0.0.2:80?max_bytes_per_second=0&max_connections_per_client=0");
    assert!(plain.ipv6_only && plain.limits == turnpike_rules::Limits::default());

    let unix = |name: &str| name.parse::<turnpike_rules::UnixName>().expect("a name");
    let rule = argument("unix:///run/in.sock=unix:@app,10.0.0.2:80?socket_mode=660");
    assert_eq!(
        (rule.bind, rule.socket_mode),
        (turnpike_rules::Bind::Unix(unix("/run/in.sock")), Some(0o660))
    );
    assert_eq!(rule.id.0, "tcp://unix:/run/in.sock");
    assert_eq!(rule.targets[0].host, Host::Unix(unix("@app")));
    assert_eq!(rule.targets[1], ip("10.0.0.2", 80));
}

#[test]
fn source_address_may_have_a_zone() {
    let settings = |source: &str| {
        let loaded = from_arguments(&[&format!("udp://0.0.0.0:1=[fe80::2%lo]:1?source={source}")])?;
        Ok::<_, Mistakes>(loaded.settings.rules[0].source.map(|source| source.to_string()))
    };
    assert_eq!(settings("fe80::1%lo").expect("valid"), Some("fe80::1%1".to_owned()));
    let told = settings("fe80::1%nowhere9").expect_err("no such interface").to_string();
    assert!(
        told.contains("rule.source: found \"fe80::1%nowhere9\": this machine has no interface of that name"),
        "{told}"
    );
}

#[test]
fn keys_invalid_for_unix_sockets_or_a_single_family_are_refused() {
    for (text, key, why) in [
        ("udp://unix:/a=10.0.0.2:80", "rule.listen", "only stream-type Unix sockets are supported"),
        ("udptotcp://0.0.0.0:1=unix:/a", "rule.target", "only stream-type Unix sockets are supported"),
        ("tcp://0.0.0.0:1=unix:/a?source=10.0.0.1", "rule.source", "unix:/a has no address and no route"),
        ("tcp://0.0.0.0:1=unix:/a?mark=1", "rule.mark", "unix:/a has no address and no route"),
        ("tcp://0.0.0.0:1=unix:/a?copy=kernel", "rule.copy", "the kernel forwards only between TCP sockets"),
        ("unix:///a=10.0.0.2:80?copy=kernel", "rule.copy", "the kernel forwards only between TCP sockets"),
        (
            "tcp://0.0.0.0:1=unix:/a?transparent=true",
            "rule.transparent",
            "unix:/a has no address and no route",
        ),
        (
            "tcp://0.0.0.0:1=10.0.0.2:80?socket_mode=660",
            "rule.socket_mode",
            "does not listen on a Unix socket",
        ),
        (
            "unix:///a=10.0.0.2:80?socket_mode=888",
            "rule.socket_mode",
            "found \"888\"; expected permissions in octal",
        ),
        ("unix:///a=10.0.0.2:80?allow=10.*", "rule.allow", "clients of a Unix socket have no address"),
        (
            "unix:///a=10.0.0.2:80?max_connections_per_client=1",
            "rule.max_connections_per_client",
            "have no address",
        ),
        (
            "unix:///a=10.0.0.2:80?transparent=true",
            "rule.transparent",
            "clients of a Unix socket have no address",
        ),
        ("unix://a=10.0.0.2:80", "rule.listen", "a Unix socket is an absolute path, or @ and a name"),
        ("tcp://0.0.0.0:1=10.0.0.2:80?ipv6_only=false", "rule.ipv6_only", "0.0.0.0:1 has only one family"),
        ("tcp://[::1]:1=10.0.0.2:80?ipv6_only=false", "rule.ipv6_only", "[::1]:1 has only one family"),
        (
            "tcp://0.0.0.0:1=10.0.0.2:80?max_bytes_per_second=999",
            "rule.max_bytes_per_second",
            "found \"999\"",
        ),
    ] {
        let told = from_arguments(&[text]).expect_err(text).to_string();
        assert!(told.contains(&format!("{key}: ")) && told.contains(why), "{text}: {told}");
    }
    assert!(from_arguments(&["unix:///a=10.0.0.2:80?proxy_protocol_from=unix:&allow=10.*"]).is_ok());
    let absent =
        from_arguments(&["tcp://0.0.0.0:1=a:1?proxy_protocol_from=unix:"]).expect_err("not a Unix socket");
    assert!(
        absent.to_string().contains("rule.proxy_protocol_from: the rule does not listen on a Unix socket"),
        "{absent}"
    );
}

#[test]
fn dual_stack_listener_conflicts_with_either_family() {
    let both = "tcp://[::]:80=a:1?ipv6_only=false";
    for other in
        ["tcp://0.0.0.0:80=b:1", "tcp://10.0.0.1:80=b:1", "tcp://[::1]:80=b:1", "tcptoudp://0.0.0.0:80=b:1"]
    {
        for rules in [[both, other], [other, both]] {
            let told = from_arguments(&rules).expect_err(other).to_string();
            assert!(told.contains("is already used by the rule at"), "{other}: {told}");
        }
    }
    for fine in [
        ["tcp://[::]:80=a:1", "tcp://0.0.0.0:80=b:1"],
        [both, "udp://0.0.0.0:80=b:1"],
        [both, "tcp://0.0.0.0:81=b:1"],
    ] {
        assert!(from_arguments(&fine).is_ok(), "{fine:?}");
    }
    let twice = from_arguments(&["unix:///a=a:1", "unix:///a=b:1"]).expect_err("one socket").to_string();
    assert!(twice.contains("unix:/a is already used"), "{twice}");
    assert!(from_arguments(&["unix:///a=a:1", "unix:///b=b:1"]).is_ok());
}

/// Arguments with one error, and the message after "argument ARGUMENT, ".
const WRONG_ARGUMENTS: &[(&str, &str)] = &[
    (
        "0.0.0.0:9000=10.0.0.2:9001",
        "column 1: it has no \"://\"; expected SCHEME://LISTEN=TARGET[,TARGET...][?KEY=VALUE&...] with the scheme tcp, udp, \
         tcp+udp, udptotcp, tcptoudp or unix, such as tcp://0.0.0.0:9000=10.0.0.2:9001",
    ),
    (
        "tpc://0.0.0.0:9000=10.0.0.2:9001",
        "column 1: found the scheme \"tpc\"; expected SCHEME://LISTEN=TARGET[,TARGET...][?KEY=VALUE&...] with the scheme tcp, \
         udp, tcp+udp, udptotcp, tcptoudp or unix, such as tcp://0.0.0.0:9000=10.0.0.2:9001; did you mean \"tcp\"?",
    ),
    (
        "tcp://0.0.0.0:9000",
        "column 7: it has no \"=\" between listener and target; expected SCHEME://LISTEN=TARGET[,TARGET...][?KEY=VALUE&...] \
         with the scheme tcp, udp, tcp+udp, udptotcp, tcptoudp or unix, such as tcp://0.0.0.0:9000=10.0.0.2:9001",
    ),
    (
        "tcp://0.0.0.0=10.0.0.2:9001",
        "column 7: rule.listen: found \"0.0.0.0\": it has no port; expected ADDR:PORT or ADDR:FIRST-LAST, IPv6 in brackets, \
         such as \"0.0.0.0:9000\" or \"[::]:9000-9010\", or unix:/PATH",
    ),
    (
        "tcp://0.0.0.0:1=10.0.0.2:1,10.0.0.3:x",
        "column 28: rule.target: found \"10.0.0.3:x\": \"x\" is not a port: a port is a number, 0 to 65535; expected HOST:PORT \
         or HOST:FIRST-LAST, IPv6 in brackets, or unix:/PATH, followed by *WEIGHT if that is not 1, such as \"10.0.0.2:9001\", \
         \"[2001:db8::2]:80\" or \"db.example.org:5432*3\"",
    ),
    (
        "tcp://0.0.0.0:1=a:1?",
        "column 21: it has an option without a name; expected SCHEME://LISTEN=TARGET[,TARGET...][?KEY=VALUE&...] with the \
         scheme tcp, udp, tcp+udp, udptotcp, tcptoudp or unix, such as tcp://0.0.0.0:9000=10.0.0.2:9001",
    ),
    (
        "tcp://0.0.0.0:1=a:1?idle=x",
        "column 26: rule.idle: found \"x\"; expected seconds without a byte, 1 to 31536000, or 0 for no limit",
    ),
    (
        "tcp://0.0.0.0:1=a:1?proxy=v3",
        "column 27: rule.proxy: found \"v3\"; expected \"v1\", \"v2\" or \"off\"",
    ),
    (
        "tcp://0.0.0.0:1=a:1?idle=1&idle=2",
        "column 28: rule.idle: the key is given twice; expected each key once; lists are separated by commas",
    ),
    (
        "tcp://0.0.0.0:1-5=a:1-4",
        "column 19: rule.target: a:1-4 has 4 ports, the listener has 5; expected as many ports as the listener has, or one \
         for all of them",
    ),
    (
        "tcp://0.0.0.0:1=a:1*0,b:1*0",
        "column 17: rule.target: every target has the weight 0, so no client would be served; expected a weight above 0 \
         for one of them",
    ),
    (
        "tcp://0.0.0.0:1=a:1*2,b:1?balance=failover",
        "column 17: rule.target: a:1*2 has a weight, but failover uses the first healthy target; expected with failover, no weight \
         other than 0, or another balance",
    ),
    (
        "tcp://0.0.0.0:1-60000=a:1",
        "column 7: rule.listen: 60000 ports; expected at most 4096 ports in one rule",
    ),
    (
        "tcp://0.0.0.0:1=a:1?health_expect=220",
        "column 35: rule.health_expect: there are no health checks: the rule has no health; expected health as well, the seconds between two \
         checks",
    ),
    (
        "udp://0.0.0.0:1=a:1?proxy=v1",
        "column 27: rule.proxy: PROXY headers exist for TCP and, in version 2, also for UDP; expected a rule from TCP to TCP, \
         or v2 in a rule from UDP to UDP",
    ),
    (
        "tcp://0.0.0.0:1=a:1?any_port",
        "column 29: rule.any_port: only a UDP target can answer from another port; expected a rule from UDP to UDP",
    ),
    (
        "udp://0.0.0.0:1=a:1?keepalive_idle=60",
        "column 36: rule.keepalive_idle: UDP has no such timers; expected a rule without this key",
    ),
    (
        "tcp://0.0.0.0:1=a:1?keepalive=false&keepalive_count=3",
        "column 31: rule.keepalive: the rule configures keepalive probes and turns them off; expected true, or no \
         keepalive_idle, keepalive_interval and keepalive_count",
    ),
    (
        "udp://0.0.0.0:1=a:1?health_send=x",
        "column 33: rule.health_send: there are no health checks: the rule has no health; expected health as well, the seconds between two \
         checks",
    ),
    (
        "udp://0.0.0.0:1=a:1?health=5&health_expect=x",
        "column 44: rule.health_expect: found \"x\": the rule has no health_send; expected at most 1024 bytes, as \
         text, or as 0x and two hexadecimal digits per byte, such as \"0x00010000\"",
    ),
    (
        "udp://0.0.0.0:1=a:1?health=5&health_send=",
        "column 42: rule.health_send: found \"\": leave this key out to send nothing, or an empty datagram over UDP; expected at most 1024 \
         bytes, as text, or as 0x and two hexadecimal digits per byte, such as \"0x00010000\"",
    ),
    (
        "tcp://0.0.0.0:1=a:1?accept_proxy",
        "column 21: rule.accept_proxy: it would trust every client that connects; expected proxy_protocol_from, the addresses of the \
         proxies: addresses or prefixes such as \"10.0.0.2\" or \"10.0.0.0/8\", one or a list of them; \"unix:\" for all \
         clients of the Unix socket",
    ),
    (
        "tcp://0.0.0.0:1=a:1?proxy_protocol_from=10.*",
        "column 41: rule.proxy_protocol_from: found \"10.*\": \"10.*\" is not an address prefix: expected for example 10.0.0.0/8, \
         2001:db8::/32 or 192.0.2.1; expected addresses or prefixes such as \"10.0.0.2\" or \"10.0.0.0/8\", one or a list of \
         them; \"unix:\" for all clients of the Unix socket",
    ),
    (
        "udp://0.0.0.0:1=a:1?half_close_timeout=5",
        "column 40: rule.half_close_timeout: UDP has no half-close; expected a rule from TCP to TCP",
    ),
    (
        "udp://0.0.0.0:1=a:1?idle=0",
        "column 26: rule.idle: a UDP session ends only by timeout; expected 1 or more seconds, because one side is UDP",
    ),
    (
        "tcp://0.0.0.0:1=a:1?framed",
        "column 27: rule.framed: found \"true\": only \"udptotcp\" and \"tcptoudp\" carry datagrams in a stream; expected true \
         or false",
    ),
    (
        "tcp://0.0.0.0:1=[::1]:1?source=10.0.0.1",
        "column 32: rule.source: 10.0.0.1 and the target ::1 are of different families; expected an address of the target's family",
    ),
    (
        "tcp://0.0.0.0:1=a:1?source=10.0.0.1&transparent",
        "column 48: rule.transparent: a transparent rule sends from the client's address, not from rule.source; expected one \
         of the two",
    ),
    (
        "udp://0.0.0.0:1=a:1?copy=splice",
        "column 26: rule.copy: it applies only to rules from TCP to TCP; expected a rule without this key",
    ),
    (
        "tcp://0.0.0.0:1=a:1?copy=kernel&max_bytes_per_second=1000",
        "column 26: rule.copy: a rate limit needs the user-space copy; expected another copy mode, or no rate limit",
    ),
    (
        "tcp://0.0.0.0:1=a:1?kernel=false",
        "column 28: rule.kernel: it applies only to rules from UDP to UDP; expected a rule without this key",
    ),
    (
        "udp://0.0.0.0:1=a:1?kernel=true&mark=1",
        "column 28: rule.kernel: mark can select a route that the kernel path does not use; expected false, or a rule without this key",
    ),
    (
        "udp://0.0.0.0:1=a:1?kernel=true&max_bytes_per_second_per_connection=1000",
        "column 28: rule.kernel: a rate limit needs user-space forwarding; expected false, or a rule without this key",
    ),
    (
        "udp://0.0.0.0:1=a:1?proxy_protocol_from=10.0.0.2",
        "column 41: rule.proxy_protocol_from: only TCP connections start with a PROXY header; expected a rule from TCP to TCP",
    ),
];

#[test]
fn wrong_argument_is_quoted_with_column_and_form() {
    for (text, message) in WRONG_ARGUMENTS {
        let found = from_arguments(&[text]).expect_err("a wrong argument").to_string();
        assert_eq!(found, format!("argument {text}, {message}"));
    }
}

#[test]
fn unknown_option_suggests_the_nearest_one() {
    let found = from_arguments(&["tcp://0.0.0.0:1=a:1?idel=5"]).expect_err("a typo").to_string();
    assert_eq!(
        found,
        "argument tcp://0.0.0.0:1=a:1?idel=5, column 21: rule.idel: unknown key; did you mean \"idle\"?"
    );
    let found = from_arguments(&["tcp://0.0.0.0:1=a:1?colour=5"]).expect_err("unknown key").to_string();
    assert!(found.contains(": rule.colour: unknown key; expected one of name, "), "{found}");
}

#[test]
fn two_rules_cannot_share_a_listener_or_a_name() {
    for (one, two, message) in [
        ("tcp://0.0.0.0:1-5=a:1", "tcp://0.0.0.0:5=b:1", "0.0.0.0:5 is already used by the rule at argument"),
        ("udp://[::1]:7=a:1", "udptotcp://[::1]:7=b:1", "[::1]:7 is already used"),
        ("tcp://0.0.0.0:1=a:1", "tcp://127.0.0.1:1=b:1", "127.0.0.1:1 is already used"),
        ("tcp://[fe80::1%e0]:1=a:1", "tcp://[fe80::1%e0]:1=b:1", "[fe80::1%e0]:1 is already used"),
        ("tcp://0.0.0.0:1=a:1?name=x", "tcp://0.0.0.0:2=a:1?name=x", "is also named \"x\""),
    ] {
        let found = from_arguments(&[one, two]).expect_err("the rules collide").to_string();
        assert!(found.starts_with(&format!("argument {two}, column ")) && found.contains(message), "{found}");
    }
    let together = ["tcp://0.0.0.0:1=a:1", "udp://0.0.0.0:1=a:1", "tcp://[::]:1=a:1"];
    assert_eq!(from_arguments(&together).map(|loaded| loaded.settings.rules.len()), Ok(3));
    let on_a_link = ["tcp://[fe80::1%e0]:1=a:1", "udp://[fe80::1%e0]:1=a:1", "tcp://[fe80::1%e0]:2=a:1"];
    assert_eq!(from_arguments(&on_a_link).map(|loaded| loaded.settings.rules.len()), Ok(3));
    let any_port = ["tcp://127.0.0.1:0=a:1", "tcp://127.0.0.1:0=a:2"];
    assert_eq!(from_arguments(&any_port).map(|loaded| loaded.settings.rules.len()), Ok(2));
}

#[test]
fn having_no_rules_is_an_error() {
    let found = from_arguments(&[]).expect_err("no rule").to_string();
    assert!(
        found.starts_with("default: there is no forwarding rule; expected at least one, such as"),
        "{found}"
    );
    for text in ["", "# nothing\n", "[log]\nlevel = \"info\"\n"] {
        let found = from_file(text).expect_err("no rule").to_string();
        assert!(found.starts_with("f.conf: there is no forwarding rule"), "{found}");
    }
}

#[test]
fn forward_example_shows_the_defaults() {
    let loaded = from_file(EXAMPLE).expect("the example is valid");
    assert_eq!(loaded.format, Some(Format::Turnpike));
    let mut settings = loaded.settings;
    let rules = std::mem::take(&mut settings.rules);
    settings.origins.clear();
    assert_eq!(settings, ForwardSettings::default());
    let ids: Vec<&str> = rules.iter().map(|rule| rule.id.0.as_str()).collect();
    assert_eq!(ids, ["web", "telemetry", "dns"]);
    assert_eq!(rules[1].protocol, Protocol::UdpToTcp { framed: true });
    let question = rules[2].health_question.as_ref().expect("a health check of the UDP target");
    assert_eq!(
        (question.send.len(), &question.expect[..]),
        (17, &question.send[..2]),
        "a DNS query and its ID"
    );
}

#[test]
fn the_example_names_every_key() {
    let named = |name: &str| {
        EXAMPLE.lines().any(|line| {
            line.strip_prefix('#').unwrap_or(line).split_once(" = ").is_some_and(|(key, _)| key == name)
        })
    };
    let rule_keys = rule_keys::RULE_KEYS.iter().map(KeySpec::name);
    for name in FORWARD_KEYS.iter().map(KeySpec::name).chain(rule_keys).chain([INCLUDE]) {
        assert!(named(name), "{name} is not documented");
    }
}

#[test]
fn file_mistakes_name_line_column_key_and_form() {
    let text = "[forward]\nworkes = 2\n[[rule]]\nlisten = \"0.0.0.0\"\ntarget = \"a:1\"\nidel = 5\n[[rule]]\ntarget = [\"a:1\", 5]\n\
                [log]\nformat = 3\n";
    let found = from_file(text).expect_err("wrong").to_string();
    let lines: Vec<&str> = found.lines().collect();
    assert_eq!(lines.len(), 6, "{found}");
    assert_eq!(lines[0], "f.conf:2:1: forward.workes: unknown key; did you mean \"workers\"?");
    assert!(
        lines[1].starts_with("f.conf:4:10: rule.listen: found the string \"0.0.0.0\": it has no port; "),
        "{found}"
    );
    assert!(lines[2].starts_with("f.conf:6:1: rule.idel: unknown key; "), "{found}");
    assert!(lines[2].ends_with("did you mean \"idle\"?"), "{found}");
    assert!(
        lines[3].starts_with("f.conf:7:1: rule.listen: the rule lacks this key; expected ADDR:PORT"),
        "{found}"
    );
    assert!(
        lines[4].starts_with("f.conf:8:18: rule.target: found the integer 5; expected HOST:PORT"),
        "{found}"
    );
    assert_eq!(
        lines[5],
        "f.conf:10:10: log.format: found the integer 3; expected \"text\", \"json\" or \"journald\""
    );
}

#[test]
fn file_of_another_program_or_of_serve_is_reported_once() {
    for (text, told) in [
        (
            "global\n  daemon\nfrontend f\n  bind :80\n",
            "f.conf:1:1: this looks like haproxy.cfg; expected rules: a listen, or ",
        ),
        (
            "stream {\n  server {\n",
            "f.conf:1:1: this looks like nginx.conf; expected rules: a server block in stream ",
        ),
        (
            "# c\nlistening-port=3478\nrealm=a\n",
            "f.conf:2:1: this looks like coturn's turnserver.conf; expected rules to ",
        ),
        (
            "[log]\nlevel = \"info\"\n[server]\nlistn = 5\n",
            "f.conf:3:2: this is a file for turnpike serve, because it contains \"server\"; expected a file for turnpike forward; for this one: \
             turnpike serve -c f.conf",
        ),
        (
            "[[realm]]\nname = \"x\n",
            "f.conf:1:3: this is a file for turnpike serve, because it contains \"realm\"; ",
        ),
    ] {
        let found = from_file(text).expect_err("another program's file").to_string();
        assert!(found.starts_with(told) && found.lines().count() == 1, "{found}");
    }
    let found =
        from_file("[server]\n[[rule]]\nlisten = \"0.0.0.0:1\"\ntarget = \"a:1\"\n").expect_err("mixed");
    assert!(found.to_string().starts_with("f.conf:1:2: server: unknown section; "), "{found}");
}

#[test]
fn proxy_protocol_from_everywhere_is_a_warning() {
    let warned = |from| {
        let rule = format!("tcp://0.0.0.0:1=a:1?proxy_protocol_from={from}");
        from_arguments(&[&rule]).expect("valid").warnings
    };
    assert!(warned("10.0.0.0/8").is_empty());
    let warnings = warned("10.0.0.0/8,::/0");
    assert!(
        warnings[0].contains("rule.proxy_protocol_from: ::/0 lets every client claim any address"),
        "{warnings:?}"
    );
}

#[test]
fn broken_toml_is_reported_once() {
    let found =
        from_file("[[rule]]\nlisten = \"0.0.0.0:1\ntarget = \"a:1\"\n").expect_err("wrong").to_string();
    assert!(found.starts_with("f.conf:2:") && found.contains("invalid TOML"), "{found}");
    assert!(!found.contains("lacks"), "{found}");
}

#[test]
fn rule_that_is_not_a_table_is_reported() {
    let found = from_file("rule = \"tcp://0.0.0.0:1=a:1\"\n").expect_err("wrong").to_string();
    assert_eq!(found, "f.conf:1:1: rule: it is a single value, not a table; expected tables, [[rule]]");
}

#[test]
fn flags_win_over_environment_over_file_over_defaults() {
    let file = "[forward]\nworkers = 2\nmax_connections = 10\nallow = [\"10.*\"]\n[[rule]]\nlisten = \"0.0.0.0:1\"\ntarget = \"a:1\"\n";
    let environment = [("TURNPIKE_FORWARD_WORKERS", "3"), ("TURNPIKE_FORWARD_ALLOW", "127.*, ::1")];
    let mut flags = Flags::new();
    flags.set("forward.workers", "--workers", ["4".to_owned()]);
    flags.set("forward.copy", "--copy", ["buffer".to_owned()]);
    let loaded = load(Some(file), &["tcp://0.0.0.0:2=b:1?copy=auto"], &environment, flags).expect("valid");
    let settings = loaded.settings;
    assert_eq!((settings.workers, settings.max_connections), (Some(4), 10));
    assert_eq!(settings.access.allow.len(), 2);
    let rules: Vec<_> = settings.rules.iter().map(|rule| (rule.id.0.as_str(), rule.copy)).collect();
    assert_eq!(rules, [("tcp://0.0.0.0:1", CopyMode::Buffer), ("tcp://0.0.0.0:2", CopyMode::Auto)]);
    assert!(settings.rules.iter().all(|rule| rule.max_connections == 10));
}

#[test]
fn rules_in_the_environment_are_added() {
    let rule = [("TURNPIKE_RULE", "[{ listen = \"0.0.0.0:2\", target = \"10.0.0.2:2\" }]")];
    let loaded = load(None, &["tcp://0.0.0.0:1=10.0.0.2:1"], &rule, Flags::new()).expect("valid");
    assert_eq!(loaded.settings.rules.len(), 2);
    assert!(
        loaded.warnings.iter().all(|warning| !warning.contains("TURNPIKE_RULE")),
        "{:?}",
        loaded.warnings
    );
    let wrong = [("TURNPIKE_RULE", "[{ listen = 7 }]")];
    let told = load(None, &[], &wrong, Flags::new()).expect_err("no address").to_string();
    assert!(told.starts_with("TURNPIKE_RULE:1:"), "{told}");
}

#[test]
fn the_environment_overrides_rinetd_conf_too() {
    let file = "logfile /var/log/a\n0.0.0.0 1 10.0.0.1 2\n";
    let loaded = load(Some(file), &[], &[("TURNPIKE_LOG_CONNECTIONS", "/b")], Flags::new()).expect("valid");
    assert_eq!(loaded.settings.connections, Some(PathBuf::from("/b")));
}

#[test]
fn variables_of_both_commands_are_known() {
    let rule = ["tcp://0.0.0.0:1=a:1"];
    let environment = [("TURNPIKE_SERVER_REALM", "x"), ("TURNPIKE_FORWARD_WORKES", "2")];
    let warnings = load(None, &rule, &environment, Flags::new()).expect("valid").warnings;
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].ends_with("did you mean TURNPIKE_FORWARD_WORKERS?"), "{warnings:?}");
}

#[test]
fn format_is_detected_by_content() {
    for (text, toml) in [
        ("0.0.0.0 80 10.0.0.1 80", false),
        ("[::1] 80 10.0.0.1 80", false),
        ("# x = 1\n\nallow 10.*", false),
        ("0.0.0.0 80/udp 10.0.0.1 80 [timeout=5]", false),
        ("logcommon", false),
        ("[[rule]]", true),
        ("[forward]", true),
        ("# c\n[[forwarding_rules]]", true),
        ("log_file = \"x\"", true),
        ("\n", true),
    ] {
        assert_eq!(looks_like_toml(text), toml, "{text}");
    }
    for (text, theirs) in [
        ("[[forwarding_rules]]", true),
        ("[[forwarding_rule]]", true),
        ("log_file = \"x\"", true),
        ("[[rule]]", false),
        ("[[rules]]", false),
        ("[log]", false),
    ] {
        let entries = parse_file(Path::new("f"), text, &mut Vec::new());
        assert_eq!(is_oxidinetd(&entries), theirs, "{text}");
    }
}

#[test]
fn shown_settings_are_a_valid_configuration() {
    for text in [EXAMPLE, RINETD] {
        let first = from_file(text).expect("valid").settings;
        let second =
            from_file(&first.to_toml()).unwrap_or_else(|errors| panic!("{errors}\n{}", first.to_toml()));
        assert_eq!(second.format, Some(Format::Turnpike));
        let values = |mut settings: ForwardSettings| {
            settings.origins.clear();
            settings
        };
        assert_eq!(values(second.settings), values(first));
    }
}

#[test]
fn keys_that_need_a_restart_are_named() {
    let rule = "[[rule]]\nlisten = \"0.0.0.0:1\"\ntarget = \"a:1\"\n";
    let old = from_file(rule).expect("valid").settings;
    let new =
        from_file(&format!("[forward]\nworkers = 3\nmax_connections = 5\n[admin]\nlisten = \"off\"\n{rule}"));
    assert_eq!(old.unchangeable(&new.expect("valid").settings), ["forward.workers", "admin.listen"]);
}

#[test]
fn list_of_forward_changes_has_keys_including_secrets() {
    let with = |token: &str| {
        let rule = "[[rule]]\nlisten = \"0.0.0.0:1\"\ntarget = \"a:1\"\n";
        from_file(&format!("[admin]\nread_tokens = [\"{token}\"]\n{rule}")).expect("valid").settings
    };
    let (old, new) = (with("0123456789abcdef"), with("fedcba9876543210"));
    assert!(old.changed(&old).is_empty());
    assert_eq!(old.changed(&new), [KeyChange { key: "admin.read_tokens", values: None }]);
    assert!(!new.to_toml().contains("fedcba"), "{}", new.to_toml());
}

#[test]
fn unprotected_admin_interface_is_refused() {
    let told =
        from_file("[admin]\nlisten = \"0.0.0.0:9642\"\n[[rule]]\nlisten = \"0.0.0.0:1\"\ntarget = \"a:1\"\n");
    let told = told.expect_err("open").to_string();
    assert!(told.starts_with("f.conf:2:10: admin.listen") && told.contains("no certificate"), "{told}");
}

mod properties {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(text in ".{0,200}") {
            let _ = from_arguments(&[&text]);
            let _ = from_file(&text);
        }

        #[test]
        fn almost_valid_rule_does_not_panic(text in "(tcp|udp)://[0-9.:\\[\\]-]{0,12}=[0-9.:,\\[\\]-]{0,12}(\\?[a-z_=&0-9]{0,20})?") {
            let _ = from_arguments(&[&text]);
        }

        #[test]
        fn almost_valid_conf_does_not_panic(text in "[0-9. /a-z\\[\\]=,#\"\n*?]{0,120}") {
            let _ = from_file(&text);
        }
    }
}
