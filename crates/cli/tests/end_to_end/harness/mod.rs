//! What the tests stand on: programs that are started, watched and always ended, the admin page, a bare STUN client.

mod forward;
mod http;
mod namespace;
mod newcomers;
mod program;
mod stun;
mod tls;
mod turnpike;
mod upgraded;

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

pub(crate) use forward::{Forward, connect, copies, say, say_udp, tcp_echo, udp_echo};
pub(crate) use http::{Metrics, delete, get as fetch, get_as, get_unix, post};
pub(crate) use namespace::{Namespace, namespace};
pub(crate) use newcomers::Newcomers;
pub(crate) use program::{Finished, Program};
pub(crate) use stun::{
    Answer, Challenge, Stun, allocate_request, forged_request, plain_message, signed_request,
};
pub(crate) use tls::{Certificate, shown_by};
pub(crate) use turnpike::{
    Load, PASSWORD, REALM, RUN, Reflect, Serve, USER, address_after, turnpike, upgradable,
};
pub(crate) use turnpike_testkit::{
    Dir, PATIENCE as SOON, alone::skip, eventually, free_address, free_port, need,
};
pub(crate) use upgraded::{Upgraded, ends, lives};

pub(crate) const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
pub(crate) const V6: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

/// Flags as a person types them.
pub(crate) fn words(text: &str) -> Vec<&str> {
    text.split(' ').collect()
}

/// Whether this machine has an IPv6 loopback address.
pub(crate) fn has_ipv6() -> bool {
    loopback_of(V6).is_ok()
}

/// Or why not.
pub(crate) fn loopback_of(family: IpAddr) -> Result<(), &'static str> {
    UdpSocket::bind((family, 0)).map(drop).map_err(|_| "no IPv6 loopback address")
}

/// Whether this process may load programs into the kernel: in a user namespace of its own nobody may.
pub(crate) fn may_load_programs() -> Result<(), &'static str> {
    if is_root() { Ok(()) } else { Err("only root may load programs into the kernel here") }
}

/// Whether this process is root, and not only that of a user namespace of its own.
pub(crate) fn is_root() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let is_root = fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0);
    is_root && map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// Where a program of this name is on the PATH, or where servers are, which the PATH of an ordinary user leaves out.
pub(crate) fn installed(name: &str) -> Result<PathBuf, String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let servers = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut places = std::env::split_paths(&path).chain(servers).map(|dir| dir.join(name));
    places.find(|program| program.is_file()).ok_or_else(|| format!("{name} is not installed"))
}

/// What the step of this name of `./test` has put into `target/interop`.
pub(crate) fn interop_program(step: &str, name: &str) -> Result<PathBuf, String> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("below the target directory");
    let program = target.join("interop").join(name);
    if program.is_file() { Ok(program) } else { Err(format!("{name} is missing: ./test {step} installs it")) }
}
