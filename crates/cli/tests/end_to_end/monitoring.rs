//! Monitoring: every query of the dashboard and alerts uses series that `serve` or `forward` exports, and promtool accepts metrics
//! and alerts.

use crate::prelude::*;

const DASHBOARD: &str = include_str!("../../../../deploy/grafana/turnpike.json");
const RULES: &str = include_str!("../../../../deploy/prometheus/turnpike.rules.yml");
const TESTS: &str = include_str!("../../../../deploy/prometheus/turnpike.test.yml");

/// Metrics in the default format, of a server with every feature and of a forwarder.
fn scraped() -> [String; 2] {
    let certificate = Certificate::new(&["turn.example.org"]);
    let state = Dir::new();
    let secret = "x".repeat(32);
    let node = format!(
        "[tls]\nacme = [\"turn.example.org\"]\n[acme]\ndirectory = \"https://127.0.0.1:1/\"\n\
         [fleet]\nurl = \"redis://127.0.0.1:1\"\nsecret = \"{secret}\"\nnode = \"a\"\n"
    );
    let (file, path) = (state.file("node.toml", &node), state.path().to_str().expect("UTF-8"));
    let file = file.to_str().expect("UTF-8");
    let serve = Serve::start_secured(&certificate, &["--state", path, "-c", file]);
    let brief = ["--mode", "allocate", "--rate", "5", "--duration", "1"];
    assert_eq!(Load::new(serve.address(V4)).with_words(&brief).run().code, Some(0));
    let reflect = Reflect::start(V4, &[]);
    let _allocation = serve.load(&reflect).with("--rate 10 --duration 60").start();
    serve.wait_for_allocations(1);
    let mut forward = Forward::start(&[&format!("tcp://127.0.0.1:0={}?name=a", tcp_echo())]);
    let address = forward.address("rule a");
    assert_eq!(say(&mut connect(address), "hello"), "hello");
    forward.wait_for("turnpike_forward_target_connected_total", "", 1);
    [serve.metrics().text().to_owned(), forward.metrics().text().to_owned()]
}

fn series(pages: &[String]) -> BTreeMap<String, BTreeMap<String, BTreeSet<String>>> {
    let mut all: BTreeMap<String, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for line in pages.iter().flat_map(|page| page.lines()).filter(|line| !line.starts_with('#')) {
        let (name, labels) = line.split_once('{').unwrap_or((line.split(' ').next().unwrap_or_default(), ""));
        let of = all.entry(name.to_owned()).or_default();
        for (label, value) in matchers(labels) {
            of.entry(label.to_owned()).or_default().insert(value.to_owned());
        }
    }
    all
}

fn matchers(labels: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    let mut rest = labels;
    while let Some((label, behind)) = rest.split_once('"') {
        let Some((value, behind)) = behind.split_once('"') else { break };
        found.push((label.trim_matches([',', ' ', '=', '~', '!']), value));
        rest = behind;
        if rest.starts_with('}') {
            break;
        }
    }
    found
}

fn queries(dashboard: &Value, found: &mut Vec<String>) {
    match dashboard {
        Value::Object(members) => {
            for (key, value) in members {
                match value {
                    Value::String(text) if matches!(key.as_str(), "expr" | "definition") => {
                        found.push(text.clone());
                    }
                    other => queries(other, found),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| queries(item, found)),
        _ => {}
    }
}

/// Labels whose values depend on the deployment.
const CHOSEN: [&str; 7] = ["job", "instance", "worker", "file", "rule", "target", "address"];

fn unknown(query: &str, known: &BTreeMap<String, BTreeMap<String, BTreeSet<String>>>) -> Vec<String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut missing = Vec::new();
    for (at, _) in query.match_indices("turnpike_") {
        let rest = &query[at..];
        let (name, behind) = rest.split_at(rest.find(|c| !is_name(c)).unwrap_or(rest.len()));
        let Some(labels) = known.get(name) else {
            missing.push(name.to_owned());
            continue;
        };
        let Some(asked) = behind.strip_prefix('{') else { continue };
        for (label, wanted) in matchers(asked).into_iter().filter(|(label, _)| !CHOSEN.contains(label)) {
            let has = |value: &str| labels.get(label).is_some_and(|values| values.contains(value));
            missing.extend(
                wanted
                    .split('|')
                    .filter(|value| !has(value))
                    .map(|value| format!("{name}{{{label}={value}}}")),
            );
        }
    }
    missing
}

#[test]
fn dashboard_and_alerts_query_existing_series() {
    let known = series(&scraped());
    let mut all = Vec::new();
    queries(&serde_json::from_str(DASHBOARD).expect("JSON"), &mut all);
    assert!(all.len() > 70, "{}", all.len());
    for query in all.iter().map(String::as_str).chain([RULES, TESTS]) {
        assert_eq!(unknown(query, &known), [] as [String; 0], "{query}");
    }
    for state in known.keys().filter(|name| name.ends_with("_up")) {
        let is_named = [RULES.to_owned(), all.join("\n")].map(|text| text.contains(state.as_str()));
        assert_eq!(is_named, [true, true], "{state}");
    }
    let labels: BTreeSet<&str> =
        known.values().flat_map(|labels| labels.keys().map(String::as_str)).collect();
    for by in
        all.iter().flat_map(|query| query.split(" by (").skip(1)).filter_map(|rest| rest.split(')').next())
    {
        for label in by.split(", ").filter(|label| *label != "instance") {
            assert!(labels.contains(label), "by ({by})");
        }
    }
    assert_eq!(unknown("rate(turnpike_no_such_total[5m]) + turnpike_draining{x=\"y\"}", &known).len(), 2);
}

#[test]
fn every_alert_is_tested_both_firing_and_not_firing() {
    let alerts: Vec<&str> = RULES.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() > 15, "{alerts:?}");
    let cases: Vec<(&str, bool)> = TESTS
        .split("alertname: ")
        .skip(1)
        .filter_map(|case| Some((case.lines().next()?, !case.lines().nth(1)?.contains("[]"))))
        .collect();
    for alert in alerts {
        for fires in [true, false] {
            assert!(cases.contains(&(alert, fires)), "{alert}, {fires}");
        }
    }
}

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/prometheus")
}

#[test]
fn promtool_accepts_the_metrics() {
    let promtool = need!(installed("promtool"));
    for page in scraped() {
        let mut check = Command::new(&promtool);
        check.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = check.spawn().expect("promtool is installed");
        child.stdin.take().expect("piped").write_all(page.as_bytes()).expect("promtool reads standard input");
        let output = child.wait_with_output().expect("promtool ends");
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success() && said.is_empty(), "{}\n{page}", String::from_utf8_lossy(&said));
    }
}

#[test]
fn promtool_accepts_the_alerts_and_their_tests_pass() {
    let promtool = need!(installed("promtool"));
    for arguments in [["check", "rules", "turnpike.rules.yml"], ["test", "rules", "turnpike.test.yml"]] {
        let output = Command::new(&promtool)
            .args(arguments)
            .current_dir(deploy())
            .output()
            .expect("promtool is installed");
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&said));
    }
}
