//! Interoperability with `turnadmin` in both directions, and with coturn's example databases.

use std::{fs, path::Path, process::Command};

use turnpike_stores::{Backend as _, Edit, StoredLimits, UserKeys};
use turnpike_testkit::{alone::skip, databases::installed};
use turnpike_wire::integrity::KeyAlgorithm;
use turnpike_wire::secret::Secret;

use crate::support::*;

const REALM: &str = "north.gov";

fn place(world: &World) -> [String; 2] {
    match (&world.server, &world.file) {
        (Some(server), _) => {
            let flag = match world.kind {
                Kind::Postgres => "-e",
                Kind::Mariadb => "-M",
                _ => "-N",
            };
            [flag.to_owned(), server.coturn_words()]
        }
        (None, Some(file)) => ["-b".to_owned(), file.display().to_string()],
        (None, None) => unreachable!("neither a server nor a file"),
    }
}

fn turnadmin_command(world: &World, arguments: &[&str]) -> Command {
    let program = installed("turnadmin").expect("installed");
    let mut command = Command::new(program);
    // turnadmin writes a log file to the working directory.
    command.current_dir(env!("CARGO_TARGET_TMPDIR")).args(place(world)).args(arguments);
    command
}

fn turnadmin(world: &World, arguments: &[&str]) -> String {
    let mut command = turnadmin_command(world, arguments);
    let output = command.output().expect("starts");
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn with_turnadmin(test: impl Fn(&World)) {
    if installed("turnadmin").is_none() {
        return skip("turnadmin (coturn) is not installed");
    }
    each(|world| test(world));
}

#[test]
fn changes_by_turnadmin_are_read() {
    with_turnadmin(|world| {
        turnadmin(world, &["-a", "-u", "gorst", "-r", REALM, "-p", "hero"]);
        turnadmin(world, &["-s", "logen", "-r", REALM]);
        turnadmin(
            world,
            &["-g", "-r", REALM, "--max-bps", "500000", "--total-quota", "12", "--user-quota", "3"],
        );
        turnadmin(world, &["-O", "-o", "https://bligh.edu:443", "-r", REALM]);
        let database = world.database();
        let gorst = world.wait(database.user(REALM, "gorst")).expect("an answer").expect("the user exists");
        assert_eq!(
            gorst.get(KeyAlgorithm::Md5),
            UserKeys::new("gorst", REALM, "hero").get(KeyAlgorithm::Md5)
        );
        let secrets = world.wait(database.secrets(REALM)).expect("an answer");
        assert_eq!(secrets.iter().map(|secret| secret.value.reveal()).collect::<Vec<_>>(), ["logen"]);
        let rules = world.wait(database.rules()).expect("an answer");
        let limits = StoredLimits { total_quota: Some(12), user_quota: Some(3), max_bps: Some(500_000) };
        assert_eq!(rules.realms[REALM].limits, limits, "{:?}", world.kind);
        assert_eq!(&*rules.origins["https://bligh.edu:443"], REALM);
        turnadmin(world, &["-d", "-u", "gorst", "-r", REALM]);
        assert_eq!(world.wait(database.user(REALM, "gorst")).expect("an answer"), None);
    });
}

#[test]
fn turnadmin_reads_turnpikes_changes() {
    with_turnadmin(|world| {
        let realm = REALM.to_owned();
        let keys = UserKeys::new("whirrun", REALM, "sword");
        world.edit(&Edit::PutUser { realm: realm.clone(), name: "whirrun".to_owned(), keys });
        world.edit(&Edit::AddSecret { realm: realm.clone(), secret: Secret::new("bloody9") });
        let limits = StoredLimits { total_quota: Some(9), user_quota: None, max_bps: Some(250_000) };
        world.edit(&Edit::PutRealm { realm, limits });
        let users = turnadmin(world, &["-l", "-r", REALM]);
        assert!(users.contains("whirrun"), "{:?}: {users}", world.kind);
        let secrets = turnadmin(world, &["-S", "-r", REALM]);
        assert!(secrets.contains("bloody9"), "{secrets}");
        // During a rotation, coturn accepts both secrets; afterwards the row is gone.
        let (realm, new) = (REALM.to_owned(), Secret::new("shivers"));
        world.edit(&Edit::RotateSecret { realm, secret: new, since: 1000, until: 2000 });
        let secrets = turnadmin(world, &["-S", "-r", REALM]);
        assert!(secrets.contains("bloody9") && secrets.contains("shivers"), "{secrets}");
        world.edit(&Edit::RemoveSecret { realm: REALM.to_owned(), secret: Secret::new("bloody9") });
        let secrets = turnadmin(world, &["-S", "-r", REALM]);
        assert!(!secrets.contains("bloody9") && secrets.contains("shivers"), "{secrets}");
        let options = turnadmin(world, &["-G", "-r", REALM]);
        for said in ["total-quota", "9", "max-bps", "250000"] {
            assert!(options.contains(said), "{said}: {options}");
        }
    });
}

const NAMES: [&str; 22] = [
    "gorst",
    "Gorst",
    "@matrix:example.org",
    "a:b:c",
    ":leading",
    "1001",
    "user@example.org",
    "two words",
    "a/b",
    "a.b-c_d",
    "a+b",
    "a*b",
    "a?b[c]",
    "a,b;c",
    "a=b&c",
    "(a){b}",
    "#a!",
    "José",
    "voilà",
    "Ωmega",
    "日本語",
    "🦀",
];

/// turnadmin escapes nothing, so it fails to write some names. Those names do not exist, and no query
/// fails because of them.
#[test]
fn every_turnadmin_name_is_found_and_none_breaks_the_store() {
    with_turnadmin(|world| {
        let mut found = Vec::new();
        for name in NAMES {
            let mut command = turnadmin_command(world, &["-a", "-u", name, "-r", REALM, "-p", "hero"]);
            let _ = command.output().expect("starts");
            let listed = turnadmin(world, &["-l", "-r", REALM]);
            let is_written = listed.lines().any(|line| line.trim().starts_with(&format!("{name}[")));
            let asked = world.wait(world.database().user(REALM, name));
            let user = asked.unwrap_or_else(|error| panic!("{:?}, {name:?}: {error}", world.kind));
            if is_written {
                let user = user.unwrap_or_else(|| panic!("{:?} has no {name:?}: {listed}", world.kind));
                let expected = UserKeys::new(name, REALM, "hero");
                assert_eq!(user.get(KeyAlgorithm::Md5), expected.get(KeyAlgorithm::Md5), "{name:?}");
                found.push(name);
            }
        }
        for name in ["gorst", "@matrix:example.org", "José"] {
            assert!(found.contains(&name), "{:?}: {found:?}", world.kind);
        }
        let database = world.database();
        let listed = world.wait(database.users(Some(REALM), None)).expect("a list, whatever it contains");
        for name in found {
            let rows = listed.iter().filter(|row| row.name == name).count();
            // A key in MySQL treats Gorst and gorst as equal.
            assert!(
                rows == 1 || (world.kind == Kind::Mariadb && name.eq_ignore_ascii_case("gorst")),
                "{name:?}"
            );
        }
        for name in [
            "",
            " ",
            "\0",
            "a\0b",
            "'",
            "\"",
            "\\",
            "%",
            "_",
            "\u{1F980}\u{301}",
            "x' or '1'='1",
            &"é".repeat(254),
        ] {
            let asked = world.wait(database.user(REALM, name));
            assert_eq!(asked.unwrap_or_else(|error| panic!("{name:?}: {error}")), None, "{:?}", world.kind);
        }
    });
}

/// Emulates an old installation: coturn's schema sets no character set, and MariaDB's default used to be
/// latin1.
#[test]
fn name_outside_the_table_charset_does_not_exist() {
    on(Kind::Mariadb, |world| {
        world.sql("alter table turnusers_lt convert to character set latin1");
        let database = world.database();
        for name in ["日本語", "🦀", "Ωmega"] {
            assert_eq!(world.wait(database.user(REALM, name)).expect("an answer"), None, "{name}");
            let removal = Edit::RemoveUser { realm: REALM.to_owned(), name: name.to_owned() };
            assert!(!world.edit(&removal), "{name}");
        }
        let keys = UserKeys::new("José", REALM, "pw");
        world.edit(&Edit::PutUser { realm: REALM.to_owned(), name: "José".to_owned(), keys: keys.clone() });
        assert_eq!(world.wait(database.user(REALM, "José")).expect("an answer"), Some(keys));
    });
}

/// Directory with the examples of Debian's package.
const EXAMPLES: &str = "/usr/share/coturn";

#[test]
fn coturn_schema_and_example_rows_are_read_unchanged() {
    let read = |name: &str| fs::read_to_string(Path::new(EXAMPLES).join(name));
    let (Ok(schema), Ok(rows)) = (read("schema.sql"), read("testsqldbsetup.sql")) else {
        return skip(&format!("{EXAMPLES} has no schema.sql and testsqldbsetup.sql"));
    };
    for kind in [Kind::Sqlite, Kind::Postgres, Kind::Mariadb] {
        on(kind, |world| {
            for table in
                schema.split("CREATE TABLE ").skip(1).filter_map(|table| table.split_whitespace().next())
            {
                world.sql(&format!("drop table {table}"));
            }
            world.sql(&schema);
            world.sql(&rows);
            let database = world.database();
            let rules = world.wait(database.rules()).expect("an answer");
            assert_eq!((rules.token_keys.len(), rules.origins.len()), (3, 2));
            assert_eq!(
                (rules.secrets[REALM].len(), rules.realms[REALM].limits.total_quota),
                (2, Some(12_000))
            );
            assert_eq!(rules.realms["crinna.org"].peers.deny.len(), 1);
            let gorst =
                world.wait(database.user(REALM, "gorst")).expect("an answer").expect("the user exists");
            assert_eq!(
                gorst.get(KeyAlgorithm::Md5),
                UserKeys::new("gorst", REALM, "hero").get(KeyAlgorithm::Md5)
            );
        });
    }
}
