//! `turnpike usage`.

use std::io::{self, Write};

use clap::{Args, ValueEnum};
use turnpike_api::{UsageFilter, UsageGrouping};
use turnpike_ctl::commands::{self, CommandError, OutputFormat, UsageFormat};

use crate::admin_args::AdminArgs;

#[derive(Args)]
pub(crate) struct UsageArgs {
    /// One line per user, key, identifier, realm, node, hour or day
    #[arg(long, value_name = "GROUP", default_value = "user")]
    by: Grouping,

    /// Beginning: a date, or a time such as 2026-11-30T18:00:00Z [default: 30 days before the end]
    #[arg(long, value_name = "T")]
    since: Option<String>,

    /// End, like --since [default: now]
    #[arg(long, value_name = "T")]
    until: Option<String>,

    /// Only this user
    #[arg(long, value_name = "NAME")]
    user: Option<String>,

    /// Only this realm
    #[arg(long, value_name = "R")]
    realm: Option<String>,

    /// Only credentials issued to this API key
    #[arg(long, value_name = "NAME")]
    key: Option<String>,

    /// Only this identifier, the application's name for its customer
    #[arg(long, value_name = "NAME")]
    identifier: Option<String>,

    /// Only this node
    #[arg(long, value_name = "NAME")]
    node: Option<String>,

    /// Print CSV
    #[arg(long, conflicts_with = "json")]
    csv: bool,

    #[command(flatten)]
    admin: AdminArgs,
}

#[derive(Clone, Copy, ValueEnum)]
enum Grouping {
    User,
    Key,
    Identifier,
    Realm,
    Node,
    Hour,
    Day,
}

impl From<Grouping> for UsageGrouping {
    fn from(grouping: Grouping) -> Self {
        match grouping {
            Grouping::User => Self::User,
            Grouping::Key => Self::Key,
            Grouping::Identifier => Self::Identifier,
            Grouping::Realm => Self::Realm,
            Grouping::Node => Self::Node,
            Grouping::Hour => Self::Hour,
            Grouping::Day => Self::Day,
        }
    }
}

impl UsageArgs {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<(), CommandError> {
        let Self { by, since, until, user, realm, key, identifier, node, csv, admin } = self;
        let by = Some(by.into());
        let wanted =
            UsageFilter { by, since, until, user, realm, key, identifier, node, limit: None, cursor: None };
        let format =
            if csv { UsageFormat::Csv } else { UsageFormat::Other(OutputFormat::of_stdout(admin.json)) };
        commands::show_usage(&admin.client()?, wanted, format, out, &mut io::stderr())
    }
}

pub(crate) const USAGE_EXAMPLES: &str = "\
Examples:
  turnpike usage
  turnpike usage --by key --since 2026-11-01 --until 2026-12-01 --csv >november.csv
  turnpike usage --by day --user alice";
