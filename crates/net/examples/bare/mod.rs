//! Command-line flags, duration and result line of the bare programs, which measure kernel features without
//! any protocol on top. Usage: docs/dev/benchmarks.md.

use std::{
    collections::BTreeMap,
    str::FromStr,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// A run, which ends on SIGTERM or SIGINT, or after `--seconds`.
pub(crate) struct Run {
    flags: BTreeMap<String, String>,
    began: Instant,
    ends: Option<Instant>,
}

static TOLD_TO_END: AtomicBool = AtomicBool::new(false);

extern "C" fn end(_: libc::c_int) {
    TOLD_TO_END.store(true, Ordering::Relaxed);
}

impl Run {
    /// Parses `--name value` pairs with names from `known`.
    pub(crate) fn start(known: &[&str]) -> Self {
        let mut flags = BTreeMap::new();
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let name = word.strip_prefix("--").filter(|name| *name == "seconds" || known.contains(name));
            let Some(name) = name else {
                panic!("{word}: expected one of --seconds, --{}", known.join(", --"))
            };
            flags.insert(name.to_owned(), words.next().unwrap_or_else(|| panic!("{word} needs a value")));
        }
        for signal in [libc::SIGTERM, libc::SIGINT] {
            // SAFETY: the handler stores to an atomic and does nothing else.
            unsafe { libc::signal(signal, end as *const () as libc::sighandler_t) };
        }
        let mut run = Self { flags, began: Instant::now(), ends: None };
        let seconds: f64 = run.get("seconds", 0.0);
        run.ends = (seconds > 0.0).then(|| run.began + Duration::from_secs_f64(seconds));
        run
    }

    /// Value of a flag, or the default.
    pub(crate) fn get<T: FromStr>(&self, name: &str, default: T) -> T {
        let Some(text) = self.flags.get(name) else { return default };
        text.parse().unwrap_or_else(|_| panic!("--{name}: cannot parse {text:?}"))
    }

    pub(crate) fn need<T: FromStr>(&self, name: &str) -> T {
        assert!(self.flags.contains_key(name), "--{name} is required");
        self.flags[name].parse().unwrap_or_else(|_| panic!("--{name}: cannot parse {:?}", self.flags[name]))
    }

    pub(crate) fn goes_on(&self) -> bool {
        !TOLD_TO_END.load(Ordering::Relaxed) && self.ends.is_none_or(|ends| Instant::now() < ends)
    }

    /// Prints a JSON object with the number of delivered datagrams (or messages) and the CPU time of this
    /// process in seconds.
    #[expect(clippy::cast_precision_loss, reason = "counts of one run are far below 2^53")]
    pub(crate) fn report(&self, experiment: &str, variant: &str, datagrams: u64, more: &[(&str, f64)]) {
        let (seconds, cpu) = (self.began.elapsed().as_secs_f64(), cpu_s());
        let each = if datagrams > 0 { cpu * 1e6 / datagrams as f64 } else { 0.0 };
        let more: String = more.iter().map(|(name, value)| format!(",\"{name}\":{value}")).collect();
        println!(
            "{{\"experiment\":\"{experiment}\",\"variant\":\"{variant}\",\"seconds\":{seconds:.3},\"datagrams\":{datagrams},\
             \"cpu_s\":{cpu:.6},\"cpu_us_per_datagram\":{each:.4}{more}}}"
        );
    }
}

#[expect(clippy::cast_precision_loss, reason = "seconds of a run")]
fn cpu_s() -> f64 {
    // SAFETY: zero is a valid value for every member of `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live `rusage`.
    let asked = unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    assert_eq!(asked, 0, "getrusage");
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
