//! Other processes' BPF programs on the path of flows with leases.

use crate::prelude::*;
use std::{
    io::{self, Write as _},
    os::fd::{AsRawFd, FromRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    thread,
};

use turnpike_testkit::alone::in_own_process;

use crate::verdicts::{Bench, SOME};

/// BPF_PROG_LOAD, BPF_PROG_ATTACH, BPF_PROG_DETACH, BPF_LINK_CREATE.
const LOAD: libc::c_long = 5;
const ATTACH: libc::c_long = 8;
const DETACH: libc::c_long = 9;
const LINK: libc::c_long = 28;
/// BPF_CGROUP_INET_EGRESS and BPF_TCX_EGRESS.
const CGROUP_EGRESS: u32 = 1;
const TCX_EGRESS: u32 = 47;
/// BPF_F_BEFORE and BPF_F_AFTER.
const BEFORE: u32 = 1 << 3;
const AFTER: u32 = 1 << 4;

fn bpf(command: libc::c_long, attributes: &[u8]) -> io::Result<i32> {
    // SAFETY: a live buffer of this length, which the kernel only reads.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attributes.as_ptr(), attributes.len()) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(i32::try_from(result).expect("a descriptor"))
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Descriptor of a program with these instructions.
fn load(kind: u32, instructions: &[[u8; 8]]) -> io::Result<OwnedFd> {
    let license = c"GPL";
    let mut attributes = words(&[kind, u32::try_from(instructions.len()).expect("few")]);
    attributes.extend((instructions.as_ptr() as u64).to_ne_bytes());
    attributes.extend((license.as_ptr() as u64).to_ne_bytes());
    attributes.resize(48, 0);
    // BPF_PROG_TYPE_CGROUP_SKB checks the attach type.
    attributes.extend(words(&[0, 0, 0, 0, 0]));
    attributes.extend(words(&[if kind == CGROUP_SKB { CGROUP_EGRESS } else { 0 }]));
    let program = bpf(LOAD, &attributes)?;
    // SAFETY: a new descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(program) })
}

const CGROUP_SKB: u32 = 8;
const SCHED_CLS: u32 = 3;

fn number(descriptor: &impl AsRawFd) -> u32 {
    u32::try_from(descriptor.as_raw_fd()).expect("a descriptor")
}

/// Returns `to_peer` for datagrams to port 6000, else `other`. `at` is the offset of the destination port.
fn by_port(at: u8, to_peer: u8, other: u8) -> Vec<[u8; 8]> {
    vec![
        [0xb7, 2, 0, 0, at, 0, 0, 0],            // r2 = at
        [0xbf, 0xa3, 0, 0, 0, 0, 0, 0],          // r3 = r10
        [0x07, 3, 0, 0, 0xf8, 0xff, 0xff, 0xff], // r3 -= 8
        [0x7a, 3, 0, 0, 0, 0, 0, 0],             // *(u64 *)r3 = 0
        [0xb7, 4, 0, 0, 2, 0, 0, 0],             // r4 = 2
        [0x85, 0, 0, 0, 26, 0, 0, 0],            // call bpf_skb_load_bytes
        [0x71, 0xa1, 0xf8, 0xff, 0, 0, 0, 0],    // r1 = *(u8 *)(r10 - 8)
        [0x71, 0xa2, 0xf9, 0xff, 0, 0, 0, 0],    // r2 = *(u8 *)(r10 - 7)
        [0xb7, 0, 0, 0, other, 0, 0, 0],         // r0 = other
        [0x55, 1, 2, 0, 0x17, 0, 0, 0],          // if r1 != 6000 >> 8 skip 2
        [0x55, 2, 1, 0, 0x70, 0, 0, 0],          // if r2 != 6000 & 255 skip 1
        [0xb7, 0, 0, 0, to_peer, 0, 0, 0],       // r0 = to_peer
        [0x95, 0, 0, 0, 0, 0, 0, 0],             // exit
    ]
}

/// `skb->mark = 7; return TCX_NEXT;`
const MARKS: [[u8; 8]; 4] = [
    [0xb7, 2, 0, 0, 7, 0, 0, 0],
    [0x63, 0x21, 8, 0, 0, 0, 0, 0],
    [0xb7, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
    [0x95, 0, 0, 0, 0, 0, 0, 0],
];
const SHOT: u8 = 2;
const OK: u8 = 0;

/// Attaches a program to TC egress of the link until the result is dropped. Before Linux 6.6, prints a skip
/// notice and returns `None`.
fn at_egress(instructions: &[[u8; 8]], order: u32) -> Option<OwnedFd> {
    let program = load(SCHED_CLS, instructions).expect("the verifier accepts the program");
    // SAFETY: the string is static.
    let interface = unsafe { libc::if_nametoindex(c"one".as_ptr()) };
    match bpf(LINK, &words(&[number(&program), interface, TCX_EGRESS, order, 0, 0, 0, 0])) {
        // SAFETY: a new descriptor, which nothing else owns.
        Ok(link) => Some(unsafe { OwnedFd::from_raw_fd(link) }),
        Err(error) => {
            skip(&format!("tcx is not supported: {error}"));
            None
        }
    }
}

fn in_thread(case: impl FnOnce() + Send) {
    thread::scope(|scope| scope.spawn(case).join()).expect("the test case passes");
}

#[test]
fn flows_that_a_program_at_egress_marks_stay_in_user_space() {
    in_thread(|| {
        let Some(mut bench) = Bench::new("") else { return };
        assert!(bench.send(SOME).by_kernel > 0);
        let Some(marks) = at_egress(&MARKS, BEFORE) else { return };
        bench.outlast_lease();
        let passed = bench.send(SOME);
        assert_eq!(passed.by_kernel, 0, "{passed:?}");
        assert!(bench.count(Count::RefusedMark) > 0, "{:?}", bench.kernel.snapshot());
        drop(marks);
        turnpike_testkit::eventually("the kernel relays again", || bench.send(5).by_kernel > 0);
        bench.send(1);
        assert_eq!(bench.arrived, bench.sent);
    });
}

#[test]
fn a_program_at_egress_drops_relayed_datagrams() {
    in_thread(|| {
        let Some(mut bench) = Bench::new("") else { return };
        assert!(bench.send(SOME).by_kernel > 0);
        let Some(drops) = at_egress(&by_port(36, SHOT, OK), AFTER) else { return };
        let passed = bench.send(SOME);
        assert!(passed.by_kernel > 0 && passed.arrived == 0, "immediately: {passed:?}");
        drop(drops);
        let passed = bench.send(SOME);
        assert!(passed.by_kernel > 0 && passed.arrived == SOME, "{passed:?}");
    });
}

/// A cgroup of this process, removed at the end.
struct Cgroup {
    root: PathBuf,
    own: PathBuf,
}

impl Cgroup {
    fn new() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/mounts").expect("a list");
        let of_version_2 = |line: &&str| line.split(' ').nth(2) == Some("cgroup2");
        let root = mounts.lines().find(of_version_2).and_then(|line| line.split(' ').nth(1));
        let Some(root) = root.map(PathBuf::from) else {
            skip("no cgroup v2 file system is mounted");
            return None;
        };
        let own = root.join(format!("turnpike-test-{}", std::process::id()));
        let cgroup = Self { root, own };
        if let Err(error) = fs::create_dir(&cgroup.own).and_then(|()| enter(&cgroup.own)) {
            skip(&format!("cannot create a cgroup: {error}"));
            return None;
        }
        Some(cgroup)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = enter(&self.root);
        let _ = fs::remove_dir(&self.own);
    }
}

fn enter(cgroup: &Path) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).open(cgroup.join("cgroup.procs"))?;
    file.write_all(b"0")
}

#[test]
fn flows_that_a_program_of_their_cgroup_drops_stay_in_user_space() {
    in_own_process(turnpike_testkit::this_test!(), || {
        let Some(cgroup) = Cgroup::new() else { return };
        in_thread(|| {
            let Some(mut bench) = Bench::new("") else { return };
            assert!(bench.send(SOME).by_kernel > 0);
            let program = load(CGROUP_SKB, &by_port(22, 0, 1)).expect("the verifier accepts the program");
            let directory = fs::File::open(&cgroup.own).expect("the test's own cgroup");
            let at = words(&[number(&directory), number(&program), CGROUP_EGRESS, 0]);
            if let Err(error) = bpf(ATTACH, &at) {
                return skip(&format!("cannot attach a program to a cgroup: {error}"));
            }
            bench.outlast_lease();
            let passed = bench.send(SOME);
            assert_eq!((passed.by_kernel, passed.arrived), (0, 0), "{passed:?}");
            assert!(bench.count(Count::Unseen) > 0, "{:?}", bench.kernel.snapshot());
            bpf(DETACH, &at).expect("the program is attached");
            turnpike_testkit::eventually("the kernel relays again", || bench.send(5).by_kernel > 0);
        });
    });
}
