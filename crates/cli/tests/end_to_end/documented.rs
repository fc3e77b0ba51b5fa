//! Commands and configurations of other programs in the documentation work with turnpike.

use crate::prelude::*;

const SERVE: &str = include_str!("../../../../docs/serve.md");
const NAT: &str = include_str!("../../../../docs/nat.md");
const NAME: &str = "turn.example.org";

/// First code block after these words.
pub(crate) fn block<'d>(document: &'d str, words: &str) -> &'d str {
    let (_, behind) = document.split_once(words).unwrap_or_else(|| panic!("{words} is not in the document"));
    let code = behind.split("```").nth(1).expect("a block of code");
    code.split_once('\n').expect("the block has a line").1
}

fn run(line: &str) {
    let words: Vec<&str> = line.split_whitespace().collect();
    alone::run(words[0], &words[1..]);
}

#[test]
fn documented_haproxy_passes_client_addresses() {
    let haproxy = need!(installed("haproxy"));
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        run("ip address add 10.0.0.5/32 dev lo");
        let dir = Dir::new();
        let lines =
            block(SERVE, "can claim any address. HAProxy:").replace("bind :443", "bind 127.0.0.1:443");
        assert!(lines.contains("bind 127.0.0.1:443"), "{lines}");
        let lines = dir.file("haproxy.cfg", lines);
        Program::run(Command::new(&haproxy).arg("-c").arg("-f").arg(&lines)).ended(0);

        let certificate = Certificate::new(&[NAME]);
        let file = dir.file("turnpike.toml", block(SERVE, "## Behind a load balancer"));
        let user = format!("{USER}:{PASSWORD}");
        let mut serve = Serve::start_bare(
            &[
                &["-c", file.to_str().expect("UTF-8"), "--tls-listen", "10.0.0.5:443"],
                &["--realm", REALM, "--user", &user, "--relay-ip", "127.0.0.1"][..],
                &certificate.flags(),
            ]
            .concat(),
        );
        let _haproxy = Program::start(Command::new(&haproxy).arg("-db").arg("-f").arg(&lines));
        eventually("haproxy listens", || TcpStream::connect("127.0.0.1:443").is_ok());
        assert_eq!(shown_by(([127, 0, 0, 1], 443).into(), NAME), certificate.der());
        let ca = certificate.cert().display().to_string();
        Load::at("turns:127.0.0.1:443?transport=tcp")
            .with(&format!("--ca {ca} --server-name {NAME} --mode allocate --rate 5 --duration 1"))
            .run()
            .ended(0);
        let line = serve.program.line_with("allocation ended");
        assert!(line.contains("client=127.0.0.1:"), "{line}");
    });
}

#[test]
fn documented_routes_answer_through_the_right_uplink() {
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        for (link, network, own) in [("eth0", "203.0.113", 5), ("eth1", "198.51.100", 7)] {
            run(&format!("ip link add {link} type veth peer name {link}-far"));
            run(&format!("ip link set {link}-far up"));
            run(&format!("ip link set {link} up"));
            run(&format!("ip address add {network}.{own}/24 dev {link}"));
        }
        run("ip route add default via 203.0.113.1 dev eth0");
        for line in block(NAT, "**Two uplinks.**").lines() {
            let command = line.split('#').next().unwrap_or_default();
            run(command.strip_prefix("sudo ").expect("each needs root"));
        }
        for (own, way) in
            [("203.0.113.5", "via 203.0.113.1 dev eth0"), ("198.51.100.7", "via 198.51.100.1 dev eth1")]
        {
            let mut command = Command::new("ip");
            let route = Program::run(command.args(["route", "get", "192.0.2.1", "from", own]));
            assert!(route.stdout.contains(way), "{}", route.output());
        }
    });
}
