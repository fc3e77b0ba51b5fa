//! Padding bytes are zero on every transport and never contain other data.

use crate::prelude::*;
use crate::support::*;

/// Payload lengths; long ones come first, so that reused buffers contain other bytes.
const LENGTHS: [usize; 10] = [1399, 1398, 1397, 0, 1, 2, 3, 4, 5, 7];

struct Peers {
    relayed: SocketAddr,
    channel: UdpSocket,
    permitted: UdpSocket,
}

impl Peers {
    fn of(mut ask: impl FnMut(&[u8]) -> Message) -> Self {
        let (channel, permitted) = (peer(), peer());
        let relayed = plain(&ask(&allocate()).attribute(0x0016));
        ask(&bind(channel.local_addr().unwrap()));
        ask(&permit(permitted.local_addr().unwrap()));
        Self { relayed, channel, permitted }
    }

    /// Sends each length in both directions; `receive` returns the next message with its padding.
    fn send_all(&self, mut receive: impl FnMut() -> Vec<u8>, pads_channel_data: bool) {
        for length in LENGTHS {
            let payload = vec![0xEE; length];
            self.channel.send_to(&payload, self.relayed).unwrap();
            let message = receive();
            let padding = if pads_channel_data { 4 + length.next_multiple_of(4) } else { 4 + length };
            assert_eq!(message.len(), padding, "{length}");
            assert_eq!(message[4..4 + length], payload);
            assert!(message[4 + length..].iter().all(|byte| *byte == 0), "{length}: {message:02x?}");

            self.permitted.send_to(&payload, self.relayed).unwrap();
            let message = receive();
            assert_eq!(Message(message.clone()).attribute(0x0013), payload);
            assert_padded_with_zeros(&message);
        }
    }
}

fn assert_padded_with_zeros(message: &[u8]) {
    let mut rest = &message[20..];
    assert_eq!(usize::from(u16::from_be_bytes([message[2], message[3]])), rest.len());
    while let [_, _, l0, l1, behind @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*l0, *l1]));
        let padded = length.next_multiple_of(4);
        assert!(behind[length..padded].iter().all(|byte| *byte == 0), "{length}: {message:02x?}");
        rest = &behind[padded..];
    }
    assert!(rest.is_empty());
}

#[test]
fn over_udp() {
    let world = start(|_| {});
    let client = peer();
    client.connect(world.udp()).unwrap();
    let ask = |request: &[u8]| {
        client.send(request).unwrap();
        Message(heard(&client))
    };
    // RFC 8656 section 12.5 requires padding of ChannelData only over streams.
    Peers::of(ask).send_all(|| heard(&client), false);
}

fn read(stream: &mut impl Read) -> Vec<u8> {
    let mut message = vec![0; 4];
    stream.read_exact(&mut message).unwrap();
    let length = usize::from(u16::from_be_bytes([message[2], message[3]]));
    let is_stun = message[0] < 0x40;
    let rest = if is_stun { 16 + length } else { length.next_multiple_of(4) };
    message.resize(4 + rest, 0xEE);
    stream.read_exact(&mut message[4..]).unwrap();
    message
}

fn over_a_stream<S: Read + Write>(mut stream: S) {
    let peers = Peers::of(|request| {
        stream.write_all(request).unwrap();
        stream.flush().unwrap();
        Message(read(&mut stream))
    });
    peers.send_all(|| read(&mut stream), true);
}

#[test]
fn over_tcp() {
    let world = start(|_| {});
    over_a_stream(connect(world.tcp()));
}

#[test]
fn over_tls() {
    let world = start(|config| config.tls = Some(context(&[identity(&["turn.example.org"])])));
    over_a_stream(tls_connect(world.tls(), "turn.example.org", &tls_config(&[])).unwrap());
}

#[test]
fn over_dtls() {
    let world = support::dtls::world();
    for kind in [Kind::V12, Kind::V13] {
        let mut client = DtlsClient::connect(world.dtls(), kind);
        let peers = Peers::of(|request| client.ask(request));
        peers.send_all(|| client.receive().0, false);
    }
}
