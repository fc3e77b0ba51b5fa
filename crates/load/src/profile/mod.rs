//! Traffic profiles: each client has streams in both directions, each with its own rate, bursts and sizes. Peers do not return the clients'
//! packets but send their own streams.
//!
//! ```text
//! client ──▶ [server | forwarder] ──▶ peer        to-peer     both ends are in the generator, with one clock: latency
//!        ◀────────────────────────◀──             to-client   is one-way, from the due time; loss is per direction
//! ```

mod draw;
mod ends;
mod figures;
mod file;
mod schedule;

use std::{fmt, path::Path, str::FromStr};

use clap::Args;
use draw::{Draw, Range};
pub(crate) use ends::{ProfileEnds, run};
pub(crate) use figures::{StreamFigures, gather, put};
use turnpike_measure::Direction;
use turnpike_strict::{Mistake, Mistakes, Origin};

use crate::{LoadError, payload::HEADER_LEN};

const BUILT_IN: [(&str, &str); 5] = [
    ("audio", include_str!("builtin/audio.toml")),
    ("call", include_str!("builtin/call.toml")),
    ("sfu", include_str!("builtin/sfu.toml")),
    ("screen", include_str!("builtin/screen.toml")),
    ("vpn", include_str!("builtin/vpn.toml")),
];

#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    name: String,
    streams: Vec<ProfileStream>,
    /// For each flow of a client, the index of its stream. Every flow has its own sequence numbers.
    flows: Vec<usize>,
}

#[derive(Clone, Debug, PartialEq)]
struct ProfileStream {
    name: String,
    direction: Direction,
    bursts_per_second: f64,
    shape: Shape,
}

#[derive(Clone, Debug, PartialEq)]
enum Shape {
    Packets { count: Range, sizes: Vec<Sizes> },
    Frame { bytes: Range, packet: u32, key: Option<KeyFrames> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    range: Range,
    /// Cumulative weight. A random number selects the first entry whose value is above the number.
    weights: u32,
}

/// Key frames: larger frames that do not depend on others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KeyFrames {
    bytes: Range,
    /// Interval between key frames, in frames.
    every: u32,
}

impl Profile {
    const MAX_FLOWS: usize = 200;

    pub fn open(name: &str) -> Result<Self, Mistakes> {
        if let Some((name, text)) = BUILT_IN.iter().find(|(known, _)| *known == name) {
            return file::parse(Path::new(name), name, text);
        }
        let path = Path::new(name);
        let text = std::fs::read_to_string(path).map_err(|error| {
            let names = BUILT_IN.map(|(name, _)| name).join(", ");
            let expected = format!("{names}, or a readable file");
            Mistakes(vec![Mistake::new(&Origin::file(path), "", error.to_string(), expected)])
        })?;
        let title =
            path.file_stem().map_or_else(|| name.to_owned(), |stem| stem.to_string_lossy().into_owned());
        file::parse(path, &title, &text)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn flows(&self) -> usize {
        self.flows.len()
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "at most 10,000 clients with 200 flows each")]
    fn flow_number(&self, client: usize, flow: usize) -> u32 {
        (client * self.flows.len() + flow) as u32
    }

    pub(crate) fn longest(&self) -> usize {
        self.streams.iter().map(|stream| stream.shape.longest() as usize).max().unwrap_or_default()
    }

    pub(crate) fn packets_per_second(&self) -> f64 {
        self.per_flow(|stream| stream.bursts_per_second * stream.shape.mean().packets)
    }

    pub(crate) fn mean_size(&self) -> f64 {
        self.per_flow(|stream| stream.bursts_per_second * stream.shape.mean().bytes)
            / self.packets_per_second()
    }

    fn per_flow(&self, figure: impl Fn(&ProfileStream) -> f64) -> f64 {
        self.flows.iter().map(|stream| figure(&self.streams[*stream])).sum()
    }
}

impl FromStr for Profile {
    type Err = Mistakes;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::open(name)
    }
}

struct Mean {
    packets: f64,
    bytes: f64,
}

impl Shape {
    #[inline]
    fn burst(&self, mut draw: Draw, number: u64, mut packets: impl FnMut(usize, usize)) {
        match self {
            Self::Packets { count, sizes } => {
                for _ in 0..draw.from(*count) {
                    packets(draw_size(sizes, &mut draw), 1);
                }
            }
            Self::Frame { bytes, packet: most, key } => {
                let bytes = match key {
                    Some(key) if number.is_multiple_of(key.every.into()) => draw.from(key.bytes),
                    _ => draw.from(*bytes),
                };
                let count = bytes.div_ceil(*most);
                // Packets of equal size are adjacent, so that they are sent as one super-packet.
                let (each, longer) = (bytes / count, bytes % count);
                for (size, count) in [(each + 1, longer), (each, count - longer)] {
                    if count > 0 {
                        packets((size as usize).max(HEADER_LEN), count as usize);
                    }
                }
            }
        }
    }

    fn longest(&self) -> u32 {
        match self {
            Self::Packets { sizes, .. } => {
                sizes.iter().map(|sizes| sizes.range.most).max().unwrap_or_default()
            }
            Self::Frame { packet, .. } => *packet,
        }
    }

    fn mean(&self) -> Mean {
        match self {
            Self::Packets { count, sizes } => {
                let all = sizes.last().map_or(1, |sizes| sizes.weights);
                let mut before = 0;
                let size: f64 = sizes
                    .iter()
                    .map(|Sizes { range, weights }| {
                        let share = f64::from(weights - std::mem::replace(&mut before, *weights));
                        range.mean() * share / f64::from(all)
                    })
                    .sum();
                Mean { packets: count.mean(), bytes: count.mean() * size }
            }
            Self::Frame { bytes, packet, key } => {
                let cut = |range: Range| {
                    let packets = (range.least..=range.most).map(|bytes| f64::from(bytes.div_ceil(*packet)));
                    packets.sum::<f64>() / f64::from(range.most - range.least + 1)
                };
                let share = key.map_or(0.0, |key| 1.0 / f64::from(key.every));
                let key = key.map_or(*bytes, |key| key.bytes);
                Mean {
                    packets: cut(*bytes) * (1.0 - share) + cut(key) * share,
                    bytes: bytes.mean() * (1.0 - share) + key.mean() * share,
                }
            }
        }
    }
}

#[inline]
fn draw_size(sizes: &[Sizes], draw: &mut Draw) -> usize {
    let range = match sizes {
        [only] => only.range,
        several => {
            let all = several.last().map_or(1, |sizes| sizes.weights);
            let at = draw.below(all.into());
            several.iter().find(|sizes| at < sizes.weights.into()).map_or(Range::just(0), |sizes| sizes.range)
        }
    };
    draw.from(range) as usize
}

/// Profile and seed given on the command line.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct ProfileOptions {
    /// Traffic profile that replaces --rate, --size, --burst and --window: a built-in one (audio, call, sfu, screen or vpn) or a TOML file.
    /// Each client gets the profile's streams in both directions, with peers inside the generator; docs/load.md describes the file
    #[arg(long, value_name = "NAME|FILE", required = false, conflicts_with_all = ["rate", "size", "burst", "window"])]
    pub profile: Profile,

    /// Seed of the random numbers of --profile: runs with the same seed send the same packets at the same
    /// times
    #[arg(long, value_name = "N", default_value_t = 1, requires = "profile")]
    pub seed: u64,
}

impl ProfileOptions {
    pub(crate) fn validate(&self, most: usize) -> Result<(), LoadError> {
        let longest = self.profile.longest();
        if longest > most {
            return Err(LoadError::Config(format!(
                "--profile {} has packets of {longest} bytes, but packets must be {HEADER_LEN} to {most} bytes long",
                self.profile.name
            )));
        }
        Ok(())
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

#[cfg(test)]
mod tests;
