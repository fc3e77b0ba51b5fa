//! A forwarder under test and its target, which checks every byte of the clients' streams and every datagram.

use std::{
    fs,
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    os::unix::fs::PermissionsExt as _,
    time::Duration,
};

use serde_json::Value;

use super::{
    Row, Wanted, as_before, or_thorough,
    row::complaints,
    server::{Kept, start},
    talks::{self, Talks, Target},
    within,
};
use turnpike_trials::{Dir, Metrics, Program, SOON, Upgraded, V4, eventually, free_port, get_unix};

pub(super) struct Forwarder {
    pub(super) program: Program,
    pub(super) tcp: SocketAddr,
    pub(super) udp: SocketAddr,
    target: Option<Target>,
    host: Option<String>,
    wanted: Wanted,
    dir: Dir,
    said: Vec<String>,
    pub(super) upgraded: Upgraded,
}

impl Forwarder {
    pub(super) fn local(wanted: Wanted) -> Self {
        Self::between(V4, Target::on(V4), wanted)
    }

    /// A forwarder whose target is a host name, on the target's own ports, so that the name may resolve to the forwarder itself. Requires a
    /// namespace, where the ports are free.
    pub(super) fn to_name(wanted: Wanted, target: Target, name: &str) -> Self {
        Self::new(V4, target, Some(name), wanted)
    }

    pub(super) fn between(listen: IpAddr, target: Target, wanted: Wanted) -> Self {
        Self::new(listen, target, None, wanted)
    }

    fn new(listen: IpAddr, target: Target, host: Option<&str>, wanted: Wanted) -> Self {
        let dir = Dir::new();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777))
            .expect("the test's own directory is writable");
        let ports = match host {
            Some(_) => [target.tcp.port(), target.udp.port()],
            None if listen == V4 => [free_port(V4), free_port(V4)],
            // Every port of a new namespace is free.
            None => [9000, 9001],
        };
        let [tcp, udp] = ports.map(|port| SocketAddr::new(listen, port));
        let host = host.map(str::to_owned);
        dir.file("f.toml", rules(tcp, udp, &target, host.as_deref(), &wanted.rule, 0));
        let program = launch(&wanted, &dir);
        let upgraded = Upgraded::new(&program);
        let target = Some(target);
        let forwarder = Self { program, tcp, udp, target, host, wanted, dir, said: Vec::new(), upgraded };
        forwarder.is_up();
        forwarder
    }

    pub(super) fn kill_and_start(&mut self) {
        self.kill();
        self.again();
    }

    pub(super) fn kill(&mut self) {
        self.program.signal("KILL");
        eventually("the process has exited", || self.program.has_ended());
    }

    pub(super) fn again(&mut self) {
        self.said.append(&mut self.program.lines());
        let _ = fs::remove_file(self.dir.at("a.sock"));
        self.program = launch(&self.wanted, &self.dir);
        self.upgraded = Upgraded::new(&self.program);
        self.is_up();
    }

    /// Reloads a rules file with a change that does not affect clients.
    pub(super) fn reload(&self, turn: u32) {
        let target = self.target.as_ref().expect("the target is running");
        let text = rules(self.tcp, self.udp, target, self.host.as_deref(), &self.wanted.rule, turn);
        self.dir.file("next.toml", text);
        fs::rename(self.dir.at("next.toml"), self.dir.at("f.toml")).expect("both files are in one directory");
        self.program.signal("HUP");
    }

    /// Returns true if the listener and target of the unused rule show that the rules of that turn are in use.
    pub(super) fn has_rules_of(&self, turn: u32) -> bool {
        let (listener, target) = other(self.tcp, turn);
        let leads_there = format!("rule=\"other\",target=\"{target}\"");
        let is_taken = TcpListener::bind(listener).is_err_and(|error| error.kind() == ErrorKind::AddrInUse);
        is_taken && self.metrics().text().contains(&leads_there)
    }

    /// Number of connections that reached the target, and number of those that sent data.
    pub(super) fn visits(&self) -> [u64; 2] {
        self.target.as_ref().expect("the target is running").visits()
    }

    pub(super) fn lose_target(&mut self) {
        self.target = None;
    }

    pub(super) fn lead_to(&mut self, target: Target) {
        self.target = Some(target);
        self.reload(1);
    }

    pub(super) fn metrics(&self) -> Metrics {
        eventually("the admin interface answers", || match get_unix(&self.dir.at("a.sock"), "/metrics") {
            Ok((200, text)) => Some(Metrics::new(text)),
            _ => None,
        })
    }

    pub(super) fn lines(&self) -> Vec<String> {
        [self.said.clone(), self.program.lines()].concat()
    }

    pub(super) fn pid(&self) -> u32 {
        self.upgraded.pid()
    }

    pub(super) fn kept(&self) -> Kept {
        Kept::of(self.pid(), self.metrics().sum("turnpike_forward_connections", ""))
    }

    fn is_up(&self) {
        within(SOON, "/healthz answers 200", || {
            get_unix(&self.dir.at("a.sock"), "/healthz").is_ok_and(|(status, _)| status == 200)
        });
    }

    pub(super) fn clients() -> u64 {
        or_thorough(4, 20)
    }

    /// Runs `fault` with active clients and returns their results; afterwards all resources must be as before.
    pub(super) fn row(self, row: Row, fault: impl FnOnce(&mut Self, &mut Row)) -> Value {
        let udp = self.udp;
        self.row_by(udp, row, fault)
    }

    /// Like `row`, but UDP clients use this address.
    pub(super) fn row_by(
        mut self,
        udp: SocketAddr,
        mut row: Row,
        fault: impl FnOnce(&mut Self, &mut Row),
    ) -> Value {
        let clients = Self::clients();
        Talks::begin(self.tcp, udp, clients).end();
        let rest = Duration::from_secs(20);
        within(rest, "the test run has ended", || self.kept().sessions == 0);
        let before = self.kept();

        let talks = Talks::begin(self.tcp, udp, clients);
        let said = self.lines().len();
        fault(&mut self, &mut row);
        talks.flow();
        let seen = talks.end();
        talks::whole(self.tcp, udp);
        as_before(|| self.kept(), before, rest);
        row.note(format!(
            "{} stream bytes correct; {} of {} connections cut",
            seen["stream_bytes"], seen["cut"], seen["connections"]
        ));
        let log = complaints(&self.lines()[said..]);
        row.tell(&seen, &log, (before, self.kept()), clients);
        seen
    }
}

fn launch(wanted: &Wanted, dir: &Dir) -> Program {
    start(&["forward", "-c", "f.toml"], wanted, dir.path())
}

/// Rules with short UDP timeouts, which tests wait for; the unused rule differs each time.
fn rules(
    tcp: SocketAddr,
    udp: SocketAddr,
    target: &Target,
    host: Option<&str>,
    more: &str,
    turn: u32,
) -> String {
    let named = |address: SocketAddr| match host {
        Some(host) => format!("{host}:{}", address.port()),
        None => address.to_string(),
    };
    let (unused, nowhere) = other(tcp, turn);
    format!(
        "[forward]\nworkers = 2\nresolve_every = 1\n\
         [[rule]]\nname = \"t\"\nlisten = \"{tcp}\"\ntarget = \"{}\"\n{more}\
         [[rule]]\nname = \"u\"\nprotocol = \"udp\"\nlisten = \"{udp}\"\ntarget = \"{}\"\nidle = 3\n\
         [[rule]]\nname = \"other\"\nlisten = \"{unused}\"\ntarget = \"{nowhere}\"\n",
        named(target.tcp),
        named(target.udp),
    )
}

/// Listener and target of the unused rule, different each time.
fn other(tcp: SocketAddr, turn: u32) -> (SocketAddr, SocketAddr) {
    // A loopback address derived from the port, so that no other test uses it.
    let [high, low] = tcp.port().to_be_bytes();
    let ip = if tcp.ip().is_loopback() { Ipv4Addr::new(127, 9, high, low).into() } else { tcp.ip() };
    let port = u16::try_from(9_100 + turn % 50).expect("a small number");
    let last = u8::try_from(turn % 250).expect("a small number");
    (SocketAddr::new(ip, port), (Ipv4Addr::new(192, 0, 2, last), 80).into())
}
