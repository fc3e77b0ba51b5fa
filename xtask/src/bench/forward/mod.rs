//! `cargo xtask bench forward`: `turnpike forward` beside oxidinetd, rinetd, HAProxy and nginx, one core each in turn.
//! docs/benchmarks.md says what is measured and why.

mod finding;
mod options;
mod report;
mod subject;
mod trial;
mod workload;

use std::process::ExitCode;

use serde_json::{Map, Value, json};

pub(crate) use self::options::Options;
use self::{
    report::Comparison,
    subject::{Peer, Subject},
    trial::Bench,
    workload::{Transport, Workload},
};
use super::{
    LIMIT_EXCEEDED, counters, list, machine,
    netns::{Network, Place},
    prepare,
    rounds::Plan,
};
use crate::Failure;

pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let run = &options.run;
    if run.list {
        return Ok(list(&workload::all()));
    }
    let workloads = workload::chosen(&run.workload)?;
    let turnpike = run.turnpike_binary()?;
    let field = options.field(&turnpike)?;
    for (peer, reason) in &field.missing {
        eprintln!("note: without {peer}: {reason}");
    }
    let subjects = &field.subjects;
    let directory = prepare()?;
    let bench = Bench {
        network: network()?,
        turnpike,
        forwarder_core: run.relay_cpu,
        load_core: run.load_cpu,
        nice: run.nice,
        seconds: run.seconds(),
        profile: run.profile,
        burst: run.burst,
        load: options.load(),
        ksoftirqd: counters::softirq_thread(run.relay_cpu),
        directory,
    };
    let mut origin = machine::describe(&bench.network, run);
    origin.insert("subjects".to_owned(), commands(subjects, &bench)?.into());
    origin.insert("versions".to_owned(), versions().into());
    origin.insert("generator".to_owned(), json!(format!("turnpike load {}", bench.load.join(" "))));
    let plan = Plan::new(run, "forward", origin)?;

    let taking_part = |workload: &Workload| {
        let able = |subject: &&Subject| subject.refusal(workload.shape).is_none();
        subjects.iter().filter(able).map(|subject| subject.name.clone()).collect()
    };
    let results = plan.measure(&workloads, taking_part, |workload, name, label| {
        let subject = subjects.iter().find(|subject| subject.name == name).ok_or("no such subject")?;
        bench.run(workload.shape, subject, label)
    })?;

    let comparison = Comparison::of(&results, subjects, plan.seed);
    println!("\n{}", comparison.markdown());
    println!("Medians behind the ratios, and references:\n\n{}", report::details(&results, subjects));
    let gaps = report::gaps(&results, subjects, &field.missing);
    if !gaps.is_empty() {
        println!("Not measured:\n\n{gaps}");
    }
    plan.print_origin();
    let missed = run.check && !comparison.all_met();
    Ok(if missed { ExitCode::from(LIMIT_EXCEEDED) } else { ExitCode::SUCCESS })
}

/// The three namespaces of the relay's benchmark, with ports for short connections. At 15,000 of them a second, ports
/// come round again within seconds while their last connection rests in TIME_WAIT (60 s): with `tcp_tw_reuse` a client may
/// take such a port again after one second.
fn network() -> Result<Network, Failure> {
    let network = Network::up()?;
    for place in [Place::Client, Place::Relay] {
        network.set(place, "net/ipv4/tcp_tw_reuse", "1")?;
        network.set(place, "net/ipv4/ip_local_port_range", "10240 65535")?;
    }
    Ok(network)
}

/// The command line of each subject, as far as it has one.
fn commands(subjects: &[Subject], bench: &Bench) -> Result<Map<String, Value>, Failure> {
    let mut commands = Map::new();
    for subject in subjects {
        let command = subject.command(Transport::Tcp, &bench.directory)?;
        let shown = command.map_or("none".to_owned(), |command| machine::show_command(&command));
        commands.insert(subject.name.clone(), shown.into());
    }
    Ok(commands)
}

/// Versions of the peers that Debian packages.
fn versions() -> Map<String, Value> {
    Peer::ALL
        .iter()
        .map(|peer| (peer.name().to_owned(), json!(machine::package_version(peer.name()))))
        .filter(|(_, version)| version != "unknown")
        .collect()
}
