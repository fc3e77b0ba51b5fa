//! DTLS client: dimpl on its own UDP socket.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::Arc,
    time::{Duration, Instant},
};

use dimpl::{Config, Dtls, DtlsCertificate, Error, Output, ProtocolVersion};
use rcgen::{CertificateParams, KeyPair};
use turnpike_relay::{DtlsConfig, DtlsContext, DtlsStats, Identity};

use super::{Message, SOON, World, allocate, bind, eventually, identity, plain, start_with};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    V12,
    V13,
    Auto,
}

pub(crate) fn context(identities: &[Identity]) -> Arc<DtlsContext> {
    Arc::new(DtlsContext::new(identities, Duration::from_secs(10)).unwrap())
}

pub(crate) fn world() -> World {
    start_with(|config| config.dtls.context = Some(context(&[identity(&["dtls.example"])])))
}

pub(crate) fn world_with(change: impl FnOnce(&mut DtlsConfig)) -> World {
    start_with(|config| {
        config.dtls.context = Some(context(&[identity(&["dtls.example"])]));
        change(&mut config.dtls);
    })
}

impl World {
    pub(crate) fn dtls(&self) -> SocketAddr {
        self.relay.listeners().dtls[0]
    }

    pub(crate) fn dtls_stats(&self) -> DtlsStats {
        self.relay.snapshots()[0].dtls
    }

    pub(crate) fn wait_for_dtls(&self, what: &str, reached: impl Fn(&DtlsStats) -> bool) {
        eventually(what, || reached(&self.dtls_stats()));
    }
}

pub(crate) struct DtlsClient {
    pub(crate) socket: UdpSocket,
    pub(crate) dtls: Dtls,
    pub(crate) connected: bool,
    pub(crate) closed: bool,
    pub(crate) shown: Vec<u8>,
    messages: Vec<Message>,
    room: Vec<u8>,
}

/// Created once, because key generation is slow.
fn own_certificate() -> DtlsCertificate {
    static OWN: std::sync::OnceLock<DtlsCertificate> = std::sync::OnceLock::new();
    OWN.get_or_init(|| {
        let key = KeyPair::generate().unwrap();
        let certificate =
            CertificateParams::new(vec!["client".to_owned()]).unwrap().self_signed(&key).unwrap();
        DtlsCertificate { certificate: certificate.der().to_vec(), private_key: key.serialize_der() }
    })
    .clone()
}

fn settings() -> Arc<Config> {
    static SETTINGS: std::sync::OnceLock<Arc<Config>> = std::sync::OnceLock::new();
    Arc::clone(SETTINGS.get_or_init(|| Arc::new(Config::builder().build().unwrap())))
}

impl DtlsClient {
    pub(crate) fn new(server: SocketAddr, kind: Kind) -> Self {
        let socket = UdpSocket::bind((server.ip(), 0)).unwrap();
        socket.connect(server).unwrap();
        Self::on(socket, kind)
    }

    pub(crate) fn on(socket: UdpSocket, kind: Kind) -> Self {
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let (config, now) = (settings(), Instant::now());
        let mut dtls = match kind {
            Kind::V12 => Dtls::new_12(config, own_certificate(), now),
            Kind::V13 => Dtls::new_13(config, own_certificate(), now),
            Kind::Auto => Dtls::new_auto(config, own_certificate(), now),
        };
        dtls.set_active(true);
        dtls.handle_timeout(now).unwrap();
        Self {
            socket,
            dtls,
            connected: false,
            closed: false,
            shown: Vec::new(),
            messages: Vec::new(),
            room: vec![0; 1 << 16],
        }
    }

    pub(crate) fn connect(server: SocketAddr, kind: Kind) -> Self {
        let mut client = Self::new(server, kind);
        client.finish().unwrap();
        client
    }

    pub(crate) fn says(&mut self) -> Vec<Vec<u8>> {
        let mut said = Vec::new();
        loop {
            match self.dtls.poll_output(&mut self.room) {
                Output::Packet(packet) => said.push(packet.to_vec()),
                Output::ApplicationData(data) => self.messages.push(Message(data.to_vec())),
                Output::Connected => self.connected = true,
                Output::PeerCert(leaf) => self.shown = leaf.to_vec(),
                Output::CloseNotify => self.closed = true,
                Output::Timeout(_) => return said,
                _ => {}
            }
        }
    }

    /// Sends pending output and receives for up to 50 ms.
    pub(crate) fn step(&mut self) -> Result<(), Error> {
        for packet in self.says() {
            self.socket.send(&packet).unwrap();
        }
        let mut datagram = [0; 1 << 16];
        let heard = self.socket.recv(&mut datagram);
        self.dtls.handle_timeout(Instant::now())?;
        if let Ok(len) = heard {
            self.dtls.handle_packet(&datagram[..len])?;
        }
        for packet in self.says() {
            self.socket.send(&packet).unwrap();
        }
        Ok(())
    }

    pub(crate) fn finish(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + SOON;
        while !self.connected {
            assert!(Instant::now() < deadline, "handshake not finished within {SOON:?}: {:?}", self.dtls);
            self.step()?;
        }
        Ok(())
    }

    pub(crate) fn version(&self) -> Option<ProtocolVersion> {
        self.dtls.protocol_version()
    }

    pub(crate) fn send(&mut self, message: &[u8]) {
        assert_eq!(self.dtls.send_application_data(message), Ok(message.len()));
        for packet in self.says() {
            self.socket.send(&packet).unwrap();
        }
    }

    pub(crate) fn receive(&mut self) -> Message {
        let deadline = Instant::now() + SOON;
        while self.messages.is_empty() {
            assert!(Instant::now() < deadline, "nothing received within {SOON:?}");
            self.step().unwrap();
        }
        self.messages.remove(0)
    }

    pub(crate) fn ask(&mut self, request: &[u8]) -> Message {
        self.send(request);
        let answer = self.receive();
        assert_eq!(answer.kind(), u16::from_be_bytes([request[0], request[1]]) | 0x0100, "{answer:?}");
        answer
    }

    pub(crate) fn allocated(&mut self, peer: &UdpSocket) -> SocketAddr {
        let relayed = plain(&self.ask(&allocate()).attribute(0x0016));
        self.ask(&bind(peer.local_addr().unwrap()));
        relayed
    }

    pub(crate) fn close(&mut self) {
        self.dtls.close().unwrap();
        for packet in self.says() {
            self.socket.send(&packet).unwrap();
        }
    }

    pub(crate) fn hears_farewell(&mut self) {
        let deadline = Instant::now() + SOON;
        while !self.closed {
            assert!(Instant::now() < deadline, "no close_notify within {SOON:?}");
            let _ = self.step();
        }
    }
}

/// First and second datagram of a client; the second contains the cookie.
pub(crate) fn hellos(world: &World, kind: Kind) -> (DtlsClient, Vec<u8>, Vec<u8>) {
    let mut client = DtlsClient::new(world.dtls(), kind);
    let first = client.says().remove(0);
    client.socket.send(&first).unwrap();
    let second = answer(&mut client);
    (client, first, second)
}

fn answer(client: &mut DtlsClient) -> Vec<u8> {
    let mut buffer = [0; 4096];
    client.socket.set_read_timeout(Some(SOON)).unwrap();
    let len = client.socket.recv(&mut buffer).unwrap();
    client.socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    client.dtls.handle_timeout(Instant::now()).unwrap();
    client.dtls.handle_packet(&buffer[..len]).unwrap();
    client.says().remove(0)
}

pub(crate) fn wait_for_no_allocation(world: &World) {
    eventually("all allocations have ended", || world.allocations() == 0);
}
