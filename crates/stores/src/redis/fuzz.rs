//! Fuzz target: arbitrary keys in a minimal Redis server.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex as StdMutex, MutexGuard},
};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use turnpike_testkit::fuzz::{self, Input};
use turnpike_turn::ip_range::IpRange;

use super::*;
use crate::{
    PeerRanges,
    fuzz::{MOST_ROWS, Word, edits, is_told, runtime, says_nothing_private, seeds},
};

const PAGE_OF_KEYS: usize = 5;

#[derive(Clone, Debug)]
enum Held {
    Text(Vec<u8>),
    Set(BTreeSet<Vec<u8>>),
    Hash(BTreeMap<Vec<u8>, Vec<u8>>),
}

#[derive(Clone, Default)]
struct Keyspace {
    held: Arc<StdMutex<BTreeMap<Vec<u8>, Held>>>,
    turned: bool,
}

#[test]
fn redis_keys() {
    let runtime = runtime();
    fuzz::target("redis_keys", seeds, |bytes| _ = runtime.block_on(check(bytes)));
}

#[test]
fn key_seeds_include_valid_and_invalid_ones() {
    let runtime = runtime();
    let read: Vec<bool> = seeds().iter().map(|seed| runtime.block_on(check(seed))).collect();
    let good = read.iter().filter(|is_read| **is_read).count();
    assert!((5..read.len() - 5).contains(&good), "{good} of {}", read.len());
}

#[test]
fn pattern_matches_as_in_redis() {
    let fitting: [(&str, &str); 5] =
        [("turn/*[^y]", "turn/a"), ("turn/[^r]*y", "turn/oy"), ("a\\*?", "a*b"), ("*", ""), ("*b*", "abc")];
    for (pattern, text) in fitting {
        assert!(fits(pattern.as_bytes(), text.as_bytes()), "{pattern} {text}");
    }
    for (pattern, text) in [("turn/*[^y]", "turn/y"), ("turn/[^r]*y", "turn/ry"), ("a\\*", "ab"), ("?", "")] {
        assert!(!fits(pattern.as_bytes(), text.as_bytes()), "{pattern} {text}");
    }
}

/// The test has only one connection; if that were discarded, the next query would fail.
#[test]
fn binary_value_is_reported_and_keeps_the_connection() {
    runtime().block_on(async {
        let keyspace = Keyspace::default();
        let key = format!("{ORIGIN}https://a.example");
        keyspace.lock().insert(key.clone().into_bytes(), Held::Text(vec![0xe0]));
        let redis = connected(&keyspace).await;
        let error = redis.rules().await.expect_err("an unreadable value");
        assert!(matches!(error.fault, StoreFault::Schema) && error.to_string().contains(&key), "{error}");
        assert_eq!(redis.user("a", "b").await.expect("the connection still works"), None);
    });
}

async fn check(bytes: &[u8]) -> bool {
    let mut input = Input::new(bytes);
    let well = input.byte() & 2 == 0;
    let (keyspace, mut texts) = (Keyspace::default(), Vec::new());
    for _ in 0..input.below(MOST_ROWS) {
        keyspace.draw(&mut input, well, &mut texts);
    }
    // Leading and trailing spaces are ignored when the keys are read.
    let exact = texts.iter().all(|(_, text)| text.trim() == text);
    let redis = connected(&keyspace).await;

    let read = redis.rules().await;
    // The order of keys, members and fields must not matter, unless two differ only in leading or trailing
    // spaces.
    let turned = connected(&Keyspace { turned: true, ..keyspace.clone() }).await;
    match (&read, turned.rules().await) {
        (Ok(rules), Ok(other)) => assert!(!exact || *rules == other, "{rules:?}, {other:?}"),
        (Err(error), Err(_)) => is_told(error, &[StoreFault::Row, StoreFault::Schema], &texts),
        (_, other) => panic!("{read:?}, {other:?}"),
    }
    if let Ok(rules) = &read {
        keyspace.is_read_whole(rules);
        says_nothing_private(&format!("{rules:?}"), &texts);
        if exact {
            keyspace.secrets_are_those_of_their_realms(&redis, rules).await;
        }
    }
    keyspace.users_are_found(&redis).await;
    edits(&redis, &mut input, exact).await;
    read.is_ok()
}

async fn connected(keyspace: &Keyspace) -> Redis {
    let (ours, theirs) = duplex(1 << 16);
    tokio::spawn(keyspace.clone().serve(theirs));
    // No timeout, because the machine may be busy.
    let config = AsyncConnectionConfig::new().set_response_timeout(None);
    let made = MultiplexedConnection::new_with_config(&RedisConnectionInfo::default(), ours, config).await;
    let (connection, driver) = made.expect("an answer");
    tokio::spawn(driver);
    Redis {
        client: Err(StoreError::new("memory", StoreFault::Other, "there is only one connection")),
        patience: Duration::MAX,
        connection: Mutex::new(Some(connection)),
        name: "memory".to_owned(),
    }
}

impl Keyspace {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Vec<u8>, Held>> {
        self.held.lock().expect("the lock is not poisoned")
    }

    fn draw(&self, input: &mut Input<'_>, well: bool, texts: &mut Vec<(Word, String)>) {
        let mut word = |word: Word, input: &mut Input<'_>| {
            let text = word.draw(input, well).unwrap_or_default();
            texts.push((word, text.clone()));
            text
        };
        let realm = word(Word::Realm, input);
        let key = |what: &str| format!("{REALM}{realm}/{what}");
        let set = |text: String| Held::Set([text.into_bytes()].into());
        let (key, held) = match input.below(12) {
            0 => (secrets_key(&realm), set(word(Word::Secret, input))),
            1 => (key(ALLOWED), set(word(Word::Range, input))),
            2 => (key(DENIED), set(word(Word::Range, input))),
            3 => (key(&word(Word::Limit, input)), Held::Text(word(Word::Number, input).into())),
            4 => (format!("{ORIGIN}{}", word(Word::Origin, input)), Held::Text(realm.into())),
            5 => {
                let fields = [
                    ("ikm_key", Word::TokenKey),
                    ("timestamp", Word::Number),
                    ("lifetime", Word::Number),
                    ("as_rs_alg", Word::Algorithm),
                    ("realm", Word::Realm),
                ];
                let fields =
                    fields.map(|(name, of)| (name.as_bytes().to_vec(), word(of, input).into_bytes()));
                (format!("{KID}{}", word(Word::Kid, input)), Held::Hash(fields.into()))
            }
            6 => (format!("{ADMIN}{}", word(Word::User, input)), Held::Hash(BTreeMap::new())),
            7 => (user_key(&realm, &word(Word::User, input)), Held::Text(word(Word::Keys, input).into())),
            8 => {
                let secret = word(Word::Secret, input);
                let times = [word(Word::Number, input), word(Word::Number, input)].join(" ");
                (marks_key(&realm), Held::Hash([(secret.into_bytes(), times.into_bytes())].into()))
            }
            9 => {
                let name = word(Word::ApiKey, input);
                let of = [Word::Hash, Word::Realm, Word::Number, Word::Number].map(|of| word(of, input));
                let mut words = form_urlencoded::Serializer::new(String::new());
                words.extend_pairs(API_KEY_WORDS.iter().zip(&of));
                (API_KEYS.to_owned(), Held::Hash([(name.into_bytes(), words.finish().into_bytes())].into()))
            }
            10 => {
                let name = word(Word::User, input);
                let text = word(Word::Keys, input);
                // The name of the key marks it as a limit.
                if OPTIONS.iter().any(|option| name.ends_with(option)) {
                    texts.push((Word::Number, text.clone()));
                }
                (key(&name), Held::Text(text.into()))
            }
            _ => (format!("turn/{}", word(Word::Origin, input)), set(word(Word::User, input))),
        };
        let other = input.byte();
        let held = if well || other >= 8 {
            held
        } else {
            let bytes = input.bytes().to_vec();
            texts.push((Word::Kid, String::from_utf8_lossy(&bytes).into_owned()));
            if other < 4 { Held::Text(bytes) } else { Held::Set([bytes].into()) }
        };
        let mut all = self.lock();
        match (all.get_mut(key.as_bytes()), held) {
            (Some(Held::Set(known)), Held::Set(more)) => known.extend(more),
            (Some(Held::Hash(known)), Held::Hash(more)) => known.extend(more),
            (_, held) => _ = all.insert(key.into_bytes(), held),
        }
    }

    /// Checks that no set member is lost, in particular none that denies peers.
    fn is_read_whole(&self, rules: &Rules) {
        let ranges = |of: fn(&PeerRanges) -> &Vec<IpRange>| -> usize {
            rules.realms.values().map(|realm| of(&realm.peers).len()).sum::<usize>() + of(&rules.peers).len()
        };
        assert_eq!(ranges(|peers| &peers.deny), self.members(DENIED));
        assert_eq!(ranges(|peers| &peers.allow), self.members(ALLOWED));
        let told = |held: &Held| if let Held::Hash(fields) = held { fields.len().max(1) } else { 1 };
        let most = self.lock().values().map(told).sum::<usize>() + 1;
        assert!(rules.ignored.len() <= most, "{:?}", rules.ignored);
    }

    fn members(&self, wanted: &str) -> usize {
        let all = self.lock();
        let of_realms = all.iter().filter(|(key, _)| {
            let of_realm = str::from_utf8(key).ok().and_then(|key| key.strip_prefix(REALM)?.rsplit_once('/'));
            of_realm.is_some_and(|(_, what)| what == wanted)
        });
        of_realms.map(|(_, held)| if let Held::Set(members) = held { members.len() } else { 0 }).sum()
    }

    async fn secrets_are_those_of_their_realms(&self, redis: &Redis, rules: &Rules) {
        let keys: Vec<Vec<u8>> = self.lock().keys().cloned().collect();
        let names = keys.iter().filter_map(|key| str::from_utf8(key).ok());
        for realm in names.filter_map(|key| key.strip_prefix(REALM)?.strip_suffix("/secret")) {
            let found = redis.secrets(realm).await.expect("all secrets are readable");
            let expected = rules.secrets.get(realm).map(|secrets| secrets.to_vec()).unwrap_or_default();
            assert_eq!(found, expected, "{realm:?}");
        }
    }

    async fn users_are_found(&self, redis: &Redis) {
        let all = self.lock().clone();
        let users = all.iter().filter_map(|(key, held)| Some((user_of(str::from_utf8(key).ok()?)?, held)));
        let users: BTreeMap<_, _> = users.collect();
        let mut readable = true;
        for ((realm, name), held) in &users {
            let found = redis.user(realm, name).await;
            let Held::Text(digits) = held else {
                assert!(found.is_err());
                readable = false;
                continue;
            };
            let Ok(digits) = str::from_utf8(digits) else {
                readable = false;
                continue;
            };
            assert_eq!(found.expect("a text"), Some(UserKeys::from_hex(digits).unwrap_or_default()));
        }
        if readable {
            let listed = redis.users(None, None).await.expect("all users are readable");
            assert!(listed.into_iter().map(|user| (user.realm, user.name)).eq(users.into_keys()));
        }
    }

    async fn serve(self, mut stream: DuplexStream) {
        let mut heard = Vec::new();
        while stream.read_buf(&mut heard).await.is_ok_and(|length| length > 0) {
            let mut said = Vec::new();
            while let Some((words, length)) = command(&heard) {
                heard.drain(..length);
                said.extend(self.answer(&words));
            }
            if stream.write_all(&said).await.is_err() {
                return;
            }
        }
    }

    /// Emulates a script of [`super`], including the errors of `redis.call`.
    fn eval(&self, script: &str, keys: &[Vec<u8>], arguments: &[Vec<u8>]) -> Result<usize, Vec<u8>> {
        let call = |words: &[&[u8]]| -> Result<Vec<u8>, Vec<u8>> {
            let answer = self.answer(&words.iter().map(|word| word.to_vec()).collect::<Vec<_>>());
            if answer.starts_with(b"-") { Err(answer) } else { Ok(answer) }
        };
        let number = |words: &[&[u8]]| -> Result<usize, Vec<u8>> {
            let answer = call(words)?;
            let digits = str::from_utf8(&answer[1..]).expect("an integer").trim();
            Ok(digits.parse().expect("an integer"))
        };
        match script {
            ADD_SECRET => {
                let added = number(&[b"SADD", &keys[0], &arguments[0]])?;
                if added == 1 || arguments[1] == b"replace" {
                    call(&[b"HDEL", &keys[1], &arguments[0]])?;
                }
                Ok(1 - added)
            }
            REMOVE_SECRET => {
                call(&[b"HDEL", &keys[1], &arguments[0]])?;
                number(&[b"SREM", &keys[0], &arguments[0]])
            }
            ROTATE => {
                call(&[b"SMEMBERS", &keys[0]])?;
                let held = match self.lock().get(&keys[0]) {
                    Some(Held::Set(members)) => members.clone(),
                    _ => BTreeSet::new(),
                };
                for other in held.iter().filter(|other| **other != arguments[0]) {
                    call(&[b"HGET", &keys[1], other])?;
                    let times = match self.lock().get(&keys[1]) {
                        Some(Held::Hash(fields)) => fields.get(other).cloned(),
                        _ => None,
                    };
                    let times = times.unwrap_or_else(|| b"0 ".to_vec());
                    let (since, ends) = match times.iter().position(|byte| !byte.is_ascii_digit()) {
                        None => (&times[..], &b""[..]),
                        Some(at) if times[at] == b' ' && times[at + 1..].iter().all(u8::is_ascii_digit) => {
                            (&times[..at], &times[at + 1..])
                        }
                        Some(_) => (&b"0"[..], &b""[..]),
                    };
                    if ends.is_empty() || (ends.len(), ends) > (arguments[2].len(), &arguments[2][..]) {
                        call(&[b"HSET", &keys[1], other, &[since, b" ", &arguments[2]].concat()])?;
                    }
                }
                call(&[b"HSET", &keys[1], &arguments[0], &[&arguments[1][..], b" "].concat()])?;
                call(&[b"SADD", &keys[0], &arguments[0]])?;
                Ok(held.len())
            }
            PUT_REALM => {
                let found = keys.iter().filter(|key| self.lock().contains_key(*key)).count();
                if found == 0 || arguments[0] != b"keep" {
                    let mut all = self.lock();
                    for (key, value) in keys.iter().zip(&arguments[1..]) {
                        all.insert(key.clone(), Held::Text(value.clone()));
                    }
                }
                Ok(found)
            }
            other => panic!("no such script: {other}"),
        }
    }

    fn answer(&self, words: &[Vec<u8>]) -> Vec<u8> {
        let mut answer = Vec::new();
        let name = words[0].to_ascii_uppercase();
        if name == b"EVAL" {
            let text = |word: &[u8]| str::from_utf8(word).expect("the directory is ours").to_owned();
            let keys: usize = text(&words[2]).parse().expect("the number of keys");
            let (keys, arguments) = words[3..].split_at(keys);
            match self.eval(&text(&words[1]), keys, arguments) {
                Ok(number) => integer(&mut answer, number),
                Err(error) => answer = error,
            }
            return answer;
        }
        let (said, mut all) = (&mut answer, self.lock());
        let more = words.get(2..).unwrap_or_default();
        let key = words.get(1).cloned().unwrap_or_default();
        let found = all.get_mut(&key);
        match (&name[..], found) {
            (b"GET" | b"GETSET", None) => said.extend_from_slice(b"$-1\r\n"),
            (b"GET" | b"GETSET", Some(Held::Text(text))) => bulk(said, text),
            (b"SMEMBERS" | b"HGETALL", None) => array(said, 0),
            (b"SMEMBERS", Some(Held::Set(members))) => {
                array(said, members.len());
                self.in_order(&*members).into_iter().for_each(|member| bulk(said, member));
            }
            (b"HGETALL", Some(Held::Hash(fields))) => {
                array(said, 2 * fields.len());
                for (field, value) in self.in_order(&*fields) {
                    bulk(said, field);
                    bulk(said, value);
                }
            }
            (b"SADD", None) => {
                let members: BTreeSet<_> = more.iter().cloned().collect();
                integer(said, members.len());
                all.insert(key.clone(), Held::Set(members));
            }
            (b"SADD", Some(Held::Set(members))) => {
                integer(said, more.iter().filter(|member| members.insert((*member).clone())).count());
            }
            (b"SREM" | b"HDEL", None) => integer(said, 0),
            (b"SREM", Some(Held::Set(members))) => {
                integer(said, more.iter().filter(|member| members.remove(*member)).count());
            }
            (b"HDEL", Some(Held::Hash(fields))) => {
                integer(said, more.iter().filter(|field| fields.remove(*field).is_some()).count());
            }
            (b"SETNX", None) => {
                integer(said, 1);
                all.insert(key.clone(), Held::Text(more[0].clone()));
            }
            (b"SETNX", Some(_)) => integer(said, 0),
            (b"HGET", None) => said.extend_from_slice(b"$-1\r\n"),
            (b"HGET", Some(Held::Hash(fields))) => match fields.get(&more[0]) {
                Some(value) => bulk(said, value),
                None => said.extend_from_slice(b"$-1\r\n"),
            },
            (b"HSETNX", Some(Held::Hash(fields))) if fields.contains_key(&more[0]) => integer(said, 0),
            (b"HSET" | b"HSETNX", None) => {
                integer(said, 1);
                all.insert(key.clone(), Held::Hash([(more[0].clone(), more[1].clone())].into()));
            }
            (b"HSET" | b"HSETNX", Some(Held::Hash(fields))) => {
                integer(said, usize::from(fields.insert(more[0].clone(), more[1].clone()).is_none()));
            }
            (b"DEL", found) => {
                integer(said, usize::from(found.is_some()));
                all.remove(&key);
            }
            (b"SCAN", _) => {
                let from: usize =
                    str::from_utf8(&key).ok().and_then(|cursor| cursor.parse().ok()).expect("a number");
                let keys = self.in_order(all.keys());
                let page = keys.iter().skip(from).take(PAGE_OF_KEYS);
                let next = if from + PAGE_OF_KEYS < keys.len() { from + PAGE_OF_KEYS } else { 0 };
                let fitting: Vec<_> = page.filter(|key| fits(&more[1], key)).collect();
                array(said, 2);
                bulk(said, next.to_string().as_bytes());
                array(said, fitting.len());
                fitting.into_iter().for_each(|key| bulk(said, key));
            }
            (b"CLIENT", _) => said.extend_from_slice(b"+OK\r\n"),
            (_, Some(_)) => said.extend_from_slice(b"-WRONGTYPE another kind of value\r\n"),
            (other, None) => panic!("unexpected command {:?}", str::from_utf8(other)),
        }
        if name == b"GETSET" && !said.starts_with(b"-") {
            all.insert(key, Held::Text(more[0].clone()));
        }
        all.retain(|_, held| match held {
            Held::Text(_) => true,
            Held::Set(members) => !members.is_empty(),
            Held::Hash(fields) => !fields.is_empty(),
        });
        answer
    }

    fn in_order<T>(&self, all: impl IntoIterator<Item = T>) -> Vec<T> {
        let mut all: Vec<T> = all.into_iter().collect();
        if self.turned {
            all.reverse();
        }
        all
    }
}

fn command(bytes: &[u8]) -> Option<(Vec<Vec<u8>>, usize)> {
    let mut at = 0;
    let mut words = Vec::new();
    for _ in 0..number(bytes, &mut at)? {
        let length = number(bytes, &mut at)?;
        words.push(bytes.get(at..at + length)?.to_vec());
        at += length + 2;
    }
    (at <= bytes.len()).then_some((words, at))
}

fn number(bytes: &[u8], at: &mut usize) -> Option<usize> {
    let end = *at + bytes.get(*at..)?.windows(2).position(|two| two == b"\r\n")?;
    let number = str::from_utf8(&bytes[*at + 1..end]).ok()?.parse().ok()?;
    *at = end + 2;
    Some(number)
}

fn bulk(said: &mut Vec<u8>, text: &[u8]) {
    said.extend_from_slice(format!("${}\r\n", text.len()).as_bytes());
    said.extend_from_slice(text);
    said.extend_from_slice(b"\r\n");
}

fn array(said: &mut Vec<u8>, length: usize) {
    said.extend_from_slice(format!("*{length}\r\n").as_bytes());
}

fn integer(said: &mut Vec<u8>, number: usize) {
    said.extend_from_slice(format!(":{number}\r\n").as_bytes());
}

/// Redis patterns, except character ranges.
fn fits(pattern: &[u8], text: &[u8]) -> bool {
    match pattern {
        [] => text.is_empty(),
        [b'*', rest @ ..] => (0..=text.len()).any(|at| fits(rest, &text[at..])),
        [b'?', rest @ ..] => text.split_first().is_some_and(|(_, after)| fits(rest, after)),
        [b'[', rest @ ..] => {
            let Some((first, after)) = text.split_first() else { return false };
            let end = rest.iter().position(|byte| *byte == b']').unwrap_or(rest.len());
            let set = &rest[..end];
            let wanted = set.strip_prefix(b"^").map_or(set.contains(first), |set| !set.contains(first));
            wanted && fits(rest.get(end + 1..).unwrap_or_default(), after)
        }
        [b'\\', byte, rest @ ..] | [byte, rest @ ..] => {
            text.split_first().is_some_and(|(first, after)| first == byte && fits(rest, after))
        }
    }
}
