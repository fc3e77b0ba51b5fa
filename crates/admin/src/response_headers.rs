//! Headers of every response.

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};

/// Name of the Deprecation header (RFC 9745).
pub(crate) const DEPRECATION: HeaderName = HeaderName::from_static("deprecation");

pub(crate) fn set_security_headers(headers: &mut HeaderMap) {
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    // A response that a browser opens as a page must be inert. The actual web page has its own policy.
    let nothing = HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'");
    headers.entry(header::CONTENT_SECURITY_POLICY).or_insert(nothing);
}
