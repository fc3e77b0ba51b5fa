//! Configuration checks that need crates on which `config` cannot depend.

use turnpike_config::Checks;

pub(crate) const CHECKS: Checks =
    Checks { log_filter: turnpike_process::check_filter, turn_uri: turnpike_client::uri::turn_uri };
