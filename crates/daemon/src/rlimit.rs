//! Room for as many files as the configuration may need.

use std::sync::{Mutex, PoisonError};

/// Limit and need of the last warning: a reload that changes neither repeats nothing.
static WARNED: Mutex<Option<(u64, u64)>> = Mutex::new(None);

/// Raises the limit of open files to `needed` and those that are set `apart`, and says so where that is not possible: `subject` needs
/// them, `key` is what can be lowered instead. Set apart they are for the admin interface and for files that a reload reads: who connects
/// shall not take them.
pub(crate) fn raise_open_files(needed: u64, apart: u64, subject: &str, key: &str) {
    let needed = needed + apart;
    let limit = turnpike_net::rlimit::raise_open_files(needed);
    if limit < needed {
        let warned = WARNED.lock().unwrap_or_else(PoisonError::into_inner).replace((limit, needed));
        if warned != Some((limit, needed)) {
            tracing::warn!(
                "the limit of open files is {limit}, {subject} may need {needed}; raise it with `ulimit -n {needed}` \
                 or LimitNOFILE=, or lower {key}"
            );
        }
    }
    // Where there is no memory for it, the table grows when descriptors are asked for.
    let _ = turnpike_net::rlimit::make_room(needed);
    turnpike_net::rlimit::set_apart(apart);
}
