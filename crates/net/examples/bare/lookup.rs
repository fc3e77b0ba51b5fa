//! BPF sk_lookup program, loaded by hand: all datagrams to a range of ports go to one socket, regardless of
//! other sockets bound there.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
};

/// From linux/bpf.h: commands, types, helpers.
const MAP_CREATE: libc::c_int = 0;
const MAP_UPDATE_ELEM: libc::c_int = 2;
const PROG_LOAD: libc::c_int = 5;
const LINK_CREATE: libc::c_int = 28;
const MAP_TYPE_SOCKMAP: u32 = 15;
const PROG_TYPE_SK_LOOKUP: u32 = 30;
const ATTACH_SK_LOOKUP: u32 = 36;
const MAP_LOOKUP_ELEM: i32 = 1;
const SK_RELEASE: i32 = 86;
const SK_ASSIGN: i32 = 124;
/// Offsets of protocol and local port in `struct bpf_sk_lookup`.
const PROTOCOL: i16 = 12;
const LOCAL_PORT: i16 = 60;

/// Attached program; dropping it detaches the program.
pub(crate) struct Lookup(#[expect(dead_code, reason = "held, not read")] [OwnedFd; 3]);

impl Lookup {
    /// Makes `socket` receive all datagrams to these UDP ports in this network namespace. Needs CAP_NET_ADMIN
    /// and CAP_BPF.
    pub(crate) fn attach(socket: &impl AsFd, (first, last): (u16, u16)) -> io::Result<Self> {
        let map = bpf(MAP_CREATE, &words(&[MAP_TYPE_SOCKMAP, 4, 8, 1]))?;
        let (key, value) = (0_u32, socket.as_fd().as_raw_fd() as u64);
        let element = [u64::from(number(&map)), &raw const key as u64, &raw const value as u64, 0];
        call(MAP_UPDATE_ELEM, &element)?;
        let program = program(number(&map), i32::from(first), i32::from(last));
        let license = c"GPL";
        let mut load = [0_u64; 9];
        load[0] = u64::from(PROG_TYPE_SK_LOOKUP) | (program.len() as u64) << 32;
        (load[1], load[2]) = (program.as_ptr() as u64, license.as_ptr() as u64);
        // expected_attach_type.
        load[8] = u64::from(ATTACH_SK_LOOKUP) << 32;
        let program = bpf(PROG_LOAD, &load)?;
        let namespace = File::open("/proc/self/ns/net")?;
        let link = bpf(LINK_CREATE, &words(&[number(&program), number(&namespace), ATTACH_SK_LOOKUP, 0]))?;
        Ok(Self([map, program, link]))
    }
}

/// Selects the socket in the map for UDP datagrams to a port of the range. Instructions consist of code,
/// registers, offset and value.
fn program(map: u32, first: i32, last: i32) -> Vec<u64> {
    const PASS: usize = 18;
    let op = |code: u8, to: u8, from: u8, offset: i16, value: i32| {
        u64::from(code)
            | u64::from(to | from << 4) << 8
            | u64::from(offset.cast_unsigned()) << 16
            | u64::from(value.cast_unsigned()) << 32
    };
    let pass = |at: usize| i16::try_from(PASS - at - 1).unwrap_or(i16::MAX);
    let program = vec![
        op(0xbf, 6, 1, 0, 0),                       // r6 = context
        op(0x61, 2, 6, PROTOCOL, 0),                // r2 = protocol
        op(0x55, 2, 0, pass(2), libc::IPPROTO_UDP), // not UDP: pass
        op(0x61, 2, 6, LOCAL_PORT, 0),              // r2 = port
        op(0xa5, 2, 0, pass(4), first),             // below the range: pass
        op(0x25, 2, 0, pass(5), last),              // above it: pass
        op(0x62, 10, 0, -4, 0),                     // key = 0
        op(0xbf, 2, 10, 0, 0),                      // r2 = &key
        op(0x07, 2, 0, 0, -4),                      //
        op(0x18, 1, 1, 0, map.cast_signed()),       // r1 = map (two instructions)
        op(0, 0, 0, 0, 0),                          //
        op(0x85, 0, 0, 0, MAP_LOOKUP_ELEM),         // r0 = socket
        op(0x15, 0, 0, pass(12), 0),                // none: pass
        op(0xbf, 7, 0, 0, 0),                       // r7 = socket
        op(0xbf, 1, 6, 0, 0),                       // assign the socket
        op(0xbf, 2, 7, 0, 0),                       //
        op(0xb7, 3, 0, 0, 0),                       //
        op(0x05, 0, 0, 2, 0),                       // skip the pass branch
        op(0xb7, 0, 0, 0, 1),                       // pass: SK_PASS
        op(0x95, 0, 0, 0, 0),                       // exit
        op(0x85, 0, 0, 0, SK_ASSIGN),               //
        op(0xbf, 1, 7, 0, 0),                       // release the reference
        op(0x85, 0, 0, 0, SK_RELEASE),              //
        op(0xb7, 0, 0, 0, 1),                       // SK_PASS
        op(0x95, 0, 0, 0, 0),                       // exit
    ];
    debug_assert_eq!(program[PASS], op(0xb7, 0, 0, 0, 1));
    program
}

fn number(fd: &impl AsRawFd) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

/// Packs pairs of 32-bit words in memory order.
fn words(words: &[u32]) -> Vec<u64> {
    words.chunks(2).map(|pair| u64::from(pair[0]) | u64::from(pair[1]) << 32).collect()
}

/// bpf(2) command that returns a descriptor.
fn bpf(command: libc::c_int, attributes: &[u64]) -> io::Result<OwnedFd> {
    let fd = call(command, attributes)?;
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn call(command: libc::c_int, attributes: &[u64]) -> io::Result<i32> {
    let (at, size) = (attributes.as_ptr(), size_of_val(attributes));
    // SAFETY: `attributes` and everything it points to live until the call returns; the kernel treats missing
    // attributes as zero.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, at, size) };
    if result < 0 { Err(io::Error::last_os_error()) } else { i32::try_from(result).map_err(io::Error::other) }
}
