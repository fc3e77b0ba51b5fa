//! Cost of one packet in `turn`, for each decision that a client, a peer or a stranger can trigger at will.

#[path = "../../crates/turn/tests/common/mod.rs"]
mod common;

use std::{
    hint::black_box,
    net::{IpAddr, SocketAddr},
};

use common::{Ask, BINDING, PEER, Scheme, TestPolicy, World, address, channel_data, client, config};
use turnpike_turn::{
    server::{OwnEndpoints, QualityLevel, RelayId, ServerConfig, SharedPort, Source, Verdict},
    time::Now,
};

use crate::Bench;

/// A peer with a permission and no channel: its data becomes a Data indication.
const PERMITTED: &str = "198.41.0.5:7000";
const PAYLOAD: [u8; 120] = [7; 120];

pub(crate) fn cases(bench: &mut Bench) {
    for clients in [1, 1000] {
        relaying(bench, clients);
    }
    measuring(bench);
    claims(bench);
    requests(bench);
}

/// Looking up the owner of a peer when 1,000 allocations share a relay socket.
fn claims(bench: &mut Bench) {
    const PORT: SharedPort = SharedPort(0);
    let mut world = empty();
    let peers: Vec<IpAddr> = (1..=1000_u16)
        .map(|port| {
            let [high, low] = port.to_be_bytes();
            let peer = SocketAddr::from(([198, 41, high, low], 7000));
            world.client = client(port);
            let (alice, _) = world.allocated_sharing(address("203.0.113.1:50000"), PORT);
            world.ask(&Ask::bind(0x4000, &peer.to_string()).signed(&alice)).success();
            peer.ip()
        })
        .collect();
    let (mut at, server) = (0, &mut world.server);
    bench.case("route/claimant/1000", || {
        at = (at + 617) % peers.len();
        assert!(server.data.claimant(PORT, black_box(peers[at]), 1).is_some());
    });
}

/// Relaying for one allocation while its worker has `clients` clients.
fn relaying(bench: &mut Bench, clients: u16) {
    let (mut world, relays) = populated(clients);
    let (now, server) = (world.now, &mut world.server);
    let (bound, permitted) = (address(PEER), address(PERMITTED));
    let message = channel_data(0x4000, &PAYLOAD);
    let send = Ask::send(PEER, &PAYLOAD);
    // The first datagram of a channel costs more than later ones.
    for (source, _) in &relays {
        let _ = server.from_client(now, source, &message);
    }
    // A stride that visits all clients in an order that is independent of their creation.
    let mut at = 0;
    let mut next = || {
        at = (at + 617) % relays.len();
        &relays[at]
    };

    bench.case(&format!("route/channel_data/{clients}"), || {
        let verdict = server.from_client(now, &next().0, black_box(&message));
        assert!(matches!(verdict, Verdict::ToPeer { payload, .. } if payload.len() == PAYLOAD.len()));
    });
    bench.case(&format!("route/from_peer_channel/{clients}"), || {
        let verdict = server.data.from_peer(now, next().1, bound, black_box(&PAYLOAD));
        assert!(matches!(verdict, Verdict::ToClient { header, .. } if header.as_slice().len() == 4));
    });
    bench.case(&format!("route/from_peer_data/{clients}"), || {
        let verdict = server.data.from_peer(now, next().1, permitted, black_box(&PAYLOAD));
        assert!(matches!(verdict, Verdict::ToClient { header, .. } if header.as_slice().len() > 4));
    });
    bench.case(&format!("route/send/{clients}"), || {
        let verdict = server.from_client(now, &next().0, black_box(&send));
        assert!(matches!(verdict, Verdict::ToPeer { payload, .. } if payload.len() == PAYLOAD.len()));
    });
    // Many strangers, because a single one whose hash resembles that of a client would cost 30 more
    // instructions.
    let strangers: Vec<Source> = (clients + 1..=clients + 1000).map(|port| client(port).into()).collect();
    let mut stranger = 0;
    bench.case(&format!("route/stranger/{clients}"), || {
        stranger = (stranger + 1) % strangers.len();
        let verdict = server.from_client(now, &strangers[stranger], black_box(&message));
        assert!(matches!(verdict, Verdict::Drop(_)));
    });
}

/// Relaying RTP whose quality is measured.
fn measuring(bench: &mut Bench) {
    let config = ServerConfig { quality: QualityLevel::On, ..config() };
    let mut world = World::with(config);
    let (alice, relay) = world.allocated();
    world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
    let (mut now, from, peer) = (world.now, world.client.into(), address(PEER));
    let mut sequence = 0_u16;
    let mut next = |now: &mut Now, datagram: &mut [u8]| {
        now.ms += 20;
        sequence = sequence.wrapping_add(1);
        datagram[..2].copy_from_slice(&[0x80, 111]);
        datagram[2..4].copy_from_slice(&sequence.to_be_bytes());
        datagram[4..8].copy_from_slice(&(u32::from(sequence) * 960).to_be_bytes());
    };
    let server = &mut world.server;
    let (mut message, mut datagram) = (channel_data(0x4000, &PAYLOAD), PAYLOAD);
    bench.case("route/measured_channel_data", || {
        next(&mut now, &mut message[4..]);
        let verdict = server.from_client(now, &from, black_box(&message));
        assert!(matches!(verdict, Verdict::ToPeer { .. }));
    });
    bench.case("route/measured_from_peer", || {
        next(&mut now, &mut datagram);
        let verdict = server.data.from_peer(now, relay, peer, black_box(&datagram));
        assert!(matches!(verdict, Verdict::ToClient { .. }));
    });
}

/// Unauthenticated requests, and requests that known clients send occasionally.
fn requests(bench: &mut Bench) {
    let (mut world, relays) = populated(1);
    let (now, from) = (world.now, relays[0].0);
    let (binding, challenge) = (Ask::new(BINDING).bytes(), Ask::allocate().bytes());
    let refresh = Ask::refresh(600).signed(&world.credentials("alice", Scheme::Md5)).bytes();
    let stranger = client(2).into();
    // The first two bytes of a STUN message are its type: success and error responses (RFC 8489, section 5).
    let server = &mut world.server;
    bench.case("request/binding", || {
        let verdict = server.from_client(now, &from, black_box(&binding));
        assert!(matches!(verdict, Verdict::Reply { bytes, .. } if bytes[..2] == [0x01, 0x01]));
    });
    bench.case("request/challenge_401", || {
        let verdict = server.from_client(now, &stranger, black_box(&challenge));
        assert!(matches!(verdict, Verdict::Reply { bytes, .. } if bytes[..2] == [0x01, 0x13]));
    });
    // Authenticated. The test policy's cost is that of deriving the key from the password.
    bench.case("request/refresh", || {
        let verdict = server.from_client(now, &from, black_box(&refresh));
        assert!(matches!(verdict, Verdict::Reply { bytes, .. } if bytes[..2] == [0x01, 0x04]));
    });
}

/// A server without clients.
fn empty() -> World {
    let policy = TestPolicy { per_user: 100_000, total: 100_000, ..TestPolicy::default() };
    let mut config = config();
    // One listener, as on most servers: each peer is compared with it.
    config.peers.own = OwnEndpoints::new([client(1).local.ip()], [], [client(1).local], 49_152..=65_535);
    World::with_policy(config, policy)
}

/// Clients with one allocation, one channel and one permission each.
fn populated(clients: u16) -> (World, Vec<(Source, RelayId)>) {
    let mut world = empty();
    let relays = (1..=clients)
        .map(|port| {
            world.client = client(port);
            let (alice, relay) = world.allocated();
            world.ask(&Ask::bind(0x4000, PEER).signed(&alice)).success();
            world.ask(&Ask::permit(PERMITTED).signed(&alice)).success();
            (world.client.into(), relay)
        })
        .collect();
    (world, relays)
}
