//! What is remembered of a target, `fuzz/NAME/`: inputs in hex, one a line. `captured.hex` is from real clients, `found.hex` what
//! fuzzing has found to go where nothing else goes, `faults.hex` what has once made the target fail.

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

/// Bytes of all that `found.hex` has. It is in everybody's clone.
const MOST_FOUND: usize = 48 * 1024;

/// The inputs of a file, of which there may be none.
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

/// Replaces a file; one without inputs is none.
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

/// Adds an input that has made a target fail, with what it said.
pub(super) fn add_fault(file: &Path, why: &str, input: &[u8]) -> Result<(), Failure> {
    if read(file)?.iter().any(|known| known == input) {
        return Ok(());
    }
    fs::create_dir_all(file.parent().ok_or("a file has a directory")?)?;
    let mut file = fs::File::options().append(true).create(true).open(file)?;
    Ok(writeln!(file, "# {}\n{}", why.replace('\n', " "), hex::encode(input))?)
}

/// All that a target remembers, its own seeds first, as files of a directory. `None` where the test skips itself.
pub(super) fn unpack(
    places: &Places,
    target: &Target,
    program: &Path,
    directory: &Path,
) -> Result<Option<usize>, Failure> {
    fs::create_dir_all(directory)?;
    let Some(seeds) = seeds(places, target, program)? else { return Ok(None) };
    let memory = places.memory(target);
    let mut all = seeds;
    for file in [CAPTURED, FOUND, FAULTS] {
        all.extend(read(&memory.join(file))?);
    }
    for (number, input) in all.iter().enumerate() {
        fs::write(directory.join(format!("known-{number:05}")), input)?;
    }
    Ok(Some(all.len()))
}

/// The seeds that a target makes itself.
fn seeds(places: &Places, target: &Target, program: &Path) -> Result<Option<Vec<Vec<u8>>>, Failure> {
    let scratch = places.scratch(target)?;
    let file = scratch.join("seeds.hex");
    let _ = fs::remove_file(&file);
    let output = command(target, program, &scratch).env("TURNPIKE_FUZZ_SEEDS", &file).output()?;
    if !output.status.success() {
        return Err(
            format!("{} writes no seeds: {}", target.name, String::from_utf8_lossy(&output.stderr)).into()
        );
    }
    if file.exists() { read(&file).map(Some) } else { Ok(None) }
}

/// Keeps in `found.hex` those of these files that go where nothing before them goes and nothing else that is remembered goes; the
/// smallest, where they are too many. How many.
pub(super) fn keep(places: &Places, target: &Target, files: &[PathBuf]) -> Result<usize, Failure> {
    let memory = places.memory(target);
    let mut known: BTreeSet<Vec<u8>> = read(&memory.join(CAPTURED))?.into_iter().collect();
    known.extend(read(&memory.join(FAULTS))?);
    known.extend(read(&places.scratch(target)?.join("seeds.hex"))?);
    let mut found = BTreeSet::new();
    for file in files {
        let input = fs::read(file)?;
        if !known.contains(&input) {
            found.insert((input.len(), input));
        }
    }
    let mut room = MOST_FOUND;
    let kept = found.into_iter().map(|(_, input)| input).take_while(|input| {
        let fits = input.len() <= room;
        room = room.saturating_sub(input.len());
        fits
    });
    let kept: Vec<_> = kept.collect();
    write(&memory.join(FOUND), &kept)?;
    Ok(kept.len())
}
