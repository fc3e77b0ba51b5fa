//! Profiles as files: TOML, read strictly, every mistake at once with its line and column.

use std::ops::Range as Span;

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};
use turnpike_measure::Direction;

use super::{InvalidProfile, KeyFrames, Profile, Range, Shape, Sizes, Stream};
use crate::{payload::HEADER_LEN, udp::MAX_SIZE};

/// Keys of `[[stream]]`.
const KEYS: [&str; 10] =
    ["name", "direction", "rate", "copies", "burst", "size", "frame", "packet", "key_frame", "key_every"];
/// Bursts a second of one flow.
const RATES: (f64, f64) = (0.1, 10_000.0);
/// Packets of a burst.
const BURSTS: Span<i64> = 1..257;
/// Bytes of a frame.
const FRAMES: Span<i64> = 1..1_048_577;
/// Flows of one stream.
const COPIES: Span<i64> = 1..101;
/// Of sizes, in relation to each other.
const WEIGHTS: Span<i64> = 1..1_000_001;
/// Frames from one key frame to the next.
const EVERY: Span<i64> = 1..1_000_001;
#[expect(clippy::cast_possible_wrap, reason = "both are short")]
const PACKETS: Span<i64> = HEADER_LEN as i64..MAX_SIZE as i64 + 1;

/// Reads a profile; `file` is where mistakes are said to be, `title` its name where it gives none itself.
pub(super) fn parse(file: &str, title: &str, text: &str) -> Result<Profile, InvalidProfile> {
    let (root, broken) = DeTable::parse_recoverable(text);
    let mut reader = Reader { mistakes: Vec::new() };
    for error in &broken {
        reader.wrong(error.span().unwrap_or_default(), format!("no valid TOML: {}", error.message().trim()));
    }
    let profile = reader.profile(root.get_ref(), title);
    reader.mistakes.sort_by_key(|(at, _)| *at);
    if reader.mistakes.is_empty() {
        return Ok(profile);
    }
    let line = |(at, what): &(usize, String)| {
        let before = text.get(..*at).unwrap_or(text);
        let begin = before.rfind('\n').map_or(0, |at| at + 1);
        let (line, column) = (before.matches('\n').count() + 1, before[begin..].chars().count() + 1);
        format!("{file}:{line}:{column}: {what}")
    };
    let mut lines: Vec<_> = reader.mistakes.iter().map(line).collect();
    lines.dedup();
    Err(InvalidProfile(lines.join("\n")))
}

struct Reader {
    /// Where each stands in the text, and what it is.
    mistakes: Vec<(usize, String)>,
}

/// A value that has been found wrong, and told.
struct Told;

type Read<T> = Result<T, Told>;

impl Reader {
    fn wrong(&mut self, at: Span<usize>, what: impl Into<String>) -> Told {
        self.mistakes.push((at.start, what.into()));
        Told
    }

    fn unknown(&mut self, key: &Spanned<std::borrow::Cow<'_, str>>, known: &[&str]) {
        let word: &str = key.get_ref();
        let most = (word.chars().count() / 3).max(1);
        let distance = |known: &&&str| strsim::damerau_levenshtein(word, known);
        let nearest = known.iter().min_by_key(distance).filter(|known| distance(known) <= most);
        let hint = match nearest {
            Some(nearest) => format!("did you mean \"{nearest}\"?"),
            None => format!("known here: {}", known.join(", ")),
        };
        self.wrong(key.span(), format!("unknown key \"{word}\"; {hint}"));
    }

    fn profile(&mut self, root: &DeTable<'_>, title: &str) -> Profile {
        let (mut name, mut streams, mut flows) = (title.to_owned(), Vec::new(), Vec::new());
        let mut any = false;
        for (key, value) in root {
            match key.get_ref().as_ref() {
                "name" => name = self.text(value, "name").unwrap_or(name),
                "stream" => {
                    any = true;
                    for (table, at) in self.tables(value) {
                        // What is wrong has been told.
                        let _ = self.stream(table, at, &mut streams, &mut flows);
                    }
                }
                _ => self.unknown(key, &["name", "stream"]),
            }
        }
        if !any {
            self.wrong(0..0, "there is no [[stream]], and nothing to send");
        }
        if flows.len() > Profile::MAX_FLOWS {
            let most = Profile::MAX_FLOWS;
            self.wrong(
                0..0,
                format!("a client would have {} flows, but may have at most {most}", flows.len()),
            );
        }
        Profile { name, streams, flows }
    }

    fn tables<'a, 'i>(&mut self, value: &'a Spanned<DeValue<'i>>) -> Vec<(&'a DeTable<'i>, Span<usize>)> {
        let DeValue::Array(items) = value.get_ref() else {
            self.wrong(value.span(), "stream: a stream begins with [[stream]], in two brackets");
            return Vec::new();
        };
        let tables = items.iter().filter_map(|item| Some((item.get_ref().as_table()?, item.span())));
        let tables: Vec<_> = tables.collect();
        if tables.len() < items.len() {
            self.wrong(value.span(), "stream: expected tables");
        }
        tables
    }

    fn stream(
        &mut self,
        table: &DeTable<'_>,
        at: Span<usize>,
        streams: &mut Vec<Stream>,
        flows: &mut Vec<usize>,
    ) -> Read<()> {
        for (key, _) in table {
            if !KEYS.contains(&key.get_ref().as_ref()) {
                self.unknown(key, &KEYS);
            }
        }
        let name = self.needed(table, &at, "name").and_then(|value| self.text(value, "name"));
        let directions = self.needed(table, &at, "direction").and_then(|value| self.directions(value));
        let rate = self.needed(table, &at, "rate").and_then(|value| self.rate(value));
        let copies = table.get("copies").map_or(Ok(1), |value| self.whole(value, "copies", COPIES));
        let shape = self.shape(table, &at);
        let (name, directions, bursts_per_second, copies, shape) =
            (name?, directions?, rate?, copies?, shape?);
        for direction in directions {
            let is_twin = |known: &Stream| known.name == name && known.direction == *direction;
            if streams.iter().any(is_twin) {
                return Err(self.wrong(at, format!("there are two streams \"{name}\" {direction}")));
            }
            flows.extend(std::iter::repeat_n(streams.len(), copies as usize));
            let (name, direction, shape) = (name.clone(), *direction, shape.clone());
            streams.push(Stream { name, direction, bursts_per_second, shape });
        }
        Ok(())
    }

    fn shape(&mut self, table: &DeTable<'_>, at: &Span<usize>) -> Read<Shape> {
        let of_frames = ["packet", "key_frame", "key_every"];
        let Some(frame) = table.get("frame") else {
            for (key, value) in table.iter().filter(|(key, _)| of_frames.contains(&key.get_ref().as_ref())) {
                let key: &str = key.get_ref();
                self.wrong(
                    value.span(),
                    format!("{key}: goes with \"frame\", which this stream does not have"),
                );
            }
            let count =
                table.get("burst").map_or(Ok(Range::just(1)), |value| self.range(value, "burst", BURSTS));
            let sizes = self.needed(table, at, "size").and_then(|value| self.sizes(value));
            return Ok(Shape::Packets { count: count?, sizes: sizes? });
        };
        for (key, value) in
            table.iter().filter(|(key, _)| ["burst", "size"].contains(&key.get_ref().as_ref()))
        {
            let key: &str = key.get_ref();
            self.wrong(value.span(), format!("{key}: does not go with \"frame\", which is cut into packets"));
        }
        let bytes = self.range(frame, "frame", FRAMES);
        let packet = self.needed(table, at, "packet").and_then(|value| self.whole(value, "packet", PACKETS));
        let key = match (table.get("key_frame"), table.get("key_every")) {
            (None, None) => Ok(None),
            (Some(key), None) => {
                Err(self.wrong(key.span(), "key_frame: goes with \"key_every\", which is missing"))
            }
            (None, Some(every)) => {
                Err(self.wrong(every.span(), "key_every: goes with \"key_frame\", which is missing"))
            }
            (Some(key), Some(every)) => {
                let (bytes, every) =
                    (self.range(key, "key_frame", FRAMES), self.whole(every, "key_every", EVERY));
                bytes.and_then(|bytes| Ok(Some(KeyFrames { bytes, every: every? })))
            }
        };
        Ok(Shape::Frame { bytes: bytes?, packet: packet?, key: key? })
    }

    fn needed<'a, 'i>(
        &mut self,
        table: &'a DeTable<'i>,
        at: &Span<usize>,
        key: &str,
    ) -> Read<&'a Spanned<DeValue<'i>>> {
        table
            .get(key)
            .ok_or_else(|| self.wrong(at.clone(), format!("this stream has no \"{key}\", which is needed")))
    }

    fn text(&mut self, value: &Spanned<DeValue<'_>>, key: &str) -> Read<String> {
        match value.get_ref().as_str() {
            Some(text) if !text.is_empty() && text.chars().all(|c| !c.is_control()) => Ok(text.to_owned()),
            _ => Err(self.wrong(value.span(), format!("{key}: expected text in quotes"))),
        }
    }

    fn directions(&mut self, value: &Spanned<DeValue<'_>>) -> Read<&'static [Direction]> {
        match value.get_ref().as_str() {
            Some("to-peer") => Ok(&[Direction::ToPeer]),
            Some("to-client") => Ok(&[Direction::ToClient]),
            Some("both") => Ok(&[Direction::ToPeer, Direction::ToClient]),
            _ => Err(self.wrong(value.span(), "direction: expected \"to-peer\", \"to-client\" or \"both\"")),
        }
    }

    fn rate(&mut self, value: &Spanned<DeValue<'_>>) -> Read<f64> {
        let number = match value.get_ref() {
            DeValue::Integer(digits) => {
                i64::from_str_radix(digits.as_str(), digits.radix()).ok().map(|n| n as f64)
            }
            DeValue::Float(digits) => digits.as_str().parse().ok(),
            _ => None,
        };
        let (least, most) = RATES;
        number.filter(|rate| (least..=most).contains(rate)).ok_or_else(|| {
            self.wrong(value.span(), format!("rate: expected bursts a second, {least} to {most}"))
        })
    }

    /// A whole number of `range`.
    fn whole(&mut self, value: &Spanned<DeValue<'_>>, key: &str, range: Span<i64>) -> Read<u32> {
        number(value, &range).ok_or_else(|| {
            let (least, most) = (range.start, range.end - 1);
            self.wrong(value.span(), format!("{key}: expected a whole number, {least} to {most}"))
        })
    }

    /// A whole number, or the least and the most.
    fn range(&mut self, value: &Spanned<DeValue<'_>>, key: &str, range: Span<i64>) -> Read<Range> {
        range_of(value, &range).ok_or_else(|| {
            let (least, most) = (range.start, range.end - 1);
            let what =
                format!("{key}: expected a whole number, {least} to {most}, or two of them: [LEAST, MOST]");
            self.wrong(value.span(), what)
        })
    }

    /// A range, or a list of `{ size, weight }`.
    fn sizes(&mut self, value: &Spanned<DeValue<'_>>) -> Read<Vec<Sizes>> {
        let Some(items) =
            value.get_ref().as_array().filter(|items| items.iter().any(|item| item.get_ref().is_table()))
        else {
            return Ok(vec![Sizes { range: self.range(value, "size", PACKETS)?, weights: 1 }]);
        };
        let (mut sizes, mut weights) = (Vec::new(), 0_u32);
        let mut told = None;
        for item in items {
            let Some(table) = item.get_ref().as_table() else {
                told = Some(self.wrong(item.span(), "size: expected tables like { size = 120, weight = 3 }"));
                continue;
            };
            for (key, _) in
                table.iter().filter(|(key, _)| !["size", "weight"].contains(&key.get_ref().as_ref()))
            {
                self.unknown(key, &["size", "weight"]);
            }
            let size = self.needed(table, &item.span(), "size");
            let size = size.and_then(|value| self.range(value, "size", PACKETS));
            let weight = self.needed(table, &item.span(), "weight");
            let weight = weight.and_then(|value| self.whole(value, "weight", WEIGHTS));
            match (size, weight) {
                (Ok(range), Ok(weight)) => {
                    weights = weights.saturating_add(weight);
                    sizes.push(Sizes { range, weights });
                }
                _ => told = Some(Told),
            }
        }
        told.map_or(Ok(sizes), Err)
    }
}

fn number(value: &Spanned<DeValue<'_>>, range: &Span<i64>) -> Option<u32> {
    let digits = value.get_ref().as_integer()?;
    let number = i64::from_str_radix(digits.as_str(), digits.radix()).ok()?;
    u32::try_from(number).ok().filter(|_| range.contains(&number))
}

fn range_of(value: &Spanned<DeValue<'_>>, range: &Span<i64>) -> Option<Range> {
    let Some(items) = value.get_ref().as_array() else { return number(value, range).map(Range::just) };
    let numbers: Vec<_> = items.iter().filter_map(|item| number(item, range)).collect();
    match numbers[..] {
        [least, most] if least <= most && items.len() == 2 => Some(Range { least, most }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mistakes(text: &str) -> Vec<String> {
        let error = parse("x.toml", "x", text).expect_err(text).to_string();
        error.lines().map(str::to_owned).collect()
    }

    #[test]
    fn each_mistake_is_told_with_its_place_and_all_of_them_at_once() {
        let text = "\
nmae = 'a'
[[stream]]
name = 'audio'
direction = 'up'
rate = 0
szie = 120
[[stream]]
name = 'video'
direction = 'both'
rate = 30
frame = [5000, 3000]
size = 5
key_every = 300
colour = 1
";
        assert_eq!(
            mistakes(text),
            [
                "x.toml:1:1: unknown key \"nmae\"; did you mean \"name\"?",
                "x.toml:2:1: this stream has no \"size\", which is needed",
                "x.toml:4:13: direction: expected \"to-peer\", \"to-client\" or \"both\"",
                "x.toml:5:8: rate: expected bursts a second, 0.1 to 10000",
                "x.toml:6:1: unknown key \"szie\"; did you mean \"size\"?",
                "x.toml:7:1: this stream has no \"packet\", which is needed",
                "x.toml:11:9: frame: expected a whole number, 1 to 1048576, or two of them: [LEAST, MOST]",
                "x.toml:12:8: size: does not go with \"frame\", which is cut into packets",
                "x.toml:13:13: key_every: goes with \"key_frame\", which is missing",
                "x.toml:14:1: unknown key \"colour\"; known here: name, direction, rate, copies, burst, size, frame, packet, key_frame, key_every",
            ]
        );
    }

    #[test]
    fn what_is_no_profile_is_refused() {
        let stream = "[[stream]]\nname = 'a'\ndirection = 'both'\nrate = 1\n";
        for (text, what) in [
            (String::new(), "no [[stream]]"),
            ("stream = 5".to_owned(), "two brackets"),
            ("[[stream]".to_owned(), "no valid TOML"),
            (format!("{stream}size = 23"), "size: expected a whole number, 24 to 65000"),
            (format!("{stream}size = [100]"), "[LEAST, MOST]"),
            (format!("{stream}size = [{{ size = 100 }}]"), "no \"weight\""),
            (format!("{stream}size = [{{ size = 100, weight = 0 }}]"), "weight: expected"),
            (format!("{stream}size = 100\nburst = 257"), "burst: expected a whole number, 1 to 256"),
            (format!("{stream}size = 100\nkey_frame = 5"), "key_frame: goes with \"frame\""),
            (format!("{stream}size = 100\ncopies = 101"), "copies"),
            (format!("{stream}size = 100\n{stream}size = 100"), "two streams \"a\" to peer"),
            (
                format!("{stream}size = 100\ncopies = 100\n{}size = 99", stream.replace("'a'", "'b'")),
                "202 flows",
            ),
        ] {
            let told = mistakes(&text).join("\n");
            assert!(told.contains(what), "{text:?}: {told}");
        }
    }

    #[test]
    fn any_text_is_read_or_refused() {
        let pieces =
            ["[[stream]]", "\n", "size", " = ", "[", "]", "{", "}", "24", "'a'", ",", "rate", "frame"];
        for a in pieces {
            for b in pieces {
                for c in pieces {
                    let text = ["[[stream]]\n", a, b, c].concat();
                    assert!(!mistakes(&text).is_empty());
                }
            }
        }
    }
}
