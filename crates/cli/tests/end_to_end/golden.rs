//! Interfaces that scripts and dashboards rely on, each in a file of `tests/golden`: help texts, metric names with labels, keys of
//! JSON results. The API has docs/openapi.json. `TURNPIKE_TEST_GOLDEN=write cargo test --workspace --test end_to_end golden::`
//! rewrites the files after an intended change; the diff then shows it.

use crate::prelude::*;
use std::fmt::Write as _;

#[track_caller]
fn is_as_in(file: &str, found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file);
    if turnpike_testkit::writes_golden_files() {
        fs::write(path, found).expect("the repository can be written");
        return;
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<_>>();
    let (wanted, have) = (lines(&expected), lines(found));
    assert!(
        found == expected,
        "{file} differs; only in the file: {:#?}; only now: {:#?}",
        wanted.difference(&have).collect::<Vec<_>>(),
        have.difference(&wanted).collect::<Vec<_>>()
    );
}

#[test]
fn help_texts_match_the_golden_file() {
    let mut text = String::new();
    collect_help(&[], &mut text);
    is_as_in("help.txt", &text);
}

fn collect_help(path: &[&str], text: &mut String) {
    let run = Program::run(&mut turnpike(&[path, &["--help"]].concat()));
    assert_eq!(run.code, Some(0), "{path:?}: {}", run.output());
    let _ = writeln!(text, "$ turnpike {}\n{}\n", [path, &["--help"]].concat().join(" "), run.stdout);
    let listed = run.stdout.lines().skip_while(|line| *line != "Commands:").skip(1);
    // Wrapped descriptions continue with deeper indentation.
    let names = listed
        .take_while(|line| line.is_empty() || line.starts_with(' '))
        .filter_map(|line| line.strip_prefix("  "))
        .filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase()))
        .filter_map(|line| line.split(' ').next())
        .filter(|name| *name != "help");
    for name in names {
        collect_help(&[path, &[name]].concat(), text);
    }
}

#[test]
fn metrics_match_the_golden_files() {
    let certificate = Certificate::new(&["turn.example.org"]);
    // Avoids metrics that exist only with the kernel path.
    let serve = Serve::start_secured(&certificate, &["--datapath", "mmsg"]);
    let reflect = Reflect::start(V4, &[]);
    let load = serve.load(&reflect);
    assert_eq!(load.with("--rate 100 --duration 0.5").run().code, Some(0));
    is_as_in("metrics-serve.txt", &families(&serve.metrics()));

    let mut forward =
        Forward::start(&[&format!("udp://127.0.0.1:0={}?name=echo", udp_echo()), "--datapath", "mmsg"]);
    let listener = forward.address("rule echo");
    assert_eq!(say_udp(listener, "hello"), "hello");
    is_as_in("metrics-forward.txt", &families(&forward.metrics()));
}

/// One line per family: name, type, labels.
fn families(metrics: &Metrics) -> String {
    let mut families = BTreeMap::<&str, (&str, BTreeSet<&str>)>::new();
    let mut family = "";
    for line in metrics.text().lines() {
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            family = name;
            families.insert(name, (kind, BTreeSet::new()));
        } else if let Some((_, rest)) = line.split_once('{')
            && let Some((labels, _)) = rest.rsplit_once('}')
        {
            // No label value contains both a quotation mark and a comma.
            let names = labels.split("\",").filter_map(|label| Some(label.split_once('=')?.0));
            families.entry(family).or_default().1.extend(names);
        }
    }
    families.into_iter().fold(String::new(), |mut text, (name, (kind, labels))| {
        let labels = labels.into_iter().collect::<Vec<_>>().join(" ");
        let _ = writeln!(text, "{}", format!("{name} {kind} {labels}").trim_end());
        text
    })
}

#[test]
fn json_results_match_the_golden_files() {
    let serve = Serve::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    let more = ["--rate", "100", "--duration", "0.5"];
    let turn = serve.load(&reflect).with_words(&more).run();
    is_as_in("load-turn.txt", &keys(&turn.result()));

    let to = reflect.address.to_string();
    let udp = Program::run(&mut turnpike(&[&["load", "udp", &to, "--json", "-"][..], &more].concat()));
    is_as_in("load-udp.txt", &keys(&udp.result()));

    let server = format!("turn:{}", serve.address(V4));
    let user = format!("{USER}:{PASSWORD}");
    let probe = Program::start(&mut turnpike(&["probe", &server, "--user", &user, "--json"])).wait(SOON * 2);
    is_as_in("probe.txt", &keys(&probe.result()));
    eventually("all allocations have ended", || serve.allocations() == 0);
}

const VARIABLE: [&str; 2] = [".errors", ".port_443"];

const OPTIONAL: &str = ".notes";

fn keys(result: &Value) -> String {
    let mut keys = BTreeMap::new();
    collect_keys("", result, &mut keys);
    keys.into_iter().fold(String::new(), |mut text, (key, types)| {
        let _ = writeln!(text, "{key} {}", types.into_iter().collect::<Vec<_>>().join("|"));
        text
    })
}

fn collect_keys(path: &str, value: &Value, keys: &mut BTreeMap<String, BTreeSet<&'static str>>) {
    if path == OPTIONAL {
        return;
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    keys.entry(path.to_owned()).or_default().insert(kind);
    match value {
        Value::Array(values) if !VARIABLE.contains(&path) => {
            values.iter().for_each(|value| collect_keys(&format!("{path}[]"), value, keys));
        }
        Value::Object(values) if !VARIABLE.contains(&path) => {
            values.iter().for_each(|(key, value)| collect_keys(&format!("{path}.{key}"), value, keys));
        }
        _ => {}
    }
}
