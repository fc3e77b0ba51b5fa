//! Allocations: lists in pages, details, and ending them.

use crate::prelude::*;
use std::net::IpAddr;
use turnpike_admin::AllocationQualities;
use turnpike_api::{
    FlowDirection, Leg, QualityProblem,
    quality::{FlowQuality, LegQuality, Quality},
};
use turnpike_turn::server::{AllocationId, ClientNetwork, ClientNetworks, Country};

fn listed(running: &Running, query: &str) -> Vec<Value> {
    running.get(&format!("/v1/allocations{query}")).ok()["allocations"].as_array().expect("a list").clone()
}

#[test]
fn pages_list_each_allocation_exactly_once() {
    let running = Running::server(2);
    let clients: Vec<_> = (0..25).map(|_| running.allocated()).collect();
    let wanted: BTreeMap<String, String> = clients
        .iter()
        .map(|(client, relayed)| (client.local_addr().unwrap().to_string(), relayed.to_string()))
        .collect();
    for limit in [1, 7, 25, 1000] {
        let mut found = BTreeMap::new();
        let mut ids = BTreeSet::new();
        let mut cursor = String::new();
        loop {
            let page = running.get(&format!("/v1/allocations?limit={limit}{cursor}")).ok();
            let allocations = page["allocations"].as_array().unwrap();
            assert!(allocations.len() <= limit);
            for allocation in allocations {
                let text = |key: &str| allocation[key].as_str().unwrap().to_owned();
                assert!(ids.insert(text("id")), "{allocation} twice");
                found
                    .insert(text("client"), allocation["relayed"][0]["address"].as_str().unwrap().to_owned());
            }
            match page["next"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => break,
            }
        }
        assert_eq!(found, wanted, "{limit}");
    }
    assert_eq!(listed(&running, "").len(), 25);
}

#[test]
fn allocation_list_is_filtered() {
    let running = Running::server(1);
    let (one, relayed) = running.allocated();
    let _other = running.allocated();
    let client = one.local_addr().unwrap();
    for (query, count) in [
        (format!("client={client}"), 1),
        (format!("client={}", client.ip()), 2),
        ("client=127.0.0.0/8".to_owned(), 2),
        ("client=10.0.0.0/8".to_owned(), 0),
        (format!("relayed={relayed}"), 1),
        ("transport=udp".to_owned(), 2),
        ("transport=tls".to_owned(), 0),
        ("realm=elsewhere".to_owned(), 0),
        ("realm=turnpike&user=".to_owned(), 2),
        ("user=nobody".to_owned(), 0),
        (format!("client={client}&transport=tcp"), 0),
    ] {
        assert_eq!(listed(&running, &format!("?{query}")).len(), count, "{query}");
    }
}

#[test]
fn invalid_allocation_filters_are_refused() {
    let running = Running::server(1);
    for query in [
        "limit=0",
        "limit=1001",
        "limit=ten",
        "limit=-1",
        "cursor=1",
        "cursor=a.b",
        "cursor=-1.0",
        "cursor=0.4294967296",
        "transport=sctp",
        "client=alice",
        "client=10.0.0.1/8",
        "relayed=10.0.0.1:99999",
        "usr=alice",
        "user=a&user=b",
    ] {
        assert_eq!(running.get(&format!("/v1/allocations?{query}")).problem(400), "bad_request", "{query}");
    }
    // A cursor from a server with more workers.
    let page = running.get("/v1/allocations?cursor=900.5").ok();
    assert_eq!(page, json!({ "allocations": [], "next": null }));
}

#[test]
fn allocation_details_include_permissions_and_channels() {
    let running = Running::server(2);
    let (client, relayed) = running.allocated();
    let _others: Vec<_> = (0..8).map(|_| running.allocated()).collect();
    let peer: SocketAddr = "127.0.0.1:9".parse().unwrap();
    let bind = stun::message(0x0009, 2, &[(0x000C, &[0x40, 1, 0, 0]), (0x0012, &stun::xor_address(peer, 0))]);
    client.send(&bind).unwrap();
    client.recv(&mut [0; 1500]).unwrap();
    client.send(&[0x40, 1, 0, 3, b'a', b'b', b'c']).unwrap();
    let found = &listed(&running, &format!("?client={}", client.local_addr().unwrap()))[0];
    assert!(found.get("permissions").is_none() && found.get("channels").is_none(), "{found}");
    let path = format!("/v1/allocations/{}", found["id"].as_str().unwrap());
    let allocation = turnpike_testkit::eventually("the datagram is counted", || {
        let allocation = running.get(&path).ok();
        (allocation["to_peer"]["datagrams"] == 1).then_some(allocation)
    });
    assert_eq!(allocation["to_peer"], json!({ "datagrams": 1, "bytes": 3 }));
    assert_eq!(allocation["relayed"][0]["address"], relayed.to_string());
    assert_eq!(allocation["server"], running.relay().listeners().udp[0].to_string());
    assert_eq!((&allocation["transport"], &allocation["relayed_transport"]), (&json!("udp"), &json!("udp")));
    assert_eq!((&allocation["mobile"], &allocation["away"]), (&json!(false), &json!(false)));
    let left = |value: &Value, most: u64| {
        let seconds = value["expires_in_s"].as_u64().unwrap();
        assert!((most - 60..=most).contains(&seconds), "{value}");
    };
    assert_eq!(allocation["permissions"][0]["peer"], "127.0.0.1");
    // A channel keeps its permission alive.
    left(&allocation["permissions"][0], 600);
    assert_eq!(
        (&allocation["channels"][0]["number"], &allocation["channels"][0]["peer"]),
        (&json!(0x4001), &json!("127.0.0.1:9"))
    );
    left(&allocation["channels"][0], 600);
    left(&allocation["relayed"][0], 600);
}

#[test]
fn ended_allocation_is_gone_and_others_remain() {
    let running = Running::server(2);
    let clients: Vec<_> = (0..6).map(|_| running.allocated()).collect();
    let ended = listed(&running, "")[3].clone();
    let path = format!("/v1/allocations/{}", ended["id"].as_str().unwrap());
    let told = running.ask("DELETE", &path, None).ok();
    assert_eq!((&told["id"], &told["client"]), (&ended["id"], &ended["client"]));
    assert_eq!(running.ask("DELETE", &path, None).problem(404), "no_such_allocation");
    assert_eq!(running.get(&path).problem(404), "no_such_allocation");
    assert_eq!(listed(&running, "").len(), 5);
    for (client, _) in &clients {
        let was = client.local_addr().unwrap().to_string() == ended["client"];
        client.send(&stun::message(0x0004, 9, &[])).unwrap();
        let mut answer = [0; 1500];
        client.recv(&mut answer).unwrap();
        assert_eq!(answer[0] == 0x01 && answer[1] == 0x14, was, "{:?}", &answer[..2]);
    }
}

#[test]
fn invalid_allocation_id_is_refused() {
    let running = Running::server(1);
    for id in ["0", "alice", "%20", "0123456789abcdef0123456789abcdeg", &"0".repeat(33), "%FF"] {
        for method in ["GET", "DELETE"] {
            let answer = running.ask(method, &format!("/v1/allocations/{id}"), None);
            assert_eq!(answer.problem(400), "bad_request", "{method} {id}");
        }
    }
}

#[derive(Debug)]
struct Everywhere;

impl ClientNetworks for Everywhere {
    fn network(&self, client: IpAddr) -> ClientNetwork {
        assert!(client.is_loopback());
        ClientNetwork { country: Country::new("DE"), asn: None }
    }
}

#[test]
fn network_of_the_client_is_shown_if_it_is_known() {
    let running = Running::server(1);
    let _client = running.allocated();
    assert_eq!(listed(&running, "")[0].get("network"), None);
    *running.program.networks.lock().unwrap() = Some(Arc::new(Everywhere));
    let allocation = listed(&running, "").remove(0);
    let network = json!({ "country": "DE", "asn": null });
    assert_eq!(allocation["network"], network);
    let id = allocation["id"].as_str().unwrap();
    assert_eq!(running.get(&format!("/v1/allocations/{id}")).ok()["network"], network);
}

struct Lossy;

impl AllocationQualities for Lossy {
    fn quality(&self, _: AllocationId) -> Option<Quality> {
        let uplink = FlowQuality { expected: 1000, lost: 31, jitter_ms: 2.5, ..FlowQuality::default() };
        let client = LegQuality { round_trip_ms: Some(40.5), uplink: Some(uplink), downlink: None };
        Some(Quality { client, peer: LegQuality::default() })
    }

    fn problem(&self, _: AllocationId) -> Option<QualityProblem> {
        Some(QualityProblem {
            leg: Leg::Client,
            direction: Some(FlowDirection::Uplink),
            since: "2026-11-30T14:02:10Z".to_owned(),
            sentence: "uplink of the client: 3.1 % loss since 14:02 UTC".to_owned(),
        })
    }
}

#[test]
fn quality_of_an_allocation_is_shown_if_it_is_measured() {
    let running = Running::server(1);
    let _client = running.allocated();
    let unmeasured = listed(&running, "").remove(0);
    assert_eq!((unmeasured.get("quality"), unmeasured.get("quality_problem")), (None, None));
    *running.program.qualities.lock().unwrap() = Some(Arc::new(Lossy));
    let in_list = listed(&running, "").remove(0);
    let path = format!("/v1/allocations/{}", in_list["id"].as_str().unwrap());
    for allocation in [in_list, running.get(&path).ok()] {
        let client = &allocation["quality"]["client"];
        assert_eq!((&client["round_trip_ms"], &client["uplink"]["lost"]), (&json!(40.5), &json!(31)));
        assert_eq!(client["downlink"], json!(null));
        let problem = &allocation["quality_problem"];
        assert_eq!((&problem["leg"], &problem["direction"]), (&json!("client"), &json!("uplink")));
        assert_eq!(problem["sentence"], "uplink of the client: 3.1 % loss since 14:02 UTC");
    }
}
