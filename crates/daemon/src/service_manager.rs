//! What a service manager hears of this process (sd_notify(3)): that it is ready, reads its configuration again or ends, how things
//! stand, and, as long as control loop and workers make progress, that no watchdog need end it. Without a service manager nothing is
//! said.

use std::{env, pin::pin, time::Duration};

use sd_notify::NotifyState;
use tokio::time::{Instant, sleep};

/// Signs of life in the time that the watchdog waits for one: two may come late.
const SIGNS: u32 = 3;
/// Between two questions to the workers where no watchdog waits for the answer.
const UNWATCHED: Duration = Duration::from_secs(10);
/// Between two sentences about how things stand.
const STATUS: Duration = Duration::from_secs(5);
/// What a stop may take beyond the time that sessions get: workers end, the log is written.
const AFTERWARDS: Duration = Duration::from_secs(15);

/// Whose signs of life the watchdog waits for (sd_watchdog_enabled(3)). Where it is not set they are those of any main process: also of one
/// that takes another one's place.
pub(crate) const WATCHDOG_PID: &str = "WATCHDOG_PID";

type Say = Box<dyn Fn(&[NotifyState<'_>]) + Send>;

/// The main process of the service is another one from now on. Only the one before may say so (`NotifyAccess=main`); nothing that it says
/// behind that counts.
pub(crate) fn main_process(id: u32) {
    if env::var_os("NOTIFY_SOCKET").is_some()
        && let Err(error) = sd_notify::notify(&[NotifyState::MainPid(id)])
    {
        tracing::warn!("cannot tell the service manager that process {id} is the main one: {error}");
    }
}

pub(crate) struct ServiceManager {
    /// `None` where nobody listens.
    say: Option<Say>,
    /// Between two signs of life, where the service manager wants any.
    every: Option<Duration>,
    next_sign: Instant,
    /// Since when a worker takes no commands, and it has been said.
    stalled: Option<Instant>,
    /// What was said last of how things stand, and when more may be said.
    status: String,
    next_status: Instant,
    /// Whether the last reload changed nothing.
    refused: bool,
}

impl ServiceManager {
    /// The one that has started this process, if any.
    pub(crate) fn of_this_process() -> Self {
        // Where it does not hear, it will act on that; those who are served need not.
        let say = |states: &[NotifyState<'_>]| _ = sd_notify::notify(states);
        let listens = env::var_os("NOTIFY_SOCKET").is_some();
        Self::new(listens.then(|| Box::new(say) as Say), sd_notify::watchdog_enabled())
    }

    fn new(say: Option<Say>, watchdog: Option<Duration>) -> Self {
        let now = Instant::now();
        let every = watchdog.filter(|_| say.is_some()).map(|patience| patience / SIGNS);
        Self {
            say,
            every,
            next_sign: now,
            stalled: None,
            status: String::new(),
            next_status: now,
            refused: false,
        }
    }

    /// How long the control loop may sleep at most.
    pub(crate) fn pause(&self) -> Duration {
        self.every.unwrap_or(Duration::MAX)
    }

    /// All listeners listen.
    pub(crate) fn ready(&self) {
        self.say(&[NotifyState::Ready]);
    }

    /// The configuration is being read again, until [`Self::reloaded`].
    pub(crate) fn reloading(&self) {
        match NotifyState::monotonic_usec_now() {
            Ok(now) => self.say(&[NotifyState::Reloading, now]),
            Err(error) => tracing::warn!("cannot tell the service manager of the reload: {error}"),
        }
    }

    /// Whether the configuration was taken.
    pub(crate) fn reloaded(&mut self, taken: bool) {
        self.say(&[NotifyState::Ready]);
        self.refused = !taken;
        self.next_status = Instant::now();
    }

    /// Waits for what keeps the control loop from its rounds for a while, and has an end of its own.
    pub(crate) async fn stay_alive_for<T>(&mut self, busy: impl Future<Output = T>) -> T {
        let mut busy = pin!(busy);
        loop {
            tokio::select! {
                done = &mut busy => return done,
                () = sleep(self.pause()) => self.say(&[NotifyState::Watchdog]),
            }
        }
    }

    /// Sessions get so long to end.
    pub(crate) fn stopping(&self, patience: Duration) {
        // In place of TimeoutStopSec=, which knows nothing of the deadline in the configuration.
        let until = format!("EXTEND_TIMEOUT_USEC={}", (patience + AFTERWARDS).as_micros());
        self.say(&[NotifyState::Stopping, NotifyState::Custom(&until)]);
    }

    /// To be called in each round of the control loop. `makes_progress` is asked from time to time, and where a sign of life is due.
    pub(crate) fn look(&mut self, makes_progress: impl FnOnce() -> bool, status: impl FnOnce() -> String) {
        let now = Instant::now();
        if now >= self.next_sign {
            let every = self.every.unwrap_or(UNWATCHED);
            self.next_sign = now + every;
            self.note(makes_progress(), now, every);
        }
        if self.say.is_none() || now < self.next_status {
            return;
        }
        self.next_status = now + STATUS;
        let refused = if self.refused { "; the last reload was refused: see the log" } else { "" };
        let status = status() + refused;
        if status != self.status {
            self.say(&[NotifyState::Status(&status)]);
            self.status = status;
        }
    }

    /// Whether the workers have taken what they were told `every` ago.
    fn note(&mut self, progress: bool, now: Instant, every: Duration) {
        match (progress, self.stalled) {
            (false, None) => {
                tracing::warn!(
                    "a worker has taken no command for {} s: its clients are not served",
                    every.as_secs_f64()
                );
                self.stalled = Some(now - every);
            }
            (false, Some(_)) => {}
            (true, stalled) => {
                if let Some(since) = stalled {
                    tracing::warn!(
                        "all workers take commands again, after {:.1} s",
                        (now - since).as_secs_f64()
                    );
                }
                self.stalled = None;
                if self.every.is_some() {
                    self.say(&[NotifyState::Watchdog]);
                }
            }
        }
    }

    fn say(&self, states: &[NotifyState<'_>]) {
        if let Some(say) = &self.say {
            say(states);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    fn manager(watchdog: Option<Duration>) -> (ServiceManager, Arc<Mutex<Vec<String>>>) {
        let said = Arc::<Mutex<Vec<String>>>::default();
        let heard = Arc::clone(&said);
        let say = move |states: &[NotifyState<'_>]| {
            let states: Vec<String> = states.iter().map(ToString::to_string).collect();
            heard.lock().expect("no panic").push(states.join(" "));
        };
        (ServiceManager::new(Some(Box::new(say)), watchdog), said)
    }

    fn take(said: &Mutex<Vec<String>>) -> Vec<String> {
        std::mem::take(&mut said.lock().expect("no panic"))
    }

    #[tokio::test(start_paused = true)]
    async fn signs_of_life_come_in_time_and_only_while_there_is_progress() {
        let (mut manager, said) = manager(Some(Duration::from_secs(30)));
        assert_eq!(manager.pause(), Duration::from_secs(10));
        let status = || "fine".to_owned();
        let mut signs = Vec::new();
        for second in 0..100 {
            manager.look(|| !(35..75).contains(&second), status);
            if take(&said).iter().any(|said| said == "WATCHDOG=1") {
                signs.push(second);
            }
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!(signs, [0, 10, 20, 30, 80, 90]);
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_busy_for_long_gives_signs_of_life_meanwhile() {
        let (mut manager, said) = manager(Some(Duration::from_secs(30)));
        let busy = async {
            sleep(Duration::from_secs(35)).await;
            7
        };
        assert_eq!((manager.stay_alive_for(busy).await, take(&said)), (7, vec!["WATCHDOG=1".to_owned(); 3]));
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_watchdog_workers_are_asked_all_the_same_and_it_hears_nothing() {
        let (mut manager, said) = manager(None);
        let (mut asked, mut stalled) = (Vec::new(), Vec::new());
        for second in 0..50 {
            let progress = || {
                asked.push(second);
                !(15..35).contains(&second)
            };
            manager.look(progress, || "1 allocation".to_owned());
            stalled.extend(manager.stalled.map(|_| second));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!((asked, take(&said)), (vec![0, 10, 20, 30, 40], vec!["STATUS=1 allocation".to_owned()]));
        assert_eq!((stalled.first(), stalled.last()), (Some(&20), Some(&39)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_status_is_told_when_it_has_changed_and_not_all_the_time() {
        let (mut manager, said) = manager(None);
        for second in 0..20_u32 {
            manager.look(|| true, || format!("{} allocations", second.min(7)));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!(take(&said), [0, 5, 7].map(|count| format!("STATUS={count} allocations")));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reload_has_a_beginning_with_its_time_and_an_end() {
        let (mut manager, said) = manager(None);
        manager.ready();
        manager.reloading();
        manager.reloaded(false);
        manager.look(|| true, || "serving".to_owned());
        manager.stopping(Duration::from_secs(3600));
        let said = take(&said);
        let expected = [
            "READY=1",
            "RELOADING=1 MONOTONIC_USEC=",
            "READY=1",
            "STATUS=serving; the last reload",
            "STOPPING=1 ",
        ];
        assert_eq!(said.len(), expected.len(), "{said:?}");
        for (said, expected) in said.iter().zip(expected) {
            assert!(said.starts_with(expected), "{said}");
        }
        assert!(said[4].ends_with(" EXTEND_TIMEOUT_USEC=3615000000"), "{}", said[4]);
    }
}
