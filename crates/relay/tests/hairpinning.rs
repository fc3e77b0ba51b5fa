//! Two clients of a relay behind a NAT reach each other through their external addresses. There is no NAT in
//! the test: the public address is unassigned, so datagrams actually sent to it would be lost.

use crate::prelude::*;
use turnpike_turn::server::PeerRules;

use crate::support::*;

const PUBLIC: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 41, 0, 9));

/// Relay behind a NAT with default peer rules: the bound address is not a permitted peer.
pub(crate) fn behind_nat(config: &mut Config) {
    config.relay = vec![RelayAddress { bind: Ipv4Addr::LOCALHOST.into(), external: Some(PUBLIC) }];
    config.server.peers = PeerRules::default();
}

pub(crate) struct Caller {
    socket: UdpSocket,
    pub(crate) relayed: SocketAddr,
}

impl Caller {
    pub(crate) fn new(world: &World) -> Self {
        let socket = peer();
        socket.connect(world.udp()).unwrap();
        socket.send(&allocate()).unwrap();
        let relayed = plain(&Message(heard(&socket)).attribute(0x0016));
        assert_eq!(relayed.ip(), PUBLIC);
        Self { socket, relayed }
    }

    pub(crate) fn ask(&self, request: &[u8]) {
        self.socket.send(request).unwrap();
        let kind = u16::from_be_bytes([request[0], request[1]]);
        assert_eq!(Message(heard(&self.socket)).kind(), kind | 0x0100);
    }

    pub(crate) fn call(&self, other: &Self) {
        self.ask(&bind(other.relayed));
        other.ask(&bind(self.relayed));
    }

    /// Sends a burst and checks that it arrives complete and in order.
    pub(crate) fn speaks_to(&self, other: &Self) {
        for number in 0..40 {
            self.socket.send(&channel_data(&[number; 100])).unwrap();
        }
        for number in 0..40 {
            assert_eq!(Message(heard(&other.socket)).payload(), [number; 100]);
        }
    }

    fn sends_to(&self, other: &Self) {
        let attributes = [(XOR_PEER_ADDRESS, &xored(other.relayed)[..]), (PAYLOAD, b"alone")];
        self.socket.send(&stun(SEND, 7, &attributes)).unwrap();
        let indication = Message(heard(&other.socket));
        assert_eq!((indication.kind(), &indication.attribute(PAYLOAD)[..]), (DATA, &b"alone"[..]));
        assert_eq!(plain(&indication.attribute(XOR_PEER_ADDRESS)), self.relayed);
    }
}

fn converse(world: &World) {
    let [alice, bob, carol, dave] = [(); 4].map(|()| Caller::new(world));
    alice.call(&bob);
    alice.speaks_to(&bob);
    bob.speaks_to(&alice);
    carol.ask(&permit(dave.relayed));
    dave.ask(&permit(carol.relayed));
    carol.sends_to(&dave);
    dave.sends_to(&carol);
}

#[test]
fn clients_reach_each_other_on_every_data_path() {
    for datapath in [Datapath::Basic, Datapath::Mmsg, Datapath::Gso] {
        for workers in [1, 2] {
            let world = start_with(|config| {
                behind_nat(config);
                (config.datapath, config.workers) = (datapath, workers);
            });
            converse(&world);
        }
    }
}

#[test]
fn clients_on_shared_relay_sockets_reach_each_other() {
    let world = start_with(|config| {
        behind_nat(config);
        // One socket per client, because all clients have the same peer address.
        config.shared_ports = 4;
    });
    converse(&world);
}

#[test]
fn reload_with_a_new_external_address_keeps_calls() {
    let world = start_with(behind_nat);
    let [alice, bob] = [(); 2].map(|()| Caller::new(&world));
    alice.call(&bob);
    for external in ["198.41.0.10", "198.41.0.11"] {
        let config = configured(|config| {
            behind_nat(config);
            config.relay[0].external = external.parse().ok();
        });
        let mut layout = world.relay.layout();
        layout.follow(&config.listen, &config.dtls.listen, &config.streams);
        let absent: Arc<dyn turnpike_relay::CredentialStore> = Arc::new(());
        world.relay.reconfigure(&config, &layout, &absent).unwrap();
        eventually("new clients get the new address", || {
            let socket = peer();
            socket.connect(world.udp()).unwrap();
            socket.send(&allocate()).unwrap();
            let told = plain(&Message(heard(&socket)).attribute(0x0016));
            told.ip().to_string() == external
        });
        alice.speaks_to(&bob);
        bob.speaks_to(&alice);
        alice.call(&bob);
    }
}
