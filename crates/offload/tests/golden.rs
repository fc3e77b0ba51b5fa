//! Frames written by hand and by an independent program, and the results expected from the BPF programs and
//! from their mirror.

use crate::prelude::*;

use crate::program::{LOOPBACK, MTU, Program, places, tells_mtu, with_program};

const CHANNEL: u16 = 0x4abc;
const CLIENT: [&str; 2] = ["198.51.100.7:5000", "[2001:db8:7::7]:5000"];
const SERVER: [&str; 2] = ["192.0.2.1:3478", "[2001:db8::1]:3478"];
const RELAY: [&str; 2] = ["192.0.2.2:49160", "[2001:db8::2]:49160"];
const PEER: [&str; 2] = ["203.0.113.9:6000", "[2001:db8:9::9]:6000"];

pub(crate) struct Golden {
    pub(crate) name: &'static str,
    kind: Kind,
    families: [usize; 2],
    pub(crate) arrives: &'static str,
    /// ID and checksum of an IPv4 header vary.
    pub(crate) leaves: &'static str,
}

pub(crate) const GOLDEN: &[Golden] = &[
    Golden {
        name: "to peer v4",
        kind: Kind::ToPeer,
        families: [0, 0],
        arrives: "000000000000000000000000080045b900231234400040113ba1c6336407c000020113880d96000fd4514abc00036f6464",
        leaves: "000000000000000000000000080045b9001f000000003f117d09c0000202cb007109c0081770000b56ee6f6464",
    },
    Golden {
        name: "to client v4",
        kind: Kind::ToClient,
        families: [0, 0],
        arrives: "00000000000000000000000008004500001f000000000211bac2cb007109c00002021770c008000b56ee6f6464",
        leaves: "000000000000000000000000080045000023000000000111cd8ec0000201c63364070d961388000fd4514abc00036f6464",
    },
    Golden {
        name: "to peer v6",
        kind: Kind::ToPeer,
        families: [1, 1],
        arrives: "00000000000000000000000086dd62e00000001111ff20010db800070000000000000000000720010db8000000000000 \
                  00000000000113880d960011f4994abc000568656c6c6f",
        leaves: "00000000000000000000000086dd62e00000000d11fe20010db800000000000000000000000220010db8000900000000 \
                  000000000009c0081770000d890368656c6c6f",
    },
    Golden {
        name: "to client v6",
        kind: Kind::ToClient,
        families: [1, 1],
        arrives: "00000000000000000000000086dd60300000000e114020010db800090000000000000000000920010db8000000000000 \
                  0000000000021770c008000e88e068656c6c6f21",
        leaves: "00000000000000000000000086dd603000000012113f20010db800000000000000000000000120010db8000700000000 \
                  0000000000070d9613880012f4754abc000668656c6c6f21",
    },
    Golden {
        name: "v4 to v6 peer",
        kind: Kind::ToPeer,
        families: [0, 1],
        arrives: "0000000000000000000000000800452800230000000040118e66c6336407c000020113880d96000fd4514abc00036f6464",
        leaves: "00000000000000000000000086dd62800000000b113f20010db800000000000000000000000220010db8000900000000 \
                  000000000009c0081770000bf9746f6464",
    },
    Golden {
        name: "v6 peer to v4",
        kind: Kind::ToClient,
        families: [0, 1],
        arrives: "00000000000000000000000086dd628000000008114020010db800090000000000000000000920010db8000000000000 \
                  0000000000021770c0080008ccdf",
        leaves: "000000000000000000000000080045280020000000003f118f69c0000201c63364070d961388000ca7bf4abc0000",
    },
    Golden {
        name: "no checksum",
        kind: Kind::ToPeer,
        families: [0, 0],
        arrives: "0000000000000000000000000800450000230000000040118e8ec6336407c000020113880d96000f00004abc00036f6464",
        leaves: "00000000000000000000000008004500001f000000003f117dc2c0000202cb007109c0081770000b00006f6464",
    },
    Golden {
        name: "forwards v4 payload that looks like ChannelData",
        kind: Kind::Forward,
        families: [0, 0],
        arrives: "000000000000000000000000080045b900231234400040113ba1c6336407c000020113880d96000fd4514abc00036f6464",
        leaves: "000000000000000000000000080045000023000000003f117dbec0000202cb007109c0081770000f0c274abc00036f6464",
    },
    Golden {
        name: "forwards v4 to v6",
        kind: Kind::Forward,
        families: [0, 1],
        arrives: "000000000000000000000000080045b900231234400040113ba1c6336407c000020113880d96000fd4514abc00036f6464",
        leaves: "00000000000000000000000086dd60000000000f113f20010db800000000000000000000000220010db8000900000000 \
                  000000000009c0081770000faead4abc00036f6464",
    },
    Golden {
        name: "forwards v6 to v4",
        kind: Kind::Forward,
        families: [1, 0],
        arrives: "00000000000000000000000086dd6b900000000f114020010db800070000000000000000000720010db8000000000000 \
                  00000000000113880d96000f650d4abc00036f6464",
        leaves: "000000000000000000000000080045000023000000003f117dbec0000202cb007109c0081770000f0c274abc00036f6464",
    },
    Golden {
        name: "forwards v6",
        kind: Kind::Forward,
        families: [1, 1],
        arrives: "00000000000000000000000086dd6b900000000f114020010db800070000000000000000000720010db8000000000000 \
                  00000000000113880d96000f650d4abc00036f6464",
        leaves: "00000000000000000000000086dd60000000000f113f20010db800000000000000000000000220010db8000900000000 \
                  000000000009c0081770000faead4abc00036f6464",
    },
    Golden {
        name: "forwards v4 without a checksum",
        kind: Kind::Forward,
        families: [0, 0],
        arrives: "00000000000000000000000008004500001e000000000211cc93c6336407c000020113880d96000a00006e6f",
        leaves: "00000000000000000000000008004500001e000000000111bbc3c0000202cb007109c0081770000a00006e6f",
    },
];

pub(crate) fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    let pairs = digits.chunks(2).map(|pair| std::str::from_utf8(pair).expect("digits"));
    pairs.map(|pair| u8::from_str_radix(pair, 16).expect("digits")).collect()
}

fn masked(mut frame: Vec<u8>) -> Vec<u8> {
    if frame[12..14] == [8, 0] {
        let words = frame[14..34].chunks(2).map(|pair| u64::from(pair[0]) << 8 | u64::from(pair[1]));
        assert_eq!(words.sum::<u64>() % 0xffff, 0, "checksum of {frame:02x?}");
        frame[18..20].fill(0);
        frame[24..26].fill(0);
    }
    frame
}

pub(crate) fn tables(golden: &Golden) -> Tables {
    let [client, peer] = golden.families;
    let end = |text: &str| text.parse().expect("an address");
    let (client, server) = (end(CLIENT[client]), end(SERVER[client]));
    let (relay, peer) = (end(RELAY[peer]), end(PEER[peer]));
    let number = ChannelNumber::new(CHANNEL).expect("in range");
    let (remote, local, from, to): (std::net::SocketAddr, _, std::net::SocketAddr, std::net::SocketAddr) =
        match golden.kind {
            Kind::ToPeer | Kind::Forward => (client, server, relay, peer),
            _ => (peer, relay, server, client),
        };
    let to_peer = golden.kind == Kind::ToPeer;
    let key = FlowKey::new(remote, local, to_peer.then_some(number));
    let flow = Flow {
        stamp: 1,
        key,
        from: mapped(from.ip()),
        to: mapped(to.ip()),
        from_port: from.port().to_be_bytes(),
        to_port: to.port().to_be_bytes(),
        channel: if to_peer { [0; 2] } else { CHANNEL.to_be_bytes() },
        kind: golden.kind as u8,
        expires: u64::MAX,
        stamp_end: 1,
        lease: Lease { of: 1, until: u64::MAX, dscps: u64::MAX, from: LOOPBACK, ..Lease::default() },
        ..Flow::default()
    };
    Tables {
        flows: [(key, flow)].into(),
        states: vec![State::default()],
        drained: vec![0],
        routes: vec![route_by(LOOPBACK, MTU)],
        hops: vec![[u64::from_le_bytes(NEIGHBOUR), 0]],
        classes: classes(&[3478], 49_152..=65_535),
        leases: true,
    }
}

/// Link address of the next hop for XDP, with its padding in the table.
const NEIGHBOUR: [u8; 8] = [2, 3, 4, 5, 6, 7, 0, 0];

pub(crate) fn frame(bytes: &[u8], summed: Summed) -> Frame<'_> {
    Frame { bytes, interface: LOOPBACK, for_us: true, segments: 1, segment_size: 0, summed }
}

#[test]
fn the_mirror_produces_the_golden_frames() {
    for (golden, place) in GOLDEN.iter().flat_map(|golden| [(golden, Place::Tc), (golden, Place::Xdp)]) {
        let arrives = bytes(golden.arrives);
        let moment = Moment { now: 1, id: [0xab, 0xcd] };
        let decision = decide(place, &frame(&arrives, Summed::Nothing), &tables(golden), &moment);
        check(golden, place, decision.action);
    }
}

/// GRO reports the number of datagrams; a virtual machine's network card reports their size.
#[test]
fn super_packets_of_any_origin_go_to_user_space() {
    let golden = &GOLDEN[1];
    let arrives = bytes(golden.arrives);
    let alone = frame(&arrives, Summed::Nothing);
    let moment = Moment { now: 1, id: [0xab, 0xcd] };
    let cases = [(0, 0), (1, 0), (2, 0), (0, 200), (1, 200), (4, 200)];
    let frames = cases.map(|(segments, segment_size)| Frame { segments, segment_size, ..alone });
    let is_several = [false, false, true, true, true, true];
    let goes_up = |action: &Action| *action == Action::Up(Some(Count::SuperPacket));
    let mirrored = frames.map(|frame| goes_up(&decide(Place::Tc, &frame, &tables(golden), &moment).action));
    assert_eq!(mirrored, is_several);
    with_program(|program| {
        let run = frames.map(|frame| {
            program.fill(&tables(golden));
            goes_up(&program.run(Place::Tc, &frame).expect("the kernel accepts the frame").action)
        });
        assert_eq!(run, is_several);
    });
}

/// The link's MTU is 1,400 bytes, and the route's is smaller: programs for kernels that do not report the
/// MTU follow the route.
#[test]
fn without_bpf_check_mtu_the_mtu_of_the_route_applies() {
    with_program(|program| {
        let golden = &GOLDEN[0];
        let narrow = Tables { routes: vec![route_by(LOOPBACK, 30)], ..tables(golden) };
        let mut without = Program::load(false).expect("every kernel loads the program");
        for place in places() {
            let goes_up = |program: &mut Program, tables: &Tables| {
                program.fill(tables);
                let outcome = program.run(*place, &frame(&bytes(golden.arrives), Summed::Nothing));
                outcome.expect("the kernel accepts the frame").action == Action::Up(Some(Count::TooBig))
            };
            assert!(goes_up(&mut without, &narrow), "{place:?}");
            assert!(!goes_up(&mut without, &tables(golden)), "{place:?}");
            assert_eq!(goes_up(program, &narrow), !tells_mtu(), "{place:?}");
        }
    });
}

#[test]
fn the_programs_produce_the_golden_frames() {
    with_program(|program| {
        for golden in GOLDEN {
            for (place, summed) in
                [(Place::Tc, Summed::Nothing), (Place::Tc, Summed::Complete), (Place::Xdp, Summed::Nothing)]
            {
                if !places().contains(&place) || summed == Summed::Complete && !program.knows_complete() {
                    continue;
                }
                program.fill(&tables(golden));
                let outcome = program.run(place, &frame(&bytes(golden.arrives), summed));
                check(golden, place, outcome.expect("the kernel accepts the frame").action);
            }
        }
    });
}

/// BPF_PROG_TEST_RUN cannot create this state; the end-to-end test `kernel_path::checksums` covers it on
/// links.
#[test]
fn a_partial_checksum_stays_partial() {
    let golden = &GOLDEN[0];
    let pseudo_header = |frame: &[u8]| {
        let words = frame[26..34].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
        let sum: u32 = words.sum::<u32>() + 17 + u32::from(frame[38]) * 256 + u32::from(frame[39]);
        let [_, _, high, low] = ((sum & 0xffff) + (sum >> 16)).to_be_bytes();
        [high, low]
    };
    let mut arrives = bytes(golden.arrives);
    let sum = pseudo_header(&arrives);
    arrives[40..42].copy_from_slice(&sum);
    let moment = Moment { now: 1, id: [0xab, 0xcd] };
    let decide = |summed| decide(Place::Tc, &frame(&arrives, summed), &tables(golden), &moment).action;
    assert_eq!(decide(Summed::Nothing), Action::Up(Some(Count::Checksum)));
    let Action::Across { bytes: leaves, .. } = decide(Summed::Partial) else {
        panic!("the frame is not relayed")
    };
    assert_eq!(leaves[40..42], pseudo_header(&leaves));
}

fn check(golden: &Golden, place: Place, action: Action) {
    let Action::Across { bytes: mut leaves, count, .. } = action else {
        panic!("{}: {action:?}", golden.name)
    };
    if place == Place::Xdp {
        let addresses = [&NEIGHBOUR[..6], &[0; 6]].concat();
        assert_eq!(leaves[..12], addresses, "{}", golden.name);
        leaves[..12].fill(0);
    }
    assert_eq!(masked(leaves), masked(bytes(golden.leaves)), "{}", golden.name);
    let counted = match golden.kind {
        Kind::ToPeer => Count::ToPeer,
        Kind::Forward => Count::Forwarded,
        _ => Count::ToClient,
    };
    assert_eq!(count, counted, "{}", golden.name);
}
