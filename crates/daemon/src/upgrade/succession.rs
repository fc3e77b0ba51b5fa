//! The side of the process that gives its place to a new one.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    process::Child,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use turnpike_net::Channel;

use super::{Estate, FromNew, FromOld, Offered, PROTOCOL, Program};
use crate::service_manager;

/// Between two looks whether an upgrade has been called off.
const LOOK: Duration = Duration::from_millis(100);
/// How long a process that closes its end may take to say why, or to end.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How long is waited for the new process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// To start, and to be ready.
    pub(crate) prepare: Duration,
    /// For each step while nobody is served.
    pub(crate) take: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { prepare: Duration::from_secs(30), take: Duration::from_secs(5) }
    }
}

/// The new process. Dropping it before it serves ends it.
#[derive(Debug)]
pub(crate) struct Successor {
    channel: Channel,
    child: Child,
    serves: bool,
    /// Whether it hears no more.
    is_gone: bool,
}

/// Has a new process of this program take the place of this one: that process, and a sentence about it. `say` hears of each step. Where
/// it does not come to that, this process serves as before, and the answer is why.
pub(crate) fn hand_over(
    estate: &dyn Estate,
    program: &Program,
    patience: Patience,
    called_off: &AtomicBool,
    say: &dyn Fn(String),
) -> Result<(Successor, String), String> {
    let mut successor = Successor::start(program)?;
    say(format!("started {} as process {}", program.path().display(), successor.id()));
    let offered = estate.offer().map_err(|error| format!("cannot offer what this process has: {error}"))?;
    let Offered { text, descriptors, heirs } = offered;
    successor.send_offer(estate.service(), &text, &descriptors, patience.prepare)?;
    drop((text, descriptors));
    let (version, keeps_flows) = match successor.hear(patience.prepare, "is not ready", called_off)? {
        FromNew::Ready { version, keeps_flows } => (version, keeps_flows),
        answer => return Err(out_of_turn(&answer)),
    };
    say(format!("turnpike {version} is ready to take over"));

    let rested = Instant::now();
    let sessions = match successor.take_over(estate, keeps_flows, heirs, patience.take) {
        Ok(sessions) => sessions,
        Err(why) => {
            // It must not serve beside this process.
            drop(successor);
            estate.thaw();
            return Err(why);
        }
    };
    let pause_ms = 1000.0 * rested.elapsed().as_secs_f64();
    estate.release();
    service_manager::main_process(successor.id());
    if let Err(error) = successor.channel.send_value(&FromOld::Released, &[]) {
        tracing::warn!("process {} is not told that the kernel's path is its own: {error}", successor.id());
    }
    let how =
        format!("process {} serves: {sessions} sessions, nothing read for {pause_ms:.1} ms", successor.id());
    Ok((successor, how))
}

impl Successor {
    fn start(program: &Program) -> Result<Self, String> {
        let (channel, there) =
            Channel::pair().map_err(|error| format!("cannot make a pair of sockets: {error}"))?;
        let child = program.start(there)?;
        Ok(Self { channel, child, serves: false, is_gone: false })
    }

    /// Its number.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Tells it what this process counts.
    pub(crate) fn tell(&mut self, metrics: String) {
        if self.is_gone {
            return;
        }
        if let Err(error) = self.channel.send_value(&FromOld::Metrics(metrics), &[]) {
            self.is_gone = true;
            // Unless it is asked for, its number stays taken for as long as this process lives.
            let status = self.child.try_wait().ok().flatten();
            let how = status.map_or_else(|| error.to_string(), |status| status.to_string());
            tracing::error!("process {}, which has taken over, hears no more: {how}", self.id());
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

    /// The part in which nobody is served; how many sessions it has. It cannot be called off.
    fn take_over(
        &mut self,
        estate: &dyn Estate,
        keeps_flows: bool,
        heirs: Vec<Channel>,
        patience: Duration,
    ) -> Result<usize, String> {
        let never = AtomicBool::new(false);
        estate.freeze(keeps_flows).map_err(|error| error.to_string())?;
        self.channel.set_patience(patience).map_err(|error| error.to_string())?;
        let given = estate.hand_over(heirs, patience).map_err(|error| self.why(&error))?;
        match self.hear(patience, "has not taken the sessions", &never)? {
            FromNew::Taken { sessions } if sessions == given => {}
            answer => return Err(out_of_turn(&answer)),
        }
        let metrics = FromOld::Metrics(estate.metrics());
        let told = self.channel.send_value(&metrics, &[]);
        let told = told.and_then(|()| self.channel.send_value(&FromOld::Commit, &[]));
        told.map_err(|error| self.why(&error))?;
        match self.hear(patience, "does not serve", &never)? {
            FromNew::Serving => self.serves = true,
            answer => return Err(out_of_turn(&answer)),
        }
        Ok(given)
    }

    fn hear(&mut self, patience: Duration, what: &str, called_off: &AtomicBool) -> Result<FromNew, String> {
        let until = Instant::now() + patience;
        while !called_off.load(Ordering::Relaxed) {
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
        Err("it was called off, as this process is to end".to_owned())
    }

    /// Why a step failed: the new process knows better than the socket that leads to it.
    fn why(&mut self, error: &io::Error) -> String {
        let is_closed = matches!(
            error.kind(),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
        );
        if !is_closed {
            return format!("the new process does not do its part: {error}");
        }
        if self.channel.is_ready(LAST_WORDS).is_ok_and(|is_ready| is_ready)
            && let Ok((FromNew::Refused { why }, _)) = self.channel.receive_value::<FromNew>()
        {
            return why;
        }
        let until = Instant::now() + LAST_WORDS;
        while Instant::now() < until {
            if let Ok(Some(status)) = self.child.try_wait() {
                return format!("the new process has ended ({status}); its lines in the log may say why");
            }
            thread::sleep(Duration::from_millis(10));
        }
        "the new process has closed its end".to_owned()
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
    format!("the new process answers out of turn: {answer:?}")
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::PermissionsExt as _,
        sync::{Mutex, MutexGuard, PoisonError},
    };

    use turnpike_testkit::{Dir, PATIENCE};

    use super::*;

    /// What it is told, in order.
    #[derive(Default)]
    struct Recorder {
        told: Mutex<Vec<&'static str>>,
        /// Whether its workers are stuck.
        is_stuck: bool,
    }

    impl Recorder {
        fn told(&self, what: &'static str) {
            self.told.lock().expect("no panic").push(what);
        }
    }

    impl Estate for Recorder {
        fn service(&self) -> &'static str {
            "serve"
        }
        fn offer(&self) -> io::Result<Offered> {
            self.told("offer");
            Offered::new(
                &"what it has",
                vec![OwnedFd::from(std::net::UdpSocket::bind("127.0.0.1:0")?)],
                Vec::new(),
            )
        }
        fn freeze(&self, _: bool) -> io::Result<()> {
            self.told("freeze");
            if self.is_stuck { Err(io::Error::other("a worker did not come to rest")) } else { Ok(()) }
        }
        fn hand_over(&self, _: Vec<Channel>, _: Duration) -> io::Result<usize> {
            self.told("hand over");
            Ok(3)
        }
        fn thaw(&self) {
            self.told("thaw");
        }
        fn release(&self) {
            self.told("release");
        }
        fn metrics(&self) -> String {
            "# EOF\n".to_owned()
        }
    }

    /// One at a time: while a test writes its program, another one's child would hold that file open, and it could not be run.
    fn program(dir: &Dir, script: &str) -> (Program, MutexGuard<'static, ()>) {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let path = dir.file("program", script);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("it is ours");
        (Program::find(Some(&path)).expect("it is good"), alone)
    }

    const QUICK: Patience =
        Patience { prepare: Duration::from_millis(300), take: Duration::from_millis(300) };
    const PATIENT: Patience = Patience { prepare: PATIENCE, take: PATIENCE };

    fn handed_over(estate: &Recorder, script: &str, patience: Patience) -> Result<u32, String> {
        let dir = Dir::new();
        let (program, _alone) = program(&dir, script);
        let (successor, how) = hand_over(estate, &program, patience, &AtomicBool::new(false), &|_| {})?;
        assert!(how.contains(&successor.id().to_string()), "{how}");
        Ok(successor.id())
    }

    #[test]
    fn a_program_that_ends_or_talks_nonsense_or_nothing_changes_nothing() {
        for (script, patience, why) in [
            ("#!/bin/sh\nexit 7\n", PATIENT, "exit status: 7"),
            ("#!/bin/sh\necho nonsense on standard output; exit 0\n", PATIENT, "exit status: 0"),
            ("#!/bin/sh\nprintf nonsense >&0; exec sleep 600\n", PATIENT, "none of our messages"),
            ("#!/bin/sh\nexec sleep 600\n", QUICK, "is not ready after 0.3 s"),
            ("no program\n", PATIENT, "cannot start"),
        ] {
            let estate = Recorder::default();
            let error = handed_over(&estate, script, patience).expect_err("no turnpike");
            assert!(error.contains(why), "{script}: {error}");
            let told = estate.told.into_inner().expect("no panic");
            // Nobody has rested.
            assert!(told.is_empty() || told == ["offer"], "{told:?}");
        }
    }

    #[test]
    fn it_can_be_called_off_while_the_new_process_prepares() {
        let (dir, estate) = (Dir::new(), Recorder::default());
        let (program, _alone) = program(&dir, "#!/bin/sh\nexec sleep 600\n");
        let error =
            hand_over(&estate, &program, PATIENT, &AtomicBool::new(true), &|_| {}).expect_err("called off");
        assert!(error.contains("called off"), "{error}");
        assert_eq!(estate.told.into_inner().expect("no panic"), ["offer"]);
    }

    /// Messages of one piece without descriptors, as the channel has them: their length, no descriptors, and then the bytes.
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
    fn whatever_fails_while_the_workers_rest_lets_them_go_on() {
        for (messages, is_stuck, patience, why, told) in [
            (vec![READY], true, PATIENT, "did not come to rest", &["offer", "freeze", "thaw"][..]),
            (
                vec![READY, r#"{"refused":{"why":"no room"}}"#],
                false,
                PATIENT,
                "no room",
                &["offer", "freeze", "hand over", "thaw"],
            ),
            (
                vec![READY, r#"{"taken":{"sessions":2}}"#],
                false,
                PATIENT,
                "out of turn",
                &["offer", "freeze", "hand over", "thaw"],
            ),
            (
                vec![READY],
                false,
                Patience { take: QUICK.take, ..PATIENT },
                "has not taken the sessions after 0.3 s",
                &["offer", "freeze", "hand over", "thaw"],
            ),
            (
                vec![READY, r#"{"taken":{"sessions":3}}"#],
                false,
                Patience { take: QUICK.take, ..PATIENT },
                "does not serve after 0.3 s",
                &["offer", "freeze", "hand over", "thaw"],
            ),
        ] {
            let estate = Recorder { is_stuck, ..Recorder::default() };
            let error = handed_over(&estate, &says(&messages), patience).expect_err("it does not take over");
            assert!(error.contains(why), "{messages:?}: {error}");
            assert_eq!(estate.told.into_inner().expect("no panic"), told, "{messages:?}");
        }
    }

    #[test]
    fn a_process_that_serves_lives_on_without_us() {
        let estate = Recorder::default();
        let messages = [READY, r#"{"taken":{"sessions":3}}"#, r#""serving""#];
        let id = handed_over(&estate, &says(&messages), PATIENT).expect("it takes over");
        let lives = rustix::process::Pid::from_raw(id.cast_signed()).expect("a number");
        rustix::process::test_kill_process(lives).expect("it lives");
        rustix::process::kill_process(lives, rustix::process::Signal::KILL).expect("it is ours");
        assert_eq!(estate.told.into_inner().expect("no panic"), ["offer", "freeze", "hand over", "release"]);
    }
}
