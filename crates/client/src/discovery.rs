//! Servers of a name by NAPTR and SRV records (RFC 5928; for STUN, RFC 8489 section 8; for DTLS, RFC 7350).

use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, ToSocketAddrs as _},
    time::{Duration, Instant},
};

use turnpike_wire::names::server_name;

use crate::{
    ClientTransport, ServerUri,
    dns::{NameServers, Record, RecordType},
};

/// Maximum number of servers used per transport.
const MOST_TARGETS: usize = 8;
/// Time for which [`ServerUri::resolve`] waits for records.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum number of NAPTR records followed to others.
const MOST_HOPS: usize = 4;

/// A host and its port.
pub type Target = (String, u16);

/// Servers by transport, in the order to try them. Transports without records are absent; an empty list means
/// that the domain states not to offer the transport (RFC 2782).
pub type Targets = BTreeMap<ClientTransport, Vec<Target>>;

/// Looks up the servers for these transports. Finds nothing if the URI has a port or an address, if the name has
/// no records, or if no name server answers: use the name itself then.
pub fn discover(uri: &ServerUri, transports: &[ClientTransport], servers: &NameServers) -> Targets {
    let Some(name) = uri.name().filter(|name| uri.port.is_none() && is_in_dns(name)) else {
        return Targets::new();
    };
    let mut found = if uri.is_turn() && uri.tcp.is_none() {
        by_naptr(name, transports, servers, MOST_HOPS)
    } else {
        Targets::new()
    };
    if !found.is_empty() {
        return found;
    }
    for transport in transports {
        found.extend(by_srv(&service(uri, *transport, name), servers).map(|targets| (*transport, targets)));
    }
    found
}

impl ServerUri {
    /// Addresses of the server for a transport, possibly blocking on DNS. Fails if there are none.
    pub fn resolve(&self, transport: ClientTransport) -> io::Result<Vec<SocketAddr>> {
        self.resolve_by(transport, &NameServers::of_system(Instant::now() + PATIENCE))
    }

    pub fn resolve_by(
        &self,
        transport: ClientTransport,
        servers: &NameServers,
    ) -> io::Result<Vec<SocketAddr>> {
        match discover(self, &[transport], servers).remove(&transport) {
            None => addresses(&[(self.host.clone(), self.port_for(transport))]),
            Some(targets) if targets.is_empty() => {
                let why = format!("its SRV record states that it offers no server for {transport}");
                Err(io::Error::new(io::ErrorKind::NotFound, why))
            }
            Some(targets) => addresses(&targets),
        }
    }
}

/// Addresses of all targets that have some, in order.
pub fn addresses(targets: &[Target]) -> io::Result<Vec<SocketAddr>> {
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let mut found = Vec::new();
    for (host, port) in targets {
        match (host.as_str(), *port).to_socket_addrs() {
            Ok(addresses) => found.extend(addresses),
            Err(error) => failed = error,
        }
    }
    if found.is_empty() { Err(failed) } else { Ok(found) }
}

/// False for names that name servers do not know (RFC 6761, RFC 6762), so that these need no name server.
fn is_in_dns(name: &str) -> bool {
    let last = name.trim_end_matches('.').rsplit_once('.').map(|(_, last)| last);
    last.is_some_and(|last| !["local", "localhost"].iter().any(|own| own.eq_ignore_ascii_case(last)))
}

fn service(uri: &ServerUri, transport: ClientTransport, name: &str) -> String {
    let kind = if uri.is_turn() { "turn" } else { "stun" };
    let secure = if transport.is_secure() { "s" } else { "" };
    let protocol = if transport.is_stream() { "tcp" } else { "udp" };
    format!("_{kind}{secure}._{protocol}.{}", name.trim_end_matches('.'))
}

fn by_srv(name: &str, servers: &NameServers) -> Option<Vec<Target>> {
    let records = servers.query(name, RecordType::Srv).ok()?;
    let mut records: Vec<_> = records
        .into_iter()
        .filter_map(|record| match record {
            Record::Srv { priority, weight, port, target } => Some((priority, delay(weight), (target, port))),
            Record::Naptr { .. } => None,
        })
        .collect();
    if records.is_empty() {
        return None;
    }
    records.sort_by(|one, other| one.0.cmp(&other.0).then(one.1.total_cmp(&other.1)));
    let targets = records.into_iter().filter_map(|(.., (name, port))| Some((host(&name)?, port)));
    Some(targets.take(MOST_TARGETS).collect())
}

/// Random time until an event whose rate is this weight: the order of these times is the one of RFC 2782.
fn delay(weight: u16) -> f64 {
    let uniform: f64 = rand::random();
    -uniform.max(f64::MIN_POSITIVE).ln() / f64::from(weight).max(1e-3)
}

/// Host name; `None` for the root, which stands for no server, and for invalid names.
fn host(name: &str) -> Option<String> {
    server_name(name.trim_end_matches('.')).ok()
}

/// Follows the records of a domain in their order (RFC 3958). A record serves each transport that it lists and
/// that has no servers yet.
fn by_naptr(name: &str, transports: &[ClientTransport], servers: &NameServers, hops: usize) -> Targets {
    let mut found = Targets::new();
    let mut records: Vec<_> = servers
        .query(name, RecordType::Naptr)
        .unwrap_or_default()
        .into_iter()
        .filter_map(|record| match record {
            Record::Naptr { order, preference, flags, services, replacement } => {
                Some((order, preference, flags.to_ascii_lowercase(), services, replacement))
            }
            Record::Srv { .. } => None,
        })
        .collect();
    records.sort();
    for (_, _, flags, services, replacement) in records.into_iter().take(2 * MOST_TARGETS) {
        let wanted =
            |transport: &&ClientTransport| offers(&services, **transport) && !found.contains_key(*transport);
        let wanted: Vec<ClientTransport> = transports.iter().filter(wanted).copied().collect();
        if wanted.is_empty() {
            continue;
        }
        match &*flags {
            "s" => {
                if let Some(targets) = by_srv(&replacement, servers) {
                    found.extend(wanted.into_iter().map(|transport| (transport, targets.clone())));
                }
            }
            "a" => {
                let Some(host) = host(&replacement) else { continue };
                let target = |transport: ClientTransport| (host.clone(), transport.default_port());
                found.extend(wanted.into_iter().map(|transport| (transport, vec![target(transport)])));
            }
            "" if hops > 0 => found.extend(by_naptr(&replacement, &wanted, servers, hops - 1)),
            _ => {}
        }
    }
    found
}

/// True for services such as `RELAY:turn.udp:turn.tcp`.
fn offers(services: &str, transport: ClientTransport) -> bool {
    let tag = match transport {
        ClientTransport::Udp => "turn.udp",
        ClientTransport::Tcp => "turn.tcp",
        ClientTransport::Tls => "turn.tls",
        ClientTransport::Dtls => "turn.dtls",
    };
    let mut parts = services.split(':');
    parts.next().is_some_and(|service| service.eq_ignore_ascii_case("RELAY"))
        && parts.any(|part| part.eq_ignore_ascii_case(tag))
}

#[cfg(test)]
mod tests {
    use std::{net::UdpSocket, thread};

    use super::*;
    use simple_dns::{
        CLASS, CharacterString, Name, Packet, RCODE, ResourceRecord,
        rdata::{CNAME, NAPTR, RData, SRV},
    };

    fn name(text: &str) -> Name<'_> {
        Name::new(text).unwrap()
    }

    fn srv(priority: u16, port: u16, target: &str) -> RData<'_> {
        RData::SRV(SRV { priority, weight: 0, port, target: name(target) })
    }

    fn naptr<'a>(order: u16, flags: &'a str, services: &'a str, replacement: &'a str) -> RData<'a> {
        let text = |text: &'a str| CharacterString::new(text.as_bytes()).unwrap();
        let (flags, services, regexp) = (text(flags), text(services), text(""));
        RData::NAPTR(NAPTR { order, preference: 1, flags, services, regexp, replacement: name(replacement) })
    }

    /// The domains of the tests.
    fn zone() -> Vec<(&'static str, RData<'static>)> {
        vec![
            ("_turn._udp.srv.example", srv(20, 3479, "localhost")),
            ("_turn._udp.srv.example", srv(10, 3478, "first.example")),
            ("_turns._tcp.srv.example", srv(1, 443, "localhost")),
            ("_turn._tcp.srv.example", srv(0, 0, "")),
            ("_stun._udp.srv.example", srv(0, 3480, "localhost")),
            // The example of RFC 5928 section 3, with a delegation.
            ("naptr.example", naptr(100, "", "RELAY:turn.udp", "datagram.naptr.example")),
            ("naptr.example", naptr(200, "s", "RELAY:turn.tcp:turn.tls", "_turn._tcp.naptr.example")),
            ("naptr.example", naptr(50, "s", "SIP+D2U", "_sip._udp.naptr.example")),
            ("datagram.naptr.example", naptr(100, "S", "relay:Turn.UDP", "_turn._udp.naptr.example")),
            ("datagram.naptr.example", naptr(200, "a", "RELAY:turn.dtls", "dtls.naptr.example")),
            ("_turn._udp.naptr.example", srv(0, 1, "a.naptr.example")),
            ("_turn._tcp.naptr.example", srv(0, 2, "b.naptr.example")),
            ("_turn._udp.alias.example", RData::CNAME(CNAME(name("_turn._udp.srv.example")))),
            ("loop.example", naptr(1, "", "RELAY:turn.udp", "loop.example")),
            ("_turn._udp.bad.example", srv(0, 1, "a b")),
        ]
    }

    /// Answers queries on loopback until the test ends. Does not answer names that begin with `silent`.
    fn name_server() -> NameServers {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let servers = vec![socket.local_addr().unwrap()];
        thread::spawn(move || {
            let mut buffer = [0; 1500];
            while let Ok((len, client)) = socket.recv_from(&mut buffer) {
                let query = Packet::parse(&buffer[..len]).unwrap();
                let asked = query.questions[0].clone();
                let mut reply = Packet::new_reply(query.id());
                let owner = asked.qname.clone();
                let alias = zone().into_iter().find_map(|(name, data)| match data {
                    RData::CNAME(CNAME(alias)) if self::name(name) == owner => Some(alias),
                    _ => None,
                });
                for (name, data) in zone() {
                    let name = self::name(name);
                    let is_asked = name == owner || Some(&name) == alias.as_ref();
                    let record = ResourceRecord::new(name, CLASS::IN, 60, data);
                    if is_asked
                        && (record.match_qtype(asked.qtype) || matches!(record.rdata, RData::CNAME(_)))
                    {
                        reply.answers.push(record);
                    }
                }
                if owner.to_string().starts_with("fails") {
                    *reply.rcode_mut() = RCODE::ServerFailure;
                }
                reply.questions.push(asked);
                // A forged response with another id comes first.
                let mut forged = reply.build_bytes_vec().unwrap();
                forged[0] ^= 1;
                socket.send_to(&forged, client).unwrap();
                if !owner.to_string().contains("silent") {
                    socket.send_to(&reply.build_bytes_vec().unwrap(), client).unwrap();
                }
            }
        });
        NameServers::new(servers, Instant::now() + Duration::from_secs(10))
    }

    fn found(uri: &str, servers: &NameServers) -> Vec<(ClientTransport, Vec<Target>)> {
        let uri: ServerUri = uri.parse().unwrap();
        let all = ClientTransport::ALL.into_iter().filter(|transport| uri.allows(*transport));
        discover(&uri, &all.collect::<Vec<_>>(), servers).into_iter().collect()
    }

    fn target(host: &str, port: u16) -> Target {
        (host.to_owned(), port)
    }

    use ClientTransport::{Dtls, Tcp, Tls, Udp};

    #[test]
    fn srv_records_name_the_server_of_each_transport() {
        let servers = name_server();
        let udp = vec![target("first.example", 3478), target("localhost", 3479)];
        let tls = vec![target("localhost", 443)];
        let all = [(Udp, udp.clone()), (Tcp, vec![]), (Tls, tls.clone())];
        assert_eq!(found("turn:srv.example", &servers), all);
        assert_eq!(found("turn:SRV.example.?transport=udp", &servers), [(Udp, udp.clone())]);
        assert_eq!(found("turns:srv.example", &servers), [(Tls, tls)]);
        assert_eq!(found("turn:alias.example", &servers), [(Udp, udp)]);
        assert_eq!(found("stun:srv.example", &servers), [(Udp, vec![target("localhost", 3480)])]);
        assert_eq!(found("turn:bad.example", &servers), [(Udp, vec![])]);
        for none in ["turn:srv.example:3478", "turn:192.0.2.1", "turn:[::1]", "turn:host", "turn:a.localhost"]
        {
            assert_eq!(found(none, &servers), [], "{none}");
        }
        for none in ["turn:nothing.example", "turn:fails.example"] {
            assert_eq!(found(none, &servers), [], "{none}");
        }
    }

    #[test]
    fn naptr_records_come_first_unless_the_uri_has_a_transport() {
        let servers = name_server();
        let (udp, tcp) = (vec![target("a.naptr.example", 1)], vec![target("b.naptr.example", 2)]);
        let all = [(Udp, udp.clone()), (Tcp, tcp.clone()), (Tls, tcp)];
        assert_eq!(found("turn:naptr.example", &servers), all);
        assert_eq!(found("turn:naptr.example?transport=udp", &servers), [(Udp, udp)]);
        let dtls = vec![target("dtls.naptr.example", Dtls.default_port())];
        assert_eq!(found("turn:datagram.naptr.example", &servers)[1], (Dtls, dtls));
        assert_eq!(found("turn:loop.example", &servers), [], "a loop ends");
    }

    #[test]
    fn addresses_are_those_of_the_targets_or_of_the_name() {
        let servers = name_server();
        let resolve = |uri: &str, transport| {
            uri.parse::<ServerUri>()
                .unwrap()
                .resolve_by(transport, &servers)
                .map_err(|error| error.to_string())
        };
        let tls = resolve("turns:srv.example", Tls).unwrap();
        assert!(tls.contains(&([127, 0, 0, 1], 443).into()) && tls.iter().all(|server| server.port() == 443));
        assert!(resolve("turn:srv.example?transport=tcp", Tcp).unwrap_err().contains("no server for tcp"));
        assert_eq!(resolve("turn:127.0.0.1:9", Udp), Ok(vec![([127, 0, 0, 1], 9).into()]));
        assert!(resolve("turn:localhost", Udp).unwrap().contains(&([127, 0, 0, 1], 3478).into()));
    }

    #[test]
    fn silent_name_servers_leave_the_name_itself() {
        let servers = name_server().until(Instant::now() + Duration::from_millis(100));
        assert_eq!(found("turn:silent.example", &servers), []);
    }

    #[test]
    fn targets_with_more_weight_come_first_more_often() {
        let wins = (0..1000).filter(|_| delay(90) < delay(10)).count();
        assert!((800..980).contains(&wins), "{wins}");
    }

    /// Ends the server with the test.
    struct Dnsmasq(std::process::Child);

    impl Drop for Dnsmasq {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn dnsmasq_answers_with_srv_and_naptr_records() {
        let port = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let started = std::process::Command::new("dnsmasq")
            .args(["--keep-in-foreground", "--no-resolv", "--no-hosts", "--no-poll", "--conf-file=/dev/null"])
            .args([
                "--pid-file=",
                "--listen-address=127.0.0.1",
                "--bind-interfaces",
                &format!("--port={port}"),
            ])
            .args(["--naptr-record=corp.example,10,1,s,RELAY:turn.tls,,_turns._tcp.corp.example"])
            .args(["--srv-host=_turns._tcp.corp.example,turn.corp.example,443,5,1"])
            .args(["--srv-host=_turn._udp.corp.example,turn.corp.example,3478"])
            .args(["--local=/example/"])
            .spawn();
        let Ok(child) = started else { return turnpike_testkit::alone::skip("dnsmasq is not installed") };
        let _server = Dnsmasq(child);
        let at = vec![SocketAddr::from(([127, 0, 0, 1], port))];
        let tls = [(Tls, vec![target("turn.corp.example", 443)])];
        turnpike_testkit::eventually("dnsmasq answers", || {
            let servers = NameServers::new(at.clone(), Instant::now() + Duration::from_secs(5));
            found("turn:corp.example", &servers) == tls
        });
        let servers = NameServers::new(at, Instant::now() + Duration::from_secs(5));
        let udp = [(Udp, vec![target("turn.corp.example", 3478)])];
        assert_eq!(found("turn:corp.example?transport=udp", &servers), udp);
        assert_eq!(found("turn:other.example", &servers), []);
    }
}
