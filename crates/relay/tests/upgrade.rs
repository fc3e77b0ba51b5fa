//! Handover of a relay to another one in the same process, with the same sockets and messages as between
//! processes.

use crate::prelude::*;
use std::sync::atomic::AtomicU64;

use turnpike_relay::upgrade::{RelayHandover, RelayOffer};

use crate::{
    hairpinning::{Caller, behind_nat},
    shared_ports::peer_at,
    support::{configured, context, dtls, identity},
};

/// Upgrades `old` to a new relay with this configuration; on failure `old` resumes, and the reason is
/// returned.
fn upgraded(old: &World, config: &Config) -> Result<World, String> {
    let (offer, descriptors, channels) = old.relay.offer().map_err(|error| error.to_string())?;
    let offer: RelayOffer = serde_json::from_str(&serde_json::to_string(&offer).unwrap()).unwrap();
    let mut config = config.clone();
    config.server.own_key = offer.own_key();
    config.server.nonce_keys = offer.own_key().into();
    let mut layout = offer.layout().clone();
    layout.follow(&config.listen, &config.dtls.listen, &config.streams);
    let handover = RelayHandover::new(offer, descriptors);
    let new = Relay::start_from_handover(None, &config, &layout, Arc::new(()), Arc::new(()), handover);
    let new = new.map_err(|error| error.to_string())?;
    let exported = old.relay.pause(false).and_then(|()| old.relay.export(channels, SOON));
    // A new process that fails closes the channel; its own error is more precise.
    let done = match (exported, new.received()) {
        (Ok(exported), Ok(taken)) => {
            assert_eq!(exported, taken);
            Ok(())
        }
        (_, Err(unfit)) => Err(unfit.to_string()),
        (Err(error), Ok(_)) => Err(error.to_string()),
    };
    if let Err(why) = done {
        drop(new);
        old.relay.resume();
        return Err(why);
    }
    new.serve();
    old.relay.forget();
    Ok(World { relay: new })
}

fn ended(old: World) {
    eventually("the old relay has no allocations left", || old.relay.left() == (0, 0));
    drop(old);
}

/// Datagrams in flight per client. Together, they fit into the smallest default receive buffer, so a slow
/// machine loses nothing.
const WINDOW: u64 = 16;

struct Talk {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    threads: Vec<thread::JoinHandle<u64>>,
}

impl Talk {
    fn start(server: SocketAddr) -> Self {
        Self::with(server, peer())
    }

    fn with(server: SocketAddr, far: UdpSocket) -> Self {
        let socket = peer();
        socket.connect(server).unwrap();
        socket.send(&allocate()).unwrap();
        heard(&socket);
        socket.send(&bind(far.local_addr().unwrap())).unwrap();
        heard(&socket);
        let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let echo = thread::spawn(move || {
            let mut buffer = [0; 64];
            let mut count = 0;
            while let Ok((len, from)) = far.recv_from(&mut buffer) {
                far.send_to(&buffer[..len], from).unwrap();
                if len == 0 {
                    break;
                }
                count += 1;
            }
            count
        });
        let receiving = socket.try_clone().unwrap();
        let heard_of = Arc::<AtomicU64>::default();
        let hears = Arc::clone(&heard_of);
        let receiver = thread::spawn(move || {
            let mut expected = 0_u64;
            loop {
                hears.store(expected, Ordering::Relaxed);
                let message = Message(heard(&receiving));
                let payload = message.payload();
                if payload.is_empty() {
                    return expected;
                }
                let number = u64::from_be_bytes(payload.try_into().unwrap());
                assert_eq!(number, expected, "lost, or out of order");
                expected += 1;
            }
        });
        let sender = thread::spawn({
            let (stop, sent) = (Arc::clone(&stop), Arc::clone(&sent));
            move || {
                let mut number = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    if number < heard_of.load(Ordering::Relaxed) + WINDOW {
                        socket.send(&channel_data(&number.to_be_bytes())).unwrap();
                        number += 1;
                        sent.store(number, Ordering::Relaxed);
                    }
                    thread::sleep(Duration::from_micros(200));
                }
                socket.send(&channel_data(&[])).unwrap();
                number
            }
        });
        Self { stop, sent, threads: vec![sender, echo, receiver] }
    }

    fn goes_on(&self) {
        let wanted = self.sent.load(Ordering::Relaxed) + 20;
        eventually("the conversation continues", || self.sent.load(Ordering::Relaxed) >= wanted);
    }

    fn lost_nothing(self) {
        self.stop.store(true, Ordering::Relaxed);
        let counts: Vec<u64> = self.threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(counts.iter().all(|count| *count == counts[0]), "sent, sent back, and received: {counts:?}");
    }
}

fn workers(count: usize) -> Config {
    configured(|config| config.workers = count)
}

fn start(config: &Config) -> World {
    World { relay: Relay::start(config, Arc::new(()), Arc::new(())).unwrap() }
}

#[test]
fn repeated_upgrades_lose_and_reorder_no_udp_datagrams() {
    for count in [1, 3] {
        let config = workers(count);
        let mut world = start(&config);
        let talks: Vec<Talk> = (0..24).map(|_| Talk::start(world.udp())).collect();
        for _ in 0..3 {
            talks.iter().for_each(Talk::goes_on);
            let next = upgraded(&world, &config).unwrap();
            assert_eq!(world.relay.left(), (0, 0), "immediately");
            drop(std::mem::replace(&mut world, next));
        }
        talks.iter().for_each(Talk::goes_on);
        let allocations: u64 = world.relay.snapshots().iter().map(|snapshot| snapshot.allocations).sum();
        assert_eq!(allocations, 24);
        let drops: u64 = world.relay.snapshots().iter().map(|snapshot| snapshot.rx.kernel_drops).sum();
        assert_eq!(drops, 0, "a socket overflowed because it was not read in time");
        talks.into_iter().for_each(Talk::lost_nothing);
    }
}

#[test]
fn clients_behind_a_nat_reach_each_other_after_an_upgrade() {
    let config = configured(behind_nat);
    let old = start(&config);
    let [alice, bob] = [(); 2].map(|()| Caller::new(&old));
    alice.call(&bob);
    alice.speaks_to(&bob);
    let new = upgraded(&old, &config).unwrap();
    ended(old);
    alice.speaks_to(&bob);
    bob.speaks_to(&alice);
    alice.call(&bob);
    drop(new);
}

#[test]
fn allocations_keep_their_expiry_across_an_upgrade() {
    let config = workers(2);
    let old = start(&config);
    let client = peer();
    client.connect(old.udp()).unwrap();
    client.send(&allocate()).unwrap();
    let relayed = Message(heard(&client)).attribute(0x0016);
    let new = upgraded(&old, &config).unwrap();
    ended(old);
    // A retransmission gets the same response.
    client.send(&allocate()).unwrap();
    assert_eq!(Message(heard(&client)).attribute(0x0016), relayed);
    client.send(&refresh(2)).unwrap();
    assert_eq!(Message(heard(&client)).kind(), 0x0104);
    client.send(&crate::support::stun(crate::support::REFRESH, 3, &[(0x000D, &[0; 4])])).unwrap();
    assert_eq!(Message(heard(&client)).kind(), 0x0104);
    new.wait_for_counter("allocations_closed", "deleted", 1);
    eventually("the port is free", || UdpSocket::bind(plain(&relayed)).is_ok());
}

#[test]
fn upgrade_keeps_stream_clients_in_the_old_process() {
    let tls = context(&[identity(&["turn.example.org"])]);
    let config = configured(|config| {
        config.workers = 2;
        config.streams.tls = Some(Arc::clone(&tls));
    });
    let old = start(&config);
    let (tcp, tls_address) = (old.tcp(), old.tls());
    let client_config = tls_config(&[]);
    let far = peer();
    let mut plain_client = Client::new(connect(tcp));
    let relayed = plain_client.allocated(&far);
    let stream = tls_connect(tls_address, "turn.example.org", &client_config).unwrap();
    let mut secure_client = Client::new(stream);
    secure_client.allocated(&far);
    // This client has sent nothing, so its connection still waits in the kernel.
    let mut silent = Client::new(connect(tcp));

    let mut next = config;
    let other = context(&[identity(&["turn.example.org"])]);
    other.take_over(&tls.ticket_keys());
    next.streams.tls = Some(other);
    let new = upgraded(&old, &next).unwrap();
    silent.ask(&binding(1));
    let mut late = Client::new(connect(tcp));
    late.allocated(&far);
    let accepted = || new.relay.snapshots().iter().map(|snapshot| snapshot.streams.accepted).sum::<u64>();
    eventually("the new relay has accepted both clients", || accepted() == 2);
    plain_client.send(&padded(channel_data(b"still here")));
    assert_eq!(heard(&far), b"still here");
    far.send_to(b"and back", relayed).unwrap();
    assert_eq!(plain_client.receive().unwrap().payload(), b"and back");
    secure_client.send(&padded(channel_data(b"me too")));
    assert_eq!(heard(&far), b"me too");
    let again = tls_connect(tls_address, "turn.example.org", &client_config).unwrap();
    assert_eq!(again.conn.handshake_kind(), Some(HandshakeKind::Resumed));
    eventually("both remaining allocations are counted", || old.relay.left().0 == 2);
    drop((plain_client, secure_client));
    ended(old);
    late.ask(&refresh(7));
}

#[test]
fn udp_clients_keep_their_shared_ports() {
    let config = configured(|config| (config.workers, config.shared_ports) = (2, 1));
    let mut world = start(&config);
    let far = peer_at(100);
    let mut stream = Client::new(connect(world.tcp()));
    let relayed = stream.allocated(&far);
    let talks: Vec<Talk> = (1..=12).map(|number| Talk::with(world.udp(), peer_at(number))).collect();
    let mut left = Vec::new();
    for round in 0..2 {
        talks.iter().for_each(Talk::goes_on);
        let next = upgraded(&world, &config).unwrap();
        let (allocations, _) = world.relay.left();
        assert_eq!(allocations, u64::from(round == 0), "the TCP allocation");
        left.push(std::mem::replace(&mut world, next));
        stream.send(&padded(channel_data(b"still here")));
        assert_eq!(heard(&far), b"still here");
        far.send_to(b"and back", relayed).unwrap();
        assert_eq!(stream.receive().unwrap().payload(), b"and back");
    }
    talks.iter().for_each(Talk::goes_on);
    // New clients also share a port, but not with the TCP client.
    let (late, its_peer) = (peer(), peer_at(99));
    late.connect(world.udp()).unwrap();
    late.send(&allocate()).unwrap();
    let shared = plain(&Message(heard(&late)).attribute(0x0016));
    late.send(&bind(its_peer.local_addr().unwrap())).unwrap();
    assert_eq!(Message(heard(&late)).kind(), 0x0109);
    its_peer.send_to(b"it is heard", shared).unwrap();
    assert_eq!(Message(heard(&late)).payload(), b"it is heard");
    assert_ne!(shared, relayed);
    talks.into_iter().for_each(Talk::lost_nothing);
    drop(stream);
    left.into_iter().for_each(ended);
}

#[test]
fn upgrade_keeps_dtls_clients_in_the_old_process() {
    for (shared, kind) in [(false, Kind::V12), (true, Kind::V13)] {
        let config = configured(|config| {
            config.dtls.context = Some(dtls::context(&[identity(&["dtls.example"])]));
            if shared {
                config.dtls.listen = config.listen.clone();
            }
        });
        let old = start(&config);
        let far = peer();
        let mut client = DtlsClient::connect(old.dtls(), kind);
        let relayed = client.allocated(&far);
        let talk = Talk::start(old.udp());
        // The first half of a handshake, whose second half will reach the new relay.
        let mut begun = DtlsClient::new(old.dtls(), kind);
        let hello = begun.says().remove(0);
        begun.socket.send(&hello).unwrap();
        eventually("the client has received its cookie", || old.dtls_stats().cookies >= 2);

        let mut chain = vec![upgraded(&old, &config).unwrap()];
        begun.finish().unwrap();
        begun.allocated(&far);
        // A second upgrade, now with clients in two processes.
        let last = upgraded(&chain[0], &config).unwrap();
        chain.push(last);
        let mut late = DtlsClient::connect(old.dtls(), kind);
        late.allocated(&far);
        for (number, client) in [&mut client, &mut begun, &mut late].into_iter().enumerate() {
            let said = format!("of process {number}");
            client.send(&channel_data(said.as_bytes()));
            assert_eq!(heard(&far), said.as_bytes());
        }
        far.send_to(b"and back", relayed).unwrap();
        assert_eq!(client.receive().payload(), b"and back");
        for (number, process) in [&old, &chain[0], &chain[1]].into_iter().enumerate() {
            eventually("each process has one association", || process.dtls_stats().open == 1);
            assert_eq!(process.dtls_stats().half_open, 0, "process {number}");
        }
        // Clients whose association has ended start over with the newest relay.
        client.close();
        eventually("the first relay has no allocations left", || old.relay.left() == (0, 0));
        let again = client.socket.try_clone().unwrap();
        let mut again = DtlsClient::on(again, kind);
        again.finish().unwrap();
        eventually("the newest relay serves the client", || chain[1].dtls_stats().open == 2);
        drop(old);
        begun.send(&channel_data(b"of the second"));
        assert_eq!(heard(&far), b"of the second");
        talk.lost_nothing();
    }
}

#[test]
fn failed_upgrade_keeps_all_allocations_in_the_old_process() {
    let config = workers(2);
    let old = start(&config);
    let talks: Vec<Talk> = (0..6).map(|_| Talk::start(old.udp())).collect();
    let few = Config {
        limits: AllocationLimits { allocations: 3, ..AllocationLimits::default() },
        ..config.clone()
    };
    let why = upgraded(&old, &few).err().expect("too few allocations are allowed");
    assert!(why.contains("limits.allocations"), "{why}");
    let gone = Config { listen: vec!["127.0.0.3:0".parse().unwrap()], ..config.clone() };
    let why = upgraded(&old, &gone).err().expect("a missing listener");
    assert!(why.contains(&format!("udp {}", old.udp())), "{why}");
    let why = upgraded(&old, &workers(3)).err().expect("a different number of workers");
    assert!(why.contains("worker"), "{why}");
    talks.iter().for_each(Talk::goes_on);
    eventually("all allocations are counted", || old.relay.left().0 == 6);
    let new = upgraded(&old, &config).unwrap();
    ended(old);
    talks.into_iter().for_each(Talk::lost_nothing);
    drop(new);
}

#[test]
fn unresponsive_new_process_does_not_block_the_old_one() {
    let config = workers(2);
    let old = start(&config);
    let talks: Vec<Talk> = (0..4).map(|_| Talk::start(old.udp())).collect();
    // Ten megabytes would have to wait for a reader, but here the other ends are closed.
    let (_, descriptors, channels) = old.relay.offer().unwrap();
    drop(descriptors);
    old.relay.pause(false).unwrap();
    let error = old.relay.export(channels, SOON).expect_err("the channels are closed").to_string();
    assert!(!error.is_empty());
    old.relay.resume();
    talks.iter().for_each(Talk::goes_on);
    talks.into_iter().for_each(Talk::lost_nothing);
}

#[test]
fn offer_of_a_later_version_may_have_more_fields() {
    let old = start(&workers(1));
    let (offer, ..) = old.relay.offer().unwrap();
    let mut value = serde_json::to_value(&offer).unwrap();
    value["something"] = serde_json::json!({"new": 1});
    assert!(serde_json::from_value::<RelayOffer>(value.clone()).is_ok());
    value.as_object_mut().unwrap().remove("layout");
    assert!(serde_json::from_value::<RelayOffer>(value).is_err());
    let error = StartError::ListenerGone { protocol: "tls", address: old.tcp() };
    assert!(error.to_string().contains("tls 127.0.0.1:"), "{error}");
}
