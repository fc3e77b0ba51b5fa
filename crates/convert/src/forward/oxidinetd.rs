//! Reads the TOML file of oxidinetd: `[[forwarding_rules]]`, `[[global_rules]]`, `log_file`, `log_format`,
//! `pid_file`.
//!
//! oxidinetd ignores unknown keys, so they are only warnings here: a file that works with oxidinetd must
//! work here too.

use std::path::PathBuf;

use turnpike_rules::{Access, Endpoint, PortRange, Protocol};
use turnpike_strict::{Mistake, Origin, TableEntry, Value, ValueNode, find, nearest};

use super::{ForeignRules, ForwardHost, LineFormat, LogFile, draft::Draft, parts};

pub const TOP: [&str; 5] = ["global_rules", "forwarding_rules", "log_file", "pid_file", "log_format"];
const RULE: [&str; 8] = [
    "bind_address",
    "bind_port",
    "connect_address",
    "connect_port",
    "protocol",
    "timeout",
    "source_address",
    "rules",
];
const ACCESS: [&str; 2] = ["type", "pattern"];

const PORT_FORM: &str = "a port, 1 to 65535";
const PATH_FORM: &str = "the path of a file";

pub fn read(entries: &[TableEntry], machine: &ForwardHost, problems: &mut Vec<Mistake>) -> ForeignRules {
    let mut file = ForeignRules::default();
    let mut reader = OxidinetdReader { problems, warnings: Vec::new(), resolve: machine.resolve };
    reader.warn_unknown("", entries, &TOP);
    if let Some(node) = find(entries, "global_rules") {
        file.access = reader.access("global_rules", node);
    }
    for (table, origin) in find(entries, "forwarding_rules")
        .map_or_else(Vec::new, |node| reader.tables("forwarding_rules", node))
    {
        if let Some(draft) = reader.rule(table, origin) {
            file.drafts.push(draft);
        }
    }
    let path = |reader: &mut OxidinetdReader<'_>, key: &str| {
        let node = find(entries, key)?;
        reader.text(key, node, PATH_FORM).map(PathBuf::from)
    };
    file.pid_file = path(&mut reader, "pid_file");
    let log_file = path(&mut reader, "log_file");
    let format = match find(entries, "log_format") {
        None => LineFormat::Rinetd,
        Some(node) => reader.log_format(node),
    };
    file.connection_file = log_file.map(|path| LogFile { path, format });
    file.warnings = reader.warnings;
    file
}

struct OxidinetdReader<'a> {
    problems: &'a mut Vec<Mistake>,
    warnings: Vec<String>,
    resolve: parts::Resolve,
}

impl OxidinetdReader<'_> {
    fn rule(&mut self, table: &[TableEntry], origin: &Origin) -> Option<Draft> {
        self.warn_unknown("forwarding_rules.", table, &RULE);
        let before = self.problems.len();
        let mut draft = Draft::new(origin.clone());

        if let Some((text, node)) = self.needed_text(table, origin, "bind_address") {
            draft.origins.insert("rule.listen", node.origin.clone());
            match parts::host(&text) {
                Ok(host) => draft.rule.bind = host.into(),
                Err(why) => self.refuse_because("bind_address", node, &why, "an address of this machine"),
            }
        }
        if let Some(port) = self.port(table, origin, "bind_port", 0) {
            draft.rule.ports = port;
        }
        let host = self.needed_text(table, origin, "connect_address").and_then(|(text, node)| {
            draft.origins.insert("rule.target", node.origin.clone());
            match parts::host(&text) {
                Ok(host) => Some(host),
                Err(why) => {
                    self.refuse_because("connect_address", node, &why, "an address or a host name");
                    None
                }
            }
        });
        let ports = self.port(table, origin, "connect_port", 1);
        if let (Some(host), Some(ports)) = (host, ports) {
            draft.rule.targets = vec![Endpoint { host, ports, weight: 1 }];
        }
        if let Some(node) = find(table, "protocol") {
            const FORM: &str = "\"tcp\", \"udp\", \"udptotcp\" or \"tcptoudp\"";
            if let Some(text) = self.text("protocol", node, FORM) {
                match Protocol::from_name(&text) {
                    Some(protocol) => draft.rule.protocol = protocol,
                    None => self.refuse("protocol", node, FORM),
                }
            }
        }
        if let Some(node) = find(table, "source_address")
            && let Some(text) = self.text("source_address", node, "an address of this machine")
        {
            draft.origins.insert("rule.source", node.origin.clone());
            match parts::local_address(&text, self.resolve) {
                Ok(address) => draft.rule.source = (!address.is_unspecified()).then_some(address.into()),
                Err(why) => self.refuse_because("source_address", node, &why, "an address of this machine"),
            }
        }
        if let Some(node) = find(table, "rules") {
            draft.rule.access = self.access("forwarding_rules.rules", node);
        }
        if let Some(node) = find(table, "timeout") {
            self.timeout(node, &mut draft);
        }
        (self.problems.len() == before).then(|| draft.with_defaults())
    }

    /// Only UDP listeners have a timeout in oxidinetd.
    fn timeout(&mut self, node: &ValueNode, draft: &mut Draft) {
        let seconds = match node.value {
            Value::Integer(seconds) => {
                u64::try_from(seconds).ok().filter(|seconds| (1..=31_536_000).contains(seconds))
            }
            _ => None,
        };
        let Some(seconds) = seconds else {
            return self.refuse("timeout", node, "seconds, 1 to 31536000");
        };
        if matches!(draft.rule.protocol, Protocol::Udp | Protocol::UdpToTcp { .. }) {
            draft.rule.idle = Some(std::time::Duration::from_secs(seconds));
            draft.origins.insert("rule.idle", node.origin.clone());
        } else {
            self.warnings.push(format!("{}: timeout has no effect on TCP, as in oxidinetd", node.origin));
        }
    }

    fn access(&mut self, key: &str, node: &ValueNode) -> Access {
        let mut access = Access::default();
        for (table, origin) in self.tables(key, node) {
            self.warn_unknown(&format!("{key}."), table, &ACCESS);
            let kind = self.needed_text(table, origin, "type");
            let pattern = self.needed_text(table, origin, "pattern");
            let (Some((kind, kind_node)), Some((pattern, pattern_node))) = (kind, pattern) else { continue };
            let (list, consequence) = match kind.as_str() {
                "allow" => (&mut access.allow, "so it allows no client"),
                "deny" => (&mut access.deny, "so it refuses no client"),
                _ => {
                    self.refuse("type", kind_node, "\"allow\" or \"deny\"");
                    continue;
                }
            };
            match parts::pattern(&pattern) {
                Ok(read) => {
                    if !read.fits_some_address() {
                        let meant = parts::did_you_mean(parts::meant_pattern(&pattern));
                        let place = &pattern_node.origin;
                        self.warnings.push(format!(
                            "{place}: no address matches the pattern {pattern:?}, {consequence}, as in oxidinetd{meant}"
                        ));
                    }
                    list.push(read);
                }
                Err(why) => self.refuse_because("pattern", pattern_node, &why, parts::PATTERN_FORM),
            }
        }
        access
    }

    fn log_format(&mut self, node: &ValueNode) -> LineFormat {
        const FORM: &str = "\"rinetd\" or \"common\"";
        match self.text("log_format", node, FORM).as_deref() {
            Some("common") => LineFormat::Common,
            Some("rinetd") | None => LineFormat::Rinetd,
            Some(_) => {
                self.refuse("log_format", node, FORM);
                LineFormat::Rinetd
            }
        }
    }

    fn tables<'n>(&mut self, key: &str, node: &'n ValueNode) -> Vec<(&'n [TableEntry], &'n Origin)> {
        let Value::List(items) = &node.value else {
            self.refuse(key, node, &format!("an array of tables, [[{key}]]"));
            return Vec::new();
        };
        let mut tables = Vec::new();
        for item in items {
            match &item.value {
                Value::Table(entries) => tables.push((entries.as_slice(), &item.origin)),
                _ => self.refuse(key, item, &format!("a table, [[{key}]]")),
            }
        }
        tables
    }

    fn needed_text<'n>(
        &mut self,
        table: &'n [TableEntry],
        origin: &Origin,
        key: &str,
    ) -> Option<(String, &'n ValueNode)> {
        let node = self.needed(table, origin, key)?;
        Some((self.text(key, node, "a string")?, node))
    }

    fn port(&mut self, table: &[TableEntry], origin: &Origin, key: &str, least: u16) -> Option<PortRange> {
        let node = self.needed(table, origin, key)?;
        let port = match node.value {
            Value::Integer(port) => u16::try_from(port).ok().filter(|port| *port >= least),
            _ => None,
        };
        if port.is_none() {
            self.refuse(key, node, PORT_FORM);
        }
        port.map(|port| PortRange { first: port, last: port })
    }

    fn needed<'n>(&mut self, table: &'n [TableEntry], origin: &Origin, key: &str) -> Option<&'n ValueNode> {
        let found = find(table, key);
        if found.is_none() {
            self.push(origin, key, "it is missing".to_owned(), "a value");
        }
        found
    }

    fn text(&mut self, key: &str, node: &ValueNode, expected: &str) -> Option<String> {
        match &node.value {
            Value::Text(text) => Some(text.to_string()),
            _ => {
                self.refuse(key, node, expected);
                None
            }
        }
    }

    fn refuse(&mut self, key: &str, node: &ValueNode, expected: &str) {
        self.push(&node.origin, key, format!("found {}", node), expected);
    }

    fn refuse_because(&mut self, key: &str, node: &ValueNode, why: &str, expected: &str) {
        self.push(&node.origin, key, format!("found {}: {why}", node), expected);
    }

    fn push(&mut self, origin: &Origin, key: &str, problem: String, expected: &str) {
        self.problems.push(Mistake::new(origin, key, problem, expected));
    }

    fn warn_unknown(&mut self, section: &str, entries: &[TableEntry], known: &[&str]) {
        for entry in entries.iter().filter(|entry| !known.contains(&entry.key.as_str())) {
            let meant = parts::did_you_mean(nearest(&entry.key, known.iter().copied()));
            self.warnings.push(format!(
                "{}: {section}{}: unknown key, ignored as in oxidinetd{meant}",
                entry.origin, entry.key
            ));
        }
    }
}

#[cfg(test)]
mod tests;
