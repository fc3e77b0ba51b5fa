//! Minimal DNS client for NAPTR and SRV records, which getaddrinfo(3) cannot look up. Asks the name servers of
//! resolv.conf(5).

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    time::{Duration, Instant},
};

use simple_dns::{
    CLASS, Name, Packet, PacketFlag, Question, RCODE,
    rdata::{OPT, RData},
};

const RESOLV_CONF: &str = "/etc/resolv.conf";
const PORT: u16 = 53;
/// Maximum number of name servers used, as in resolv.conf(5).
const MOST_SERVERS: usize = 3;
/// Largest response over UDP that avoids fragments.
const UDP_PAYLOAD: u16 = 1232;
const TRIES: u32 = 2;
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum length of a chain of CNAME records.
const MOST_ALIASES: usize = 8;

/// Name servers to ask, and the time until which to ask them.
#[derive(Clone, Debug)]
pub struct NameServers {
    servers: Vec<SocketAddr>,
    deadline: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordType {
    Srv,
    Naptr,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    Srv { priority: u16, weight: u16, port: u16, target: String },
    Naptr { order: u16, preference: u16, flags: String, services: String, replacement: String },
}

impl NameServers {
    /// Those of this machine.
    pub fn of_system(deadline: Instant) -> Self {
        Self::new(parse(&fs::read_to_string(RESOLV_CONF).unwrap_or_default()), deadline)
    }

    pub fn new(mut servers: Vec<SocketAddr>, deadline: Instant) -> Self {
        servers.truncate(MOST_SERVERS);
        Self { servers, deadline }
    }

    #[cfg(test)]
    pub(crate) fn until(self, deadline: Instant) -> Self {
        Self { deadline, ..self }
    }

    /// Records of a name; empty if there are none.
    pub(crate) fn query(&self, name: &str, kind: RecordType) -> io::Result<Vec<Record>> {
        let wrong = |error: simple_dns::SimpleDnsError| io::Error::new(io::ErrorKind::InvalidInput, error);
        let id: u16 = rand::random();
        let mut packet = Packet::new_query(id);
        packet.set_flags(PacketFlag::RECURSION_DESIRED);
        let question = Question::new(Name::new(name).map_err(wrong)?, kind.into(), CLASS::IN.into(), false);
        packet.questions.push(question.clone());
        *packet.opt_mut() = Some(OPT { opt_codes: Vec::new(), udp_packet_size: UDP_PAYLOAD, version: 0 });
        let query = packet.build_bytes_vec().map_err(wrong)?;
        let mut failed = io::Error::new(io::ErrorKind::NotFound, "no name server is configured");
        for wait in (0..TRIES).map(|shift| PATIENCE * (1 << shift)) {
            for server in &self.servers {
                let wait = wait.min(self.deadline.saturating_duration_since(Instant::now()));
                if wait.is_zero() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                match ask(*server, &query, &question, wait) {
                    Ok(records) => return Ok(records),
                    Err(error) => failed = error,
                }
            }
        }
        Err(failed)
    }
}

impl From<RecordType> for simple_dns::QTYPE {
    fn from(kind: RecordType) -> Self {
        match kind {
            RecordType::Srv => simple_dns::TYPE::SRV.into(),
            RecordType::Naptr => simple_dns::TYPE::NAPTR.into(),
        }
    }
}

/// Addresses in the `nameserver` lines; the loopback address if there are none, as in resolv.conf(5).
fn parse(text: &str) -> Vec<SocketAddr> {
    let server = |line: &str| {
        let ip: IpAddr = line.trim().strip_prefix("nameserver")?.trim().parse().ok()?;
        Some(SocketAddr::new(ip, PORT))
    };
    let servers: Vec<SocketAddr> = text.lines().filter_map(server).collect();
    if servers.is_empty() { vec![(Ipv4Addr::LOCALHOST, PORT).into()] } else { servers }
}

fn ask(server: SocketAddr, query: &[u8], question: &Question<'_>, wait: Duration) -> io::Result<Vec<Record>> {
    let until = Instant::now() + wait;
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    // Responses from other addresses are discarded by the kernel.
    socket.connect(server)?;
    socket.send(query)?;
    let mut buffer = [0; UDP_PAYLOAD as usize];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(left))?;
        let len = socket.recv(&mut buffer)?;
        let Some(response) = matching(&buffer[..len], query, question) else { continue };
        if !response.has_flags(PacketFlag::TRUNCATION) {
            return records(&response, question);
        }
        let bytes = over_tcp(server, query, until)?;
        let response = matching(&bytes, query, question);
        return records(&response.ok_or(io::ErrorKind::InvalidData)?, question);
    }
}

/// RFC 7766: each message follows its length.
fn over_tcp(server: SocketAddr, query: &[u8], until: Instant) -> io::Result<Vec<u8>> {
    let left = || {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::Error::from(io::ErrorKind::TimedOut)) } else { Ok(left) }
    };
    let mut stream = TcpStream::connect_timeout(&server, left()?)?;
    stream.set_write_timeout(Some(left()?))?;
    let len = u16::try_from(query.len()).map_err(io::Error::other)?;
    stream.write_all(&[&len.to_be_bytes()[..], query].concat())?;
    let mut len = [0; 2];
    stream.set_read_timeout(Some(left()?))?;
    stream.read_exact(&mut len)?;
    let mut response = vec![0; u16::from_be_bytes(len).into()];
    stream.set_read_timeout(Some(left()?))?;
    stream.read_exact(&mut response)?;
    Ok(response)
}

/// The response to this query, which must repeat its id and question.
fn matching<'a>(bytes: &'a [u8], query: &[u8], question: &Question<'_>) -> Option<Packet<'a>> {
    let packet = Packet::parse(bytes).ok().filter(|packet| packet.has_flags(PacketFlag::RESPONSE))?;
    let [asked] = &packet.questions[..] else { return None };
    let is_ours = bytes[..2] == query[..2] && asked.qname == question.qname && asked.qtype == question.qtype;
    is_ours.then_some(packet)
}

fn records(response: &Packet<'_>, question: &Question<'_>) -> io::Result<Vec<Record>> {
    match response.rcode() {
        RCODE::NoError => {}
        RCODE::NameError => return Ok(Vec::new()),
        code => return Err(io::Error::other(format!("the name server answers {code:?}"))),
    }
    let mut owner = &question.qname;
    for _ in 0..MOST_ALIASES {
        let alias = response.answers.iter().find_map(|record| match &record.rdata {
            RData::CNAME(alias) if record.name == *owner => Some(&alias.0),
            _ => None,
        });
        let Some(alias) = alias else { break };
        owner = alias;
    }
    let own = response.answers.iter().filter(|record| record.name == *owner);
    Ok(own.filter_map(|record| Record::of(&record.rdata)).collect())
}

impl Record {
    fn of(data: &RData<'_>) -> Option<Self> {
        match data {
            RData::SRV(srv) => Some(Self::Srv {
                priority: srv.priority,
                weight: srv.weight,
                port: srv.port,
                target: srv.target.to_string(),
            }),
            RData::NAPTR(naptr) => Some(Self::Naptr {
                order: naptr.order,
                preference: naptr.preference,
                flags: naptr.flags.to_string(),
                services: naptr.services.to_string(),
                replacement: naptr.replacement.to_string(),
            }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_are_read_from_resolv_conf() {
        let text = "# comment\nsearch example.org\nnameserver 192.0.2.53\n nameserver\t2001:db8::53 \nnameserver x\n";
        let servers = ["192.0.2.53:53", "[2001:db8::53]:53"].map(|server| server.parse().unwrap());
        assert_eq!(parse(text), servers);
        assert_eq!(parse(""), ["127.0.0.1:53".parse().unwrap()]);
    }

    #[test]
    fn silent_name_servers_do_not_delay_beyond_the_deadline() {
        let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let deadline = Instant::now() + Duration::from_millis(50);
        let servers = NameServers::new(vec![silent.local_addr().unwrap()], deadline);
        let error = servers.query("example.org", RecordType::Srv).unwrap_err();
        assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{error:?}");
    }
}
