//! Steps of a sequence: actions of clients and peers, independent of the server.

use std::{collections::BTreeSet, fmt, time::Duration};

use turnpike_client::ClientTransport;
use turnpike_wire::stun::{kind, method};

use super::Kind;

/// A client of a sequence. The first is `a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Client(pub(super) usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Peer {
    Near,
    /// IP address of [`Peer::Near`] with a different port.
    Sibling,
    Far,
    Six,
    /// Peer address that every server refuses.
    Denied,
    /// IPv4 relayed address of a client; [`Peer::Near`] if the client has none.
    Relay(Client),
}

/// Form of the credentials in requests (RFC 8489 section 9.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Dialect {
    /// RFC 5389: MD5 keys, MESSAGE-INTEGRITY, USERNAME.
    #[default]
    Classic,
    /// SHA-256 keys, MESSAGE-INTEGRITY-SHA256, PASSWORD-ALGORITHMS.
    Sha256,
    /// SHA-256 with USERHASH instead of USERNAME.
    Userhash,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Auth {
    None,
    Good,
    OtherUser,
    WrongPassword,
    UnknownUser,
    WrongRealm,
    WrongNonce,
    WithoutNonce,
    WithoutRealm,
    WithoutUser,
    Unsigned,
    /// A flipped bit in the integrity attribute.
    Broken,
    /// Gets a new nonce first; the request itself has no fault.
    Fresh,
    WithoutAlgorithms,
    WithoutAlgorithm,
    OtherAlgorithms,
    UnlistedAlgorithm,
}

impl Auth {
    /// Response that RFC 8489 requires for a faulty request with SHA-256. No other server implements these
    /// rules.
    pub(super) const fn rule(self) -> Option<(u16, &'static str)> {
        match self {
            Self::WithoutAlgorithms
            | Self::WithoutAlgorithm
            | Self::OtherAlgorithms
            | Self::UnlistedAlgorithm => Some((400, "RFC 8489 section 9.2.4")),
            _ => None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Field {
    Value(u16, Vec<u8>),
    Peer(Peer),
    /// The most recent RESERVATION-TOKEN from the server; eight zero bytes if there was none.
    Token,
    Data(u16),
}

impl Field {
    pub(super) fn number(kind: u16, value: u32) -> Self {
        Self::Value(kind, value.to_be_bytes().to_vec())
    }

    pub(super) const fn kind(&self) -> u16 {
        match self {
            Self::Value(kind, _) => *kind,
            Self::Peer(_) => kind::XOR_PEER_ADDRESS,
            Self::Token => kind::RESERVATION_TOKEN,
            Self::Data(_) => kind::DATA,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Damage {
    Response,
    Cookie,
    /// The last four bytes of the message are missing; used only in datagrams.
    Cut,
    /// The message is four bytes longer than its length field indicates; used only in datagrams.
    Long,
    Fingerprint,
    Behind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) indication: bool,
    pub(super) method: u16,
    pub(super) fields: Vec<Field>,
    pub(super) auth: Auth,
    pub(super) fingerprint: bool,
    pub(super) damage: Option<Damage>,
}

impl Request {
    pub(super) const fn new(method: u16, fields: Vec<Field>, auth: Auth) -> Self {
        Self { indication: false, method, fields, auth, fingerprint: false, damage: None }
    }

    pub(super) fn has(&self, kind: u16) -> bool {
        self.fields.iter().any(|field| field.kind() == kind)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Request(Client, Request),
    /// Repeats the client's last request byte for byte.
    Again(Client),
    Channel(Client, u16, u16),
    Peer(Peer, Client, u16),
    /// The client leaves; its next step uses a different port.
    Leave(Client),
    Wait(Duration),
}

impl Step {
    pub(super) const fn client(&self) -> Option<Client> {
        match self {
            Self::Request(client, _)
            | Self::Again(client)
            | Self::Channel(client, ..)
            | Self::Peer(_, client, _)
            | Self::Leave(client) => Some(*client),
            Self::Wait(_) => None,
        }
    }

    pub(super) const fn request(&self) -> Option<&Request> {
        match self {
            Self::Request(_, request) => Some(request),
            _ => None,
        }
    }

    /// True if a server may respond to this step only after it has responded to Binding requests sent later.
    pub(super) fn may_take_time(&self) -> bool {
        match self {
            Self::Request(_, request) => request.indication || request.auth != Auth::None,
            Self::Again(_) | Self::Channel(..) | Self::Peer(..) => true,
            Self::Leave(_) | Self::Wait(_) => false,
        }
    }

    pub(super) fn label(&self) -> String {
        match self {
            Self::Request(_, Request { indication, method, fields, auth, damage, .. }) => {
                let kinds: BTreeSet<String> =
                    fields.iter().map(|field| kind::Name(field.kind()).to_string()).collect();
                let kinds = kinds.into_iter().collect::<Vec<_>>().join(" ");
                let indication = if *indication { " indication" } else { "" };
                let damage = damage.map(|damage| format!(" {damage:?}")).unwrap_or_default();
                format!("{}{indication} {auth:?}{damage} [{kinds}]", name(*method))
            }
            Self::Again(_) => "retransmission".to_owned(),
            Self::Channel(..) => "ChannelData".to_owned(),
            Self::Peer(..) => "data from a peer".to_owned(),
            Self::Leave(_) => "leave".to_owned(),
            Self::Wait(_) => "wait".to_owned(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sequence {
    pub(super) kind: Kind,
    pub(super) transports: Vec<ClientTransport>,
    pub(super) dialect: Dialect,
    pub(super) steps: Vec<Step>,
}

impl Sequence {
    pub(super) fn request(&self, at: usize) -> Option<&Request> {
        match &self.steps[at] {
            Step::Again(client) => self.earlier(at, *client).next_back(),
            step => step.request(),
        }
    }

    /// Requests of a client before a step, since it last connected.
    pub(super) fn earlier(&self, at: usize, client: Client) -> impl DoubleEndedIterator<Item = &Request> {
        let came = self.steps[..at].iter().rposition(|step| *step == Step::Leave(client)).unwrap_or_default();
        self.steps[came..at].iter().filter_map(move |step| match step {
            Step::Request(from, request) if *from == client => Some(request),
            _ => None,
        })
    }
}

pub(super) fn name(method: u16) -> String {
    let name = match method {
        method::BINDING => "Binding",
        method::ALLOCATE => "Allocate",
        method::REFRESH => "Refresh",
        method::SEND => "Send",
        method::DATA => "Data",
        method::CREATE_PERMISSION => "CreatePermission",
        method::CHANNEL_BIND => "ChannelBind",
        method::CONNECT => "Connect",
        method::CONNECTION_BIND => "ConnectionBind",
        other => return format!("method 0x{other:03x}"),
    };
    name.to_owned()
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = u8::try_from(self.0).ok().and_then(|number| b'a'.checked_add(number));
        write!(f, "{}", char::from(letter.unwrap_or(b'?')))
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Relay(client) => write!(f, "relay-of-{client}"),
            other => f.write_str(&format!("{other:?}").to_lowercase()),
        }
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = kind::Name(self.kind());
        match self {
            Self::Value(_, value) => write!(f, "{name}={}", hex::encode(value)),
            Self::Peer(peer) => write!(f, "{name}={peer}"),
            Self::Token => write!(f, "{name}"),
            Self::Data(length) => write!(f, "{name}={length} bytes"),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(client, Request { indication, method, fields, auth, fingerprint, damage }) => {
                write!(f, "{client}: {}", name(*method))?;
                if *indication {
                    f.write_str(" indication")?;
                }
                fields.iter().try_for_each(|field| write!(f, " {field}"))?;
                if *auth != Auth::None {
                    write!(f, " auth={auth:?}")?;
                }
                if *fingerprint {
                    f.write_str(" FINGERPRINT")?;
                }
                damage.map_or(Ok(()), |damage| write!(f, " damage={damage:?}"))
            }
            Self::Again(client) => write!(f, "{client}: retransmits"),
            Self::Channel(client, number, length) => {
                write!(f, "{client}: ChannelData 0x{number:04x}, {length} bytes")
            }
            Self::Peer(peer, client, length) => write!(f, "{peer} to {client}: {length} bytes"),
            Self::Leave(client) => write!(f, "{client}: leaves"),
            Self::Wait(time) => write!(f, "wait {} s", time.as_secs()),
        }
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let transports: Vec<String> = self.transports.iter().map(ToString::to_string).collect();
        write!(f, "    clients {}, {:?}", transports.join(" "), self.dialect)?;
        self.steps.iter().try_for_each(|step| write!(f, "\n    {step}"))
    }
}
