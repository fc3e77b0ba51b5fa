//! Worker threads of the relay, the forwarder and the reflector: [`Frame`] is the worker's side, and
//! [`Workers`] is the control thread's. A [`Channel`] carries sessions and open sockets to another process.
#![forbid(unsafe_code)]

mod channel;
mod handover;
mod waker;

use std::{
    collections::VecDeque,
    fmt, io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use turnpike_net::{Event, Poller};

use crate::waker::Waker;
pub use channel::{Channel, Message};
pub use handover::{HandoverBatch, HandoverStep};

/// Token of a worker's inbox in its poller; callers must not use it.
pub const INBOX: u64 = u64::MAX;
/// Milliseconds between two publications of a worker's counters.
const PUBLISH_MS: u64 = 100;

/// Sends commands to a worker from any thread.
#[derive(Debug)]
pub struct Sender<C> {
    commands: mpsc::Sender<Option<C>>,
    waker: Waker,
}

impl<C> Clone for Sender<C> {
    fn clone(&self) -> Self {
        Self { commands: self.commands.clone(), waker: self.waker.clone() }
    }
}

impl<C> Sender<C> {
    /// Sends a command without waiting. It is ignored if the worker has ended.
    pub fn tell(&self, command: C) {
        let _ = self.send(command);
    }

    /// Sends a command. If the worker has ended, returns the command as the error.
    pub fn send(&self, command: C) -> Result<(), C> {
        match self.commands.send(Some(command)) {
            Err(mpsc::SendError(Some(command))) => Err(command),
            Ok(()) | Err(_) => {
                self.waker.wake();
                Ok(())
            }
        }
    }

    fn stop(&self) {
        let _ = self.commands.send(None);
        self.waker.wake();
    }
}

/// State shared with the control thread. The lock is held only while the counters are copied.
#[derive(Debug, Default)]
struct WorkerShared<S> {
    published: Mutex<S>,
    /// True if the worker has read its commands since [`Workers::make_progress`] woke it.
    has_woken: AtomicBool,
}

impl<S> WorkerShared<S> {
    fn published(&self) -> MutexGuard<'_, S> {
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Worker's side: poller, clock, inbox of commands `C` and published counters `S`.
pub struct Frame<C, S> {
    pub number: usize,
    pub poller: Poller,
    /// The worker's own inbox, for replies.
    pub sender: Sender<C>,
    /// True if counters have changed since the last publication.
    pub dirty: bool,
    /// True if the worker must stop.
    pub is_stopped: bool,
    started: Instant,
    published_ms: u64,
    commands: mpsc::Receiver<Option<C>>,
    deferred: VecDeque<C>,
    shared: Arc<WorkerShared<S>>,
}

impl<C, S: Default> Frame<C, S> {
    /// Creates the frame of worker `number`, whose clock starts at `started`.
    pub fn new(number: usize, started: Instant) -> io::Result<Self> {
        let poller = Poller::new()?;
        let waker = Waker::new(&poller, INBOX)?;
        let (sender, commands) = mpsc::channel();
        Ok(Self {
            number,
            poller,
            sender: Sender { commands: sender, waker },
            dirty: true,
            is_stopped: false,
            started,
            published_ms: 0,
            commands,
            deferred: VecDeque::new(),
            shared: Arc::default(),
        })
    }
}

impl<C, S> Frame<C, S> {
    /// Milliseconds since the clock started.
    pub fn now_ms(&self) -> u64 {
        self.now_us() / 1000
    }

    /// Microseconds since the clock started.
    pub fn now_us(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Fills `events` from [`Poller::wait_until`], which also ends when a publication is due.
    pub fn wait(
        &mut self,
        now: u64,
        due: Option<u64>,
        at_most: Option<Duration>,
        events: &mut Vec<Event>,
    ) -> io::Result<()> {
        let publication = self.dirty.then_some(self.published_ms + PUBLISH_MS);
        let due = [due, publication].into_iter().flatten().min();
        let ready = self.poller.wait_until(now, due, at_most)?;
        events.clear();
        events.extend_from_slice(ready);
        Ok(())
    }

    /// Takes the next command without waiting. After an [`INBOX`] event, call this until it returns `None`;
    /// if commands are left, the poller reports the event again.
    pub fn command(&mut self) -> Option<C> {
        self.shared.has_woken.store(true, Ordering::Relaxed);
        if let Some(command) = self.deferred.pop_front() {
            return Some(command);
        }
        let command = self.commands.try_recv().or_else(|_| {
            // Acknowledge first, so that a command sent after this point wakes the poller again.
            self.sender.waker.acknowledge();
            self.commands.try_recv()
        });
        self.is_stopped |= command.as_ref().is_ok_and(Option::is_none);
        command.ok().flatten()
    }

    /// Blocks for the next command while the worker is paused; `None` if it must stop.
    pub fn next_command(&mut self) -> Option<C> {
        let command = self.commands.recv().ok().flatten();
        self.is_stopped |= command.is_none();
        command
    }

    /// Puts a command back for [`Frame::command`], ahead of later ones.
    pub fn defer(&mut self, command: C) {
        self.deferred.push_back(command);
        self.sender.waker.wake();
    }

    /// True if counters have changed and the last publication is 100 ms old.
    pub fn is_publication_due(&self, now: u64) -> bool {
        self.dirty && now >= self.published_ms + PUBLISH_MS
    }

    /// Publishes counters; `update` overwrites the previous ones.
    pub fn publish(&mut self, now: u64, update: impl FnOnce(&mut S)) {
        update(&mut self.shared.published());
        self.published_ms = now;
        self.dirty = false;
    }
}

impl<C, S> fmt::Debug for Frame<C, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame").field("number", &self.number).finish_non_exhaustive()
    }
}

/// All workers of one kind. Dropping this stops and joins them.
#[derive(Debug)]
pub struct Workers<C, S> {
    running: Vec<Running<C, S>>,
    /// Results of [`HandoverStep::Import`].
    imported: Mutex<Option<mpsc::Receiver<io::Result<usize>>>>,
}

#[derive(Debug)]
struct Running<C, S> {
    sender: Sender<C>,
    shared: Arc<WorkerShared<S>>,
    /// `None` once joined.
    thread: Option<JoinHandle<()>>,
}

impl<C, S> Default for Workers<C, S> {
    fn default() -> Self {
        Self { running: Vec::new(), imported: Mutex::default() }
    }
}

impl<C, S> Workers<C, S> {
    /// Runs a worker on a thread with this name; `run` must return once its frame is stopped.
    pub fn spawn<W: Send + 'static>(
        &mut self,
        name: String,
        mut worker: W,
        frame: impl FnOnce(&mut W) -> &mut Frame<C, S>,
        run: impl FnOnce(W) + Send + 'static,
    ) -> io::Result<()> {
        let frame = frame(&mut worker);
        let (sender, shared) = (frame.sender.clone(), Arc::clone(&frame.shared));
        shared.has_woken.store(true, Ordering::Relaxed);
        let thread = Some(thread::Builder::new().name(name).spawn(move || run(worker))?);
        self.running.push(Running { sender, shared, thread });
        Ok(())
    }

    pub fn count(&self) -> usize {
        self.running.len()
    }

    /// Senders to the workers' inboxes, in worker order.
    pub fn senders(&self) -> impl Iterator<Item = &Sender<C>> {
        self.running.iter().map(|worker| &worker.sender)
    }

    pub fn tell(&self, command: impl Fn() -> C) {
        self.senders().for_each(|sender| sender.tell(command()));
    }

    pub fn snapshots(&self) -> Vec<S>
    where
        S: Clone,
    {
        self.running.iter().map(|worker| worker.shared.published().clone()).collect()
    }

    /// Sends each worker a command and waits up to `patience` for all replies, in worker order. `TimedOut` if
    /// a worker is stuck or has ended; `action` is the verb phrase in that message.
    pub fn ask<T>(
        &self,
        patience: Duration,
        action: &str,
        mut command: impl FnMut(mpsc::Sender<T>) -> C,
    ) -> io::Result<Vec<T>> {
        let asked = |sender: &Sender<C>| {
            let (answer, answered) = mpsc::channel();
            sender.tell(command(answer));
            answered
        };
        let asked: Vec<_> = self.senders().map(asked).collect();
        let until = Instant::now() + patience;
        let answer = |answer: mpsc::Receiver<T>| {
            let left = until.saturating_duration_since(Instant::now());
            answer.recv_timeout(left).map_err(|_| {
                io::Error::new(io::ErrorKind::TimedOut, format!("a worker did not {action} in time"))
            })
        };
        asked.into_iter().map(answer).collect()
    }

    /// True if a worker has ended without being stopped.
    pub fn have_failed(&self) -> bool {
        self.running.iter().any(|worker| worker.thread.as_ref().is_none_or(JoinHandle::is_finished))
    }

    /// True if every worker has read its commands since the last call that returned true. If so, wakes
    /// all workers for the next call, which costs each of them one loop iteration.
    #[must_use]
    pub fn make_progress(&self) -> bool {
        let has_woken = |worker: &Running<C, S>| worker.shared.has_woken.load(Ordering::Relaxed);
        let all = self.running.iter().all(has_woken);
        if all {
            for Running { sender, shared, .. } in &self.running {
                shared.has_woken.store(false, Ordering::Relaxed);
                sender.waker.wake();
            }
        }
        all
    }

    /// Stops all workers and waits for them.
    pub fn stop(&mut self) {
        self.senders().for_each(Sender::stop);
        for worker in &mut self.running {
            if let Some(thread) = worker.thread.take() {
                // If a worker has panicked, the panic has already been printed.
                let _ = thread.join();
            }
        }
    }
}

impl<C, S> Drop for Workers<C, S> {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    enum Told {
        Add(u32),
        Wait(mpsc::Receiver<()>),
        Ask(mpsc::Sender<u32>),
        Panic,
    }

    type Sum = Workers<Told, (u32, bool)>;

    fn spawn(workers: &mut Sum) {
        let frame = Frame::<Told, (u32, bool)>::new(workers.count(), Instant::now()).unwrap();
        let run = |mut frame: Frame<Told, (u32, bool)>| {
            let mut sum = 0;
            while !frame.is_stopped {
                let mut events = frame.poller.wait(None).unwrap().iter();
                assert!(events.all(|event| event.token == INBOX));
                while let Some(told) = frame.command() {
                    match told {
                        Told::Add(number) => sum += number,
                        Told::Wait(until) => _ = until.recv(),
                        Told::Ask(answer) => _ = answer.send(sum),
                        Told::Panic => panic!("requested panic"),
                    }
                }
                let state = (sum, frame.is_stopped);
                frame.publish(0, |published| *published = state);
            }
        };
        workers.spawn("summing".to_owned(), frame, |frame| frame, run).unwrap();
    }

    #[test]
    fn dropping_workers_stops_each_after_its_commands() {
        let mut workers = Workers::default();
        (0..3).for_each(|_| spawn(&mut workers));
        let shared: Vec<_> = workers.running.iter().map(|worker| Arc::clone(&worker.shared)).collect();
        for number in 0..1000 {
            workers.tell(|| Told::Add(number));
        }
        assert_eq!((workers.count(), workers.have_failed()), (3, false));
        drop(workers);
        for shared in shared {
            assert_eq!(*shared.published(), (499_500, true));
        }
    }

    #[test]
    fn replies_keep_the_order_of_workers_and_a_missing_reply_is_an_error() {
        let mut workers = Workers::default();
        (0..3).for_each(|_| spawn(&mut workers));
        for (number, sender) in (0..).zip(workers.senders()) {
            sender.tell(Told::Add(number));
        }
        let soon = Duration::from_secs(60);
        assert_eq!(workers.ask(soon, "add up", Told::Ask).unwrap(), [0, 1, 2]);
        workers.senders().take(1).for_each(|sender| sender.tell(Told::Panic));
        let error = workers.ask(soon, "add up", Told::Ask).unwrap_err();
        assert_eq!(
            (error.kind(), error.to_string()),
            (io::ErrorKind::TimedOut, "a worker did not add up in time".to_owned())
        );
    }

    #[test]
    fn panicked_worker_has_failed_and_ignores_commands() {
        let mut workers = Workers::default();
        spawn(&mut workers);
        workers.tell(|| Told::Panic);
        while !workers.have_failed() {
            thread::yield_now();
        }
        workers.tell(|| Told::Add(1));
        workers.stop();
        assert_eq!(workers.snapshots(), [(0, false)]);
    }

    #[test]
    fn deferred_commands_come_first_and_wake_the_worker() {
        let mut frame = Frame::<u32, ()>::new(0, Instant::now()).unwrap();
        frame.sender.tell(1);
        frame.sender.tell(2);
        assert_eq!(frame.next_command(), Some(1));
        frame.defer(1);
        frame.sender.tell(3);
        let commands: Vec<u32> = std::iter::from_fn(|| frame.command()).collect();
        assert_eq!(commands, [1, 2, 3]);
        assert!(frame.poller.wait(Some(Duration::ZERO)).unwrap().is_empty());
        frame.defer(4);
        assert_eq!(frame.poller.wait(Some(Duration::ZERO)).unwrap().len(), 1);
        frame.sender.stop();
        assert_eq!((frame.command(), frame.is_stopped), (Some(4), false));
        assert_eq!((frame.command(), frame.is_stopped), (None, true));
    }

    #[test]
    fn hung_worker_stops_progress() {
        let mut workers = Workers::default();
        (0..3).for_each(|_| spawn(&mut workers));
        let until_all_answer = || {
            while !workers.make_progress() {
                thread::yield_now();
            }
        };
        assert!(workers.make_progress(), "progress has not been requested yet");
        until_all_answer();
        let (go_on, until) = mpsc::channel();
        workers.senders().next().unwrap().tell(Told::Wait(until));
        until_all_answer();
        // The other workers have replied and are not woken again in the meantime.
        for _ in 0..1000 {
            assert!(!workers.make_progress());
        }
        drop(go_on);
        until_all_answer();
    }
}
