//! Code coverage of a set of inputs from libFuzzer's own counters: its merge records which input first reached each counter, the test
//! program contains a table of all counters, and debug information maps them to lines. Unlike with LLVM's coverage tools, no tool has to
//! match the compiler's version.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use object::{File as ElfFile, Object as _, ObjectSection as _};

use super::{program::fuzzing, targets::Target};
use crate::Failure;

/// Programs that map addresses to lines, with their arguments. The first is much faster.
const SYMBOLIZERS: [(&str, &[&str], &str); 2] = [
    ("llvm-symbolizer", &["--output-style=GNU", "--functions=none", "--no-inlines"], "--obj="),
    ("addr2line", &[], "--exe="),
];

pub(super) struct Merged {
    /// New inputs that first reached a counter, smallest first.
    pub(super) found: Vec<PathBuf>,
    reached: BTreeSet<usize>,
}

/// Source lines at which a basic block starts, mapped to true if the block was reached.
pub(super) type Lines = BTreeMap<(String, u32), bool>;

/// Runs all files of `into`, then those of `from`; copies to `into` those that reach new code.
pub(super) fn merge(
    target: &Target,
    program: &Path,
    scratch: &Path,
    into: &str,
    from: &[&str],
) -> Result<Merged, Failure> {
    let control = scratch.join("control");
    let _ = fs::remove_file(&control);
    let mut arguments = vec![
        "-merge=1".to_owned(),
        "-merge_control_file=control".to_owned(),
        format!("-max_len={}", target.max_len),
        "-timeout=60".to_owned(),
        into.to_owned(),
    ];
    arguments.extend(from.iter().map(|&directory| directory.to_owned()));
    let output = fuzzing(target, program, scratch, &arguments).output()?;
    if !output.status.success() {
        return Err(format!(
            "the merge of {} failed: {}",
            target.name,
            String::from_utf8_lossy(&output.stderr)
        )
        .into());
    }
    let text =
        fs::read_to_string(&control).map_err(|error| format!("the merge left no control file: {error}"))?;
    parse(&text, scratch).ok_or_else(|| "libFuzzer's control file has an unknown format".into())
}

/// The control file: number of files, number of initial files, names; then a `COV` line per file with its number and counters.
fn parse(text: &str, scratch: &Path) -> Option<Merged> {
    let mut lines = text.lines();
    let count: usize = lines.next()?.parse().ok()?;
    let given: usize = lines.next()?.parse().ok()?;
    let files: Vec<PathBuf> = lines.by_ref().take(count).map(|line| scratch.join(line)).collect();
    let mut merged = Merged { found: Vec::new(), reached: BTreeSet::new() };
    for line in lines {
        let Some(words) = line.strip_prefix("COV ") else { continue };
        let mut numbers = words.split(' ').map(str::parse::<usize>);
        let number = numbers.next()?.ok()?;
        let file = files.get(number)?;
        let places = numbers.collect::<Result<Vec<_>, _>>().ok()?;
        if number >= given && !places.is_empty() {
            merged.found.push(file.clone());
        }
        merged.reached.extend(places);
    }
    Some(merged)
}

/// Line of each counter of a program in table order; `None` for counters without debug information.
pub(super) fn places(program: &Path, scratch: &Path) -> Result<Vec<Option<(String, u32)>>, Failure> {
    let addresses = table(program)?;
    let list = scratch.join("addresses");
    fs::write(&list, addresses.iter().map(|address| format!("{address:#x}\n")).collect::<String>())?;
    for (symbolizer, options, about) in SYMBOLIZERS {
        let asked = Command::new(symbolizer)
            .args(options)
            .arg(format!("{about}{}", program.display()))
            .stdin(File::open(&list)?)
            .stderr(Stdio::null())
            .output();
        let Ok(output) = asked else { continue };
        let text = String::from_utf8_lossy(&output.stdout);
        let lines: Vec<_> = text.lines().filter(|line| !line.is_empty()).map(place).collect();
        if lines.len() != addresses.len() {
            return Err(format!(
                "{symbolizer} prints {} lines for {} addresses",
                lines.len(),
                addresses.len()
            )
            .into());
        }
        return Ok(lines);
    }
    Err("neither llvm-symbolizer nor addr2line is installed".into())
}

/// Addresses in the program's table of counters, which consists of pairs of an address and flags and is linked without relocation.
fn table(program: &Path) -> Result<Vec<u64>, Failure> {
    let bytes = fs::read(program)?;
    let elf = ElfFile::parse(&*bytes)?;
    let section = elf.section_by_name("__sancov_pcs").ok_or("the program has no coverage counters")?;
    let entries = section.data()?.chunks_exact(16);
    Ok(entries.filter_map(|entry| entry.first_chunk().copied().map(u64::from_le_bytes)).collect())
}

/// Converts `/somewhere/crates/wire/src/frame.rs:12 (discriminator 3)` to a path in the repository.
fn place(line: &str) -> Option<(String, u32)> {
    let (file, rest) = line.rsplit_once(':')?;
    let number = rest.split(' ').next()?.parse().ok().filter(|number| *number > 0)?;
    let at = file.find("/crates/")? + 1;
    Some((file[at..].to_owned(), number))
}

/// Lines of a target's files with their coverage, excluding unit tests.
pub(super) fn lines(
    repository: &Path,
    target: &Target,
    merged: &Merged,
    places: &[Option<(String, u32)>],
) -> Lines {
    let mut lines = Lines::new();
    let mut tests_from = BTreeMap::new();
    for (number, place) in places.iter().enumerate() {
        let Some((file, line)) = place else { continue };
        if !target.about.iter().any(|about| file.starts_with(about)) {
            continue;
        }
        let end =
            *tests_from.entry(file.clone()).or_insert_with(|| first_line_of_tests(&repository.join(file)));
        if end.is_none_or(|end| *line < end) {
            *lines.entry((file.clone(), *line)).or_default() |= merged.reached.contains(&number);
        }
    }
    lines
}

fn first_line_of_tests(file: &Path) -> Option<u32> {
    let text = fs::read_to_string(file).unwrap_or_default();
    (1..).zip(text.lines()).find_map(|(number, line)| (line == "mod tests {").then_some(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_file_names_the_first_input_of_each_counter() {
        let text = "4\n1\nin/z\nin/a\nin/b\nin/c\nSTARTED 0 1\nFT 0 9\nCOV 0 6\nSTARTED 1 2\nFT 1 1 2\nCOV 1 7 8\n\
                    STARTED 2 4\nFT 2\nCOV 2\nSTARTED 3 9\nFT 3 5\nCOV 3 9\n";
        let merged = parse(text, Path::new("/s")).expect("a valid form");
        assert_eq!(merged.found, [Path::new("/s/in/a"), Path::new("/s/in/c")]);
        assert_eq!(merged.reached, BTreeSet::from([6, 7, 8, 9]));
        assert!(parse("x\n0\n", Path::new("/s")).is_none());
        assert!(parse("1\n0\na\nCOV 1 2\n", Path::new("/s")).is_none());
    }

    #[test]
    fn lines_are_mapped_to_paths_in_the_repository() {
        let told = place("/home/a/turnpike/crates/wire/src/frame.rs:12 (discriminator 3)");
        assert_eq!(told, Some(("crates/wire/src/frame.rs".to_owned(), 12)));
        assert_eq!(place("??:0"), None);
        assert_eq!(place("/rustc/abc/library/core/src/slice/mod.rs:7"), None);
        assert_eq!(place("/home/a/crates/wire/src/frame.rs:?"), None);
    }
}
