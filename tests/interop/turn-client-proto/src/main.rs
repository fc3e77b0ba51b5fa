//! Two turn-client-proto clients exchange data over channels between their relayed addresses.
//!
//! Usage: `turnpike-interop-turn-client-proto LIBRARY TRANSPORT HOST PORT USERNAME PASSWORD SECONDS`. The TRANSPORT is `udp`, `tcp`, `tls`
//! or `dtls`; TLS uses rustls, DTLS the LIBRARY, `openssl` or `dimpl`. `SSL_CERT_FILE` is the path of the CA certificate; dimpl does not
//! verify certificates. It prints `version NAMES`, then every 250 ms `MS SENT RECEIVED SENT RECEIVED`: the time since the call began, and
//! the messages of each end so far.
#![forbid(unsafe_code)]

use std::{
    env,
    error::Error,
    io::{self, ErrorKind, Read, Write},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    path::PathBuf,
    sync::Arc,
    time::{self, Duration},
};

use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};
use turn_client_dimpl::{TurnClientDimpl, dimpl};
use turn_client_openssl::{
    TurnClientOpensslTls,
    openssl::ssl::{SslContext, SslMethod, SslVerifyMode},
};
use turn_client_proto::{
    api::{TurnClientApi as _, TurnConfig, TurnEvent, TurnPollRet, TurnRecvRet},
    prelude::DelayedTransmitBuild as _,
    stun::{Instant, agent::Transmit},
    tcp::TurnClientTcp,
    types::{TransportType, TurnCredentials},
    udp::TurnClientUdp,
};
use turn_client_rustls::TurnClientRustls;

type Failure = Box<dyn Error>;

/// Eight bytes: over a stream, turn-client-proto leaves out the padding of ChannelData that RFC 8656 section 12.5 requires.
const MESSAGE: &[u8] = b"messages";
const INTERVAL: Duration = Duration::from_millis(60);
const REPORTS: Duration = Duration::from_millis(250);
/// Read timeout of one end, during which the other end has to wait.
const WAIT: Duration = Duration::from_millis(5);

turn_client_proto::impl_client!(
    Client,
    (Udp, TurnClientUdp),
    (Tcp, TurnClientTcp),
    (Tls, TurnClientRustls),
    (Openssl, TurnClientOpensslTls),
    (Dimpl, TurnClientDimpl)
);

enum Socket {
    Datagrams(UdpSocket),
    Stream(TcpStream),
}

impl Socket {
    fn open(transport: &str, server: SocketAddr) -> Result<Self, Failure> {
        if matches!(transport, "tcp" | "tls") {
            let stream = TcpStream::connect(server)?;
            stream.set_read_timeout(Some(WAIT))?;
            stream.set_nodelay(true)?;
            return Ok(Self::Stream(stream));
        }
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        socket.connect(server)?;
        socket.set_read_timeout(Some(WAIT))?;
        Ok(Self::Datagrams(socket))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Datagrams(socket) => socket.local_addr(),
            Self::Stream(stream) => stream.local_addr(),
        }
    }

    fn send(&mut self, data: &[u8]) -> io::Result<()> {
        match self {
            Self::Datagrams(socket) => socket.send(data).map(drop),
            Self::Stream(stream) => stream.write_all(data),
        }
    }

    /// Length of the data, or `None` after a timeout.
    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let received = match self {
            Self::Datagrams(socket) => socket.recv(buffer),
            Self::Stream(stream) => match stream.read(buffer) {
                Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
                read => read,
            },
        };
        match received {
            Ok(length) => Ok(Some(length)),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

struct End {
    client: Client,
    socket: Socket,
    epoch: time::Instant,
    relayed: Option<SocketAddr>,
    /// Peer of the channel, once the server has confirmed it.
    peer: Option<SocketAddr>,
    sent: u64,
    received: u64,
}

impl End {
    fn start(library: &str, transport: &str, server: SocketAddr, credentials: TurnCredentials) -> Result<Self, Failure> {
        let socket = Socket::open(transport, server)?;
        let (local, config) = (socket.local_addr()?, TurnConfig::new(credentials));
        let client = match transport {
            "udp" => TurnClientUdp::allocate(local, server, config).into(),
            "tcp" => TurnClientTcp::allocate(local, server, config).into(),
            "tls" => {
                let name = server.ip().into();
                TurnClientRustls::allocate(local, server, config, name, Arc::new(tls()?)).into()
            }
            "dtls" if library == "openssl" => {
                let over = TransportType::Udp;
                TurnClientOpensslTls::allocate(over, local, server, config, dtls()?).into()
            }
            "dtls" => {
                let tls = Arc::new(dimpl::Config::builder().build()?);
                TurnClientDimpl::allocate(local, server, config, tls).into()
            }
            _ => return Err(format!("unknown transport {transport}").into()),
        };
        let epoch = time::Instant::now();
        Ok(Self { client, socket, epoch, relayed: None, peer: None, sent: 0, received: 0 })
    }

    fn now(&self) -> Instant {
        Instant::from_std(self.epoch)
    }

    /// Handles received data and sends pending messages.
    fn step(&mut self) -> Result<(), Failure> {
        let mut buffer = [0; 4096];
        if let Some(length) = self.socket.receive(&mut buffer)? {
            let (remote, local) = (self.client.remote_addr(), self.client.local_addr());
            let transmit = Transmit::new(&buffer[..length], self.client.transport(), remote, local);
            if let TurnRecvRet::PeerData(_) = self.client.recv(transmit, self.now()) {
                self.received += 1;
            }
        }
        while self.client.poll_recv(self.now()).is_some() {
            self.received += 1;
        }
        if let TurnPollRet::Closed = self.client.poll(self.now()) {
            return Err("the client has closed".into());
        }
        self.flush()?;
        while let Some(event) = self.client.poll_event() {
            match event {
                TurnEvent::AllocationCreated(_, address) => self.relayed = Some(address),
                TurnEvent::ChannelCreated(_, peer) => self.peer = Some(peer),
                TurnEvent::PermissionCreated(..) => {}
                failed => return Err(format!("{failed:?}").into()),
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Failure> {
        while let Some(transmit) = self.client.poll_transmit(self.now()) {
            self.socket.send(&transmit.data)?;
        }
        Ok(())
    }

    fn talk(&mut self) -> Result<(), Failure> {
        let Some(peer) = self.peer else { return Ok(()) };
        let now = self.now();
        if let Some(transmit) = self.client.send_to(TransportType::Udp, peer, MESSAGE, now)? {
            self.socket.send(&transmit.data.build())?;
        }
        // Over TLS or DTLS the data is queued together with the requests.
        self.flush()?;
        self.sent += 1;
        Ok(())
    }
}

fn authority() -> Result<PathBuf, Failure> {
    Ok(env::var_os("SSL_CERT_FILE").ok_or("SSL_CERT_FILE is not set")?.into())
}

fn dtls() -> Result<SslContext, Failure> {
    let mut context = SslContext::builder(SslMethod::dtls_client())?;
    context.set_ca_file(authority()?)?;
    context.set_verify(SslVerifyMode::PEER);
    Ok(context.build())
}

fn tls() -> Result<ClientConfig, Failure> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(authority()?)?)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// Version of a crate in the lock file.
fn locked_version(name: &str) -> &'static str {
    let package = format!("name = \"{name}\"\nversion = \"");
    let (_, rest) = include_str!("../Cargo.lock").split_once(&package).expect("a dependency");
    rest.split_once('"').expect("a version").0
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [library, transport, host, port, username, password, seconds] = &arguments[..] else {
        return Err("LIBRARY TRANSPORT HOST PORT USERNAME PASSWORD SECONDS".into());
    };
    let wrapper = match &transport[..] {
        "tls" => Some("rustls"),
        "dtls" => Some(&library[..]),
        _ => None,
    };
    let crates = wrapper.map(|library| format!("turn-client-{library}"));
    let crates = ["turn-client-proto".to_owned()].into_iter().chain(crates);
    let versions: Vec<_> = crates.map(|name| format!("{name} {}", locked_version(&name))).collect();
    println!("version {}", versions.join(" with "));
    let server = SocketAddr::new(host.parse::<IpAddr>()?, port.parse()?);
    let credentials = TurnCredentials::new(username, password);
    let mut ends = [
        End::start(library, transport, server, credentials.clone())?,
        End::start(library, transport, server, credentials)?,
    ];
    while ends.iter().any(|end| end.relayed.is_none()) {
        ends.iter_mut().try_for_each(End::step)?;
    }
    let [a, b] = [0, 1].map(|end| ends[end].relayed.expect("just seen"));
    for (end, peer) in ends.iter_mut().zip([b, a]) {
        let now = end.now();
        end.client.bind_channel(TransportType::Udp, peer, now)?;
    }
    let seconds = Duration::from_secs_f64(seconds.parse()?);
    let mut began = None;
    let [mut next_message, mut next_report] = [time::Instant::now(); 2];
    loop {
        ends.iter_mut().try_for_each(End::step)?;
        let now = time::Instant::now();
        if now >= next_message {
            next_message += INTERVAL;
            ends.iter_mut().try_for_each(End::talk)?;
        }
        if now < next_report || ends.iter().any(|end| end.received == 0) {
            continue;
        }
        next_report = now + REPORTS;
        let elapsed = began.get_or_insert(now).elapsed();
        let [a, b] = &ends;
        println!("{} {} {} {} {}", elapsed.as_millis(), a.sent, a.received, b.sent, b.received);
        if elapsed >= seconds {
            return Ok(());
        }
    }
}
