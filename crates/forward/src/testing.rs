//! A rule for the unit tests of this crate.

use std::{net::SocketAddr, time::Duration};

use crate::{Access, Balance, CopyMode, Endpoint, Host, PortRange, Protocol, Rule, RuleId};

/// From any port of 127.0.0.1 to `target`, with the defaults that the documentation states.
pub(crate) fn rule(id: &str, target: SocketAddr) -> Rule {
    Rule {
        id: RuleId(id.to_owned()),
        protocol: Protocol::Tcp,
        bind: [127, 0, 0, 1].into(),
        ports: PortRange { first: 0, last: 0 },
        targets: vec![Endpoint {
            host: Host::Ip(target.ip()),
            ports: PortRange { first: target.port(), last: target.port() },
            weight: 1,
        }],
        balance: Balance::RoundRobin,
        health_check: None,
        source: None,
        device: None,
        mark: None,
        transparent: false,
        accept_proxy: false,
        send_proxy: None,
        access: Access::default(),
        idle_timeout: None,
        connect_timeout: Duration::from_secs(10),
        keepalive: true,
        nodelay: true,
        max_connections: 1000,
        copy: CopyMode::Auto,
    }
}
