//! What the threads of the data path have in common towards whoever starts them: an inbox that wakes them up, something that they
//! publish, and an end that is waited for.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::poll::{Poller, Waker};

/// What a worker is told, among it that it shall end.
pub trait Command: Send + 'static {
    /// Ends the worker.
    const STOP: Self;
}

/// What a worker is told that is asked now and then whether it still takes commands.
pub trait Asked: Command {
    /// Asks; to take it out of the inbox and drop it is the answer.
    fn ask(question: Question) -> Self;
}

/// Whether a worker still takes commands. It has answered once it has dropped its copy.
#[derive(Clone, Debug, Default)]
pub struct Question(Arc<()>);

/// Both ends of a worker's inbox; its poller tells of new commands under `token`.
///
/// # Errors
/// Those of eventfd(2) and epoll_ctl(2).
pub fn inbox<C>(poller: &Poller, token: u64) -> io::Result<(Sender<C>, Inbox<C>)> {
    let waker = Waker::new(poller, token)?;
    let (commands, received) = mpsc::channel();
    Ok((Sender { commands, waker: waker.clone() }, Inbox { commands: received, waker }))
}

/// The way to a worker, for any thread.
#[derive(Debug)]
pub struct Sender<C> {
    commands: mpsc::Sender<C>,
    waker: Waker,
}

impl<C> Clone for Sender<C> {
    fn clone(&self) -> Self {
        Self { commands: self.commands.clone(), waker: self.waker.clone() }
    }
}

impl<C> Sender<C> {
    /// Tells the worker, without waiting. One that is gone needs no telling.
    pub fn tell(&self, command: C) {
        let _ = self.send(command);
    }

    /// The same, where a command must not be lost.
    ///
    /// # Errors
    /// The worker is gone: the command comes back.
    pub fn send(&self, command: C) -> Result<(), C> {
        self.commands.send(command).map_err(|mpsc::SendError(command)| command)?;
        self.waker.wake();
        Ok(())
    }
}

/// The worker's end.
#[derive(Debug)]
pub struct Inbox<C> {
    commands: mpsc::Receiver<C>,
    waker: Waker,
}

impl<C> Inbox<C> {
    /// To be called after a wake-up and before [`Self::command`], or the poller tells of it again.
    pub fn acknowledge(&self) {
        self.waker.acknowledge();
    }

    /// Has the poller tell of it again: the worker leaves the rest for later.
    pub fn wake_again(&self) {
        self.waker.wake();
    }

    /// The next command, which is waited for. `None` when nobody is left who could send one.
    pub fn wait(&self) -> Option<C> {
        self.commands.recv().ok()
    }

    /// The next command, if there is one. No system call.
    pub fn command(&self) -> Option<C> {
        self.commands.try_recv().ok()
    }
}

/// What a worker has published last, for whoever looks. Neither side keeps the lock for longer than a copy takes.
#[derive(Debug, Default)]
pub struct Published<T>(Mutex<T>);

impl<T> Published<T> {
    /// Changes it.
    pub fn update(&self, change: impl FnOnce(&mut T)) {
        change(&mut self.lock());
    }

    /// A copy.
    pub fn get(&self) -> T
    where
        T: Clone,
    {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Running workers that are told `C` and share an `S` each. Dropping this stops and joins them.
#[derive(Debug)]
pub struct Workers<C: Command, S> {
    running: Vec<Running<C, S>>,
    question: Mutex<Question>,
}

#[derive(Debug)]
struct Running<C, S> {
    sender: Sender<C>,
    shared: Arc<S>,
    /// `None` once it is joined.
    thread: Option<JoinHandle<()>>,
}

impl<C: Command, S> Default for Workers<C, S> {
    fn default() -> Self {
        Self { running: Vec::new(), question: Mutex::default() }
    }
}

impl<C: Command, S> Workers<C, S> {
    /// Starts one more: `run` returns when `sender` has told it [`Command::STOP`].
    ///
    /// # Errors
    /// When the system has no more threads.
    pub fn spawn(
        &mut self,
        name: String,
        sender: Sender<C>,
        shared: Arc<S>,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let thread = Some(thread::Builder::new().name(name).spawn(run)?);
        self.running.push(Running { sender, shared, thread });
        Ok(())
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.running.len()
    }

    /// The way to each.
    pub fn senders(&self) -> impl Iterator<Item = &Sender<C>> {
        self.running.iter().map(|worker| &worker.sender)
    }

    /// What each shares.
    pub fn shared(&self) -> impl Iterator<Item = &S> {
        self.running.iter().map(|worker| &*worker.shared)
    }

    /// Asks all at once, and waits for the answers, altogether for so long; `what` says what they are to do.
    ///
    /// # Errors
    /// `TimedOut` where one does not answer: it is stuck or gone.
    pub fn ask<T>(
        &self,
        patience: Duration,
        what: &str,
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
                io::Error::new(io::ErrorKind::TimedOut, format!("a worker did not {what} in time"))
            })
        };
        asked.into_iter().map(answer).collect()
    }

    /// Whether one has ended though nobody stopped it.
    pub fn have_failed(&self) -> bool {
        self.running.iter().any(|worker| worker.thread.as_ref().is_none_or(JoinHandle::is_finished))
    }

    /// Tells all of them to stop, and then waits for each.
    pub fn stop(&mut self) {
        self.senders().for_each(|sender| sender.tell(C::STOP));
        for worker in &mut self.running {
            if let Some(thread) = worker.thread.take() {
                // One that panicked has said so itself.
                let _ = thread.join();
            }
        }
    }
}

impl<C: Asked, S> Workers<C, S> {
    /// Whether each worker has answered what the last call of this asked; if so, asks again. The first call has nothing to go by, and
    /// says yes. A worker that sleeps is woken up, at the cost of one round through its loop.
    #[must_use]
    pub fn make_progress(&self) -> bool {
        let question = self.question.lock().unwrap_or_else(PoisonError::into_inner);
        let answered = Arc::strong_count(&question.0) == 1;
        if answered {
            self.senders().for_each(|sender| sender.tell(C::ask(question.clone())));
        }
        answered
    }
}

impl<C: Command, S> Drop for Workers<C, S> {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAKE: u64 = 7;

    enum Told {
        Add(u32),
        Wait(mpsc::Receiver<()>),
        Answer(Question),
        /// What the sum is now.
        Ask(mpsc::Sender<u32>),
        Panic,
        Stop,
    }

    impl Command for Told {
        const STOP: Self = Self::Stop;
    }

    impl Asked for Told {
        fn ask(question: Question) -> Self {
            Self::Answer(question)
        }
    }

    /// Sums up what it is told until it is stopped.
    fn spawn(workers: &mut Workers<Told, Published<(u32, bool)>>) {
        let mut poller = Poller::new().unwrap();
        let (sender, inbox) = inbox(&poller, WAKE).unwrap();
        let shared = Arc::<Published<(u32, bool)>>::default();
        let published = Arc::clone(&shared);
        let run = move || {
            loop {
                assert!(poller.wait(None).unwrap().iter().all(|event| event.token == WAKE));
                inbox.acknowledge();
                while let Some(told) = inbox.command() {
                    match told {
                        Told::Add(number) => published.update(|(sum, _)| *sum += number),
                        Told::Wait(until) => _ = until.recv(),
                        Told::Answer(question) => drop(question),
                        Told::Ask(answer) => _ = answer.send(published.get().0),
                        Told::Panic => panic!("as told"),
                        Told::Stop => return published.update(|(_, stopped)| *stopped = true),
                    }
                }
            }
        };
        workers.spawn("summing".to_owned(), sender, shared, run).unwrap();
    }

    #[test]
    fn dropping_workers_ends_each_after_what_it_was_told_before() {
        let mut workers = Workers::default();
        (0..3).for_each(|_| spawn(&mut workers));
        let shared: Vec<_> = workers.running.iter().map(|worker| Arc::clone(&worker.shared)).collect();
        for number in 0..1000 {
            workers.senders().for_each(|sender| sender.tell(Told::Add(number)));
        }
        assert_eq!((workers.count(), workers.have_failed()), (3, false));
        drop(workers);
        for shared in shared {
            assert_eq!(shared.get(), (499_500, true));
        }
    }

    #[test]
    fn answers_come_in_the_order_of_the_workers_and_one_that_is_missing_is_told() {
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
    fn a_worker_that_panics_has_failed_and_is_told_in_vain() {
        let mut workers = Workers::default();
        spawn(&mut workers);
        workers.senders().for_each(|sender| sender.tell(Told::Panic));
        while !workers.have_failed() {
            thread::yield_now();
        }
        workers.senders().for_each(|sender| sender.tell(Told::Add(1)));
        workers.stop();
        assert_eq!(workers.shared().map(Published::get).collect::<Vec<_>>(), [(0, false)]);
    }

    #[test]
    fn workers_make_progress_unless_one_of_them_hangs() {
        let mut workers = Workers::default();
        (0..3).for_each(|_| spawn(&mut workers));
        let until_all_answer = || {
            while !workers.make_progress() {
                thread::yield_now();
            }
        };
        assert!(workers.make_progress(), "nothing was asked yet");
        until_all_answer();
        let (go_on, until) = mpsc::channel();
        workers.senders().next().unwrap().tell(Told::Wait(until));
        until_all_answer();
        // All others answer, and are asked nothing more meanwhile.
        for _ in 0..1000 {
            assert!(!workers.make_progress());
        }
        drop(go_on);
        until_all_answer();
    }
}
