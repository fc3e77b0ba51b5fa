//! `server.hand_on`: rules that hand connections on to a web server.

use std::{fmt::Display, net::SocketAddr, str::FromStr};

use turnpike_convert::{
    forward::parts::without_zone,
    toml_text::{list, quoted},
};
use turnpike_rules::{HandOnRule, ProxyVersion, Selector};
use turnpike_strict::{Value, ValueNode, find};

use crate::{key::ValueKind, read::ValueReader};

pub(crate) const RULES: ValueKind<Vec<HandOnRule>> = ValueKind::list(
    "a list of { sni = \"*.example.org\", to = \"ADDR:PORT\" }, each with sni, alpn (one or a list) or plain = true, and \
     optionally proxy_protocol = \"v1\" or \"v2\"",
    |reader, node| reader.list(node, rule),
    |rules| list(rules.iter().map(shown)),
);

fn rule(reader: &mut ValueReader<'_>, node: &ValueNode) -> Option<HandOnRule> {
    let entries = reader.table(node, &["sni", "alpn", "plain", "to", "proxy_protocol"])?;
    let names = find(entries, "sni").map(|node| one_or_more(reader, node));
    let protocols = find(entries, "alpn").map(|node| one_or_more(reader, node));
    let plain = find(entries, "plain").map(|node| reader.boolean(node));
    let to = match find(entries, "to") {
        Some(node) => reader.parsed(node, target),
        None => reader.refuse(node, Some("it has no to".to_owned())),
    };
    let proxy_protocol = match find(entries, "proxy_protocol") {
        Some(node) => reader.parsed(node, version).map(Some),
        None => Some(None),
    };
    let has_tls = names.is_some() || protocols.is_some();
    let (names, protocols) = (names.unwrap_or(Some(Vec::new()))?, protocols.unwrap_or(Some(Vec::new()))?);
    let selector = match (plain.unwrap_or(Some(false))?, has_tls) {
        (false, true) => Selector::Tls { names, protocols },
        (true, false) => Selector::Plain,
        (true, true) => {
            let why = "plain = true selects connections without TLS, sni and alpn select those with TLS: write two rules";
            return reader.refuse(node, Some(why.to_owned()));
        }
        (false, false) => {
            return reader.refuse(node, Some("it has neither sni nor alpn nor plain = true".to_owned()));
        }
    };
    Some(HandOnRule { selector, to: to?, proxy_protocol: proxy_protocol? })
}

/// A value, or a list with at least one value.
fn one_or_more<T: FromStr>(reader: &mut ValueReader<'_>, node: &ValueNode) -> Option<Vec<T>>
where
    T::Err: Display,
{
    match &node.value {
        Value::List(values) if values.is_empty() => reader.refuse(node, Some("the list is empty".to_owned())),
        Value::List(_) => reader.list(node, |reader, node| reader.parsed(node, T::from_str)),
        _ => reader.parsed(node, T::from_str).map(|value| vec![value]),
    }
}

fn target(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr = without_zone(text.trim())?
        .parse()
        .map_err(|_| "the web server's address is an IP address and a port, such as 127.0.0.1:8443")?;
    if address.port() == 0 || address.ip().is_unspecified() || address.ip().is_multicast() {
        return Err("no server can have this address".to_owned());
    }
    Ok(address)
}

fn version(text: &str) -> Result<ProxyVersion, &'static str> {
    match text {
        "v1" => Ok(ProxyVersion::V1),
        "v2" => Ok(ProxyVersion::V2),
        _ => Err("the versions of the PROXY protocol are \"v1\" and \"v2\""),
    }
}

fn shown(rule: &HandOnRule) -> String {
    let mut parts = Vec::new();
    match &rule.selector {
        Selector::Plain => parts.push("plain = true".to_owned()),
        Selector::Tls { names, protocols } => {
            let texts = |items: Vec<String>| list(items.iter().map(|item| quoted(item)));
            if !names.is_empty() {
                parts.push(format!("sni = {}", texts(names.iter().map(ToString::to_string).collect())));
            }
            if !protocols.is_empty() {
                parts.push(format!("alpn = {}", texts(protocols.iter().map(ToString::to_string).collect())));
            }
        }
    }
    parts.push(format!("to = {}", quoted(&rule.to.to_string())));
    parts.extend(rule.proxy_protocol.map(|version| {
        format!("proxy_protocol = {}", quoted(if version == ProxyVersion::V1 { "v1" } else { "v2" }))
    }));
    format!("{{ {} }}", parts.join(", "))
}
