//! rinetd's log file, for programs that parse it: tab-separated, or in the common format of web servers
//! (`logcommon`).
//!
//! ```text
//! 20/Nov/2026:12:00:00 <tab>client<tab>listen host<tab>port<tab>target host<tab>port<tab>bytes in<tab>bytes out<tab>result
//! client - - [20/Nov/2026:12:00:00 +0100] "GET /rinetd-services/LISTEN/PORT/TARGET/PORT/RESULT HTTP/1.0" 200 out - - - in
//! ```
//!
//! As in rinetd, hosts and ports are those in the configuration; if a rule has several targets, the line
//! shows the one reached. Unlike rinetd's file, this one has no "opened" lines and limits the number of refusals as the
//! log does, but it contains every connection that has ended.

use std::{
    collections::HashMap,
    fmt::Write as _,
    fs::{self, File, OpenOptions},
    io,
    path::Path,
};

use jiff::Zoned;
use turnpike_config::forward::LineFormat;
use turnpike_forward::{Address, Bind, ConnectionReport, EndReason, Rule};

use crate::denial::{AccessDenial, AccessLists};

pub(crate) struct ConnectionFile {
    file: File,
    format: LineFormat,
    rules: HashMap<String, Rule>,
    /// True if the last write failed; further errors are not logged until a write succeeds.
    failed: bool,
    /// True if the last line in the file is incomplete.
    is_cut: bool,
}

impl ConnectionFile {
    /// Opens the file for appending; creates it and its directory if missing.
    pub(crate) fn open(path: &Path, format: LineFormat, rules: &[Rule]) -> io::Result<Self> {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        let rules = rules.iter().map(|rule| (rule.id.0.clone(), rule.clone())).collect();
        Ok(Self { file, format, rules, failed: false, is_cut: false })
    }

    /// Appends one line per report in a single write; `lists` determine the reasons for refusals. Returns the
    /// number of lines that could not be written.
    pub(crate) fn write(&mut self, reports: &[ConnectionReport], lists: &AccessLists) -> u64 {
        let mut text = String::new();
        let now = Zoned::now();
        for report in reports {
            self.line(&mut text, report, lists, &now);
        }
        let (unwritten, error) = append(&mut self.file, text.as_bytes(), &mut self.is_cut);
        if let Some(error) = &error
            && !self.failed
        {
            tracing::warn!("cannot write to the connection log file, so lines are lost: {error}");
        }
        self.failed = error.is_some();
        unwritten
    }

    fn line(&self, text: &mut String, report: &ConnectionReport, lists: &AccessLists, now: &Zoned) {
        let rule = self.rules.get(&report.rule.0);
        let unknown = || ("?".to_owned(), 0);
        let (from_host, from_port) = rule.map_or_else(unknown, |rule| (host_of(rule), rule.ports.first));
        // If there are several targets, the one used is known only from the report.
        let (to_host, to_port) = match (rule.map(|rule| &rule.targets[..]), &report.target) {
            (Some([only]), _) if only.ports.first == only.ports.last => {
                (only.host.to_string().trim_matches(['[', ']']).to_owned(), only.ports.first)
            }
            (_, Some(target)) => (show(target), target.port()),
            (_, None) => unknown(),
        };
        let client = show(&report.client);
        let result = result(report, lists);
        let time = now.strftime("%d/%b/%Y:%H:%M:%S");
        let (bytes_in, bytes_out) = (report.to_target, report.to_client);
        // Writing to a String cannot fail.
        let _ = match self.format {
            LineFormat::Rinetd => writeln!(
                text,
                "{time} \t{client}\t{from_host}\t{from_port}\t{to_host}\t{to_port}\t{bytes_in}\t{bytes_out}\t{result}"
            ),
            LineFormat::Common => writeln!(
                text,
                "{client} - - [{time} {zone}] \"GET /rinetd-services/{from_host}/{from_port}/{to_host}/{to_port}/{result} \
                 HTTP/1.0\" 200 {bytes_out} - - - {bytes_in}",
                zone = now.strftime("%z")
            ),
        };
    }
}

fn append(file: &mut impl io::Write, lines: &[u8], is_cut: &mut bool) -> (u64, Option<io::Error>) {
    let mut error = None;
    if *is_cut && !lines.is_empty() {
        // The rest of that line is lost. End it, so that new lines are not appended to it.
        match file.write_all(b"\n") {
            Ok(()) => *is_cut = false,
            Err(why) => error = Some(why),
        }
    }
    let mut rest = lines;
    while error.is_none() && !rest.is_empty() {
        match file.write(rest) {
            Ok(0) => error = Some(io::ErrorKind::WriteZero.into()),
            Ok(written) => {
                *is_cut = rest[written - 1] != b'\n';
                rest = &rest[written..];
            }
            Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
            Err(why) => error = Some(why),
        }
    }
    let unwritten = rest.iter().filter(|byte| **byte == b'\n').count();
    (u64::try_from(unwritten).unwrap_or(u64::MAX), error)
}

/// rinetd's terms: "local" is the target's side, "remote" the client's. If both sides closed normally, the
/// order is not known; usually the client closed first.
fn result(report: &ConnectionReport, lists: &AccessLists) -> &'static str {
    match report.reason {
        EndReason::TargetReset | EndReason::TargetDown | EndReason::TargetGone => "done-local-closed",
        EndReason::ConnectFailed => "local-connect-failed -",
        EndReason::Denied => match lists.denial(&report.rule.0, report.client.ip()) {
            Some(AccessDenial::NotAllowed) => "not-allowed",
            _ => "denied",
        },
        EndReason::Limit | EndReason::BadProxyHeader | EndReason::UntrustedProxy => "accept-failed -",
        _ => "done-remote-closed",
    }
}

fn host_of(rule: &Rule) -> String {
    match &rule.bind {
        Bind::Ip(ip) => ip.to_string(),
        Bind::Name(name) => name.clone(),
        Bind::Unix(name) => format!("unix:{name}"),
    }
}

fn show(address: &Address) -> String {
    address.ip().map_or_else(|| address.to_string(), |ip| ip.to_canonical().to_string())
}

#[cfg(test)]
mod tests {
    use std::{net::SocketAddr, time::Duration};

    use turnpike_config::forward::ForwardSettings;
    use turnpike_forward::{Access, Pattern, RuleId};

    use super::*;
    use crate::denial::rule;

    const WHEN: &str = "2026-11-20T12:00:00+01:00[+01:00]";

    fn line(format: LineFormat, rule: &str, report: &ConnectionReport) -> String {
        let rule = self::rule(rule);
        let dir = turnpike_testkit::Dir::new();
        let access = Access { allow: vec![Pattern::Wildcard("192.0.2.*".to_owned())], deny: Vec::new() };
        let settings = ForwardSettings { rules: vec![rule], access, ..ForwardSettings::default() };
        let file = ConnectionFile::open(&dir.at("log"), format, &settings.rules).expect("a temporary file");
        let mut text = String::new();
        file.line(&mut text, report, &AccessLists::new(&settings), &WHEN.parse().expect("a time"));
        text
    }

    fn at(text: &str) -> Address {
        text.parse::<SocketAddr>().expect("an address").into()
    }

    fn report(reason: EndReason) -> ConnectionReport {
        ConnectionReport {
            rule: RuleId("web".to_owned()),
            client: at("192.0.2.9:50000"),
            target: Some(at("10.0.0.2:80")),
            to_target: 100,
            to_client: 2000,
            lived: Duration::from_secs(3),
            reason,
        }
    }

    struct Disk {
        room: usize,
        written: Vec<u8>,
    }

    impl io::Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.room);
            if taken == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.room -= taken;
            self.written.extend_from_slice(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_lost_to_a_full_disk_are_counted_and_do_not_corrupt_others() {
        let mut disk = Disk { room: 6, written: Vec::new() };
        let mut is_cut = false;
        let mut append = |disk: &mut Disk, lines: &str| {
            let (unwritten, error) = append(disk, lines.as_bytes(), &mut is_cut);
            (unwritten, error.is_some())
        };
        assert_eq!(append(&mut disk, "one\ntwo\nsix\n"), (2, true));
        assert_eq!(append(&mut disk, "ten\n"), (1, true));
        disk.room = 100;
        assert_eq!(append(&mut disk, "end\n"), (0, false));
        assert_eq!(disk.written, b"one\ntw\nend\n");
    }

    #[test]
    fn tab_separated_lines_match_rinetd() {
        let line =
            line(LineFormat::Rinetd, "tcp://[::]:8080=web.example:80?name=web", &report(EndReason::Finished));
        assert_eq!(
            line,
            "20/Nov/2026:12:00:00 \t192.0.2.9\t::\t8080\tweb.example\t80\t100\t2000\tdone-remote-closed\n"
        );
    }

    #[test]
    fn common_format_lines_match_rinetd() {
        let line = line(
            LineFormat::Common,
            "tcp://0.0.0.0:8080=10.0.0.2:80?name=web",
            &report(EndReason::TargetReset),
        );
        assert_eq!(
            line,
            "192.0.2.9 - - [20/Nov/2026:12:00:00 +0100] \
             \"GET /rinetd-services/0.0.0.0/8080/10.0.0.2/80/done-local-closed HTTP/1.0\" 200 2000 - - - 100\n"
        );
    }

    #[test]
    fn with_several_targets_the_line_contains_the_one_reached() {
        let rule = "tcp://0.0.0.0:8080=a.example:80,b.example:80?name=web";
        let text = line(LineFormat::Rinetd, rule, &report(EndReason::Finished));
        assert!(text.contains("\t10.0.0.2\t80\t"), "{text}");
    }

    #[test]
    fn refusal_lines_distinguish_deny_from_not_allowed() {
        let rule = "tcp://0.0.0.0:8080=10.0.0.2:80?name=web&deny=192.0.2.9";
        let mut refused = ConnectionReport { target: None, ..report(EndReason::Denied) };
        assert!(line(LineFormat::Rinetd, rule, &refused).ends_with("\tdenied\n"));
        refused.client = at("198.51.100.1:5");
        assert!(line(LineFormat::Rinetd, rule, &refused).ends_with("\tnot-allowed\n"));
    }
}
