//! A started subject with its helpers, and measurements of it under load. Dropping the session stops
//! everything.
//!
//! ```text
//! workload   ├─ set-up ─┬─ warm-up ─┬──────────── its own measured time ────────────┬─┤
//! counters                            ├────────────── our window ──────────────┤
//! ```

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use super::{
    ready,
    result::{self, WorkloadResult},
    run_failure::RunFailure,
    stage::{MeasuredWindow, RunStage},
};
use crate::{
    error::LabError,
    experiment::{Experiment, ResultFormat, ServiceSpec, fill::Variables},
    metric,
    probe::{
        CounterReading, CounterScope, cpu,
        hardware::{self, Counting},
        syscalls::{ATTACH, Tracing},
    },
    program::{self, ChildProgram, Launch},
    record::{Round, Syscall},
};

const FLOWING: u64 = 20;
const LOOK: Duration = Duration::from_millis(10);
const SATURATED: f64 = 0.97;

pub(crate) struct SubjectSession<'a> {
    stage: &'a RunStage,
    pub(crate) subject: String,
    variables: Variables,
    // Fields are dropped in order, so the subject is stopped before the programs that it depends on.
    nodes: Vec<ChildProgram>,
    helpers: Vec<ChildProgram>,
    pub(crate) scope: CounterScope,
    memory_at_start: u64,
    has_worked: bool,
}

impl RunStage {
    pub(crate) fn start(&self, subject: &ServiceSpec) -> Result<SubjectSession<'_>, RunFailure> {
        let mut scope = CounterScope::new(&self.topology)?;
        scope.delivered_at.clone_from(&self.experiment.workload.delivered_at);
        let mut helpers = Vec::new();
        for helper in &self.experiment.helper {
            for process in helper.processes(&self.variables)? {
                let launched = self.launch(&process).map_err(|halt| match halt {
                    RunFailure::NotReady(how) => RunFailure::HelperNotReady(how),
                    other => other,
                })?;
                scope.add_helper(&process.name, launched.pid());
                helpers.push(launched);
            }
        }
        let mut nodes = Vec::new();
        for process in subject.processes(&self.variables)? {
            let launched = self.launch(&process)?;
            scope.add_node(&process, launched.pid(), &self.topology)?;
            nodes.push(launched);
        }
        let variables = subject.scope(&self.variables)?;
        let mut session = SubjectSession {
            stage: self,
            subject: subject.name.clone(),
            variables,
            nodes,
            helpers,
            scope,
            memory_at_start: 0,
            has_worked: false,
        };
        session.memory_at_start = session.memory();
        Ok(session)
    }

    fn launch(&self, service: &ServiceSpec) -> Result<ChildProgram, RunFailure> {
        for (name, content) in &service.files {
            let path = self.scratch.join(name);
            fs::write(&path, content).map_err(LabError::io(format!("cannot write {}", path.display())))?;
        }
        let log = self.log(&service.name);
        // Remove the old log, in which a line from the previous run could be taken as a sign of readiness.
        let _ = fs::remove_file(&log);
        let mut program = ChildProgram::start(&Launch {
            name: service.name.clone(),
            entry: self.topology.entry(service.namespace.as_deref())?,
            command: service.command.words()?,
            environment: service.env.clone().into_iter().collect(),
            cpus: service.cpus.clone(),
            mark: self.topology.id().to_owned(),
            log: log.clone(),
            output: None,
        })?;
        ready::wait(service, &mut program, &self.topology, &log, &self.stop)?;
        Ok(program)
    }

    fn log(&self, name: &str) -> PathBuf {
        self.scratch.join(format!("{name}.log"))
    }
}

impl SubjectSession<'_> {
    /// Runs the first load after a start and discards its result, because it fills caches, faults in memory and resolves neighbours.
    pub(crate) fn discard_first(&mut self) -> Result<(), RunFailure> {
        let seconds = self.stage.experiment.discard;
        if seconds == 0.0 {
            return Ok(());
        }
        let mut variables = self.variables.clone();
        // Subtract the second that `set_window` adds.
        variables.set_window(0.0, (seconds - 1.0).max(0.0));
        self.has_worked = true;
        let (mut workload, _) = self.start_workload(&variables)?;
        if self.is_ended_by_us() {
            return self.pass(Duration::from_secs_f64(seconds), &mut workload);
        }
        self.await_end(&mut workload, seconds)
    }

    fn is_ended_by_us(&self) -> bool {
        let workload = &self.stage.experiment.workload;
        workload.format == ResultFormat::None && !workload.whole
    }

    pub(crate) fn measure(
        &mut self,
        window: MeasuredWindow,
        adjust: impl FnOnce(&mut Variables),
        round: &mut Round,
    ) -> Result<WorkloadResult, RunFailure> {
        self.measure_with(window, adjust, round, |_| Ok(()), |()| {})
    }

    pub(crate) fn trace(&mut self, window: MeasuredWindow) -> Result<Option<Vec<Syscall>>, RunFailure> {
        let mark = self.stage.topology.id().to_owned();
        let directory = self.stage.scratch.clone();
        let mut table = None;
        let mut round = Round::new(0, "", 0);
        self.measure_with(
            window,
            |variables| prolong(variables, window),
            &mut round,
            |pids| Ok(Tracing::start(pids, &mark, &directory)?),
            |tracing| table = tracing.map(Tracing::finish),
        )?;
        Ok(table)
    }

    pub(crate) fn measure_with<T>(
        &mut self,
        window: MeasuredWindow,
        adjust: impl FnOnce(&mut Variables),
        round: &mut Round,
        attach: impl FnOnce(&[u32]) -> Result<T, RunFailure>,
        detach: impl FnOnce(T),
    ) -> Result<WorkloadResult, RunFailure> {
        let stage = self.stage;
        let mut variables = self.variables.clone();
        variables.set_window(window.warmup, window.duration);
        adjust(&mut variables);
        self.rest()?;
        let whole = stage.experiment.workload.whole;
        let before = if whole { Some(CounterReading::take(&self.scope, u32::MAX)?) } else { None };

        let (mut workload, result) = self.start_workload(&variables)?;
        let opened = match before {
            Some(before) => before,
            None => {
                self.await_flow(&mut workload)?;
                self.pass(Duration::from_secs_f64(window.warmup), &mut workload)?;
                CounterReading::take(&self.scope, workload.pid())?
            }
        };
        let counting = if stage.hardware {
            Some(Counting::start(&self.pids(), stage.topology.id(), &stage.scratch)?)
        } else {
            None
        };
        let spent = opened.taken.elapsed();
        let attached = attach(&self.pids())?;
        // The tracer stays attached for the full duration, because the workload runs longer to make up for the time that attaching takes.
        if whole {
            self.await_end(&mut workload, window.warmup + window.duration)?;
        } else {
            let rest = Duration::from_secs_f64(window.duration).saturating_sub(spent);
            self.pass(rest, &mut workload)?;
        }
        let closed = CounterReading::take(&self.scope, workload.pid())?;
        // Memory is read after the window, because counting the subject's pages stalls the subject.
        let memory = self.memory();
        detach(attached);
        match counting {
            Some(counting) => round.metrics.extend(counting.finish()),
            None => round.not_supported.extend(hardware::EVENTS.iter().map(|(_, name)| (*name).to_owned())),
        }
        closed.since(&opened, &self.scope, round);
        if self.is_ended_by_us() {
            drop(workload);
        } else if !whole {
            self.await_end(&mut workload, window.warmup + window.duration)?;
        }
        self.check_alive()?;
        let elapsed = round.metrics.get("elapsed_s").copied().unwrap_or(window.duration);
        let outcome = read_result(&stage.experiment, &result).map_err(RunFailure::Other)?;
        outcome.clone().complete(elapsed, round);
        round.metrics.insert(metric::MEMORY_BYTES.to_owned(), memory as f64);
        // If a first run was discarded, its memory is still in use, so growth per client cannot be measured.
        if let Some(clients) =
            outcome.clients.filter(|clients| *clients > 0 && stage.experiment.discard == 0.0)
        {
            let grown = memory.saturating_sub(self.memory_at_start) as f64 / clients as f64;
            round.metrics.insert(metric::MEMORY_PER_CLIENT_BYTES.to_owned(), grown);
        }
        caveats(round, elapsed);
        Ok(outcome)
    }

    fn pids(&self) -> Vec<u32> {
        self.nodes.iter().flat_map(|node| program::group(node.pid())).collect()
    }

    fn memory(&self) -> u64 {
        self.nodes.iter().map(|node| cpu::memory(node.pid())).sum()
    }

    fn rest(&mut self) -> Result<(), RunFailure> {
        let until = Instant::now() + Duration::from_secs_f64(self.stage.experiment.workload.rest);
        while self.has_worked && Instant::now() < until {
            if self.stage.stop.requested() {
                return Err(RunFailure::Interrupted);
            }
            self.check_alive()?;
            thread::sleep(LOOK);
        }
        self.has_worked = true;
        Ok(())
    }

    fn start_workload(&self, variables: &Variables) -> Result<(ChildProgram, PathBuf), RunFailure> {
        let stage = self.stage;
        let workload = &stage.experiment.workload;
        let on_stdout = workload.result == "stdout";
        let result = if on_stdout {
            stage.scratch.join("workload.out")
        } else {
            PathBuf::from(variables.text(&workload.result)?)
        };
        // Remove the old result, which could be taken for the result of this run.
        let _ = fs::remove_file(&result);
        let mut environment = Vec::new();
        for (name, value) in &workload.env {
            environment.push((name.clone(), variables.text(value)?));
        }
        let mut program = ChildProgram::start(&Launch {
            name: "the workload".to_owned(),
            entry: stage.topology.entry(workload.namespace.as_deref())?,
            command: variables.command(&workload.command)?,
            environment,
            cpus: workload.cpus.clone(),
            mark: stage.topology.id().to_owned(),
            log: stage.log("workload"),
            output: on_stdout.then(|| result.clone()),
        })?;
        program.settle(Duration::from_secs(5));
        Ok((program, result))
    }

    /// Waits for the workload's traffic. Returns immediately on the host, which also has other traffic.
    fn await_flow(&mut self, workload: &mut ChildProgram) -> Result<(), RunFailure> {
        let patience = self.stage.experiment.workload.patience;
        let deadline = Instant::now() + Duration::from_secs_f64(patience);
        let Some(start) = self.scope.arrived()? else { return Ok(()) };
        loop {
            let arrived = self.scope.arrived()?.unwrap_or(start).saturating_sub(start);
            // When the deadline has passed, even a trickle counts as traffic.
            if arrived >= FLOWING || (arrived > 0 && Instant::now() > deadline) {
                return Ok(());
            }
            self.look(workload)?;
            if Instant::now() > deadline {
                return Err(RunFailure::Other(format!("no traffic arrived within {patience} s")));
            }
            thread::sleep(LOOK);
        }
    }

    fn pass(&mut self, time: Duration, workload: &mut ChildProgram) -> Result<(), RunFailure> {
        let until = Instant::now() + time;
        loop {
            self.look(workload)?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(LOOK));
        }
    }

    fn look(&mut self, workload: &mut ChildProgram) -> Result<(), RunFailure> {
        if self.stage.stop.requested() {
            return Err(RunFailure::Interrupted);
        }
        self.check_alive()?;
        match workload.ended() {
            // If the subject has exited too, that is why the workload ended.
            Some(_) => {
                thread::sleep(LOOK);
                self.check_alive()?;
                Err(RunFailure::Other(format!(
                    "{} before the end of the measurement",
                    workload.exit_report()
                )))
            }
            None => Ok(()),
        }
    }

    fn check_alive(&mut self) -> Result<(), RunFailure> {
        let exit_report = |programs: &mut [ChildProgram]| {
            programs.iter_mut().find_map(|program| program.ended().is_some().then(|| program.exit_report()))
        };
        if let Some(exit_report) = exit_report(&mut self.nodes) {
            return Err(RunFailure::Subject(format!("under load, {exit_report}")));
        }
        match exit_report(&mut self.helpers) {
            Some(exit_report) => Err(RunFailure::Other(format!("helper {exit_report}"))),
            None => Ok(()),
        }
    }

    fn await_end(&mut self, workload: &mut ChildProgram, expected: f64) -> Result<(), RunFailure> {
        let stop = self.stage.stop.clone();
        let patience = self.stage.experiment.workload.patience;
        let deadline = Instant::now() + Duration::from_secs_f64(expected + patience);
        let ended = loop {
            let ended = workload.wait(Instant::now() + 10 * LOOK, || stop.requested());
            if stop.requested() {
                return Err(RunFailure::Interrupted);
            }
            self.check_alive()?;
            if ended.is_some() || Instant::now() > deadline {
                break ended;
            }
        };
        match ended {
            Some(status) if status.success() => Ok(()),
            Some(_) => Err(RunFailure::Other(workload.exit_report())),
            None => Err(RunFailure::Other(format!(
                "the workload was still running {patience} s after it should have ended"
            ))),
        }
    }
}

/// Extends the time that the workload runs, because a tracer needs time to attach.
pub(crate) fn prolong(variables: &mut Variables, window: MeasuredWindow) {
    variables.set_window(window.warmup, window.duration + ATTACH.as_secs_f64());
}

fn read_result(experiment: &Experiment, path: &Path) -> Result<WorkloadResult, String> {
    if experiment.workload.format == ResultFormat::None {
        return Ok(WorkloadResult::default());
    }
    let text = fs::read_to_string(path).map_err(|error| format!("the workload wrote no result: {error}"))?;
    result::read(&experiment.workload, &text)
}

fn caveats(round: &mut Round, elapsed: f64) {
    // This is only a note, because a multi-threaded generator might not have reached its limit.
    if round.metrics.get("generator_cpu_s").is_some_and(|spent| *spent > SATURATED * elapsed) {
        round.notes.push("the generator used a whole CPU and may have limited the subject".to_owned());
    }
}
