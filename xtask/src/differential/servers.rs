//! The servers under comparison: their addresses, command lines and client connections.
//!
//! Each has its own address in a private network namespace, so that ports never conflict.

use std::{
    fmt,
    fs::{self, File},
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use turnpike_client::{ClientTransport, TlsOptions};
use turnpike_probe::connection::{ProbeConnection, Trust};

use super::{
    INSIDE, Kind,
    message::{REALM, offers_sha256, users},
    session::SIX,
};
use crate::Failure;

/// Maximum number of allocations per user in sequences of kind `Overload`.
const QUOTA: u16 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Name {
    Turnpike,
    Coturn,
    Pion,
    /// Not a server: stands for the rules in RFCs that no other server implements.
    Rfc,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Turnpike => "turnpike",
            Self::Coturn => "coturn",
            Self::Pion => "pion",
            Self::Rfc => "the RFC",
        })
    }
}

pub(super) struct Programs {
    pub(super) turnpike: PathBuf,
    pub(super) coturn: Option<PathBuf>,
    pub(super) pion: Option<PathBuf>,
}

pub(super) struct Server {
    pub(super) name: Name,
    pub(super) has_ipv6: bool,
    pub(super) knows_sha256: bool,
    ip: IpAddr,
    trust: Trust,
    process: Child,
}

/// Starts all available servers with settings for this kind of sequence; their logs go to `dir`.
pub(super) fn start(programs: &Programs, kind: Kind, dir: &Path) -> Result<Vec<Server>, Failure> {
    let has_ipv6 = UdpSocket::bind((SIX, 0)).is_ok();
    let made = rcgen::generate_simple_self_signed(vec!["turn.example.org".to_owned()])?;
    fs::write(dir.join("cert.pem"), made.cert.pem())?;
    fs::write(dir.join("key.pem"), made.signing_key.serialize_pem())?;
    let place = Place { dir, kind, has_ipv6 };
    let mut servers = vec![place.start(Name::Turnpike, place.turnpike(&programs.turnpike))?];
    if let Some(program) = &programs.coturn {
        servers.push(place.start(Name::Coturn, place.coturn(program))?);
    }
    if let Some(program) = &programs.pion {
        servers.push(place.start(Name::Pion, place.pion(program))?);
    }
    Ok(servers)
}

struct Place<'a> {
    dir: &'a Path,
    kind: Kind,
    has_ipv6: bool,
}

impl Place<'_> {
    fn start(&self, name: Name, mut command: Command) -> Result<Server, Failure> {
        let log = File::create(self.dir.join(format!("{name}.log")))?;
        let process = command.stdout(log.try_clone()?).stderr(log).spawn()?;
        let ip = address(name).into();
        let options = TlsOptions { insecure: true, resumption: false, ..TlsOptions::default() };
        let trust = Trust::new(&options, Some("turn.example.org"), (ip, 5349).into())?;
        let mut server = Server { name, has_ipv6: self.has_ipv6, knows_sha256: false, ip, trust, process };
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            if let Some(challenge) = server.challenge() {
                server.knows_sha256 = offers_sha256(&challenge);
                return Ok(server);
            }
            if let Some(status) = server.process.try_wait()? {
                return Err(format!("{name} exited ({status}): see {}", self.dir.display()).into());
            }
            if Instant::now() > deadline {
                return Err(format!("{name} does not answer: see {}", self.dir.display()).into());
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn turnpike(&self, program: &Path) -> Command {
        let ip = address(Name::Turnpike);
        let mut command = Command::new(program);
        command.env_remove(INSIDE).arg("serve").args([
            "--listen",
            &format!("{ip}:3478"),
            "--admin",
            "off",
            "--realm",
            REALM,
        ]);
        command.args(["--tls-listen", &format!("{ip}:5349"), "--dtls-listen", &format!("{ip}:5349")]);
        command
            .arg("--tls-cert")
            .arg(self.dir.join("cert.pem"))
            .arg("--tls-key")
            .arg(self.dir.join("key.pem"));
        command.args(["--relay-ip", &ip.to_string(), "--allow-peer", "127.0.0.0/8"]);
        for (user, password) in users() {
            command.args(["--user", &format!("{user}:{password}")]);
        }
        if self.has_ipv6 {
            command.args(["--relay-ip", &six(Name::Turnpike), "--allow-peer", &SIX.to_string()]);
        }
        match self.kind {
            Kind::Requests => {}
            Kind::Time => _ = command.env("TURNPIKE_AUTH_NONCE_LIFETIME", "60"),
            Kind::Overload => _ = command.env("TURNPIKE_LIMITS_ALLOCATIONS_PER_USER", QUOTA.to_string()),
            Kind::Shared => _ = command.env("TURNPIKE_RELAY_SHARED_PORTS", "1"),
        }
        command
    }

    fn coturn(&self, program: &Path) -> Command {
        let ip = address(Name::Coturn).to_string();
        let file = |name: &str| self.dir.join(name).display().to_string();
        let mut command = Command::new(program);
        command.args(["-n", "--no-cli", "--log-file", "stdout", "--simple-log"]);
        command.args(["--pidfile", &file("coturn.pid"), "--userdb", &file("coturn.db")]);
        command.args(["-L", &ip, "-E", &ip, "-p", "3478", "--tls-listening-port", "5349"]);
        command.args(["--cert", &file("cert.pem"), "--pkey", &file("key.pem")]);
        command.args(["--lt-cred-mech", "-r", REALM, "--allow-loopback-peers"]);
        // coturn gets one thread: with more, the first responses to a client may be reordered.
        command.args(["-m", "0"]);
        command.args(["--denied-peer-ip", "10.0.0.0-10.255.255.255"]);
        for (user, password) in users() {
            command.args(["-u", &format!("{user}:{password}")]);
        }
        if self.has_ipv6 {
            command.args(["-E", &six(Name::Coturn)]);
        }
        match self.kind {
            Kind::Requests | Kind::Shared => {}
            Kind::Time => _ = command.arg("--stale-nonce=60"),
            Kind::Overload => _ = command.args(["--user-quota", &QUOTA.to_string()]),
        }
        command.current_dir(self.dir);
        command
    }

    fn pion(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.args(["-listen", &address(Name::Pion).to_string(), "-realm", REALM, "-deny", "10.0.0.0/8"]);
        command.arg("-cert").arg(self.dir.join("cert.pem")).arg("-key").arg(self.dir.join("key.pem"));
        if self.has_ipv6 {
            command.args(["-relay6", &six(Name::Pion)]);
        }
        if self.kind == Kind::Overload {
            command.args(["-quota", &QUOTA.to_string()]);
        }
        command.args(users().map(|(user, password)| format!("{user}:{password}")));
        command
    }
}

impl Server {
    pub(super) fn connect(
        &self,
        transport: ClientTransport,
        deadline: Instant,
    ) -> Result<ProbeConnection, String> {
        let address = SocketAddr::new(self.ip, transport.default_port());
        ProbeConnection::open(transport, address, Some(&self.trust), deadline)
            .map(|(connection, _)| connection)
    }

    fn challenge(&self) -> Option<super::message::Challenge> {
        use turnpike_wire::stun::{Class, Header, View, Writer, method};
        let deadline = Instant::now() + Duration::from_secs(1);
        let mut connection = self.connect(ClientTransport::Udp, deadline).ok()?;
        let mut buffer = Vec::new();
        let header = Header { class: Class::Request, method: method::REFRESH, transaction: [1; 12] };
        Writer::begin(&mut buffer, header).finish(false);
        connection.send(&buffer, deadline).ok()?;
        let answer = connection.receive(deadline).ok()?;
        super::message::challenge(&View::new_checked(&answer).ok()?)
    }

    pub(super) fn socket(&self) -> io::Result<UdpSocket> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        socket.connect((self.ip, 3478))?;
        Ok(socket)
    }

    pub(super) fn ended(&mut self) -> Option<String> {
        let status = self.process.try_wait().ok()??;
        Some(format!("{} has exited: {status}", self.name))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Errors are ignored, because the process may already have exited.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

const fn address(name: Name) -> Ipv4Addr {
    Ipv4Addr::new(127, 0, 1, name as u8 + 1)
}

pub(super) fn six(name: Name) -> String {
    format!("2001:db8::{}", name as u8 + 1)
}
