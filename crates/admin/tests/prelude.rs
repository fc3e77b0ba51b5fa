//! Common imports of the test modules.

pub(crate) use crate::support::{Answer, Dir, FULL, READ, Running, Together, exchange_tls, log, request};
pub(crate) use serde_json::{Value, json};
pub(crate) use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt,
    sync::Arc,
    time::Duration,
};
pub(crate) use turnpike_api::{Drain, NotReloaded, Reloaded};
pub(crate) use turnpike_config::{
    AdminAccess, AdminAddress, ConfiguredUser, RealmSettings, Secret, Settings, TokenKeySettings, UserSecret,
};
pub(crate) use turnpike_ctl::{
    client::{Client, Target},
    commands::{self, AllocationListFilter, CommandError, OutputFormat},
};
pub(crate) use turnpike_testkit::{
    certificates::{Certificate, believing_client},
    eventually, stun,
};
pub(crate) use turnpike_turn::access_token::TokenKey;
