//! A rule for the unit tests of this crate.

use std::{net::SocketAddr, time::Duration};

use crate::{Access, Balance, CopyMode, Endpoint, Host, Limits, PortRange, Protocol, Rule, RuleId};

/// From any port of 127.0.0.1 to `target`, with the defaults that the documentation states.
pub(crate) fn rule(id: &str, target: SocketAddr) -> Rule {
    Rule {
        id: RuleId(id.to_owned()),
        protocol: Protocol::Tcp,
        bind: [127, 0, 0, 1].into(),
        ipv6_only: true,
        socket_mode: None,
        ports: PortRange { first: 0, last: 0 },
        targets: vec![Endpoint {
            host: Host::Ip(target.ip()),
            ports: PortRange { first: target.port(), last: target.port() },
            weight: 1,
        }],
        balance: Balance::RoundRobin,
        health_check: None,
        health_question: None,
        source: None,
        device: None,
        mark: None,
        transparent: false,
        proxy_protocol_from: Vec::new(),
        send_proxy: None,
        access: Access::default(),
        idle_timeout: None,
        half_close_timeout: None,
        connect_timeout: Duration::from_secs(10),
        keepalive: true,
        nodelay: true,
        max_connections: 1000,
        limits: Limits::default(),
        copy: CopyMode::Auto,
    }
}
