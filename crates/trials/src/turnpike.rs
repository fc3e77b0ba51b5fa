//! The binary's commands, as used in tests.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use turnpike_testkit::process;

use super::{Certificate, Dir, Finished, Metrics, Namespace, Newcomers, Program, eventually, has_ipv6, http};

pub const USER: &str = "alice";
pub const PASSWORD: &str = "secret";
pub const REALM: &str = "example.org";

/// Command that runs the binary without environment variables that would configure it.
pub fn turnpike(arguments: &[&str]) -> Command {
    let program = std::env::var_os("TURNPIKE_TEST_PROGRAM").map_or_else(built_program, PathBuf::from);
    let mut command = Command::new(program);
    command.args(arguments).env_clear().env("RUST_BACKTRACE", "1");
    // Environment variables that run all tests with a different data path or copy mode.
    for (asked, variables) in [
        ("TURNPIKE_TEST_DATAPATH", &["TURNPIKE_SERVER_DATAPATH", "TURNPIKE_FORWARD_DATAPATH"][..]),
        ("TURNPIKE_TEST_COPY", &["TURNPIKE_FORWARD_COPY"][..]),
    ] {
        if let Some(value) = std::env::var_os(asked) {
            command.envs(variables.iter().map(|variable| (variable, &value)));
        }
    }
    command
}

fn built_program() -> PathBuf {
    let program = build_directory().join("turnpike");
    assert!(program.is_file(), "{} is missing: cargo build --bin turnpike creates it", program.display());
    program
}

fn build_directory() -> PathBuf {
    let test = std::env::current_exe().expect("this program has a path");
    // Test programs are in the subdirectory `deps` of the build directory.
    test.ancestors().nth(2).expect("test programs are below the target directory").to_owned()
}

pub(crate) fn target() -> PathBuf {
    build_directory().parent().expect("the build directory is inside the target directory").to_owned()
}

/// Directory for the upgrade sockets of test processes; it contains no admin sockets.
pub fn run_directory() -> PathBuf {
    target().join("tmp/run")
}

/// Command with `run_directory` set, for programs that upgrade or request an upgrade.
pub fn upgradable(arguments: &[&str]) -> Command {
    let mut command = turnpike(arguments);
    command.env("RUNTIME_DIRECTORY", run_directory());
    command
}

pub struct Serve {
    pub program: Program,
    v4: SocketAddr,
    v6: Option<SocketAddr>,
    admin: SocketAddr,
    _newcomers: Option<Newcomers>,
    _dir: Dir,
}

/// Environment variable with the number of unrelated new clients per second that connect to each server under test.
const NEWCOMERS: &str = "TURNPIKE_TEST_NEWCOMERS";

impl Serve {
    pub fn load(&self, reflect: &Reflect) -> Load {
        Load::new(self.address(super::V4)).to(reflect.address)
    }

    /// Starts a server on loopback (both families if available) with [`USER`] and loopback peers allowed; it relays on loopback unless
    /// `more` contains a relay address.
    pub fn start(more: &[&str]) -> Self {
        Self::start_in_environment(more, &[])
    }

    /// Like `start`, with environment variables.
    pub fn start_in_environment(more: &[&str], variables: &[(&str, &Path)]) -> Self {
        let user = format!("{USER}:{PASSWORD}");
        let mut arguments = vec!["--realm", REALM, "--user", &user];
        arguments.extend(["--allow-peer", "127.0.0.0/8", "--allow-peer", "::1"]);
        if !more.contains(&"--relay-ip") {
            arguments.extend(["--relay-ip", "127.0.0.1"]);
            if has_ipv6() {
                arguments.extend(["--relay-ip", "::1"]);
            }
        }
        arguments.extend(more);
        Self::start_bare_in(&arguments, variables)
    }

    /// Like `start`, with UDP, TCP, TLS and DTLS on one port.
    pub fn start_secured(certificate: &Certificate, more: &[&str]) -> Self {
        let mut arguments = certificate.flags().to_vec();
        arguments.extend(["--dtls-listen", "127.0.0.1:0"]);
        if has_ipv6() {
            arguments.extend(["--dtls-listen", "[::1]:0"]);
        }
        arguments.extend(more);
        Self::start(&arguments)
    }

    /// Starts a server with nothing configured but its listeners and the admin interface, on free ports.
    pub fn start_bare(more: &[&str]) -> Self {
        Self::start_bare_in(more, &[])
    }

    fn start_bare_in(more: &[&str], variables: &[(&str, &Path)]) -> Self {
        let mut arguments = vec!["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"];
        if has_ipv6() {
            arguments.extend(["--listen", "[::1]:0"]);
        }
        arguments.extend(more);
        let dir = Dir::new();
        let mut program =
            Program::start(upgradable(&arguments).current_dir(dir.path()).envs(variables.iter().copied()));
        let admin = address_after(&program.line_with(" on http://"), " on http://");
        let v4 = address_after(&program.line_with("listening on udp 127.0.0.1:"), "listening on udp ");
        let v6 = has_ipv6()
            .then(|| address_after(&program.line_with("listening on udp [::1]:"), "listening on udp "));
        let mut serve = Self { program, v4, v6, admin, _newcomers: None, _dir: dir };
        eventually("/healthz answers 200", || serve.health() == Some(200));
        serve._newcomers = std::env::var(NEWCOMERS)
            .ok()
            .map(|rate| Newcomers::arrive(v4, rate.parse().expect("new clients per second"), 1));
        serve
    }

    pub fn address(&self, family: IpAddr) -> SocketAddr {
        if family.is_ipv4() { self.v4 } else { self.v6.expect("IPv6 is available") }
    }

    pub fn address_of(&self, transport: &str, ip: IpAddr) -> SocketAddr {
        // A TCP listener also accepts TLS, and its log line is the one for TCP.
        let shown = if transport == "tls" { "tcp" } else { transport };
        let label = format!("listening on {shown} ");
        // The listeners are logged before the admin interface, and `start` has waited for the latter's line.
        let lines = self.program.lines();
        let found = lines.iter().filter(|line| line.contains(&label)).map(|line| address_after(line, &label));
        found
            .into_iter()
            .find(|address| address.ip() == ip)
            .unwrap_or_else(|| panic!("there is no line with {label}{ip}"))
    }

    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// Status of `/healthz`, or `None` if the admin interface is unreachable.
    pub fn health(&self) -> Option<u16> {
        http::get(self.admin, "/healthz").ok().map(|(status, _)| status)
    }

    pub fn metrics(&self) -> Metrics {
        let (status, text) = http::get(self.admin, "/metrics").expect("the admin interface answers");
        assert_eq!(status, 200);
        Metrics::new(text)
    }

    pub fn allocations(&self) -> u64 {
        self.metrics().sum("turnpike_allocations", "")
    }

    pub fn wait_for_allocations(&self, wanted: u64) {
        eventually(&format!("{wanted} allocations"), || self.allocations() == wanted);
    }

    pub fn memory(&self) -> u64 {
        process::memory_of(self.program.pid())
    }
}

pub struct Reflect {
    pub address: SocketAddr,
    pub program: Program,
}

impl Reflect {
    pub fn start(family: IpAddr, more: &[&str]) -> Self {
        let listen = SocketAddr::new(family, 0).to_string();
        let mut arguments = vec!["reflect", "--listen", &listen];
        arguments.extend(more);
        Self::of(Program::start(&mut turnpike(&arguments)))
    }

    pub fn start_in(namespace: &Namespace, listen: SocketAddr) -> Self {
        let listen = listen.to_string();
        Self::of(Program::start(&mut namespace.command(&turnpike(&["reflect", "--listen", &listen]))))
    }

    fn of(mut program: Program) -> Self {
        let address = address_after(&program.line_with(" on udp "), " on udp ");
        Self { address, program }
    }
}

pub struct Load(Vec<String>);

impl Load {
    pub fn new(server: SocketAddr) -> Self {
        Self::as_user(server, &format!("{USER}:{PASSWORD}"))
    }

    pub fn at(server: &str) -> Self {
        Self::at_as(server, &format!("{USER}:{PASSWORD}"))
    }

    pub fn as_user(server: SocketAddr, user: &str) -> Self {
        Self::at_as(&server.to_string(), user)
    }

    pub fn at_as(server: &str, user: &str) -> Self {
        Self(["load", "turn", server, "--user", user, "--json", "-"].map(str::to_owned).to_vec())
    }

    pub fn to(self, peer: SocketAddr) -> Self {
        self.with(&format!("--peer {peer}"))
    }

    pub fn with(self, more: &str) -> Self {
        self.with_words(&super::words(more))
    }

    pub fn with_words(mut self, more: &[&str]) -> Self {
        self.0.extend(more.iter().map(|&argument| argument.to_owned()));
        self
    }

    pub fn start(&self) -> Program {
        Program::start(&mut self.command())
    }

    pub fn start_in(&self, namespace: &Namespace) -> Program {
        Program::start(&mut namespace.command(&self.command()))
    }

    fn command(&self) -> Command {
        let arguments: Vec<&str> = self.0.iter().map(String::as_str).collect();
        turnpike(&arguments)
    }

    pub fn run(&self) -> Finished {
        self.start().wait(super::SOON * 2)
    }
}

impl Finished {
    pub fn result(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| {
            panic!("no JSON result ({error}), exit {:?}:\n{}", self.code, self.output())
        })
    }
}

pub fn address_after(line: &str, label: &str) -> SocketAddr {
    let (_, rest) = line.split_once(label).expect("the line was found by its label");
    let end = rest.find(|c: char| !c.is_ascii_hexdigit() && !"[]:.".contains(c)).unwrap_or(rest.len());
    let text = rest[..end].trim_end_matches('.');
    text.parse().unwrap_or_else(|error| panic!("{text:?} in {line:?}: {error}"))
}
