//! Room for as many files as the configuration may need.

/// Raises the limit of open files to `needed`, and says so where that is not possible: `subject` needs them, `key` is what can be
/// lowered instead.
pub(crate) fn raise_open_files(needed: u64, subject: &str, key: &str) {
    match turnpike_net::limits::raise_open_files(needed) {
        Ok(limit) if limit < needed => tracing::warn!(
            "the limit of open files is {limit}, {subject} may need {needed}; raise it with `ulimit -n {needed}` \
             or LimitNOFILE=, or lower {key}"
        ),
        Ok(_) => {}
        Err(error) => tracing::warn!("cannot raise the limit of open files to {needed}: {error}"),
    }
}
