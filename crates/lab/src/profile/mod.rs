//! Profiles: a flame graph of the subject under load, its hottest symbols in user space and in the kernel, and its syscalls. Complete
//! stacks need a subject built with frame pointers (`cargo profiling`).

mod folded;

use std::{fs, path::Path};

use inferno::{
    collapse::{Collapse, perf},
    differential, flamegraph,
};

pub(crate) use self::folded::FoldedStacks;
use crate::{
    console,
    error::LabError,
    probe::syscalls,
    program::ChildProgram,
    record::{Round, RunRecord, write_whole},
    request::RunRequest,
    run::{run_failure::RunFailure, session::prolong, stage::RunStage},
    tools::{self, words},
};

/// Samples per second. A prime, so that sampling does not run in step with periodic timers.
const FREQUENCY: u32 = 997;
const ROWS: usize = 20;

const STACKS: &str = "stacks.folded";
const FLAME: &str = "flame.svg";

pub(crate) fn profile(request: &RunRequest, stage: &RunStage) -> Result<RunRecord, LabError> {
    tools::require("perf", "to take a profile")?;
    let mut kept = stage.record(request)?;
    kept.experiment.rounds = 1;
    let service = stage
        .experiment
        .subject
        .first()
        .ok_or_else(|| LabError::usage("nothing to profile: give the command before `--`"))?;
    let data = stage.scratch.join("perf.data");
    let mark = stage.topology.id().to_owned();
    let mut round = Round::new(0, &service.name, 0);
    stage.console.note(&format!("profiling {} for {} s", service.name, stage.experiment.duration));
    let recorded = stage.start(service).and_then(|mut session| {
        session.discard_first()?;
        session.measure_with(
            stage.window(),
            |variables| prolong(variables, stage.window()),
            &mut round,
            |pids| Ok(record(pids, &mark, &data, &stage.scratch)?),
            ChildProgram::detach,
        )
    });
    recorded.map_err(RunFailure::into_error)?;
    let folded = fold(&data)?;
    let stacks = FoldedStacks::parse(&folded);
    if stacks.samples() == 0 {
        return Err(LabError::failed(
            "perf took no samples: check that the subject is under load and that kernel.perf_event_paranoid is at most 2",
        ));
    }
    write_whole(&stage.directory.join(STACKS), folded.as_bytes())?;
    let title = format!("{}, {} samples", service.name, stacks.samples());
    write_whole(&stage.directory.join(FLAME), flame(&folded, &title)?.as_bytes())?;

    stage.console.note("syscalls");
    let traced = stage.start(service).and_then(|mut session| {
        session.discard_first()?;
        session.trace(stage.window())
    });
    let table = match traced {
        Ok(Some(table)) => {
            let text = syscalls::describe(&table, ROWS);
            kept.syscalls.insert(service.name.clone(), table);
            text
        }
        Ok(None) => "not supported, because strace is not installed\n".to_owned(),
        Err(halt) => format!("not measured: {}\n", halt.into_error()),
    };
    let text = format!("{}\nsyscalls\n{table}", stacks.describe(ROWS));
    write_whole(&stage.directory.join("profile.txt"), text.as_bytes())?;
    kept.profiles.insert(service.name.clone(), stacks.profile(2 * ROWS));
    round.notes.push("measured while perf was sampling".to_owned());
    round.voided = kept.experiment.limits.check(&round.metrics);
    kept.rounds.push(round);
    kept.save(&stage.directory)?;
    stage.console.done();
    console::result(&format!("{text}\nflame graph: {}", stage.directory.join(FLAME).display()));
    Ok(kept)
}

pub(crate) fn diff(before: &Path, after: &Path, out: &Path) -> Result<(), LabError> {
    let read = |directory: &Path| {
        let path = directory.join(STACKS);
        fs::read_to_string(&path).map_err(|error| {
            LabError::usage(format!(
                "cannot read {}: {error}: give a directory written by `lab profile`",
                path.display()
            ))
        })
    };
    let (old, new) = (read(before)?, read(after)?);
    let mut stacks = Vec::new();
    // Counts are normalised, because the profiles may differ in duration.
    let options = differential::Options { normalize: true, strip_hex: true };
    differential::from_readers(options, old.as_bytes(), new.as_bytes(), &mut stacks)
        .map_err(LabError::io("cannot compare the stacks"))?;
    let stacks = String::from_utf8_lossy(&stacks);
    let title = format!("{} to {}", before.display(), after.display());
    write_whole(out, flame(&stacks, &title)?.as_bytes())?;
    let table = FoldedStacks::parse(&old).compare(&FoldedStacks::parse(&new), ROWS);
    console::result(&format!("{table}\nflame graph of the difference: {}", out.display()));
    Ok(())
}

fn record(pids: &[u32], mark: &str, data: &Path, directory: &Path) -> Result<ChildProgram, LabError> {
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    let hardware = crate::probe::hardware::supported();
    // Use hardware cycles if possible, because samples taken by the kernel's timer miss code that runs with interrupts disabled.
    let event = if hardware { "cycles" } else { "cpu-clock" };
    let fixed = format!("perf record -q -F {FREQUENCY} -e {event} --call-graph fp -p {} -o", pids.join(","));
    let mut command = words(fixed.split(' '));
    command.push(data.display().to_string());
    let mut perf = ChildProgram::attach("perf record", command, mark, directory.join("perf-record.log"))?;
    perf.await_counters(syscalls::ATTACH);
    Ok(perf)
}

fn fold(data: &Path) -> Result<String, LabError> {
    // The period field is left out, so that every sample counts as one. With it, samples of software clocks would count as nanoseconds.
    let fields = "comm,pid,tid,time,event,ip,sym,dso";
    let script = tools::output(["perf", "script", "-F", fields, "-i", &data.display().to_string()])?;
    let mut options = perf::Options::default();
    options.annotate_kernel = true;
    let mut folded = Vec::new();
    perf::Folder::from(options)
        .collapse(script.as_bytes(), &mut folded)
        .map_err(LabError::io("cannot fold the stacks"))?;
    Ok(String::from_utf8_lossy(&folded).into_owned())
}

fn flame(folded: &str, title: &str) -> Result<String, LabError> {
    let mut options = flamegraph::Options::default();
    options.title = title.to_owned();
    let mut svg = Vec::new();
    flamegraph::from_reader(&mut options, folded.as_bytes(), &mut svg)
        .map_err(LabError::io("cannot draw the flame graph"))?;
    Ok(String::from_utf8_lossy(&svg).into_owned())
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::Dir;

    use super::*;

    const OLD: &str = "relay;main;route 60\nrelay;main;sys_sendmsg_[k];ip_output_[k] 40\n";
    const NEW: &str = "relay;main;route 60\nrelay;main;sys_sendmmsg_[k];ip_output_[k] 10\n";

    #[test]
    fn stacks_become_a_flame_graph() {
        let svg = flame(OLD, "relay, 100 samples").unwrap();
        assert!(svg.contains("<svg") && svg.contains("ip_output") && svg.contains("relay, 100 samples"));
    }

    #[test]
    fn two_profiles_become_a_differential_graph() {
        let directory = Dir::new();
        let (before, after) = (directory.at("a"), directory.at("b"));
        for (path, stacks) in [(&before, OLD), (&after, NEW)] {
            fs::create_dir(path).unwrap();
            fs::write(path.join(STACKS), stacks).unwrap();
        }
        let out = directory.at("diff.svg");
        diff(&before, &after, &out).unwrap();
        assert!(fs::read_to_string(out).unwrap().contains("sys_sendmmsg"));
        let error = diff(&before, &directory.at("none"), &directory.at("x")).unwrap_err();
        assert_eq!(error.exit_code(), 2);
    }
}
