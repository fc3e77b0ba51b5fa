//! Harness for end-to-end tests: child processes that always end, test networks, an HTTP client and a simple STUN client. The tests
//! themselves are in `tests`.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "libtest shows the output of failed tests")]

pub mod browsers;
mod coturn_store;
mod forward;
mod http;
pub mod links;
mod namespace;
mod newcomers;
mod program;
mod tls;
mod turnpike;
mod upgraded;

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
};

pub use coturn_store::coturn_store;
pub use forward::{Forward, connect, copies, say, say_udp, tcp_echo, udp_echo};
pub use http::{Metrics, delete, get as fetch, get_as, get_unix, post};
pub use namespace::{Namespace, namespace};
pub use newcomers::Newcomers;
pub use program::{Finished, Program};
pub use tls::{Certificate, shown_by, spki_hash};
pub use turnpike::{
    Load, PASSWORD, REALM, Reflect, Serve, USER, address_after, run_directory, turnpike, upgradable,
};
pub use turnpike_testkit::{Dir, PATIENCE as SOON, alone::skip, eventually, free_address, free_port, need};
pub use upgraded::{Upgraded, ends, lives};

pub const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
pub const V6: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

pub fn words(text: &str) -> Vec<&str> {
    text.split(' ').collect()
}

pub fn has_ipv6() -> bool {
    loopback_of(V6).is_ok()
}

/// Returns the reason if loopback has no address of this family.
pub fn loopback_of(family: IpAddr) -> Result<(), &'static str> {
    UdpSocket::bind((family, 0)).map(drop).map_err(|_| "no IPv6 loopback address")
}

/// Returns the reason if this process may not load eBPF programs, which a user namespace never allows.
pub fn may_load_programs() -> Result<(), &'static str> {
    if is_root() { Ok(()) } else { Err("only root may load programs into the kernel here") }
}

/// True for root outside user namespaces.
pub fn is_root() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let is_root = fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0);
    is_root && map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// Finds a program on the PATH or in the sbin directories, which are not on the PATH of ordinary users.
pub fn installed(name: &str) -> Result<PathBuf, String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let servers = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut places = std::env::split_paths(&path).chain(servers).map(|dir| dir.join(name));
    places.find(|program| program.is_file()).ok_or_else(|| format!("{name} is not installed"))
}

/// Finds a program that a step of `./test` has built in `target/interop`.
pub fn interop_program(step: &str, name: &str) -> Result<PathBuf, String> {
    let program = turnpike::target().join("interop").join(name);
    if program.is_file() { Ok(program) } else { Err(format!("{name} is missing: ./test {step} installs it")) }
}
