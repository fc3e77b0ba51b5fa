//! The server under test, which can be killed and restarted on its ports. Its admin interface is a Unix socket, reachable from other
//! namespaces.

use std::{
    ffi::OsStr,
    fs,
    net::{IpAddr, SocketAddr},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use turnpike_testkit::process;

use super::within;
use turnpike_trials::links::Links;
use turnpike_trials::{
    Dir, Metrics, PASSWORD, Program, REALM, SOON, USER, Upgraded, V4, eventually, free_port, get_unix,
    upgradable,
};

#[derive(Clone, Default)]
pub(crate) struct Wanted {
    /// Words before the command line; the process that they start must exec the server.
    pub(crate) entry: Vec<String>,
    pub(crate) environment: Vec<(&'static str, String)>,
    pub(crate) flags: Vec<String>,
    /// Realm, user and peers are in a file instead of flags.
    pub(crate) by_file: bool,
    pub(crate) rule: String,
}

impl Wanted {
    pub(crate) fn flags(flags: &[&str]) -> Self {
        Self { flags: flags.iter().map(|&flag| flag.to_owned()).collect(), ..Self::default() }
    }

    pub(super) fn inside(links: &Links) -> Self {
        Self { entry: [vec!["nsenter".to_owned()], links.nsenter()].concat(), ..Self::default() }
    }

    pub(super) fn with_rule(self, lines: &str) -> Self {
        Self { rule: lines.to_owned(), ..self }
    }
}

pub(crate) struct Server {
    pub(crate) program: Program,
    pub(crate) address: SocketAddr,
    relay: IpAddr,
    wanted: Wanted,
    dir: Dir,
    said: Vec<String>,
    pub(crate) upgraded: Upgraded,
}

/// Resources that must not remain in use for clients that have left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    pub(crate) sessions: u64,
    /// Excludes pipes, which are kept for later bulk connections.
    pub(crate) descriptors: usize,
    /// Bytes.
    pub(crate) memory: u64,
}

impl Kept {
    pub(crate) fn of(pid: u32, sessions: u64) -> Self {
        /// Two workers have at most 256 pipes each, with two ends per pipe.
        const MOST_PIPES: usize = 2 * 2 * 256;
        let all = fs::read_dir(format!("/proc/{pid}/fd")).expect("the process is a running child").flatten();
        let is_pipe = |link: &PathBuf| link.to_string_lossy().starts_with("pipe:");
        let (pipes, others): (Vec<_>, Vec<_>) =
            all.filter_map(|entry| fs::read_link(entry.path()).ok()).partition(is_pipe);
        // Standard streams may be pipes too.
        assert!(pipes.len() <= MOST_PIPES + 3, "{} pipes", pipes.len());
        Self { sessions, descriptors: others.len(), memory: process::memory_of(pid) }
    }
}

impl Server {
    pub(crate) fn start(wanted: Wanted) -> Self {
        Self::on(SocketAddr::new(V4, free_port(V4)), V4, wanted)
    }

    pub(crate) fn on(address: SocketAddr, relay: IpAddr, wanted: Wanted) -> Self {
        let dir = Dir::new();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777))
            .expect("the test's own directory is writable");
        let program = launch(address, relay, &wanted, &dir);
        let upgraded = Upgraded::new(&program);
        let server = Self { program, address, relay, wanted, dir, said: Vec::new(), upgraded };
        server.is_up();
        server
    }

    pub(crate) fn again(&mut self) {
        self.said.append(&mut self.program.lines());
        let _ = fs::remove_file(self.admin());
        self.program = launch(self.address, self.relay, &self.wanted, &self.dir);
        self.upgraded = Upgraded::new(&self.program);
        self.is_up();
    }

    pub(crate) fn kill_and_start(&mut self) {
        self.kill();
        self.again();
    }

    pub(super) fn kill(&mut self) {
        self.program.signal("KILL");
        eventually("the process has exited", || self.program.has_ended());
    }

    pub(crate) fn pid(&self) -> u32 {
        self.upgraded.pid()
    }

    pub(crate) fn signal(&self, name: &str) {
        let script = format!("kill -{name} {}", self.pid());
        let status = Command::new("sh").args(["-c", &script]).status().expect("every Linux has sh");
        assert!(status.success(), "{script}");
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        [self.said.clone(), self.program.lines()].concat()
    }

    pub(crate) fn metrics(&self) -> Metrics {
        eventually("the admin interface answers", || self.metrics_now())
    }

    pub(super) fn metrics_now(&self) -> Option<Metrics> {
        let (status, text) = get_unix(&self.admin(), "/metrics").ok()?;
        (status == 200).then(|| Metrics::new(text))
    }

    pub(crate) fn allocations(&self) -> u64 {
        self.metrics().sum("turnpike_allocations", "")
    }

    pub(crate) fn relayed(&self) -> u64 {
        self.metrics().sum("turnpike_relayed_datagrams_total", "direction=\"to_client\"")
    }

    /// Datagrams relayed in the kernel; the count may be up to a second old.
    pub(super) fn across(&self) -> u64 {
        self.metrics().sum("turnpike_kernel_datagrams_total", "")
    }

    pub(crate) fn kept(&self) -> Kept {
        Kept::of(self.pid(), self.allocations())
    }

    pub(super) fn admin(&self) -> PathBuf {
        self.dir.at("a.sock")
    }

    fn is_up(&self) {
        within(SOON, "/healthz answers 200", || {
            get_unix(&self.admin(), "/healthz").is_ok_and(|(status, _)| status == 200)
        });
    }
}

fn launch(address: SocketAddr, relay: IpAddr, wanted: &Wanted, dir: &Dir) -> Program {
    let (listen, relay, user) = (address.to_string(), relay.to_string(), format!("{USER}:{PASSWORD}"));
    let mut arguments = vec!["serve", "--listen", &listen, "--relay-ip", &relay];
    if !wanted.by_file {
        arguments.extend(["--realm", REALM, "--user", &user]);
        arguments.extend(["--allow-peer", "127.0.0.0/8", "--allow-peer", "10.77.0.0/16"]);
    }
    start(&arguments, wanted, dir.path())
}

pub(crate) fn start(arguments: &[&str], wanted: &Wanted, dir: &Path) -> Program {
    let admin = format!("unix:{}", dir.join("a.sock").display());
    let mut arguments = [arguments, &["--admin", &admin]].concat();
    arguments.extend(wanted.flags.iter().map(String::as_str));
    let turnpike = upgradable(&arguments);
    let words =
        wanted.entry.iter().map(OsStr::new).chain([turnpike.get_program()]).chain(turnpike.get_args());
    let words: Vec<_> = words.collect();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).env_clear().current_dir(dir);
    command.envs(turnpike.get_envs().filter_map(|(name, value)| Some((name, value?))));
    // Allocations of clients that change their address expire after a minute instead of ten.
    if arguments[0] == "serve" {
        command.env("TURNPIKE_LIMITS_DEFAULT_LIFETIME", "60");
    }
    if let Some(path) = std::env::var_os("PATH") {
        command.env("PATH", path);
    }
    command.envs(wanted.environment.iter().map(|(name, value)| (*name, value)));
    Program::start(&mut command)
}
