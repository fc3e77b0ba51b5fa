//! Several servers as a fleet over Redis or Valkey: redirects, fleet-wide quotas and bans, and store outages.

use crate::prelude::*;
use std::os::unix::net::UnixStream;

const SECRET: &str = "of the fleet, and of at least 32 characters";

struct World {
    server: Server,
    dir: Dir,
}

struct Node {
    serve: Serve,
    socket: PathBuf,
}

impl World {
    fn new() -> Result<Self, String> {
        Ok(Self { server: Server::redis()?, dir: Dir::new() })
    }

    /// Command line of a node; `more` are lines of `[fleet]`.
    fn arguments(&self, name: &str, at: SocketAddr, more: &str) -> Vec<String> {
        let url = self.server.url(at, "");
        let text = format!("[fleet]\nurl = \"{url}\"\nsecret = \"{SECRET}\"\nnode = \"{name}\"\n{more}\n");
        let file = self.dir.file(&format!("{name}.toml"), text);
        let socket = format!("unix:{}", self.socket(name).display());
        ["-c", super::path(&file), "--admin", &socket].map(str::to_owned).into()
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.sock"))
    }

    fn node_at(&self, name: &str, at: SocketAddr, more: &str) -> Node {
        let arguments = self.arguments(name, at, more);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        Node { serve: Serve::start(&arguments), socket: self.socket(name) }
    }

    fn node(&self, name: &str, more: &str) -> Node {
        self.node_at(name, self.server.address, more)
    }
}

impl Node {
    fn told(&self, words: &[&str]) -> Finished {
        let admin = format!("unix:{}", self.socket.display());
        let arguments = [words, &["--admin", &admin]].concat();
        Program::start(&mut turnpike(&arguments)).wait(SOON)
    }

    fn json(&self, words: &[&str]) -> Value {
        let ended = self.told(&[words, &["--json"]].concat());
        assert_eq!(ended.code, Some(0), "{words:?}: {}", ended.output());
        serde_json::from_str(&ended.stdout).expect("JSON")
    }

    fn sees(&self) -> Vec<(String, String)> {
        let nodes = self.json(&["fleet", "status"])["nodes"].clone();
        let text = |node: &Value, key: &str| node[key].as_str().unwrap_or_default().to_owned();
        nodes
            .as_array()
            .expect("a list")
            .iter()
            .map(|node| (text(node, "name"), text(node, "state")))
            .collect()
    }

    #[track_caller]
    fn waits_for(&self, nodes: &[(&str, &str)]) {
        let wanted: Vec<_> =
            nodes.iter().map(|(name, state)| ((*name).to_owned(), (*state).to_owned())).collect();
        eventually(&format!("{nodes:?} are seen"), || {
            thread::sleep(Duration::from_millis(50));
            self.sees() == wanted && self.readiness().1 != "recovering\n"
        });
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        ask(&self.socket, method, path, body)
    }

    fn address(&self) -> SocketAddr {
        self.serve.address(V4)
    }

    /// Error code of an Allocate; `None` if it succeeds.
    fn allocate(&self, user: &str, password: &str) -> Option<u16> {
        super::allocate(&self.serve, user, password)
    }

    fn readiness(&self) -> (u16, String) {
        get_unix(&self.socket, "/readyz").expect("the node responds")
    }
}

fn ask(socket: &Path, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(socket).expect("the node accepts connections");
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .expect("the server accepts requests");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("the node responds");
    let (head, body) = answer.split_once("\r\n\r\n").expect("headers");
    (head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status"), body.to_owned())
}

const BOTH: [(&str, &str); 2] = [("a", "serving"), ("b", "serving")];

#[test]
fn draining_node_redirects_to_a_node_that_accepts_the_nonce() {
    let world = need!(World::new());
    let (a, b) = (world.node("a", ""), world.node("b", ""));
    a.waits_for(&BOTH);
    b.waits_for(&BOTH);
    let status = b.json(&["fleet", "status"]);
    assert_eq!((&status["node"], &status["alone"]), (&Value::from("b"), &Value::Null), "{status}");
    let own = format!("udp://{}", a.address());
    assert!(
        status["nodes"][0]["addresses"].as_array().expect("a list").iter().any(|at| *at == own),
        "{status}"
    );

    b.told(&["fleet", "drain", "a"]).ended(0);
    b.waits_for(&[("a", "draining"), ("b", "serving")]);
    assert_eq!(a.readiness(), (503, "draining\n".to_owned()));
    let client = stun::Client::new(a.address());
    let (_, _, challenge) = client.challenge();
    let answer = client.allocate_once(USER, PASSWORD, &challenge);
    assert_eq!((answer.error(), answer.alternate()), (Some(300), b.address()));
    let follows = stun::Client::new(answer.alternate());
    assert_eq!(follows.allocate_once(USER, PASSWORD, &challenge).error(), None, "no second redirect");
    assert_eq!(a.serve.metrics().sum("turnpike_fleet_returns_total", ""), 0);
    assert_eq!(
        client.allocate_once(USER, PASSWORD, &challenge).error(),
        None,
        "the client does not follow redirects, and is served"
    );
    assert_eq!(a.serve.metrics().sum("turnpike_fleet_returns_total", ""), 1);
    assert_eq!(a.serve.metrics().sum("turnpike_fleet_redirects_total", "reason=\"draining\""), 1);

    assert_eq!(b.told(&["fleet", "uncordon", "a"]).code, Some(0));
    b.waits_for(&BOTH);
    assert_eq!((a.readiness().0, a.allocate(USER, PASSWORD)), (200, None));
    let absent = b.told(&["fleet", "drain", "x"]);
    assert!(absent.code == Some(1) && absent.stderr.contains("there is no node"), "{}", absent.output());
}

/// A Kubernetes Service replaces its address with the node's, so only the port identifies the balancer's
/// clients.
#[test]
fn clients_of_a_balancer_are_redirected_to_the_nodes_own_port() {
    let world = need!(World::new());
    let balanced = SocketAddr::new(V4, free_port(V4));
    let more = format!("redirect = \"always\"\nbalancer_ports = [{}]", balanced.port());
    let mut arguments = world.arguments("a", world.server.address, &more);
    arguments.extend(["--listen".to_owned(), balanced.to_string()]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let node = Node { serve: Serve::start(&arguments), socket: world.socket("a") };
    node.waits_for(&[("a", "serving")]);
    let client = stun::Client::new(balanced);
    let (_, _, challenge) = client.challenge();
    let answer = client.allocate_once(USER, PASSWORD, &challenge);
    assert_eq!((answer.error(), answer.alternate()), (Some(300), node.address()));
    let client = stun::Client::new(answer.alternate());
    assert_eq!(client.allocate_once(USER, PASSWORD, &challenge).error(), None, "no second redirect");
}

#[test]
fn quota_is_fleet_wide_and_leaving_clients_return_it() {
    let world = need!(World::new());
    let limits = "[limits]\nallocations_per_user = 12";
    let nodes = ["a", "b", "c"].map(|name| world.node(name, limits));
    let all = [("a", "serving"), ("b", "serving"), ("c", "serving")];
    nodes.iter().for_each(|node| node.waits_for(&all));
    let mut taken = [0; 3];
    let mut codes = Vec::new();
    for attempt in 0..36 {
        match nodes[attempt % 3].allocate(USER, PASSWORD) {
            None => taken[attempt % 3] += 1,
            Some(code) => codes.push(code),
        }
        // Counters are updated ten times a second.
        thread::sleep(Duration::from_millis(50));
    }
    let sum: u32 = taken.iter().sum();
    assert!((12..=15).contains(&sum), "at most one more per node: {taken:?}");
    assert!(codes.iter().all(|code| *code == 486), "{codes:?}");
    let [a, b, _c] = nodes;
    assert_eq!(b.allocate(USER, PASSWORD), Some(486));
    a.serve.program.signal("TERM");
    a.serve.program.signal("TERM");
    assert_eq!(a.serve.program.wait(SOON).code, Some(0));
    eventually("the first user's share is free", || {
        thread::sleep(Duration::from_millis(50));
        b.allocate(USER, PASSWORD).is_none()
    });
}

#[test]
fn quota_of_a_killed_node_is_returned_by_another() {
    let world = need!(World::new());
    let limits = "[limits]\nallocations_per_user = 2";
    let (a, b) = (world.node("a", limits), world.node("b", limits));
    a.waits_for(&BOTH);
    b.waits_for(&BOTH);
    assert_eq!([a.allocate(USER, PASSWORD), a.allocate(USER, PASSWORD)], [None, None]);
    eventually("the other node knows of the usage", || {
        thread::sleep(Duration::from_millis(50));
        b.allocate(USER, PASSWORD) == Some(486)
    });
    a.serve.program.signal("KILL");
    b.waits_for(&[("b", "serving")]);
    eventually("the share is free", || {
        thread::sleep(Duration::from_millis(200));
        b.allocate(USER, PASSWORD).is_none()
    });
}

#[test]
fn ban_is_fleet_wide_and_ends_allocations() {
    let world = need!(World::new());
    let (a, mut b) = (world.node("a", ""), world.node("b", ""));
    a.waits_for(&BOTH);
    assert_eq!(b.allocate(USER, PASSWORD), None);
    let (status, body) = a.ask("POST", "/v1/bans", &format!("{{\"user\":\"{USER}\",\"seconds\":600}}"));
    assert_eq!(status, 201, "{body}");
    let line = b.serve.program.line_with("allocation ended");
    assert!(line.contains("reason=\"banned\""), "{line}");
    eventually("that name is refused", || b.allocate(USER, PASSWORD) == Some(403));
    assert_eq!(a.allocate(USER, PASSWORD), Some(403));
    let c = world.node("c", "");
    eventually("a new node has learned of the ban", || c.allocate(USER, PASSWORD) == Some(403));
    let (status, body) = b.ask("DELETE", &format!("/v1/bans?user={USER}"), "");
    assert_eq!(status, 200, "{body}");
    eventually("the ban is lifted", || a.allocate(USER, PASSWORD).is_none());
}

#[test]
fn any_node_lists_and_ends_allocations_of_the_fleet() {
    let world = need!(World::new());
    let (a, b) = (world.node("a", ""), world.node("b", ""));
    a.waits_for(&BOTH);
    b.waits_for(&BOTH);
    assert_eq!([a.allocate(USER, PASSWORD), b.allocate(USER, PASSWORD)], [None, None]);
    let allocations = a.json(&["fleet", "allocations", "--user", USER]);
    let nodes: Vec<&str> = allocations
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|allocation| allocation["node"].as_str())
        .collect();
    assert_eq!(nodes, ["a", "b"], "{allocations}");
    let id = allocations[1]["id"].as_str().expect("a name");
    assert_eq!(a.json(&["allocation", "show", id])["node"], "b");
    let ended = a.told(&["allocation", "end", id]);
    assert!(ended.stdout.contains("on node b"), "{}", ended.output());
    b.serve.wait_for_allocations(0);
    assert_eq!(a.told(&["allocation", "show", id]).code, Some(1));
}

#[test]
fn user_removed_on_one_node_is_refused_on_the_others() {
    let world = need!(World::new());
    let state = world.dir.path().join("state");
    let users = format!("[store]\nstate = \"{}\"", super::path(&state));
    let (a, b) = (world.node("a", &users), world.node("b", &users));
    a.waits_for(&BOTH);
    let add = ["user", "add", "bob", "--realm", REALM, "--password", "sesame"];
    assert_eq!(a.told(&add).code, Some(0));
    eventually("bob is accepted", || b.allocate("bob", "sesame").is_none());
    assert_eq!(a.told(&["user", "remove", "bob", "--realm", REALM]).code, Some(0));
    eventually("bob is refused", || {
        thread::sleep(Duration::from_millis(50));
        b.allocate("bob", "sesame") == Some(401)
    });
}

#[test]
fn store_outage_does_not_affect_clients() {
    let world = need!(World::new());
    let proxy = Proxy::new(world.server.address);
    let mut a = world.node_at("a", proxy.address, "");
    let b = world.node_at("b", proxy.address, "");
    a.waits_for(&BOTH);
    let reflect = Reflect::start(V4, &[]);
    let allocation = Load::new(a.address()).to(reflect.address).with("--rate 200 --duration 15").start();
    eventually("data is relayed", || a.serve.allocations() > 0);

    let (status, body) = b.ask("POST", "/v1/bans", "{\"user\":\"eve\",\"seconds\":600}");
    assert_eq!(status, 201, "{body}");
    eventually("the other node has learned of the ban", || a.ask("GET", "/v1/bans", "").1.contains("eve"));

    proxy.hold(true);
    a.serve.program.line_with("this node is alone");
    assert_eq!(a.readiness(), (200, "alone\n".to_owned()));
    assert_eq!(a.serve.metrics().sum("turnpike_fleet_up", ""), 0);
    assert_eq!([a.allocate(USER, PASSWORD), b.allocate(USER, PASSWORD)], [None, None]);
    let (status, body) = a.ask("POST", "/v1/bans", "{\"user\":\"mallory\",\"seconds\":600}");
    assert!(status == 202 && body.contains("\"announced\":false"), "{status} {body}");
    let (status, body) = a.ask("DELETE", "/v1/bans?user=eve", "");
    assert!(status == 202 && body.contains("\"announced\":false"), "{status} {body}");
    for number in 0..500 {
        let ban = format!("{{\"user\":\"mallory-{number}\",\"seconds\":600}}");
        assert_eq!(a.ask("POST", "/v1/bans", &ban).0, 202);
    }
    proxy.hold(false);
    a.serve.program.line_with("answers again");
    eventually("both nodes are ready", || a.readiness().1 == "ok\n" && b.readiness().1 == "ok\n");
    a.waits_for(&BOTH);
    b.waits_for(&BOTH);
    eventually("the other node learns of all bans and never considers this node silent", || {
        thread::sleep(Duration::from_millis(50));
        let fleet = b.ask("GET", "/v1/fleet", "").1;
        assert!(!fleet.contains("\"silent\""), "{fleet}");
        let bans = b.ask("GET", "/v1/bans", "").1;
        bans.matches("mallory").count() == 501 && !bans.contains("eve")
    });
    let result = allocation.wait(SOON * 2).result();
    assert_eq!(result["lost"], 0, "relayed traffic is not disturbed: {result}");
}

#[test]
fn emptied_store_is_filled_again() {
    let world = need!(World::new());
    let limits = "[limits]\nallocations_per_user = 4";
    let (mut a, b) = (world.node("a", limits), world.node("b", limits));
    a.waits_for(&BOTH);
    b.waits_for(&BOTH);
    let mut taken = 0;
    eventually("the quota is used up", || {
        thread::sleep(Duration::from_millis(50));
        taken += u32::from(a.allocate(USER, PASSWORD).is_none());
        taken == 4
    });
    eventually("the other node knows of the usage", || {
        thread::sleep(Duration::from_millis(50));
        b.allocate(USER, PASSWORD) == Some(486)
    });
    let (status, body) = a.ask("POST", "/v1/bans", "{\"client\":\"192.0.2.0/24\",\"seconds\":600}");
    assert_eq!(status, 201, "{body}");
    let nonce = |node: &Node| stun::Client::new(node.address()).challenge().2;
    let before = nonce(&a);
    assert!(world.server.say("FLUSHALL").contains("OK"));
    a.serve.program.line_with("each node grants its equal share");
    let is_whole = || world.server.say("HGET turnpike:{turnpike}:era whole") == "$1\r\n1\r\n";
    eventually("the store has the state of all nodes", || {
        assert_eq!(b.allocate(USER, PASSWORD), Some(486), "no node exceeds the quota");
        thread::sleep(Duration::from_millis(50));
        is_whole() && a.readiness().1 == "ok\n" && b.readiness().1 == "ok\n"
    });
    a.waits_for(&BOTH);
    for _ in 0..10 {
        assert_eq!(b.allocate(USER, PASSWORD), Some(486));
        thread::sleep(Duration::from_millis(50));
    }
    eventually("the store has the ban again", || {
        thread::sleep(Duration::from_millis(50));
        world.server.say("HLEN turnpike:{turnpike}:bans").starts_with(":1")
    });
    let stun::Challenge { realm, nonce } = before;
    let answer =
        stun::Client::new(b.address()).allocate_once("absent", "x", &stun::Challenge { realm, nonce });
    assert_eq!(answer.error(), Some(401), "not 438 Stale Nonce");
}

fn ids(node: &Node) -> BTreeSet<String> {
    let allocations = node.json(&["allocations"]);
    let ids =
        allocations.as_array().expect("a list").iter().filter_map(|allocation| allocation["id"].as_str());
    ids.map(str::to_owned).collect()
}

#[test]
fn upgraded_node_keeps_its_identity() {
    let world = need!(World::new());
    let limits = "[limits]\nallocations_per_user = 8";
    let (a, b) = (world.node("a", limits), world.node("b", limits));
    a.waits_for(&BOTH);
    b.waits_for(&BOTH);
    let mut upgraded = Upgraded::new(&a.serve.program);
    let reflect = Reflect::start(V4, &[]);
    let clients = ["--clients", "4", "--rate", "200", "--duration", "600"];
    let load = Load::new(a.address()).to(reflect.address).with_words(&clients).start();
    a.serve.wait_for_allocations(4);
    let mut taken = 0;
    eventually("the quota is used up", || {
        thread::sleep(Duration::from_millis(100));
        let code = b.allocate(USER, PASSWORD);
        taken += u32::from(code.is_none());
        code == Some(486)
    });
    assert!((4..=5).contains(&taken), "at most one more: {taken}");
    let (status, body) = a.ask("POST", "/v1/bans", "{\"user\":\"mallory\",\"seconds\":600}");
    assert_eq!(status, 201, "{body}");
    let allocations = ids(&a);
    let of_a = |status: &Value| (status["nodes"][0]["number"].clone(), status["keys"].clone());
    let before = of_a(&b.json(&["fleet", "status"]));
    let number = before.0.as_u64().expect("a number");
    let held = || {
        let told = world.server.say(&format!("HVALS turnpike:{{turnpike}}:held:{number}"));
        told.lines().filter(|line| !line.starts_with(['*', '$'])).map(str::to_owned).collect::<BTreeSet<_>>()
    };
    eventually("the store has the node's state", || held().contains("4"));
    let stun::Challenge { realm, nonce } = stun::Client::new(a.address()).challenge().2;

    for drains in [false, true] {
        if drains {
            assert_eq!(b.told(&["fleet", "drain", "a"]).code, Some(0));
            b.waits_for(&[("a", "draining"), ("b", "serving")]);
        }
        let old = upgraded.upgrade();
        ends(old);
        assert_eq!(ids(&a), allocations, "the allocations keep their IDs");
        a.waits_for(&[("a", if drains { "draining" } else { "serving" }), ("b", "serving")]);
        assert_eq!(
            of_a(&b.json(&["fleet", "status"])),
            before,
            "the node's number and all keys are the same"
        );
        for node in [&a, &b] {
            let known = stun::Challenge { realm: realm.clone(), nonce: nonce.clone() };
            assert_eq!(
                stun::Client::new(node.address()).allocate_once("absent", "x", &known).error(),
                Some(401),
                "not stale"
            );
        }
        assert!(a.ask("GET", "/v1/bans", "").1.contains("mallory"));
        eventually("the store still has the node's state", || held().contains("4"));
        for _ in 0..5 {
            assert_eq!(b.allocate(USER, PASSWORD), Some(486), "the quota is not exceeded");
            thread::sleep(Duration::from_millis(100));
        }
    }
    assert_eq!(a.readiness(), (503, "draining\n".to_owned()));
    load.signal("INT");
    let result = load.wait(SOON).result();
    assert_eq!((&result["lost"], &result["reordered"]), (&Value::from(0), &Value::from(0)), "{result}");
    eventually("the share of the node's clients is free", || {
        thread::sleep(Duration::from_millis(50));
        b.allocate(USER, PASSWORD).is_none()
    });
    let strange = ["has left", "node gone", "lost this node's record"];
    let lines = [a.serve.program.lines(), b.serve.program.lines()].concat();
    let noticed = lines.iter().find(|line| strange.iter().any(|text| line.contains(text)));
    assert_eq!(noticed, None, "no client notices");
    assert_eq!(b.told(&["fleet", "uncordon", "a"]).code, Some(0));
    b.waits_for(&BOTH);
    let told = Command::new("sh").args(["-c", &format!("kill -TERM {}", upgraded.pid())]).status();
    assert!(told.is_ok_and(|status| status.success()));
    b.waits_for(&[("b", "serving")]);
}

#[test]
fn ban_ends_allocations_in_previous_processes_of_a_node() {
    let world = need!(World::new());
    let (mut a, b) = (world.node("a", ""), world.node("b", ""));
    b.waits_for(&BOTH);
    let mut upgraded = Upgraded::new(&a.serve.program);
    let reflect = Reflect::start(V4, &[]);
    let over_tcp = ["--transport", "tcp", "--rate", "100", "--duration", "600"];
    let load = Load::new(a.serve.address_of("tcp", V4)).to(reflect.address).with_words(&over_tcp).start();
    a.serve.wait_for_allocations(1);
    let old = upgraded.upgrade();
    assert!(lives(old), "a client is connected");
    let (status, body) = b.ask("POST", "/v1/bans", &format!("{{\"user\":\"{USER}\",\"seconds\":600}}"));
    assert_eq!(status, 201, "{body}");
    let line = a.serve.program.line_with("allocation ended");
    assert!(line.contains("reason=\"banned\""), "{line}");
    load.signal("INT");
    load.wait(SOON);
    ends(old);
}

#[test]
fn duplicate_name_and_different_secret_are_refused() {
    let world = need!(World::new());
    let a = world.node("a", "");
    a.waits_for(&[("a", "serving")]);
    let start = |arguments: &[String]| {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let bare = ["serve", "--listen", "127.0.0.1:0", "--user", "x:y"];
        Program::start(&mut turnpike(&[&bare[..], &arguments[..]].concat())).wait(SOON)
    };
    let mut arguments = world.arguments("a", world.server.address, "");
    arguments.extend(["--admin".to_owned(), "off".to_owned()]);
    arguments.retain(|word| !word.starts_with("unix:"));
    arguments.remove(2);
    start(&arguments).ended(1).says("another running node of the fleet is named a");
    let file = world.dir.path().join("a.toml");
    let text = fs::read_to_string(&file).expect("the test's own file");
    let other = text.replace(SECRET, &"x".repeat(32)).replace("node = \"a\"", "node = \"b\"");
    fs::write(&file, other).expect("the test's own file");
    let ended = start(&arguments).ended(1).says("use another fleet.secret");
    for secret in [SECRET, "xxxxxxxx"] {
        assert!(!ended.output().contains(secret), "{}", ended.output());
    }
    assert_eq!(a.allocate(USER, PASSWORD), None, "the first node continues");
    assert_eq!(a.sees(), [("a".to_owned(), "serving".to_owned())], "a node that was refused is not listed");
    assert!(world.server.say("HEXISTS turnpike:{turnpike}:nodes b").starts_with(":0"));
}

/// A node record in the store that was sealed with a different secret, from a running node or a previous
/// version.
#[test]
fn node_with_a_different_secret_is_ignored() {
    let world = need!(World::new());
    let a = world.node("a", "[limits]\nallocations_per_user = 12");
    a.waits_for(&[("a", "serving")]);
    let stamp = world.server.say("HGET turnpike:{turnpike}:nodes a");
    let stamp = stamp.lines().find_map(|line| line.split_once(' ')).expect("a record").0.to_owned();
    world.server.say("HSET turnpike:{turnpike}:cards b sealed");
    world.server.say(&format!("HSET turnpike:{{turnpike}}:nodes b \"{stamp} 9 7 0 0 0 0 0 0 0 0\""));
    for _ in 0..12 {
        assert_eq!(a.allocate(USER, PASSWORD), None);
        // Nodes are listed once a second.
        thread::sleep(Duration::from_millis(200));
        assert_eq!(a.sees(), [("a".to_owned(), "serving".to_owned())]);
    }
}

#[test]
fn restarted_node_is_seen_immediately_with_its_new_state() {
    let world = need!(World::new());
    let (mut a, b) = (world.node("a", ""), world.node("b", ""));
    b.waits_for(&BOTH);
    a.serve.program.signal("TERM");
    a.serve.program.signal("TERM");
    a.serve.program.line_with("has left the fleet");
    let again = world.node("a", "");
    eventually("the node is back", || {
        let nodes = b.json(&["fleet", "status"])["nodes"].clone();
        for node in nodes.as_array().expect("a list") {
            let is_wrong =
                node["state"] == "full" || node["state"] == "silent" || node["max_allocations"] == 0;
            assert!(!is_wrong, "{node}");
        }
        nodes.as_array().map(Vec::len) == Some(2)
    });
    assert_eq!(again.allocate(USER, PASSWORD), None);
    eventually("the allocation is listed", || {
        thread::sleep(Duration::from_millis(100));
        b.json(&["fleet", "status"])["nodes"][0]["allocations"] == 1
    });
    let mut upgraded = Upgraded::new(&again.serve.program);
    let old = upgraded.upgrade();
    ends(old);
    for _ in 0..30 {
        let node = b.json(&["fleet", "status"])["nodes"][0].clone();
        assert!(node["state"] == "serving" && node["allocations"] == 1, "{node}");
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn allocations_are_published_in_coturns_format() {
    let world = need!(World::new());
    let a = world.node("a", "coturn_status = true");
    a.waits_for(&[("a", "serving")]);
    assert_eq!(a.allocate(USER, PASSWORD), None);
    let keys = eventually("a status is stored", || {
        thread::sleep(Duration::from_millis(50));
        let keys = world.server.say(&format!("KEYS turn/realm/{REALM}/user/{USER}/allocation/*/status"));
        keys.contains("/status").then_some(keys)
    });
    let key = keys.lines().find(|line| line.ends_with("/status")).expect("a key");
    assert!(world.server.say(&format!("GET {key}")).contains("new lifetime=600"), "{key}");
    let allocations = a.json(&["allocations"]);
    let id = allocations[0]["id"].as_str().expect("a name");
    assert_eq!(a.told(&["allocation", "end", id]).code, Some(0));
    eventually("the allocation is gone", || world.server.say(&format!("EXISTS {key}")).starts_with(":0"));
}
