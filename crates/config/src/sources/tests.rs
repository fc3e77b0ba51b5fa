//! Tests of configuration as a whole: sources, precedence, errors, output.

use turnpike_testkit::Dir;

use turnpike_rules::{ProxyVersion, Selector};
use turnpike_turn::server::{AlternateWhen, Transport};

use std::net::SocketAddr;

use turnpike_strict::parse_file;

use super::*;
use crate::{FleetRedirect, KeyChange, Secret, StoredKey, UserSecret};

const EXAMPLE: &str = include_str!("../../../../examples/turnpike.toml");

fn load_text(text: &str) -> Result<LoadedConfig<()>, Mistakes> {
    load(text, &[], Flags::new())
}

const CHECKS: Checks = Checks {
    log_filter: |text| {
        if ["inof", "a=b=c"].contains(&text) { Err("not a filter".to_owned()) } else { Ok(()) }
    },
    turn_uri: |text| {
        if text.starts_with("turn:") || text.starts_with("turns:") {
            Ok(text.to_owned())
        } else {
            Err("no URI".to_owned())
        }
    },
};

fn load(text: &str, environment: &[(&str, &str)], flags: Flags) -> Result<LoadedConfig<()>, Mistakes> {
    let environment =
        environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let mut problems = Vec::new();
    let entries = parse_file(Path::new("t.toml"), text, &mut problems);
    let sources = Sources { checks: CHECKS, ..Sources::new(None, environment, flags) };
    sources.merge(entries, problems, |_| ReadCertificates::default())
}

fn settings(text: &str) -> Settings {
    load_text(text).expect("a valid configuration").settings
}

fn errors(text: &str) -> Vec<Mistake> {
    load_text(text).expect_err("an invalid configuration").0
}

fn flag(key: &'static str, name: &'static str, values: &[&str]) -> Flags {
    let mut flags = Flags::new();
    flags.set(key, name, values.iter().map(|value| (*value).to_owned()));
    flags
}

fn values_of(mut settings: Settings) -> Settings {
    settings.origins.clear();
    for realm in &mut settings.realms {
        realm.place = RealmSettings::default().place;
    }
    settings
}

#[test]
fn each_kernel_datapath_has_a_name() {
    for (name, choice) in [
        ("kernel", crate::DatapathChoice::Kernel),
        ("xdp", crate::DatapathChoice::Xdp),
        ("xdp-generic", crate::DatapathChoice::XdpGeneric),
    ] {
        assert_eq!(settings(&format!("[server]\ndatapath = \"{name}\"")).datapath, choice);
    }
}

#[test]
fn file_of_another_program_or_of_forward_is_reported_once() {
    for (text, told) in [
        (
            "# c\nlistening-port=3478\nuser=a:b\n",
            "f:2:1: this looks like coturn's turnserver.conf; expected turnpike's TOML; to translate it: turnpike import coturn f -o ",
        ),
        ("global\n", "f:1:1: this looks like haproxy.cfg; expected turnpike's TOML"),
        ("0.0.0.0 80 10.0.0.1 80\n", "f:1:1: this looks like rinetd.conf; expected turnpike's TOML"),
        (
            "[log]\n[[rule]]\nlisten = \"0.0.0.0:1\"\n",
            "f:2:3: this is a file for turnpike forward, because it contains \"rule\"; expected a file for turnpike serve; for this one: turnpike \
             forward -c f",
        ),
        (
            "[[forwarding_rules]]\n",
            "f:1:3: this is a file for turnpike forward, because it contains \"forwarding_rules\"; ",
        ),
        (include_str!("../../../../examples/rinetd.conf"), "f:9:1: this looks like rinetd.conf; expected "),
        (
            include_str!("../../../../examples/forward.toml"),
            "f:24:2: this is a file for turnpike forward, because it contains \"forward\"; ",
        ),
    ] {
        let Err(found) = entries_of(Path::new("f"), text, &mut Vec::new()) else {
            panic!("{text} is accepted")
        };
        let found = found.to_string();
        assert!(found.starts_with(told) && found.lines().count() == 1, "{found}");
    }
    assert!(entries_of(Path::new("f"), EXAMPLE, &mut Vec::new()).is_ok());
    assert!(
        entries_of(Path::new("f"), "[rule]\n[server]\n", &mut Vec::new()).is_ok(),
        "reported as an unknown section"
    );
}

#[test]
fn the_example_shows_the_defaults() {
    assert_eq!(values_of(settings(EXAMPLE)), Settings::default());
}

#[test]
fn the_example_names_every_key_in_its_section() {
    let mut section = "";
    let mut named = Vec::new();
    for line in EXAMPLE.lines() {
        // [[realm]] and [[alternate]] are commented out, because the defaults have none.
        let line = line.strip_prefix('#').unwrap_or(line);
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = name.trim_matches(['[', ']']);
        } else if let Some((name, _)) = line.split_once(" = ")
            && !name.starts_with(' ')
        {
            named.push(format!("{section}.{name}"));
        }
    }
    let realm = REALM_KEYS.iter().map(|spec| spec.path);
    let alternate = ALTERNATE_KEYS.iter().map(|spec| spec.path);
    for path in KEYS.iter().map(|spec| spec.path).chain(realm).chain(alternate) {
        assert!(named.iter().any(|name| name == path), "{path} is not documented");
    }
}

#[test]
fn commented_examples_are_valid() {
    let uncommented: Vec<&str> = EXAMPLE
        .lines()
        .filter(|line| {
            line.starts_with('[')
                || (line.starts_with('#') && line.as_bytes().get(1).is_some_and(|c| *c != b' '))
        })
        .map(|line| line.strip_prefix('#').unwrap_or(line))
        .collect();
    let settings = settings(&uncommented.join("\n"));
    assert_eq!(
        (settings.auth.users.len(), settings.auth.secrets.len(), settings.relay.addresses.len()),
        (2, 2, 2)
    );
    assert_eq!((settings.allow.len(), settings.deny.len()), (5, 1));
    assert_eq!((settings.realms.len(), settings.alternates.len(), settings.oauth.keys.len()), (1, 1, 1));
    assert_eq!(settings.tls.certificates.len(), 1);
}

/// Files with one error each, followed by a line with the position, the key and part of the expected form.
const MISTAKES: &str = include_str!("mistakes.txt");

#[test]
fn each_mistake_names_line_column_key_and_expected_form() {
    let (mut text, mut files) = (String::new(), 0);
    for line in MISTAKES.lines() {
        let Some(wanted) = line.strip_prefix("--> ") else {
            text += &format!("{line}\n");
            continue;
        };
        let (place, wanted) = wanted.split_once(' ').expect("a place");
        let (key, expected) = wanted.split_once(": ").expect("a key");
        let errors = errors(&text);
        assert_eq!(errors.len(), 1, "{text}: {errors:?}");
        let Mistake { origin, key: found, .. } = &errors[0];
        let Origin::File { path, line, column } = origin else { panic!("{text}: {origin}") };
        assert_eq!(
            (path.as_path(), format!("{line}:{column}")),
            (Path::new("t.toml"), place.to_owned()),
            "{text}"
        );
        assert_eq!(found, key, "{text}");
        assert!(errors[0].expected.contains(expected), "{text}: {}", errors[0]);
        text.clear();
        files += 1;
    }
    assert!(files > 100 && text.is_empty(), "{files} files, and {text:?}");
}

#[test]
fn shared_ports_allow_more_allocations_than_ports() {
    let text = "[relay]\nports = \"5000-5009\"\nshared_ports = 2\n[limits]\nallocations = 1000";
    let settings = settings(text);
    assert_eq!((settings.relay.shared_ports, settings.allocation_limits.allocations), (2, 1000));
}

#[test]
fn unknown_key_suggests_the_nearest_one() {
    for (text, line, column, key, suggestion) in [
        ("[server]\nlisen = []", 2, 1, "server.lisen", Some("listen")),
        ("[server]\n  workes = 2", 2, 3, "server.workes", Some("workers")),
        ("[server]\nusers = []", 2, 1, "server.users", Some("auth.users")),
        ("[server]\ntls_cert = \"x\"", 2, 1, "server.tls_cert", Some("admin.tls_cert")),
        ("[servr]\nlisten = []", 1, 2, "servr", Some("server")),
        ("realms = \"x\"", 1, 1, "realms", Some("realm")),
        ("workers = 3", 1, 1, "workers", Some("server.workers")),
        ("[[relm]]\nname = \"x\"", 1, 3, "relm", Some("realm")),
        ("[[realm]]\nname = \"x\"\nsecret = [\"s\"]", 3, 1, "realm.secret", Some("secrets")),
        ("[auth]\nusers = [{ nam = \"a\", password = \"b\" }]", 2, 12, "auth.users.nam", Some("name")),
    ] {
        let errors = errors(text);
        assert_eq!(errors.len(), 1, "{text}: {errors:?}");
        let error = &errors[0];
        assert_eq!(error.origin, Origin::File { path: "t.toml".into(), line, column }, "{text}");
        assert_eq!((error.key.as_str(), error.suggestion.as_deref()), (key, suggestion), "{text}");
    }
}

#[test]
fn all_mistakes_are_listed_in_file_order() {
    let text = "[log]\nformat = 3\n[server]\nworkers = 0\nrelm = \"x\"\n[relay]\nports = \"x\"";
    let lines: Vec<String> = errors(text).iter().map(ToString::to_string).collect();
    assert_eq!(
        lines,
        [
            "t.toml:2:10: log.format: found the integer 3; expected \"text\", \"json\" or \"journald\"",
            "t.toml:4:11: server.workers: found the integer 0; expected a number of threads, 1 to 1024, or \"auto\" for one \
             per core",
            "t.toml:5:1: server.relm: unknown key; did you mean \"realm\"?",
            "t.toml:7:9: relay.ports: found the string \"x\"; expected \"A-B\", ports 1 to 65535, at least 2 of them \
             (EVEN-PORT reserves pairs), such as \"49152-65535\"",
        ]
    );
}

#[test]
fn broken_toml_is_reported_without_quoting_the_line() {
    let errors = errors("[auth]\nsecrets = [\"hunter2\n");
    let text = Mistakes(errors.clone()).to_string();
    assert!(matches!(&errors[0].origin, Origin::File { line: 2, .. }), "{errors:?}");
    assert!(text.contains("invalid TOML") && !text.contains("hunter2"), "{text}");
}

#[test]
fn broken_toml_gives_one_mistake_per_place() {
    let mut places = std::collections::BTreeSet::new();
    for mistake in errors("x = [}}}}") {
        let text = mistake.to_string();
        if text.contains("invalid TOML")
            && let Origin::File { line, column, .. } = mistake.origin
        {
            assert!(places.insert((line, column)), "{text}");
        }
    }
    assert!(places.len() > 3, "{places:?}");
}

#[test]
fn flags_win_over_environment_over_file_over_defaults() {
    let file = "[server]\nrealm = \"file\"\nworkers = 2\nsoftware = \"file\"";
    let environment = [("TURNPIKE_SERVER_REALM", "environment"), ("TURNPIKE_SERVER_WORKERS", "3")];
    let loaded = load(file, &environment, flag("server.realm", "--realm", &["flag"])).expect("valid");
    let settings = loaded.settings;
    assert_eq!(
        (settings.realm.as_str(), settings.origin("server.realm")),
        ("flag", &Origin::Flag("--realm"))
    );
    assert_eq!(settings.workers, Some(3));
    assert_eq!(settings.software, "file");
    assert_eq!(settings.shutdown.deadline, 30);
    assert!(settings.is_explicit("server.workers") && !settings.is_explicit("shutdown.deadline"));
}

#[test]
fn lists_are_replaced_instead_of_merged() {
    let file = "[server]\nlisten = [\"127.0.0.1:1\"]";
    let environment = [("TURNPIKE_SERVER_LISTEN", "127.0.0.1:2, [::1]:3")];
    let settings = load(file, &environment, Flags::new()).expect("valid").settings;
    assert_eq!(strings(&settings.listen), ["127.0.0.1:2", "[::1]:3"]);
    let flags = flag("server.listen", "--listen", &["127.0.0.1:4"]);
    let settings = load(file, &environment, flags).expect("valid").settings;
    assert_eq!(strings(&settings.listen), ["127.0.0.1:4"]);
}

fn strings(items: &[SocketAddr]) -> Vec<String> {
    items.iter().map(ToString::to_string).collect()
}

/// The default of a key, or for a secret one that is valid.
fn value_of<S>(spec: &KeySpec<S>, defaults: &S) -> String {
    match spec.path {
        "auth.users" => "[{ name = \"alice\", password = \"a,b\" }]".to_owned(),
        "oauth.key" => "[{ kid = \"north\", key = \"AAAAAAAAAAAAAAAAAAAAAA==\" }]".to_owned(),
        "events.webhook" => "[{ url = \"https://a.example/\", secret = \"0123456789abcdef\" }]".to_owned(),
        _ => (spec.show)(defaults).trim_matches(['[', ']']).replace('"', ""),
    }
}

#[test]
fn every_key_has_an_environment_variable() {
    let defaults = Settings::default();
    for spec in KEYS {
        let [name, _] = spec.variables();
        let value = value_of(spec, &defaults);
        let found = load("", &[(name.as_str(), value.as_str())], Flags::new());
        let found = found.unwrap_or_else(|mistakes| panic!("{name}: {mistakes}"));
        assert!(found.settings.is_explicit(spec.path), "{name}");
        assert!(found.warnings.iter().all(|warning| !warning.contains("unknown")), "{:?}", found.warnings);
    }
}

#[test]
fn lists_of_tables_in_the_environment_are_toml() {
    let file = "[[realm]]\nname = \"file\"\nsecrets = [\"s\"]";
    let environment = [
        ("TURNPIKE_SERVER_HAND_ON", "[{ plain = true, to = \"127.0.0.1:8080\" }]"),
        (
            "TURNPIKE_REALM",
            "[\n  { name = \"red\", secrets = [\"s\"] },\n  { name = \"blue\", secrets = [\"t\"] },\n]\n",
        ),
        ("TURNPIKE_ALTERNATE", "[{ address = \"203.0.113.9:3478\" }]"),
    ];
    let found = load(file, &environment, Flags::new()).expect("valid");
    assert_eq!(found.warnings, [] as [String; 0]);
    let names: Vec<&str> = found.settings.realms.iter().map(|realm| realm.name.as_str()).collect();
    assert_eq!((names, found.settings.alternates.len()), (vec!["red", "blue"], 1));
    assert_eq!(found.settings.hand_on[0].selector, Selector::Plain);
    let dir = Dir::new();
    let users = dir.file("users", "[{ name = \"alice\", password = \"a b\" }]\n");
    let variable = ("TURNPIKE_AUTH_USERS_FILE", users.to_str().expect("UTF-8"));
    let found = load("", &[variable, ("TURNPIKE_REALM", "")], Flags::new()).expect("valid").settings;
    assert_eq!((found.auth.users[0].name.as_str(), found.realms.len()), ("alice", 0));
}

#[test]
fn mistakes_in_tables_name_variable_and_position() {
    for (name, value, start) in [
        ("TURNPIKE_REALM", "[\n{ name = \"red\", nme = 1 }]", "TURNPIKE_REALM:2:17: realm.nme: unknown key"),
        ("TURNPIKE_REALM", "[{ name = \"hunter2 }]", "TURNPIKE_REALM:1:22: invalid TOML"),
        (
            "TURNPIKE_REALM",
            "hunter2",
            "environment variable TURNPIKE_REALM: realm: it is not a list of tables",
        ),
        ("TURNPIKE_SERVER_HAND_ON", "[{ plain = true }]", "TURNPIKE_SERVER_HAND_ON:1:2: server.hand_on: "),
    ] {
        let told = load("", &[(name, value)], Flags::new()).expect_err(value).to_string();
        assert!(told.starts_with(start) && !told.contains("hunter2"), "{told}");
    }
}

#[test]
fn mistakes_name_the_flag_or_variable() {
    let environment = [("TURNPIKE_RELAY_PORTS", "1")];
    let errors =
        load("", &environment, flag("server.workers", "--workers", &["none"])).expect_err("two mistakes").0;
    let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
    assert!(
        lines[0].starts_with("environment variable TURNPIKE_RELAY_PORTS: relay.ports: found \"1\""),
        "{lines:?}"
    );
    assert!(lines[1].starts_with("flag --workers: server.workers: found \"none\""), "{lines:?}");
}

#[test]
fn incomplete_credential_names_the_missing_part() {
    for (key, name, value, why) in [
        ("auth.users", "--user", "alice", "the colon and the password are missing"),
        ("auth.users", "--user", ":wonderland", "the name before the colon is missing"),
        ("auth.users", "--user", "alice:", "the password of \"alice\", after the colon, is empty"),
        ("auth.secrets", "--secret", "", "the secret is empty"),
    ] {
        let error = load("", &[], flag(key, name, &[value])).expect_err(why).to_string();
        assert!(error.starts_with(&format!("flag {name}: {key}: ")) && error.contains(why), "{error}");
        assert!(!error.contains("wonderland"), "{error}");
    }
}

#[test]
fn error_hidden_by_a_flag_is_still_reported() {
    let flags = flag("server.workers", "--workers", &["2"]);
    let errors = load("[server]\nworkers = 0", &[], flags).expect_err("the file is wrong").0;
    assert_eq!(errors.len(), 1);
}

#[test]
fn environment_variables_can_name_secret_files() {
    let dir = Dir::new();
    let path = dir.file("secrets", "new one\n\nold, one\n");
    let variable = ("TURNPIKE_AUTH_SECRETS_FILE", path.to_str().expect("UTF-8"));
    let settings = load("", &[variable], Flags::new()).expect("valid").settings;
    let both = load("", &[variable, ("TURNPIKE_AUTH_SECRETS", "x")], Flags::new());
    drop(dir);
    let secrets: Vec<&str> = settings.auth.secrets.iter().map(Secret::reveal).collect();
    assert_eq!(secrets, ["new one", "old, one"]);
    assert!(both.expect_err("ambiguous").to_string().contains("both set"));
    let gone = load("", &[variable], Flags::new()).expect_err("the file is gone").to_string();
    assert!(
        gone.starts_with("environment variable TURNPIKE_AUTH_SECRETS_FILE: auth.secrets: cannot read"),
        "{gone}"
    );
}

#[test]
fn bad_secret_lines_and_empty_secret_files_are_refused() {
    let dir = Dir::new();
    for (text, place, words) in [
        ("north\n\"south\"\n", ":2:1: auth.secrets: ", "quotes"),
        ("static-auth-secret=north\n", ":1:1: auth.secrets: ", "static-auth-secret="),
        ("\n", "TURNPIKE_AUTH_SECRETS_FILE: auth.secrets: ", "secrets is empty"),
    ] {
        let path = dir.file("secrets", text);
        let variable = ("TURNPIKE_AUTH_SECRETS_FILE", path.to_str().expect("UTF-8"));
        let told = load("", &[variable], Flags::new()).expect_err(text).to_string();
        assert!(told.contains(place) && told.contains(words), "{told}");
        assert!(!told.contains("north") && !told.contains("south"), "{told}");
    }
    let path = dir.file("secrets", "\u{feff}north\n");
    let variable = ("TURNPIKE_AUTH_SECRETS_FILE", path.to_str().expect("UTF-8"));
    let settings = load("", &[variable], Flags::new()).expect("a byte order mark is not an error").settings;
    assert_eq!(settings.auth.secrets.iter().map(Secret::reveal).collect::<Vec<_>>(), ["north"]);
}

#[test]
fn every_key_can_come_from_a_file() {
    let dir = Dir::new();
    let addresses = dir.file("addresses", "10.0.0.5=203.0.113.5\n2001:db8::5\n");
    let ports = dir.file("ports", "50000-50999\n");
    let nothing = dir.file("nothing", "\n");
    let two = dir.file("two", "50000-50999\n60000-60999\n");
    let name = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let (addresses, ports, nothing, two) = (name(&addresses), name(&ports), name(&nothing), name(&two));
    let environment = [
        ("TURNPIKE_RELAY_ADDRESSES_FILE", addresses.as_str()),
        ("TURNPIKE_RELAY_PORTS_FILE", &ports),
        ("TURNPIKE_FLEET_ZONE_FILE", &nothing),
    ];
    let loaded = load("", &environment, Flags::new()).expect("valid");
    let shown = loaded.settings.to_toml();
    for line in
        [r#"addresses = ["10.0.0.5=203.0.113.5", "2001:db8::5"]"#, r#"ports = "50000-50999""#, r#"zone = """#]
    {
        assert!(shown.contains(line), "{line}: {shown}");
    }
    assert!(
        loaded.warnings.iter().all(|warning| !warning.contains("unknown environment")),
        "{:?}",
        loaded.warnings
    );
    let wrong = load("", &[("TURNPIKE_RELAY_PORTS_FILE", &two)], Flags::new());
    let text = wrong.expect_err("two lines").to_string();
    assert!(text.contains("relay.ports") && text.contains("has 2 lines"), "{text}");
}

#[test]
fn error_in_a_users_file_names_its_line() {
    let dir = Dir::new();
    let path = dir.file("users", "alice:wonderland\n\nbob\n");
    let name = path.to_str().expect("UTF-8");
    let errors = load("", &[("TURNPIKE_AUTH_USERS_FILE", name)], Flags::new());
    let text = errors.expect_err("bob has no password").to_string();
    assert!(text.starts_with(&format!("{name}:3:1: auth.users: ")), "{text}");
}

#[test]
fn unknown_variable_is_a_warning_with_a_suggestion() {
    let environment =
        [("TURNPIKE_SERVER_RELM", "x"), ("TURNPIKE_PORT", "tcp://10.0.0.1:3478"), ("TURNPIKE_CONFIG", "x")];
    let warnings = load("", &environment, Flags::new()).expect("valid").warnings;
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].ends_with("did you mean TURNPIKE_SERVER_REALM?"), "{warnings:?}");
}

#[test]
fn useless_or_excessive_settings_are_warnings() {
    for (text, words) in [
        (
            "[server]\ntcp = false\n[tls]\ncert = \"a\"\nkey = \"b\"",
            &["t.toml:4:8: tls.cert: nothing uses it", "server.tcp", "tls.listen"][..],
        ),
        (
            "[server]\ntcp = false\n[tls]\ncertificates = [{ cert = \"a\", key = \"b\" }]",
            &["t.toml:4:16: tls.certificates: nothing uses it"],
        ),
        (
            "[server]\nproxy_protocol_from = [\"10.0.0.1/32\", \"0.0.0.0/0\"]",
            &["t.toml:2:23: server.proxy_protocol_from: 0.0.0.0/0", "every TCP client"],
        ),
        ("[server]\nproxy_protocol_from = [\"::/0\"]", &["server.proxy_protocol_from: ::/0"]),
        ("[fleet]\nzone = \"west\"", &["fleet.url: it is missing", "[fleet]"]),
        (
            "[server]\nrealm = \"a-realm-of-more-than-forty-bytes.example.org\"",
            &[
                "t.toml:2:9: server.realm: the realm is long",
                "28 bytes",
                "116 bytes",
                "limits.refusals_per_prefix",
            ],
        ),
    ] {
        let warnings = load_text(text).expect("valid").warnings;
        assert_eq!(warnings.len(), 1, "{text}: {warnings:?}");
        for word in words {
            assert!(warnings[0].contains(word), "{text}: {warnings:?}");
        }
    }
    for text in [
        "",
        "[tls]\ncert = \"a\"\nkey = \"b\"",
        "[server]\ntcp = false\n[dtls]\nlisten = [\"0.0.0.0:5349\"]\n[tls]\ncert = \"a\"\nkey = \"b\"",
        "[server]\nproxy_protocol_from = [\"10.0.0.0/8\"]",
        "[server]\ntcp = false\nlisten = [\"127.0.0.1:9641\"]",
        "[[alternate]]\naddress = \"192.0.2.1:3478\"",
        "[server]\nrealm = \"realm-of-forty-bytes-in-all.example.org\"",
    ] {
        assert_eq!(load_text(text).expect(text).warnings, [""; 0], "{text}");
    }
}

#[test]
fn users_are_read_in_all_three_forms() {
    let md5 = "0123456789abcdef0123456789ABCDEF";
    let text = format!(
        "[auth]\nusers = [{{ name = \"a\", password = \"p:w\" }}, {{ name = \"b\", key = \"{md5}\" }}, \"c:p:w\"]"
    );
    let users = settings(&text).auth.users;
    let names: Vec<&str> = users.iter().map(|user| user.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    assert_eq!(users[0].secret, UserSecret::Password(Secret::new("p:w")));
    assert_eq!(users[1].secret, UserSecret::Keys(vec![StoredKey::Md5(Secret::new(md5))]));
    assert_eq!(users[2].secret, UserSecret::Password(Secret::new("p:w")));
    let tables = settings(
        "[[auth.users]]\nname = \"a\"\npassword = \"x\"\n[[auth.users]]\nname = \"b\"\npassword = \"y\"",
    );
    assert_eq!(tables.auth.users.len(), 2);
}

const DIGITS: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

#[test]
fn fleet_needs_a_secret_and_users_and_has_limits_for_all_nodes() {
    let with = |more: &str| {
        load_text(&format!("[fleet]\nurl = \"redis://:{DIGITS}@h\"\nsecret = \"{DIGITS}\"\n{more}"))
    };
    let fleet =
        with("node = \"turn-1\"\nzone = \"west\"\naddresses = [\"tls://203.0.113.5:5349\"]").expect("valid");
    assert!(!fleet.settings.to_toml().contains(DIGITS) && !format!("{fleet:?}").contains(DIGITS));
    let fleet = fleet.settings.fleet;
    assert_eq!((fleet.node, fleet.zone), ("turn-1".parse().ok(), "west".parse().ok()));
    assert_eq!((fleet.name.as_str(), fleet.redirect), ("turnpike", FleetRedirect::Load));
    let realm = "[[realm]]\nname = \"r\"\nsecrets = [\"s\"]\nallocations = 1000000";
    assert_eq!(with(realm).expect("above one node's limit").settings.realms.len(), 1);
    let errors = load_text("[fleet]\nurl = \"redis://h\"").expect_err("no secret").to_string();
    assert!(errors.contains("fleet.secret") && errors.contains("openssl rand"), "{errors}");
    for (more, told) in [
        (format!("allocations = 5\n{realm}"), "fleet.allocations"),
        ("[auth]\nrequired = false".to_owned(), "auth.required is false"),
    ] {
        let errors = with(&more).expect_err("wrong").to_string();
        assert!(errors.contains(told) && !errors.contains(DIGITS), "{errors}");
    }
}

#[test]
fn secrets_are_in_no_output() {
    let key = "aa23456789abcdef0123456789abcdef";
    let text = format!(
        "[auth]\nsecrets = [\"hunter2\"]\nusers = [{{ name = \"a\", password = \"hunter2\" }}, {{ name = \"b\", key = \"{key}\" }}]"
    );
    let loaded = load_text(&text).expect("valid");
    for output in [loaded.settings.to_toml(), format!("{loaded:?}")] {
        assert!(!output.contains("hunter2") && !output.contains(key), "{output}");
        assert!(output.contains("***"), "{output}");
    }
    for wrong in [
        "users = [\"hunter2\"]",
        "users = \"hunter2\"",
        "secrets = \"hunter2\"",
        "users = [{ name = \"a\", key = \"hunter2\" }]",
    ] {
        let message = load_text(&format!("[auth]\n{wrong}")).expect_err("wrong").to_string();
        assert!(!message.contains("hunter2"), "{message}");
    }
    let flags = flag("auth.users", "--user", &["hunter2"]);
    let message = load("", &[("TURNPIKE_AUTH_USERS", "hunter2")], flags).expect_err("wrong").to_string();
    assert!(!message.contains("hunter2"), "{message}");
}

#[test]
fn shown_settings_are_a_valid_configuration() {
    let text = "[server]\nrealm = \"a b\"\nlisten = [\"127.0.0.1:1\"]\nworkers = 3\n[relay]\naddresses = [\"10.0.0.1=192.0.2.1\"]\n\
                [admin]\nlisten = \"off\"\n[log]\nformat = \"json\"";
    let first = settings(text);
    assert_eq!(values_of(settings(&first.to_toml())), values_of(first));
}

#[test]
fn realms_are_read_and_shown_without_their_secrets() {
    let text = "[server]\nlisten = [\"127.0.0.1:1\", \"127.0.0.1:2\"]\n\
                [[realm]]\nname = \"a\"\nusers = [\"ann:hunter2\"]\nallocations = 7\n\
                [[realm]]\nname = \"b\"\nsecrets = [\"hunter2\"]\nlisten = [\"127.0.0.1:2\"]\n\
                server_names = [\"TURN.example.org\"]\nallocations_per_user = 3";
    let read = settings(text);
    let [a, b] = &read.realms[..] else { panic!("not two realms: {:?}", read.realms) };
    assert_eq!((a.name.as_str(), a.users.len(), a.allocations), ("a", 1, Some(7)));
    assert_eq!((b.name.as_str(), b.secrets.len(), b.allocations_per_user), ("b", 1, Some(3)));
    assert_eq!((b.listen.len(), b.server_names[0].as_str()), (1, "turn.example.org"));
    let shown = read.to_toml();
    assert!(!shown.contains("hunter2") && shown.contains("[[realm]] # t.toml:"), "{shown}");
    let again = settings(&shown);
    assert_eq!(again.realms.len(), 2);
    assert_eq!((again.realms[0].allocations, &again.realms[1].listen), (Some(7), &b.listen));
    let mistake =
        load_text("[[realm]]\nname = \"a\"\nsecrets = \"hunter2\"").expect_err("not a list").to_string();
    assert!(!mistake.contains("hunter2"), "{mistake}");
}

#[test]
fn token_keys_are_read_from_text_and_files_and_kept_secret() {
    let dir = Dir::new();
    let path = dir.file("token-key", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n");
    let text = format!(
        "[oauth]\nserver_name = \"turn.example.org\"\n[[oauth.key]]\nkid = \"north\"\nkey = \"AAAAAAAAAAAAAAAAAAAAAA==\"\n\
         [[oauth.key]]\nkid = \"north\"\nkey_file = {path:?}\nrealm = \"b\"\nlifetime = 60\n\
         [[realm]]\nname = \"b\""
    );
    let read = load_text(&text).expect("valid").settings;
    let [here, there] = &read.oauth.keys[..] else { panic!("not two keys: {:?}", read.oauth) };
    assert_eq!((here.key.algorithm(), here.max_lifetime, &here.realm), ("A128GCM", 86_400, &None));
    assert_eq!(
        (there.key.algorithm(), there.max_lifetime, there.realm.as_deref()),
        ("A256GCM", 60, Some("b"))
    );
    let shown = read.to_toml();
    assert!(!shown.contains("AAAA") && !shown.contains("AAEC") && shown.contains("A256GCM"), "{shown}");
    let wrong =
        load_text("[[oauth.key]]\nkid = \"a\"\nkey = \"hunter2\"").expect_err("not a key").to_string();
    assert!(!wrong.contains("hunter2"), "{wrong}");
}

#[test]
fn alternates_are_read_and_shown() {
    let text = "[[alternate]]\naddress = \"192.0.2.1:3478\"\n\
                [[alternate]]\naddress = \"[2001:db8::1]:5349\"\ndomain = \"turn2.example.org\"\n\
                transports = [\"tls\", \"dtls\"]\nwhen = \"always\"";
    let read = settings(text);
    let [plain, named] = &read.alternates[..] else { panic!("not two alternates: {:?}", read.alternates) };
    assert_eq!((plain.alternate.when, &plain.alternate.domain), (AlternateWhen::Drain, &None));
    assert!(plain.alternate.transports.is_empty());
    assert_eq!(named.alternate.transports, [Transport::Tls, Transport::Dtls]);
    assert_eq!(named.alternate.domain.as_deref(), Some("turn2.example.org"));
    assert_eq!(values_of(settings(&read.to_toml())).alternates, read.alternates);
}

#[test]
fn hand_on_rules_are_read_and_shown() {
    let text = "[server]\nhand_on = [{ sni = [\"*.example.org\", \"example.org\"], alpn = \"h2\", to = \"[::1]:8443\", \
                proxy_protocol = \"v2\" }, { plain = true, to = \"127.0.0.1:8080\" }]";
    let read = settings(text);
    let [tls, plain] = &read.hand_on[..] else { panic!("not two targets: {:?}", read.hand_on) };
    assert!(
        matches!(&tls.selector, Selector::Tls { names, protocols } if names.len() == 2 && protocols.len() == 1)
    );
    assert_eq!((tls.to.to_string(), tls.proxy_protocol), ("[::1]:8443".to_owned(), Some(ProxyVersion::V2)));
    assert_eq!((&plain.selector, plain.proxy_protocol), (&Selector::Plain, None));
    assert_eq!(values_of(settings(&read.to_toml())).hand_on, read.hand_on);
}

#[test]
fn alternate_on_an_unserved_transport_is_another_server() {
    let is_refused = |switches: &str, transports: &str| {
        let text = format!(
            "[server]\nlisten = [\"192.0.2.1:3478\"]\n{switches}\n[tls]\nlisten = [\"192.0.2.1:5349\"]\n\
             [[alternate]]\naddress = \"192.0.2.1:3478\"\n{transports}"
        );
        let mistakes = load_text(&text).err().map_or_else(Vec::new, |mistakes| mistakes.0);
        mistakes.iter().any(|mistake| mistake.to_string().contains("clients would be redirected in a loop"))
    };
    for (switches, transports, refused) in [
        ("", "", true),
        ("udp = false", "", true),
        ("udp = false", "transports = [\"tcp\"]", true),
        ("udp = false", "transports = [\"udp\"]", false),
        ("tcp = false", "transports = [\"tcp\", \"tls\"]", false),
        ("udp = false\ntcp = false", "", false),
    ] {
        assert_eq!(is_refused(switches, transports), refused, "{switches:?} {transports:?}");
    }
}

#[test]
fn the_example_names_every_key_of_tables_that_repeat() {
    let names = |table: &str, keys: Vec<&str>| {
        let (_, after) = EXAMPLE.split_once(&format!("#[[{table}]]")).expect("a commented example");
        let own = after.split_once("#[[").map_or(after, |(own, _)| own);
        for key in keys {
            assert!(own.contains(&format!("\n#{key} = ")), "{table}.{key} is not documented");
        }
    };
    names("realm", REALM_KEYS.iter().map(KeySpec::name).collect());
    names("alternate", ALTERNATE_KEYS.iter().map(KeySpec::name).collect());
}

#[test]
fn keys_that_need_a_restart_are_named() {
    let old = settings("[server]\nrealm = \"a\"\nworkers = 2");
    let new = settings("[server]\nrealm = \"b\"\nworkers = 3\n[admin]\nlisten = \"off\"");
    assert_eq!(old.unchangeable(&new), ["server.workers", "admin.listen"]);
    let mut kept = new.clone();
    kept.keep_unchangeable(&old);
    assert_eq!((kept.workers, &kept.admin, kept.realm.as_str()), (Some(2), &old.admin, "b"));
    assert!(!kept.is_explicit("admin.listen") && old.unchangeable(&kept).is_empty());
    assert_eq!(old.changed(&kept), old.changed(&new));
}

#[test]
fn limits_accept_units_and_are_shown_unchanged() {
    let text = "[limits]\nbits_per_second = \"10G\"\nbits_per_second_per_user = \"none\"\nburst = 100\n\
                allocations_per_prefix = 5\nprefix_v6 = 56\nrefusals_per_prefix = 100\nmax_allocation_duration = 86400\n\
                [peers]\nallow = [\"192.0.2.0/24\"]\nallow_only = true\n\
                [[realm]]\nname = \"a\"\nsecrets = [\"s\"]\nbits_per_second = \"500M\"\n\
                bits_per_second_per_allocation = \"none\"\nmax_allocation_duration = \"none\"\nrelay_ports = \"50000-50099\"";
    let read = settings(text);
    assert_eq!(
        (read.rates.bits_per_second, read.rates.bits_per_second_per_user, read.rates.burst),
        (Some(10_000_000_000), None, 100)
    );
    assert_eq!(
        (read.allocation_limits.allocations_per_prefix, read.prefix_v4, read.prefix_v6),
        (Some(5), 32, 56)
    );
    assert_eq!(
        (read.refusals_per_prefix, read.max_allocation_duration, read.allow_only),
        (Some(100), Some(86_400), true)
    );
    let realm = &read.realms[0];
    assert_eq!(
        (realm.bits_per_second, realm.bits_per_second_per_user, realm.bits_per_second_per_allocation),
        (Some(Some(500_000_000)), None, Some(None))
    );
    assert_eq!(
        (realm.max_allocation_duration, realm.relay_ports.clone()),
        (Some(None), Some(50_000..=50_099))
    );
    let mut shown = settings(&read.to_toml());
    shown.realms[0].secrets.clone_from(&realm.secrets);
    assert_eq!(values_of(shown), values_of(read));
    let environment =
        [("TURNPIKE_LIMITS_BITS_PER_SECOND", "64k"), ("TURNPIKE_LIMITS_MAX_ALLOCATION_DURATION", "60")];
    let read = load("", &environment, flag("peers.allow_only", "--allow-peers-only", &["false"]));
    let read = read.expect("valid").settings;
    assert_eq!(
        (read.rates.bits_per_second, read.max_allocation_duration, read.allow_only),
        (Some(64_000), Some(60), false)
    );
}

#[test]
fn unreadable_file_is_reported_once() {
    let sources = Sources::new(Some("/nonexistent/turnpike.toml".into()), Vec::new(), Flags::new());
    let message = sources.settings().expect_err("no such file").to_string();
    assert!(
        message.starts_with("/nonexistent/turnpike.toml: cannot read the configuration file"),
        "{message}"
    );
}

#[test]
fn list_of_changes_has_reloadable_keys_including_secrets() {
    let changed = |old: &str, new: &str| {
        let changes = settings(old).changed(&settings(new));
        changes.iter().map(|change| change.key).collect::<Vec<_>>()
    };
    let one = "[auth]\nusers = [\"a:one\"]\n";
    assert_eq!(changed(one, one), [""; 0]);
    assert_eq!(changed(one, "[auth]\nusers = [\"a:two\"]\n"), ["auth.users"]);
    assert_eq!(changed(one, "[auth]\nsecrets = [\"one\"]\n"), ["auth.users", "auth.secrets"]);
    let key = |key: &str| format!("{one}[oauth]\nkey = [{{ kid = \"n\", key = \"{key}\" }}]\n");
    assert_eq!(changed(&key("AAAAAAAAAAAAAAAAAAAAAA=="), &key("AQEBAQEBAQEBAQEBAQEBAQ==")), ["oauth.key"]);
    let token = |token: &str| format!("{one}[admin]\ntokens = [\"{token}\"]\n");
    assert_eq!(changed(&token("0123456789abcdef"), &token("fedcba9876543210")), ["admin.tokens"]);
    let other = format!("{one}[relay]\nbuffer = 50000\n[peers]\ndeny = [\"8.8.8.8\"]\n");
    assert_eq!(changed(one, &other), ["peers.deny"]);
    let values = |old: &str, new: &str| settings(old).changed(&settings(new)).remove(0).values;
    assert_eq!(values("", "[limits]\nburst = 100"), Some(("250".to_owned(), "100".to_owned())));
    assert_eq!(values(one, ""), None, "secrets are not shown");
    let realm = |more: &str| settings(&format!("[[realm]]\nname = \"a\"\nsecrets = [\"s\"]\n{more}"));
    let changes = realm("").realms[0].changed(&realm("bits_per_second = \"2M\"").realms[0]);
    let change =
        KeyChange { key: "realm.bits_per_second", values: Some((String::new(), "2000000".to_owned())) };
    assert_eq!(changes, [change]);
}

#[test]
fn passed_sockets_have_the_lowest_precedence() {
    let passed = || {
        let mut fallback = flag("server.listen", "LISTEN_FDS", &["127.0.0.1:3478", "[::1]:3478"]);
        fallback.set("server.workers", "LISTEN_FDS", ["2".to_owned()]);
        fallback
    };
    let load = |text: &str, flags: Flags| {
        let mut problems = Vec::new();
        let entries = parse_file(Path::new("t.toml"), text, &mut problems);
        let sources = Sources::new(None, Vec::new(), flags).with_fallback(passed());
        let merged = sources.merge(entries, problems, |_| ReadCertificates::<()>::default());
        merged.expect("a valid configuration").settings
    };
    let settings = load("", Flags::new());
    assert_eq!(settings.listen, ["127.0.0.1:3478", "[::1]:3478"].map(|at| at.parse().unwrap()));
    assert_eq!(settings.workers, Some(2));
    assert_eq!(settings.origin("server.listen"), &Origin::Environment("LISTEN_FDS".to_owned()));
    let settings =
        load("[server]\nlisten = [\"127.0.0.1:9\"]\n", flag("server.workers", "--workers", &["1"]));
    assert_eq!((settings.listen, settings.workers), (vec!["127.0.0.1:9".parse().unwrap()], Some(1)));
}

/// RFC 8489 sections 14.9, 14.14 and 14.16; RFC 7635 section 6.1.
#[test]
fn names_fit_into_their_stun_attributes() {
    let letters = |count| "\u{e4}".repeat(count);
    let domain = |last| ["d".repeat(63), "d".repeat(63), "d".repeat(63), "d".repeat(last)].join(".");
    let redirect = "[[alternate]]\naddress = \"198.51.100.1:3478\"\ndomain";
    for (key, fits, longer) in [
        ("[server]\nrealm", letters(127), letters(128)),
        ("[server]\nsoftware", letters(127), letters(128)),
        ("[oauth]\nserver_name", "n".repeat(255), "n".repeat(256)),
        (redirect, domain(61), domain(62)),
    ] {
        assert!(load_text(&format!("{key} = \"{fits}\"")).is_ok(), "{key}");
        assert_eq!(errors(&format!("{key} = \"{longer}\"")).len(), 1, "{key}");
    }
}
