//! Readiness: polls a program until it answers or exits, or until the timeout.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use turnpike_measure::kernel;

use super::run_failure::RunFailure;
use crate::{
    error::LabError,
    experiment::{Ready, ServiceSpec},
    probe::inside,
    program::ChildProgram,
    stop::StopFlag,
    topology::Topology,
};

const INTERVAL: Duration = Duration::from_millis(20);
/// Maximum time that a program needs to enter its namespace.
const SETTLE: Duration = Duration::from_secs(5);
/// A program without a probe counts as ready if it is still running after this time.
const BREATH: Duration = Duration::from_millis(100);

pub(crate) fn wait(
    service: &ServiceSpec,
    program: &mut ChildProgram,
    topology: &Topology,
    log: &Path,
    stop: &StopFlag,
) -> Result<(), RunFailure> {
    program.settle(SETTLE);
    let Some(ready) = &service.ready else {
        program.wait(Instant::now() + BREATH, || stop.requested());
        return match program.ended() {
            Some(_) => Err(RunFailure::NotReady(program.exit_report())),
            None => Ok(()),
        };
    };
    let deadline = Instant::now() + Duration::from_secs_f64(ready.within);
    loop {
        if program.ended().is_some() {
            return Err(RunFailure::NotReady(program.exit_report()));
        }
        if stop.requested() {
            return Err(RunFailure::Interrupted);
        }
        let asked = Instant::now();
        if is_ready(service, topology, log)? {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(RunFailure::NotReady(format!(
                "{} is not ready after {} s ({}); {}",
                service.name,
                ready.within,
                missing(ready),
                program.exit_report()
            )));
        }
        thread::sleep(INTERVAL.saturating_sub(asked.elapsed()));
    }
}

fn is_ready(service: &ServiceSpec, topology: &Topology, log: &Path) -> Result<bool, LabError> {
    let Some((ready, (key, text, _))) =
        service.ready.as_ref().and_then(|ready| Some((ready, ready.probe()?)))
    else {
        return Ok(true);
    };
    let refuse =
        |expected| LabError::usage(format!("{}: ready.{key} \"{text}\": expected {expected}", service.name));
    let port = || text.parse::<u16>().map_err(|_| refuse("a port"));
    let pid = |name: Option<&String>| name.map(|name| topology.anchor(name)).transpose();
    let from = pid(ready.from.as_ref().or(service.namespace.as_ref()))?;
    let own = pid(service.namespace.as_ref())?.unwrap_or_else(std::process::id);
    Ok(match key {
        "stun" => {
            let address = text.parse().map_err(|_| refuse("ADDRESS:PORT, IPv6 in brackets"))?;
            inside::inside(from, || inside::answers_stun(address))?.is_some()
        }
        "udp_port" => kernel::udp_port_is_bound(own, port()?),
        "tcp_port" => kernel::tcp_port_listens(own, port()?),
        _ => String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).contains(&text),
    })
}

fn missing(ready: &Ready) -> String {
    match ready.probe() {
        Some(("stun", address, _)) => format!("no answer to STUN from {address}"),
        Some(("udp_port", port, _)) => format!("no UDP socket on port {port}"),
        Some(("tcp_port", port, _)) => format!("nothing listens on TCP port {port}"),
        Some((_, text, _)) => format!("its output does not contain \"{text}\""),
        None => String::new(),
    }
}
