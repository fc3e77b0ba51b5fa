//! Notifications to a service manager (sd_notify(3)): ready, reloading, stopping, a status line, and watchdog
//! messages while the control loop and the workers make progress. Does nothing without a service manager.

use std::{env, pin::pin, time::Duration};

use sd_notify::NotifyState;
use tokio::time::{Instant, sleep};

/// Watchdog messages per timeout, so that two may be lost or late.
const SIGNS: u32 = 3;
/// Interval between checks for stalled workers if there is no watchdog.
const UNWATCHED: Duration = Duration::from_secs(10);
/// Minimum interval between status lines.
const STATUS: Duration = Duration::from_secs(5);
/// Time to stop after the sessions' deadline: to join the workers and write the log.
const AFTERWARDS: Duration = Duration::from_secs(15);

/// Process whose messages the watchdog expects (sd_watchdog_enabled(3)). If this is unset, the watchdog
/// accepts messages from any main process, including a new one after an upgrade.
pub(crate) const WATCHDOG_PID: &str = "WATCHDOG_PID";

type Notify = Box<dyn Fn(&[NotifyState<'_>]) + Send>;

/// Makes another process the main process of the service. Only the current main process may do so
/// (`NotifyAccess=main`), as its last notification.
pub(crate) fn notify_main_process(id: u32) {
    if env::var_os("NOTIFY_SOCKET").is_some()
        && let Err(error) = sd_notify::notify(&[NotifyState::MainPid(id)])
    {
        tracing::warn!("cannot notify the service manager that process {id} is the main process: {error}");
    }
}

pub(crate) struct ServiceManager {
    notify: Option<Notify>,
    every: Option<Duration>,
    next_sign: Instant,
    /// Time when a worker was last reported as stuck.
    stalled: Option<Instant>,
    status: String,
    next_status: Instant,
    refused: bool,
}

impl ServiceManager {
    pub(crate) fn of_this_process() -> Self {
        // Errors are ignored: without notifications, the timeouts of the service manager take effect.
        let notify = |states: &[NotifyState<'_>]| _ = sd_notify::notify(states);
        let listens = env::var_os("NOTIFY_SOCKET").is_some();
        Self::new(listens.then(|| Box::new(notify) as Notify), sd_notify::watchdog_enabled())
    }

    fn new(notify: Option<Notify>, watchdog: Option<Duration>) -> Self {
        let now = Instant::now();
        let every = watchdog.filter(|_| notify.is_some()).map(|patience| patience / SIGNS);
        Self {
            notify,
            every,
            next_sign: now,
            stalled: None,
            status: String::new(),
            next_status: now,
            refused: false,
        }
    }

    pub(crate) fn pause(&self) -> Duration {
        self.every.unwrap_or(Duration::MAX)
    }

    pub(crate) fn notify_ready(&self) {
        self.notify(&[NotifyState::Ready]);
    }

    pub(crate) fn notify_reloading(&self) {
        match NotifyState::monotonic_usec_now() {
            Ok(now) => self.notify(&[NotifyState::Reloading, now]),
            Err(error) => tracing::warn!("cannot notify the service manager of the reload: {error}"),
        }
    }

    /// Notifies the service manager of the end of a reload; `taken` is true if the new configuration is in
    /// effect.
    pub(crate) fn notify_reloaded(&mut self, taken: bool) {
        self.notify(&[NotifyState::Ready]);
        self.refused = !taken;
        self.next_status = Instant::now();
    }

    /// Sends watchdog messages while the control loop waits for `busy`, which must end on its own.
    pub(crate) async fn stay_alive_for<T>(&mut self, busy: impl Future<Output = T>) -> T {
        let mut busy = pin!(busy);
        loop {
            tokio::select! {
                done = &mut busy => return done,
                () = sleep(self.pause()) => self.notify(&[NotifyState::Watchdog]),
            }
        }
    }

    pub(crate) fn notify_stopping(&self, patience: Duration) {
        // Extends TimeoutStopSec=, because systemd does not know the configured deadline.
        let until = format!("EXTEND_TIMEOUT_USEC={}", (patience + AFTERWARDS).as_micros());
        self.notify(&[NotifyState::Stopping, NotifyState::Custom(&until)]);
    }

    /// Called in each round of the control loop. Calls `makes_progress` from time to time, and before each
    /// watchdog message.
    pub(crate) fn tick(&mut self, makes_progress: impl FnOnce() -> bool, status: impl FnOnce() -> String) {
        let now = Instant::now();
        if now >= self.next_sign {
            let every = self.every.unwrap_or(UNWATCHED);
            self.next_sign = now + every;
            self.note_progress(makes_progress(), now, every);
        }
        if self.notify.is_none() || now < self.next_status {
            return;
        }
        self.next_status = now + STATUS;
        let refused = if self.refused { "; the last reload was refused: see the log" } else { "" };
        let status = status() + refused;
        if status != self.status {
            self.notify(&[NotifyState::Status(&status)]);
            self.status = status;
        }
    }

    /// Logs a warning if a worker has not taken a command for the time `every`.
    fn note_progress(&mut self, progress: bool, now: Instant, every: Duration) {
        match (progress, self.stalled) {
            (false, None) => {
                tracing::warn!(
                    "a worker has been stuck for {} s and does not serve its clients",
                    every.as_secs_f64()
                );
                self.stalled = Some(now - every);
            }
            (false, Some(_)) => {}
            (true, stalled) => {
                if let Some(since) = stalled {
                    tracing::warn!("all workers respond again after {:.1} s", (now - since).as_secs_f64());
                }
                self.stalled = None;
                if self.every.is_some() {
                    self.notify(&[NotifyState::Watchdog]);
                }
            }
        }
    }

    fn notify(&self, states: &[NotifyState<'_>]) {
        if let Some(notify) = &self.notify {
            notify(states);
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
    async fn watchdog_messages_are_sent_only_while_workers_make_progress() {
        let (mut manager, said) = manager(Some(Duration::from_secs(30)));
        assert_eq!(manager.pause(), Duration::from_secs(10));
        let status = || "fine".to_owned();
        let mut signs = Vec::new();
        for second in 0..100 {
            manager.tick(|| !(35..75).contains(&second), status);
            if take(&said).iter().any(|said| said == "WATCHDOG=1") {
                signs.push(second);
            }
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!(signs, [0, 10, 20, 30, 80, 90]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_wait_sends_watchdog_messages() {
        let (mut manager, said) = manager(Some(Duration::from_secs(30)));
        let busy = async {
            sleep(Duration::from_secs(35)).await;
            7
        };
        assert_eq!((manager.stay_alive_for(busy).await, take(&said)), (7, vec!["WATCHDOG=1".to_owned(); 3]));
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_watchdog_progress_is_checked_but_not_reported() {
        let (mut manager, said) = manager(None);
        let (mut asked, mut stalled) = (Vec::new(), Vec::new());
        for second in 0..50 {
            let progress = || {
                asked.push(second);
                !(15..35).contains(&second)
            };
            manager.tick(progress, || "1 allocation".to_owned());
            stalled.extend(manager.stalled.map(|_| second));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!((asked, take(&said)), (vec![0, 10, 20, 30, 40], vec!["STATUS=1 allocation".to_owned()]));
        assert_eq!((stalled.first(), stalled.last()), (Some(&20), Some(&39)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_status_line_is_sent_only_after_a_change() {
        let (mut manager, said) = manager(None);
        for second in 0..20_u32 {
            manager.tick(|| true, || format!("{} allocations", second.min(7)));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!(take(&said), [0, 5, 7].map(|count| format!("STATUS={count} allocations")));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reload_is_reported_with_its_start_time_and_end() {
        let (mut manager, said) = manager(None);
        manager.notify_ready();
        manager.notify_reloading();
        manager.notify_reloaded(false);
        manager.tick(|| true, || "serving".to_owned());
        manager.notify_stopping(Duration::from_secs(3600));
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
