//! The old process's side of an upgrade.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    process::Child,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use turnpike_worker::Channel;

use super::{
    handover::{HandoverOffer, HandoverState},
    program::ProgramFile,
    protocol::{FromNew, FromOld, PROTOCOL},
};
use crate::{exposition::MetricsPage, service_manager};

/// Interval between checks for a cancelled upgrade.
const LOOK: Duration = Duration::from_millis(100);
/// Time to wait for a process that has closed its end of the channel to give a reason or exit.
const LAST_WORDS: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Time limit for the new process to start up and prepare.
    pub(crate) prepare: Duration,
    /// Time limit for each step while the workers are paused.
    pub(crate) take: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { prepare: Duration::from_secs(30), take: Duration::from_secs(5) }
    }
}

/// The new process, which is killed if this is dropped before it serves.
#[derive(Debug)]
pub(crate) struct Successor {
    channel: Channel,
    child: Child,
    serves: bool,
    is_gone: bool,
}

/// Hands over to a new process of `program`; returns that process and a summary. Calls `step` with a line for
/// each step. If there is an error, this process continues to serve.
pub(crate) fn hand_over(
    (service, state, metrics): (&str, &dyn HandoverState, &MetricsPage),
    program: &ProgramFile,
    patience: Patience,
    cancelled: &AtomicBool,
    step: &dyn Fn(String),
) -> Result<(Successor, String), String> {
    let mut successor = Successor::start(program)?;
    step(format!("started {} as process {}", program.path().display(), successor.id()));
    let offered =
        state.offer().map_err(|error| format!("cannot export the state of this process: {error}"))?;
    let HandoverOffer { text, descriptors, channels } = offered;
    successor.send_offer(service, &text, &descriptors, patience.prepare)?;
    drop((text, descriptors));
    let (version, keeps_flows) = match successor.hear(patience.prepare, "is not ready", cancelled)? {
        FromNew::Ready { version, keeps_flows } => (version, keeps_flows),
        answer => return Err(out_of_turn(&answer)),
    };
    step(format!("turnpike {version} is ready to take over"));

    let rested = Instant::now();
    let sessions = match successor.take_over(state, metrics, keeps_flows, channels, patience.take) {
        Ok(sessions) => sessions,
        Err(why) => {
            // The new process must not serve at the same time as this one.
            drop(successor);
            state.resume();
            return Err(why);
        }
    };
    let pause_ms = 1000.0 * rested.elapsed().as_secs_f64();
    state.forget();
    service_manager::notify_main_process(successor.id());
    if let Err(error) = successor.channel.send_value(&FromOld::Released, &[]) {
        tracing::warn!("cannot notify process {} that the kernel path is released: {error}", successor.id());
    }
    let noun = if sessions == 1 { "session" } else { "sessions" };
    let how =
        format!("process {} serves {sessions} {noun} after a pause of {pause_ms:.1} ms", successor.id());
    Ok((successor, how))
}

impl Successor {
    fn start(program: &ProgramFile) -> Result<Self, String> {
        let (channel, there) =
            Channel::pair().map_err(|error| format!("cannot create a socket pair: {error}"))?;
        let child = program.start(there)?;
        Ok(Self { channel, child, serves: false, is_gone: false })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn send_metrics(&mut self, metrics: &MetricsPage) {
        if self.is_gone {
            return;
        }
        if let Err(error) = self.channel.send_value(&FromOld::Metrics(metrics()), &[]) {
            self.is_gone = true;
            // Reaps the process if it has ended; otherwise it would remain a zombie.
            let status = self.child.try_wait().ok().flatten();
            let how = status.map_or_else(|| error.to_string(), |status| status.to_string());
            tracing::error!("lost contact with process {}, which has taken over: {how}", self.id());
        }
    }

    fn send_offer(
        &mut self,
        service: &str,
        offer: &[u8],
        descriptors: &[OwnedFd],
        patience: Duration,
    ) -> Result<(), String> {
        let (version, service) = (env!("CARGO_PKG_VERSION").to_owned(), service.to_owned());
        let hello = FromOld::Hello { protocol: PROTOCOL, version, service };
        let descriptors: Vec<_> = descriptors.iter().map(OwnedFd::as_fd).collect();
        let sent = self
            .channel
            .set_patience(patience)
            .and_then(|()| self.channel.send_value(&hello, &[]))
            .and_then(|()| self.channel.send(offer, &descriptors));
        sent.map_err(|error| self.why(&error))
    }

    /// The part of the handover during which the workers are paused. Returns the number of sessions. Cannot
    /// be cancelled.
    fn take_over(
        &mut self,
        state: &dyn HandoverState,
        metrics: &MetricsPage,
        keeps_flows: bool,
        channels: Vec<Channel>,
        patience: Duration,
    ) -> Result<usize, String> {
        let never = AtomicBool::new(false);
        state.pause(keeps_flows).map_err(|error| error.to_string())?;
        self.channel.set_patience(patience).map_err(|error| error.to_string())?;
        let exported = state.export(channels, patience).map_err(|error| self.why(&error))?;
        match self.hear(patience, "has not taken over the sessions", &never)? {
            FromNew::Taken { sessions } if sessions == exported => {}
            answer => return Err(out_of_turn(&answer)),
        }
        let sent = self.channel.send_value(&FromOld::Metrics(metrics()), &[]);
        let sent = sent.and_then(|()| self.channel.send_value(&FromOld::Commit, &[]));
        sent.map_err(|error| self.why(&error))?;
        match self.hear(patience, "is not serving", &never)? {
            FromNew::Serving => self.serves = true,
            answer => return Err(out_of_turn(&answer)),
        }
        Ok(exported)
    }

    fn hear(&mut self, patience: Duration, what: &str, cancelled: &AtomicBool) -> Result<FromNew, String> {
        let until = Instant::now() + patience;
        while !cancelled.load(Ordering::Relaxed) {
            let left = until.saturating_duration_since(Instant::now());
            if self.channel.is_ready(left.min(LOOK)).map_err(|error| error.to_string())? {
                return match self.channel.receive_value::<FromNew>() {
                    Ok((FromNew::Refused { why }, _)) => Err(why),
                    Ok((answer, _)) => Ok(answer),
                    Err(error) => Err(self.why(&error)),
                };
            }
            if left.is_zero() {
                return Err(format!("the new process {what} after {} s", patience.as_secs_f64()));
            }
        }
        Err("cancelled, because this process is stopping".to_owned())
    }

    /// Reason for a failed step: from the new process if possible, otherwise the channel's error.
    fn why(&mut self, error: &io::Error) -> String {
        let is_closed = matches!(
            error.kind(),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
        );
        if !is_closed {
            return format!("the new process does not respond: {error}");
        }
        if self.channel.is_ready(LAST_WORDS).is_ok_and(|is_ready| is_ready)
            && let Ok((FromNew::Refused { why }, _)) = self.channel.receive_value::<FromNew>()
        {
            return why;
        }
        let until = Instant::now() + LAST_WORDS;
        while Instant::now() < until {
            if let Ok(Some(status)) = self.child.try_wait() {
                return format!("the new process has ended ({status}); see its log lines");
            }
            thread::sleep(Duration::from_millis(10));
        }
        "the new process has closed the connection".to_owned()
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        if !self.serves {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn out_of_turn(answer: &FromNew) -> String {
    format!("unexpected message from the new process: {answer:?}")
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::PermissionsExt as _,
        sync::{Arc, Mutex, MutexGuard, PoisonError},
    };

    use turnpike_testkit::{Dir, PATIENCE};

    use super::*;

    #[derive(Default)]
    struct Recorder {
        told: Mutex<Vec<&'static str>>,
        is_stuck: bool,
    }

    impl Recorder {
        fn told(&self, what: &'static str) {
            self.told.lock().expect("no panic").push(what);
        }
    }

    impl HandoverState for Recorder {
        fn offer(&self) -> io::Result<HandoverOffer> {
            self.told("offer");
            HandoverOffer::new(
                &"what it has",
                vec![OwnedFd::from(std::net::UdpSocket::bind("127.0.0.1:0")?)],
                Vec::new(),
            )
        }
        fn pause(&self, _: bool) -> io::Result<()> {
            self.told("pause");
            if self.is_stuck { Err(io::Error::other("a worker did not pause")) } else { Ok(()) }
        }
        fn export(&self, _: Vec<Channel>, _: Duration) -> io::Result<usize> {
            self.told("export");
            Ok(3)
        }
        fn resume(&self) {
            self.told("resume");
        }
        fn forget(&self) {
            self.told("forget");
        }
    }

    /// Keeps another test's child process from inheriting the new file while it is open for writing, which
    /// would prevent its execution (ETXTBSY).
    fn program(dir: &Dir, script: &str) -> (ProgramFile, MutexGuard<'static, ()>) {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let path = dir.file("program", script);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))
            .expect("permissions can be set");
        (ProgramFile::find(Some(&path)).expect("an acceptable program"), alone)
    }

    fn page() -> MetricsPage {
        Arc::new(|| "# EOF\n".to_owned())
    }

    const QUICK: Patience =
        Patience { prepare: Duration::from_millis(300), take: Duration::from_millis(300) };
    const PATIENT: Patience = Patience { prepare: PATIENCE, take: PATIENCE };

    fn handed_over(state: &Recorder, script: &str, patience: Patience) -> Result<u32, String> {
        let dir = Dir::new();
        let (program, _alone) = program(&dir, script);
        let (successor, how) =
            hand_over(("serve", state, &page()), &program, patience, &AtomicBool::new(false), &|_| {})?;
        assert!(how.contains(&successor.id().to_string()), "{how}");
        Ok(successor.id())
    }

    #[test]
    fn an_unusable_program_leaves_the_old_process_serving() {
        for (script, patience, why) in [
            ("#!/bin/sh\nexit 7\n", PATIENT, "exit status: 7"),
            ("#!/bin/sh\necho nonsense on standard output; exit 0\n", PATIENT, "exit status: 0"),
            ("#!/bin/sh\nprintf nonsense >&0; exec sleep 600\n", PATIENT, "malformed message"),
            ("#!/bin/sh\nexec sleep 600\n", QUICK, "is not ready after 0.3 s"),
            ("no program\n", PATIENT, "cannot start"),
        ] {
            let state = Recorder::default();
            let error = handed_over(&state, script, patience).expect_err("no turnpike");
            assert!(error.contains(why), "{script}: {error}");
            let told = state.told.into_inner().expect("no panic");
            // The workers have not paused.
            assert!(told.is_empty() || told == ["offer"], "{told:?}");
        }
    }

    #[test]
    fn an_upgrade_can_be_cancelled_while_the_new_process_prepares() {
        let (dir, state) = (Dir::new(), Recorder::default());
        let (program, _alone) = program(&dir, "#!/bin/sh\nexec sleep 600\n");
        let error = hand_over(("serve", &state, &page()), &program, PATIENT, &AtomicBool::new(true), &|_| {})
            .expect_err("cancelled");
        assert!(error.contains("cancelled"), "{error}");
        assert_eq!(state.told.into_inner().expect("no panic"), ["offer"]);
    }

    /// Single-part messages without descriptors, in the channel's format: length, no descriptors, bytes.
    fn says(messages: &[&str]) -> String {
        let mut script = "#!/bin/sh\n".to_owned();
        for message in messages {
            let len = format!("\\{:03o}\\{:03o}", message.len() >> 8, message.len() & 255);
            script += &format!("printf '\\000\\000{len}\\000\\000\\000\\000{message}' >&0\n");
        }
        script + "exec sleep 600\n"
    }

    const READY: &str = r#"{"ready":{"version":"9"}}"#;

    #[test]
    fn any_failure_during_the_pause_resumes_service() {
        for (messages, is_stuck, patience, why, told) in [
            (vec![READY], true, PATIENT, "did not pause", &["offer", "pause", "resume"][..]),
            (
                vec![READY, r#"{"refused":{"why":"no room"}}"#],
                false,
                PATIENT,
                "no room",
                &["offer", "pause", "export", "resume"],
            ),
            (
                vec![READY, r#"{"taken":{"sessions":2}}"#],
                false,
                PATIENT,
                "unexpected message",
                &["offer", "pause", "export", "resume"],
            ),
            (
                vec![READY],
                false,
                Patience { take: QUICK.take, ..PATIENT },
                "has not taken over the sessions after 0.3 s",
                &["offer", "pause", "export", "resume"],
            ),
            (
                vec![READY, r#"{"taken":{"sessions":3}}"#],
                false,
                Patience { take: QUICK.take, ..PATIENT },
                "is not serving after 0.3 s",
                &["offer", "pause", "export", "resume"],
            ),
        ] {
            let state = Recorder { is_stuck, ..Recorder::default() };
            let error = handed_over(&state, &says(&messages), patience).expect_err("the handover fails");
            assert!(error.contains(why), "{messages:?}: {error}");
            assert_eq!(state.told.into_inner().expect("no panic"), told, "{messages:?}");
        }
    }

    #[test]
    fn a_serving_new_process_outlives_the_old_one() {
        let state = Recorder::default();
        let messages = [READY, r#"{"taken":{"sessions":3}}"#, r#""serving""#];
        let id = handed_over(&state, &says(&messages), PATIENT).expect("the handover succeeds");
        let lives = rustix::process::Pid::from_raw(id.cast_signed()).expect("a number");
        rustix::process::test_kill_process(lives).expect("the process lives");
        rustix::process::kill_process(lives, rustix::process::Signal::KILL).expect("a child of this process");
        assert_eq!(state.told.into_inner().expect("no panic"), ["offer", "pause", "export", "forget"]);
    }
}
