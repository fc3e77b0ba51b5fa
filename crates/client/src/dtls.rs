//! A DTLS client on datagrams (RFC 7350), by dimpl: what it says, sends and hears, with the server's certificate judged.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use dimpl::{Config, Dtls, DtlsCertificate, Output};
use rustls::pki_types::ServerName;

use crate::{InvalidSetting, Security, explain};

/// Longer than any record that dimpl makes of one TURN message.
const LARGEST: usize = 1 << 16;
/// A datagram that crosses any path of today; only the handshake is cut to this, application data is sent as it is.
const MTU: usize = 1_200;

/// What every DTLS client of a run shares.
#[derive(Clone)]
pub struct DtlsSettings {
    config: Arc<Config>,
    certificate: DtlsCertificate,
    security: Security,
}

impl DtlsSettings {
    /// With a certificate of its own, which dimpl wants to have and TURN servers do not ask for. `handshake` is how long one may
    /// take.
    ///
    /// # Errors
    /// When that certificate cannot be made, or dimpl does not take the settings.
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

/// One client's association.
pub struct ClientAssociation {
    dtls: Dtls,
    security: Security,
    buffer: Vec<u8>,
    timeout: Option<Instant>,
    connected: bool,
    closed: bool,
    /// The server's certificate (DER), once it has shown one.
    pub certificate: Option<Vec<u8>>,
}

impl ClientAssociation {
    /// Begins a handshake; [`ClientAssociation::drain`] has the first packet. `name` is what the certificate must have where that is
    /// not the name of the settings.
    ///
    /// # Errors
    /// In words, as everywhere here: why it does not go on.
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

    /// Whether the handshake is over.
    pub fn is_connected(&self) -> bool {
        self.connected
    }

    /// When [`ClientAssociation::handle_timeout`] wants to be called.
    pub fn timeout(&self) -> Option<Instant> {
        self.timeout
    }

    /// The version spoken, once that is known.
    pub fn version(&self) -> Option<String> {
        let version = format!("{:?}", self.dtls.protocol_version()?);
        Some(version.replacen('S', "S ", 1).replace('_', "."))
    }

    /// Feeds a datagram.
    ///
    /// # Errors
    /// When the handshake fails by it.
    pub fn handle_datagram(&mut self, datagram: &[u8]) -> Result<(), String> {
        self.dtls.handle_packet(datagram).map_err(|error| error.to_string())
    }

    /// Sends again what got no answer.
    ///
    /// # Errors
    /// When the handshake has taken too long.
    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), String> {
        self.dtls.handle_timeout(now).map_err(|error| error.to_string())
    }

    /// Queues one message.
    ///
    /// # Errors
    /// When the handshake is not over, or the association is.
    pub fn send(&mut self, message: &[u8]) -> Result<(), String> {
        self.dtls.send_application_data(message).map(|_| ()).map_err(|error| error.to_string())
    }

    /// Queues the farewell.
    pub fn close(&mut self) {
        // A failed association needs none.
        let _ = self.dtls.close();
    }

    /// Hands out what is to be sent and what was received.
    ///
    /// # Errors
    /// When the server's certificate is not to be trusted, or when it said farewell.
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
        if self.closed { Err("the server closed the association".to_owned()) } else { Ok(()) }
    }
}
