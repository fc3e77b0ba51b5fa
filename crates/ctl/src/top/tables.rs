//! Tables of `turnpike top`: columns, rows, and colors of rows that need attention.

use ratatui::style::Color;
use turnpike_api::{
    CertificateInfo, FleetNode, FleetStatus, Live, LiveServer, LiveWorker, NetworkInfo, NodeState,
    QualityProblem, ReasonCount, Talkers,
};
use turnpike_measure::units::{bits_per_second, per_second, span};

use super::{
    grid::{Column, Grid},
    units::{bits, mean, micros, percent},
};

/// Shares of a core above which a worker is shown as busy or as full.
const BUSY: f64 = 0.8;
const FULL: f64 = 0.95;
/// Remaining validity in seconds below which a certificate is highlighted.
const NEAR_S: i64 = 14 * 86_400;

pub(super) fn workers(workers: &[LiveWorker]) -> Grid {
    let row = |worker: &LiveWorker| {
        let cells = [
            worker.number.to_string(),
            percent(worker.load),
            percent(worker.waiting),
            micros(worker.event_loop_us),
            worker.allocations.to_string(),
            per_second(worker.received),
            mean(worker.receive_batch),
            per_second(worker.sent),
            mean(worker.send_batch),
            per_second(worker.dropped),
        ];
        let colour = match worker.load {
            Some(load) if load >= FULL => Some(Color::Red),
            Some(load) if load >= BUSY => Some(Color::Yellow),
            _ => None,
        };
        (cells.to_vec(), colour)
    };
    const HEAD: &[Column] = &[
        ("WORKER", 0),
        ("LOAD", 1),
        ("WAITS", 7),
        ("EVENT LOOP", 6),
        ("ALLOCATIONS", 3),
        ("RECEIVED", 4),
        ("PER CALL", 8),
        ("SENT", 5),
        ("PER CALL", 9),
        ("LOST", 2),
    ];
    Grid { head: HEAD, rows: workers.iter().map(row).collect() }
}

pub(super) fn talkers(talkers: Option<&Talkers>) -> Grid {
    const HEAD: &[Column] = &[
        ("USER", 0),
        ("REALM", 7),
        ("CLIENT", 3),
        ("VIA", 6),
        ("TO PEERS", 1),
        ("TO CLIENT", 2),
        ("DATAGRAMS", 4),
        ("ALLOCATION", 8),
        ("NETWORK", 5),
        ("QUALITY", 5),
    ];
    let talkers = talkers.map_or(&[][..], |talkers| &talkers.talkers);
    let has_networks = talkers.iter().any(|talker| talker.network.is_some());
    let has_problems = talkers.iter().any(|talker| talker.quality_problem.is_some());
    let rows = talkers.iter().map(|talker| {
        let mut cells = vec![
            talker.user.clone(),
            talker.realm.clone(),
            talker.client.clone(),
            talker.transport.clone(),
            bits(talker.to_peer.bytes),
            bits(talker.to_client.bytes),
            per_second(talker.to_peer.datagrams + talker.to_client.datagrams),
            talker.id.clone(),
        ];
        if has_networks || has_problems {
            cells.push(talker.network.as_ref().map_or_else(String::new, NetworkInfo::to_string));
        }
        if has_problems {
            cells.push(talker.quality_problem.as_ref().map_or_else(String::new, QualityProblem::place));
        }
        cells
    });
    let left_out = if has_problems { 0 } else { 2 - usize::from(has_networks) };
    Grid::new(&HEAD[..HEAD.len() - left_out], rows)
}

pub(super) fn reasons(reasons: &[ReasonCount]) -> Grid {
    let rows = reasons.iter().map(|reason| {
        vec![
            reason.kind.clone(),
            reason.reason.replace('_', " "),
            per_second(reason.rate),
            reason.total.to_string(),
        ]
    });
    Grid::new(&[("KIND", 3), ("REASON", 0), ("NOW", 1), ("SINCE STARTUP", 2)], rows)
}

pub(super) fn listeners(server: &LiveServer) -> Grid {
    let listeners = server.listeners.iter().map(|listener| {
        let name = listener.server_name.clone().unwrap_or_default();
        let at = format!("{} {}", listener.transport, listener.address);
        vec!["listener".to_owned(), at, name, listener.allocations.to_string()]
    });
    let realms = server.realms.iter().map(|realm| {
        vec!["realm".to_owned(), realm.name.clone(), String::new(), realm.allocations.to_string()]
    });
    Grid::new(&[("", 2), ("WHICH", 0), ("SERVER NAME", 3), ("ALLOCATIONS", 1)], listeners.chain(realms))
}

pub(super) fn certificates(certificates: &[CertificateInfo]) -> Grid {
    let row = |certificate: &CertificateInfo| {
        let left = certificate.expires_in_s;
        let text = span(left.unsigned_abs());
        let left_text = if left < 0 { format!("expired {text} ago") } else { text };
        let cells = vec![
            certificate.names.join(", "),
            certificate.not_after.clone(),
            left_text,
            if certificate.dtls { "yes" } else { "no" }.to_owned(),
            certificate.file.clone(),
        ];
        let colour = match left {
            ..0 => Some(Color::Red),
            0..NEAR_S => Some(Color::Yellow),
            _ => None,
        };
        (cells, colour)
    };
    const HEAD: &[Column] = &[("NAMES", 0), ("ENDS", 2), ("LEFT", 1), ("DTLS", 3), ("FILE", 4)];
    Grid { head: HEAD, rows: certificates.iter().map(row).collect() }
}

pub(super) fn nodes(fleet: Option<&FleetStatus>) -> Grid {
    let row = |node: &FleetNode| {
        let (state, colour) = match node.state {
            NodeState::Serving if node.busy >= FULL => ("serving", Some(Color::Red)),
            NodeState::Serving if node.busy >= BUSY => ("serving", Some(Color::Yellow)),
            NodeState::Serving => ("serving", None),
            NodeState::Full => ("full", Some(Color::Red)),
            NodeState::Draining => ("draining", Some(Color::Yellow)),
            NodeState::Silent => ("silent", Some(Color::Red)),
        };
        #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
        let traffic = bits_per_second(node.bits_per_second as f64);
        let cells = vec![
            node.name.clone(),
            state.to_owned(),
            node.zone.clone(),
            percent(Some(node.busy)),
            format!("{} of {}", node.allocations, node.max_allocations),
            traffic,
            percent(Some(node.cpu)),
            node.version.clone().unwrap_or_default(),
        ];
        (cells, colour)
    };
    const HEAD: &[Column] = &[
        ("NODE", 0),
        ("STATE", 1),
        ("ZONE", 6),
        ("BUSY", 2),
        ("ALLOCATIONS", 3),
        ("TRAFFIC", 4),
        ("CPU", 5),
        ("VERSION", 7),
    ];
    Grid { head: HEAD, rows: fleet.into_iter().flat_map(|fleet| &fleet.nodes).map(row).collect() }
}

pub(super) fn rules(live: &Live) -> Grid {
    let rows = live.rules.iter().map(|rule| {
        vec![
            rule.name.clone(),
            rule.state.name().to_owned(),
            rule.open.to_string(),
            per_second(rule.accepted),
            bits(rule.to_target.bytes),
            bits(rule.to_client.bytes),
            per_second(rule.to_target.datagrams + rule.to_client.datagrams),
        ]
    });
    Grid::new(
        &[
            ("RULE", 0),
            ("STATE", 3),
            ("OPEN", 1),
            ("NEW", 5),
            ("TO TARGETS", 2),
            ("TO CLIENTS", 4),
            ("DATAGRAMS", 6),
        ],
        rows,
    )
}

/// Reasons why rules are waiting; each begins with the name of its rule.
pub(super) fn waiting(live: &Live) -> Grid {
    let rows = live.rules.iter().filter_map(|rule| Some(vec![rule.waits_for.clone()?]));
    Grid::new(&[("REASON", 0)], rows)
}

pub(super) fn ends(live: &Live) -> Grid {
    let rows = live.rules.iter().flat_map(|rule| {
        rule.ends.iter().map(|end| {
            let reason = end.reason.replace('_', " ");
            vec![rule.name.clone(), reason, per_second(end.rate), end.total.to_string()]
        })
    });
    Grid::new(&[("RULE", 2), ("REASON", 0), ("NOW", 1), ("SINCE STARTUP", 3)], rows)
}
