//! The service of the package: systemd's turnpike.service and its user.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::setup::{
    answers::Certificate,
    args::{SERVICE_CONFIG, is_root},
    error::SetupError,
};

pub(crate) const UNIT: &str = "turnpike.service";
const UNIT_DIRECTORIES: [&str; 3] = ["/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];
const DROP_INS: &str = "/etc/systemd/system/turnpike.service.d";
const LOW_PORTS: (&str, &str) =
    ("low-ports.conf", include_str!("../../../../deploy/systemd/drop-ins/low-ports.conf"));
const NOTIFY: (&str, &str) = ("notify.conf", include_str!("../../../../deploy/systemd/drop-ins/notify.conf"));
/// First version of systemd with `Type=notify-reload`.
const NOTIFY_RELOAD: u32 = 253;

const CERTBOT: &str = "/etc/letsencrypt/live";
const CERTBOT_HOOK: &str = "/etc/letsencrypt/renewal-hooks/deploy/turnpike";
const COPIES: &str = "/etc/turnpike/tls";

/// Name of the service's user.
const USER: &str = "turnpike";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Service {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Service {
    /// Service that reads this file. `None` without root, systemd, the unit or its user.
    pub(crate) fn find(config: &Path) -> Option<Self> {
        let has_unit = || UNIT_DIRECTORIES.iter().any(|directory| Path::new(directory).join(UNIT).is_file());
        let is_its = config == Path::new(SERVICE_CONFIG) && is_root();
        if !is_its || !Path::new("/run/systemd/system").is_dir() || !has_unit() {
            return None;
        }
        Self::of_accounts(&fs::read_to_string("/etc/passwd").ok()?)
    }

    /// Reads passwd(5).
    fn of_accounts(text: &str) -> Option<Self> {
        let line = text.lines().find_map(|line| line.strip_prefix(USER)?.strip_prefix(':'))?;
        let mut fields = line.split(':').skip(1);
        let mut number = || fields.next()?.parse::<u32>().ok();
        Some(Self { uid: number()?, gid: number()? })
    }

    pub(crate) fn is_active(self) -> bool {
        let status = Command::new("systemctl").args(["is-active", "--quiet", UNIT]).status();
        status.is_ok_and(|status| status.success())
    }

    /// Adds the drop-ins that the unit needs here.
    pub(crate) fn prepare(self, has_low_ports: bool) -> Result<(), SetupError> {
        let is_old = systemd_version().is_some_and(|version| version < NOTIFY_RELOAD);
        let needed = [LOW_PORTS].into_iter().filter(|_| has_low_ports);
        for (name, text) in needed.chain([NOTIFY].into_iter().filter(|_| is_old)) {
            let path = Path::new(DROP_INS).join(name);
            if !path.exists() {
                let written = fs::create_dir_all(DROP_INS).and_then(|()| fs::write(&path, text));
                written.map_err(|source| SetupError::Write { path, source })?;
            }
        }
        systemctl(&["daemon-reload"])
    }

    pub(crate) fn start(self) -> Result<(), SetupError> {
        systemctl(&["enable", UNIT])?;
        systemctl(&["restart", UNIT])
    }

    /// Copies certbot's files to a directory that the service can read, now and at each renewal.
    pub(crate) fn with_readable(self, certificate: Certificate) -> Result<Certificate, SetupError> {
        let Certificate::Files { cert, .. } = &certificate else { return Ok(certificate) };
        let Some(lineage) = cert.parent().filter(|lineage| lineage.starts_with(CERTBOT)) else {
            return Ok(certificate);
        };
        let hook = Path::new(CERTBOT_HOOK);
        let directory = hook.parent().unwrap_or(hook);
        let written = fs::create_dir_all(directory).and_then(|()| fs::write(hook, certbot_hook(lineage)));
        let executable = written.and_then(|()| fs::set_permissions(hook, fs::Permissions::from_mode(0o755)));
        executable.map_err(|source| SetupError::Write { path: hook.to_owned(), source })?;
        run(Command::new(hook).env("RENEWED_LINEAGE", lineage), "see the lines above")?;
        let copy = |name: &str| PathBuf::from(COPIES).join(name);
        Ok(Certificate::Files { cert: copy("fullchain.pem"), key: copy("privkey.pem") })
    }
}

fn certbot_hook(lineage: &Path) -> String {
    format!(
        "#!/bin/sh\n\
         # Written by `turnpike setup`: copies renewed files for the service, which certbot's directory keeps out.\n\
         set -e\n\
         [ \"$RENEWED_LINEAGE\" = '{}' ] || exit 0\n\
         install -d -m 750 -g {USER} {COPIES}\n\
         install -m 640 -g {USER} \"$RENEWED_LINEAGE/fullchain.pem\" \"$RENEWED_LINEAGE/privkey.pem\" {COPIES}/\n",
        lineage.display().to_string().replace('\'', r"'\''")
    )
}

fn systemd_version() -> Option<u32> {
    let output = Command::new("systemctl").arg("--version").output().ok()?;
    version_in(&String::from_utf8_lossy(&output.stdout))
}

/// Version in `systemd 252 (252.39-1~deb12u1)`.
fn version_in(text: &str) -> Option<u32> {
    text.split_whitespace().nth(1)?.parse().ok()
}

fn systemctl(arguments: &[&str]) -> Result<(), SetupError> {
    run(Command::new("systemctl").args(arguments), "journalctl -u turnpike -n 20 shows the reason")
}

fn run(command: &mut Command, hint: &str) -> Result<(), SetupError> {
    let shown = format!("{command:?}").replace('"', "");
    match command.stdin(Stdio::null()).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(SetupError::Start(format!("{shown} failed; {hint}"))),
        Err(source) => Err(SetupError::Program { program: shown, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_the_service_user_are_read() {
        let of = Service::of_accounts;
        let text = "root:x:0:0:root:/root:/bin/sh\nturnpike2:x:7:8::/:\nturnpike:x:998:997:relay:/var/lib/turnpike:/bin/false\n";
        assert_eq!(of(text), Some(Service { uid: 998, gid: 997 }));
        for other in ["", "turnpike2:x:7:8::/:", "turnpike:x:y:8::/:", "turnpike:x:7"] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn systemd_version_is_read() {
        assert_eq!(version_in("systemd 252 (252.39-1~deb12u1)\n+PAM +AUDIT\n"), Some(252));
        assert_eq!(version_in("runit"), None);
    }

    #[test]
    fn certbot_hook_copies_only_its_own_lineage() {
        let hook = certbot_hook(Path::new("/etc/letsencrypt/live/it's"));
        assert!(hook.contains(r"= '/etc/letsencrypt/live/it'\''s' ] || exit 0"), "{hook}");
        let dir = turnpike_testkit::Dir::new();
        let file = dir.file("hook", hook);
        let status = Command::new("sh").arg(&file).env("RENEWED_LINEAGE", "/other").status();
        assert!(status.is_ok_and(|status| status.success()));
    }
}
