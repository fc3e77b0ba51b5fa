//! The `turnpike` program: arguments in, exit codes out. Everything else happens in the crates below.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command line program prints its results")]

mod args;
mod credentials_args;
mod load_args;
mod load_forward_args;
mod serve_args;
mod summary;

use std::{
    fmt::Display,
    fs,
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Parser;
use turnpike_load::{
    LoadError, Outcome, Report,
    progress::{self, Interval},
    reflect::Reflector,
    stream, turn, udp,
};
use turnpike_ops::{
    serve::{self, ServeError},
    stop,
};

use crate::{
    args::{Cli, Command},
    credentials_args::CredentialsArgs,
    load_args::{LoadCommand, ReflectArgs},
    serve_args::ServeArgs,
    summary::{Summary, Unit},
};

/// Something did not work.
const FAILED: u8 = 1;
/// Wrong flags or configuration; clap exits with the same.
const BAD_USAGE: u8 = 2;
/// `--max-loss` or `--max-p99`.
const LIMIT_EXCEEDED: u8 = 3;

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Serve(args) => run_server(args),
        Command::CheckConfig(args) => check_config(args),
        Command::Credentials(args) => print_credentials(args),
        Command::Reflect(args) => run_reflector(args),
        Command::Load { command } => generate(command),
        Command::Lab(args) => ExitCode::from(turnpike_lab::run(*args, &turnpike_lab::Stop::on_signals())),
    }
}

fn run_server(args: ServeArgs) -> ExitCode {
    match serve::serve(&args.into_sources(), &mut io::stdout()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(ServeError::Config(errors)) => fail(BAD_USAGE, &errors),
        Err(error) => fail(FAILED, &error),
    }
}

fn check_config(args: ServeArgs) -> ExitCode {
    match args.into_sources().load() {
        Ok(loaded) => {
            for warning in &loaded.warnings {
                eprintln!("warning: {warning}");
            }
            println!("ok\n\n{}", loaded.settings.to_toml().trim_end());
            ExitCode::SUCCESS
        }
        Err(errors) => fail(BAD_USAGE, &errors),
    }
}

fn print_credentials(args: CredentialsArgs) -> ExitCode {
    match args.make() {
        Ok(lines) => {
            println!("{lines}");
            ExitCode::SUCCESS
        }
        Err(error) => fail(FAILED, &error),
    }
}

fn run_reflector(args: ReflectArgs) -> ExitCode {
    let config = args.into_config();
    let reflector = match Reflector::start(&config) {
        Ok(reflector) => reflector,
        Err(error) => return fail_load(&error),
    };
    for listener in reflector.listeners() {
        eprintln!("listening on udp {listener}");
    }
    for listener in reflector.tcp_listeners() {
        eprintln!("listening on tcp {listener}");
    }
    eprintln!("data path {}; workers: {}", config.datapath, config.workers);
    if let Err(error) = stop::wait() {
        return fail(FAILED, &format_args!("cannot wait for signals: {error}"));
    }
    let stats = reflector.stats();
    reflector.stop();
    eprintln!(
        "received {} datagrams, sent {} back, {} refused by the kernel, {} dropped for want of receive buffer",
        stats.received, stats.sent, stats.refused, stats.kernel_drops
    );
    if stats.connections > 0 {
        eprintln!(
            "took {} TCP connections, received {} bytes, sent {}",
            stats.connections, stats.tcp_received_bytes, stats.tcp_sent_bytes
        );
    }
    ExitCode::SUCCESS
}

fn generate(command: LoadCommand) -> ExitCode {
    match command {
        LoadCommand::Turn(args) => match args.into_config() {
            Ok((config, json)) => run_load(json, Unit::Messages, |show| turn::run(&config, show)),
            Err(error) => fail(FAILED, &error),
        },
        LoadCommand::Udp(args) => {
            let (config, json) = args.into_config();
            run_load(json, Unit::Messages, |show| udp::run(&config, show))
        }
        LoadCommand::Tcp(args) => {
            let (config, json) = args.into_config();
            run_load(json, Unit::Bytes, |show| stream::run(&config, show))
        }
        LoadCommand::Rr(args) => {
            let (config, json) = args.into_config();
            run_load(json, Unit::Messages, |show| stream::run(&config, show))
        }
        LoadCommand::Connect(args) => {
            let (config, json) = args.into_config();
            run_load(json, Unit::Messages, |show| stream::run(&config, show))
        }
    }
}

fn run_load(
    json: Option<PathBuf>,
    unit: Unit,
    run: impl FnOnce(&mut dyn FnMut(&Interval)) -> Result<Outcome, LoadError>,
) -> ExitCode {
    let display = progress::Display::new(io::stderr().is_terminal());
    let result = run(&mut |interval| display.show(interval));
    display.finish();
    let outcome = match result {
        Ok(outcome) => outcome,
        Err(error) => return fail_load(&error),
    };
    if let Err(error) = show(&outcome.report, unit, json.as_deref()) {
        return fail(FAILED, &format_args!("cannot write the result: {error}"));
    }
    let exceeded = outcome.limits_exceeded();
    if exceeded.is_empty() { ExitCode::SUCCESS } else { fail(LIMIT_EXCEEDED, &exceeded.join("\n")) }
}

/// JSON where it was asked for; for people on standard output, unless that has the JSON.
fn show(report: &Report, unit: Unit, json: Option<&Path>) -> io::Result<()> {
    let Some(path) = json else {
        println!("{}", Summary { report, unit });
        return Ok(());
    };
    let mut text = serde_json::to_string(report)?;
    text.push('\n');
    if path.as_os_str() == "-" {
        return io::stdout().write_all(text.as_bytes());
    }
    fs::write(path, text)?;
    println!("{}", Summary { report, unit });
    Ok(())
}

fn fail_load(error: &LoadError) -> ExitCode {
    fail(if matches!(error, LoadError::Config(_)) { BAD_USAGE } else { FAILED }, error)
}

/// One line per mistake, each told from which program it comes.
fn fail(code: u8, error: &dyn Display) -> ExitCode {
    for line in error.to_string().lines() {
        eprintln!("turnpike: {line}");
    }
    ExitCode::from(code)
}
