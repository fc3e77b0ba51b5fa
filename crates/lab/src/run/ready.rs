//! Whether a program has started: asked again and again until it answers, ends, or its time is over.

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use turnpike_measure::kernel;

use super::halt::Halt;
use crate::{
    error::LabError,
    experiment::{Ready, ServiceSpec},
    probe::inside,
    program::ChildProgram,
    stop::StopFlag,
    topology::Topology,
};

const INTERVAL: Duration = Duration::from_millis(20);
/// For a program without a probe to have replaced the commands that enter its namespace.
const SETTLE: Duration = Duration::from_secs(5);
/// A program without a probe that lives so long has not failed at once.
const BREATH: Duration = Duration::from_millis(100);

/// Waits until `program` is ready, as `service` says.
pub(crate) fn wait(
    service: &ServiceSpec,
    program: &mut ChildProgram,
    topology: &Topology,
    log: &Path,
    stop: &StopFlag,
) -> Result<(), Halt> {
    program.settle(SETTLE);
    let Some(ready) = &service.ready else {
        program.wait(Instant::now() + BREATH, || stop.requested());
        return match program.ended() {
            Some(_) => Err(Halt::NotReady(program.obituary())),
            None => Ok(()),
        };
    };
    let question = ReadinessProbe::new(ready, service, topology, log)?;
    let deadline = Instant::now() + Duration::from_secs_f64(ready.within);
    loop {
        if program.ended().is_some() {
            return Err(Halt::NotReady(program.obituary()));
        }
        if stop.requested() {
            return Err(Halt::Interrupted);
        }
        let asked = Instant::now();
        if question.ask()? {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(Halt::NotReady(format!(
                "{} is not ready after {} s ({}); {}",
                service.name,
                ready.within,
                question.describe(),
                program.obituary()
            )));
        }
        thread::sleep(INTERVAL.saturating_sub(asked.elapsed()));
    }
}

enum ReadinessProbe<'a> {
    Stun(SocketAddr, Option<u32>),
    Tcp(SocketAddr, Option<u32>),
    Http(SocketAddr, String, Option<u32>),
    Log(&'a str, &'a Path),
    UdpPort(u16, u32),
    TcpPort(u16, u32),
}

impl<'a> ReadinessProbe<'a> {
    fn new(
        ready: &'a Ready,
        service: &'a ServiceSpec,
        topology: &Topology,
        log: &'a Path,
    ) -> Result<Self, LabError> {
        let refuse = |what: &str, text: &str, expected: &str| {
            LabError::usage(format!("{}: ready.{what} \"{text}\": expected {expected}", service.name))
        };
        let address = |what: &str, text: &str| {
            text.parse::<SocketAddr>().map_err(|_| refuse(what, text, "ADDRESS:PORT, IPv6 in brackets"))
        };
        let pid = |name: &Option<String>| name.as_deref().map(|name| topology.anchor(name)).transpose();
        let from = pid(if ready.from.is_some() { &ready.from } else { &service.namespace })?;
        if let Some(text) = &ready.stun {
            return Ok(Self::Stun(address("stun", text)?, from));
        }
        if let Some(text) = &ready.tcp {
            return Ok(Self::Tcp(address("tcp", text)?, from));
        }
        if let Some(url) = &ready.http {
            let (address, path) = inside::parse_url(url)?;
            return Ok(Self::Http(address, path, from));
        }
        let own = pid(&service.namespace)?.unwrap_or_else(std::process::id);
        if let Some(port) = &ready.udp_port {
            return Ok(Self::UdpPort(port.parse().map_err(|_| refuse("udp_port", port, "a port"))?, own));
        }
        if let Some(port) = &ready.tcp_port {
            return Ok(Self::TcpPort(port.parse().map_err(|_| refuse("tcp_port", port, "a port"))?, own));
        }
        // Checked when the file was read: exactly one is there.
        Ok(Self::Log(ready.log.as_deref().unwrap_or_default(), log))
    }

    fn ask(&self) -> Result<bool, LabError> {
        let answered = match self {
            Self::Stun(address, from) => inside::inside(*from, || inside::answers_stun(*address))?,
            Self::Tcp(address, from) => inside::inside(*from, || inside::accepts_tcp(*address))?,
            Self::Http(address, path, from) => {
                inside::inside(*from, || inside::http_get(*address, path).map(drop))?
            }
            Self::Log(text, log) => {
                let said = fs::read(log).unwrap_or_default();
                String::from_utf8_lossy(&said).contains(text).then_some(())
            }
            Self::UdpPort(port, pid) => kernel::udp_port_is_bound(*pid, *port).then_some(()),
            Self::TcpPort(port, pid) => kernel::tcp_port_listens(*pid, *port).then_some(()),
        };
        Ok(answered.is_some())
    }

    fn describe(&self) -> String {
        match self {
            Self::Stun(address, _) => format!("no answer to STUN from {address}"),
            Self::Tcp(address, _) => format!("no TCP connection to {address}"),
            Self::Http(address, path, _) => format!("no answer to http://{address}{path}"),
            Self::Log(text, _) => format!("its output has no \"{text}\""),
            Self::UdpPort(port, _) => format!("no UDP socket on port {port}"),
            Self::TcpPort(port, _) => format!("nothing listens on TCP port {port}"),
        }
    }
}
