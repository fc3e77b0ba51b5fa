//! All programs at once through one process with one file.

use crate::prelude::*;
use std::fmt::Write as _;

use super::{dns::Dnsmasq, nginx::Nginx, postgres::Postgres, ssh::Sshd};

#[test]
fn one_process_forwards_all_programs_at_once() {
    let (nginx, sshd, postgres, dnsmasq) =
        (Nginx::start(), Sshd::start(), Postgres::start(), Dnsmasq::start());
    let mut toml = "[forward]\nworkers = 2\nallow = [\"127.*\"]\n".to_owned();
    let mut rule = |name: &str, target: SocketAddr, more: &str| {
        let _ = writeln!(
            toml,
            "[[rule]]\nname = \"{name}\"\nlisten = \"127.0.0.1:0\"\ntarget = \"{target}\"\n{more}"
        );
    };
    if let Ok(nginx) = &nginx {
        rule("web", nginx.http, "idle = 60");
        rule("tls", nginx.https, "copy = \"splice\"");
        rule("behind-proxy", nginx.behind_proxy, "proxy = \"v2\"");
    }
    if let Ok(sshd) = &sshd {
        rule("ssh", sshd.address, "");
    }
    if let Ok(postgres) = &postgres {
        rule("sql", postgres.address, "nodelay = true");
    }
    if let Ok(dnsmasq) = &dnsmasq {
        rule("dns", dnsmasq.address, "protocol = \"udp\"\nidle = 5");
        rule("dns-tcp", dnsmasq.address, "");
    }
    let reasons =
        [nginx.as_ref().err(), sshd.as_ref().err(), postgres.as_ref().err(), dnsmasq.as_ref().err()];
    if reasons.iter().flatten().count() > 2 {
        return skip(
            reasons.iter().flatten().map(|why| why.as_str()).collect::<Vec<_>>().join(", ").as_str(),
        );
    }

    let mut forward = Forward::start_file("forward.toml", &toml);
    let mut at = |rule: &str| forward.address(&format!("rule {rule})"));
    thread::scope(|scope| {
        if let Ok(nginx) = &nginx {
            let [web, tls, proxied] = ["web", "tls", "behind-proxy"].map(&mut at);
            scope.spawn(move || nginx.exercise_http(web));
            scope.spawn(move || nginx.exercise_https(tls));
            scope.spawn(move || (0..20).for_each(|_| nginx.exercise_proxy_header(proxied)));
        }
        if let Ok(sshd) = &sshd {
            let ssh = at("ssh");
            scope.spawn(move || sshd.exercise(ssh));
        }
        if let Ok(postgres) = &postgres {
            let sql = at("sql");
            scope.spawn(move || postgres.exercise(sql, "together"));
        }
        if let Ok(dnsmasq) = &dnsmasq {
            let (udp, tcp) = (at("dns"), at("dns-tcp"));
            scope.spawn(move || dnsmasq.exercise_udp(udp));
            scope.spawn(move || (0..20).for_each(|_| dnsmasq.exercise_tcp(tcp)));
        }
    });
    let refused = forward.metrics().sum("turnpike_forward_ended_total", "reason=\"connect_failed\"");
    assert_eq!(refused, 0);
}
