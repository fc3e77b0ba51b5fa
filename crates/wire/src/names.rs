/// REALM must be shorter than 128 characters (RFC 8489 section 14.9); characters that need quoting are not
/// allowed.
#[must_use]
pub fn is_realm(name: &str) -> bool {
    (1..=127).contains(&name.chars().count())
        && !name.contains(|c: char| c.is_control() || c == '"' || c == '\\')
}

/// USERNAME must be shorter than 509 bytes (RFC 8489 section 14.3); a colon would make the long-term key
/// ambiguous.
#[must_use]
pub fn is_username(name: &str) -> bool {
    (1..=508).contains(&name.len()) && !name.contains(|c: char| c.is_control() || c == ':')
}

/// Normalizes a host name as in SNI (RFC 6066 section 3): lower case; no address, trailing dot or wildcard.
pub fn server_name(text: &str) -> Result<String, &'static str> {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    if text.len() > 253 || !text.split('.').all(label) {
        return Err("not a host name");
    }
    if text.parse::<std::net::IpAddr>().is_ok() {
        return Err("SNI cannot contain an IP address (RFC 6066)");
    }
    Ok(text.to_ascii_lowercase())
}
