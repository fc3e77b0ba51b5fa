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
