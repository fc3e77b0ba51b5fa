//! curl fetches files from Python's http.server through the forwarder, byte for byte.

use crate::prelude::*;

#[test]
fn curl_gets_files_of_all_sizes() {
    let (curl, python) = (need!(installed("curl")), need!(installed("python3")));
    let dir = Dir::new();
    // Port 0: the server picks a free port and prints it.
    let mut web = Program::start(
        Command::new(python)
            .args(["-u", "-m", "http.server", "0", "--bind", "127.0.0.1"])
            .current_dir(dir.path()),
    );
    let line = web.line_with("Serving HTTP on 127.0.0.1 port ");
    let port = line.split("port ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a port");
    let server = format!("127.0.0.1:{port}");

    for copy in copies() {
        let mut forward = Forward::start(&[&format!("tcp://127.0.0.1:0={server}?name=web&copy={copy}")]);
        let address = forward.address("rule web");
        for size in [0, 1, 70_000, 8 << 20] {
            let content: Vec<u8> =
                (0..size).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            fs::write(dir.path().join("file"), &content).expect("the test's own directory");
            let got = dir.path().join("got");
            Program::start(Command::new(&curl).args([
                "--silent",
                "--show-error",
                "--fail",
                "--output",
                got.to_str().expect("the test's path is UTF-8"),
                &format!("http://{address}/file"),
            ]))
            .wait(SOON)
            .ended(0);
            // curl creates no file for an empty response.
            assert!(fs::read(&got).unwrap_or_default() == content, "{copy}, {size} bytes");
            let _ = fs::remove_file(&got);
        }
        forward.wait_for("turnpike_forward_accepted_total", "", 4);
    }
}
