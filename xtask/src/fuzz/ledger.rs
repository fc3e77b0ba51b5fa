//! `fuzz/ledger.toml`: total cost of fuzzing by target. Every run adds to it.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Seek as _, Write as _},
    path::Path,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::Failure;

const HEAD: &str =
    "# CPU seconds and executions spent on fuzzing so far, by target. Written by `cargo xtask fuzz`.\n\n";

pub(super) type Ledger = BTreeMap<String, Spent>;

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Spent {
    pub(super) cpu_seconds: u64,
    pub(super) executions: u64,
}

pub(super) fn load(file: &Path) -> Result<Ledger, Failure> {
    if !file.exists() {
        return Ok(Ledger::new());
    }
    Ok(toml::from_str(&fs::read_to_string(file)?)?)
}

/// Adds the cost of a run; safe with concurrent runs.
pub(super) fn add(file: &Path, target: &str, cpu: Duration, executions: u64) -> Result<(), Failure> {
    fs::create_dir_all(file.parent().ok_or("a file has a directory")?)?;
    let mut file = fs::File::options().read(true).write(true).create(true).truncate(false).open(file)?;
    file.lock()?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    let mut ledger: Ledger = toml::from_str(&text)?;
    let spent = ledger.entry(target.to_owned()).or_default();
    spent.cpu_seconds += cpu.as_secs();
    spent.executions += executions;
    file.set_len(0)?;
    file.rewind()?;
    Ok(write!(file, "{HEAD}{}", toml::to_string(&ledger)?)?)
}

/// CPU time of all children that have been waited for and their descendants (proc_pid_stat(5)).
pub(super) fn children_cpu() -> Result<Duration, Failure> {
    /// Unit of these times: Linux uses hundredths of a second on every machine.
    const TICK: Duration = Duration::from_millis(10);
    let stat = fs::read_to_string("/proc/self/stat")?;
    // The third field is the first after the name, which may contain spaces.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3).and_then(|text| text.parse::<u32>().ok());
    let (Some(user), Some(system)) = (field(16), field(17)) else {
        return Err("/proc/self/stat does not contain the CPU time of children".into());
    };
    Ok(TICK * (user + system))
}
