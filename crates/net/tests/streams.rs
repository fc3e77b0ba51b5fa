//! TCP sockets: inherited options, deferred accept, connecting, writing, edge-triggered events, resets.

use crate::prelude::*;
use std::io::{self, IoSlice};

use turnpike_net::{PassedSockets, SocketProtocol, TcpTimers};

fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

fn pair(options: &ListenOptions) -> (TcpStream, TcpSocket) {
    let listener = TcpListener::bind(loopback(), options).unwrap();
    let client = TcpStream::connect(listener.local_addr()).unwrap();
    let (server, peer) = eventually("a connection", || listener.accept().unwrap());
    assert_eq!(peer, client.local_addr().unwrap());
    assert_eq!(server.peer_addr().unwrap(), peer);
    assert_eq!(server.local_addr().unwrap(), listener.local_addr());
    (client, server)
}

fn would_block<T: std::fmt::Debug>(result: &io::Result<T>) -> bool {
    matches!(result, Err(error) if error.kind() == ErrorKind::WouldBlock)
}

#[test]
fn accepted_sockets_inherit_nodelay_and_keepalive() {
    for on in [false, true] {
        let (_client, server) =
            pair(&ListenOptions { nodelay: on, keepalive: on, ..ListenOptions::default() });
        let server = socket2::SockRef::from(&server);
        assert_eq!(server.tcp_nodelay().unwrap(), on);
        assert_eq!(server.keepalive().unwrap(), on);
    }
}

#[test]
fn accepted_and_connected_sockets_have_the_configured_timers() {
    let timers = TcpTimers {
        keepalive_idle: Some(Duration::from_secs(60)),
        keepalive_interval: Some(Duration::from_secs(10)),
        keepalive_count: Some(5),
        user_timeout: Some(Duration::from_secs(30)),
    };
    let listener = TcpListener::bind(loopback(), &ListenOptions::default()).unwrap();
    let accepted = |timers: &TcpTimers| {
        listener.set_inherited(&ListenOptions { timers: *timers, ..ListenOptions::default() }).unwrap();
        let connected = TcpSocket::connect(listener.local_addr(), &ConnectOptions::default()).unwrap();
        connected.set_timers(timers).unwrap();
        let (accepted, _) = eventually("a connection", || listener.accept().unwrap());
        [accepted, connected]
    };
    let timers_of = |socket: &TcpSocket| {
        let socket = socket2::SockRef::from(socket);
        TcpTimers {
            keepalive_idle: socket.tcp_keepalive_time().ok(),
            keepalive_interval: socket.tcp_keepalive_interval().ok(),
            keepalive_count: socket.tcp_keepalive_retries().ok(),
            user_timeout: Some(socket.tcp_user_timeout().unwrap().unwrap_or_default()),
        }
    };
    assert_eq!(accepted(&timers).map(|socket| timers_of(&socket)), [timers; 2]);
    // After a reload, a forwarding rule without timers may use the listener.
    let [accepted, _] = accepted(&TcpTimers::default());
    let defaults = TcpTimers {
        keepalive_idle: Some(Duration::from_secs(7200)),
        keepalive_interval: Some(Duration::from_secs(75)),
        keepalive_count: Some(9),
        user_timeout: Some(Duration::ZERO),
    };
    assert_eq!(timers_of(&accepted), defaults);
}

#[test]
fn accept_without_a_connection_is_not_an_error() {
    let listener = TcpListener::bind(loopback(), &ListenOptions::default()).unwrap();
    assert!(listener.accept().unwrap().is_none());
}

#[test]
fn deferred_accept_waits_for_data_or_its_timeout() {
    let options = ListenOptions { defer_accept: Some(1), ..ListenOptions::default() };
    let listener = TcpListener::bind(loopback(), &options).unwrap();
    let mut client = TcpStream::connect(listener.local_addr()).unwrap();
    assert!(listener.accept().unwrap().is_none());
    client.write_all(b"abc").unwrap();
    let (server, _) = eventually("a connection", || listener.accept().unwrap());
    assert_eq!(server.read(&mut [0; 8]).unwrap(), 3, "accepted with its first bytes");
    let silent = TcpStream::connect(listener.local_addr()).unwrap();
    let (_, peer) = eventually("a connection", || listener.accept().unwrap());
    assert_eq!(peer, silent.local_addr().unwrap());
}

#[test]
fn write_with_more_is_held_until_the_next_one() {
    // The kernel holds the segment back for only 200 ms, which a busy machine may miss.
    eventually("the segment is held back", || {
        let (mut client, server) = pair(&ListenOptions { nodelay: true, ..ListenOptions::default() });
        client.set_nonblocking(true).unwrap();
        assert_eq!(server.write_vectored(&[IoSlice::new(b"ab"), IoSlice::new(b"c")], true).unwrap(), 3);
        let held = would_block(&client.peek(&mut [0; 8]));
        assert_eq!(server.write_vectored(&[IoSlice::new(b"d")], false).unwrap(), 1);
        let mut buffer = [0; 4];
        client.set_nonblocking(false).unwrap();
        client.read_exact(&mut buffer).unwrap();
        assert_eq!(&buffer, b"abcd");
        held
    });
}

#[test]
fn probe_detects_a_listener_with_reuse_port() {
    let shared = ListenOptions { reuse_port: true, ..ListenOptions::default() };
    let listener = TcpListener::bind(loopback(), &shared).unwrap();
    assert!(TcpListener::bind(listener.local_addr(), &shared).is_ok());
    let error =
        PassedSockets::default().probe(SocketProtocol::Tcp, listener.local_addr(), &shared).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AddrInUse);
    assert_ne!(PassedSockets::default().probe(SocketProtocol::Tcp, loopback(), &shared).unwrap().port(), 0);
}

#[test]
fn connect_reports_its_result_as_an_event() {
    let listener = TcpListener::bind(loopback(), &ListenOptions::default()).unwrap();
    let absent = turnpike_testkit::free_address();
    let mut poller = Poller::new().unwrap();
    for (address, expected) in [(listener.local_addr(), None), (absent, Some(ErrorKind::ConnectionRefused))] {
        let source = Some(([127, 0, 0, 5], 0).into());
        let socket =
            TcpSocket::connect(address, &ConnectOptions { source, ..ConnectOptions::default() }).unwrap();
        poller.add_with(&socket, 7, Interest::Edge).unwrap();
        let event = eventually("an event for the connect", || {
            poller.wait(Some(Duration::from_millis(100))).unwrap().first().copied()
        });
        assert_eq!((event.token, event.error), (7, expected.is_some()));
        assert_eq!(socket.take_error().err().map(|error| error.kind()), expected);
        if expected.is_none() {
            assert_eq!(socket.local_addr().unwrap().ip().to_string(), "127.0.0.5");
        }
    }
}

#[test]
fn source_of_the_other_family_is_refused() {
    let listener = TcpListener::bind(loopback(), &ListenOptions::default()).unwrap();
    let options = ConnectOptions { source: Some("[::1]:0".parse().unwrap()), ..ConnectOptions::default() };
    let error = TcpSocket::connect(listener.local_addr(), &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AddrNotAvailable);
    assert!(error.to_string().contains("families"), "{error}");
}

#[test]
fn vectored_write_beyond_the_kernel_limit_is_short() {
    let (mut client, server) = pair(&ListenOptions::default());
    let bytes: Vec<u8> = (0..1100_u32).map(|at| (at % 251) as u8).collect();
    let pieces: Vec<IoSlice<'_>> = bytes.chunks(1).map(IoSlice::new).collect();
    assert_eq!(server.write_vectored(&pieces, false).unwrap(), 1024);
    assert_eq!(server.write_vectored(&pieces[1024..], false).unwrap(), 76);
    assert_eq!(server.write_vectored(&[], false).unwrap(), 0);
    let mut heard = vec![0; bytes.len()];
    client.read_exact(&mut heard).unwrap();
    assert_eq!(heard, bytes);
    // The error is returned, not raised as SIGPIPE.
    drop(client);
    eventually("an error from the write", || server.write_vectored(&pieces[..1], false).err());
}

#[test]
fn edge_events_report_data_urgent_bytes_and_the_end() {
    let (mut client, server) = pair(&ListenOptions::default());
    let mut poller = Poller::new().unwrap();
    poller.add_with(&server, 1, Interest::EdgeRead).unwrap();
    let mut next =
        || eventually("an event", || poller.wait(Some(Duration::from_millis(100))).unwrap().first().copied());
    client.write_all(b"abc").unwrap();
    let event = next();
    assert!(event.readable && !event.closed && !event.priority && !event.writable, "{event:?}");
    assert_eq!(server.read(&mut [0; 8]).unwrap(), 3);
    socket2::SockRef::from(&client).send_out_of_band(b"!").unwrap();
    let event = next();
    assert!(event.priority, "{event:?}");
    socket2::SockRef::from(&server).set_out_of_band_inline(true).unwrap();
    let mut buffer = [0; 8];
    assert_eq!(server.read(&mut buffer).unwrap(), 1);
    assert_eq!(buffer[0], b'!');
    drop(client);
    let event = eventually("a closed event", || Some(next()).filter(|event| event.closed));
    assert!(event.readable, "{event:?}");
    assert_eq!(server.read(&mut buffer).unwrap(), 0);
}

#[test]
fn edge_end_ignores_data_until_reading_is_watched_again() {
    let (mut client, server) = pair(&ListenOptions::default());
    let mut poller = Poller::new().unwrap();
    poller.add_with(&server, 7, Interest::Edge).unwrap();
    poller.set(&server, 7, Interest::EdgeEnd).unwrap();
    client.write_all(b"abc").unwrap();
    eventually("three bytes", || server.peek(&mut [0; 8]).is_ok_and(|seen| seen == 3));
    assert!(poller.wait(Some(Duration::ZERO)).unwrap().is_empty());
    poller.set(&server, 7, Interest::Edge).unwrap();
    let event = poller.wait(Some(Duration::ZERO)).unwrap()[0];
    assert!(event.readable && event.writable && !event.closed, "{event:?}");
    poller.set(&server, 7, Interest::EdgeEnd).unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let event = eventually("the end", || poller.wait(Some(Duration::ZERO)).unwrap().first().copied());
    assert!(event.closed, "{event:?}");
}

#[test]
fn written_counts_acknowledged_and_queued_bytes() {
    let (mut client, server) = pair(&ListenOptions::default());
    let before = server.written().unwrap();
    assert_eq!(server.write(b"12345").unwrap(), 5);
    assert_eq!(server.written().unwrap() - before, 5);
    client.read_exact(&mut [0; 5]).unwrap();
    // Fills both buffers.
    let mut sent = 5;
    while let Ok(more) = server.write(&[7; 1 << 16]) {
        sent += more as u64;
    }
    eventually("all written bytes are counted", || server.written().unwrap() - before == sent);
}

#[test]
fn full_socket_reports_when_it_is_writable_again() {
    let (mut client, server) = pair(&ListenOptions::default());
    let mut poller = Poller::new().unwrap();
    poller.add_with(&server, 1, Interest::EdgeRead).unwrap();
    let chunk = vec![0; 1 << 16];
    let mut sent = 0;
    while let Ok(n) = server.write(&chunk) {
        sent += n;
    }
    assert!(would_block(&server.write(&chunk)));
    poller.set(&server, 1, Interest::Edge).unwrap();
    assert!(poller.wait(Some(Duration::ZERO)).unwrap().iter().all(|event| !event.writable));
    client.read_exact(&mut vec![0; sent]).unwrap();
    eventually("a writable event", || {
        poller.wait(Some(Duration::from_millis(100))).unwrap().first().filter(|event| event.writable).copied()
    });
    assert!(server.write(&chunk).unwrap() > 0);
}

#[test]
fn reset_arrives_as_a_connection_reset() {
    let (mut client, server) = pair(&ListenOptions::default());
    server.reset();
    assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[test]
fn half_closed_socket_still_reads() {
    let (mut client, server) = pair(&ListenOptions::default());
    server.shutdown_write().unwrap();
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    client.write_all(b"x").unwrap();
    eventually("the client's byte", || server.read(&mut [0]).ok());
}
