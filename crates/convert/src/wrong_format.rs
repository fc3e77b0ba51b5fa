//! Recognizes files of other programs or commands, to report one error instead of one per line.

use std::{net::IpAddr, path::Path};

use turnpike_strict::{Mistake, Origin, TableEntry};

use crate::coturn::options::is_option;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormatReader {
    Serve,
    Forward,
    Coturn,
}

/// Returns an error if the text is a file of another program that `reader` does not accept.
pub fn of_another_program(path: &Path, text: &str, reader: FormatReader) -> Option<Mistake> {
    let found = lines(text).find_map(|line| recognise(&line, text)).or_else(|| yaml(text))?;
    let expected = expected(found.format, reader, path)?;
    let name = match found.format {
        ForeignFormat::Coturn => "coturn's turnserver.conf",
        ForeignFormat::Eturnal => "eturnal.yml",
        ForeignFormat::Haproxy => "haproxy.cfg",
        ForeignFormat::Nginx => "nginx.conf",
        ForeignFormat::Rinetd => "rinetd.conf",
        ForeignFormat::Yaml => "YAML",
    };
    let origin = Origin::File { path: path.to_owned(), line: found.line, column: found.column };
    Some(Mistake::new(&origin, "", format!("this looks like {name}"), expected))
}

/// Description of the file that this reader expects; `None` if it accepts this one.
fn expected(format: ForeignFormat, reader: FormatReader, path: &Path) -> Option<String> {
    let path = path.display();
    Some(match (format, reader) {
        (ForeignFormat::Coturn, FormatReader::Coturn) | (ForeignFormat::Rinetd, FormatReader::Forward) => return None,
        (_, FormatReader::Coturn) => "a turnserver.conf for coturn".to_owned(),
        (ForeignFormat::Coturn, FormatReader::Serve) => {
            format!("turnpike's TOML; to translate it: turnpike import coturn {path} -o turnpike.toml")
        }
        (ForeignFormat::Coturn, FormatReader::Forward) => {
            "rules to forward ports; a TURN server is `turnpike serve`, with a file like examples/turnpike.toml".to_owned()
        }
        (ForeignFormat::Eturnal, FormatReader::Serve) => {
            "turnpike's TOML (examples/turnpike.toml); eturnal's secret becomes auth.secrets, relay_min_port and relay_max_port become \
             relay.ports, and relay_ipv4_addr becomes relay.addresses"
                .to_owned()
        }
        (ForeignFormat::Eturnal, FormatReader::Forward) => {
            "rules to forward ports; a TURN server is `turnpike serve`, with a file like examples/turnpike.toml".to_owned()
        }
        (ForeignFormat::Yaml, FormatReader::Forward) => "TOML (examples/forward.toml) or a rinetd.conf".to_owned(),
        (ForeignFormat::Haproxy | ForeignFormat::Nginx | ForeignFormat::Yaml, FormatReader::Serve) => {
            "turnpike's TOML (examples/turnpike.toml)".to_owned()
        }
        (ForeignFormat::Haproxy, FormatReader::Forward) => {
            "rules: a listen, or a frontend with its backend, becomes tcp://ADDR:PORT=TARGET[,TARGET...] on the command line, or a [[rule]] \
             (examples/forward.toml)"
                .to_owned()
        }
        (ForeignFormat::Nginx, FormatReader::Forward) => {
            "rules: a server block in stream with its upstream becomes tcp://ADDR:PORT=TARGET[,TARGET...] or udp://... on the command \
             line, or a [[rule]] (examples/forward.toml)"
                .to_owned()
        }
        (ForeignFormat::Rinetd, FormatReader::Serve) => {
            format!("turnpike's TOML (examples/turnpike.toml); for this file: turnpike forward -c {path}")
        }
    })
}

/// Returns an error for sections that only the other command has.
pub fn of_the_other_command(
    path: &Path,
    entries: &[TableEntry],
    (ours, theirs): (&[&str], &[&str]),
    reader: FormatReader,
) -> Option<Mistake> {
    let is_of = |sections: &[&str], entry: &&TableEntry| sections.contains(&entry.key.as_str());
    if entries.iter().any(|entry| is_of(ours, &entry)) {
        return None;
    }
    let entry = entries.iter().find(|entry| is_of(theirs, entry))?;
    let (theirs, ours) = match reader {
        FormatReader::Forward => ("serve", "forward"),
        FormatReader::Serve | FormatReader::Coturn => ("forward", "serve"),
    };
    Some(Mistake::new(
        &entry.origin,
        "",
        format!("this is a file for turnpike {theirs}, because it contains {:?}", entry.key),
        format!("a file for turnpike {ours}; for this one: turnpike {theirs} -c {}", path.display()),
    ))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ForeignFormat {
    Coturn,
    Eturnal,
    Haproxy,
    Nginx,
    Rinetd,
    Yaml,
}

struct FormatMatch {
    format: ForeignFormat,
    line: usize,
    column: usize,
}

struct NumberedLine<'a> {
    number: usize,
    column: usize,
    text: &'a str,
}

fn lines(text: &str) -> impl Iterator<Item = NumberedLine<'_>> {
    let says = |line: &NumberedLine<'_>| !line.text.is_empty() && !line.text.starts_with('#');
    let lines = (1..).zip(text.lines()).map(|(number, text)| NumberedLine {
        number,
        column: text.len() - text.trim_start().len() + 1,
        text: text.trim(),
    });
    lines.filter(says)
}

/// Recognizes YAML by its first line: `---`, or a name followed by a colon.
fn yaml(text: &str) -> Option<FormatMatch> {
    let line = lines(text).next()?;
    let (name, rest) = line.text.split_once(':').unwrap_or_default();
    let is_name =
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'));
    let is_yaml = line.text == "---" || is_name && (rest.is_empty() || rest.starts_with([' ', '\t']));
    is_yaml.then_some(FormatMatch { format: ForeignFormat::Yaml, line: line.number, column: line.column })
}

/// Recognizes a format by one unambiguous line; `text` is the whole file, for a second check.
fn recognise(line: &NumberedLine<'_>, text: &str) -> Option<FormatMatch> {
    let found = |format| Some(FormatMatch { format, line: line.number, column: line.column });
    let words: Vec<&str> = line.text.split('#').next().unwrap_or_default().split_whitespace().collect();
    let first = *words.first()?;
    if is_coturn(line.text) {
        return found(ForeignFormat::Coturn);
    }
    if first == "eturnal:" {
        return found(ForeignFormat::Eturnal);
    }
    // A HAProxy section begins with a keyword, possibly followed by a name; a rinetd rule has four
    // words.
    if HAPROXY.contains(&first) && words.len() < 4 && !line.text.contains(['=', ';', '{']) {
        return found(ForeignFormat::Haproxy);
    }
    let ends = line.text.split('#').next().unwrap_or_default().trim_end();
    if ends.ends_with([';', '{']) && has_word(NGINX, first) && text.contains(['{', ';']) {
        return found(ForeignFormat::Nginx);
    }
    is_rinetd(&words).then(|| found(ForeignFormat::Rinetd)).flatten()
}

const HAPROXY: [&str; 9] =
    ["global", "defaults", "frontend", "backend", "listen", "resolvers", "peers", "userlist", "mailers"];

const NGINX: &str = "user worker_processes worker_rlimit_nofile error_log pid include load_module daemon events http \
    stream upstream server map log_format limit_conn_zone";

fn has_word(words: &str, wanted: &str) -> bool {
    words.split(' ').any(|word| word == wanted)
}

/// Recognizes options that only coturn has, as `name` or as `name=value` without quotes.
fn is_coturn(line: &str) -> bool {
    let (name, value) = match line.split_once('=') {
        Some((name, value)) => (name.trim(), Some(value.trim())),
        None => (line, None),
    };
    if value.is_some_and(|value| value.starts_with(['"', '\'', '[', '{'])) {
        return false;
    }
    let is_its_own = name.contains('-') || ["fingerprint", "oauth"].contains(&name);
    is_option(name) && (is_its_own || value.is_some() && COTURN_WITH_VALUE.contains(&name))
}

/// Option names that other programs use too.
const COTURN_WITH_VALUE: [&str; 6] = ["realm", "user", "userdb", "cert", "pkey", "pidfile"];

/// Recognizes a rule or a pattern by parts that cannot be names or words in a sentence.
fn is_rinetd(words: &[&str]) -> bool {
    let is_address = |text: &str| text == "0" || text.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
    let is_port = |text: &str| text.split('/').next().is_some_and(|port| port.parse::<u16>().is_ok());
    match words {
        [bind, port, _, target, ..] => is_address(bind) && (is_port(port) || is_port(target)),
        ["allow" | "deny", pattern] => pattern.contains(['.', ':', '*']),
        ["logfile" | "pidlogfile", _] | ["logcommon"] => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(text: &str, reader: FormatReader) -> Option<String> {
        of_another_program(Path::new("f"), text, reader).map(|error| error.to_string())
    }

    #[test]
    fn files_of_other_programs_are_recognized_with_their_line() {
        for (text, beginning) in [
            ("# c\nglobal\n    daemon\n", "f:2:1: this looks like haproxy.cfg; expected "),
            ("frontend web\n  bind :80\n", "f:1:1: this looks like haproxy.cfg; "),
            ("listen web 0.0.0.0:80\n", "f:1:1: this looks like haproxy.cfg; "),
            ("user www-data;\n", "f:1:1: this looks like nginx.conf; "),
            ("\n  stream {\n server { listen 1; }\n}\n", "f:2:3: this looks like nginx.conf; "),
            ("upstream a { # c\n", "f:1:1: this looks like nginx.conf; "),
            ("listening-port=3478\n", "f:1:1: this looks like coturn's turnserver.conf; "),
            ("# c\nfingerprint\n", "f:2:1: this looks like coturn's turnserver.conf; "),
            ("user=alice:secret\n", "f:1:1: this looks like coturn's turnserver.conf; "),
            ("verbose\nrealm = example.org\n", "f:2:1: this looks like coturn's turnserver.conf; "),
            ("# eturnal\neturnal:\n  secret: \"x\"\n", "f:2:1: this looks like eturnal.yml; "),
            ("---\neturnal:\n  secret: \"x\"\n", "f:2:1: this looks like eturnal.yml; "),
            ("server:\n  realm: example.org\n", "f:1:1: this looks like YAML; expected "),
            ("---\nrules: []\n", "f:1:1: this looks like YAML; expected "),
        ] {
            for reader in [FormatReader::Serve, FormatReader::Forward] {
                let found = told(text, reader).unwrap_or_default();
                assert!(found.starts_with(beginning), "{text}: {found}");
            }
        }
    }

    #[test]
    fn import_accepts_only_coturn_files() {
        assert_eq!(told("realm=example.org\nuse-auth-secret\n", FormatReader::Coturn), None);
        for text in ["eturnal:\n  secret: x\n", "stream {\n", "0.0.0.0 80 10.0.0.1 80\n"] {
            let found = told(text, FormatReader::Coturn).unwrap_or_default();
            assert!(found.ends_with("expected a turnserver.conf for coturn"), "{found}");
        }
    }

    #[test]
    fn turnserver_conf_is_recognized_by_any_option() {
        for text in [
            "use-auth-secret\n",
            "denied-peer-ip=10.0.0.0-10.255.255.255\n",
            "user-quota=12\n",
            "stale-nonce=600\n",
        ] {
            let found = told(text, FormatReader::Serve).unwrap_or_default();
            assert!(found.contains("turnpike import coturn"), "{text}: {found}");
        }
    }

    #[test]
    fn rinetd_conf_is_rejected_only_by_serve() {
        for text in ["0.0.0.0 80 10.0.0.1 80\n", "allow 10.*\n", "logcommon\n", "[::1] 53/udp a domain/udp"] {
            assert!(
                told(text, FormatReader::Serve).is_some_and(|told| told.contains("turnpike forward -c f")),
                "{text}"
            );
            assert_eq!(told(text, FormatReader::Forward), None, "{text}");
        }
    }

    #[test]
    fn turnpikes_own_and_supported_files_are_accepted() {
        for text in [
            include_str!("../../../examples/turnpike.toml"),
            include_str!("../../../examples/forward.toml"),
            "realm = \"x\"\nuser = [\"a\"]\n",
            "[[forwarding_rules]]\nbind_address = \"0.0.0.0\"\n",
            "a sentence of four words\n",
            "listen",
        ] {
            let found = told(text, FormatReader::Forward);
            assert!(found.is_none() || text == "listen", "{found:?}");
        }
        assert_eq!(told(include_str!("../../../examples/rinetd.conf"), FormatReader::Forward), None);
    }
}
