//! Splits datagrams into records before dimpl parses them.

/// Length of a plaintext record header, equal in DTLS 1.2 and 1.3 (RFC 6347 section 4.1, RFC 9147 section 4).
pub(super) const HEADER: usize = 13;
/// Content type of alerts (RFC 6347 section 4.3.1, RFC 5246 section 7.2).
pub(super) const ALERT: u8 = 21;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Sifted<'a> {
    Whole(&'a [u8]),
    /// The remaining records, possibly none.
    Rest(&'a [u8]),
}

/// Removes plaintext alerts (epoch 0) from a datagram; `buffer` receives the result. If lengths are
/// inconsistent, the rest of the datagram is left to the parser.
pub(super) fn without_plain_alerts<'a>(datagram: &'a [u8], buffer: &'a mut Vec<u8>) -> Sifted<'a> {
    if !records(datagram).any(is_plain_alert) {
        return Sifted::Whole(datagram);
    }
    buffer.clear();
    records(datagram)
        .filter(|record| !is_plain_alert(record))
        .for_each(|record| buffer.extend_from_slice(record));
    Sifted::Rest(buffer)
}

fn is_plain_alert(record: &[u8]) -> bool {
    matches!(record, [ALERT, _, _, 0, 0, ..])
}

/// Records with their headers. Encrypted DTLS 1.3 records have a different header, so the rest of the
/// datagram is returned as one record.
pub(super) fn records(datagram: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let length = match rest {
            [20..=26, _, _, _, _, _, _, _, _, _, _, high, low, ..] => {
                HEADER + usize::from(u16::from_be_bytes([*high, *low]))
            }
            _ => rest.len(),
        };
        let (record, behind) = rest.split_at(length.min(rest.len()));
        rest = behind;
        Some(record)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(kind: u8, epoch: u8, body: &[u8]) -> Vec<u8> {
        let length = u16::try_from(body.len()).unwrap().to_be_bytes();
        [&[kind, 0xFE, 0xFD, 0, epoch, 0, 0, 0, 0, 0, 9], &length[..], body].concat()
    }

    #[test]
    fn plaintext_alerts_are_removed_from_any_position() {
        let (alert, sealed) = (record(ALERT, 0, &[2, 40]), record(ALERT, 1, &[7; 26]));
        let (message, finished) = (record(22, 0, &[1; 30]), record(22, 1, &[2; 40]));
        // Unified header (RFC 9147 section 4): bits 001 and five more flag bits; the length may be missing.
        let unified = vec![0x2C, 0, 1, 0, 0, 9, 9];
        for (datagram, rest) in [
            (vec![&alert], Some(vec![])),
            (vec![&alert, &alert], Some(vec![])),
            (vec![&message, &alert], Some(vec![&message])),
            (vec![&alert, &message, &alert, &finished], Some(vec![&message, &finished])),
            (vec![&message, &alert, &unified], Some(vec![&message, &unified])),
            (vec![&message, &finished], None),
            (vec![&sealed], None),
            (vec![&unified, &alert], None),
        ] {
            let datagram: Vec<u8> = datagram.into_iter().flatten().copied().collect();
            let rest: Option<Vec<u8>> = rest.map(|records| records.into_iter().flatten().copied().collect());
            let mut buffer = vec![5; 10];
            let expected = rest.as_deref().map_or(Sifted::Whole(&datagram), Sifted::Rest);
            assert_eq!(without_plain_alerts(&datagram, &mut buffer), expected, "{datagram:?}");
        }
        // A truncated alert is also removed.
        let mut buffer = Vec::new();
        assert_eq!(without_plain_alerts(&alert[..7], &mut buffer), Sifted::Rest(&[]));
    }

    proptest! {
        #[test]
        fn records_of_any_bytes_concatenate_to_the_datagram(
            datagram in prop::collection::vec(prop_oneof![Just(0_u8), Just(21), Just(22), any::<u8>()], 0..300),
        ) {
            let pieces: Vec<u8> = records(&datagram).flatten().copied().collect();
            prop_assert_eq!(&pieces, &datagram);
            let mut buffer = Vec::new();
            let (Sifted::Whole(left) | Sifted::Rest(left)) = without_plain_alerts(&datagram, &mut buffer);
            prop_assert!(!left.starts_with(&[21, 0, 0, 0, 0]));
        }
    }
}
