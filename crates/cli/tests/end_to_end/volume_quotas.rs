//! Volume quotas: their events, and their effect on the clients of two servers with one ledger.

use crate::{
    events::{next, stream},
    prelude::*,
};

const TEXT: &str = "[auth]\nusers = [\"alice:secret\", \"bob:secret\"]\n[usage]\ndays = 400\n";

struct Metered {
    serve: Serve,
    config: PathBuf,
}

impl Metered {
    fn start(dir: &Dir, name: &str, quotas: &str) -> Self {
        let config = dir.file(name, format!("{TEXT}{quotas}"));
        let (path, state) = (config.display().to_string(), dir.path().join("state").display().to_string());
        let serve = Serve::start_bare(
            &[
                &["-c", &path, "--state", &state, "--realm", "example.org", "--workers", "2"],
                &["--relay-ip", "127.0.0.1", "--allow-peer", "127.0.0.0/8"][..],
            ]
            .concat(),
        );
        Self { serve, config }
    }

    fn reload(&mut self, quotas: &str) {
        fs::write(&self.config, format!("{TEXT}{quotas}")).expect("the test's own file");
        self.serve.program.signal("HUP");
        self.serve.program.line_with("reloaded usage.quota: ");
    }

    /// 0.8 MB per second.
    fn load(&self, user: &str, reflect: &Reflect, seconds: &str) -> Load {
        Load::as_user(self.serve.address(V4), &format!("{user}:secret"))
            .to(reflect.address)
            .with(&format!("--clients 4 --rate 400 --size 1000 --warmup 0 --duration {seconds}"))
    }

    /// Error code of an Allocate.
    fn allocate(&self, user: &str) -> Option<u16> {
        let client = stun::Client::new(self.serve.address(V4));
        let (_, _, challenge) = client.challenge();
        client.allocate(user, "secret", &challenge)
    }

    fn notices(&self) -> usize {
        self.serve.program.lines().iter().filter(|line| line.contains("of a volume quota is used")).count()
    }
}

#[test]
fn a_used_up_quota_refuses_new_allocations_on_all_servers() {
    let dir = Dir::new();
    let quota = "[[usage.quota]]\nby = \"user\"\nbytes = \"3M\"\n";
    let [mut one, two] = ["one.toml", "two.toml"].map(|name| Metered::start(&dir, name, quota));
    let mut events = [&one, &two].map(|metered| stream(metered.serve.admin(), "quota", ""));
    let reflect = Reflect::start(V4, &[]);
    assert_eq!((one.allocate("alice"), two.allocate("alice")), (None, None));
    // Each server relays less than the quota.
    let loads = [&one, &two].map(|metered| metered.load("alice", &reflect, "3").start());
    loads.map(|load| load.wait(SOON).ended(0));
    for (server, name) in [(&one, "the first server"), (&two, "the second one")] {
        eventually(&format!("alice is refused by {name}"), || server.allocate("alice") == Some(486));
        assert_eq!(server.allocate("bob"), None);
    }
    let refused = || one.serve.metrics().sum("turnpike_limit_refusals_total", "limit=\"volume\"") > 0;
    eventually("the refusals are counted", refused);
    let (_, refusals) = fetch(one.serve.admin(), "/v1/refusals?user=alice").expect("an answer");
    assert!(refusals.contains("volume quota") && refusals.contains("usage.quota"), "{refusals}");

    eventually("both notices are logged", || one.notices() + two.notices() == 2);
    let mut percentages = Vec::new();
    for (server, events) in [&one, &two].into_iter().zip(&mut events) {
        for _ in 0..server.notices() {
            let (_, event) = next(events);
            let data = &event["data"];
            for (member, value) in
                [("by", "user"), ("name", "alice"), ("realm", "example.org"), ("per", "month")]
            {
                assert_eq!(data[member], value, "{event}");
            }
            let number = |member: &str| data[member].as_u64().unwrap_or_else(|| panic!("{member}: {event}"));
            assert!(number("bytes") * 100 >= number("quota") * number("percent"), "{event}");
            percentages.push(number("percent"));
        }
    }
    percentages.sort_unstable();
    assert_eq!(percentages, [80, 100]);

    // A restarted server knows the sums, and does not repeat the notices.
    drop(two);
    let two = Metered::start(&dir, "two.toml", quota);
    eventually("the restarted server refuses alice", || two.allocate("alice") == Some(486));
    one.reload("[[usage.quota]]\nby = \"user\"\nbytes = \"1G\"\n");
    eventually("a raised quota admits alice", || one.allocate("alice").is_none());
    assert!(two.notices() == 0 && one.notices() <= 2);
}

#[test]
fn a_used_up_quota_slows_open_and_new_allocations_of_the_user() {
    let dir = Dir::new();
    let quota = "[[usage.quota]]\nby = \"user\"\nbytes = \"1M\"\nper = \"day\"\nthen = \"100k\"\n";
    let mut one = Metered::start(&dir, "turnpike.toml", quota);
    let reflect = Reflect::start(V4, &[]);
    let dropped = |metered: &Metered| {
        metered.serve.metrics().sum("turnpike_dropped_datagrams_total", "reason=\"user_bandwidth\"")
    };
    let load = one.load("alice", &reflect, "600").start();
    eventually("open allocations are slowed", || dropped(&one) > 100);
    load.signal("INT");
    load.wait(SOON);
    let lost = |metered: &Metered, user: &str| {
        let result = metered.load(user, &reflect, "2").run().result();
        result["lost"].as_u64().expect("a number")
    };
    assert!(lost(&one, "alice") > 400, "of 800");
    assert_eq!(lost(&one, "bob"), 0);
    assert_eq!(one.allocate("alice"), None, "not refused");
    one.reload("");
    eventually("the limit is lifted", || lost(&one, "alice") == 0);
}
