//! Capabilities: which are kept, and that no program that is started gets others (no_new_privs).

use std::{io, sync::OnceLock};

use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};

/// Privileges at the start of the process.
static BEFORE: OnceLock<CapabilitySet> = OnceLock::new();

/// Forbids core dumps of this process, which holds keys, and tracing by other processes of this user (PR_SET_DUMPABLE in prctl(2)). A new
/// program sets its own.
pub(super) fn forbid_core_dumps() -> io::Result<()> {
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Drops all other privileges of this thread and of those that it starts.
pub(super) fn drop_all_but(wanted: CapabilitySet) -> Result<Vec<String>, String> {
    let drop = || -> io::Result<CapabilitySet> {
        // Without it a program of root would have all of them again.
        set_no_new_privs(true)?;
        let held = capabilities(None)?;
        BEFORE.get_or_init(|| held.permitted);
        let kept = kept(wanted, held.permitted);
        let inheritable = held.inheritable & kept;
        // Not called without need: units may forbid capset(2).
        if (kept, inheritable) != (held.permitted, held.inheritable) {
            set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable })?;
        }
        Ok(kept)
    };
    drop().map(names).map_err(|error| format!("they cannot be given up ({error})"))
}

/// Wanted privileges that the process began with and no longer has.
pub(super) fn given_up(wanted: CapabilitySet) -> Option<String> {
    let now = capabilities(None).ok()?.permitted;
    let gone = names(kept(wanted, *BEFORE.get()?) & !now);
    (!gone.is_empty()).then(|| gone.join(", "))
}

fn kept(wanted: CapabilitySet, held: CapabilitySet) -> CapabilitySet {
    // Linux before 5.8 knows no CAP_BPF: there it is a part of CAP_SYS_ADMIN.
    let is_old = wanted.contains(CapabilitySet::BPF) && !held.contains(CapabilitySet::BPF);
    let wanted = if is_old { wanted | CapabilitySet::SYS_ADMIN } else { wanted };
    wanted & held
}

/// As capabilities(7) has them, without `CAP_`.
fn names(set: CapabilitySet) -> Vec<String> {
    set.iter_names().map(|(name, _)| name.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::alone;

    use super::*;

    #[test]
    fn before_cap_bpf_its_place_is_taken_by_the_one_before() {
        let kernel = CapabilitySet::BPF | CapabilitySet::NET_ADMIN;
        let old = CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN | CapabilitySet::CHOWN;
        assert_eq!(names(kept(kernel, old)), ["NET_ADMIN", "SYS_ADMIN"]);
        assert_eq!(names(kept(kernel, old | CapabilitySet::BPF)), ["NET_ADMIN", "BPF"]);
        assert_eq!(names(kept(CapabilitySet::NET_ADMIN, old)), ["NET_ADMIN"]);
        assert!(kept(kernel, CapabilitySet::empty()).is_empty());
    }

    #[test]
    fn memory_goes_into_no_core_dump() {
        alone::in_own_process(turnpike_testkit::this_test!(), || {
            forbid_core_dumps().expect("it is ours");
            let now = rustix::process::dumpable_behavior().expect("it is ours");
            assert_eq!(now, DumpableBehavior::NotDumpable);
        });
    }

    #[test]
    fn what_is_given_up_is_gone_for_good_and_known() {
        alone::in_own_process(turnpike_testkit::this_test!(), || {
            let held = capabilities(None).expect("it is ours").permitted;
            let kept = drop_all_but(CapabilitySet::NET_BIND_SERVICE).expect("less can always be had");
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
