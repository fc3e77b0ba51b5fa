//! ChannelData messages (RFC 8656 section 12.4).

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChannelRange {
    /// 0x4000 to 0x4FFF (RFC 8656 section 12).
    #[default]
    Rfc8656,
    /// 0x4000 to 0x7FFF (RFC 5766 section 11). A server that has no other protocol on its port can allow the
    /// whole range.
    Rfc5766,
}

/// Channel number: 0x4000 to 0x4FFF, or to 0x7FFF with [`ChannelRange::Rfc5766`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChannelNumber(u16);

impl ChannelNumber {
    pub const MIN: Self = Self(0x4000);
    pub const MAX: Self = Self(0x4FFF);

    #[must_use]
    pub const fn new(number: u16) -> Option<Self> {
        Self::within(ChannelRange::Rfc8656, number)
    }

    #[must_use]
    pub const fn within(range: ChannelRange, number: u16) -> Option<Self> {
        let last = match range {
            ChannelRange::Rfc8656 => Self::MAX.0,
            ChannelRange::Rfc5766 => 0x7FFF,
        };
        if number >= Self::MIN.0 && number <= last { Some(Self(number)) } else { None }
    }

    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChannelDataError {
    #[error("the message is shorter than its length field")]
    Truncated,
    #[error("channel number {0:#06x} is out of range")]
    Number(u16),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelData<'a> {
    number: ChannelNumber,
    payload: &'a [u8],
}

impl<'a> ChannelData<'a> {
    /// Bytes before the payload.
    pub const HEADER_LEN: usize = 4;

    /// Parses an RFC 8656 channel number. Bytes after the payload are padding (section 12.5).
    #[inline]
    pub fn parse(datagram: &'a [u8]) -> Result<Self, ChannelDataError> {
        Self::parse_within(ChannelRange::Rfc8656, datagram)
    }

    #[inline]
    pub fn parse_within(range: ChannelRange, datagram: &'a [u8]) -> Result<Self, ChannelDataError> {
        let [a, b, c, d, rest @ ..] = datagram else { return Err(ChannelDataError::Truncated) };
        let raw = u16::from_be_bytes([*a, *b]);
        let number = ChannelNumber::within(range, raw).ok_or(ChannelDataError::Number(raw))?;
        let length = usize::from(u16::from_be_bytes([*c, *d]));
        let payload = rest.get(..length).ok_or(ChannelDataError::Truncated)?;
        Ok(Self { number, payload })
    }

    #[must_use]
    pub fn number(&self) -> ChannelNumber {
        self.number
    }

    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// Header of a message whose payload is `length` bytes long.
    #[must_use]
    pub fn header(number: ChannelNumber, length: u16) -> [u8; 4] {
        let [a, b] = number.0.to_be_bytes();
        let [c, d] = length.to_be_bytes();
        [a, b, c, d]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_of_rfc_5766_ends_at_0x7fff() {
        for raw in 0..=u16::MAX {
            let number = ChannelNumber::within(ChannelRange::Rfc5766, raw).map(ChannelNumber::get);
            assert_eq!(number, (0x4000..=0x7FFF).contains(&raw).then_some(raw));
        }
        let bytes = [0x7F, 0xFF, 0, 1, b'a'];
        assert_eq!(ChannelData::parse_within(ChannelRange::Rfc5766, &bytes).unwrap().payload(), b"a");
    }

    #[test]
    fn a_message_parses_into_number_and_payload() {
        let bytes = [0x40, 0x01, 0x00, 0x03, b'a', b'b', b'c'];
        let message = ChannelData::parse(&bytes).unwrap();
        assert_eq!(message.number().get(), 0x4001);
        assert_eq!(message.payload(), b"abc");
        assert_eq!(ChannelData::header(message.number(), 3), bytes[..4]);
    }

    #[test]
    fn an_empty_payload_is_valid() {
        assert_eq!(ChannelData::parse(&[0x4F, 0xFF, 0, 0]).unwrap().payload(), b"");
    }

    #[test]
    fn padding_is_not_part_of_the_payload() {
        let bytes = [0x40, 0x00, 0x00, 0x01, b'a', 0, 0, 0];
        assert_eq!(ChannelData::parse(&bytes).unwrap().payload(), b"a");
    }

    #[test]
    fn only_0x4000_to_0x4fff_are_channels() {
        for raw in 0..=u16::MAX {
            let [high, low] = raw.to_be_bytes();
            let is_channel = (0x4000..=0x4FFF).contains(&raw);
            assert_eq!(ChannelNumber::new(raw).map(ChannelNumber::get), is_channel.then_some(raw));
            let bytes = [high, low, 0, 0];
            let parsed = ChannelData::parse(&bytes);
            assert_eq!(parsed.err(), (!is_channel).then_some(ChannelDataError::Number(raw)));
        }
    }

    #[test]
    fn a_payload_shorter_than_its_length_field_is_refused() {
        let bytes = [0x40, 0x01, 0x00, 0x03, b'a', b'b', b'c'];
        for length in 0..bytes.len() {
            assert_eq!(ChannelData::parse(&bytes[..length]), Err(ChannelDataError::Truncated), "{length}");
        }
    }
}
