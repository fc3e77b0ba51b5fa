//! Compares the CPU cost per message of the generator with coturn's `turnutils_uclient` (package coturn), at
//! the rate that uclient reaches and at four times that rate.
//!
//! ```text
//! cargo build --release && cargo run --release -p turnpike-load --example uclient -- target/release/turnpike [ROUNDS]
//! ```
//!
//! Both use 200 clients over channels on loopback. Runs alternate, each with a fresh server, because uclient
//! leaves its allocations behind. Prints the CPU time of the whole process per returned message, including
//! startup and allocations.
#![forbid(unsafe_code)]
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a developer tool, whose panics show where it failed"
)]

use std::{
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use serde_json::Value;

const CLIENTS: u32 = 200;
const MESSAGES: u32 = 500;
const SIZE: &str = "120";

struct Run {
    cpu_s: f64,
    received: u32,
}

impl Run {
    fn us_each(&self) -> f64 {
        self.cpu_s * 1e6 / f64::from(self.received)
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let binary = arguments.next().expect("the path of turnpike");
    let rounds: usize = arguments.next().map_or(6, |text| text.parse().expect("a number of rounds"));
    let mut found: [Vec<f64>; 3] = Default::default();
    for round in 0..rounds {
        let (uclient, rate) = uclient(&binary);
        let runs = [uclient, load(&binary, rate), load(&binary, 4.0 * rate)];
        let back = runs.each_ref().map(|run| run.received);
        println!("round {round}: {rate:.0}/s, messages back {back:?}");
        for (all, run) in found.iter_mut().zip(&runs) {
            all.push(run.us_each());
        }
    }
    let [uclient, same, faster] = found.map(median);
    println!(
        "CPU time per message, medians: turnutils_uclient {uclient:.2} us, turnpike load {same:.2} us, at four \
         times the rate {faster:.2} us"
    );
}

/// Also returns the number of messages sent per second.
fn uclient(binary: &str) -> (Run, f64) {
    let (clients, messages) = (CLIENTS.to_string(), MESSAGES.to_string());
    let mut command = pinned("1", "turnutils_uclient");
    command.args(["-c", "-m", &clients, "-n", &messages, "-l", SIZE, "-z", "1", "-u", "lab", "-w", "lab"]);
    command.args(["-e", "127.0.0.1", "-r", "3480", "127.0.0.1"]);
    let (cpu_s, said) = measured(binary, command);
    let number = |name: &str| -> u32 {
        let (_, last) = said.rsplit_once(name).expect("the output has this line");
        last.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
    };
    let run = Run { cpu_s, received: number("tot_recv_msgs=") };
    (run, f64::from(CLIENTS * MESSAGES) / f64::from(number("Total transmit time is ")))
}

fn load(binary: &str, rate: f64) -> Run {
    let seconds = f64::from(CLIENTS * MESSAGES) / rate;
    let (clients, rate, seconds) = (CLIENTS.to_string(), format!("{rate:.0}"), format!("{seconds:.1}"));
    let mut command = pinned("1", binary);
    command.args(["load", "turn", "127.0.0.1:3478", "--peer", "127.0.0.1:3480", "--user", "lab:lab"]);
    command.args(["--via", "channel", "--clients", &clients, "--size", SIZE, "--rate", &rate]);
    command.args(["--duration", &seconds, "--warmup", "0", "--threads", "1", "--json", "-"]);
    let (cpu_s, said) = measured(binary, command);
    let report: Value = serde_json::from_str(&said[said.find('{').unwrap()..]).expect("one document");
    Run { cpu_s, received: report["received"].as_u64().unwrap().try_into().unwrap() }
}

/// Runs a command while a server and a reflector share the other CPU; returns its CPU time and output.
fn measured(binary: &str, mut command: Command) -> (f64, String) {
    let mut serve = pinned("0", binary);
    serve.args([
        "serve",
        "--listen",
        "127.0.0.1:3478",
        "--relay-ip",
        "127.0.0.1",
        "--allow-peer",
        "127.0.0.1/32",
    ]);
    serve.args(["--realm", "lab", "--user", "lab:lab", "--admin", "off", "--workers", "1"]);
    serve.env("TURNPIKE_LIMITS_ALLOCATIONS_PER_USER", "1000");
    let mut reflect = pinned("0", binary);
    reflect.args(["reflect", "--listen", "127.0.0.1:3480", "--workers", "1"]);
    let helpers = [serve, reflect].map(Helper::start);
    thread::sleep(Duration::from_millis(1500));
    let before = cpu_of_children();
    let output = command.stderr(Stdio::null()).output().expect("the program starts");
    let cpu_s = cpu_of_children() - before;
    drop(helpers);
    (cpu_s, String::from_utf8_lossy(&output.stdout).into_owned())
}

fn pinned(cpu: &str, program: &str) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", cpu, program]);
    command
}

struct Helper(Child);

impl Helper {
    fn start(mut command: Command) -> Self {
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the program starts"))
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// CPU seconds of reaped children: `cutime` and `cstime` of proc(5).
fn cpu_of_children() -> f64 {
    let stat = procfs::process::Process::myself().and_then(|it| it.stat()).unwrap();
    let ticks = u32::try_from(stat.cutime + stat.cstime).unwrap();
    f64::from(ticks) / f64::from(u32::try_from(procfs::ticks_per_second()).unwrap())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
