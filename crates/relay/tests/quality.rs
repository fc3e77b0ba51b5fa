//! Quality of media, over real sockets.

use crate::prelude::*;
use crate::support::*;
use turnpike_testkit::rtp::RtpSender;
use turnpike_turn::server::{Measured, QualityLevel, QualityReport};

fn reports(world: &World) -> Vec<QualityReport> {
    let (sender, reports) = mpsc::channel();
    let (answer, answered) = mpsc::channel();
    world.relay.report_quality(
        0,
        0,
        move |report| sender.send(*report).unwrap(),
        move |next| answer.send(next).unwrap(),
    );
    assert_eq!(answered.recv_timeout(SOON), Ok(None));
    reports.try_iter().collect()
}

/// Sends RTP both ways, of which the client's loses every tenth datagram, and a STUN transaction.
fn call(
    world: &World,
    mut send: impl FnMut(&[u8]),
    peer: &UdpSocket,
    relayed: SocketAddr,
) -> (SocketAddr, Measured) {
    let (mut up, mut down) = (RtpSender::new(1, 65_500), RtpSender::new(2, 9));
    for number in 0..200 {
        let at = Duration::from_millis(number);
        let (sent, received) = (up.datagram(at, 100), down.datagram(at, 100));
        if number % 10 != 5 {
            send(&sent);
            assert_eq!(heard(peer), sent);
        }
        peer.send_to(&received, relayed).unwrap();
    }
    send(&binding(9));
    assert_eq!(heard(peer), binding(9));
    let mut response = binding(9);
    response[0] = 1;
    peer.send_to(&response, relayed).unwrap();
    eventually("the response to pass", || {
        (world.counter("relayed_datagrams", "to_client") >= 201).then_some(())
    });
    let reports = reports(world);
    assert_eq!(reports.len(), 1, "{reports:?}");
    (reports[0].client, reports[0].measured)
}

fn check(measured: &Measured) {
    let (up, down) = (measured.client.uplink.unwrap(), measured.peer.uplink.unwrap());
    assert_eq!((up.expected, up.lost, up.reordered), (200, 20, 0));
    assert_eq!((down.expected, down.lost, down.reordered), (200, 0, 0));
    assert!(measured.peer.round_trip_us.is_some_and(|us| us > 0), "{measured:?}");
}

#[test]
fn quality_of_a_call_over_udp_is_reported() {
    let world = start_with(|config| config.server.quality = QualityLevel::Headers);
    let (peer, client) = (peer(), support::peer());
    client.connect(world.udp()).unwrap();
    let ask = |request: &[u8]| {
        client.send(request).unwrap();
        Message(heard(&client))
    };
    let relayed = plain(&ask(&allocate()).attribute(0x0016));
    ask(&bind(peer.local_addr().unwrap()));
    let send = |payload: &[u8]| assert!(client.send(&channel_data(payload)).is_ok());
    let (address, measured) = call(&world, send, &peer, relayed);
    assert_eq!(address, client.local_addr().unwrap());
    check(&measured);
    assert_eq!(measured.client.round_trip_us, None);
    assert_eq!(reports(&world), [], "nothing since");
}

#[test]
fn round_trip_to_a_client_over_tcp_is_that_of_the_connection() {
    let world = start_with(|config| config.server.quality = QualityLevel::Headers);
    let (peer, mut client) = (peer(), world.client());
    let relayed = client.allocated(&peer);
    let (_, measured) = call(&world, |payload| client.send(&padded(channel_data(payload))), &peer, relayed);
    check(&measured);
    assert!(measured.client.round_trip_us.is_some_and(|us| us > 0), "{measured:?}");
}

#[test]
fn nothing_is_reported_while_the_setting_is_off() {
    let world = start_with(|_| {});
    let (peer, mut client) = (peer(), world.client());
    client.allocated(&peer);
    client.send(&padded(channel_data(&RtpSender::new(1, 1).datagram(Duration::ZERO, 100))));
    heard(&peer);
    assert_eq!(reports(&world), []);
}
