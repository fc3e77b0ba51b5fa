//! 1,000 nodes in three zones and ten million unevenly distributed clients: the busiest node gets fourteen
//! times as many clients as the idlest. Time and the store are simulated.

use turnpike_fleet::{
    BEAT_MS, Beat, Card, Charges, Entrance, FleetMembers, FleetView, Load, MemberChange, Need, NodeRecord,
    look_period_ms,
};
use turnpike_turn::server::Transport;

use crate::chance::Chance;

const NODES: usize = 1000;
const ZONES: [&str; 3] = ["east", "west", "north"];
const CLIENTS: f64 = 10e6;
const ROOM: u32 = 20_000;
const LIFE: f64 = 300.0;
/// Choices per node per second, each for many clients.
const CHOICES: u32 = 8;
const UDP: (Transport, bool) = (Transport::Udp, true);

struct Node {
    zone: usize,
    /// Share of clients that first contact this node.
    weight: f64,
    allocations: u32,
    alive: bool,
    charges: Charges,
}

struct World {
    nodes: Vec<Node>,
    records: Vec<NodeRecord>,
    members: FleetMembers,
    /// Members as known to the nodes that read in the same second of the period; `views` are also per zone.
    known: Vec<FleetMembers>,
    views: Vec<Vec<FleetView>>,
    chance: Chance,
    second: u64,
    redirected: f64,
    arrived: f64,
    /// Clients redirected to a dead node.
    lost: f64,
    /// Clients redirected twice.
    twice: f64,
}

impl World {
    fn new() -> Self {
        let mut chance = Chance::new(1);
        let mut nodes: Vec<Node> = (0..NODES)
            .map(|number| {
                let zone = number % ZONES.len();
                let weight = (0.25 + 1.5 * chance.fraction()) * [1.2, 1.0, 0.8][zone];
                Node { zone, weight, allocations: 0, alive: true, charges: Charges::default() }
            })
            .collect();
        let all: f64 = nodes.iter().map(|node| node.weight).sum();
        for node in &mut nodes {
            node.allocations = chance.about(CLIENTS * node.weight / all).min(ROOM);
        }
        let mut world = Self {
            nodes,
            records: Vec::new(),
            members: FleetMembers::default(),
            known: Vec::new(),
            views: Vec::new(),
            chance,
            second: 0,
            redirected: 0.0,
            arrived: 0.0,
            lost: 0.0,
            twice: 0.0,
        };
        world.look();
        for (at, zone) in (0..NODES).map(|at| (at, ZONES[at % ZONES.len()])) {
            let address =
                ([10, 0, u8::try_from(at / 250).unwrap(), u8::try_from(at % 250).unwrap()], 3478).into();
            world.members.put_card(Card {
                name: format!("n{at}").parse().unwrap(),
                incarnation: 1,
                zone: zone.to_owned(),
                version: String::new(),
                entrances: vec![Entrance { transport: Transport::Udp, address }],
                domain: None,
            });
        }
        let period = world.period();
        world.known = vec![world.members.clone(); period];
        world.views = world.known.iter().map(seen).collect();
        (0..NODES)
            .for_each(|at| world.nodes[at].charges = world.views[at % period][at % ZONES.len()].charges());
        world
    }

    fn period(&self) -> usize {
        usize::try_from(look_period_ms(NODES) / BEAT_MS).unwrap()
    }

    /// Live nodes send heartbeats, and some of them read the records; all others are notified of overdue
    /// nodes.
    fn look(&mut self) {
        let now = self.second * 1000;
        let record = |(at, node): (usize, &Node)| {
            let load = Load { allocations: node.allocations, most_allocations: ROOM, ..Load::default() };
            let number = u16::try_from(at + 1).unwrap();
            let beat = Beat { number, incarnation: 1, draining: false, load };
            NodeRecord { name: format!("n{at}").parse().unwrap(), stamp_ms: now, beat }
        };
        if self.records.is_empty() {
            self.records = self.nodes.iter().enumerate().map(record).collect();
        }
        for (at, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.alive) {
            self.records[at] = record((at, node));
        }
        let changes = self.members.look(now, now, u64::MAX, self.records.clone());
        let silent = changes.into_iter().filter_map(|change| match change {
            MemberChange::Silent { name, incarnation } => Some((name, incarnation)),
            _ => None,
        });
        let silent: Vec<_> = silent.collect();
        if silent.is_empty() {
            return;
        }
        let period = self.period();
        for phase in 0..period {
            silent.iter().for_each(|(name, incarnation)| _ = self.known[phase].doubt(name, *incarnation));
            let views = seen(&self.known[phase]);
            for node in self.nodes.iter_mut().skip(phase).step_by(period) {
                let (before, after) = (&self.views[phase][node.zone], &views[node.zone]);
                node.charges = after.charges_after(before, &node.charges);
            }
            self.views[phase] = views;
        }
    }

    fn step(&mut self, more: f64) {
        self.second += 1;
        self.look();
        let period = self.period();
        let phase = usize::try_from(self.second).unwrap() % period;
        self.known[phase] = self.members.clone();
        self.views[phase] = seen(&self.known[phase]);
        for at in (phase..NODES).step_by(period) {
            self.nodes[at].charges = self.views[phase][self.nodes[at].zone].charges();
        }
        let here: f64 = self.nodes.iter().map(|node| f64::from(node.allocations)).sum();
        let weights: f64 = self.nodes.iter().filter(|node| node.alive).map(|node| node.weight).sum();
        let rate = here / LIFE + more;
        let mut arrive = vec![0_u32; NODES];
        let alive: Vec<usize> = (0..NODES).filter(|at| self.nodes[*at].alive).collect();
        for at in alive {
            let come = self.chance.about(rate * self.nodes[at].weight / weights);
            self.arrived += f64::from(come);
            for choice in 0..CHOICES {
                let some = come / CHOICES + u32::from(choice < come % CHOICES);
                if some > 0 {
                    let to = self.choose(at, some);
                    arrive[to] += some;
                }
            }
        }
        for (node, come) in self.nodes.iter_mut().zip(arrive).filter(|(node, _)| node.alive) {
            let go = self.chance.about(f64::from(node.allocations) / LIFE);
            node.allocations = (node.allocations + come).saturating_sub(go).min(ROOM);
        }
    }

    fn choose(&mut self, at: usize, some: u32) -> usize {
        let Some(to) = self.target(at, some) else { return at };
        if !self.nodes[to].alive {
            self.lost += f64::from(some);
            return at;
        }
        self.redirected += f64::from(some);
        if self.target(to, 1).is_some() {
            self.twice += f64::from(some);
        }
        to
    }

    fn target(&mut self, at: usize, some: u32) -> Option<usize> {
        let node = &self.nodes[at];
        let view = &self.views[at % self.period()][node.zone];
        let full = node.allocations >= ROOM;
        let need = if full { Need::Room } else { Need::None };
        let number = u16::try_from(at + 1).unwrap();
        let target = view.choose(number, &node.charges, need, UDP, self.chance.dice())?;
        // One choice counts for several clients.
        view.charge(&node.charges, target.number, some - 1);
        Some(usize::from(target.number) - 1)
    }

    fn balance(&self) -> (f64, f64) {
        let loads = || self.nodes.iter().filter(|node| node.alive).map(|node| f64::from(node.allocations));
        let mean = loads().sum::<f64>() / loads().map(|_| 1.0).sum::<f64>();
        let over_mean = loads().map(|load| load / mean);
        over_mean.fold((f64::MAX, 0.0), |(least, most), load| (load.min(least), load.max(most)))
    }

    fn forget(&mut self) {
        (self.redirected, self.arrived, self.lost, self.twice) = (0.0, 0.0, 0.0, 0.0);
    }
}

fn seen(members: &FleetMembers) -> Vec<FleetView> {
    ZONES.iter().map(|zone| FleetView::new(zone, members)).collect()
}

#[test]
fn thousand_nodes_balance_clients_and_survive_a_lost_zone() {
    let mut world = World::new();
    let (least, most) = world.balance();
    assert!(least < 0.35 && most > 1.6, "uneven at first: {least:.2} to {most:.2}");
    for _ in 0..600 {
        world.step(0.0);
    }
    world.forget();
    let (least, most) = world.balance();
    println!("at rest: {least:.3} to {most:.3} of the mean");
    for second in 0..60 {
        world.step(0.0);
        let (least, most) = world.balance();
        assert!(least > 0.9 && most < 1.1, "second {second}: {least:.3} to {most:.3} of the mean");
    }
    let sent_on = world.redirected / world.arrived;
    println!("at rest: {sent_on:.3} of clients redirected, {:.3} twice", world.twice / world.arrived);
    assert!(sent_on < 0.4, "too many clients are redirected: {sent_on:.2}");
    assert!(world.twice / world.arrived < 0.01, "redirected twice: {:.3}", world.twice / world.arrived);

    // A zone fails, and its clients reconnect to the others within four seconds.
    let mut gone = 0.0;
    for node in world.nodes.iter_mut().filter(|node| ZONES[node.zone] == "north") {
        gone += f64::from(std::mem::take(&mut node.allocations));
        node.alive = false;
    }
    world.forget();
    for second in 0..30 {
        world.step(if second < 4 { gone / 4.0 } else { 0.0 });
    }
    // Redirects to that zone continue until it is known to be gone; those clients retry.
    println!(
        "a zone lost: {:.3} of clients redirected to it within half a minute",
        world.lost / world.arrived
    );
    assert!(world.lost / world.arrived < 0.1, "redirected to dead nodes: {:.3}", world.lost / world.arrived);
    for _ in 30..300 {
        world.step(0.0);
    }
    // Five minutes after the failure, the loads are stable and do not oscillate.
    let mut before: Option<Vec<u32>> = None;
    let mut turns = vec![0_u32; NODES];
    let mut last = vec![0_i64; NODES];
    for second in 0..120 {
        world.step(0.0);
        let (least, most) = world.balance();
        assert!(least > 0.9 && most < 1.1, "second {second}: {least:.3} to {most:.3} of the mean");
        if second % 10 != 0 {
            continue;
        }
        let now: Vec<u32> = world.nodes.iter().map(|node| node.allocations).collect();
        if let Some(before) = before.replace(now.clone()) {
            for at in (0..NODES).filter(|at| world.nodes[*at].alive) {
                let step = i64::from(now[at]) - i64::from(before[at]);
                // A swing is a change of 2 % of the mean, followed by an opposite one.
                let swings = step.abs() > 300 && last[at].abs() > 300 && step.signum() != last[at].signum();
                turns[at] += u32::from(swings);
                last[at] = step;
            }
        }
    }
    let (least, most) = world.balance();
    println!("two zones left: {least:.3} to {most:.3} of the mean");
    let swinging = turns.iter().filter(|turns| **turns > 2).count();
    assert!(swinging < 10, "{swinging} nodes oscillate");
}
