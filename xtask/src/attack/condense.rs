//! Shortens tables: merges rows that differ only in the data path or in the conditions of one measurement.

use super::DATAPATHS;

type Cells = Vec<String>;

/// Rows of the table `peers`: data paths with equal figures share a row, and so do requests with equal figures.
pub(super) fn peers(rows: &[String]) -> Vec<String> {
    let split = |cells: &Cells| {
        let (path, condition) = split_at_comma(&cells[0]);
        DATAPATHS
            .contains(&path)
            .then(|| (path.to_owned(), [vec![condition.to_owned()], cells[1..].to_vec()].concat()))
    };
    let groups = grouped(rows, |cells| split(cells).unwrap_or_else(|| (String::new(), cells.clone())));
    let merged = groups.into_iter().map(|(key, paths)| {
        let paths: Vec<&str> = paths.iter().map(String::as_str).filter(|path| !path.is_empty()).collect();
        let first = if paths.is_empty() { key[0].clone() } else { label(&paths) + &key[0] };
        joined(&[vec![first], key[1..].to_vec()].concat())
    });
    let groups =
        grouped(&merged.collect::<Vec<_>>(), |cells| (cells[1].clone(), [&cells[..1], &cells[2..]].concat()));
    let merged = groups.into_iter().map(|(key, requests)| {
        joined(&[vec![key[0].clone(), requests.join(", ")], key[1..].to_vec()].concat())
    });
    merged.collect()
}

/// Rows of the table `witness`: one for each attack, with the ranges of its figures over the data paths.
pub(super) fn witness(rows: &[String]) -> Vec<String> {
    const PATH: &str = ", data path ";
    let key = |cells: &Cells| match cells[0].split_once(PATH) {
        Some((attack, rest)) => {
            let (path, condition) = split_at_comma(rest);
            (vec![attack.to_owned(), condition.to_owned()], Some(path.to_owned()))
        }
        None => (vec![cells[0].clone(), String::new()], None),
    };
    let groups = grouped(rows, |cells| {
        let (key, path) = key(cells);
        ((path, cells[1..].to_vec()), key)
    });
    let merged = groups.into_iter().map(|(key, found)| {
        let paths: Vec<&str> = found.iter().filter_map(|(path, _)| path.as_deref()).collect();
        let paths = if paths.is_empty() { String::new() } else { format!("{PATH}{}", label(&paths)) };
        let figures: Vec<&Cells> = found.iter().map(|(_, cells)| cells).collect();
        joined(&[vec![format!("{}{paths}{}", key[0], key[1])], ranges(&figures)].concat())
    });
    merged.collect()
}

/// Rows of the table `newcomers`: one for each client and transport, with the ranges of its figures over realms, rates and networks.
pub(super) fn newcomers(rows: &[String]) -> Vec<String> {
    let groups = grouped(rows, |cells| {
        let at = cells.len().min(3);
        let end = cells.len().min(5);
        (cells[end..].to_vec(), cells[at..end].to_vec())
    });
    let merged = groups.into_iter().map(|(key, found)| {
        joined(&[key, vec![found.len().to_string()], ranges(&found.iter().collect::<Vec<_>>())].concat())
    });
    merged.collect()
}

fn grouped<V>(rows: &[String], split: impl Fn(&Cells) -> (V, Cells)) -> Vec<(Cells, Vec<V>)> {
    let mut groups: Vec<(Cells, Vec<V>)> = Vec::new();
    for row in rows {
        let cells: Cells =
            row.trim().trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
        let (value, key) = split(&cells);
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, values)) => values.push(value),
            None => groups.push((key, vec![value])),
        }
    }
    groups
}

fn joined(cells: &[String]) -> String {
    format!("| {} |", cells.join(" | "))
}

fn split_at_comma(text: &str) -> (&str, &str) {
    text.split_at(text.find(',').unwrap_or(text.len()))
}

fn label(paths: &[&str]) -> String {
    if DATAPATHS.iter().all(|path| paths.contains(path)) { "all".to_owned() } else { paths.join(", ") }
}

/// Range of each column; text is taken from the first row.
fn ranges(rows: &[&Cells]) -> Cells {
    let column = |at: usize| {
        let cells: Vec<&str> = rows.iter().filter_map(|row| row.get(at)).map(String::as_str).collect();
        let number = |cell: &&&str| cell.parse::<f64>().ok();
        let by_number = |one: &&&str, other: &&&str| {
            number(one).partial_cmp(&number(other)).unwrap_or(std::cmp::Ordering::Equal)
        };
        let (least, most) = (cells.iter().min_by(by_number), cells.iter().max_by(by_number));
        match (least, most) {
            (Some(least), Some(most)) if number(&least).is_some() && least != most => {
                format!("{least}–{most}")
            }
            _ => cells.first().map_or_else(String::new, |cell| (*cell).to_owned()),
        }
    };
    (0..rows.first().map_or(0, |row| row.len())).map(column).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rows: &[&str]) -> Vec<String> {
        rows.iter().map(|row| (*row).to_owned()).collect()
    }

    #[test]
    fn equal_rows_of_several_data_paths_become_one() {
        let of_all: Vec<String> =
            DATAPATHS.iter().map(|path| format!("| {path}, after a reload | send | 69 | - |")).collect();
        assert_eq!(peers(&of_all), ["| all, after a reload | send | 69 | - |"]);
        let some =
            rows(&["| basic | send | 69 |", "| gso | send | 70 |", "| mmsg | send | 69 |", "| a | b |"]);
        assert_eq!(peers(&some), ["| basic, mmsg | send | 69 |", "| gso | send | 70 |", "| a | b |"]);
    }

    #[test]
    fn witness_rows_of_several_data_paths_are_merged_into_ranges() {
        let found = rows(&[
            "| flood, data path basic, after a reload | 9 | 100 |",
            "| flood, data path gso, after a reload | 9 | 90 |",
            "| flood | 1 | 2 |",
        ]);
        assert_eq!(
            witness(&found),
            ["| flood, data path basic, gso, after a reload | 9 | 90–100 |", "| flood | 1 | 2 |"]
        );
    }

    #[test]
    fn newcomers_have_a_row_for_each_client_and_transport() {
        let found = rows(&[
            "| 1 | 200 | 1 | pion | udp | 300 | 300 | 1.0 |",
            "| 20 | 5000 | 100 | pion | udp | 300 | 299 | 0.9 |",
            "| 1 | 200 | 1 | pion | tcp | 300 | 300 | 1.1 |",
        ]);
        let expected =
            ["| pion | udp | 2 | 300 | 299–300 | 0.9–1.0 |", "| pion | tcp | 1 | 300 | 300 | 1.1 |"];
        assert_eq!(newcomers(&found), expected);
    }
}
