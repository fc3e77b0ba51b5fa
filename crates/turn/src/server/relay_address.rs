use std::net::IpAddr;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RelayAddress {
    pub bind: IpAddr,
    /// Address announced to clients if the server is behind a NAT.
    pub external: Option<IpAddr>,
}
