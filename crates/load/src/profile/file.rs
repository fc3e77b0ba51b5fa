//! Profile files: TOML with strict parsing. All errors are reported together, with line and column.

use std::{ops::RangeInclusive, path::Path};

use serde::Deserialize;
use turnpike_measure::Direction;
use turnpike_strict::{Document, Mistakes};

use super::{KeyFrames, Profile, ProfileStream, Range, Shape, Sizes};
use crate::{payload::HEADER_LEN, udp::MAX_SIZE};

const RATES: RangeInclusive<f64> = 0.1..=10_000.0;
const BURSTS: RangeInclusive<u32> = 1..=256;
const FRAMES: RangeInclusive<u32> = 1..=1_048_576;
const COPIES: RangeInclusive<u32> = 1..=100;
const WEIGHTS: RangeInclusive<u32> = 1..=1_000_000;
const EVERY: RangeInclusive<u32> = 1..=1_000_000;
#[expect(clippy::cast_possible_truncation, reason = "both are at most 65,000")]
const PACKETS: RangeInclusive<u32> = HEADER_LEN as u32..=MAX_SIZE as u32;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProfileFile {
    name: Option<String>,
    #[serde(default)]
    stream: Vec<StreamEntry>,
}

/// `[[stream]]`. The required keys depend on the kind of stream.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamEntry {
    name: Option<String>,
    direction: Option<StreamWay>,
    rate: Option<f64>,
    copies: Option<u32>,
    burst: Option<SizeSpan>,
    size: Option<Size>,
    frame: Option<SizeSpan>,
    packet: Option<u32>,
    key_frame: Option<SizeSpan>,
    key_every: Option<u32>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum StreamWay {
    ToPeer,
    ToClient,
    Both,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(untagged, expecting = "expected a whole number, or two of them: [LEAST, MOST]")]
enum SizeSpan {
    Just(u32),
    FromTo([u32; 2]),
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a whole number, two of them: [LEAST, MOST], or tables like { size = 120, weight = 3 }"
)]
enum Size {
    Span(SizeSpan),
    Weighted(Vec<Weighted>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Weighted {
    size: SizeSpan,
    weight: u32,
}

/// Parses a profile. `file` is the path shown in error messages, and `title` the profile's name if the file sets none.
pub(super) fn parse(file: &Path, title: &str, text: &str) -> Result<Profile, Mistakes> {
    let (ProfileFile { name, stream }, mut document) = Document::parse(file, text)?;
    let name = name.unwrap_or_else(|| title.to_owned());
    let mut profile = Profile { name, streams: Vec::new(), flows: Vec::new() };
    if profile.name.is_empty() || profile.name.contains(char::is_control) {
        document.problem("name", NO_NAME);
    }
    if stream.is_empty() {
        document.problem("stream", "no [[stream]]: a profile needs at least one");
    }
    for (index, entry) in stream.into_iter().enumerate() {
        ProfileTable { document: &mut document, path: format!("stream[{index}]") }.take(entry, &mut profile);
    }
    let (flows, most) = (profile.flows.len(), Profile::MAX_FLOWS);
    if flows > most {
        document.problem("", format!("{flows} flows per client, but at most {most} are allowed"));
    }
    document.finish()?;
    Ok(profile)
}

const NO_NAME: &str = "name: expected text in quotes, neither empty nor with control characters";

/// A table that is being parsed. If a method returns `None`, the error has already been reported.
struct ProfileTable<'a> {
    document: &'a mut Document,
    path: String,
}

impl ProfileTable<'_> {
    fn take(&mut self, entry: StreamEntry, profile: &mut Profile) -> Option<()> {
        let is_name = |name: &String| !name.is_empty() && !name.contains(char::is_control);
        let name = self.needed("name", entry.name.clone());
        let name =
            name.and_then(|name| if is_name(&name) { Some(name) } else { self.wrong("name", NO_NAME) });
        let way = self.needed("direction", entry.direction);
        let rate = self.needed("rate", entry.rate).and_then(|rate| {
            let (least, most) = (RATES.start(), RATES.end());
            let what = || format!("rate: expected bursts a second, {least} to {most}");
            if RATES.contains(&rate) { Some(rate) } else { self.wrong("rate", &what()) }
        });
        let copies = self.whole("copies", entry.copies.unwrap_or(1), &COPIES);
        let shape = self.shape(&entry);
        let (name, way, bursts_per_second, copies, shape) = (name?, way?, rate?, copies?, shape?);
        let directions = match way {
            StreamWay::ToPeer => &[Direction::ToPeer][..],
            StreamWay::ToClient => &[Direction::ToClient],
            StreamWay::Both => &[Direction::ToPeer, Direction::ToClient],
        };
        for direction in directions.iter().copied() {
            if profile.streams.iter().any(|known| known.name == name && known.direction == direction) {
                self.document.problem(&self.path, format!("two streams {direction} are named \"{name}\""));
                return None;
            }
            profile.flows.extend(std::iter::repeat_n(profile.streams.len(), copies as usize));
            let (name, shape) = (name.clone(), shape.clone());
            profile.streams.push(ProfileStream { name, direction, bursts_per_second, shape });
        }
        Some(())
    }

    fn shape(&mut self, entry: &StreamEntry) -> Option<Shape> {
        let StreamEntry { burst, ref size, frame, packet, key_frame, key_every, .. } = *entry;
        if self.document.is_wrong(&format!("{}.frame", self.path)) {
            return None;
        }
        let Some(frame) = frame else {
            let of_frames = [("packet", packet.is_some()), ("key_frame", key_frame.is_some())];
            for (key, _) in
                of_frames.into_iter().chain([("key_every", key_every.is_some())]).filter(|of| of.1)
            {
                let what = format!("{key}: only valid with \"frame\", which this stream does not have");
                self.wrong::<()>(key, &what);
            }
            let count = burst.map_or(Some(Range::just(1)), |burst| self.range("burst", burst, &BURSTS));
            let sizes = self.needed("size", size.as_ref()).and_then(|size| self.sizes(size));
            return Some(Shape::Packets { count: count?, sizes: sizes? });
        };
        for (key, _) in [("burst", burst.is_some()), ("size", size.is_some())].iter().filter(|of| of.1) {
            self.wrong::<()>(key, &format!("{key}: not valid with \"frame\", which is cut into packets"));
        }
        let bytes = self.range("frame", frame, &FRAMES);
        let packet = self.needed("packet", packet).and_then(|packet| self.whole("packet", packet, &PACKETS));
        let missing = |key, other| format!("{key}: needs \"{other}\", which is missing");
        let key = match (key_frame, key_every) {
            (None, None) => Some(None),
            (Some(_), None) => self.wrong("key_frame", &missing("key_frame", "key_every")),
            (None, Some(_)) => self.wrong("key_every", &missing("key_every", "key_frame")),
            (Some(bytes), Some(every)) => {
                let bytes = self.range("key_frame", bytes, &FRAMES);
                let every = self.whole("key_every", every, &EVERY);
                bytes.zip(every).map(|(bytes, every)| Some(KeyFrames { bytes, every }))
            }
        };
        Some(Shape::Frame { bytes: bytes?, packet: packet?, key: key? })
    }

    fn sizes(&mut self, size: &Size) -> Option<Vec<Sizes>> {
        let items = match size {
            Size::Span(span) => {
                return Some(vec![Sizes { range: self.range("size", *span, &PACKETS)?, weights: 1 }]);
            }
            Size::Weighted(items) if items.is_empty() => {
                return self.wrong("size", "size: the list is empty");
            }
            Size::Weighted(items) => items,
        };
        let mut weights = 0_u32;
        let mut one = |(index, item): (usize, &Weighted)| {
            let range = self.range(&format!("size[{index}].size"), item.size, &PACKETS);
            let weight = self.whole(&format!("size[{index}].weight"), item.weight, &WEIGHTS);
            weights = weights.saturating_add(weight?);
            Some(Sizes { range: range?, weights })
        };
        let read: Vec<_> = items.iter().enumerate().map(&mut one).collect();
        read.into_iter().collect()
    }

    fn needed<T>(&mut self, key: &str, value: Option<T>) -> Option<T> {
        let missing = || format!("this stream has no \"{key}\", which is required");
        value.or_else(|| self.wrong(key, &missing()))
    }

    fn whole(&mut self, key: &str, number: u32, range: &RangeInclusive<u32>) -> Option<u32> {
        self.range(key, SizeSpan::Just(number), range).map(|range| range.least)
    }

    fn range(&mut self, key: &str, span: SizeSpan, range: &RangeInclusive<u32>) -> Option<Range> {
        let name = key.rsplit('.').next().unwrap_or(key);
        let what = format!("{name}: expected a whole number, {} to {}", range.start(), range.end());
        match span {
            SizeSpan::Just(number) if range.contains(&number) => Some(Range::just(number)),
            SizeSpan::Just(_) => self.wrong(key, &what),
            SizeSpan::FromTo([least, most])
                if least <= most && range.contains(&least) && range.contains(&most) =>
            {
                Some(Range { least, most })
            }
            SizeSpan::FromTo(_) => self.wrong(key, &(what + ", or two of them: [LEAST, MOST]")),
        }
    }

    fn wrong<T>(&mut self, key: &str, what: &str) -> Option<T> {
        self.document.problem(&format!("{}.{key}", self.path), what);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mistakes(text: &str) -> Vec<String> {
        let error = parse(Path::new("x.toml"), "x", text).expect_err(text).to_string();
        error.lines().map(str::to_owned).collect()
    }

    #[test]
    fn all_errors_are_reported_with_their_positions() {
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
                "x.toml:4:13: direction: found \"up\"; expected one of to-peer, to-client, both",
                "x.toml:5:8: rate: expected bursts a second, 0.1 to 10000",
                "x.toml:6:1: unknown key \"szie\"; did you mean \"size\"?",
                "x.toml:7:1: this stream has no \"packet\", which is required",
                "x.toml:11:9: frame: expected a whole number, 1 to 1048576, or two of them: [LEAST, MOST]",
                "x.toml:12:8: size: not valid with \"frame\", which is cut into packets",
                "x.toml:13:13: key_every: needs \"key_frame\", which is missing",
                "x.toml:14:1: unknown key \"colour\"; expected one of name, direction, rate, copies, burst, size, frame, packet, key_frame, key_every",
            ]
        );
    }

    #[test]
    fn invalid_profiles_are_rejected() {
        let stream = "[[stream]]\nname = 'a'\ndirection = 'both'\nrate = 1\n";
        for (text, what) in [
            (String::new(), "no [[stream]]"),
            ("stream = 5".to_owned(), "stream: found integer 5; expected a list in brackets"),
            ("[[stream]".to_owned(), "invalid TOML"),
            (format!("{stream}size = 23"), "size: expected a whole number, 24 to 65000"),
            (format!("{stream}size = [100]"), "[LEAST, MOST]"),
            (format!("{stream}size = []"), "size: the list is empty"),
            (format!("{stream}size = [{{ size = 100 }}]"), "{ size = 120, weight = 3 }"),
            (format!("{stream}size = [{{ size = 100, weight = 0 }}]"), "weight: expected"),
            (format!("{stream}size = 100\nburst = 257"), "burst: expected a whole number, 1 to 256"),
            (format!("{stream}size = 100\nkey_frame = 5"), "key_frame: only valid with \"frame\""),
            (format!("{stream}size = 100\ncopies = 101"), "copies"),
            (format!("{stream}size = 100\n{stream}size = 100"), "two streams to peer are named \"a\""),
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
    fn parsing_arbitrary_profiles_does_not_panic() {
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
