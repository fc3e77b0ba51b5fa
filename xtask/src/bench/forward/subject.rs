//! The forwarders under comparison: their programs, their configuration files, and what each cannot do.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{
    super::{
        machine,
        netns::{PEER_IP, RELAY_LISTEN_IP},
    },
    workload::{Shape, Transport},
};
use crate::Failure;

pub(crate) const LISTEN_PORT: u16 = 9000;
pub(crate) const TARGET_PORT: u16 = 9001;
/// HAProxy refuses to start where two sockets for each of these, and its pipes, are more files than a process may open; the
/// benchmark guarantees 10,500.
const CONNECTIONS: u32 = 5080;
/// Our own build, the one that all ratios are of.
pub(crate) const OURS: &str = "turnpike";

/// A way for bytes from the client to the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Subject {
    pub(crate) name: String,
    pub(crate) program: Program,
    /// More arguments of its command line.
    pub(crate) arguments: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Program {
    Turnpike(PathBuf),
    /// The same, while a thread of the lowest class keeps its core from ever going idle.
    Sleepless(PathBuf),
    Peer(Peer, PathBuf),
    /// A command line to fill in.
    Other(Vec<String>),
    /// None: the kernel routes the client's packets to the server.
    Direct,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    Oxidinetd,
    Rinetd,
    Haproxy,
    /// The same, told to splice from the first byte: its best at bulk, where `splice-auto` mostly copies.
    HaproxySplice,
    Nginx,
}

impl Peer {
    pub(crate) const ALL: [Self; 5] =
        [Self::Oxidinetd, Self::Rinetd, Self::Haproxy, Self::HaproxySplice, Self::Nginx];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Oxidinetd => "oxidinetd",
            Self::Rinetd => "rinetd",
            Self::Haproxy => "haproxy",
            Self::HaproxySplice => "haproxy-splice",
            Self::Nginx => "nginx",
        }
    }

    /// The program's name for `--peer`.
    pub(crate) fn program(self) -> &'static str {
        if self == Self::HaproxySplice { "haproxy" } else { self.name() }
    }

    /// Where it is: the path given for it, or what `PATH` has; `Err` says what to do.
    pub(crate) fn find(self, given: Option<&Path>) -> Result<PathBuf, String> {
        if let Some(path) = given {
            return machine::find(&path.display().to_string())
                .and_then(|path| path.canonicalize().ok())
                .ok_or_else(|| format!("{} is no program", path.display()));
        }
        let (programs, remedy): (&[&str], _) = match self {
            // Its repository calls the binary `oi`.
            Self::Oxidinetd => (&["oxidinetd", "oi"], "build it and say --peer oxidinetd=FILE"),
            Self::Rinetd => (&["rinetd", "/usr/sbin/rinetd"], "apt-get install rinetd"),
            Self::Haproxy | Self::HaproxySplice => {
                (&["haproxy", "/usr/sbin/haproxy"], "apt-get install haproxy")
            }
            Self::Nginx => (&["nginx", "/usr/sbin/nginx"], "apt-get install nginx libnginx-mod-stream"),
        };
        programs
            .iter()
            .find_map(|program| machine::find(program))
            .ok_or_else(|| format!("not installed ({remedy})"))
    }

    /// Why it has no part in a workload.
    fn refusal(self, shape: Shape) -> Option<&'static str> {
        match (self, shape.transport()) {
            (Self::HaproxySplice, _) if !matches!(shape, Shape::Bulk { .. }) => Some("haproxy takes part"),
            (Self::Rinetd, Transport::Udp) => {
                Some("rinetd 0.73 forwards UDP datagrams without their payload")
            }
            (Self::Haproxy, Transport::Udp) => Some("HAProxy forwards no UDP"),
            _ => None,
        }
    }

    /// Its configuration for one rule. None of them logs connections; limits are out of the way of 5,000 connections.
    fn configuration(self, transport: Transport, directory: &Path) -> String {
        match self {
            Self::Oxidinetd => format!(
                "[[forwarding_rules]]\nbind_address = \"{RELAY_LISTEN_IP}\"\nbind_port = {LISTEN_PORT}\n\
                 connect_address = \"{PEER_IP}\"\nconnect_port = {TARGET_PORT}\nprotocol = \"{}\"\n",
                transport.scheme()
            ),
            Self::Rinetd => format!("{RELAY_LISTEN_IP} {LISTEN_PORT} {PEER_IP} {TARGET_PORT}\n"),
            Self::Haproxy => haproxy("option splice-auto"),
            Self::HaproxySplice => haproxy("option splice-request\n  option splice-response"),
            Self::Nginx => {
                // Debian has the stream module in a file of its own; elsewhere it may be built in.
                let module = "/usr/lib/nginx/modules/ngx_stream_module.so";
                let load = if Path::new(module).exists() {
                    format!("load_module {module};\n")
                } else {
                    String::new()
                };
                let udp = if transport == Transport::Udp { " udp" } else { "" };
                format!(
                    "{load}daemon off;\nmaster_process off;\nworker_processes 1;\nerror_log stderr warn;\npid {};\n\
                     events {{ worker_connections 10240; }}\n\
                     stream {{ server {{\n  listen {RELAY_LISTEN_IP}:{LISTEN_PORT}{udp};\n  \
                     proxy_pass {PEER_IP}:{TARGET_PORT};\n  proxy_buffer_size 256k;\n  proxy_timeout 10m;\n}} }}\n",
                    directory.join("nginx.pid").display()
                )
            }
        }
    }

    /// Its command line in the foreground.
    fn command(self, program: &Path, configuration: &Path) -> Vec<String> {
        let flags = match self {
            Self::Oxidinetd => "--config",
            Self::Rinetd => "-f -c",
            // In the foreground and without a master process.
            Self::Haproxy | Self::HaproxySplice => "-db -f",
            Self::Nginx => "-e stderr -c",
        };
        let mut command = vec![program.display().to_string()];
        command.extend(words(flags));
        command.push(configuration.display().to_string());
        command
    }
}

fn haproxy(splice: &str) -> String {
    format!(
        "global\n  nbthread 1\n  maxconn {CONNECTIONS}\n  maxpipes 64\n  tune.pipesize 1048576\n\
         defaults\n  mode tcp\n  maxconn {CONNECTIONS}\n  {splice}\n\
         \x20 timeout connect 5s\n  timeout client 10m\n  timeout server 10m\n\
         listen bench\n  bind {RELAY_LISTEN_IP}:{LISTEN_PORT}\n  server server {PEER_IP}:{TARGET_PORT}\n"
    )
}

impl Subject {
    pub(crate) fn new(name: &str, program: Program) -> Self {
        Self { name: name.to_owned(), program, arguments: Vec::new() }
    }

    /// `NAME=COMMAND`: a lone path is another build of turnpike; otherwise a command line in which `{listen}`, `{target}` and
    /// `{scheme}` (`tcp` or `udp`) are filled in.
    pub(crate) fn parse(text: &str) -> Result<Self, Failure> {
        let (name, command) = name_and_value("--subject", text)?;
        let command = words(command);
        let program = match &command[..] {
            [binary] => Program::Turnpike(binary.into()),
            _ => Program::Other(command),
        };
        Ok(Self::new(name, program))
    }

    /// Whether its absence from a workload is worth telling.
    pub(crate) fn is_missed(&self) -> bool {
        self.is_peer() && !matches!(self.program, Program::Peer(Peer::HaproxySplice, _))
    }

    /// Whether ratios are taken against it: what is measured for reference only is no peer.
    pub(crate) fn is_peer(&self) -> bool {
        self.name != OURS && !matches!(self.program, Program::Sleepless(_) | Program::Direct)
    }

    /// Why it has no part in a workload; `None` where it has.
    pub(crate) fn refusal(&self, shape: Shape) -> Option<&'static str> {
        match &self.program {
            Program::Peer(peer, _) => peer.refusal(shape),
            Program::Sleepless(_) | Program::Direct if !shape.has_references() => {
                Some("a reference for rr-1")
            }
            _ => None,
        }
    }

    /// The command that forwards `transport`, its configuration written to `directory`; `None` where nothing runs.
    pub(crate) fn command(
        &self,
        transport: Transport,
        directory: &Path,
    ) -> Result<Option<Vec<String>>, Failure> {
        let listen = format!("{RELAY_LISTEN_IP}:{LISTEN_PORT}");
        let target = format!("{PEER_IP}:{TARGET_PORT}");
        let scheme = transport.scheme();
        let mut command = match &self.program {
            Program::Direct => return Ok(None),
            Program::Turnpike(binary) | Program::Sleepless(binary) => {
                let mut command = vec![binary.display().to_string()];
                let rule = format!("{scheme}://{listen}={target}");
                command.extend(words("forward --workers 1 --admin off --log warn"));
                command.push(rule);
                command
            }
            Program::Peer(peer, program) => {
                let path = directory.join(format!("{}-{scheme}.conf", self.name));
                // oxidinetd tells its two formats apart by the file's name.
                let path = if *peer == Peer::Oxidinetd { path.with_extension("toml") } else { path };
                fs::write(&path, peer.configuration(transport, directory))?;
                peer.command(program, &path)
            }
            Program::Other(command) => command
                .iter()
                .map(|word| {
                    word.replace("{listen}", &listen).replace("{target}", &target).replace("{scheme}", scheme)
                })
                .collect(),
        };
        command.extend_from_slice(&self.arguments);
        Ok(Some(command))
    }

    /// Where the generator finds it.
    pub(crate) fn address(&self) -> String {
        match self.program {
            Program::Direct => format!("{PEER_IP}:{TARGET_PORT}"),
            _ => format!("{RELAY_LISTEN_IP}:{LISTEN_PORT}"),
        }
    }
}

/// Splits the value of an option of the form `NAME=VALUE`.
pub(crate) fn name_and_value<'a>(option: &str, text: &'a str) -> Result<(&'a str, &'a str), Failure> {
    text.split_once('=')
        .filter(|(name, value)| !name.is_empty() && !value.trim().is_empty())
        .ok_or_else(|| format!("{option} {text:?}: expected NAME=VALUE").into())
}

pub(crate) fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const UDP: Shape = Shape::Datagrams { flows: 1, burst: 1 };

    #[test]
    fn a_command_line_gets_the_addresses_of_the_network() {
        let subject = Subject::parse("x=relayd {scheme} {listen} {target}").unwrap();
        let command = subject.command(Transport::Udp, Path::new("/nowhere")).unwrap().unwrap();
        assert_eq!(command, ["relayd", "udp", "10.77.1.1:9000", "10.77.2.2:9001"]);
    }

    #[test]
    fn a_lone_path_is_another_build_of_turnpike() {
        let mut subject = Subject::parse("old=/tmp/turnpike-old").unwrap();
        subject.arguments = words("--copy splice");
        let command = subject.command(Transport::Tcp, Path::new("/nowhere")).unwrap().unwrap().join(" ");
        assert!(command.starts_with("/tmp/turnpike-old forward --workers 1 "), "{command}");
        assert!(command.ends_with(" tcp://10.77.1.1:9000=10.77.2.2:9001 --copy splice"), "{command}");
        assert!(subject.is_peer());
    }

    #[test]
    fn who_cannot_forward_udp_says_why_and_forwards_tcp() {
        let refusal = |peer| Subject::new("x", Program::Peer(peer, PathBuf::new())).refusal(UDP);
        assert!(refusal(Peer::Rinetd).is_some() && refusal(Peer::Haproxy).is_some());
        assert_eq!((refusal(Peer::Nginx), refusal(Peer::Oxidinetd)), (None, None));
        for peer in Peer::ALL {
            assert_eq!(peer.refusal(Shape::Bulk { streams: 1 }), None);
        }
        assert!(refusal(Peer::HaproxySplice).is_some());
    }

    #[test]
    fn references_take_part_in_one_workload_and_are_no_peers() {
        for program in [Program::Direct, Program::Sleepless(PathBuf::new())] {
            let subject = Subject::new("x", program);
            assert!(!subject.is_peer());
            assert!(subject.refusal(UDP).is_some());
            assert_eq!(subject.refusal(Shape::Exchange { connections: 1 }), None);
        }
    }

    #[test]
    fn a_peer_that_is_not_there_is_told_with_what_was_given() {
        let message = Peer::Nginx.find(Some(Path::new("/no/such/nginx"))).unwrap_err();
        assert!(message.contains("/no/such/nginx"), "{message}");
    }

    #[test]
    fn every_configuration_names_both_ends() {
        for peer in Peer::ALL {
            let text = peer.configuration(Transport::Tcp, Path::new("/tmp"));
            for part in [RELAY_LISTEN_IP, PEER_IP, "9000", "9001"] {
                assert!(text.contains(part), "{}: {text}", peer.name());
            }
        }
        assert!(Peer::Nginx.configuration(Transport::Udp, Path::new("/tmp")).contains("9000 udp;"));
    }
}
