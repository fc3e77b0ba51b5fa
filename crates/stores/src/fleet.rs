//! State that the nodes of a fleet share in one Redis or Valkey store: members, quotas, keys, bans, notices. The
//! rules are in `turnpike_fleet`; this module stores the data.
//!
//! ```text
//!  questions ──▶ Link: one multiplexed connection           ──▶ commands, and scripts if several keys must agree
//!  news      ──▶ News: one connection that blocks for events ──▶ XREAD
//! ```
//!
//! All keys have one hash tag, so a single server of a cluster stores all of them: scripts may use several
//! keys, and no slot map is needed.

mod address;
mod link;
mod news;
mod reply;
mod scripts;

use std::time::Duration;

use redis::{Cmd, Value};
use turnpike_fleet::{
    Ask, Beat, EpochState, GONE_MS, Load, NodeName, NodeRecord, NodeReport, QuotaBucket, QuotaGrant,
    QuotaLevel, StoreEpoch, Subject,
};

pub use address::FleetAddress;
pub use news::{FleetNews, NewsBatch};

use crate::StoreError;
use link::Link;
use reply::{bytes, int, list, text};

/// Seconds for which an answer to another node's request is kept.
const ANSWER_S: u64 = 10;
/// Seconds that certificates are kept. If a node finds its certificate missing, it writes the certificate again.
const ORDERS_S: u64 = 30 * 86_400;
const SCAN: usize = 1000;
/// Maximum number of quota buckets of a dead node that one call releases.
const REAPED: usize = 500;
const LINES: usize = 200;

pub struct FleetStore {
    link: Link,
    keys: KeyNames,
}

#[derive(Clone, Debug)]
struct KeyNames(String);

impl KeyNames {
    fn of(&self, what: &str) -> String {
        format!("{}{what}", self.0)
    }

    fn held(&self, number: u16) -> String {
        format!("{}held:{number}", self.0)
    }

    fn answer(&self, question: u64) -> String {
        format!("{}answer:{question:x}", self.0)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beaten {
    Written {
        /// The node's number, which may have changed.
        number: u16,
        /// False if the store did not know this process. The store may have lost all its data.
        known: bool,
        /// Version of the key ring; 0 if there is none.
        ring: u64,
        era: EpochState,
    },
    /// Another process uses this name; contains that process's record.
    Taken(String),
    Full,
}

#[derive(Clone, Debug, Default)]
pub struct StoreView {
    /// The store's time in milliseconds.
    pub store_ms: u64,
    pub records: Vec<NodeRecord>,
}

#[derive(Clone, Copy, Debug)]
pub struct Beating<'a> {
    pub name: &'a NodeName,
    pub incarnation: u64,
    pub number: u16,
    pub draining: bool,
    pub load: &'a Load,
    /// Record of another process with this node's name, which is to be overwritten.
    pub take_over: Option<&'a str>,
    /// Progress in reporting the node's quotas.
    pub report: NodeReport,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchanged {
    pub era: EpochState,
    /// Grants in the order of the requests; `None` if the epoch differs and the requests were ignored.
    pub grants: Option<Vec<QuotaGrant>>,
}

impl FleetStore {
    /// Connects on first use. `name` is the fleet's name, and `patience` is the time limit for answers.
    #[must_use]
    pub fn new(address: &FleetAddress, name: &str, patience: Duration) -> Self {
        Self { link: Link::new(address.clone(), patience), keys: KeyNames(format!("turnpike:{{{name}}}:")) }
    }

    #[must_use]
    pub fn name(&self) -> &str {
        self.link.name()
    }

    pub async fn beat(&self, beating: Beating<'_>) -> Result<Beaten, StoreError> {
        let Beating { name, incarnation, number, draining, load, take_over, report } = beating;
        let keys = ["nodes", "numbers", "ring", "era", "told"].map(|key| self.keys.of(key));
        let mut script = scripts::eval(scripts::BEAT, &keys);
        script.arg(name.as_str()).arg(format!("{incarnation:x}")).arg(GONE_MS).arg(number);
        script.arg(Beat::rest(draining, load)).arg(take_over.unwrap_or_default()).arg(self.keys.of("held:"));
        script.arg(report.era.number).arg(report.era.since_ms).arg(report.members).arg(report.progress as u8);
        let answer = list(self.link.ask(&script).await?);
        let number_at = |at: usize| answer.get(at).and_then(int).unwrap_or_default();
        let small = |at: usize| u16::try_from(number_at(at)).unwrap_or_default();
        Ok(match number_at(0) {
            1 => Beaten::Written {
                number: small(1),
                known: number_at(2) == 1,
                ring: u64::try_from(number_at(3)).unwrap_or_default(),
                era: era_of(answer.get(4..).unwrap_or_default()),
            },
            2 => Beaten::Full,
            _ => Beaten::Taken(answer.get(1).and_then(text).unwrap_or_default()),
        })
    }

    pub async fn look(&self) -> Result<StoreView, StoreError> {
        let script = scripts::eval(scripts::LOOK, &[self.keys.of("nodes")]);
        let mut answer = list(self.link.ask(&script).await?).into_iter();
        let store_ms = answer.next().as_ref().and_then(int).and_then(|ms| u64::try_from(ms).ok());
        let fields = answer.next().map(list).unwrap_or_default();
        let records = fields.chunks_exact(2).filter_map(|pair| {
            let (name, record) = (text(&pair[0])?, text(&pair[1])?);
            let (stamp_ms, beat) = record.split_once(' ')?;
            Some(NodeRecord {
                name: name.parse().ok()?,
                stamp_ms: stamp_ms.parse().ok()?,
                beat: beat.parse().ok()?,
            })
        });
        Ok(StoreView { store_ms: store_ms.unwrap_or_default(), records: records.collect() })
    }

    pub async fn put_card(&self, name: &NodeName, sealed: &[u8]) -> Result<(), StoreError> {
        let mut command = redis::cmd("HSET");
        command.arg(self.keys.of("cards")).arg(name.as_str()).arg(sealed);
        self.link.ask(&command).await.map(drop)
    }

    /// Cards of these nodes; nodes without a card are left out.
    pub async fn cards(&self, names: &[NodeName]) -> Result<Vec<Vec<u8>>, StoreError> {
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let mut command = redis::cmd("HMGET");
        command.arg(self.keys.of("cards"));
        names.iter().for_each(|name| _ = command.arg(name.as_str()));
        let cards = list(self.link.ask(&command).await?);
        Ok(cards.into_iter().filter_map(bytes).collect())
    }

    /// Epoch of the store, for a node that last saw epoch `known`.
    pub async fn era(&self, known: StoreEpoch) -> Result<EpochState, StoreError> {
        let mut script = scripts::eval(scripts::LOOK_AT_ERA, &["era", "told"].map(|key| self.keys.of(key)));
        script.arg(known.number);
        Ok(era_of(&list(self.link.ask(&script).await?)))
    }

    /// Requests parts of quotas for node `number`, which last saw epoch `known`.
    pub async fn exchange(
        &self,
        number: u16,
        nodes: u32,
        known: StoreEpoch,
        asks: &[Ask],
    ) -> Result<Exchanged, StoreError> {
        let [sums, levels, events, era, told] =
            ["sums", "levels", "events", "era", "told"].map(|key| self.keys.of(key));
        let keys = [sums, levels, self.keys.held(number), events, era, told];
        let mut script = scripts::eval(scripts::EXCHANGE, &keys);
        script.arg(nodes.max(1)).arg(known.number).arg(known.since_ms);
        for Ask { bucket, limit, used, want } in asks {
            script.arg(&bucket.0[..]).arg(*limit).arg(*used).arg(*want);
        }
        let answer = list(self.link.ask(&script).await?);
        let (era, answer) = answer.split_at(answer.len().min(3));
        let era = era_of(era);
        let number = |value: &Value| int(value).and_then(|number| u32::try_from(number).ok());
        let granted = asks.iter().zip(answer.chunks_exact(2)).filter_map(|(ask, pair)| {
            let (held, sum) = (number(&pair[0])?, number(&pair[1])?);
            Some(QuotaGrant { bucket: ask.bucket, told: ask.used, held, sum })
        });
        Ok(Exchanged { era, grants: (era.era == known).then(|| granted.collect()) })
    }

    pub async fn levels(&self) -> Result<Vec<(QuotaBucket, QuotaLevel)>, StoreError> {
        let mut levels = Vec::new();
        let mut cursor = "0".to_owned();
        loop {
            let mut command = redis::cmd("HSCAN");
            command.arg(self.keys.of("levels")).arg(&cursor).arg("COUNT").arg(SCAN);
            let mut answer = list(self.link.ask(&command).await?).into_iter();
            let next = answer.next().as_ref().and_then(text);
            let fields = answer.next().map(list).unwrap_or_default();
            levels.extend(fields.chunks_exact(2).filter_map(|pair| {
                let bucket: [u8; 16] = bytes(pair[0].clone())?.try_into().ok()?;
                let level = u8::try_from(int(&pair[1])?).ok().and_then(QuotaLevel::from_number)?;
                Some((QuotaBucket(bucket), level))
            }));
            match next {
                Some(next) if next != "0" => cursor = next,
                _ => return Ok(levels),
            }
        }
    }

    pub async fn ring(&self) -> Result<Option<Vec<u8>>, StoreError> {
        let mut command = redis::cmd("HGET");
        command.arg(self.keys.of("ring")).arg("sealed");
        self.link.ask(&command).await.map(bytes)
    }

    /// Replaces the ring of version `before` (0 for none). Returns false if the version has changed.
    pub async fn put_ring(&self, before: u64, version: u64, sealed: &[u8]) -> Result<bool, StoreError> {
        let mut script = scripts::eval(scripts::RING, &[self.keys.of("ring")]);
        script.arg(before).arg(version).arg(sealed);
        self.link.ask(&script).await.map(|answer| int(&answer) == Some(1))
    }

    /// Reserves certificate ordering for the node with this incarnation, or extends its reservation. Returns
    /// false if another node has reserved it.
    pub async fn reserve_orders(&self, incarnation: u64, duration: Duration) -> Result<bool, StoreError> {
        let mut script = scripts::eval(scripts::RESERVE, &[self.keys.of("ordering")]);
        script.arg(format!("{incarnation:x}")).arg(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX));
        self.link.ask(&script).await.map(|answer| int(&answer) == Some(1))
    }

    pub async fn release_orders(&self, incarnation: u64) -> Result<(), StoreError> {
        let mut script = scripts::eval(scripts::RELEASE, &[self.keys.of("ordering")]);
        script.arg(format!("{incarnation:x}"));
        self.link.ask(&script).await.map(drop)
    }

    /// Sealed values of the given fields in the shared certificate orders.
    pub async fn orders(&self, fields: &[QuotaBucket]) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        if fields.is_empty() {
            return Ok(Vec::new());
        }
        let mut command = redis::cmd("HMGET");
        command.arg(self.keys.of("orders"));
        fields.iter().for_each(|field| _ = command.arg(&field.0[..]));
        let mut values = list(self.link.ask(&command).await?).into_iter().map(bytes);
        Ok(fields.iter().map(|_| values.next().flatten()).collect())
    }

    pub async fn put_orders(&self, fields: &[(QuotaBucket, Vec<u8>)]) -> Result<(), StoreError> {
        let key = self.keys.of("orders");
        let mut command = redis::cmd("HSET");
        command.arg(&key);
        fields.iter().for_each(|(field, sealed)| _ = command.arg(&field.0[..]).arg(sealed));
        self.link.ask(&command).await?;
        let mut expire = redis::cmd("EXPIRE");
        expire.arg(&key).arg(ORDERS_S);
        self.link.ask(&expire).await.map(drop)
    }

    pub async fn bans(&self) -> Result<Vec<Vec<u8>>, StoreError> {
        let mut command = redis::cmd("HVALS");
        command.arg(self.keys.of("bans"));
        Ok(list(self.link.ask(&command).await?).into_iter().filter_map(bytes).collect())
    }

    pub async fn put_ban(&self, subject: &Subject, sealed: &[u8]) -> Result<(), StoreError> {
        let mut command = redis::cmd("HSET");
        command.arg(self.keys.of("bans")).arg(subject.to_string()).arg(sealed);
        self.link.ask(&command).await.map(drop)
    }

    pub async fn remove_ban(&self, subject: &Subject) -> Result<(), StoreError> {
        let mut command = redis::cmd("HDEL");
        command.arg(self.keys.of("bans")).arg(subject.to_string());
        self.link.ask(&command).await.map(drop)
    }

    /// Broadcasts a message to all nodes, including this one.
    pub async fn say(&self, sealed: &[u8]) -> Result<(), StoreError> {
        let mut command = redis::cmd("XADD");
        command.arg(self.keys.of("events")).arg("MAXLEN").arg("~").arg(scripts::EVENTS).arg("*");
        command.arg(news::MESSAGE).arg(sealed);
        self.link.ask(&command).await.map(drop)
    }

    /// Subscribes to messages sent after this call; the effects of earlier ones are in the store.
    #[must_use]
    pub fn news(&self) -> FleetNews {
        FleetNews::new(self.link.address().clone(), self.keys.of("events"))
    }

    /// Releases part of a dead node's quotas; returns true if some are left. `force` is for a node that is itself
    /// leaving.
    pub async fn reap(&self, name: &NodeName, number: u16, force: bool) -> Result<bool, StoreError> {
        let keys = ["nodes", "cards", "sums", "levels", "events"].map(|key| self.keys.of(key));
        let mut script = scripts::eval(scripts::REAP, &[&keys[..], &[self.keys.held(number)]].concat());
        script.arg(name.as_str()).arg(number).arg(GONE_MS).arg(REAPED).arg(u8::from(force));
        let left = int(&self.link.ask(&script).await?).unwrap_or_default();
        Ok(left > 0)
    }

    pub async fn answer(&self, question: u64, sealed: &[u8]) -> Result<(), StoreError> {
        let key = self.keys.answer(question);
        let mut push = redis::cmd("RPUSH");
        push.arg(&key).arg(sealed);
        self.link.ask(&push).await?;
        let mut expire = redis::cmd("EXPIRE");
        expire.arg(&key).arg(ANSWER_S);
        self.link.ask(&expire).await.map(drop)
    }

    /// Removes and returns the answer to a request, if it has arrived.
    pub async fn answered(&self, question: u64) -> Result<Option<Vec<u8>>, StoreError> {
        let mut command = redis::cmd("LPOP");
        command.arg(self.keys.answer(question));
        self.link.ask(&command).await.map(bytes)
    }

    /// Publishes lines, each on its channel, like coturn. Lines with a time to live are also stored in a key
    /// with the same name as the channel; a time of 0 deletes that key.
    pub async fn publish(&self, lines: &[(String, String, Option<u64>)]) -> Result<(), StoreError> {
        for some in lines.chunks(LINES) {
            let mut commands = Vec::new();
            for (channel, line, kept_s) in some {
                // A cluster would keep these keys on other servers.
                let kept_s = kept_s.filter(|_| !self.link.address().is_cluster());
                match kept_s {
                    Some(0) => commands.push(command("DEL", &[channel])),
                    Some(seconds) => {
                        commands.push(command("SET", &[channel, line, "EX", &seconds.to_string()]));
                    }
                    None => {}
                }
                commands.push(command("PUBLISH", &[channel, line]));
            }
            self.link.tell(&commands).await?;
        }
        Ok(())
    }
}

/// Parses the epoch's number and beginning, and whether the store is complete.
fn era_of(answer: &[Value]) -> EpochState {
    let number = |at: usize| answer.get(at).and_then(int).and_then(|number| u64::try_from(number).ok());
    let era = StoreEpoch { number: number(0).unwrap_or_default(), since_ms: number(1).unwrap_or_default() };
    EpochState { era, is_whole: number(2) == Some(1) }
}

fn command(name: &str, arguments: &[&str]) -> Cmd {
    let mut made = redis::cmd(name);
    made.arg(arguments);
    made
}
