//! Fuzz target: arbitrary text as the configuration of `serve`.

use turnpike_testkit::fuzz;

use super::*;
use crate::{Secret, UserSecret};

const EXAMPLE: &str = include_str!("../../../../examples/turnpike.toml");

#[test]
fn config() {
    let defaults = Settings::default().to_toml();
    fuzz::target("config", seeds, |bytes| {
        // Files named in the text have tests of their own, and devices must not be read.
        let Some(text) = str::from_utf8(bytes).ok().filter(|text| !text.contains("/dev/")) else { return };
        match load(text) {
            Err(mistakes) => are_bounded(&mistakes, text),
            Ok(loaded) => {
                let shown = loaded.settings.to_toml();
                for secret in secrets(&loaded.settings) {
                    let secret = secret.reveal();
                    // A secret that also appears elsewhere in the text may be shown there.
                    if secret.len() >= 6 && text.matches(secret).count() == 1 && !defaults.contains(secret) {
                        assert!(
                            !shown.contains(secret) && !format!("{loaded:?}").contains(secret),
                            "{secret}"
                        );
                    }
                }
                is_shown_as_it_is(loaded.settings, &shown);
            }
        }
    });
}

fn load(text: &str) -> Result<LoadedConfig<()>, Mistakes> {
    let mut problems = Vec::new();
    let entries = entries_of(Path::new("t.toml"), text, &mut problems)?;
    let sources = Sources::new(None, Vec::new(), Flags::new());
    sources.merge(entries, problems, |_| ReadCertificates::default())
}

pub(crate) fn are_bounded(mistakes: &Mistakes, text: &str) {
    // One byte can add a table that lacks all its mandatory keys.
    assert!(!mistakes.0.is_empty() && mistakes.0.len() <= 6 * text.len() + 16, "{}", mistakes.0.len());
    let told: usize = mistakes.0.iter().map(|mistake| mistake.to_string().len()).sum();
    assert!(told <= 4096 + 600 * text.len(), "{told} bytes for {}", text.len());
    let lines = text.split('\n').count();
    for mistake in &mistakes.0 {
        if let Origin::File { line, column, .. } = &mistake.origin {
            assert!(*line <= lines && *column <= text.len() + 1, "{mistake}");
        }
    }
}

fn secrets(settings: &Settings) -> Vec<&Secret> {
    let realms = settings.realms.iter();
    let users = settings.auth.users.iter().chain(realms.clone().flat_map(|realm| &realm.users));
    let passwords = users.filter_map(|user| match &user.secret {
        UserSecret::Password(password) => Some(password),
        UserSecret::Keys(_) => None,
    });
    passwords.chain(&settings.auth.secrets).chain(realms.flat_map(|realm| &realm.secrets)).collect()
}

fn is_shown_as_it_is(mut first: Settings, shown: &str) {
    let admin = &first.admin;
    if !secrets(&first).is_empty()
        || !admin.tokens.is_empty()
        || !admin.read_tokens.is_empty()
        || !first.auth.users.is_empty()
        || !first.oauth.keys.is_empty()
        || !first.realms.is_empty()
        || !first.events.webhooks.is_empty()
    {
        return;
    }
    let mut again = load(shown).unwrap_or_else(|mistakes| panic!("{mistakes}\n{shown}")).settings;
    first.origins.clear();
    again.origins.clear();
    assert_eq!(first, again);
}

/// An example with its commented-out keys enabled, whole and section by section.
pub(crate) fn of_example(example: &str) -> Vec<Vec<u8>> {
    let shown =
        |line: &str| line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line).to_owned();
    let all = example.lines().map(shown).collect::<Vec<_>>().join("\n");
    let sections = all.split("\n[").map(|section| format!("[{section}").into_bytes());
    [example.into(), all.clone().into_bytes()].into_iter().chain(sections).collect()
}

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = of_example(EXAMPLE);
    seeds.extend(
        [
            "[auth]\nusers = [\"alice:correct horse\", { name = \"b\", key = \"0123456789abcdef0123456789abcdef\" }]\n",
            "[limits]\nallocations = 1\n",
            "[relay]\nports = \"50000-50001\"\n",
            "[nat_discovery]\nrequests = 1\n",
            "[[realm]]\nname = \"a\"\nsecrets = [\"a long secret\"]\nallocations = 7\n[log]\nlevel = \"info,turn=debug\"\n",
            "[oauth]\nserver_name = \"t\"\n[[oauth.key]]\nkid = \"n\"\nkey = \"AAAAAAAAAAAAAAAAAAAAAA==\"\nlifetime = 60\n",
            "[[alternate]]\naddress = \"[2001:db8::1]:5349\"\ndomain = \"t.example\"\ntransports = [\"tls\"]\nwhen = \"always\"\n",
            "[[events.webhook]]\nurl = \"https://a.example/x\"\nsecret = \"0123456789abcdef\"\ntypes = [\"quota\"]\nbatch = true\n",
            "[usage]\ndays = 31\n[[usage.quota]]\nby = \"user\"\nbytes = \"10G\"\nper = \"day\"\nthen = \"1M\"\n",
            "listening-port=3478\nrealm=example.org\n",
            "0.0.0.0 80 10.0.0.1 80\n",
            "[[rule]]\nlisten = \"0.0.0.0:1\"\n",
            "[sever]\nlisten = 3\nrealm = [1979-05-27T07:32:00Z, 0x10, 1e9, inf]\n\"a\\u0000b\" = '''\n'''\n",
        ]
        .map(|text| text.as_bytes().to_vec()),
    );
    seeds
}
