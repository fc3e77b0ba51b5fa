//! Queries and changes in each kind of store.

use std::{sync::Arc, time::Duration};

use tokio::sync::oneshot;
use turnpike_stores::{
    ApiKey, Backend as _, CUT_OFF, CachedUser, Directory, DirectoryLimits, Edit, Rules, StoredLimits,
    StoredSecret, UserKeys, UserLookup, signing,
};
use turnpike_wire::integrity::KeyAlgorithm;
use turnpike_wire::secret::Secret;

use crate::support::*;

const REALM: &str = "north.example";

const ROWS: &str = "
insert into turnusers_lt (realm, name, hmackey) values ('north.example', 'gorst', '0123456789abcdef0123456789abcdef');
insert into turnusers_lt (realm, name, hmackey) values ('north.example', 'broken', 'no key at all');
insert into turn_secret (realm, value) values ('north.example', 'logen');
insert into turn_secret (realm, value) values ('north.example', 'bloody9');
insert into turn_secret (realm, value) values ('crinna.example', 'library');
insert into turn_origin_to_realm (origin, realm) values ('https://crinna.example:443', 'crinna.example');
insert into turn_realm_option (realm, opt, value) values ('north.example', 'max-bps', '500000');
insert into turn_realm_option (realm, opt, value) values ('north.example', 'total-quota', '12000');
insert into turn_realm_option (realm, opt, value) values ('north.example', 'user-quota', '10000');
insert into allowed_peer_ip (ip_range) values ('172.17.13.200');
insert into allowed_peer_ip (realm, ip_range) values ('north.example', '172.17.13.201');
insert into denied_peer_ip (ip_range) values ('172.17.13.133-172.17.14.56');
insert into denied_peer_ip (realm, ip_range) values ('crinna.example', '123::77');
insert into oauth_key (kid, ikm_key, timestamp, lifetime, as_rs_alg, realm)
    values ('north', 'MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDEK', 0, 0, 'A256GCM', 'crinna.example');
insert into oauth_key (kid, ikm_key, timestamp, lifetime, as_rs_alg, realm)
    values ('gone', 'MTIzNDU2Nzg5MDEyMzQ1Ngo=', 1000, 60, 'A128GCM', '');
insert into admin_user (name, realm, password) values ('skarling', 'north.example', 'hoodless');
";

/// [`ROWS`] for Redis.
const KEYS: &str = "
set turn/realm/north.example/user/gorst/key 0123456789abcdef0123456789abcdef
set turn/realm/north.example/user/broken/key no-key-at-all
sadd turn/realm/north.example/secret logen bloody9
sadd turn/realm/crinna.example/secret library
set turn/origin/https://crinna.example:443 crinna.example
set turn/realm/north.example/max-bps 500000
set turn/realm/north.example/total-quota 12000
set turn/realm/north.example/user-quota 10000
sadd turn/realm//allowed-peer-ip 172.17.13.200
sadd turn/realm/north.example/allowed-peer-ip 172.17.13.201
sadd turn/realm//denied-peer-ip 172.17.13.133-172.17.14.56
sadd turn/realm/crinna.example/denied-peer-ip 123::77
hset turn/oauth/kid/north ikm_key MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDEK as_rs_alg A256GCM realm crinna.example
hset turn/oauth/kid/gone ikm_key MTIzNDU2Nzg5MDEyMzQ1Ngo= as_rs_alg A128GCM timestamp 1000 lifetime 60
hset turn/admin_user/skarling realm north.example password hoodless
";

fn fill(world: &World) {
    if world.kind == Kind::Redis { world.redis(KEYS) } else { world.sql(ROWS) }
}

fn values(secrets: &[StoredSecret]) -> Vec<&str> {
    let mut values: Vec<&str> = secrets.iter().map(|secret| secret.value.reveal()).collect();
    values.sort_unstable();
    values
}

fn texts(ranges: &[turnpike_turn::ip_range::IpRange]) -> Vec<String> {
    ranges.iter().map(ToString::to_string).collect()
}

#[test]
fn coturn_rows_are_read_in_place() {
    each(|world| {
        fill(world);
        let database = world.database();
        let user = |name: &str| world.wait(database.user(REALM, name)).expect("an answer");
        let gorst = user("gorst").expect("the user exists");
        assert_eq!((gorst.kinds(), gorst.to_hex().as_str()), ("MD5", "0123456789abcdef0123456789abcdef"));
        assert_eq!(user("broken").expect("the user exists").kinds(), "none", "{:?}", world.kind);
        assert!(user("nobody").is_none() && user("").is_none() && user("'; drop table x; --").is_none());
        assert!(user("GORST").is_none() && user("gorst ").is_none(), "{:?}: another user", world.kind);
        assert!(world.wait(database.user("crinna.example", "gorst")).expect("an answer").is_none());

        let rules = world.wait(database.rules()).expect("an answer");
        let north = &rules.realms[REALM];
        let limits =
            StoredLimits { total_quota: Some(12_000), user_quota: Some(10_000), max_bps: Some(500_000) };
        assert_eq!(north.limits, limits);
        assert!(north.named && rules.realms["crinna.example"].named);
        assert_eq!(&*rules.origins["https://crinna.example:443"], "crinna.example");
        assert_eq!(texts(&rules.peers.allow), ["172.17.13.200"]);
        assert_eq!(texts(&rules.peers.deny), ["172.17.13.133-172.17.14.56"]);
        assert_eq!(texts(&north.peers.allow), ["172.17.13.201"]);
        assert_eq!(texts(&rules.realms["crinna.example"].peers.deny), ["123::77"]);
        let [key] = &rules.token_keys[..] else { panic!("{:?}", rules.token_keys) };
        assert_eq!(
            (key.kid.as_str(), key.realm.as_deref(), key.key.algorithm()),
            ("north", Some("crinna.example"), "A256GCM")
        );
        let ignored = rules.ignored.join("; ");
        assert!(ignored.contains("\"gone\"") && ignored.contains("coturn's web interface"), "{ignored}");
        assert_eq!((rules.secrets[REALM].len(), rules.secrets["crinna.example"].len()), (2, 1));
        let secrets = world.wait(database.secrets(REALM)).expect("an answer");
        assert_eq!(values(&secrets), ["bloody9", "logen"]);
        assert!(rules.api_keys.is_empty());
        assert!(world.wait(database.secrets("elsewhere")).expect("an answer").is_empty());
    });
}

#[test]
fn written_items_are_read_and_removed_items_are_gone() {
    each(|world| {
        let database = world.database();
        let (realm, name) = (REALM.to_owned(), "o'brien/50%".to_owned());
        let keys = |password: &str| UserKeys::new(&name, &realm, password);
        let put =
            |password: &str| Edit::PutUser { realm: realm.clone(), name: name.clone(), keys: keys(password) };
        let found = || world.wait(database.user(REALM, &name)).expect("an answer");
        assert!(!world.edit(&put("one")) && found() == Some(keys("one")));
        assert!(world.edit(&put("two")) && found() == Some(keys("two")), "replaced");
        assert!(found().is_some_and(|keys| keys.get(KeyAlgorithm::Sha256).is_some()));
        let remove = Edit::RemoveUser { realm: realm.clone(), name: name.clone() };
        assert!(world.edit(&remove) && found().is_none() && !world.edit(&remove));

        let add = |text: &str| Edit::AddSecret { realm: realm.clone(), secret: Secret::new(text) };
        assert_eq!(
            [world.edit(&add("a")), world.edit(&add("b")), world.edit(&add("a"))],
            [false, false, true]
        );
        assert_eq!(world.wait(database.secrets(REALM)).expect("an answer").len(), 2);
        let remove = Edit::RemoveSecret { realm: realm.clone(), secret: Secret::new("a") };
        assert!(world.edit(&remove) && !world.edit(&remove));
        assert_eq!(values(&world.wait(database.secrets(REALM)).expect("an answer")), ["b"]);

        let rules = || -> Rules { world.wait(database.rules()).expect("an answer") };
        let limits = StoredLimits { total_quota: Some(7), user_quota: None, max_bps: Some(125_000) };
        let put = |limits| Edit::PutRealm { realm: "new.example".to_owned(), limits };
        assert!(!world.edit(&put(limits)));
        let new = rules().realms["new.example"].clone();
        assert_eq!((new.named, new.limits), (true, limits));
        assert!(world.edit(&put(StoredLimits::default())));
        let new = rules().realms["new.example"].clone();
        assert_eq!(
            (new.named, new.limits),
            (true, StoredLimits::default()),
            "the realm exists without a limit"
        );
        let remove = Edit::RemoveRealm { realm: "new.example".to_owned() };
        assert!(world.edit(&remove) && !world.edit(&remove));
        assert!(!rules().realms.contains_key("new.example"));
    });
}

#[test]
fn rotation_changes_the_signing_secret_and_lets_the_others_expire() {
    each(|world| {
        fill(world);
        let database = world.database();
        let secrets = || -> Vec<StoredSecret> { world.wait(database.secrets(REALM)).expect("an answer") };
        let signs = || signing(&secrets()).map(|secret| secret.value.reveal().to_owned());
        assert_eq!(signs().as_deref(), Some("bloody9"));
        let rotate = |secret: &str, since, until| {
            let (realm, secret) = (REALM.to_owned(), Secret::new(secret));
            world.edit(&Edit::RotateSecret { realm, secret, since, until })
        };
        assert!(rotate("new", 1000, 2000), "{:?}: there were other secrets", world.kind);
        let rules = || -> Rules { world.wait(database.rules()).expect("an answer") };
        let times = |secrets: &[StoredSecret]| {
            let mut times: Vec<_> = secrets
                .iter()
                .map(|secret| (secret.value.reveal().to_owned(), secret.since, secret.until))
                .collect();
            times.sort_unstable();
            times
        };
        let expected = |list: &[(&str, u64, Option<u64>)]| {
            list.iter().map(|(value, since, until)| ((*value).to_owned(), *since, *until)).collect::<Vec<_>>()
        };
        let first = expected(&[("bloody9", 0, Some(2000)), ("logen", 0, Some(2000)), ("new", 1000, None)]);
        assert_eq!(times(&rules().secrets[REALM]), first, "{:?}", world.kind);
        assert_eq!((times(&secrets()), signs().as_deref()), (first, Some("new")));
        assert_eq!(rules().secrets["crinna.example"][0].until, None, "another realm's secret");
        assert!(rotate("newer", 1500, 2500));
        let second = expected(&[
            ("bloody9", 0, Some(2000)),
            ("logen", 0, Some(2000)),
            ("new", 1000, Some(2500)),
            ("newer", 1500, None),
        ]);
        assert_eq!((times(&secrets()), signs().as_deref()), (second, Some("newer")));
        // The expiry can be made earlier: a leaked secret may already have one.
        assert!(rotate("newest", 1600, 1600));
        let third = expected(&[
            ("bloody9", 0, Some(1600)),
            ("logen", 0, Some(1600)),
            ("new", 1000, Some(1600)),
            ("newer", 1500, Some(1600)),
            ("newest", 1600, None),
        ]);
        assert_eq!((times(&secrets()), signs().as_deref()), (third, Some("newest")));
        // A secret that was invalidated is not confused with one that expires in the second of the next
        // rotation, and an expired secret is not treated as invalidated.
        assert!(rotate("leaked", 1700, 1800) && rotate("safe", 1800, CUT_OFF));
        let fourth = expected(&[
            ("bloody9", 0, Some(1600)),
            ("leaked", 1700, Some(CUT_OFF)),
            ("logen", 0, Some(1600)),
            ("new", 1000, Some(1600)),
            ("newer", 1500, Some(1600)),
            ("newest", 1600, Some(CUT_OFF)),
            ("safe", 1800, None),
        ]);
        assert_eq!((times(&secrets()), signs().as_deref()), (fourth, Some("safe")), "{:?}", world.kind);
        for cut_off in ["leaked", "safe"] {
            let (realm, secret) = (REALM.to_owned(), Secret::new(cut_off));
            assert!(world.edit(&Edit::RemoveSecret { realm, secret }));
        }
        // A removed secret leaves no mark that would affect a new one with the same value.
        let of = |text: &str| (REALM.to_owned(), Secret::new(text));
        let ((realm, secret), (again, same)) = (of("logen"), of("logen"));
        assert!(world.edit(&Edit::RemoveSecret { realm, secret }));
        assert_eq!(values(&secrets()), ["bloody9", "new", "newer", "newest"]);
        assert!(!world.edit(&Edit::AddSecret { realm: again, secret: same }));
        assert!(times(&secrets()).contains(&("logen".to_owned(), 0, None)), "{:?}", world.kind);
        // The first secret of a realm becomes the signing one.
        let (realm, secret) = ("empty.example".to_owned(), Secret::new("only"));
        assert!(!world.edit(&Edit::RotateSecret { realm, secret, since: 1, until: 2 }));
        let only = world.wait(database.secrets("empty.example")).expect("an answer");
        assert_eq!(times(&only), expected(&[("only", 1, None)]));
        let user = world.wait(database.user(REALM, "gorst")).expect("an answer");
        assert!(user.is_some(), "coturn's own tables are unchanged");
    });
}

#[test]
fn api_keys_are_stored_with_all_fields() {
    each(|world| {
        let database = world.database();
        let rules = || -> Rules { world.wait(database.rules()).expect("an answer") };
        assert!(rules().api_keys.is_empty());
        let remove = |name: &str| world.edit(&Edit::RemoveApiKey { name: name.to_owned() });
        assert!(!remove("shop"), "{:?}: without a table", world.kind);
        let bare = ApiKey { name: "shop".to_owned(), hash: [7; 32], realm: None, max_ttl: None, rate: None };
        let bound = ApiKey {
            name: "a-b_c".to_owned(),
            hash: [255; 32],
            realm: Some("a & b=c".to_owned()),
            max_ttl: Some(600),
            rate: Some(5),
        };
        for key in [&bare, &bound] {
            assert!(!world.edit(&Edit::PutApiKey(key.clone())));
        }
        let found = rules().api_keys;
        assert_eq!((found.get("shop"), found.get("a-b_c")), (Some(&bare), Some(&bound)), "{:?}", world.kind);
        let changed = ApiKey { rate: Some(1), hash: [8; 32], ..bare };
        assert!(world.edit(&Edit::PutApiKey(changed.clone())), "replaced");
        assert_eq!(rules().api_keys.get("shop"), Some(&changed));
        assert!(remove("shop") && !remove("shop"));
        assert_eq!(rules().api_keys.len(), 1);
    });
}

#[test]
fn users_are_listed_in_pages_in_order() {
    each(|world| {
        let name = |number: usize| format!("user{number:05}");
        let mut rows = String::new();
        for number in 0..2_300 {
            rows += &match world.kind {
                Kind::Redis => {
                    format!("set turn/realm/{REALM}/user/{}/key {}\n", name(number), "ab".repeat(16))
                }
                _ => format!(
                    "insert into turnusers_lt values ('{REALM}', '{}', '{}');\n",
                    name(number),
                    "ab".repeat(16)
                ),
            };
        }
        let other = Edit::PutUser {
            realm: "a.example".to_owned(),
            name: "first".to_owned(),
            keys: UserKeys::new("first", "a.example", "pw"),
        };
        if world.kind == Kind::Redis {
            world.redis(&rows);
        } else {
            world.sql(&rows);
        }
        world.edit(&other);
        let database = world.database();
        let all = |realm: Option<&str>| {
            let mut users = Vec::new();
            loop {
                let page = world.wait(database.users(realm, users.last())).expect("an answer");
                assert!(page.len() <= 1000);
                if page.is_empty() {
                    return users;
                }
                users.extend(page);
            }
        };
        let users = all(None);
        assert_eq!(users.len(), 2_301);
        assert_eq!(
            (users[0].name.as_str(), users[0].realm.as_str(), users[0].keys),
            ("first", "a.example", "MD5, SHA-256")
        );
        assert_eq!((users[2_300].name.as_str(), users[2_300].keys), ("user02299", "MD5"));
        assert!(
            users.windows(2).all(|pair| (&pair[0].realm, &pair[0].name) < (&pair[1].realm, &pair[1].name))
        );
        assert_eq!(all(Some(REALM)).len(), 2_300);
        assert_eq!(all(Some("nowhere")).len(), 0);
    });
}

fn ask(directory: &Directory<turnpike_stores::Database>, name: &str) -> oneshot::Receiver<UserLookup> {
    let (sender, receiver) = oneshot::channel();
    directory.look_up(REALM, name, move |found| drop(sender.send(found)));
    receiver
}

#[test]
fn ten_thousand_users_take_one_query_each_and_are_cached() {
    const USERS: usize = 10_000;
    each(|world| {
        let hex = |number: usize| format!("{number:032x}");
        let mut rows = String::new();
        for number in 0..USERS {
            let separator = if number % 500 == 0 { ";\ninsert into turnusers_lt values " } else { ", " };
            rows += &match world.kind {
                Kind::Redis => format!("set turn/realm/{REALM}/user/u{number}/key {}\n", hex(number)),
                _ => format!("{separator}('{REALM}', 'u{number}', '{}')", hex(number)),
            };
        }
        if world.kind == Kind::Redis {
            world.redis(&rows);
        } else {
            world.sql(rows.trim_start_matches(";\n"));
        }
        let directory = world
            .directory_at(&world.url, DirectoryLimits { deadline: Duration::from_secs(8), ..impatient() });
        world.wait(async {
            directory.read().await.expect("an answer");
            // One worker allows this many lookups to wait.
            for first in (0..USERS).step_by(1000) {
                let asking: Vec<_> =
                    (first..first + 1000).map(|number| ask(&directory, &format!("u{number}"))).collect();
                for (number, found) in (first..).zip(asking) {
                    match found.await.expect("an answer") {
                        UserLookup::User(keys) => {
                            assert_eq!(keys.to_hex().as_str(), hex(number), "another's keys");
                        }
                        other => panic!("u{number}: {other:?}"),
                    }
                }
            }
        });
        let counts = directory.counts();
        assert_eq!(counts.users, USERS as u64);
        assert!(counts.queries.contains(&("found", USERS as u64)), "{:?}: {:?}", world.kind, counts.queries);
        for number in 0..USERS {
            assert!(matches!(directory.cached(REALM, &format!("u{number}")), CachedUser::User(_)));
        }
    });
}

#[test]
fn changes_to_a_file_by_other_processes_are_noticed() {
    on(Kind::Sqlite, |world| {
        fill(world);
        let directory = world.directory_at(&world.url, impatient());
        world.wait(async {
            directory.read().await.expect("the store exists");
            let UserLookup::User(_) = ask(&directory, "gorst").await.expect("an answer") else { panic!() };
            let UserLookup::Absent = ask(&directory, "whirrun").await.expect("an answer") else { panic!() };
        });
        let generation = directory.generation();
        // To the open connection, this looks like a change by another process.
        world.edit(&Edit::PutUser {
            realm: REALM.to_owned(),
            name: "whirrun".to_owned(),
            keys: UserKeys::new("whirrun", REALM, "sword"),
        });
        world.edit(&Edit::RemoveUser { realm: REALM.to_owned(), name: "gorst".to_owned() });
        world.edit(&Edit::PutRealm { realm: "new.example".to_owned(), limits: StoredLimits::default() });
        let directory = Arc::new(directory);
        world.wait(async {
            while !matches!(directory.cached(REALM, "gorst"), CachedUser::Unknown)
                || directory.generation() == generation
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let UserLookup::User(_) = ask(&directory, "whirrun").await.expect("an answer") else { panic!() };
            let UserLookup::Absent = ask(&directory, "gorst").await.expect("an answer") else { panic!() };
        });
        let rules = directory.rules().expect("secrets were read");
        assert!(rules.realms.contains_key("new.example"));
        assert_eq!(
            rules.md5_only,
            Some([REALM.into()].into()),
            "SQLite knows which realms have users without a SHA-256 key"
        );
    });
}

/// Operators whose database user may not create tables create them as documented.
#[test]
fn own_tables_match_the_documentation() {
    const DOCUMENT: &str = include_str!("../../../docs/credentials.md");
    let (_, rest) = DOCUMENT.split_once("```sql\n").expect("the document has the tables");
    let tables = rest.split_once("```").expect("a closing fence").0;
    for kind in [Kind::Sqlite, Kind::Postgres, Kind::Mariadb] {
        on(kind, |world| {
            world.sql(tables);
            let key = ApiKey {
                name: "x".repeat(64),
                hash: [9; 32],
                realm: Some("y".repeat(127)),
                max_ttl: Some(u32::MAX),
                rate: Some(u32::MAX),
            };
            assert!(!world.edit(&Edit::PutApiKey(key.clone())));
            let (realm, secret) = (REALM.to_owned(), Secret::new("z".repeat(256)));
            let (since, until) = (i64::MAX as u64, u64::MAX);
            assert!(!world.edit(&Edit::RotateSecret { realm: realm.clone(), secret, since, until }));
            let secret = Secret::new("next");
            assert!(world.edit(&Edit::RotateSecret { realm, secret, since, until }));
            let rules = world.wait(world.database().rules()).expect("an answer");
            assert_eq!(rules.api_keys.values().collect::<Vec<_>>(), [&key]);
            assert_eq!(rules.secrets[REALM].iter().map(|held| held.until).max(), Some(Some(until)));
        });
    }
}
