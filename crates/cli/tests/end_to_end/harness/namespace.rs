//! A network of one's own, in which addresses and ports are free that somebody has outside.

use std::process::Command;

use super::{Program, installed};

/// Commands that have the shell run a script in a new network namespace, with loopback and what else `setup` makes. Or why there are none.
pub(crate) fn namespace(setup: &'static str) -> Result<impl Fn(&str) -> Command, String> {
    installed("ip")?;
    installed("unshare")?;
    // With the shell, the first process of its namespace, everything in it ends.
    let inside = move |flags: &str, script: &str| {
        let script = format!("ip link set lo up && {setup} && {script}");
        let mut command = Command::new("unshare");
        command.args([flags, "--kill-child", "sh", "-c", &script]).env_remove("TURNPIKE_CONFIG");
        command
    };
    // A user namespace needs no privilege, but is often forbidden in containers, where root may do without.
    let allowed = |flags: &&str| Program::run(&mut inside(flags, "true")).code == Some(0);
    let flags = ["-npf", "-rnpf"].into_iter().find(allowed);
    let flags = flags.ok_or("unshare(1) and ip(8) cannot make a network namespace here")?;
    Ok(move |script: &str| inside(flags, script))
}
