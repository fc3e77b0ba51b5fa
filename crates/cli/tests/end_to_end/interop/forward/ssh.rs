//! ssh and scp to a local sshd with fresh keys.

use crate::prelude::*;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use super::{all_installed, free_address, is_root, noise, run};

const FILE: u64 = 8 << 20;

/// An sshd that admits only the user who runs the tests. It runs as that user, because only root's sshd
/// can log in other users.
pub(super) struct Sshd {
    pub(super) address: SocketAddr,
    user: String,
    dir: Dir,
    program: Program,
}

impl Sshd {
    pub(super) fn start() -> Result<Self, String> {
        all_installed(&["sshd", "ssh", "scp", "ssh-keygen", "sha256sum"])?;
        let sshd = installed("sshd")?;
        let (user, shell) = myself().ok_or("this user has no name to log in with")?;
        if ["nologin", "false"].iter().any(|no| shell.ends_with(no)) {
            return Err(format!("{user} has no shell to log in to"));
        }
        if is_root() {
            // sshd's chroot directory: compiled in, and normally created by the service.
            let _ = fs::create_dir_all("/run/sshd");
        }
        let dir = Dir::new();
        for name in ["host", "user"] {
            let keygen = ["-q", "-t", "ed25519", "-N", "", "-f", name];
            run(Command::new("ssh-keygen").args(keygen).current_dir(dir.path()));
        }
        let address = free_address();
        let host_key =
            fs::read_to_string(dir.path().join("host.pub")).expect("ssh-keygen has written the key");
        // A fixed name, because behind a forwarder the address and port are not the host's.
        dir.file("known_hosts", format!("the-host {host_key}"));
        let here = dir.path().display();
        let conf = dir.file(
            "sshd_config",
            format!(
                "ListenAddress {address}\nHostKey {here}/host\nAuthorizedKeysFile {here}/user.pub\nPidFile none\n\
                 StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\n\
                 KbdInteractiveAuthentication no\nPrintMotd no\nSubsystem sftp internal-sftp\n"
            ),
        );
        fs::set_permissions(dir.path().join("host"), fs::Permissions::from_mode(0o600))
            .expect("the test's own file");
        let mut program = Program::start(Command::new(sshd).args(["-D", "-e", "-f"]).arg(conf));
        program.line_with("Server listening on ");
        let server = Self { address, user, dir, program };
        let ended = server.ssh(address, "true");
        if ended.code == Some(255)
            && server.program.lines().iter().any(|line| line.contains("account is locked"))
        {
            return Err(format!("the account of {} is locked", server.user));
        }
        assert_eq!(ended.code, Some(0), "without a forwarder: {}", ended.output());
        Ok(server)
    }

    pub(super) fn exercise(&self, through: SocketAddr) {
        let ended = self.ssh(through, "echo out; echo err >&2; exit 7");
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(7), "out"), "{}", ended.output());
        assert!(ended.stderr.contains("err"), "{}", ended.stderr);

        let sent = self.dir.path().join("sent");
        fs::write(&sent, noise(FILE)).expect("the test's own directory");
        let sum = run(Command::new("sha256sum").arg(&sent)).stdout[..64].to_owned();
        let ssh = [&["ssh".to_owned()], &self.options(through)[..], &["the-host".to_owned()]].concat();
        for (pipe, remote) in [
            ("\"$@\" | sha256sum", format!("cat {}", sent.display())),
            ("exec <\"$1\"; shift; \"$@\"", "sha256sum".to_owned()),
        ] {
            let mut shell = Command::new("sh");
            shell.args(["-c", pipe, "sh"]);
            if pipe.starts_with("exec") {
                shell.arg(&sent);
            }
            let ended = run(shell.args(&ssh).arg(remote));
            assert_eq!(ended.stdout[..64], sum, "{}", ended.output());
        }

        let remote = format!("the-host:{}", self.dir.path().join("stored").display());
        run(Command::new("scp").args(self.options(through)).arg(&sent).arg(&remote));
        assert!(fs::read(self.dir.path().join("stored")).is_ok_and(|stored| stored == noise(FILE)));
        let got = self.dir.path().join("got");
        run(Command::new("scp").args(self.options(through)).arg(&remote).arg(&got));
        assert!(fs::read(got).is_ok_and(|got| got == noise(FILE)));
    }

    fn ssh(&self, through: SocketAddr, remote: &str) -> Finished {
        Program::run(Command::new("ssh").args(self.options(through)).args(["the-host", remote]))
    }

    /// Options of ssh and scp: no user configuration, and only the known host key.
    fn options(&self, through: SocketAddr) -> Vec<String> {
        let here = self.dir.path().display();
        let mut options = vec!["-F".to_owned(), "/dev/null".to_owned()];
        for option in [
            format!("HostName={}", through.ip()),
            format!("Port={}", through.port()),
            format!("User={}", self.user),
            format!("IdentityFile={here}/user"),
            format!("UserKnownHostsFile={here}/known_hosts"),
            "GlobalKnownHostsFile=/dev/null".to_owned(),
            "HostKeyAlias=the-host".to_owned(),
            "StrictHostKeyChecking=yes".to_owned(),
            "IdentitiesOnly=yes".to_owned(),
            "BatchMode=yes".to_owned(),
        ] {
            options.extend(["-o".to_owned(), option]);
        }
        options
    }
}

fn myself() -> Option<(String, String)> {
    let uid = fs::metadata("/proc/self").ok()?.uid().to_string();
    let users = fs::read_to_string("/etc/passwd").ok()?;
    let user = users
        .lines()
        .map(|line| line.split(':').collect::<Vec<_>>())
        .find(|user| user.get(2) == Some(&&*uid))?;
    Some(((*user.first()?).to_owned(), (*user.get(6)?).to_owned()))
}

#[test]
fn commands_streams_and_files_pass() {
    let server = need!(Sshd::start());
    for copy in copies() {
        let mut forward =
            Forward::start(&[&format!("tcp://127.0.0.1:0={}?name=ssh&copy={copy}", server.address)]);
        server.exercise(forward.address("rule ssh"));
        forward.wait_for("turnpike_forward_connections", "rule=\"ssh\"", 0);
    }
}
