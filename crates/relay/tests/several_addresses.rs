//! Several relay addresses of a family: a client gets the address to which it sent.

use crate::prelude::*;
use crate::support::*;

const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 0, 0, 2)];

fn with_both(change: impl FnOnce(&mut Config)) -> World {
    start_with(|config| {
        config.listen = vec![(Ipv4Addr::UNSPECIFIED, 0).into()];
        config.streams.listen.clone_from(&config.listen);
        config.relay = ADDRESSES.map(|ip| RelayAddress { bind: ip.into(), external: None }).into();
        change(config);
    })
}

/// Relay addresses of successive clients that send to this address; all clients stay connected.
fn relayed(world: &World, at: Ipv4Addr) -> Vec<IpAddr> {
    let server = SocketAddr::new(at.into(), world.udp().port());
    let mut clients = Vec::new();
    let answers = (1..=4).map(|id| {
        let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        client.set_read_timeout(Some(SOON)).unwrap();
        client.connect(server).unwrap();
        client.send(&stun(ALLOCATE, id, &[(REQUESTED_TRANSPORT, &[17, 0, 0, 0])])).unwrap();
        let answer = Message(heard(&client));
        clients.push(client);
        plain(&answer.attribute(XOR_RELAYED_ADDRESS)).ip()
    });
    answers.collect()
}

#[test]
fn client_gets_the_relay_address_to_which_it_sent() {
    for shared_ports in [0, 2] {
        let world = with_both(|config| config.shared_ports = shared_ports);
        for at in ADDRESSES {
            assert_eq!(relayed(&world, at), [IpAddr::from(at); 4], "{shared_ports} shared ports");
        }
    }
}

#[test]
fn relay_addresses_are_used_in_turn_if_configured() {
    let world = with_both(|config| config.relay_in_turn = true);
    let relayed = relayed(&world, ADDRESSES[1]);
    let on = |at: Ipv4Addr| relayed.iter().filter(|ip| **ip == at).count();
    assert_eq!(ADDRESSES.map(on), [2, 2], "{relayed:?}");
}
