//! The server that reads the new file, and probes of it: from this machine, and from another one over SSH.

use std::{
    env,
    io::{self, Write as _},
    net::IpAddr,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use rustix::process::{Pid, Signal, kill_process};
use turnpike_client::{Login, ServerUri, TlsOptions, uri::Scheme};
use turnpike_config::restapi_credentials;
use turnpike_probe::{FindingLevel, ProbeConfig, ProbeReport};

use crate::setup::{
    answers::{Answers, Certificate, ClientAccess},
    error::SetupError,
    service::Service,
};

/// Lifetime of the probe's credential in seconds.
const LIFETIME: u64 = 600;
/// Time for the server to open its listeners.
const START: Duration = Duration::from_secs(10);
/// Time for the authority to issue a certificate.
const ORDER: Duration = Duration::from_secs(45);
const PAUSE: Duration = Duration::from_secs(1);
/// State directory of the service.
pub(crate) const STATE: &str = "/var/lib/turnpike";
/// Exit code of a shell that does not find the program, and of an ssh that cannot connect.
const NO_PROGRAM: i32 = 127;
const NO_CONNECTION: i32 = 255;

fn this_program() -> Result<Command, SetupError> {
    let failed = |source| SetupError::Program { program: "turnpike".to_owned(), source };
    let mut command = env::current_exe().map(Command::new).map_err(failed)?;
    command.stdin(Stdio::null());
    Ok(command)
}

/// Runs `turnpike check-config` on the new file, as the service's user if there is one. Returns the warnings; they and the
/// errors contain the path `shown`.
pub(crate) fn check_config(
    file: &Path,
    shown: &Path,
    service: Option<Service>,
) -> Result<Vec<String>, SetupError> {
    let mut command = this_program()?;
    command.args(["check-config", "-c"]).arg(file);
    if let Some(Service { uid, gid }) = service {
        command.env_clear().env("STATE_DIRECTORY", STATE).current_dir("/").uid(uid).gid(gid);
    }
    let failed = |source| SetupError::Program { program: "turnpike check-config".to_owned(), source };
    let output = command.output().map_err(failed)?;
    let messages = String::from_utf8_lossy(&output.stderr);
    let messages = messages.replace(&file.display().to_string(), &shown.display().to_string());
    let prefix = if output.status.success() { "warning: " } else { "turnpike: " };
    let lines = messages.lines().map(|line| line.strip_prefix(prefix).unwrap_or(line).to_owned());
    if output.status.success() {
        return Ok(lines.collect());
    }
    Err(SetupError::Rejected(lines.collect::<Vec<_>>().join("\n")))
}

/// A server that runs only while it is probed.
pub(crate) struct Trial(Child);

impl Trial {
    pub(crate) fn start(config: &Path) -> Result<Self, SetupError> {
        let mut command = this_program()?;
        command.args(["serve", "--log", "error", "-c"]).arg(config).stdout(Stdio::null());
        let failed = |source| SetupError::Program { program: "turnpike serve".to_owned(), source };
        command.spawn().map(Self).map_err(failed)
    }

    fn check(&mut self) -> Result<(), SetupError> {
        match self.0.try_wait() {
            Ok(Some(status)) => {
                Err(SetupError::Start(format!("turnpike serve ended ({status}): see the lines above")))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
            let _ = self.0.wait();
        }
    }
}

/// URIs of the server at this host: TLS first, because the probe may have to wait for an ordered certificate, then UDP and TCP.
pub(crate) fn uris(answers: &Answers, host: &str) -> Vec<ServerUri> {
    let uri = |scheme, port| ServerUri { scheme, host: host.to_owned(), port: Some(port), tcp: None };
    let tls = answers.tls_port().map(|port| uri(Scheme::Turns, port));
    tls.into_iter().chain([uri(Scheme::Turn, answers.port())]).collect()
}

pub(crate) fn login(answers: &Answers) -> Login {
    let secret = &answers.secret;
    if let ClientAccess::User(name) = &answers.access {
        return Login { name: name.clone(), password: secret.reveal().to_owned() };
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let name = restapi_credentials::username(now + LIFETIME, "setup");
    let password = restapi_credentials::password(secret, &name).reveal().to_owned();
    Login { name, password }
}

/// Probes the server at its local address. Repeats a failed probe for as long as the server may still be opening listeners or
/// waiting for a certificate. Returns true if every report is green.
pub(crate) fn probe_here(
    answers: &Answers,
    host: &str,
    trial: &mut Option<Trial>,
    show: &dyn Fn(&ProbeReport) -> io::Result<()>,
) -> Result<bool, SetupError> {
    let is_ordered = matches!(answers.certificate, Certificate::Automatic { .. });
    let deadline = Instant::now() + if is_ordered { ORDER } else { START };
    let server_name = answers.name.as_ref().map(ToString::to_string);
    let mut all_green = true;
    for uri in uris(answers, host) {
        let config = ProbeConfig {
            user: Some(login(answers)),
            tls: TlsOptions { server_name: server_name.clone(), resumption: false, ..TlsOptions::default() },
            ..ProbeConfig::new(uri)
        };
        let report = loop {
            if let Some(trial) = trial {
                trial.check()?;
            }
            let report = turnpike_probe::run(&config)?;
            if is_green(&report) || Instant::now() >= deadline {
                break report;
            }
            thread::sleep(PAUSE);
        };
        show(&report)?;
        all_green &= is_green(&report);
    }
    Ok(all_green)
}

fn is_green(report: &ProbeReport) -> bool {
    report.usable && report.worst() < FindingLevel::Bad
}

/// Runs `turnpike probe` on another machine. The credential is in its standard input, because process lists show arguments.
pub(crate) fn probe_from(helper: &str, answers: &Answers, host: &str) -> Result<bool, SetupError> {
    let Login { name, password } = login(answers);
    let mut all_green = true;
    for uri in uris(answers, host) {
        let script = format!(
            "IFS= read -r TURNPIKE_PROBE_USER; export TURNPIKE_PROBE_USER; exec turnpike probe {uri} --fail-on bad"
        );
        let failed = |source| SetupError::Program { program: "ssh".to_owned(), source };
        let mut ssh = Command::new("ssh")
            .args(["-o", "ConnectTimeout=10", "--", helper, &format!("sh -c '{script}'")])
            .stdin(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        // A failed ssh closes the pipe; its exit code explains more.
        if let Some(mut input) = ssh.stdin.take() {
            let _ = writeln!(input, "{name}:{password}");
        }
        match ssh.wait().map_err(failed)?.code() {
            Some(0) => {}
            Some(NO_CONNECTION) => {
                return SetupError::answer(format!(
                    "ssh cannot run a command on {helper}: check with ssh {helper} true"
                ));
            }
            Some(NO_PROGRAM) => {
                return SetupError::answer(format!(
                    "{helper} has no turnpike in its PATH: install it there, or omit --helper"
                ));
            }
            _ => all_green = false,
        }
    }
    Ok(all_green)
}

/// Host for probes from this machine: a listener's specific address, else the name if it resolves to this machine, else `address`.
pub(crate) fn local_host(answers: &Answers, leads_here: bool, address: IpAddr) -> String {
    let listener = answers.listen.first().map(|listener| listener.ip()).filter(|ip| !ip.is_unspecified());
    match (&answers.name, listener) {
        (_, Some(ip)) => ip.to_string(),
        (Some(name), None) if leads_here => name.to_string(),
        _ => address.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use crate::setup::answers::HttpsPort;

    use super::*;

    fn answers(certificate: Certificate, https: HttpsPort) -> Answers {
        Answers {
            name: "turn.example.org".parse().ok(),
            certificate,
            access: ClientAccess::Secret,
            https,
            public: None,
            relay_ports: None,
            listen: vec![([0, 0, 0, 0], 3478).into()],
            secret: turnpike_config::Secret::new("north"),
        }
    }

    #[test]
    fn each_client_port_is_probed() {
        let automatic = || Certificate::Automatic { contact: None };
        for (certificate, https, expected) in [
            (Certificate::None, HttpsPort::No, &["turn:h:3478"][..]),
            (automatic(), HttpsPort::No, &["turns:h:3478", "turn:h:3478"]),
            (automatic(), HttpsPort::Yes, &["turns:h:443", "turn:h:3478"]),
        ] {
            let found = uris(&answers(certificate, https), "h");
            assert_eq!(found.iter().map(ToString::to_string).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn a_name_is_probed_only_if_it_resolves_to_this_machine() {
        let mut answers = answers(Certificate::None, HttpsPort::No);
        let host = |answers: &Answers, leads_here| local_host(answers, leads_here, [10, 0, 0, 5].into());
        assert_eq!(host(&answers, true), "turn.example.org");
        assert_eq!(host(&answers, false), "10.0.0.5");
        answers.listen = vec![([127, 0, 0, 1], 3478).into()];
        assert_eq!(host(&answers, true), "127.0.0.1");
    }

    #[test]
    fn the_probe_uses_the_credential_from_the_answers() {
        let mut answers = answers(Certificate::None, HttpsPort::No);
        let Login { name, password } = login(&answers);
        assert_eq!(restapi_credentials::parse(&name).map(|(_, id)| id), Some("setup"));
        assert_eq!(password, restapi_credentials::password(&answers.secret, &name).reveal());
        answers.access = ClientAccess::User("alice".to_owned());
        assert_eq!(login(&answers), Login { name: "alice".to_owned(), password: "north".to_owned() });
    }
}
