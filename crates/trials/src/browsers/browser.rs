//! Starts Debian's browsers headless, each with a fresh profile, fake media devices, and trust in one certificate.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use crate::{Certificate, Dir, Program, installed};

pub trait Browser: Sized {
    /// True if the browser rejects IP addresses as the host in a `turns:` URI.
    const TLS_WANTS_NAME: bool;
    /// True if the browser offers X25519MLKEM768 to TURN servers.
    const POST_QUANTUM: bool;

    /// Returns the reason if the browser cannot run here. If `tls` is set, the browser must be able to trust a test certificate.
    fn available(tls: bool) -> Result<(), String>;

    fn open(url: &str, certificate: &Certificate) -> Self;

    fn program(&mut self) -> &mut Program;

    /// Closes the browser cleanly, so that no child process is left; dropping it kills only the first process.
    fn close(mut self) {
        self.program().signal("TERM");
        let deadline = Instant::now() + Duration::from_secs(5);
        while !self.program().has_ended() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

pub struct Chromium {
    program: Program,
    _home: Dir,
}

impl Browser for Chromium {
    const TLS_WANTS_NAME: bool = false;
    const POST_QUANTUM: bool = true;

    fn available(_: bool) -> Result<(), String> {
        installed("chromium").map(drop)
    }

    fn open(url: &str, certificate: &Certificate) -> Self {
        Self::open_trusting(url, &certificate.spki_hash())
    }

    fn program(&mut self) -> &mut Program {
        &mut self.program
    }
}

impl Chromium {
    /// Trusts certificates with this key (see [`crate::spki_hash`]).
    pub fn open_trusting(url: &str, spki_hash: &str) -> Self {
        let home = Dir::new();
        let mut command = chromium(&home);
        command.args(["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]);
        command.arg(format!("--ignore-certificate-errors-spki-list={spki_hash}"));
        Self { program: Program::start(command.arg(url)), _home: home }
    }
}

pub(super) fn chromium(home: &Dir) -> Command {
    let mut command = at_home("chromium", home);
    command.args(["--headless=new", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]);
    // The browser's sandbox works neither for root nor without user namespaces, which many containers lack. It is not needed, because the
    // browser opens only the test's page.
    command.arg("--no-sandbox");
    command.args(["--disable-background-networking", "--disable-component-update", "--disable-sync"]);
    command.arg(format!("--user-data-dir={}", home.path().join("profile").display()));
    command
}

pub struct Firefox {
    program: Program,
    _home: Dir,
}

const PREFERENCES: &[(&str, &str)] = &[
    ("app.normandy.enabled", "false"),
    ("app.update.enabled", "false"),
    ("browser.aboutwelcome.enabled", "false"),
    ("browser.safebrowsing.downloads.remote.enabled", "false"),
    ("browser.safebrowsing.malware.enabled", "false"),
    ("browser.safebrowsing.phishing.enabled", "false"),
    ("browser.shell.checkDefaultBrowser", "false"),
    ("browser.startup.homepage_override.mstone", "\"ignore\""),
    ("datareporting.policy.dataSubmissionEnabled", "false"),
    ("extensions.update.enabled", "false"),
    ("media.gmp-manager.updateEnabled", "false"),
    ("media.navigator.permission.disabled", "true"),
    ("media.navigator.streams.fake", "true"),
    ("media.peerconnection.ice.loopback", "true"),
    ("network.captive-portal-service.enabled", "false"),
    ("network.connectivity-service.enabled", "false"),
    ("services.settings.server", "\"data:,\""),
    ("toolkit.telemetry.enabled", "false"),
];

impl Browser for Firefox {
    const TLS_WANTS_NAME: bool = true;
    const POST_QUANTUM: bool = false;

    fn available(tls: bool) -> Result<(), String> {
        installed("firefox-esr")?;
        if tls { installed("certutil").map(drop) } else { Ok(()) }
    }

    fn open(url: &str, certificate: &Certificate) -> Self {
        let home = Dir::new();
        let mut command = firefox(&home, &[]);
        if installed("certutil").is_ok() {
            trust(home.path(), &certificate.authority());
        }
        Self { program: Program::start(command.arg(url)), _home: home }
    }

    fn program(&mut self) -> &mut Program {
        &mut self.program
    }
}

pub(super) fn firefox(home: &Dir, more: &[(&str, &str)]) -> Command {
    let all = PREFERENCES.iter().chain(more);
    let preferences: String = all.map(|(name, value)| format!("user_pref(\"{name}\", {value});\n")).collect();
    home.file("user.js", &preferences);
    let mut command = at_home("firefox-esr", home);
    command.args(["--headless", "--no-remote", "--profile"]).arg(home.path());
    command
}

/// Adds the CA to the profile's certificate database, the only one that Firefox reads on Linux.
fn trust(profile: &Path, authority: &Path) {
    let database = format!("sql:{}", profile.display());
    let certutil = |arguments: &[&str]| {
        let ended = Program::run(Command::new("certutil").args(["-d", &database]).args(arguments));
        assert_eq!(ended.code, Some(0), "certutil {arguments:?}: {}", ended.output());
    };
    certutil(&["-N", "--empty-password"]);
    certutil(&["-A", "-n", "ours", "-t", "C,,", "-i", authority.to_str().expect("the test's path is UTF-8")]);
}

/// Uses an empty home directory, so that the user's own profile is neither read nor changed.
fn at_home(name: &str, home: &Dir) -> Command {
    let mut command = Command::new(name);
    command.env("HOME", home.path());
    for name in
        ["XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "CHROMIUM_FLAGS", "DISPLAY"]
    {
        command.env_remove(name);
    }
    command
}
