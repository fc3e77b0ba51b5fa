//! What is measured of a forwarder, and what each figure must reach against its peers.

use super::super::{rounds::Named, workload::choose};

/// A kind of load and the figures drawn from it.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    /// As it stands in the table.
    pub(crate) title: &'static str,
    pub(crate) shape: Shape,
    /// The headline first.
    pub(crate) figures: Vec<Figure>,
}

/// What the generator does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Bytes from the client to the server, as fast as they go.
    Bulk { streams: u32 },
    /// 32 bytes there, 32 bytes back, one at a time on each connection.
    Exchange { connections: u32 },
    /// Connect, a byte there, a byte back, close; the client closes first, and `reset`s where told so.
    Connect { at_once: u32, reset: bool },
    /// 120-byte datagrams at saturation, echoed by the server; `burst` of a flow go back to back.
    Datagrams { flows: u32, burst: u32 },
    /// This many connections opened and left alone.
    Idle { connections: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Tcp,
    Udp,
}

impl Shape {
    pub(crate) fn transport(self) -> Transport {
        match self {
            Self::Datagrams { .. } => Transport::Udp,
            _ => Transport::Tcp,
        }
    }

    /// Whether the path without a forwarder is measured beside them, and a forwarder that never sleeps: what the hop costs,
    /// and how much of that is waking up.
    pub(crate) fn has_references(self) -> bool {
        self == Self::Exchange { connections: 1 }
    }
}

impl Transport {
    /// As it begins a rule.
    pub(crate) fn scheme(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// A figure of a workload and its requirements; without any it stands there for information.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) metric: Metric,
    pub(crate) musts: Vec<Must>,
}

/// A figure of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Metric {
    /// Seconds that the forwarder's core was busy, for 10^9 bytes delivered.
    CoreSecondsPerGb,
    /// Seconds of the forwarder's process, for 10^9 bytes delivered.
    ProcessSecondsPerGb,
    /// 10^9 bits delivered a second.
    Gbits,
    /// Transactions or connections a second.
    Rate,
    /// Median time of a transaction, microseconds.
    P50,
    /// Datagrams delivered per second that the forwarder's core was busy.
    PerBusySecond,
    /// The same per second of the forwarder's process.
    PerProcessSecond,
    /// Resident bytes of the forwarder per idle connection.
    ConnectionBytes,
}

impl Metric {
    /// What it is, in a table.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::CoreSecondsPerGb => "core-seconds per GB",
            Self::ProcessSecondsPerGb => "process seconds per GB",
            Self::Gbits => "Gbit/s",
            Self::Rate => "a second",
            Self::P50 => "p50",
            Self::PerBusySecond => "datagrams per core-second",
            Self::PerProcessSecond => "datagrams per process second",
            Self::ConnectionBytes => "resident bytes per connection",
        }
    }

    /// A value of it.
    pub(crate) fn show(self, value: f64) -> String {
        match self {
            Self::CoreSecondsPerGb | Self::ProcessSecondsPerGb => format!("{value:.3} s"),
            Self::Gbits => format!("{value:.1}"),
            Self::Rate if value >= 1e5 => format!("{:.0}k", value / 1e3),
            Self::Rate => format!("{:.1}k", value / 1e3),
            Self::P50 => format!("{value:.0} us"),
            Self::PerBusySecond | Self::PerProcessSecond => format!("{:.1}k", value / 1e3),
            Self::ConnectionBytes => format!("{value:.0} B"),
        }
    }

    pub(crate) fn less_is_better(self) -> bool {
        match self {
            Self::CoreSecondsPerGb | Self::ProcessSecondsPerGb | Self::P50 | Self::ConnectionBytes => true,
            Self::Gbits | Self::Rate | Self::PerBusySecond | Self::PerProcessSecond => false,
        }
    }
}

/// A bound on the ratio ours / theirs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Must {
    pub(crate) against: Against,
    pub(crate) bound: Bound,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Against {
    /// The peer with the best median.
    Best,
    Every,
    Peer(&'static str),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
    Below(f64),
}

impl Bound {
    pub(crate) fn holds(self, ratio: f64) -> bool {
        match self {
            Self::AtLeast(bound) => ratio >= bound,
            Self::AtMost(bound) => ratio <= bound,
            Self::Below(bound) => ratio < bound,
        }
    }

    pub(crate) fn show(self) -> String {
        match self {
            Self::AtLeast(bound) => format!(">= {} x", short(bound)),
            Self::AtMost(bound) => format!("<= {} x", short(bound)),
            Self::Below(bound) => format!("< {} x", short(bound)),
        }
    }
}

/// A sixth is 0.167, and 0.9 is 0.9.
fn short(bound: f64) -> f64 {
    (bound * 1e3).round() / 1e3
}

impl Named for Workload {
    fn name(&self) -> &str {
        self.name
    }

    fn title(&self) -> &str {
        self.title
    }
}

/// All workloads, in the order of the table.
pub(crate) fn all() -> Vec<Workload> {
    let must = |against, bound| Must { against, bound };
    let figure = |metric, musts: &[Must]| Figure { metric, musts: musts.to_vec() };
    let bulk = |cost_of_best| {
        let oxidinetd = Against::Peer("oxidinetd");
        vec![
            figure(
                Metric::CoreSecondsPerGb,
                &[
                    must(oxidinetd, Bound::AtMost(1.0 / 6.0)),
                    must(Against::Best, Bound::AtMost(cost_of_best)),
                ],
            ),
            figure(Metric::ProcessSecondsPerGb, &[]),
            figure(
                Metric::Gbits,
                &[must(oxidinetd, Bound::AtLeast(4.0)), must(Against::Best, Bound::AtLeast(1.0))],
            ),
        ]
    };
    let datagrams = |bound| {
        vec![
            figure(Metric::PerBusySecond, &[must(Against::Best, Bound::AtLeast(bound))]),
            figure(Metric::PerProcessSecond, &[]),
        ]
    };
    vec![
        Workload {
            name: "bulk-1",
            title: "TCP bulk, 1 stream",
            shape: Shape::Bulk { streams: 1 },
            figures: bulk(1.0),
        },
        Workload {
            name: "bulk-8",
            title: "TCP bulk, 8 streams",
            shape: Shape::Bulk { streams: 8 },
            figures: bulk(0.9),
        },
        Workload {
            name: "rr-64",
            title: "request/response 32 B, 64 connections",
            shape: Shape::Exchange { connections: 64 },
            figures: vec![figure(Metric::Rate, &[must(Against::Best, Bound::AtLeast(1.05))])],
        },
        Workload {
            name: "rr-1",
            title: "request/response 32 B, 1 connection",
            shape: Shape::Exchange { connections: 1 },
            figures: vec![figure(Metric::P50, &[must(Against::Best, Bound::AtMost(1.0))])],
        },
        Workload {
            name: "connect-32",
            title: "connect, 1 byte, close; 32 at once",
            shape: Shape::Connect { at_once: 32, reset: false },
            figures: vec![figure(
                Metric::Rate,
                &[
                    must(Against::Peer("oxidinetd"), Bound::AtLeast(2.7)),
                    must(Against::Peer("haproxy"), Bound::AtLeast(1.0)),
                ],
            )],
        },
        Workload {
            name: "connect-32-reset",
            title: "connect, 1 byte, reset; 32 at once",
            shape: Shape::Connect { at_once: 32, reset: true },
            figures: vec![figure(Metric::Rate, &[])],
        },
        Workload {
            name: "udp-1",
            title: "UDP 120 B, 1 flow, saturation",
            shape: Shape::Datagrams { flows: 1, burst: 16 },
            figures: datagrams(5.0),
        },
        Workload {
            name: "udp-64",
            title: "UDP 120 B, 64 flows, saturation",
            shape: Shape::Datagrams { flows: 64, burst: 4 },
            figures: datagrams(2.0),
        },
        Workload {
            name: "idle-5000",
            title: "memory, 5,000 idle connections",
            shape: Shape::Idle { connections: 5000 },
            figures: vec![figure(Metric::ConnectionBytes, &[must(Against::Every, Bound::Below(1.0))])],
        },
    ]
}

/// Those of `--workload`, or all.
pub(crate) fn chosen(names: &[String]) -> Result<Vec<Workload>, String> {
    choose(all(), names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_chooses_by_beginning() {
        let chosen = chosen(&["bulk*".to_owned(), "rr-1".to_owned()]).unwrap();
        assert_eq!(chosen.iter().map(|w| w.name).collect::<Vec<_>>(), ["bulk-1", "bulk-8", "rr-1"]);
    }

    #[test]
    fn each_name_is_unique_and_only_the_lone_request_has_references() {
        let all = all();
        for (index, workload) in all.iter().enumerate() {
            assert!(all[..index].iter().all(|other| other.name != workload.name), "{}", workload.name);
            assert_eq!(workload.shape.has_references(), workload.name == "rr-1");
        }
    }

    #[test]
    fn a_bound_holds_up_to_itself_unless_it_is_strict() {
        assert!(Bound::AtLeast(2.0).holds(2.0) && !Bound::AtLeast(2.0).holds(1.99));
        assert!(Bound::AtMost(0.9).holds(0.9) && !Bound::AtMost(0.9).holds(0.91));
        assert!(!Bound::Below(1.0).holds(1.0));
        assert_eq!(Bound::AtMost(1.0 / 6.0).show(), "<= 0.167 x");
    }
}
