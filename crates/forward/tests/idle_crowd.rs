//! Memory use of thousands of idle connections.

use crate::prelude::*;

const COUNT: usize = 5000;

#[test]
fn five_thousand_idle_connections_cost_less_than_a_kilobyte_each() {
    alone::in_own_process(turnpike_testkit::this_test!(), gather);
}

fn gather() {
    // Descriptors per connection: one for the client, one for the server, and two for the forwarder.
    let limit = turnpike_net::rlimit::raise_open_files(4 * COUNT as u64 + 200);
    let count = COUNT.min((limit as usize - 200) / 4);
    let mut buffers = Vec::with_capacity(count);
    let of_buffers = grown(|| buffers.extend((0..count).map(|_| vec![7_u8; 1024])));

    let (server, target) = listener();
    let running = Running::start(&[rule("r", target)]);
    let mut ends = Vec::with_capacity(count);
    let of_connections = grown(|| {
        for _ in 0..count {
            let client = running.connect("r");
            ends.push((client, accept(&server)));
        }
        // A first byte each way.
        for (client, server) in &mut ends {
            client.write_all(b"a").unwrap();
            assert_eq!(read_exactly(server, 1), b"a");
            server.write_all(b"b").unwrap();
            assert_eq!(read_exactly(client, 1), b"b");
        }
    });
    println!("{count} connections take {of_connections} bytes, as many buffers of 1 KiB take {of_buffers}");
    assert!(
        of_connections < of_buffers,
        "connections take {of_connections} bytes, as many buffers of 1 KiB only {of_buffers}"
    );
    drop(buffers);
    assert_eq!(running.forwarder.active(), count as u64);
    for (client, server) in ends.iter_mut().step_by(97) {
        client.write_all(b"again").unwrap();
        assert_eq!(read_exactly(server, 5), b"again");
    }
    drop(ends);
    running.log.wait(count);
    assert_eq!(running.forwarder.active(), 0);
}
