//! Fuzz targets: arbitrary text as a rule on the command line, and as each file format of `forward`.

use turnpike_convert::forward::Services;
use turnpike_strict::parse_file;
use turnpike_testkit::fuzz;

use super::*;
use crate::sources::fuzz::{are_bounded, of_example};

const EXAMPLE: &str = include_str!("../../../../examples/forward.toml");
const RINETD: &str = include_str!("../../../../examples/rinetd.conf");
const SERVICES: &str = "http 80/tcp www # web\ndomain 53/tcp\ndomain 53/udp\n";

#[test]
fn forward_config() {
    fuzz::target("forward_config", seeds, |bytes| file(bytes, |_| true));
}

#[test]
fn oxidinetd_toml() {
    fuzz::target("oxidinetd_toml", oxidinetd_seeds, |bytes| file(bytes, is_oxidinetd));
}

/// Calls the reader directly, with services that do not depend on the machine.
#[test]
fn rinetd_conf() {
    let machine = ForwardHost { services: Services::parse(SERVICES), ..tests::machine() };
    fuzz::target("rinetd_conf", rinetd_seeds, |bytes| {
        let Ok(text) = str::from_utf8(bytes) else { return };
        let mut problems = Vec::new();
        let conf = rinetd::read(Path::new("r.conf"), text, &machine, &mut problems);
        conf.drafts.iter().for_each(|draft| check::rule(draft, &mut problems));
        check::together(&conf.drafts, &mut problems);
        circles::check(&conf.drafts, &mut problems);
        if !problems.is_empty() {
            return are_bounded(&Mistakes(problems), text);
        }
        assert!(conf.drafts.len() <= text.lines().count());
        // Converts the result to our own format.
        let content = Content::foreign(Path::new("r.conf"), Format::Rinetd, conf);
        let rules = rules(content.drafts, &content.settings);
        shown_means_the_same(ForwardSettings { rules, ..content.settings });
    });
}

#[test]
fn rule_argument() {
    fuzz::target("rule_argument", rule_seeds, |bytes| {
        let Ok(text) = str::from_utf8(bytes) else { return };
        match load(None, &[text]) {
            Err(mistakes) => are_bounded(&mistakes, text),
            Ok(loaded) => shown_means_the_same(loaded.settings),
        }
    });
}

fn file(bytes: &[u8], is_wanted: fn(&[TableEntry]) -> bool) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    // Other files have tests of their own.
    let entries = parse_file(Path::new("f.conf"), text, &mut Vec::new());
    if entries.iter().any(|entry| entry.key == INCLUDE) || !is_wanted(&entries) {
        return;
    }
    match load(Some(text), &[]) {
        Err(mistakes) => are_bounded(&mistakes, text),
        Ok(loaded) => shown_means_the_same(loaded.settings),
    }
}

fn load(file: Option<&str>, arguments: &[&str]) -> Result<ForwardLoaded, Mistakes> {
    let sources = ForwardSources {
        sources: Sources::new(None, Vec::new(), Flags::new()),
        arguments: arguments.iter().map(|&argument| argument.to_owned()).collect(),
    };
    sources.merge(file.map(|text| (Path::new("f.conf"), text)), Vec::new())
}

/// Checks that the result still means the same when written in our own format. Exceptions: a file without
/// rules is invalid, rules may conflict, and only our format rejects patterns that match no address.
fn shown_means_the_same(mut first: ForwardSettings) {
    let shown = first.to_toml();
    let lists = first.rules.iter().map(|rule| &rule.access).chain([&first.access]);
    if lists.flat_map(|access| access.allow.iter().chain(&access.deny)).any(|one| !one.fits_some_address()) {
        return assert!(load(Some(&shown), &[]).is_err(), "{shown}");
    }
    match load(Some(&shown), &[]) {
        Ok(mut again) => {
            assert_eq!(again.format, Some(Format::Turnpike));
            first.origins.clear();
            again.settings.origins.clear();
            assert_eq!(again.settings, first);
        }
        Err(mistakes) => assert!(first.rules.len() != 1, "{mistakes}\n{shown}"),
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = of_example(EXAMPLE);
    let rule = "[[rule]]\nlisten = \"[::1]:9000-9001\"\ntarget = [\"10.0.0.2:9000-9001*3\", \"db.example:1-2\"]\nproxy = \"v2\"\nidle = 60\n";
    seeds.extend([
        rule.into(),
        format!("[forward]\nallow = [\"10.*\"]\n{rule}{rule}").into(),
        "[[rules]]\n".into(),
    ]);
    seeds.into_iter().chain(rinetd_seeds()).chain(oxidinetd_seeds()).collect()
}

fn rinetd_seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![RINETD.as_bytes().to_vec()];
    seeds.extend(
        [
            "0.0.0.0 80 10.0.0.1 8080\nallow 10.*\ndeny 10.0.0.?\n[::1] 53/udp 10.0.0.2 domain/udp [timeout=60, src=127.0.0.1]\n",
            "0 http/tcp 10.0.0.1 www\nlogfile /var/log/r.log\nlogcommon\npidlogfile /run/r.pid\n",
            "localhost 80 \"10.0.0.1\" 80 [keepalive=off] # comment\nALLOW 192.168.0.0/16\n",
            "this is a letter to you\n",
        ]
        .map(|text| text.as_bytes().to_vec()),
    );
    seeds
}

fn oxidinetd_seeds() -> Vec<Vec<u8>> {
    [
        "log_file = \"/var/log/o.log\"\nlog_format = \"common\"\npid_file = \"/run/o.pid\"\n[[forwarding_rules]]\n\
         bind_address = \"0.0.0.0\"\nbind_port = 80\nconnect_address = \"10.0.0.1\"\nconnect_port = 8080\nprotocol = \"tcp\"\n",
        "[[global_rules]]\ntype = \"allow\"\npattern = \"10.*\"\n[[forwarding_rules]]\nbind_address = \"::1\"\nbind_port = 53\n\
         connect_address = \"10.0.0.1\"\nconnect_port = 53\nprotocol = \"udp\"\ntimeout = 60\nsource_address = \"127.0.0.1\"\n\
         [[forwarding_rules.rules]]\ntype = \"deny\"\npattern = \"10.0.0.0/8\"\n",
        "forwarding_rules = [{ bind_address = \"0\", bind_port = 0x50, connect_address = \"h\", connect_port = 99999, unknown = 1 }]\n",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}

fn rule_seeds() -> Vec<Vec<u8>> {
    [
        "tcp://0.0.0.0:9000=10.0.0.2:9001",
        "udp://[::]:53=10.0.0.2:53?idle=60",
        "unix:///run/a.sock=unix:@b",
        "tcptoudp://127.0.0.1:53=10.0.0.2:53",
        "tcp://[::1]:9000-9010=db-1.example.org:9000-9010,[2001:db8::2]:80*3?proxy=v2&copy=splice&idle=60&balance=failover&health=5\
         &source=2001:db8::1&device=eth0&mark=0x10&allow=10.*,192.168.0.0/16&deny=10.0.0.?&keepalive=false&nodelay\
         &proxy_protocol_from=10.0.0.2,unix:&half_close_timeout=30&connect_timeout=3&max_connections=7&name=web",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}
