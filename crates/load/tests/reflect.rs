//! The reflector returns datagrams unchanged, in order and to their sender.

use std::{
    collections::HashMap,
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use crate::common::{eventually, loopback};
use turnpike_load::{
    LoadError,
    reflect::{ReflectConfig, ReflectPath, Reflector},
};
use turnpike_net::Datapath;

fn start(listen: Vec<SocketAddr>, datapath: Datapath, workers: u16) -> Reflector {
    let (workers, datapath) = (Some(workers), ReflectPath::Step(datapath));
    Reflector::start(&ReflectConfig { listen, workers, datapath, ..ReflectConfig::default() }).unwrap()
}

fn client(to: SocketAddr) -> UdpSocket {
    let any: SocketAddr = if to.is_ipv4() { loopback(0) } else { "[::1]:0".parse().unwrap() };
    let socket = UdpSocket::bind(any).unwrap();
    socket.connect(to).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    socket
}

fn datapaths() -> [Datapath; 3] {
    [Datapath::Basic, Datapath::Mmsg, Datapath::best().0]
}

#[test]
fn datagrams_of_mixed_sizes_come_back_whole_and_in_order() {
    for datapath in datapaths() {
        let reflector = start(vec![loopback(0)], datapath, 1);
        let socket = client(reflector.listeners()[0]);
        let mut buffer = vec![0; 1 << 16];
        for round in 0..20_u32 {
            let sizes = [1_usize, 120, 120, 120, 1200, 1200, 7, 0, 1472, 9_000, 120];
            for (index, size) in sizes.into_iter().enumerate() {
                let fill = u8::try_from(round as usize * sizes.len() + index).unwrap();
                socket.send(&vec![fill; size]).unwrap();
            }
            for (index, size) in sizes.into_iter().enumerate() {
                let fill = u8::try_from(round as usize * sizes.len() + index).unwrap();
                let len = socket.recv(&mut buffer).unwrap();
                assert_eq!(len, size, "{datapath} round {round} datagram {index}");
                assert!(buffer[..len].iter().all(|byte| *byte == fill), "{datapath} datagram {index}");
            }
        }
        reflector.stop();
    }
}

#[test]
fn each_client_gets_its_own_datagrams_back() {
    let reflector = start(vec![loopback(0)], Datapath::best().0, 3);
    let sockets: Vec<_> = (0..64).map(|_| client(reflector.listeners()[0])).collect();
    let mut buffer = [0; 64];
    for round in 0..10_u32 {
        for (index, socket) in sockets.iter().enumerate() {
            socket.send(format!("client {index} round {round}").as_bytes()).unwrap();
        }
        for (index, socket) in sockets.iter().enumerate() {
            let len = socket.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..len], format!("client {index} round {round}").as_bytes());
        }
    }
    eventually("all datagrams are returned", || reflector.stats().sent >= 640);
    let stats = reflector.stats();
    assert_eq!((stats.received, stats.sent, stats.refused), (640, 640, 0));
}

#[test]
fn a_wildcard_listener_answers_from_the_requested_address() {
    let reflector = start(vec![([0, 0, 0, 0], 0).into()], Datapath::best().0, 1);
    let port = reflector.listeners()[0].port();
    let mut answers = HashMap::new();
    for last in 1..=3_u8 {
        let asked = SocketAddr::from(([127, 0, 0, last], port));
        let socket = UdpSocket::bind(loopback(0)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        socket.send_to(b"where?", asked).unwrap();
        let (_, from) = socket.recv_from(&mut [0; 16]).unwrap();
        answers.insert(asked, from);
    }
    assert!(answers.iter().all(|(asked, from)| asked == from), "{answers:?}");
}

#[test]
fn ipv6_is_reflected_too() {
    let six: SocketAddr = "[::1]:0".parse().unwrap();
    if UdpSocket::bind(six).is_err() {
        println!("SKIPPED: this machine has no IPv6");
        return;
    }
    let reflector = start(vec![six], Datapath::best().0, 1);
    let socket = client(reflector.listeners()[0]);
    socket.send(b"six").unwrap();
    let mut buffer = [0; 16];
    assert_eq!(socket.recv(&mut buffer).unwrap(), 3);
}

#[test]
fn a_port_in_use_is_named() {
    let taken = UdpSocket::bind(loopback(0)).unwrap();
    let address = taken.local_addr().unwrap();
    let config = ReflectConfig { listen: vec![address], workers: Some(1), ..ReflectConfig::default() };
    match Reflector::start(&config) {
        Err(LoadError::Listen(error)) => assert_eq!(error.place, format!("udp {address}")),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("bound a port in use"),
    }
}

/// If reflectors only set SO_REUSEPORT, two of them would share the traffic unnoticed.
#[test]
fn a_second_reflector_on_a_port_fails() {
    let first = start(vec![loopback(0)], Datapath::Basic, 2);
    let config =
        ReflectConfig { listen: first.listeners().to_vec(), workers: Some(1), ..ReflectConfig::default() };
    let error = Reflector::start(&config).err().unwrap().to_string();
    assert!(error.contains("another program or listener has this port"), "{error}");
}
