//! The programs under comparison and the programs that load them, as command lines.

use std::path::{Path, PathBuf};

use super::{
    netns::{PEER_IP, RELAY_LISTEN_IP, RELAY_PEER_IP},
    workload::Transport,
};
use crate::Failure;

/// UDP and TCP.
pub(crate) const TURN_PORT: u16 = 3478;
/// TLS.
pub(crate) const TLS_PORT: u16 = 5349;
pub(crate) const ECHO_PORT: u16 = 3480;
pub(crate) const USER: &str = "bench";
pub(crate) const PASSWORD: &str = "bench";
const REALM: &str = "bench";
/// Relay ports of every subject: room for 10,000 allocations and their successors.
const PORTS: (u16, u16) = (10240, 65535);

/// Lifts turnpike's quotas, as coturn's flags do with its own; other programs do not know these variables.
pub(crate) const NO_QUOTAS: [(&str, &str); 2] =
    [("TURNPIKE_LIMITS_ALLOCATIONS", "50000"), ("TURNPIKE_LIMITS_ALLOCATIONS_PER_USER", "50000")];

/// A relay to be measured.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    pub(crate) name: String,
    /// What is the same for all transports.
    command: Vec<String>,
    /// Arguments added where clients come by UDP.
    over_datagrams: Vec<String>,
    /// Arguments added where clients come by TCP or TLS; `{cert}` and `{key}` are not filled in yet.
    over_streams: Vec<String>,
}

impl Subject {
    /// Debian's coturn with one relay thread, no quota, no log, and without the transports that are not measured. What
    /// waits for it listens by UDP always.
    pub(crate) fn coturn() -> Self {
        let (first, last) = PORTS;
        let command = format!(
            "turnserver -n --listening-ip {RELAY_LISTEN_IP} --listening-port {TURN_PORT} --relay-ip {RELAY_PEER_IP} \
             --min-port {first} --max-port {last} --lt-cred-mech --user {USER}:{PASSWORD} --realm {REALM} \
             --relay-threads 1 --user-quota 0 --total-quota 0 --max-bps 0 --allowed-peer-ip {PEER_IP} \
             --no-dtls --no-tcp-relay --no-cli --no-rfc5780 --no-multicast-peers \
             --log-file /dev/null --simple-log --no-stdout-log --pidfile /dev/null"
        );
        Self {
            name: "coturn".to_owned(),
            command: words(&command),
            over_datagrams: words("--no-tls --no-tcp"),
            over_streams: words(&format!("--tls-listening-port {TLS_PORT} --cert {{cert}} --pkey {{key}}")),
        }
    }

    /// `turnpike serve` of the given binary with one worker.
    pub(crate) fn turnpike(name: &str, binary: &Path, datapath: &str) -> Self {
        let (first, last) = PORTS;
        let arguments = format!(
            "serve --listen {RELAY_LISTEN_IP}:{TURN_PORT} --relay-ip {RELAY_PEER_IP} --relay-ports {first}-{last} \
             --realm {REALM} --user {USER}:{PASSWORD} --allow-peer {PEER_IP}/32 --workers 1 --datapath {datapath}"
        );
        let mut command = vec![binary.display().to_string()];
        command.extend(words(&arguments));
        let streams =
            format!("--tls-listen {RELAY_LISTEN_IP}:{TLS_PORT} --tls-cert {{cert}} --tls-key {{key}}");
        Self { name: name.to_owned(), command, over_datagrams: Vec::new(), over_streams: words(&streams) }
    }

    /// `NAME=COMMAND`: a lone path is a turnpike binary; otherwise a command line, in which `{listen}`,
    /// `{listen_ip}`, `{port}`, `{tls_port}`, `{cert}`, `{key}`, `{relay_ip}`, `{peer_ip}`, `{user}`, `{password}` and
    /// `{realm}` are filled in. It is the same for all transports.
    pub(crate) fn parse(text: &str, datapath: &str) -> Result<Self, Failure> {
        let (name, command) = text
            .split_once('=')
            .filter(|(name, command)| !name.is_empty() && !command.trim().is_empty())
            .ok_or_else(|| format!("--subject {text:?}: expected NAME=COMMAND"))?;
        let command = words(command);
        if let [binary] = &command[..] {
            return Ok(Self::turnpike(name, Path::new(binary), datapath));
        }
        let command = command.iter().map(|word| fill_in(word)).collect();
        Ok(Self { name: name.to_owned(), command, over_datagrams: Vec::new(), over_streams: Vec::new() })
    }

    /// The relay's command line where clients come by `transport`. The files in it are still called `{cert}` and `{key}`.
    pub(crate) fn command(&self, transport: Transport) -> Vec<String> {
        let more = if transport.is_stream() { &self.over_streams } else { &self.over_datagrams };
        self.command.iter().chain(more).cloned().collect()
    }
}

/// The program that makes the load.
#[derive(Clone, Debug)]
pub(crate) enum Generator {
    /// `turnpike load turn`.
    Turnpike(PathBuf),
    /// coturn's `turnutils_uclient`: a second opinion on packets per busy second, from a program that is not ours.
    /// It floods at its own pace and reports no latency.
    Uclient,
}

/// What the generator is asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Load {
    pub(crate) transport: Transport,
    pub(crate) clients: u32,
    /// Datagrams a second towards the peers, all clients together; `None` for as many as possible.
    pub(crate) rate: Option<u32>,
    /// Payload of a datagram in bytes.
    pub(crate) size: u32,
    /// Datagrams that one client sends back to back before the next client's turn.
    pub(crate) burst: u32,
    /// At saturation: datagrams that one client may have under way; `None` for no bound.
    pub(crate) window: Option<u32>,
    /// Allocation churn instead of traffic.
    pub(crate) churn: bool,
    /// Seconds measured by the generator, after its warm-up.
    pub(crate) seconds: f64,
    /// Seconds of traffic before it measures.
    pub(crate) warmup: f64,
}

impl Generator {
    /// The command that makes `load` against the relay; the JSON result goes to `result`. The certificate to trust is still
    /// called `{cert}` in it.
    pub(crate) fn command(&self, load: &Load, result: &Path) -> Result<Vec<String>, Failure> {
        match self {
            Self::Turnpike(binary) => Ok(turnpike_load(binary, load, result)),
            // On a stream only the generator knows what has arrived, and this one does not say it.
            Self::Uclient if load.churn || load.rate == Some(0) || load.transport.is_stream() => {
                Err("turnutils_uclient cannot make this load".into())
            }
            Self::Uclient => Ok(words(&format!(
                "turnutils_uclient -c -e {PEER_IP} -r {ECHO_PORT} -u {USER} -w {PASSWORD} -p {TURN_PORT} \
                 -m {} -l {} -n 100000000 -z {} {RELAY_LISTEN_IP}",
                load.clients,
                load.size,
                load.rate.map_or(0, |rate| 1000 * load.clients / rate.max(1)),
            ))),
        }
    }

    /// The echo on the peer's side.
    pub(crate) fn reflector(&self) -> Vec<String> {
        match self {
            Self::Turnpike(binary) => {
                let mut command = vec![binary.display().to_string()];
                command.extend(words(&format!("reflect --listen {PEER_IP}:{ECHO_PORT} --workers 1")));
                command
            }
            Self::Uclient => words(&format!("turnutils_peer -L {PEER_IP} -p {ECHO_PORT}")),
        }
    }

    /// As it stands with the results.
    pub(crate) fn title(&self) -> &'static str {
        match self {
            Self::Turnpike(_) => "turnpike load turn",
            Self::Uclient => "turnutils_uclient",
        }
    }

    /// Whether it ends by itself and leaves a result.
    pub(crate) fn reports(&self) -> bool {
        matches!(self, Self::Turnpike(_))
    }
}

fn turnpike_load(binary: &Path, load: &Load, result: &Path) -> Vec<String> {
    let mut command = vec![binary.display().to_string()];
    let port = if load.transport == Transport::Tls { TLS_PORT } else { TURN_PORT };
    command.extend(words(&format!(
        "load turn {RELAY_LISTEN_IP}:{port} --transport {} --peer {PEER_IP}:{ECHO_PORT} --user {USER}:{PASSWORD} \
         --clients {} --size {} --duration {} --warmup {} --mode {}",
        load.transport.name(),
        load.clients,
        load.size,
        load.seconds,
        load.warmup,
        if load.churn { "allocate" } else { "packet" },
    )));
    let rate = load.rate.map_or("max".to_owned(), |rate| rate.to_string());
    command.extend(["--rate".to_owned(), rate]);
    if !load.churn {
        command.extend(words(&format!("--via channel --burst {}", load.burst)));
    }
    if let Some(window) = load.window {
        command.extend(words(&format!("--window {window}")));
    }
    if load.transport == Transport::Tls {
        command.extend(words("--ca {cert}"));
    }
    command.extend(["--json".to_owned(), result.display().to_string()]);
    command
}

fn fill_in(word: &str) -> String {
    word.replace("{listen}", &format!("{RELAY_LISTEN_IP}:{TURN_PORT}"))
        .replace("{listen_ip}", RELAY_LISTEN_IP)
        .replace("{port}", &TURN_PORT.to_string())
        .replace("{tls_port}", &TLS_PORT.to_string())
        .replace("{relay_ip}", RELAY_PEER_IP)
        .replace("{peer_ip}", PEER_IP)
        .replace("{user}", USER)
        .replace("{password}", PASSWORD)
        .replace("{realm}", REALM)
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lone_path_is_a_turnpike_binary() {
        let subject = Subject::parse("old=/tmp/turnpike-old", "mmsg").unwrap();
        assert_eq!(subject.name, "old");
        let command = subject.command(Transport::Udp);
        assert_eq!(command[..2], ["/tmp/turnpike-old", "serve"]);
        assert!(command.ends_with(&["--datapath".to_owned(), "mmsg".to_owned()]));
    }

    #[test]
    fn a_command_line_gets_the_addresses_of_the_network() {
        let subject =
            Subject::parse("x=relayd -l {listen} -r {relay_ip} -u {user}:{password}", "gso").unwrap();
        assert_eq!(
            subject.command(Transport::Udp),
            ["relayd", "-l", "10.77.1.1:3478", "-r", "10.77.2.1", "-u", "bench:bench"]
        );
    }

    #[test]
    fn a_subject_without_a_name_or_command_is_refused() {
        for text in ["/tmp/turnpike", "=x", "x= "] {
            assert!(Subject::parse(text, "gso").is_err(), "{text}");
        }
    }

    #[test]
    fn the_uclient_stand_in_refuses_loads_it_cannot_make() {
        let refuses = |load: Load| Generator::Uclient.command(&load, Path::new("/tmp/x")).is_err();
        assert!(!refuses(LOAD));
        assert!(refuses(Load { churn: true, ..LOAD }));
        assert!(refuses(Load { transport: Transport::Tls, ..LOAD }));
    }

    const LOAD: Load = Load {
        transport: Transport::Udp,
        clients: 1,
        rate: None,
        size: 120,
        burst: 1,
        window: None,
        churn: false,
        seconds: 1.0,
        warmup: 0.0,
    };

    #[test]
    fn only_over_streams_do_relays_listen_on_them() {
        let coturn = Subject::coturn();
        let has = |transport, word: &str| coturn.command(transport).iter().any(|other| other == word);
        assert!(has(Transport::Udp, "--no-tcp") && has(Transport::Udp, "--no-tls"));
        assert!(!has(Transport::Udp, "--cert"));
        for transport in [Transport::Tcp, Transport::Tls] {
            assert!(!has(transport, "--no-tcp") && !has(transport, "--no-tls") && has(transport, "--cert"));
        }
        let turnpike = Subject::turnpike("turnpike", Path::new("/tmp/turnpike"), "gso");
        assert!(!turnpike.command(Transport::Udp).contains(&"--tls-listen".to_owned()));
        assert!(turnpike.command(Transport::Tcp).contains(&"10.77.1.1:5349".to_owned()));
    }

    #[test]
    fn the_generator_goes_where_the_transport_is_served() {
        let line = |transport| {
            let generator = Generator::Turnpike("/tmp/turnpike".into());
            generator.command(&Load { transport, ..LOAD }, Path::new("/tmp/x")).unwrap().join(" ")
        };
        assert!(line(Transport::Udp).contains(" 10.77.1.1:3478 --transport udp "));
        assert!(line(Transport::Tcp).contains(" 10.77.1.1:3478 --transport tcp "));
        let tls = line(Transport::Tls);
        assert!(tls.contains(" 10.77.1.1:5349 --transport tls ") && tls.contains(" --ca {cert} "), "{tls}");
        assert!(!tls.contains("--window"), "{tls}");
    }

    #[test]
    fn a_window_bounds_what_is_under_way() {
        let generator = Generator::Turnpike("/tmp/turnpike".into());
        let line = generator.command(&Load { window: Some(64), ..LOAD }, Path::new("/tmp/x")).unwrap();
        assert!(line.join(" ").contains(" --window 64 "), "{line:?}");
    }
}
