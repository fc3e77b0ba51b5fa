//! The admin page in real browsers with 10,000 allocations: correct contents, keyboard operation, and no accessibility violations found by
//! axe (tests/interop/axe).

use crate::prelude::*;
use std::sync::{Mutex, PoisonError};

use turnpike_measure::units;

use turnpike_trials::browsers::{Devtools, Driver, Marionette};

const TOKEN: &str = "token-for-the-browsers-test";

/// One test at a time: each needs twenty thousand sockets.
static ALONE: Mutex<()> = Mutex::new(());

struct World {
    serve: Serve,
    _load: Program,
    _reflect: Reflect,
    _dir: Dir,
}

impl World {
    fn new(allocations: u64) -> Self {
        let dir = Dir::new();
        let limits = "[limits]\nallocations_per_user = 16384\n";
        let config = dir.file("turnpike.toml", format!("[admin]\ntokens = [\"{TOKEN}\"]\n{limits}"));
        let serve = Serve::start(&["-c", config.to_str().expect("the test's path is UTF-8")]);
        let reflect = Reflect::start(V4, &[]);
        let clients = allocations.to_string();
        let load =
            serve.load(&reflect).with(&format!("--clients {clients} --rate 2000 --duration 3600")).start();
        eventually("all clients have allocations", || serve.allocations() == allocations);
        Self { serve, _load: load, _reflect: reflect, _dir: dir }
    }

    fn url(&self) -> String {
        format!("http://{}/", self.serve.admin())
    }
}

fn enough_descriptors(allocations: u64) -> Result<(), String> {
    let limit = turnpike_net::rlimit::raise_open_files(2 * allocations + 1000);
    if limit >= allocations + 500 {
        Ok(())
    } else {
        Err(format!("ulimit -n is {limit}: too few for {allocations}"))
    }
}

fn until(page: &mut impl Driver, what: &str, script: &str) -> Value {
    eventually(what, || Some(page.run(script)).filter(|value| !value.is_null() && *value != json!(false)))
}

fn rows(caption: &str) -> String {
    format!(
        "[...document.querySelectorAll('main table')].filter((it) => it.caption.textContent === '{caption}')\
         .flatMap((it) => [...it.tBodies[0].rows].map((row) => row.innerText))"
    )
}

/// Saves a screenshot in the directory named by TURNPIKE_TEST_PICTURES, if set.
fn keep(page: &mut impl Driver, browser: &str, name: &str) {
    if let Some(dir) = env::var_os("TURNPIKE_TEST_PICTURES") {
        let picture = page.picture();
        fs::write(Path::new(&dir).join(format!("{browser}-{name}.png")), picture)
            .expect("the picture can be written");
    }
}

fn shows_ten_thousand_allocations<D: Driver>() {
    const ALLOCATIONS: u64 = 10_000;
    need!(D::available());
    need!(enough_descriptors(ALLOCATIONS));
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let world = World::new(ALLOCATIONS);
    let stranger = stun::Client::new(world.serve.address(V4));
    let (_, _, challenge) = stranger.challenge();
    assert_eq!(stranger.forge("mallory", REALM.as_bytes(), &challenge.nonce), Some(401));

    let mut page = D::start();
    page.show(1400, 900, false);
    page.go(&world.url());
    until(&mut page, "the stream", "return document.getElementById('state').textContent === 'Live'");
    until(
        &mut page,
        "all allocations",
        "return document.querySelector('.tiles dd').textContent === '10,000'",
    );
    assert_eq!(page.run("return document.getElementById('access').textContent"), "Read only");
    let strange = page.run(
        "return performance.getEntriesByType('resource').map((it) => it.name).filter((it) => !it.startsWith(location.origin))",
    );
    assert_eq!(strange, json!([]));
    until(&mut page, "workers", &format!("return {}.length > 0", rows("Workers")));
    until(
        &mut page,
        "the busiest allocations",
        &format!("return {}.length === 20", rows("Allocations that relay the most")),
    );
    until(
        &mut page,
        "graphs",
        "return document.querySelector('.line-0').getAttribute('d').split('L').length > 3",
    );
    keep(&mut page, D::NAME, "overview-light");
    page.show(1400, 900, true);
    keep(&mut page, D::NAME, "overview-dark");
    page.show(400, 850, false);
    let wider =
        page.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth");
    assert_eq!(wider, 0, "on a phone nothing is wider than the screen");
    keep(&mut page, D::NAME, "overview-phone");
    page.show(1400, 900, false);

    lists_finds_and_ends::<D>(&mut page, &world);

    page.run("location.hash = '#/refusals?of=mallory'");
    let told = until(
        &mut page,
        "the refusal",
        &format!("const found = {}; return found.length === 1 && found[0]", rows("Refusals")),
    );
    assert!(told.as_str().is_some_and(|row| row.contains("no such user") && row.contains("401")), "{told}");
    keep(&mut page, D::NAME, "refusals");

    page.run("location.hash = '#/configuration'");
    let told = until(
        &mut page,
        "the configuration",
        &format!(
            "return {}.find((row) => row.includes('limits.allocations_per_user'))",
            rows("Configuration")
        ),
    );
    assert!(
        told.as_str().is_some_and(|row| row.contains("16384") && row.contains("turnpike.toml")),
        "{told}"
    );
    assert_eq!(
        page.run(&format!("return {}.some((row) => row.includes('{TOKEN}'))", rows("Configuration"))),
        false
    );
    keep(&mut page, D::NAME, "configuration");

    world.serve.program.signal("KILL");
    until(
        &mut page,
        "the lost connection",
        "return document.getElementById('state').textContent === 'No connection'",
    );
}

fn lists_finds_and_ends<D: Driver>(page: &mut D, world: &World) {
    let allocations = rows("Allocations");
    page.run("location.hash = '#/allocations'");
    until(page, "a page of allocations", &format!("return {allocations}.length === 100"));
    keep(page, D::NAME, "allocations");
    let first = page.run(&format!("return {allocations}"));
    page.run("[...document.querySelectorAll('.pages button')].find((it) => it.textContent === 'Next page').click()");
    let second = until(
        page,
        "the next page",
        &format!(
            "const found = {allocations}; return location.hash.includes('page=2') && found.length === 100 && found"
        ),
    );
    let on_both = |row: &Value| second.as_array().expect("rows").contains(row);
    assert!(!first.as_array().expect("rows").iter().any(on_both), "an allocation is on two pages");

    let client =
        page.run("return document.querySelector('main tbody tr').cells[1].querySelector('span').textContent");
    page.run(&format!(
        "document.getElementById('by').value = 'client'; document.getElementById('wanted').value = '{}'; \
         document.querySelector('form button').click()",
        client.as_str().expect("an address")
    ));
    until(
        page,
        "the one",
        &format!("return location.hash.includes('client=') && {allocations}.length === 1"),
    );
    page.run("document.querySelector('main tbody a').click()");
    until(
        page,
        "its details",
        "return document.querySelector('h1').textContent.startsWith('Allocation ') && document.querySelector('.facts dd')",
    );
    let facts = page.run("return document.querySelector('.facts').innerText");
    assert!(facts.as_str().is_some_and(|text| text.contains(USER)), "{facts}");
    until(page, "channels", &format!("return {}.length === 1", rows("Channels")));
    keep(page, D::NAME, "allocation");
    assert_eq!(
        page.run("return document.querySelector('main button.danger').disabled"),
        true,
        "a read-only token cannot end the allocation"
    );

    page.run("document.getElementById('token-open').focus()");
    page.press("Enter");
    until(page, "the token dialog", "return document.getElementById('token-dialog').open");
    page.run(&format!("document.getElementById('token').value = '{TOKEN}'"));
    page.press("Enter");
    until(page, "full access", "return document.getElementById('access').textContent === 'Full access'");
    until(page, "the button", "return document.querySelector('main button.danger').disabled === false");
    page.run("document.querySelector('main button.danger').focus()");
    page.press("Enter");
    until(page, "the confirmation dialog", "return document.querySelector('main dialog').open");
    assert_eq!(
        page.run("return document.activeElement.textContent"),
        "Cancel",
        "the harmless choice comes first"
    );
    keep(page, D::NAME, "end");
    page.press("Escape");
    until(page, "no dialog", "return !document.querySelector('main dialog').open");
    page.run("document.querySelector('main button.danger').focus()");
    page.press("Enter");
    until(page, "the dialog again", "return document.querySelector('main dialog').open");
    page.press("Tab");
    page.press("Enter");
    until(page, "the list again", "return location.hash === '#/allocations'");
    let announced = page.run("return document.getElementById('announcement').textContent");
    assert_eq!(announced, format!("The allocation of {USER} has ended."));
    let ended = || world.serve.metrics().sum("turnpike_allocations_closed_total", "reason=\"administrator\"");
    eventually("the action is counted", || ended() == 1);
    page.run("sessionStorage.clear()");
}

fn violations(page: &mut impl Driver, axe: &str) -> Value {
    page.run(&format!(
        "{axe}\n; const found = await axe.run(document, {{ resultTypes: ['violations'] }}); \
         return found.violations.map((it) => `${{it.id}}: ${{it.nodes.map((node) => node.html.slice(0, 120) + ' ' + node.failureSummary).join(' | ')}}`)"
    ))
}

fn axe_finds_nothing<D: Driver>() {
    need!(D::available());
    let axe = need!(interop_program("interop-browsers", "axe/node_modules/axe-core/axe.min.js"));
    let axe = fs::read_to_string(axe).expect("a script");
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let world = World::new(150);
    let stranger = stun::Client::new(world.serve.address(V4));
    let (_, _, challenge) = stranger.challenge();
    assert_eq!(stranger.forge("mallory", REALM.as_bytes(), &challenge.nonce), Some(401));
    let mut page = D::start();
    page.go(&world.url());
    until(&mut page, "the stream", "return document.getElementById('state').textContent === 'Live'");
    for (place, there) in [
        ("#/", format!("return {}.length > 0", rows("Allocations that relay the most"))),
        ("#/allocations", format!("return {}.length === 100", rows("Allocations"))),
        ("#/refusals", format!("return {}.length > 0", rows("Refusals"))),
        ("#/configuration", format!("return {}.length > 0", rows("Configuration"))),
        ("#/allocations/", format!("return {}.length > 0", rows("Channels"))),
        ("token", "return document.getElementById('token-dialog').open".to_owned()),
    ] {
        match place {
            "token" => page.run("document.getElementById('token-open').click()"),
            "#/allocations/" => page.run(
                "location.hash = `#/allocations/${(await (await fetch('/v1/allocations?limit=1')).json()).allocations[0].id}`",
            ),
            _ => page.run(&format!("location.hash = '{place}'")),
        };
        until(&mut page, place, &there);
        for (width, dark) in [(1400, false), (1400, true), (400, false)] {
            page.show(width, 900, dark);
            let found = violations(&mut page, &axe);
            assert_eq!(found, json!([]), "{} {place} {width} dark: {dark}", D::NAME);
        }
    }
}

/// Starts at the top and uses only the Tab key: each stop is visible and has a name.
fn every_stop_of_the_keyboard_has_a_name<D: Driver>() {
    need!(D::available());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let world = World::new(3);
    let mut page = D::start();
    page.show(1400, 900, false);
    page.go(&world.url());
    until(&mut page, "workers", &format!("return {}.length > 0", rows("Workers")));
    let mut stops = Vec::new();
    for _ in 0..60 {
        page.press("Tab");
        let stop = page.run(
            "const it = document.activeElement; if (it === document.body || it === document.documentElement) return null; \
             const name = it.getAttribute('aria-label') ?? it.labels?.[0]?.textContent ?? it.textContent; \
             const box = it.getBoundingClientRect(); return [name.trim(), box.width > 0 && box.height > 0]",
        );
        if stop.is_null() {
            break;
        }
        assert!(
            stop[0].as_str().is_some_and(|name| !name.is_empty()) && stop[1] == true,
            "{stop} after {stops:?}"
        );
        stops.push(stop[0].as_str().unwrap_or_default().to_owned());
    }
    assert_eq!(stops[0], "Skip to content");
    for name in ["Allocations", "Why refused?", "Configuration", "Token", "Look back", "Workers", "Metrics"] {
        assert!(stops.iter().any(|stop| stop == name), "{name} in {stops:?}");
    }
}

fn on_a_phone(page: &mut impl Driver, place: &str, there: &str, dark: bool) {
    page.run(&format!("location.hash = '{place}'"));
    until(page, place, there);
    page.show(360, 740, dark);
}

fn fits_a_phone<D: Driver>() {
    need!(D::available());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let world = World::new(3);
    let stranger = stun::Client::new(world.serve.address(V4));
    let (_, _, challenge) = stranger.challenge();
    assert_eq!(stranger.forge("mallory", REALM.as_bytes(), &challenge.nonce), Some(401));
    let mut page = D::start();
    page.go(&world.url());
    until(&mut page, "the stream", "return document.getElementById('state').textContent === 'Live'");
    let one = page.run("return (await (await fetch('/v1/allocations?limit=1')).json()).allocations[0].id");
    let allocation = format!("#/allocations/{}", one.as_str().expect("an id"));
    for (place, caption) in [
        ("#/", "Allocations that relay the most"),
        ("#/allocations", "Allocations"),
        (&allocation, "Channels"),
        ("#/refusals", "Refusals"),
        ("#/configuration", "Configuration"),
    ] {
        for dark in [false, true] {
            let there = format!("return {}.length > 0", rows(caption));
            on_a_phone(&mut page, place, &there, dark);
            let name = place.split('/').nth(1).unwrap_or_default();
            let kind = if place == allocation { "allocation" } else { name };
            keep(&mut page, D::NAME, &format!("phone-{kind}-{}", if dark { "dark" } else { "light" }));
            let wider = page.run(
                "return [document.documentElement, ...document.querySelectorAll('.scroll, header nav')]\
                 .filter((it) => it.scrollWidth > it.clientWidth).map((it) => it.className || it.nodeName)",
            );
            assert_eq!(wider, json!([]), "{} {place}: nothing is wider than the screen", D::NAME);
            let outside = page.run(
                "const width = document.documentElement.clientWidth; return [...document.querySelectorAll('tbody th, tbody td')]\
                 .filter((it) => it.getBoundingClientRect().width > 0 && it.textContent !== '')\
                 .filter((it) => it.getBoundingClientRect().right > width || it.scrollWidth > it.clientWidth + 1).map((it) => it.textContent)",
            );
            assert_eq!(outside, json!([]), "{} {place}: each cell is visible", D::NAME);
            let broken = page.run(
                "return [...document.querySelectorAll('.together')].filter((it) => it.getClientRects().length > 1).map((it) => it.textContent)",
            );
            assert_eq!(broken, json!([]), "{} {place}: no address is broken", D::NAME);
            let head = page.run(
                "const box = (it) => document.querySelector(it).getBoundingClientRect(); \
                 const [brand, state, tabs] = ['.brand', '.state', 'header nav'].map(box); \
                 const tops = new Set([...document.querySelectorAll('header nav li:not([hidden])')].map((it) => it.getBoundingClientRect().top)); \
                 return [state.top < brand.bottom && brand.top < state.bottom && state.height < 60, tabs.top >= brand.bottom, tops.size]",
            );
            assert_eq!(head, json!([true, true, 1]), "{} {place}: one row, and one row of tabs", D::NAME);
        }
    }
    let addresses = "return document.querySelectorAll('td .together').length > 0";
    on_a_phone(&mut page, "#/allocations", addresses, false);

    on_a_phone(&mut page, "#/refusals", "return document.querySelector('td .links a') !== null", false);
    let why = page.run(
        "const it = [...document.querySelectorAll('td')].find((cell) => cell.textContent.includes('no such user')); \
         const box = it.getBoundingClientRect(); return [it.dataset.title, getComputedStyle(it, '::before').display, box.width > 100, box.height > 0]",
    );
    assert_eq!(why, json!(["Why", "block", true, true]), "{}", D::NAME);
    page.run("document.querySelector('td .links a').click()");
    let found = until(
        &mut page,
        "the key",
        &format!(
            "const found = {}; return location.hash.includes('key=') && found.length > 0 && found",
            rows("Configuration")
        ),
    );
    let all = found.as_array().expect("rows").iter();
    assert!(all.clone().all(|row| row.as_str().is_some_and(|row| row.contains("auth.users"))), "{found}");
}

/// The page formats units like `turnpike_measure::units`, and wraps no address within its port.
fn writes_as_the_commands_do<D: Driver>() {
    need!(D::available());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let world = World::new(1);
    let mut page = D::start();
    page.go(&world.url());
    let seconds = [0, 59, 60, 61, 3661, 7200, 90_000, 863_999, 1_126_800, 63_071_999, 95_926_150];
    let told =
        page.run(&format!("const it = await import('/web/format.js'); return {seconds:?}.map(it.span)"));
    assert_eq!(told, json!(seconds.map(units::span)));
    let counts = [0, 999, 1000, 12_345, 999_499, 999_500, 5_000_000_000];
    let told =
        page.run(&format!("const it = await import('/web/format.js'); return {counts:?}.map(it.bytes)"));
    assert_eq!(told, json!(counts.map(units::bytes)));
    let rates = [0.0, 0.25, 12.34, 999.0, 1500.0, 999_500.0];
    let told = page.run(&format!(
        "const it = await import('/web/format.js'); return {rates:?}.flatMap((rate) => [it.perSecond(rate), it.bits(rate)])"
    ));
    assert_eq!(
        told,
        json!(rates.map(|rate| [units::per_second(rate), units::bits_per_second(rate)]).concat())
    );

    let text = "from [2001:db8:1111:2222:3333:4444:5555:6666]:50000 to 192.0.2.9:50000, [::1]:7 and 10.0.0.0/8 at 12:34:56";
    let told = page.run(&format!(
        "const {{ h, setText }} = await import('/web/dom.js'); const it = h('p', {{ id: 'narrow' }}); document.body.append(it); \
         it.style.width = '9em'; setText(it, '{text}'); const parts = [...it.querySelectorAll('.together')]; \
         return [it.textContent, parts.map((part) => part.textContent), parts.every((part) => part.getClientRects().length === 1), \
         it.scrollWidth <= it.clientWidth]"
    ));
    let together = ["6666]:50000", "192.0.2.9:50000", "1]:7", "10.0.0.0/8"];
    assert_eq!(told, json!([text, together, true, true]), "{}", D::NAME);
}

tests! {
    chromium_page_fits_a_phone: fits_a_phone::<Devtools>();
    firefox_page_fits_a_phone: fits_a_phone::<Marionette>();
    chromium_page_writes_as_the_commands_do: writes_as_the_commands_do::<Devtools>();
    firefox_page_writes_as_the_commands_do: writes_as_the_commands_do::<Marionette>();
    chromium_shows_ten_thousand_allocations: shows_ten_thousand_allocations::<Devtools>();
    firefox_shows_ten_thousand_allocations: shows_ten_thousand_allocations::<Marionette>();
    axe_finds_nothing_in_chromium: axe_finds_nothing::<Devtools>();
    axe_finds_nothing_in_firefox: axe_finds_nothing::<Marionette>();
    chromium_keyboard_stops_have_names: every_stop_of_the_keyboard_has_a_name::<Devtools>();
    firefox_keyboard_stops_have_names: every_stop_of_the_keyboard_has_a_name::<Marionette>();
}
