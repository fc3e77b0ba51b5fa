//! `cargo xtask soak`: relays over all transports and data paths for a given time, with reloads and upgrades, and checks whether resource
//! use grows. The time is split into slices, whose results are committed, so that later runs on any machine can add to them.

mod slope;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{ExitCode, Stdio},
    time::{Duration, Instant},
};

use clap::Args;
use serde::Deserialize;
use serde_json::json;

use self::slope::{Series, Trend};
use crate::{Failure, LIMIT_EXCEEDED, document::with_table, program, why_skipped};

/// Data paths, used in turn, so that all get a similar share of the time.
const DATAPATHS: [&str; 5] = ["basic", "mmsg", "gso", "kernel", "xdp"];
const TEST: &str = "soak::soak_piece";
/// Seconds until a server has allocated its long-lived state; the admin interface's history takes the longest to fill (ten minutes).
const WARM_UP: u64 = 660;
/// File with one line per slice, which is committed.
const MEMORY: &str = "soak/slices.jsonl";
const DOCUMENT: &str = "docs/dev/reliability.md";
/// Growth per million allocations, relative to a figure's mean, beyond which it counts as a leak.
const TOLERATED: f64 = 0.02;

#[derive(Args)]
pub(crate) struct Options {
    /// Total number of allocations over all runs
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    allocations: u64,

    /// Total number of datagrams in both directions
    #[arg(long, value_name = "N", default_value_t = 20_000_000)]
    datagrams: u64,

    /// Stop after this many minutes, even if the run is unfinished; the next run continues from there
    #[arg(long, value_name = "N", default_value_t = 10)]
    minutes: u64,

    /// Forget the results of earlier runs
    #[arg(long)]
    fresh: bool,

    /// Report the results of earlier runs without running anything
    #[arg(long)]
    report: bool,

    /// Write the results of all runs into docs/dev/reliability.md
    #[arg(long)]
    write: bool,

    /// Program to test [default: a release build of this repository]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// Resource use after a slice; the file has one line for each slice.
#[derive(Deserialize)]
struct Slice {
    datapath: String,
    life: u64,
    seconds: u64,
    upgraded: bool,
    allocations: u64,
    datagrams: u64,
    lost: u64,
    across: u64,
    life_allocations: u64,
    memory: u64,
    descriptors: u64,
    flows: u64,
    idle_ms: u64,
    sockets: Option<u64>,
    tcp_pages: Option<u64>,
    udp_pages: Option<u64>,
    /// Uncertainty of the kernel's page count, due to per-CPU reserves.
    slack_pages: Option<u64>,
    kernel_memory: Option<u64>,
    /// Memory of an idle server for comparison.
    control: u64,
}

/// Runs pieces until everything is done or the time is up. Exit code 3 if a figure grows.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    let repository = crate::repository()?;
    let dir = crate::target(&repository).join("soak");
    fs::create_dir_all(&dir)?;
    let file = repository.join(MEMORY);
    fs::create_dir_all(repository.join("soak"))?;
    if options.fresh && file.exists() {
        fs::remove_file(&file)?;
    }
    if !options.report {
        let program = program(&repository, options.program.as_deref())?;
        let until = Instant::now() + Duration::from_secs(60 * options.minutes);
        soak(options, &repository, &program, (&dir, &file), until)?;
    }
    let slices = read(&file)?;
    let (text, grows) = report(&slices);
    let sum = |figure: fn(&Slice) -> u64| slices.iter().map(figure).sum::<u64>();
    let (allocations, datagrams) = (sum(|slice| slice.allocations), sum(|slice| slice.datagrams));
    println!("{text}");
    println!(
        "{allocations} of {} allocations and {datagrams} of {} datagrams done.",
        options.allocations, options.datagrams
    );
    if options.write {
        let document = repository.join(DOCUMENT);
        let written =
            with_table(&fs::read_to_string(&document)?, "hours", "cargo xtask soak --write", &text)?;
        fs::write(document, written)?;
    }
    Ok(if grows { ExitCode::from(LIMIT_EXCEEDED) } else { ExitCode::SUCCESS })
}

fn soak(
    options: &Options,
    repository: &Path,
    program: &Path,
    (dir, file): (&Path, &Path),
    until: Instant,
) -> Result<(), Failure> {
    let mut skipped = Vec::new();
    loop {
        let done = read(file)?;
        let sum = |figure: fn(&Slice) -> u64| done.iter().map(figure).sum::<u64>();
        let left = (
            options.allocations.saturating_sub(sum(|slice| slice.allocations)),
            options.datagrams.saturating_sub(sum(|slice| slice.datagrams)),
        );
        let time = until.saturating_duration_since(Instant::now()).as_secs();
        let had = |name: &str| done.iter().filter(|slice| slice.datapath == name).count();
        let next = DATAPATHS.iter().filter(|name| !skipped.contains(*name)).min_by_key(|name| had(name));
        let Some(datapath) = next.filter(|_| time > 0 && left != (0, 0)) else { return Ok(()) };
        // Length of a piece: each data path gets an equal part of the time. A trend needs about twenty minutes of data.
        let seconds = (options.minutes * 60 / DATAPATHS.len() as u64).clamp(60, 3_600).min(time.max(30));
        eprintln!("{datapath}: {seconds} s; {} allocations and {} datagrams remain", left.0, left.1);
        let piece = json!({
            "datapath": datapath, "seconds": seconds, "allocations": left.0, "datagrams": left.1, "file": file,
        });
        let output = crate::trials(repository)
            .args(["--", "--exact", TEST, "--include-ignored", "--nocapture", "--test-threads=1"])
            .env("TURNPIKE_TEST_SOAK", piece.to_string())
            .env("TURNPIKE_TEST_PROGRAM", program)
            .stdin(Stdio::null())
            .output()?;
        let said =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        let log = dir.join(format!("{datapath}.log"));
        fs::write(&log, &said)?;
        if !output.status.success() {
            return Err(format!("{datapath} failed: see {}", log.display()).into());
        }
        if let Some(why) = said.lines().find_map(why_skipped) {
            println!("{datapath} was skipped: {why}");
            skipped.push(*datapath);
        }
    }
}

fn read(file: &Path) -> Result<Vec<Slice>, Failure> {
    if !file.exists() {
        return Ok(Vec::new());
    }
    fs::read_to_string(file)?.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

/// Page reserve of two CPUs, for slices without a recorded reserve.
const SLACK_PAGES: u64 = 512;

/// Name, divisor for the unit, and value of a figure.
type Figure = (&'static str, f64, fn(&Slice) -> Option<u64>);

const FIGURES: [Figure; 9] = [
    ("memory, KiB", 1024.0, |slice| Some(slice.memory)),
    ("memory of an idle server, KiB", 1024.0, |slice| Some(slice.control)),
    ("descriptors", 1.0, |slice| Some(slice.descriptors)),
    ("kernel flows", 1.0, |slice| Some(slice.flows)),
    ("CPU ms per idle second", 1.0, |slice| Some(slice.idle_ms)),
    ("sockets in the namespace", 1.0, |slice| slice.sockets),
    ("TCP pages", 1.0, |slice| slice.tcp_pages),
    ("UDP pages", 1.0, |slice| slice.udp_pages),
    ("kernel memory, KiB", 1024.0, |slice| slice.kernel_memory),
];

/// Returns two tables in Markdown, and true if any figure grows.
fn report(slices: &[Slice]) -> (String, bool) {
    let mut by_path: BTreeMap<&str, Vec<&Slice>> = BTreeMap::new();
    slices.iter().for_each(|slice| by_path.entry(&slice.datapath).or_default().push(slice));
    let mut text = done(slices, &by_path);
    let names: Vec<String> = by_path.keys().map(|name| format!("`{name}`")).collect();
    let line = " --- |".repeat(names.len());
    let _ = writeln!(text, "\n| after all clients are gone | {} |\n| --- |{line}", names.join(" | "));
    let mut grows = false;
    let mut too_short: BTreeSet<&str> = BTreeSet::new();
    let figures = FIGURES.len() * by_path.len();
    for (what, unit, figure) in FIGURES {
        let mut cells = Vec::new();
        for (name, slices) in &by_path {
            let mut series = Series::default();
            for slice in slices.iter().filter(|slice| slice.seconds >= WARM_UP && !slice.upgraded) {
                if let Some(value) = figure(slice) {
                    series.add(slice.life, slice.life_allocations as f64 / 1e6, value as f64 / unit);
                }
            }
            let Some(trend) = series.trend() else {
                too_short.insert(name);
                cells.push("-".to_owned());
                continue;
            };
            let Trend { first, second, slope, interval, .. } = trend;
            // `first` and `second` are means over half a run each, so up to half of the reserve may appear as a difference between them.
            let slack = if what.contains("pages") { slack(slices) / 2.0 } else { 0.0 };
            let leaks = trend.grows(TOLERATED, figures) && second - first > slack;
            grows |= leaks;
            let verdict = if leaks { " **grows**" } else { "" };
            cells.push(format!("{first:.1}→{second:.1}, {slope:+.1}±{interval:.1}{verdict}"));
        }
        let _ = writeln!(text, "| {what} | {} |", cells.join(" | "));
    }
    if !too_short.is_empty() {
        let names: Vec<_> = too_short.into_iter().collect();
        let _ = writeln!(
            text,
            "\nGrowth is unknown for {}, because no run was long enough; with --minutes 100, each run takes 20 minutes.",
            names.join(", ")
        );
    }
    (text, grows)
}

fn slack(slices: &[&Slice]) -> f64 {
    slices.iter().map(|slice| slice.slack_pages.unwrap_or(SLACK_PAGES)).max().unwrap_or(SLACK_PAGES) as f64
}

fn done(slices: &[Slice], by_path: &BTreeMap<&str, Vec<&Slice>>) -> String {
    let mut text = "| data path | servers | slices | with an upgrade | allocations | datagrams | by the kernel | lost | slices with equal counters |\n\
                    | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        .to_owned();
    let mut row = |name: &str, slices: &[&Slice]| {
        let sum = |figure: fn(&Slice) -> u64| slices.iter().map(|slice| figure(slice)).sum::<u64>();
        let exact = slices.iter().filter(|slice| slice.lost == 0).count();
        let lives: BTreeSet<(&str, u64)> =
            slices.iter().map(|slice| (slice.datapath.as_str(), slice.life)).collect();
        let _ = writeln!(
            text,
            "| {name} | {} | {} | {} | {} | {} | {} | {} | {exact} |",
            lives.len(),
            slices.len(),
            sum(|slice| slice.upgraded.into()),
            sum(|slice| slice.allocations),
            sum(|slice| slice.datagrams),
            sum(|slice| slice.across),
            sum(|slice| slice.lost),
        );
    };
    for (name, slices) in by_path {
        row(&format!("`{name}`"), slices);
    }
    row("all", &slices.iter().collect::<Vec<_>>());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Slices of one server: ten seconds and 10,000 allocations each, with memory as a function of time.
    fn life(seconds: u64, memory: impl Fn(u64) -> u64) -> Vec<Slice> {
        let slice = |at: u64| Slice {
            datapath: "gso".to_owned(),
            life: 1,
            seconds: 10 * at,
            upgraded: false,
            allocations: 10_000,
            datagrams: 1,
            lost: 0,
            across: 0,
            life_allocations: 10_000 * at,
            memory: memory(10 * at),
            descriptors: 25,
            flows: 0,
            idle_ms: 0,
            sockets: Some(1),
            tcp_pages: Some(1),
            udp_pages: Some(1),
            slack_pages: Some(512),
            kernel_memory: Some(1),
            control: 1 << 21,
        };
        (1..=seconds / 10).map(slice).collect()
    }

    #[test]
    fn only_growth_after_the_first_minutes_is_a_leak() {
        let leak = |seconds: u64| (10 << 20) + seconds * 4096;
        let (text, grows) = report(&life(1200, leak));
        assert!(grows && text.contains("**grows**") && !text.contains("unknown"), "{text}");
        let (text, grows) = report(&life(1200, |seconds| leak(seconds.min(WARM_UP))));
        assert!(!grows && !text.contains("**grows**"), "{text}");
    }

    #[test]
    fn page_growth_must_exceed_the_cpu_reserves() {
        let with_pages = |pages: fn(u64) -> u64| {
            let mut slices = life(1200, |_| 10 << 20);
            slices.iter_mut().for_each(|slice| slice.tcp_pages = Some(pages(slice.seconds)));
            slices
        };
        let (text, grows) = report(&with_pages(|seconds| if seconds < 800 { 0 } else { 76 }));
        assert!(!grows, "a CPU released its reserve: {text}");
        let (text, grows) = report(&with_pages(|seconds| seconds * 2));
        assert!(grows && text.contains("| TCP pages | ") && text.contains("**grows**"), "{text}");
    }

    #[test]
    fn runs_too_short_for_a_trend_are_reported() {
        let (text, grows) = report(&life(600, |seconds| (10 << 20) + seconds * 4096));
        assert!(!grows && text.contains("unknown for gso"), "{text}");
    }
}
