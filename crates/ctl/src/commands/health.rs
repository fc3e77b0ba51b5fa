//! `turnpike health` and `turnpike drain --wait`, for containers without a shell.

use std::{io::Write, thread, time::Duration};

use turnpike_api::Status;

use super::{CommandError, write_json};
use crate::client::{Client, ClientError};

const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Checks readiness or, with `live`, only that the program is running.
pub fn health(client: &Client, live: bool, json: bool, out: &mut dyn Write) -> Result<(), CommandError> {
    let (well, words) = client.words(if live { "/livez" } else { "/readyz?verbose" })?;
    if json {
        let mut lines = words.lines();
        let (state, relays) = (lines.next().unwrap_or_default(), lines.collect::<Vec<_>>());
        write_json(out, &serde_json::json!({ "well": well, "state": state, "relays": relays }))?;
    } else if well {
        writeln!(out, "{words}")?;
    }
    if well { Ok(()) } else { Err(CommandError::Unwell(words)) }
}

/// Waits until the running program has exited, which happens by the deadline of `drain` at the latest.
pub fn wait_for_end(client: &Client) -> Result<(), CommandError> {
    let mut waited_for = None;
    loop {
        match client.get::<Status>("/v1/status") {
            Ok(Status { pid, started_at, .. }) => {
                let process = (pid, started_at);
                // A service manager, for example, may already have started another process.
                if *waited_for.get_or_insert_with(|| process.clone()) != process {
                    return Ok(());
                }
            }
            Err(ClientError::NoProgram { .. }) => return Ok(()),
            // The program may exit while it is answering; the next request will then find no program.
            Err(ClientError::Broken { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        thread::sleep(LOOK_AGAIN);
    }
}
