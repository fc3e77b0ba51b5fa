//! The configuration file: its text, and its replacement after a check by `turnpike check-config`.

use std::{
    ffi::OsString,
    fs,
    io::{self, Write as _},
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _, chown},
    path::{Path, PathBuf},
};

use turnpike_convert::toml_text::{quoted, strings};
use turnpike_wire::address::is_private;

use crate::setup::{
    answers::{Answers, Certificate, ClientAccess, HttpsPort},
    error::SetupError,
};

/// File of the package, which may be replaced unless it was edited.
const PACKAGED: &str = include_str!("../../../../deploy/package/turnpike.toml");
/// Port of the HTTP interface for applications.
const API: u16 = 8443;

const HEAD: &str = "\
# Written by `turnpike setup`. examples/turnpike.toml documents every key; `turnpike check-config -c FILE` lists errors.
";

/// Text of the file. The log goes to the journal if `is_service`.
pub(crate) fn text(answers: &Answers, is_service: bool) -> String {
    let Answers { name, access, public, relay_ports, secret, .. } = answers;
    let mut text = format!("{HEAD}\n[server]\n");
    if let Some(name) = name {
        text += &format!("realm = {}\n", quoted(&name.to_string()));
    }
    let listen = strings(&answers.listeners());
    text +=
        &format!("# UDP and TCP, and TLS with a certificate: the first byte decides.\nlisten = {listen}\n");
    if let HttpsPort::Shared(to) = answers.https {
        let to = quoted(&to.to_string());
        text += "# The web server gets all names except those in the certificate.\n";
        text += &format!("hand_on = [{{ sni = \"*\", to = {to}, proxy_protocol = \"v2\" }}]\n");
    }
    text += &certificate(answers);
    if public.is_some() || relay_ports.is_some() {
        text += "\n[relay]\n";
    }
    if let Some(public) = public {
        text += "# Public address of the NAT; \"auto\" is the address of this machine.\n";
        text += &format!("addresses = [\"auto={public}\", \"auto\"]\n");
    }
    if let Some(ports) = relay_ports {
        text += &format!("ports = {}\n", quoted(&ports.0));
    }
    text += "\n[auth]\n";
    let secret = quoted(secret.reveal());
    text += &match access {
        ClientAccess::Secret => format!("# Shared with the application.\nsecrets = [{secret}]\n"),
        ClientAccess::Api => {
            format!("# Signs the credentials that applications request.\nsecrets = [{secret}]\n")
        }
        ClientAccess::User(user) => {
            format!("users = [{{ name = {}, password = {secret} }}]\n", quoted(user))
        }
    };
    if *access == ClientAccess::Api {
        text += &api(answers);
    }
    if is_service {
        text += "\n[log]\nformat = \"journald\"\n";
    }
    text
}

fn certificate(answers: &Answers) -> String {
    match (&answers.certificate, &answers.name) {
        (Certificate::Files { cert, key }, _) => {
            let [cert, key] = [cert, key].map(|path| quoted(&path.display().to_string()));
            format!(
                "\n[tls]\n# The server reloads these files when they change.\ncert = {cert}\nkey = {key}\n"
            )
        }
        (Certificate::Automatic { contact }, Some(name)) => {
            let contact =
                contact.as_ref().map(|contact| format!("\n[acme]\ncontact = {}\n", quoted(contact)));
            format!(
                "\n[tls]\n# The server orders a certificate for this name from Let's Encrypt, and renews it.\nacme = [{}]\n{}",
                quoted(&name.to_string()),
                contact.unwrap_or_default()
            )
        }
        _ => String::new(),
    }
}

/// HTTPS if there are certificate files, otherwise plain HTTP on loopback, for local applications or a proxy.
fn api(answers: &Answers) -> String {
    let is_taken = matches!(answers.https, HttpsPort::Shared(web) if web.port() == API);
    let port = if is_taken { API + 1 } else { API };
    let mut listen: Vec<SocketAddr> = match answers.certificate {
        Certificate::Files { .. } => answers.listen.iter().map(|at| (at.ip(), port).into()).collect(),
        Certificate::None | Certificate::Automatic { .. } => vec![(Ipv4Addr::LOCALHOST, port).into()],
    };
    listen.sort_unstable();
    listen.dedup();
    let names = match (&answers.name, answers.public) {
        (Some(name), _) => vec![name.to_string()],
        (None, Some(public)) if !is_private(public) => vec![public.to_string()],
        (None, _) => Vec::new(),
    };
    let what = "# Applications request credentials here, with a key from `turnpike key add`.";
    format!("\n[credentials]\n{what}\nlisten = {}\nnames = {}\n", strings(&listen), strings(&names))
}

/// Fails if the file exists and has been edited.
pub(crate) fn check_replaceable(path: &Path) -> Result<(), SetupError> {
    match fs::read_to_string(path) {
        Ok(text) if text == PACKAGED => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        _ => SetupError::answer(format!(
            "{0} exists and has been edited: --force replaces it and keeps it as {0}.bak, --config writes another file",
            path.display()
        )),
    }
}

/// Writes the file. An existing one is replaced and kept as a `.bak` copy. `check` validates the new file first; if the check
/// fails, nothing changes.
pub(crate) fn write(
    path: &Path,
    text: &str,
    group: Option<u32>,
    check: impl FnOnce(&Path) -> Result<(), SetupError>,
) -> Result<(), SetupError> {
    let failed = |source| SetupError::Write { path: path.to_owned(), source };
    let new = beside(path, ".new");
    let replace = || {
        if path.exists() {
            fs::copy(path, beside(path, ".bak"))?;
        }
        fs::rename(&new, path)
    };
    let written = create(&new, text, group).map_err(failed);
    let outcome = written.and_then(|()| check(&new)).and_then(|()| replace().map_err(failed));
    if outcome.is_err() {
        let _ = fs::remove_file(&new);
    }
    outcome
}

/// Creates the file for its owner and, if given, a group of readers.
fn create(path: &Path, text: &str, group: Option<u32>) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    if group.is_some() {
        chown(path, None, group)?;
        file.set_permissions(fs::Permissions::from_mode(0o640))?;
    }
    file.sync_all()
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name: OsString = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

#[cfg(test)]
mod tests {
    use turnpike_config::{Flags, Sources, certificates::ReadCertificates};
    use turnpike_testkit::Dir;

    use super::*;
    use crate::setup::answers::HostName;

    fn answers() -> Answers {
        Answers {
            name: None,
            certificate: Certificate::None,
            access: ClientAccess::Secret,
            https: HttpsPort::No,
            public: None,
            relay_ports: None,
            listen: ["0.0.0.0:3478", "[::]:3478"]
                .map(|address| address.parse().expect("an address"))
                .to_vec(),
            secret: turnpike_config::Secret::new("6d2a1f0c8e5b4793"),
        }
    }

    fn combinations() -> Vec<Answers> {
        let mut all = Vec::new();
        let name = || "turn.example.org".parse::<HostName>().ok();
        let web: SocketAddr = ([127, 0, 0, 1], 8443).into();
        let certificates = [
            (None, Certificate::None),
            (name(), Certificate::None),
            (name(), Certificate::Automatic { contact: None }),
            (name(), Certificate::Automatic { contact: Some("admin@example.org".to_owned()) }),
            (
                name(),
                Certificate::Files { cert: "/etc/tls/a \"b\".pem".into(), key: "/etc/tls/key.pem".into() },
            ),
        ];
        for (name, certificate) in certificates {
            for access in [ClientAccess::Secret, ClientAccess::Api, ClientAccess::User("al\"ice".to_owned())]
            {
                for https in [HttpsPort::No, HttpsPort::Yes, HttpsPort::Shared(web)] {
                    for public in [None, Some([203, 0, 113, 5].into())] {
                        let relay_ports = public.and_then(|_| "50000-50999".parse().ok());
                        let (name, certificate, access) = (name.clone(), certificate.clone(), access.clone());
                        all.push(Answers {
                            name,
                            certificate,
                            access,
                            https,
                            public,
                            relay_ports,
                            ..answers()
                        });
                    }
                }
            }
        }
        all
    }

    #[test]
    fn every_combination_loads_without_a_warning() {
        let dir = Dir::new();
        let file = dir.at("turnpike.toml");
        let all = combinations();
        assert_eq!(all.len(), 5 * 3 * 3 * 2);
        for answers in all {
            let _ = fs::remove_file(&file);
            let text = text(&answers, true);
            write(&file, &text, None, |_| Ok(())).expect("a file");
            let mut flags = Flags::new();
            flags.set("store.state", "--state", Some("/var/lib/turnpike".to_owned()));
            let loaded = Sources::new(Some(file.clone()), Vec::new(), flags)
                .load(|_| ReadCertificates::<()>::default());
            let loaded = loaded.unwrap_or_else(|errors| panic!("{errors}\n{text}"));
            assert_eq!(loaded.warnings, [] as [String; 0], "{text}");
            assert_eq!(loaded.settings.listen, answers.listeners(), "{text}");
            let has_certificate = loaded.settings.tls.cert.is_some() || !loaded.settings.tls.acme.is_empty();
            assert_eq!(has_certificate, answers.certificate != Certificate::None, "{text}");
            assert_eq!(
                loaded.settings.hand_on.is_empty(),
                !matches!(answers.https, HttpsPort::Shared(_)),
                "{text}"
            );
            assert_eq!(loaded.settings.relay.addresses.is_empty(), answers.public.is_none(), "{text}");
            assert_eq!(
                loaded.settings.credentials.listen.is_empty(),
                answers.access != ClientAccess::Api,
                "{text}"
            );
            let has_users = !loaded.settings.auth.users.is_empty();
            assert_eq!(has_users, matches!(answers.access, ClientAccess::User(_)), "{text}");
            assert_eq!(has_users, loaded.settings.auth.secrets.is_empty(), "{text}");
        }
    }

    #[test]
    fn only_unedited_files_are_replaced() {
        let dir = Dir::new();
        assert!(check_replaceable(&dir.at("missing.toml")).is_ok());
        assert!(check_replaceable(&dir.file("packaged.toml", PACKAGED)).is_ok());
        for edited in [&b"[server]\n"[..], b"\xff", b""] {
            let refused = check_replaceable(&dir.file("edited.toml", edited)).expect_err("edited");
            assert!(refused.to_string().contains("edited.toml.bak"), "{refused}");
        }
    }

    #[test]
    fn a_rejected_file_changes_nothing() {
        let dir = Dir::new();
        let file = dir.file("turnpike.toml", "old");
        let names = || fs::read_dir(dir.path()).expect("a directory").count();
        let rejected = write(&file, "new", None, |new| {
            assert_eq!(fs::read_to_string(new).expect("the new file"), "new");
            Err(SetupError::Rejected("wrong".to_owned()))
        });
        assert!(rejected.is_err_and(|error| error.is_usage()));
        assert_eq!((fs::read_to_string(&file).expect("the old file").as_str(), names()), ("old", 1));
        write(&file, "new", None, |_| Ok(())).expect("a file");
        let mode = fs::metadata(&file).expect("a file").permissions().mode() & 0o777;
        assert_eq!((fs::read_to_string(&file).expect("the new file").as_str(), mode), ("new", 0o600));
        assert_eq!(fs::read_to_string(dir.at("turnpike.toml.bak")).expect("a copy"), "old");
        assert_eq!(names(), 2);
    }

    #[test]
    fn an_unwritable_place_is_an_error_with_a_remedy() {
        let dir = Dir::new();
        let text = "x".repeat(1 << 16);
        for (file, words) in [
            (dir.at("missing/turnpike.toml"), "create the directory"),
            ("/proc/turnpike.toml".into(), "--config"),
            (dir.file("file", "").join("turnpike.toml"), "choose another file with --config"),
        ] {
            let error = write(&file, &text, None, |_| Ok(())).expect_err("not writable").to_string();
            assert!(error.starts_with(&format!("cannot write {}: ", file.display())), "{error}");
            assert!(error.contains(words) && error.lines().count() == 1, "{error}");
        }
    }
}
