//! Redis and Valkey with coturn's keys and our own, over one multiplexed connection.

use std::{borrow::Cow, collections::BTreeSet, fs, time::Duration};

use redis::{
    Arg, AsyncConnectionConfig, Client, ClientTlsConfig, Cmd, ConnectionAddr, ErrorKind, FromRedisValue,
    IntoConnectionInfo as _, ParsingError, RedisConnectionInfo, RedisError, TlsCertificates, Value,
    aio::MultiplexedConnection,
};
use tokio::sync::Mutex;
use url::form_urlencoded;
use zeroize::Zeroizing;

use crate::{
    ApiKey, Backend, Edit, Existing, Rules, ServerAddress, StoreError, StoreFault, StoredSecret, TlsMode,
    UserKeys, UserRow,
    api_keys::ApiKeyRow,
    backend::PAGE,
    rules::{RulesReader, TokenKeyRow},
    secrets::latest_kept_end,
    tables::bad_key,
};

const SCAN: usize = 1000;

pub(crate) struct Redis {
    client: Result<Client, StoreError>,
    /// Deadline for one answer. If none arrives by then, the connection may be dead.
    patience: Duration,
    connection: Mutex<Option<MultiplexedConnection>>,
    name: String,
}

impl Redis {
    pub(crate) fn new(address: &ServerAddress, patience: Duration, name: String) -> Self {
        let client = client(address).map_err(|(fault, why)| StoreError::new(&name, fault, why));
        Self { client, patience, connection: Mutex::new(None), name }
    }

    /// Returns the existing connection, or a new one. Concurrent callers wait for one connection attempt.
    async fn connected(&self) -> Result<MultiplexedConnection, StoreError> {
        let mut held = self.connection.lock().await;
        if let Some(connection) = &*held {
            return Ok(connection.clone());
        }
        let client = self.client.as_ref().map_err(Clone::clone)?;
        let patience = Some(self.patience);
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(patience).set_response_timeout(patience);
        let made = client.get_multiplexed_async_connection_with_config(&config).await;
        let made = made.map_err(|error| told(&self.name, &error))?;
        *held = Some(made.clone());
        Ok(made)
    }

    async fn ask<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, StoreError> {
        let mut fresh = false;
        loop {
            let reused = !fresh && self.connection.lock().await.is_some();
            let mut connection = self.connected().await?;
            match command.query_async::<Value>(&mut connection).await {
                Ok(value) => return T::from_redis_value(value).map_err(|error| self.unlike(command, &error)),
                Err(error) => {
                    if error.is_io_error() || error.is_connection_dropped() || error.is_unrecoverable_error()
                    {
                        *self.connection.lock().await = None;
                        if reused && !error.is_timeout() {
                            fresh = true;
                            continue;
                        }
                    }
                    return Err(told(&self.name, &error));
                }
            }
        }
    }

    fn unlike(&self, command: &Cmd, error: &ParsingError) -> StoreError {
        let key = match command.args_iter().nth(1) {
            Some(Arg::Simple(key)) => String::from_utf8_lossy(key),
            _ => Cow::Borrowed("?"),
        };
        StoreError::new(
            &self.name,
            StoreFault::Schema,
            format_args!("does not match coturn's schema: the value of {key}: {error}"),
        )
    }

    async fn keys(&self, pattern: &str) -> Result<BTreeSet<String>, StoreError> {
        let mut found = BTreeSet::new();
        let mut cursor = 0_u64;
        loop {
            let mut command = redis::cmd("SCAN");
            command.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(SCAN);
            let (next, keys): (u64, Vec<Vec<u8>>) = self.ask(&command).await?;
            found.extend(keys.into_iter().filter_map(|key| String::from_utf8(key).ok()));
            if next == 0 {
                return Ok(found);
            }
            cursor = next;
        }
    }

    async fn get(&self, key: &str) -> Result<Option<String>, StoreError> {
        self.ask(redis::cmd("GET").arg(key)).await
    }

    async fn members(&self, key: &str) -> Result<Vec<String>, StoreError> {
        self.ask(redis::cmd("SMEMBERS").arg(key)).await
    }

    async fn token_key(&self, key: &str, reader: &mut RulesReader<'_>) -> Result<(), StoreError> {
        let fields: Vec<(String, String)> = self.ask(redis::cmd("HGETALL").arg(key)).await?;
        let field =
            |name: &str| fields.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str());
        reader.token_key(TokenKeyRow {
            kid: key.strip_prefix(KID).unwrap_or(key),
            key: field("ikm_key"),
            timestamp: field("timestamp"),
            lifetime: field("lifetime"),
            algorithm: field("as_rs_alg"),
            realm: field("realm"),
        })
    }

    async fn marks(&self, realm: &str, reader: &mut RulesReader<'_>) -> Result<(), StoreError> {
        let marks: Vec<(String, String)> = self.ask(redis::cmd("HGETALL").arg(marks_key(realm))).await?;
        for (secret, times) in &marks {
            let (since, until) = times.split_once(' ').unwrap_or((times, ""));
            reader.mark(Some(realm), Some(secret), Some(since), Some(until))?;
        }
        Ok(())
    }

    async fn api_keys(&self, reader: &mut RulesReader<'_>) -> Result<(), StoreError> {
        let keys: Vec<(String, String)> = self.ask(redis::cmd("HGETALL").arg(API_KEYS)).await?;
        for (name, words) in &keys {
            let words: Vec<_> = form_urlencoded::parse(words.as_bytes()).collect();
            let word = |wanted: &str| {
                words.iter().find(|(word, _)| word == wanted).map_or("", |(_, value)| &**value)
            };
            reader.api_key(&ApiKeyRow {
                name,
                hash: word(API_KEY_WORDS[0]),
                realm: word(API_KEY_WORDS[1]),
                max_ttl: word(API_KEY_WORDS[2]),
                rate: word(API_KEY_WORDS[3]),
            });
        }
        Ok(())
    }

    /// Runs a script atomically; returns the number that the script returns.
    async fn script(&self, script: &str, keys: &[&str], arguments: &[&str]) -> Result<u64, StoreError> {
        let mut command = redis::cmd("EVAL");
        self.ask(command.arg(script).arg(keys.len()).arg(keys).arg(arguments)).await
    }

    /// Returns how many of the commands changed something.
    async fn run(&self, commands: &[Cmd]) -> Result<u64, StoreError> {
        let mut changed = 0;
        for command in commands {
            changed += self.ask::<u64>(command).await?;
        }
        Ok(changed)
    }
}

const REALM: &str = "turn/realm/";
const ORIGIN: &str = "turn/origin/";
const KID: &str = "turn/oauth/kid/";
const ADMIN: &str = "turn/admin_user/";
const OPTIONS: [&str; 3] = ["total-quota", "user-quota", "max-bps"];
const ALLOWED: &str = "allowed-peer-ip";
const DENIED: &str = "denied-peer-ip";

/// Redis hash that maps each key's name to its fields, encoded as a URL query string.
const API_KEYS: &str = "turnpike/api-keys";
/// Same order as in [`ApiKey::written`].
const API_KEY_WORDS: [&str; 4] = ["sha256", "realm", "max_ttl", "rate"];

impl Backend for Redis {
    async fn user(&self, realm: &str, name: &str) -> Result<Option<UserKeys>, StoreError> {
        let Some(hmackey) = self.get(&user_key(realm, name)).await?.map(Zeroizing::new) else {
            return Ok(None);
        };
        Ok(Some(UserKeys::from_hex(&hmackey).unwrap_or_else(|| {
            tracing::warn!("{}: {}", self.name, bad_key(realm, name));
            UserKeys::default()
        })))
    }

    async fn secrets(&self, realm: &str) -> Result<Vec<StoredSecret>, StoreError> {
        let mut reader = RulesReader::new(&self.name);
        for secret in self.members(&secrets_key(realm)).await? {
            reader.secret(Some(realm), Some(&secret));
        }
        self.marks(realm, &mut reader).await?;
        Ok(reader.finish().secrets.into_values().flat_map(|secrets| secrets.to_vec()).collect())
    }

    /// Redis has no index by prefix, so this scans all keys, with two patterns that together match
    /// everything except the keys of users, which begin with `turn/realm/` and end with `/key`.
    async fn rules(&self) -> Result<Rules, StoreError> {
        let mut reader = RulesReader::new(&self.name);
        let mut admins = 0;
        let mut keys = self.keys("turn/*[^y]").await?;
        keys.extend(self.keys("turn/[^r]*y").await?);
        for key in &keys {
            if let Some(of_realm) = key.strip_prefix(REALM) {
                // A realm may contain a slash; the known suffix follows the last one.
                let Some((realm, what)) = of_realm.rsplit_once('/') else { continue };
                match what {
                    "secret" => {
                        for secret in self.members(key).await? {
                            reader.secret(Some(realm), Some(&secret));
                        }
                        self.marks(realm, &mut reader).await?;
                    }
                    ALLOWED | DENIED => {
                        for range in self.members(key).await? {
                            reader.peer(what == DENIED, key, Some(realm), Some(&range))?;
                        }
                    }
                    option if OPTIONS.contains(&option) => {
                        if let Some(value) = self.get(key).await? {
                            reader.option(Some(realm), option, Some(&value))?;
                        }
                    }
                    _ => {}
                }
            } else if let Some(origin) = key.strip_prefix(ORIGIN) {
                let realm = self.get(key).await?;
                reader.origin(Some(origin), realm.as_deref());
            } else if key.starts_with(KID) {
                self.token_key(key, &mut reader).await?;
            } else if key.starts_with(ADMIN) {
                admins += 1;
            }
        }
        self.api_keys(&mut reader).await?;
        if admins > 0 {
            reader.ignore(format!(
                "{ADMIN}* has users of coturn's web interface ({admins}), which turnpike ignores"
            ));
        }
        Ok(reader.finish())
    }

    async fn users(&self, realm: Option<&str>, after: Option<&UserRow>) -> Result<Vec<UserRow>, StoreError> {
        let pattern = format!("{REALM}{}/user/*/key", realm.map_or_else(|| "*".to_owned(), literal));
        let mut users: Vec<_> = self.keys(&pattern).await?.iter().filter_map(|key| user_of(key)).collect();
        users.sort_unstable();
        let last = after.map(|user| (user.realm.as_str(), user.name.as_str()));
        let rest = users
            .into_iter()
            .filter(|(realm, name)| last.is_none_or(|last| (realm.as_str(), name.as_str()) > last));
        let mut rows = Vec::new();
        for (realm, name) in rest.take(PAGE) {
            let keys = self.user(&realm, &name).await?.unwrap_or_default().kinds();
            rows.push(UserRow { realm, name, keys });
        }
        Ok(rows)
    }

    async fn apply(&self, edit: &Edit, existing: Existing) -> Result<bool, StoreError> {
        let key = |realm: &str, what: &str| format!("{REALM}{realm}/{what}");
        let keeps = existing == Existing::Keep;
        let words_of_existing = if keeps { "keep" } else { "replace" };
        let changed = match edit {
            Edit::PutUser { realm, name, keys } => {
                let (user, keys) = (user_key(realm, name), keys.to_hex());
                if keeps {
                    return Ok(self.run(&[of("SETNX", &[&user, &keys])]).await? == 0);
                }
                let set = of("GETSET", &[&user, &keys]);
                return Ok(self.ask::<Option<String>>(&set).await?.is_some());
            }
            Edit::RemoveUser { realm, name } => self.run(&[of("DEL", &[&user_key(realm, name)])]).await?,
            Edit::AddSecret { realm, secret } => {
                let keys = [secrets_key(realm), marks_key(realm)];
                let arguments = [secret.reveal(), words_of_existing];
                self.script(ADD_SECRET, &keys.each_ref().map(String::as_str), &arguments).await?
            }
            Edit::RemoveSecret { realm, secret } => {
                let keys = [secrets_key(realm), marks_key(realm)];
                self.script(REMOVE_SECRET, &keys.each_ref().map(String::as_str), &[secret.reveal()]).await?
            }
            Edit::RotateSecret { realm, secret, since, until } => {
                let keys = [secrets_key(realm), marks_key(realm)];
                let kept = latest_kept_end(*since, *until).to_string();
                let (since, until) = (since.to_string(), until.to_string());
                let arguments = [secret.reveal(), &since, &until, &kept];
                self.script(ROTATE, &keys.each_ref().map(String::as_str), &arguments).await?
            }
            Edit::PutApiKey(key) => {
                let put = if keeps { "HSETNX" } else { "HSET" };
                return Ok(self.run(&[of(put, &[API_KEYS, &key.name, &words(key)])]).await? == 0);
            }
            Edit::RemoveApiKey { name } => self.run(&[of("HDEL", &[API_KEYS, name])]).await?,
            Edit::PutRealm { realm, limits } => {
                let [total, user, rate] = limits.written().map(|(option, value)| (key(realm, option), value));
                let (keys, values) =
                    ([&*total.0, &user.0, &rate.0], [words_of_existing, &total.1, &user.1, &rate.1]);
                self.script(PUT_REALM, &keys, &values).await?
            }
            Edit::RemoveRealm { realm } => {
                let mut removed = Vec::new();
                for what in OPTIONS.into_iter().chain([ALLOWED, DENIED]) {
                    removed.push(of("DEL", &[&key(realm, what)]));
                }
                for origin in self.keys(&format!("{ORIGIN}*")).await? {
                    if self.get(&origin).await?.as_ref() == Some(realm) {
                        removed.push(of("DEL", &[&origin]));
                    }
                }
                self.run(&removed).await?
            }
        };
        Ok(changed > 0)
    }
}

/// Keys: secrets, marks. Arguments: secret, `keep` or `replace`. Returns 1 if the secret existed.
const ADD_SECRET: &str = "\
local added = redis.call('SADD', KEYS[1], ARGV[1])
if added == 1 or ARGV[2] == 'replace' then redis.call('HDEL', KEYS[2], ARGV[1]) end
return 1 - added";
/// Keys: secrets, marks. Argument: secret. Returns 1 if the secret existed.
const REMOVE_SECRET: &str = "\
redis.call('HDEL', KEYS[2], ARGV[1])
return redis.call('SREM', KEYS[1], ARGV[1])";
/// Keys: secrets, marks. Arguments: secret, since, until, the latest expiry to keep. Compares numbers as
/// text: they have no leading zeros, so the longer one is greater. Returns the previous number of secrets.
const ROTATE: &str = "\
local held = redis.call('SMEMBERS', KEYS[1])
for _, other in ipairs(held) do
  if other ~= ARGV[1] then
    local times = redis.call('HGET', KEYS[2], other) or '0 '
    local since, ends = string.match(times, '^(%d*) ?(%d*)$')
    if not since then since, ends = '0', '' end
    if ends == '' or #ends > #ARGV[4] or (#ends == #ARGV[4] and ends > ARGV[4]) then
      redis.call('HSET', KEYS[2], other, since .. ' ' .. ARGV[3])
    end
  end
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2] .. ' ')
redis.call('SADD', KEYS[1], ARGV[1])
return #held";
/// Keys: options. Arguments: `keep` or `replace`, then the values of the options. Returns the previous
/// number of options.
const PUT_REALM: &str = "\
local found = 0
for _, key in ipairs(KEYS) do found = found + redis.call('EXISTS', key) end
if found > 0 and ARGV[1] == 'keep' then return found end
for index, key in ipairs(KEYS) do redis.call('SET', key, ARGV[index + 1]) end
return found";

pub(crate) fn told(name: &str, error: &RedisError) -> StoreError {
    let code = error.code().unwrap_or_default();
    // The client drops the error code of the answer to its first SELECT, so only the text identifies the
    // error.
    let says = |words: &str| error.to_string().contains(words);
    let fault = match error.kind() {
        ErrorKind::AuthenticationFailed => StoreFault::Login,
        _ if matches!(code, "WRONGPASS" | "NOAUTH") || says("Authentication required") => StoreFault::Login,
        _ if says("DB index is out of range") => StoreFault::NoDatabase,
        _ if code == "NOPERM" => StoreFault::Permission,
        _ if code == "WRONGTYPE" => StoreFault::Schema,
        _ if matches!(code, "LOADING" | "MASTERDOWN" | "CLUSTERDOWN") => StoreFault::Unreachable,
        ErrorKind::InvalidClientConfig => StoreFault::Tls,
        _ if error.is_timeout() => StoreFault::Slow,
        _ if says("certificate") => StoreFault::Tls,
        _ if error.is_io_error() || error.is_connection_refusal() || error.is_connection_dropped() => {
            StoreFault::Unreachable
        }
        ErrorKind::UnexpectedReturnType => StoreFault::Schema,
        _ => StoreFault::Other,
    };
    match fault {
        StoreFault::Schema => {
            StoreError::new(name, fault, format_args!("does not match coturn's schema: {error}"))
        }
        _ => StoreError::new(name, fault, error),
    }
}

fn of(command: &str, arguments: &[&str]) -> Cmd {
    let mut made = redis::cmd(command);
    made.arg(arguments);
    made
}

fn user_key(realm: &str, name: &str) -> String {
    format!("{REALM}{realm}/user/{name}/key")
}

fn secrets_key(realm: &str) -> String {
    format!("{REALM}{realm}/secret")
}

/// Redis hash that maps each secret to two timestamps (since and until), separated by a space.
fn marks_key(realm: &str) -> String {
    format!("turnpike/realm/{realm}/secrets")
}

fn words(key: &ApiKey) -> String {
    let mut words = form_urlencoded::Serializer::new(String::new());
    let written = key.written();
    words.extend_pairs(API_KEY_WORDS.iter().zip(&written).filter(|(_, value)| !value.is_empty()));
    words.finish()
}

/// Realm and name of a user's key. Both may contain slashes; the first `/user/` separates them.
fn user_of(key: &str) -> Option<(String, String)> {
    let (realm, name) = key.strip_prefix(REALM)?.strip_suffix("/key")?.split_once("/user/")?;
    Some((realm.to_owned(), name.to_owned()))
}

fn literal(text: &str) -> String {
    let mut pattern = String::new();
    for character in text.chars() {
        if "*?[]\\^".contains(character) {
            pattern.push('\\');
        }
        pattern.push(character);
    }
    pattern
}

pub(crate) fn client(address: &ServerAddress) -> Result<Client, (StoreFault, String)> {
    let port = address.port.unwrap_or(6379);
    let with_tls = address.tls.mode != TlsMode::Off;
    let place = match &address.socket {
        Some(path) => ConnectionAddr::Unix(path.clone()),
        None if with_tls => {
            ConnectionAddr::TcpTls { host: address.host.clone(), port, insecure: false, tls_params: None }
        }
        None => ConnectionAddr::Tcp(address.host.clone(), port),
    };
    let mut settings = RedisConnectionInfo::default();
    if let Some(number) = &address.database {
        let number = number
            .parse()
            .map_err(|_| (StoreFault::NoDatabase, format!("{number:?} is not a database number")))?;
        settings = settings.set_db(number);
    }
    if let Some(user) = &address.user {
        settings = settings.set_username(user);
    }
    if let Some(password) = &address.password {
        settings = settings.set_password(password.reveal());
    }
    let tls = |error: RedisError| (StoreFault::Tls, error.to_string());
    let info = place.into_connection_info().map_err(tls)?.set_redis_settings(settings);
    if !with_tls || address.socket.is_some() {
        return Client::open(info).map_err(tls);
    }
    let read = |path: &std::path::Path| {
        fs::read(path).map_err(|error| (StoreFault::Tls, format!("{}: {error}", path.display())))
    };
    let root_cert = address.tls.authority.as_deref().map(read).transpose()?;
    let client_tls = match &address.tls.identity {
        Some((certificate, key)) => {
            Some(ClientTlsConfig { client_cert: read(certificate)?, client_key: read(key)? })
        }
        None => None,
    };
    Client::build_with_tls(info, TlsCertificates { client_tls, root_cert }).map_err(tls)
}

#[cfg(test)]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_keys_are_parsed() {
        let user = |realm: &str, name: &str| Some((realm.to_owned(), name.to_owned()));
        assert_eq!(user_of("turn/realm/north.gov/user/gorst/key"), user("north.gov", "gorst"));
        assert_eq!(user_of(&user_key("a/b", "c/d")), user("a/b", "c/d"));
        for other in
            ["turn/realm/north.gov/secret", "turn/realm/north.gov/user/gorst", "turn/origin/user/x/key", ""]
        {
            assert_eq!(user_of(other), None, "{other}");
        }
    }

    #[test]
    fn literal_pattern_matches_only_its_text() {
        assert_eq!(literal("north.gov"), "north.gov");
        assert_eq!(literal("a*b?[c]\\"), "a\\*b\\?\\[c\\]\\\\");
    }
}
