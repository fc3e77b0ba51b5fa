//! Requests as the documentation of Cloudflare's and Twilio's TURN services and Twilio's libraries write them, with
//! the fields and types of their responses.

use crate::prelude::*;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use turnpike_config::restapi_credentials;

const SID: &str = "AC0123456789abcdef0123456789abcdef";

fn running() -> Running {
    let running = Running::server(1);
    running.program.settings().auth.secrets = vec![Secret::new("north")];
    running
}

fn at_cloudflare(running: &Running, key: &str, name: &str, what: &str, body: Option<&str>) -> Answer {
    let authorization = format!("Bearer {key}");
    let headers = [("Authorization", authorization.as_str()), ("Content-Type", "application/json")];
    let headers = if body.is_some() { &headers[..] } else { &headers[..1] };
    running.apply("POST", &format!("/v1/turn/keys/{name}/credentials/{what}"), headers, body)
}

fn at_twilio(running: &Running, sid: &str, password: &str, form: &str) -> Answer {
    let authorization = format!("Basic {}", STANDARD.encode(format!("{SID}:{password}")));
    let headers = [
        ("Authorization", authorization.as_str()),
        ("Content-Type", "application/x-www-form-urlencoded"),
        ("Accept", "application/json"),
    ];
    running.apply("POST", &format!("/2010-04-01/Accounts/{sid}/Tokens.json"), &headers, Some(form))
}

fn fits(username: &Value, password: &Value) -> bool {
    let username = username.as_str().unwrap();
    restapi_credentials::password(&Secret::new("north"), username).reveal() == password
}

fn place(running: &Running) -> String {
    format!("192.0.2.1:{}", running.relay().listeners().udp[0].port())
}

fn created(answer: Answer) -> Value {
    assert_eq!(answer.status, 201, "{answer:?}");
    assert!(answer.header("content-type").starts_with("application/json"), "{answer:?}");
    serde_json::from_str(&answer.body).unwrap()
}

#[test]
fn cloudflare_clients_get_ice_servers() {
    let running = running();
    let key = running.key("shop", json!({ "max_ttl": 3600 }));
    let wanted = "{\"ttl\": 600, \"customIdentifier\": \"alice\"}";
    let told = created(at_cloudflare(&running, &key, "shop", "generate-ice-servers", Some(wanted)));
    let place = place(&running);
    let [stun, turn] = &told["iceServers"].as_array().unwrap()[..] else { panic!("{told}") };
    assert_eq!(*stun, json!({ "urls": [format!("stun:{place}")] }));
    assert_eq!(turn["urls"], json!([format!("turn:{place}?transport=udp")]));
    assert!(turn["username"].as_str().unwrap().ends_with(":alice"), "{told}");
    assert!(fits(&turn["username"], &turn["credential"]), "{told}");
    assert_eq!((told.as_object().unwrap().len(), turn.as_object().unwrap().len()), (1, 3));

    let told = created(at_cloudflare(&running, &key, "shop", "generate", Some("{\"ttl\": 600}")));
    let both = json!([format!("stun:{place}"), format!("turn:{place}?transport=udp")]);
    assert_eq!(told["iceServers"]["urls"], both);
    assert!(fits(&told["iceServers"]["username"], &told["iceServers"]["credential"]), "{told}");

    for what in ["generate", "generate-ice-servers"] {
        let refused = |key: &str, name: &str, body| at_cloudflare(&running, key, name, what, Some(body));
        assert_eq!(refused(&key, "shop", "{\"ttl\": 3601}").problem(400), "bad_request");
        assert_eq!(refused(&key, "shop", "{\"custom\": 1}").problem(400), "bad_request");
        assert_eq!(refused(&key, "other", "{}").problem(401), "wrong_key");
        assert_eq!(refused("tpk_shop.x", "shop", "{}").problem(401), "wrong_key");
    }
}

#[test]
fn revoked_credential_is_banned_until_it_expires() {
    let running = running();
    let key = running.key("shop", json!({}));
    let wanted = "{\"ttl\": 600, \"customIdentifier\": \"alice\"}";
    let told = created(at_cloudflare(&running, &key, "shop", "generate", Some(wanted)));
    let username = told["iceServers"]["username"].as_str().unwrap().to_owned();
    let revoke = |name: &str, username: &str| {
        at_cloudflare(&running, &key, name, &format!("{}/revoke", username.replace(':', "%3A")), None)
    };
    assert_eq!(revoke("other", &username).problem(401), "wrong_key");
    for bad in ["alice", "alice:1999999999", "99999999999:alice", "18446744073709551616:a"] {
        assert_eq!(revoke("shop", bad).problem(400), "bad_request", "{bad}");
    }
    assert_eq!(revoke("shop", "1700000000:alice").status, 204, "expired long ago");
    assert_eq!(running.get("/v1/bans").ok()["bans"], json!([]));
    let done = revoke("shop", &username);
    assert_eq!((done.status, &*done.body), (204, ""), "{done:?}");
    let bans = running.get("/v1/bans").ok();
    assert_eq!((&bans["bans"][0]["user"], &bans["bans"][0]["realm"]), (&json!(username), &json!("turnpike")));
    let expiry = restapi_credentials::parse(&username).unwrap().0;
    let until: jiff::Timestamp = bans["bans"][0]["until"].as_str().unwrap().parse().unwrap();
    assert_eq!(u64::try_from(until.as_second()).unwrap(), expiry + 1);
}

#[test]
fn twilio_clients_get_a_token() {
    let running = running();
    let key = running.key("shop", json!({ "max_ttl": 3600 }));
    let told = created(at_twilio(&running, SID, &key, "Ttl=600"));
    let place = place(&running);
    let text = |field: &str| told[field].as_str().unwrap_or_else(|| panic!("{field} is no text: {told}"));
    assert_eq!((text("account_sid"), text("ttl")), (SID, "600"));
    assert!(fits(&told["username"], &told["password"]), "{told}");
    assert_eq!(text("date_created"), text("date_updated"));
    let date = jiff::fmt::rfc2822::parse(text("date_created")).unwrap();
    let age = jiff::Timestamp::now().as_second() - date.timestamp().as_second();
    assert!((0..=60).contains(&age) && text("date_created").ends_with(" +0000"), "{told}");
    let stun = format!("stun:{place}");
    let turn = format!("turn:{place}?transport=udp");
    let servers = json!([
        { "url": stun, "urls": stun },
        { "url": turn, "urls": turn, "username": told["username"], "credential": told["password"] },
    ]);
    assert_eq!(told["ice_servers"], servers);
    assert_eq!(told.as_object().unwrap().len(), 7);
    // The libraries send an empty form without a lifetime.
    assert_eq!(created(at_twilio(&running, SID, &key, ""))["ttl"], "3600");

    assert_eq!(at_twilio(&running, SID, &key, "Ttl=3601").problem(400), "bad_request");
    assert_eq!(at_twilio(&running, SID, &key, "ttl=5").problem(400), "bad_request");
    assert_eq!(at_twilio(&running, "a%2Fb", &key, "").problem(400), "bad_request");
    assert_eq!(at_twilio(&running, SID, "secret", "").problem(401), "wrong_key");
    let path = format!("/2010-04-01/Accounts/{SID}/Tokens.json");
    assert_eq!(running.apply("POST", &path, &[], None).problem(401), "no_key");
    for malformed in
        ["Basic", "Basic !", &format!("Bearer {key}"), &format!("Basic {}", STANDARD.encode("a"))]
    {
        let answer = running.apply("POST", &path, &[("Authorization", malformed)], None);
        assert_eq!(answer.problem(400), "bad_request", "{malformed}");
    }
}
