//! curl to nginx: plain, TLS terminated by nginx, PROXY protocol, large bodies in both directions.

use super::{Certificate, NAME, Workshop, all_installed, free_address, noise, run};
use crate::prelude::*;

const BODY: u64 = 48 << 20;

pub(super) struct Nginx {
    pub(super) http: SocketAddr,
    pub(super) https: SocketAddr,
    /// Expects a PROXY header and answers with its client address.
    pub(super) behind_proxy: SocketAddr,
    certificate: Certificate,
    workshop: Workshop,
    _program: Program,
}

impl Nginx {
    pub(super) fn start() -> Result<Self, String> {
        all_installed(&["nginx", "curl", "openssl"])?;
        let nginx = installed("nginx")?;
        let built_with = Program::run(Command::new(&nginx).arg("-V")).output();
        for module in ["http_ssl_module", "http_dav_module"] {
            if !built_with.contains(module) {
                return Err(format!("this nginx is built without {module}"));
            }
        }
        let workshop = Workshop::new();
        let certificate = Certificate::new(&workshop);
        let [http, https, behind_proxy] = [free_address(), free_address(), free_address()];
        fs::create_dir(workshop.path("www")).expect("the test's own directory");
        workshop.give(&workshop.path("www"));
        workshop.file("www/large", noise(BODY));
        workshop.file("www/small", "small\n");
        let here = workshop.path.display();
        let conf = workshop.file(
            "nginx.conf",
            format!(
                "daemon off; master_process off; pid {here}/pid; error_log stderr notice;
                events {{}}
                http {{
                    access_log off;
                    client_body_temp_path {here}/body; proxy_temp_path {here}/proxy; fastcgi_temp_path {here}/fastcgi;
                    uwsgi_temp_path {here}/uwsgi; scgi_temp_path {here}/scgi;
                    server {{
                        listen {http}; root {here}/www; client_max_body_size 0; dav_methods PUT;
                    }}
                    server {{
                        listen {https} ssl; root {here}/www;
                        ssl_certificate {}; ssl_certificate_key {};
                    }}
                    server {{
                        listen {behind_proxy} proxy_protocol;
                        location / {{ return 200 \"$proxy_protocol_addr $proxy_protocol_port $remote_addr\"; }}
                    }}
                }}\n",
                certificate.certificate.display(),
                certificate.key.display()
            ),
        );
        let mut program = Program::start(
            workshop.command(&nginx).args(["-e", "stderr", "-c"]).arg(conf).arg("-p").arg(&workshop.path),
        );
        eventually("nginx listens", || {
            assert!(!program.has_ended(), "nginx exited: {:?}", program.lines());
            std::net::TcpStream::connect(behind_proxy).ok()
        });
        Ok(Self { http, https, behind_proxy, certificate, workshop, _program: program })
    }

    pub(super) fn exercise_http(&self, through: SocketAddr) {
        let dir = Dir::new();
        let small = run(curl().arg(format!("http://{through}/small")).arg(format!("http://{through}/small")));
        assert_eq!(small.stdout, "small\nsmall");
        self.fetches_the_large_file(&dir, curl().arg(format!("http://{through}/large")));

        let sent = dir.path().join("sent");
        fs::write(&sent, noise(BODY / 2)).expect("the test's own directory");
        run(curl().arg("--upload-file").arg(&sent).arg(format!("http://{through}/stored")));
        let stored = fs::read(self.workshop.path("www/stored")).expect("nginx has stored the file");
        assert!(stored == noise(BODY / 2), "{} bytes were stored, not the ones sent", stored.len());
    }

    pub(super) fn exercise_https(&self, through: SocketAddr) {
        let dir = Dir::new();
        let url = format!("https://{NAME}:{}/large", through.port());
        let resolve = format!("{NAME}:{}:{}", through.port(), through.ip());
        let command = || {
            let mut command = curl();
            command.args(["--resolve", &resolve]).arg(&url);
            command
        };
        let refused = Program::run(&mut command());
        assert_eq!(refused.code, Some(60), "CURLE_PEER_FAILED_VERIFICATION: {}", refused.output());
        let trusted = self.certificate.certificate.as_os_str();
        self.fetches_the_large_file(&dir, command().arg("--cacert").arg(trusted));

        let openssl = installed("openssl").expect("checked at the start");
        let shown = Program::run(Command::new(openssl).args([
            "s_client",
            "-connect",
            &through.to_string(),
            "-servername",
            NAME,
        ]));
        assert!(shown.stdout.contains(&self.certificate.pem), "another certificate: {}", shown.output());
    }

    pub(super) fn exercise_proxy_header(&self, through: SocketAddr) {
        let client = ["--interface", "127.0.0.77", "--write-out", "\n%{local_port}"];
        let ended = run(curl().args(client).arg(format!("http://{through}/")));
        let (seen, port) = ended.stdout.split_once('\n').expect("the body and curl's own port");
        assert_eq!(seen, format!("127.0.0.77 {port} 127.0.0.1"));
    }

    fn fetches_the_large_file(&self, dir: &Dir, command: &mut Command) {
        let path = dir.path().join("got");
        run(command.arg("--output").arg(&path));
        let served = fs::read(self.workshop.path("www/large")).expect("the file is readable");
        let got = fs::read(&path).expect("curl has written the file");
        assert!(got == served, "{} bytes arrived, not the {} that are served", got.len(), served.len());
    }
}

fn curl() -> Command {
    let mut command = Command::new(installed("curl").unwrap_or_else(|_| Path::new("curl").to_owned()));
    // Ignores proxies from the environment and the user's configuration.
    command.env_clear().args(["--disable", "--silent", "--show-error", "--fail", "--noproxy", "*"]);
    command
}

fn start(rule: impl Fn(&Nginx) -> String) -> Result<(Nginx, Forward), String> {
    let nginx = Nginx::start()?;
    let forward = Forward::start(&[&rule(&nginx)]);
    Ok((nginx, forward))
}

#[test]
fn bodies_arrive_unchanged_in_both_directions() {
    for copy in copies() {
        let rule = |nginx: &Nginx| format!("tcp://127.0.0.1:0={}?name=web&copy={copy}", nginx.http);
        let (nginx, mut forward) = need!(start(rule));
        nginx.exercise_http(forward.address("rule web"));
        forward.wait_for("turnpike_forward_ended_total", "rule=\"web\",reason=\"finished\"", 3);
    }
}

#[test]
fn tls_passes_unchanged() {
    let (nginx, mut forward) = need!(start(|nginx| format!("tcp://127.0.0.1:0={}?name=tls", nginx.https)));
    nginx.exercise_https(forward.address("rule tls"));
}

#[test]
fn proxy_headers_of_both_versions_carry_the_client_address() {
    for version in ["v1", "v2"] {
        let rule = |nginx: &Nginx| format!("tcp://127.0.0.1:0={}?name=p&proxy={version}", nginx.behind_proxy);
        let (nginx, mut forward) = need!(start(rule));
        nginx.exercise_proxy_header(forward.address("rule p"));
    }
}

/// curl sends version 1; the forwarder trusts it and sends version 2.
#[test]
fn incoming_proxy_header_is_forwarded_in_the_other_version() {
    let rule = |nginx: &Nginx| {
        format!("tcp://127.0.0.1:0={}?name=p&proxy_protocol_from=127.0.0.78&proxy=v2", nginx.behind_proxy)
    };
    let (_nginx, mut forward) = need!(start(rule));
    let through = forward.address("rule p");
    let client = ["--interface", "127.0.0.78", "--haproxy-protocol"];
    let ended = run(curl().args(client).arg(format!("http://{through}/")));
    assert!(ended.stdout.starts_with("127.0.0.78 "), "{}", ended.stdout);
}
