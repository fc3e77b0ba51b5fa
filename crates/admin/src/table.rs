//! Columns for people: as wide as what is first shown in them, the last one as it comes.

use std::{
    fmt::Write as _,
    io::{self, Write},
};

use turnpike_wire::escape;

/// Writes rows as they come; the widths are those of the first rows, which come together.
pub(crate) struct Table<const N: usize> {
    head: [&'static str; N],
    widths: Option<[usize; N]>,
}

impl<const N: usize> Table<N> {
    pub(crate) fn new(head: [&'static str; N]) -> Self {
        Self { head, widths: None }
    }

    /// Nothing, if there are no rows.
    pub(crate) fn write(&mut self, out: &mut dyn Write, rows: &[[String; N]]) -> io::Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let rows: Vec<[String; N]> =
            rows.iter().map(|row| row.each_ref().map(|cell| escape::name(cell).to_string())).collect();
        let widths = match self.widths {
            Some(widths) => widths,
            None => {
                let widest = |column: usize| {
                    let cells = rows.iter().map(|row| row[column].chars().count());
                    cells.chain([self.head[column].len()]).max().unwrap_or_default()
                };
                let widths = std::array::from_fn(widest);
                self.widths = Some(widths);
                line(out, &widths, &self.head.map(str::to_owned))?;
                widths
            }
        };
        rows.iter().try_for_each(|row| line(out, &widths, row))
    }
}

fn line<const N: usize>(out: &mut dyn Write, widths: &[usize; N], cells: &[String; N]) -> io::Result<()> {
    let mut text = String::new();
    for (cell, width) in cells.iter().zip(widths) {
        let _ = write!(text, "{cell:width$}  ");
    }
    writeln!(out, "{}", text.trim_end())
}

/// Bytes in a unit that leaves three digits.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KB", "MB", "GB", "TB", "PB"];
    if count < 1000 {
        return format!("{count} B");
    }
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let mut value = count as f64 / 1000.0;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    format!("{value:.digits$} {}", UNITS[unit])
}

/// Seconds in two units at the most.
pub(crate) fn span(seconds: u64) -> String {
    match seconds {
        ..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(parts: &[&[[&str; 2]]]) -> String {
        let mut table = Table::new(["A", "LONG"]);
        let mut out = Vec::new();
        for rows in parts {
            let rows: Vec<[String; 2]> = rows.iter().map(|row| row.map(str::to_owned)).collect();
            table.write(&mut out, &rows).unwrap();
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn columns_stand_below_one_another_and_the_head_comes_once() {
        let text = written(&[&[["1", "x"], ["four", "y"]], &[["2", "z"]]]);
        assert_eq!(text, "A     LONG\n1     x\nfour  y\n2     z\n");
        assert_eq!(written(&[&[], &[["1", "x"]]]), "A  LONG\n1  x\n");
        assert_eq!(written(&[&[]]), "");
    }

    #[test]
    fn cells_show_any_name_on_their_line() {
        for (name, shown) in turnpike_testkit::names::CORPUS {
            let text = written(&[&[["1", name]]]);
            assert_eq!(text, format!("A  LONG\n1  {shown}\n"));
        }
    }

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        for (count, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.00 KB"),
            (12_345, "12.3 KB"),
            (999_499, "999 KB"),
            (999_500, "1.00 MB"),
            (5_000_000_000, "5.00 GB"),
            (u64::MAX, "18447 PB"),
        ] {
            assert_eq!(bytes(count), text);
        }
        for (seconds, text) in [(0, "0 s"), (61, "1 min 1 s"), (3661, "1 h 1 min"), (90_000, "1 d 1 h")] {
            assert_eq!(span(seconds), text);
        }
    }
}
