//! State of a fleet in a real Redis or Valkey server, with sentinels and in a cluster.

use std::{collections::BTreeMap, time::Duration};

use tokio::{runtime::Runtime, time::sleep};
use turnpike_fleet::{
    Ask, EpochProgress, EpochState, Load, NodeName, NodeReport, QuotaBucket, QuotaGrant, QuotaLevel,
    SETTLE_MS, SHORTEST_MS, StoreEpoch, TELLING_MS, grant, reclaim,
};
use turnpike_stores::{Beaten, Beating, FleetAddress, FleetNews, FleetStore, NewsBatch, StoreFault};
use turnpike_testkit::{
    PATIENCE,
    alone::skip,
    databases::{PASSWORD, Proxy, Server},
};

struct World {
    runtime: Runtime,
    server: Server,
}

impl World {
    fn new() -> Option<Self> {
        let server = Server::redis().map_err(|why| skip(&why)).ok()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Some(Self { runtime, server })
    }

    fn is_whole(&self, store: &FleetStore) {
        let era = self.wait(store.era(StoreEpoch::default())).unwrap().era;
        self.put_into_era("whole", 1);
        assert_eq!(self.wait(store.era(era)).unwrap(), EpochState { era, is_whole: true });
    }

    fn put_into_era(&self, field: &str, value: u64) {
        let put = self.server.say(&format!("HSET turnpike:{{f}}:era {field} {value}"));
        assert_eq!(put, ":0\r\n", "the field existed");
    }

    fn of_era(&self, field: &str) -> u64 {
        let told = self.server.say(&format!("HGET turnpike:{{f}}:era {field}"));
        told.lines().nth(1).and_then(|line| line.parse().ok()).expect("a number")
    }

    fn store(&self) -> FleetStore {
        store(&self.server.url(self.server.address, ""), "f")
    }

    fn wait<T>(&self, question: impl Future<Output = T>) -> T {
        self.runtime.block_on(question)
    }
}

fn store(url: &str, fleet: &str) -> FleetStore {
    let address: FleetAddress = url.parse().unwrap();
    FleetStore::new(&address, fleet, Duration::from_secs(2))
}

fn name(text: &str) -> NodeName {
    text.parse().unwrap()
}

const LOAD: Load = Load {
    allocations: 7,
    most_allocations: 100,
    bits_per_second: 1,
    most_bits_per_second: 2,
    cpu: 3,
    ports_left: 4,
    ports: 5,
};

async fn beat(
    store: &FleetStore,
    of: &str,
    incarnation: u64,
    number: u16,
    take_over: Option<&str>,
) -> Beaten {
    let report = NodeReport::default();
    let name = &name(of);
    let beating = Beating { name, incarnation, number, draining: false, load: &LOAD, take_over, report };
    match store.beat(beating).await.unwrap() {
        // The epoch is tested separately.
        Beaten::Written { number, known, ring, .. } => {
            Beaten::Written { number, known, ring, era: EpochState::default() }
        }
        other => other,
    }
}

fn written(number: u16, known: bool) -> Beaten {
    Beaten::Written { number, known, ring: 0, era: EpochState::default() }
}

async fn exchange(store: &FleetStore, number: u16, nodes: u32, asks: &[Ask]) -> Vec<QuotaGrant> {
    let known = store.era(StoreEpoch::default()).await.unwrap().era;
    store.exchange(number, nodes, known, asks).await.unwrap().grants.expect("the current epoch")
}

/// Reports a node's quotas; returns the epoch that the node gets.
async fn report(store: &FleetStore, of: &str, report: NodeReport) -> EpochState {
    let (name, incarnation) = (&name(of), u64::from(of.as_bytes()[0]));
    let number = u16::from(of.as_bytes()[0]);
    let beating =
        Beating { name, incarnation, number, draining: false, load: &LOAD, take_over: None, report };
    match store.beat(beating).await.unwrap() {
        Beaten::Written { era, .. } => era,
        other => panic!("{other:?}"),
    }
}

#[test]
fn node_with_a_heartbeat_is_visible_with_its_number() {
    let Some(world) = World::new() else { return };
    let store = world.store();
    world.wait(async {
        assert_eq!(beat(&store, "a", 1, 7, None).await, written(7, false));
        assert_eq!(beat(&store, "a", 1, 7, None).await, written(7, true));
        assert_eq!(beat(&store, "b", 2, 7, None).await, written(8, false), "the number is in use");
        assert_eq!(beat(&store, "c", 3, 4095, None).await, written(4095, false));
        assert_eq!(beat(&store, "d", 4, 4095, None).await, written(1, false), "numbers wrap around");
        let look = store.look().await.unwrap();
        let seen: BTreeMap<String, (u16, u64)> = look
            .records
            .iter()
            .map(|record| (record.name.to_string(), (record.beat.number, record.beat.incarnation)))
            .collect();
        let all = [("a", (7, 1)), ("b", (8, 2)), ("c", (4095, 3)), ("d", (1, 4))];
        assert_eq!(seen, all.map(|(name, seen)| (name.to_owned(), seen)).into());
        for record in &look.records {
            assert_eq!(record.beat.load, LOAD);
            assert!(!record.beat.draining && look.store_ms - record.stamp_ms < 60_000, "{record:?}");
        }
    });
}

#[test]
fn name_belongs_to_one_process_and_can_be_taken_over() {
    let Some(world) = World::new() else { return };
    let store = world.store();
    world.wait(async {
        beat(&store, "a", 1, 1, None).await;
        let Beaten::Taken(record) = beat(&store, "a", 0xBEEF, 1, None).await else {
            panic!("a second process got the name")
        };
        assert!(record.ends_with(" 1 1 0 7 100 1 2 3 4 5"), "{record}");
        sleep(Duration::from_millis(5)).await;
        beat(&store, "a", 1, 1, None).await;
        let Beaten::Taken(now) = beat(&store, "a", 0xBEEF, 1, Some(&record)).await else {
            panic!("a second process got the name with an old record")
        };
        assert_ne!(now, record);
        assert_eq!(beat(&store, "a", 0xBEEF, 9, Some(&now)).await, written(1, false), "the number is kept");
        assert!(
            matches!(beat(&store, "a", 1, 1, None).await, Beaten::Taken(_)),
            "the first process has lost the name"
        );
    });
}

#[test]
fn cards_bans_and_answers_are_stored() {
    let Some(world) = World::new() else { return };
    let store = world.store();
    let any_bytes: Vec<u8> = (0..=255).collect();
    world.wait(async {
        store.put_card(&name("a"), &any_bytes).await.unwrap();
        let cards = store.cards(&[name("a"), name("absent")]).await.unwrap();
        assert_eq!((cards.as_slice(), store.cards(&[]).await.unwrap().len()), (&[any_bytes.clone()][..], 0));
        let subject = "user alice@here".parse().unwrap();
        assert!(store.bans().await.unwrap().is_empty());
        store.put_ban(&subject, b"one").await.unwrap();
        store.put_ban(&subject, &any_bytes).await.unwrap();
        assert_eq!(store.bans().await.unwrap(), std::slice::from_ref(&any_bytes));
        store.remove_ban(&subject).await.unwrap();
        assert!(store.bans().await.unwrap().is_empty());
        assert_eq!(store.answered(7).await.unwrap(), None);
        store.answer(7, &any_bytes).await.unwrap();
        assert_eq!(store.answered(8).await.unwrap(), None);
        assert_eq!(store.answered(7).await.unwrap(), Some(any_bytes));
        assert_eq!(store.answered(7).await.unwrap(), None, "an answer can be taken only once");
    });
}

#[test]
fn only_one_of_two_concurrent_key_rotations_succeeds() {
    let Some(world) = World::new() else { return };
    let store = world.store();
    world.wait(async {
        assert_eq!(store.ring().await.unwrap(), None);
        assert!(store.put_ring(0, 1, b"first").await.unwrap());
        assert!(!store.put_ring(0, 1, b"too late").await.unwrap());
        assert!(store.put_ring(1, 2, b"second").await.unwrap());
        assert!(!store.put_ring(1, 2, b"too late").await.unwrap());
        assert_eq!(store.ring().await.unwrap().unwrap(), b"second");
        let Beaten::Written { ring, .. } = beat(&store, "a", 1, 1, None).await else { panic!() };
        assert_eq!(ring, 2, "each heartbeat returns the ring's version");
    });
}

#[test]
fn documented_permissions_are_sufficient() {
    let Some(world) = World::new() else { return };
    let documentation = include_str!("../../../docs/fleet.md");
    let line = documentation.lines().find(|line| line.starts_with("ACL SETUSER turnpike ")).unwrap();
    let line = line.replace(">PASSWORD", &format!(">{PASSWORD}"));
    // The Redis client on this machine may not have this command.
    let older = line.replace(" +client|setinfo", "");
    assert!([line, older].iter().any(|line| world.server.say(line).contains("OK")));
    let url = world.server.url(world.server.address, "");
    let store = store(&url.replacen("redis://:", "redis://turnpike:", 1), "turnpike");
    world.wait(async {
        let mut news = store.news();
        assert!(hear(&mut news).await.anew);
        assert_eq!(beat(&store, "a", 1, 1, None).await, written(1, false));
        assert_eq!(store.look().await.unwrap().records.len(), 1);
        store.put_card(&name("a"), b"card").await.unwrap();
        assert_eq!(store.cards(&[name("a")]).await.unwrap().len(), 1);
        assert!(store.put_ring(0, 1, b"ring").await.unwrap() && store.ring().await.unwrap().is_some());
        let subject = "user alice@here".parse().unwrap();
        store.put_ban(&subject, b"ban").await.unwrap();
        assert_eq!(store.bans().await.unwrap().len(), 1);
        store.remove_ban(&subject).await.unwrap();
        exchange(&store, 1, 1, &[Ask { bucket: bucket(1), limit: 2, used: 2, want: 2 }]).await;
        assert_eq!(store.levels().await.unwrap(), [(bucket(1), QuotaLevel::Full)]);
        store.say(b"hello").await.unwrap();
        while hear(&mut news).await.messages.is_empty() {}
        store.answer(7, b"answer").await.unwrap();
        assert!(store.answered(7).await.unwrap().is_some());
        assert!(store.reserve_orders(1, PATIENCE).await.unwrap());
        store.put_orders(&[(bucket(2), b"sealed".to_vec())]).await.unwrap();
        assert_eq!(store.orders(&[bucket(2)]).await.unwrap(), [Some(b"sealed".to_vec())]);
        store.release_orders(1).await.unwrap();
        for kept_s in [Some(60), Some(0)] {
            store.publish(&[("turn/realm/here".to_owned(), "line".to_owned(), kept_s)]).await.unwrap();
        }
        assert!(!store.reap(&name("a"), 1, true).await.unwrap());
    });
}

fn bucket(byte: u8) -> QuotaBucket {
    // Includes bytes that have a special meaning in some protocol.
    QuotaBucket([byte, 0, b'\r', b'\n', b' ', b'*', 255, b'"', 1, 2, 3, 4, 5, 6, 7, 8])
}

async fn hear(news: &mut FleetNews) -> NewsBatch {
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        let heard = news.next().await.unwrap();
        if heard != NewsBatch::default() {
            return heard;
        }
        assert!(std::time::Instant::now() < deadline, "no message arrived");
    }
}

#[test]
fn store_grants_the_same_quotas_as_the_rule() {
    let Some(world) = World::new() else { return };
    let store = world.store();
    let mut seed = 7_u64;
    let mut below = |most: u32| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from(seed >> 40).unwrap() % most
    };
    let mut sums: BTreeMap<QuotaBucket, u32> = BTreeMap::new();
    let mut held: BTreeMap<(u16, QuotaBucket), u32> = BTreeMap::new();
    let mut levels: BTreeMap<QuotaBucket, QuotaLevel> = BTreeMap::new();
    let era = world.wait(store.era(StoreEpoch::default())).unwrap().era;
    world.wait(async {
        for round in 0..300 {
            let is_whole = below(3) > 0;
            world.put_into_era("whole", is_whole.into());
            // Far enough in the future even if the test is slow.
            world.put_into_era("until", era.since_ms + 3_600_000);
            let (node, nodes) = (1 + u16::try_from(below(3)).unwrap(), 1 + below(5));
            let asks: Vec<Ask> = (0..1 + below(4))
                .map(|at| {
                    let limit = [1, 2, 5, 40, 1000, u32::MAX][usize::try_from(below(6)).unwrap()];
                    let used = below(limit.min(1200) + 2);
                    Ask {
                        bucket: bucket(u8::try_from(at * 3 + below(3)).unwrap()),
                        limit,
                        used,
                        want: used + below(50),
                    }
                })
                .collect();
            let exchanged = store.exchange(node, nodes, era, &asks).await.unwrap();
            assert_eq!(exchanged.era, EpochState { era, is_whole });
            let granted = exchanged.grants.expect("the current epoch");
            assert_eq!(granted.len(), asks.len(), "round {round}");
            for (ask, granted) in asks.iter().zip(granted) {
                let old = held.get(&(node, ask.bucket)).copied().unwrap_or_default();
                let sum = sums.get(&ask.bucket).copied().unwrap_or_default();
                let (now, sum, level) = if is_whole {
                    grant(ask.limit, nodes, sum, old, ask.used, ask.want)
                } else {
                    reclaim(ask.limit, sum, old, ask.used, ask.want)
                };
                assert_eq!((granted.held, granted.sum), (now, sum), "round {round}: {ask:?}, {old} before");
                assert_eq!((granted.bucket, granted.told), (ask.bucket, ask.used));
                held.insert((node, ask.bucket), now);
                sums.insert(ask.bucket, sum);
                levels.insert(ask.bucket, level);
            }
        }
        let kept: BTreeMap<QuotaBucket, QuotaLevel> = store.levels().await.unwrap().into_iter().collect();
        levels.retain(|_, level| *level != QuotaLevel::Calm);
        assert_eq!(kept, levels);
    });
}

/// The rule is `turnpike_fleet::Chronicle`. Durations are tested together with the scripts.
#[test]
fn store_grants_again_after_all_nodes_have_reported_or_a_timeout() {
    let Some(world) = World::new() else { return };
    let store = world.store();
    let look = |known| world.wait(store.era(StoreEpoch { number: known, since_ms: 0 })).unwrap();
    let tell =
        |of, era, members, progress| world.wait(report(&store, of, NodeReport { era, members, progress }));
    let another_server = |number: u64| {
        world.put_into_era("run", number);
        look(0)
    };
    let first = look(0);
    assert_eq!((first.era.number, first.is_whole), (1, false));
    assert_eq!(look(1), first);
    assert_eq!(look(7).era.number, 8, "a node has seen a later epoch");
    let era = another_server(1);
    assert_eq!((era.era.number, era.is_whole), (9, false));
    assert_eq!(look(9), era);

    // A moment later, all nodes report, including one that has just started.
    world.put_into_era("since", era.era.since_ms - SHORTEST_MS);
    let (before, era) = (era.era, look(9).era);
    for (of, known, members, progress, is_whole) in [
        ("a", era, 2, EpochProgress::Done, false),
        ("a", era, 2, EpochProgress::Done, false),
        ("d", era, 0, EpochProgress::Done, false),
        ("b", era, 3, EpochProgress::Done, false),
        ("c", before, 3, EpochProgress::Done, false),
        ("c", era, 3, EpochProgress::None, false),
        ("c", era, 3, EpochProgress::Telling, false),
        ("c", era, 3, EpochProgress::Done, true),
    ] {
        assert_eq!(tell(of, known, members, progress), EpochState { era, is_whole }, "{of}: {progress:?}");
    }
    assert!(look(9).is_whole);

    // One node never reports.
    assert_eq!(another_server(2).era.number, 10);
    assert_eq!(world.server.say("HLEN turnpike:{f}:told"), ":0\r\n", "all nodes must report again");
    world.put_into_era("until", 1);
    assert!(look(10).is_whole);
    // The clock was set back.
    another_server(3);
    let far = look(11).era.since_ms + 3_600_000;
    world.put_into_era("until", far);
    assert!(!look(11).is_whole && world.of_era("until") < far);
    // Each report extends the wait. This is repeated in case the test itself is suspended.
    for number in 4.. {
        let era = another_server(number).era;
        let soon = era.since_ms + TELLING_MS - 100;
        world.put_into_era("until", soon);
        if !tell("a", era, 2, EpochProgress::Telling).is_whole {
            assert!(world.of_era("until") > soon);
            break;
        }
    }
    assert!(world.of_era("until") <= world.of_era("since") + SETTLE_MS + TELLING_MS);
}

#[test]
fn requests_from_another_epoch_are_ignored() {
    let Some(world) = World::new() else { return };
    let store = world.store();
    world.wait(async {
        let ask = [Ask { bucket: bucket(1), limit: 10, used: 4, want: 6 }];
        let era = store.era(StoreEpoch::default()).await.unwrap();
        for known in [StoreEpoch::default(), StoreEpoch { since_ms: 1, ..era.era }] {
            let answer = store.exchange(1, 1, known, &ask).await.unwrap();
            assert_eq!((answer.era, answer.grants), (era, None));
        }
        assert_eq!(world.server.say("EXISTS turnpike:{f}:sums turnpike:{f}:held:1"), ":0\r\n");
        let answer = store.exchange(1, 1, era.era, &ask).await.unwrap();
        let kept = QuotaGrant { bucket: bucket(1), told: 4, held: 6, sum: 6 };
        assert_eq!((answer.era, answer.grants), (era, Some(vec![kept])), "reported quota is kept");
    });
}

/// Invalid text instead of a number must not stop the nodes.
#[test]
fn invalid_stored_numbers_count_as_zero() {
    const BUCKET: &str = "abcdefghijklmnop";
    let Some(world) = World::new() else { return };
    let store = world.store();
    let bucket = QuotaBucket(BUCKET.as_bytes().try_into().unwrap());
    let mut known = 0;
    for put in [
        "HSET turnpike:{f}:era number x",
        "HSET turnpike:{f}:era number nan",
        "HSET turnpike:{f}:era number inf",
        "HSET turnpike:{f}:era number -1",
        "HSET turnpike:{f}:era number 1e300",
        "HSET turnpike:{f}:era since x until x whole 0 expected x",
        "SET turnpike:{f}:era x",
        "RPUSH turnpike:{f}:era x",
        &format!("HSET turnpike:{{f}}:sums {BUCKET} x"),
        &format!("HSET turnpike:{{f}}:held:1 {BUCKET} x"),
        "HSET turnpike:{f}:ring version x",
    ] {
        world.wait(async {
            known = store.era(StoreEpoch { number: known, since_ms: 0 }).await.unwrap().era.number;
            if !put.starts_with("HSET") {
                // RPUSH needs a key that does not exist.
                world.server.say("DEL turnpike:{f}:era");
            }
            let told = world.server.say(put);
            assert!(told.starts_with([':', '+']), "{put}: {told}");
            let era = store.era(StoreEpoch { number: known, since_ms: 0 }).await.unwrap().era;
            assert!(era.number >= known && era.number < known + 3, "{put}: {era:?} after {known}");
            known = era.number;
            let written = beat(&store, "a", 1, 1, None).await;
            assert!(matches!(written, Beaten::Written { number: 1, ring: 0, .. }), "{put}: {written:?}");
            let ask = [Ask { bucket, limit: 10, used: 4, want: 4 }];
            let granted = store.exchange(1, 1, era, &ask).await.unwrap().grants.expect("the current epoch");
            assert!(granted[0].held == 4 && granted[0].sum >= 4, "{put}: {granted:?}");
        });
    }
    world.wait(async {
        assert!(store.put_ring(0, 1, b"ring").await.unwrap());
        world.server.say(&format!("HSET turnpike:{{f}}:held:1 {BUCKET} x"));
        assert!(!store.reap(&name("a"), 1, true).await.unwrap());
        // A key of the wrong type must be fixed by an operator.
        world.server.say("DEL turnpike:{f}:nodes");
        world.server.say("SET turnpike:{f}:nodes x");
        let error = store.look().await.unwrap_err();
        assert_eq!((error.fault, error.may_pass()), (StoreFault::Row, false));
        assert!(error.to_string().ends_with("; correct it there"), "{error}");
    });
}

#[test]
fn dead_node_returns_its_quotas_with_an_event() {
    let Some(world) = World::new() else { return };
    let store = world.store();
    world.is_whole(&store);
    world.wait(async {
        let mut news = store.news();
        assert!(hear(&mut news).await.anew);
        beat(&store, "a", 1, 1, None).await;
        beat(&store, "b", 2, 2, None).await;
        let ask = |used, want| [Ask { bucket: bucket(1), limit: 10, used, want }];
        exchange(&store, 1, 2, &ask(4, 4)).await;
        exchange(&store, 2, 2, &ask(6, 6)).await;
        let heard = hear(&mut news).await;
        assert_eq!(heard.levels.last(), Some(&(bucket(1), QuotaLevel::Full)), "{heard:?}");
        // More buckets than one call returns, held by this node only.
        let many = (0..1200_u16).map(|at| Ask {
            bucket: QuotaBucket(std::array::from_fn(|byte| at.to_be_bytes()[byte % 2])),
            limit: 100,
            used: 1,
            want: 1,
        });
        exchange(&store, 2, 2, &many.collect::<Vec<_>>()).await;

        assert!(!store.reap(&name("b"), 2, false).await.unwrap(), "it exists");
        assert_eq!(exchange(&store, 1, 2, &ask(4, 4)).await[0].sum, 10);
        let mut times = 1;
        while store.reap(&name("b"), 2, true).await.unwrap() {
            times += 1;
        }
        assert_eq!(times, 3, "1201 buckets, 500 at a time");
        assert_eq!(exchange(&store, 1, 2, &ask(4, 9)).await[0].sum, 5, "used part and share of the rest");
        let look = store.look().await.unwrap();
        assert_eq!(look.records.iter().map(|record| record.name.as_str()).collect::<Vec<_>>(), ["a"]);
        assert_eq!(
            hear(&mut news).await.levels,
            [(bucket(1), QuotaLevel::Heavy)],
            "the bucket is no longer full, but another node holds a part"
        );
        assert_eq!(beat(&store, "c", 3, 2, None).await, written(2, false));
        assert_eq!(beat(&store, "b", 2, 2, None).await, written(3, false));
    });
}

#[test]
fn number_is_not_reused_before_all_quotas_are_returned() {
    let Some(world) = World::new() else { return };
    let store = world.store();
    world.wait(async {
        beat(&store, "a", 1, 1, None).await;
        let asks: Vec<Ask> = (0..200)
            .flat_map(|high| {
                [1, 2, 3].map(|low| Ask {
                    bucket: QuotaBucket([high, low, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]),
                    limit: 9,
                    used: 1,
                    want: 1,
                })
            })
            .collect();
        exchange(&store, 1, 1, &asks).await;
        assert!(store.reap(&name("a"), 1, true).await.unwrap(), "more to return");
        assert_eq!(beat(&store, "b", 2, 1, None).await, written(2, false));
        let records = store.look().await.unwrap().records;
        assert_eq!(
            records[0].beat.incarnation, 0,
            "a record without an owner remains, so that another node can continue"
        );
        while store.reap(&name("a"), 1, false).await.unwrap() {}
        assert_eq!(store.look().await.unwrap().records.len(), 1);
        assert_eq!(beat(&store, "c", 3, 1, None).await, written(1, false));
    });
}

#[test]
fn messages_reach_all_subscribers_in_order() {
    let Some(world) = World::new() else { return };
    let store = world.store();
    world.wait(async {
        store.say(b"before any subscriber").await.unwrap();
        let mut listeners = [store.news(), store.news()];
        for news in &mut listeners {
            assert_eq!(news.next().await.unwrap(), NewsBatch { anew: true, ..NewsBatch::default() });
        }
        for number in 0..50 {
            store.say(&[number, 0, 255]).await.unwrap();
        }
        for news in &mut listeners {
            let mut messages = Vec::new();
            while messages.len() < 50 {
                messages.extend(hear(news).await.messages);
            }
            assert_eq!(messages, (0..50).map(|number| vec![number, 0, 255]).collect::<Vec<_>>());
        }
    });
}

async fn fails(store: &FleetStore) -> StoreFault {
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        if let Err(error) = store.look().await {
            assert!(
                error.to_string().contains("127.0.0.1") && !error.to_string().contains(PASSWORD),
                "{error}"
            );
            return error.fault;
        }
        assert!(std::time::Instant::now() < deadline, "still answering");
    }
}

async fn heals(store: &FleetStore) {
    let deadline = std::time::Instant::now() + PATIENCE;
    while let Err(error) = store.look().await {
        assert!(std::time::Instant::now() < deadline, "{error}");
        sleep(Duration::from_millis(20)).await;
    }
}

#[test]
fn lost_slow_or_emptied_store_is_detected_and_recovers() {
    let Some(mut world) = World::new() else { return };
    let proxy = Proxy::new(world.server.address);
    let address: FleetAddress = world.server.url(proxy.address, "").parse().unwrap();
    let store = FleetStore::new(&address, "f", Duration::from_millis(300));
    let mut news = store.news();
    let known = world.wait(async {
        assert!(hear(&mut news).await.anew);
        beat(&store, "a", 1, 5, None).await;
        let known = store.era(StoreEpoch::default()).await.unwrap();
        proxy.refuse(true);
        assert_eq!(fails(&store).await, StoreFault::Unreachable);
        assert!(news.next().await.is_err());
        proxy.refuse(false);
        heals(&store).await;
        assert_eq!(beat(&store, "a", 1, 5, None).await, written(5, true));
        proxy.hold(true);
        assert_eq!(fails(&store).await, StoreFault::Slow);
        proxy.hold(false);
        heals(&store).await;
        assert_eq!(store.era(known.era).await.unwrap(), known, "nothing was lost");
        known
    });
    world.server.stop();
    world.server.start();
    assert!(world.server.say("FLUSHALL").contains("OK"));
    world.wait(async {
        heals(&store).await;
        assert_eq!(beat(&store, "a", 1, 5, None).await, written(5, false), "the number is kept");
        let era = store.era(known.era).await.unwrap();
        assert!(era.era != known.era && !era.is_whole, "everything was lost");
        while news.next().await.is_err() {
            sleep(Duration::from_millis(20)).await;
        }
        store.say(b"afterwards").await.unwrap();
        let mut messages = Vec::new();
        while messages.is_empty() {
            messages = hear(&mut news).await.messages;
        }
        assert_eq!(messages, [b"afterwards".to_vec()]);
    });
}

#[test]
fn sentinels_name_the_current_master() {
    let Some(mut world) = World::new() else { return };
    let replica = match Server::redis_replica(&world.server) {
        Ok(replica) => replica,
        Err(why) => return skip(&why),
    };
    turnpike_testkit::eventually("replication", || {
        replica.say("INFO replication").contains("master_link_status:up")
    });
    let sentinel = Server::sentinel(&world.server, "main").expect("sentinel starts");
    let absent = "127.0.0.1:1";
    let url =
        format!("redis+sentinel://:{}@{absent},{}/main", PASSWORD.replace('%', "%25"), sentinel.address);
    let store = store(&url, "f");
    world.wait(async {
        assert_eq!(beat(&store, "a", 1, 5, None).await, written(5, false));
        assert_eq!(store.era(StoreEpoch::default()).await.unwrap().era.number, 1);
        let error =
            crate::fleet::store(&url.replace("/main", "/other"), "f").look().await.expect_err("no such");
        assert!(error.to_string().contains("\"other\""), "{error}");
    });
    turnpike_testkit::eventually("the sentinel knows the replica", || {
        let mut stream = std::net::TcpStream::connect(sentinel.address).expect("listening");
        stream.set_read_timeout(Some(PATIENCE)).expect("not zero");
        std::io::Write::write_all(&mut stream, b"SENTINEL replicas main\r\n").expect("writable");
        let mut answer = [0; 4096];
        let length = std::io::Read::read(&mut stream, &mut answer).expect("an answer");
        String::from_utf8_lossy(&answer[..length]).contains(&replica.address.port().to_string())
    });
    world.server.stop();
    world.wait(async {
        heals(&store).await;
        assert_eq!(beat(&store, "a", 1, 5, None).await, written(5, true), "the replica has the record");
        let era = store.era(StoreEpoch::default()).await.unwrap();
        assert_eq!((era.era.number, era.is_whole), (2, false), "the replica may not have the latest data");
    });
    assert!(replica.say("ROLE").contains("master"));
}

#[test]
fn cluster_server_with_the_keys_is_found() {
    let [first, second] = match Server::redis_cluster() {
        Ok(servers) => servers,
        Err(why) => return skip(&why),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let url = format!("redis+cluster://:{}@{}", PASSWORD.replace('%', "%25"), first.address);
    runtime.block_on(async {
        for fleet in ["a", "b", "c", "d", "e", "f"] {
            let store = store(&url, fleet);
            let mut news = store.news();
            assert!(hear(&mut news).await.anew);
            assert_eq!(beat(&store, "n", 1, 5, None).await, written(5, false));
            store.say(b"hello").await.unwrap();
            assert_eq!(hear(&mut news).await.messages, [b"hello".to_vec()]);
            let ask = Ask { bucket: bucket(1), limit: 10, used: 1, want: 1 };
            assert_eq!(exchange(&store, 5, 1, &[ask]).await.len(), 1);
            assert!(!store.reap(&name("n"), 5, true).await.unwrap());
        }
    });
    let keys = |server: &Server| server.say("DBSIZE").trim().trim_start_matches(':').parse::<u32>().unwrap();
    assert!(keys(&first) > 0 && keys(&second) > 0, "six names are spread over both servers");
}

#[test]
fn statuses_are_published_in_coturns_format() {
    let Some(world) = World::new() else { return };
    let store = world.store();
    let channel = "turn/realm/here/user/alice/allocation/000000000000000007/status";
    let line = |line: &str, kept| (channel.to_owned(), line.to_owned(), kept);
    let mut listener = std::net::TcpStream::connect(world.server.address).unwrap();
    listener.set_read_timeout(Some(PATIENCE)).unwrap();
    let subscribe = format!("AUTH {PASSWORD}\r\nPSUBSCRIBE turn/realm/*/user/*/allocation/*/status\r\n");
    std::io::Write::write_all(&mut listener, subscribe.as_bytes()).unwrap();
    let mut heard = String::new();
    let mut until = |text: &str| {
        while !heard.contains(text) {
            let mut some = [0; 1024];
            let count = std::io::Read::read(&mut listener, &mut some).unwrap();
            assert!(count > 0, "{heard}");
            heard.push_str(std::str::from_utf8(&some[..count]).unwrap());
        }
    };
    until("psubscribe");
    world.wait(async { store.publish(&[line("new lifetime=600", Some(600))]).await.unwrap() });
    until("new lifetime=600");
    assert!(world.server.say(&format!("GET {channel}")).contains("new lifetime=600"));
    assert!(
        world.server.say(&format!("TTL {channel}")).contains(":600")
            || world.server.say(&format!("TTL {channel}")).contains(":59")
    );
    world.wait(async { store.publish(&[line("deleted", Some(0)), line("more", None)]).await.unwrap() });
    until("deleted");
    until("more");
    assert!(world.server.say(&format!("GET {channel}")).contains("$-1"));
}

#[test]
fn one_node_orders_certificates_until_its_reservation_ends() {
    let Some(world) = World::new() else { return };
    let store = world.store();
    let reserve = |incarnation, ms| {
        world.wait(store.reserve_orders(incarnation, Duration::from_millis(ms))).expect("the store answers")
    };
    let release = |incarnation| world.wait(store.release_orders(incarnation)).expect("the store answers");
    assert!(reserve(1, 60_000) && reserve(1, 60_000), "extended");
    assert!(!reserve(2, 60_000));
    release(2);
    assert!(!reserve(2, 60_000), "another node's");
    release(1);
    assert!(reserve(2, 1));
    world.wait(async { sleep(Duration::from_millis(50)).await });
    assert!(reserve(1, 60_000), "the reservation has expired");
    for kept in [
        "SET turnpike:{f}:ordering x",
        "HSET turnpike:{f}:ordering owner 9 until x",
        "HSET turnpike:{f}:ordering owner 9 until 4000000000000",
    ] {
        world.server.say("DEL turnpike:{f}:ordering");
        world.server.say(kept);
        assert!(reserve(3, 60_000), "{kept}");
    }
}

#[test]
fn certificate_orders_are_kept_for_a_month() {
    let Some(world) = World::new() else { return };
    let store = world.store();
    let fields = [1, 2, 3].map(|number| QuotaBucket([number; 16]));
    let read = || world.wait(store.orders(&fields)).expect("the store answers");
    assert_eq!(read(), [None, None, None]);
    let values = [vec![0, 255, 10], vec![]];
    let put = [(fields[0], values[0].clone()), (fields[2], values[1].clone())];
    world.wait(store.put_orders(&put)).expect("the store answers");
    assert_eq!(read(), [Some(values[0].clone()), None, Some(values[1].clone())]);
    let left = world.server.say("TTL turnpike:{f}:orders");
    let left: u32 = left.trim_start_matches(':').trim().parse().expect("a number");
    assert!((29 * 86_400..=30 * 86_400).contains(&left), "{left}");
}
