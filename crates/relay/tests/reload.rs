//! Reloads change listeners and relay addresses while existing allocations continue.

use crate::prelude::*;
use turnpike_relay::{Relistened, WaitingListener};
use turnpike_testkit::free_port;

use crate::support::*;

const ANOTHER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3));

fn reload(world: &World, change: impl FnOnce(&mut Config)) -> Result<Relistened, StartError> {
    let config = configured(change);
    let mut layout = world.relay.layout();
    layout.follow(&config.listen, &config.dtls.listen, &config.streams);
    let absent: Arc<dyn CredentialStore> = Arc::new(());
    world.relay.reconfigure(&config, &layout, &absent)
}

fn asked(socket: &UdpSocket, server: SocketAddr, request: &[u8]) -> Message {
    socket.send_to(request, server).unwrap();
    Message(heard(socket))
}

fn is_success(answer: &Message) -> bool {
    answer.kind() & 0x0110 == 0x0100
}

fn allocates(server: SocketAddr) -> bool {
    is_success(&asked(&peer(), server, &allocate()))
}

struct Flow {
    client: UdpSocket,
    server: SocketAddr,
    peer: UdpSocket,
    relayed: SocketAddr,
}

impl Flow {
    fn new(server: SocketAddr) -> Self {
        let (client, peer) = (peer(), peer());
        let relayed = plain(&asked(&client, server, &allocate()).attribute(0x0016));
        assert!(is_success(&asked(&client, server, &bind(peer.local_addr().unwrap()))));
        Self { client, server, peer, relayed }
    }

    fn goes_on(&self) {
        self.client.send_to(&channel_data(b"up"), self.server).unwrap();
        assert_eq!(heard(&self.peer), b"up");
        self.peer.send_to(b"down", self.relayed).unwrap();
        assert_eq!(heard(&self.client)[4..], *b"down");
        assert!(is_success(&asked(&self.client, self.server, &refresh(5))));
    }

    fn ends(self) {
        let delete = stun(REFRESH, 6, &[(0x000D, &0_u32.to_be_bytes())]);
        assert!(is_success(&asked(&self.client, self.server, &delete)));
    }
}

#[test]
fn removed_udp_listener_serves_only_existing_clients() {
    for workers in [1, 2] {
        let world = start_with(|config| config.workers = workers);
        let old = world.udp();
        let flow = Flow::new(old);
        let elsewhere = |config: &mut Config| config.listen = vec![SocketAddr::new(ANOTHER, 0)];
        let changed = reload(&world, elsewhere).unwrap();
        let new = world.udp();
        assert_eq!((changed.opened, changed.closed), (vec![("udp", new)], vec![("udp", old)]));
        assert_eq!((new.ip(), world.relay.listeners().udp.len()), (ANOTHER, 1));
        eventually("the new listener serves clients", || allocates(new));
        eventually("the old listener refuses new clients", || !allocates(old));
        assert!(is_success(&asked(&peer(), old, &binding(1))), "the old listener no longer replies");
        flow.goes_on();

        // The listener reopens with the same identity.
        let changed = reload(&world, |config| config.listen.push(SocketAddr::new(ANOTHER, 0))).unwrap();
        assert_eq!((changed.opened, changed.closed), (vec![("udp", old)], vec![]));
        eventually("the listener accepts clients again", || allocates(old));
        flow.goes_on();

        // Start a new relay, because new clients keep the reopened listener open.
        let world = start_with(|config| config.workers = workers);
        let old = world.udp();
        let flow = Flow::new(old);
        reload(&world, elsewhere).unwrap();
        flow.goes_on();
        assert!(UdpSocket::bind(old).is_err());
        flow.ends();
        eventually("the listener is closed on all workers", || UdpSocket::bind(old).ok());
        eventually("the new listener serves clients", || allocates(world.udp()));
    }
}

#[test]
fn removed_stream_listener_closes_immediately_and_keeps_connections() {
    let world = start_workers(2);
    let (tcp, peer) = (world.tcp(), peer());
    let mut client = world.client();
    client.allocated(&peer);
    let changed = reload(&world, |config| config.streams.listen.clear()).unwrap();
    assert!(changed.closed.contains(&("tcp", tcp)), "{changed:?}");
    eventually("the listener is closed", || TcpStream::connect(tcp).err());
    client.send(&padded(channel_data(b"still here")));
    assert_eq!(heard(&peer), b"still here");
    client.ask(&refresh(3));

    let changed = reload(&world, |_| {}).unwrap();
    let back = world.tcp();
    assert!(changed.opened.contains(&("tcp", back)), "{changed:?}");
    eventually("the listener is back", || TcpStream::connect(back).ok());
    world.client().ask(&binding(1));
}

#[test]
fn failed_bind_changes_nothing() {
    let world = start(|_| {});
    let before = world.relay.listeners();
    let (busy, also_busy) = (peer(), std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let taken = [busy.local_addr().unwrap(), also_busy.local_addr().unwrap()];
    let by_udp = reload(&world, |config| config.listen = vec![SocketAddr::new(ANOTHER, 0), taken[0]]);
    assert!(by_udp.unwrap_err().to_string().contains(&format!("udp {}", taken[0])));
    let by_tcp = reload(&world, |config| {
        config.listen.clear();
        config.streams.listen.push(taken[1]);
    });
    assert!(by_tcp.unwrap_err().to_string().contains(&format!("tcp {}", taken[1])));
    let elsewhere = "192.0.2.1".parse().unwrap();
    let relay = reload(&world, |config| {
        config.listen.clear();
        config.relay = vec![RelayAddress { bind: elsewhere, external: None }];
    });
    assert!(matches!(relay, Err(StartError::RelayAddress { address, .. }) if address == elsewhere));
    assert_eq!(world.relay.listeners(), before);
    assert!(allocates(before.udp[0]));
    world.client().ask(&binding(1));
}

#[test]
fn absent_address_is_unused_until_it_appears() {
    let world = start_with(|config| config.workers = 2);
    let at = SocketAddr::new(ANOTHER, free_port(ANOTHER));
    let named = |absent: &[IpAddr]| {
        let absent = absent.to_vec();
        move |config: &mut Config| {
            config.listen.push(at);
            config.relay = vec![RelayAddress { bind: ANOTHER, external: None }];
            config.absent = absent;
        }
    };
    let code = || {
        let answer = asked(&peer(), world.udp(), &allocate());
        answer.error()
    };
    // Binding the address would succeed here, as it would with ip_nonlocal_bind.
    let changed = reload(&world, named(&[ANOTHER])).unwrap();
    assert!(!changed.opened.iter().any(|(_, opened)| *opened == at), "{changed:?}");
    assert_eq!(world.relay.waiting(), [WaitingListener { protocol: "udp", address: at, error: None }]);
    eventually("508 is returned", || code() == Some(508));
    // Another program has the port when the address appears. All other changes take effect.
    let other = UdpSocket::bind(at).unwrap();
    reload(&world, named(&[])).unwrap();
    let waiting = world.relay.waiting();
    assert!(waiting[0].error.as_ref().is_some_and(|error| error.contains("another program")), "{waiting:?}");
    eventually("an allocation is granted", || code().is_none());
    drop(other);
    let changed = reload(&world, named(&[])).unwrap();
    assert_eq!((changed.opened, world.relay.waiting()), (vec![("udp", at)], vec![]));
    eventually("the listener serves clients", || allocates(at));
}

#[test]
fn lost_address_ends_only_its_own_allocations() {
    for shared_ports in [0, 1] {
        let world = start_with(|config| {
            config.shared_ports = shared_ports;
            config.server.tcp_relay = true;
        });
        let flow = Flow::new(world.udp());
        let mut by_tcp = world.client();
        let allocate = stun(ALLOCATE, 1, &[(0x0019, &[6, 0, 0, 0])]);
        assert!(is_success(&by_tcp.ask(&allocate)));
        world.relay.end_at(&[ANOTHER]);
        flow.goes_on();
        world.relay.end_at(&[flow.relayed.ip()]);
        world.wait_for_counter("allocations_closed", "address_gone", 2);
        assert!(!is_success(&asked(&flow.client, flow.server, &refresh(5))));
        eventually("no allocation is left", || world.allocations() == 0);
    }
}

/// Two clients use each other's relayed addresses as peers, as in WebRTC with NATs on both sides.
#[test]
fn reload_changes_relay_addresses_of_new_allocations_only() {
    let world = start(|_| {});
    let flow = Flow::new(world.udp());
    let relayed = |flow: &Flow| (flow.relayed.ip(), (30_000..=30_099).contains(&flow.relayed.port()));
    assert_eq!(relayed(&flow), (Ipv4Addr::LOCALHOST.into(), false));
    let other = peer();
    let at_other = plain(&asked(&other, world.udp(), &allocate()).attribute(0x0016));
    assert!(is_success(&asked(&other, world.udp(), &bind(flow.relayed))));
    assert!(is_success(&asked(&flow.client, flow.server, &permit(at_other))));

    let elsewhere = |config: &mut Config| {
        config.ports = 30_000..=30_099;
        config.relay = vec![RelayAddress { bind: ANOTHER, external: None }];
    };
    reload(&world, elsewhere).unwrap();
    assert_eq!(relayed(&Flow::new(world.udp())), (ANOTHER, true));
    flow.goes_on();
    other.send_to(&channel_data(b"relay to relay"), world.udp()).unwrap();
    let indication = Message(heard(&flow.client));
    assert_eq!((indication.kind(), indication.attribute(0x0013)), (DATA, b"relay to relay".to_vec()));
}

#[test]
fn first_certificate_enables_tls_and_dtls() {
    for workers in [1, 2] {
        let world = start_with(|config| config.workers = workers);
        let flow = Flow::new(world.udp());
        let secure = |config: &mut Config| {
            let identity = identity(&["turn.example.org"]);
            config.streams.tls = Some(context(std::slice::from_ref(&identity)));
            config.dtls.context = Some(dtls::context(&[identity]));
            config.dtls.listen = config.listen.clone();
        };
        let changed = reload(&world, secure).unwrap();
        let (tls, dtls) = (world.tls(), world.dtls());
        assert_eq!(changed.opened, [("dtls", dtls), ("tls", tls)]);
        assert_eq!(dtls, world.udp());
        eventually("TLS is served", || {
            let stream = tls_connect(tls, "turn.example.org", &tls_config(&[])).ok()?;
            Client::new(stream).ask(&binding(1));
            Some(())
        });
        // If the worker has not handled the reload yet, the client has to retransmit.
        let mut client = DtlsClient::connect(dtls, Kind::V12);
        let peer = peer();
        client.allocated(&peer);
        flow.goes_on();

        // Existing clients continue without the certificate.
        let changed = reload(&world, |_| {}).unwrap();
        assert_eq!((changed.opened.len(), changed.closed), (0, vec![("dtls", dtls), ("tls", tls)]));
        client.send(&channel_data(b"still here"));
        assert_eq!(heard(&peer), b"still here");
        client.ask(&refresh(2));
        flow.goes_on();
    }
}
