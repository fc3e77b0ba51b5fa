//! Redirects clients to another server (RFC 8489 section 10, RFC 8656 section 7.2): 300 (Try Alternate) with
//! ALTERNATE-SERVER. In a fleet the policy chooses the target; otherwise the configuration does.
//!
//! Only authenticated requests are redirected, in a signed response, so that an attacker cannot send clients
//! away.

use std::{net::SocketAddr, sync::Arc};

use turnpike_wire::{integrity::Mac, stun::kind};

use crate::server::{
    AllocateAttempt, Destination, Disposition, Policy, RequestRefusal, Server, Transport,
    request::{bad_request::Denied, context::Context, response::Envelope},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alternate {
    pub address: SocketAddr,
    /// ALTERNATE-DOMAIN (RFC 8489 section 14.16), at most 255 ASCII characters, for TLS and DTLS.
    pub domain: Option<String>,
    /// Empty means all.
    pub transports: Vec<Transport>,
    pub when: AlternateWhen,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AlternateWhen {
    #[default]
    Drain,
    /// The server is draining or out of capacity.
    Full,
    Always,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occasion {
    None,
    Draining,
    Full,
}

impl AlternateWhen {
    fn applies(self, occasion: Occasion) -> bool {
        match self {
            Self::Drain => occasion == Occasion::Draining,
            Self::Full => occasion != Occasion::None,
            Self::Always => true,
        }
    }
}

impl Alternate {
    fn serves(&self, transport: Transport) -> bool {
        self.transports.is_empty() || self.transports.contains(&transport)
    }
}

impl<P: Policy> Server<P> {
    /// Returns false if no other server is configured for this situation.
    pub(crate) fn write_redirect(&mut self, attempt: &AllocateAttempt<'_>, to: &Envelope) -> bool {
        if to.signer.is_none() {
            return false;
        }
        let transport = self.config.listener(attempt.client.listener).transport;
        let found = self.policy.redirect_target(attempt, transport);
        let Some(destination) = found.or_else(|| self.configured(attempt, transport)) else { return false };
        self.write_alternate(&destination, transport, to);
        true
    }

    /// Sends the `otherwise` error if the node is gone.
    pub(crate) fn send_to_node(
        &mut self,
        context: &Context<'_>,
        node: u16,
        otherwise: Denied,
    ) -> Disposition {
        let client = context.client();
        let transport = self.config.listener(client.listener).transport;
        let signed = context.envelope.signer.is_some();
        let found = self.policy.node(node, transport, client.address.is_ipv4()).filter(|_| signed);
        let Some(destination) = found else { return self.deny_request(context, otherwise) };
        self.tell_of(context, 300, RequestRefusal::Code);
        self.write_alternate(&destination, transport, &context.envelope);
        Disposition::Reply
    }

    /// Chooses round-robin.
    fn configured(&mut self, attempt: &AllocateAttempt<'_>, transport: Transport) -> Option<Destination> {
        let v4 = attempt.client.address.is_ipv4();
        let of_family = |of_v4: bool| {
            self.config.alternates.iter().filter(move |alternate| {
                alternate.when.applies(attempt.occasion)
                    && alternate.serves(transport)
                    && alternate.address.is_ipv4() == of_v4
            })
        };
        // The first ALTERNATE-SERVER has the family of the client's address.
        let count = of_family(v4).count();
        let first = self.alternate_turn.checked_rem(count).and_then(|turn| of_family(v4).nth(turn))?;
        // One ALTERNATE-DOMAIN covers both, so the second must have the same name.
        let second = of_family(!v4).find(|second| second.domain == first.domain);
        let (address, domain) = (first.address, first.domain.as_deref().map(Arc::from));
        let second = second.map(|second| second.address);
        self.alternate_turn = self.alternate_turn.wrapping_add(1);
        Some(Destination { address, second, domain })
    }

    fn write_alternate(&mut self, destination: &Destination, transport: Transport, to: &Envelope) {
        // MESSAGE-INTEGRITY-SHA256 identifies an RFC 8489 client, which understands ALTERNATE-DOMAIN.
        let knows = to.signer.as_ref().is_some_and(|signer| signer.mac == Mac::Sha256);
        let secure = matches!(transport, Transport::Tls | Transport::Dtls) && knows;
        self.data.stats.redirects += 1;
        self.data.stats.error(300);
        let mut response = to.error(&mut self.reply, 300);
        response.address(kind::ALTERNATE_SERVER, destination.address);
        if let Some(second) = destination.second {
            response.address(kind::ALTERNATE_SERVER, second);
        }
        if let Some(domain) = destination.domain.as_deref().filter(|_| secure) {
            response.attribute(kind::ALTERNATE_DOMAIN, domain.as_bytes());
        }
        to.sign(response, self.config.software.as_deref());
    }
}
