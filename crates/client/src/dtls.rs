//! DTLS client (RFC 7350) based on dimpl, with verification of the server's certificate.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use dimpl::{Config, Dtls, DtlsCertificate, Output};
use rustls::pki_types::ServerName;

use crate::{InvalidSetting, Security, explain};

/// Buffer size, larger than any record that dimpl creates from one TURN message.
const LARGEST: usize = 1 << 16;
/// Conservative path MTU. Only handshake messages are fragmented to fit.
const MTU: usize = 1_200;

#[derive(Clone)]
pub struct DtlsSettings {
    config: Arc<Config>,
    certificate: DtlsCertificate,
    security: Security,
}

impl DtlsSettings {
    /// Creates settings with a self-signed client certificate, which dimpl requires but TURN servers do not.
    pub fn new(security: Security, handshake: Duration) -> Result<Self, InvalidSetting> {
        let failed =
            |error: &dyn std::fmt::Display| InvalidSetting(format!("DTLS cannot be set up: {error}"));
        let own = rcgen::generate_simple_self_signed(vec!["turnpike".to_owned()]).map_err(|e| failed(&e))?;
        let certificate = DtlsCertificate {
            certificate: own.cert.der().to_vec(),
            private_key: own.signing_key.serialize_der(),
        };
        let config = Config::builder()
            .mtu(MTU)
            .flight_start_rto(Duration::from_millis(500))
            .handshake_timeout(handshake)
            .build()
            .map_err(|error| failed(&error))?;
        Ok(Self { config: Arc::new(config), certificate, security })
    }
}

pub struct ClientAssociation {
    dtls: Dtls,
    security: Security,
    buffer: Vec<u8>,
    timeout: Option<Instant>,
    connected: bool,
    closed: bool,
    pub certificate: Option<Vec<u8>>,
}

impl ClientAssociation {
    pub fn new(
        settings: &DtlsSettings,
        name: Option<&ServerName<'static>>,
        now: Instant,
    ) -> Result<Self, String> {
        let mut security = settings.security.clone();
        if let Some(name) = name {
            security.name = name.clone();
        }
        let mut dtls = Dtls::new_auto(Arc::clone(&settings.config), settings.certificate.clone(), now);
        dtls.set_active(true);
        dtls.handle_timeout(now).map_err(|error| error.to_string())?;
        Ok(Self {
            dtls,
            security,
            buffer: vec![0; LARGEST],
            timeout: None,
            connected: false,
            closed: false,
            certificate: None,
        })
    }

    pub fn is_connected(&self) -> bool {
        self.connected
    }

    pub fn timeout(&self) -> Option<Instant> {
        self.timeout
    }

    pub fn version(&self) -> Option<String> {
        let version = format!("{:?}", self.dtls.protocol_version()?);
        Some(version.replacen('S', "S ", 1).replace('_', "."))
    }

    pub fn handle_datagram(&mut self, datagram: &[u8]) -> Result<(), String> {
        self.dtls.handle_packet(datagram).map_err(|error| error.to_string())
    }

    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), String> {
        self.dtls.handle_timeout(now).map_err(|error| error.to_string())
    }

    pub fn send(&mut self, message: &[u8]) -> Result<(), String> {
        self.dtls.send_application_data(message).map(|_| ()).map_err(|error| error.to_string())
    }

    pub fn close(&mut self) {
        let _ = self.dtls.close();
    }

    /// Fails if the server's certificate is not trusted or the server closed the association.
    pub fn drain(
        &mut self,
        mut send: impl FnMut(&[u8]),
        mut receive: impl FnMut(&[u8]),
    ) -> Result<(), String> {
        loop {
            match self.dtls.poll_output(&mut self.buffer) {
                Output::Packet(packet) => send(packet),
                Output::ApplicationData(data) => receive(data),
                Output::BufferTooSmall { needed } => self.buffer.resize(needed, 0),
                Output::Connected => self.connected = true,
                Output::PeerCert(leaf) => {
                    self.certificate = Some(leaf.to_vec());
                    self.security.judge(leaf).map_err(|error| explain(&error))?;
                }
                Output::CloseNotify => self.closed = true,
                Output::Timeout(at) => {
                    self.timeout = Some(at);
                    break;
                }
                _ => {}
            }
        }
        if self.closed { Err("the server closed the DTLS association".to_owned()) } else { Ok(()) }
    }
}
