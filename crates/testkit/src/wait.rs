//! Polling with a deadline, instead of sleeping for a guessed time.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Deadline for events that take almost no time on an idle machine; only a failing test waits this long.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Polls until the answer is `true` or `Some`, and returns the value.
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

pub trait Answer {
    type Found;
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
