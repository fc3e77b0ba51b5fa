//! `turnpike upgrade` of a forwarder: listeners and UDP sessions move, TCP connections stay.

use crate::prelude::*;

const DATAGRAMS: u64 = 1000;

fn talk(address: SocketAddr) -> thread::JoinHandle<()> {
    let socket = UdpSocket::bind((V4, 0)).expect("loopback has a free port");
    socket.connect(address).expect("loopback is reachable");
    socket.set_read_timeout(Some(SOON)).expect("not zero");
    let receiving = socket.try_clone().expect("the socket is bound");
    thread::spawn(move || {
        for number in 0..DATAGRAMS {
            socket.send(&number.to_be_bytes()).expect("loopback accepts a datagram");
            thread::sleep(Duration::from_millis(4));
        }
    });
    thread::spawn(move || {
        let mut number = [0; 8];
        for expected in 0..DATAGRAMS {
            receiving.recv(&mut number).expect("the datagram returns");
            assert_eq!(u64::from_be_bytes(number), expected, "lost, or out of order");
        }
    })
}

#[test]
fn upgrade_moves_listeners_and_udp_sessions_and_keeps_connections() {
    let dir = Dir::new();
    dir.file(
        "f.toml",
        format!(
            "[forward]\nworkers = 2\npid_file = \"pid\"\n\
             [[rule]]\nname = \"t\"\nlisten = \"127.0.0.1:0\"\ntarget = \"{}\"\n\
             [[rule]]\nname = \"u\"\nprotocol = \"udp\"\nlisten = \"127.0.0.1:0\"\ntarget = \"{}\"\n",
            tcp_echo(),
            udp_echo()
        ),
    );
    let mut forward = Forward::start_in(dir, &["-c", "f.toml"]);
    let (tcp, udp) = (forward.address("rule t"), forward.address("rule u"));
    let mut upgraded = Upgraded::new(&forward.program);
    let mut stream = connect(tcp);
    assert_eq!(say(&mut stream, "before"), "before");
    let talks: Vec<_> = (0..4).map(|_| talk(udp)).collect();
    forward.wait_for("turnpike_forward_connections", "rule=\"u\"", 4);

    let first = upgraded.upgrade();
    let pid_file = || fs::read_to_string(forward.path("pid")).unwrap_or_default();
    eventually("the file names the new process", || pid_file().trim() == upgraded.pid().to_string());
    assert_eq!(say(&mut stream, "after"), "after");
    assert_eq!(say(&mut connect(tcp), "a newcomer"), "a newcomer");
    assert_eq!(say_udp(udp, "a newcomer"), "a newcomer");
    forward.wait_for("turnpike_forward_accepted_total", "rule=\"t\"", 2);
    forward.wait_for("turnpike_forward_connections", "rule=\"t\"", 1);
    let second = upgraded.upgrade();
    assert_eq!(say(&mut stream, "once more"), "once more");
    assert!(lives(first), "a connection is open");
    drop(stream);
    ends(first);
    // The second process reported the first process's counters until the first one exited.
    ends(second);
    eventually("the file names the new process", || pid_file().trim() == upgraded.pid().to_string());

    for talk in talks {
        talk.join().expect("all datagrams returned");
    }
    let metrics = forward.metrics();
    let sum = |name, label| metrics.sum(name, label);
    assert_eq!(sum("turnpike_forward_accepted_total", "rule=\"u\""), 5);
    assert_eq!(sum("turnpike_forward_dropped_datagrams_total", "rule=\"u\""), 0);
    let (all, datagrams) = (4 * DATAGRAMS + 1, "turnpike_forward_datagrams_total");
    forward.wait_for(datagrams, "rule=\"u\",direction=\"to_client\"", all);
    assert_eq!(sum("turnpike_upgrades_total", "result=\"done\""), 2);
}

#[test]
fn removed_rule_fails_the_upgrade_and_changes_nothing() {
    let dir = Dir::new();
    let rule = |name: &str, target: SocketAddr| {
        format!("[[rule]]\nname = \"{name}\"\nlisten = \"127.0.0.1:0\"\ntarget = \"{target}\"\n")
    };
    let target = tcp_echo();
    let both = rule("a", target) + &rule("b", target);
    dir.file("f.toml", &both);
    let mut forward = Forward::start_in(dir, &["-c", "f.toml"]);
    let address = forward.address("rule b");
    let mut upgraded = Upgraded::new(&forward.program);
    forward.write("f.toml", &rule("a", target));
    let asked = upgraded.ask(&[]).ended(1);
    assert!(asked.stderr.contains("rule b ") && asked.stderr.contains("reload"), "{}", asked.output());
    assert_eq!(say(&mut connect(address), "still here"), "still here");
    forward.write("f.toml", &both);
    upgraded.upgrade();
    assert_eq!(say(&mut connect(address), "and there"), "and there");
    ends(forward.program.pid());
    assert_eq!(say(&mut connect(address), "alone"), "alone");
}
