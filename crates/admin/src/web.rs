//! The page that browsers are shown: its files, which are part of this program. It asks the API as any client does, and gets nothing from
//! elsewhere.

use axum::{
    http::{HeaderMap, HeaderValue, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};

use crate::problem::Problem;

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// Scripts, styles, images and answers of this very server, and nothing else; no script or style that stands in the page itself; no
/// text that becomes a script.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// The file that a browser gets which opens the interface.
const FRONT: &str = include_str!("web/index.html");

/// All others, by their names under `/web/`.
static FILES: [(&str, &str, &str); 12] = [
    ("style.css", CSS, include_str!("web/style.css")),
    ("icon.svg", SVG, include_str!("web/icon.svg")),
    ("main.js", SCRIPT, include_str!("web/main.js")),
    ("api.js", SCRIPT, include_str!("web/api.js")),
    ("dom.js", SCRIPT, include_str!("web/dom.js")),
    ("format.js", SCRIPT, include_str!("web/format.js")),
    ("chart.js", SCRIPT, include_str!("web/chart.js")),
    ("words.js", SCRIPT, include_str!("web/words.js")),
    ("overview.js", SCRIPT, include_str!("web/overview.js")),
    ("sessions.js", SCRIPT, include_str!("web/sessions.js")),
    ("refusals.js", SCRIPT, include_str!("web/refusals.js")),
    ("configuration.js", SCRIPT, include_str!("web/configuration.js")),
];

/// Whether there is such a file.
pub(crate) fn is_file(path: &str) -> bool {
    path.strip_prefix("/web/").is_some_and(|name| find(name).is_some())
}

/// Whether somebody asks who shows pages.
pub(crate) fn is_wanted(headers: &HeaderMap) -> bool {
    let takes = |value: &HeaderValue| value.to_str().is_ok_and(|text| text.contains("text/html"));
    headers.get_all(header::ACCEPT).iter().any(takes)
}

/// The page.
pub(crate) fn front() -> Response {
    shown(HTML, FRONT)
}

/// One of its files.
pub(crate) async fn file(uri: Uri) -> Response {
    let name = uri.path().trim_start_matches("/web/");
    match find(name) {
        Some((kind, text)) => shown(kind, text),
        None => {
            let detail = format!("the page has no file {name:?}");
            Problem::new(StatusCode::NOT_FOUND, "no_such_path", detail).into_response()
        }
    }
}

fn find(wanted: &str) -> Option<(&'static str, &'static str)> {
    FILES.iter().find(|(name, ..)| *name == wanted).map(|(_, kind, text)| (*kind, *text))
}

fn shown(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE.as_str(), kind),
        (header::CONTENT_SECURITY_POLICY.as_str(), POLICY),
        // For browsers that do not know the policy's part of it.
        (header::X_FRAME_OPTIONS.as_str(), "DENY"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
    ];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What stands between quotes behind this in a text.
    fn named<'t>(text: &'t str, before: &str) -> Vec<&'t str> {
        text.split(before).skip(1).filter_map(|rest| rest.split('"').next()).collect()
    }

    #[test]
    fn every_file_that_is_named_is_there_and_every_file_that_is_there_is_named() {
        let mut used: Vec<String> = Vec::new();
        for before in ["src=\"", "href=\""] {
            let links = named(FRONT, before).into_iter().filter(|link| link.starts_with("/web/"));
            used.extend(links.map(str::to_owned));
        }
        for (_, kind, text) in FILES {
            if kind == SCRIPT {
                let imported = named(text, "from \"./").into_iter().chain(named(text, "import \"./"));
                used.extend(imported.map(|name| format!("/web/{name}")));
            }
        }
        for path in &used {
            assert!(is_file(path), "{path} is not there");
        }
        for (name, ..) in FILES {
            assert!(used.iter().any(|path| path == &format!("/web/{name}")), "nobody asks for {name}");
        }
    }

    /// What the policy forbids would not work, and a browser would say so only to who opens its console.
    #[test]
    fn nothing_is_loaded_from_elsewhere_and_nothing_stands_in_the_page_that_the_policy_forbids() {
        for (name, text) in FILES.iter().map(|(name, _, text)| (*name, *text)).chain([("index.html", FRONT)])
        {
            let mut lines = text.lines().filter(|line| line.contains("://"));
            assert!(lines.all(|line| line.contains("http://www.w3.org/")), "{name} names another place");
            for forbidden in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "new Function",
                "style=",
                "onclick=",
                "<style",
                "javascript:",
                "localStorage",
            ] {
                assert!(!text.contains(forbidden), "{forbidden} in {name}");
            }
        }
        assert_eq!(FRONT.matches("<script").count(), 1, "one, and that by its name");
        assert!(FRONT.contains("<script type=\"module\" src=\"/web/main.js\"></script>"));
        assert!(!POLICY.contains("unsafe") && !POLICY.contains('*') && !POLICY.contains("http"));
    }
}
