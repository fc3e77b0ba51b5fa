//! TLS ClientHello at the start of a byte stream (RFC 8446 sections 4.1.2 and 5.1): server name and application
//! protocols, read without terminating TLS.
//!
//! ```text
//! │ 22 │ 3, minor │ length │ fragment of the message … │ 22 │ 3, minor │ length │ … │
//! message: │ 1 │ length (3) │ version 2, random 32 │ session │ suites │ compression │ extensions │
//! ```

/// Maximum length of a handshake message, including its header: one full record.
pub const MAX_MESSAGE: usize = 16 << 10;
/// Maximum number of records of one message. Clients use one, or a few if they send post-quantum key shares.
pub const MAX_RECORDS: usize = 64;
/// Maximum length of a ClientHello in bytes, including record headers.
pub const MAX_LEN: usize = MAX_MESSAGE + MAX_RECORDS * RECORD_HEADER;

/// Content type of a handshake record. It cannot start ChannelData, and as STUN it would mean an unassigned method
/// (RFC 7983 section 7).
pub const HANDSHAKE: u8 = 22;

const RECORD_HEADER: usize = 5;
const MAX_RECORD: usize = 16 << 10;
const MESSAGE_HEADER: usize = 4;
const CLIENT_HELLO: u8 = 1;
const MAJOR_VERSION: u8 = 3;
const SERVER_NAME: u16 = 0;
const PROTOCOLS: u16 = 16;
const HOST_NAME: u8 = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed<'a> {
    Incomplete {
        /// Number of bytes needed before another attempt can make progress.
        wanted: usize,
    },
    Hello(ClientHello<'a>),
    /// Not a ClientHello, too long, or ambiguous.
    Malformed,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientHello<'a> {
    /// Server name (RFC 6066 section 3), not converted to lower case.
    pub server_name: Option<&'a str>,
    protocols: &'a [u8],
}

impl<'a> ClientHello<'a> {
    /// Offered application protocols (RFC 7301), most preferred first.
    pub fn protocols(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let mut reader = ByteReader(self.protocols);
        std::iter::from_fn(move || reader.vector8())
    }
}

/// Reads a stream from its first byte. A message that spans several records is assembled in `joined`.
pub fn parse<'a>(bytes: &'a [u8], joined: &'a mut Vec<u8>) -> Parsed<'a> {
    let len = match extent(bytes) {
        Ok(len) => len,
        Err(parsed) => return parsed,
    };
    let message = match bytes.get(RECORD_HEADER..RECORD_HEADER + first_record(bytes)) {
        Some(record) if record.len() >= len => &record[..len],
        _ => {
            join(bytes, len, joined);
            &joined[..]
        }
    };
    read(&message[MESSAGE_HEADER..]).map_or(Parsed::Malformed, Parsed::Hello)
}

/// Length of the handshake message that starts `bytes`, once it is complete.
fn extent(bytes: &[u8]) -> Result<usize, Parsed<'static>> {
    let mut head = [0; MESSAGE_HEADER];
    let (mut at, mut have) = (0, 0);
    for _ in 0..MAX_RECORDS {
        let rest = &bytes[at..];
        let is_handshake = rest.first().is_none_or(|kind| *kind == HANDSHAKE);
        if !is_handshake || rest.get(1).is_some_and(|major| *major != MAJOR_VERSION) {
            return Err(Parsed::Malformed);
        }
        let Some(header) = rest.first_chunk::<RECORD_HEADER>() else {
            return Err(Parsed::Incomplete { wanted: at + RECORD_HEADER });
        };
        let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if len == 0 || len > MAX_RECORD {
            return Err(Parsed::Malformed);
        }
        let fragment = &rest[RECORD_HEADER..rest.len().min(RECORD_HEADER + len)];
        for (to, from) in head.iter_mut().skip(have).zip(fragment) {
            *to = *from;
        }
        have += fragment.len();
        if have > 0 && head[0] != CLIENT_HELLO {
            return Err(Parsed::Malformed);
        }
        let mut message = MESSAGE_HEADER;
        if have >= MESSAGE_HEADER {
            message += usize::from(head[1]) << 16 | usize::from(head[2]) << 8 | usize::from(head[3]);
            if message > MAX_MESSAGE {
                return Err(Parsed::Malformed);
            }
            if have >= message {
                return Ok(message);
            }
        }
        if fragment.len() < len {
            let missing = (message - have).min(len - fragment.len());
            return Err(Parsed::Incomplete { wanted: bytes.len() + missing });
        }
        at += RECORD_HEADER + len;
    }
    Err(Parsed::Malformed)
}

fn first_record(bytes: &[u8]) -> usize {
    bytes.get(3..RECORD_HEADER).map_or(0, |len| usize::from(u16::from_be_bytes([len[0], len[1]])))
}

/// Joins the first `len` bytes of the message, which [`extent`] has found complete.
fn join(mut bytes: &[u8], len: usize, joined: &mut Vec<u8>) {
    joined.clear();
    while joined.len() < len {
        let record = first_record(bytes);
        let Some(fragment) = bytes.get(RECORD_HEADER..).filter(|_| record > 0) else { return };
        let (fragment, missing) = (&fragment[..record.min(fragment.len())], len - joined.len());
        joined.extend_from_slice(&fragment[..missing.min(fragment.len())]);
        bytes = bytes.get(RECORD_HEADER + record..).unwrap_or_default();
    }
}

fn read(body: &[u8]) -> Option<ClientHello<'_>> {
    let mut reader = ByteReader(body);
    // Skip version and random.
    reader.take(2 + 32)?;
    let (_session, suites, _compression) = (reader.vector8()?, reader.vector16()?, reader.vector8()?);
    if suites.is_empty() {
        return None;
    }
    let mut hello = ClientHello::default();
    if reader.0.is_empty() {
        return Some(hello);
    }
    let mut extensions = ByteReader(reader.vector16()?);
    if !reader.0.is_empty() {
        return None;
    }
    while !extensions.0.is_empty() {
        let (kind, value) = (extensions.number16()?, extensions.vector16()?);
        // Duplicates, which RFC 8446 section 4.2 forbids, are refused: the web server might use the other
        // one.
        match kind {
            SERVER_NAME if hello.server_name.is_none() => hello.server_name = Some(host_name(value)?),
            PROTOCOLS if hello.protocols.is_empty() => hello.protocols = protocols(value)?,
            SERVER_NAME | PROTOCOLS => return None,
            _ => {}
        }
    }
    Some(hello)
}

/// The only entry of a list of names, because no types other than host names have ever been defined.
fn host_name(value: &[u8]) -> Option<&str> {
    let mut reader = ByteReader(value);
    let mut list = ByteReader(reader.vector16()?);
    let kind = list.take(1)?[0];
    let name = list.vector16()?;
    let is_only = reader.0.is_empty() && list.0.is_empty();
    let is_name = kind == HOST_NAME && !name.is_empty() && name.is_ascii();
    std::str::from_utf8(name).ok().filter(|_| is_only && is_name)
}

/// Returns the list if neither it nor any entry is empty.
fn protocols(value: &[u8]) -> Option<&[u8]> {
    let mut reader = ByteReader(value);
    let list = reader.vector16()?;
    if list.is_empty() || !reader.0.is_empty() {
        return None;
    }
    let mut names = ByteReader(list);
    while !names.0.is_empty() {
        names.vector8().filter(|name| !name.is_empty())?;
    }
    Some(list)
}

struct ByteReader<'a>(&'a [u8]);

impl<'a> ByteReader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn number16(&mut self) -> Option<u16> {
        self.take(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]))
    }

    fn vector8(&mut self) -> Option<&'a [u8]> {
        let len = self.take(1)?[0];
        self.take(usize::from(len))
    }

    fn vector16(&mut self) -> Option<&'a [u8]> {
        let len = self.number16()?;
        self.take(usize::from(len))
    }
}
