//! Reads rinetd.conf, as rinetd 0.73 does (rinetd(8) and its grammar): forwarding rules, allow, deny,
//! logfile, logcommon and pidlogfile.
//!
//! Also accepts extensions of other programs: a `keepalive` option (rinetd after 0.73), prefixes
//! as patterns and ALLOW in capitals (oxidinetd). Everything that rinetd accepts has the same meaning here.
//! `timeout` on a TCP rule has no effect, as in rinetd; here it also produces a warning.

use std::{
    collections::HashMap,
    net::IpAddr,
    path::{Path, PathBuf},
};

use turnpike_rules::{Access, Endpoint, Host, Pattern, PortRange, Protocol, Rule};
use turnpike_strict::{Mistake, Origin, nearest};

use super::{ForeignRules, ForwardHost, LineFormat, LogFile, draft::Draft, parts, services::ServiceProtocol};

const RULE_FORM: &str =
    "bindaddress bindport connectaddress connectport [options], such as 0.0.0.0 80 10.0.0.2 8080";
const PORT_FORM: &str =
    "a port from 1 to 65535 or a service name, optionally followed by /tcp or /udp (default: tcp)";
const ADDRESS_FORM: &str = "an IPv4 or IPv6 address or a host name";
/// Maximum of `rule.idle`.
const LONGEST_IDLE: u32 = 31_536_000;
const OPTIONS_FORM: &str = "[timeout=SECONDS, src=ADDRESS, keepalive=on|off], each at most once";
const DIRECTIVES: [&str; 5] = ["allow", "deny", "logfile", "logcommon", "pidlogfile"];

/// Maximum number of invalid lines that are reported one by one if no line is valid. A file with more of them
/// is not a rinetd.conf.
const FEW: usize = 3;

/// Reads a file. Names are resolved only if all lines are valid: a name server can be slow, and every line of
/// another program's file would have a "name".
pub fn read(path: &Path, text: &str, machine: &ForwardHost, problems: &mut Vec<Mistake>) -> ForeignRules {
    let mut conf = ForeignRules::default();
    let mut log_file = None;
    let mut common = false;
    let mut names = Vec::new();
    let mut wrong = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let mut line = RinetdLine {
            path,
            number: index + 1,
            text: line,
            at: 0,
            services: &machine.services,
            names: &mut names,
        };
        if let Err(problem) = line.read(&mut conf, &mut log_file, &mut common) {
            wrong.push(*problem);
        }
    }
    if wrong.is_empty() {
        resolve(names, machine.resolve, &mut conf.drafts, &mut wrong);
    } else if conf.drafts.is_empty() && wrong.len() > FEW {
        let more = wrong.len() - 1;
        wrong.truncate(1);
        wrong[0].problem += &format!("; {more} more lines are invalid too, and the file has no valid rule");
        wrong[0].expected = format!(
            "a rinetd.conf with lines of the form {RULE_FORM}; or a TOML file in the format of turnpike (examples/forward.toml) or oxidinetd"
        );
    }
    problems.extend(wrong);
    let format = if common { LineFormat::Common } else { LineFormat::Rinetd };
    conf.connection_file = log_file.map(|path| LogFile { path, format });
    conf
}

struct SourceName {
    name: String,
    draft: usize,
    origin: Origin,
}

const LOOKUPS: usize = 32;

/// Resolves names concurrently, because each lookup can take as long as a name server timeout.
fn resolve(
    names: Vec<SourceName>,
    resolve: parts::Resolve,
    drafts: &mut [Draft],
    problems: &mut Vec<Mistake>,
) {
    let mut distinct: Vec<&str> = names.iter().map(|name| name.name.as_str()).collect();
    distinct.sort_unstable();
    distinct.dedup();
    let mut answers: HashMap<&str, std::result::Result<IpAddr, String>> = HashMap::new();
    for some in distinct.chunks(LOOKUPS) {
        std::thread::scope(|scope| {
            let asked: Vec<_> = some
                .iter()
                .copied()
                .map(|name| scope.spawn(move || parts::local_address(name, resolve)))
                .collect();
            for (name, thread) in some.iter().zip(asked) {
                let answer = thread.join().unwrap_or_else(|_| Err("it cannot be looked up".to_owned()));
                answers.insert(name, answer);
            }
        });
    }
    for local in &names {
        match (&answers[local.name.as_str()], drafts.get_mut(local.draft)) {
            (Ok(address), Some(draft)) => set_source(&mut draft.rule, *address),
            (Err(why), _) => {
                let problem = format!("src {}: {why}", local.name);
                problems.push(Mistake::new(&local.origin, "", problem, ADDRESS_FORM));
            }
            (Ok(_), None) => {}
        }
    }
}

/// The unspecified address allows any source address, as in rinetd.
fn set_source(rule: &mut Rule, source: IpAddr) {
    rule.source = (!source.is_unspecified()).then_some(source.into());
}

struct RinetdLine<'a> {
    path: &'a Path,
    number: usize,
    text: &'a str,
    at: usize,
    services: &'a super::Services,
    names: &'a mut Vec<SourceName>,
}

type Result<T> = std::result::Result<T, Box<Mistake>>;

impl RinetdLine<'_> {
    fn read(
        &mut self,
        conf: &mut ForeignRules,
        log_file: &mut Option<PathBuf>,
        common: &mut bool,
    ) -> Result<()> {
        let start = self.skip_blanks();
        if self.at_end() {
            return Ok(());
        }
        let word = self.word("#").to_owned();
        match word.to_ascii_lowercase().as_str() {
            "allow" => self.pattern(conf, "so it allows no client", |access| &mut access.allow)?,
            "deny" => self.pattern(conf, "so it refuses no client", |access| &mut access.deny)?,
            "logfile" => *log_file = Some(self.file_name()?),
            "pidlogfile" => conf.pid_file = Some(self.file_name()?),
            "logcommon" => *common = true,
            _ => {
                if let Some(meant) = self.mistyped(&word) {
                    let expected = format!("{RULE_FORM}, or one of {}", DIRECTIVES.join(", "));
                    let problem = self.problem(start, format!("found {word:?}"), &expected);
                    return Err(suggesting(problem, Some(meant)));
                }
                self.at = start;
                let draft = self.rule(start, conf.drafts.len(), &mut conf.warnings)?;
                conf.drafts.push(draft);
            }
        }
        self.end()
    }

    /// Detects a mistyped directive, as opposed to the address of a rule.
    fn mistyped(&self, word: &str) -> Option<&'static str> {
        let rest = self.text[self.at..].split('#').next().unwrap_or_default();
        if rest.split_whitespace().count() > 1 || word.contains(['.', ':']) {
            return None;
        }
        DIRECTIVES.into_iter().find(|directive| nearest(word, [*directive]).is_some())
    }

    fn rule(&mut self, start: usize, number: usize, warnings: &mut Vec<String>) -> Result<Draft> {
        let mut draft = Draft::new(self.origin(start));

        let at = self.skip_blanks();
        let word = self.address("bindaddress")?;
        let host = parts::host(parts::or_zero(&word))
            .map_err(|why| self.problem(at, format!("bindaddress {word}: {why}"), ADDRESS_FORM))?;
        draft.rule.bind = host.into();
        draft.origins.insert("rule.listen", self.origin(at));

        let at = self.skip_blanks();
        let (port, from) = self.port("bindport")?;
        if port == 0 {
            let why = "bindport 0: the kernel would choose a random port".to_owned();
            return Err(self.problem(at, why, PORT_FORM));
        }
        draft.rule.ports = PortRange { first: port, last: port };

        let at = self.skip_blanks();
        let word = self.address("connectaddress")?;
        let host = parts::host(parts::or_zero(&word))
            .map_err(|why| self.problem(at, format!("connectaddress {word}: {why}"), ADDRESS_FORM))?;
        draft.origins.insert("rule.target", self.origin(at));

        let at = self.skip_blanks();
        let (port, to) = self.port("connectport")?;
        if port == 0 {
            return Err(self.problem(at, "port 0 cannot be a target".to_owned(), PORT_FORM));
        }
        draft.rule.targets = vec![Endpoint { host, ports: PortRange { first: port, last: port }, weight: 1 }];
        draft.rule.protocol = match (from, to) {
            (ServiceProtocol::Tcp, ServiceProtocol::Tcp) => Protocol::Tcp,
            (ServiceProtocol::Udp, ServiceProtocol::Udp) => Protocol::Udp,
            (ServiceProtocol::Udp, ServiceProtocol::Tcp) => Protocol::UdpToTcp { framed: false },
            (ServiceProtocol::Tcp, ServiceProtocol::Udp) => Protocol::TcpToUdp { framed: false },
        };
        self.skip_blanks();
        if self.text[self.at..].starts_with('[') {
            self.options(&mut draft, number, from, warnings)?;
        }
        Ok(draft.with_defaults())
    }

    fn address(&mut self, what: &str) -> Result<String> {
        let at = self.skip_blanks();
        if self.at_end() {
            return Err(self.problem(at, format!("the line ends before {what}"), RULE_FORM));
        }
        // Accepts any word, because an IPv6 address may be in brackets.
        Ok(self.word("#").to_owned())
    }

    fn port(&mut self, what: &str) -> Result<(u16, ServiceProtocol)> {
        let at = self.skip_blanks();
        if self.at_end() {
            return Err(self.problem(at, format!("the line ends before {what}"), RULE_FORM));
        }
        let word = self.word("#[").to_owned();
        let (name, transport) = match word.split_once('/') {
            None => (word.as_str(), Some(ServiceProtocol::Tcp)),
            Some((name, "tcp")) => (name, Some(ServiceProtocol::Tcp)),
            Some((name, "udp")) => (name, Some(ServiceProtocol::Udp)),
            Some((name, _)) => (name, None),
        };
        let Some(transport) = transport else {
            return Err(self.problem(at, format!("{what} {word}: no such protocol"), PORT_FORM));
        };
        if let Some(port) = self.services.port(name, transport) {
            return Ok((port, transport));
        }
        if let Ok(PortRange { first, last }) = parts::port_range(name)
            && first == last
            && !name.contains('-')
        {
            return Ok((first, transport));
        }
        let numeric = name.starts_with(|c: char| c.is_ascii_digit());
        let why = if numeric {
            "not a port".to_owned()
        } else {
            format!("/etc/services has no {} service of this name", transport.name())
        };
        let meant = if numeric { None } else { nearest(name, self.services.names()) };
        let problem = self.problem(at, format!("{what} {word}: {why}"), PORT_FORM);
        Err(suggesting(problem, meant))
    }

    fn options(
        &mut self,
        draft: &mut Draft,
        number: usize,
        from: ServiceProtocol,
        warnings: &mut Vec<String>,
    ) -> Result<()> {
        let start = self.at;
        let Some(len) = self.text[start..].find(']') else {
            return Err(self.problem(start, "the options have no closing ]".to_owned(), OPTIONS_FORM));
        };
        let mut at = start + 1;
        let inside = self.text[at..start + len].to_owned();
        self.at = start + len + 1;
        for option in inside.split(',') {
            let indent = option.len() - option.trim_start().len();
            self.option(option.trim(), at + indent, (draft, number), from, warnings)?;
            at += option.len() + 1;
        }
        Ok(())
    }

    fn option(
        &mut self,
        option: &str,
        at: usize,
        (draft, number): (&mut Draft, usize),
        from: ServiceProtocol,
        warnings: &mut Vec<String>,
    ) -> Result<()> {
        let Some((key, value)) = option.split_once('=').map(|(key, value)| (key.trim(), value.trim())) else {
            return Err(self.problem(at, format!("found the option {option:?}"), OPTIONS_FORM));
        };
        let bad = |why: &str| self.problem(at, format!("{key} {value:?}: {why}"), OPTIONS_FORM);
        let path = match key {
            "timeout" => "rule.idle",
            "src" => "rule.source",
            "keepalive" => "rule.keepalive",
            _ => {
                let problem = self.problem(at, format!("unknown option {key:?}"), OPTIONS_FORM);
                return Err(suggesting(problem, nearest(key, ["timeout", "src", "keepalive"])));
            }
        };
        if draft.has(path) {
            return Err(bad("this option is given twice"));
        }
        match key {
            "timeout" => {
                let digits = value.bytes().all(|byte| byte.is_ascii_digit());
                let seconds: u32 =
                    value.parse().ok().filter(|_| digits).ok_or_else(|| bad("not a number of seconds"))?;
                // 0 keeps the default timeout, as in rinetd.
                if seconds == 0 {
                    return Ok(());
                }
                if seconds > LONGEST_IDLE {
                    return Err(bad(&format!("longer than a year, {LONGEST_IDLE} seconds")));
                }
                if from == ServiceProtocol::Tcp {
                    warnings.push(format!("{}: timeout has no effect on TCP, as in rinetd", self.origin(at)));
                    return Ok(());
                }
                draft.rule.idle = Some(std::time::Duration::from_secs(seconds.into()));
            }
            "src" => {
                let source = parts::host(parts::or_zero(value)).map_err(|why| bad(&why))?;
                match source {
                    Host::Ip(address) => set_source(&mut draft.rule, address),
                    Host::Name(name) => {
                        let origin = self.origin(at);
                        self.names.push(SourceName { name, draft: number, origin });
                    }
                    // Unreachable: `parts::host` never returns a Unix socket here.
                    Host::Unix(_) => {}
                }
            }
            _ => {
                draft.rule.keepalive = match value {
                    "on" | "yes" | "true" | "1" => true,
                    "off" | "no" | "false" | "0" => false,
                    _ => return Err(bad("neither on nor off")),
                };
            }
        }
        draft.origins.insert(path, self.origin(at));
        Ok(())
    }

    /// A pattern before the first rule applies to all rules; any other pattern applies to the rule above it.
    fn pattern(
        &mut self,
        conf: &mut ForeignRules,
        consequence: &str,
        list: fn(&mut Access) -> &mut Vec<Pattern>,
    ) -> Result<()> {
        let at = self.skip_blanks();
        let word = self.word("#").to_owned();
        // A rinetd listener on :: sees IPv4 clients as IPv4-mapped IPv6 addresses.
        let lower_case = word.to_ascii_lowercase();
        let pattern = parts::pattern(parts::without_mapping(&lower_case))
            .map_err(|why| self.problem(at, format!("pattern {word:?}: {why}"), parts::PATTERN_FORM))?;
        if !pattern.fits_some_address() {
            let meant = parts::did_you_mean(parts::meant_pattern(&word));
            let place = self.origin(at);
            conf.warnings.push(format!(
                "{place}: no address matches the pattern {word:?}, {consequence}, as in rinetd{meant}"
            ));
        }
        let access = conf.drafts.last_mut().map_or(&mut conf.access, |draft| &mut draft.rule.access);
        list(access).push(pattern);
        Ok(())
    }

    fn file_name(&mut self) -> Result<PathBuf> {
        let at = self.skip_blanks();
        const EXPECTED: &str = "the path of a file, in double quotes if it contains spaces";
        if let Some(quoted) = self.text[at..].strip_prefix('"') {
            let Some(len) = quoted.find('"').filter(|len| *len > 0) else {
                return Err(self.problem(at, "the quotes are empty or not closed".to_owned(), EXPECTED));
            };
            self.at = at + len + 2;
            return Ok(PathBuf::from(&quoted[..len]));
        }
        // A # within a word is part of it, as in rinetd.
        if self.at_end() {
            return Err(self.problem(at, "the file name is missing".to_owned(), EXPECTED));
        }
        Ok(PathBuf::from(self.word("")))
    }

    fn end(&mut self) -> Result<()> {
        let at = self.skip_blanks();
        if self.at_end() {
            return Ok(());
        }
        let rest = self.text[at..].trim_end().to_owned();
        Err(self.problem(
            at,
            format!("found {rest:?} after the end of the entry"),
            "the end of the line, or a # comment",
        ))
    }

    fn word(&mut self, stops: &str) -> &str {
        let rest = &self.text[self.at..];
        let stop = |c: char| c.is_ascii_whitespace() || stops.contains(c);
        let len = rest.find(stop).unwrap_or(rest.len());
        self.at += len;
        &rest[..len]
    }

    fn skip_blanks(&mut self) -> usize {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_whitespace()).len();
        self.at
    }

    fn at_end(&self) -> bool {
        let rest = &self.text[self.at..];
        rest.is_empty() || rest.starts_with('#')
    }

    fn origin(&self, at: usize) -> Origin {
        Origin::File {
            path: self.path.to_owned(),
            line: self.number,
            column: self.text[..at].chars().count() + 1,
        }
    }

    fn problem(&self, at: usize, problem: String, expected: &str) -> Box<Mistake> {
        Box::new(Mistake::new(&self.origin(at), "", problem, expected))
    }
}

fn suggesting(mut problem: Box<Mistake>, meant: Option<&str>) -> Box<Mistake> {
    problem.suggestion = meant.map(str::to_owned);
    problem
}

#[cfg(test)]
mod tests;
