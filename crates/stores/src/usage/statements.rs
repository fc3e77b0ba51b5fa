//! Statements of the usage ledger in the syntax of each database. All values are bound as text; rows of a batch
//! are one JSON array, because a statement per row would take a round trip each.

use crate::{
    sql::{Mysql, Postgres},
    sqlite::Sqlite,
};

pub(super) trait Statements {
    const TABLES: &'static [&'static str];
    /// By user, by API key, by realm. First day, end, least sum, subjects that are listed with a smaller sum.
    const VOLUMES: [&'static str; 3];
    /// Hash, beginning of the period.
    const NOTICE: &'static str;
    /// First beginning to keep.
    const FORGET_NOTICES: &'static str;
    /// Run, node, start, time.
    const BEGIN_RUN: &'static str;
    /// Span, beginning, node, rows, run, number of the batch.
    const ADD: &'static str;
    /// Number, time, is idle, is last, run, number.
    const ADDED: &'static str;
    /// Indexed by [`super::UsageBy`]. Bounds of three ranges, then each filter twice.
    const SUMS: [&'static str; 7];
    /// Earliest and latest last write.
    const GAPS: &'static str;
    /// Span, first beginning to keep.
    const FORGET: &'static str;
    /// First time to keep.
    const FORGET_RUNS: &'static str;
}

macro_rules! usage_table {
    ($options:literal) => {
        concat!(
            "create table if not exists turnpike_usage (span integer not null, begins bigint not null, account char(32) not null, ",
            "node varchar(255) not null, realm varchar(255) not null, user_name varchar(1024) not null, ",
            "api_key varchar(255) not null, identifier varchar(1024) not null, allocations bigint not null, ",
            "lived_ms bigint not null, to_peer_datagrams bigint not null, to_peer_bytes bigint not null, ",
            "to_client_datagrams bigint not null, to_client_bytes bigint not null, peak_bps bigint not null, ",
            "primary key (span, begins, account, node))",
            $options
        )
    };
}

macro_rules! run_table {
    ($options:literal) => {
        concat!(
            "create table if not exists turnpike_usage_run (run varchar(64) not null, node varchar(255) not null, ",
            "started bigint not null, last_write bigint not null, batch bigint not null, idle integer not null, ",
            "ended integer not null, primary key (run))",
            $options
        )
    };
}

/// Notices of volume quotas that a node has announced.
macro_rules! notice_table {
    ($options:literal) => {
        concat!(
            "create table if not exists turnpike_usage_notice (notice char(32) not null, begins bigint not null, ",
            "primary key (notice))",
            $options
        )
    };
}

/// Tables of the ledger's own SQLite file.
pub(super) const SQLITE_TABLES: &str = concat!(
    usage_table!(" without rowid"),
    ";\n",
    run_table!(" without rowid"),
    ";\n",
    notice_table!(" without rowid"),
    ";\n"
);

macro_rules! columns {
    () => {
        "span, begins, account, node, realm, user_name, api_key, identifier, allocations, lived_ms, to_peer_datagrams, \
         to_peer_bytes, to_client_datagrams, to_client_bytes, peak_bps"
    };
}

/// Sums of one kind of group: its labels, its columns, its order, and the database's name for 64-bit integers.
macro_rules! sums {
    ($labels:literal, $group:literal, $order:literal, $int:literal) => {
        concat!(
            "select ",
            $labels,
            ", cast(sum(allocations) as char(40)), cast(sum(lived_ms) as char(40)), cast(sum(to_peer_datagrams) as char(40)), ",
            "cast(sum(to_peer_bytes) as char(40)), cast(sum(to_client_datagrams) as char(40)), ",
            "cast(sum(to_client_bytes) as char(40)), cast(max(peak_bps) as char(40)) from (",
            sums!(@range "86400", $int),
            " union all ",
            sums!(@range "3600", $int),
            " union all ",
            sums!(@range "3600", $int),
            ") u where (? = '' or realm = ?) and (? = '' or user_name = ?) and (? = '' or api_key = ?) ",
            "and (? = '' or identifier = ?) and (? = '' or node = ?) group by ",
            $group,
            " order by ",
            $order,
            " limit 100000"
        )
    };
    (@range $span:literal, $int:literal) => {
        concat!(
            "select * from turnpike_usage where span = ", $span, " and begins >= cast(? as ", $int, ") and begins < cast(? as ",
            $int, ")"
        )
    };
}

/// Sums of bytes: the labels of a subject, its columns, a condition, and its members in a JSON array.
macro_rules! volumes {
    ($labels:literal, $group:literal, $where:literal, $int:literal, $members:expr) => {
        concat!(
            "select ",
            $labels,
            ", cast(sum(to_peer_bytes + to_client_bytes) as char(40)) from turnpike_usage where span = 86400 ",
            "and begins >= cast(? as ",
            $int,
            ") and begins < cast(? as ",
            $int,
            ")",
            $where,
            " group by ",
            $group,
            " having sum(to_peer_bytes + to_client_bytes) >= cast(? as ",
            $int,
            ") or (",
            $group,
            ") in (",
            $members,
            ") order by sum(to_peer_bytes + to_client_bytes) desc limit 20000"
        )
    };
}

/// Implements [`Statements`]: the name of 64-bit integers, options of tables, the beginning and end of an
/// insertion that ignores existing rows, rows from a JSON array, the end of an insertion that adds to existing
/// rows, and pairs and single texts from a JSON array.
macro_rules! statements {
    ($database:ty, $int:literal, $options:literal, $insert:literal, $or_nothing:literal, [$($rows:literal),+], $or_add:literal, $pairs:expr, $singles:expr) => {
        impl Statements for $database {
            const TABLES: &'static [&'static str] = &[usage_table!($options), run_table!($options), notice_table!($options)];
            const VOLUMES: [&'static str; 3] = [
                volumes!("realm, user_name, ''", "realm, user_name", "", $int, $pairs),
                volumes!("'', '', api_key", "api_key", " and api_key <> ''", $int, $singles),
                volumes!("realm, '', ''", "realm", "", $int, $singles),
            ];
            const NOTICE: &'static str = concat!(
                $insert,
                " into turnpike_usage_notice (notice, begins) values (?, cast(? as ",
                $int,
                "))",
                $or_nothing
            );
            const FORGET_NOTICES: &'static str =
                concat!("delete from turnpike_usage_notice where begins < cast(? as ", $int, ")");
            const BEGIN_RUN: &'static str = concat!(
                $insert,
                " into turnpike_usage_run (run, node, started, last_write, batch, idle, ended) values (?, ?, cast(? as ",
                $int,
                "), cast(? as ",
                $int,
                "), 0, 1, 0)",
                $or_nothing
            );
            const ADD: &'static str = concat!(
                "insert into turnpike_usage (",
                columns!(),
                ") select cast(? as ",
                $int,
                "), cast(? as ",
                $int,
                ")",
                $($rows,)+
                " where exists (select 1 from turnpike_usage_run where run = ? and batch < cast(? as ",
                $int,
                "))",
                $or_add
            );
            const ADDED: &'static str = concat!(
                "update turnpike_usage_run set batch = cast(? as ",
                $int,
                "), last_write = cast(? as ",
                $int,
                "), idle = cast(? as ",
                $int,
                "), ended = cast(? as ",
                $int,
                ") where run = ? and batch < cast(? as ",
                $int,
                ")"
            );
            const SUMS: [&'static str; 7] = [
                sums!("realm, user_name, '', '', '', ''", "realm, user_name", "sum(to_peer_bytes + to_client_bytes) desc, 1, 2", $int),
                sums!("'', '', api_key, '', '', ''", "api_key", "sum(to_peer_bytes + to_client_bytes) desc, 3", $int),
                sums!("'', '', '', identifier, '', ''", "identifier", "sum(to_peer_bytes + to_client_bytes) desc, 4", $int),
                sums!("realm, '', '', '', '', ''", "realm", "sum(to_peer_bytes + to_client_bytes) desc, 1", $int),
                sums!("'', '', '', '', node, ''", "node", "sum(to_peer_bytes + to_client_bytes) desc, 5", $int),
                sums!("'', '', '', '', '', cast(begins as char(20))", "begins", "begins", $int),
                sums!("'', '', '', '', '', cast(begins as char(20))", "begins", "begins", $int),
            ];
            const GAPS: &'static str = concat!(
                "select node, cast(started as char(20)), cast(last_write as char(20)) from turnpike_usage_run r \
                 where ended = 0 and (idle = 0 or exists (select 1 from turnpike_usage_run l where l.node = r.node and \
                 l.started > r.last_write)) and last_write >= cast(? as ",
                $int,
                ") and last_write < cast(? as ",
                $int,
                ") order by last_write desc limit 100"
            );
            const FORGET: &'static str = concat!(
                "delete from turnpike_usage where span = cast(? as ",
                $int,
                ") and begins < cast(? as ",
                $int,
                ")"
            );
            const FORGET_RUNS: &'static str =
                concat!("delete from turnpike_usage_run where last_write < cast(? as ", $int, ")");
        }
    };
}

/// `->>` needs SQLite 3.38 or PostgreSQL 9.3.
macro_rules! statements_with_arrows {
    ($database:ty, $options:literal, $elements:literal) => {
        statements!(
            $database,
            "bigint",
            $options,
            "insert",
            " on conflict do nothing",
            [
                ", value ->> 0, ?, value ->> 1, value ->> 2, value ->> 3, value ->> 4, cast(value ->> 5 as bigint), ",
                "cast(value ->> 6 as bigint), cast(value ->> 7 as bigint), cast(value ->> 8 as bigint), ",
                "cast(value ->> 9 as bigint), cast(value ->> 10 as bigint), cast(value ->> 11 as bigint) from ",
                $elements
            ],
            " on conflict (span, begins, account, node) do update set \
             allocations = turnpike_usage.allocations + excluded.allocations, \
             lived_ms = turnpike_usage.lived_ms + excluded.lived_ms, \
             to_peer_datagrams = turnpike_usage.to_peer_datagrams + excluded.to_peer_datagrams, \
             to_peer_bytes = turnpike_usage.to_peer_bytes + excluded.to_peer_bytes, \
             to_client_datagrams = turnpike_usage.to_client_datagrams + excluded.to_client_datagrams, \
             to_client_bytes = turnpike_usage.to_client_bytes + excluded.to_client_bytes, \
             peak_bps = case when excluded.peak_bps > turnpike_usage.peak_bps then excluded.peak_bps \
             else turnpike_usage.peak_bps end",
            concat!("select value ->> 0, value ->> 1 from ", $elements),
            concat!("select value ->> 0 from ", $elements)
        );
    };
}

statements_with_arrows!(Sqlite, " without rowid", "json_each(?) r");
statements_with_arrows!(Postgres, "", "json_array_elements(cast(? as json)) as r(value)");

// MySQL 8.0 and MariaDB 10.6 have JSON_TABLE.
statements!(
    Mysql,
    "signed",
    " character set utf8mb4 collate utf8mb4_bin",
    "insert ignore",
    "",
    [
        ", r.c0, ?, r.c1, r.c2, r.c3, r.c4, r.c5, r.c6, r.c7, r.c8, r.c9, r.c10, r.c11 from json_table(?, '$[*]' columns (",
        "c0 char(32) path '$[0]', c1 varchar(255) path '$[1]', c2 varchar(1024) path '$[2]', c3 varchar(255) path '$[3]', ",
        "c4 varchar(1024) path '$[4]', c5 bigint path '$[5]', c6 bigint path '$[6]', c7 bigint path '$[7]', ",
        "c8 bigint path '$[8]', c9 bigint path '$[9]', c10 bigint path '$[10]', c11 bigint path '$[11]')) r"
    ],
    " on duplicate key update allocations = allocations + values(allocations), \
     lived_ms = lived_ms + values(lived_ms), \
     to_peer_datagrams = to_peer_datagrams + values(to_peer_datagrams), \
     to_peer_bytes = to_peer_bytes + values(to_peer_bytes), \
     to_client_datagrams = to_client_datagrams + values(to_client_datagrams), \
     to_client_bytes = to_client_bytes + values(to_client_bytes), \
     peak_bps = greatest(peak_bps, values(peak_bps))",
    "select r.c0, r.c1 from json_table(?, '$[*]' columns (c0 varchar(255) path '$[0]', c1 varchar(1024) path '$[1]')) r",
    "select r.c0 from json_table(?, '$[*]' columns (c0 varchar(255) path '$[0]')) r"
);
