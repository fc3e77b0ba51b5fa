//! Runs `benches` under valgrind's callgrind and parses its dumps.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::Failure;

/// Function of `benches` whose instructions are counted. The name is fully qualified, because valgrind 3.19 supports a wildcard in only one
/// of the two options that need it.
const REGION: &str = "instructions::turnpike_counted_region";

/// Number of runs, of which the minimum is used. Hash tables are seeded at random, and one seed in thirty causes enough collisions for 5 to
/// 10 % more instructions; with a worse hash function, every seed would.
const RUNS: usize = 3;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) name: String,
    pub(crate) own: u64,
    /// Instructions in shared libraries (`memcpy`, the allocator), which differ between machines.
    pub(crate) libraries: u64,
}

/// Counts every case of `program`. Dumps remain in `directory`, one per case, for `callgrind_annotate`.
pub(crate) fn count(program: &Path, directory: &Path) -> Result<Vec<Count>, Failure> {
    if directory.exists() {
        fs::remove_dir_all(directory)?;
    }
    fs::create_dir_all(directory)?;
    let mut lowest: Vec<Count> = Vec::new();
    for _ in 0..RUNS {
        for (index, (count, dump)) in run(program, directory)?.into_iter().enumerate() {
            let file = directory.join(format!("{}.callgrind", count.name.replace('/', "-")));
            match lowest.get_mut(index) {
                Some(known) if known.own <= count.own => fs::remove_file(dump)?,
                Some(known) => {
                    *known = count;
                    fs::rename(dump, file)?;
                }
                None => {
                    lowest.push(count);
                    fs::rename(dump, file)?;
                }
            }
        }
    }
    Ok(lowest)
}

fn run(program: &Path, directory: &Path) -> Result<Vec<(Count, PathBuf)>, Failure> {
    let rest = directory.join("dump");
    let output = Command::new("valgrind")
        .arg("--tool=callgrind")
        .arg(format!("--callgrind-out-file={}", rest.display()))
        .arg(format!("--toggle-collect={REGION}"))
        .arg(format!("--dump-after={REGION}"))
        .arg(program)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cannot start valgrind: {error}: apt-get install valgrind"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("the run under valgrind failed ({}):\n{errors}", output.status).into());
    }
    fs::remove_file(rest)?;
    let said = String::from_utf8_lossy(&output.stdout);
    said.lines()
        .enumerate()
        .map(|(index, line)| {
            let (name, calls) =
                line.split_once(' ').ok_or_else(|| format!("not a case and a number of calls: `{line}`"))?;
            let dump = directory.join(format!("dump.{}", index + 1));
            let count = read(&dump, program, name, calls.parse()?)
                .map_err(|error| format!("valgrind's count of {name}: {}: {error}", dump.display()))?;
            Ok((count, dump))
        })
        .collect()
}

fn read(dump: &Path, program: &Path, name: &str, calls: u64) -> Result<Count, Failure> {
    let costs = costs_by_object(&fs::read_to_string(dump)?)?;
    let own = costs.get(&*program.to_string_lossy()).copied().unwrap_or(0);
    if own == 0 {
        return Err(format!("nothing was executed in {}", program.display()).into());
    }
    let all: u64 = costs.values().sum();
    Ok(Count { name: name.to_owned(), own: per_call(own, calls), libraries: per_call(all - own, calls) })
}

fn per_call(instructions: u64, calls: u64) -> u64 {
    (instructions + calls / 2) / calls
}

/// Instructions executed in each object file, excluding callees in other files: the self costs of the "Callgrind Format Specification"
/// (valgrind's manual), summed by `ob=`. They must add up to the dump's own total.
fn costs_by_object(dump: &str) -> Result<BTreeMap<String, u64>, Failure> {
    let mut names: BTreeMap<&str, &str> = BTreeMap::new();
    let mut costs: BTreeMap<String, u64> = BTreeMap::new();
    let mut object = "";
    let mut total = None;
    let mut lines = dump.lines();
    while let Some(line) = lines.next() {
        if let Some(name) = line.strip_prefix("ob=") {
            object = resolve(name, &mut names);
        } else if let Some(name) = line.strip_prefix("cob=") {
            resolve(name, &mut names);
        } else if line.starts_with("calls=") {
            // The next line contains the inclusive cost of the callee.
            lines.next();
        } else if let Some(number) = line.strip_prefix("totals: ") {
            total = Some(number.trim().parse::<u64>()?);
        } else if line.starts_with(|c: char| c.is_ascii_digit() || "+-*".contains(c)) {
            // A position (absolute or relative) and one cost, as only `Ir` is counted; a missing cost is 0.
            let cost = line.split_whitespace().nth(1).map_or(Ok(0), str::parse::<u64>)?;
            *costs.entry(object.to_owned()).or_default() += cost;
        }
    }
    let total = total.ok_or("there is no line with totals")?;
    let sum: u64 = costs.values().sum();
    if sum != total {
        return Err(format!("costs add up to {sum}, not to the total of {total}").into());
    }
    Ok(costs)
}

/// `(3) name` defines a name, `(3)` repeats it.
fn resolve<'a>(text: &'a str, names: &mut BTreeMap<&'a str, &'a str>) -> &'a str {
    match text.split_once(' ') {
        Some((id, name)) if id.starts_with('(') => {
            names.insert(id, name);
            name
        }
        _ => names.get(text).copied().unwrap_or(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUMP: &str = "\
# callgrind format
version: 1
positions: line
events: Ir
summary: 130

ob=(1) /bin/program
fl=(1) main.rs
fn=(1) region
10 20
+2 5
cob=(2) /lib/libc.so.6
cfn=(2) memcpy
calls=3 0
* 35
-1 70

ob=(2)
fn=(2)
0 30
0 5

totals: 130
";

    #[test]
    fn instructions_are_counted_for_the_object_that_executes_them() {
        let costs = costs_by_object(DUMP).unwrap();
        assert_eq!(costs["/bin/program"], 95);
        assert_eq!(costs["/lib/libc.so.6"], 35);
    }

    #[test]
    fn an_inconsistent_dump_is_refused() {
        let error = costs_by_object(&DUMP.replace("totals: 130", "totals: 131")).unwrap_err().to_string();
        assert!(error.contains("130") && error.contains("131"), "{error}");
        assert!(costs_by_object("events: Ir\n").is_err());
    }

    #[test]
    fn counts_are_rounded_to_whole_instructions_per_call() {
        assert_eq!(per_call(52_011, 2000), 26);
        assert_eq!(per_call(53_000, 2000), 27);
    }
}
