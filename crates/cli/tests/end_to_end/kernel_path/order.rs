//! Bulk flows keep their super-packets and low-rate flows use the kernel; no flow is reordered when it alternates.

use super::{
    CLIENT, PEER, SERVER, Server, by_each,
    client::{Client, bound, received},
    on_links, reason_of_bulk,
};
use crate::prelude::*;

fn load(arguments: &str) -> Load {
    Load::as_user(SocketAddr::new(SERVER[0], 3478), "any:body").with(arguments)
}

#[test]
fn bursts_use_user_space_and_lone_datagrams_the_kernel() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let server = links.serve(&["--datapath", datapath]);
        let reflect = Reflect::start(PEER[0], &[]);
        let run = load("--clients 50 --rate 2000 --duration 2").to(reflect.address).run();
        let result = run.result();
        assert_eq!((result["lost"].as_u64(), result["reordered"].as_u64()), (Some(0), Some(0)), "{result}");
        let received = result["received"].as_u64().expect("a number");
        let before = across_of_all(&server);
        assert!(before > received * 3 / 2, "{before} of {result}");

        let run = load("--clients 2 --rate 20000 --burst 32 --duration 2").to(reflect.address).run();
        let result = run.result();
        assert_eq!(result["reordered"].as_u64(), Some(0), "{result}");
        let bulk = server.passes(reason_of_bulk(datapath));
        assert!(bulk > 100, "{bulk}");
        let received = result["received"].as_u64().expect("a number");
        let across = across_of_all(&server) - before;
        // XDP relays the first datagram of a burst, and a generator that has stalled starts a new burst.
        let most = if datapath == "xdp" { received } else { received / 10 };
        assert!(across < most, "{across} of {result}");
    });
}

/// Traffic like the frames of a call. Super-packets that a sender emits whole, as on these plain links, stay in user space.
#[test]
fn short_bursts_use_the_kernel_unless_they_arrive_merged() {
    on_links(turnpike_testkit::this_test!(), |links| {
        for come_whole in [false, true] {
            links.bursts_come_whole(come_whole);
            let server = links.serve(&[]);
            let reflect = Reflect::start(PEER[0], &[]);
            let run = load("--clients 4 --rate 4000 --burst 4 --duration 3").to(reflect.address).run();
            eventually("all allocations have ended", || {
                server.metrics().sum("turnpike_allocations", "") == 0
            });
            short_bursts_went(&run.result(), &server, come_whole);
            if come_whole {
                let metrics = server.metrics();
                let [datagrams, buffers] = ["turnpike_rx_datagrams_total", "turnpike_rx_buffers_total"]
                    .map(|name| metrics.sum(name, ""));
                assert!(datagrams > buffers * 2, "{datagrams} in {buffers}");
            }
        }
    });
}

#[test]
fn forwarded_short_bursts_use_the_kernel_unless_merged() {
    on_links(turnpike_testkit::this_test!(), |links| {
        for come_whole in [false, true] {
            links.bursts_come_whole(come_whole);
            let reflect = Reflect::start(PEER[0], &[]);
            let at = format!("{}:5000", SERVER[0]);
            let forward = links.forward(&[&format!("udp://{at}={}?idle=2", reflect.address)]);
            let mut load = turnpike(&["load", "udp", &at, "--clients", "4", "--rate", "4000"]);
            load.args(["--burst", "4", "--duration", "3", "--json", "-"]);
            let run = Program::start(&mut load).wait(SOON);
            eventually("all sessions have ended", || forward.metrics().sum("turnpike_kernel_flows", "") == 0);
            short_bursts_went(&run.result(), &forward, come_whole);
        }
    });
}

fn short_bursts_went(result: &Value, server: &Server<'_>, come_whole: bool) {
    let count = |name: &str| result[name].as_u64().expect("a number");
    assert_eq!([count("lost"), count("reordered")], [0, 0], "{result}");
    let (received, across) = (count("received"), server.across());
    assert!(server.passes("super_packet") > 0);
    if come_whole {
        assert!(across < received / 10, "{across} of {result}");
    } else {
        assert!(across > received, "{across} of {result}");
    }
}

fn across_of_all(server: &Server<'_>) -> u64 {
    eventually("all allocations have ended", || server.metrics().sum("turnpike_allocations", "") == 0);
    server.across()
}

/// TC never reorders. XDP may if a virtual machine loses its CPU between driver and socket (docs/kernel.md): one in ten thousand is far
/// above anything observed, and far below the reordering of a flow that switches paths without waiting.
fn is_in_order(result: &Value, datapath: &str) {
    let count = |name: &str| result[name].as_u64().expect("a count");
    let allowed = if datapath == "xdp" { count("received") / 10_000 } else { 0 };
    assert!(count("reordered") <= allowed, "{result}");
}

#[test]
fn alternating_flow_keeps_its_order_under_load() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let server = links.serve(&["--datapath", datapath]);
        let reflect = Reflect::start(PEER[0], &[]);
        let busy = load("--clients 4 --rate max --window 64 --duration 12").to(reflect.address).start();
        let mut runs = Vec::new();
        for (rate, burst) in [("300", "1"), ("3000", "16"), ("900", "3")] {
            runs.push(
                load(&format!("--clients 30 --rate {rate} --burst {burst} --duration 8"))
                    .to(reflect.address)
                    .start(),
            );
        }
        let peer = SocketAddr::new(PEER[0], 0);
        runs.push(load("--profile call --clients 5 --duration 8").to(peer).start());
        runs.push(load("--profile screen --clients 5 --duration 8").to(peer).start());
        for run in runs {
            let run = run.wait(SOON).ended(0);
            is_in_order(&run.result(), datapath);
        }
        is_in_order(&busy.wait(SOON).result(), datapath);
        let across = across_of_all(&server);
        assert!(across > 1000 && server.passes("settling") > 0, "{across}");
        let bulk = server.passes(reason_of_bulk(datapath));
        assert!(bulk > 100, "{bulk}");
    });
}

/// Sends numbered datagrams that alternate between the kernel and user space while user space is stalled; `receive` must return them in
/// order.
fn stands_still(server: &Server<'_>, client: &Client, receive: impl Fn() -> Vec<u8>) {
    let mut sent = 0_u32;
    let mut send = |padded: bool| {
        sent += 1;
        let [_, payload @ ..] = sent.to_be_bytes();
        if padded {
            // The kernel does not relay padded ChannelData.
            client
                .socket()
                .send(&[&[0x40, 0x01, 0, 3][..], &payload, &[0]].concat())
                .expect("the send succeeds");
        } else {
            client.send(0x4001, &payload);
        }
    };
    let mut received = 0_u32;
    for round in 0..30 {
        server.program.signal("STOP");
        send(true);
        (0..5).for_each(|_| send(false));
        // 12 ms is long enough for the flow to stop being a bulk flow.
        thread::sleep(Duration::from_millis(if round % 2 == 0 { 12 } else { 1 }));
        (0..5).for_each(|_| send(false));
        server.program.signal("CONT");
        for number in 1..=40 {
            send(false);
            // After a pause, which XDP needs, the kernel relays the flow.
            let rest = if number % 10 == 0 { Duration::from_millis(4) } else { Duration::from_micros(50) };
            thread::sleep(rest);
        }
        for _ in 0..51 {
            received += 1;
            assert_eq!(receive(), received.to_be_bytes()[1..], "round {round}");
        }
    }
}

#[test]
fn kernel_does_not_overtake_datagrams_in_user_space() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let server = links.serve(&["--datapath", datapath]);
        let client = Client::allocate(CLIENT[0], SocketAddr::new(SERVER[0], 3478), false);
        let peer = bound(PEER[0]);
        client.bind(0x4001, peer.local_addr().expect("bound"));
        stands_still(&server, &client, || received(&peer).0);
        eventually("the kernel relayed some", || server.across() > 100);
    });
}

#[test]
fn kernel_does_not_overtake_datagrams_between_own_allocations() {
    by_each(turnpike_testkit::this_test!(), |links, datapath| {
        let server = links.serve(&["--datapath", datapath]);
        let [one, other] =
            [0, 1].map(|_| Client::allocate(CLIENT[0], SocketAddr::new(SERVER[0], 3478), false));
        one.bind(0x4001, other.relayed);
        other.bind(0x4002, one.relayed);
        stands_still(&server, &one, || other.receive().expect("a datagram").1);
        eventually("the kernel relayed some", || server.across() > 200);
    });
}
