//! What `turnpike top` draws: lines of figures, curves of the last minutes, the workers, and one of several tables below.

use std::{collections::VecDeque, iter};

use ratatui::{
    buffer::Buffer,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Cell, Paragraph, Row, Sparkline, Table, Widget},
};

use turnpike_wire::escape;

use super::units::{NONE, bits, mean, micros, per_second, percent};
use crate::{
    live::{refused, total},
    model::{
        Certificate, Fleet, FleetNode, History, Job, Live, LiveServer, LiveWorker, NodeState, Quantiles,
        Reason, Talkers,
    },
    table::span,
};

/// Points of a curve: the widest terminal has fewer columns.
const POINTS: usize = 600;
/// Below so many lines there are no curves.
const CURVES_FROM: u16 = 22;
const CURVE: u16 = 3;
/// A share of a core beyond which a worker is shown as busy, and as full.
const BUSY: f64 = 0.8;
const FULL: f64 = 0.95;
/// Days from which the end of a certificate is near.
const NEAR_S: i64 = 14 * 86_400;

/// The tables of which one is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tab {
    Talkers,
    Losses,
    Refusals,
    Listeners,
    Certificates,
    /// Where there is one.
    Fleet,
}

impl Tab {
    const OF_SERVER: [Self; 6] =
        [Self::Talkers, Self::Losses, Self::Refusals, Self::Listeners, Self::Certificates, Self::Fleet];

    fn title(self) -> &'static str {
        match self {
            Self::Talkers => "Top talkers",
            Self::Losses => "Loss and drops",
            Self::Refusals => "Refusals",
            Self::Listeners => "Listeners and realms",
            Self::Certificates => "Certificates",
            Self::Fleet => "Fleet",
        }
    }
}

/// What is known and how it is to be shown.
pub(super) struct Screen {
    colours: bool,
    whom: String,
    live: Option<Live>,
    /// Bits a second to peers and to clients, the newest last.
    curves: [VecDeque<u64>; 2],
    certificates: Vec<Certificate>,
    fleet: Option<Fleet>,
    problem: Option<String>,
    paused: bool,
    tab: Tab,
    first: usize,
    /// All tables, one below the other.
    whole: bool,
}

impl Screen {
    pub(super) fn new(colours: bool, whom: String) -> Self {
        Self {
            colours,
            whom,
            live: None,
            curves: Default::default(),
            certificates: Vec::new(),
            fleet: None,
            problem: None,
            paused: false,
            tab: Tab::Talkers,
            first: 0,
            whole: false,
        }
    }

    /// Takes a reading.
    pub(super) fn hear(&mut self, live: Live) {
        let (to_peer, to_client) = match &live.server {
            Some(server) => (server.to_peer.bytes, server.to_client.bytes),
            None => live.rules.iter().fold((0.0, 0.0), |(out, back), rule| {
                (out + rule.to_target.bytes, back + rule.to_client.bytes)
            }),
        };
        for (curve, bytes) in self.curves.iter_mut().zip([to_peer, to_client]) {
            curve.push_back(whole(bytes * 8.0));
            if curve.len() > POINTS {
                curve.pop_front();
            }
        }
        self.problem = None;
        if !self.paused {
            self.live = Some(live);
        }
    }

    /// Takes what there was before.
    pub(super) fn remember(&mut self, history: History) {
        for (curve, told) in self.curves.iter_mut().zip([history.to_peer_bps, history.to_client_bps]) {
            *curve = told.into_iter().map(|point| point.map_or(0, whole)).collect();
        }
    }

    pub(super) fn certify(&mut self, certificates: Vec<Certificate>) {
        self.certificates = certificates;
    }

    /// It is one of several servers.
    pub(super) fn join(&mut self, fleet: Fleet) {
        if !self.paused {
            self.fleet = Some(fleet);
        }
    }

    /// The tables that there are.
    fn tabs(&self) -> Vec<Tab> {
        let is_there = |tab: &Tab| *tab != Tab::Fleet || self.fleet.is_some();
        Tab::OF_SERVER.into_iter().filter(is_there).collect()
    }

    /// The program does not answer.
    pub(super) fn lose(&mut self, why: String) {
        self.problem = Some(why);
    }

    pub(super) fn pause(&mut self) {
        self.paused = !self.paused;
    }

    /// So many tables on.
    pub(super) fn turn(&mut self, by: i8) {
        let all = self.tabs();
        let at = all.iter().position(|tab| *tab == self.tab).unwrap_or(0);
        let last = all.len() - 1;
        let next =
            if by > 0 { if at == last { 0 } else { at + 1 } } else { at.checked_sub(1).unwrap_or(last) };
        (self.tab, self.first) = (all[next], 0);
    }

    /// So many rows on.
    pub(super) fn scroll(&mut self, by: i8) {
        self.first = if by > 0 { self.first + 1 } else { self.first.saturating_sub(1) };
    }

    /// The same for paper: all tables, and no keys.
    pub(super) fn whole(mut self) -> Self {
        self.whole = true;
        self
    }

    fn style(&self, colour: Color) -> Style {
        if self.colours { Style::new().fg(colour) } else { Style::new() }
    }

    fn head(&self) -> Line<'_> {
        let Some(live) = &self.live else { return Line::from("turnpike") };
        let status = &live.status;
        let (word, colour) = match (&self.problem, self.paused, status.draining) {
            (Some(_), ..) => ("NO ANSWER", Color::Red),
            (None, true, _) => ("PAUSED", Color::Yellow),
            (None, false, true) => ("DRAINING", Color::Yellow),
            (None, false, false) => ("LIVE", Color::Green),
        };
        let job = if status.job == Job::Serve { "serve" } else { "forward" };
        let node = status.node.as_ref().map_or_else(String::new, |node| format!("  node {node}"));
        Line::from(vec![
            Span::styled(format!("turnpike {job} {}", status.version), bold()),
            Span::raw(format!("{node}  {}  up {}  ", self.whom, span(status.uptime_s))),
            Span::styled(word, self.style(colour).add_modifier(Modifier::BOLD)),
        ])
    }

    fn figures(live: &Live) -> Vec<Line<'static>> {
        let cores = live.cores.map_or(NONE.to_owned(), |cores| format!("{cores:.2}"));
        let open = live.status.open;
        let Some(server) = &live.server else {
            let sum = |of: fn(&crate::model::LiveRule) -> f64| total(live.rules.iter().map(of));
            return vec![
                figures(&[
                    ("connections", open.to_string()),
                    ("new", per_second(sum(|rule| rule.accepted))),
                    ("cores", cores),
                ]),
                figures(&[
                    ("to targets", bits(sum(|rule| rule.to_target.bytes))),
                    ("to clients", bits(sum(|rule| rule.to_client.bytes))),
                ]),
            ];
        };
        let sum = |reasons: &[Reason]| total(reasons.iter().map(|reason| reason.rate));
        let refused = refused(&server.refusals);
        let (step, why) = live.status.datapath.as_ref().map_or((NONE, ""), |path| (&*path.step, &*path.why));
        vec![
            figures(&[
                ("sessions", open.to_string()),
                ("begin", per_second(server.opened)),
                ("end", per_second(server.closed)),
                ("requests", per_second(server.requests)),
                ("refused", per_second(refused)),
                ("allocation takes", opening(server.opening.as_ref())),
            ]),
            figures(&[
                (
                    "to peers",
                    format!("{} {}", bits(server.to_peer.bytes), per_second(server.to_peer.datagrams)),
                ),
                (
                    "to clients",
                    format!("{} {}", bits(server.to_client.bytes), per_second(server.to_client.datagrams)),
                ),
                ("lost", per_second(sum(&server.drops))),
                ("cores", cores),
            ]),
            figures(&[
                ("data path", format!("{step}: {why}")),
                ("across the kernel", per_second(server.across.datagrams)),
                ("a receive call", batch(server)),
            ]),
        ]
    }

    fn curves(&self, area: Rect, buffer: &mut Buffer) {
        let halves = Layout::horizontal([Constraint::Fill(1), Constraint::Length(2), Constraint::Fill(1)]);
        let [left, _, right] = halves.areas(area);
        for ((curve, place), (title, colour)) in self
            .curves
            .iter()
            .zip([left, right])
            .zip([("to peers", Color::Blue), ("to clients", Color::Magenta)])
        {
            let [head, body] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(place);
            let shown = curve.len().saturating_sub(place.width.into());
            let points: Vec<u64> = curve.iter().skip(shown).copied().collect();
            let most = points.iter().max().copied().unwrap_or(0);
            #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
            let most_text = bits(most as f64 / 8.0);
            Line::from(format!("{title}, {} s, at the most {most_text}", points.len())).render(head, buffer);
            Sparkline::default()
                .data(&points)
                .max(most.max(1))
                .style(self.style(colour))
                .render(body, buffer);
        }
    }

    /// Tables of what is shown below, each with its title.
    fn tables(&self, live: &Live) -> Vec<(&'static str, Grid)> {
        let Some(server) = &live.server else {
            return vec![("Rules", rules(live)), ("Ends", ends(live))];
        };
        let of = |tab: Tab| match tab {
            Tab::Talkers => talkers(server.talkers.as_ref()),
            Tab::Losses => reasons(&server.drops),
            Tab::Refusals => reasons(&server.refusals),
            Tab::Listeners => listeners(server),
            Tab::Certificates => certificates(&self.certificates),
            Tab::Fleet => nodes(self.fleet.as_ref()),
        };
        let wanted = self.tabs().into_iter().filter(|tab| self.whole || *tab == self.tab);
        wanted.map(|tab| (tab.title(), of(tab))).collect()
    }

    fn workers(&self, workers: &[LiveWorker]) -> Grid {
        let row = |worker: &LiveWorker| {
            let cells = [
                worker.number.to_string(),
                percent(worker.load),
                percent(worker.waiting),
                micros(worker.event_loop_us),
                worker.sessions.to_string(),
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
        let head = [
            "WORKER",
            "LOAD",
            "WAITS",
            "EVENT LOOP",
            "SESSIONS",
            "RECEIVED",
            "A CALL",
            "SENT",
            "A CALL",
            "LOST",
        ];
        Grid { head: head.to_vec(), rows: workers.iter().map(row).collect() }
    }

    fn show(&self, grid: &Grid, first: usize, area: Rect, buffer: &mut Buffer) {
        let widths = grid.widths();
        let rows = grid.rows.iter().skip(first).map(|(cells, colour)| {
            let style = colour.map_or(Style::new(), |colour| self.style(colour));
            Row::new(cells.iter().map(|cell| Cell::from(shown(cell)))).style(style)
        });
        let head = Row::new(grid.head.iter().copied()).style(Style::new().add_modifier(Modifier::DIM));
        let table = Table::new(rows, widths).header(head).column_spacing(2);
        Widget::render(table, area, buffer);
    }

    fn titles(&self, tables: &[(&'static str, Grid)], is_server: bool) -> Line<'static> {
        let all: Vec<&'static str> = if is_server {
            self.tabs().iter().map(|tab| tab.title()).collect()
        } else {
            tables.iter().map(|(title, _)| *title).collect()
        };
        let reversed = Style::new().add_modifier(Modifier::REVERSED);
        let span = |title: &'static str| {
            let is_shown = tables.iter().any(|(shown, _)| *shown == title);
            Span::styled(format!(" {title} "), if is_shown { reversed } else { Style::new() })
        };
        Line::from(all.into_iter().flat_map(|title| [span(title), Span::raw(" ")]).collect::<Vec<_>>())
    }
}

impl Widget for &Screen {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let mut pen = Pen { area, buffer };
        pen.line(self.head());
        if let Some(why) = &self.problem {
            pen.line(Line::styled(escape::line(why).to_string(), self.style(Color::Red)));
        }
        let Some(live) = &self.live else { return };
        for line in Screen::figures(live) {
            pen.line(line);
        }
        if area.height >= CURVES_FROM {
            pen.skip();
            self.curves(pen.take(CURVE + 1), pen.buffer);
        }
        if let Some(server) = &live.server {
            pen.skip();
            let workers = self.workers(&server.workers);
            // Half of what is left at the most, but on paper.
            let most = if self.whole { u16::MAX } else { pen.area.height / 2 };
            self.show(&workers, 0, pen.take(workers.height().min(most.max(2))), pen.buffer);
        }
        let tables = self.tables(live);
        let keys = u16::from(!self.whole);
        if !self.whole {
            pen.skip();
            pen.line(self.titles(&tables, live.server.is_some()));
        }
        let each = if self.whole { u16::MAX } else { pen.area.height.saturating_sub(keys) };
        for (title, grid) in &tables {
            if self.whole {
                pen.skip();
                pen.line(Line::styled(*title, bold()));
            }
            if grid.rows.is_empty() {
                pen.line(Line::from("nothing so far"));
                continue;
            }
            let first = self.first.min(grid.rows.len() - 1);
            let height = grid.height().min(each).min(pen.area.height.saturating_sub(keys));
            self.show(grid, first, pen.take(height), pen.buffer);
        }
        if !self.whole && area.height > 1 {
            let last = Rect { y: area.bottom() - 1, height: 1, ..area };
            let keys = "q quit   tab next table   up/down scroll   p pause";
            Paragraph::new(keys).style(Style::new().add_modifier(Modifier::DIM)).render(last, buffer);
        }
    }
}

/// Draws from the top on.
struct Pen<'b> {
    /// What is left.
    area: Rect,
    buffer: &'b mut Buffer,
}

impl Pen<'_> {
    fn take(&mut self, height: u16) -> Rect {
        let height = height.min(self.area.height);
        let taken = Rect { height, ..self.area };
        self.area = Rect { y: self.area.y + height, height: self.area.height - height, ..self.area };
        taken
    }

    fn skip(&mut self) {
        self.take(1);
    }

    fn line(&mut self, line: Line<'_>) {
        let place = self.take(1);
        line.render(place, self.buffer);
    }
}

/// A table before it is drawn.
struct Grid {
    head: Vec<&'static str>,
    rows: Vec<(Vec<String>, Option<Color>)>,
}

impl Grid {
    fn new(head: &[&'static str], rows: impl Iterator<Item = Vec<String>>) -> Self {
        Self { head: head.to_vec(), rows: rows.map(|cells| (cells, None)).collect() }
    }

    fn height(&self) -> u16 {
        u16::try_from(self.rows.len() + 1).unwrap_or(u16::MAX)
    }

    /// As wide as what is shown in each column.
    fn widths(&self) -> Vec<Constraint> {
        let widest = |(column, head): (usize, &&'static str)| {
            let cells = self.rows.iter().filter_map(|(cells, _)| cells.get(column));
            let widths = cells.map(|cell| Span::raw(shown(cell)).width()).chain(iter::once(head.len()));
            Constraint::Length(widths.max().and_then(|width| u16::try_from(width).ok()).unwrap_or(u16::MAX))
        };
        self.head.iter().enumerate().map(widest).collect()
    }
}

fn shown(cell: &str) -> String {
    escape::name(cell).to_string()
}

fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn figures(all: &[(&str, String)]) -> Line<'static> {
    let spans = all.iter().flat_map(|(name, value)| {
        [
            Span::raw(format!("{name} ")),
            Span::styled(escape::line(value).to_string(), bold()),
            Span::raw("   "),
        ]
    });
    Line::from(spans.collect::<Vec<_>>())
}

fn opening(quantiles: Option<&Quantiles>) -> String {
    let Some(Quantiles { p50_s, p99_s, .. }) = quantiles else { return NONE.to_owned() };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "two seconds at the most")]
    let text = |seconds: &Option<f64>| match seconds {
        Some(seconds) => micros(Some((seconds * 1e6).round() as u64)),
        None => "over 2 s".to_owned(),
    };
    format!("p50 {}, p99 {}", text(p50_s), text(p99_s))
}

/// Datagrams of a receive call, over all workers.
fn batch(server: &LiveServer) -> String {
    let calls: f64 = server.batches.iter().map(|batch| batch.rate).sum();
    if calls > 0.0 { format!("{:.1} datagrams", server.received / calls) } else { NONE.to_owned() }
}

fn talkers(talkers: Option<&Talkers>) -> Grid {
    let rows = talkers.into_iter().flat_map(|talkers| &talkers.talkers).map(|talker| {
        vec![
            talker.user.clone(),
            talker.realm.clone(),
            talker.client.clone(),
            talker.transport.clone(),
            bits(talker.to_peer.bytes),
            bits(talker.to_client.bytes),
            per_second(talker.to_peer.datagrams + talker.to_client.datagrams),
            talker.id.clone(),
        ]
    });
    Grid::new(&["USER", "REALM", "CLIENT", "VIA", "TO PEERS", "TO CLIENT", "DATAGRAMS", "SESSION"], rows)
}

fn reasons(reasons: &[Reason]) -> Grid {
    let rows = reasons.iter().map(|reason| {
        vec![
            reason.kind.clone(),
            reason.reason.replace('_', " "),
            per_second(reason.rate),
            reason.total.to_string(),
        ]
    });
    Grid::new(&["KIND", "REASON", "NOW", "SINCE THE START"], rows)
}

fn listeners(server: &LiveServer) -> Grid {
    let listeners = server.listeners.iter().map(|listener| {
        let name = listener.server_name.clone().unwrap_or_default();
        let at = format!("{} {}", listener.transport, listener.address);
        vec!["listener".to_owned(), at, name, listener.sessions.to_string()]
    });
    let realms = server
        .realms
        .iter()
        .map(|realm| vec!["realm".to_owned(), realm.name.clone(), String::new(), realm.sessions.to_string()]);
    Grid::new(&["", "WHICH", "SERVER NAME", "SESSIONS"], listeners.chain(realms))
}

fn certificates(certificates: &[Certificate]) -> Grid {
    let row = |certificate: &Certificate| {
        let left = certificate.expires_in_s;
        let text = span(left.unsigned_abs());
        let left_text = if left < 0 { format!("over for {text}") } else { text };
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
    let head = vec!["NAMES", "ENDS", "LEFT", "DTLS", "FILE"];
    Grid { head, rows: certificates.iter().map(row).collect() }
}

fn nodes(fleet: Option<&Fleet>) -> Grid {
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
        let traffic = bits(node.bits_per_second as f64 / 8.0);
        let cells = vec![
            node.name.clone(),
            state.to_owned(),
            node.zone.clone(),
            percent(Some(node.busy)),
            format!("{} of {}", node.sessions, node.max_sessions),
            traffic,
            percent(Some(node.cpu)),
            node.version.clone().unwrap_or_default(),
        ];
        (cells, colour)
    };
    let head = vec!["NODE", "STATE", "ZONE", "BUSY", "SESSIONS", "TRAFFIC", "CPU", "VERSION"];
    Grid { head, rows: fleet.into_iter().flat_map(|fleet| &fleet.nodes).map(row).collect() }
}

fn rules(live: &Live) -> Grid {
    let rows = live.rules.iter().map(|rule| {
        vec![
            rule.name.clone(),
            rule.state.name().to_owned(),
            rule.open.to_string(),
            per_second(rule.accepted),
            bits(rule.to_target.bytes),
            bits(rule.to_client.bytes),
            per_second(rule.to_target.datagrams + rule.to_client.datagrams),
            rule.waits_for.clone().unwrap_or_default(),
        ]
    });
    Grid::new(&["RULE", "STATE", "OPEN", "NEW", "TO TARGETS", "TO CLIENTS", "DATAGRAMS", "WAITS FOR"], rows)
}

fn ends(live: &Live) -> Grid {
    let rows = live.rules.iter().flat_map(|rule| {
        rule.ends.iter().map(|end| {
            let reason = end.reason.replace('_', " ");
            vec![rule.name.clone(), reason, per_second(end.rate), end.total.to_string()]
        })
    });
    Grid::new(&["RULE", "REASON", "NOW", "SINCE THE START"], rows)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate, and no more than u64 holds"
)]
fn whole(rate: f64) -> u64 {
    rate.max(0.0).round() as u64
}
