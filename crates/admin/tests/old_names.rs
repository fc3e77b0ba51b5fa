//! Names of the previous version: paths, fields and lists.

use crate::prelude::*;

#[test]
fn old_paths_return_the_old_list_and_a_deprecation_header() {
    let together = Together::default();
    let running = Running::node(&together, "one", 1);
    let _client = running.allocated();
    for (old, new) in [("/v1/sessions", "/v1/allocations"), ("/v1/fleet/sessions", "/v1/fleet/allocations")] {
        let (before, now) = (running.get(&format!("{old}?limit=5")), running.get(&format!("{new}?limit=5")));
        assert!(before.header("deprecation").starts_with('@'), "{old}");
        assert_eq!(before.header("link"), format!("<{new}>; rel=\"successor-version\""));
        assert!(!now.head.to_lowercase().contains("deprecation"), "{new}");
        let (before, now) = (before.ok(), now.ok());
        assert_eq!(before["sessions"][0]["id"], now["allocations"][0]["id"], "{old}");
        assert_eq!((before.get("allocations"), now.get("sessions")), (None, None), "{old}");
    }
}

#[test]
fn an_allocation_is_shown_and_ended_on_the_old_path() {
    let running = Running::server(1);
    let _client = running.allocated();
    let id = running.get("/v1/allocations").ok()["allocations"][0]["id"].as_str().unwrap().to_owned();
    let path = format!("/v1/sessions/{id}");
    assert_eq!(running.get(&path).ok()["id"], *id);
    let ended = running.ask("DELETE", &path, None);
    assert_eq!(ended.header("link"), format!("</v1/allocations/{id}>; rel=\"successor-version\""));
    assert_eq!(ended.ok()["id"], *id);
    assert_eq!(running.get(&path).problem(404), "no_such_allocation");
}

#[test]
fn old_paths_check_their_parameters() {
    let running = Running::server(1);
    assert_eq!(running.get("/v1/sessions?users=alice").problem(400), "bad_request");
    assert_eq!(running.ask("POST", "/v1/sessions", None).problem(405), "no_such_method");
}

#[test]
fn an_older_node_can_query_a_newer_one() {
    let together = Together::default();
    let nodes = ["a", "b"].map(|name| Running::node(&together, name, 1));
    let _client = nodes[1].allocated();
    let page = nodes[0].get("/v1/fleet/nodes/b/v1/sessions?limit=5");
    assert!(page.header("deprecation").starts_with('@'));
    assert_eq!(page.ok()["sessions"].as_array().map(Vec::len), Some(1));
}
