//! Several realms on one server, each with its own users, listener and limit, from one file and through a reload.

use crate::prelude::*;

fn allocate(port: u16, user: &str, clients: &str) -> Finished {
    Load::as_user(([127, 0, 0, 1], port).into(), user)
        .with(&format!("--mode allocate --clients {clients} --rate 20 --duration 1"))
        .run()
}

#[test]
fn each_listener_serves_its_realm_even_after_a_reload() {
    let dir = Dir::new();
    let ports = [free_port(V4), free_port(V4)];
    let [north, south] = ports.map(|port| format!("127.0.0.1:{port}"));
    let text = |users: &str| {
        format!(
            "[server]\nlisten = [\"{north}\", \"{south}\"]\n\
             [[realm]]\nname = \"north.example\"\nusers = [{users}]\nlisten = [\"{north}\"]\n\
             [[realm]]\nname = \"south.example\"\nusers = [\"sue:two\"]\nlisten = [\"{south}\"]\n"
        )
    };
    let file = dir.file("turnpike.toml", text("\"ned:one\""));
    let path = file.to_str().expect("the test's path is UTF-8");
    let more = ["--relay-ip", "127.0.0.1", "--allow-peer", "127.0.0.0/8", "--admin", "off"];
    let mut serve = Program::start(&mut turnpike(&[&["serve", "-c", path], &more[..]].concat()));
    serve.line_with("data path");

    let expect = |cases: &[(u16, &str, i32)]| {
        for (port, user, code) in cases {
            let ended = allocate(*port, user, "1");
            assert_eq!(ended.code, Some(*code), "{user} on {port}: {}", ended.output());
        }
    };
    let [north, south] = ports;
    expect(&[(north, "ned:one", 0), (south, "sue:two", 0), (north, "sue:two", 1), (south, "ned:one", 1)]);
    assert!(serve.line_with("allocation ended").contains("realm=\"north.example\" user=\"ned\""));

    fs::write(&file, text("\"nina:three\"")).expect("the test's own file");
    serve.signal("HUP");
    serve.line_with("configuration reloaded");
    expect(&[
        (north, "ned:one", 1),
        (north, "nina:three", 0),
        (south, "sue:two", 0),
        (south, "nina:three", 1),
    ]);
}
