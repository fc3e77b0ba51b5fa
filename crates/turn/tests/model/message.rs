//! Messages in two forms: their meaning, for the model, and their bytes, which the oracle writes and reads.

use super::prelude::*;
use stun_types::{
    attribute::{
        AttributeStaticType as _, AttributeType, MessageIntegrity, MessageIntegritySha256, Nonce, Realm,
        XorMappedAddress,
    },
    message::{Message, MessageClass, TransactionId},
};
use turn_types::attribute::{Data, DontFragment, Lifetime, XorPeerAddress};

use super::reference::{Framing, Port};
use crate::common::{
    ALLOCATE, Ask, BINDING, CHANNEL_BIND, CONNECT, CONNECTION_BIND, CREATE_PERMISSION, Credentials, REFRESH,
    Reply, SEND, TICKET, channel_data,
};

#[derive(Clone, Debug)]
pub(super) enum Datagram {
    Request(Request),
    Send {
        peer: SocketAddr,
        data: Vec<u8>,
        dont_fragment: bool,
    },
    ChannelData {
        number: u16,
        data: Vec<u8>,
    },
    /// Neither STUN nor ChannelData.
    Noise,
    Keepalive,
}

#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) wanted: Wanted,
    pub(super) transaction: [u8; 12],
    pub(super) claim: Option<Claim>,
    pub(super) strange: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Claim {
    pub(super) user: &'static str,
    pub(super) right: bool,
    pub(super) realm: &'static str,
    pub(super) nonce: String,
    pub(super) scheme: Scheme,
}

#[derive(Clone, Debug)]
pub(super) enum Wanted {
    Binding,
    Allocate(Wish),
    Refresh { lifetime: Option<u32>, family: Option<u8>, ticket: Option<Vec<u8>> },
    Permit(Vec<SocketAddr>),
    Bind { number: u16, peer: SocketAddr },
    Connect(SocketAddr),
    ConnectionBind(u32),
}

#[derive(Clone, Debug)]
pub(super) struct Wish {
    pub(super) transport: u8,
    pub(super) lifetime: Option<u32>,
    pub(super) port: Port,
    pub(super) family: Option<u8>,
    pub(super) additional: Option<u8>,
    /// MOBILITY-TICKET, which must be empty.
    pub(super) ticket: Option<Vec<u8>>,
}

impl Wanted {
    /// Index in the counters by method.
    pub(super) fn method(&self) -> usize {
        match self {
            Self::Binding => 0,
            Self::Allocate(_) => 1,
            Self::Refresh { .. } => 2,
            Self::Permit(_) => 3,
            Self::Bind { .. } => 4,
            Self::Connect(_) => 5,
            Self::ConnectionBind(_) => 6,
        }
    }
}

const REQUESTED_TRANSPORT: u16 = 0x0019;
const LIFETIME: u16 = 0x000D;
const REQUESTED_FAMILY: u16 = 0x0017;
const ADDITIONAL_FAMILY: u16 = 0x8000;
const EVEN_PORT: u16 = 0x0018;
const RESERVATION_TOKEN: u16 = 0x0022;
const CONNECTION_ID: u16 = 0x002A;
const ADDRESS_ERROR: u16 = 0x8001;
const ICMP: u16 = 0x8004;
/// Comprehension-required and unassigned.
const STRANGE: u16 = 0x7ABC;

impl Datagram {
    pub(super) fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Request(request) => request.bytes(),
            Self::Send { peer, data, dont_fragment } => {
                let mut ask = Ask::indication(SEND).peer(&peer.to_string());
                if *dont_fragment {
                    ask = ask.with(&DontFragment::new());
                }
                ask.with(&Data::new(data)).bytes()
            }
            Self::ChannelData { number, data } => channel_data(*number, data),
            Self::Noise => vec![0xFF, 1, 2, 3],
            Self::Keepalive => Ask::indication(BINDING).bytes(),
        }
    }
}

impl Request {
    pub(super) fn bytes(&self) -> Vec<u8> {
        let family = |number: u8| [number, 0, 0, 0];
        let new = |method| {
            let mut ask = Ask::new(method);
            ask.transaction = number_of(self.transaction);
            ask
        };
        let mut ask = match &self.wanted {
            Wanted::Binding => new(BINDING),
            Wanted::Allocate(wish) => {
                let mut ask = new(ALLOCATE).raw(REQUESTED_TRANSPORT, &[wish.transport, 0, 0, 0]);
                if let Some(seconds) = wish.lifetime {
                    ask = ask.raw(LIFETIME, &seconds.to_be_bytes());
                }
                ask = match &wish.port {
                    Port::Any => ask,
                    Port::Even => ask.raw(EVEN_PORT, &[0]),
                    Port::Pair => ask.raw(EVEN_PORT, &[0x80]),
                    Port::Reserved(token) => ask.raw(RESERVATION_TOKEN, token),
                };
                for (kind, value) in [(REQUESTED_FAMILY, wish.family), (ADDITIONAL_FAMILY, wish.additional)] {
                    if let Some(value) = value {
                        ask = ask.raw(kind, &family(value));
                    }
                }
                match &wish.ticket {
                    Some(ticket) => ask.raw(TICKET, ticket),
                    None => ask,
                }
            }
            Wanted::Refresh { lifetime, family: of, ticket } => {
                let mut ask = new(REFRESH);
                if let Some(seconds) = lifetime {
                    ask = ask.raw(LIFETIME, &seconds.to_be_bytes());
                }
                if let Some(of) = of {
                    ask = ask.raw(REQUESTED_FAMILY, &family(*of));
                }
                match ticket {
                    Some(ticket) => ask.raw(TICKET, ticket),
                    None => ask,
                }
            }
            Wanted::Permit(peers) => {
                peers.iter().fold(new(CREATE_PERMISSION), |ask, peer| ask.peer(&peer.to_string()))
            }
            Wanted::Bind { number, peer } => {
                let [high, low] = number.to_be_bytes();
                new(CHANNEL_BIND).raw(0x000C, &[high, low, 0, 0]).peer(&peer.to_string())
            }
            Wanted::Connect(peer) => new(CONNECT).peer(&peer.to_string()),
            Wanted::ConnectionBind(id) => new(CONNECTION_BIND).raw(CONNECTION_ID, &id.to_be_bytes()),
        };
        if self.strange {
            ask = ask.raw(STRANGE, b"?");
        }
        match &self.claim {
            Some(claim) => ask.signed(&claim.credentials()).bytes(),
            None => ask.bytes(),
        }
    }
}

impl Claim {
    pub(super) fn credentials(&self) -> Credentials {
        Credentials {
            user: self.user.to_owned(),
            password: if self.right { password(self.user) } else { "wrong".to_owned() },
            realm: self.realm.to_owned(),
            nonce: self.nonce.clone(),
            scheme: self.scheme,
        }
    }
}

fn number_of(transaction: [u8; 12]) -> TransactionId {
    let number = transaction.iter().fold(0_u128, |number, byte| number << 8 | u128::from(*byte));
    TransactionId::from(number)
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answer {
    pub(super) transaction: [u8; 12],
    pub(super) said: Said,
    pub(super) told: Told,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    ByNobody,
    To { user: &'static str, realm: &'static str, scheme: Scheme },
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Told {
    Done,
    Mapped(SocketAddr),
    Allocated {
        relayed: Vec<SocketAddr>,
        lifetime: u32,
        reservation: Option<[u8; 8]>,
        ticket: Option<usize>,
        mapped: SocketAddr,
        address_error: Option<(Family, u16)>,
    },
    Refreshed {
        lifetime: u32,
        ticket: Option<usize>,
    },
    Connected(u32),
    Error(u16),
    /// 401 or 438 with a nonce for this realm: the request's own or a new one.
    Challenge {
        code: u16,
        realm: &'static str,
        repeats: Option<String>,
    },
}

#[derive(Clone, Debug, Default)]
pub(super) struct Learned {
    pub(super) nonce: Option<String>,
    pub(super) ticket: Option<Vec<u8>>,
}

impl Answer {
    /// Checks that the bytes have this meaning; returns the data that only the server can choose.
    pub(super) fn check(&self, bytes: &[u8]) -> Result<Learned, String> {
        let reply = Reply(bytes.to_vec());
        let message = reply.message();
        if message.transaction_id() != number_of(self.transaction) {
            return Err("wrong transaction".to_owned());
        }
        let is_signed = message.has_attribute(MessageIntegrity::TYPE)
            || message.has_attribute(MessageIntegritySha256::TYPE);
        match &self.said {
            Said::ByNobody if is_signed => return Err("unexpected signature".to_owned()),
            Said::To { user, realm, scheme } => {
                let (user, realm, scheme) = (*user, *realm, *scheme);
                let claim = Claim { user, right: true, realm, nonce: String::new(), scheme };
                if !reply.is_signed(&claim.credentials()) {
                    return Err(format!("not signed for {user} in {realm}"));
                }
            }
            Said::ByNobody => {}
        }
        let success = message.has_class(MessageClass::Success);
        let mut learned = Learned::default();
        let says = |what: &str, it: bool| if it { Ok(()) } else { Err(format!("{what}: {message:?}")) };
        let lifetime_is = |seconds: u32| {
            let lifetime = message.attribute::<Lifetime>().ok().map(|lifetime| lifetime.seconds());
            says("wrong lifetime", lifetime == Some(seconds))
        };
        let mapped_is = |address: SocketAddr| {
            let mapped = message.attribute::<XorMappedAddress>().ok();
            says("wrong address", mapped.map(|it| it.addr(message.transaction_id())) == Some(address))
        };
        match &self.told {
            Told::Error(code) => says("wrong code", !success && reply.code() == Some(*code))?,
            Told::Challenge { code, realm, repeats } => {
                says("wrong code", !success && reply.code() == Some(*code))?;
                let said = message.attribute::<Realm>().ok().map(|realm| realm.realm().to_owned());
                says("wrong realm", said.as_deref() == Some(*realm))?;
                learned.nonce = message.attribute::<Nonce>().ok().map(|nonce| nonce.nonce().to_owned());
                says("missing nonce", learned.nonce.is_some())?;
                says("wrong nonce", repeats.is_none() || *repeats == learned.nonce)?;
            }
            _ if !success => return Err(format!("unexpected error {:?}", reply.code())),
            Told::Done => {}
            Told::Mapped(address) => mapped_is(*address)?,
            Told::Connected(id) => {
                says(
                    "wrong connection",
                    raw(&message, CONNECTION_ID).as_deref() == Some(&id.to_be_bytes()[..]),
                )?;
            }
            Told::Refreshed { lifetime, ticket } => {
                lifetime_is(*lifetime)?;
                learned.ticket = raw(&message, TICKET);
                says("unexpected or missing ticket", learned.ticket.is_some() == ticket.is_some())?;
            }
            Told::Allocated { relayed, lifetime, reservation, ticket, mapped, address_error } => {
                says("wrong relayed addresses", reply.relayed() == *relayed)?;
                lifetime_is(*lifetime)?;
                mapped_is(*mapped)?;
                let token = raw(&message, RESERVATION_TOKEN);
                says("wrong token", token == reservation.map(|token| token.to_vec()))?;
                learned.ticket = raw(&message, TICKET);
                says("unexpected or missing ticket", learned.ticket.is_some() == ticket.is_some())?;
                let error = address_error.map(|(family, code)| {
                    let digits = [code / 100, code % 100].map(|part| part.to_be_bytes()[1]);
                    [[family as u8 + 1, 0], digits].concat()
                });
                let said = raw(&message, ADDRESS_ERROR).map(|value| value[..4].to_vec());
                says("wrong address error", said == error)?;
            }
        }
        Ok(learned)
    }
}

pub(super) fn check_framing(framing: Framing, payload: &[u8], bytes: &[u8]) -> Result<(), String> {
    match framing {
        Framing::Channel { number, padded } => {
            let mut whole = channel_data(number, payload);
            if padded {
                whole.resize(whole.len().next_multiple_of(4), 0);
            }
            if whole == bytes { Ok(()) } else { Err("wrong ChannelData".to_owned()) }
        }
        Framing::Data(peer) => {
            let message = Message::from_bytes(bytes).map_err(|error| error.to_string())?;
            let data = message.attribute::<Data<'_>>().map_err(|error| error.to_string())?;
            let is_data =
                message.has_class(MessageClass::Indication) && message.has_method(turn_types::message::DATA);
            if is_data && from(&message) == Some(peer) && data.data() == payload {
                Ok(())
            } else {
                Err(format!("wrong Data indication: {message:?}"))
            }
        }
    }
}

pub(super) fn check_icmp(peer: SocketAddr, value: [u8; 8], bytes: &[u8]) -> Result<(), String> {
    check_told(peer, ICMP, &value, bytes)
}

pub(super) fn check_attempt(peer: SocketAddr, id: u32, bytes: &[u8]) -> Result<(), String> {
    check_told(peer, CONNECTION_ID, &id.to_be_bytes(), bytes)
}

fn check_told(peer: SocketAddr, kind: u16, value: &[u8], bytes: &[u8]) -> Result<(), String> {
    let message = Message::from_bytes(bytes).map_err(|error| error.to_string())?;
    let is_indication = message.has_class(MessageClass::Indication);
    if is_indication && from(&message) == Some(peer) && raw(&message, kind).as_deref() == Some(value) {
        Ok(())
    } else {
        Err(format!("wrong indication: {message:?}"))
    }
}

fn from(message: &Message<'_>) -> Option<SocketAddr> {
    let peer = message.attribute::<XorPeerAddress>().ok()?;
    Some(peer.addr(message.transaction_id()))
}

fn raw(message: &Message<'_>, kind: u16) -> Option<Vec<u8>> {
    message.raw_attribute(AttributeType::new(kind)).map(|raw| raw.value.to_vec())
}
