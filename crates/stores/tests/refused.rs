//! Store errors: wrong address, login, database, tables or certificate.

use turnpike_stores::{Backend as _, DirectoryLimits, StoreError, StoreFault};
use turnpike_testkit::databases::{DATABASE, PASSWORD};

use crate::support::*;

fn error(world: &World, url: &str) -> StoreError {
    let error = world.wait(world.database_at(url).rules()).expect_err(url);
    let text = error.to_string();
    assert!(!text.contains(PASSWORD) && !text.contains("wrong%20horse"), "{text}");
    error
}

const SERVERS: [Kind; 3] = [Kind::Postgres, Kind::Mariadb, Kind::Redis];

#[test]
fn wrong_password_is_reported() {
    for kind in SERVERS {
        on(kind, |world| {
            let url = world.url.replace(&PASSWORD.replace('%', "%25"), "wrong%20horse");
            assert_ne!(url, world.url);
            let error = error(world, &url);
            assert_eq!(error.fault, StoreFault::Login, "{error}");
            assert!(!error.may_pass() && error.to_string().contains("correct them in store.url"), "{error}");
        });
    }
}

#[test]
fn missing_password_is_reported_as_wrong() {
    on(Kind::Redis, |world| {
        let without = world.url.replace(&format!(":{}@", PASSWORD.replace('%', "%25")), "");
        for url in [&without, &without.replace("/0", "/2")] {
            assert_ne!(*url, world.url);
            let error = error(world, url);
            assert_eq!(error.fault, StoreFault::Login, "{error}");
        }
    });
}

#[test]
fn absent_server_causes_a_temporary_error() {
    for kind in SERVERS.into_iter().chain([Kind::Http]) {
        on(kind, |world| {
            world.stop();
            let error = error(world, &world.url);
            assert_eq!(error.fault, StoreFault::Unreachable, "{error}");
            assert!(error.may_pass());
            let directory = world.directory_at(&world.url, DirectoryLimits::default());
            let told = world.wait(directory.read()).expect_err("missing");
            assert!(told.may_pass() && directory.counts().is_up);
            directory.wait_for_it(&told);
            assert!(!directory.counts().is_up);
        });
    }
}

#[test]
fn missing_database_is_named() {
    for kind in [Kind::Postgres, Kind::Mariadb] {
        on(kind, |world| {
            let error = error(world, &world.url.replace(&format!("/{DATABASE}"), "/elsewhere"));
            // MariaDB hides from unauthorized users whether a database exists.
            assert!(matches!(error.fault, StoreFault::NoDatabase | StoreFault::Permission), "{error}");
            assert!(error.to_string().contains("elsewhere") && !error.may_pass(), "{error}");
        });
    }
    on(Kind::Redis, |world| {
        let error = error(world, &world.url.replace("/0", "/4711"));
        assert_eq!(error.fault, StoreFault::NoDatabase, "{error}");
        assert!(!error.may_pass(), "{error}");
    });
}

#[test]
fn wrong_tables_are_reported_with_the_missing_part() {
    for kind in [Kind::Sqlite, Kind::Postgres, Kind::Mariadb] {
        on(kind, |world| {
            world.sql("alter table oauth_key drop column realm");
            let told = error(world, &world.url);
            assert_eq!(told.fault, StoreFault::Schema);
            assert!(told.to_string().contains("a table oauth_key without the column realm"), "{told}");
            world.sql("drop table turn_secret");
            let told = error(world, &world.url);
            assert!(told.to_string().contains("no table turn_secret, but it has turnusers_lt"), "{told}");
            for (table, _) in
                [("turnusers_lt", 0), ("allowed_peer_ip", 0), ("denied_peer_ip", 0), ("oauth_key", 0)]
            {
                world.sql(&format!("drop table {table}"));
            }
            world.sql("drop table turn_origin_to_realm; drop table turn_realm_option");
            let told = error(world, &world.url);
            assert!(told.to_string().contains("none of coturn's tables"), "{told}");
            assert!(told.to_string().contains("docs/stores.md"), "{told}");
        });
    }
    on(Kind::Redis, |world| {
        world.redis("set turn/realm/a/secret north");
        let told = error(world, &world.url);
        assert_eq!(told.fault, StoreFault::Schema, "{told}");
    });
}

#[test]
fn invalid_row_rejects_all_rules() {
    each(|world| {
        match world.kind {
            Kind::Redis => world.redis("sadd turn/realm/a/denied-peer-ip 10.0.0.0-9.0.0.0"),
            _ => world.sql("insert into denied_peer_ip (realm, ip_range) values ('a', '10.0.0.0-9.0.0.0')"),
        }
        let error = error(world, &world.url);
        assert_eq!(error.fault, StoreFault::Row, "{error}");
        assert!(error.to_string().contains("10.0.0.0-9.0.0.0"), "{error}");
    });
}

#[test]
fn missing_or_invalid_file_is_named() {
    on(Kind::Sqlite, |world| {
        let missing = file_of_a_test();
        let told = error(world, &format!("sqlite://{}", missing.display()));
        assert!(told.to_string().contains(missing.to_str().expect("a path")), "{told}");
        assert!(!missing.exists(), "the file was created");
        std::fs::write(
            &missing,
            "this is a text that is long enough to be mistaken for a page of an SQLite file",
        )
        .unwrap();
        let told = error(world, &format!("sqlite://{}", missing.display()));
        std::fs::remove_file(&missing).unwrap();
        assert_eq!(told.fault, StoreFault::Schema, "{told}");
    });
}

#[test]
fn tls_requires_a_trusted_certificate() {
    for kind in SERVERS {
        on(kind, |world| {
            let server = world.server.as_ref().expect("a server");
            let (name, authority) =
                (format!("localhost:{}", server.tls_address.port()), server.authority.display());
            let at_name = server.url(server.tls_address, "").replace(&server.tls_address.to_string(), &name);
            let (good, unknown, other_name) = match kind {
                Kind::Postgres => (
                    format!("{at_name}?sslmode=verify-full&sslrootcert={authority}"),
                    format!("{at_name}?sslmode=verify-full"),
                    server.url(server.tls_address, &format!("?sslmode=verify-full&sslrootcert={authority}")),
                ),
                Kind::Mariadb => (
                    format!("{at_name}?ssl-mode=VERIFY_IDENTITY&ssl-ca={authority}"),
                    format!("{at_name}?ssl-mode=VERIFY_IDENTITY"),
                    server.url(server.tls_address, &format!("?ssl-mode=VERIFY_IDENTITY&ssl-ca={authority}")),
                ),
                _ => {
                    let secure = |url: &str| url.replace("redis://", "rediss://");
                    (
                        secure(&format!("{at_name}?tls-ca={authority}")),
                        secure(&at_name),
                        secure(&server.url(server.tls_address, &format!("?tls-ca={authority}"))),
                    )
                }
            };
            assert!(world.wait(world.database_at(&good).rules()).is_ok(), "{kind:?}: {good}");
            for url in [unknown, other_name] {
                let told = error(world, &url);
                assert_eq!(told.fault, StoreFault::Tls, "{told}");
                assert!(!told.may_pass());
            }
        });
    }
}

#[test]
fn unix_socket_works() {
    on(Kind::Postgres, |world| {
        let server = world.server.as_ref().expect("a server");
        let (dir, port) = (server.dir.display(), server.address.port());
        let url =
            format!("psql-userdb=host={dir} port={port} dbname={DATABASE} user=turn password='{PASSWORD}'");
        assert!(world.wait(world.database_at(&url).rules()).is_ok());
    });
    on(Kind::Mariadb, |world| {
        let server = world.server.as_ref().expect("a server");
        let url = format!(
            "mysql://turn:{}@localhost/{DATABASE}?socket={}",
            PASSWORD.replace('%', "%25"),
            server.dir.join("socket").display()
        );
        assert!(world.wait(world.database_at(&url).rules()).is_ok());
    });
}
