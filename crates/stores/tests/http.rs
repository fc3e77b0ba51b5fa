//! Users at an application's endpoint: requests, responses, and their errors.

use std::{ops::Range, time::Instant};

use tokio::sync::oneshot;
use turnpike_stores::{
    Backend as _, Database, Directory, DirectoryLimits, Edit, StoreFault, UserKeys, UserLookup,
};
use turnpike_testkit::databases::PASSWORD;

use crate::support::*;

const REALM: &str = "north.example";

fn request(name: &str) -> String {
    format!("{{\"realm\":\"{REALM}\",\"user\":\"{name}\"}}")
}

#[test]
fn keys_and_passwords_are_found_and_the_token_is_sent() {
    on(Kind::Http, |world| {
        let stub = world.stub.as_ref().expect("a stub");
        let keys = UserKeys::new("alice", REALM, "correct horse");
        stub.answer(&request("alice"), &format!("{{\"key\":\"{}\",\"plan\":7}}", *keys.to_hex()));
        stub.answer(&request("bob"), "{\"password\":\"correct horse\",\"key\":null}");
        stub.answer(&request("eve"), "{\"key\":\"0123\"}");
        stub.answer(&request("a\\\"b"), "{\"password\":\"x\"}");
        let database = world.database();
        let user = |name: &str| world.wait(database.user(REALM, name)).expect("an answer");
        assert_eq!(user("alice"), Some(keys));
        assert_eq!(user("bob"), Some(UserKeys::new("bob", REALM, "correct horse")));
        assert_eq!(user("a\"b"), Some(UserKeys::new("a\"b", REALM, "x")));
        assert_eq!(user("eve"), Some(UserKeys::default()), "an invalid key never matches");
        assert_eq!(user("mallory"), None);
        assert_eq!(stub.authorization(), format!("Bearer {PASSWORD}"));
        assert!(world.wait(database.secrets(REALM)).expect("an answer").is_empty());
        assert!(world.wait(database.rules()).is_ok());
        let removal = Edit::RemoveUser { realm: REALM.to_owned(), name: "alice".to_owned() };
        let error = world.wait(database.edit(&removal)).expect_err("read only");
        assert!(error.to_string().contains("in the application"), "{error}");
        assert!(world.wait(database.users(None, None)).is_err());
    });
}

/// The OpenAPI document describes these requests and responses.
#[test]
fn documented_examples_are_sent_and_understood() {
    let document = include_str!("../../../docs/user-lookup.openapi.json");
    let document: serde_json::Value = serde_json::from_str(document).expect("JSON");
    let operation = &document["webhooks"]["user"]["post"];
    let request = &operation["requestBody"]["content"]["application/json"]["example"];
    let examples = &operation["responses"]["200"]["content"]["application/json"]["examples"];
    let [realm, name] = ["realm", "user"].map(|member| request[member].as_str().expect("a string"));
    on(Kind::Http, |world| {
        let stub = world.stub.as_ref().expect("a stub");
        let user = |example: &str| {
            // The stub answers only the documented request like this.
            stub.answer(&request.to_string(), &examples[example]["value"].to_string());
            world.wait(world.database().user(realm, name)).expect("an answer")
        };
        let keys = UserKeys::new(name, realm, "correct horse");
        assert_eq!(user("password"), Some(keys.clone()));
        let by_key = user("md5").expect("a user");
        assert!(keys.to_hex().starts_with(by_key.to_hex().as_str()), "{:?}", by_key.to_hex());
        assert_eq!(user("nobody"), None);
        for code in
            operation["responses"].as_object().expect("responses").keys().filter(|code| *code != "200")
        {
            stub.answer(&request.to_string(), "{}");
            let status = if code == "default" { "404" } else { code };
            stub.otherwise(&format!("{status} Documented"), "{}");
            assert!(world.wait(world.database().user(realm, "other")).is_err(), "{code}");
        }
    });
    let answer = &document["components"]["schemas"]["Answer"]["properties"];
    let members: Vec<&String> = answer.as_object().expect("properties").keys().collect();
    assert_eq!(members, ["key", "password"]);
}

#[test]
fn unusable_responses_are_errors_and_not_absent_users() {
    on(Kind::Http, |world| {
        let stub = world.stub.as_ref().expect("a stub");
        let long = format!("{{\"key\":\"{}\"}}", "0".repeat(5000));
        for (status, body, fault, told) in [
            ("401 Unauthorized", "{}", StoreFault::Login, "store.url"),
            ("403 Forbidden", "{}", StoreFault::Login, "store.url"),
            ("404 Not Found", "{}", StoreFault::Schema, "404 Not Found instead of 200"),
            ("302 Found", "", StoreFault::Schema, "302 Found"),
            ("429 Too Many Requests", "", StoreFault::Other, "429"),
            ("503 Service Unavailable", "{}", StoreFault::Other, "503"),
            ("200 OK", "<html>hunter2</html>", StoreFault::Schema, "JSON"),
            ("200 OK", "null", StoreFault::Schema, "JSON"),
            ("200 OK", "{\"key\":[\"hunter2\"]}", StoreFault::Schema, "JSON"),
            ("200 OK", &long, StoreFault::Row, "4096 bytes"),
        ] {
            stub.otherwise(status, body);
            let error = world.wait(world.database().rules()).expect_err(status);
            let text = error.to_string();
            assert_eq!(error.fault, fault, "{text}");
            assert!(text.contains(told) && text.starts_with("http://127.0.0.1:"), "{text}");
            assert!(!text.contains(PASSWORD) && !text.contains("hunter2"), "{text}");
            assert_eq!(error.is_misconfigured(), fault == StoreFault::Login, "{text}");
        }
    });
}

#[test]
fn connections_are_reused_and_bounded() {
    on(Kind::Http, |world| {
        let stub = world.stub.as_ref().expect("a stub");
        let directory = world.directory_at(&world.url, DirectoryLimits::default());
        look_up_all(world, &directory, 0..500);
        assert_eq!(stub.requests(), 500);
        assert!(stub.connections() <= 8, "{} connections", stub.connections());
    });
}

/// Looks up all users at once.
fn look_up_all(world: &World, directory: &Directory<Database>, users: Range<usize>) {
    let answers = users.map(|user| {
        let (sender, receiver) = oneshot::channel();
        directory.look_up(REALM, &format!("user{user}"), move |found| drop(sender.send(found)));
        receiver
    });
    for answer in answers.collect::<Vec<_>>() {
        let found = world.wait(answer).expect("an answer");
        assert!(matches!(found, UserLookup::Absent), "{found:?}");
    }
}

/// Measures cold look-ups; run with `--ignored --nocapture` in a release build.
#[test]
#[ignore = "a measurement"]
fn cold_users_per_second() {
    const USERS: usize = 1000;
    on(Kind::Http, |world| {
        let directory = world.directory_at(&world.url, DirectoryLimits::default());
        let begun = Instant::now();
        for first in (0..20 * USERS).step_by(USERS) {
            look_up_all(world, &directory, first..first + USERS);
        }
        println!("{:.0} users per second", 20.0 * USERS as f64 / begun.elapsed().as_secs_f64());
    });
}
