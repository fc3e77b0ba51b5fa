//! `turnpike fleet`: status, draining, and the allocations of all nodes.

use std::io::Write;

use turnpike_api::{Allocation, FleetAllocations, FleetNode, FleetStatus, NodeOrder, NodeState};
use turnpike_measure::units::{bits_per_second, span};
use turnpike_wire::escape;

use super::{
    AllocationListFilter, CommandError, ListOutput, OutputFormat, each_page, encoded, row, write_json,
};
use crate::{client::Client, table::PagedTable};

/// Message shown while the store recovers, similar to the text on the admin page.
const RECOVERING: &str = "the store does not know the usage of all nodes yet; until it does, each node grants its equal share of quotas";

pub fn show_fleet(client: &Client, format: OutputFormat, out: &mut dyn Write) -> Result<(), CommandError> {
    let fleet: FleetStatus = client.get("/v1/fleet")?;
    if format.is_json() {
        return Ok(write_json(out, &fleet)?);
    }
    let FleetStatus { name, node, store, alone, recovering, nodes, .. } = &fleet;
    let mut say = |text: &str| writeln!(out, "{}", format.sentence(text));
    say(&format!("fleet {} in {store}, as seen by node {}", escape::name(name), escape::name(node)))?;
    if let Some(why) = alone {
        say(&format!(
            "this node is not in contact with the others, so the data below is outdated: {}",
            escape::line(why)
        ))?;
    }
    if *recovering {
        say(RECOVERING)?;
    }
    let head = ["NODE", "STATE", "ZONE", "BUSY", "ALLOCATIONS", "TRAFFIC", "CPU", "PORTS LEFT", "VERSION"];
    let rows: Vec<[String; 9]> = nodes.iter().map(row_of_node).collect();
    Ok(PagedTable::new(head, format).write(out, &rows)?)
}

/// Drains or uncordons a node; if no name is given, the queried one.
pub fn order_node(
    client: &Client,
    node: Option<&str>,
    drains: bool,
    json: bool,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let what = if drains { "drain" } else { "uncordon" };
    let node = match node {
        Some(node) => node.to_owned(),
        None => client.get::<FleetStatus>("/v1/fleet")?.node,
    };
    let path = format!("/v1/fleet/nodes/{}/{what}", encoded(&node));
    let order: NodeOrder = client.post(&path, None::<&()>)?;
    if json {
        return Ok(write_json(out, &order)?);
    }
    let NodeOrder { node, drains } = &order;
    let told = if *drains {
        "accepts no new clients; its allocations continue, and `turnpike fleet status` shows their number"
    } else {
        "accepts clients again"
    };
    Ok(writeln!(out, "node {} {told}", escape::name(node))?)
}

/// Lists allocations of all nodes, page by page. JSON output is one array.
pub fn list_fleet_allocations(
    client: &Client,
    wanted: AllocationListFilter,
    format: OutputFormat,
    out: &mut dyn Write,
) -> Result<(), CommandError> {
    let head = [
        "NODE",
        "ID",
        "REALM",
        "USER",
        "CLIENT",
        "VIA",
        "RELAYED",
        "AGE",
        "TO PEERS",
        "TO CLIENT",
        "NETWORK",
        "QUALITY",
    ];
    let mut list = ListOutput::new(format, head);
    list.omit_if_empty(&["NETWORK", "QUALITY"]);
    let mut silent = Vec::new();
    each_page(client, "/v1/fleet/allocations", wanted, |page: FleetAllocations| {
        list.show(out, &page.allocations, row_with_node)?;
        silent.extend(page.silent);
        Ok((page.allocations.len(), page.next))
    })?;
    Ok(list.end_without(out, "no allocations", &silent)?)
}

fn row_with_node(allocation: &Allocation) -> [String; 12] {
    let [id, realm, user, client, via, relayed, age, to_peers, to_client, network, quality] = row(allocation);
    let node = allocation.node.clone().unwrap_or_default();
    [node, id, realm, user, client, via, relayed, age, to_peers, to_client, network, quality]
}

fn row_of_node(node: &FleetNode) -> [String; 9] {
    let FleetNode { name, state, silent_s, zone, version, busy, allocations, max_allocations, .. } = node;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "seconds without contact")]
    let state = match state {
        NodeState::Serving => "serving".to_owned(),
        NodeState::Full => "full".to_owned(),
        NodeState::Draining => "draining".to_owned(),
        NodeState::Silent => format!("silent for {}", span(*silent_s as u64)),
    };
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
    let traffic = bits_per_second(node.bits_per_second as f64);
    let or_none = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    [
        name.clone(),
        state,
        or_none(zone),
        percent(*busy),
        format!("{allocations} of {max_allocations}"),
        traffic,
        percent(node.cpu),
        if node.relay_ports == 0 { "-".to_owned() } else { node.relay_ports_left.to_string() },
        or_none(version.as_deref().unwrap_or_default()),
    ]
}
