//! The admin interface as third-party programs see it: OpenAPI validators (tests/interop/openapi) and curl.

use crate::prelude::*;

fn socket(dir: &Dir) -> Result<PathBuf, &'static str> {
    let path = dir.path().join("a.sock");
    if path.as_os_str().len() <= 107 { Ok(path) } else { Err("the path of the socket is too long") }
}

fn curl(arguments: &[&str]) -> Result<Finished, String> {
    let mut command = Command::new(installed("curl")?);
    command.args(["--silent", "--show-error", "--max-time", "60"]).args(arguments);
    Ok(Program::run(&mut command))
}

#[test]
fn openapi_validator_accepts_the_document_and_every_answer() {
    let dir = Dir::new();
    let socket = need!(socket(&dir));
    let python = need!(interop_program("interop-openapi", "openapi/bin/python"));
    let admin = format!("unix:{}", socket.display());
    let certificate = Certificate::new(&["turn.example.org"]);
    let mut arguments = certificate.flags().to_vec();
    arguments.extend(["--admin", &admin]);
    let serve = Serve::start(&arguments);
    let reflect = Reflect::start(V4, &[]);
    let _load = serve.load(&reflect).with("--clients 3 --rate 30 --duration 600").start();
    serve.wait_for_allocations(3);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/interop/openapi/check.py");
    let ended = Program::run(Command::new(python).arg(script).arg(&socket)).ended(0);
    let report = super::report(&ended);
    assert_eq!(report["wrong"], serde_json::json!([]), "{report}");
    assert_eq!((&report["openapi"], &report["allocations"]), (&"3.1.0".into(), &3.into()), "{report}");
    assert!(report["tried"].as_u64() > Some(20), "{report}");
}

#[test]
fn curl_works_over_the_socket_and_loopback() {
    let dir = Dir::new();
    let socket = need!(socket(&dir));
    let admin = format!("unix:{}", socket.display());
    let serve = Serve::start(&["--admin", &admin]);
    let path = socket.to_str().expect("the test's path is UTF-8");
    let ended = need!(curl(&["--unix-socket", path, "http://localhost/v1/status"]));
    let status: serde_json::Value = serde_json::from_str(&ended.stdout).expect("JSON");
    assert_eq!((&status["job"], &status["pid"]), (&"serve".into(), &serve.program.pid().into()));
    let put = ["--request", "PUT", "--json", "{\"level\":\"debug\"}", "--unix-socket", path];
    let ended = curl(&[&put[..], &["http://localhost/v1/log"]].concat()).expect("the server answers");
    assert_eq!(ended.stdout, "{\"level\":\"debug\"}");
    let code = |arguments: &[&str]| {
        let all = [&["--output", "/dev/null", "--write-out", "%{http_code}"], arguments].concat();
        curl(&all).expect("the server answers").stdout
    };
    let live = format!("http://{}/v1/status", serve.admin());
    let reload = format!("http://{}/v1/reload", serve.admin());
    assert_eq!(code(&[&live]), "200");
    assert_eq!(code(&["--request", "POST", &reload]), "401");
    assert_eq!(code(&["--header", "Host: rebound.example", &live]), "421");
    assert_eq!(code(&["--header", "Origin: http://evil.example", &live]), "403");
}

#[test]
fn curl_works_over_tls_with_a_token() {
    let dir = Dir::new();
    let certificate = Certificate::of_authority(&["admin.example.org"]);
    let token = "0123456789abcdef0123456789abcdef";
    let [_, cert, _, key] = certificate.flags();
    let text = format!(
        "[admin]\nlisten = [\"127.0.0.1:0\", \"0.0.0.0:0\"]\nread_tokens = [\"{token}\"]\ntls_cert = \"{cert}\"\ntls_key = \"{key}\"\n"
    );
    let file = dir.file("t.toml", &text);
    let mut serve = Program::start(&mut turnpike_trials::turnpike(&[
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--relay-ip",
        "127.0.0.1",
        "--user",
        "a:b",
        "-c",
        file.to_str().expect("the test's path is UTF-8"),
    ]));
    let line = serve.line_with("admin interface on https://");
    assert!(line.contains("with a token or a client certificate"), "{line}");
    let port = turnpike_trials::address_after(&line, "https://").port();
    let authority = certificate.authority();
    let authority = authority.to_str().expect("the test's path is UTF-8");
    let resolve = format!("admin.example.org:{port}:127.0.0.1");
    let code = |path: &str, more: &[&str]| {
        let url = format!("https://admin.example.org:{port}{path}");
        let all = [
            "--cacert",
            authority,
            "--resolve",
            &resolve,
            "--output",
            "/dev/null",
            "--write-out",
            "%{http_code}",
        ];
        Ok::<_, String>(curl(&[&all[..], more, &[&url]].concat())?.stdout)
    };
    let bearer = format!("Authorization: Bearer {token}");
    let answered = need!(code("/livez", &[]));
    assert_eq!(answered, "421", "the name is not configured");
    let host = ["--header", "Host: localhost"];
    let ask =
        |path: &str, more: &[&str]| code(path, &[&host[..], more].concat()).expect("the server answers");
    assert_eq!(ask("/livez", &[]), "200");
    assert_eq!(ask("/v1/status", &[]), "401");
    assert_eq!(ask("/v1/status", &["--header", &bearer]), "200");
    assert_eq!(ask("/v1/reload", &["--header", &bearer, "--request", "POST"]), "403");
    assert_eq!(
        ask("/v1/status", &["--header", "Authorization: Bearer 0123456789abcdef0123456789abcdee"]),
        "401"
    );
    eventually("the allocation continues", || !serve.has_ended());
}
