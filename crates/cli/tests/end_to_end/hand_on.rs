//! `server.hand_on`: a web server shares the port, through an upgrade and until the server stops.

use crate::prelude::*;

fn sharing_with(web: SocketAddr) -> (Serve, Dir) {
    let text = format!("[server]\nhand_on = [{{ plain = true, to = \"{web}\" }}]\n");
    let dir = Dir::new();
    let file = dir.file("turnpike.toml", text);
    (Serve::start(&["-c", file.to_str().expect("the test's path is UTF-8")]), dir)
}

fn open(serve: &Serve) -> u64 {
    serve.metrics().sum("turnpike_handed_on_open", "")
}

#[test]
fn upgrade_leaves_handed_on_connections_in_the_old_process() {
    let (serve, _dir) = sharing_with(tcp_echo());
    let mut upgraded = Upgraded::new(&serve.program);
    let mut client = connect(serve.address_of("tcp", V4));
    assert_eq!(say(&mut client, "GET / HTTP/1.1"), "GET / HTTP/1.1");
    let old = upgraded.upgrade();
    assert_eq!(say(&mut client, "more"), "more");
    let mut other = connect(serve.address_of("tcp", V4));
    assert_eq!(say(&mut other, "GET /new HTTP/1.1"), "GET /new HTTP/1.1");
    eventually("the metrics include both processes", || open(&serve) == 2);
    assert!(lives(old));
    drop(client);
    ends(old);
    assert_eq!(say(&mut other, "more"), "more");
    let metrics = serve.metrics();
    assert_eq!(metrics.sum("turnpike_handed_on_total", "kind=\"plain\""), 2);
    eventually("the end of the connection is counted", || {
        serve.metrics().sum("turnpike_handed_on_ended_total", "reason=\"closed\"") == 1
    });
}

#[test]
fn drain_does_not_wait_for_handed_on_connections() {
    let (serve, _dir) = sharing_with(tcp_echo());
    let mut client = connect(serve.address_of("tcp", V4));
    assert_eq!(say(&mut client, "GET / HTTP/1.1"), "GET / HTTP/1.1");
    serve.program.signal("TERM");
    serve.program.wait(SOON).ended(0);
    assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)), "the connection outlived the server");
}
