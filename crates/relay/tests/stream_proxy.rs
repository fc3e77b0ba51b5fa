//! PROXY headers are accepted only from configured proxies.

use crate::prelude::*;
use crate::support::*;

fn behind_a_proxy() -> World {
    start(|config| {
        config.proxies = vec!["127.0.0.0/8".parse().unwrap()];
        config.tls = Some(context(&[identity(&["a.example"])]));
        config.limits.idle_connections_per_address = 2;
        config.limits.first_message = Duration::from_millis(1500);
    })
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// XOR-MAPPED-ADDRESS of a Binding response: the client's address as seen by the server.
fn mapped<S: std::io::Read + std::io::Write>(client: &mut Client<S>) -> Vec<u8> {
    client.ask(&binding(1)).attribute(0x0020)
}

#[test]
fn header_of_a_trusted_proxy_names_the_tcp_client() {
    let world = behind_a_proxy();
    let source = address("192.0.2.7:4000");
    for (version, port) in [(ProxyVersion::V1, 1), (ProxyVersion::V2, 2)] {
        let header = encode(version, source, SocketAddr::new("198.51.100.1".parse().unwrap(), port));
        let mut client = world.client();
        client.send(&header);
        assert_eq!(mapped(&mut client), xored(source));
        // Header and first message in one segment, split at every byte.
        let mut client = world.client();
        client.send(
            &[&encode(version, address("192.0.2.8:1"), address("198.51.100.1:9"))[..], &binding(1)].concat(),
        );
        assert_eq!(client.receive().unwrap().attribute(0x0020), xored(address("192.0.2.8:1")));
        drop(client);
        let mut client = world.client();
        for byte in encode(version, address("192.0.2.9:1"), address("198.51.100.1:9")) {
            client.send(&[byte]);
        }
        assert_eq!(mapped(&mut client), xored(address("192.0.2.9:1")));
        drop(client);
    }
}

#[test]
fn header_may_precede_tls() {
    let world = behind_a_proxy();
    let source = address("192.0.2.7:4000");
    let config = tls_config(&[]);
    for (local, version) in [("198.51.100.1:1", ProxyVersion::V1), ("198.51.100.1:2", ProxyVersion::V2)] {
        let header = encode(version, source, address(local));
        let stream = tls_connect_behind(world.tls(), &header, "a.example", &config).unwrap();
        assert_eq!(mapped(&mut Client::new(stream)), xored(source));
    }
}

#[test]
fn local_header_makes_the_proxy_itself_the_client() {
    let world = behind_a_proxy();
    let mut client = world.client();
    // LOCAL command of version 2.
    client.send(b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0");
    let own = client.stream.local_addr().unwrap();
    assert_eq!(mapped(&mut client), xored(own));
}

#[test]
fn trusted_proxy_without_a_complete_header_is_disconnected() {
    let world = behind_a_proxy();
    for (count, bytes) in (1..).zip([&binding(1)[..], b"GET / HTTP/1.1\r\n", b"PROXY TCP4 nonsense\r\n"]) {
        let mut client = world.client();
        client.send(bytes);
        client.ends();
        world.wait_for_closed(CloseReason::ProxyHeader, count);
    }
    let mut client = world.client();
    client.send(b"PROXY TCP4 ");
    client.ends();
    world.wait_for_closed(CloseReason::ProxyHeader, 4);
}

#[test]
fn header_from_an_untrusted_address_has_its_own_counter() {
    let world = start(|config| config.proxies = vec!["10.0.0.0/8".parse().unwrap()]);
    for version in [ProxyVersion::V1, ProxyVersion::V2] {
        let mut client = world.client();
        client.send(&encode(version, address("192.0.2.7:4000"), address("198.51.100.1:1")));
        client.ends();
    }
    // If headers were not recognised, the text would look like ChannelData of 20 kB, and the signature like
    // STUN with an invalid length.
    world.wait_for_closed(CloseReason::UntrustedProxy, 2);
}

#[test]
fn refused_clients_are_closed_even_behind_a_proxy() {
    let denying =
        |prefix: &str| ClientRules { deny: vec![prefix.parse().unwrap()], ..ClientRules::default() };
    let world = start(|config| config.clients = denying("127.0.0.0/8"));
    let mut client = world.client();
    client.send(&binding(1));
    client.ends();
    world.wait_for_closed(CloseReason::ClientRefused, 1);
    let world = start(|config| {
        config.proxies = vec!["127.0.0.0/8".parse().unwrap()];
        config.clients = denying("192.0.2.7");
    });
    let from = |source: &str| {
        let mut client = world.client();
        client.send(&encode(ProxyVersion::V2, address(source), address("198.51.100.1:1")));
        client
    };
    from("192.0.2.7:4000").ends();
    world.wait_for_closed(CloseReason::ClientRefused, 1);
    assert_eq!(mapped(&mut from("192.0.2.8:4000")), xored(address("192.0.2.8:4000")));
}

#[test]
fn limits_apply_to_the_clients_of_a_proxy() {
    let world = behind_a_proxy();
    let from = |world: &World, source: &str| {
        let mut client = world.client();
        client.send(&encode(ProxyVersion::V2, address(source), address("198.51.100.1:1")));
        client
    };
    let mut open: Vec<_> = (1..=2).map(|port| from(&world, &format!("192.0.2.7:{port}"))).collect();
    open.iter_mut().for_each(|client| drop(client.ask(&binding(1))));
    // A third client with the same address is served once the oldest is no longer protected and can be
    // evicted.
    let mut ports = 3..;
    eventually("a third client is served", || {
        let mut third = from(&world, &format!("192.0.2.7:{}", ports.next()?));
        third.send(&binding(1));
        third.receive().map(|_| ())
    });
    open.remove(0).ends();
    from(&world, "192.0.2.8:1").ask(&binding(1));
    // A second connection with the same 5-tuple is fake or stale; the existing one stays.
    open[0].ask(&allocate());
    let mut second = from(&world, "192.0.2.7:2");
    second.send(&binding(1));
    second.ends();
    world.wait_for_closed(CloseReason::Duplicate, 1);
    open[0].ask(&refresh(1));
}
