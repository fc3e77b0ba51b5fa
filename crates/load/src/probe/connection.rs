//! One connection to a server, blocking, each wait bounded: what the probe speaks through.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream, UdpSocket},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use rustls::{
    ClientConnection, DigitallySignedStruct, Error, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use turnpike_wire::frame::{self, Frame, MAX_MESSAGE_LEN};

use crate::{
    LoadError, dtls,
    secure::{self, Security, TlsOptions, explain},
    transport::Transport,
};

/// An open connection.
pub(super) struct Connection {
    channel: Channel,
    /// Bytes of a stream that are not a whole message yet; datagrams that came with another one.
    rest: Vec<u8>,
    waiting: Vec<Vec<u8>>,
    buffer: Vec<u8>,
}

enum Channel {
    Udp(UdpSocket),
    Tcp(TcpStream),
    Tls(TcpStream, Box<ClientConnection>),
    Dtls(UdpSocket, Box<dtls::Association>),
}

/// What opening it took, and what the server showed.
#[derive(Clone, Debug, Default)]
pub(super) struct Opened {
    /// TLS or DTLS version, as the library names it.
    pub(super) version: Option<String>,
    /// The application protocol that was agreed on (RFC 7443).
    pub(super) alpn: Option<String>,
    /// The server's certificates (DER), its own first.
    pub(super) chain: Vec<Vec<u8>>,
    /// What is wrong with them, in words.
    pub(super) distrust: Option<String>,
    /// From the first packet to the end of the handshake.
    pub(super) took: Duration,
}

/// What secure connections are opened with, and what their verifier saw.
pub(super) struct Trust {
    security: Security,
    observer: Arc<Observer>,
}

impl Trust {
    pub(super) fn new(
        options: &TlsOptions,
        host: Option<&str>,
        server: SocketAddr,
    ) -> Result<Self, LoadError> {
        let observer = Arc::new(Observer { inner: secure::verifier(options)?, seen: Mutex::new(None) });
        let verifier: Arc<dyn ServerCertVerifier> = Arc::clone(&observer) as _;
        let name = secure::server_name(options, host, server)?;
        let config = secure::config(options, Arc::clone(&verifier))?;
        Ok(Self { security: Security { config, verifier, name }, observer })
    }

    fn verdict(&self) -> Option<String> {
        self.observer.seen.lock().ok().and_then(|seen| seen.clone())
    }
}

impl Connection {
    /// Connects, and shakes hands where the transport has that; in words, why not.
    pub(super) fn open(
        transport: Transport,
        server: SocketAddr,
        trust: Option<&Trust>,
        deadline: Instant,
    ) -> Result<(Self, Opened), String> {
        let began = Instant::now();
        let mut opened = Opened::default();
        let channel = match (transport, trust) {
            (Transport::Udp, _) => Channel::Udp(udp(server).map_err(|error| words(&error))?),
            (Transport::Tcp, _) => Channel::Tcp(tcp(server, deadline).map_err(|error| words(&error))?),
            (Transport::Tls, Some(trust)) => tls(server, trust, deadline, &mut opened)?,
            (Transport::Dtls, Some(trust)) => dtls(server, trust, deadline, &mut opened)?,
            (Transport::Tls | Transport::Dtls, None) => {
                return Err("no certificate could be checked".to_owned());
            }
        };
        opened.took = began.elapsed();
        let this = Self {
            channel,
            rest: Vec::new(),
            waiting: Vec::new(),
            buffer: vec![0; MAX_MESSAGE_LEN.next_power_of_two()],
        };
        Ok((this, opened))
    }

    /// Whether messages may get lost on the way.
    pub(super) fn is_lossy(&self) -> bool {
        matches!(self.channel, Channel::Udp(_) | Channel::Dtls(..))
    }

    /// This side's address.
    pub(super) fn local_addr(&self) -> Option<SocketAddr> {
        match &self.channel {
            Channel::Udp(socket) | Channel::Dtls(socket, _) => socket.local_addr().ok(),
            Channel::Tcp(stream) | Channel::Tls(stream, _) => stream.local_addr().ok(),
        }
    }

    /// Sends one message.
    pub(super) fn send(&mut self, message: &[u8], deadline: Instant) -> io::Result<()> {
        match &mut self.channel {
            Channel::Udp(socket) => socket.send(message).map(|_| ()),
            Channel::Tcp(stream) => {
                stream.set_write_timeout(Some(left(deadline)?))?;
                stream.write_all(message)
            }
            Channel::Tls(stream, tls) => {
                stream.set_write_timeout(Some(left(deadline)?))?;
                tls.writer().write_all(message)?;
                while tls.wants_write() {
                    tls.write_tls(stream)?;
                }
                Ok(())
            }
            Channel::Dtls(socket, association) => association
                .send(message)
                .and_then(|()| association.drain(|packet| _ = socket.send(packet), |_| {}))
                .map_err(io::Error::other),
        }
    }

    /// The next message; `TimedOut` when there is none in time.
    pub(super) fn receive(&mut self, deadline: Instant) -> io::Result<Vec<u8>> {
        loop {
            if !self.waiting.is_empty() {
                return Ok(self.waiting.remove(0));
            }
            if let Some(message) = self.cut()? {
                return Ok(message);
            }
            self.read(deadline)?;
        }
    }

    /// A whole message out of a stream's bytes.
    fn cut(&mut self) -> io::Result<Option<Vec<u8>>> {
        match frame::first(&self.rest, MAX_MESSAGE_LEN) {
            Ok(Frame::Message { next, .. }) => Ok(Some(self.rest.drain(..next).collect())),
            Ok(Frame::Unfinished { .. }) => Ok(None),
            Err(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "what answers does not speak STUN")),
        }
    }

    fn read(&mut self, deadline: Instant) -> io::Result<()> {
        match &mut self.channel {
            Channel::Udp(socket) => {
                socket.set_read_timeout(Some(left(deadline)?))?;
                let read = timed_out(socket.recv(&mut self.buffer))?;
                self.waiting.push(self.buffer[..read].to_vec());
            }
            Channel::Tcp(stream) => {
                stream.set_read_timeout(Some(left(deadline)?))?;
                let read = timed_out(stream.read(&mut self.buffer))?;
                self.rest.extend_from_slice(whole(&self.buffer, read)?);
            }
            Channel::Tls(stream, tls) => {
                stream.set_read_timeout(Some(left(deadline)?))?;
                if timed_out(tls.read_tls(stream))? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                tls.process_new_packets().map_err(|error| io::Error::other(explain(&error)))?;
                match tls.reader().read(&mut self.buffer) {
                    Ok(read) => self.rest.extend_from_slice(whole(&self.buffer, read)?),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
            }
            Channel::Dtls(socket, association) => {
                socket.set_read_timeout(Some(left(deadline)?))?;
                let read = timed_out(socket.recv(&mut self.buffer))?;
                let waiting = &mut self.waiting;
                association
                    .handle_datagram(&self.buffer[..read])
                    .and_then(|()| {
                        association
                            .drain(|packet| _ = socket.send(packet), |message| waiting.push(message.to_vec()))
                    })
                    .map_err(io::Error::other)?;
            }
        }
        Ok(())
    }
}

impl Drop for Connection {
    /// Says farewell, as a client should; nobody waits for an answer.
    fn drop(&mut self) {
        match &mut self.channel {
            Channel::Tls(stream, tls) => {
                tls.send_close_notify();
                let _ = tls.write_tls(stream);
            }
            Channel::Dtls(socket, association) => {
                association.close();
                let _ = association.drain(|packet| _ = socket.send(packet), |_| {});
            }
            Channel::Udp(_) | Channel::Tcp(_) => {}
        }
    }
}

/// Time that is left.
pub(super) fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// A socket connected to the server.
pub(super) fn udp(server: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(any(server))?;
    socket.connect(server)?;
    Ok(socket)
}

/// Every address of the family, and any port.
pub(super) fn any(server: SocketAddr) -> SocketAddr {
    match server {
        SocketAddr::V4(_) => ([0; 4], 0).into(),
        SocketAddr::V6(_) => ([0_u16; 8], 0).into(),
    }
}

/// Why it did not work, as a person would say it.
pub(super) fn words(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => "no answer in time".to_owned(),
        io::ErrorKind::ConnectionRefused => "nothing listens there (connection refused)".to_owned(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => "the connection was reset".to_owned(),
        io::ErrorKind::UnexpectedEof => "the server closed the connection".to_owned(),
        io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable => {
            "there is no route from here".to_owned()
        }
        _ => error.to_string(),
    }
}

fn tcp(server: SocketAddr, deadline: Instant) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&server, left(deadline)?)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn tls(server: SocketAddr, trust: &Trust, deadline: Instant, opened: &mut Opened) -> Result<Channel, String> {
    let mut stream = tcp(server, deadline).map_err(|error| words(&error))?;
    let Security { config, name, .. } = &trust.security;
    let mut tls =
        ClientConnection::new(Arc::clone(config), name.clone()).map_err(|error| error.to_string())?;
    while tls.is_handshaking() {
        let left = left(deadline).map_err(|error| words(&error))?;
        let bounded = stream.set_read_timeout(Some(left)).and_then(|()| stream.set_write_timeout(Some(left)));
        bounded.map_err(|error| words(&error))?;
        while tls.wants_write() {
            tls.write_tls(&mut stream).map_err(|error| words(&error))?;
        }
        if !tls.is_handshaking() {
            break;
        }
        if timed_out(tls.read_tls(&mut stream)).map_err(|error| words(&error))? == 0 {
            return Err("the server closed the connection in the TLS handshake".to_owned());
        }
        if let Err(error) = tls.process_new_packets() {
            // The alert that tells the server why.
            let _ = tls.write_tls(&mut stream);
            return Err(explain(&error));
        }
    }
    opened.version = tls
        .protocol_version()
        .and_then(|version| version.as_str())
        .map(|name| name.replace('v', " ").replace('_', "."));
    opened.alpn = tls.alpn_protocol().map(|name| String::from_utf8_lossy(name).into_owned());
    opened.chain = tls.peer_certificates().unwrap_or_default().iter().map(|cert| cert.to_vec()).collect();
    opened.distrust = trust.verdict();
    Ok(Channel::Tls(stream, Box::new(tls)))
}

fn dtls(
    server: SocketAddr,
    trust: &Trust,
    deadline: Instant,
    opened: &mut Opened,
) -> Result<Channel, String> {
    let socket = udp(server).map_err(|error| words(&error))?;
    let bound = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let settings = dtls::Settings::new(trust.security.clone(), bound).map_err(|error| error.to_string())?;
    let mut association = dtls::Association::new(&settings, None, Instant::now())?;
    let mut buffer = vec![0; 1 << 16];
    let mut any_answer = false;
    let failed = |any_answer: bool, what: String| {
        if any_answer { what } else { "no answer in time".to_owned() }
    };
    loop {
        association
            .drain(|packet| _ = socket.send(packet), |_| {})
            .map_err(|what| failed(any_answer, what))?;
        if association.is_connected() {
            break;
        }
        let until = association.timeout().map_or(deadline, |at| at.min(deadline));
        let wait = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        socket.set_read_timeout(Some(wait)).map_err(|error| words(&error))?;
        match socket.recv(&mut buffer) {
            Ok(read) => {
                any_answer = true;
                association.handle_datagram(&buffer[..read])?;
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                if Instant::now() >= deadline {
                    return Err(failed(any_answer, "the DTLS handshake does not come to an end".to_owned()));
                }
                association.handle_timeout(Instant::now()).map_err(|what| failed(any_answer, what))?;
            }
            Err(error) => return Err(words(&error)),
        }
    }
    opened.version = association.version();
    opened.chain = association.certificate.iter().cloned().collect();
    opened.distrust = trust.verdict();
    Ok(Channel::Dtls(socket, Box::new(association)))
}

/// A read that took too long, by whichever of its two names.
fn timed_out<T>(result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    })
}

fn whole(buffer: &[u8], read: usize) -> io::Result<&[u8]> {
    if read == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(&buffer[..read]) }
}

/// Notes what a verifier thinks, and lets the handshake go on: a probe wants to tell more than the first fault.
#[derive(Debug)]
struct Observer {
    inner: Arc<dyn ServerCertVerifier>,
    /// What is wrong with the last certificate.
    seen: Mutex<Option<String>>,
}

impl ServerCertVerifier for Observer {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let judged =
            self.inner.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        if let Ok(mut seen) = self.seen.lock() {
            *seen = judged.err().map(|error| explain(&error));
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
