//! Each option has a line in `all.conf`; `all.toml` and `all.txt` contain the expected translation.

use std::collections::BTreeSet;

use turnpike_config::{Settings, settings_of};

use super::*;

const CONF: &str = include_str!("tests/all.conf");
const TOML: &str = include_str!("tests/all.toml");
const NOTES: &str = include_str!("tests/all.txt");
const DOCUMENT: &str = include_str!("../../../../docs/from-coturn.md");

const COTURN: &str = include_str!("tests/options-4.17.1.txt");

fn read(toml: &str) -> Settings {
    settings_of(toml).unwrap_or_else(|errors| panic!("{errors}\n{toml}"))
}

fn mistakes(toml: &str) -> Vec<Mistake> {
    settings_of(toml).err().map_or_else(Vec::new, |mistakes| mistakes.0)
}

fn import_here(path: Option<&Path>, arguments: &[String]) -> Result<Imported, Mistakes> {
    import(path, arguments, |_, _| None, mistakes)
}

fn translated(text: &str) -> (Settings, Vec<String>) {
    let imported = text_of(text);
    let notes = imported.notes.iter().filter(|note| !note.is_harmless).map(ToString::to_string);
    (read(&imported.toml), notes.collect())
}

/// A machine that has all databases in the file, but none of the addresses and certificates.
pub(super) const ELSEWHERE: CoturnHost =
    CoturnHost { is_own: |_| false, is_file: |_| true, can_dtls: |_, _| None, mistakes };

pub(super) fn text_of(text: &str) -> Imported {
    translate("t.conf", settings(text), Vec::new(), &ELSEWHERE)
}

fn told(notes: &[String], words: &str) -> bool {
    notes.iter().any(|note| note.contains(words))
}

#[test]
fn every_coturn_option_is_known_tested_and_documented() {
    let known: BTreeSet<&str> = OPTIONS.iter().map(|(name, _)| *name).collect();
    assert_eq!(known.len(), OPTIONS.len(), "each once");
    let missing: Vec<_> = COTURN.lines().filter(|name| !known.contains(name)).collect();
    assert_eq!(missing, [""; 0]);
    let used: BTreeSet<&str> = settings(CONF).map(|(_, name, _)| name).collect();
    assert_eq!(used, known);
    // List entries start with their options, each in backquotes.
    let entries = DOCUMENT.lines().filter_map(|line| line.strip_prefix("- `")?.split("`: ").next());
    let names = entries.flat_map(|options| options.split('`').step_by(2).collect::<Vec<_>>());
    let documented: BTreeSet<&str> = names.filter(|name| known.contains(name)).collect();
    assert_eq!(documented, known);
}

/// If a change is intended, copy the output of the failing test into the files.
#[test]
fn each_option_has_the_expected_translation() {
    let imported = translate("all.conf", settings(CONF), Vec::new(), &ELSEWHERE);
    let notes: String = imported
        .notes
        .iter()
        .map(|note| format!("{}{note}\n", if note.is_harmless { "- " } else { "! " }))
        .collect();
    assert!(imported.toml == TOML, "all.toml:\n{}", imported.toml);
    assert!(notes == NOTES, "all.txt:\n{notes}");
    read(TOML);
}

#[test]
fn notes_contain_the_line_of_their_option() {
    let (_, notes) = translated(
        "relay-ip=10.0.0.5\nexternal-ip=203.0.113.7/10.0.0.7\nexternal-ip=203.0.113.5/10.0.0.5\ncert=c.pem\npkey=/k.pem\nuser=a:b",
    );
    assert!(told(&notes, "line 2, external-ip: 10.0.0.7 is not in relay-ip"), "{notes:?}");
    assert!(told(&notes, "line 4, cert: c.pem is relative to"), "{notes:?}");
    let (_, notes) = translated("user=a:b");
    assert!(notes.iter().all(|note| !note.starts_with("line ")), "{notes:?}");
}

#[test]
fn unreachable_quotas_are_capped() {
    let (settings, notes) = translated(
        "relay-ip=10.0.0.5\nmin-port=45000\nmax-port=45999\ntotal-quota=1200\nuser-quota=1100\nallowed-peer-ip=10.1.0.0-10.1.0.9\nuser=a:b",
    );
    assert_eq!(
        (settings.allocation_limits.allocations, settings.allocation_limits.allocations_per_user),
        (1000, 1000)
    );
    assert_eq!(notes, [""; 0]);
    let (settings, _) = translated("user-quota=50000\nuser=a:b");
    assert_eq!(
        settings.allocation_limits.allocations_per_user,
        Settings::default().allocation_limits.allocations
    );
}

#[test]
fn each_option_changes_the_result_or_has_a_note() {
    let nothing = text_of("");
    for (_, name, _) in settings(CONF) {
        let line = CONF
            .lines()
            .find(|line| settings(line).any(|(_, found, _)| found == name))
            .expect("a line for the option");
        // An option that is switched off changes nothing. Options that depend on others are tested together
        // with them.
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
        let (before, after) = (text_of(&base), text_of(&(base.clone() + line)));
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
fn lines_are_parsed_as_in_coturn() {
    let read =
        |line: &'static str| settings(line).map(|(_, name, value)| (name, whole(value))).collect::<Vec<_>>();
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
    assert_eq!(read("user=a:b#c d"), [("user", "a:b#c d")], "there are no comments after values");
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
fn public_addresses_are_assigned_to_their_local_addresses() {
    let relays = |text: &str| {
        let (settings, notes) = translated(text);
        let shown = settings
            .relay
            .addresses
            .iter()
            .filter_map(turnpike_config::RelayPlace::fixed)
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
    let (none, notes) = relays("relay-ip=10.0.0.5\nrelay-ip=10.0.0.6\nexternal-ip=203.0.114.5");
    assert_eq!(none.len(), 2);
    assert!(told(&notes, "relay.addresses = [\"LOCAL=203.0.114.5\"]"), "{notes:?}");
    let (_, notes) = relays("relay-ip=10.0.0.5\nexternal-ip=203.0.114.6/10.0.0.6");
    assert!(told(&notes, "10.0.0.6 is not in relay-ip"), "{notes:?}");
    let (turned, notes) = relays("external-ip=10.0.0.6/203.0.114.6");
    assert_eq!(turned, [pair("10.0.0.6", Some("203.0.114.6"))]);
    assert!(told(&notes, "line 1, external-ip: 10.0.0.6/203.0.114.6 is in the wrong order"), "{notes:?}");
    let (_, notes) = relays("external-ip=turn.example.org");
    assert!(told(&notes, "line 1, external-ip: \"turn.example.org\""), "{notes:?}");
}

#[test]
fn authentication_is_the_same_as_in_coturn() {
    let (settings, notes) = translated("use-auth-secret\nstatic-auth-secret=north\nrealm=example.org");
    assert_eq!(
        (settings.auth.secrets.len(), settings.realm.as_str(), settings.store.url),
        (1, "example.org", None)
    );
    assert!(!told(&notes, "userdb"), "{notes:?}");
    let (settings, _) = translated("lt-cred-mech\npsql-userdb=\"host=h dbname=d user=u password=p\"");
    let url = settings.store.url.expect("a store");
    assert_eq!(url.reveal(), "psql-userdb=host=h dbname=d user=u password=p");
    // If coturn has no users of its own, it uses its default database.
    let (settings, notes) = translated("lt-cred-mech\nrealm=example.org");
    assert!(settings.store.url.is_some_and(|url| url.reveal().starts_with("sqlite:///")));
    assert!(told(&notes, "coturn's default database"), "{notes:?}");
    // Without credentials, the server would be an open relay, which must be requested explicitly.
    let (settings, notes) = translated("listening-port=3478");
    assert!(settings.auth.required && told(&notes, "auth.required = false"), "{notes:?}");
    let (settings, notes) = translated("no-auth\nuser=a:b");
    assert!(
        !settings.auth.required && settings.auth.users.is_empty() && told(&notes, "omitted"),
        "{notes:?}"
    );
    let (_, notes) = translated("user=alice\nuser=:b\nuser=a:0x12");
    assert_eq!(notes.iter().filter(|note| note.contains("user: ")).count(), 3, "{notes:?}");
}

#[test]
fn allowed_peers_are_not_denied() {
    let (settings, _) = translated("denied-peer-ip=10.0.0.0-10.0.0.7\nallowed-peer-ip=10.0.0.4");
    let shown: Vec<_> = settings.deny.iter().map(ToString::to_string).collect();
    assert_eq!(shown, [""; 0], "private peers are refused anyway");
    assert_eq!(settings.allow.len(), 1);
    let (settings, _) = translated("denied-peer-ip=198.41.0.0-198.41.0.7\nallowed-peer-ip=198.41.0.4");
    let shown: Vec<_> = settings.deny.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["198.41.0.0/30", "198.41.0.5/32", "198.41.0.6/31"]);
    let (settings, notes) = translated("allow-loopback-peers");
    assert_eq!(settings.allow.len(), 2);
    assert!(told(&notes, "private"), "{notes:?}");
    let (_, notes) = translated("denied-peer-ip=10.0.0");
    assert!(told(&notes, "line 1, denied-peer-ip"), "{notes:?}");
}

#[test]
fn listeners_are_the_same_as_in_coturn() {
    let (settings, _) = translated("listening-port=443\ncert=/c.pem\npkey=/k.pem\nuser=a:b");
    let shown = |list: &[std::net::SocketAddr]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(shown(&settings.listen), ["0.0.0.0:443", "[::]:443"]);
    assert_eq!(shown(&settings.tls.listen), ["0.0.0.0:5349", "[::]:5349"]);
    assert!(settings.dtls.listen.is_empty(), "off by default");
    let (settings, _) =
        translated("listening-ip=10.0.0.5\nlistening-ip=10.0.0.5\naux-server=10.0.0.5:3478\nuser=a:b");
    assert_eq!(shown(&settings.listen), ["10.0.0.5:3478"], "each once");
    let (settings, _) = translated("listening-ip=10.0.0.5\ncert=/c.pem\npkey=/k.pem\nno-tls\nuser=a:b");
    assert_eq!(
        (shown(&settings.listen), settings.tls.listen.len(), settings.tls.cert),
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
    let (settings, notes) =
        translated("listening-ip=10.0.0.5\nlistening-ip=10.0.0.6\nrfc5780\nno-udp\nuser=a:b");
    assert!(settings.discovery.addresses.is_empty() && told(&notes, "no-udp is set"), "{notes:?}");
    let (_, notes) = translated("rfc5780\nuser=a:b");
    assert!(told(&notes, "two listening-ip"), "{notes:?}");
    let (_, notes) = translated("cert=cert.pem\npkey=/k.pem\nuser=a:b");
    assert!(told(&notes, "write the full path"), "{notes:?}");
    for (address, is_told) in [("10.0.0.5", true), ("any", true), ("127.0.0.1", false)] {
        let (settings, notes) = translated(&format!("prometheus\nprometheus-address={address}\nuser=a:b"));
        let admin: Vec<String> = settings.admin.tcp().map(|at| at.to_string()).collect();
        assert_eq!(admin, ["127.0.0.1:9641"], "plain HTTP only on loopback");
        assert_eq!(told(&notes, "admin.tls_cert"), is_told, "{notes:?}");
    }
}

/// If the file has no DTLS option, DTLS depends on a usable certificate.
#[test]
fn dtls_is_on_as_in_coturn_if_the_certificate_allows_it() {
    let listen = |text: &str, can_dtls: fn(&Path, &Path) -> Option<bool>| {
        let machine = CoturnHost { can_dtls, ..ELSEWHERE };
        let imported = translate("t.conf", settings(text), Vec::new(), &machine);
        let listen: Vec<String> = read(&imported.toml).dtls.listen.iter().map(ToString::to_string).collect();
        (listen, imported.notes.iter().any(|note| note.text.contains("dtls.listen")))
    };
    let with = |more: &str| format!("listening-ip=10.0.0.5\ncert=/c.pem\npkey=/k.pem\nuser=a:b\n{more}");
    let (tls, both): (&[&str], &[&str]) = (&["10.0.0.5:5349"], &["10.0.0.5:3478", "10.0.0.5:5349"]);
    for (more, can_dtls, expected, has_note) in [
        ("", (|_, _| Some(true)) as fn(&Path, &Path) -> Option<bool>, tls, false),
        ("", |_, _| Some(false), &[], true),
        ("", |_, _| None, &[], true),
        ("no-dtls", |_, _| Some(true), &[], false),
        ("no-udp", |_, _| Some(true), &[], false),
        ("no-dtls=false", |_, _| Some(true), both, false),
        ("dtls", |_, _| Some(true), both, false),
        ("dtls", |_, _| Some(false), &[], true),
        ("dtls", |_, _| None, both, true),
    ] {
        let (listen, noted) = listen(&with(more), can_dtls);
        assert_eq!(
            (listen, noted),
            (expected.iter().map(|at| (*at).to_owned()).collect(), has_note),
            "{more}"
        );
    }
}

#[test]
fn missing_database_is_left_out_with_a_note() {
    let machine = CoturnHost { is_file: |path| path == Path::new("/var/db/turndb"), ..ELSEWHERE };
    let store = |text: &str| {
        let imported = translate("t.conf", settings(text), Vec::new(), &machine);
        let notes: Vec<String> = imported.notes.iter().map(ToString::to_string).collect();
        (read(&imported.toml).store.url.map(|url| url.reveal().to_owned()), notes)
    };
    let (url, notes) = store("user=a:b\nuserdb=/srv/missing");
    assert!(
        url.is_none() && told(&notes, "line 2, userdb: /srv/missing is not on this machine"),
        "{notes:?}"
    );
    assert_eq!(store("userdb=/var/db/turndb").0.as_deref(), Some("sqlite:///var/db/turndb"));
    assert_eq!(store("lt-cred-mech").0.as_deref(), Some("sqlite:///var/db/turndb"), "coturn's default");
}

#[test]
fn transports_and_shared_ports_match_coturn() {
    let (settings, notes) = translated("no-udp\nuser=a:b");
    assert!(!settings.udp && settings.tcp && !told(&notes, "no-udp"), "{notes:?}");
    let (settings, notes) =
        translated("multiplex-peer\nmultiplex-peer-port=3480\ntotal-quota=100000\nuser=a:b");
    assert_eq!((settings.relay.shared_ports, settings.allocation_limits.allocations), (1, 100_000));
    assert!(told(&notes, "line 1, multiplex-peer: a shared port") && told(&notes, "line 2, "), "{notes:?}");
}

#[test]
fn unknown_option_gets_a_suggestion() {
    let (_, notes) = translated("listning-port=1\nuser=a:b\nno-such-thing");
    assert!(
        told(&notes, "line 1, listning-port: coturn 4.17 has no such option; did you mean listening-port?"),
        "{notes:?}"
    );
    assert!(told(&notes, "line 3, no-such-thing"), "{notes:?}");
}

#[test]
fn conflicting_options_get_a_note() {
    let (_, notes) = translated("tls-listening-port=5350");
    assert!(told(&notes, "tls-listening-port: there is no cert"), "{notes:?}");
    let (_, notes) = translated("tls-listening-port=5350\nno-tls");
    assert!(!told(&notes, "there is no cert"), "{notes:?}");
    let (settings, _) = translated("total-quota=10\nuser-quota=20\nuser=a:b");
    assert_eq!(
        (settings.allocation_limits.allocations, settings.allocation_limits.allocations_per_user),
        (10, 10)
    );
}

proptest::proptest! {
    #[test]
    fn any_text_translates_to_valid_toml(lines in proptest::collection::vec("[a-z-]{1,20}[ =]{0,2}\\PC{0,20}", 0..10), known in 0..OPTIONS.len()) {
        let text = lines.join("\n") + "\n" + OPTIONS[known].0 + "=" + lines.first().map_or("", String::as_str);
        let imported = text_of(&text);
        let mut problems = Vec::new();
        turnpike_strict::parse_file(Path::new("t"), &imported.toml, &mut problems);
        proptest::prop_assert!(problems.is_empty(), "{problems:?}\n{}", imported.toml);
    }
}

#[test]
fn peer_on_the_server_itself_gets_only_the_relay_ports() {
    for (text, expected) in [
        ("listening-ip=10.0.0.1\nallowed-peer-ip=10.0.0.1", "10.0.0.1:49152-65535"),
        (
            "relay-ip=10.0.0.1\nmin-port=50000\nmax-port=50999\nallowed-peer-ip=10.0.0.1",
            "10.0.0.1:50000-50999",
        ),
        ("external-ip=203.0.114.5/10.0.0.1\nallowed-peer-ip=10.0.0.1-10.0.0.1", "10.0.0.1:49152-65535"),
        ("external-ip=203.0.114.5\nallowed-peer-ip=203.0.114.5", "203.0.114.5:49152-65535"),
        (
            "aux-server=10.0.0.1:5000\nallowed-peer-ip=10.0.0.1 # the turn server itself",
            "10.0.0.1:49152-65535",
        ),
        ("listening-ip=fd00::1\nallowed-peer-ip=fd00::1", "[fd00::1]:49152-65535"),
    ] {
        let (settings, notes) = translated(&format!("user=a:b\n{text}"));
        let shown: Vec<_> = settings.allow.iter().map(ToString::to_string).collect();
        assert_eq!(shown, [expected], "{text}");
        assert!(told(&notes, "is this server's own address"), "{text}: {notes:?}");
    }
    // The machine may have the address even if the file does not mention it.
    let machine = CoturnHost { is_own: |ip| ip == IpAddr::from([10, 0, 0, 1]), ..ELSEWHERE };
    let text = "user=a:b\nallowed-peer-ip=10.0.0.1\nallowed-peer-ip=10.0.0.9";
    let imported = translate("t.conf", settings(text), Vec::new(), &machine);
    let shown: Vec<_> = read(&imported.toml).allow.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["10.0.0.1:49152-65535", "10.0.0.9/32"]);
    // On another machine the address is unknown, so a note mentions it.
    let (settings, notes) = translated("user=a:b\nallowed-peer-ip=10.0.0.1");
    assert_eq!(settings.allow.len(), 1);
    assert!(told(&notes, "if this is the address of the server itself"), "{notes:?}");
    // coturn refuses a loopback peer unless all loopback peers are allowed.
    let (settings, _) = translated("user=a:b\nallowed-peer-ip=127.0.0.1");
    assert!(settings.allow.is_empty());
    let (_, notes) = translated("user=a:b\nallow-loopback-peers");
    assert!(told(&notes, "every service on this machine's loopback is open"), "{notes:?}");
}

#[test]
fn external_ip_without_a_local_address_uses_the_detected_one() {
    let addresses = |text: &str| {
        let (settings, notes) = translated(text);
        (settings.relay.addresses.iter().map(ToString::to_string).collect::<Vec<_>>(), notes)
    };
    let (found, notes) = addresses("user=a:b\nexternal-ip=203.0.114.5 # our public address");
    assert_eq!(found, ["auto=203.0.114.5", "auto"]);
    assert!(!told(&notes, "external-ip"), "{notes:?}");
    assert_eq!(
        addresses("external-ip=203.0.114.5\nexternal-ip=2001:db8::5").0,
        ["auto=203.0.114.5", "auto=2001:db8::5"]
    );
    let (found, notes) = addresses("external-ip=203.0.114.5\nexternal-ip=203.0.114.6");
    assert_eq!(found, ["auto=203.0.114.5", "auto"]);
    assert!(told(&notes, "line 2, external-ip: coturn uses only one such address"), "{notes:?}");
    let (found, _) = addresses("listening-ip=0.0.0.0\nlistening-ip=::\nexternal-ip=203.0.114.5");
    assert_eq!(found, ["auto=203.0.114.5", "auto"]);
    let (found, notes) = addresses("external-ip=203.0.114.5\nexternal-ip=203.0.114.6/10.0.0.5");
    assert_eq!(found, ["10.0.0.5=203.0.114.5"], "{notes:?}");
    let (_, notes) = addresses("external-ip=$(detect-external-ip)");
    assert!(told(&notes, "turnpike public-address"), "{notes:?}");
}

const TEXTS: [&str; 5] = ["user", "static-auth-secret", "realm", "server-name", "pkey-pwd"];

#[test]
fn trailing_comment_changes_only_text_options() {
    for line in CONF.lines().filter(|line| !line.starts_with('#')) {
        let (_, name, _) = settings(line).next().expect("a setting");
        for comment in [" # a comment", "\t#comment = 7", " # \"quoted\" # twice"] {
            let (bare, commented) = (text_of(line), text_of(&format!("{line}{comment}")));
            if TEXTS.contains(&name) {
                let notes = &commented.notes;
                assert!(notes.iter().any(|note| note.text.contains("no comments after values")), "{line}");
                continue;
            }
            let of = |imported: &Imported| {
                let is_ours = |note: &&Note| note.text.contains("the comment after the value is dropped");
                let notes: Vec<Note> = imported.notes.iter().filter(|note| !is_ours(note)).cloned().collect();
                (imported.toml.clone(), notes)
            };
            assert_eq!(of(&bare), of(&commented), "{line}{comment}");
        }
    }
}

#[test]
fn numbers_use_leading_digits_and_flags_are_always_on() {
    let (settings, notes) = translated("user-quota=12 # 4 streams a call\ntotal-quota=1200# all\nuser=a:b");
    assert_eq!(
        (settings.allocation_limits.allocations_per_user, settings.allocation_limits.allocations),
        (12, 1200)
    );
    assert!(!told(&notes, "quota"), "{notes:?}");
    let (settings, notes) = translated("user-quota=12 streams\nmin-port=50000;\ntotal-quota=many\nuser=a:b");
    assert_eq!(
        (settings.allocation_limits.allocations_per_user, *settings.relay.ports.start()),
        (12, 50_000)
    );
    assert!(told(&notes, "line 1, user-quota: coturn reads 12 and ignores \"streams\""), "{notes:?}");
    assert!(told(&notes, "line 3, total-quota: \"many\" is not a number"), "{notes:?}");
    let (settings, notes) = translated("prometheus=off\nuser=a:b");
    assert!(settings.admin.tcp().next().is_some() && told(&notes, "coturn treats it as on"), "{notes:?}");
    let (settings, _) = translated("realm=\"example.org\"\nuser=a:b");
    assert_eq!(settings.realm, "example.org");
    let (settings, notes) = translated("static-auth-secret=\"se#cret\" # ours");
    assert_eq!(settings.auth.secrets[0].reveal(), "se#cret\" # ours", "as in coturn");
    assert!(told(&notes, "line 1, static-auth-secret: coturn has no comments"), "{notes:?}");
    let (settings, notes) = translated("realm=example.org # ours\nuser=a:b");
    assert_eq!(settings.realm, "example.org # ours", "as in coturn");
    assert!(told(&notes, "line 1, realm: coturn has no comments"), "{notes:?}");
}

/// The peers that Synapse's documentation denies need no rules in turnpike.
#[test]
fn synapse_example_needs_no_peer_rules() {
    let denied = "0.0.0.0-0.255.255.255 10.0.0.0-10.255.255.255 100.64.0.0-100.127.255.255 127.0.0.0-127.255.255.255 \
         169.254.0.0-169.254.255.255 172.16.0.0-172.31.255.255 192.0.0.0-192.0.0.255 192.0.2.0-192.0.2.255 \
         192.88.99.0-192.88.99.255 192.168.0.0-192.168.255.255 198.18.0.0-198.19.255.255 198.51.100.0-198.51.100.255 \
         203.0.113.0-203.0.113.255 240.0.0.0-255.255.255.255 ::1 64:ff9b:1::-64:ff9b:1:ffff:ffff:ffff:ffff:ffff \
         ::ffff:0.0.0.0-::ffff:255.255.255.255 fc00::-fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff";
    let lines: String = denied.split_whitespace().fold(String::new(), |lines, range| {
        lines + &format!("denied-peer-ip={range}\ndenied-peer-ip={range} # again\n")
    });
    let head = "use-auth-secret\nstatic-auth-secret=north\nrealm=turn.example.org\nno-tcp-relay\nuser-quota=12 # 4 streams\n";
    let (settings, notes) =
        translated(&format!("{head}{lines}allowed-peer-ip=10.0.0.1\nlistening-ip=10.0.0.1\n"));
    assert_eq!(settings.deny.len(), 0, "{:?}", settings.deny);
    assert_eq!(settings.allow.iter().map(ToString::to_string).collect::<Vec<_>>(), ["10.0.0.1:49152-65535"]);
    assert_eq!(notes.len(), 1, "{notes:?}");
    let (_, notes) = translated(&format!("{head}{lines}"));
    assert_eq!(notes, [""; 0], "turnpike denies private peers by default");
}

#[test]
fn duplicate_peers_make_one_rule() {
    let (settings, _) = translated(
        "user=a:b\ndenied-peer-ip=198.41.0.0-198.41.0.255\ndenied-peer-ip=198.41.0.0/24\ndenied-peer-ip=198.41.1.0/24\n\
         allowed-peer-ip=10.1.0.0/16\nallowed-peer-ip=10.1.0.0-10.1.255.255\nallowed-peer-ip=10.1.2.3",
    );
    assert_eq!(settings.deny.iter().map(ToString::to_string).collect::<Vec<_>>(), ["198.41.0.0/23"]);
    assert_eq!(settings.allow.iter().map(ToString::to_string).collect::<Vec<_>>(), ["10.1.0.0/16"]);
}

#[test]
fn command_line_is_parsed_like_getopt() {
    let read = |line: &str| {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let mut notes = Vec::new();
        let given = read::arguments(&words, &mut notes);
        let settings = given.settings.iter().map(|(_, name, value)| format!("{name}={value}"));
        let settings = settings.collect::<Vec<_>>().join(" ");
        let file = given.file.map(|file| file.display().to_string());
        (settings, file, given.no_file, notes.iter().map(|note| note.option.clone()).collect::<Vec<_>>())
    };
    for (line, settings, file, no_file) in [
        ("-n --lt-cred-mech --fingerprint", "lt-cred-mech= fingerprint=", None, true),
        ("--realm=example.org --user alice:w=x", "realm=example.org user=alice:w=x", None, false),
        (
            "turnserver -vo -p 3479 -p3480",
            "verbose= daemon= listening-port=3479 listening-port=3480",
            None,
            false,
        ),
        (
            "-nX 203.0.114.5 -azc /etc/t.conf",
            "external-ip=203.0.114.5 lt-cred-mech= no-auth=",
            Some("/etc/t.conf"),
            true,
        ),
        ("--no-tls=off --stale-nonce --min 50000", "no-tls=off stale-nonce= min-port=50000", None, false),
        ("--min-p 50000 --static-auth=s", "min-port=50000 static-auth-secret=s", None, false),
        ("--log-file stdout --pidfile", "log-file=stdout pidfile=", None, false),
    ] {
        let expected = (settings.to_owned(), file.map(str::to_owned), no_file);
        let (found, its_file, none, _) = read(line);
        assert_eq!((found, its_file, none), expected, "{line}");
    }
    assert_eq!(read("-n --fingerprint yes -Y --realm r").3, ["yes", "-Y"]);
}

/// Arguments of a compose file: everything is translated, and errors name the option.
#[test]
fn command_line_without_a_file_is_translated() {
    let words =
        ["-n", "--lt-cred-mech", "--user=alice:wonderland", "--realm=example.org", "--min-port=50000"];
    let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    let imported = import_here(None, &words).expect("a translation");
    let settings = read(&imported.toml);
    assert_eq!(
        (settings.auth.users.len(), settings.realm.as_str(), *settings.relay.ports.start()),
        (1, "example.org", 50_000)
    );
    assert!(imported.toml.starts_with("# Translated from a command line "), "{}", imported.toml);
    let dir = turnpike_testkit::Dir::new();
    let file = dir.at("turnserver.conf");
    std::fs::write(&file, "realm=old.example.org\nuser=bob:builder\n").expect("a file");
    let imported = import_here(Some(&file), &["--realm=new.example.org".to_owned()]).expect("a translation");
    let settings = read(&imported.toml);
    assert_eq!((settings.realm.as_str(), settings.auth.users.len()), ("new.example.org", 1));
    let imported = import_here(Some(&file), &["-n".to_owned()]).expect("a translation");
    assert_eq!(read(&imported.toml).realm, "old.example.org", "an explicit file is read");
    let is_told = |note: &Note| note.option == "-n" && note.text.starts_with("coturn would not read a file");
    assert!(imported.notes.iter().any(is_told), "{:?}", imported.notes);
    std::fs::write(&file, "eturnal:\n  secret: \"x\"\n").expect("a file");
    let error = import_here(Some(&file), &[]).expect_err("another program's").to_string();
    assert!(error.contains("this looks like eturnal.yml"), "{error}");
}
