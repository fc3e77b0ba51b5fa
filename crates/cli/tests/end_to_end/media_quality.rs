//! `server.quality`: loss of each leg in a call through a real server, in the API.

mod end;
mod truth;

use crate::prelude::*;
use turnpike_testkit::{
    rtp::{RtpReceiver, RtpSender},
    stun::{attribute::*, kind::*},
};

const CHANNEL: [u8; 2] = [0x40, 0];
const DATAGRAMS: u32 = 1000;

/// Both ends of a call through a relayed address.
struct Call {
    client: stun::Client,
    peer: UdpSocket,
    relayed: SocketAddr,
}

impl Call {
    fn new(serve: &Serve) -> Self {
        let client = stun::Client::new(serve.address(V4));
        let who = (USER, PASSWORD);
        let answer = client.ask_as(who, ALLOCATE, &[(REQUESTED_TRANSPORT, &stun::UDP)]);
        assert_eq!(answer.error(), None);
        let peer = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
        peer.set_read_timeout(Some(SOON)).expect("not zero");
        let address = stun::xor_address(peer.local_addr().expect("the socket is bound"), 0);
        let number = [CHANNEL[0], CHANNEL[1], 0, 0];
        let bound =
            client.ask_as(who, CHANNEL_BIND, &[(CHANNEL_NUMBER, &number), (XOR_PEER_ADDRESS, &address)]);
        assert_eq!(bound.error(), None);
        Self { client, peer, relayed: answer.address(XOR_RELAYED_ADDRESS) }
    }

    fn to_peer(&self, payload: &[u8]) {
        let length = u16::try_from(payload.len()).expect("a short payload").to_be_bytes();
        self.client.send_raw(&[&CHANNEL[..], &length, payload].concat());
        self.hear(&self.peer, payload);
    }

    fn to_client(&self, payload: &[u8]) {
        self.peer.send_to(payload, self.relayed).expect("the relay has the address");
        self.hear(self.client.socket(), payload);
    }

    fn hear(&self, socket: &UdpSocket, payload: &[u8]) {
        let mut buffer = [0; 2048];
        let length = socket.recv(&mut buffer).expect("a datagram");
        assert!(buffer[..length].ends_with(payload));
    }
}

/// The client's uplink loses each 20th datagram before the relay, and then the peer's downlink each tenth of the others.
fn lose(call: &Call) {
    let (mut up, mut down, mut receiver) =
        (RtpSender::new(1, 65_000), RtpSender::new(2, 9), RtpReceiver::default());
    let began = Instant::now();
    let mut relayed = 0;
    for number in 0..DATAGRAMS {
        let at = began.elapsed();
        let datagram = up.datagram(at, 100);
        if number % 20 != 3 {
            call.to_peer(&datagram);
            relayed += 1;
            // The first and the last datagram arrive, so that the report covers all.
            if relayed % 10 != 5 {
                receiver.receive(at, &datagram);
            }
        }
        call.to_client(&down.datagram(at, 100));
    }
    call.to_client(&receiver.report(99));
}

#[test]
fn loss_before_the_relay_is_not_counted_behind_it() {
    let dir = Dir::new();
    let config = dir.file("turnpike.toml", "[server]\nquality = \"on\"\n");
    let serve = Serve::start(&["-c", config.to_str().expect("the test's path is UTF-8")]);
    let call = Call::new(&serve);
    lose(&call);
    let list = "/v1/allocations";
    let get = |path: &str| -> Value {
        serde_json::from_str(&fetch(serve.admin(), path).expect("the admin interface answers").1)
            .expect("JSON")
    };
    let id = get(list)["allocations"][0]["id"].as_str().expect("an id").to_owned();
    let is_full = |quality: &Value| quality["client"]["uplink"]["expected"] == DATAGRAMS;
    let began = Instant::now();
    let quality = loop {
        let quality = get(&format!("{list}/{id}"))["quality"].clone();
        if is_full(&quality) {
            break quality;
        }
        assert!(began.elapsed() < 6 * SOON, "{quality}");
        thread::sleep(Duration::from_millis(100));
    };
    assert_eq!(quality["client"]["uplink"]["lost"], 50, "{quality}");
    assert_eq!(quality["peer"]["uplink"]["lost"], 0, "{quality}");
    assert_eq!(quality["peer"]["downlink"]["expected"], 950, "{quality}");
    assert_eq!(quality["peer"]["downlink"]["lost"], 95, "{quality}");
    assert_eq!(quality["client"]["downlink"], Value::Null, "{quality}");
}
