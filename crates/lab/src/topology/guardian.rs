//! A shell process, the guardian, that outlives the lab. When the lab's end of a pipe closes, for whatever reason, the guardian kills all
//! processes with the lab's mark and removes the lab's namespaces, so even a SIGKILL of the lab leaves nothing behind.

use std::{
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use crate::{error::LabError, program::MARK};

/// Script of the guardian; its arguments are the mark, the state file, and the names of the namespaces. It kills only processes that the
/// lab started, which have the mark or are in the namespaces.
const SCRIPT: &str = r#"
mark=$1; state=$2; shift 2
trap '' INT TERM HUP QUIT
cat >/dev/null
tries=0
while [ $tries -lt 20 ]; do
    tries=$((tries + 1)); found=
    for file in $(grep -lzx "$mark" /proc/[0-9]*/environ 2>/dev/null); do
        pid=${file#/proc/}; kill -9 "${pid%/environ}" 2>/dev/null && found=1
    done
    for name in "$@"; do
        for pid in $(ip netns pids "$name" 2>/dev/null); do kill -9 "$pid" 2>/dev/null && found=1; done
    done
    [ -z "$found" ] && break
    sleep 0.05
done
for name in "$@"; do ip netns del "$name" 2>/dev/null; done
rm -f "$state"
"#;

#[derive(Debug)]
pub(crate) struct Guardian(Child);

impl Guardian {
    pub(crate) fn start(id: &str, state: &Path, namespaces: &[String]) -> Result<Self, LabError> {
        Command::new("sh")
            .args(["-c", SCRIPT, "turnpike-lab-guardian", &format!("{MARK}={id}")])
            .arg(state)
            .args(namespaces)
            // A guardian that inherited the mark of an outer lab would kill itself.
            .env_remove(MARK)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C reaches the foreground process group, which the guardian must outlive.
            .process_group(0)
            .spawn()
            .map(Self)
            .map_err(LabError::io("cannot start `sh`"))
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}
