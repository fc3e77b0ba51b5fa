//! `load --profile`: calls and similar traffic through the server and the forwarder, reported by direction and stream.

use crate::prelude::*;

const SHORT: [&str; 4] = ["--duration", "1", "--warmup", "0.2"];

fn count(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} is not a count in {value}"))
}

fn complete(run: &Finished) -> Value {
    assert_eq!(run.code, Some(0), "{}", run.output());
    let result = run.result();
    assert_eq!(
        (count(&result, "lost"), &result["errors"]),
        (0, &Value::Object(Default::default())),
        "{result}"
    );
    let profile = &result["profile"];
    let directions = [&profile["to_peer"], &profile["to_client"]];
    for direction in directions {
        assert!(count(direction, "sent") > 0, "{result}");
        assert_eq!(
            (count(direction, "received"), count(direction, "lost")),
            (count(direction, "sent"), 0),
            "{result}"
        );
        assert!(count(&direction["latency_us"], "p99") > 0, "{result}");
    }
    assert_eq!(
        directions.map(|direction| count(direction, "sent")).iter().sum::<u64>(),
        count(&result, "sent")
    );
    result
}

#[test]
fn call_profile_runs_through_the_server() {
    let serve = Serve::start(&[]);
    let load = Load::new(serve.address(V4)).with("--profile call --seed 3 --clients 2");
    let result = complete(&load.with_words(&SHORT).with("--max-loss 0").run());
    let profile = &result["profile"];
    assert_eq!((&profile["name"], count(profile, "seed")), (&"call".into(), 3), "{result}");
    let streams = profile["streams"].as_array().expect("a list");
    let names: Vec<_> = streams.iter().filter_map(|stream| stream["name"].as_str()).collect();
    assert_eq!(names, ["audio", "audio", "video", "video", "feedback", "feedback", "reports", "reports"]);
    assert!(streams[..2].iter().all(|stream| count(stream, "sent") == 100), "{result}");
    serve.wait_for_allocations(0);
}

#[test]
fn custom_profile_runs_through_the_forwarder() {
    let dir = Dir::new();
    let text = "[[stream]]\nname = 'door'\ndirection = 'to-client'\nrate = 100\nsize = [100, 200]\n\
                [[stream]]\nname = 'bell'\ndirection = 'to-peer'\nrate = 10\nsize = 30\n";
    let file = dir.file("intercom.toml", text);
    let peer = SocketAddr::new(V4, free_port(V4)).to_string();
    let mut forward = Forward::start(&[&format!("udp://127.0.0.1:0={peer}?name=a")]);
    let server = forward.address("rule a").to_string();
    let arguments = ["load", "udp", &server, "--peer", &peer, "--profile", file.to_str().expect("UTF-8")];
    let json = complete(&Program::run(&mut turnpike(&[&arguments[..], &SHORT, &["--json", "-"]].concat())));
    assert_eq!(json["profile"]["name"], "intercom");
    let run = Program::run(&mut turnpike(&[&arguments[..], &SHORT].concat())).ended(0);
    for words in [
        "latency (one way) in us: min ",
        "profile intercom, seed 1, ",
        "to peer ",
        "to client ",
        "  door ",
        "  bell ",
    ] {
        assert!(run.stdout.contains(words), "no {words:?} in {}", run.output());
    }
}

#[test]
fn profile_error_is_bad_usage_and_names_the_line() {
    let dir = Dir::new();
    let file = dir.file("wrong.toml", "[[stream]]\nname = 'a'\ndirection = 'both'\nrate = 50\nsizes = 100\n");
    let file = file.to_str().expect("UTF-8");
    for (flags, what) in [
        (&["--profile", file][..], "wrong.toml:5:1: unknown key \"sizes\"; did you mean \"size\"?"),
        (&["--profile", "vioce"], "audio, call, sfu, screen, vpn"),
        (&["--profile", "call", "--rate", "10"], "--rate"),
        (&["--profile", "call", "--size", "100"], "--size"),
        (&["--seed", "3"], "--profile"),
    ] {
        for kind in ["turn", "udp"] {
            let run =
                Program::start(&mut turnpike(&[&["load", kind, "127.0.0.1"], flags].concat())).wait(SOON);
            assert_eq!(run.code, Some(2), "{kind} {flags:?}: {}", run.output());
            assert!(run.stderr.contains(what), "{kind} {flags:?}: {}", run.output());
        }
    }
    Program::run(&mut turnpike(&["load", "turn", "127.0.0.1", "--profile", "call", "--mode", "allocate"]))
        .ended(2)
        .says("--mode allocate");
}
