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
}
