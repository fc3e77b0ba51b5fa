//! Steps of a scenario and their probabilities. A scenario is a list of steps; proptest shrinks failing ones.

use proptest::{collection::vec, prelude::*};

#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) workers: usize,
    pub(super) per_user: usize,
    /// Per address or IPv6 /64; 0 for unlimited.
    pub(super) per_prefix: usize,
    pub(super) total: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    /// The message stays in flight until a later step delivers, duplicates or loses it.
    pub(super) flies: bool,
    pub(super) heard: bool,
    pub(super) settle: bool,
    /// Selects failures while the request is processed; 0 for none.
    pub(super) luck: u8,
}

impl Way {
    pub(super) const AT_ONCE: Self = Self { flies: false, heard: true, settle: false, luck: 0 };
}

/// One step. Numbers are taken modulo the number of candidates.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// A client sends a request, signed or unsigned depending on `nonce`.
    Ask {
        from: usize,
        /// True selects a client that acts sensibly.
        knows: bool,
        user: u8,
        realm: u8,
        nonce: u8,
        asked: Asked,
        way: Way,
    },
    Data {
        from: usize,
        knows: bool,
        channel: Option<u8>,
        peer: u8,
        length: u16,
        way: Way,
    },
    Noise {
        from: usize,
        keepalive: bool,
    },
    /// A datagram in flight arrives; a copy may stay in flight.
    Deliver {
        which: usize,
        again: bool,
        way: Way,
    },
    Lose(usize),
    Copy {
        which: usize,
        from: usize,
    },
    FromPeer {
        relay: usize,
        peer: u8,
        length: u16,
    },
    /// A datagram or connection arrives on a relay socket that has been closed.
    Late {
        relay: usize,
        peer: u8,
    },
    Icmp {
        relay: usize,
        peer: u8,
        error: (u8, u8, u32),
    },
    PeerConnects {
        relay: usize,
        peer: u8,
    },
    ConnectionEnds {
        which: usize,
        bytes: u16,
    },
    /// A client's connection closes; numbers beyond the last client select a client with an allocation.
    Disconnect(usize),
    /// Two tickets are presented from one 5-tuple, to which only one allocation can move.
    Rivals {
        from: usize,
        ends: bool,
    },
    /// A reload of one or all workers denies an allocation's peer while it is in transit.
    Overtaken {
        from: usize,
        which: u8,
        everywhere: bool,
    },
    /// The runtime executes one job, a worker handles one message, or everything pending is done.
    Work {
        worker: usize,
        luck: u8,
    },
    Mail(usize),
    Settle(u8),
    /// A worker's mailbox refuses everything that may be lost.
    Full {
        worker: usize,
        full: bool,
    },
    Prompt(bool),
    Store {
        worker: usize,
        says: Says,
    },
    /// Time passes; workers check the clock on time or late.
    Sleep {
        ms: u64,
        exact: bool,
    },
    /// Time passes until a deadline or a millisecond before it; then everything is tried.
    Brink {
        which: usize,
        before: bool,
    },
    Reload {
        worker: Option<usize>,
        variant: u8,
    },
    Drain(usize),
    /// New rules that deny a permitted peer, preferably of an allocation in transit.
    Deny {
        worker: Option<usize>,
        which: usize,
    },
    Close(usize),
    Across {
        which: usize,
        datagrams: u8,
    },
    Upgrade {
        /// The old process passes on its pending moves, granted requests and deletions.
        remembers: bool,
        /// Rules of the new process; `None` keeps each worker's rules.
        variant: Option<u8>,
        /// Limit that is one below the current count; 0 for none.
        tight: u8,
    },
    Probe,
}

#[derive(Clone, Debug)]
pub(super) enum Asked {
    Binding,
    Allocate {
        transport: u8,
        lifetime: Option<u32>,
        port: u8,
        family: Option<u8>,
        additional: Option<u8>,
        mobile: u8,
    },
    Refresh {
        lifetime: Option<u32>,
        family: Option<u8>,
        ticket: u8,
    },
    Permit(Vec<u8>),
    Bind {
        number: u8,
        peer: u8,
    },
    Connect(u8),
    ConnectionBind(u8),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Says {
    Truth,
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mix {
    Data,
    Moves,
    Connections,
}

pub(super) fn plays(mix: Mix) -> impl Strategy<Value = (Setup, Vec<Step>)> {
    let workers = if mix == Mix::Data { 1..=2_usize } else { 2..=3 };
    let per_prefix = prop_oneof![2 => Just(0_usize), 1 => 1..=4_usize];
    let setup = (workers, 1..=4_usize, per_prefix, 2..=6_usize);
    let setup = setup.prop_map(|(workers, per_user, per_prefix, total)| Setup {
        workers,
        per_user,
        per_prefix,
        total,
    });
    (setup, vec(step(mix), 1..160))
}

fn weights(mix: Mix) -> [u32; 3] {
    match mix {
        Mix::Data => [20, 3, 2],
        Mix::Moves => [8, 20, 2],
        Mix::Connections => [5, 4, 20],
    }
}

fn step(mix: Mix) -> BoxedStrategy<Step> {
    let [data, moves, connections] = weights(mix);
    let from = || 0..super::cast::CLIENTS;
    let small = || 0..16_usize;
    let ask = (from(), likely(85), any::<u8>(), 0..4_u8, nonce(), asked(mix), way());
    let ask = ask.prop_map(|(from, knows, user, realm, nonce, asked, way)| Step::Ask {
        from,
        knows,
        user,
        realm,
        nonce,
        asked,
        way,
    });
    let channel = prop_oneof![3 => (0..12_u8).prop_map(Some), 2 => Just(None)];
    let sent = (from(), likely(85), channel, 0..48_u8, length(), way());
    let sent = sent.prop_map(|(from, knows, channel, peer, length, way)| Step::Data {
        from,
        knows,
        channel,
        peer,
        length,
        way,
    });
    let received = (small(), 0..15_u8, length());
    let received = received.prop_map(|(relay, peer, length)| Step::FromPeer { relay, peer, length });
    let deliver = (small(), any::<bool>(), way());
    let deliver = deliver.prop_map(|(which, again, way)| Step::Deliver { which, again, way });
    let error = (
        small(),
        0..15_u8,
        (prop_oneof![0..5_u8, Just(11_u8)], prop_oneof![0..2_u8, Just(4_u8)], 0..1500_u32),
    );
    let error = error.prop_map(|(relay, peer, error)| Step::Icmp { relay, peer, error });
    let ended = (small(), 0..100_u16).prop_map(|(which, bytes)| Step::ConnectionEnds { which, bytes });
    let slept = (
        prop_oneof![9 => 0..3_000_u64, 9 => 0..60_000_u64, 3 => 0..400_000_u64, 1 => 0..4_000_000_u64],
        any::<bool>(),
    );
    let variant = || 0..super::cast::VARIANTS;
    let reload = (prop::option::of(0..3_usize), variant());
    let deny = (prop::option::of(0..3_usize), small());
    let upgrade = (
        likely(80),
        prop_oneof![3 => Just(None), 2 => variant().prop_map(Some)],
        prop_oneof![6 => Just(0_u8), 1 => 1..4_u8],
    );
    let upgrade = upgrade.prop_map(|(remembers, variant, tight)| Step::Upgrade { remembers, variant, tight });
    let overtaken = (from(), any::<u8>(), any::<bool>());
    let overtaken =
        overtaken.prop_map(|(from, which, everywhere)| Step::Overtaken { from, which, everywhere });
    let more = prop_oneof![
        4 => (0..3_usize, luck()).prop_map(|(worker, luck)| Step::Work { worker, luck }),
        4 => (0..3_usize).prop_map(Step::Mail),
        4 => luck().prop_map(Step::Settle),
        2 => (0..3_usize, likely(40)).prop_map(|(worker, full)| Step::Full { worker, full }),
        3 => likely(60).prop_map(Step::Prompt),
        5 => (0..3_usize, prop_oneof![2 => Just(Says::Truth), 1 => Just(Says::Nothing)])
            .prop_map(|(worker, says)| Step::Store { worker, says }),
        3 => reload.prop_map(|(worker, variant)| Step::Reload { worker, variant }),
        2 => Just(Step::Reload { worker: None, variant: 0 }),
        1 => (0..12_usize).prop_map(Step::Drain),
        1 => small().prop_map(Step::Close),
        1 => (small(), any::<u8>()).prop_map(|(which, datagrams)| Step::Across { which, datagrams }),
        2 => deny.prop_map(|(worker, which)| Step::Deny { worker, which }),
        2 => upgrade,
        2 => Just(Step::Probe),
        2 => (small(), any::<bool>()).prop_map(|(which, before)| Step::Brink { which, before }),
        1 => (from(), any::<bool>()).prop_map(|(from, keepalive)| Step::Noise { from, keepalive }),
    ];
    prop_oneof![
        45 => ask,
        data => sent,
        data / 2 => received,
        2 => error,
        1 => (small(), 0..5_u8).prop_map(|(relay, peer)| Step::Late { relay, peer }),
        14 => deliver,
        2 => small().prop_map(Step::Lose),
        3 => (small(), from()).prop_map(|(which, from)| Step::Copy { which, from }),
        moves / 4 + 1 => (0..3 * super::cast::CLIENTS).prop_map(Step::Disconnect),
        moves / 6 + 1 => (from(), any::<bool>()).prop_map(|(from, ends)| Step::Rivals { from, ends }),
        moves / 8 + 1 => overtaken,
        connections / 2 => (small(), 0..15_u8).prop_map(|(relay, peer)| Step::PeerConnects { relay, peer }),
        connections / 4 + 1 => ended,
        9 => slept.prop_map(|(ms, exact)| Step::Sleep { ms, exact }),
        18 => more,
    ]
    .boxed()
}

fn asked(mix: Mix) -> impl Strategy<Value = Asked> {
    let [data, moves, connections] = weights(mix);
    let transport = match mix {
        Mix::Connections => prop_oneof![6 => Just(6_u8), 1 => Just(17_u8), 1 => Just(9_u8)].boxed(),
        _ => prop_oneof![30 => Just(17_u8), 2 => Just(6_u8), 1 => Just(9_u8)].boxed(),
    };
    let port = match mix {
        Mix::Connections => prop_oneof![20 => Just(9_u8), 1 => 0..4_u8].boxed(),
        _ => prop_oneof![4 => Just(9_u8), 2 => 0..4_u8].boxed(),
    };
    let lifetime = || prop_oneof![5 => Just(None), 2 => Just(Some(0_u32)), 3 => (1..5000_u32).prop_map(Some)];
    let family =
        || prop_oneof![8 => Just(None), 2 => Just(Some(1_u8)), 2 => Just(Some(2_u8)), 1 => Just(Some(9_u8))];
    let additional = prop_oneof![6 => Just(None), 4 => Just(Some(2_u8)), 1 => Just(Some(1_u8))];
    let mobile = if mix == Mix::Moves { 1..20_u8 } else { 0..20_u8 };
    // Even numbers mean mobile, as most allocations are in scenarios with moves.
    let mobile = mobile.prop_map(move |mobile| if mix == Mix::Moves && mobile > 3 { 2 } else { mobile });
    let allocate = (transport, lifetime(), port, family(), additional, mobile).prop_map(
        |(transport, lifetime, port, family, additional, mobile)| {
            // The two attributes are mutually exclusive, but sometimes both are sent.
            let additional = additional.filter(|_| family.is_none() || mobile == 7);
            Asked::Allocate { transport, lifetime, port, family, additional, mobile }
        },
    );
    let refresh =
        (lifetime(), family()).prop_map(|(lifetime, family)| Asked::Refresh { lifetime, family, ticket: 0 });
    let lasting = prop_oneof![6 => Just(None), 1 => Just(Some(0_u32)), 2 => (0..5000_u32).prop_map(Some)];
    let ticket = prop_oneof![1 => Just(1_u8), 12 => Just(2_u8), 5 => 3..7_u8];
    let moved = (lasting, prop_oneof![9 => Just(None), 1 => family()], ticket)
        .prop_map(|(lifetime, family, ticket)| Asked::Refresh { lifetime, family, ticket });
    prop_oneof![
        1 => Just(Asked::Binding),
        12 => allocate,
        4 => refresh,
        moves => moved,
        6 => vec(0..48_u8, 0..4).prop_map(Asked::Permit),
        data / 2 => (0..8_u8, 0..48_u8).prop_map(|(number, peer)| Asked::Bind { number, peer }),
        connections => (0..48_u8).prop_map(Asked::Connect),
        connections => (0..4_u8).prop_map(Asked::ConnectionBind),
    ]
}

/// Mostly selects a valid nonce: see `Network::ask`.
fn nonce() -> impl Strategy<Value = u8> {
    prop_oneof![1 => 0..5_u8, 9 => Just(9_u8)]
}

fn likely(times: u32) -> impl Strategy<Value = bool> {
    prop::bool::weighted(f64::from(times) / 100.0)
}

fn way() -> impl Strategy<Value = Way> {
    (likely(25), likely(85), likely(55), luck()).prop_map(|(flies, heard, settle, luck)| Way {
        flies,
        heard,
        settle,
        luck,
    })
}

fn luck() -> impl Strategy<Value = u8> {
    prop_oneof![9 => Just(0_u8), 1 => 4..8_u8]
}

fn length() -> impl Strategy<Value = u16> {
    prop_oneof![20 => 0..8_u16, 10 => 0..1500_u16, 1 => 65_440..=65_507_u16]
}
