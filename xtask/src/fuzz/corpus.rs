//! Committed inputs of a target, `fuzz/NAME/`, in hex with one input per line. `captured.hex` comes from real clients, `found.hex` has
//! inputs that reached new code, and `faults.hex` has inputs that once made the target fail.

use std::{
    collections::BTreeSet,
    fs,
    io::{ErrorKind, Write as _},
    path::{Path, PathBuf},
};

use super::{
    program::{Places, command},
    targets::Target,
};
use crate::Failure;

pub(super) const CAPTURED: &str = "captured.hex";
pub(super) const FOUND: &str = "found.hex";
pub(super) const FAULTS: &str = "faults.hex";
const SEEDS: &str = "seeds.hex";

/// Maximum size of `found.hex` in bytes; limited because the file is committed.
const MOST_FOUND: usize = 48 * 1024;

pub(super) fn read(file: &Path) -> Result<Vec<Vec<u8>>, Failure> {
    let text = match fs::read_to_string(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(|error| format!("{}: {error}", file.display()))?,
    };
    let inputs = text.lines().filter(|line| !line.starts_with('#'));
    inputs
        .map(|line| hex::decode(line).map_err(|error| format!("{}: {line}: {error}", file.display()).into()))
        .collect()
}

pub(super) fn write(file: &Path, inputs: &[Vec<u8>]) -> Result<(), Failure> {
    if inputs.is_empty() {
        return match fs::remove_file(file) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        };
    }
    fs::create_dir_all(file.parent().ok_or("a file has a directory")?)?;
    let lines: String = inputs.iter().map(|input| hex::encode(input) + "\n").collect();
    Ok(fs::write(file, lines)?)
}

pub(super) fn add_fault(file: &Path, why: &str, input: &[u8]) -> Result<(), Failure> {
    if read(file)?.iter().any(|known| known == input) {
        return Ok(());
    }
    fs::create_dir_all(file.parent().ok_or("a file has a directory")?)?;
    let mut file = fs::File::options().append(true).create(true).open(file)?;
    Ok(writeln!(file, "# {}\n{}", why.replace('\n', " "), hex::encode(input))?)
}

/// Replaces the contents of a directory with all inputs of a target, its own seeds first. Returns their number, or `None` if the test is
/// skipped.
pub(super) fn unpack(
    places: &Places,
    target: &Target,
    program: &Path,
    directory: &str,
) -> Result<Option<usize>, Failure> {
    let Some(seeds) = seeds(places, target, program)? else { return Ok(None) };
    let (scratch, memory) = (places.scratch(target)?, places.memory(target));
    let directory = scratch.join(directory);
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory)?;
    let remembered = [CAPTURED, FAULTS, FOUND].map(|file| (file, read(&memory.join(file))));
    let mut count = 0;
    for (from, inputs) in [(SEEDS, Ok(seeds))].into_iter().chain(remembered) {
        for (number, input) in inputs?.iter().enumerate() {
            fs::write(directory.join(format!("{from}-{number:05}")), input)?;
            count += 1;
        }
    }
    Ok(Some(count))
}

/// Copies the seeds and all committed inputs except those of `found.hex`.
pub(super) fn copy_given(from: &Path, to: &Path) -> Result<(), Failure> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if !entry.file_name().to_string_lossy().starts_with(FOUND) {
            fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

fn seeds(places: &Places, target: &Target, program: &Path) -> Result<Option<Vec<Vec<u8>>>, Failure> {
    let scratch = places.scratch(target)?;
    let file = scratch.join(SEEDS);
    let _ = fs::remove_file(&file);
    let output = command(target, program, &scratch).env("TURNPIKE_FUZZ_SEEDS", &file).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() || !said.contains("1 passed") {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{} has not written its seeds: {said}{why}", target.name).into());
    }
    if file.exists() { read(&file).map(Some) } else { Ok(None) }
}

/// Writes these files to `found.hex`, or only the smallest ones if there are too many; returns the number written.
pub(super) fn keep(places: &Places, target: &Target, files: &[PathBuf]) -> Result<usize, Failure> {
    let inputs = files.iter().map(fs::read).collect::<Result<Vec<_>, _>>()?;
    let sorted: BTreeSet<_> = inputs.into_iter().map(|input| (input.len(), input)).collect();
    let mut bytes = 0;
    let kept = sorted.into_iter().map(|(_, input)| input).take_while(|input| {
        bytes += input.len();
        bytes <= MOST_FOUND
    });
    let kept: Vec<_> = kept.collect();
    write(&places.memory(target).join(FOUND), &kept)?;
    Ok(kept.len())
}
