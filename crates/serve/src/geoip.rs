//! Countries and autonomous systems of clients, from the operator's MaxMind DB files. The files are read into memory and verified as a
//! whole, in a thread of their own after the start. Look-ups happen once per allocation, log entry and displayed row, not per packet.

use std::{
    fmt,
    fs::File,
    io::Read as _,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use maxminddb::{MaxMindDbError, PathElement, Reader, WithinOptions};
use tokio::{sync::oneshot, task::spawn_blocking};
use turnpike_api::Reloaded;
use turnpike_config::{Mistake, Settings};
use turnpike_process::{sandbox, warn};
use turnpike_turn::server::{ClientNetwork, ClientNetworks, ClientRule, Country};
use turnpike_wire::address::canonical_ip;

use crate::file_watch::FileWatch;

const KEY: &str = "geoip.files";
const EXPECTED: &str =
    "a list of MaxMind DB files (.mmdb) with countries or autonomous systems, such as GeoLite2-Country.mmdb";
/// Maximum size of a file in bytes; the largest databases have about 200 MB.
const LARGEST: u64 = 2 << 30;
/// Networks that are examined to find out if a database has countries or autonomous systems.
const EXAMINED: usize = 10_000;
/// Pause between attempts to read unusable files.
const RETRY: Duration = Duration::from_secs(60);

/// A database in memory.
pub(crate) struct Database {
    file: PathBuf,
    reader: Reader<Vec<u8>>,
    has_countries: bool,
    has_systems: bool,
}

/// The databases in use, shared by workers and control thread.
#[derive(Debug)]
pub(crate) struct GeoIp {
    databases: RwLock<Arc<[Database]>>,
    /// False while the old databases are in use because the files are unusable.
    is_current: AtomicBool,
    loaded: AtomicU64,
    failed: AtomicU64,
}

/// Reads the files again when they or the settings change.
pub(crate) struct GeoIpFiles {
    in_use: Arc<GeoIp>,
    watch: FileWatch,
    /// Time of the last failed attempt. A file can become readable later without changing.
    refused: Option<Instant>,
    reading: Option<Reading>,
}

/// Errors begin with the name of the file.
type Opened = Result<Vec<Database>, Vec<String>>;

struct Reading {
    opened: oneshot::Receiver<Opened>,
    /// The files have changed. Otherwise this repeats a failed attempt, and another failure is not logged.
    is_new: bool,
}

/// Values for metrics.
#[derive(Clone, Debug, Default)]
pub(crate) struct GeoIpCounts {
    /// File and build time in Unix seconds.
    pub(crate) built: Vec<(String, u64)>,
    pub(crate) is_current: bool,
    pub(crate) reloads: [(&'static str, u64); 2],
}

/// Reads and verifies the configured files.
pub(crate) fn read(settings: &Settings) -> Result<Vec<Database>, Vec<Mistake>> {
    accept(settings, open_all(&settings.geoip.files))
}

fn accept(settings: &Settings, opened: Opened) -> Result<Vec<Database>, Vec<Mistake>> {
    let databases = opened.map_err(|problems| {
        let mistake = |problem: String| Mistake::new(settings.origin(KEY), KEY, problem, EXPECTED);
        problems.into_iter().map(mistake).collect::<Vec<_>>()
    })?;
    let rules = [("clients.allow", &settings.clients.allow), ("clients.deny", &settings.clients.deny)];
    let has = |rule: &ClientRule| match rule {
        ClientRule::Prefix(_) => true,
        ClientRule::Country(_) => databases.iter().any(|database| database.has_countries),
        ClientRule::System(_) => databases.iter().any(|database| database.has_systems),
    };
    let undecidable =
        rules.into_iter().filter_map(|(key, rules)| Some((key, rules.iter().find(|rule| !has(rule))?)));
    let mistakes: Vec<Mistake> = undecidable
        .map(|(key, rule)| {
            let kind =
                if matches!(rule, ClientRule::Country(_)) { "countries" } else { "autonomous systems" };
            let problem = format!("{rule} cannot match: no database in geoip.files has {kind}");
            Mistake::new(settings.origin(key), key, problem, "a database with them in geoip.files")
        })
        .collect();
    if mistakes.is_empty() { Ok(databases) } else { Err(mistakes) }
}

fn open_all(files: &[PathBuf]) -> Opened {
    let (mut databases, mut problems) = (Vec::new(), Vec::new());
    for file in files {
        match Database::open(file) {
            Ok(database) => databases.push(database),
            Err(problem) => problems.push(format!("{}: {problem}", file.display())),
        }
    }
    if problems.is_empty() { Ok(databases) } else { Err(problems) }
}

impl Database {
    fn open(file: &Path) -> Result<Self, String> {
        let unreadable = |error: std::io::Error| format!("cannot be read: {error}");
        let mut opened = File::open(file).map_err(unreadable)?;
        let metadata = opened.metadata().map_err(unreadable)?;
        if !metadata.is_file() {
            return Err("not a regular file".to_owned());
        }
        if metadata.len() > LARGEST {
            return Err(format!("larger than {} GiB", LARGEST >> 30));
        }
        let mut bytes = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or_default());
        (&mut opened).take(LARGEST).read_to_end(&mut bytes).map_err(unreadable)?;
        let invalid =
            |error: MaxMindDbError| format!("not a valid MaxMind DB file (truncated or damaged?): {error}");
        let reader = Reader::from_source(bytes).map_err(invalid)?;
        reader.verify().map_err(invalid)?;
        let mut database = Self { file: file.to_owned(), reader, has_countries: false, has_systems: false };
        (database.has_countries, database.has_systems) = database.examine().map_err(invalid)?;
        if !database.has_countries && !database.has_systems {
            let kind = &database.reader.metadata().database_type;
            return Err(format!("has neither countries nor autonomous systems (type {kind:?})"));
        }
        Ok(database)
    }

    /// Returns true for countries and for autonomous systems, if there are any. The database's type is only a name, and each vendor
    /// has its own.
    fn examine(&self) -> Result<(bool, bool), MaxMindDbError> {
        let (mut has_countries, mut has_systems) = (false, false);
        for found in self.reader.networks(WithinOptions::default())?.take(EXAMINED) {
            let network = network_of(&found?);
            has_countries |= network.country.is_some();
            has_systems |= network.asn.is_some();
            if has_countries && has_systems {
                break;
            }
        }
        Ok((has_countries, has_systems))
    }

    fn network(&self, client: IpAddr) -> ClientNetwork {
        // An IPv4 database has no IPv6 addresses: error.
        self.reader.lookup(client).map_or_else(|_| ClientNetwork::default(), |found| network_of(&found))
    }
}

/// Fields as in the databases of MaxMind and DB-IP. Those of GeoIP2 Enterprise have the autonomous system in `traits`.
fn network_of(found: &maxminddb::LookupResult<'_, Vec<u8>>) -> ClientNetwork {
    use PathElement::Key;
    const ASN: PathElement<'_> = Key("autonomous_system_number");
    let country = found.decode_path::<&str>(&[Key("country"), Key("iso_code")]).ok().flatten();
    let asn = |path: &[PathElement<'_>]| found.decode_path::<u32>(path).ok().flatten();
    ClientNetwork {
        country: country.and_then(Country::new),
        asn: asn(&[ASN]).or_else(|| asn(&[Key("traits"), ASN])).filter(|number| *number > 0),
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Database").field("file", &self.file).finish_non_exhaustive()
    }
}

impl ClientNetworks for GeoIp {
    fn network(&self, client: IpAddr) -> ClientNetwork {
        let client = canonical_ip(client);
        let mut network = ClientNetwork::default();
        for found in self.databases().iter().map(|database| database.network(client)) {
            network.country = network.country.or(found.country);
            network.asn = network.asn.or(found.asn);
        }
        network
    }
}

impl Default for GeoIp {
    fn default() -> Self {
        Self::new(Vec::new())
    }
}

impl GeoIp {
    pub(crate) fn new(databases: Vec<Database>) -> Self {
        log_in_use(&databases);
        Self {
            databases: RwLock::new(databases.into()),
            is_current: AtomicBool::new(true),
            loaded: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }
    }

    fn databases(&self) -> Arc<[Database]> {
        Arc::clone(&self.databases.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// `None` without databases.
    pub(crate) fn counts(&self) -> Option<GeoIpCounts> {
        let built = |database: &Database| {
            (database.file.display().to_string(), database.reader.metadata().build_epoch)
        };
        let built: Vec<_> = self.databases().iter().map(built).collect();
        let is_current = self.is_current.load(Ordering::Relaxed);
        let reloads = [("loaded", &self.loaded), ("failed", &self.failed)];
        let reloads = reloads.map(|(result, count)| (result, count.load(Ordering::Relaxed)));
        (!built.is_empty() || !is_current).then_some(GeoIpCounts { built, is_current, reloads })
    }

    fn put(&self, databases: Vec<Database>) {
        log_in_use(&databases);
        *self.databases.write().unwrap_or_else(PoisonError::into_inner) = databases.into();
        self.is_current.store(true, Ordering::Relaxed);
        self.loaded.fetch_add(1, Ordering::Relaxed);
    }

    fn keep(&self) {
        self.is_current.store(false, Ordering::Relaxed);
        self.failed.fetch_add(1, Ordering::Relaxed);
    }
}

fn log_in_use(databases: &[Database]) {
    for database in databases {
        let metadata = database.reader.metadata();
        let built =
            i64::try_from(metadata.build_epoch).ok().and_then(|at| jiff::Timestamp::from_second(at).ok());
        tracing::info!(
            "GeoIP database {}: {}, built {}",
            database.file.display(),
            metadata.database_type.escape_debug(),
            built.unwrap_or_default()
        );
    }
}

impl GeoIpFiles {
    pub(crate) fn new(settings: &Settings, databases: Vec<Database>) -> Self {
        let watch = FileWatch::new(settings.geoip.files.clone());
        Self { in_use: Arc::new(GeoIp::new(databases)), watch, refused: None, reading: None }
    }

    pub(crate) fn in_use(&self) -> Arc<GeoIp> {
        Arc::clone(&self.in_use)
    }

    /// Begins to read the files if one has changed, or a minute after a failure, and uses them once they are read.
    pub(crate) fn look(&mut self, settings: &Settings) {
        if let Some(reading) = &mut self.reading {
            let is_new = reading.is_new;
            match reading.opened.try_recv() {
                Err(oneshot::error::TryRecvError::Empty) => return,
                Err(oneshot::error::TryRecvError::Closed) => {}
                Ok(opened) => self.take(accept(settings, opened), is_new, &mut Reloaded::default()),
            }
            self.reading = None;
        }
        let has_changed = self.watch.has_changed();
        if has_changed || self.refused.is_some_and(|at| at.elapsed() >= RETRY) {
            let (sender, opened) = oneshot::channel();
            let files = settings.geoip.files.clone();
            spawn_blocking(move || _ = sender.send(open_all(&files)));
            self.reading = Some(Reading { opened, is_new: has_changed });
        }
    }

    /// Applies new settings.
    pub(crate) async fn reload(&mut self, settings: &Settings, reloaded: &mut Reloaded) {
        if settings.geoip.files.is_empty() && self.in_use.counts().is_none() {
            return;
        }
        self.watch = FileWatch::new(settings.geoip.files.clone());
        self.reading = None;
        let files = settings.geoip.files.clone();
        let opened = spawn_blocking(move || open_all(&files)).await;
        let opened = opened.unwrap_or_else(|error| Err(vec![error.to_string()]));
        self.take(accept(settings, opened), true, reloaded);
    }

    fn take(&mut self, read: Result<Vec<Database>, Vec<Mistake>>, is_new: bool, reloaded: &mut Reloaded) {
        match read {
            Ok(databases) => {
                self.refused = None;
                self.in_use.put(databases);
            }
            Err(mistakes) => {
                self.refused = Some(Instant::now());
                self.in_use.keep();
                let lines: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
                let remedy = sandbox::remedy(&lines.join("\n")).map(|remedy| format!("; {remedy}"));
                if is_new {
                    let (lines, remedy) = (lines.join("; "), remedy.unwrap_or_default());
                    warn(reloaded, format!("the old GeoIP databases stay in use: {lines}{remedy}"));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use turnpike_config::GeoipSettings;
    use turnpike_testkit::{Dir, PATIENCE, mmdb::mmdb};
    use turnpike_turn::server::ClientRules;

    use super::*;

    fn countries() -> Vec<u8> {
        let networks = [
            ("192.0.2.0/24", "DE", 0),
            ("192.0.2.128/25", "FR", 0),
            ("198.51.100.0/24", "", 0),
            ("2001:db8::/32", "SE", 0),
        ];
        mmdb("Test-Country", 1_800_000_000, &networks)
    }

    fn systems() -> Vec<u8> {
        mmdb(
            "Test-ASN",
            1_800_000_001,
            &[("192.0.2.0/24", "", 64500), ("2001:db8:1::/48", "", 4_200_000_000)],
        )
    }

    fn settings(files: &[&Path]) -> Settings {
        let files = files.iter().map(|file| file.to_path_buf()).collect();
        Settings { geoip: GeoipSettings { files }, ..Settings::default() }
    }

    fn shown(geoip: &GeoIp, client: &str) -> String {
        let ClientNetwork { country, asn } = geoip.network(client.parse().expect("an address"));
        format!("{} {}", country.map(|code| code.to_string()).unwrap_or_default(), asn.unwrap_or_default())
    }

    fn problem(bytes: &[u8]) -> String {
        let dir = Dir::new();
        let file = dir.at("geo.mmdb");
        fs::write(&file, bytes).unwrap();
        let mistakes = read(&settings(&[&file])).expect_err("unusable");
        assert_eq!(mistakes.len(), 1, "{mistakes:?}");
        let text = mistakes[0].to_string();
        assert!(text.contains("geoip.files") && text.contains("geo.mmdb"), "{text}");
        text
    }

    #[test]
    fn networks_of_several_files_are_combined() {
        let dir = Dir::new();
        let (country, asn) = (dir.at("country.mmdb"), dir.at("asn.mmdb"));
        fs::write(&country, countries()).unwrap();
        fs::write(&asn, systems()).unwrap();
        let geoip = GeoIp::new(read(&settings(&[&country, &asn])).expect("valid"));
        for (client, network) in [
            ("192.0.2.1", "DE 64500"),
            ("::ffff:192.0.2.1", "DE 64500"),
            ("192.0.2.129", "FR 64500"),
            ("198.51.100.7", " 0"),
            ("203.0.113.1", " 0"),
            ("2001:db8::1", "SE 0"),
            ("2001:db8:1::1", "SE 4200000000"),
            ("2001:db9::1", " 0"),
        ] {
            assert_eq!(shown(&geoip, client), network, "{client}");
        }
        let built = geoip.counts().expect("counts").built;
        assert_eq!(built.iter().map(|(_, built)| *built).collect::<Vec<_>>(), [1_800_000_000, 1_800_000_001]);
        assert!(GeoIp::default().counts().is_none());
    }

    #[test]
    fn damaged_files_are_refused_with_their_name() {
        let whole = countries();
        for length in [0, 1, whole.len() / 4, whole.len() / 2, whole.len() - 1] {
            let text = problem(&whole[..length]);
            assert!(text.contains("not a valid MaxMind DB file"), "{length}: {text}");
        }
        assert!(problem(b"<html>503 Service Unavailable</html>").contains("not a valid MaxMind DB file"));
        // A pointer that leads out of the data.
        let mut damaged = whole;
        damaged[..6].fill(0xff);
        assert!(problem(&damaged).contains("not a valid MaxMind DB file"));
        let empty = mmdb("Test-Domain", 1, &[("192.0.2.0/24", "", 0)]);
        assert!(problem(&empty).contains("neither countries nor autonomous systems (type \"Test-Domain\")"));
        let absent = read(&settings(&[Path::new("/nowhere/geo.mmdb")])).expect_err("absent");
        assert!(absent[0].to_string().contains("/nowhere/geo.mmdb: cannot be read"), "{absent:?}");
        let directory = read(&settings(&[Path::new("/")])).expect_err("a directory");
        assert!(directory[0].to_string().contains("/: not a regular file"), "{directory:?}");
    }

    #[test]
    fn no_byte_of_a_file_makes_a_look_up_panic() {
        let dir = Dir::new();
        let (file, whole) = (dir.at("geo.mmdb"), countries());
        for at in 0..whole.len() {
            for flip in [0x01, 0x80, 0xff] {
                let mut damaged = whole.clone();
                damaged[at] ^= flip;
                fs::write(&file, damaged).unwrap();
                if let Ok(database) = Database::open(&file) {
                    for client in ["192.0.2.1", "255.255.255.255", "2001:db8::1", "::"] {
                        database.network(client.parse().expect("an address"));
                    }
                }
            }
        }
    }

    #[test]
    fn a_rule_needs_a_database_that_can_decide_it() {
        let dir = Dir::new();
        let file = dir.at("asn.mmdb");
        fs::write(&file, systems()).unwrap();
        let with = |rule: &str| {
            let deny = vec![rule.parse().expect("a rule")];
            read(&Settings { clients: ClientRules { deny, ..ClientRules::default() }, ..settings(&[&file]) })
        };
        assert!(with("AS64500").is_ok() && with("192.0.2.0/24").is_ok());
        let text = with("country:DE").expect_err("no countries")[0].to_string();
        assert!(text.contains("clients.deny: country:DE cannot match: no database"), "{text}");
    }

    #[tokio::test]
    async fn changed_file_is_read_again_and_a_damaged_one_is_not_used() {
        let dir = Dir::new();
        let file = dir.at("geo.mmdb");
        fs::write(&file, countries()).unwrap();
        let settings = settings(&[&file]);
        let mut files = GeoIpFiles::new(&settings, read(&settings).expect("valid"));
        let geoip = files.in_use();
        let reloads = |geoip: &GeoIp| geoip.counts().expect("counts").reloads.map(|(_, count)| count);
        let mut look_until = async |expected: [u64; 2]| {
            for _ in 0..1000 {
                files.look(&settings);
                if reloads(&geoip) == expected {
                    return;
                }
                tokio::time::sleep(PATIENCE / 1000).await;
            }
            panic!("{:?}", geoip.counts());
        };
        let whole = mmdb("Test-Country", 1_900_000_000, &[("192.0.2.0/24", "IT", 0)]);
        fs::write(&file, &whole[..whole.len() - 9]).unwrap();
        look_until([0, 1]).await;
        assert_eq!(
            (shown(&geoip, "192.0.2.1"), geoip.counts().expect("counts").is_current),
            ("DE 0".into(), false)
        );
        fs::write(&file, &whole).unwrap();
        look_until([1, 1]).await;
        let counts = geoip.counts().expect("counts");
        assert_eq!((shown(&geoip, "192.0.2.1"), counts.is_current), ("IT 0".into(), true));
        assert_eq!(counts.built[0].1, 1_900_000_000);
    }

    #[tokio::test]
    async fn reload_applies_other_files_or_keeps_the_old_ones() {
        let dir = Dir::new();
        let (one, other) = (dir.at("one.mmdb"), dir.at("other.mmdb"));
        fs::write(&one, countries()).unwrap();
        fs::write(&other, &systems()[1..]).unwrap();
        let before = settings(&[&one]);
        let mut files = GeoIpFiles::new(&before, read(&before).expect("valid"));
        let geoip = files.in_use();
        let mut reloaded = Reloaded::default();
        files.reload(&settings(&[&other]), &mut reloaded).await;
        let [warning] = &reloaded.warnings[..] else { panic!("{reloaded:?}") };
        assert!(warning.contains("other.mmdb") && warning.contains("stay in use"), "{warning}");
        assert_eq!(shown(&geoip, "192.0.2.1"), "DE 0");
        fs::write(&other, systems()).unwrap();
        files.reload(&settings(&[&other]), &mut Reloaded::default()).await;
        assert_eq!(shown(&geoip, "192.0.2.1"), " 64500");
        files.reload(&Settings::default(), &mut Reloaded::default()).await;
        assert_eq!(shown(&geoip, "192.0.2.1"), " 0");
        assert!(geoip.counts().is_none());
    }
}
