//! `serve` against the test CA Pebble (RFC 8555): every challenge type; a CA that is down, is slow, refuses orders or
//! rejects nonces; existing accounts; and a fleet.

use crate::prelude::*;

const NAME: &str = "turn.example.org";

pub(super) struct Authority {
    pub(super) certificate: Certificate,
    pub(super) directory: String,
    dns_management: u16,
    tls_port: u16,
    http_port: u16,
    _pebble: Program,
    _dns: Program,
    _dir: Dir,
}

impl Authority {
    /// Resolves every name to 127.0.0.1, and validates on `tls_port` and `http_port`.
    fn start(variables: &[(&str, &str)]) -> Result<Self, String> {
        Self::with(variables, json!({}))
    }

    fn with(variables: &[(&str, &str)], settings: Value) -> Result<Self, String> {
        let ports = [(); 3].map(|()| free_port(V4));
        Self::at(Ipv4Addr::LOCALHOST, Ipv4Addr::LOCALHOST, ports, variables, settings)
    }

    /// Listens on `address`, and resolves every name to `servers`.
    pub(super) fn at(
        address: Ipv4Addr,
        servers: Ipv4Addr,
        [dns_port, tls_port, http_port]: [u16; 3],
        variables: &[(&str, &str)],
        settings: Value,
    ) -> Result<Self, String> {
        let (pebble, dns) = (
            interop_program("interop-acme", "pebble")?,
            interop_program("interop-acme", "pebble-challtestsrv")?,
        );
        let [port, management, dns_management] = [(); 3].map(|()| free_port(address.into()));
        let certificate = Certificate::of_authority(&[&address.to_string()]);
        let dir = Dir::new();
        let mut config = json!({ "pebble": {
            "listenAddress": format!("{address}:{port}"),
            "managementListenAddress": format!("{address}:{management}"),
            "certificate": certificate.cert(),
            "privateKey": certificate.key(),
            "httpPort": http_port,
            "tlsPort": tls_port,
            "keyAlgorithm": "ecdsa",
            "domainBlocklist": ["blocked.example.org"],
            "retryAfter": { "authz": 1, "order": 1 },
            "profiles": {
                "default": { "description": "90 days", "validityPeriod": 7_776_000 },
                "shortlived": { "description": "6 days", "validityPeriod": 518_400 },
            },
        }});
        for (key, value) in settings.as_object().expect("settings") {
            config["pebble"][key] = value.clone();
        }
        let config = dir.file("pebble.json", config.to_string());
        let mut command = Command::new(dns);
        command.args(["-dnsserver", &format!("{address}:{dns_port}")]);
        command.args(["-defaultIPv4", &servers.to_string(), "-defaultIPv6", ""]);
        command.args(["-management", &format!("127.0.0.1:{dns_management}")]);
        command.args(["-http01", "", "-https01", "", "-doh", "", "-tlsalpn01", ""]);
        let dns_program = Program::start(&mut command);
        let mut command = Command::new(pebble);
        command.arg("-config").arg(&config).args(["-dnsserver", &format!("{address}:{dns_port}")]);
        command
            .env("PEBBLE_VA_NOSLEEP", "1")
            .env("PEBBLE_WFE_NONCEREJECT", "0")
            .envs(variables.iter().copied());
        let pebble = Program::start(&mut command);
        eventually("pebble listens", || TcpStream::connect((address, port)).is_ok());
        let directory = format!("https://{address}:{port}/dir");
        Ok(Self {
            certificate,
            directory,
            dns_management,
            tls_port,
            http_port,
            _pebble: pebble,
            _dns: dns_program,
            _dir: dir,
        })
    }

    /// Makes a name resolve to only this address.
    fn resolve(&self, name: &str, address: Ipv4Addr) {
        let body = json!({ "host": format!("{name}."), "addresses": [address] }).to_string();
        let length = body.len();
        let mut stream =
            TcpStream::connect((Ipv4Addr::LOCALHOST, self.dns_management)).expect("the name server listens");
        write!(stream, "POST /add-a HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{body}")
            .expect("the name server reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("the name server answers");
        assert!(answer.contains(" 200 "), "{answer}");
    }

    fn config(&self, dir: &Dir, names: &[&str], more: &str) -> PathBuf {
        config(dir, names, &self.directory, &self.certificate.authority(), more)
    }
}

fn config(dir: &Dir, names: &[&str], directory: &str, authority: &Path, more: &str) -> PathBuf {
    let state = dir.path().join("state");
    dir.file(
        "turnpike.toml",
        format!(
            "[tls]\nacme = {names:?}\n[store]\nstate = {state:?}\n[acme]\ndirectory = {directory:?}\nauthority = {authority:?}\n{more}\n"
        ),
    )
}

fn serve(config: &Path, more: &[&str]) -> Serve {
    let config = config.to_str().expect("UTF-8");
    Serve::start(&[&["--config", config], more].concat())
}

fn wait_for_certificate(serve: &Serve, address: SocketAddr, name: &'static str) {
    eventually("the certificate arrives", || {
        serve.metrics().sum("turnpike_acme_orders_total", "issued") == 1
    });
    eventually("the certificate is presented", || {
        std::panic::catch_unwind(|| shown_by(address, name)).is_ok()
    });
}

#[test]
fn certificate_is_ordered_by_tls_alpn_01_while_udp_and_tcp_already_work() {
    let authority = need!(Authority::start(&[]));
    let dir = Dir::new();
    // Validation connections must not be passed through to the web server.
    let web_server = "[server]\nhand_on = [{ sni = \"*.example.org\", to = \"127.0.0.1:1\" }]";
    let more = format!("challenge = \"tls-alpn-01\"\n{web_server}");
    let config = authority.config(&dir, &[NAME], &more);
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, authority.tls_port));
    let mut serve = serve(&config, &["--tls-listen", &address.to_string()]);
    assert_eq!(Load::new(serve.address(V4)).with("--mode allocate --rate 20").run().code, Some(0));
    wait_for_certificate(&serve, address, NAME);
    serve.program.line_with(&format!("new certificate for {NAME}"));
    let mode = |name: &str| {
        let file = dir.path().join("state/acme").join(name);
        fs::metadata(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display())).permissions().mode()
            & 0o777
    };
    assert_eq!(mode(&format!("{NAME}.pem")), 0o600);
    // Pebble validates each name three times.
    assert_eq!(serve.metrics().sum("turnpike_connections_closed_total", "reason=\"challenge\""), 3);
    let first = shown_by(address, NAME);
    drop(serve);
    let serve = self::serve(&config, &["--tls-listen", &address.to_string()]);
    assert_eq!(shown_by(address, NAME), first, "kept across restarts");
    assert_eq!(serve.metrics().sum("turnpike_acme_orders_total", ""), 0);
}

#[test]
fn certificate_is_ordered_by_http_01() {
    let authority = need!(Authority::start(&[]));
    let dir = Dir::new();
    let listen = format!("http_listen = [\"127.0.0.1:{}\"]", authority.http_port);
    let serve = serve(&authority.config(&dir, &[NAME], &listen), &[]);
    wait_for_certificate(&serve, serve.address(V4), NAME);
    assert!(TcpListener::bind((Ipv4Addr::LOCALHOST, authority.http_port)).is_ok(), "the port is in use");
}

/// The hook runs in the server's sandbox.
#[test]
fn wildcard_is_ordered_by_dns_01_with_a_hook() {
    let authority = need!(Authority::start(&[]));
    let dir = Dir::new();
    let hook = dir.file(
        "hook",
        format!(
            r#"#!/bin/bash
set -e
case $1 in
  set) path=/set-txt body="{{\"host\":\"$2.\",\"value\":\"$3\"}}" ;;
  remove) path=/clear-txt body="{{\"host\":\"$2.\"}}" ;;
esac
exec 3<>/dev/tcp/127.0.0.1/{}
printf 'POST %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s' "$path" ${{#body}} "$body" >&3
read -r answer <&3
case $answer in *" 200 "*) ;; *) echo "$answer" >&2; exit 1 ;; esac
"#,
            authority.dns_management
        ),
    );
    fs::set_permissions(&hook, fs::Permissions::from_mode(0o755)).expect("the file is ours");
    let more = format!("challenge = \"dns-01\"\nhook = {hook:?}");
    let serve = serve(&authority.config(&dir, &["*.example.org"], &more), &[]);
    wait_for_certificate(&serve, serve.address(V4), "any.example.org");
    assert!(dir.path().join("state/acme/_.example.org.pem").is_file());
}

#[test]
fn address_gets_a_short_lived_certificate() {
    let authority = need!(Authority::start(&[]));
    let dir = Dir::new();
    let config = authority.config(&dir, &["127.0.0.1"], "challenge = \"tls-alpn-01\"");
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, authority.tls_port));
    let serve = serve(&config, &["--tls-listen", &address.to_string()]);
    wait_for_certificate(&serve, address, "any.example.org");
    let left = serve.metrics().sum("turnpike_certificate_not_after_seconds", "").saturating_sub(now());
    assert!((5 * 86_400..=6 * 86_400).contains(&left), "{left}");
}

fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs()
}

/// The log gives the reason and the consequence; TURN without TLS keeps working, and other names still get
/// certificates.
#[test]
fn refusals_are_explained_and_do_not_stop_the_service() {
    let authority = need!(Authority::start(&[]));
    let dir = Dir::new();
    let more = format!("http_listen = [\"127.0.0.1:{}\"]", authority.http_port);
    let mut serve = serve(&authority.config(&dir, &["blocked.example.org", NAME], &more), &[]);
    let line = serve.program.line_with("no new certificate for blocked.example.org");
    for part in
        ["rejectedIdentifier", "use another name", "next attempt in", "start once the certificate is issued"]
    {
        assert!(line.contains(part), "{part}: {line}");
    }
    wait_for_certificate(&serve, serve.address(V4), NAME);
    let metrics = serve.metrics();
    assert_eq!(
        metrics.sum("turnpike_acme_failures", "name=\"blocked.example.org\""),
        1,
        "{}",
        metrics.text()
    );
    assert_eq!(Load::new(serve.address(V4)).with("--mode allocate --rate 20").run().code, Some(0));
}

#[test]
fn port_in_use_and_a_failing_validation_are_explained() {
    let authority = need!(Authority::start(&[]));
    let holder = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let taken = holder.local_addr().expect("bound");
    let dir = Dir::new();
    let more = format!("http_listen = [\"{taken}\"]");
    let mut first = serve(&authority.config(&dir, &[NAME], &more), &[]);
    let line = first.program.line_with("no new certificate for");
    assert!(
        line.contains(&format!("http-01: cannot listen on {taken}")) && line.contains("acme.http_listen"),
        "{line}"
    );
    // Nothing listens on the port to which the CA connects.
    let dir = Dir::new();
    let elsewhere = format!("http_listen = [\"127.0.0.1:{}\"]", free_port(V4));
    let mut second = serve(&authority.config(&dir, &[NAME], &elsewhere), &[]);
    let line = second.program.line_with("no new certificate for");
    assert!(
        line.contains("cannot validate the name with http-01") && line.contains("make the name resolve"),
        "{line}"
    );
}

#[test]
fn rejected_nonces_and_an_absent_authority_keep_the_old_certificate() {
    let authority = need!(Authority::start(&[("PEBBLE_WFE_NONCEREJECT", "100")]));
    let absent = format!("https://127.0.0.1:{}/dir", free_port(V4));
    for (directory, words) in
        [(&authority.directory, "badNonce"), (&absent, "cannot be reached: 127.0.0.1: ")]
    {
        let dir = Dir::new();
        fs::create_dir_all(dir.path().join("state/acme")).expect("the directory is ours");
        let old = Certificate::ending_in(&[NAME], Duration::from_secs(3600));
        let pem = [old.cert(), old.key()].map(|file| fs::read_to_string(file).expect("written")).concat();
        fs::write(dir.path().join(format!("state/acme/{NAME}.pem")), pem).expect("the directory is ours");
        let config = config(&dir, &[NAME], directory, &authority.certificate.authority(), "");
        let mut serve = serve(&config, &[]);
        let line = serve.program.line_with("no new certificate for");
        assert!(line.contains(words) && line.contains("the old certificate stays in use"), "{line}");
        assert_eq!(shown_by(serve.address(V4), NAME), old.der());
    }
}

#[test]
fn second_server_with_the_same_state_directory_uses_its_certificates() {
    let authority = need!(Authority::start(&[]));
    let dir = Dir::new();
    let more = format!("http_listen = [\"127.0.0.1:{}\"]", authority.http_port);
    let config = authority.config(&dir, &[NAME], &more);
    let first = serve(&config, &[]);
    let mut second = serve(&config, &[]);
    second.program.line_with("another process orders certificates in");
    wait_for_certificate(&first, first.address(V4), NAME);
    let shown = shown_by(first.address(V4), NAME);
    let address = second.address(V4);
    eventually("the second server reads the certificate too", || {
        std::panic::catch_unwind(|| shown_by(address, NAME)).is_ok_and(|found| found == shown)
    });
}

/// ZeroSSL and Google issue certificates only to accounts that were created on their websites.
#[test]
fn account_is_bound_to_an_existing_one() {
    const KEY: &str = "zWNDZM6eQGHWpSRTPal5eIUYFTu7EajVIoguysqZ9wG44nMEtx3MUAsUDkMTQ12W";
    let settings =
        json!({ "externalAccountBindingRequired": true, "externalAccountMACKeys": { "kid-1": KEY } });
    let authority = need!(Authority::with(&[], settings));
    let listen = format!("http_listen = [\"127.0.0.1:{}\"]", authority.http_port);
    let bound = |id: &str, key: &str| format!("{listen}\neab_key_id = {id:?}\neab_key = {key:?}");
    let other = KEY.replace('z', "y");
    for (more, words) in [
        (listen.clone(), "set acme.eab_key_id and acme.eab_key"),
        (bound("kid-1", &other), "unauthorized"),
        (bound("kid-2", KEY), "unauthorized"),
    ] {
        let dir = Dir::new();
        let mut serve = serve(&authority.config(&dir, &[NAME], &more), &[]);
        let line = serve.program.line_with("no new certificate for");
        assert!(line.contains(words) && !line.contains(KEY) && !line.contains(&other), "{line}");
    }
    let dir = Dir::new();
    let serve = serve(&authority.config(&dir, &[NAME], &bound("kid-1", KEY)), &[]);
    wait_for_certificate(&serve, serve.address(V4), NAME);
}

/// Some good nonces are rejected, each validation takes seconds, and a validated name is not validated again.
#[test]
fn slow_authority_with_faults_issues_and_reuses_its_validation() {
    let faults = [
        ("PEBBLE_WFE_NONCEREJECT", "5"),
        ("PEBBLE_AUTHZREUSE", "100"),
        ("PEBBLE_VA_NOSLEEP", "0"),
        ("PEBBLE_VA_SLEEPTIME", "4"),
    ];
    let authority = need!(Authority::start(&faults));
    let dir = Dir::new();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, authority.http_port));
    let config = authority.config(&dir, &[NAME], &format!("http_listen = [\"{address}\"]"));
    let first = serve(&config, &[]);
    wait_for_certificate(&first, first.address(V4), NAME);
    let old = shown_by(first.address(V4), NAME);
    drop(first);
    fs::remove_file(dir.path().join(format!("state/acme/{NAME}.pem"))).expect("the file is ours");
    let _taken = TcpListener::bind(address).expect("free again");
    let second = serve(&config, &[]);
    wait_for_certificate(&second, second.address(V4), NAME);
    assert_ne!(shown_by(second.address(V4), NAME), old);
}

/// Operators often try a CA's test environment first.
#[test]
fn change_of_authority_replaces_the_certificate_immediately() {
    let (trial, real) = (need!(Authority::start(&[])), need!(Authority::start(&[])));
    let dir = Dir::new();
    let listen = |authority: &Authority| format!("http_listen = [\"127.0.0.1:{}\"]", authority.http_port);
    let first = serve(&trial.config(&dir, &[NAME], &listen(&trial)), &[]);
    wait_for_certificate(&first, first.address(V4), NAME);
    let old = shown_by(first.address(V4), NAME);
    drop(first);
    let second = serve(&real.config(&dir, &[NAME], &listen(&real)), &[]);
    wait_for_certificate(&second, second.address(V4), NAME);
    let address = second.address(V4);
    eventually("the certificate is replaced", || shown_by(address, NAME) != old);
}

/// The first node places the order, because the second is held up by the lock on its state directory, but the CA can
/// reach only the second.
#[test]
fn fleet_orders_once_and_any_node_answers_the_authority() {
    let authority = need!(Authority::start(&[]));
    let store = need!(Server::redis());
    authority.resolve(NAME, Ipv4Addr::new(127, 0, 0, 2));
    let dir = Dir::new();
    let url = store.url(store.address, "");
    let node = |name: &str, ip: &str| {
        let (directory, ca) = (&authority.directory, authority.certificate.authority());
        let state = dir.path().join(name);
        let port = authority.http_port;
        let text = format!(
            "[tls]\nacme = [{NAME:?}]\n[store]\nstate = {state:?}\n[acme]\ndirectory = {directory:?}\nauthority = {ca:?}\n\
             http_listen = [\"{ip}:{port}\"]\n[fleet]\nurl = {url:?}\nnode = {name:?}\n\
             secret = \"of the fleet, and of at least 32 characters\"\n"
        );
        serve(&dir.file(&format!("{name}.toml"), text), &[])
    };
    fs::create_dir_all(dir.path().join("b/acme")).expect("the directory is ours");
    let lock = fs::File::create(dir.path().join("b/acme/lock")).expect("the directory is ours");
    lock.try_lock().expect("free");
    let mut b = node("b", "127.0.0.2");
    b.program.line_with("another process orders certificates in");
    let mut a = node("a", "127.0.0.1");
    a.program.line_with("ordering a certificate for");
    drop(lock);
    wait_for_certificate(&a, a.address(V4), NAME);
    let issued = shown_by(a.address(V4), NAME);
    let takes = |serve: &Serve| {
        let address = serve.address(V4);
        let shown = || std::panic::catch_unwind(|| shown_by(address, NAME));
        eventually("the other node presents the certificate", || shown().is_ok_and(|found| found == issued));
        assert_eq!(serve.metrics().sum("turnpike_acme_orders_total", ""), 0);
    };
    takes(&b);
    takes(&node("c", "127.0.0.3"));
    let script = "for _, value in ipairs(redis.call('HVALS', KEYS[1])) do if string.find(value, 'KEY') then return 0 end end \
                  return redis.call('HLEN', KEYS[1])";
    let kept = store.say(&format!("EVAL \"{script}\" 1 turnpike:{{turnpike}}:orders"));
    assert_eq!(kept, ":4\r\n", "account, challenge, order and certificate are sealed");
    let file = |node: &str| fs::read(dir.path().join(format!("{node}/acme/{NAME}.pem"))).expect("written");
    assert!(file("a") == file("b") && file("a") == file("c"));
}
