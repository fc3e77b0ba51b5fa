//! The screen in a buffer, and the effect of keys.

use std::collections::VecDeque;

use ratatui::{Terminal, backend::TestBackend};
use turnpike_api::{
    BatchRate, DatapathStatus, FleetNode, FleetStatus, FlowDirection, Job, Leg, LiveListener, LiveRealm,
    LiveRule, LiveServer, LiveWorker, NetworkInfo, NodeState, PayloadRate, QualityProblem, Quantiles,
    ReasonCount, RuleState, Status, Talker, Talkers,
};

use super::{screen::CURVES_FROM, *};

fn live() -> Live {
    let rate = |datagrams: f64, bytes: f64| PayloadRate { datagrams, bytes };
    let reason = |kind: &str, reason: &str, total, rate| ReasonCount {
        kind: kind.to_owned(),
        reason: reason.to_owned(),
        total,
        rate,
        keys: Vec::new(),
    };
    let worker = |number, load| LiveWorker {
        number,
        allocations: 5,
        load: Some(load),
        waiting: Some(0.01),
        event_loop_us: Some(70),
        wakeups: 10.0,
        received: 1500.0,
        sent: 1400.0,
        receive_batch: Some(3.5),
        send_batch: Some(3.0),
        dropped: 0.0,
    };
    Live {
        at: "2026-01-02T03:04:05.678Z".to_owned(),
        interval_s: 1.0,
        status: Status {
            job: Job::Serve,
            version: "1.2.3".to_owned(),
            pid: 7,
            started_at: "2026-01-02T00:00:00Z".to_owned(),
            uptime_s: 3700,
            draining: false,
            open: 1234,
            datapath: Some(DatapathStatus {
                step: "gso".to_owned(),
                why: "the highest that works".to_owned(),
            }),
            relays: Vec::new(),
            node: None,
            sandbox: None,
        },
        cores: Some(1.25),
        server: Some(LiveServer {
            to_peer: rate(1000.0, 125_000.0),
            to_client: rate(2000.0, 250_000.0),
            across: rate(0.0, 0.0),
            received: 3000.0,
            sent: 2800.0,
            requests: 12.0,
            opened: 2.5,
            closed: 1.5,
            opening: Some(Quantiles { count: 9, p50_s: Some(0.001), p99_s: None }),
            drops: vec![reason("packet", "no_permission", 77, 0.5)],
            refusals: vec![reason("credentials", "wrong_key", 88, 3.0), reason("limit", "user", 9, 9.0)],
            workers: vec![worker(0, 0.5), worker(1, 0.97)],
            batches: vec![BatchRate { from: 1, to: Some(1), rate: 1000.0 }],
            listeners: vec![LiveListener {
                transport: "tls".to_owned(),
                address: "192.0.2.1:5349".to_owned(),
                server_name: None,
                allocations: 4,
            }],
            realms: vec![LiveRealm { name: "example.org".to_owned(), allocations: 10 }],
            talkers: Some(Talkers {
                interval_s: 5.0,
                active: 1,
                talkers: vec![Talker {
                    id: "00112233445566778899aabbccddeeff".to_owned(),
                    realm: "example.org".to_owned(),
                    user: "al\u{1b}[2Jice".to_owned(),
                    client: "192.0.2.9:50000".to_owned(),
                    network: None,
                    transport: "udp".to_owned(),
                    to_peer: rate(10.0, 1000.0),
                    to_client: rate(20.0, 2000.0),
                    quality_problem: None,
                }],
            }),
        }),
        rules: Vec::new(),
    }
}

fn certificate(left_s: i64) -> CertificateInfo {
    CertificateInfo {
        file: "turn.pem".to_owned(),
        names: vec!["turn.example.org".to_owned()],
        not_after: "2026-03-01T00:00:00Z".to_owned(),
        expires_in_s: left_s,
        ends_soon: false,
        dtls: true,
    }
}

fn drawn(screen: &Screen, columns: u16, rows: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
    terminal.draw(|frame| frame.render_widget(screen, frame.area())).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let row =
        |y| (0..columns).filter_map(|x| buffer.cell((x, y))).map(|cell| cell.symbol()).collect::<String>();
    (0..rows).map(row).map(|line: String| line.trim_end().to_owned()).collect()
}

fn holds(lines: &[String], parts: &[&str]) {
    for part in parts {
        assert!(lines.iter().any(|line| line.contains(part)), "no {part:?} in\n{}", lines.join("\n"));
    }
}

#[test]
fn screen_shows_figures_graphs_workers_and_the_first_table() {
    let mut screen = Screen::new(true, "unix:/run/a.sock".to_owned());
    screen.hear(live());
    let lines = drawn(&screen, 120, 40);
    assert!(
        lines[0].starts_with("turnpike serve 1.2.3  unix:/run/a.sock  up 1 h 1 min  LIVE"),
        "{}",
        lines[0]
    );
    holds(
        &lines,
        &[
            "allocations 1234",
            "refused 3/s",
            "allocation time p50 1.0 ms, p99 over 2 s",
            "to peers 1.00 Mbit/s 1.00 k/s",
            "lost 0.50/s",
            "data path gso: the highest that works",
            "per receive call 3.0 datagrams",
            "to clients, 1 s, at most 2.00 Mbit/s",
            "WORKER  LOAD",
            "1       97 %",
            "Top talkers",
            "192.0.2.9:50000",
            "00112233445566778899aabbccddeeff",
            "q quit",
        ],
    );
    assert!(!lines.concat().contains('\u{1b}'), "client data cannot contain escape sequences");
    holds(&lines, &["al\\u{1b}[2Jice"]);
}

#[test]
fn talkers_have_a_network_column_only_if_a_network_is_known() {
    let mut screen = Screen::new(false, String::new());
    screen.hear(live());
    assert!(!drawn(&screen, 140, 40).concat().contains("NETWORK"));
    let mut known = live();
    let talkers = known.server.as_mut().and_then(|server| server.talkers.as_mut()).unwrap();
    talkers.talkers[0].network = Some(NetworkInfo { country: Some("DE".to_owned()), asn: Some(64500) });
    screen.hear(known);
    holds(&drawn(&screen, 140, 40), &["NETWORK", "DE AS64500"]);
}

#[test]
fn talkers_have_a_quality_column_only_if_one_has_trouble() {
    let mut screen = Screen::new(false, String::new());
    screen.hear(live());
    assert!(!drawn(&screen, 140, 40).concat().contains("QUALITY"));
    let mut troubled = live();
    let talkers = troubled.server.as_mut().and_then(|server| server.talkers.as_mut()).unwrap();
    talkers.talkers[0].quality_problem = Some(QualityProblem {
        leg: Leg::Client,
        direction: Some(FlowDirection::Uplink),
        since: "2026-11-30T14:02:10Z".to_owned(),
        sentence: "uplink of the client: 3.1 % loss since 14:02 UTC".to_owned(),
    });
    screen.hear(troubled);
    holds(&drawn(&screen, 140, 40), &["QUALITY", "client uplink"]);
}

fn fleet() -> FleetStatus {
    let node = |name: &str, state, busy| FleetNode {
        name: name.to_owned(),
        number: 1,
        state,
        silent_s: 0.5,
        zone: "west".to_owned(),
        version: Some("1.2.3".to_owned()),
        busy,
        allocations: 7,
        max_allocations: 100,
        bits_per_second: 8_000_000,
        max_bits_per_second: None,
        cpu: 0.25,
        relay_ports_left: 93,
        relay_ports: 100,
        addresses: Vec::new(),
    };
    FleetStatus {
        name: "turnpike".to_owned(),
        node: "one".to_owned(),
        store: "redis://h".to_owned(),
        alone: None,
        recovering: false,
        keys: 1,
        nodes: vec![node("one", NodeState::Serving, 0.25), node("two", NodeState::Draining, 0.99)],
    }
}

#[test]
fn only_a_fleet_node_has_the_fleet_table() {
    let mut screen = Screen::new(false, String::new());
    screen.hear(live());
    assert!(!drawn(&screen, 120, 40).concat().contains(" Fleet "));
    let mut of_node = live();
    of_node.status.node = Some("one".to_owned());
    screen.hear(of_node);
    screen.join(fleet());
    screen.turn(-1);
    let lines = drawn(&screen, 120, 40);
    assert!(lines[0].starts_with("turnpike serve 1.2.3  node one  "), "{}", lines[0]);
    holds(&lines, &["NODE  STATE", "one   serving   west  25 %  7 of 100     8.00 Mbit/s", "two   draining"]);
    screen.turn(1);
    holds(&drawn(&screen, 120, 40), &["192.0.2.9:50000"]);
}

fn pieces(lines: &[String]) -> Vec<String> {
    let pieces = lines.iter().flat_map(|line| line.split("  ")).map(str::trim);
    pieces.filter(|piece| !piece.is_empty()).map(str::to_owned).collect()
}

#[test]
fn narrow_terminal_loses_only_whole_columns() {
    let mut of_node = live();
    of_node.status.node = Some("one".to_owned());
    for tab in 0..6 {
        let mut screen = Screen::new(false, "unix:/run/turnpike/turnpike.sock".to_owned());
        screen.hear(of_node.clone());
        screen.join(fleet());
        screen.certify(vec![certificate(90_000)]);
        (0..tab).for_each(|_| screen.turn(1));
        // Draws the screen without graphs, because their titles depend on the width.
        let whole = pieces(&drawn(&screen, 400, CURVES_FROM - 1));
        let mut shown = Vec::new();
        for columns in [40, 60, 80, 120] {
            let lines = drawn(&screen, columns, 60);
            let page = lines.join("\n");
            assert!(lines[0].ends_with("LIVE") && page.contains("allocations 1234"), "{page}");
            for title in pieces(&lines).iter().filter(|piece| piece.contains("at most")) {
                assert!(title.ends_with("bit/s"), "{page}");
            }
            let tables = pieces(&drawn(&screen, columns, CURVES_FROM - 1));
            let broken = tables.iter().find(|piece| !piece.contains('…') && !whole.contains(piece));
            assert_eq!(broken, None, "{columns} columns:\n{page}");
            let shortened = tables.iter().filter(|piece| piece.contains('…')).count();
            assert!(columns < 60 || shortened <= 1, "{columns} columns:\n{page}");
            shown.push(tables.len());
        }
        assert!(shown.is_sorted() && shown[0] < shown[3], "wider terminals show more: {shown:?}");
    }
    let mut screen = Screen::new(false, String::new());
    screen.hear(live());
    holds(&drawn(&screen, 40, 60), &["WORKER  LOAD", "LOST", "USER", "TO PEERS"]);
    holds(&drawn(&screen, 60, 60), &["192.0.2.9:50000"]);
}

#[test]
fn tiny_terminals_do_not_panic() {
    let mut screen = Screen::new(true, "unix:/run/a.sock".to_owned());
    for known in [false, true] {
        if known {
            screen.hear(live());
            screen.certify(vec![certificate(5)]);
        }
        for _ in 0..5 {
            screen.turn(1);
            screen.scroll(1);
            for (columns, rows) in [(0, 0), (1, 1), (2, 3), (10, 4), (20, 9), (40, 22), (300, 100)] {
                let _ = text(&screen, columns, rows);
            }
        }
    }
}

#[test]
fn colors_can_be_disabled() {
    for colours in [true, false] {
        let mut screen = Screen::new(colours, String::new());
        screen.hear(live());
        let mut terminal = Terminal::new(TestBackend::new(120, 40)).unwrap();
        terminal.draw(|frame| frame.render_widget(&screen, frame.area())).unwrap();
        let cells = terminal.backend().buffer().content().iter();
        let coloured = cells.filter(|cell| cell.fg != ratatui::style::Color::Reset).count();
        assert_eq!(coloured > 0, colours, "{coloured}");
    }
}

#[test]
fn non_interactive_output_has_all_tables() {
    let mut screen = Screen::new(false, "unix:/run/a.sock".to_owned());
    screen.hear(live());
    screen.certify(vec![certificate(-90_000)]);
    let lines = text(&screen.whole(), 120, 100);
    holds(
        &lines,
        &[
            "Top talkers",
            "Loss and drops",
            "packet  no permission  0.50/s  77",
            "Refusals",
            "wrong key",
            "Listeners and realms",
            "tls 192.0.2.1:5349",
            "Certificates",
            "expired 1 day 1 h ago",
        ],
    );
    assert!(!lines.concat().contains("q quit"));
    assert!(!lines.last().unwrap().is_empty());
}

#[test]
fn forwarder_screen_shows_its_rules() {
    let mut live = live();
    (live.server, live.status.job, live.status.datapath) = (None, Job::Forward, None);
    live.rules = vec![LiveRule {
        name: "web".to_owned(),
        state: RuleState::Waiting,
        waits_for: Some("cannot listen".to_owned()),
        open: 3,
        accepted: 1.0,
        to_target: PayloadRate { datagrams: 0.0, bytes: 1000.0 },
        to_client: PayloadRate { datagrams: 0.0, bytes: 2000.0 },
        ends: vec![ReasonCount {
            kind: "end".to_owned(),
            reason: "target_reset".to_owned(),
            total: 4,
            rate: 0.0,
            keys: Vec::new(),
        }],
    }];
    let mut screen = Screen::new(true, String::new());
    screen.hear(live);
    holds(
        &drawn(&screen, 100, 30),
        &[
            "turnpike forward",
            "connections 1234",
            "to targets 8.00 kbit/s",
            "web",
            "waiting",
            "cannot listen",
            "target reset",
        ],
    );
}

fn pressed(keys: &[Key], told: Vec<TopUpdate>) -> Vec<String> {
    let (teller, heard) = mpsc::channel();
    told.into_iter().for_each(|told| teller.send(told).unwrap());
    let mut screen = Screen::new(false, String::new());
    screen.hear(live());
    let mut keys: VecDeque<Key> = keys.iter().copied().chain([Key::Quit]).collect();
    let mut seen = Vec::new();
    let draw = |screen: &Screen| {
        seen.push(drawn(screen, 120, 40).join("\n"));
        Ok(())
    };
    interact(&mut screen, &heard, draw, |_| Ok(keys.pop_front()), || false).unwrap();
    seen
}

#[test]
fn keys_switch_tables_and_quit() {
    let seen = pressed(&[Key::Next, Key::Next, Key::Previous], Vec::new());
    assert_eq!(seen.len(), 4, "the first table, and one for each key except the last");
    assert!(seen[0].contains("192.0.2.9:50000") && !seen[1].contains("192.0.2.9:50000"));
    assert!(seen[1].contains("no permission") && seen[2].contains("wrong key"));
    assert!(seen[3].contains("no permission"));
}

#[test]
fn pause_freezes_the_screen_but_an_error_is_still_shown() {
    let mut other = live();
    other.status.open = 4321;
    let seen = pressed(&[Key::Pause], vec![TopUpdate::Problem("connection refused".to_owned())]);
    let last = seen.last().unwrap();
    assert!(last.contains("NO ANSWER") && last.contains("connection refused"), "{last}");
    let seen = pressed(&[Key::Other], vec![TopUpdate::Live(Box::new(other.clone()))]);
    assert!(seen.last().unwrap().contains("allocations 4321"));

    let mut screen = Screen::new(false, String::new());
    screen.hear(live());
    screen.pause();
    screen.hear(other);
    let shown = drawn(&screen, 120, 40).join("\n");
    assert!(shown.contains("allocations 1234") && shown.contains("PAUSED"), "{shown}");
}

#[test]
fn top_ends_when_stopped() {
    let (_teller, told) = mpsc::channel();
    let mut screen = Screen::new(false, String::new());
    interact(&mut screen, &told, |_| Ok(()), |_| panic!("a key was read"), || true).unwrap();
}
