//! What has to happen at once to several keys. Each script is sent whole: the longest has two thousand bytes, and a server that has forgotten it
//! needs no second round.

use redis::Cmd;

/// Events that are kept, about: minutes of a busy fleet, for nodes that lost their connection.
pub(super) const EVENTS: usize = 100_000;

/// Runs a script on these keys; arguments follow.
pub(super) fn eval(script: &str, keys: &[String]) -> Cmd {
    let mut command = redis::cmd("EVAL");
    command.arg(script).arg(keys.len()).arg(keys);
    command
}

/// nodes, numbers, ring; name, incarnation, time after which a record is nobody's, wanted number, record, record to be overwritten, prefix of what
/// nodes hold. A number is free when its node is gone and nothing is left of what that held; a new process of a name has the number of the last one.
pub(super) const BEAT: &str = r"
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
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
return {1, number, known, tonumber(redis.call('HGET', KEYS[3], 'version') or '0')}
";

/// nodes.
pub(super) const LOOK: &str = r"
local time = redis.call('TIME')
return {time[1] * 1000 + math.floor(time[2] / 1000), redis.call('HGETALL', KEYS[1])}
";

/// sums, levels, what this node holds, events; number of nodes, and for each bucket its name, the limit, what is used, what is wanted. The rule is
/// `turnpike_fleet::grant`; a test holds the two together.
pub(super) const EXCHANGE: &str = r"
local nodes = tonumber(ARGV[1])
local answer, changed = {}, {}
for at = 2, #ARGV, 4 do
  local bucket = ARGV[at]
  local limit, used, want = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local old = tonumber(redis.call('HGET', KEYS[3], bucket) or '0')
  local sum = tonumber(redis.call('HGET', KEYS[1], bucket) or '0')
  local others = math.max(sum - old, 0)
  local room = math.max(math.max(limit - others, 0) - used, 0)
  local spare = 0
  if room > 0 then
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
";

/// ring; version that is expected, new version, sealed.
pub(super) const RING: &str = r"
if (redis.call('HGET', KEYS[1], 'version') or '0') ~= ARGV[1] then
  return 0
end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'sealed', ARGV[3])
return 1
";

/// nodes, cards, sums, levels, events, what the node holds; name, number, time after which a record is nobody's, buckets at a time, whether the node
/// itself asks. How many buckets are left; below 0 for a node that is there. Until the last is given back, a record of nobody stands in its place: so
/// whoever begins need not be the one who ends, and the node learns of it if it comes back.
pub(super) const REAP: &str = r"
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
  local bucket, held = part[at], tonumber(part[at + 1])
  local sum = tonumber(redis.call('HGET', KEYS[3], bucket) or '0') - held
  if sum > 0 then
    redis.call('HSET', KEYS[3], bucket, string.format('%.0f', sum))
  else
    redis.call('HDEL', KEYS[3], bucket)
  end
  redis.call('HDEL', KEYS[6], bucket)
  -- Of what is left nobody knows here how much of the limit it is: it counts for heavy until somebody asks.
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
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scripts_keep_as_many_events_as_the_rest() {
        for script in [EXCHANGE, REAP] {
            assert!(script.contains(&format!("'~', {EVENTS}, '*'")));
        }
    }
}
