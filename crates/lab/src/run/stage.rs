//! State shared by comparisons, sweeps and profiles: topology, directories, console and machine description.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    builds, certificate,
    console::Console,
    environment,
    error::LabError,
    experiment::{Experiment, fill::Variables},
    probe::hardware,
    record::{self, RunRecord},
    request::RunRequest,
    stop::StopFlag,
    topology::{Topology, spec::Spec, userns},
};

pub(crate) struct RunStage {
    pub(crate) experiment: Experiment,
    pub(crate) topology: Topology,
    pub(crate) variables: Variables,
    pub(crate) directory: PathBuf,
    pub(crate) scratch: PathBuf,
    pub(crate) hardware: bool,
    pub(super) traces_syscalls: bool,
    left_out: Vec<String>,
    pub(crate) stop: StopFlag,
    pub(crate) console: Console,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct MeasuredWindow {
    pub(crate) warmup: f64,
    pub(crate) duration: f64,
}

impl RunStage {
    /// Validates the request before any program is started, then creates the topology, and directories below `base`.
    pub(crate) fn set(request: &RunRequest, base: &Path, stop: &StopFlag) -> Result<Self, LabError> {
        let mut experiment = request.experiment()?;
        let spec = experiment.topology()?;
        if spec.is_some() {
            userns::enter_if_needed()?;
        }
        let addresses = spec.as_ref().map(Spec::addresses).unwrap_or_default();
        let nowhere = experiment.variables(&addresses, &request.point, Path::new("."));
        let left_out = experiment.drop_missing_subjects(&nowhere);
        if experiment.subject.is_empty() {
            return Err(LabError::usage(left_out.join("\n")));
        }
        experiment.check_tools(&nowhere)?;
        // Enough for the sockets of 10,000 allocations or 5,000 forwarded connections. Programs inherit the
        // limit.
        turnpike_net::rlimit::raise_open_files(1 << 20);
        let topology = Topology::for_run(spec.as_ref())?;
        let directory = request.make_directory(base, &experiment)?;
        let scratch = directory.join("runs");
        let variables = experiment.variables(&addresses, &request.point, &scratch);
        fs::create_dir_all(&scratch).map_err(LabError::io(format!("cannot create {}", scratch.display())))?;
        if experiment.wants_certificate() {
            certificate::make(&scratch, addresses.into_values())?;
        }
        request.save(&directory)?;
        let hardware = experiment.counters && hardware::supported();
        Ok(Self {
            traces_syscalls: request.changes.syscalls,
            stop: stop.clone(),
            console: Console::new(),
            experiment,
            topology,
            variables,
            directory,
            scratch,
            hardware,
            left_out,
        })
    }

    pub(crate) fn window(&self) -> MeasuredWindow {
        MeasuredWindow { warmup: self.experiment.warmup, duration: self.experiment.duration }
    }

    /// Saves the record, with notes on files that have changed, or removes its directory if nothing was measured.
    pub(crate) fn keep(&self, record: &mut RunRecord, is_measured: bool) -> Result<(), LabError> {
        if is_measured {
            for told in builds::changes_since(&record.programs) {
                let note = format!("a file changed during the experiment: {told}");
                self.console.note(&format!("warning: {note}"));
                record.environment.notes.push(note);
            }
            record.save(&self.directory)?;
        } else {
            self.remove_directory();
        }
        self.console.done();
        Ok(())
    }

    pub(crate) fn remove_directory(&self) {
        // Errors are ignored: the caller reports why there is no record.
        let _ = fs::remove_dir_all(&self.directory);
        if let Some(base) = self.directory.parent() {
            let _ = fs::remove_dir(base);
        }
    }

    pub(crate) fn record(&self, request: &RunRequest) -> Result<RunRecord, LabError> {
        let experiment = &self.experiment;
        let mut subjects = Vec::new();
        for service in &experiment.subject {
            subjects.push(service.describe(&self.variables)?);
        }
        let mut environment = environment::describe(experiment, &self.topology, &self.variables);
        if !experiment.about.is_empty() {
            environment.notes.insert(0, experiment.about.clone());
        }
        for note in &self.left_out {
            self.console.note(note);
            environment.notes.push(note.clone());
        }
        let programs = builds::identify(experiment, &self.variables, &environment.tools);
        if let Some(then) = &request.repeats {
            for note in builds::changes_since(then) {
                self.console.note(&format!("warning: {note}"));
                environment.notes.push(note);
            }
        }
        let id =
            self.directory.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Ok(RunRecord {
            format: record::FORMAT,
            id,
            started: environment::now(),
            command: request.command.clone(),
            seed: request.seed,
            environment,
            experiment: record::RecordedExperiment {
                name: experiment.name.clone(),
                subjects,
                workload: self.workload_in_words(request)?,
                load_cpus: experiment.workload.cpus.clone(),
                metric: experiment.metric.clone(),
                rounds: experiment.rounds,
                duration_s: experiment.duration,
                warmup_s: experiment.warmup,
                rules: experiment.rules,
                limits: experiment.limits,
                must: experiment.must.clone(),
                aim: experiment.aim.clone(),
            },
            programs,
            ..RunRecord::default()
        })
    }

    /// Describes the workload; the text is the same for equal workloads, regardless of paths and builds.
    fn workload_in_words(&self, request: &RunRequest) -> Result<String, LabError> {
        let mut command = self.experiment.workload.command.words()?;
        for word in &mut command {
            for (name, value) in &request.point {
                *word = word.replace(&format!("{{{name}}}"), value);
            }
        }
        Ok(format!("{} [{}]", command.join(" "), self.experiment.topology))
    }
}
