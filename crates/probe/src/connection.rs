//! Blocking client connection with a deadline on every wait.

use std::{
    collections::HashMap,
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream, UdpSocket},
    sync::{Arc, Mutex},
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use rustls::{AlertDescription, ClientConnection, Error};
use turnpike_client::{
    CertificateJudge, ClientTransport, InvalidSetting, Security, ShownCertificate, TlsOptions,
    certificates::{AnyCertificate, Authorities},
    dtls, explain,
};
use turnpike_tls::KeyExchangeGroup;
use turnpike_wire::{
    escape,
    frame::{self, Frame, MAX_MESSAGE_LEN},
};

pub struct ProbeConnection {
    channel: ProbeChannel,
    /// Bytes of an incomplete message on a stream.
    rest: Vec<u8>,
    waiting: Vec<Vec<u8>>,
    buffer: Vec<u8>,
}

enum ProbeChannel {
    Udp(UdpSocket),
    Tcp(TcpStream),
    Tls(TcpStream, Box<ClientConnection>),
    Dtls(UdpSocket, Box<dtls::ClientAssociation>),
}

#[derive(Clone, Debug, Default)]
pub struct OpenedConnection {
    pub version: Option<String>,
    /// IANA name of the key exchange group (TLS only).
    pub group: Option<String>,
    /// Negotiated application protocol (RFC 7443).
    pub alpn: Option<String>,
    pub chain: Vec<Vec<u8>>,
    pub distrust: Option<String>,
    pub took: Duration,
}

pub struct Trust {
    pub(crate) security: Security,
    observer: Arc<Observer>,
}

impl Trust {
    /// Creates the TLS and DTLS settings. Certificates are verified even with `--insecure`, which affects only the verdict "usable".
    pub fn new(options: &TlsOptions, host: Option<&str>, server: SocketAddr) -> Result<Self, InvalidSetting> {
        let observer = match Authorities::new(options) {
            Ok(judge) => Observer::new(Arc::new(judge), None),
            Err(error) if options.ca.is_some() => return Err(error),
            Err(error) => {
                let unjudged = format!("the certificate cannot be verified: {error}");
                Observer::new(Arc::new(AnyCertificate), Some(unjudged))
            }
        };
        Self::with_observer(options, host, server, observer)
    }

    fn with_observer(
        options: &TlsOptions,
        host: Option<&str>,
        server: SocketAddr,
        observer: Observer,
    ) -> Result<Self, InvalidSetting> {
        let observer = Arc::new(observer);
        let judge: Arc<dyn CertificateJudge> = Arc::clone(&observer) as _;
        Ok(Self { security: Security::with_judge(options, host, server, judge)?, observer })
    }

    fn verdict(&self) -> Option<String> {
        self.observer.seen.lock().ok().and_then(|mut seen| seen.remove(&thread::current().id()))
    }
}

impl ProbeConnection {
    pub fn open(
        transport: ClientTransport,
        server: SocketAddr,
        trust: Option<&Trust>,
        deadline: Instant,
    ) -> Result<(Self, OpenedConnection), String> {
        let began = Instant::now();
        let mut opened = OpenedConnection::default();
        let channel = match (transport, trust) {
            (ClientTransport::Udp, _) => ProbeChannel::Udp(udp(server).map_err(describe_error)?),
            (ClientTransport::Tcp, _) => ProbeChannel::Tcp(tcp(server, deadline).map_err(describe_error)?),
            (ClientTransport::Tls, Some(trust)) => tls(server, trust, deadline, &mut opened)?,
            (ClientTransport::Dtls, Some(trust)) => dtls(server, trust, deadline, &mut opened)?,
            (ClientTransport::Tls | ClientTransport::Dtls, None) => {
                return Err("certificates cannot be verified for this server".to_owned());
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

    pub(crate) fn is_lossy(&self) -> bool {
        matches!(self.channel, ProbeChannel::Udp(_) | ProbeChannel::Dtls(..))
    }

    pub fn local_addr(&self) -> Option<SocketAddr> {
        match &self.channel {
            ProbeChannel::Udp(socket) | ProbeChannel::Dtls(socket, _) => socket.local_addr().ok(),
            ProbeChannel::Tcp(stream) | ProbeChannel::Tls(stream, _) => stream.local_addr().ok(),
        }
    }

    pub fn send(&mut self, message: &[u8], deadline: Instant) -> io::Result<()> {
        match &mut self.channel {
            ProbeChannel::Udp(socket) => socket.send(message).map(|_| ()),
            ProbeChannel::Tcp(stream) => {
                stream.set_write_timeout(Some(left(deadline)?))?;
                stream.write_all(message)
            }
            ProbeChannel::Tls(stream, tls) => {
                stream.set_write_timeout(Some(left(deadline)?))?;
                tls.writer().write_all(message)?;
                while tls.wants_write() {
                    tls.write_tls(stream)?;
                }
                Ok(())
            }
            ProbeChannel::Dtls(socket, association) => association
                .send(message)
                .and_then(|()| association.drain(|packet| _ = socket.send(packet), |_| {}))
                .map_err(io::Error::other),
        }
    }

    /// Returns the next message. The error `UnexpectedEof` means that the server closed the connection, and
    /// `InvalidData` that it does not speak STUN.
    pub fn receive(&mut self, deadline: Instant) -> io::Result<Vec<u8>> {
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

    fn cut(&mut self) -> io::Result<Option<Vec<u8>>> {
        if let Some(what) = web_server(&self.rest) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        match frame::first(&self.rest, MAX_MESSAGE_LEN) {
            Ok(Frame::Message { next, .. }) => Ok(Some(self.rest.drain(..next).collect())),
            Ok(Frame::Unfinished { .. }) => Ok(None),
            Err(_) => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "the server does not speak STUN on this port"))
            }
        }
    }

    /// Returns true if the bytes left over at the end of a stream cannot be the start of a STUN message.
    pub(crate) fn ends_in_garbage(&self) -> bool {
        // The first byte of a STUN message is 0 to 3 (RFC 7983 section 7).
        self.rest.first().is_some_and(|first| *first > 3)
    }

    fn read(&mut self, deadline: Instant) -> io::Result<()> {
        match &mut self.channel {
            ProbeChannel::Udp(socket) => {
                socket.set_read_timeout(Some(left(deadline)?))?;
                let read = timed_out(socket.recv(&mut self.buffer))?;
                self.waiting.push(self.buffer[..read].to_vec());
            }
            ProbeChannel::Tcp(stream) => {
                stream.set_read_timeout(Some(left(deadline)?))?;
                let read = timed_out(stream.read(&mut self.buffer))?;
                self.rest.extend_from_slice(whole(&self.buffer, read)?);
            }
            ProbeChannel::Tls(stream, tls) => {
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
            ProbeChannel::Dtls(socket, association) => {
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

impl Drop for ProbeConnection {
    /// Sends close_notify, but does not wait for the server's.
    fn drop(&mut self) {
        match &mut self.channel {
            ProbeChannel::Tls(stream, tls) => {
                tls.send_close_notify();
                let _ = tls.write_tls(stream);
            }
            ProbeChannel::Dtls(socket, association) => {
                association.close();
                let _ = association.drain(|packet| _ = socket.send(packet), |_| {});
            }
            ProbeChannel::Udp(_) | ProbeChannel::Tcp(_) => {}
        }
    }
}

pub(crate) const WEB_SERVER: &str = "a web server answers";

/// Recognizes a web server by its status line, which would otherwise parse as ChannelData of 21 kB.
fn web_server(answer: &[u8]) -> Option<String> {
    let status = answer.strip_prefix(b"HTTP/")?;
    let line = status.split(|byte| matches!(byte, b'\r' | b'\n')).next().unwrap_or_default();
    let line = String::from_utf8_lossy(&line[..line.len().min(60)]);
    Some(format!("{WEB_SERVER} (HTTP/{}), not TURN", escape::line(&line)))
}

pub(crate) fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

pub(crate) fn udp(server: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(any(server))?;
    socket.connect(server)?;
    Ok(socket)
}

pub(crate) fn any(server: SocketAddr) -> SocketAddr {
    match server {
        SocketAddr::V4(_) => ([0; 4], 0).into(),
        SocketAddr::V6(_) => ([0_u16; 8], 0).into(),
    }
}

pub(crate) fn describe_error(error: io::Error) -> String {
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

fn tls(
    server: SocketAddr,
    trust: &Trust,
    deadline: Instant,
    opened: &mut OpenedConnection,
) -> Result<ProbeChannel, String> {
    let mut stream = tcp(server, deadline).map_err(describe_error)?;
    let Security { config, name, .. } = &trust.security;
    let mut tls =
        ClientConnection::new(Arc::clone(config), name.clone()).map_err(|error| error.to_string())?;
    while tls.is_handshaking() {
        let left = left(deadline).map_err(describe_error)?;
        let bounded = stream.set_read_timeout(Some(left)).and_then(|()| stream.set_write_timeout(Some(left)));
        bounded.map_err(describe_error)?;
        while tls.wants_write() {
            tls.write_tls(&mut stream).map_err(describe_error)?;
        }
        if !tls.is_handshaking() {
            break;
        }
        if timed_out(tls.read_tls(&mut stream)).map_err(describe_error)? == 0 {
            return Err("the server closed the connection during the TLS handshake".to_owned());
        }
        if let Err(error) = tls.process_new_packets() {
            let _ = tls.write_tls(&mut stream);
            return Err(match error {
                // nginx and other web servers reject the ALPN protocols of RFC 7443.
                Error::AlertReceived(AlertDescription::NoApplicationProtocol) => {
                    format!(
                        "{WEB_SERVER}, or another service that accepts neither stun.turn nor stun.nat-discovery as ALPN"
                    )
                }
                error => explain(&error),
            });
        }
    }
    opened.version = tls
        .protocol_version()
        .and_then(|version| version.as_str())
        .map(|name| name.replace('v', " ").replace('_', "."));
    opened.group = KeyExchangeGroup::of(&tls).map(|group| <&str>::from(group).to_owned());
    opened.alpn = tls.alpn_protocol().map(|name| String::from_utf8_lossy(name).into_owned());
    opened.chain = tls.peer_certificates().unwrap_or_default().iter().map(|cert| cert.to_vec()).collect();
    opened.distrust = trust.verdict();
    Ok(ProbeChannel::Tls(stream, Box::new(tls)))
}

fn dtls(
    server: SocketAddr,
    trust: &Trust,
    deadline: Instant,
    opened: &mut OpenedConnection,
) -> Result<ProbeChannel, String> {
    let socket = udp(server).map_err(describe_error)?;
    let bound = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let settings =
        dtls::DtlsSettings::new(trust.security.clone(), bound).map_err(|error| error.to_string())?;
    let mut association = dtls::ClientAssociation::new(&settings, None, Instant::now())?;
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
        // The deadline is checked after every datagram, because a server may keep sending forever.
        if Instant::now() >= deadline {
            return Err(failed(any_answer, "the DTLS handshake did not finish in time".to_owned()));
        }
        let until = association.timeout().map_or(deadline, |at| at.min(deadline));
        let wait = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        socket.set_read_timeout(Some(wait)).map_err(describe_error)?;
        match socket.recv(&mut buffer) {
            Ok(read) => {
                // The first byte of a DTLS record is 20 to 63 (RFC 7983 section 7).
                if !any_answer && !matches!(buffer[..read].first(), Some(20..=63)) {
                    return Err("the server does not speak DTLS on this port".to_owned());
                }
                any_answer = true;
                association.handle_datagram(&buffer[..read])?;
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                let now = Instant::now();
                if now < deadline {
                    association.handle_timeout(now).map_err(|what| failed(any_answer, what))?;
                }
            }
            Err(error) => return Err(describe_error(error)),
        }
    }
    opened.version = association.version();
    opened.chain = association.certificate.iter().cloned().collect();
    opened.distrust = trust.verdict();
    Ok(ProbeChannel::Dtls(socket, Box::new(association)))
}

fn timed_out<T>(result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    })
}

fn whole(buffer: &[u8], read: usize) -> io::Result<&[u8]> {
    if read == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(&buffer[..read]) }
}

/// Lets the handshake continue with a bad certificate, so that the probe can report more than the first
/// fault.
#[derive(Debug)]
struct Observer {
    inner: Arc<dyn CertificateJudge>,
    unjudged: Option<String>,
    /// Fault of each certificate, keyed by the thread that opens the connection, because connections are opened in parallel.
    seen: Mutex<HashMap<ThreadId, String>>,
}

impl Observer {
    fn new(inner: Arc<dyn CertificateJudge>, unjudged: Option<String>) -> Self {
        Self { inner, unjudged, seen: Mutex::default() }
    }
}

impl CertificateJudge for Observer {
    fn judge(&self, shown: &ShownCertificate<'_>) -> Result<(), Error> {
        let judged = self.inner.judge(shown);
        if let Ok(mut seen) = self.seen.lock() {
            let wrong = self.unjudged.clone().or_else(|| judged.err().map(|error| explain(&error)));
            match wrong {
                Some(wrong) => _ = seen.insert(thread::current().id(), wrong),
                None => _ = seen.remove(&thread::current().id()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trust(options: &TlsOptions) -> Trust {
        Trust::new(options, Some("turn.example.org"), ([127, 0, 0, 1], 5349).into()).unwrap()
    }

    #[test]
    fn a_web_server_is_named_by_its_status_line() {
        for (answer, what) in [
            (&b"HTTP/1.1 400 Bad Request\r\nServer: nginx\r\n"[..], Some("HTTP/1.1 400 Bad Request")),
            (b"HTTP/1.0 200 \x1b[31m\n", Some("HTTP/1.0 200 ")),
            (b"SSH-2.0-OpenSSH_9.7\r\n", None),
            (&[0x01, 0x01, 0, 0], None),
        ] {
            let found = web_server(answer);
            assert_eq!(found.is_some(), what.is_some(), "{found:?}");
            assert!(found.iter().zip(what).all(|(found, what)| found.contains(what)), "{found:?}");
            assert!(found.is_none_or(|found| !found.contains('\x1b')));
        }
    }

    #[test]
    fn a_web_server_is_reported_with_its_status() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 20]).unwrap();
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        });
        let deadline = Instant::now() + Duration::from_secs(20);
        let (mut connection, _) = ProbeConnection::open(ClientTransport::Tcp, at, None, deadline).unwrap();
        connection.send(&[0; 20], deadline).unwrap();
        let error = connection.receive(deadline).unwrap_err();
        assert_eq!(describe_error(error), "a web server answers (HTTP/1.1 400 Bad Request), not TURN");
        server.join().unwrap();
    }

    #[test]
    fn a_web_server_that_refuses_our_alpn_is_named() {
        let made = rcgen::generate_simple_self_signed(vec!["turn.example.org".to_owned()]).unwrap();
        let key = rustls::pki_types::PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider);
        let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
        let mut config = config.with_single_cert(vec![made.cert.der().clone()], key).unwrap();
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut tls = rustls::ServerConnection::new(Arc::new(config)).unwrap();
            tls.complete_io(&mut stream).unwrap_err();
        });
        let trust = trust(&TlsOptions { insecure: true, ..TlsOptions::default() });
        let deadline = Instant::now() + Duration::from_secs(20);
        let failed =
            ProbeConnection::open(ClientTransport::Tls, at, Some(&trust), deadline).map(drop).unwrap_err();
        assert_eq!(
            failed,
            "a web server answers, or another service that accepts neither stun.turn nor stun.nat-discovery as ALPN"
        );
        server.join().unwrap();
    }

    #[test]
    fn insecure_accepts_a_bad_certificate_and_reports_it() {
        let mut params = rcgen::CertificateParams::new(vec!["turn.example.org".to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(2020, 2, 1);
        let key = rcgen::KeyPair::generate().unwrap();
        let expired = params.self_signed(&key).unwrap();
        let trust = trust(&TlsOptions { insecure: true, ..TlsOptions::default() });
        trust.security.judge(expired.der()).unwrap();
        let verdict = trust.verdict().expect("the certificate has a fault");
        assert!(verdict.contains("has expired") || verdict.contains("cannot be verified"), "{verdict}");
        assert_eq!(trust.verdict(), None, "each verdict is taken once");
    }

    #[test]
    fn without_authorities_no_certificate_is_trusted() {
        let name = rcgen::generate_simple_self_signed(vec!["turn.example.org".to_owned()]).unwrap();
        let options = TlsOptions { insecure: true, ..TlsOptions::default() };
        let observer = Observer::new(Arc::new(AnyCertificate), Some("cannot be verified".to_owned()));
        let server = ([127, 0, 0, 1], 5349).into();
        let trust = Trust::with_observer(&options, Some("turn.example.org"), server, observer).unwrap();
        trust.security.judge(name.cert.der()).unwrap();
        assert_eq!(trust.verdict().as_deref(), Some("cannot be verified"));
    }

    #[test]
    fn a_reply_that_is_not_a_dtls_record_is_reported() {
        let server = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        let address = server.local_addr().unwrap();
        let other = thread::spawn(move || {
            let (_, client) = server.recv_from(&mut [0; 2048]).unwrap();
            server.send_to(b"HTTP/1.1 400 Bad Request", client).unwrap();
        });
        let trust = trust(&TlsOptions { insecure: true, ..TlsOptions::default() });
        let deadline = Instant::now() + Duration::from_secs(20);
        let failed = ProbeConnection::open(ClientTransport::Dtls, address, Some(&trust), deadline)
            .map(drop)
            .unwrap_err();
        assert_eq!(failed, "the server does not speak DTLS on this port");
        other.join().unwrap();
    }

    /// Error of a handshake with a server that sends the same HelloVerifyRequest again and again (RFC 6347 section 4.2.1).
    fn handshake_with_copies(most: usize, patience: Duration) -> String {
        let server = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        let address = server.local_addr().unwrap();
        let talker = thread::spawn(move || {
            let (_, client) = server.recv_from(&mut [0; 2048]).unwrap();
            server.connect(client).unwrap();
            let hello = [3, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 4, 0xFE, 0xFF, 1, 1];
            let record = [&[22, 0xFE, 0xFD, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16][..], &hello].concat();
            let mut sent = 0;
            while sent < most && server.send(&record).is_ok() {
                sent += 1;
                thread::yield_now();
            }
            server
        });
        let trust = trust(&TlsOptions { insecure: true, ..TlsOptions::default() });
        let deadline = Instant::now() + patience;
        let failed = ProbeConnection::open(ClientTransport::Dtls, address, Some(&trust), deadline)
            .map(drop)
            .unwrap_err();
        talker.join().unwrap();
        failed
    }

    /// Regression test: each datagram used to restart the wait for the next one.
    #[test]
    fn dtls_handshakes_end_at_the_deadline() {
        for most in [usize::MAX, 1] {
            let patience = [700, 20_000].map(Duration::from_millis);
            let mut told = patience.into_iter().map(|patience| handshake_with_copies(most, patience));
            let failed = told.find(|failed| failed != "no answer in time");
            assert_eq!(failed.as_deref(), Some("the DTLS handshake did not finish in time"), "{most}");
        }
    }
}
