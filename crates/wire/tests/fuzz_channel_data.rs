//! Fuzz target: any bytes as ChannelData. Bounded under `cargo test`, unbounded under `cargo bolero`.

use turnpike_wire::channel_data::{ChannelData, ChannelDataError, ChannelNumber};

#[test]
fn channel_data() {
    bolero::check!().for_each(|bytes: &[u8]| match ChannelData::parse(bytes) {
        Ok(view) => {
            let length = u16::try_from(view.payload().len()).unwrap();
            let header = ChannelData::header(view.number(), length);
            assert_eq!([&header[..], view.payload()].concat(), bytes[..4 + view.payload().len()]);
        }
        Err(ChannelDataError::Number(raw)) => assert_eq!(ChannelNumber::new(raw), None),
        Err(ChannelDataError::Truncated) => {
            let claimed =
                bytes.get(2..4).map_or(0, |length| usize::from(u16::from_be_bytes([length[0], length[1]])));
            assert!(bytes.len() < 4 + claimed);
        }
    });
}
