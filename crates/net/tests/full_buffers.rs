//! Datagrams dropped because of a full send buffer (EAGAIN) or receive buffer (SO_RXQ_OVFL).

use crate::prelude::*;

/// Datagrams to a neighbour that never answers ARP stay in the send buffer.
#[test]
fn drops_of_a_full_send_buffer_are_counted() {
    let setup = [
        "link set lo up",
        "link add name near type veth peer name far",
        "addr add 10.9.8.1/24 dev near",
        "link set near up",
        "link set far up",
    ];
    in_namespace(turnpike_testkit::this_test!(), &setup, || {
        for datapath in DATAPATHS {
            let options = UdpOptions { send_buffer: Some(16 << 10), ..UdpOptions::default() };
            let mut sender = Sender::new(datapath, "10.9.8.1".parse().unwrap(), &options);
            let route = sender.route("10.9.8.2:9".parse().unwrap());
            let mut pushed = 0;
            for _ in 0..8 {
                for _ in 0..200 {
                    sender.tx.push_bytes(&route, &[0; 500]);
                }
                pushed += 200;
                sender.flush();
            }
            let stats = *sender.tx.stats();
            assert!(stats.would_block > 0 && stats.datagrams > 0, "{datapath}: {stats:?}");
            assert_eq!(stats.datagrams + stats.would_block, pushed, "{datapath}: {stats:?}");
            assert_eq!(stats.step_downs, 0);
            if datapath != Datapath::Basic {
                // A batch ends with the first refusal.
                assert!(stats.calls <= 8 * 4, "{datapath}: {stats:?}");
            }
        }
    });
}

#[test]
fn kernel_drops_of_a_small_receive_buffer_are_counted() {
    for ip in [V4, common::V6] {
        let to = bind(ip, &UdpOptions { recv_buffer: Some(4 << 10), ..UdpOptions::default() });
        let mut sender = Sender::new(Datapath::Mmsg, ip, &UdpOptions::default());
        let route = sender.route(to.local_addr());
        let mut rx = Rx::new(Datapath::Mmsg);
        let mut sent = 0;
        let mut got = 0;
        for _ in 0..3 {
            for n in 0..100_u8 {
                sender.tx.push_bytes(&route, &[n; 400]);
            }
            sent += 100;
            sender.flush();
            // Receives the queued datagrams, and one more that reports the drops.
            got += drain(&mut rx, &to);
            sender.tx.push_bytes(&route, b"and now?");
            sent += 1;
            sender.flush();
            got += receive(&mut rx, &[&to], 1).len();
        }
        assert_eq!(sender.tx.stats().datagrams, sent);
        assert!(got < 200, "{got} of {sent} datagrams fit in 4 KiB");
        assert_eq!(rx.stats().kernel_drops, sent - got as u64);
        assert_eq!(rx.stats().datagrams, got as u64);
    }
}

fn drain(rx: &mut Rx, socket: &turnpike_net::UdpSocket) -> usize {
    let mut got = receive(rx, &[socket], 1).len();
    loop {
        let received = rx.recv(socket).unwrap();
        if received.count == 0 {
            rx.reset();
            return got;
        }
        got += rx.buffers(received).map(|b| b.count()).sum::<usize>();
    }
}
