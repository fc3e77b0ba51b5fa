//! Capabilities: drops the unneeded ones, and sets no_new_privs so that started programs cannot gain others.

use std::{io, sync::OnceLock};

use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};

static BEFORE: OnceLock<CapabilitySet> = OnceLock::new();

/// Forbids core dumps, which would contain keys, and tracing by other processes of the same user
/// (PR_SET_DUMPABLE in prctl(2)). execve(2) resets this.
pub(super) fn forbid_core_dumps() -> io::Result<()> {
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

pub(super) fn drop_all_but(wanted: CapabilitySet) -> Result<Vec<String>, String> {
    let drop = || -> io::Result<CapabilitySet> {
        // Without this, a setuid root program would regain all capabilities.
        set_no_new_privs(true)?;
        let held = capabilities(None)?;
        BEFORE.get_or_init(|| held.permitted);
        let kept = kept(wanted, held.permitted);
        let inheritable = held.inheritable & kept;
        // Skipped if not needed: units may forbid capset(2).
        if (kept, inheritable) != (held.permitted, held.inheritable) {
            set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable })?;
        }
        Ok(kept)
    };
    drop().map(names).map_err(|error| format!("cannot drop capabilities ({error})"))
}

/// Wanted privileges that the process had at startup but no longer has.
pub(super) fn given_up(wanted: CapabilitySet) -> Option<String> {
    let now = capabilities(None).ok()?.permitted;
    let gone = names(kept(wanted, *BEFORE.get()?) & !now);
    (!gone.is_empty()).then(|| gone.join(", "))
}

fn kept(wanted: CapabilitySet, held: CapabilitySet) -> CapabilitySet {
    // Linux before 5.8 has no CAP_BPF; there, CAP_SYS_ADMIN grants the same privileges.
    let is_old = wanted.contains(CapabilitySet::BPF) && !held.contains(CapabilitySet::BPF);
    let wanted = if is_old { wanted | CapabilitySet::SYS_ADMIN } else { wanted };
    wanted & held
}

/// Names as in capabilities(7), without `CAP_`.
fn names(set: CapabilitySet) -> Vec<String> {
    set.iter_names().map(|(name, _)| name.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::alone;

    use super::*;

    #[test]
    fn without_cap_bpf_cap_sys_admin_is_kept() {
        let kernel = CapabilitySet::BPF | CapabilitySet::NET_ADMIN;
        let old = CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN | CapabilitySet::CHOWN;
        assert_eq!(names(kept(kernel, old)), ["NET_ADMIN", "SYS_ADMIN"]);
        assert_eq!(names(kept(kernel, old | CapabilitySet::BPF)), ["NET_ADMIN", "BPF"]);
        assert_eq!(names(kept(CapabilitySet::NET_ADMIN, old)), ["NET_ADMIN"]);
        assert!(kept(kernel, CapabilitySet::empty()).is_empty());
    }

    #[test]
    fn core_dumps_are_disabled() {
        alone::in_own_process(turnpike_testkit::this_test!(), || {
            forbid_core_dumps().expect("always allowed");
            let now = rustix::process::dumpable_behavior().expect("always allowed");
            assert_eq!(now, DumpableBehavior::NotDumpable);
        });
    }

    #[test]
    fn dropped_privileges_stay_dropped_and_are_reported() {
        alone::in_own_process(turnpike_testkit::this_test!(), || {
            let held = capabilities(None).expect("always allowed").permitted;
            let kept = drop_all_but(CapabilitySet::NET_BIND_SERVICE).expect("dropping is always allowed");
            assert!(kept.iter().all(|name| *name == "NET_BIND_SERVICE"), "{kept:?}");
            let again =
                CapabilitySets { effective: held, permitted: held, inheritable: CapabilitySet::empty() };
            let had_more = !(held & !CapabilitySet::NET_BIND_SERVICE).is_empty();
            assert_eq!(set_capabilities(None, again).is_err(), had_more);
            let gone = given_up(CapabilitySet::CHOWN | CapabilitySet::NET_BIND_SERVICE);
            assert_eq!(gone.as_deref(), held.contains(CapabilitySet::CHOWN).then_some("CHOWN"));
        });
    }
}
