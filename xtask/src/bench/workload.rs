//! What is measured, and what each measurement must reach (the table of docs/performance-log.md).

use super::rounds::Named;

/// A kind of load and the verdicts drawn from it.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    /// As it stands in the table.
    pub(crate) title: &'static str,
    pub(crate) shape: Shape,
    pub(crate) requirements: Vec<Requirement>,
}

impl Named for Workload {
    fn name(&self) -> &str {
        self.name
    }

    fn title(&self) -> &str {
        self.title
    }
}

/// What the generator does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Shape {
    /// Datagrams through channels, echoed by the peer.
    Traffic {
        /// How clients reach the relay; between relay and peer it is UDP always.
        transport: Transport,
        clients: u32,
        /// Offered datagrams a second towards the peers; `None` for saturation.
        rate: Option<u32>,
        size: u32,
        burst: u32,
        /// At saturation: datagrams that one client may have under way; `None` for no bound.
        window: Option<u32>,
    },
    /// Authenticated allocations made and freed, `clients` at a time; over TCP and TLS each on a connection of its own.
    Churn { transport: Transport, clients: u32 },
    /// This many allocations made and left alone.
    Idle { allocations: u32 },
}

/// How clients reach the relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Udp,
    Tcp,
    Tls,
}

impl Transport {
    /// As the generator's `--transport` has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
            Self::Tls => "tls",
        }
    }

    pub(crate) fn is_stream(self) -> bool {
        self != Self::Udp
    }
}

impl Shape {
    pub(crate) fn transport(self) -> Transport {
        match self {
            Self::Traffic { transport, .. } | Self::Churn { transport, .. } => transport,
            Self::Idle { .. } => Transport::Udp,
        }
    }
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Requirement {
    pub(crate) metric: Metric,
    pub(crate) must: Must,
}

/// A figure of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Metric {
    /// Datagrams delivered at both far ends per second that the relay's core was busy.
    PerBusySecond,
    /// The same per second of the relay's process time.
    PerProcessSecond,
    /// Share of the generator's datagrams that did not come back.
    Loss,
    /// Round-trip latency, microseconds.
    P50,
    P99,
    /// Allocations made per second.
    Allocations,
    /// Resident bytes of the relay per idle allocation.
    AllocationBytes,
}

impl Metric {
    /// With its unit, and short: it stands in a table.
    pub(crate) fn show(self, value: f64) -> String {
        match self {
            Self::PerBusySecond => format!("{:.1}k/busy s", value / 1e3),
            Self::PerProcessSecond => format!("{:.1}k/process s", value / 1e3),
            Self::Loss => format!("{:.3} % lost", value * 100.0),
            Self::P50 => format!("p50 {value:.0} us"),
            Self::P99 => format!("p99 {value:.0} us"),
            Self::Allocations => format!("{value:.0}/s"),
            Self::AllocationBytes => format!("{value:.0} B"),
        }
    }
}

/// What a figure is held against.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Must {
    /// Subject / baseline, at least.
    AtLeast(f64),
    /// Subject / baseline, at most.
    AtMost(f64),
    /// The subject's own figure, at most.
    OwnAtMost(f64),
    /// Subject / baseline, at least this share of the ratio that the named workload reached.
    ShareOf(&'static str, f64),
}

/// All workloads, in the order of the table.
pub(crate) fn all() -> Vec<Workload> {
    let per_busy_second = |must| vec![Requirement { metric: Metric::PerBusySecond, must }];
    let not_slower = || {
        [Metric::P50, Metric::P99]
            .map(|metric| Requirement { metric, must: Must::AtMost(1.0) })
            .into_iter()
            .chain([Requirement { metric: Metric::Loss, must: Must::OwnAtMost(0.001) }])
            .collect::<Vec<_>>()
    };
    let traffic = |clients, rate, size, burst| Shape::Traffic {
        transport: Transport::Udp,
        clients,
        rate,
        size,
        burst,
        window: None,
    };
    // A stream without a bound queues megabytes for the slower relay: seconds of them, at 64 clients more than a trial lasts.
    let saturating = |transport, clients, burst, window| Shape::Traffic {
        transport,
        clients,
        rate: None,
        size: 120,
        burst,
        window: Some(window),
    };
    let paced = |transport| Shape::Traffic {
        transport,
        clients: 64,
        rate: Some(20_000),
        size: 120,
        burst: 1,
        window: None,
    };
    let stream = |name, title, shape| Workload {
        name,
        title,
        shape,
        // At most coturn's processor time for each packet that is delivered.
        requirements: per_busy_second(Must::AtLeast(1.0)),
    };
    vec![
        Workload {
            name: "flood-1",
            title: "1 client, flood, 120 B",
            shape: traffic(1, None, 120, 16),
            requirements: per_busy_second(Must::AtLeast(6.0)),
        },
        Workload {
            name: "flood-8",
            title: "8 clients, flood, 120 B",
            shape: traffic(8, None, 120, 16),
            requirements: per_busy_second(Must::AtLeast(4.0)),
        },
        Workload {
            name: "burst-64",
            title: "64 clients, bursts of 4, saturation, 120 B",
            shape: traffic(64, None, 120, 4),
            requirements: per_busy_second(Must::AtLeast(2.5)),
        },
        Workload {
            name: "burst-64-200k",
            title: "64 clients, bursts of 4, 200,000 offered a second, 120 B",
            shape: traffic(64, Some(200_000), 120, 4),
            requirements: vec![Requirement { metric: Metric::Loss, must: Must::OwnAtMost(0.001) }],
        },
        Workload {
            name: "thin-1000",
            title: "1,000 clients, one datagram at a time, 120 B",
            shape: traffic(1000, None, 120, 1),
            requirements: per_busy_second(Must::AtLeast(1.1)),
        },
        Workload {
            name: "latency-1",
            title: "20,000 offered a second, 1 client, 120 B",
            shape: traffic(1, Some(20_000), 120, 1),
            requirements: not_slower(),
        },
        Workload {
            name: "latency-64",
            title: "20,000 offered a second, 64 clients, 120 B",
            shape: traffic(64, Some(20_000), 120, 1),
            requirements: not_slower(),
        },
        Workload {
            name: "flood-1-1200",
            title: "1 client, flood, 1,200 B",
            shape: traffic(1, None, 1200, 16),
            requirements: per_busy_second(Must::ShareOf("flood-1", 0.8)),
        },
        Workload {
            name: "flood-8-1200",
            title: "8 clients, flood, 1,200 B",
            shape: traffic(8, None, 1200, 16),
            requirements: per_busy_second(Must::ShareOf("flood-8", 0.8)),
        },
        Workload {
            name: "burst-64-1200",
            title: "64 clients, bursts of 4, saturation, 1,200 B",
            shape: traffic(64, None, 1200, 4),
            requirements: per_busy_second(Must::ShareOf("burst-64", 0.8)),
        },
        Workload {
            name: "thin-1000-1200",
            title: "1,000 clients, one datagram at a time, 1,200 B",
            shape: traffic(1000, None, 1200, 1),
            requirements: per_busy_second(Must::ShareOf("thin-1000", 0.8)),
        },
        Workload {
            name: "allocate",
            title: "allocations a second (authenticated, one worker)",
            shape: Shape::Churn { transport: Transport::Udp, clients: 64 },
            requirements: vec![Requirement { metric: Metric::Allocations, must: Must::AtLeast(2.0) }],
        },
        Workload {
            name: "memory",
            title: "memory per idle allocation (of 10,000)",
            shape: Shape::Idle { allocations: 10_000 },
            requirements: vec![Requirement { metric: Metric::AllocationBytes, must: Must::AtMost(0.5) }],
        },
        stream("tcp-1", "TCP, 1 client, saturation, 120 B", saturating(Transport::Tcp, 1, 16, 256)),
        stream("tcp-8", "TCP, 8 clients, saturation, 120 B", saturating(Transport::Tcp, 8, 16, 128)),
        stream(
            "tcp-64",
            "TCP, 64 clients, bursts of 4, saturation, 120 B",
            saturating(Transport::Tcp, 64, 4, 64),
        ),
        stream("tcp-64-20k", "TCP, 64 clients, 20,000 offered a second, 120 B", paced(Transport::Tcp)),
        stream("tls-1", "TLS, 1 client, saturation, 120 B", saturating(Transport::Tls, 1, 16, 256)),
        stream("tls-8", "TLS, 8 clients, saturation, 120 B", saturating(Transport::Tls, 8, 16, 128)),
        stream(
            "tls-64",
            "TLS, 64 clients, bursts of 4, saturation, 120 B",
            saturating(Transport::Tls, 64, 4, 64),
        ),
        stream("tls-64-20k", "TLS, 64 clients, 20,000 offered a second, 120 B", paced(Transport::Tls)),
        Workload {
            name: "allocations-tls",
            title: "allocations a second over TLS, sessions resumed (authenticated, one worker)",
            shape: Shape::Churn { transport: Transport::Tls, clients: 64 },
            requirements: vec![Requirement { metric: Metric::Allocations, must: Must::AtLeast(1.5) }],
        },
    ]
}

/// The workloads of these names, or all if there are none; `Err` names one that does not exist. A name ending in
/// `*` stands for all that begin so.
pub(crate) fn chosen(names: &[String]) -> Result<Vec<Workload>, String> {
    choose(all(), names)
}

/// Those of `all` that `names` name; see [`chosen`].
pub(crate) fn choose<W: Named>(all: Vec<W>, names: &[String]) -> Result<Vec<W>, String> {
    let matches = |pattern: &String, name: &str| match pattern.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => pattern == name,
    };
    if let Some(unknown) = names.iter().find(|pattern| !all.iter().any(|w| matches(pattern, w.name()))) {
        let known: Vec<_> = all.iter().map(Named::name).collect();
        return Err(format!("no workload {unknown:?}; there are {}", known.join(", ")));
    }
    Ok(all
        .into_iter()
        .filter(|w| names.is_empty() || names.iter().any(|name| matches(name, w.name())))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(patterns: &[&str]) -> Result<Vec<&'static str>, String> {
        let patterns: Vec<String> = patterns.iter().map(ToString::to_string).collect();
        Ok(chosen(&patterns)?.iter().map(|workload| workload.name).collect())
    }

    #[test]
    fn no_name_chooses_all_and_each_name_is_unique() {
        let mut all = names(&[]).unwrap();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn a_star_chooses_by_beginning_and_order_is_the_tables() {
        assert_eq!(names(&["memory", "flood-1*"]).unwrap(), ["flood-1", "flood-1-1200", "memory"]);
        assert_eq!(names(&["flood-1"]).unwrap(), ["flood-1"]);
    }

    #[test]
    fn workloads_over_streams_stand_behind_those_over_udp() {
        let streams = ["tcp-1", "tcp-8", "tcp-64", "tcp-64-20k", "tls-1", "tls-8", "tls-64", "tls-64-20k"];
        assert_eq!(names(&["tls*", "tcp*"]).unwrap(), streams);
        assert!(all().is_sorted_by_key(|workload| workload.shape.transport().is_stream()));
    }

    #[test]
    fn an_unknown_name_is_told_with_the_known_ones() {
        let message = names(&["flod-1"]).unwrap_err();
        assert!(message.contains("flod-1") && message.contains("flood-1-1200"), "{message}");
    }

    #[test]
    fn a_share_refers_to_an_earlier_workload() {
        let all = all();
        for (index, workload) in all.iter().enumerate() {
            for requirement in &workload.requirements {
                if let Must::ShareOf(other, _) = requirement.must {
                    assert!(all[..index].iter().any(|w| w.name == other), "{}", workload.name);
                }
            }
        }
    }
}
