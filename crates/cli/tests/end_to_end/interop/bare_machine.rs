//! A Debian machine with nothing but our package, booted with systemd in a container of its own: five commands lead to a
//! Chromium call over TLS on port 443 with a certificate from the test CA Pebble.

use std::time::Instant;

use super::{
    acme::Authority,
    browsers::{audio_heard, report_of},
};
use crate::prelude::*;

use turnpike_trials::{
    browsers::{Browser as _, Over},
    spki_hash,
};

// Public addresses, because the server relays to no others. No packet leaves the test's namespace.
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(11, 0, 113, 1);
const MACHINE: Ipv4Addr = Ipv4Addr::new(11, 0, 113, 2);
const NAME: &str = "turn.example.org";

/// A root file system that has booted.
struct Machine {
    root: PathBuf,
    /// Its first process, in our PID namespace.
    init: String,
    container: Program,
}

impl Machine {
    /// Boots `root` behind the interface `e0`; its name server is [`OUTSIDE`].
    fn boot(root: PathBuf) -> Self {
        run("ip", &["link", "add", "e0", "type", "veth", "peer", "name", "e1"]);
        run("ip", &["address", "add", &format!("{OUTSIDE}/24"), "dev", "e0"]);
        run("ip", &["link", "set", "e0", "up"]);
        fs::write(root.join("etc/resolv.conf"), format!("nameserver {OUTSIDE}\n")).expect("our own root");
        let mut command = Command::new("systemd-nspawn");
        command.arg("--quiet").arg("--directory").arg(&root).arg("--boot");
        command.args(["--private-network", "--register=no", "--keep-unit", "--resolv-conf=off"]);
        // A real machine has no such limits.
        command.args(["--capability=CAP_NET_ADMIN,CAP_BPF,CAP_PERFMON", "--system-call-filter=bpf"]);
        let container = Program::start(command.arg("--console=pipe"));
        let pid = container.pid();
        let mut machine = Self { root, init: String::new(), container };
        eventually("the machine has booted", || {
            thread::sleep(Duration::from_millis(200));
            // The first child only starts the second one.
            let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
            machine.init = children.split_whitespace().last().unwrap_or_default().to_owned();
            let state = machine.command(&["systemctl", "is-system-running"]).output();
            let state = state.map(|state| String::from_utf8_lossy(&state.stdout).into_owned());
            ["running", "degraded"].contains(&state.unwrap_or_default().trim())
        });
        run("ip", &["link", "set", "e1", "netns", &machine.init]);
        for line in [
            format!("ip address add {MACHINE}/24 dev e1"),
            "ip link set lo up".to_owned(),
            "ip link set e1 up".to_owned(),
            format!("ip route add default via {OUTSIDE}"),
        ] {
            machine.run(&line);
        }
        machine
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args([
            "--target", &self.init, "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd=/",
        ]);
        command.args(["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"]).args(words);
        command
    }

    fn run(&self, line: &str) -> String {
        let ended = Program::run(&mut self.command(&["sh", "-c", line]));
        assert_eq!(ended.code, Some(0), "{line}: {}", ended.output());
        ended.output()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Ends all processes of its PID namespace.
        let _ = Command::new("kill").args(["-KILL", &self.init]).status();
        self.container.signal("KILL");
    }
}

/// Variables that `./test first-hour` sets.
fn provided(variable: &str) -> Result<PathBuf, String> {
    env::var_os(variable)
        .map(PathBuf::from)
        .ok_or_else(|| format!("{variable} is not set: run ./test first-hour"))
}

#[test]
#[ignore = "./test first-hour prepares the machine"]
fn five_commands_lead_to_a_chromium_call_over_port_443() {
    let root = need!(provided("TURNPIKE_TEST_MACHINE"));
    let package = need!(provided("TURNPIKE_TEST_PACKAGE"));
    need!(Chromium::available(true));
    alone::in_network_namespace(turnpike_testkit::this_test!(), || {
        let machine = Machine::boot(root.clone());
        let authority = need!(Authority::at(OUTSIDE, MACHINE, [53, 443, 80], &[], json!({})));
        fs::copy(&package, machine.root.join("root/turnpike.deb")).expect("the machine has space");
        fs::copy(authority.certificate.authority(), machine.root.join("etc/test-ca.pem")).expect("the same");
        let since = Instant::now();
        machine.run("dpkg --install /root/turnpike.deb");
        let said = machine.run(&format!("turnpike setup --name {NAME} --access user:alice --port-443 yes"));
        // Users of Let's Encrypt skip this command.
        machine.run(&format!(
            "printf '\\n[acme]\\ndirectory = \"{}\"\\nauthority = \"/etc/test-ca.pem\"\\n' >>/etc/turnpike/turnpike.toml",
            authority.directory
        ));
        machine.run("systemctl enable --now turnpike.service");
        let password = said.split("alice ").nth(1).and_then(|rest| rest.split_whitespace().next());
        let password = password.unwrap_or_else(|| panic!("{said}"));
        let stored = machine.root.join(format!("var/lib/private/turnpike/acme/{NAME}.pem"));
        let direct = machine.root.join(format!("var/lib/turnpike/acme/{NAME}.pem"));
        let pem = eventually("the certificate is issued", || {
            [&stored, &direct].into_iter().find_map(|file| fs::read_to_string(file).ok())
        });
        let key = pem
            .split_inclusive("-----END PRIVATE KEY-----")
            .next()
            .and_then(|key| key.find("-----BEGIN PRIVATE KEY-----").map(|begin| &key[begin..]));
        let key = key.expect("the file contains the key");
        let probed = machine.run(&format!(
            "turnpike probe turn:{MACHINE} --user alice:{password}; journalctl --unit turnpike --output cat"
        ));
        assert!(probed.contains("usable; 0 bad, "), "{probed}");
        let page = Page::serve(json!({
            "urls": [format!("turns:{MACHINE}:443?transport=tcp")],
            "username": "alice",
            "credential": password,
        }));
        let mut browser = Chromium::open_trusting(&page.url(), &spki_hash(key));
        let metrics = || Metrics::new(machine.run("journalctl --unit turnpike --output cat"));
        let report = report_of(&mut browser, &page, metrics);
        audio_heard(&report, Over::Tls);
        browser.close();
        println!("REPORT: from the package to the call in {} s", since.elapsed().as_secs());
        for line in ["notify.conf", "low-ports.conf"] {
            assert!(machine.run("systemctl status turnpike.service").contains(line), "{line}");
        }
    });
}
