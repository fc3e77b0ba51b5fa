//! Leases: requested at ingress, granted or refused by the program at TC egress.

use crate::prelude::*;
use turnpike_offload::layout::{LEASE_NS, dscp_bit};

use crate::{
    golden::{GOLDEN, bytes, frame, tables},
    program::{LOOPBACK, Program, tells_mtu, with_program},
};

/// To a peer over IPv4, with TOS 0xb9 and TTL 64.
const TO_PEER: usize = 0;
const TOS: u8 = 0xb9;
/// Queue priority of that TOS (rt_tos2priority).
const PRIORITY: u32 = 4;
const SENT: [u32; 3] = [0, PRIORITY, 0];

struct Bench<'p> {
    program: &'p mut Program,
    key: FlowKey,
    arrives: Vec<u8>,
    leaves: Vec<u8>,
}

impl<'p> Bench<'p> {
    /// A flow without a lease.
    fn new(program: &'p mut Program, golden: usize) -> Self {
        let golden = &GOLDEN[golden];
        let mut tables = tables(golden);
        for flow in tables.flows.values_mut() {
            flow.lease = Lease::default();
        }
        program.fill(&tables);
        let key = *tables.flows.keys().next().expect("one flow");
        Self { program, key, arrives: bytes(golden.arrives), leaves: bytes(golden.leaves) }
    }

    /// Runs the program on the next datagram, after user space has sent everything.
    fn arrive(&mut self) -> Count {
        self.program.settle();
        let arrives = self.arrives.clone();
        let outcome = self.program.run(Place::Tc, &frame(&arrives, Summed::Nothing));
        match outcome.expect("the kernel accepts the frame").action {
            Action::Across { count, .. } | Action::Up(Some(count)) => count,
            other => panic!("{other:?}"),
        }
    }

    fn leave(&mut self) -> Vec<Count> {
        let leaves = self.leaves.clone();
        self.program.leave(&leaves, SENT)
    }

    fn lease(&self) -> Lease {
        self.program.flow(&self.key).lease
    }

    fn change(&mut self, change: impl FnOnce(&mut Flow)) {
        let mut flow = self.program.flow(&self.key);
        change(&mut flow);
        self.program.set_flow(&flow);
    }
}

/// Sets a byte of an IPv4 header, and updates the checksum.
fn with_byte(frame: &[u8], at: usize, value: u8) -> Vec<u8> {
    let mut frame = frame.to_vec();
    frame[14 + at] = value;
    frame[24..26].fill(0);
    let words = frame[14..34].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
    let sum: u32 = words.sum();
    let check = !u16::try_from((sum & 0xffff) + (sum >> 16)).expect("folded");
    frame[24..26].copy_from_slice(&check.to_be_bytes());
    frame
}

#[test]
fn a_flow_gets_a_lease_after_a_datagram_has_left_unchanged() {
    with_program(|program| {
        for (index, golden) in GOLDEN.iter().enumerate() {
            let mut bench = Bench::new(program, index);
            assert_eq!(bench.arrive(), Count::Lease, "{}", golden.name);
            let before = now_ns();
            // Priorities of IPv4 and IPv6 datagrams by their TOS in the golden frames.
            let tos = if bench.leaves[12] == 8 { bench.leaves[15] } else { 0 };
            let priority = [0, 2, 6, 4][usize::from(tos >> 3 & 3)];
            let leaves = bench.leaves.clone();
            assert_eq!(bench.program.leave(&leaves, [0, priority, 0]), [], "{}", golden.name);
            let lease = bench.lease();
            assert_eq!((lease.of, lease.from), (1, LOOPBACK), "{}", golden.name);
            assert!(
                lease.until >= before + LEASE_NS / 4 * 3 && lease.until <= now_ns() + LEASE_NS,
                "{lease:?}"
            );
            assert!(!bench.arrive().is_pass(), "{}", golden.name);
            bench.change(|flow| flow.lease.until = 1);
            assert_eq!(bench.arrive(), Count::Lease, "{}", golden.name);
        }
    });
}

#[test]
fn a_datagram_that_does_not_leave_grants_nothing() {
    with_program(|program| {
        let mut bench = Bench::new(program, TO_PEER);
        assert_eq!(
            [bench.arrive(), bench.arrive(), bench.arrive()],
            [Count::Lease, Count::Unseen, Count::Unseen]
        );
        // A datagram that leaves without a request, because it was sent earlier, grants nothing.
        let mut bench = Bench::new(program, TO_PEER);
        assert_eq!(bench.leave(), []);
        assert_eq!(bench.lease(), Lease::default());
        // A datagram that the kernel relayed also passes through TC egress.
        assert_eq!(bench.arrive(), Count::Lease);
        let leaves = bench.leaves.clone();
        // Linux 5.10 cannot run a program on such a datagram in a test.
        if tells_mtu() {
            assert_eq!(bench.program.leave(&leaves, [0, PRIORITY, 2]), []);
            assert_eq!(bench.arrive(), Count::Unseen);
        }
        // A different length: this is not the datagram that requested the lease.
        let mut bench = Bench::new(bench.program, TO_PEER);
        bench.arrive();
        bench.change(|flow| flow.lease.asked_length = 12);
        assert_eq!(bench.leave(), []);
        assert_eq!(bench.arrive(), Count::Unseen);
        // A different destination (NAT).
        let other = with_byte(&leaves, 19, 200);
        assert_eq!(bench.program.leave(&other, SENT), []);
        assert_eq!(bench.arrive(), Count::Unseen);
    });
}

#[test]
fn a_changed_datagram_is_refused_with_a_reason() {
    with_program(|program| {
        let leaves = bytes(GOLDEN[TO_PEER].leaves);
        let unchanged = leaves.clone();
        for (reason, leaves, context) in [
            (Count::RefusedMark, unchanged.clone(), [7, PRIORITY, 0]),
            (Count::RefusedPriority, unchanged, [0, 0x1_0001, 0]),
            (Count::RefusedDscp, with_byte(&leaves, 1, 0), SENT),
            (Count::RefusedTtl, with_byte(&leaves, 8, 64), SENT),
        ] {
            let mut bench = Bench::new(program, TO_PEER);
            assert_eq!(bench.arrive(), Count::Lease);
            assert_eq!(bench.program.leave(&leaves, context), [reason]);
            assert_eq!(bench.arrive(), Count::Refused, "{reason:?}");
            // Then the datagram leaves unchanged.
            assert_eq!(bench.leave(), []);
            assert_eq!(bench.arrive(), Count::ToPeer, "{reason:?}");
        }
        let mut bench = Bench::new(program, TO_PEER);
        let elsewhere = Tables { routes: vec![route_by(77, 1400)], ..tables(&GOLDEN[TO_PEER]) };
        bench.program.fill(&elsewhere);
        bench.change(|flow| {
            flow.lease =
                Lease { asked_by: 1, asked: u64::MAX, asked_from: 1, asked_length: 11, ..Lease::default() }
        });
        assert_eq!(bench.leave(), [Count::RefusedInterface]);
    });
}

#[test]
fn each_dscp_needs_its_own_grant_within_the_lease() {
    with_program(|program| {
        let mut bench = Bench::new(program, TO_PEER);
        bench.arrive();
        bench.leave();
        let first = bench.lease();
        assert_eq!(first.dscps, dscp_bit(TOS));
        // Only the ECN field differs, not the DSCP.
        bench.arrives = with_byte(&bench.arrives, 1, TOS ^ 3);
        assert_eq!(bench.arrive(), Count::ToPeer);
        bench.arrives = with_byte(&bench.arrives, 1, 0);
        assert_eq!(bench.arrive(), Count::Lease);
        let leaves = with_byte(&bench.leaves, 1, 0);
        assert_eq!(bench.program.leave(&leaves, [0; 3]), []);
        assert_eq!(bench.arrive(), Count::ToPeer);
        let second = bench.lease();
        assert_eq!(
            (second.dscps, second.until),
            (first.dscps | 1, first.until),
            "the second grant does not extend the lease"
        );
    });
}

#[test]
fn a_lease_applies_to_one_flow_and_one_interface() {
    with_program(|program| {
        let mut bench = Bench::new(program, TO_PEER);
        bench.arrive();
        bench.leave();
        let lease = bench.lease();
        for other in [Lease { of: 2, ..lease }, Lease { from: 9, ..lease }] {
            bench.change(|flow| flow.lease = other);
            assert_eq!(bench.arrive(), Count::Lease, "{other:?}");
        }
        // Datagrams of two interfaces are in user space: which of them leaves is unknown.
        bench.change(|flow| flow.lease.asked_from = 9);
        let arrives = bench.arrives.clone();
        bench.program.reset_counts();
        let held_up = bench.program.run(Place::Tc, &frame(&arrives, Summed::Nothing));
        assert_eq!(held_up.expect("the program runs").action, Action::Up(Some(Count::Settling)));
        assert_eq!(bench.lease().asked_from, 0);
        assert_eq!(bench.leave(), []);
        assert_eq!(bench.arrive(), Count::Unseen);
        assert_eq!(bench.leave(), []);
        assert_eq!(bench.arrive(), Count::ToPeer);
    });
}
