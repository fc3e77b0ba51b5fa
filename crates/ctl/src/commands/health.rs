//! `turnpike health`, and what `turnpike drain --wait` waits for: for those who look after a program and have no shell, as in a container.

use std::{io::Write, thread, time::Duration};

use turnpike_api::Status;

use super::{CommandError, write_json};
use crate::client::{Client, ClientError};

/// How often it is asked whether the program has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Says how the program is: whether it takes clients, or with `live` whether it runs.
///
/// # Errors
/// See [`CommandError`]; [`CommandError::Unwell`] where it takes nobody new.
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

/// Waits until the program that answers now has ended. Who ends it says when that is at the latest (`drain`).
///
/// # Errors
/// See [`CommandError`]: somebody is there who does not answer this one.
pub fn wait_for_end(client: &Client) -> Result<(), CommandError> {
    let mut waited_for = None;
    loop {
        match client.get::<Status>("/v1/status") {
            Ok(Status { pid, started_at, .. }) => {
                let process = (pid, started_at);
                // Another one may have its place by now, such as one that a service manager has started.
                if *waited_for.get_or_insert_with(|| process.clone()) != process {
                    return Ok(());
                }
            }
            Err(ClientError::Nobody { .. }) => return Ok(()),
            // It may end in the midst of an answer: then nobody is there the next time.
            Err(ClientError::Broken { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        thread::sleep(LOOK_AGAIN);
    }
}
