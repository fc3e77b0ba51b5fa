//! A reading of all counters, and its difference from the previous one.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use jiff::Timestamp;
use strum::VariantArray;
use turnpike_api::{
    BatchRate, Live, LiveListener, LiveRealm, LiveRule, LiveServer, LiveWorker, PayloadRate, Quantiles,
    ReasonCount, RuleStatus, Status, Talkers,
};
use turnpike_relay::{
    CloseReason, DtlsDrop, DtlsFailure, HandshakeFailure, KernelCount, ListenerCount, WorkerSnapshot,
};
use turnpike_turn::server::{DropReason, Stats, stats::ALLOCATION_MS};

use super::AllocationTimes;
use crate::{program::Owner, threads::ThreadUse};

/// Counters by kind and reason, always in the same order.
type ReasonCounters = Vec<(&'static str, &'static str, u64)>;

pub(super) struct Reading {
    at: Instant,
    server: Option<ServerReading>,
    rules: Vec<RuleStatus>,
}

struct ServerReading {
    workers: Vec<WorkerSnapshot>,
    turn: Stats,
    drops: ReasonCounters,
    refusals: ReasonCounters,
    listeners: Vec<ListenerCount>,
    realms: Vec<(Box<str>, usize)>,
}

impl Reading {
    pub(super) fn take(program: &dyn Owner) -> Self {
        let server = program.server().map(|server| {
            let workers = server.relay.snapshots();
            let mut turn = Stats::default();
            for worker in &workers {
                turn.merge(&worker.turn);
            }
            let kernel = server.relay.kernel().map(|kernel| kernel.snapshot());
            let by_kernel =
                |what: KernelCount| kernel.as_ref().map_or(0, |kernel| kernel.counts[what as usize]);
            ServerReading {
                drops: drops(&workers, &turn, by_kernel),
                refusals: refusals(&workers, &turn),
                listeners: server.relay.by_listener(&workers),
                realms: server.relay.realms(),
                workers,
                turn,
            }
        });
        Self { at: Instant::now(), server, rules: program.rules() }
    }

    pub(super) fn at(&self) -> Instant {
        self.at
    }

    pub(super) fn allocation_times(&self) -> Option<&AllocationTimes> {
        self.server.as_ref().map(|server| &server.turn.allocation_times)
    }

    /// Activity since `before`. `waits` contains the response time of each worker.
    pub(super) fn since(
        &self,
        before: &Self,
        status: Status,
        shares: &HashMap<String, ThreadUse>,
        waits: &[Option<Duration>],
        talkers: Option<&Talkers>,
        program: &dyn Owner,
    ) -> Live {
        let seconds = (self.at - before.at).as_secs_f64().max(0.001);
        let server = self.server.as_ref().zip(before.server.as_ref());
        let server = server.map(|(now, before)| now.since(before, seconds, shares, waits, talkers, program));
        let rules = self.rules.iter().map(|rule| {
            let none = RuleStatus::default();
            let before = before.rules.iter().find(|before| before.name == rule.name).unwrap_or(&none);
            live_rule(before, rule, seconds)
        });
        let cores: f64 = shares.values().map(|share| share.ran).sum();
        Live {
            at: milliseconds(Timestamp::now()),
            interval_s: rounded(seconds),
            status,
            cores: (!shares.is_empty()).then_some(rounded(cores)),
            server,
            rules: rules.collect(),
        }
    }
}

impl ServerReading {
    fn since(
        &self,
        before: &Self,
        seconds: f64,
        shares: &HashMap<String, ThreadUse>,
        waits: &[Option<Duration>],
        talkers: Option<&Talkers>,
        program: &dyn Owner,
    ) -> LiveServer {
        let more = |of: fn(&Self) -> u64| per(of(self).saturating_sub(of(before)), seconds);
        let sum = |of: fn(&WorkerSnapshot) -> u64| {
            let total = |reading: &Self| reading.workers.iter().map(of).sum::<u64>();
            total(self).saturating_sub(total(before))
        };
        let across = |direction: usize| {
            let total = |reading: &Self| {
                let pairs = reading.workers.iter().map(|worker| worker.across[direction]);
                pairs.fold((0, 0), |sum: (u64, u64), pair| (sum.0 + pair.0, sum.1 + pair.1))
            };
            less(total(self), total(before))
        };
        let (up, down) = (across(0), across(1));
        let absent = WorkerSnapshot::default();
        let workers = self.workers.iter().enumerate().map(|(number, worker)| {
            let before = before.workers.get(number).unwrap_or(&absent);
            let share = shares.get(&format!("relay-{number}"));
            live_worker(number, before, worker, seconds, share, waits.get(number).copied().flatten())
        });
        LiveServer {
            to_peer: PayloadRate {
                datagrams: more(|it| it.turn.to_peer_datagrams),
                bytes: more(|it| it.turn.to_peer_bytes + it.turn.connection_bytes[0]),
            },
            to_client: PayloadRate {
                datagrams: more(|it| it.turn.to_client_datagrams),
                bytes: more(|it| it.turn.to_client_bytes + it.turn.connection_bytes[1]),
            },
            across: rate((up.0 + down.0, up.1 + down.1), seconds),
            received: per(sum(|worker| worker.rx.datagrams), seconds),
            sent: per(sum(|worker| worker.tx.datagrams), seconds),
            requests: more(|it| it.turn.requests.iter().sum()),
            opened: more(|it| it.turn.allocations_opened),
            closed: more(|it| it.turn.allocations_closed.iter().sum()),
            opening: None,
            drops: reasons(&before.drops, &self.drops, seconds, program),
            refusals: reasons(&before.refusals, &self.refusals, seconds, program),
            workers: workers.collect(),
            batches: self.batches(before, seconds),
            listeners: self.listeners.iter().map(live_listener).collect(),
            realms: self.realms.iter().map(live_realm).collect(),
            talkers: talkers.cloned(),
        }
    }

    /// Bucket i counts calls with 2^i to 2^(i+1) - 1 datagrams; the last one is unbounded.
    fn batches(&self, before: &Self, seconds: f64) -> Vec<BatchRate> {
        let total = |reading: &Self, bucket: usize| -> u64 {
            reading.workers.iter().map(|worker| worker.rx.batch[bucket]).sum()
        };
        let buckets = WorkerSnapshot::default().rx.batch.len();
        let batch = |bucket: usize| BatchRate {
            from: 1 << bucket,
            to: (bucket + 1 < buckets).then(|| (1 << (bucket + 1)) - 1),
            rate: per(total(self, bucket).saturating_sub(total(before, bucket)), seconds),
        };
        (0..buckets).map(batch).collect()
    }
}

fn live_worker(
    number: usize,
    before: &WorkerSnapshot,
    now: &WorkerSnapshot,
    seconds: f64,
    share: Option<&ThreadUse>,
    waited: Option<Duration>,
) -> LiveWorker {
    let more = |of: fn(&WorkerSnapshot) -> u64| of(now).saturating_sub(of(before));
    let calls = more(|worker| worker.rx.calls).saturating_sub(more(|worker| worker.rx.would_block));
    LiveWorker {
        number: number as u64,
        allocations: now.allocations,
        load: share.map(|share| rounded(share.ran)),
        waiting: share.map(|share| rounded(share.waited)),
        event_loop_us: waited.and_then(|waited| u64::try_from(waited.as_micros()).ok()),
        wakeups: per(more(|worker| worker.wakeups), seconds),
        received: per(more(|worker| worker.rx.datagrams), seconds),
        sent: per(more(|worker| worker.tx.datagrams), seconds),
        receive_batch: ratio(more(|worker| worker.rx.datagrams), calls),
        send_batch: ratio(more(|worker| worker.tx.datagrams), more(|worker| worker.tx.calls)),
        dropped: per(more(dropped), seconds),
    }
}

fn dropped(worker: &WorkerSnapshot) -> u64 {
    let own: u64 = worker.turn.drops.iter().sum();
    let kept_alive = worker.turn.dropped(DropReason::Keepalive);
    let WorkerSnapshot { rx, tx, streams, dtls, ttl_expired, handoffs_lost, .. } = worker;
    own - kept_alive
        + (rx.kernel_drops + rx.truncated)
        + (tx.would_block + tx.too_big + tx.refused)
        + (streams.queue_drops + dtls.dropped.iter().sum::<u64>())
        + (ttl_expired + handoffs_lost)
}

fn live_listener(count: &ListenerCount) -> LiveListener {
    let ListenerCount { transport, address, server_name, allocations } = count;
    LiveListener {
        transport: <&str>::from(*transport).to_owned(),
        address: address.to_string(),
        server_name: server_name.clone(),
        allocations: *allocations,
    }
}

fn live_realm((name, allocations): &(Box<str>, usize)) -> LiveRealm {
    LiveRealm { name: name.to_string(), allocations: *allocations as u64 }
}

fn live_rule(before: &RuleStatus, now: &RuleStatus, seconds: f64) -> LiveRule {
    let ends = now.ends.iter().map(|(reason, total)| {
        let then = before.ends.iter().find(|(known, _)| known == reason).map_or(0, |(_, count)| *count);
        let kind = if reason.starts_with("datagrams_") { "datagram" } else { "end" };
        let rate = per(total.saturating_sub(then), seconds);
        ReasonCount {
            kind: kind.to_owned(),
            reason: (*reason).to_owned(),
            total: *total,
            rate,
            keys: Vec::new(),
        }
    });
    LiveRule {
        name: now.name.clone(),
        state: now.state,
        waits_for: now.waits_for.clone(),
        open: now.open,
        accepted: per(now.accepted.saturating_sub(before.accepted), seconds),
        to_target: rate(less(now.to_target, before.to_target), seconds),
        to_client: rate(less(now.to_client, before.to_client), seconds),
        ends: ends.filter(|end| end.total > 0).collect(),
    }
}

/// Lost and dropped packets. A keepalive needs no reply, so it is not counted as a loss.
fn drops(workers: &[WorkerSnapshot], turn: &Stats, by_kernel: impl Fn(KernelCount) -> u64) -> ReasonCounters {
    let sum = |of: fn(&WorkerSnapshot) -> u64| workers.iter().map(of).sum::<u64>();
    let keepalive = <&str>::from(DropReason::Keepalive);
    let mut counted = family(turn, "dropped_datagrams", "packet");
    counted.retain(|(_, reason, _)| *reason != keepalive);
    counted.extend([
        ("packet", "ttl_expired", sum(|worker| worker.ttl_expired)),
        ("receive", "buffer_full", sum(|worker| worker.rx.kernel_drops)),
        ("receive", "truncated", sum(|worker| worker.rx.truncated)),
        ("send", "would_block", sum(|worker| worker.tx.would_block)),
        ("send", "too_big", sum(|worker| worker.tx.too_big)),
        ("send", "refused", sum(|worker| worker.tx.refused)),
        ("stream", "slow_reader", sum(|worker| worker.streams.queue_drops)),
        ("worker", "handoff_lost", sum(|worker| worker.handoffs_lost)),
    ]);
    counted.extend(by_reason("kernel", &[KernelCount::Failed, KernelCount::Behind], by_kernel));
    counted.extend(by_reason("dtls", DtlsDrop::VARIANTS, |reason| {
        workers.iter().map(|worker| worker.dtls.dropped(reason)).sum()
    }));
    counted
}

/// Refused requests. 401 and 438 are not counted, because every client gets them in the course of
/// authentication; nor is 300, because redirects are counted separately.
fn refusals(workers: &[WorkerSnapshot], turn: &Stats) -> ReasonCounters {
    let mut counted = family(turn, "error_responses", "answer");
    counted.retain(|(_, code, _)| !["300", "401", "438"].contains(code));
    counted.extend(family(turn, "credentials_refused", "credentials"));
    counted.extend(family(turn, "limit_refusals", "limit"));
    counted.extend(family(turn, "peer_refusals", "peer"));
    counted.extend(family(turn, "peer_connection_refusals", "peer_connection"));
    counted.push(("request", "banned", turn.ban_refusals));
    counted.push(("request", "client_network", turn.network_refusals));
    counted.push(("request", "draining", turn.drain_refusals));
    counted.push(("request", "loop", turn.loop_refusals));
    counted.push(("request", "redirected", turn.redirects));
    counted.push(("request", "no_relay_port", workers.iter().map(|worker| worker.ports_exhausted).sum()));
    counted.push(("request", "no_descriptor", workers.iter().map(|worker| worker.files_exhausted).sum()));
    let closed = by_reason("connection", CloseReason::VARIANTS, |reason| {
        workers.iter().map(|worker| worker.streams.closed(reason)).sum()
    });
    counted.extend(closed.into_iter().filter(|(_, reason, _)| !HARMLESS.contains(reason)));
    counted.extend(by_reason("tls", HandshakeFailure::VARIANTS, |why| {
        workers.iter().map(|worker| worker.streams.failed(why)).sum()
    }));
    counted.extend(by_reason("dtls", DtlsFailure::VARIANTS, |why| {
        workers.iter().map(|worker| worker.dtls.failed(why)).sum()
    }));
    counted
}

/// Connections that ended for these reasons were not refused; failed handshakes are counted under
/// reasons of their own.
const HARMLESS: [&str; 9] = [
    "client",
    "broken",
    "idle",
    "data_connection",
    "challenge",
    "handed_over",
    "handed_on",
    "shutdown",
    "handshake",
];

fn family(turn: &Stats, wanted: &str, shown_as: &'static str) -> ReasonCounters {
    let found = turn.counters().filter(|(family, ..)| *family == wanted);
    found.filter_map(|(_, label, value)| Some((shown_as, label?.1, value))).collect()
}

fn by_reason<T>(shown_as: &'static str, all: &'static [T], count: impl Fn(T) -> u64) -> ReasonCounters
where
    T: Copy + Into<&'static str>,
{
    all.iter().map(|one| (shown_as, (*one).into(), count(*one))).collect()
}

/// Nonzero reasons, the most frequent first.
fn reasons(
    before: &ReasonCounters,
    now: &ReasonCounters,
    seconds: f64,
    program: &dyn Owner,
) -> Vec<ReasonCount> {
    let both = now.iter().zip(before);
    let counted =
        both.filter(|((.., total), _)| *total > 0).map(|((kind, reason, total), (.., then))| ReasonCount {
            kind: (*kind).to_owned(),
            reason: (*reason).to_owned(),
            total: *total,
            rate: per(total.saturating_sub(*then), seconds),
            keys: program.keys_of(kind, reason).iter().map(|key| (*key).to_owned()).collect(),
        });
    let mut reasons: Vec<ReasonCount> = counted.collect();
    reasons.sort_by(|one, other| other.rate.total_cmp(&one.rate).then(other.total.cmp(&one.total)));
    reasons
}

pub(super) fn quantiles(before: &AllocationTimes, now: &AllocationTimes) -> Option<Quantiles> {
    let mut counts = *now;
    counts.iter_mut().zip(before).for_each(|(count, then)| *count = count.saturating_sub(*then));
    let count: u64 = counts.iter().sum();
    let at = |percent: u64| {
        let wanted = (count * percent).div_ceil(100);
        let mut seen = 0;
        let bucket = counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        });
        bucket.and_then(|bucket| ALLOCATION_MS.get(bucket)).map(|ms| Duration::from_millis(*ms).as_secs_f64())
    };
    (count > 0).then(|| Quantiles { count, p50_s: at(50), p99_s: at(99) })
}

pub(super) fn rate((datagrams, bytes): (u64, u64), seconds: f64) -> PayloadRate {
    PayloadRate { datagrams: per(datagrams, seconds), bytes: per(bytes, seconds) }
}

fn milliseconds(at: Timestamp) -> String {
    Timestamp::from_millisecond(at.as_millisecond()).unwrap_or(at).to_string()
}

fn less(now: (u64, u64), before: (u64, u64)) -> (u64, u64) {
    (now.0.saturating_sub(before.0), now.1.saturating_sub(before.1))
}

#[expect(clippy::cast_precision_loss, reason = "a rate")]
fn per(count: u64, seconds: f64) -> f64 {
    rounded(count as f64 / seconds)
}

#[expect(clippy::cast_precision_loss, reason = "a mean")]
fn ratio(count: u64, of: u64) -> Option<f64> {
    (of > 0).then(|| rounded(count as f64 / of as f64))
}

/// Rounds to three decimal places; more would not be meaningful.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use turnpike_api::refused;

    use super::*;

    fn server(change: impl FnOnce(&mut WorkerSnapshot)) -> ServerReading {
        let mut worker = WorkerSnapshot::default();
        change(&mut worker);
        let turn = worker.turn.clone();
        let workers = vec![worker, WorkerSnapshot::default()];
        ServerReading {
            drops: drops(&workers, &turn, |what| if what == KernelCount::Behind { 3 } else { 0 }),
            refusals: refusals(&workers, &turn),
            listeners: Vec::new(),
            realms: vec![("a".into(), 3)],
            workers,
            turn,
        }
    }

    fn live(before: &ServerReading, now: &ServerReading) -> LiveServer {
        now.since(
            before,
            2.0,
            &HashMap::new(),
            &[Some(Duration::from_micros(70)), None],
            None,
            &crate::connections::tests::IdleProgram::default(),
        )
    }

    #[test]
    fn rates_cover_the_interval_and_all_workers() {
        let before = server(|worker| worker.turn.to_peer_bytes = 1000);
        let now = server(|worker| {
            (worker.turn.to_peer_bytes, worker.turn.connection_bytes) = (5000, [200, 0]);
            (worker.rx.datagrams, worker.rx.calls, worker.rx.would_block) = (300, 110, 10);
            worker.rx.batch[1] = 100;
            worker.across = [(10, 100), (20, 200)];
            worker.allocations = 7;
        });
        let live = live(&before, &now);
        assert_eq!((live.to_peer.bytes, live.to_peer.datagrams, live.received), (2100.0, 0.0, 150.0));
        assert_eq!(live.across, PayloadRate { datagrams: 15.0, bytes: 150.0 });
        assert_eq!(live.batches[1], BatchRate { from: 2, to: Some(3), rate: 50.0 });
        assert_eq!((live.batches.len(), live.batches[11].from, live.batches[11].to), (12, 2048, None));
        let [first, second] = &live.workers[..] else { panic!("{live:?}") };
        assert_eq!((first.allocations, first.receive_batch, first.event_loop_us), (7, Some(3.0), Some(70)));
        assert_eq!((second.number, second.receive_batch, second.event_loop_us), (1, None, None));
        assert_eq!(live.realms, [LiveRealm { name: "a".to_owned(), allocations: 3 }]);
    }

    #[test]
    fn nonzero_reasons_are_listed_by_frequency() {
        let drop = |worker: &mut WorkerSnapshot, reason: DropReason, count| {
            worker.turn.drops[reason as usize] = count;
        };
        let before = server(|worker| drop(worker, DropReason::NoPermission, 100));
        let now = server(|worker| {
            drop(worker, DropReason::NoPermission, 102);
            drop(worker, DropReason::Keepalive, 1000);
            worker.rx.kernel_drops = 40;
        });
        let live = live(&before, &now);
        let told: Vec<_> = live.drops.iter().map(|it| (&*it.kind, &*it.reason, it.total, it.rate)).collect();
        assert_eq!(
            told,
            [
                ("receive", "buffer_full", 40, 20.0),
                ("packet", "no_permission", 102, 1.0),
                ("kernel", "behind", 3, 0.0)
            ]
        );
        assert_eq!((live.workers[0].dropped, live.workers[1].dropped), (21.0, 0.0));
    }

    #[test]
    fn missing_counts_do_not_become_negative() {
        assert!(refused(&[]).is_sign_positive());
    }

    /// Fails, too, if the page describes a reason that does not exist.
    #[test]
    fn page_describes_each_reason() {
        let words = include_str!("../web/words.js");
        let (drops, refusals) = words.split_once("const REFUSALS").expect("two tables");
        let told = |table: &str| -> BTreeSet<String> {
            let line = |line: &str| Some(line.trim().strip_prefix('"')?.split_once("\":")?.0.to_owned());
            table.lines().filter_map(line).collect()
        };
        let counted = |all: ReasonCounters| -> BTreeSet<String> {
            all.iter().map(|(kind, reason, _)| format!("{kind} {reason}")).collect()
        };
        assert_eq!(told(drops), counted(super::drops(&[], &Stats::default(), |_| 0)));
        assert_eq!(told(refusals), counted(super::refusals(&[], &Stats::default())));
    }

    #[test]
    fn each_refusal_is_counted_once() {
        let code =
            |wanted| turnpike_turn::server::stats::ERROR_CODES.iter().position(|(code, _)| *code == wanted);
        let now = server(|worker| {
            worker.turn.quota_refusals = [4, 0, 0];
            worker.turn.errors[code(486).unwrap()] = 4;
            worker.turn.errors[code(401).unwrap()] = 1000;
            worker.turn.credentials_refused[2] = 6;
            worker.streams.closed[CloseReason::Handshake as usize] = 2;
            worker.streams.handshakes_failed[HandshakeFailure::Alert as usize] = 2;
            worker.streams.closed[CloseReason::Client as usize] = 50;
        });
        let live = live(&server(|_| {}), &now);
        assert_eq!(refused(&live.refusals), 6.0, "{:?}", live.refusals);
        let told: Vec<_> = live.refusals.iter().map(|it| (&*it.kind, &*it.reason)).collect();
        assert_eq!(
            told,
            [("credentials", "wrong_key"), ("answer", "486"), ("limit", "user"), ("tls", "alert")]
        );
    }

    #[test]
    fn quantile_is_the_upper_bound_of_its_bucket() {
        let mut now = AllocationTimes::default();
        assert_eq!(quantiles(&now, &now), None);
        (now[0], now[3]) = (98, 2);
        let found = quantiles(&AllocationTimes::default(), &now).unwrap();
        assert_eq!((found.count, found.p50_s, found.p99_s), (100, Some(0.001), Some(0.02)));
        let before = now;
        now[ALLOCATION_MS.len()] = 1;
        let beyond = quantiles(&before, &now).unwrap();
        assert_eq!((beyond.count, beyond.p50_s), (1, None), "beyond the last bucket");
    }

    #[test]
    fn new_rule_starts_at_zero() {
        let rule = |bytes, denied| RuleStatus {
            name: "web".to_owned(),
            open: 2,
            accepted: 10,
            to_target: (0, bytes),
            ends: vec![("denied", denied), ("datagrams_dropped", 0)],
            ..RuleStatus::default()
        };
        let live = live_rule(&rule(100, 1), &rule(400, 5), 1.5);
        assert_eq!((live.open, live.accepted, live.to_target.bytes), (2, 0.0, 200.0));
        let [end] = &live.ends[..] else { panic!("{live:?}") };
        assert_eq!((&*end.kind, &*end.reason, end.total, end.rate), ("end", "denied", 5, 2.667));
    }
}
