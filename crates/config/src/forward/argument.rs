//! Rules on the command line: `tcp://LISTEN=TARGET[,TARGET...][?KEY=VALUE[&KEY=VALUE...]]`. `unix:///PATH=`
//! is short for `tcp://unix:/PATH=`.

use turnpike_strict::{TableEntry, Value, ValueNode, nearest};

use turnpike_convert::forward::draft::Draft;
use turnpike_rules::Protocol;

use super::rule_keys::{BOTH, read_rules};
use crate::{Mistake, Origin};

const FORM: &str = "SCHEME://LISTEN=TARGET[,TARGET...][?KEY=VALUE&...] with the scheme tcp, udp, tcp+udp, udptotcp, tcptoudp or unix, such \
                    as tcp://0.0.0.0:9000=10.0.0.2:9001";

pub(crate) fn read(text: &str, problems: &mut Vec<Mistake>) -> Vec<Draft> {
    let argument = Argument(text);
    let Some((scheme, rest)) = text.split_once("://") else {
        if text.starts_with(['/', '.']) || text.ends_with(".conf") || text.ends_with(".toml") {
            let meant = format!("-c {text}");
            return argument.refuse(0, "this looks like a file, not a rule", Some(&meant), problems);
        }
        return argument.refuse(0, "it has no \"://\"", None, problems);
    };
    let unix = scheme == "unix";
    let protocol = if unix { "tcp" } else { scheme };
    if Protocol::from_name(protocol).is_none() && protocol != BOTH {
        let meant = match scheme {
            "udp+tcp" | "tcpudp" | "both" => Some(BOTH),
            _ => nearest(scheme, ["tcp", "udp", BOTH, "udptotcp", "tcptoudp", "unix"]),
        };
        return argument.refuse(0, &format!("found the scheme {scheme:?}"), meant, problems);
    }
    let listen_at = scheme.len() + 3;
    let (rule, options) = match rest.split_once('?') {
        Some((rule, options)) => (rule, Some(options)),
        None => (rest, None),
    };
    let Some((listen, targets)) = rule.split_once('=') else {
        return argument.refuse(listen_at, "it has no \"=\" between listener and target", None, problems);
    };
    let target_at = listen_at + listen.len() + 1;

    let mut entries = vec![
        argument.entry("protocol", 0, protocol, 0),
        argument.entry(
            "listen",
            listen_at,
            &if unix { format!("unix:{listen}") } else { listen.to_owned() },
            listen_at,
        ),
        argument.targets(targets, target_at),
    ];
    let mut at = target_at + targets.len() + 1;
    for option in options.into_iter().flat_map(|options| options.split('&')) {
        if option.is_empty() {
            return argument.refuse(at, "it has an option without a name", None, problems);
        }
        let (key, value) = option.split_once('=').unwrap_or((option, "true"));
        entries.push(argument.entry(key, at, value, (at + key.len() + 1).min(text.len())));
        at += option.len() + 1;
    }
    read_rules(&entries, &argument.origin(0), problems)
}

struct Argument<'a>(&'a str);

impl Argument<'_> {
    fn origin(&self, offset: usize) -> Origin {
        let column = self.0.get(..offset).map_or(0, |before| before.chars().count()) + 1;
        Origin::Argument { text: self.0.to_owned(), column }
    }

    fn entry(&self, key: &str, key_at: usize, value: &str, value_at: usize) -> TableEntry {
        TableEntry { key: key.to_owned(), origin: self.origin(key_at), node: self.text(value, value_at) }
    }

    fn text(&self, value: &str, at: usize) -> ValueNode {
        ValueNode { value: Value::text(value), origin: self.origin(at) }
    }

    fn targets(&self, targets: &str, at: usize) -> TableEntry {
        let mut offset = at;
        let mut nodes = Vec::new();
        for target in targets.split(',') {
            nodes.push(self.text(target, offset));
            offset += target.len() + 1;
        }
        let node = ValueNode { value: Value::List(nodes), origin: self.origin(at) };
        TableEntry { key: "target".to_owned(), origin: self.origin(at), node }
    }

    fn refuse(
        &self,
        offset: usize,
        problem: &str,
        meant: Option<&str>,
        problems: &mut Vec<Mistake>,
    ) -> Vec<Draft> {
        problems.push(Mistake::new(&self.origin(offset), "", problem, FORM).suggesting(meant));
        Vec::new()
    }
}
