//! Veth links to a server in a network namespace of its own, where the kernel path can relay.
//!
//! ```text
//!  this test                       the server's namespace
//!  10.77.1.2  fd77:1::2  c ──────── c  10.77.1.1  fd77:1::1   clients
//!  10.77.2.2  fd77:2::2  p ──────── p  10.77.2.1  fd77:2::1   peers
//! ```

use std::{fs, net::IpAddr, ops::Deref, os::unix::fs::PermissionsExt, process::Command};

use turnpike_testkit::alone::{in_namespaces, run};

use crate::{Dir, Metrics, Namespace, Program, get_unix, installed, may_load_programs, need, upgradable};

pub const CLIENT: [IpAddr; 2] = [v4(1, 2), v6(1, 2)];
pub const PEER: [IpAddr; 2] = [v4(2, 2), v6(2, 2)];
pub const SERVER: [IpAddr; 2] = [v4(1, 1), v6(1, 1)];
pub const RELAY: [IpAddr; 2] = [v4(2, 1), v6(2, 1)];

const fn v4(link: u8, end: u8) -> IpAddr {
    IpAddr::V4(std::net::Ipv4Addr::new(10, 77, link, end))
}

const fn v6(link: u16, end: u16) -> IpAddr {
    IpAddr::V6(std::net::Ipv6Addr::new(0xfd77, link, 0, 0, 0, 0, 0, end))
}

pub struct Links(Namespace);

impl Deref for Links {
    type Target = Namespace;

    fn deref(&self) -> &Namespace {
        &self.0
    }
}

/// Runs `body` with links to a server's namespace, or prints why this is not possible; `test` is the name of the calling test.
pub fn on_links(test: &str, body: impl FnOnce(&Links)) {
    need!(may_load_programs());
    need!(installed("nsenter"));
    need!(installed("ip"));
    in_namespaces(test, "n", &["ip", "link", "set", "lo", "up"], || {
        run("ip", &["link", "set", "lo", "up"]);
        body(&Links::up());
    });
}

pub fn by_each(test: &str, body: impl Fn(&Links, &str)) {
    need!(installed("ethtool"));
    on_links(test, |links| {
        for datapath in ["kernel", "xdp"] {
            if datapath == "xdp" {
                links.behave_as_cards();
            }
            println!("by {datapath}");
            body(links, datapath);
        }
    });
}

/// Value of the label `reason` for super-packets that the kernel path leaves to user space.
pub fn reason_of_bulk(datapath: &str) -> &'static str {
    if datapath == "xdp" { "bulk" } else { "super_packet" }
}

impl Links {
    /// Configures the veths for XDP: the test's ends must write checksums and VLAN tags into packets, because XDP sees nothing else, and
    /// must receive through NAPI, because redirected packets would otherwise never arrive.
    pub fn behave_as_cards(&self) {
        for device in ["c", "p"] {
            run("ethtool", &["-K", device, "tx", "off", "txvlan", "off", "gro", "on"]);
        }
    }

    /// If `whole` is set, super-packets cross the links unsegmented; otherwise they arrive as single datagrams, which the receiver's GRO
    /// merges.
    pub fn bursts_come_whole(&self, whole: bool) {
        let segments = if whole { "on" } else { "off" };
        for device in ["c", "p"] {
            // A veth does not merge packets if the other end can send TCP unsegmented.
            run("ethtool", &["-K", device, "tx-udp-segmentation", segments, "tso", segments]);
            // GRO takes effect only if it is turned on while both ends are up.
            for gro in ["off", "on"] {
                self.inside(&["ethtool", "-K", device, "gro", gro]);
            }
        }
    }

    pub fn link_address(&self) -> String {
        let said = self.inside_says(&["ip", "-o", "link", "show", "dev", "p"]);
        let mut words = said.split_whitespace().skip_while(|word| *word != "link/ether");
        words.nth(1).expect("an Ethernet device has a link-layer address").to_owned()
    }

    fn up() -> Self {
        let links = Self(Namespace::with_loopback());
        let pid = links.pid().to_string();
        for (name, link) in [("c", 1), ("p", 2)] {
            run("ip", &["link", "add", name, "type", "veth", "peer", "name", name, "netns", &pid]);
            for (end, inside) in [(1, true), (2, false)] {
                let set = |arguments: &[&str]| {
                    if inside { links.inside(&[&["ip"], arguments].concat()) } else { run("ip", arguments) }
                };
                set(&["addr", "add", &format!("10.77.{link}.{end}/24"), "dev", name]);
                set(&["addr", "add", &format!("fd77:{link}::{end}/64"), "dev", name, "nodad"]);
                set(&["link", "set", name, "up"]);
            }
        }
        links
    }

    pub fn serve(&self, more: &[&str]) -> Server<'_> {
        let mut command = Command::new("nsenter");
        command.args(self.nsenter()).env_clear();
        self.serve_as(command, more)
    }

    pub fn serve_as(&self, mut command: Command, more: &[&str]) -> Server<'_> {
        let mut arguments = vec!["serve", "--listen", "10.77.1.1:3478", "--listen", "[fd77:1::1]:3478"];
        let (dir, admin) = admin_socket();
        arguments.extend(["--allow-peer", "10.77.0.0/16", "--allow-peer", "fd77::/16", "--admin", &admin]);
        for (flag, values) in [
            ("--relay-ip", &["10.77.2.1", "fd77:2::1"][..]),
            ("--workers", &["1"]),
            ("--datapath", &["kernel"]),
        ] {
            if !more.contains(&flag) {
                arguments.extend(values.iter().flat_map(|value| [flag, *value]));
            }
        }
        let serve = upgradable(&arguments);
        command.arg(serve.get_program()).args(serve.get_args()).args(more);
        command.envs(serve.get_envs().filter_map(|(name, value)| Some((name, value?))));
        if !more.contains(&"--user") {
            command.env("TURNPIKE_AUTH_REQUIRED", "false");
        }
        let mut program = Program::start(&mut command);
        program.line_with("admin interface on unix:");
        Server { program, dir, _links: self }
    }

    pub fn forward(&self, more: &[&str]) -> Server<'_> {
        let mut command = Command::new("nsenter");
        command.args(self.nsenter()).env_clear();
        self.forward_as(command, more)
    }

    pub fn forward_as(&self, mut command: Command, more: &[&str]) -> Server<'_> {
        let (dir, admin) = admin_socket();
        let mut arguments = vec!["forward", "--admin", &admin];
        for (flag, value) in [("--workers", "1"), ("--datapath", "kernel")] {
            if !more.contains(&flag) {
                arguments.extend([flag, value]);
            }
        }
        let forward = upgradable(&arguments);
        command.arg(forward.get_program()).args(forward.get_args()).args(more);
        command.envs(forward.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let mut program = Program::start(command.env("RUST_BACKTRACE", "1"));
        program.line_with("admin interface on unix:");
        Server { program, dir, _links: self }
    }
}

/// Address of the admin interface: a Unix socket, reachable from every network namespace, in a directory writable for ordinary users.
fn admin_socket() -> (Dir, String) {
    let dir = Dir::new();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777))
        .expect("the test's own directory is writable");
    let admin = format!("unix:{}", dir.at("a.sock").display());
    (dir, admin)
}

pub struct Server<'l> {
    pub program: Program,
    dir: Dir,
    /// Borrow that keeps the namespace alive until the server has exited.
    _links: &'l Links,
}

impl Server<'_> {
    pub fn metrics(&self) -> Metrics {
        let (status, text) = get_unix(&self.dir.at("a.sock"), "/metrics").expect("the target responds");
        assert_eq!(status, 200);
        Metrics::new(text)
    }

    pub fn status(&self) -> String {
        self.get("/v1/status")
    }

    pub fn get(&self, path: &str) -> String {
        let (status, text) = get_unix(&self.dir.at("a.sock"), path).expect("the server responds");
        assert_eq!(status, 200, "{text}");
        text
    }

    /// Number of datagrams relayed in the kernel; may be up to a second old.
    pub fn across(&self) -> u64 {
        self.metrics().sum("turnpike_kernel_datagrams_total", "")
    }

    /// Number of datagrams and super-packets passed to user space for this reason.
    pub fn passes(&self, reason: &str) -> u64 {
        self.metrics().sum("turnpike_kernel_passes_total", &format!("reason=\"{reason}\""))
    }
}
