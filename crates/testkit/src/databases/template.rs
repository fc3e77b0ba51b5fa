//! Initial files of a server. Creating them takes seconds of CPU time, so this is done once per process, and each server gets a copy.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use super::files::{command_in, make_dir, run};

pub(super) struct Template {
    dir: PathBuf,
    /// Shell that removes the directory when its standard input is closed, which happens when this process exits for any reason.
    _remover: Child,
}

impl Template {
    pub(super) fn new(name: &str, fill: impl FnOnce(&Path)) -> Self {
        let dir = std::env::temp_dir().join(format!("turnpike-store-{}-{name}", std::process::id()));
        make_dir(&dir);
        let mut remover = Command::new("sh");
        remover.args(["-c", "read -r _; rm -rf \"$0\""]).arg(&dir);
        let remover = remover.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let _remover = remover.spawn().expect("the shell starts");
        fill(&dir);
        Self { dir, _remover }
    }

    pub(super) fn copy_to(&self, dir: &Path) {
        run(command_in(dir, Path::new("cp")).arg("-a").arg(self.dir.join("data")).arg("data"));
    }
}
