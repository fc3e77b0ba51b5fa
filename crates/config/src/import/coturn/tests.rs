//! Each option has its line in `all.conf`, and what that comes to stands in `all.toml` and `all.txt`.

use std::collections::BTreeSet;

use super::*;
use crate::Settings;

const CONF: &str = include_str!("tests/all.conf");
const TOML: &str = include_str!("tests/all.toml");
const NOTES: &str = include_str!("tests/all.txt");
const DOCUMENT: &str = include_str!("../../../../../docs/from-coturn.md");

/// Those of 4.17.1, from its own list of options.
const COTURN: &str = include_str!("tests/options-4.17.1.txt");

fn read(toml: &str) -> Settings {
    let mut problems = Vec::new();
    let entries = source::parse_file(Path::new("t.toml"), toml, &mut problems);
    let sources = Sources::new(None, Vec::new(), Flags::new());
    let loaded = sources.merge(&entries, problems, |_| certificates::Found::default());
    loaded.unwrap_or_else(|errors| panic!("{errors}\n{toml}")).0.settings
}

/// What a file comes to, and what is told that is to be done.
fn translated(text: &str) -> (Settings, Vec<String>) {
    let imported = translate("t.conf", text);
    let notes = imported.notes.iter().filter(|note| !note.is_harmless).map(ToString::to_string);
    (read(&imported.toml), notes.collect())
}

fn told(notes: &[String], words: &str) -> bool {
    notes.iter().any(|note| note.contains(words))
}

#[test]
fn every_option_of_coturn_is_known_and_has_its_line_in_the_test_and_in_the_document() {
    let known: BTreeSet<&str> = OPTIONS.iter().map(|(name, _)| *name).collect();
    assert_eq!(known.len(), OPTIONS.len(), "each once");
    let missing: Vec<_> = COTURN.lines().filter(|name| !known.contains(name)).collect();
    assert_eq!(missing, [""; 0]);
    let used: BTreeSet<&str> = settings(CONF).map(|(_, name, _)| name).collect();
    assert_eq!(used, known);
    // Rows of tables begin with the options that they are about, each in backquotes.
    let rows = DOCUMENT.lines().filter_map(|line| line.strip_prefix("| `")?.split('|').next());
    let names = rows.flat_map(|cell| cell.split('`').step_by(2).collect::<Vec<_>>());
    let documented: BTreeSet<&str> = names.filter(|name| known.contains(name)).collect();
    assert_eq!(documented, known);
}

/// After a change that is meant: the test shows what it found, and that is what the files should say.
#[test]
fn every_option_comes_to_what_the_files_say() {
    let imported = translate("all.conf", CONF);
    let notes: String = imported
        .notes
        .iter()
        .map(|note| format!("{}{note}\n", if note.is_harmless { "- " } else { "! " }))
        .collect();
    assert!(imported.toml == TOML, "all.toml:\n{}", imported.toml);
    assert!(notes == NOTES, "all.txt:\n{notes}");
    read(TOML);
}

/// What several options together come to is told by the line of the one that it is named after.
#[test]
fn what_is_told_has_the_line_of_its_option() {
    let (_, notes) = translated(
        "relay-ip=10.0.0.5\nexternal-ip=203.0.113.7/10.0.0.7\nexternal-ip=203.0.113.5/10.0.0.5\ncert=c.pem\npkey=/k.pem\nuser=a:b",
    );
    assert!(told(&notes, "line 2, external-ip: 10.0.0.7 is none of relay-ip"), "{notes:?}");
    assert!(told(&notes, "line 4, cert: c.pem is looked for"), "{notes:?}");
    let (_, notes) = translated("user=a:b");
    assert!(notes.iter().all(|note| !note.starts_with("line ")), "{notes:?}");
}

#[test]
fn quotas_that_cannot_be_reached_become_those_that_can() {
    let (settings, notes) = translated(
        "relay-ip=10.0.0.5\nmin-port=45000\nmax-port=45999\ntotal-quota=1200\nuser-quota=1100\nallowed-peer-ip=10.1.0.0-10.1.0.9\nuser=a:b",
    );
    assert_eq!((settings.max_allocations, settings.max_allocations_per_user), (1000, 1000));
    assert_eq!(notes, [""; 0]);
    let (settings, _) = translated("user-quota=50000\nuser=a:b");
    assert_eq!(settings.max_allocations_per_user, Settings::default().max_allocations);
}

/// No option disappears: it changes the result, or is told.
#[test]
fn each_option_alone_changes_something_or_is_told() {
    let nothing = translate("t.conf", "");
    for (_, name, _) in settings(CONF) {
        let line =
            CONF.lines().find(|line| settings(line).any(|(_, found, _)| found == name)).expect("it is there");
        // What is off by default says nothing when it is switched off; what belongs together is looked at together.
        let is_off = settings(line).any(|(_, _, value)| is_on(value) == Some(false) && !value.is_empty());
        let with = [
            "cert=/c",
            "pkey=/k",
            "prometheus",
            "rfc5780",
            "listening-ip=10.0.0.5",
            "listening-ip=10.0.0.6",
            "lt-cred-mech",
        ];
        let base = with
            .iter()
            .filter(|other| !other.starts_with(name))
            .fold(String::new(), |text, line| text + line + "\n");
        let (before, after) = (translate("t.conf", &base), translate("t.conf", &(base.clone() + line)));
        let is_default =
            matches!(line, "rest-api-separator=:" | "software-attribute=false" | "use-auth-secret" | "oauth");
        assert!(before != after || is_off || is_default, "{line}");
    }
    assert_eq!(
        nothing.toml.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).count(),
        0,
        "{}",
        nothing.toml
    );
}

#[test]
fn lines_are_read_as_coturn_reads_them() {
    let read = |line: &'static str| settings(line).map(|(_, name, value)| (name, value)).collect::<Vec<_>>();
    for line in [
        "realm=example.org",
        "realm example.org",
        "realm = example.org",
        "  realm\t=\t\"example.org\"  ",
        "realm == example.org",
    ] {
        assert_eq!(read(line), [("realm", "example.org")], "{line}");
    }
    assert_eq!(read("# realm=a\n\n  #b\nfingerprint"), [("fingerprint", "")]);
    assert_eq!(read("user=a:b#c d"), [("user", "a:b#c d")], "there are no comments behind values");
    assert_eq!(settings("\n\nrealm=a").next().map(|(line, ..)| line), Some(3));
    for (value, on) in [
        ("", Some(true)),
        ("1", Some(true)),
        ("Yes", Some(true)),
        ("off", Some(false)),
        ("F", Some(false)),
        ("0", Some(false)),
        ("on", Some(true)),
        ("maybe", None),
    ] {
        assert_eq!(is_on(value), on, "{value}");
    }
}

#[test]
fn addresses_behind_a_nat_are_told_by_their_public_ones() {
    let relays = |text: &str| {
        let (settings, notes) = translated(text);
        let shown = settings
            .relay_addresses
            .iter()
            .map(|address| (address.bind.to_string(), address.external.map(|ip| ip.to_string())));
        (shown.collect::<Vec<_>>(), notes)
    };
    let pair = |local: &str, public: Option<&str>| (local.to_owned(), public.map(str::to_owned));
    assert_eq!(
        relays("relay-ip=10.0.0.5\nexternal-ip=203.0.114.5").0,
        [pair("10.0.0.5", Some("203.0.114.5"))]
    );
    assert_eq!(
        relays("listening-ip=10.0.0.5\nexternal-ip=203.0.114.5").0,
        [pair("10.0.0.5", Some("203.0.114.5"))]
    );
    assert_eq!(
        relays("relay-ip=10.0.0.5\nrelay-ip=10.0.0.6\nexternal-ip=203.0.114.6/10.0.0.6").0,
        [pair("10.0.0.5", None), pair("10.0.0.6", Some("203.0.114.6"))]
    );
    assert_eq!(relays("external-ip=203.0.114.6/10.0.0.6").0, [pair("10.0.0.6", Some("203.0.114.6"))]);
    let (none, notes) = relays("external-ip=203.0.114.5");
    assert!(none.is_empty() && told(&notes, "relay.addresses = [\"LOCAL=203.0.114.5\"]"), "{notes:?}");
    let (_, notes) = relays("relay-ip=10.0.0.5\nexternal-ip=203.0.114.6/10.0.0.6");
    assert!(told(&notes, "10.0.0.6 is none of relay-ip"), "{notes:?}");
    let (_, notes) = relays("external-ip=turn.example.org");
    assert!(told(&notes, "line 1, external-ip: \"turn.example.org\""), "{notes:?}");
}

#[test]
fn who_may_come_in_is_who_may_in_coturn() {
    let (settings, notes) = translated("use-auth-secret\nstatic-auth-secret=north\nrealm=example.org");
    assert_eq!(
        (settings.secrets.len(), settings.realm.as_str(), settings.store.url),
        (1, "example.org", None)
    );
    assert!(!told(&notes, "userdb"), "{notes:?}");
    let (settings, _) = translated("lt-cred-mech\npsql-userdb=\"host=h dbname=d user=u password=p\"");
    let url = settings.store.url.expect("a store");
    assert_eq!(url.reveal(), "psql-userdb=host=h dbname=d user=u password=p");
    // Without a user of its own, coturn looks into its own database.
    let (settings, notes) = translated("lt-cred-mech\nrealm=example.org");
    assert!(settings.store.url.is_some_and(|url| url.reveal().starts_with("sqlite:///")));
    assert!(told(&notes, "coturn's own database"), "{notes:?}");
    // An open relay has to be asked for in words.
    let (settings, notes) = translated("listening-port=3478");
    assert!(settings.auth_required && told(&notes, "auth.required = false"), "{notes:?}");
    let (settings, notes) = translated("no-auth\nuser=a:b");
    assert!(!settings.auth_required && settings.users.is_empty() && told(&notes, "left out"), "{notes:?}");
    let (_, notes) = translated("user=alice\nuser=:b\nuser=a:0x12");
    assert_eq!(notes.iter().filter(|note| note.contains("user: ")).count(), 3, "{notes:?}");
}

#[test]
fn peers_that_are_allowed_are_not_denied() {
    let (settings, _) = translated("denied-peer-ip=10.0.0.0-10.0.0.7\nallowed-peer-ip=10.0.0.4");
    let shown: Vec<_> = settings.deny.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["10.0.0.0/30", "10.0.0.5/32", "10.0.0.6/31"]);
    assert_eq!(settings.allow.len(), 1);
    let (settings, notes) = translated("allow-loopback-peers");
    assert_eq!(settings.allow.len(), 2);
    assert!(told(&notes, "private"), "{notes:?}");
    let (_, notes) = translated("denied-peer-ip=10.0.0");
    assert!(told(&notes, "line 1, denied-peer-ip"), "{notes:?}");
}

#[test]
fn listeners_are_where_coturns_are() {
    let (settings, _) = translated("listening-port=443\ncert=/c.pem\npkey=/k.pem\nuser=a:b");
    let shown = |list: &[std::net::SocketAddr]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(shown(&settings.listen), ["0.0.0.0:443", "[::]:443"]);
    assert_eq!(shown(&settings.tls_listen), ["0.0.0.0:5349", "[::]:5349"]);
    assert!(settings.dtls_listen.is_empty(), "it is off unless asked for");
    let (settings, _) =
        translated("listening-ip=10.0.0.5\nlistening-ip=10.0.0.5\naux-server=10.0.0.5:3478\nuser=a:b");
    assert_eq!(shown(&settings.listen), ["10.0.0.5:3478"], "each once");
    let (settings, _) = translated("listening-ip=10.0.0.5\ncert=/c.pem\npkey=/k.pem\nno-tls\nuser=a:b");
    assert_eq!(
        (shown(&settings.listen), settings.tls_listen.len(), settings.tls_cert),
        (vec!["10.0.0.5:3478".to_owned()], 0, None)
    );
    let (settings, notes) = translated(
        "listening-ip=10.0.0.5\nlistening-ip=10.0.0.6\nrfc5780\nalt-listening-port=3500\nuser=a:b",
    );
    assert_eq!(
        (settings.discovery.addresses.len(), settings.discovery.ports),
        (2, [3478, 3500]),
        "{notes:?}"
    );
    let (_, notes) = translated("rfc5780\nuser=a:b");
    assert!(told(&notes, "two listening-ip"), "{notes:?}");
    let (_, notes) = translated("cert=cert.pem\npkey=/k.pem\nuser=a:b");
    assert!(told(&notes, "write the whole path"), "{notes:?}");
    for (address, is_told) in [("10.0.0.5", true), ("any", true), ("127.0.0.1", false)] {
        let (settings, notes) = translated(&format!("prometheus\nprometheus-address={address}\nuser=a:b"));
        let admin: Vec<String> = settings.admin.tcp().map(|at| at.to_string()).collect();
        assert_eq!(admin, ["127.0.0.1:9641"], "in the clear for this machine alone");
        assert_eq!(told(&notes, "admin.tls_cert"), is_told, "{notes:?}");
    }
}

#[test]
fn what_is_no_option_is_told_with_what_was_meant() {
    let (_, notes) = translated("listning-port=1\nuser=a:b\nno-such-thing");
    assert!(
        told(&notes, "line 1, listning-port: coturn 4.17 has no such option; did you mean listening-port?"),
        "{notes:?}"
    );
    assert!(told(&notes, "line 3, no-such-thing"), "{notes:?}");
}

#[test]
fn what_cannot_work_together_is_told() {
    let (_, notes) = translated("tls-listening-port=5350");
    assert!(told(&notes, "tls-listening-port: there is no cert"), "{notes:?}");
    let (_, notes) = translated("tls-listening-port=5350\nno-tls");
    assert!(!told(&notes, "there is no cert"), "{notes:?}");
    let (settings, _) = translated("total-quota=10\nuser-quota=20\nuser=a:b");
    assert_eq!((settings.max_allocations, settings.max_allocations_per_user), (10, 10));
}

proptest::proptest! {
    #[test]
    fn any_text_is_translated_into_toml(lines in proptest::collection::vec("[a-z-]{1,20}[ =]{0,2}\\PC{0,20}", 0..10), known in 0..OPTIONS.len()) {
        let text = lines.join("\n") + "\n" + OPTIONS[known].0 + "=" + lines.first().map_or("", String::as_str);
        let imported = translate("t.conf", &text);
        let mut problems = Vec::new();
        source::parse_file(Path::new("t"), &imported.toml, &mut problems);
        proptest::prop_assert!(problems.is_empty(), "{problems:?}\n{}", imported.toml);
    }
}
