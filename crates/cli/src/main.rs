//! The `turnpike` program: parses arguments, calls the other crates, and sets the exit code.
#![forbid(unsafe_code)]

mod admin_args;
mod args;
mod capture_args;
mod config_checks;
mod credentials_args;
mod firewall_args;
mod forward_args;
mod import_args;
mod load_args;
mod log_args;
mod manage_args;
mod probe_args;
mod probe_text;
mod public_address_args;
mod renamed;
mod serve_args;
mod shell_args;
mod summary;
mod upgrade_args;
mod usage;
mod usage_args;

use std::{
    env,
    fmt::{self, Display},
    fs,
    io::{self, IsTerminal, Write},
    path::Path,
    process::ExitCode,
};

use clap::{CommandFactory as _, Parser};
use serde_json::{Map, Value};
use turnpike_admin::Problem;
use turnpike_config::{Mistakes, Sources, forward::ForwardSources, readable_by_all};
use turnpike_ctl::{
    commands::CommandError,
    setup::{self, SetupArgs, SetupContext, SetupError},
};
use turnpike_forwarder::ForwarderError;
use turnpike_load::{
    LoadError, LoadReport, RunOutcome, StopHandle,
    progress::{self, ProgressInterval},
    reflect::{self, ReflectPath, Reflector},
    stream::{self, Workload},
    turn, udp,
};
use turnpike_probe::ProbeError;
use turnpike_process::{init, wait_for_stop};
use turnpike_serve::ServeError;
use turnpike_wire::escape;

use crate::{
    args::{Cli, Command},
    credentials_args::CredentialsArgs,
    forward_args::ForwardArgs,
    import_args::ImportCommand,
    load_args::LoadCommand,
    manage_args::ManageError,
    probe_args::ProbeArgs,
    serve_args::{CheckConfigArgs, ServeCommand},
    summary::{Summary, Unit},
    upgrade_args::UpgradeArgs,
};

const FAILED: u8 = 1;
/// Bad flags or configuration; the same exit code as clap's.
const BAD_USAGE: u8 = 2;
/// A limit set by `--max-loss`, `--max-p99` or `--fail-on` was exceeded.
const LIMIT_EXCEEDED: u8 = 3;

fn main() -> ExitCode {
    let (arguments, notices) = renamed::rename(env::args_os().collect());
    for notice in notices {
        tell(format_args!("turnpike: {notice}"));
    }
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => return usage::show(error),
    };
    match cli.command {
        Command::Setup(args) => set_up(&args),
        Command::Serve(args) => run_server(*args),
        Command::Forward(args) => run_forwarder(*args),
        Command::Upgrade(args) => upgrade(&args),
        Command::CheckConfig(args) => check_config(*args),
        Command::Credentials(args) => print_credentials(args),
        Command::Reflect(config) => run_reflector(&config),
        Command::Load { command } => generate(command),
        Command::Probe(args) => probe(args),
        Command::Allocations(args) => told(|out| args.run(out)),
        Command::Allocation { command } => told(|out| command.run(out)),
        Command::Capture(args) => told(|out| args.run(out)),
        Command::Usage(args) => told(|out| args.run(out)),
        Command::Drain(args) => told(|out| args.run(out)),
        Command::Health(args) => told(|out| args.run(out)),
        Command::Fleet { command } => told(|out| command.run(out)),
        Command::Reload(args) => told(|out| args.run(out)),
        Command::Top(args) => told(|out| args.run(out)),
        Command::User { command } => managed(|out| command.run(out)),
        Command::Secret { command } => managed(|out| command.run(out)),
        Command::Realm { command } => managed(|out| command.run(out)),
        Command::Key { command } => managed(|out| command.run(out)),
        Command::Import { command } => import(&command),
        Command::PrintFirewall(args) => match args.make() {
            Ok(rules) => print(format_args!("{}", rules.trim_end())),
            Err(errors) => fail(BAD_USAGE, &errors),
        },
        Command::PublicAddress(args) => match args.run() {
            Ok(None) => ExitCode::SUCCESS,
            Ok(Some(lines)) => print(format_args!("{lines}")),
            Err(error) => fail(FAILED, &error),
        },
        Command::Completions(args) => {
            written("the completions", args.write(Cli::command(), &mut io::stdout()))
        }
        Command::Man(args) => written("the manual pages", args.write(Cli::command(), &mut io::stdout())),
        #[cfg(feature = "tools")]
        Command::Lab(args) => ExitCode::from(turnpike_lab::run(*args)),
        #[cfg(not(feature = "tools"))]
        Command::Lab { arguments } => {
            drop(arguments);
            let remedy = "build turnpike with its default cargo feature `tools`";
            fail(BAD_USAGE, &format_args!("this build has no lab: {remedy}"))
        }
    }
}

fn set_up(args: &SetupArgs) -> ExitCode {
    let context = SetupContext {
        cloud_address: public_address_args::of_cloud,
        new_secret: rand::random(),
        show: &|report| probe_text::show(report, false),
        warn: &|warning| tell(format_args!("warning: {warning}")),
    };
    match setup::set_up(args, &context, &mut io::stdout()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(FAILED),
        Err(SetupError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => fail(if error.is_usage() { BAD_USAGE } else { FAILED }, &error),
    }
}

fn run_server(ServeCommand { check, serve: args }: ServeCommand) -> ExitCode {
    if check {
        return check_server(&args.into_sources());
    }
    if init::is_needed() {
        return run_as_init();
    }
    match turnpike_serve::serve(&args.into_sources(), &mut io::stdout()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(ServeError::Config(errors)) => fail(BAD_USAGE, &errors),
        Err(error) => fail(FAILED, &error),
    }
}

fn run_forwarder(args: ForwardArgs) -> ExitCode {
    let check_only = args.check;
    let sources = args.into_sources();
    if check_only {
        return check_forward(&sources);
    }
    if init::is_needed() {
        return run_as_init();
    }
    match turnpike_forwarder::forward(&sources) {
        Ok(()) => ExitCode::SUCCESS,
        Err(ForwarderError::Config(errors)) => fail(BAD_USAGE, &errors),
        Err(error) => fail(FAILED, &error),
    }
}

fn run_as_init() -> ExitCode {
    init::run()
        .unwrap_or_else(|error| fail(FAILED, &format_args!("process 1 cannot run the service: {error}")))
}

/// Writes the translation to standard output or a file, and notes about options without a translation to
/// standard error.
fn import(command: &ImportCommand) -> ExitCode {
    let imported = match command.run() {
        Ok(imported) => imported,
        Err(errors) => return fail(BAD_USAGE, &errors),
    };
    for note in &imported.notes {
        let kind = if note.is_harmless { "nothing to do" } else { "to do" };
        tell(format_args!("{kind}: {note}"));
    }
    match command.output() {
        None => print(format_args!("{}", imported.toml.trim_end())),
        Some(path) => match import_args::write(path, &imported.toml) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(FAILED, &format_args!("cannot write {}: {error}", path.display())),
        },
    }
}

fn managed(ask: impl FnOnce(&mut dyn Write) -> Result<(), ManageError>) -> ExitCode {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let done = ask(&mut out);
    let flushed = out.flush().map_err(CommandError::from).map_err(ManageError::from);
    drop(out);
    match done.and(flushed) {
        Ok(()) => ExitCode::SUCCESS,
        Err(ManageError::Command(error)) => refused(&error),
        Err(ManageError::Store(ServeError::Config(errors))) => fail(BAD_USAGE, &errors),
        Err(
            error @ (ManageError::Store(ServeError::NoStore)
            | ManageError::Address(_)
            | ManageError::OtherRealm { .. }
            | ManageError::Secret { .. }
            | ManageError::NoRealm),
        ) => fail(BAD_USAGE, &error),
        Err(error) => fail(FAILED, &error),
    }
}

fn upgrade(args: &UpgradeArgs) -> ExitCode {
    let step = |step: &str| tell(format_args!("{step}"));
    match turnpike_process::upgrade::ask(&args.which(), args.binary.as_deref(), step) {
        Ok(done) => print(format_args!("{done}")),
        Err(error) => fail(FAILED, &error),
    }
}

fn check_config(args: CheckConfigArgs) -> ExitCode {
    if let Some(file) = args.forward {
        return check_forward(&ForwardArgs::of_file(file));
    }
    check_server(&args.serve.into_sources())
}

fn check_server(sources: &Sources) -> ExitCode {
    let checked = turnpike_serve::load(sources).and_then(|loaded| {
        let mut mistakes = turnpike_serve::check_start(&loaded.settings);
        mistakes.extend(turnpike_admin::check(&loaded.settings));
        if mistakes.is_empty() { Ok(loaded) } else { Err(Mistakes::sorted(mistakes)) }
    });
    show_checked(checked.map(|loaded| {
        let faults = turnpike_serve::time_faults(&loaded.certificates);
        let waited_for = turnpike_serve::waited_for(&loaded.settings);
        let warnings = loaded.warnings.into_iter().chain(faults).chain(waited_for);
        (warnings.collect(), loaded.settings.to_toml())
    }))
}

fn check_forward(sources: &ForwardSources) -> ExitCode {
    show_checked(sources.load().map(|loaded| {
        let toml = loaded.settings.to_toml();
        match (sources.file(), loaded.format) {
            (Some(path), Some(format)) => {
                (loaded.warnings, format!("# {} is read as {format}\n{toml}", path.display()))
            }
            _ => (loaded.warnings, toml),
        }
    }))
}

fn show_checked(checked: Result<(Vec<String>, String), Mistakes>) -> ExitCode {
    match checked {
        Ok((warnings, settings)) => {
            for warning in &warnings {
                tell(format_args!("warning: {warning}"));
            }
            print(format_args!("ok\n\n{}", settings.trim_end()))
        }
        Err(errors) => fail(BAD_USAGE, &errors),
    }
}

fn told(ask: impl FnOnce(&mut dyn Write) -> Result<(), CommandError>) -> ExitCode {
    let mut out = io::BufWriter::new(io::stdout().lock());
    match ask(&mut out).and_then(|()| Ok(out.flush()?)) {
        Err(error) => refused(&error),
        Ok(()) => ExitCode::SUCCESS,
    }
}

fn refused(error: &CommandError) -> ExitCode {
    match error {
        CommandError::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        error => {
            let code = if error.is_usage() { BAD_USAGE } else { FAILED };
            let problem = if let CommandError::Refused(problem) = error { Some(problem) } else { None };
            fail_as(code, error, problem)
        }
    }
}

fn print_credentials(args: CredentialsArgs) -> ExitCode {
    match args.make() {
        Ok(lines) => print(format_args!("{lines}")),
        Err(error) => fail(FAILED, &error),
    }
}

fn run_reflector(config: &reflect::ReflectConfig) -> ExitCode {
    let reflector = match Reflector::start(config) {
        Ok(reflector) => reflector,
        Err(error) => return fail_load(&error),
    };
    for listener in reflector.listeners() {
        tell(format_args!("listening on udp {listener}"));
    }
    for listener in reflector.tcp_listeners() {
        tell(format_args!("listening on tcp {listener}"));
    }
    tell(format_args!("data path {}; workers: {}", config.datapath.step(), config.workers()));
    let in_kernel = config.datapath == ReflectPath::Kernel;
    if in_kernel {
        tell(format_args!("in-kernel reflection on {}", reflector.in_kernel().join(", ")));
    }
    if let Err(error) = wait_for_stop() {
        return fail(FAILED, &format_args!("cannot wait for signals: {error}"));
    }
    let stats = reflector.stop();
    tell(format_args!(
        "datagrams: {} received, {} returned, {} refused by the kernel, {} dropped because the receive buffer was full",
        stats.received, stats.sent, stats.refused, stats.kernel_drops
    ));
    if in_kernel {
        tell(format_args!("returned in the kernel: {}", stats.in_kernel));
    }
    if stats.connections > 0 {
        tell(format_args!(
            "TCP connections: {} accepted, {} bytes received, {} sent",
            stats.connections, stats.tcp_received_bytes, stats.tcp_sent_bytes
        ));
    }
    ExitCode::SUCCESS
}

fn generate(command: LoadCommand) -> ExitCode {
    let (target, workload) = match command {
        LoadCommand::Turn(config) => {
            let json = config.run.json.as_deref();
            return run_load(json, Unit::Messages, |stop, show| turn::run(&config, stop, show));
        }
        LoadCommand::Udp(config) => {
            let json = config.run.json.as_deref();
            return run_load(json, Unit::Messages, |stop, show| udp::run(&config, stop, show));
        }
        LoadCommand::Tcp { target, options } => (target, Workload::Bulk(options)),
        LoadCommand::Rr { target, options } => (target, Workload::Exchange(options)),
        LoadCommand::Connect { target, options } => (target, Workload::Connect(options)),
    };
    let unit = if matches!(workload, Workload::Bulk(_)) { Unit::Bytes } else { Unit::Messages };
    let config = stream::StreamLoadConfig::new(target, workload);
    let json = config.target.run.json.as_deref();
    run_load(json, unit, |stop, show| stream::run(&config, stop, show))
}

fn probe(args: ProbeArgs) -> ExitCode {
    let (config, asked) = args.into_config();
    if asked.only_say {
        let lines = turnpike_probe::attack::plan(&config).join("\n");
        let _ = print(format_args!("{lines}"));
        return ExitCode::from(BAD_USAGE);
    }
    let report = match turnpike_probe::run(&config) {
        Ok(report) => report,
        Err(error @ ProbeError::Setting(_)) => return fail(BAD_USAGE, &error),
        Err(error) => return fail(FAILED, &error),
    };
    if let Err(error) = probe_text::show(&report, asked.json) {
        return fail(FAILED, &format_args!("cannot write to standard output: {error}"));
    }
    match asked.fail_on {
        _ if !report.usable => ExitCode::from(FAILED),
        Some(limit) if report.worst() >= limit => ExitCode::from(LIMIT_EXCEEDED),
        _ => ExitCode::SUCCESS,
    }
}

fn run_load(
    json: Option<&Path>,
    unit: Unit,
    run: impl FnOnce(&StopHandle, &mut dyn FnMut(&ProgressInterval)) -> Result<RunOutcome, LoadError>,
) -> ExitCode {
    if let Some(error) = json.and_then(|path| unwritable(path).err()) {
        return fail(
            FAILED,
            &format_args!("cannot write the result: {error}; choose another file with --json"),
        );
    }
    let stop = StopHandle::default();
    if let Err(error) = stop_on_signals(stop.clone()) {
        return fail(FAILED, &format_args!("cannot wait for signals: {error}"));
    }
    let display = progress::ProgressDisplay::new(io::stderr().is_terminal());
    let result = run(&stop, &mut |interval| display.show(interval));
    display.finish();
    let outcome = match result {
        Ok(outcome) => outcome,
        Err(error) => return fail_load(&error),
    };
    if let Err(error) = show(&outcome.report, unit, json) {
        return fail(FAILED, &format_args!("cannot write the result: {error}"));
    }
    let exceeded = &outcome.exceeded;
    if !exceeded.is_empty() {
        return fail(LIMIT_EXCEEDED, &exceeded.join("\n"));
    }
    // An interrupted run is a failure even if the figures are good.
    if outcome.interrupted { ExitCode::from(FAILED) } else { ExitCode::SUCCESS }
}

/// The first SIGINT or SIGTERM ends the run and reports its measurements; the second exits immediately.
fn stop_on_signals(stop: StopHandle) -> io::Result<()> {
    let wait = move || {
        if wait_for_stop().is_ok() {
            stop.stop();
            tell(format_args!(
                "turnpike: interrupted; waiting for the last replies (interrupt again to exit immediately)"
            ));
            let _ = wait_for_stop();
            std::process::exit(FAILED.into());
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(wait).map(drop)
}

/// Checks before the run that the result can be written; keeps the contents of the file.
fn unwritable(json: &Path) -> io::Result<()> {
    if json.as_os_str() == "-" {
        return Ok(());
    }
    fs::OpenOptions::new().append(true).create(true).open(json).map(drop)
}

/// Writes JSON if requested, and text to standard output unless the JSON is written there.
fn show(report: &LoadReport, unit: Unit, json: Option<&Path>) -> io::Result<()> {
    let Some(path) = json else {
        return writeln!(io::stdout(), "{}", Summary { report, unit }).or_else(forgive_closed_pipe);
    };
    let mut text = escape::json(&serde_json::to_string(report)?).into_owned();
    text.push('\n');
    if path.as_os_str() == "-" {
        return io::stdout().write_all(text.as_bytes()).or_else(forgive_closed_pipe);
    }
    fs::write(path, text)?;
    writeln!(io::stdout(), "{}", Summary { report, unit }).or_else(forgive_closed_pipe)
}

/// Prints a line; `println!` would panic if standard output is closed.
fn print(result: fmt::Arguments<'_>) -> ExitCode {
    match writeln!(io::stdout(), "{result}").or_else(forgive_closed_pipe) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(FAILED, &format_args!("cannot write to standard output: {error}")),
    }
}

fn written(what: &str, result: io::Result<()>) -> ExitCode {
    match result.or_else(forgive_closed_pipe) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(FAILED, &format_args!("cannot write {what}: {error}")),
    }
}

/// Prints a line on standard error; `eprintln!` would panic if it is closed.
fn tell(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{}", escape::line(&line.to_string()));
}

pub(crate) fn warn_of_token(file: Option<&Path>) {
    if let Some(warning) = file.and_then(|file| readable_by_all(file, "the token in it")) {
        tell(format_args!("warning: {warning}"));
    }
}

/// Ignores a closed pipe, as with `turnpike ... | head`.
pub(crate) fn forgive_closed_pipe(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error) }
}

fn fail_load(error: &LoadError) -> ExitCode {
    fail(if matches!(error, LoadError::Config(_)) { BAD_USAGE } else { FAILED }, error)
}

fn fail(code: u8, error: &dyn Display) -> ExitCode {
    fail_as(code, error, None)
}

/// Prints one line per error or, with `--json`, one JSON object: the problem that the server or store
/// reported, if there is one.
fn fail_as(code: u8, error: &dyn Display, problem: Option<&Problem>) -> ExitCode {
    if usage::wants_json() {
        let detail = error.to_string();
        let mut object = match problem.map(serde_json::to_value) {
            Some(Ok(Value::Object(problem))) => problem,
            _ => Map::from_iter([("detail".to_owned(), detail.trim_end().into())]),
        };
        object.insert("exit_code".to_owned(), code.into());
        let _ = writeln!(io::stderr(), "{}", escape::json(&Value::Object(object).to_string()));
    } else {
        for line in error.to_string().lines() {
            tell(format_args!("turnpike: {line}"));
        }
    }
    ExitCode::from(code)
}
