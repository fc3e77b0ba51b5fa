//! Address of a store: a URL, a path, or a line of turnserver.conf.

use std::{fmt, path::PathBuf, str::FromStr};

use percent_encoding::percent_decode_str;
use turnpike_wire::secret::Secret;
use url::{ParseError, Url};

use crate::HttpAddress;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreAddress {
    Sqlite(PathBuf),
    Postgres(ServerAddress),
    /// MySQL or MariaDB.
    Mysql(ServerAddress),
    /// Redis or Valkey.
    Redis(ServerAddress),
    /// Endpoint of an application.
    Http(HttpAddress),
}

#[derive(Clone, PartialEq, Eq)]
pub struct ServerAddress {
    pub host: String,
    /// Unix socket to use instead of `host`; for PostgreSQL, its directory.
    pub socket: Option<PathBuf>,
    /// Port; `None` means the protocol's default port.
    pub port: Option<u16>,
    pub user: Option<String>,
    /// Password, which is left out of all output.
    pub password: Option<Secret>,
    /// Database name; for Redis its number.
    pub database: Option<String>,
    pub tls: Tls,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    pub mode: TlsMode,
    /// PEM file with CAs to trust in addition to the system's; for Redis, instead of them.
    pub authority: Option<PathBuf>,
    pub identity: Option<(PathBuf, PathBuf)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsMode {
    Off,
    /// Opportunistic TLS, certificate not verified.
    #[default]
    IfOffered,
    /// TLS required, certificate not verified.
    Unverified,
    /// TLS required, certificate chain verified, name ignored.
    Authority,
    /// TLS required, certificate chain and name verified.
    Full,
}

const FORMS: &str = "postgres://USER:PASSWORD@HOST/DATABASE, mysql://..., redis://... or rediss://..., sqlite:///PATH, https://HOST/PATH, or a line of \
                     turnserver.conf such as psql-userdb=\"host=... dbname=... user=... password=...\"";

impl FromStr for StoreAddress {
    type Err = String;

    /// Messages never quote the text, because it may contain a password.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        if text.starts_with('/') {
            return Ok(Self::Sqlite(text.into()));
        }
        for (option, kind) in
            [("psql-userdb", Kind::Postgres), ("mysql-userdb", Kind::Mysql), ("redis-userdb", Kind::Redis)]
        {
            if let Some(value) = value_of(text, option) {
                return if begins_with_scheme(value) { from_url(value) } else { from_words(kind, value) };
            }
        }
        for option in ["userdb", "sqlite-userdb", "db", "sqlite"] {
            if let Some(path) = value_of(text, option).filter(|value| value.starts_with('/')) {
                return Ok(Self::Sqlite(path.into()));
            }
        }
        from_url(text)
    }
}

/// Returns true for a URL (RFC 3986 section 3.1). In the `key=value` form, a password may also contain `://`.
fn begins_with_scheme(value: &str) -> bool {
    let is_of_scheme = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
    value.split_once("://").is_some_and(|(scheme, _)| !scheme.is_empty() && scheme.chars().all(is_of_scheme))
}

/// Leaves out the password.
impl fmt::Display for StoreAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, server) = match self {
            Self::Sqlite(path) => return write!(f, "sqlite://{}", path.display()),
            Self::Http(address) => return address.fmt(f),
            Self::Postgres(server) => ("postgres", server),
            Self::Mysql(server) => ("mysql", server),
            Self::Redis(server) if server.tls.mode == TlsMode::Off => ("redis", server),
            Self::Redis(server) => ("rediss", server),
        };
        write!(f, "{scheme}://")?;
        if let Some(user) = &server.user {
            write!(f, "{user}@")?;
        }
        match &server.socket {
            Some(path) => path.display().fmt(f)?,
            None if server.host.contains(':') => write!(f, "[{}]", server.host)?,
            None => f.write_str(&server.host)?,
        }
        if let Some(port) = server.port {
            write!(f, ":{port}")?;
        }
        server.database.as_ref().map_or(Ok(()), |database| write!(f, "/{database}"))
    }
}

impl fmt::Debug for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, socket, port, user, database, tls, .. } = self;
        write!(f, "ServerAddress({host:?}, {socket:?}, {port:?}, {user:?}, .., {database:?}, {tls:?})")
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Postgres,
    Mysql,
    Redis,
}

impl Kind {
    fn address(self, server: ServerAddress) -> StoreAddress {
        match self {
            Self::Postgres => StoreAddress::Postgres(server),
            Self::Mysql => StoreAddress::Mysql(server),
            Self::Redis => StoreAddress::Redis(server),
        }
    }

    fn server(self) -> ServerAddress {
        let mode = if self == Self::Redis { TlsMode::Off } else { TlsMode::default() };
        ServerAddress {
            host: if self == Self::Postgres { "localhost" } else { "127.0.0.1" }.to_owned(),
            socket: None,
            port: None,
            user: None,
            password: None,
            database: None,
            tls: Tls { mode, ..Tls::default() },
        }
    }
}

fn value_of<'a>(text: &'a str, option: &str) -> Option<&'a str> {
    let value = text.strip_prefix(option)?.trim_start().strip_prefix('=')?.trim();
    let unquoted = ['"', '\''].into_iter().find_map(|quote| value.strip_prefix(quote)?.strip_suffix(quote));
    Some(unquoted.unwrap_or(value))
}

fn from_url(text: &str) -> Result<StoreAddress, String> {
    // libpq accepts `USER@/DATABASE`, which means the default host.
    let parsed = Url::parse(text).or_else(|why| match why {
        ParseError::EmptyHost => Url::parse(&text.replacen("@/", "@localhost/", 1)),
        _ => Err(why),
    });
    let url = parsed.map_err(|_| format!("not a store address: expected {FORMS}"))?;
    let (kind, with_tls) = match url.scheme() {
        "sqlite" | "sqlite3" => {
            let path = decoded(url.path())?;
            // The text after two slashes would be a host, and sqlite://store.db has no path at all.
            if url.host_str().is_some_and(|host| !host.is_empty()) || !path.starts_with('/') || path == "/" {
                return Err(
                    "sqlite needs an absolute path, with three slashes: sqlite:///var/db/turndb".to_owned()
                );
            }
            return Ok(StoreAddress::Sqlite(path.into()));
        }
        "https" | "http" => return HttpAddress::new(url).map(StoreAddress::Http),
        "postgres" | "postgresql" => (Kind::Postgres, false),
        "mysql" | "mariadb" => (Kind::Mysql, false),
        "redis" | "valkey" => (Kind::Redis, false),
        "rediss" | "valkeys" => (Kind::Redis, true),
        "unix" | "redis+unix" | "valkey+unix" => (Kind::Redis, false),
        other => return Err(format!("{other} is not a supported store: expected {FORMS}")),
    };
    let mut server = kind.server();
    let is_unix = url.scheme().ends_with("unix");
    if with_tls {
        server.tls.mode = TlsMode::Full;
    }
    if let Some(host) = url.host_str().filter(|host| !host.is_empty()) {
        set(kind, &mut server, "host", &decoded(host.trim_matches(['[', ']']))?)?;
    }
    server.port = url.port().or(server.port);
    if !url.username().is_empty() {
        server.user = Some(decoded(url.username())?);
    }
    if let Some(password) = url.password() {
        server.password = Some(Secret::new(decoded(password)?));
    }
    let path = decoded(url.path())?;
    if is_unix {
        server.socket = Some(path.into());
    } else {
        let database = path.trim_start_matches('/');
        if !database.is_empty() {
            server.database = Some(database.to_owned());
        }
    }
    for (key, value) in url.query_pairs() {
        set(kind, &mut server, &key, &value)?;
    }
    finish(kind, server)
}

/// Parses `key=value key=value`, the form of coturn and libpq. As in libpq, a value may be enclosed in single
/// quotes, in which quotes and backslashes are escaped with a backslash.
fn from_words(kind: Kind, text: &str) -> Result<StoreAddress, String> {
    let mut server = kind.server();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let Some((key, after)) = rest.split_once('=') else {
            return Err("a setting has no =: expected host=... dbname=... user=... password=...".to_owned());
        };
        let after = if kind == Kind::Postgres { after.trim_start() } else { after };
        let (value, left) = if kind == Kind::Postgres && after.starts_with('\'') {
            quoted(&after[1..]).ok_or("a quoted value has no closing quote")?
        } else {
            let end = after.find(char::is_whitespace).unwrap_or(after.len());
            (after[..end].to_owned(), &after[end..])
        };
        set(kind, &mut server, key.trim(), &value)?;
        rest = left.trim_start();
    }
    finish(kind, server)
}

/// Parses up to the closing quote; returns the value and the rest.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '\'' => return Some((value, &text[at + 1..])),
            '\\' => value.push(characters.next()?.1),
            other => value.push(other),
        }
    }
    None
}

fn set(kind: Kind, server: &mut ServerAddress, key: &str, value: &str) -> Result<(), String> {
    let tls = &mut server.tls;
    match (kind, key) {
        (_, "host" | "ip" | "addr" | "ipaddr" | "hostaddr") if value.starts_with('/') => {
            server.socket = Some(value.into());
        }
        (_, "host" | "ip" | "addr" | "ipaddr" | "hostaddr") => server.host = value.to_owned(),
        (_, "socket") => server.socket = Some(value.into()),
        (_, "dbname" | "db" | "database") => server.database = Some(value.to_owned()),
        (_, "user" | "uname" | "name" | "username") => server.user = Some(value.to_owned()),
        (_, "password" | "pwd" | "passwd" | "secret") => {
            server.password = Some(Secret::new(value));
        }
        (_, "port" | "p") => {
            let port = value.parse().ok().filter(|port| *port > 0);
            server.port = Some(port.ok_or_else(|| format!("{key} is {value:?}, not a port"))?);
        }
        // Ignored: queries have their own deadline, and the other settings affect only libpq's own
        // connections.
        (_, "connect_timeout" | "timeout") => {}
        // Ignored: only the secure ciphers of TLS 1.2 and 1.3 are available.
        (Kind::Mysql, "read_timeout" | "write_timeout" | "cipher" | "ssl-cipher") => {}
        (
            Kind::Postgres,
            "keepalives"
            | "keepalives_idle"
            | "keepalives_interval"
            | "keepalives_count"
            | "application_name"
            | "fallback_application_name"
            | "client_encoding"
            | "gssencmode"
            | "target_session_attrs",
        ) => {}
        (Kind::Postgres, "sslmode") | (Kind::Mysql, "ssl-mode" | "sslmode" | "ssl_mode") => {
            tls.mode = match &*value.to_ascii_lowercase().replace('_', "-") {
                "disable" | "disabled" => TlsMode::Off,
                "allow" | "prefer" | "preferred" => TlsMode::IfOffered,
                "require" | "required" => TlsMode::Unverified,
                "verify-ca" => TlsMode::Authority,
                "verify-full" | "verify-identity" => TlsMode::Full,
                other => return Err(format!("{key} has the unknown value {other:?}")),
            };
        }
        (Kind::Redis, "tls" | "ssl") => {
            let wanted = matches!(value, "1" | "true" | "on" | "yes");
            tls.mode = if wanted { TlsMode::Full } else { TlsMode::Off };
        }
        (Kind::Redis, "tls-verify" | "verify") if !matches!(value, "none" | "0" | "false") => {}
        (Kind::Postgres, "sslrootcert")
        | (Kind::Mysql, "ca" | "ssl-ca" | "sslca")
        | (Kind::Redis, "tls-ca" | "ca" | "cacert") => tls.authority = Some(value.into()),
        (Kind::Postgres, "sslcert")
        | (Kind::Mysql, "cert" | "ssl-cert" | "sslcert")
        | (Kind::Redis, "tls-cert" | "cert") => tls.identity.get_or_insert_default().0 = value.into(),
        (Kind::Postgres, "sslkey")
        | (Kind::Mysql, "key" | "ssl-key" | "sslkey")
        | (Kind::Redis, "tls-key" | "clientkey") => tls.identity.get_or_insert_default().1 = value.into(),
        _ => return Err(format!("{key} is not a supported setting of this store")),
    }
    Ok(())
}

fn finish(kind: Kind, mut server: ServerAddress) -> Result<StoreAddress, String> {
    if let Some((certificate, key)) = &server.tls.identity
        && (certificate.as_os_str().is_empty() || key.as_os_str().is_empty())
    {
        return Err("a client certificate needs its key, and a key needs its certificate".to_owned());
    }
    // A configured CA implies verification.
    if server.tls.authority.is_some() && matches!(server.tls.mode, TlsMode::IfOffered | TlsMode::Unverified) {
        server.tls.mode = TlsMode::Authority;
    }
    match kind {
        Kind::Redis => match &server.database {
            Some(number) if number.parse::<u16>().is_err() => {
                return Err(format!("{number:?} is not a Redis database number"));
            }
            _ => {}
        },
        Kind::Postgres | Kind::Mysql if server.database.is_none() => {
            return Err("no database name: expected dbname=... or a URL with /DATABASE".to_owned());
        }
        Kind::Postgres | Kind::Mysql => {}
    }
    Ok(kind.address(server))
}

fn decoded(text: &str) -> Result<String, String> {
    let decoded = percent_decode_str(text).decode_utf8();
    decoded
        .map(std::borrow::Cow::into_owned)
        .map_err(|_| "the percent-encoded text is not valid UTF-8".to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> StoreAddress {
        text.parse().unwrap_or_else(|why| panic!("{text}: {why}"))
    }

    #[test]
    fn urls_and_coturn_lines_are_equivalent() {
        for (url, line, shown) in [
            (
                "postgres://turn:se%20cret@db.example:5433/coturn",
                "psql-userdb=\"host=db.example port=5433 dbname=coturn user=turn password='se cret' connect_timeout=30\"",
                "postgres://turn@db.example:5433/coturn",
            ),
            (
                "mysql://turn:s@[2001:db8::1]/coturn?ssl-ca=/etc/ca.pem",
                "mysql-userdb=host=2001:db8::1 dbname=coturn user=turn password=s ca=/etc/ca.pem connect_timeout=30 read_timeout=30 \
                 cipher=DHE-RSA-AES256-SHA",
                "mysql://turn@[2001:db8::1]/coturn",
            ),
            (
                "redis://:s@127.0.0.1:6380/2",
                "redis-userdb = \"ip=127.0.0.1 dbname=2 password=s port=6380 timeout=30\"",
                "redis://127.0.0.1:6380/2",
            ),
            ("rediss://r.example", "redis-userdb=host=r.example tls=1", "rediss://r.example"),
            ("sqlite:///var/db/turndb", "userdb=/var/db/turndb", "sqlite:///var/db/turndb"),
            ("sqlite:///var/db/turndb", "/var/db/turndb", "sqlite:///var/db/turndb"),
            (
                "postgresql:///coturn?host=/run/postgresql&user=turn",
                "psql-userdb=postgresql:///coturn?host=/run/postgresql&user=turn",
                "postgres://turn@/run/postgresql/coturn",
            ),
            (
                "postgresql://turn:s@/coturn",
                "psql-userdb=\"dbname=coturn user=turn password=s\"",
                "postgres://turn@localhost/coturn",
            ),
        ] {
            let (by_url, by_line) = (read(url), read(line));
            assert_eq!(by_url, by_line, "{url}");
            assert_eq!(by_url.to_string(), shown);
        }
    }

    #[test]
    fn tls_modes_are_parsed_and_a_ca_implies_verification() {
        let mode = |text: &str| match read(text) {
            StoreAddress::Postgres(server) | StoreAddress::Mysql(server) | StoreAddress::Redis(server) => {
                server.tls.mode
            }
            StoreAddress::Sqlite(_) | StoreAddress::Http(_) => panic!("no server"),
        };
        for (text, expected) in [
            ("postgres://h/d", TlsMode::IfOffered),
            ("postgres://h/d?sslmode=disable", TlsMode::Off),
            ("postgres://h/d?sslmode=require", TlsMode::Unverified),
            ("postgres://h/d?sslmode=require&sslrootcert=/ca", TlsMode::Authority),
            ("postgres://h/d?sslmode=verify-full&sslrootcert=/ca", TlsMode::Full),
            ("mysql://h/d?ssl-mode=VERIFY_IDENTITY", TlsMode::Full),
            ("redis://h", TlsMode::Off),
            ("rediss://h", TlsMode::Full),
        ] {
            assert_eq!(mode(text), expected, "{text}");
        }
    }

    #[test]
    fn invalid_store_is_refused_without_its_password() {
        for (text, told) in [
            ("", "expected postgres://"),
            ("turndb", "expected postgres://"),
            ("mongodb://u:hunter2@h/d", "mongodb is not a supported store"),
            ("postgres://u:hunter2@h", "no database name"),
            ("sqlite://turndb", "three slashes"),
            ("sqlite:///", "three slashes"),
            ("http://hunter2@h/users", "use https://"),
            ("https://hunter2%0d@h/users", "control characters"),
            ("https://hunter2@", "expected postgres://"),
            ("redis://:hunter2@h/two", "not a Redis database number"),
            ("psql-userdb=host=h dbname=d password='hunter2", "no closing quote"),
            ("psql-userdb=host=h dbname=d color=hunter2", "color is not a supported setting"),
            ("psql-userdb=hunter2", "a setting has no ="),
            ("mysql-userdb=host=h dbname=d capath=/etc/hunter2", "capath is not a supported setting"),
            (
                "redis-userdb=ip=h tls=1 tls-verify=none password=hunter2",
                "tls-verify is not a supported setting",
            ),
            ("mysql://h/d?ssl-cert=/c", "needs its key"),
            ("redis-userdb=ip=h port=hunter", "not a port"),
        ] {
            let why = text.parse::<StoreAddress>().expect_err(text);
            assert!(why.contains(told) && !why.contains("hunter2"), "{text}: {why}");
        }
    }

    #[test]
    fn address_output_omits_the_password() {
        for text in ["mysql://turn:hunter2@h/d", "https://hunter2@h/d", "https://x:hunter2@h/d?k=hunter2"] {
            let address = read(text);
            assert!(!format!("{address} {address:?}").contains("hunter2"), "{text}");
        }
    }

    #[test]
    fn password_is_not_mistaken_for_a_scheme() {
        for text in
            ["psql-userdb=dbname=d password=a://b user=u", "psql-userdb=\"dbname=d password='a://b' user=u\""]
        {
            let StoreAddress::Postgres(server) = read(text) else { panic!("{text}") };
            let [password, user] = [server.password.as_ref().map(Secret::reveal), server.user.as_deref()];
            assert_eq!([password, user], [Some("a://b"), Some("u")], "{text}");
        }
    }

    proptest! {
        #[test]
        fn address_parser_accepts_any_text_without_panic(text in "(psql-userdb=|mysql-userdb=|redis-userdb=|postgres://)?\\PC{0,60}") {
            let _ = text.parse::<StoreAddress>();
        }

        #[test]
        fn any_quoted_password_is_parsed(password in "\\PC{1,20}") {
            let written = password.replace('\\', "\\\\").replace('\'', "\\'");
            let read = format!("psql-userdb=dbname=d password='{written}' user=u").parse::<StoreAddress>();
            let Ok(StoreAddress::Postgres(server)) = read else { panic!("{read:?}") };
            prop_assert_eq!(server.password.as_ref().map(Secret::reveal), Some(&*password));
            prop_assert_eq!(server.user.as_deref(), Some("u"));
        }
    }
}
