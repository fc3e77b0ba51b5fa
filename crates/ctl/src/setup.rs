//! `turnpike setup`: asks for the facts that a server needs, writes its configuration, starts it and probes it.
//!
//! ```text
//!  flags, dialogue ─▶ Answers ─▶ text ─▶ check-config ─▶ file
//!  systemd's service, or a trial ─▶ probe from here ─▶ probe from outside
//! ```

mod answers;
mod args;
mod dialogue;
mod error;
mod file;
mod guide;
mod machine;
mod questions;
mod server;
mod service;

use std::{
    io::{self, IsTerminal as _, Write},
    net::IpAddr,
    path::Path,
};

use turnpike_config::{Mistake, Mistakes, Settings, settings_of};
use turnpike_probe::ProbeReport;
use turnpike_wire::address::is_private;

use answers::Answers;
pub use args::SetupArgs;
use dialogue::Dialogue;
pub use error::SetupError;
use machine::Machine;
use server::Trial;
use service::{Service, UNIT};

/// First port that needs no privilege.
const UNPRIVILEGED: u16 = 1024;

/// Inputs and outputs that the caller provides.
pub struct SetupContext<'a> {
    /// Asks the cloud's metadata service for the public address of this machine.
    pub cloud_address: fn() -> Option<IpAddr>,
    pub new_secret: [u8; 32],
    pub show: &'a dyn Fn(&ProbeReport) -> io::Result<()>,
    pub warn: &'a dyn Fn(&str),
}

/// Returns false if a probe found the server unusable, or a finding of level bad. A server that was not started is not probed.
pub fn set_up(args: &SetupArgs, context: &SetupContext<'_>, out: &mut dyn Write) -> Result<bool, SetupError> {
    let (input, mut output) = (io::stdin(), io::stderr());
    let is_terminal = input.is_terminal() && output.is_terminal();
    let mut input = input.lock();
    let input: Option<&mut dyn io::BufRead> = if is_terminal { Some(&mut input) } else { None };
    let mut dialogue = Dialogue::new(input, &mut output);

    let config = args.config().map_err(SetupError::Dialogue)?;
    let service = Service::find(&config);
    if !args.dry_run {
        check_flags(args, &config, service)?;
    }
    let machine = Machine::new(context.cloud_address, service.is_some_and(Service::is_active));
    let (mut answers, named) = questions::ask(args, &mut dialogue, &machine, context.new_secret)?;
    let here = answers.public.unwrap_or_else(|| machine.address());
    if args.helper.is_some() && answers.name.is_none() && is_private(here) {
        return SetupError::answer(format!("--helper needs --name or --public-address: {here} is private"));
    }
    let warning = answers.name.as_ref().and_then(|name| machine::name_warning(name, &named, here));
    if let Some(warning) = &warning {
        (context.warn)(warning);
    }
    if args.dry_run {
        out.write_all(file::text(&answers, service.is_some()).as_bytes())?;
        return Ok(true);
    }

    let settings = write(&mut answers, &config, service, &machine, context.warn)?;
    let outside = answers.name.as_ref().map_or_else(|| here.to_string(), ToString::to_string);
    writeln!(out, "wrote {}\n", config.display())?;
    writeln!(out, "{}", guide::firewall(&settings))?;
    writeln!(out, "{}", guide::applications(&answers, &settings, &outside))?;
    let mut trial = None;
    match service {
        Some(service) => {
            service.prepare(has_low_port(&settings))?;
            if !args.start && !dialogue.confirm("Start turnpike.service now")? {
                writeln!(out, "To start it: sudo systemctl enable {UNIT} && sudo systemctl restart {UNIT}")?;
                return Ok(true);
            }
            service.start()?;
        }
        None => trial = Some(Trial::start(&config)?),
    }
    let leads_here = !named.is_empty() && named.iter().all(|ip| machine::is_own(*ip));
    let local = server::local_host(&answers, leads_here, machine.address());
    let mut is_green = server::probe_here(&answers, &local, &mut trial, context.show)?;
    if let Some(helper) = &args.helper {
        writeln!(out, "\nfrom {helper}:")?;
        is_green &= server::probe_from(helper, &answers, &outside)?;
    }
    if trial.take().is_some() {
        writeln!(
            out,
            "\nThe server ran for the probe only. To start it: turnpike serve -c {}",
            config.display()
        )?;
    }
    Ok(is_green)
}

fn check_flags(args: &SetupArgs, config: &Path, service: Option<Service>) -> Result<(), SetupError> {
    if args.start && service.is_none() {
        return SetupError::answer(format!(
            "--start needs root, the file {} and the package's {UNIT}: omit --start, or install the package and use sudo",
            args::SERVICE_CONFIG
        ));
    }
    if args.force { Ok(()) } else { file::check_replaceable(config) }
}

/// Writes the configuration after all checks, and returns its settings.
fn write(
    answers: &mut Answers,
    config: &Path,
    service: Option<Service>,
    machine: &Machine,
    warn: &dyn Fn(&str),
) -> Result<Settings, SetupError> {
    // The service's state directory is not in the environment of this process.
    let state = service.map_or_else(String::new, |_| format!("[store]\nstate = {:?}\n", server::STATE));
    let settings = settings_of(&(file::text(answers, service.is_some()) + &state)).map_err(refused)?;
    machine.check_ports(&settings)?;
    if let Some(service) = service {
        answers.certificate = service.with_readable(answers.certificate.clone())?;
    }
    let text = file::text(answers, service.is_some());
    file::write(config, &text, service.map(|service| service.gid), |new| {
        server::check_config(new, config, service)?.iter().for_each(|warning| warn(warning));
        Ok(())
    })?;
    Ok(settings)
}

/// Errors without their positions, because the file does not exist yet.
fn refused(mistakes: Mistakes) -> SetupError {
    let lines = mistakes
        .0
        .iter()
        .map(|Mistake { key, problem, expected, .. }| format!("{key}: {problem}; expected {expected}"));
    SetupError::Answer(lines.collect::<Vec<_>>().join("\n"))
}

fn has_low_port(settings: &Settings) -> bool {
    let listeners = settings.listen.iter().chain(&settings.credentials.listen);
    listeners.chain(settings.http_challenge_listeners()).any(|at| (1..UNPRIVILEGED).contains(&at.port()))
}
