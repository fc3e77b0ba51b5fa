//! ClientHello parser for everything needed before any state exists: version, returned cookie, common
//! algorithms, and reconstruction of the first ClientHello from the second.

use std::ops::Range;

use super::record::HEADER as RECORD_HEADER;

/// Length of a cookie; dimpl supports no other.
pub(super) const COOKIE_LEN: usize = 32;

pub(super) type Cookie = [u8; COOKIE_LEN];

/// Maximum length of a datagram with a ClientHello. Post-quantum key shares take about 1500 bytes.
pub(super) const MAX_HELLO: usize = 4096;
/// Handshake header (RFC 6347 section 4.2.2).
const MESSAGE_HEADER: usize = 12;
const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const DTLS_1_2: u16 = 0xFEFD;
const DTLS_1_3: u16 = 0xFEFC;
/// X25519, P-256 and P-384: the groups that dimpl supports.
pub(super) const GROUPS: [u16; 3] = [0x001D, 0x0017, 0x0018];
/// Cipher suites that dimpl supports for DTLS 1.2: ECDHE and ECDSA with AES-128-GCM, AES-256-GCM and
/// ChaCha20-Poly1305.
pub(super) const SUITES_1_2: [u16; 3] = [0xC02B, 0xC02C, 0xCCA9];
pub(super) const SUITES_1_3: [u16; 3] = [0x1301, 0x1302, 0x1303];
const NULL_COMPRESSION: u8 = 0;

const SERVER_NAME: u16 = 0;
const SUPPORTED_GROUPS: u16 = 10;
const SIGNATURE_ALGORITHMS: u16 = 13;
const PADDING: u16 = 21;
const EXTENDED_MASTER_SECRET: u16 = 23;
const SUPPORTED_VERSIONS: u16 = 43;
const COOKIE: u16 = 44;
const KEY_SHARE: u16 = 51;
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    V12,
    V13,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HelloError {
    Fragmented,
    TooLong,
    Malformed,
    Version,
    /// The client supports only DTLS 1.3 and sent no key share of a supported group. Requesting another share
    /// would require state.
    KeyShare,
}

pub(super) fn is_hello(datagram: &[u8]) -> bool {
    datagram.len() > RECORD_HEADER
        && datagram[0] == HANDSHAKE
        && datagram[3..5] == [0, 0]
        && datagram[RECORD_HEADER] == CLIENT_HELLO
}

#[derive(Debug)]
pub(super) struct Hello<'a> {
    pub(super) sequence: u64,
    body: &'a [u8],
    pub(super) version: Version,
    pub(super) random: [u8; 32],
    pub(super) cookie: Option<&'a [u8]>,
    legacy_cookie: Range<usize>,
    extensions: usize,
    cookie_extension: Option<Range<usize>>,
    padding_extension: Option<Range<usize>>,
    pub(super) server_name: Option<&'a str>,
    signature_algorithms: &'a [u8],
    cipher_suites: &'a [u8],
    compression_methods: &'a [u8],
    groups: Option<&'a [u8]>,
    extended_master_secret: bool,
}

impl<'a> Hello<'a> {
    pub(super) fn parse(datagram: &'a [u8]) -> Result<Self, HelloError> {
        if datagram.len() > MAX_HELLO {
            return Err(HelloError::TooLong);
        }
        let fragment = Fragment::parse(datagram)?;
        if fragment.offset != 0 || fragment.bytes.len() != fragment.length {
            return Err(HelloError::Fragmented);
        }
        Self::parse_body(fragment.sequence, fragment.bytes)
    }

    fn parse_body(sequence: u64, body: &'a [u8]) -> Result<Self, HelloError> {
        let mut reader = HelloReader { bytes: body, at: 0 };
        let Beginning { version: legacy_version, random, cookie: legacy_cookie } =
            Beginning::read(&mut reader)?;
        let cipher_suites = reader.vector16()?;
        let compression_methods = reader.vector8()?;
        let mut hello = Self {
            sequence,
            body,
            version: Version::V12,
            random,
            cookie: None,
            legacy_cookie,
            extensions: body.len(),
            cookie_extension: None,
            padding_extension: None,
            server_name: None,
            signature_algorithms: &[],
            cipher_suites,
            compression_methods,
            groups: None,
            extended_master_secret: false,
        };
        let mut versions = None;
        let mut retry_cookie = None;
        let mut has_share = false;
        if reader.at < body.len() {
            let length = usize::from(pair(reader.take(2)?));
            hello.extensions = reader.at;
            if body.len() - reader.at != length {
                return Err(HelloError::Malformed);
            }
        }
        while reader.at < body.len() {
            let start = reader.at;
            let kind = pair(reader.take(2)?);
            let mut value = HelloReader { bytes: reader.vector16()?, at: 0 };
            let whole = start..reader.at;
            match kind {
                SERVER_NAME => hello.server_name = host_name(&mut value),
                SUPPORTED_GROUPS => hello.groups = Some(value.vector16()?),
                EXTENDED_MASTER_SECRET => hello.extended_master_secret = true,
                SIGNATURE_ALGORITHMS => hello.signature_algorithms = value.vector16()?,
                PADDING => hello.padding_extension = Some(whole),
                SUPPORTED_VERSIONS => versions = Some(value.vector8()?),
                COOKIE => {
                    retry_cookie = Some(value.vector16()?);
                    hello.cookie_extension = Some(whole);
                }
                KEY_SHARE => has_share = shares_a_group(value.vector16()?)?,
                _ => {}
            }
        }
        let offers = |version| match versions {
            Some(versions) => versions.chunks_exact(2).any(|offered| pair(offered) == version),
            None => version == DTLS_1_2 && legacy_version == DTLS_1_2,
        };
        if !hello.legacy_cookie.is_empty() {
            hello.cookie = Some(&body[hello.legacy_cookie.clone()]);
        } else if offers(DTLS_1_3) && (has_share || retry_cookie.is_some()) {
            hello.version = Version::V13;
            hello.cookie = retry_cookie;
        } else if !offers(DTLS_1_2) {
            return Err(if offers(DTLS_1_3) { HelloError::KeyShare } else { HelloError::Version });
        }
        Ok(hello)
    }

    /// Returns false if the handshake cannot succeed: no common cipher suite, group or compression method, or
    /// a DTLS 1.2 client without extended master secret (RFC 7627), which dimpl requires. dimpl would
    /// silently drop such a ClientHello.
    pub(super) fn is_compatible(&self) -> bool {
        let any = |offered: &[u8], ours: &[u16]| offered.chunks_exact(2).any(|one| ours.contains(&pair(one)));
        let has_suite = match self.version {
            Version::V12 => any(self.cipher_suites, &SUITES_1_2) && self.extended_master_secret,
            Version::V13 => any(self.cipher_suites, &SUITES_1_3),
        };
        has_suite
            && self.groups.is_none_or(|groups| any(groups, &GROUPS))
            && self.compression_methods.contains(&NULL_COMPRESSION)
    }

    /// Signature schemes that the client can verify, numbered as in RFC 8446 section 4.2.3.
    pub(super) fn signature_algorithms(&self) -> impl Iterator<Item = u16> + '_ {
        self.signature_algorithms.chunks_exact(2).map(pair)
    }

    /// Version, random and session id, which precede the cookie in DTLS 1.2. A client repeats them after a
    /// HelloVerifyRequest (RFC 6347 section 4.2.1).
    pub(super) fn before_cookie(&self) -> &'a [u8] {
        &self.body[..self.legacy_cookie.start - 1]
    }

    /// Length of the padding (RFC 7685): the only unpredictable difference allowed between the two
    /// ClientHellos of DTLS 1.3 (RFC 8446 section 4.1.2).
    pub(super) fn padding(&self) -> Option<usize> {
        self.padding_extension.as_ref().map(|whole| whole.len() - 4)
    }

    pub(super) fn write_first(&self, padding: Option<usize>, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(&self.body[..self.legacy_cookie.start - 1]);
        out.push(0);
        if self.extensions == self.body.len() {
            out.extend_from_slice(&self.body[self.legacy_cookie.end..]);
            return;
        }
        out.extend_from_slice(&self.body[self.legacy_cookie.end..self.extensions]);
        let start = out.len();
        let mut special = [self.cookie_extension.clone(), self.padding_extension.clone()];
        special.sort_by_key(|whole| whole.as_ref().map_or(usize::MAX, |whole| whole.start));
        let mut from = self.extensions;
        for whole in special.into_iter().flatten() {
            out.extend_from_slice(&self.body[from..whole.start]);
            if Some(&whole) == self.padding_extension.as_ref() {
                write_padding(padding, out);
            }
            from = whole.end;
        }
        out.extend_from_slice(&self.body[from..]);
        if self.padding_extension.is_none() {
            write_padding(padding, out);
        }
        let length = u16::try_from(out.len() - start).unwrap_or(u16::MAX);
        out[start - 2..start].copy_from_slice(&length.to_be_bytes());
    }
}

/// A fragment of a ClientHello, or all of it (RFC 6347 section 4.2.3).
#[derive(Debug)]
pub(super) struct Fragment<'a> {
    pub(super) sequence: u64,
    pub(super) message: u16,
    pub(super) length: usize,
    pub(super) offset: usize,
    pub(super) bytes: &'a [u8],
}

impl<'a> Fragment<'a> {
    pub(super) fn parse(datagram: &'a [u8]) -> Result<Self, HelloError> {
        let mut reader = HelloReader { bytes: datagram, at: 0 };
        let header = reader.take(RECORD_HEADER)?;
        let sequence = header[5..11].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        let mut record = HelloReader { bytes: reader.take(usize::from(pair(&header[11..])))?, at: 0 };
        let header = record.take(MESSAGE_HEADER)?;
        let triple =
            |at: usize| header[at..at + 3].iter().fold(0, |sum: usize, byte| sum << 8 | usize::from(*byte));
        let (length, offset, here) = (triple(1), triple(6), triple(9));
        if offset + here > length {
            return Err(HelloError::Malformed);
        }
        Ok(Self { sequence, message: pair(&header[4..]), length, offset, bytes: record.take(here)? })
    }

    /// The part before the DTLS 1.2 cookie, and the cookie. A first fragment contains both unless it is very
    /// short.
    pub(super) fn beginning(&self) -> Option<(&'a [u8], &'a [u8])> {
        let mut reader = HelloReader { bytes: (self.offset == 0).then_some(self.bytes)?, at: 0 };
        let cookie = Beginning::read(&mut reader).ok()?.cookie;
        Some((&self.bytes[..cookie.start - 1], &self.bytes[cookie]))
    }
}

struct Beginning {
    version: u16,
    random: [u8; 32],
    cookie: Range<usize>,
}

impl Beginning {
    fn read(reader: &mut HelloReader<'_>) -> Result<Self, HelloError> {
        let version = pair(reader.take(2)?);
        let random = reader.take(32)?.try_into().map_err(|_| HelloError::Malformed)?;
        reader.vector8()?;
        let cookie = reader.vector8()?.len();
        Ok(Self { version, random, cookie: reader.at - cookie..reader.at })
    }
}

/// HelloVerifyRequest (RFC 6347 section 4.2.1) up to the cookie. Its version field is always DTLS 1.0.
#[rustfmt::skip]
const VERIFY_REQUEST: [u8; 28] = [
    HANDSHAKE, 0xFE, 0xFF, 0, 0, 0, 0, 0, 0, 0, 0, 0, 47,
    3, 0, 0, 35, 0, 0, 0, 0, 0, 0, 0, 35,
    0xFE, 0xFF, 32,
];

pub(super) fn write_verify_request(sequence: u64, cookie: &Cookie, out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(&VERIFY_REQUEST);
    out[5..11].copy_from_slice(&sequence.to_be_bytes()[2..]);
    out.extend_from_slice(cookie);
}

pub(super) fn write_packet(sequence: u64, message: u16, body: &[u8], out: &mut Vec<u8>) {
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX).to_be_bytes();
    let record = u16::try_from(body.len() + MESSAGE_HEADER).unwrap_or(u16::MAX).to_be_bytes();
    out.clear();
    out.extend_from_slice(&[HANDSHAKE, 0xFE, 0xFD, 0, 0]);
    out.extend_from_slice(&sequence.to_be_bytes()[2..]);
    out.extend_from_slice(&record);
    out.push(CLIENT_HELLO);
    out.extend_from_slice(&length[1..]);
    out.extend_from_slice(&message.to_be_bytes());
    out.extend_from_slice(&[0; 3]);
    out.extend_from_slice(&length[1..]);
    out.extend_from_slice(body);
}

fn write_padding(padding: Option<usize>, out: &mut Vec<u8>) {
    let Some(padding) = padding else { return };
    out.extend_from_slice(&PADDING.to_be_bytes());
    out.extend_from_slice(&u16::try_from(padding).unwrap_or(u16::MAX).to_be_bytes());
    out.resize(out.len() + padding, 0);
}

/// Parses the server name extension (RFC 6066 section 3): a list of names, although host names are the only
/// type ever defined.
fn host_name<'a>(value: &mut HelloReader<'a>) -> Option<&'a str> {
    let mut list = HelloReader { bytes: value.vector16().ok()?, at: 0 };
    if list.take(1).ok()? != [0] {
        return None;
    }
    std::str::from_utf8(list.vector16().ok()?).ok()
}

fn shares_a_group(shares: &[u8]) -> Result<bool, HelloError> {
    let mut reader = HelloReader { bytes: shares, at: 0 };
    let mut found = false;
    while reader.at < shares.len() {
        found |= GROUPS.contains(&pair(reader.take(2)?));
        reader.vector16()?;
    }
    Ok(found)
}

fn pair(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

struct HelloReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> HelloReader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], HelloError> {
        let taken = self.bytes.get(self.at..self.at + len).ok_or(HelloError::Malformed)?;
        self.at += len;
        Ok(taken)
    }

    fn vector8(&mut self) -> Result<&'a [u8], HelloError> {
        let len = self.take(1)?[0];
        self.take(usize::from(len))
    }

    fn vector16(&mut self) -> Result<&'a [u8], HelloError> {
        let len = pair(self.take(2)?);
        self.take(usize::from(len))
    }
}

#[cfg(test)]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    fn extension(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(value.len()).unwrap().to_be_bytes();
        [&kind.to_be_bytes(), &length[..], value].concat()
    }

    fn hello(legacy_cookie: &[u8], extensions: &[Vec<u8>]) -> Vec<u8> {
        let extensions = extensions.concat();
        let mut body = [&[0xFE, 0xFD][..], &[7; 32], &[1, 9]].concat();
        body.push(u8::try_from(legacy_cookie.len()).unwrap());
        body.extend_from_slice(legacy_cookie);
        body.extend_from_slice(&[0, 2, 0x13, 0x01, 1, 0]);
        if !extensions.is_empty() {
            body.extend_from_slice(&u16::try_from(extensions.len()).unwrap().to_be_bytes());
            body.extend_from_slice(&extensions);
        }
        body
    }

    fn packet(body: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        write_packet(5, 0, body, &mut out);
        out
    }

    fn versions() -> Vec<u8> {
        extension(SUPPORTED_VERSIONS, &[4, 0xFE, 0xFC, 0xFE, 0xFD])
    }

    fn share(group: u16) -> Vec<u8> {
        extension(KEY_SHARE, &[&[0, 6][..], &group.to_be_bytes(), &[0, 2, 1, 1]].concat())
    }

    #[test]
    fn version_depends_on_the_offer_and_the_key_shares() {
        let version = |extensions: &[Vec<u8>]| {
            let packet = packet(&hello(&[], extensions));
            Hello::parse(&packet).map(|hello| hello.version)
        };
        assert_eq!(version(&[]), Ok(Version::V12));
        assert_eq!(version(&[versions(), share(0x1D)]), Ok(Version::V13));
        assert_eq!(
            version(&[versions(), share(0x11EC)]),
            Ok(Version::V12),
            "no supported share, but DTLS 1.2 is offered"
        );
        let only = extension(SUPPORTED_VERSIONS, &[2, 0xFE, 0xFC]);
        assert_eq!(version(&[only.clone(), share(0x17)]), Ok(Version::V13));
        assert_eq!(version(&[only, share(0x11EC)]), Err(HelloError::KeyShare));
        assert_eq!(version(&[extension(SUPPORTED_VERSIONS, &[2, 0xFE, 0xFF])]), Err(HelloError::Version));
    }

    #[test]
    fn first_hello_is_reconstructed_from_the_second() {
        let mut found = Vec::new();
        let first = hello(&[], &[versions()]);
        let second = packet(&hello(&[1; 32], &[versions()]));
        let parsed = Hello::parse(&second).unwrap();
        assert_eq!((parsed.sequence, parsed.cookie), (5, Some(&[1; 32][..])));
        parsed.write_first(None, &mut found);
        assert_eq!(found, first);

        let cookie = extension(COOKIE, &[&[0, 32][..], &[2; 32]].concat());
        let padded = |len: usize| extension(PADDING, &vec![0; len]);
        for (before, after, padding) in [
            (vec![versions(), share(0x1D)], vec![versions(), cookie.clone(), share(0x1D)], None),
            (
                vec![versions(), share(0x1D), padded(50)],
                vec![versions(), share(0x1D), cookie.clone(), padded(14)],
                Some(50),
            ),
            (
                vec![versions(), share(0x1D), padded(8)],
                vec![versions(), share(0x1D), cookie.clone()],
                Some(8),
            ),
            (vec![versions(), share(0x1D)], vec![padded(3), versions(), share(0x1D), cookie], None),
        ] {
            let second = packet(&hello(&[], &after));
            let parsed = Hello::parse(&second).unwrap();
            assert_eq!((parsed.version, parsed.cookie), (Version::V13, Some(&[2; 32][..])));
            parsed.write_first(padding, &mut found);
            assert_eq!(found, hello(&[], &before), "{padding:?}");
        }
    }

    #[test]
    fn first_fragment_begins_like_the_whole_hello() {
        let whole = packet(&hello(&[1; 20], &[versions()]));
        let before_cookie = Hello::parse(&whole).unwrap().before_cookie();
        assert_eq!(before_cookie, Hello::parse(&packet(&hello(&[], &[]))).unwrap().before_cookie());
        let fragment = Fragment::parse(&whole).unwrap();
        assert_eq!((fragment.sequence, fragment.message, fragment.offset), (5, 0, 0));
        for len in 0..=fragment.bytes.len() {
            let part = Fragment { bytes: &fragment.bytes[..len], ..fragment };
            let expected = (len >= before_cookie.len() + 21).then_some((before_cookie, &[1; 20][..]));
            assert_eq!(part.beginning(), expected, "{len}");
        }
        assert_eq!(Fragment { offset: 1, ..fragment }.beginning(), None);
    }

    #[test]
    fn hello_without_common_parameters_is_incompatible() {
        let groups = |groups: &[u16]| {
            let list: Vec<u8> = groups.iter().flat_map(|group| group.to_be_bytes()).collect();
            extension(
                SUPPORTED_GROUPS,
                &[&u16::try_from(list.len()).unwrap().to_be_bytes()[..], &list].concat(),
            )
        };
        let body = |suites: [u8; 2], compression: u8, extensions: &[Vec<u8>]| {
            let mut body = hello(&[], extensions);
            body[39..41].copy_from_slice(&suites);
            body[42] = compression;
            body
        };
        let ems = extension(EXTENDED_MASTER_SECRET, &[]);
        let of_1_3 = [extension(SUPPORTED_VERSIONS, &[2, 0xFE, 0xFC]), share(0x1D)];
        let both = [ems.clone(), groups(&[0x11EC, 0x17])];
        for (body, compatible) in [
            (body([0xC0, 0x2B], 0, &both), true),
            (body([0xCC, 0xA9], 0, std::slice::from_ref(&ems)), true),
            (body([0xC0, 0x2F], 0, &both), false),
            (body([0x13, 0x01], 0, &both), false),
            (body([0xC0, 0x2B], 1, &both), false),
            (body([0xC0, 0x2B], 0, &[groups(&[0x17])]), false),
            (body([0xC0, 0x2B], 0, &[ems, groups(&[0x11EC, 0x19])]), false),
            (body([0x13, 0x03], 0, &of_1_3), true),
            (body([0xC0, 0x2B], 0, &of_1_3), false),
        ] {
            assert_eq!(Hello::parse(&packet(&body)).unwrap().is_compatible(), compatible, "{body:02x?}");
        }
    }

    #[test]
    fn truncations_and_fragments_are_refused_without_a_panic() {
        let name = extension(SERVER_NAME, &[&[0, 8, 0, 0, 5][..], b"a.org"].concat());
        let schemes = extension(SIGNATURE_ALGORITHMS, &[0, 4, 4, 3, 8, 4]);
        let whole = packet(&hello(&[3; 32], &[name, schemes, versions(), share(0x1D)]));
        let parsed = Hello::parse(&whole).unwrap();
        assert_eq!(parsed.server_name, Some("a.org"));
        assert_eq!(parsed.signature_algorithms().collect::<Vec<_>>(), [0x0403, 0x0804]);
        for len in 0..whole.len() {
            assert!(!is_hello(&whole[..len]) || Hello::parse(&whole[..len]).is_err(), "{len}");
        }
        let mut fragment = whole.clone();
        fragment[RECORD_HEADER + 3] += 1;
        assert_eq!(Hello::parse(&fragment).err(), Some(HelloError::Fragmented));
        assert_eq!(Hello::parse(&[22; MAX_HELLO + 1]).err(), Some(HelloError::TooLong));
        for at in 0..whole.len() {
            for value in [0, 1, 0x7F, 0xFF] {
                let mut broken = whole.clone();
                broken[at] = value;
                if is_hello(&broken)
                    && let Ok(hello) = Hello::parse(&broken)
                {
                    hello.write_first(hello.padding(), &mut Vec::new());
                    hello.is_compatible();
                }
            }
        }
    }
}
