//! Screen of `turnpike top`: figures, graphs of the last minutes, the workers, and one of several tables.

use std::collections::VecDeque;

use ratatui::{
    buffer::Buffer,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Cell, Paragraph, Row, Sparkline, Table, Widget},
};
use turnpike_api::{
    CertificateInfo, FleetStatus, History, Job, Live, LiveServer, Quantiles, ReasonCount, refused, total,
};
use turnpike_measure::units::{per_second, span};
use turnpike_wire::escape;

use super::{
    grid::{Fitting, GAP, Grid, shortened},
    tables::{certificates, ends, listeners, nodes, reasons, rules, talkers, waiting, workers},
    units::{NONE, bits, micros},
};

/// Number of points in a graph; no terminal is wider.
const POINTS: usize = 600;
/// Minimum number of lines for showing graphs.
pub(super) const CURVES_FROM: u16 = 22;
const CURVE: u16 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tab {
    Talkers,
    Losses,
    Refusals,
    Listeners,
    Certificates,
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

pub(super) struct Screen {
    colours: bool,
    whom: String,
    live: Option<Live>,
    /// Bits per second to peers and to clients; the most recent value is last.
    curves: [VecDeque<u64>; 2],
    certificates: Vec<CertificateInfo>,
    fleet: Option<FleetStatus>,
    problem: Option<String>,
    paused: bool,
    tab: Tab,
    first: usize,
    /// Shows all tables, one below another.
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

    pub(super) fn remember(&mut self, history: History) {
        for (curve, told) in self.curves.iter_mut().zip([history.to_peer_bps, history.to_client_bps]) {
            *curve = told.into_iter().map(|point| point.map_or(0, whole)).collect();
        }
    }

    pub(super) fn certify(&mut self, certificates: Vec<CertificateInfo>) {
        self.certificates = certificates;
    }

    pub(super) fn join(&mut self, fleet: FleetStatus) {
        if !self.paused {
            self.fleet = Some(fleet);
        }
    }

    fn tabs(&self) -> Vec<Tab> {
        let is_there = |tab: &Tab| *tab != Tab::Fleet || self.fleet.is_some();
        Tab::OF_SERVER.into_iter().filter(is_there).collect()
    }

    pub(super) fn lose(&mut self, why: String) {
        self.problem = Some(why);
    }

    pub(super) fn pause(&mut self) {
        self.paused = !self.paused;
    }

    pub(super) fn turn(&mut self, by: i8) {
        let all = self.tabs();
        let at = all.iter().position(|tab| *tab == self.tab).unwrap_or(0);
        let last = all.len() - 1;
        let next =
            if by > 0 { if at == last { 0 } else { at + 1 } } else { at.checked_sub(1).unwrap_or(last) };
        (self.tab, self.first) = (all[next], 0);
    }

    pub(super) fn scroll(&mut self, by: i8) {
        self.first = if by > 0 { self.first + 1 } else { self.first.saturating_sub(1) };
    }

    /// All tables and no keys, for non-interactive output.
    pub(super) fn whole(mut self) -> Self {
        self.whole = true;
        self
    }

    fn style(&self, colour: Color) -> Style {
        if self.colours { Style::new().fg(colour) } else { Style::new() }
    }

    fn head(&self, width: u16) -> Line<'_> {
        let Some(live) = &self.live else { return Line::from("turnpike") };
        let status = &live.status;
        let (word, colour) = match (&self.problem, self.paused, status.draining) {
            (Some(_), ..) => ("NO ANSWER", Color::Red),
            (None, true, _) => ("PAUSED", Color::Yellow),
            (None, false, true) => ("DRAINING", Color::Yellow),
            (None, false, false) => ("LIVE", Color::Green),
        };
        let job = if status.job == Job::Serve { "serve" } else { "forward" };
        let name = format!("turnpike {job} {}", status.version);
        let node = status.node.as_ref().map_or_else(String::new, |node| format!("node {node}"));
        // On a narrow terminal, these parts are dropped in this order.
        let mut more = [Some(self.whom.clone()), Some(format!("up {}", span(status.uptime_s))), Some(node)];
        let is_there = |text: &&String| !text.is_empty();
        for at in 0..more.len() {
            let all = more.iter().flatten().filter(is_there).map(|text| Span::raw(text).width() + 2);
            if Span::raw(&name).width() + all.sum::<usize>() + 2 + word.len() > width.into() {
                more[at] = None;
            }
        }
        let [whom, up, node] = more;
        let more: String =
            [node, whom, up].iter().flatten().filter(is_there).map(|text| format!("  {text}")).collect();
        Line::from(vec![
            Span::styled(name, bold()),
            Span::raw(more + "  "),
            Span::styled(word, self.style(colour).add_modifier(Modifier::BOLD)),
        ])
    }

    /// Groups of figures; each group begins a line.
    fn figures(live: &Live) -> Vec<Vec<(&'static str, String)>> {
        let cores = live.cores.map_or(NONE.to_owned(), |cores| format!("{cores:.2}"));
        let open = live.status.open;
        let Some(server) = &live.server else {
            let sum = |of: fn(&turnpike_api::LiveRule) -> f64| total(live.rules.iter().map(of));
            return vec![
                vec![
                    ("connections", open.to_string()),
                    ("new", per_second(sum(|rule| rule.accepted))),
                    ("cores", cores),
                ],
                vec![
                    ("to targets", bits(sum(|rule| rule.to_target.bytes))),
                    ("to clients", bits(sum(|rule| rule.to_client.bytes))),
                ],
            ];
        };
        let sum = |reasons: &[ReasonCount]| total(reasons.iter().map(|reason| reason.rate));
        let refused = refused(&server.refusals);
        let (step, why) = live.status.datapath.as_ref().map_or((NONE, ""), |path| (&*path.step, &*path.why));
        vec![
            vec![
                ("allocations", open.to_string()),
                ("begin", per_second(server.opened)),
                ("end", per_second(server.closed)),
                ("requests", per_second(server.requests)),
                ("refused", per_second(refused)),
                ("allocation time", opening(server.opening.as_ref())),
            ],
            vec![
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
            ],
            vec![
                ("data path", format!("{step}: {why}")),
                ("relayed by the kernel", per_second(server.across.datagrams)),
                ("per receive call", batch(server)),
            ],
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
            let titles = [
                format!("{title}, {} s, at most {most_text}", points.len()),
                format!("{title}, at most {most_text}"),
                title.to_owned(),
            ];
            let fitting = titles.into_iter().find(|title| title.len() <= place.width.into());
            Line::from(fitting.unwrap_or_default()).render(head, buffer);
            Sparkline::default()
                .data(&points)
                .max(most.max(1))
                .style(self.style(colour))
                .render(body, buffer);
        }
    }

    fn tables(&self, live: &Live) -> Vec<(&'static str, Grid)> {
        let Some(server) = &live.server else {
            let waiting = Some(("Waiting", waiting(live))).filter(|(_, grid)| !grid.rows.is_empty());
            return [("Rules", rules(live))]
                .into_iter()
                .chain(waiting)
                .chain([("Ends", ends(live))])
                .collect();
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

    fn show(&self, grid: &Grid, first: usize, area: Rect, buffer: &mut Buffer) {
        let Fitting { head, widths, rows } = grid.fit(area.width);
        let rows = rows.into_iter().skip(first).map(|(cells, colour)| {
            let style = colour.map_or(Style::new(), |colour| self.style(colour));
            Row::new(cells.into_iter().map(Cell::from)).style(style)
        });
        let head = Row::new(head).style(Style::new().add_modifier(Modifier::DIM));
        let table = Table::new(rows, widths.into_iter().map(Constraint::Length)).header(head);
        Widget::render(table.column_spacing(GAP), area, buffer);
    }

    fn titles(&self, tables: &[(&'static str, Grid)], is_server: bool, width: u16) -> Line<'static> {
        let all: Vec<&'static str> = if is_server {
            self.tabs().iter().map(|tab| tab.title()).collect()
        } else {
            tables.iter().map(|(title, _)| *title).collect()
        };
        let is_shown = |title: &str| tables.iter().any(|(shown, _)| *shown == title);
        // Titles that do not fit are dropped, except the selected one.
        let length = |titles: &[&str]| titles.iter().map(|title| title.len() + 3).sum::<usize>();
        let mut some = &all[..];
        while length(some) > width.into() && some.len() > 1 {
            some = if some.last().is_some_and(|title| is_shown(title)) {
                &some[1..]
            } else {
                &some[..some.len() - 1]
            };
        }
        let reversed = Style::new().add_modifier(Modifier::REVERSED);
        let span = |title: &str| {
            Span::styled(format!(" {title} "), if is_shown(title) { reversed } else { Style::new() })
        };
        Line::from(some.iter().flat_map(|title| [span(title), Span::raw(" ")]).collect::<Vec<_>>())
    }
}

impl Widget for &Screen {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let mut pen = Pen { area, buffer };
        pen.line(self.head(area.width));
        if let Some(why) = &self.problem {
            pen.line(Line::styled(escape::line(why).to_string(), self.style(Color::Red)));
        }
        let Some(live) = &self.live else { return };
        for line in Screen::figures(live).iter().flat_map(|group| figures(group, area.width)) {
            pen.line(line);
        }
        if area.height >= CURVES_FROM {
            pen.skip();
            self.curves(pen.take(CURVE + 1), pen.buffer);
        }
        if let Some(server) = &live.server {
            pen.skip();
            let workers = workers(&server.workers);
            // Limited to half of the remaining lines, except in non-interactive output.
            let most = if self.whole { u16::MAX } else { pen.area.height / 2 };
            self.show(&workers, 0, pen.take(workers.height().min(most.max(2))), pen.buffer);
        }
        let tables = self.tables(live);
        let keys = u16::from(!self.whole);
        if !self.whole {
            pen.skip();
            pen.line(self.titles(&tables, live.server.is_some(), area.width));
        }
        let each = if self.whole { u16::MAX } else { pen.area.height.saturating_sub(keys) };
        for (title, grid) in &tables {
            if self.whole {
                pen.skip();
                pen.line(Line::styled(*title, bold()));
            }
            if grid.rows.is_empty() {
                pen.line(Line::from("none so far"));
                continue;
            }
            let first = self.first.min(grid.rows.len() - 1);
            let height = grid.height().min(each).min(pen.area.height.saturating_sub(keys));
            self.show(grid, first, pen.take(height), pen.buffer);
        }
        if !self.whole && area.height > 1 {
            let last = Rect { y: area.bottom() - 1, height: 1, ..area };
            let mut keys = "q quit   tab next table   up/down scroll   p pause";
            while keys.len() > area.width.into() {
                keys = keys.rsplit_once("   ").map_or("", |(fewer, _)| fewer);
            }
            Paragraph::new(keys).style(Style::new().add_modifier(Modifier::DIM)).render(last, buffer);
        }
    }
}

struct Pen<'b> {
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

fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn figures(all: &[(&str, String)], width: u16) -> Vec<Line<'static>> {
    let mut lines: Vec<Vec<Span<'static>>> = Vec::new();
    let mut left = 0;
    for (name, value) in all {
        let name = format!("{name} ");
        let value =
            shortened(&escape::line(value).to_string(), usize::from(width).saturating_sub(name.len()));
        let taken = name.len() + Span::raw(&value).width();
        match lines.last_mut() {
            Some(line) if taken + 3 <= left => {
                line.extend([Span::raw("   "), Span::raw(name), Span::styled(value, bold())]);
                left -= taken + 3;
            }
            _ => {
                lines.push(vec![Span::raw(name), Span::styled(value, bold())]);
                left = usize::from(width).saturating_sub(taken);
            }
        }
    }
    lines.into_iter().map(Line::from).collect()
}

fn opening(quantiles: Option<&Quantiles>) -> String {
    let Some(Quantiles { p50_s, p99_s, .. }) = quantiles else { return NONE.to_owned() };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most two seconds")]
    let text = |seconds: &Option<f64>| match seconds {
        Some(seconds) => micros(Some((seconds * 1e6).round() as u64)),
        None => "over 2 s".to_owned(),
    };
    format!("p50 {}, p99 {}", text(p50_s), text(p99_s))
}

/// Mean number of datagrams per receive call over all workers.
fn batch(server: &LiveServer) -> String {
    let calls: f64 = server.batches.iter().map(|batch| batch.rate).sum();
    if calls > 0.0 { format!("{:.1} datagrams", server.received / calls) } else { NONE.to_owned() }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate, which fits into u64")]
fn whole(rate: f64) -> u64 {
    rate.max(0.0).round() as u64
}
