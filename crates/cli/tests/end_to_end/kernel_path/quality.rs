//! `server.quality` on the kernel path: loss of datagrams that the kernel relayed.

use crate::prelude::*;
use turnpike_testkit::{
    rtp::RtpSender,
    stun::{attribute::*, kind::*},
};

use super::{CLIENT, PEER, SERVER, by_each};

const CHANNEL: [u8; 2] = [0x40, 0];

#[test]
fn loss_of_streams_in_the_kernel_is_exact() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let dir = Dir::new();
        let config = dir.file("turnpike.toml", "[server]\nquality = \"on\"\n").display().to_string();
        let server = links.serve(&["--datapath", datapath, "-c", &config]);
        let client = stun::Client::from(CLIENT[0], SocketAddr::new(SERVER[0], 3478));
        let answer = client.ask(&stun::plain_message(ALLOCATE, &[(REQUESTED_TRANSPORT, &stun::UDP)]));
        assert_eq!(answer.error(), None);
        let peer = UdpSocket::bind((PEER[0], 0)).expect("the address is up");
        peer.set_read_timeout(Some(SOON)).expect("not zero");
        let address = stun::xor_address(peer.local_addr().expect("the socket is bound"), 0);
        let number = [CHANNEL[0], CHANNEL[1], 0, 0];
        let request =
            stun::plain_message(CHANNEL_BIND, &[(CHANNEL_NUMBER, &number), (XOR_PEER_ADDRESS, &address)]);
        let bound = client.ask(&request);
        assert_eq!(bound.error(), None);
        let relayed = answer.address(XOR_RELAYED_ADDRESS);
        let hear = |socket: &UdpSocket, payload: &[u8]| {
            let mut buffer = [0; 2048];
            let length = socket.recv(&mut buffer).expect("a datagram");
            assert!(buffer[..length].ends_with(payload));
        };
        let (mut up, mut down) = (RtpSender::new(1, 65_000), RtpSender::new(2, 9));
        let began = Instant::now();
        let (mut sent, mut lost) = (0, [0, 0]);
        while sent < 3000 {
            let at = began.elapsed();
            let (to_peer, to_client) = (up.datagram(at, 100), down.datagram(at, 100));
            let length = u16::try_from(to_peer.len()).expect("short").to_be_bytes();
            if sent % 20 == 3 {
                lost[0] += 1;
            } else {
                client.send_raw(&[&CHANNEL[..], &length, &to_peer].concat());
                hear(&peer, &to_peer);
            }
            if sent % 50 == 7 {
                lost[1] += 1;
            } else {
                peer.send_to(&to_client, relayed).expect("the relay has the address");
                hear(client.socket(), &to_client);
            }
            sent += 1;
            thread::sleep(Duration::from_millis(1));
        }
        let get = |path: &str| -> Value { serde_json::from_str(&server.get(path)).expect("JSON") };
        let id = get("/v1/allocations")["allocations"][0]["id"].as_str().expect("an id").to_owned();
        let quality = || get(&format!("/v1/allocations/{id}"))["quality"].clone();
        eventually("all datagrams are reported", || {
            ["client", "peer"].iter().all(|leg| quality()[leg]["uplink"]["expected"] == sent)
        });
        let lost_on = |leg: &str| quality()[leg]["uplink"]["lost"].clone();
        assert_eq!([lost_on("client"), lost_on("peer")], lost, "{}", quality());
        let jitter = quality()["client"]["uplink"]["jitter_ms"].as_f64();
        assert!(jitter.is_some_and(|jitter| 0.0 < jitter && jitter < 20.0), "{}", quality());
        // User space saw few of them.
        assert!(server.across() > 2 * (sent - lost[0] - lost[1]) * 4 / 5, "{}", server.across());
    });
}
