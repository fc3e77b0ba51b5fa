//! Confusing usernames: escaped in log lines and tables, unchanged in JSON.

use crate::prelude::*;
use base64::{Engine as _, prelude::BASE64_STANDARD};
use hmac::{KeyInit as _, Mac as _};
use sha1::Sha1;

/// One client address per name, because refusal log lines are limited per address.
fn client(number: usize) -> IpAddr {
    Ipv4Addr::from(0x7f00_0002 + u32::try_from(number).expect("few names")).into()
}

fn is_shown_safely(text: &str) -> bool {
    text.chars().all(|character| character == '\n' || escape::is_plain(character))
}

fn users(body: &str, list: &str) -> BTreeSet<String> {
    let body: Value = serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body}"));
    let list = if list.is_empty() { &body } else { &body[list] };
    list.as_array().into_iter().flatten().filter_map(|one| one["user"].as_str().map(str::to_owned)).collect()
}

#[test]
fn refused_names_are_escaped_in_the_log_and_kept_in_json() {
    let mut serve = Serve::start(&[]);
    for (number, (name, shown)) in CORPUS.iter().enumerate() {
        let stun = stun::Client::from(client(number), serve.address(V4));
        let (_, _, challenge) = stun.challenge();
        stun.forge(name, REALM.as_bytes(), &challenge.nonce);
        let line = serve.program.line_with(&format!("credential refused user=\"{shown}\" "));
        assert!(is_shown_safely(&line), "{line}");
    }
    let (status, body) = fetch(serve.admin(), "/v1/refusals?limit=100").expect("the server responds");
    assert!(status == 200 && is_shown_safely(&body), "{status} {body}");
    let told = users(&body, "refusals");
    assert_eq!(told, CORPUS.iter().map(|(name, _)| (*name).to_owned()).collect());
}

#[test]
fn non_text_username_is_refused_and_the_log_names_the_attribute() {
    let mut serve = Serve::start(&["-v"]);
    let stun = stun::Client::new(serve.address(V4));
    let (_, _, challenge) = stun.challenge();
    let code = stun.forge(b"f\xffnul", REALM.as_bytes(), &challenge.nonce);
    assert_eq!(code, Some(400));
    let line = serve.program.line_with("request refused");
    assert!(line.contains(" user=\"\" ") && line.contains("USERNAME"), "{line}");
}

#[test]
fn allocation_names_are_escaped_in_tables_and_kept_in_json() {
    let serve = Serve::start(&["--secret", "north-star"]);
    let mut wanted = BTreeSet::new();
    for (number, (name, _)) in CORPUS.iter().enumerate().filter(|(_, (name, _))| name.len() < 400) {
        let user = format!("{}:{name}", unix() + 600);
        let mut mac = Hmac::<Sha1>::new_from_slice(b"north-star").expect("any length");
        mac.update(user.as_bytes());
        let password = BASE64_STANDARD.encode(mac.finalize().into_bytes());
        let stun = stun::Client::from(client(number), serve.address(V4));
        let (_, _, challenge) = stun.challenge();
        assert_eq!(stun.allocate(&user, &password, &challenge), None, "{user:?}");
        wanted.insert(user);
    }
    let admin = serve.admin().to_string();
    let run = |more: &[&str]| {
        let ended =
            Program::run(&mut turnpike(&[&["allocations", "--admin", &admin], more].concat())).ended(0);
        assert!(is_shown_safely(&ended.stdout), "{}", ended.stdout);
        ended.stdout
    };
    let table = run(&[]);
    for user in &wanted {
        let cell = format!("  {}  ", escape::name(user));
        assert!(table.contains(&cell), "{user:?}: {table}");
    }
    assert_eq!(users(&run(&["--json"]), ""), wanted);
    let (_, body) = fetch(serve.admin(), "/v1/allocations?limit=100").expect("the server responds");
    assert!(is_shown_safely(&body), "{body}");
    assert_eq!(users(&body, "allocations"), wanted);
}

fn unix() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.expect("after 1970").as_secs()
}
