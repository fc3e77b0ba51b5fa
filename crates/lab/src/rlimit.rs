//! Limits of this process that all programs it starts inherit.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Sockets of 10,000 allocations, or of 5,000 connections through a forwarder, with room to spare.
const FILES: u64 = 1 << 20;

/// Lets programs open as many files as the kernel permits: what has too few of them says so itself.
pub(crate) fn raise_open_files() {
    let now = getrlimit(Resource::Nofile);
    // Beyond the hard limit takes CAP_SYS_RESOURCE, which root of a container may lack; then up to it.
    let candidates = [Some(FILES), now.maximum.map(|hard| hard.min(FILES))];
    for files in candidates.into_iter().flatten() {
        let maximum = now.maximum.map(|hard| hard.max(files));
        if now.current.is_none_or(|current| current >= files)
            || setrlimit(Resource::Nofile, Rlimit { current: Some(files), maximum }).is_ok()
        {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_files_as_may_be_are_open_to_all() {
        raise_open_files();
        let now = getrlimit(Resource::Nofile);
        assert!(now.current.is_none_or(|current| current >= now.maximum.unwrap_or(FILES).min(FILES)));
    }
}
