//! JSON log lines of `serve` and `forward` have one schema: no name occurs twice in a line, and each name has the type documented
//! in docs/serve.md.

use crate::prelude::*;
use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Visitor},
};

/// An object that must not repeat a name; `serde_json` itself keeps the last one.
struct Line(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Line {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Line;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Line, M::Error> {
                let mut line: Vec<(String, Value)> = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, Value>()? {
                    if line.iter().any(|(other, _)| *other == name) {
                        return Err(M::Error::custom(format!("{name} is listed twice")));
                    }
                    line.push((name, value));
                }
                Ok(Line(line))
            }
        }
        deserializer.deserialize_map(Names)
    }
}

impl Line {
    fn get(&self, name: &str) -> &Value {
        let found = self.0.iter().find(|(other, _)| other == name);
        found.map_or(&Value::Null, |(_, value)| value)
    }
}

/// Names in the tables of docs/serve.md, section "Log lines": numbers and strings.
fn documented() -> (BTreeSet<String>, BTreeSet<String>) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/serve.md");
    let text = fs::read_to_string(path).expect("docs/serve.md exists");
    let (_, section) = text.split_once("## Log lines").expect("the section exists");
    let section = section.split("\n## ").next().unwrap_or_default();
    let (mut numbers, mut texts) = (BTreeSet::new(), BTreeSet::new());
    for row in section.lines().filter(|line| line.starts_with("| `")) {
        let mut cells = row.trim_matches('|').split('|').map(str::trim);
        let (names, kind) = (cells.next().unwrap_or_default(), cells.next().unwrap_or_default());
        let set = match kind {
            "number" => &mut numbers,
            "text" => &mut texts,
            _ => continue,
        };
        set.extend(names.split(',').map(|name| name.trim().trim_matches('`').to_owned()));
    }
    (numbers, texts)
}

fn check(lines: &[String]) -> Vec<Line> {
    let (numbers, texts) = documented();
    assert!(numbers.contains("seconds") && texts.contains("client"), "{numbers:?} {texts:?}");
    lines
        .iter()
        .map(|text| {
            let line: Line = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
            for (name, value) in &line.0 {
                let good = match value {
                    Value::Number(_) => numbers.contains(name),
                    Value::String(_) => texts.contains(name),
                    _ => false,
                };
                assert!(good, "{name} or its type is not in docs/serve.md: {text}");
            }
            assert!(line.get("timestamp").is_string() && line.get("level").is_string(), "{text}");
            let target = line.get("target").as_str().unwrap_or_default();
            assert!(target.starts_with("turnpike"), "the module that logged the line: {text}");
            line
        })
        .collect()
}

fn of<'a>(lines: &'a [Line], message: &str) -> &'a Line {
    let found =
        lines.iter().find(|line| line.get("message").as_str().is_some_and(|text| text.contains(message)));
    found.unwrap_or_else(|| panic!("no line {message:?}"))
}

#[test]
fn every_log_line_of_serve_matches_the_schema() {
    let dir = Dir::new();
    let file = dir.file("t.toml", "[auth]\nusers = [\"alice:secret\", \"bob:x\"]\n");
    let path = file.to_str().expect("the test's path is UTF-8");
    let mut serve = Serve::start_bare(&[
        "-c",
        path,
        "-v",
        "--log-format",
        "json",
        "--realm",
        REALM,
        "--relay-ip",
        "127.0.0.1",
        "--allow-peer",
        "127.0.0.0/8",
        "--deny-peer",
        "127.6.6.0/24",
    ]);
    let reflect = Reflect::start(V4, &[]);
    serve.load(&reflect).with("--rate 50 --duration 1").run().ended(0);
    for peer in ["127.6.6.6:9", "10.0.0.1:9"] {
        let run = Load::new(serve.address(V4))
            .to(peer.parse().expect("an address"))
            .with("--rate 50 --duration 1")
            .run();
        assert_ne!(run.code, Some(0), "{peer} is not refused");
    }
    let stun = stun::Client::new(serve.address(V4));
    let (_, _, challenge) = stun.challenge();
    stun.forge("mal\"lory\\", &challenge.realm, &challenge.nonce);
    Load::new(serve.address(V4)).with("--mode allocate --clients 20 --rate max --duration 2").run().ended(0);
    serve.program.line_with("too many allocations ended");
    fs::write(&file, "[auth]\nusers = [\"alice:secret\"]\n[relay]\nbuffer = 65536\n")
        .expect("the test's own file");
    serve.program.signal("HUP");
    serve.program.line_with("configuration reloaded");
    fs::write(&file, "[auth]\nusrs = []\n").expect("the test's own file");
    serve.program.signal("HUP");
    serve.program.line_with("the old one stays in use");
    serve.program.signal("TERM");
    let Serve { program, .. } = serve;
    let ended = program.wait(SOON);
    let all: Vec<String> = ended.stderr.lines().map(str::to_owned).collect();
    let lines = check(&all);

    let allocation = of(&lines, "allocation ended");
    assert!(allocation.get("seconds").is_f64(), "{:?}", allocation.0);
    assert!(allocation.get("to_peer_bytes").as_u64().is_some_and(|bytes| bytes > 0), "{:?}", allocation.0);
    assert_eq!((allocation.get("realm"), allocation.get("user")), (&REALM.into(), &USER.into()));
    assert_eq!(allocation.get("relayed2"), &Value::Null, "absent, not null");
    assert!(!allocation.0.iter().any(|(name, _)| name == "relayed2"));
    assert_eq!(of(&lines, "allocation opened").get("level"), "DEBUG");
    let refused = of(&lines, "credential refused");
    assert_eq!(refused.get("user"), "mal\"lory\\");
    assert_eq!(refused.get("suppressed"), 0);
    let by = |wanted: &str| {
        lines.iter().any(|line| line.get("by").as_str().is_some_and(|by| by.starts_with(wanted)))
    };
    assert!(by("peers.deny 127.6.6.0/24") && by("default: "), "peers are refused by rule and by default");
    assert!(of(&lines, "too many allocations ended").get("allocations").is_u64());
    let reloaded = of(&lines, "configuration reloaded");
    assert_eq!(reloaded.get("changed"), "auth.users");
    assert_eq!(reloaded.get("users_removed"), 1);
    for message in
        ["listening on udp", "data path", "relaying on", "relay.buffer has changed", "draining", "stopped"]
    {
        of(&lines, message);
    }
}

#[test]
fn every_log_line_of_forward_matches_the_schema() {
    let target = tcp_echo();
    let absent = format!("127.0.0.1:{}", free_port(V4));
    let rules = |more: &str| {
        format!(
            "[log]\nformat = \"json\"\nlevel = \"debug\"\n\
             [[rule]]\nname = \"web\"\nlisten = \"127.0.0.1:0\"\ntarget = \"{target}\"\n\
             [[rule]]\nname = \"no\"\nlisten = \"127.0.0.1:0\"\ntarget = \"{target}\"\ndeny = [\"127.*\"]\n\
             [[rule]]\nname = \"list\"\nlisten = \"127.0.0.1:0\"\ntarget = \"{target}\"\nallow = [\"10.*\"]\n\
             [[rule]]\nname = \"dead\"\nlisten = \"127.0.0.1:0\"\ntarget = \"{absent}\"\nhealth = 1\n\
             [[rule]]\nname = \"host\"\nlisten = \"127.0.0.1:0\"\ntarget = \"localhost:9\"\n{more}"
        )
    };
    let mut forward = Forward::start_file("f.toml", &rules(""));
    let address = |forward: &mut Forward, rule: &str| forward.address(&format!("rule {rule})"));
    let web = address(&mut forward, "web");
    assert_eq!(say(&mut connect(web), "hello"), "hello");
    for rule in ["no", "list", "dead"] {
        let address = address(&mut forward, rule);
        drop(TcpStream::connect(address));
    }
    forward.program.line_with("connection ended");
    forward.program.line_with("fails its health check");
    eventually("two refusals", || {
        let lines = forward.program.lines();
        lines.iter().filter(|line| line.contains("connection refused")).count() == 2
    });
    forward.write(
        "f.toml",
        &rules("[[rule]]\nname = \"new\"\nlisten = \"127.0.0.1:0\"\ntarget = \"127.0.0.1:9\"\n"),
    );
    forward.reload("rules reloaded");
    forward.write("f.toml", "[[rule]]\nlisen = \"127.0.0.1:0\"\n");
    forward.reload("the old ones stay in use");
    forward.program.signal("TERM");
    let Forward { program, .. } = forward;
    let ended = program.wait(SOON);
    let all: Vec<String> = ended.stderr.lines().map(str::to_owned).collect();
    let lines = check(&all);

    let connection = lines
        .iter()
        .find(|line| line.get("message") == "connection ended" && line.get("rule") == "web")
        .expect("a connection ended");
    assert_eq!(connection.get("to"), &Value::from(target.to_string()));
    assert_eq!(connection.get("target"), "turnpike::forward");
    assert!(connection.get("seconds").is_f64(), "{:?}", connection.0);
    assert_eq!(connection.get("to_target_bytes"), 5);
    let refused = |rule: &str| {
        let of_rule = |line: &&Line| line.get("message") == "connection refused" && line.get("rule") == rule;
        lines.iter().find(of_rule).unwrap_or_else(|| panic!("{rule}: no refusal")).get("by").clone()
    };
    assert_eq!(refused("no"), "deny 127.*");
    assert!(refused("list").as_str().is_some_and(|by| by.starts_with("default: ")), "{:?}", refused("list"));
    let reloaded = of(&lines, "rules reloaded");
    assert_eq!((reloaded.get("added"), reloaded.get("rules")), (&"new".into(), &6.into()));
    assert_eq!(reloaded.get("removed"), &Value::Null);
}
