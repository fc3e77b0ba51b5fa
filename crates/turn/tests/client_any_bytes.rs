//! Arbitrary input neither makes the client panic nor lets its memory grow.

use crate::client_support::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn any_datagram_is_handled_without_a_panic(datagrams in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 1..20)) {
        let mut client = allocated(0, 600);
        client.bind_channel(0, peer()).unwrap();
        for datagram in &datagrams {
            if let Incoming::Data { payload, .. } = client.handle_datagram(1, datagram) {
                prop_assert!(payload.len() + 4 <= datagram.len());
            }
        }
        prop_assert!(client.allocation().is_some());
    }

    #[test]
    fn an_altered_response_is_rejected(at in 0_usize..1_000, flip in 1_u8..) {
        let mut client = client();
        client.allocate(0).unwrap();
        let first = request(&mut client);
        client.handle_datagram(0, &challenge(&first, 401, PLAIN_NONCE, None));
        let second = request(&mut client);
        let answer = success(&second, 600, Some(IntegrityAlgorithm::Sha1));
        let mut changed = answer.clone();
        let at = at % changed.len();
        changed[at] ^= flip;
        client.handle_datagram(0, &changed);
        prop_assert!(client.allocation().is_none(), "byte {at} ^ {flip:#x}");
        client.handle_datagram(0, &answer);
        prop_assert!(client.allocation().is_some());
    }
}
