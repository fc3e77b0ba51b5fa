//! Documented configurations that share port 443 with a web server, in front of turnpike and behind it.

use crate::{documented::block, prelude::*};

const RECIPES: &str = include_str!("../../../../docs/recipes.md");
const STREAM_MODULE: &str = "/usr/lib/nginx/modules/ngx_stream_module.so";
const TURN: &str = "turn.example.org";
const WEB: &str = "www.example.org";
/// Address of the HTTPS client, which the site returns in its response.
const CLIENT: &str = "127.0.0.77";
const SHARED: &str = "127.0.0.1:443";
const SITE: &str = "127.0.0.1:8443";

fn behind() -> &'static str {
    RECIPES
        .split_once("### Behind turnpike")
        .and_then(|(_, rest)| rest.split_once("### In front"))
        .expect("both")
        .0
}

fn in_front() -> &'static str {
    RECIPES.split_once("### In front of turnpike").expect("a section").1
}

/// Certificates of the site and of turnpike, and files of the programs.
struct Bench {
    curl: PathBuf,
    site: Certificate,
    turn: Certificate,
    dir: Dir,
}

impl Bench {
    fn new(curl: PathBuf) -> Self {
        Self { curl, site: Certificate::new(&[WEB]), turn: Certificate::new(&[TURN]), dir: Dir::new() }
    }

    fn start(&self, program: &Path, arguments: &[&str], file: &Path, at: &str) -> Program {
        let mut command = Command::new(program);
        command.args(arguments).arg(file).current_dir(self.dir.path()).env("HOME", self.dir.path());
        let mut started = Program::start(&mut command);
        eventually("the program listens", || {
            assert!(!started.has_ended(), "it ended: {:?}", started.lines());
            TcpStream::connect(at).ok()
        });
        started
    }

    /// nginx with a site as documented, and `more` next to the `http` block.
    fn nginx(&self, program: &Path, more: &str, at: &str) -> Program {
        let here = self.dir.path().display();
        let own = format!(
            "server_name {WEB}; ssl_certificate {}; ssl_certificate_key {}; location / {{ return 200 $remote_addr; }}",
            self.site.cert().display(),
            self.site.key().display()
        );
        let server = with(
            block(behind(), "nginx, for each site:"),
            "# server_name, certificates and locations as before",
            &own,
        );
        let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .iter()
            .map(|kind| format!("{kind}_temp_path {here}/{kind}; "))
            .collect();
        let load = if more.is_empty() { String::new() } else { format!("load_module {STREAM_MODULE};\n") };
        let main = "daemon off; master_process off; error_log stderr notice; events {}";
        let text =
            format!("{load}{main} pid {here}/pid;\nhttp {{ access_log off; {paths}\n{server}}}\n{more}");
        let file = self.dir.file("nginx.conf", text);
        self.start(program, &["-e", "stderr", "-c"], &file, at)
    }

    fn caddy(&self, program: &Path, options: &str, at: &str) -> Program {
        let (cert, key) = (self.site.cert(), self.site.key());
        let site =
            format!("{WEB} {{\n tls {} {}\n respond {{remote_host}}\n}}\n", cert.display(), key.display());
        let file = self.dir.file("Caddyfile", format!("{options}{site}"));
        self.start(program, &["run", "--adapter", "caddyfile", "--config"], &file, at)
    }

    fn serve(&self, configuration: &str, more: &[&str]) -> Serve {
        let file = self.dir.file("turnpike.toml", configuration);
        let user = format!("{USER}:{PASSWORD}");
        let file = file.to_str().expect("UTF-8");
        let own = ["-c", file, "--realm", REALM, "--user", &user, "--relay-ip", "127.0.0.1"];
        Serve::start_bare(&[&own[..], more, &self.turn.flags()].concat())
    }

    /// Asserts that each name gets its own certificate, the site sees the client address `seen`, and TURN
    /// works.
    fn exercise(&self, seen: &str) {
        let resolve = format!("{WEB}:443:127.0.0.1");
        let mut curl = Command::new(&self.curl);
        curl.env_clear().args(["--disable", "--silent", "--show-error", "--fail", "--noproxy", "*"]);
        curl.args(["--interface", CLIENT, "--resolve", &resolve, "--cacert"]).arg(self.site.cert());
        let answer = Program::run(curl.arg(format!("https://{WEB}/"))).ended(0);
        assert_eq!(answer.stdout, seen);
        let shared: SocketAddr = SHARED.parse().expect("an address");
        assert_eq!(shown_by(shared, WEB), self.site.der());
        assert_eq!(shown_by(shared, TURN), self.turn.der());
        let ca = self.turn.cert().display().to_string();
        Load::at(&format!("turns:{SHARED}?transport=tcp"))
            .with(&format!("--ca {ca} --server-name {TURN} --mode allocate --rate 5 --duration 1"))
            .run()
            .ended(0);
    }
}

/// Replaces text that must be present.
fn with(text: &str, old: &str, new: &str) -> String {
    assert!(text.contains(old), "{old} is not in {text}");
    text.replace(old, new)
}

fn haproxy_checks(haproxy: &Path, file: &Path) {
    Program::run(Command::new(haproxy).arg("-c").arg("-f").arg(file)).ended(0);
}

const TIMEOUTS: &str = "defaults\n    timeout connect 5s\n    timeout client 30s\n    timeout server 30s\n";

#[test]
fn documented_nginx_shares_the_port_behind_turnpike() {
    let (nginx, curl) = (need!(installed("nginx")), need!(installed("curl")));
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        let bench = Bench::new(curl);
        let _site = bench.nginx(&nginx, "", SITE);
        let _serve = bench.serve(block(behind(), ""), &["--tls-listen", SHARED]);
        bench.exercise(CLIENT);
    });
}

#[test]
fn documented_haproxy_shares_the_port_behind_turnpike() {
    let (haproxy, curl) = (need!(installed("haproxy")), need!(installed("curl")));
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        let bench = Bench::new(curl);
        let pem = [bench.site.cert(), bench.site.key()]
            .map(|file| fs::read_to_string(file).expect("the test's own file"));
        let pem = bench.dir.file("site.pem", pem.concat());
        let site = with(block(behind(), "\nHAProxy:"), "/etc/haproxy/certs", &pem.display().to_string());
        let answer =
            "    mode http\n    http-request return status 200 content-type text/plain lf-string %[src]\n";
        let file = bench.dir.file("haproxy.cfg", format!("{TIMEOUTS}{site}{answer}"));
        haproxy_checks(&haproxy, &file);
        let _site = bench.start(&haproxy, &["-db", "-f"], &file, SITE);
        let _serve = bench.serve(block(behind(), ""), &["--tls-listen", SHARED]);
        bench.exercise(CLIENT);
    });
}

#[test]
fn documented_caddy_shares_the_port_behind_turnpike() {
    let (caddy, curl) = (need!(installed("caddy")), need!(installed("curl")));
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        let bench = Bench::new(curl);
        let (options, rules) = (block(behind(), "\nCaddy"), block(behind(), ""));
        let version = Program::run(Command::new(&caddy).arg("version")).ended(0).stdout;
        let numbers: Vec<u32> =
            version.trim_start_matches('v').split('.').map_while(|number| number.parse().ok()).collect();
        let knows_proxies = numbers >= vec![2, 7];
        let (options, rules) = if knows_proxies {
            (options.to_owned(), rules.to_owned())
        } else {
            let (before, _) = options.split_once("    servers").expect("the recipe has this line");
            (format!("{before}}}\n"), with(rules, ", proxy_protocol = \"v2\"", ""))
        };
        let _site = bench.caddy(&caddy, &options, SITE);
        let _serve = bench.serve(&rules, &["--tls-listen", SHARED]);
        bench.exercise(if knows_proxies { CLIENT } else { "127.0.0.1" });
    });
}

#[test]
fn documented_nginx_shares_the_port_in_front_of_turnpike() {
    let (nginx, curl) = (need!(installed("nginx")), need!(installed("curl")));
    if !Path::new(STREAM_MODULE).exists() {
        return skip("libnginx-mod-stream is not installed");
    }
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        let bench = Bench::new(curl);
        let _serve = bench.serve(block(in_front(), ""), &[]);
        let _web = bench.nginx(&nginx, block(in_front(), "nginx with"), SHARED);
        bench.exercise(CLIENT);
    });
}

#[test]
fn documented_haproxy_shares_the_port_in_front_of_turnpike() {
    let programs = (need!(installed("haproxy")), need!(installed("nginx")), need!(installed("curl")));
    let (haproxy, nginx, curl) = programs;
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        let bench = Bench::new(curl);
        let mut serve = bench.serve(block(in_front(), ""), &[]);
        let _site = bench.nginx(&nginx, "", SITE);
        let file = bench.dir.file("haproxy.cfg", block(in_front(), "\nHAProxy:"));
        haproxy_checks(&haproxy, &file);
        let _proxy = bench.start(&haproxy, &["-db", "-f"], &file, SHARED);
        bench.exercise(CLIENT);
        assert!(serve.program.line_with("allocation ended").contains("client=127.0.0.1:"));
    });
}

#[test]
fn documented_caddy_shares_the_port_in_front_of_turnpike() {
    let (caddy, curl) = (need!(installed("caddy")), need!(installed("curl")));
    let modules = Program::run(Command::new(&caddy).arg("list-modules")).ended(0).stdout;
    if !modules.contains("caddy.listeners.layer4") {
        return skip("this caddy is built without the layer4 module");
    }
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        let bench = Bench::new(curl);
        let _serve = bench.serve(block(in_front(), ""), &[]);
        let _site = bench.caddy(&caddy, block(in_front(), "\nCaddy"), SHARED);
        bench.exercise(CLIENT);
    });
}
