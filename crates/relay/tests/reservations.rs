//! Reserved ports (EVEN-PORT with R = 1, RFC 8656 section 7.2) belong to the user who reserved them. Without
//! authentication, clients are distinguished by address.

use crate::prelude::*;
use crate::support::*;

const ALICE: Ipv4Addr = Ipv4Addr::LOCALHOST;
const BOB: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

fn asks(world: &World, from: Ipv4Addr, attribute: (u16, &[u8])) -> Message {
    let socket = UdpSocket::bind((from, 0)).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket.connect(world.udp()).unwrap();
    socket.send(&stun(ALLOCATE, 1, &[(REQUESTED_TRANSPORT, &[17, 0, 0, 0]), attribute])).unwrap();
    Message(heard(&socket))
}

fn reserves(world: &World, from: Ipv4Addr) -> Message {
    asks(world, from, (EVEN_PORT, &[0x80]))
}

fn code(answer: &Message) -> u16 {
    assert_eq!(answer.kind(), ALLOCATE | 0x0110, "{answer:?}");
    answer.error().unwrap()
}

#[test]
fn token_is_invalid_for_another_user() {
    let world = start(|_| {});
    let first = reserves(&world, ALICE);
    let token = first.attribute(RESERVATION_TOKEN);
    assert_eq!(code(&asks(&world, BOB, (RESERVATION_TOKEN, &token))), 508);
    let second = asks(&world, ALICE, (RESERVATION_TOKEN, &token));
    let port = |answer: &Message| plain(&answer.attribute(XOR_RELAYED_ADDRESS)).port();
    assert_eq!(port(&second), port(&first) + 1);
    assert_eq!(code(&asks(&world, ALICE, (RESERVATION_TOKEN, &token))), 508, "a token is valid once");
}
