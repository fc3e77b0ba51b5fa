//! coturn's tools for features beyond RFC 8656: `turnutils_natdiscovery` (RFC 5780), RFC 7635 tokens with `turnutils_uclient` and
//! `turnutils_oauth`, and redirects.

use crate::prelude::*;

/// Keys built into uclient for `-J`; it uses 32 bytes of the 33-byte keys.
const COTURN_KEYS: &str = "[oauth]\nserver_name = \"blackdow.carleon.gov\"\n\
     [[oauth.key]]\nkid = \"north\"\nkey = \"MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=\"\n\
     [[oauth.key]]\nkid = \"union\"\nkey = \"MTIzNDU2Nzg5MDEyMzQ1Ng==\"\nalgorithm = \"A128GCM\"\n\
     [[oauth.key]]\nkid = \"oldempire\"\nkey = \"MTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTI=\"\n";

fn serve_with(dir: &Dir, text: &str) -> Serve {
    let file = dir.file("turnpike.toml", text);
    let user = format!("{USER}:{PASSWORD}");
    let path = file.to_str().expect("the test's path is UTF-8");
    let arguments = ["-c", path, "--realm", REALM, "--user", &user, "--relay-ip", "127.0.0.1"];
    Serve::start_bare(&[&arguments[..], &["--allow-peer", "127.0.0.0/8"]].concat())
}

fn run(program: &str, arguments: &[&str]) -> Finished {
    Program::run(Command::new(program).args(arguments)).ended(0)
}

#[test]
fn natdiscovery_finds_no_nat_on_loopback() {
    need!(installed("turnutils_natdiscovery"));
    let dir = Dir::new();
    let ports = [free_port(V4), free_port(V4)];
    let second = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
    let serve = serve_with(
        &dir,
        &format!("[nat_discovery]\naddresses = [\"127.0.0.1\", \"{second}\"]\nports = {ports:?}\n"),
    );
    let port = ports[0].to_string();
    for padding in [&[][..], &["-P"]] {
        let ended =
            run("turnutils_natdiscovery", &[&["-m", "-f", "-H", "-p", &port, "127.0.0.1"], padding].concat());
        let output = ended.output();
        for found in [
            "NAT with Endpoint Independent Mapping!",
            "NAT with Endpoint Independent Filtering!",
            // MAPPED-ADDRESS fits only into a padded response.
            if padding.is_empty() {
                "Not received mapped address attribute"
            } else {
                "No ALG: Mapped == XOR-Mapped"
            },
            &format!("Response origin: : {}", SocketAddr::new(second, ports[1])),
            &format!("Other addr: : {}", SocketAddr::new(second, ports[1])),
        ] {
            assert!(output.contains(found), "{found:?} is not in {output}");
        }
    }
    // RESPONSE-PORT: the response to the second request arrives on the first one's port.
    let ended = run("turnutils_natdiscovery", &["-t", "-T", "1", "-p", &port, "127.0.0.1"]);
    assert_eq!(ended.output().matches("RFC 5780 response").count(), 2, "{}", ended.output());
    eventually("each kind of request is counted", || {
        let metrics = serve.metrics();
        let count = |attribute: &str| {
            metrics.sum("turnpike_nat_discovery_requests_total", &format!("attribute=\"{attribute}\""))
        };
        count("change_request") >= 2 && count("padding") >= 4 && count("response_port") == 1
    });
}

/// uclient makes a token with one of its keys for the name in our challenge, and replaces USERNAME with
/// the key's name.
#[test]
fn uclient_relays_with_tokens() {
    need!(installed("turnutils_uclient"));
    let dir = Dir::new();
    let serve = serve_with(&dir, COTURN_KEYS);
    let reflect = Reflect::start(V4, &[]);
    let (server, peer) = (serve.address(V4).port().to_string(), reflect.address.port().to_string());
    // uclient picks a key at random: several clients are likely to use all three.
    let messages = ["-J", "-c", "-X", "-n", "20", "-m", "6", "-l", "120", "-z", "5"];
    let ended = run(
        "turnutils_uclient",
        &[&messages[..], &["-p", &server, "-e", "127.0.0.1", "-r", &peer, "127.0.0.1"]].concat(),
    );
    let output = ended.output();
    assert!(output.contains("tot_recv_msgs=120"), "{output}");
    assert!(output.contains("Total lost packets 0"), "{output}");
}

#[test]
fn coturn_accepts_our_tokens() {
    need!(installed("turnutils_oauth"));
    for (algorithm, key) in
        [("A256GCM", "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="), ("A128GCM", "MTIzNDU2Nzg5MDEyMzQ1Ng==")]
    {
        let name = ["--server-name", "turn.example.org", "--ttl", "600"];
        let made = [&["credentials", "--user", "north", "--token-key", key], &name[..]].concat();
        let made = Program::run(&mut turnpike(&made));
        let token = made.stdout.lines().find_map(|line| line.strip_prefix("access_token: "));
        let token = token.unwrap_or_else(|| panic!("no token: {}", made.output()));
        let read = |server_name: &str| {
            let key = ["-j", "north", "-k", key, "-l", "1700000000", "-m", "3600", "-n", algorithm];
            let arguments = [&["-v", "-d", "-i", server_name, "-t", token], &key[..]].concat();
            Program::run(Command::new("turnutils_oauth").args(arguments)).output()
        };
        let good = read("turn.example.org");
        assert!(good.contains("Valid token") && good.contains("lifetime: 600"), "{good}");
        let wrong = read("turn.example.com");
        assert!(!wrong.contains("lifetime: 600"), "{wrong}");
    }
}

fn relays_ten(server: &Serve, peer: SocketAddr) {
    let (server, peer) = (server.address(V4).port().to_string(), peer.port().to_string());
    let flags = ["-u", USER, "-w", PASSWORD, "-c", "-X", "-n", "10", "-m", "1", "-l", "120", "-z", "5"];
    let ended = run(
        "turnutils_uclient",
        &[&flags[..], &["-p", &server, "-e", "127.0.0.1", "-r", &peer, "127.0.0.1"]].concat(),
    );
    let output = ended.output();
    assert!(output.contains("tot_recv_msgs=10") && output.contains("Total lost packets 0"), "{output}");
}

#[test]
fn uclient_follows_try_alternate_and_redirects_during_a_drain() {
    need!(installed("turnutils_uclient"));
    let other = Serve::start(&[]);
    let reflect = Reflect::start(V4, &[]);
    for when in ["always", "drain"] {
        let dir = Dir::new();
        let address = other.address(V4);
        let text = format!("[[alternate]]\naddress = \"{address}\"\nwhen = \"{when}\"\n");
        let mut serve = serve_with(&dir, &text);
        let mut allocation = None;
        if when == "drain" {
            // An allocation keeps the drain from finishing immediately.
            allocation = Some(serve.load(&reflect).with("--rate 20 --duration 20").start());
            serve.wait_for_allocations(1);
            serve.program.signal("TERM");
            serve.program.line_with("draining");
        }
        relays_ten(&serve, reflect.address);
        eventually("the redirection is counted", || {
            let metrics = serve.metrics();
            let redirects = metrics.sum("turnpike_redirects_total", "");
            redirects >= 1 && metrics.sum("turnpike_drain_refusals_total", "") == 0
        });
        assert_eq!(serve.allocations(), u64::from(allocation.is_some()));
        drop(allocation);
    }
}
