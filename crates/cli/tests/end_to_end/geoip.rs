//! Countries and autonomous systems of clients, from MaxMind DB files: in logs, events and the admin interface, and in rules.

use crate::prelude::*;
use turnpike_testkit::mmdb::mmdb;

const PLAIN: [&str; 4] = ["--relay-ip", "127.0.0.1", "--user", "a:one"];

fn database(country: &str, asn: u32) -> Vec<u8> {
    mmdb("Test-City", 1_800_000_000, &[("127.0.0.0/8", country, asn), ("::1/128", country, asn)])
}

/// Replaces the file at once, as geoipupdate does.
fn replace(file: &Path, content: &[u8]) {
    let new = file.with_extension("new");
    fs::write(&new, content).expect("the test's own file");
    fs::rename(new, file).expect("the test's own file");
}

struct Located {
    serve: Serve,
    database: PathBuf,
    config: PathBuf,
    _dir: Dir,
}

impl Located {
    fn start(country: &str, asn: u32, rules: &str) -> Self {
        let dir = Dir::new();
        let database = dir.at("geo.mmdb");
        replace(&database, &self::database(country, asn));
        let config = dir.file("turnpike.toml", text(&database, rules));
        let path = config.to_str().expect("the test's path is UTF-8");
        let serve =
            Serve::start_bare(&[&PLAIN[..], &["-c", path, "--allow-peer", "127.0.0.0/8", "-v"]].concat());
        Self { serve, database, config, _dir: dir }
    }

    fn allocate(&self) -> Finished {
        Load::as_user(self.serve.address(V4), "a:one")
            .with("--mode allocate --clients 1 --rate 20 --duration 0.2")
            .run()
    }

    fn is_refused(&self) -> bool {
        let output = self.allocate().output();
        output.contains("403") || output.contains("\"refused\"")
    }

    fn get(&self, path: &str) -> Value {
        serde_json::from_str(&fetch(self.serve.admin(), path).expect("the admin interface answers").1)
            .expect("JSON")
    }
}

fn text(database: &Path, rules: &str) -> String {
    format!("[geoip]\nfiles = [{database:?}]\n[clients]\n{rules}")
}

#[test]
fn network_of_a_client_is_in_log_api_and_commands() {
    let mut located = Located::start("DE", 64500, "");
    let network = json!({ "country": "DE", "asn": 64500 });
    let reflect = Reflect::start(V4, &[]);
    let load = Load::as_user(located.serve.address(V4), "a:one")
        .to(reflect.address)
        .with("--clients 1 --rate 200 --warmup 0 --duration 30")
        .start();
    located.serve.wait_for_allocations(1);
    let shown = located.get("/v1/allocations");
    assert_eq!(shown["allocations"][0]["network"], network, "{shown}");
    let id = shown["allocations"][0]["id"].as_str().expect("an id");
    assert_eq!(located.get(&format!("/v1/allocations/{id}"))["network"], network);
    let admin = located.serve.admin().to_string();
    let list = Program::run(&mut turnpike(&["allocations", "--admin", &admin])).ended(0).stdout;
    assert!(list.lines().next().is_some_and(|head| head.ends_with("NETWORK")), "{list}");
    assert!(list.contains("DE AS64500"), "{list}");
    load.signal("INT");
    load.wait(SOON);
    for told in ["allocation opened", "allocation ended"] {
        let line = located.serve.program.line_with(told);
        assert!(line.contains("country=DE asn=64500"), "{line}");
    }
    let built = located.serve.metrics().sum("turnpike_geoip_built_seconds", "geo.mmdb");
    assert_eq!(built, 1_800_000_000);
}

#[test]
fn rules_on_networks_refuse_allocations_and_follow_the_file() {
    let mut located = Located::start("DE", 64500, "deny = [\"AS64501\", \"country:FR\"]\n");
    assert_eq!(located.allocate().code, Some(0));
    for (country, asn) in [("FR", 64500), ("DE", 64501)] {
        replace(&located.database, &database(country, asn));
        let network = json!({ "country": country, "asn": asn });
        let refused = || {
            let is_refused = located.is_refused();
            let found = located.get("/v1/refusals")["refusals"].take();
            let found =
                found.as_array().expect("a list").iter().find(|found| found["network"] == network).cloned();
            found.inspect(|_| assert!(is_refused, "refusals without an error of the client"))
        };
        eventually("the new file is in use", || refused().is_some());
        let refusal = refused().expect("a refusal");
        assert_eq!((&refusal["code"], &refusal["asked"]), (&json!(403), &json!("allocate")), "{refusal}");
        assert_eq!(refusal["keys"], json!(["clients.allow", "clients.deny", "geoip.files"]), "{refusal}");
    }
    assert!(located.serve.metrics().sum("turnpike_network_refusals_total", "") > 0);

    let damaged = &database("DE", 64500)[..200];
    replace(&located.database, damaged);
    let line = located.serve.program.line_with("the old GeoIP databases stay in use");
    assert!(line.contains("geo.mmdb: not a valid MaxMind DB file"), "{line}");
    assert_eq!(located.serve.metrics().sum("turnpike_geoip_current", ""), 0);
    assert!(located.is_refused(), "AS 64501, as in the last valid file");

    replace(&located.database, &database("DE", 64501));
    fs::write(&located.config, text(&located.database, "allow = [\"country:DE\"]\n"))
        .expect("the test's own file");
    located.serve.program.signal("HUP");
    located.serve.program.line_with("configuration reloaded");
    assert_eq!(located.allocate().code, Some(0));
    assert_eq!(located.serve.metrics().sum("turnpike_geoip_current", ""), 1);
}

#[test]
fn unusable_file_prevents_the_start_and_is_named() {
    let dir = Dir::new();
    let database = dir.at("geo.mmdb");
    fs::write(&database, &self::database("DE", 64500)[..200]).expect("the test's own file");
    let config = dir.file("turnpike.toml", text(&database, ""));
    let path = config.to_str().expect("the test's path is UTF-8");
    for command in ["serve", "check-config"] {
        let ended = Program::run(&mut turnpike(&[command, "-c", path])).ended(2);
        let words = ["turnpike.toml:2", "geoip.files", "geo.mmdb: not a valid MaxMind DB file"];
        assert!(words.iter().all(|word| ended.stderr.contains(word)), "{command}: {}", ended.stderr);
    }
    let config = dir.file("rule.toml", "[clients]\ndeny = [\"country:DE\"]\n");
    let path = config.to_str().expect("the test's path is UTF-8");
    let ended = Program::run(&mut turnpike(&["check-config", "-c", path])).ended(2);
    assert!(
        ended.stderr.contains("country:DE needs a database, and geoip.files is empty"),
        "{}",
        ended.stderr
    );
}
