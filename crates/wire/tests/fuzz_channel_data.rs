//! Fuzz target: arbitrary bytes as ChannelData.

use crate::prelude::*;
use turn_types::channel::ChannelData as OracleChannelData;
use turnpike_wire::channel_data::{ChannelDataError, ChannelRange};

#[test]
fn channel_data() {
    fuzz::target("channel_data", seeds, |bytes| {
        let counted = allocation_counter::measure(|| {
            let [narrow, wide] =
                [ChannelRange::Rfc8656, ChannelRange::Rfc5766].map(|range| check(range, bytes));
            assert!(narrow.is_none() || narrow == wide);
        });
        assert_eq!(counted.count_total, 0, "reading does not allocate");
        // The oracle also accepts the numbers that RFC 8656 reserves.
        let ours = ChannelData::parse(bytes).ok().map(|view| (view.number().get(), view.payload()));
        let theirs =
            OracleChannelData::parse(bytes).ok().filter(|view| view.id() <= ChannelNumber::MAX.get());
        assert_eq!(ours, theirs.as_ref().map(|view| (view.id(), view.data())));
    });
}

fn check(range: ChannelRange, bytes: &[u8]) -> Option<ChannelData<'_>> {
    match ChannelData::parse_within(range, bytes) {
        Ok(view) => {
            let length = u16::try_from(view.payload().len()).expect("the length field has 16 bits");
            let header = ChannelData::header(view.number(), length);
            let (before, after) = bytes.split_at(ChannelData::HEADER_LEN);
            assert_eq!(before, header);
            assert_eq!(after.as_ptr_range().start, view.payload().as_ptr_range().start);
            assert_eq!(demux::classify(bytes), demux::Kind::ChannelData);
            return Some(view);
        }
        Err(ChannelDataError::Number(raw)) => assert_eq!(ChannelNumber::within(range, raw), None),
        Err(ChannelDataError::Truncated) => {
            let claimed =
                bytes.get(2..4).map_or(0, |length| usize::from(u16::from_be_bytes([length[0], length[1]])));
            assert!(bytes.len() < 4 + claimed);
        }
    }
    None
}

fn seeds() -> Vec<Vec<u8>> {
    let messages = [(0x4000_u16, 0_u16), (0x4FFF, 5), (0x5000, 4), (0x7FFF, 120)].map(|(number, length)| {
        let header = [number.to_be_bytes(), length.to_be_bytes()].concat();
        [header, vec![9; length.into()], vec![0; 3]].concat()
    });
    messages.into_iter().chain(fuzz::captured("channel_data")).collect()
}
