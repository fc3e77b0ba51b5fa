//! Client data connection (RFC 6062): a ConnectionBind exchange, followed by the peer's bytes.

use std::sync::Arc;

use turnpike_wire::stun::{Class, View};

use crate::random::Random;

use super::{
    Config, ConnectionId, Failure, MAX_CHALLENGES, Request,
    credentials::{Challenge, Session},
    refusal, requests,
};

/// The caller opens the connection, sends [`DataConnection::poll_transmit`], feeds complete STUN messages,
/// and limits the wait: the server allows 30 s (RFC 6062 section 4.3).
pub struct DataConnection {
    config: Arc<Config>,
    session: Option<Session>,
    connection: ConnectionId,
    id: [u8; 12],
    signed: bool,
    challenges: u8,
    out: Option<Vec<u8>>,
    random: Random,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindProgress {
    /// Bound: all bytes after this message come from the peer.
    Bound,
    Pending,
}

impl DataConnection {
    pub(super) fn new(
        config: Arc<Config>,
        session: Option<Session>,
        connection: ConnectionId,
        random: Random,
    ) -> Self {
        let (id, out) = ([0; 12], None);
        let mut this = Self { config, session, connection, id, signed: false, challenges: 0, out, random };
        this.write();
        this
    }

    pub fn poll_transmit(&mut self) -> Option<Vec<u8>> {
        self.out.take()
    }

    /// Handles one STUN message. An error means that the server refused the connection.
    pub fn handle_message(&mut self, bytes: &[u8]) -> Result<BindProgress, Failure> {
        let Ok(message) = View::new_checked(bytes) else { return Ok(BindProgress::Pending) };
        let header = message.header();
        let method = requests::method_of(&Request::BindConnection(self.connection));
        if (header.method, header.transaction) != (method, self.id) {
            return Ok(BindProgress::Pending);
        }
        let error = match header.class {
            Class::Success => None,
            Class::Error => Some(message.error().ok_or(Failure::Incomplete("ERROR-CODE"))?),
            Class::Request | Class::Indication => return Ok(BindProgress::Pending),
        };
        if error.is_some_and(|error| error.is_challenge()) {
            self.answer(&message)?;
            return Ok(BindProgress::Pending);
        }
        if let (true, Some(session)) = (self.signed, &self.session)
            && message.verify(&session.key, session.mac).is_err()
        {
            let unverified = error.map(|error| (error.code, error.text()));
            return Err(Failure::Timeout { transmissions: 1, unverified });
        }
        error.map_or(Ok(BindProgress::Bound), |error| Err(refusal(&message, &error)))
    }

    fn answer(&mut self, message: &View<'_>) -> Result<(), Failure> {
        let known = self.session.as_ref().map(|session| session.challenge.realm.as_str());
        let challenge = Challenge::read(message, known, self.config.password_algorithms)
            .map_err(|_| Failure::Incomplete("REALM or NONCE"))?;
        // The first challenge may just mean that the nonce belongs to another 5-tuple.
        if self.challenges >= MAX_CHALLENGES.min(2) {
            return Err(Failure::Credentials {
                username: self.config.username.clone(),
                realm: challenge.realm,
            });
        }
        self.challenges += 1;
        self.session = Some(Session::answer(&self.config, challenge)?);
        self.write();
        Ok(())
    }

    fn write(&mut self) {
        self.id = self.random.bytes();
        self.signed = self.session.is_some();
        let request = Request::BindConnection(self.connection);
        // Credentials that cannot be encoded have already failed on the control connection.
        self.out = requests::write(&request, self.id, &self.config, self.session.as_ref(), &[]).ok();
    }
}
