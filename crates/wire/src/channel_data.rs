//! ChannelData messages (RFC 8656 section 12.4).

/// A channel number: 0x4000 to 0x4FFF (RFC 8656 section 12). Cannot hold anything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChannelNumber(u16);

impl ChannelNumber {
    /// 0x4000.
    pub const MIN: Self = Self(0x4000);
    /// 0x4FFF.
    pub const MAX: Self = Self(0x4FFF);

    /// `None` outside 0x4000..=0x4FFF.
    #[must_use]
    pub const fn new(number: u16) -> Option<Self> {
        if number >= Self::MIN.0 && number <= Self::MAX.0 { Some(Self(number)) } else { None }
    }

    /// The number as it stands on the wire.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }
}

/// Why bytes are not a ChannelData message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChannelDataError {
    /// Fewer than four bytes, or fewer payload bytes than the length field claims.
    #[error("the message is shorter than its header says")]
    Truncated,
    /// The channel number is outside 0x4000..=0x4FFF.
    #[error("channel number {0:#06x} is outside 0x4000-0x4FFF")]
    Number(u16),
}

/// A checked view of a ChannelData message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelData<'a> {
    number: ChannelNumber,
    payload: &'a [u8],
}

impl<'a> ChannelData<'a> {
    /// Bytes before the payload.
    pub const HEADER_LEN: usize = 4;

    /// Parses a datagram. Bytes after the claimed length are padding and ignored (RFC 8656 section 12.5).
    pub fn parse(datagram: &'a [u8]) -> Result<Self, ChannelDataError> {
        let [a, b, c, d, rest @ ..] = datagram else { return Err(ChannelDataError::Truncated) };
        let raw = u16::from_be_bytes([*a, *b]);
        let number = ChannelNumber::new(raw).ok_or(ChannelDataError::Number(raw))?;
        let length = usize::from(u16::from_be_bytes([*c, *d]));
        let payload = rest.get(..length).ok_or(ChannelDataError::Truncated)?;
        Ok(Self { number, payload })
    }

    /// The channel.
    #[must_use]
    pub fn number(&self) -> ChannelNumber {
        self.number
    }

    /// The application data, a part of the datagram that was parsed.
    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// The four bytes that stand before a payload of `length` bytes.
    #[must_use]
    pub fn header(number: ChannelNumber, length: u16) -> [u8; 4] {
        let [a, b] = number.0.to_be_bytes();
        let [c, d] = length.to_be_bytes();
        [a, b, c, d]
    }
}
