//! Requests as bytes.

use turnpike_wire::{
    integrity::{self, KeyAlgorithm},
    stun_types::{
        attribute::{
            AttributeStaticType, AttributeType, Nonce, PasswordAlgorithm, PasswordAlgorithmValue,
            PasswordAlgorithms, RawAttribute, Realm, Software, Userhash, Username,
        },
        message::{
            BINDING, Message, MessageClass, MessageType, MessageWrite as _, MessageWriteExt as _,
            MessageWriteVec, Method, StunWriteError, TransactionId,
        },
    },
    turn_types::{
        AddressFamily,
        attribute::{
            AdditionalAddressFamily, ChannelNumber, ConnectionId, DontFragment, EvenPort, Lifetime,
            RequestedAddressFamily, RequestedTransport, ReservationToken, XorPeerAddress,
        },
        message::{ALLOCATE, CHANNEL_BIND, CONNECT, CONNECTION_BIND, CREATE_PERMISSION, REFRESH},
    },
};

use super::{Config, Relayed, Request, credentials::Session};

pub(super) fn method(request: &Request) -> Method {
    match request {
        Request::Binding => BINDING,
        Request::Allocate => ALLOCATE,
        Request::Refresh | Request::Delete | Request::Migrate => REFRESH,
        Request::Permit(_) => CREATE_PERMISSION,
        Request::Bind(..) => CHANNEL_BIND,
        Request::Connect(_) => CONNECT,
        Request::BindConnection(_) => CONNECTION_BIND,
    }
}

/// MOBILITY-TICKET (RFC 8016 section 3.3) and ACCESS-TOKEN (RFC 7635 section 6.2), which `turn_types` does not have.
const MOBILITY_TICKET: AttributeType = AttributeType::new(0x8030);
const ACCESS_TOKEN: AttributeType = AttributeType::new(0x001B);

/// The ticket in a response.
pub(super) fn ticket(message: &Message<'_>) -> Option<Vec<u8>> {
    message.raw_attribute(MOBILITY_TICKET).map(|raw| raw.value.to_vec())
}

/// Writes a request; with a session, signed. `ticket` is what [`Request::Migrate`] carries.
pub(super) fn write(
    request: &Request,
    id: [u8; 12],
    config: &Config,
    session: Option<&Session>,
    ticket: &[u8],
) -> Result<Vec<u8>, StunWriteError> {
    let transaction = transaction_id(id);
    let kind = MessageType::from_class_method(MessageClass::Request, method(request));
    let mut message = Message::builder(kind, transaction, MessageWriteVec::with_capacity(256));
    match request {
        Request::Binding => {}
        Request::Allocate => write_allocate(&mut message, config)?,
        Request::Refresh => {
            if let Some(seconds) = config.lifetime {
                message.add_attribute(&Lifetime::new(seconds))?;
            }
        }
        Request::Delete => message.add_attribute(&Lifetime::new(0))?,
        // The port is ignored (RFC 8656 section 10.1).
        Request::Permit(peer) => {
            message.add_attribute(&XorPeerAddress::new((*peer, 0).into(), transaction))?;
        }
        Request::Bind(number, peer) => {
            message.add_attribute(&ChannelNumber::new(number.get()))?;
            message.add_attribute(&XorPeerAddress::new(*peer, transaction))?;
        }
        Request::Connect(peer) => message.add_attribute(&XorPeerAddress::new(*peer, transaction))?,
        Request::BindConnection(connection) => message.add_attribute(&ConnectionId::new(connection.0))?,
        Request::Migrate => {
            if let Some(seconds) = config.lifetime {
                message.add_attribute(&Lifetime::new(seconds))?;
            }
            message.add_attribute(&RawAttribute::new(MOBILITY_TICKET, ticket))?;
        }
    }
    if let Some(software) = &config.software {
        message.add_attribute(&Software::new(software)?)?;
    }
    if let Some(session) = session {
        write_credentials(&mut message, request, config, session)?;
    }
    let mut bytes = message.finish();
    if let Some(session) = session {
        integrity::sign(&mut bytes, &session.key, session.mac);
    }
    if config.fingerprint {
        integrity::append_fingerprint(&mut bytes);
    }
    Ok(bytes)
}

pub(super) fn transaction_id(id: [u8; 12]) -> TransactionId {
    let mut wide = [0; 16];
    wide[4..].copy_from_slice(&id);
    u128::from_be_bytes(wide).into()
}

fn write_allocate(message: &mut MessageWriteVec, config: &Config) -> Result<(), StunWriteError> {
    message.add_attribute(&RequestedTransport::new(match config.relayed {
        Relayed::Udp => RequestedTransport::UDP,
        Relayed::Tcp => RequestedTransport::TCP,
    }))?;
    if let Some(seconds) = config.lifetime {
        message.add_attribute(&Lifetime::new(seconds))?;
    }
    if let Some(family) = config.family {
        message.add_attribute(&RequestedAddressFamily::new(family))?;
    }
    if config.dual_stack {
        message.add_attribute(&AdditionalAddressFamily::new(AddressFamily::IPV6))?;
    }
    if let Some(reserve_next) = config.even_port {
        message.add_attribute(&EvenPort::new(reserve_next))?;
    }
    if let Some(token) = config.reservation {
        message.add_attribute(&ReservationToken::new(u64::from_be_bytes(token)))?;
    }
    if config.dont_fragment {
        message.add_attribute(&DontFragment::new())?;
    }
    // Empty, it asks for a ticket (RFC 8016 section 3.1.1).
    if config.mobility {
        message.add_attribute(&RawAttribute::new(MOBILITY_TICKET, &[]))?;
    }
    Ok(())
}

fn write_credentials(
    message: &mut MessageWriteVec,
    request: &Request,
    config: &Config,
    session: &Session,
) -> Result<(), StunWriteError> {
    let challenge = &session.challenge;
    if challenge.anonymous {
        let hash = integrity::userhash(&config.username, &challenge.realm);
        message.add_attribute(&Userhash::new(hash))?;
    } else {
        message.add_attribute(&Username::new(&config.username)?)?;
    }
    message.add_attribute(&Realm::new(&challenge.realm)?)?;
    message.add_attribute(&Nonce::new(&challenge.nonce)?)?;
    // Other requests are known by the allocation (RFC 7635 section 9).
    let shows_token = matches!(method(request), ALLOCATE | REFRESH);
    if let Some(access) = config.access_token.as_ref().filter(|_| shows_token) {
        message.add_attribute(&RawAttribute::new(ACCESS_TOKEN, &access.token))?;
    }
    if let Some(offered) = &challenge.algorithms {
        message.add_attribute(&RawAttribute::new(PasswordAlgorithms::TYPE, offered))?;
        let chosen = match session.algorithm {
            KeyAlgorithm::Md5 => PasswordAlgorithmValue::MD5,
            KeyAlgorithm::Sha256 => PasswordAlgorithmValue::SHA256,
        };
        message.add_attribute(&PasswordAlgorithm::new(chosen))?;
    }
    Ok(())
}
