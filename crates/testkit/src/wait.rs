//! Waiting for something by asking again and again: a test has no idea of how long anything takes.

use std::{
    thread,
    time::{Duration, Instant},
};

/// How long anything may take that happens at once on an idle machine: only a test that fails waits that long.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Asks until the answer is `true` or `Some`, and returns what was found.
pub fn eventually<A: Answer>(what: &str, mut ask: impl FnMut() -> A) -> A::Found {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = ask().found() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// What [`eventually`] is told: whether, or what.
pub trait Answer {
    /// What it finds.
    type Found;
    /// `None` to be asked again.
    fn found(self) -> Option<Self::Found>;
}

impl Answer for bool {
    type Found = ();

    fn found(self) -> Option<()> {
        self.then_some(())
    }
}

impl<T> Answer for Option<T> {
    type Found = T;

    fn found(self) -> Self {
        self
    }
}
