//! `lab up`, `exec` and `down`: working namespaces, and no leftovers.
#![allow(clippy::unwrap_used, reason = "a failed step must fail the test")]

mod support;

use std::{
    fs,
    net::UdpSocket,
    sync::{Mutex, MutexGuard, PoisonError},
};

use support::{Dir, can_run, ended, marked, namespaces, needs, ran, run, said};

#[test]
fn as_lab() {
    support::as_lab();
}

/// ID of a topology, which is removed whatever the outcome of the test.
struct Id(String, #[expect(dead_code, reason = "held, not read")] MutexGuard<'static, ()>);

/// One topology at a time: if several are created in parallel on a busy machine, they exceed their deadlines.
static ALONE: Mutex<()> = Mutex::new(());

impl Drop for Id {
    fn drop(&mut self) {
        run(&["down", "--id", &self.0]);
    }
}

impl std::ops::Deref for Id {
    type Target = String;

    fn deref(&self) -> &String {
        &self.0
    }
}

impl std::fmt::Display for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

fn id(letter: char) -> Id {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    Id(format!("t{letter}{}", std::process::id()), alone)
}

#[test]
fn up_exec_and_down_work_twice_in_a_row() {
    needs!("python3");
    let id = id('a');
    let up = ran(0, &["up", "--id", &id]);
    assert!(up.contains("10.77.1.2/24"), "{up}");
    assert!(up.contains("relay/r-p: "), "no offloads in {up}");
    assert_eq!(namespaces(&format!("tplab-{id}-")).len(), 3);

    // The relay forwards packets from client to peer, in both families.
    let listen = "import socket,sys; s=socket.create_server((sys.argv[1],7),family=int(sys.argv[2])); s.settimeout(20); c,_=s.accept(); c.sendall(b'through')";
    let ask = "import socket,sys,time
for _ in range(200):
    try:
        c=socket.create_connection((sys.argv[1],7),timeout=5); print(c.recv(99).decode()); break
    except ConnectionRefusedError: time.sleep(0.05)";
    // One of the many addresses local to the peer.
    for (address, family) in [("10.77.2.2", "2"), ("10.78.1.200", "2"), ("fd77:2::2", "10")] {
        if family == "10" && !fs::exists("/proc/net/if_inet6").unwrap() {
            continue;
        }
        let mut server =
            support::lab(&["exec", "--id", &id, "peer", "--", "python3", "-c", listen, address, family])
                .spawn()
                .unwrap();
        let client = run(&["exec", "--id", &id, "client", "--", "python3", "-c", ask, address]);
        assert!(said(&client).contains("through"), "{address}: {}", said(&client));
        assert!(server.wait().unwrap().success());
    }

    let again = ran(2, &["up", "--id", &id]);
    assert!(again.contains("is already up: remove it with `turnpike lab down`"));

    for expected in ["1 topology removed", "no topology was up"] {
        let down = ran(0, &["down", "--id", &id]);
        // Tests run in parallel, and topologies of other tests may be stale at this time.
        assert!(down.contains("removed") || down.contains(expected), "{down}");
    }
    assert!(namespaces(&format!("tplab-{id}-")).is_empty());
    assert_eq!(marked(&id), 0);
}

#[test]
fn a_mistyped_namespace_and_a_missing_topology_are_reported() {
    needs!();
    let id = id('b');
    let none = ran(2, &["exec", "--id", &id, "client", "--", "true"]);
    assert!(none.contains("is not up: create it with `turnpike lab up`"), "{none}");

    ran(0, &["up", "--id", &id]);
    let wrong = ran(2, &["exec", "--id", &id, "cleint", "--", "true"]);
    assert!(wrong.contains("did you mean \"client\"?"), "{wrong}");
    ran(0, &["down", "--id", &id]);
    assert!(namespaces(&format!("tplab-{id}-")).is_empty());
}

#[test]
fn down_kills_everything_inside_even_daemons() {
    needs!("setsid");
    let id = id('c');
    ran(0, &["up", "--id", &id]);
    // A daemon with an empty environment has no mark but still lives in the namespace.
    let script = "setsid env -i sleep 3600 >/dev/null 2>&1 & setsid sleep 3600 >/dev/null 2>&1 & exit 0";
    assert!(run(&["exec", "--id", &id, "relay", "--", "sh", "-c", script]).status.success());
    let inside = || {
        let name = format!("tplab-{id}-relay");
        let pids = std::process::Command::new("ip").args(["netns", "pids", &name]).output().unwrap();
        String::from_utf8_lossy(&pids.stdout).split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    support::eventually("both daemons and the anchor run", || inside().len() == 3);
    let pids = inside();
    ran(0, &["down", "--id", &id]);
    support::eventually("the daemons are gone", || {
        pids.iter().all(|pid| {
            !fs::exists(format!("/proc/{pid}/ns/net")).unwrap_or(false)
                || fs::read_link(format!("/proc/{pid}/ns/net")).is_err()
        })
    });
    assert!(namespaces(&format!("tplab-{id}-")).is_empty());
}

#[test]
fn an_invalid_topology_file_creates_nothing() {
    needs!();
    let directory = Dir::new();
    let file = directory.at("t.toml");
    fs::write(&file, "[[namespace]]\nname = 'a'\nforwards = true\n").unwrap();
    let id = id('d');
    let up = ran(2, &["up", file.to_str().unwrap(), "--id", &id]);
    assert!(up.contains("t.toml:3:1: unknown key \"forwards\"; did you mean \"forward\"?"), "{up}");
    assert!(namespaces(&format!("tplab-{id}-")).is_empty());

    // This offload does not exist, so creation fails halfway and must be undone.
    fs::write(
        &file,
        "[[namespace]]\nname = 'a'\n[[namespace]]\nname = 'b'\n[[link]]\nends = [\
         { namespace = 'a', device = 'x', addresses = ['10.9.8.1/24'] },\
         { namespace = 'b', device = 'y', addresses = ['10.9.8.2/24'] }]\n[offloads]\nno-such-offload = true\n",
    )
    .unwrap();
    if can_run(&["ethtool"]) {
        let up = ran(2, &["up", file.to_str().unwrap(), "--id", &id]);
        assert!(up.contains("no-such-offload"), "{up}");
    }
    assert!(namespaces(&format!("tplab-{id}-")).is_empty());
    assert_eq!(marked(&id), 0);
}

#[test]
fn topologies_work_in_a_user_namespace_without_root() {
    let ordinary = !support::is_root();
    if !ordinary && !can_run(&["setpriv"]) {
        return;
    }
    let directory = Dir::new();
    let everybody = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    fs::set_permissions(directory.path(), everybody).unwrap();
    // Other users cannot access the build directory.
    let program = directory.at("lab");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let as_nobody = |command: &mut std::process::Command| {
        let mut nobody = std::process::Command::new(if ordinary { "env" } else { "setpriv" });
        if !ordinary {
            nobody.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        }
        nobody.arg(command.get_program()).args(command.get_args());
        nobody.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        nobody.env("XDG_RUNTIME_DIR", directory.path()).current_dir(directory.path());
        nobody
    };
    if !as_nobody(std::process::Command::new("unshare").args(["-Urn", "true"])).status().unwrap().success() {
        eprintln!("SKIPPED: user namespaces are not allowed here");
        return;
    }
    let id = id('f');
    let lab = |arguments: &[&str]| {
        let template = support::lab(arguments);
        let mut command = std::process::Command::new(&program);
        command
            .args(template.get_args())
            .envs(template.get_envs().filter_map(|(name, value)| Some((name, value?))));
        as_nobody(&mut command).output().unwrap()
    };
    ended(0, &lab(&["up", "--id", &id]));
    let inside = lab(&["exec", "--id", &id, "relay", "--", "ip", "-o", "addr"]);
    assert!(
        said(&inside).contains("10.77.1.1/24") && said(&inside).contains("10.77.2.1/24"),
        "{}",
        said(&inside)
    );
    assert!(namespaces(&format!("tplab-{id}-")).is_empty(), "names exist outside the user namespace");
    assert!(marked(&id) >= 3);
    let down = lab(&["down", "--id", &id]);
    assert!(said(&down).contains("1 topology removed"), "{}", said(&down));
    assert_eq!(marked(&id), 0);
    assert!(said(&lab(&["down", "--id", &id])).contains("no topology was up"));
}

#[test]
fn the_host_is_not_touched() {
    needs!();
    let links = || fs::read_to_string("/proc/net/dev").unwrap().lines().count();
    let forwarding = || fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap();
    let before = (links(), forwarding());
    let id = id('e');
    ran(0, &["up", "--id", &id]);
    assert_eq!((links(), forwarding()), before);
    assert!(UdpSocket::bind("10.77.1.1:0").is_err());
    ran(0, &["down", "--id", &id]);
}

/// True for root outside user namespaces, who may pin kernel threads.
fn is_root_of_the_machine() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap();
    support::is_root() && map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[test]
fn a_wire_splits_super_packets_and_receives_in_pinned_threads() {
    needs!("python3", "ethtool", "chrt", "taskset");
    if !is_root_of_the_machine() || std::thread::available_parallelism().unwrap().get() < 2 {
        eprintln!("SKIPPED: pinning kernel threads needs two CPUs, and root outside user namespaces");
        return;
    }
    let id = id('w');
    // 20 segments of 100 bytes in one call, after a datagram that triggers neighbour discovery.
    let send = "import socket,time
s=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); s.connect(('10.77.1.1',9))
s.send(b'x'); time.sleep(0.5)
s.setsockopt(socket.SOL_UDP if hasattr(socket,'SOL_UDP') else 17,103,100)
try: s.send(b'x'*2000)
except ConnectionRefusedError: s.send(b'x'*2000)";
    for (topology, least, most) in [("wire", 20, 60), ("wire-mitigated", 20, 60), ("veth", 1, 15)] {
        ran(0, &["up", topology, "--id", &id]);
        let received = || -> u64 {
            let devices = said(&run(&["exec", "--id", &id, "relay", "--", "cat", "/proc/net/dev"]));
            let line = devices.lines().find_map(|line| line.trim().strip_prefix("r-c:")).expect("the device");
            line.split_whitespace().nth(1).unwrap().parse().unwrap()
        };
        let before = received();
        ran(0, &["exec", "--id", &id, "client", "--", "python3", "-c", send]);
        let grown = received() - before;
        assert!((least..=most).contains(&grown), "{topology}: {grown} packets");
        ran(0, &["down", "--id", &id]);
    }
}
