//! Address of a fleet's store: one server, a master found through sentinels, or a cluster.

use std::{fmt, str::FromStr};

use turnpike_wire::secret::Secret;

use crate::{ServerAddress, StoreAddress};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetAddress {
    /// Servers to connect to; never empty.
    pub(super) servers: Vec<ServerAddress>,
    pub(super) kind: RedisKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RedisKind {
    Alone,
    /// Sentinels that monitor the master with this name. They may need a separate password.
    Sentinels {
        master: String,
        password: Option<Secret>,
    },
    /// Some servers of a cluster.
    Cluster,
}

const FORMS: &str = "redis://:PASSWORD@HOST, rediss://..., redis+sentinel://:PASSWORD@HOST,HOST,HOST/MASTER or redis+cluster://:PASSWORD@HOST,HOST; \
                     valkey instead of redis works too";

impl FleetAddress {
    #[must_use]
    pub fn is_cluster(&self) -> bool {
        self.kind == RedisKind::Cluster
    }
}

impl FromStr for FleetAddress {
    type Err = String;

    /// Messages never quote the text, because it may contain a password.
    fn from_str(text: &str) -> Result<Self, String> {
        let none = || format!("not a fleet store address: expected {FORMS}");
        let (scheme, rest) = text.trim().split_once("://").ok_or_else(none)?;
        let (base, wanted) = match scheme.split_once('+') {
            Some((base, "sentinel")) => (base, Some(true)),
            Some((base, "cluster")) => (base, Some(false)),
            _ => (scheme, None),
        };
        let Some(is_sentinel) = wanted else {
            return Ok(Self { servers: vec![server(text)?], kind: RedisKind::Alone });
        };
        let (place, query) = rest.split_once('?').map_or((rest, ""), |(place, query)| (place, query));
        let (authority, path) = place.split_once('/').unwrap_or((place, ""));
        let (who, hosts) = authority.rsplit_once('@').map_or(("", authority), |(who, hosts)| (who, hosts));
        let at = if who.is_empty() { String::new() } else { format!("{who}@") };
        let mut password = None;
        let options: Vec<&str> = query
            .split('&')
            .filter(|option| match option.strip_prefix("sentinel-password=") {
                Some(of_sentinels) => {
                    let decoded = percent_encoding::percent_decode_str(of_sentinels).decode_utf8_lossy();
                    password = Some(Secret::new(decoded));
                    false
                }
                None => !option.is_empty(),
            })
            .collect();
        let options = if options.is_empty() { String::new() } else { format!("?{}", options.join("&")) };
        let (kind, database) = if is_sentinel {
            let (master, database) = path.split_once('/').unwrap_or((path, ""));
            if master.is_empty() {
                return Err(
                    "sentinels need the name of the master: redis+sentinel://HOST,HOST/MASTER".to_owned()
                );
            }
            (RedisKind::Sentinels { master: master.to_owned(), password }, database)
        } else {
            if !matches!(path, "" | "0") {
                return Err("a cluster has only database 0".to_owned());
            }
            (RedisKind::Cluster, "")
        };
        let database = if database.is_empty() { String::new() } else { format!("/{database}") };
        let servers = hosts.split(',').map(|host| server(&format!("{base}://{at}{host}{database}{options}")));
        let servers = servers.collect::<Result<Vec<_>, _>>()?;
        Ok(Self { servers, kind })
    }
}

fn server(text: &str) -> Result<ServerAddress, String> {
    match text.parse::<StoreAddress>()? {
        StoreAddress::Redis(server) => Ok(server),
        _ => Err(format!("a fleet's store is Redis or Valkey: expected {FORMS}")),
    }
}

impl fmt::Display for FleetAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<String> =
            self.servers.iter().map(|server| StoreAddress::Redis(server.clone()).to_string()).collect();
        match &self.kind {
            RedisKind::Alone => f.write_str(&shown.join(", ")),
            RedisKind::Sentinels { master, .. } => {
                write!(f, "{master} of the sentinels {}", shown.join(", "))
            }
            RedisKind::Cluster => write!(f, "the cluster at {}", shown.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> FleetAddress {
        text.parse().unwrap_or_else(|why| panic!("{text}: {why}"))
    }

    #[test]
    fn server_sentinels_and_cluster_are_distinguished() {
        let alone = read("rediss://u:hunter2@db.example:7000/2");
        assert_eq!((alone.servers.len(), &alone.kind), (1, &RedisKind::Alone));
        let sentinels =
            read("redis+sentinel://:hunter2@s1:26379,s2,s3:1/main/3?sentinel-password=s%40&tls-ca=/ca");
        let RedisKind::Sentinels { master, password } = &sentinels.kind else { panic!("{sentinels:?}") };
        assert_eq!((master.as_str(), password.as_ref().map(Secret::reveal)), ("main", Some("s@")));
        let ports: Vec<_> = sentinels.servers.iter().map(|server| server.port).collect();
        assert_eq!(ports, [Some(26379), None, Some(1)]);
        assert!(sentinels.servers.iter().all(|server| {
            server.database.as_deref() == Some("3")
                && server.password.as_ref().map(Secret::reveal) == Some("hunter2")
                && server.tls.authority.as_deref() == Some("/ca".as_ref())
        }));
        let cluster = read("valkey+cluster://a,b:7001");
        assert!(cluster.is_cluster() && cluster.servers.len() == 2 && !alone.is_cluster());
        for address in [&alone, &sentinels, &cluster] {
            assert!(!format!("{address} {address:?}").contains("hunter2"));
            assert!(!format!("{address} {address:?}").contains("s@"));
        }
    }

    #[test]
    fn invalid_fleet_store_is_refused_without_its_password() {
        for (text, told) in [
            ("", "expected redis://"),
            ("postgres://u:hunter2@h/d", "is Redis or Valkey"),
            ("redis+sentinel://:hunter2@h", "name of the master"),
            ("redis+cluster://:hunter2@h/2", "database 0"),
            ("redis+cluster://:hunter2@h?color=hunter2", "color is not a supported setting"),
            ("mongodb+cluster://:hunter2@h", "not a supported store"),
        ] {
            let why = text.parse::<FleetAddress>().expect_err(text);
            assert!(why.contains(told) && !why.contains("hunter2"), "{text}: {why}");
        }
    }

    proptest! {
        #[test]
        fn address_parser_accepts_any_text_without_panic(text in "(redis|valkeys|postgres)(\\+sentinel|\\+cluster)?://\\PC{0,40}") {
            let _ = text.parse::<FleetAddress>();
        }
    }
}
