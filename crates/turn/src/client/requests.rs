use turnpike_wire::{
    integrity::userhash,
    precis::opaque_string,
    stun::{Class, Header, Writer, kind, method},
};

use super::{Config, Failure, Relayed, Request, credentials::Session};
use crate::Family;

/// Maximum length of USERNAME and SOFTWARE in bytes (RFC 8489 sections 14.3 and 14.14).
const MAX_USERNAME_LEN: usize = 508;
const MAX_SOFTWARE_LEN: usize = 763;
/// Protocol numbers of REQUESTED-TRANSPORT (RFC 8656 section 18.7).
const UDP: u8 = 17;
const TCP: u8 = 6;

pub(super) fn method_of(request: &Request) -> u16 {
    match request {
        Request::Binding => method::BINDING,
        Request::Allocate => method::ALLOCATE,
        Request::Refresh | Request::Delete | Request::Migrate => method::REFRESH,
        Request::Permit(_) => method::CREATE_PERMISSION,
        Request::Bind(..) => method::CHANNEL_BIND,
        Request::Connect(_) => method::CONNECT,
        Request::BindConnection(_) => method::CONNECTION_BIND,
    }
}

/// Writes a request and signs it if there is a session. `ticket` is used only for [`Request::Migrate`].
pub(super) fn write(
    request: &Request,
    transaction: [u8; 12],
    config: &Config,
    session: Option<&Session>,
    ticket: &[u8],
) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::with_capacity(256);
    let header = Header { class: Class::Request, method: method_of(request), transaction };
    let mut message = Writer::begin(&mut bytes, header);
    match request {
        Request::Binding => {}
        Request::Allocate => write_allocate(&mut message, config),
        Request::Refresh => write_lifetime(&mut message, config.lifetime),
        Request::Delete => write_lifetime(&mut message, Some(0)),
        // The port is ignored (RFC 8656 section 10.1).
        Request::Permit(peer) => _ = message.xor_address(kind::XOR_PEER_ADDRESS, (*peer, 0).into()),
        Request::Bind(number, peer) => {
            let [high, low] = number.get().to_be_bytes();
            message.attribute(kind::CHANNEL_NUMBER, &[high, low, 0, 0]);
            message.xor_address(kind::XOR_PEER_ADDRESS, *peer);
        }
        Request::Connect(peer) => _ = message.xor_address(kind::XOR_PEER_ADDRESS, *peer),
        Request::BindConnection(connection) => _ = message.number(kind::CONNECTION_ID, connection.0),
        Request::Migrate => {
            write_lifetime(&mut message, config.lifetime);
            message.attribute(kind::MOBILITY_TICKET, ticket);
        }
    }
    if let Some(software) = &config.software {
        message.attribute(kind::SOFTWARE, within("SOFTWARE", software, MAX_SOFTWARE_LEN)?);
    }
    if let Some(session) = session {
        write_credentials(&mut message, request, config, session)?;
        message.sign(&session.key, session.mac);
    }
    message.finish(config.fingerprint);
    Ok(bytes)
}

fn write_lifetime(message: &mut Writer<'_>, lifetime: Option<u32>) {
    if let Some(seconds) = lifetime {
        message.number(kind::LIFETIME, seconds);
    }
}

fn write_allocate(message: &mut Writer<'_>, config: &Config) {
    let transport = match config.relayed {
        Relayed::Udp => UDP,
        Relayed::Tcp => TCP,
    };
    message.attribute(kind::REQUESTED_TRANSPORT, &[transport, 0, 0, 0]);
    write_lifetime(message, config.lifetime);
    if let Some(family) = config.family {
        message.attribute(kind::REQUESTED_ADDRESS_FAMILY, &[family.number(), 0, 0, 0]);
    }
    if config.dual_stack {
        message.attribute(kind::ADDITIONAL_ADDRESS_FAMILY, &[Family::V6.number(), 0, 0, 0]);
    }
    if let Some(reserve_next) = config.even_port {
        message.attribute(kind::EVEN_PORT, &[if reserve_next { 0x80 } else { 0 }]);
    }
    if let Some(token) = config.reservation {
        message.attribute(kind::RESERVATION_TOKEN, &token);
    }
    if config.dont_fragment {
        message.attribute(kind::DONT_FRAGMENT, &[]);
    }
    // An empty attribute requests a ticket (RFC 8016 section 3.1.1).
    if config.mobility {
        message.attribute(kind::MOBILITY_TICKET, &[]);
    }
}

fn write_credentials(
    message: &mut Writer<'_>,
    request: &Request,
    config: &Config,
    session: &Session,
) -> Result<(), Failure> {
    let challenge = &session.challenge;
    if challenge.anonymous {
        message.attribute(kind::USERHASH, &userhash(&config.username, &challenge.realm));
    } else {
        message.attribute(
            kind::USERNAME,
            within("USERNAME", &opaque_string(&config.username), MAX_USERNAME_LEN)?,
        );
    }
    message.attribute(kind::REALM, challenge.realm.as_bytes());
    message.attribute(kind::NONCE, challenge.nonce.as_bytes());
    // The server verifies other requests with the allocation's token (RFC 7635 section 9).
    let shows_token = matches!(method_of(request), method::ALLOCATE | method::REFRESH);
    if let Some(access) = config.access_token.as_ref().filter(|_| shows_token) {
        message.attribute(kind::ACCESS_TOKEN, &access.token);
    }
    if let Some(offered) = &challenge.algorithms {
        message.attribute(kind::PASSWORD_ALGORITHMS, offered);
        message.attribute(kind::PASSWORD_ALGORITHM, &session.algorithm.attribute());
    }
    Ok(())
}

fn within<'a>(name: &str, text: &'a str, most: usize) -> Result<&'a [u8], Failure> {
    if text.len() > most {
        return Err(Failure::Unwritable(format!("{name} is {} bytes long; the limit is {most}", text.len())));
    }
    Ok(text.as_bytes())
}
