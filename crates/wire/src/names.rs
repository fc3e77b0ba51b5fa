//! Names that a server accepts.

/// REALM has less than 128 characters (RFC 8489 section 14.9); what would have to be quoted is left out.
#[must_use]
pub fn is_realm(name: &str) -> bool {
    (1..=127).contains(&name.chars().count())
        && !name.contains(|c: char| c.is_control() || c == '"' || c == '\\')
}

/// USERNAME is less than 509 bytes (RFC 8489 section 14.3); a colon would make the long-term key ambiguous.
#[must_use]
pub fn is_username(name: &str) -> bool {
    (1..=508).contains(&name.len()) && !name.contains(|c: char| c.is_control() || c == ':')
}

/// A host name as clients send it in SNI (RFC 6066 section 3): no address, no final dot, no wildcard; case does not count.
///
/// # Errors
/// The reason why it is none.
pub fn server_name(text: &str) -> Result<String, &'static str> {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    if text.len() > 253 || !text.split('.').all(label) {
        return Err("not a host name");
    }
    if text.parse::<std::net::IpAddr>().is_ok() {
        return Err("clients send no addresses in SNI (RFC 6066)");
    }
    Ok(text.to_ascii_lowercase())
}
