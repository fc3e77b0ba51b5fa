//! Two clients of one relay behind a NAT have each other as peers by the addresses that they are told. There is no NAT here that could
//! send anything back: nobody has the public address, and nothing that went there would arrive.

use crate::prelude::*;
use turnpike_turn::server::PeerRules;

use crate::support::*;

const PUBLIC: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 41, 0, 9));

/// Behind a NAT, and by the peer rules of a server to which nothing is allowed: what is bound is no peer under its own address.
pub(crate) fn behind_nat(config: &mut Config) {
    config.relay = vec![RelayAddress { bind: Ipv4Addr::LOCALHOST.into(), external: Some(PUBLIC) }];
    config.server.peers = PeerRules::default();
}

/// A client over UDP.
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

    /// A channel between the two, each way.
    pub(crate) fn call(&self, other: &Self) {
        self.ask(&bind(other.relayed));
        other.ask(&bind(self.relayed));
    }

    /// A burst, which arrives whole and in order.
    pub(crate) fn speaks_to(&self, other: &Self) {
        for number in 0..40 {
            self.socket.send(&channel_data(&[number; 100])).unwrap();
        }
        for number in 0..40 {
            assert_eq!(Message(heard(&other.socket)).payload(), [number; 100]);
        }
    }

    /// One datagram without a channel.
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
fn clients_reach_each_other_by_channels_and_indications_on_every_data_path() {
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
fn clients_on_relay_sockets_that_others_have_too_reach_each_other() {
    let world = start_with(|config| {
        behind_nat(config);
        // One for each of them, since all are the same peer.
        config.shared_ports = 4;
    });
    converse(&world);
}

#[test]
fn a_reload_that_tells_of_the_nat_or_of_another_address_leaves_calls_up() {
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
        let nobody: Arc<dyn turnpike_relay::CredentialStore> = Arc::new(());
        world.relay.reconfigure(&config, &layout, &nobody).unwrap();
        eventually("newcomers are told the new one", || {
            let socket = peer();
            socket.connect(world.udp()).unwrap();
            socket.send(&allocate()).unwrap();
            let told = plain(&Message(heard(&socket)).attribute(0x0016));
            told.ip().to_string() == external
        });
        alice.speaks_to(&bob);
        bob.speaks_to(&alice);
        // A call can still be made by the address of before.
        alice.call(&bob);
    }
}
