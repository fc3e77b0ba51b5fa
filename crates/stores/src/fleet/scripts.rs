//! Lua scripts for atomic changes. Each script is sent in full (at most 3,000 bytes), so no script cache is
//! needed.

use redis::Cmd;

/// Approximate number of events in the stream: a few minutes' worth in a busy fleet, so that nodes that were
/// disconnected can catch up.
pub(super) const EVENTS: usize = 100_000;

/// Runs a script on these keys; arguments follow.
pub(super) fn eval(script: &str, keys: &[String]) -> Cmd {
    let mut command = redis::cmd("EVAL");
    command.arg(script).arg(keys.len()).arg(keys);
    command
}

/// Lua: converts a stored value to a number. Invalid text is treated as 0, so that it cannot stop all nodes.
macro_rules! count {
    () => {
        r"
local function count(kept)
  local number = tonumber(kept or '0') or 0
  if number >= 0 and number < 4503599627370496 then return math.floor(number) end
  return 0
end
"
    };
}

/// Lua prologue of each script that grants quotas or checks whether quotas can be granted: determines the
/// epoch, starts a new one if needed, and checks whether the store is complete. The rule is
/// `turnpike_fleet::Chronicle`; a test compares the two. A restarted server has a new `run_id`; a replica that
/// took over has a different one.
macro_rules! chronicle {
    () => {
        concat!(
            count!(),
            r"
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function keep(key, field, value)
  redis.call('HSET', key, field, string.format('%.0f', value))
end
local function look(key, told, known)
  local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') or '-'
  local kept = redis.pcall('HMGET', key, 'number', 'since', 'until', 'whole', 'run')
  if kept.err then
    redis.call('DEL', key)
    kept = {}
  end
  local era = {number = count(kept[1]), since = count(kept[2]), ends = count(kept[3]), whole = kept[4] == '1'}
  if era.number == 0 or kept[5] ~= run or known > era.number then
    era = {number = math.max(era.number, known) + 1, since = now, ends = now + 5000, whole = false}
    redis.call('DEL', told)
    redis.call('HSET', key, 'run', run, 'whole', '0', 'expected', '0')
    keep(key, 'number', era.number)
    keep(key, 'since', era.since)
    keep(key, 'until', era.ends)
  end
  if not era.whole then
    if era.ends > now + 5000 then
      era.ends = now + 5000
      keep(key, 'until', era.ends)
    end
    if now >= era.ends then
      era.whole = true
      redis.call('HSET', key, 'whole', '1')
    end
  end
  return era
end
"
        )
    };
}

/// Keys: epoch, nodes that have reported. Argument: epoch number that the node knows.
pub(super) const LOOK_AT_ERA: &str = concat!(
    chronicle!(),
    r"
local era = look(KEYS[1], KEYS[2], tonumber(ARGV[1]))
return {era.number, era.since, era.whole and 1 or 0}
"
);

/// Keys: nodes, numbers, ring, epoch, nodes that have reported. Arguments: name, incarnation, age of a stale
/// record, preferred number, record, record to overwrite, key prefix of held quotas, number and beginning of
/// the node's last known epoch, its last known number of nodes, its progress. A number is free when its node
/// is gone and holds no quota. A new process with the same name gets the number of the previous one.
pub(super) const BEAT: &str = concat!(
    chronicle!(),
    r"
local old = redis.call('HGET', KEYS[1], ARGV[1])
local known = 0
local number = tonumber(ARGV[4])
if old then
  local stamp, had, incarnation = string.match(old, '^(%d+) (%d+) (%x+)')
  if incarnation == ARGV[2] then
    known = 1
  elseif stamp and old ~= ARGV[6] and now - tonumber(stamp) < tonumber(ARGV[3]) then
    return {0, old}
  end
  number = tonumber(had) or number
end
local function free(number)
  local owner = redis.call('HGET', KEYS[2], number)
  return not owner or owner == ARGV[1]
    or (redis.call('HEXISTS', KEYS[1], owner) == 0 and redis.call('EXISTS', ARGV[7] .. number) == 0)
end
local tried = 0
while not free(number) do
  number = number % 4095 + 1
  tried = tried + 1
  if tried > 4095 then return {2} end
end
redis.call('HSET', KEYS[2], number, ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %d %s %s', now, number, ARGV[2], ARGV[5]))
local era = look(KEYS[4], KEYS[5], tonumber(ARGV[8]))
local members, progress = tonumber(ARGV[10]), tonumber(ARGV[11])
if not era.whole and era.number == tonumber(ARGV[8]) and era.since == tonumber(ARGV[9]) and progress > 0 then
  local expected = math.max(count(redis.call('HGET', KEYS[4], 'expected')), members)
  keep(KEYS[4], 'expected', expected)
  local age = math.max(now - era.since, 0)
  if progress == 1 then
    if age < 120000 then
      keep(KEYS[4], 'until', math.max(era.ends, now + 3000))
    end
  elseif members > 0 then
    redis.call('HSET', KEYS[5], ARGV[1], '1')
  end
  if expected > 0 and redis.call('HLEN', KEYS[5]) >= expected and age >= 1000 then
    era.whole = true
    redis.call('HSET', KEYS[4], 'whole', '1')
  end
end
local ring = count(redis.call('HGET', KEYS[3], 'version'))
return {1, number, known, ring, era.number, era.since, era.whole and 1 or 0}
"
);

/// Key: reservation. Arguments: incarnation, milliseconds. A reservation with more than an hour left is
/// invalid, because none is granted for so long.
pub(super) const RESERVE: &str = concat!(
    count!(),
    r"
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local kept = redis.pcall('HMGET', KEYS[1], 'owner', 'until')
if kept.err then
  redis.call('DEL', KEYS[1])
  kept = {}
end
local left = count(kept[2]) - now
if kept[1] and kept[1] ~= ARGV[1] and left > 0 and left <= 3600000 then return 0 end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'until', string.format('%.0f', now + tonumber(ARGV[2])))
return 1
"
);

/// Key: reservation. Argument: incarnation.
pub(super) const RELEASE: &str = r"
if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
";

pub(super) const LOOK: &str = r"
local time = redis.call('TIME')
return {time[1] * 1000 + math.floor(time[2] / 1000), redis.call('HGETALL', KEYS[1])}
";

/// Keys: sums, levels, held by this node, events, epoch, nodes that have reported. Arguments: number of
/// nodes, number and beginning of the epoch that the node knows, and for each bucket its name, the limit, the
/// used and the wanted amount. Requests from another epoch are ignored. The rules are `turnpike_fleet::grant`
/// and `reclaim`; a test compares them.
pub(super) const EXCHANGE: &str = concat!(
    chronicle!(),
    r"
local nodes = tonumber(ARGV[1])
local era = look(KEYS[5], KEYS[6], tonumber(ARGV[2]))
local answer, changed = {era.number, era.since, era.whole and 1 or 0}, {}
if era.number ~= tonumber(ARGV[2]) or era.since ~= tonumber(ARGV[3]) then return answer end
for at = 4, #ARGV, 4 do
  local bucket = ARGV[at]
  local limit, used, want = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local old = count(redis.call('HGET', KEYS[3], bucket))
  local sum = count(redis.call('HGET', KEYS[1], bucket))
  local others = math.max(sum - old, 0)
  local room = math.max(math.max(limit - others, 0) - used, 0)
  local spare = 0
  if not era.whole then
    spare = math.max(want - used, 0)
  elseif room > 0 then
    spare = math.min(math.max(want - used, 0), math.max(math.floor(room / (2 * nodes)), 1))
  end
  local held = used + spare
  sum = others + held
  if held > 0 then
    redis.call('HSET', KEYS[3], bucket, string.format('%.0f', held))
  else
    redis.call('HDEL', KEYS[3], bucket)
  end
  if sum > 0 then
    redis.call('HSET', KEYS[1], bucket, string.format('%.0f', sum))
  else
    redis.call('HDEL', KEYS[1], bucket)
  end
  local level = '0'
  if sum >= limit then level = '2' elseif sum * 2 >= limit then level = '1' end
  if level ~= (redis.call('HGET', KEYS[2], bucket) or '0') then
    if level == '0' then
      redis.call('HDEL', KEYS[2], bucket)
    else
      redis.call('HSET', KEYS[2], bucket, level)
    end
    changed[#changed + 1] = bucket .. level
  end
  answer[#answer + 1] = held
  answer[#answer + 1] = sum
end
if #changed > 0 then
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', 100000, '*', 'l', table.concat(changed))
end
return answer
"
);

/// Key: ring. Arguments: expected version, new version, sealed ring.
pub(super) const RING: &str = concat!(
    count!(),
    r"
if count(redis.call('HGET', KEYS[1], 'version')) ~= tonumber(ARGV[1]) then
  return 0
end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'sealed', ARGV[3])
return 1
"
);

/// Keys: nodes, cards, sums, levels, events, held by the node. Arguments: name, number, age of a stale
/// record, buckets per call, 1 if the node itself asks. Returns the number of buckets left; negative for a
/// live node. Until the last bucket is returned, a record without an owner remains, so that another node can
/// continue, and so that the node notices if it returns.
pub(super) const REAP: &str = concat!(
    count!(),
    r"
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local record = redis.call('HGET', KEYS[1], ARGV[1])
local nobody = '0 ' .. ARGV[2] .. ' 0 1 0 0 0 0 0 0 0'
local own = false
if record then
  local stamp, number = string.match(record, '^(%d+) (%d+)')
  if ARGV[5] == '0' and number == ARGV[2] and now - tonumber(stamp) < tonumber(ARGV[3]) then
    return -1
  end
  if not number or number == ARGV[2] then
    own = true
    redis.call('HSET', KEYS[1], ARGV[1], nobody)
    redis.call('HDEL', KEYS[2], ARGV[1])
  end
end
local part = redis.call('HRANDFIELD', KEYS[6], ARGV[4], 'WITHVALUES')
local changed = {}
for at = 1, #part, 2 do
  local bucket, held = part[at], count(part[at + 1])
  local sum = count(redis.call('HGET', KEYS[3], bucket)) - held
  if sum > 0 then
    redis.call('HSET', KEYS[3], bucket, string.format('%.0f', sum))
  else
    redis.call('HDEL', KEYS[3], bucket)
  end
  redis.call('HDEL', KEYS[6], bucket)
  -- The limit is unknown here, so the remaining use is considered heavy until the next request.
  if sum > 0 then
    if redis.call('HGET', KEYS[4], bucket) == '2' then
      redis.call('HSET', KEYS[4], bucket, '1')
      changed[#changed + 1] = bucket .. '1'
    end
  elseif redis.call('HDEL', KEYS[4], bucket) == 1 then
    changed[#changed + 1] = bucket .. '0'
  end
end
if #changed > 0 then
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', 100000, '*', 'l', table.concat(changed))
end
local left = redis.call('HLEN', KEYS[6])
if own and left == 0 then
  redis.call('HDEL', KEYS[1], ARGV[1])
end
return left
"
);

#[cfg(test)]
mod tests {
    use turnpike_fleet::{LONGEST_MS, SETTLE_MS, SHORTEST_MS, TELLING_MS};

    use super::*;

    #[test]
    fn scripts_use_the_durations_of_the_rules() {
        for script in [BEAT, EXCHANGE, LOOK_AT_ERA] {
            assert_eq!(script.matches(&format!("now + {SETTLE_MS}")).count(), 3);
        }
        for text in
            [format!("now + {TELLING_MS})"), format!("age < {LONGEST_MS} "), format!("age >= {SHORTEST_MS} ")]
        {
            assert!(BEAT.contains(&text), "{text}");
        }
    }

    #[test]
    fn scripts_keep_the_configured_number_of_events() {
        for script in [EXCHANGE, REAP] {
            assert!(script.contains(&format!("'~', {EVENTS}, '*'")));
        }
    }
}
