//! `turnpike health`, and what `turnpike drain --wait` waits for: for those who look after a program and have no shell, as in a container.

use std::{io::Write, thread, time::Duration};

use super::{CommandError, write_json};
use crate::client::{Client, ClientError};

/// How often it is asked whether the program has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Says how the program is: whether it takes clients, or with `live` whether it runs.
///
/// # Errors
/// See [`CommandError`]; [`CommandError::Unwell`] where it takes nobody new.
pub fn health(client: &Client, live: bool, json: bool, out: &mut dyn Write) -> Result<(), CommandError> {
    let (well, words) = client.words(if live { "/livez" } else { "/readyz" })?;
    if json {
        write_json(out, &serde_json::json!({ "well": well, "state": words }))?;
    } else if well {
        writeln!(out, "{words}")?;
    }
    if well { Ok(()) } else { Err(CommandError::Unwell(words)) }
}

/// Waits until no program answers any more. Who ends it says when that is at the latest (`drain`).
///
/// # Errors
/// See [`CommandError`]: somebody is there who does not answer this one.
pub fn wait_for_end(client: &Client) -> Result<(), CommandError> {
    loop {
        match client.finds_somebody() {
            Ok(false) => return Ok(()),
            // It may end in the midst of an answer: then nobody is there the next time.
            Ok(true) | Err(ClientError::Broken { .. }) => thread::sleep(LOOK_AGAIN),
            Err(error) => return Err(error.into()),
        }
    }
}
