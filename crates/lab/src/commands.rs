//! `turnpike lab` commands.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use clap::Parser;

use crate::{
    adhoc,
    advice::advice,
    builds,
    builtin_experiments::{BuiltinText, EXPERIMENTS, SUITES},
    cli::{ExperimentFile, Lab, LabArgs, LabCommand, RunOptions},
    console::{self, Console},
    error::LabError,
    experiment::Experiment,
    metric, profile,
    program::MARK,
    record::{RunRecord, write_whole},
    report,
    request::{self, RowSettings, RunRequest, Task},
    run::{self, rates, stage::RunStage},
    search::RatePlan,
    stats,
    stop::StopFlag,
    suite::{Suite, SuiteJournal, SuiteTable, run_remaining_rows},
    thresholds,
    topology::{
        self, Topology, offload,
        spec::{Spec, is_plain},
        userns,
    },
    verdict::judge,
};

const LIMIT_EXCEEDED: u8 = 3;
const FURTHER: usize = 8;

/// Runs `turnpike lab`. Returns the exit code: 0 done, 1 failed, 2 bad usage.
pub fn main<A: Into<OsString> + Clone>(arguments: impl IntoIterator<Item = A>) -> u8 {
    match Lab::try_parse_from(arguments) {
        Ok(lab) => run(lab.args),
        Err(error) => {
            // Errors are ignored because the terminal may be closed. Help exits with 0.
            let _ = error.print();
            if error.use_stderr() { 2 } else { 0 }
        }
    }
}

pub fn run(arguments: LabArgs) -> u8 {
    match dispatch(arguments.command, &StopFlag::on_signals()) {
        Ok(code) => code,
        Err(error) => {
            Console::new().note(&format!("turnpike lab: {error}"));
            error.exit_code()
        }
    }
}

fn dispatch(command: LabCommand, stop: &StopFlag) -> Result<u8, LabError> {
    match command {
        LabCommand::Up { topology, id } => up(&topology, &id.id),
        LabCommand::Exec { id, name, command } => Err(exec(&id.id, &name, &command)),
        LabCommand::Down { id } => down(&id.id),
        LabCommand::Run { file } => execute(&requests_of(&file)?, &file.options.out.path, stop),
        LabCommand::List => list(),
        LabCommand::Suite { suite, resume, only, options } => {
            let mut journal = match resume {
                Some(directory) => SuiteJournal::load(&directory)?,
                None => begin_suite(&suite.unwrap_or_default(), &only, options)?,
            };
            run_remaining_rows(&mut journal, stop)?;
            conclude_suite(&journal, stop)
        }
        LabCommand::Ab { a, b, setting, changes, out, workload } => {
            let request = adhoc::request("ab", &[("a", &a), ("b", &b)], &workload, &setting, &changes)?;
            Console::new().note(&adhoc::describe(&request.experiment()?));
            execute(&[request], &out.path, stop)
        }
        LabCommand::Sweep { file, rates } => {
            if rates.contains(&0) {
                return Err(LabError::usage("--rates: expected datagrams per second, at least 1"));
            }
            rates_of_file(&file, &RatePlan::Sweep(rates), stop)
        }
        LabCommand::FindMax { file, search } => {
            let settings = search.settings();
            let settings = settings.map_err(|mistake| LabError::usage(format!("find-max: {mistake}")))?;
            rates_of_file(&file, &RatePlan::FindMax(settings), stop)
        }
        LabCommand::Profile { subject, diff, setting, changes, out, workload } => {
            if let [before, after] = &diff[..] {
                return profile::diff(before, after, Path::new("profile-diff.svg")).map(|()| 0);
            }
            let subject =
                subject.ok_or_else(|| LabError::usage("nothing to profile: give the command before `--`"))?;
            let mut request =
                adhoc::request("profile", &[("subject", &subject)], &workload, &setting, &changes)?;
            request.task = Task::Profile;
            Console::new().note(&adhoc::describe(&request.experiment()?));
            execute(&[request], &out.path, stop)
        }
        LabCommand::Report { directories } => show(&directories),
        LabCommand::Rerun { directory, out } => execute(&[RunRequest::load(&directory)?], &out.path, stop),
    }
}

fn up(topology: &str, id: &str) -> Result<u8, LabError> {
    let spec = Spec::load(topology, Path::new("."))?;
    check_id(id)?;
    userns::enter_if_needed()?;
    let lab = Topology::up(&spec, id)?;
    let mut text = String::new();
    for space in &spec.namespace {
        let ends = spec.ends().filter(|end| end.namespace == space.name);
        let addresses: Vec<String> =
            ends.map(|end| format!("{} {}", end.device, end.addresses.join(" "))).collect();
        text += &format!("{:<10} {}\n", space.name, addresses.join(", "));
    }
    for (device, held) in &lab.offloads {
        text += &format!("{device}: {}\n", offload::describe(held));
    }
    let option = if id == "up" { String::new() } else { format!(" --id {id}") };
    text += &format!(
        "run a command inside with `turnpike lab exec{option} NAME -- CMD`; remove it with `turnpike lab down{option}`"
    );
    console::result(&text);
    Ok(0)
}

fn exec(id: &str, name: &str, command: &[String]) -> LabError {
    let entered = check_id(id).and_then(|()| Topology::find(id)).and_then(|lab| lab.entry(Some(name)));
    let mut words = match entered {
        Ok(words) => words,
        Err(error) => return error,
    };
    words.extend_from_slice(command);
    let error = Command::new(&words[0]).args(&words[1..]).env(MARK, id).exec();
    LabError::failed(format!("cannot start `{}`: {error}", words[0]))
}

fn down(id: &str) -> Result<u8, LabError> {
    check_id(id)?;
    let ended = topology::down(id)?;
    console::result(&match ended {
        0 => "no topology was up".to_owned(),
        1 => "1 topology removed".to_owned(),
        ended => format!("{ended} topologies removed"),
    });
    Ok(0)
}

/// Rejects IDs with hyphens, which separate the parts of a namespace's name.
fn check_id(id: &str) -> Result<(), LabError> {
    if is_plain(id, 16) && !id.contains('-') {
        return Ok(());
    }
    Err(LabError::usage(format!(
        "--id {id}: expected 1 to 16 lower-case letters and digits, starting with a letter"
    )))
}

fn rates_of_file(file: &ExperimentFile, plan: &RatePlan, stop: &StopFlag) -> Result<u8, LabError> {
    let rounds = file.options.changes.rounds.unwrap_or(1);
    let mut requests = requests_of(file)?;
    for request in &mut requests {
        request.task = Task::Rates { plan: plan.clone(), rounds };
    }
    execute(&requests, &file.options.out.path, stop)
}

fn requests_of(ExperimentFile { experiment, options }: &ExperimentFile) -> Result<Vec<RunRequest>, LabError> {
    let variant = RowSettings { topology: options.topology.clone(), ..RowSettings::default() };
    RunRequest::of(Experiment::find(experiment)?, &options.changes, &variant, &options.set)
}

fn begin_suite(suite: &Path, only: &[String], mut options: RunOptions) -> Result<SuiteJournal, LabError> {
    let BuiltinText { path, text } = SUITES.find(suite, Path::new("experiments"))?;
    let suite = Suite::parse(&path, &text)?.only(only)?;
    // All rows use the same seed, so that the table can show it.
    options.changes.seed.get_or_insert_with(request::draw_seed);
    let rows = suite.requests(&options)?;
    // This must come first, because it may re-execute the program as root of a user namespace.
    for (_, request) in &rows {
        if request.experiment()?.topology()?.is_some() {
            userns::enter_if_needed()?;
        }
    }
    SuiteJournal::begin(&suite.name, &suite.about, &rows, &options.out.path)
}

fn list() -> Result<u8, LabError> {
    let mut text = String::new();
    for (title, shelf) in [
        ("experiments (`turnpike lab run NAME`)", EXPERIMENTS),
        ("suites (`turnpike lab suite NAME`)", SUITES),
    ] {
        text += &format!("{title}\n");
        for (name, BuiltinText { text: content, .. }) in shelf.all() {
            let about = content.lines().next().and_then(|line| line.strip_prefix("# ")).unwrap_or_default();
            text += &format!("  {name:<18} {about}\n");
        }
    }
    console::result(&text);
    Ok(0)
}

/// Prints and saves a suite's table. Returns exit code 1 if a row is missing, 3 if a `must` threshold is
/// missed.
fn conclude_suite(journal: &SuiteJournal, stop: &StopFlag) -> Result<u8, LabError> {
    let table = SuiteTable::of(journal);
    let path = journal.directory().join("table.md");
    write_whole(&path, table.markdown().as_bytes())?;
    console::result(&format!(
        "{}\n{}\nsuite: {}",
        table.markdown(),
        table.totals(),
        journal.directory().display()
    ));
    let left = journal.left();
    if left > 0 && stop.requested() {
        Console::new().note(&format!(
            "interrupted with {left} of {} rows left: continue with `turnpike lab suite --resume {}`",
            journal.rows.len(),
            journal.directory().display()
        ));
    }
    Ok(match (left, table.missed) {
        (0, 0) => 0,
        (0, _) => LIMIT_EXCEEDED,
        _ => 1,
    })
}

fn execute(requests: &[RunRequest], out: &Path, stop: &StopFlag) -> Result<u8, LabError> {
    let mut code = 0;
    for request in requests {
        let stage = RunStage::set(request, out, stop)?;
        let record = run::execute(request, &stage)?;
        for sweep in &record.sweeps {
            console::result(&rates::describe(sweep));
        }
        if stage.directory.is_dir() {
            code = code.max(conclude(request, &record, &stage)?);
        }
        if stop.requested() {
            break;
        }
    }
    Ok(code)
}

/// Writes the report and prints the summary. Returns exit code 1 if a subject has no result.
fn conclude(request: &RunRequest, record: &RunRecord, stage: &RunStage) -> Result<u8, LabError> {
    let further = match request.task {
        Task::Rates { .. } => &[][..],
        Task::Compare | Task::Profile => &stage.experiment.metrics,
    };
    report::save(&stage.directory, record)?;
    console::result(&summary(record, further));
    console::result(&format!("record: {}", stage.directory.display()));
    let metric = &record.experiment.metric;
    let counted =
        |name: &str| record.rounds.iter().any(|round| round.subject == name && record.counts(round, metric));
    let all_counted = record.experiment.subjects.iter().all(|subject| counted(&subject.name));
    Ok(u8::from(!all_counted))
}

fn summary(record: &RunRecord, wanted: &[String]) -> String {
    let deciding = &record.experiment.metric;
    let mut text = String::new();
    for subject in &record.experiment.subjects {
        let values = record.values(&subject.name, deciding);
        let rounds = || record.rounds.iter().filter(|round| round.subject == subject.name);
        let all = rounds().count();
        let counting = rounds().filter(|round| record.counts(round, deciding)).count();
        let late = rounds().filter(|round| round.voided.is_some() && record.counts(round, deciding)).count();
        let median = stats::median(&values)
            .map_or_else(|| "not measured".to_owned(), |value| metric::show(deciding, value));
        let word = if all == 1 { "round" } else { "rounds" };
        text += &format!("{}: {deciding} {median}, {all} {word}", subject.name);
        if counting < all {
            text += &format!(", {} of them void", all - counting);
        }
        if late > 0 {
            text += &format!(", in {late} of them the generator fell behind");
        }
        text.push('\n');
        if let Some(void) = rounds().find_map(|round| round.voided.as_ref()) {
            text += &format!("  {void}\n");
        }
    }
    let mut listed = BTreeSet::from([deciding]);
    let further: Vec<&String> = wanted.iter().take(FURTHER).filter(|name| listed.insert(name)).collect();
    let of_all = record
        .candidates()
        .flat_map(|candidate| further.iter().map(move |name| judge(record, candidate, name)));
    let verdicts: Vec<_> = report::verdicts(record).into_iter().chain(of_all).collect();
    let verdicts_in_words = verdicts.iter().map(ToString::to_string);
    let thresholds = thresholds::evaluate(record).into_iter().map(|held| held.to_string());
    let advice = advice(record, &verdicts).into_iter().map(|advice| advice.to_string());
    for line in verdicts_in_words.chain(thresholds).chain(advice) {
        text += &format!("{line}\n");
    }
    text
}

fn programs(record: &RunRecord) -> String {
    let mut text = String::new();
    for build in &record.programs {
        text += &format!("{}\n", builds::describe(build));
    }
    for told in builds::changes_since(&record.programs) {
        text += &format!("warning: {told}\n");
    }
    text
}

fn show(directories: &[PathBuf]) -> Result<u8, LabError> {
    if let [directory] = directories
        && SuiteJournal::is_in(directory)
    {
        return conclude_suite(&SuiteJournal::load(directory)?, &StopFlag::default());
    }
    let records =
        directories.iter().map(|directory| RunRecord::load(directory)).collect::<Result<Vec<_>, _>>()?;
    if let ([record], [directory]) = (&records[..], directories) {
        if directory.is_dir() {
            report::save(directory, record)?;
        }
        console::result(&(summary(record, &[]) + &programs(record)));
    } else {
        console::result(&report::compare(&records));
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_definition_is_valid() {
        use clap::CommandFactory;
        Lab::command().debug_assert();
    }

    #[test]
    fn each_metric_has_one_line_that_starts_with_its_name() {
        let mut record = crate::record::tests::record("delivered_pps", &[(100.0, 100.1, 200.0); 8]);
        for round in record.rounds.iter_mut().chain(&mut record.aa) {
            round.metrics.insert("cpu_us_per_packet".to_owned(), 2.0);
        }
        let wanted = ["cpu_us_per_packet", "delivered_pps", "loss_percent", "cpu_us_per_packet"];
        let text = summary(&record, &wanted.map(str::to_owned));
        let lines: Vec<&str> = text
            .lines()
            .filter_map(|line| line.split_once(": new against old: ").map(|(name, _)| name))
            .collect();
        assert_eq!(lines, ["delivered_pps", "cpu_us_per_packet", "loss_percent"], "{text}");
    }

    #[test]
    fn bad_ids_are_refused() {
        assert!(check_id("a1").is_ok());
        assert!(check_id("a-b").is_err() && check_id("").is_err() && check_id("A").is_err());
    }
}
