//! A table that drops whole columns on a narrow terminal instead of cutting figures or addresses.

use ratatui::{style::Color, text::Span};

use turnpike_wire::escape;

/// Spaces between two columns.
pub(super) const GAP: u16 = 2;
/// Width of the main column below which other columns are dropped to make room for it.
const TEXT: u16 = 20;

/// Title and rank. The highest rank is dropped first; the column with rank 0 stays, possibly shortened.
pub(super) type Column = (&'static str, u8);

pub(super) struct Grid {
    pub(super) head: &'static [Column],
    pub(super) rows: Vec<(Vec<String>, Option<Color>)>,
}

/// The columns that fit into the available width.
pub(super) struct Fitting {
    pub(super) head: Vec<&'static str>,
    pub(super) widths: Vec<u16>,
    pub(super) rows: Vec<(Vec<String>, Option<Color>)>,
}

impl Grid {
    pub(super) fn new(head: &'static [Column], rows: impl Iterator<Item = Vec<String>>) -> Self {
        Self { head, rows: rows.map(|cells| (cells, None)).collect() }
    }

    pub(super) fn height(&self) -> u16 {
        u16::try_from(self.rows.len() + 1).unwrap_or(u16::MAX)
    }

    pub(super) fn fit(&self, width: u16) -> Fitting {
        let rows: Vec<(Vec<String>, Option<Color>)> = self
            .rows
            .iter()
            .map(|(cells, colour)| {
                (cells.iter().map(|cell| escape::name(cell).to_string()).collect(), *colour)
            })
            .collect();
        let widest = |at: usize| {
            let cells = rows.iter().filter_map(|(cells, _)| cells.get(at));
            let widths = cells.map(|cell| Span::raw(cell).width()).chain([self.head[at].0.len()]);
            widths.max().and_then(|width| u16::try_from(width).ok()).unwrap_or(u16::MAX)
        };
        let all: Vec<u16> = (0..self.head.len()).map(widest).collect();
        let is_text = |at: usize| self.head[at].1 == 0;
        let mut kept: Vec<usize> = (0..self.head.len()).collect();
        let taken = |kept: &[usize]| -> usize {
            let length = |at: &usize| if is_text(*at) { all[*at].min(TEXT) } else { all[*at] };
            let gaps = usize::from(GAP) * kept.len().saturating_sub(1);
            kept.iter().map(|at| usize::from(length(at))).sum::<usize>() + gaps
        };
        while taken(&kept) > width.into()
            && let Some(next) =
                kept.iter().copied().filter(|at| !is_text(*at)).max_by_key(|at| self.head[*at].1)
        {
            kept.retain(|at| *at != next);
        }
        let others: u16 = kept.iter().filter(|at| !is_text(**at)).map(|at| all[*at] + GAP).sum();
        let widths: Vec<u16> = kept
            .iter()
            .map(|at| if is_text(*at) { all[*at].min(width.saturating_sub(others)) } else { all[*at] })
            .collect();
        let cells = |cells: &[String]| {
            let kept = kept.iter().zip(&widths);
            kept.map(|(at, width)| {
                cells.get(*at).map_or_else(String::new, |cell| shortened(cell, (*width).into()))
            })
            .collect()
        };
        Fitting {
            head: kept.iter().map(|at| self.head[*at].0).collect(),
            rows: rows.iter().map(|(row, colour)| (cells(row), *colour)).collect(),
            widths,
        }
    }
}

/// Shortens text in the middle, because an address ends with its port.
pub(super) fn shortened(text: &str, width: usize) -> String {
    if Span::raw(text).width() <= width {
        return text.to_owned();
    }
    let mut front = String::new();
    let mut back = String::new();
    let fits = |front: &str, back: &str, more: char| {
        Span::raw(front).width() + Span::raw(back).width() + Span::raw(more.to_string()).width() < width
    };
    let (mut from_front, mut from_back) = (text.chars(), text.chars().rev());
    while let Some(next) = from_front.next().filter(|next| fits(&front, &back, *next)) {
        front.push(next);
        let Some(next) = from_back.next().filter(|next| fits(&front, &back, *next)) else { break };
        back.insert(0, next);
    }
    if width == 0 { String::new() } else { format!("{front}…{back}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_shortened_in_the_middle() {
        for (text, width, short) in [
            ("alice", 5, "alice"),
            ("alice", 4, "al…e"),
            ("tls [2001:db8:1:2:3:4:5:6]:5349", 20, "tls [2001:…5:6]:5349"),
            ("alice", 1, "…"),
            ("alice", 0, ""),
        ] {
            assert_eq!(shortened(text, width), short, "{text} {width}");
            assert!(Span::raw(shortened(text, width)).width() <= width);
        }
    }
}
