//! Embedded files of the web page. The page uses the API and loads nothing from elsewhere.

use axum::{
    http::{HeaderMap, HeaderValue, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};

use crate::problem::Problem;

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// Allows only files of this server, no inline scripts or styles, and no text used as a script.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// Page shown to browsers that open the interface.
const FRONT: &str = include_str!("web/index.html");

/// All other files, by their names under `/web/`.
static FILES: [(&str, &str, &str); 13] = [
    ("style.css", CSS, include_str!("web/style.css")),
    ("icon.svg", SVG, include_str!("web/icon.svg")),
    ("main.js", SCRIPT, include_str!("web/main.js")),
    ("api.js", SCRIPT, include_str!("web/api.js")),
    ("dom.js", SCRIPT, include_str!("web/dom.js")),
    ("format.js", SCRIPT, include_str!("web/format.js")),
    ("chart.js", SCRIPT, include_str!("web/chart.js")),
    ("words.js", SCRIPT, include_str!("web/words.js")),
    ("overview.js", SCRIPT, include_str!("web/overview.js")),
    ("allocations.js", SCRIPT, include_str!("web/allocations.js")),
    ("refusals.js", SCRIPT, include_str!("web/refusals.js")),
    ("usage.js", SCRIPT, include_str!("web/usage.js")),
    ("configuration.js", SCRIPT, include_str!("web/configuration.js")),
];

pub(crate) fn is_file(path: &str) -> bool {
    path.strip_prefix("/web/").is_some_and(|name| find(name).is_some())
}

/// Returns true for clients that accept HTML.
pub(crate) fn is_wanted(headers: &HeaderMap) -> bool {
    let takes = |value: &HeaderValue| value.to_str().is_ok_and(|text| text.contains("text/html"));
    headers.get_all(header::ACCEPT).iter().any(takes)
}

pub(crate) fn front() -> Response {
    shown(HTML, FRONT)
}

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
        // For browsers that do not support the equivalent directive in the policy.
        (header::X_FRAME_OPTIONS.as_str(), "DENY"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
    ];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named<'t>(text: &'t str, before: &str) -> Vec<&'t str> {
        text.split(before).skip(1).filter_map(|rest| rest.split('"').next()).collect()
    }

    #[test]
    fn page_files_match_their_references() {
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
            assert!(is_file(path), "{path} does not exist");
        }
        for (name, ..) in FILES {
            assert!(used.iter().any(|path| path == &format!("/web/{name}")), "{name} is not used");
        }
    }

    /// Violations of the policy would only be visible in a browser's console.
    #[test]
    fn page_complies_with_its_content_security_policy() {
        for (name, text) in FILES.iter().map(|(name, _, text)| (*name, *text)).chain([("index.html", FRONT)])
        {
            let mut lines = text.lines().filter(|line| line.contains("://"));
            assert!(lines.all(|line| line.contains("http://www.w3.org/")), "{name} refers to another server");
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
        assert_eq!(FRONT.matches("<script").count(), 1, "one script, loaded from a file");
        assert!(FRONT.contains("<script type=\"module\" src=\"/web/main.js\"></script>"));
        assert!(!POLICY.contains("unsafe") && !POLICY.contains('*') && !POLICY.contains("http"));
    }
}
