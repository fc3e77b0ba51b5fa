//! `cargo xtask bench`: relays, or forwarders, side by side in network namespaces. docs/benchmarks.md says what is measured and why.

mod certificate;
mod counters;
mod finding;
mod forward;
mod logs;
mod machine;
mod netns;
mod options;
mod probe;
mod report;
mod rounds;
mod stats;
mod subject;
mod trial;
mod workload;

use std::{path::PathBuf, process::ExitCode};

use serde_json::Value;

use self::{
    certificate::Certificate,
    netns::Network,
    options::Options,
    report::{Comparison, Results},
    rounds::{Named, Plan},
    subject::{Generator, Subject},
    trial::Bench,
    workload::{Transport, Workload},
};
pub(crate) use self::{machine::repository, options::Command};
use crate::Failure;

/// An asked-for limit was exceeded, as turnpike's own exit code says it.
const LIMIT_EXCEEDED: u8 = 3;

/// Workloads that show what the generator can do.
const GENERATOR_WORKLOADS: [&str; 4] = ["flood-1", "flood-8", "burst-64", "thin-1000"];

/// Runs the command to its end.
pub(crate) fn run(command: Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Relay(options) if options.run.clean => clean(),
        Command::Relay(options) if options.run.list => Ok(list(&workload::all())),
        Command::Relay(options) => bench_relay(&options),
        Command::Generator(options) => bench_generator(&options),
        Command::Forward(options) if options.run.clean => clean(),
        Command::Forward(options) => forward::run(&options),
        Command::Guardian { prefix } => netns::guard(&prefix).map(|()| ExitCode::SUCCESS),
        Command::Probe { address } => probe::until_answered(address).map(|()| ExitCode::SUCCESS),
    }
}

fn bench_relay(options: &Options) -> Result<ExitCode, Failure> {
    let workloads = workload::chosen(&options.run.workload)?;
    let turnpike = options.turnpike_binary()?;
    let subjects = options.subjects(turnpike.as_deref())?;
    let baseline = options.baseline(&subjects)?;
    let lab = Lab::set_up(options, turnpike, "relay", &subjects)?;
    let results = lab.measure(&workloads, &subjects)?;

    let mut all_met = true;
    for subject in subjects.iter().filter(|subject| subject.name != baseline) {
        let comparison = Comparison::of(&subject.name, &baseline, &results, lab.plan.seed);
        all_met &= comparison.all_met();
        println!("\n{}", comparison.markdown());
        let by_process = Comparison::by_process_time(&subject.name, &baseline, &results, lab.plan.seed);
        if !by_process.is_empty() {
            println!("By the time of the process in place of its core:\n\n{}", by_process.markdown());
        }
    }
    let names: Vec<String> = subjects.iter().map(|subject| subject.name.clone()).collect();
    println!("Medians behind the ratios:\n\n{}", report::details(&results, &names));
    lab.plan.print_origin();
    Ok(if options.run.check && !all_met { ExitCode::from(LIMIT_EXCEEDED) } else { ExitCode::SUCCESS })
}

fn bench_generator(options: &Options) -> Result<ExitCode, Failure> {
    let names = match &options.run.workload[..] {
        [] => GENERATOR_WORKLOADS.map(str::to_owned).to_vec(),
        named => named.to_vec(),
    };
    let workloads = workload::chosen(&names)?;
    let turnpike =
        options.turnpike_binary()?.ok_or("the generator is turnpike's: --generator uclient has none")?;
    let subject = Subject::turnpike("turnpike", &turnpike, &options.datapath);
    let subjects = [subject];
    let lab = Lab::set_up(options, Some(turnpike), "generator", &subjects)?;
    let results = lab.measure(&workloads, &subjects)?;
    println!("\n{}", report::generator_table(&results, "turnpike"));
    println!("{}", report::details(&results, &["turnpike".to_owned()]));
    lab.plan.print_origin();
    Ok(ExitCode::SUCCESS)
}

/// A benchmark of relays ready to run.
struct Lab {
    bench: Bench,
    plan: Plan,
}

impl Lab {
    fn set_up(
        options: &Options,
        turnpike: Option<PathBuf>,
        kind: &str,
        subjects: &[Subject],
    ) -> Result<Self, Failure> {
        let directory = prepare()?;
        machine::demand_programs(subjects)?;
        let generator = match (options.generator.as_str(), turnpike) {
            ("turnpike", Some(binary)) => Generator::Turnpike(binary),
            _ => Generator::Uclient,
        };
        let run = &options.run;
        let bench = Bench {
            network: Network::up()?,
            generator,
            relay_core: run.relay_cpu,
            load_core: run.load_cpu,
            nice: run.nice,
            seconds: run.seconds(),
            profile: run.profile,
            burst: run.burst,
            certificate: Certificate::make(&directory)?,
            directory,
        };
        let mut origin = machine::describe(&bench.network, run);
        let commands = |transport| -> Value {
            let shown = |subject: &Subject| machine::show_command(&subject.command(transport));
            subjects.iter().map(|subject| (subject.name.clone(), shown(subject))).collect()
        };
        origin.insert("coturn".to_owned(), machine::package_version("coturn").into());
        origin.insert("generator".to_owned(), bench.generator.title().into());
        origin.insert("subjects".to_owned(), commands(Transport::Udp));
        origin.insert("subjects_over_streams".to_owned(), commands(Transport::Tcp));
        Ok(Self { bench, plan: Plan::new(run, kind, origin)? })
    }

    fn measure(&self, workloads: &[Workload], subjects: &[Subject]) -> Result<Vec<Results>, Failure> {
        let names = |_: &Workload| subjects.iter().map(|subject| subject.name.clone()).collect();
        self.plan.measure(workloads, names, |workload, name, label| {
            let subject = subjects.iter().find(|subject| subject.name == name).ok_or("no such subject")?;
            self.bench.run(workload, subject, label)
        })
    }
}

/// What every benchmark needs first; returns the directory for its logs.
fn prepare() -> Result<PathBuf, Failure> {
    machine::demand_root_and_tools()?;
    machine::raise_open_files_limit()?;
    for namespace in netns::stale_namespaces()? {
        eprintln!("note: {namespace} was left behind by an earlier run; --clean removes it");
    }
    rounds::make_log_directory()
}

fn clean() -> Result<ExitCode, Failure> {
    let removed = netns::remove_stale()?;
    println!("removed {removed} namespaces of earlier runs");
    Ok(ExitCode::SUCCESS)
}

fn list<W: Named>(workloads: &[W]) -> ExitCode {
    for workload in workloads {
        println!("{:<16} {}", workload.name(), workload.title());
    }
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generators_workloads_exist() {
        let names = GENERATOR_WORKLOADS.map(str::to_owned);
        assert_eq!(workload::chosen(&names).unwrap().len(), names.len());
    }
}
