//! One piece of `cargo xtask soak`: clients over all transports send data, and others come and go, while the server is reloaded and
//! upgraded. After each slice all clients leave, the two ends' counters are compared, and the server's resources are recorded.

use std::{
    fs::{self, File},
    io::Write as _,
    net::SocketAddr,
    path::PathBuf,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde::Deserialize;
use serde_json::{Value, json};

use super::faults::{Group, Server, Wanted, cpu_ms};
use turnpike_trials::links::{Links, PEER, RELAY, SERVER, on_links};
use turnpike_trials::{Certificate, Load, PASSWORD, Program, Reflect, SOON, USER, ends, eventually, skip};

const TEST: &str = "soak::soak_piece";
const SECONDS: u64 = 10;
const TRANSPORTS: [&str; 4] = ["udp", "tcp", "tls", "dtls"];
/// Traffic in bursts, and as single datagrams, which the kernel path relays.
const TALKERS: [(&str, &str, [&str; 6]); 5] = [
    ("bursts over UDP", "udp", BURSTS),
    ("bursts over TCP", "tcp", BURSTS),
    ("bursts over TLS", "tls", BURSTS),
    ("bursts over DTLS", "dtls", BURSTS),
    ("single datagrams over UDP", "udp", ["--clients", "32", "--burst", "1", "--window", "1"]),
];
const BURSTS: [&str; 6] = ["--clients", "8", "--burst", "8", "--window", "16"];

#[derive(Deserialize)]
struct Piece {
    datapath: String,
    /// The piece ends after the first slice that finishes after this time.
    seconds: u64,
    allocations: u64,
    datagrams: u64,
    /// File to which one line per slice is added.
    file: PathBuf,
}

#[test]
#[ignore = "takes hours: cargo xtask soak"]
fn soak_piece() {
    let Some(asked) = std::env::var_os("TURNPIKE_TEST_SOAK") else {
        return skip("cargo xtask soak sets TURNPIKE_TEST_SOAK");
    };
    let piece: Piece = serde_json::from_str(asked.to_str().expect("UTF-8")).expect("xtask writes JSON");
    on_links(TEST, |links| {
        if piece.datapath == "xdp" {
            links.behave_as_cards();
        }
        Soak::begin(links, &piece.datapath).go(&piece);
    });
}

struct Soak<'l> {
    links: &'l Links,
    server: Server,
    control: Server,
    /// Dropped after the server.
    group: Option<Group>,
    certificate: Certificate,
    reflect: Reflect,
    configuration: PathBuf,
    datapath: String,
}

#[derive(Clone, Copy, Default)]
struct Totals {
    allocations: u64,
    datagrams: u64,
}

impl<'l> Soak<'l> {
    fn begin(links: &'l Links, datapath: &str) -> Self {
        let certificate = Certificate::of_authority(&["turn.soak.test"]);
        let reflect = Reflect::start(PEER[0], &["--workers", "1"]);
        let configuration = certificate.authority().with_file_name("turnpike.toml");
        fs::write(&configuration, settings(0)).expect("the test's own directory is writable");
        let address = SERVER[0].to_string();
        let mut flags = certificate.flags().to_vec();
        let (tls, dtls) = (format!("{address}:5349"), format!("{address}:5349"));
        let file = configuration.display().to_string();
        flags.extend([
            "--tls-listen",
            &tls,
            "--dtls-listen",
            &dtls,
            "--workers",
            "2",
            "--datapath",
            datapath,
            "-c",
            &file,
        ]);
        let mut wanted = Wanted::flags(&flags);
        wanted.entry = [vec!["nsenter".to_owned()], links.nsenter()].concat();
        let server = Server::on(SocketAddr::new(SERVER[0], 3478), RELAY[0], wanted);
        // Without a cgroup, sockets are the only measure of kernel memory.
        let group = Group::of_process(server.pid()).ok();
        let mut wanted = Wanted::flags(&["--workers", "2", "--datapath", "basic"]);
        wanted.entry = [vec!["nsenter".to_owned()], links.nsenter()].concat();
        let control = Server::on(SocketAddr::new(SERVER[0], 4478), RELAY[0], wanted);
        let datapath = datapath.to_owned();
        Self { links, server, control, group, certificate, reflect, configuration, datapath }
    }

    fn go(mut self, piece: &Piece) {
        let mut file = File::options()
            .create(true)
            .append(true)
            .open(&piece.file)
            .expect("xtask has created the directory");
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is after 1970");
        let (life, begin) = (since_1970.as_secs(), Instant::now());
        let mut all = Totals::default();
        for slice in 0.. {
            let share =
                begin.elapsed().as_secs_f64() / (Duration::from_secs(piece.seconds.max(1))).as_secs_f64();
            // An upgrade starts with fresh memory, so the server is upgraded only in the last fifth of the time.
            let upgrade = slice > 0 && share > 0.8;
            let line = self.slice(&mut all, upgrade);
            let (seconds, kept) = (begin.elapsed().as_secs(), self.server.kept());
            let line = merge(
                line,
                json!({
                    "datapath": self.datapath, "life": life, "slice": slice, "upgraded": upgrade, "seconds": seconds,
                    "life_allocations": all.allocations, "memory": kept.memory, "descriptors": kept.descriptors,
                    "control": self.control.kept().memory,
                }),
            );
            println!("{line}");
            writeln!(file, "{line}").expect("the disk has space");
            let over = seconds >= piece.seconds
                || all.allocations >= piece.allocations && all.datagrams >= piece.datagrams;
            if over {
                return;
            }
        }
    }

    fn slice(&mut self, all: &mut Totals, upgrade: bool) -> Value {
        let (before, across) = (Counted::of(&self.server), self.across());
        let talkers: Vec<Program> =
            TALKERS.iter().map(|(_, transport, how)| self.talk(transport, how)).collect();
        let comers: Vec<Program> = TRANSPORTS.iter().map(|transport| self.come_and_go(transport)).collect();
        let mut old = None;
        for turn in 0..SECONDS / 2 {
            thread::sleep(Duration::from_secs(2));
            fs::write(&self.configuration, settings(turn)).expect("the test's own directory is writable");
            if upgrade && turn == 2 {
                old = Some(self.server.upgraded.upgrade());
            } else if turn < SECONDS / 2 - 1 {
                self.server.signal("HUP");
            }
        }
        let finished = |programs: Vec<Program>| -> Vec<Value> {
            let ended = programs.into_iter().map(|program| program.wait(SOON * 2));
            ended
                .map(|run| {
                    assert_eq!(run.code, Some(0), "{}", run.output());
                    run.result()
                })
                .collect()
        };
        let (talked, came) = (finished(talkers), finished(comers));
        if let Some(old) = old {
            ends(old);
        }
        eventually("all sessions have ended", || self.server.allocations() == 0);
        let sum = |results: &[Value], name: &str| -> u64 {
            results
                .iter()
                .map(|result| {
                    result[name].as_u64().unwrap_or_else(|| panic!("{name} is missing from {result}"))
                })
                .sum()
        };
        let (sent, received, lost) = (sum(&talked, "sent"), sum(&talked, "received"), sum(&talked, "lost"));
        let granted = sum(&came, "received") + sum(&talked, "clients");
        // Kernel counters are up to a second old.
        let told = || Counted::of(&self.server).since(before);
        if lost == 0 {
            eventually("both ends agree exactly", || {
                told() == Counted { to_peer: sent, to_client: received, opened: granted }
            });
        }
        let counted = told();
        assert!(
            counted.to_peer <= sent && counted.to_client <= counted.to_peer && received <= counted.to_client,
            "{counted:?}, {sent}, {received}"
        );
        assert_eq!(counted.opened, granted, "allocations");
        all.allocations += granted;
        all.datagrams += sent + received;
        let spent = cpu_ms(self.server.pid());
        thread::sleep(Duration::from_secs(1));
        let sockets = self.links.inside_says(&["cat", "/proc/net/sockstat"]);
        let figure = |kind: &str, name: &str| {
            let words = sockets.lines().find_map(|line| line.strip_prefix(kind));
            let mut words = words.unwrap_or_default().split_whitespace().skip_while(|word| *word != name);
            words.nth(1).and_then(|word| word.parse::<u64>().ok())
        };
        json!({
            "allocations": granted, "datagrams": sent + received, "lost": lost,
            "across": self.across() - across,
            "idle_ms": cpu_ms(self.server.pid()) - spent,
            "flows": self.server.metrics().maybe("turnpike_kernel_flows").unwrap_or_default(),
            "sockets": figure("sockets:", "used"), "tcp_pages": figure("TCP:", "mem"), "udp_pages": figure("UDP:", "mem"),
            "slack_pages": slack_pages(),
            "kernel_memory": self.group.as_ref().and_then(Group::kernel),
        })
    }

    fn across(&self) -> u64 {
        self.server.metrics().maybe("turnpike_kernel_datagrams_total").unwrap_or_default()
    }

    /// Sends datagrams to the reflector and back as fast as the window allows.
    fn talk(&self, transport: &str, how: &[&str]) -> Program {
        self.load(transport)
            .to(self.reflect.address)
            .with("--rate max --size 200 --threads 1")
            .with_words(how)
            .start()
    }

    fn come_and_go(&self, transport: &str) -> Program {
        let clients = if transport == "dtls" { "4" } else { "8" };
        self.load(transport)
            .with(&format!("--mode allocate --clients {clients} --rate max --threads 1"))
            .start()
    }

    fn load(&self, transport: &str) -> Load {
        let port = if matches!(transport, "udp" | "tcp") { 3478 } else { 5349 };
        let authority = self.certificate.authority().display().to_string();
        let load = Load::as_user(SocketAddr::new(SERVER[0], port), &format!("{USER}:{PASSWORD}"))
            .with(&format!("--transport {transport} --warmup 0 --duration {SECONDS}"));
        if port == 5349 { load.with(&format!("--ca {authority} --server-name turn.soak.test")) } else { load }
    }
}

/// Uncertainty of the kernel's page count: each CPU may have this many pages that are not counted (net.core.mem_pcpu_rsv since Linux 6.7, 1
/// MiB before).
fn slack_pages() -> u64 {
    let each =
        fs::read_to_string("/proc/sys/net/core/mem_pcpu_rsv").ok().and_then(|text| text.trim().parse().ok());
    each.unwrap_or(256) * thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64)
}

fn settings(turn: u64) -> String {
    format!(
        "[relay]\nports = \"20000-{}\"\n[limits]\nallocations = 20000\nallocations_per_user = {}\nhalf_open_per_network = 1024\n",
        64_000 + turn % 10,
        10_000 + turn % 10
    )
}

fn merge(mut one: Value, other: Value) -> Value {
    if let (Some(one), Value::Object(other)) = (one.as_object_mut(), other) {
        one.extend(other);
    }
    one
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counted {
    to_peer: u64,
    to_client: u64,
    opened: u64,
}

impl Counted {
    fn of(server: &Server) -> Self {
        let metrics = server.metrics();
        let relayed = |direction| metrics.sum("turnpike_relayed_datagrams_total", direction);
        Self {
            to_peer: relayed("direction=\"to_peer\""),
            to_client: relayed("direction=\"to_client\""),
            opened: metrics.sum("turnpike_allocations_opened_total", ""),
        }
    }

    fn since(self, before: Self) -> Self {
        Self {
            to_peer: self.to_peer - before.to_peer,
            to_client: self.to_client - before.to_client,
            opened: self.opened - before.opened,
        }
    }
}
