//! The web page: access to it, and the restrictions that it imposes on browsers.

use crate::prelude::*;

fn page(running: &Running, headers: &[(&str, &str)]) -> Answer {
    let accept = ("Accept", "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8");
    running.ask_tcp("GET", "/", &[headers, &[accept]].concat())
}

fn files(text: &str) -> Vec<String> {
    let names = text.split("/web/").skip(1).filter_map(|rest| rest.split('"').next());
    names.map(|name| format!("/web/{name}")).collect()
}

#[test]
fn browsers_get_the_page_and_others_a_list() {
    let running = Running::server(1);
    let shown = page(&running, &[]);
    assert_eq!((shown.status, shown.header("content-type")), (200, "text/html; charset=utf-8"));
    let listed = running.ask_tcp("GET", "/", &[("Accept", "*/*")]);
    assert!(listed.header("content-type").starts_with("text/plain"), "{listed:?}");
    assert!(listed.body.contains("/metrics ") && listed.body.contains("in a browser"), "{listed:?}");
    let files = files(&shown.body);
    assert!(files.len() >= 3, "{files:?}");
    for (path, kind) in files.iter().map(|path| {
        let kind = match path.rsplit('.').next().unwrap() {
            "js" => "text/javascript; charset=utf-8",
            "css" => "text/css; charset=utf-8",
            "svg" => "image/svg+xml",
            other => panic!("{other}"),
        };
        (path, kind)
    }) {
        let file = running.ask_tcp("GET", path, &[]);
        assert_eq!((file.status, file.header("content-type")), (200, kind), "{path}");
    }
    for path in ["/web/", "/web/none.js", "/web/../main.js", "/web/%2e%2e/main.js"] {
        assert_eq!(running.ask_tcp("GET", path, &[]).problem(404), "no_such_path", "{path}");
    }
}

#[test]
fn page_and_its_files_need_no_token() {
    let running = Running::server(1);
    running.program.settings().admin.loopback = AdminAccess::None;
    let shown = page(&running, &[]);
    assert_eq!(shown.status, 200);
    for path in files(&shown.body) {
        assert_eq!(running.ask_tcp("GET", &path, &[]).status, 200, "{path}");
    }
    for path in ["/v1/status", "/v1/live", "/v1/access", "/v1/refusals", "/v1/config", "/web/none.js"] {
        assert_eq!(running.ask_tcp("GET", path, &[]).problem(401), "no_token", "{path}");
    }
    // Credentials are issued at the same path, which stays protected.
    for (method, path) in [("POST", "/"), ("GET", "/?service=turn&username=alice")] {
        assert_eq!(running.ask_tcp(method, path, &[]).problem(401), "no_token", "{method} {path}");
    }
}

#[test]
fn responses_have_restrictive_browser_headers() {
    let running = Running::server(1);
    let shown = page(&running, &[]);
    let policy = shown.header("content-security-policy");
    for directive in [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ] {
        assert!(policy.split("; ").any(|found| found.trim() == directive), "no {directive} in {policy}");
    }
    assert!(!policy.contains("unsafe") && !policy.contains('*') && !policy.contains("http"), "{policy}");
    for (name, value) in [
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cache-control", "no-store"),
    ] {
        assert_eq!(shown.header(name), value);
    }
    for path in ["/v1/status", "/metrics", "/livez", "/nowhere", "/openapi.json"] {
        let answer = running.get(path);
        let policy = answer.header("content-security-policy");
        assert_eq!(policy, "default-src 'none'; frame-ancestors 'none'", "{path}");
    }
}

#[test]
fn link_on_another_site_opens_only_the_page() {
    let running = Running::server(1);
    let from_elsewhere =
        [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document")];
    assert_eq!(page(&running, &from_elsewhere).status, 200);
    for (site, mode, dest) in [
        ("cross-site", "no-cors", "script"),
        ("cross-site", "navigate", "iframe"),
        ("same-site", "cors", "empty"),
    ] {
        let headers = [("Sec-Fetch-Site", site), ("Sec-Fetch-Mode", mode), ("Sec-Fetch-Dest", dest)];
        assert_eq!(page(&running, &headers).problem(403), "foreign_origin", "{mode} {dest}");
    }
    for path in ["/v1/status", "/metrics", "/web/main.js", "/?service=turn&username=alice"] {
        assert_eq!(running.ask_tcp("GET", path, &from_elsewhere).problem(403), "foreign_origin", "{path}");
    }
    let host = "rebound.example";
    let rebound = running.say_tcp(&request("GET", "/", host, &from_elsewhere, None));
    assert_eq!(rebound.problem(421), "unknown_host");
}
