//! Checks of a configuration that need crates above `config`.

use turnpike_config::Checks;

pub(crate) const CHECKS: Checks =
    Checks { log_filter: turnpike_process::check_filter, turn_uri: turnpike_client::uri::turn_uri };
