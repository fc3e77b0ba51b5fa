//! Open file limit.

use std::sync::{Mutex, PoisonError};

/// Limit and required number of files in the last warning, so that a reload does not repeat the warning.
static WARNED: Mutex<Option<(u64, u64)>> = Mutex::new(None);

/// Raises the open file limit to `needed` plus `apart`. On failure, logs that `subject` needs that many and
/// that `key` can be lowered. The `apart` files are for the admin interface and reloads, so that clients
/// cannot use them up.
pub fn raise_open_files(needed: u64, apart: u64, subject: &str, key: &str) {
    let needed = needed + apart;
    let limit = turnpike_net::rlimit::raise_open_files(needed);
    if limit < needed {
        let warned = WARNED.lock().unwrap_or_else(PoisonError::into_inner).replace((limit, needed));
        if warned != Some((limit, needed)) {
            tracing::warn!(
                "the limit on open files is {limit}, but {subject} may need {needed}; raise it with `ulimit -n {needed}` \
                 or LimitNOFILE=, or lower {key}"
            );
        }
    }
    // If this fails for lack of memory, the descriptor table grows on demand.
    let _ = turnpike_net::rlimit::make_room(needed);
    turnpike_net::rlimit::set_apart(apart);
}
