//! `turnpike top`: current activity (`/v1/live`) as a screen, as JSON lines, or once as text.

mod grid;
mod screen;
mod tables;
mod units;

use std::{
    io::{self, Write},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use ratatui::{
    buffer::Buffer,
    crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers},
    layout::Rect,
    widgets::Widget as _,
};
use turnpike_api::{CertificateInfo, CertificateList, FleetStatus, History, Live};
use turnpike_wire::escape;

use crate::{
    client::{Client, ClientError},
    commands::CommandError,
};
use screen::Screen;

/// Maximum time to wait for a key, and therefore the maximum delay after a signal.
const LOOK: Duration = Duration::from_millis(100);
/// Refresh interval of certificates and history.
const SELDOM: Duration = Duration::from_secs(60);
/// Refresh interval of the fleet, whose nodes report once per second.
const FLEET: Duration = Duration::from_secs(2);
/// Default width for [`Options::once`].
const COLUMNS: u16 = 110;
/// Maximum number of lines for [`Options::once`].
const LINES: u16 = 200;

#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Interval between two updates.
    pub interval: Duration,
    pub once: bool,
    pub json: bool,
    pub colours: bool,
    /// Width of output that is not a terminal.
    pub columns: Option<u16>,
}

enum TopUpdate {
    Live(Box<Live>),
    History(Box<History>),
    Certificates(Vec<CertificateInfo>),
    Fleet(Box<FleetStatus>),
    Problem(String),
}

/// Runs until the user presses `q` or `stopped` returns true. After the first answer, errors are shown
/// on the screen.
pub fn run(
    client: Client,
    options: &Options,
    out: &mut dyn Write,
    stopped: impl Fn() -> bool,
) -> Result<(), CommandError> {
    if options.json {
        return lines(&client, options, out, stopped);
    }
    if options.once {
        return once(&client, options, out);
    }
    // Done before anything is drawn, so that an error message stays readable.
    let live: Live = client.get("/v1/live")?;
    let mut screen = Screen::new(options.colours, client.whom());
    screen.hear(live);
    let (teller, told) = mpsc::channel();
    let interval = options.interval;
    thread::Builder::new().name("top".to_owned()).spawn(move || tell(&client, interval, &teller))?;
    let mut terminal = ratatui::try_init()?;
    let draw = |screen: &Screen| {
        let drawn = terminal.draw(|frame| frame.render_widget(screen, frame.area()));
        drawn.map(drop)
    };
    let result = interact(&mut screen, &told, draw, key, stopped);
    ratatui::restore();
    Ok(result?)
}

fn tell(client: &Client, interval: Duration, to: &mpsc::Sender<TopUpdate>) {
    let problem = |error: ClientError| TopUpdate::Problem(error.to_string());
    let (mut seldom, mut fleet): (Option<Instant>, Option<Instant>) = (None, None);
    loop {
        if seldom.is_none_or(|last| last.elapsed() >= SELDOM) {
            let history = client.get("/v1/live/history").map(Box::new);
            let _ = history.map(|history| to.send(TopUpdate::History(history)));
            // A forwarder has no certificates, so an error is ignored.
            let told = client.get("/v1/certificates").map(|told: CertificateList| told.certificates);
            let _ = told.map(|told| to.send(TopUpdate::Certificates(told)));
            seldom = Some(Instant::now());
        }
        thread::sleep(interval);
        let told = client.get("/v1/live").map_or_else(problem, |live| TopUpdate::Live(Box::new(live)));
        if matches!(told, TopUpdate::Problem(_)) {
            seldom = None;
        }
        if is_node(&told) && fleet.is_none_or(|last| last.elapsed() >= FLEET) {
            let _ = client.get("/v1/fleet").map(|found| to.send(TopUpdate::Fleet(Box::new(found))));
            fleet = Some(Instant::now());
        }
        if to.send(told).is_err() {
            return;
        }
    }
}

fn is_node(told: &TopUpdate) -> bool {
    matches!(told, TopUpdate::Live(live) if live.status.node.is_some())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Quit,
    Pause,
    Next,
    Previous,
    Down,
    Up,
    Other,
}

fn key(patience: Duration) -> io::Result<Option<Key>> {
    if !event::poll(patience)? {
        return Ok(None);
    }
    let Event::Key(pressed) = event::read()? else { return Ok(Some(Key::Other)) };
    if pressed.kind == KeyEventKind::Release {
        return Ok(None);
    }
    let is_control = pressed.modifiers.contains(KeyModifiers::CONTROL);
    Ok(Some(match pressed.code {
        KeyCode::Char('c') if is_control => Key::Quit,
        KeyCode::Char('q') | KeyCode::Esc => Key::Quit,
        KeyCode::Char('p' | ' ') => Key::Pause,
        KeyCode::Tab | KeyCode::Right => Key::Next,
        KeyCode::BackTab | KeyCode::Left => Key::Previous,
        KeyCode::Down | KeyCode::Char('j') => Key::Down,
        KeyCode::Up | KeyCode::Char('k') => Key::Up,
        _ => Key::Other,
    }))
}

fn interact(
    screen: &mut Screen,
    told: &Receiver<TopUpdate>,
    mut draw: impl FnMut(&Screen) -> io::Result<()>,
    mut key: impl FnMut(Duration) -> io::Result<Option<Key>>,
    stopped: impl Fn() -> bool,
) -> io::Result<()> {
    draw(screen)?;
    while !stopped() {
        let mut changed = false;
        loop {
            match told.recv_timeout(Duration::ZERO) {
                Ok(TopUpdate::Live(live)) => screen.hear(*live),
                Ok(TopUpdate::History(history)) => screen.remember(*history),
                Ok(TopUpdate::Certificates(told)) => screen.certify(told),
                Ok(TopUpdate::Fleet(fleet)) => screen.join(*fleet),
                Ok(TopUpdate::Problem(why)) => screen.lose(why),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
            changed = true;
        }
        let pressed = key(LOOK)?;
        match pressed {
            Some(Key::Quit) => return Ok(()),
            Some(Key::Pause) => screen.pause(),
            Some(Key::Next) => screen.turn(1),
            Some(Key::Previous) => screen.turn(-1),
            Some(Key::Down) => screen.scroll(1),
            Some(Key::Up) => screen.scroll(-1),
            Some(Key::Other) | None => {}
        }
        if changed || pressed.is_some() {
            draw(screen)?;
        }
    }
    Ok(())
}

fn lines(
    client: &Client,
    options: &Options,
    out: &mut dyn Write,
    stopped: impl Fn() -> bool,
) -> Result<(), CommandError> {
    loop {
        let live: Live = client.get("/v1/live")?;
        writeln!(out, "{}", escape::json(&serde_json::to_string(&live).map_err(io::Error::from)?))?;
        out.flush()?;
        if options.once {
            return Ok(());
        }
        let since = Instant::now();
        while since.elapsed() < options.interval {
            if stopped() {
                return Ok(());
            }
            thread::sleep(LOOK.min(options.interval - since.elapsed().min(options.interval)));
        }
    }
}

fn once(client: &Client, options: &Options, out: &mut dyn Write) -> Result<(), CommandError> {
    let history: History = client.get("/v1/live/history")?;
    let live: Live = client.get("/v1/live")?;
    let mut screen = Screen::new(false, client.whom());
    screen.remember(history);
    if live.status.node.is_some()
        && let Ok(fleet) = client.get("/v1/fleet")
    {
        screen.join(fleet);
    }
    screen.hear(live);
    if let Ok(CertificateList { certificates, .. }) = client.get("/v1/certificates") {
        screen.certify(certificates);
    }
    for line in text(&screen.whole(), options.columns.unwrap_or(COLUMNS), LINES) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// Lines of a screen of this size, without trailing spaces or empty lines.
fn text(screen: &Screen, columns: u16, rows: u16) -> Vec<String> {
    let area = Rect::new(0, 0, columns, rows);
    let mut buffer = Buffer::empty(area);
    screen.render(area, &mut buffer);
    let row = |y: u16| {
        let cells = (0..columns).filter_map(|x| buffer.cell((x, y)));
        cells.map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned()
    };
    let mut lines: Vec<String> = (0..rows).map(row).collect();
    while lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    lines
}

#[cfg(test)]
mod tests;
