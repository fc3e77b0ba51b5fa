//! Tables. If the terminal is too narrow, each row becomes a record with one line per column.

use std::{
    fmt::Write as _,
    io::{self, IsTerminal as _, Write},
};

use ratatui::{crossterm::terminal, text::Span};
use turnpike_wire::escape;

/// Spaces between two columns.
const GAP: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputFormat {
    Json,
    /// Text with lines of at most this width; `None` for lines of any length.
    Text(Option<usize>),
}

impl OutputFormat {
    #[must_use]
    pub fn of_stdout(json: bool) -> Self {
        if json {
            return Self::Json;
        }
        let size = io::stdout().is_terminal().then(terminal::size).and_then(Result::ok);
        Self::Text(size.map(|(columns, _)| columns.into()).filter(|columns| *columns > 0))
    }

    pub(crate) fn is_json(self) -> bool {
        self == Self::Json
    }

    fn columns(self) -> usize {
        match self {
            Self::Text(Some(columns)) => columns,
            Self::Text(None) | Self::Json => usize::MAX,
        }
    }

    pub(crate) fn sentence(self, text: &str) -> String {
        broken(text, self.columns()).join("\n")
    }
}

/// Writes rows page by page; the first page determines the widths.
pub(crate) struct PagedTable<const N: usize> {
    head: [&'static str; N],
    /// Titles of columns that are left out if they are empty on the first page.
    pub(crate) omitted: &'static [&'static str],
    columns: usize,
    layout: Option<TableLayout<N>>,
}

enum TableLayout<const N: usize> {
    Table([usize; N]),
    Records,
}

impl<const N: usize> PagedTable<N> {
    pub(crate) fn new(head: [&'static str; N], format: OutputFormat) -> Self {
        Self { head, omitted: &[], columns: format.columns(), layout: None }
    }

    /// Writes nothing if there are no rows.
    pub(crate) fn write(&mut self, out: &mut dyn Write, rows: &[[String; N]]) -> io::Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let rows: Vec<[String; N]> =
            rows.iter().map(|row| row.each_ref().map(|cell| escape::name(cell).to_string())).collect();
        let head = self.head.map(str::to_owned);
        let is_first = self.layout.is_none();
        let widths = match self.layout {
            Some(TableLayout::Records) => None,
            Some(TableLayout::Table(widths)) => Some(widths),
            None => Some(std::array::from_fn(|column| {
                let widest = rows.iter().map(|row| width(&row[column])).max().unwrap_or_default();
                let is_omitted = widest == 0 && self.omitted.contains(&self.head[column]);
                if is_omitted { 0 } else { widest.max(width(self.head[column])) }
            })),
        };
        let lines = |widths: &[usize; N]| -> Vec<String> {
            let head = is_first.then_some(&head).into_iter();
            head.chain(&rows).map(|cells| line(widths, cells)).collect()
        };
        let lines = widths.as_ref().map(lines);
        match (widths, lines) {
            (Some(widths), Some(lines)) if lines.iter().all(|line| width(line) <= self.columns) => {
                self.layout = Some(TableLayout::Table(widths));
                lines.iter().try_for_each(|line| writeln!(out, "{line}"))
            }
            _ => {
                self.layout = Some(TableLayout::Records);
                for (number, row) in rows.iter().enumerate() {
                    if number > 0 || !is_first {
                        writeln!(out)?;
                    }
                    let members = self.head.iter().zip(row).map(|(title, cell)| (*title, cell.as_str()));
                    let members: Vec<_> = members.filter(|(_, cell)| !cell.is_empty()).collect();
                    write_record(out, &members, self.columns)?;
                }
                Ok(())
            }
        }
    }
}

pub(crate) fn write_members(
    out: &mut dyn Write,
    members: &[(&str, String)],
    format: OutputFormat,
) -> io::Result<()> {
    let members: Vec<_> =
        members.iter().map(|(title, value)| (*title, escape::name(value).to_string())).collect();
    let members: Vec<_> = members.iter().map(|(title, value)| (*title, value.as_str())).collect();
    write_record(out, &members, format.columns())
}

fn write_record(out: &mut dyn Write, members: &[(&str, &str)], columns: usize) -> io::Result<()> {
    let titles = members.iter().map(|(title, _)| width(title)).max().unwrap_or_default();
    let left = columns.saturating_sub(titles + GAP);
    for (title, value) in members {
        if value.split(' ').all(|word| width(word) <= left) {
            for (number, line) in broken(value, left).iter().enumerate() {
                let title = if number == 0 { title } else { "" };
                writeln!(out, "{}", format!("{title:titles$}  {line}").trim_end())?;
            }
        } else {
            writeln!(out, "{title}")?;
            broken(value, columns).iter().try_for_each(|line| writeln!(out, "{line}"))?;
        }
    }
    Ok(())
}

/// Wraps text between words. A word that is too long is split only if it is an IPv6 address, between
/// its groups.
fn broken(text: &str, columns: usize) -> Vec<String> {
    let (mut lines, mut line) = (Vec::new(), String::new());
    for word in text.split(' ') {
        for (number, piece) in pieces(word, columns).into_iter().enumerate() {
            let blank = if number > 0 || line.is_empty() { "" } else { " " };
            if line.is_empty() || width(&line) + blank.len() + width(&piece) <= columns {
                line += blank;
                line += &piece;
            } else {
                lines.push(std::mem::replace(&mut line, piece));
            }
        }
    }
    lines.push(line);
    lines
}

/// Returns the word if it fits, otherwise the groups of an IPv6 address. The last piece includes the
/// port.
fn pieces(word: &str, columns: usize) -> Vec<String> {
    let end = word.rfind(']').filter(|_| width(word) > columns);
    let Some(end) = end else { return vec![word.to_owned()] };
    let (groups, port) = word.split_at(end);
    let mut pieces: Vec<String> = groups.split_inclusive(':').map(str::to_owned).collect();
    if let Some(last) = pieces.last_mut() {
        *last += port;
    }
    pieces
}

fn line<const N: usize>(widths: &[usize; N], cells: &[String; N]) -> String {
    let mut text = String::new();
    for (cell, width) in cells.iter().zip(widths).filter(|(_, width)| **width > 0) {
        let blanks = (width + GAP).saturating_sub(self::width(cell)).max(GAP);
        let _ = write!(text, "{cell}{:blanks$}", "");
    }
    text.truncate(text.trim_end().len());
    text
}

fn width(text: &str) -> usize {
    Span::raw(text).width()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(parts: &[&[[&str; 2]]], columns: Option<usize>) -> String {
        let mut table = PagedTable::new(["A", "LONG"], OutputFormat::Text(columns));
        let mut out = Vec::new();
        for rows in parts {
            let rows: Vec<[String; 2]> = rows.iter().map(|row| row.map(str::to_owned)).collect();
            table.write(&mut out, &rows).unwrap();
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn columns_are_aligned_and_the_header_is_printed_once() {
        let text = written(&[&[["1", "x"], ["four", "y"]], &[["2", "z"]]], None);
        assert_eq!(text, "A     LONG\n1     x\nfour  y\n2     z\n");
        assert_eq!(written(&[&[], &[["1", "x"]]], None), "A  LONG\n1  x\n");
        assert_eq!(written(&[&[]], None), "");
    }

    #[test]
    fn column_that_is_empty_on_the_first_page_can_be_left_out() {
        for (cell, expected) in [("", "A\n1\n"), ("x", "A  LONG\n1  x\n")] {
            let mut table = PagedTable::new(["A", "LONG"], OutputFormat::Text(None));
            table.omitted = &["LONG"];
            let mut out = Vec::new();
            table.write(&mut out, &[["1".to_owned(), cell.to_owned()]]).unwrap();
            assert_eq!(String::from_utf8(out).unwrap(), expected);
        }
    }

    #[test]
    fn cells_show_any_name_on_one_line() {
        for (name, shown) in turnpike_testkit::names::CORPUS {
            let text = written(&[&[["1", name]]], None);
            assert_eq!(text, format!("A  LONG\n1  {shown}\n"));
        }
    }

    #[test]
    fn rows_that_do_not_fit_become_records() {
        let (short, long) = (["alice", "192.0.2.1:3478"], ["bob", "198.51.100.200:50123"]);
        assert_eq!(written(&[&[short]], Some(21)), "A      LONG\nalice  192.0.2.1:3478\n");
        assert_eq!(written(&[&[short]], Some(20)), "A     alice\nLONG  192.0.2.1:3478\n");
        let text = written(&[&[short, long]], Some(21));
        assert_eq!(text, "A     alice\nLONG  192.0.2.1:3478\n\nA     bob\nLONG\n198.51.100.200:50123\n");
        // A later page may have longer rows.
        let text = written(&[&[short], &[long]], Some(22));
        assert_eq!(text, "A      LONG\nalice  192.0.2.1:3478\n\nA     bob\nLONG\n198.51.100.200:50123\n");
    }

    #[test]
    fn no_line_is_split_within_a_port() {
        let address = "[2001:db8:1111:2222:3333:4444:5555:6666]:50123";
        for columns in 20..60 {
            let text = written(&[&[["tls, to peers", address]]], Some(columns));
            assert!(text.lines().all(|line| width(line) <= columns), "{columns}:\n{text}");
            assert!(text.contains("6666]:50123\n"), "{columns}:\n{text}");
            assert!(text.replace('\n', "").contains(address), "{columns}:\n{text}");
        }
    }
}
