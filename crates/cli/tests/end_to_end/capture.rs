//! `turnpike capture`: both legs of an allocation, as tcpdump reads them, and the right to capture.

use crate::prelude::*;

const TOKEN: &str = "capture-token-0123";
const FULL_TOKEN: &str = "full-token-0123456";
const SIZE: &str = "172";

struct Captured {
    serve: Serve,
    reflect: Reflect,
    load: Program,
    id: String,
    dir: Dir,
}

impl Captured {
    fn start(transport: &str) -> Self {
        let dir = Dir::new();
        let tokens = format!("[admin]\ntokens = [\"{FULL_TOKEN}\"]\ncapture_tokens = [\"{TOKEN}\"]\n");
        let config = dir.file("turnpike.toml", tokens);
        let certificate = Certificate::new(&["localhost"]);
        let path = config.to_str().expect("the test's path is UTF-8");
        let serve = Serve::start_secured(&certificate, &["-c", path]);
        let reflect = Reflect::start(V4, &[]);
        let more = format!(
            "--transport {transport} --insecure --clients 1 --rate 200 --size {SIZE} --warmup 0 --duration 60"
        );
        let load = Load::new(serve.address_of(transport, V4)).to(reflect.address).with(&more).start();
        serve.wait_for_allocations(1);
        let list = fetch(serve.admin(), "/v1/allocations").expect("the admin interface answers").1;
        let list: Value = serde_json::from_str(&list).expect("JSON");
        let id = list["allocations"][0]["id"].as_str().expect("an id").to_owned();
        Self { serve, reflect, load, id, dir }
    }

    fn capture(&self, token: Option<&str>, more: &[&str]) -> Finished {
        let admin = self.serve.admin().to_string();
        let file = self.dir.file("token", token.unwrap_or_default());
        let mut words = vec!["capture", &self.id, "--admin", &admin];
        if token.is_some() {
            words.extend(["--token-file", file.to_str().expect("the test's path is UTF-8")]);
        }
        words.extend(more);
        Program::run(&mut turnpike(&words))
    }

    /// Lines of tcpdump about a capture of at most `count` datagrams.
    fn read(&self, count: &str, more: &[&str]) -> Vec<String> {
        let file = self.dir.at("capture.pcapng");
        let path = file.to_str().expect("the test's path is UTF-8");
        self.capture(Some(TOKEN), &[&["-w", path, "--count", count], more].concat()).ended(0);
        let read = Program::run(Command::new("tcpdump").args(["-nvr", path])).ended(0);
        read.stdout.lines().map(str::to_owned).collect()
    }
}

fn has_tcpdump() -> bool {
    let found = Command::new("tcpdump").arg("--version").output().is_ok();
    if !found {
        println!("SKIPPED: tcpdump is not installed");
    }
    found
}

#[test]
fn tcpdump_reads_both_legs_of_an_allocation() {
    if !has_tcpdump() {
        return;
    }
    for transport in ["udp", "tls"] {
        let mut captured = Captured::start(transport);
        let lines = captured.read("40", &[]);
        let text = lines.join("\n");
        assert!(!text.contains("bad cksum") && !text.contains("truncated"), "{text}");
        let server = captured.serve.address_of(transport, V4);
        let about = |needle: &str| lines.iter().filter(|line| line.contains(needle)).count();
        // tcpdump writes ADDRESS.PORT.
        let dotted = |address: SocketAddr| format!("{}.{}", address.ip(), address.port());
        let (server, peer) = (dotted(server), dotted(captured.reflect.address));
        let (to_server, from_server) = (about(&format!(" > {server}: ")), about(&format!("{server} > ")));
        let (to_peer, from_peer) = (about(&format!(" > {peer}: ")), about(&format!("{peer} > ")));
        assert_eq!((to_server, from_server), (to_peer, from_peer), "each datagram is on both legs:\n{text}");
        assert!(to_server + from_server == 40 && to_server > 0 && from_server > 0, "{text}");
        assert!(text.contains(&format!("length {SIZE}")), "the peers' leg has the payload's length:\n{text}");
        let begun = captured.serve.program.line_with("capture of allocation");
        assert!(
            begun.contains("turnpike::audit") && begun.contains("token 1 of admin.capture_tokens"),
            "{begun}"
        );
        let ended = captured.serve.program.line_with("capture ended");
        assert!(ended.contains("datagrams=40 lost=0") && ended.contains(&captured.id), "{ended}");
        captured.load.signal("INT");
    }
}

#[test]
fn payload_is_captured_only_if_it_is_asked_for() {
    let captured = Captured::start("udp");
    let lengths = [&[][..], &["--snap", "100"]].map(|more| {
        let file = captured.dir.at("capture.pcapng");
        let path = file.to_str().expect("the test's path is UTF-8");
        let words = [&["-w", path, "--count", "10"], more].concat();
        captured.capture(Some(TOKEN), &words).ended(0);
        fs::metadata(&file).expect("a file").len()
    });
    let payload = 10 * 2 * 100;
    assert_eq!(lengths[1] - lengths[0], payload, "{lengths:?}");
}

#[test]
fn capture_needs_its_own_right_and_has_bounds() {
    let mut captured = Captured::start("udp");
    for token in [None, Some(FULL_TOKEN)] {
        let refused = captured.capture(token, &["--count", "1"]).ended(1);
        assert!(refused.stderr.contains("admin.capture_tokens"), "{}", refused.stderr);
        captured.serve.program.line_with("refused\"");
    }
    captured.capture(Some(TOKEN), &["--count", "0"]).ended(2);
    captured.capture(Some(TOKEN), &["--seconds", "1"]).ended(0);
    captured.load.signal("INT");
    captured.serve.wait_for_allocations(0);
    let gone = captured.capture(Some(TOKEN), &[]).ended(1);
    assert!(gone.stderr.contains("there is no allocation"), "{}", gone.stderr);
}
