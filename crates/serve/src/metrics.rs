//! `/metrics`: the workers' counters as OpenMetrics text, built at each scrape from live snapshots.
//!
//! The number of time series is bounded: no label has a value that clients choose.

use std::{collections::BTreeMap, fmt, sync::Arc, time::UNIX_EPOCH};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, NoLabelSet},
    metrics::MetricType,
};
use turnpike_acme::AcmeStatus;
use turnpike_events::WebhookCounts;
use turnpike_process::{
    ControlStatus, MetricsPage,
    exposition::{
        self, MetricFamilies, ProcessMetrics, by_name, count, counter, counts, gauge, gauges, total,
    },
    kernel_path,
    log_queue::LogCounts,
};
use turnpike_relay::{
    CloseReason, DtlsDrop, DtlsEnd, DtlsFailure, HandOnEnd, HandedOnBy, HandshakeFailure, KernelSnapshot,
    ListenerCount, RelayState, WorkerSnapshot,
};
use turnpike_tls::KeyExchangeGroup;
use turnpike_turn::server::{Stats, stats::ALLOCATION_MS};

use crate::{
    certificates::CertificateState,
    ended_allocations::{EndedAllocations, LENGTHS, Totals},
    fleet::FleetCounts,
    geoip::{GeoIp, GeoIpCounts},
    quality::{self, JITTER_BOUNDS, LOSS_BOUNDS, QualityFigures, QualityMonitor, ROUND_TRIP_BOUNDS, Samples},
    store::{self, StoreInUse},
    usage::{UsageCounts, UsageFigures},
};

/// Shared figures outside the relay's workers.
pub(crate) struct MetricSources {
    pub(crate) certificates: Arc<CertificateState>,
    pub(crate) acme: Arc<AcmeStatus>,
    pub(crate) store: StoreInUse,
    pub(crate) ended: Arc<EndedAllocations>,
    pub(crate) usage: Option<Arc<UsageCounts>>,
    pub(crate) geoip: Arc<GeoIp>,
    pub(crate) quality: Arc<QualityMonitor>,
}

pub(crate) fn page(
    snapshots: impl Fn() -> ServerSnapshots + Send + Sync + 'static,
    sources: MetricSources,
    fleet: impl Fn() -> FleetCounts + Send + Sync + 'static,
    webhooks: impl Fn() -> Vec<WebhookCounts> + Send + Sync + 'static,
    status: Arc<ControlStatus>,
    log: Arc<LogCounts>,
) -> MetricsPage {
    exposition::page(
        move |common| {
            let (certificates, acme) = (Arc::clone(&sources.certificates), Arc::clone(&sources.acme));
            let store = store::shared(&sources.store).map(|store| store.counts());
            let (snapshots, ended) = (snapshots(), sources.ended.get());
            let (fleet, webhooks) = (fleet(), webhooks());
            let usage = sources.usage.as_ref().map(|usage| usage.get());
            let (geoip, quality) = (sources.geoip.counts(), sources.quality.figures());
            Scrape {
                snapshots,
                ended,
                certificates,
                acme,
                store,
                fleet,
                webhooks,
                usage,
                geoip,
                quality,
                common,
            }
        },
        status,
        log,
    )
}

#[derive(Clone, Debug, Default)]
pub(crate) struct ServerSnapshots {
    /// Snapshots of the workers, each with its worker number.
    pub(crate) workers: Vec<(String, WorkerSnapshot)>,
    pub(crate) realms: Vec<(Box<str>, usize)>,
    pub(crate) listeners: Vec<ListenerCount>,
    pub(crate) relays: Arc<[RelayState]>,
    /// Names in `peers.allow`, and true if the last lookup succeeded.
    pub(crate) peer_names: Vec<(String, bool)>,
    /// Counters of the kernel path, if it is in use.
    pub(crate) kernel: Option<KernelSnapshot>,
}

#[derive(Clone, Debug, Default)]
struct Scrape {
    snapshots: ServerSnapshots,
    ended: Totals,
    certificates: Arc<CertificateState>,
    acme: Arc<AcmeStatus>,
    /// Counters of the store; `None` without a store.
    store: Option<turnpike_stores::DirectoryCounts>,
    fleet: FleetCounts,
    webhooks: Vec<WebhookCounts>,
    /// Counters of the usage ledger; `None` without one.
    usage: Option<UsageFigures>,
    geoip: Option<GeoIpCounts>,
    /// `None` until the quality of an allocation has been measured.
    quality: Option<QualityFigures>,
    common: ProcessMetrics,
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let ServerSnapshots { workers, realms, listeners, relays, peer_names, kernel } = &self.snapshots;
        let mut page = ServerFamilies(MetricFamilies { encoder, label: "worker", snapshots: workers });
        page.0.gauge("allocations", "Current allocations.", |snapshot| snapshot.allocations)?;
        page.realms(realms)?;
        page.listeners(listeners)?;
        page.relays(relays)?;
        page.peer_names(peer_names)?;
        page.ended_allocations(&self.ended)?;
        page.turn()?;
        page.allocation_times()?;
        page.refused()?;
        page.received()?;
        page.sent()?;
        page.streams()?;
        page.peers()?;
        page.handed_on()?;
        page.dtls()?;
        if let Some(kernel) = kernel {
            page.kernel(kernel)?;
        }
        page.certificates(&self.certificates)?;
        page.acme(&self.acme)?;
        if let Some(store) = &self.store {
            page.store(store)?;
        }
        page.fleet(&self.fleet)?;
        if !self.webhooks.is_empty() {
            page.webhooks(&self.webhooks)?;
        }
        if let Some(usage) = &self.usage {
            page.usage(usage)?;
        }
        if let Some(geoip) = &self.geoip {
            page.geoip(geoip)?;
        }
        if let Some(quality) = &self.quality {
            page.quality(quality)?;
        }
        self.common.encode(&mut page.0.encoder)
    }
}

/// Counters of each worker. A row has the name, the help text, and the field of the worker's snapshot.
macro_rules! each {
    ($page:expr; $($name:literal $help:literal $($field:ident).+;)+) => {
        $($page.0.each($name, $help, |snapshot| snapshot.$($field).+)?;)+
    };
}

/// Counters of each worker by the variants of an enumeration. A row has the name, the help text, the label, the
/// enumeration, and the method of a part of the worker's snapshot that returns the count.
macro_rules! by_variant {
    ($page:expr; $($name:literal $help:literal $label:literal $kind:ident $part:ident.$count:ident;)+) => {
        $($page.0.by($name, $help, $label, |snapshot| {
            by_name(|kind: $kind| snapshot.$part.$count(kind))
        })?;)+
    };
}

struct ServerFamilies<'e, 's>(MetricFamilies<'e, 's, WorkerSnapshot>);

impl ServerFamilies<'_, '_> {
    fn realms(&mut self, realms: &[(Box<str>, usize)]) -> fmt::Result {
        let help = "Current allocations by realm; realms without allocations are omitted.";
        let counts = realms.iter().map(|(realm, count)| (realm, *count));
        gauges(&mut self.0.encoder, "realm_allocations", help, "realm", counts)
    }

    fn peer_names(&mut self, names: &[(String, bool)]) -> fmt::Result {
        let help = "1 if the last lookup of a name in peers.allow succeeded; 0 while only its last addresses are allowed.";
        let resolved = names.iter().map(|(name, is_resolved)| (name, u64::from(*is_resolved)));
        gauges(&mut self.0.encoder, "peer_name_resolved", help, "name", resolved)
    }

    fn relays(&mut self, relays: &[RelayState]) -> fmt::Result {
        let help = "1 while this machine has the relay address; 0 while it is absent and new allocations on it are refused.";
        let up = relays.iter().map(|state| (state.address.bind.to_string(), u64::from(state.is_up)));
        gauges(&mut self.0.encoder, "relay_address_up", help, "address", up)?;
        let help = "Time of the last change of relay_address_up, in Unix seconds.";
        let since = relays.iter().map(|state| {
            let since = state.since.duration_since(UNIX_EPOCH).unwrap_or_default();
            (state.address.bind.to_string(), since.as_secs())
        });
        gauges(&mut self.0.encoder, "relay_address_since_seconds", help, "address", since)
    }

    /// Sums the counters by transport and port, over all addresses and server names.
    fn listeners(&mut self, listeners: &[ListenerCount]) -> fmt::Result {
        let mut sums: BTreeMap<(&'static str, u16), u64> = BTreeMap::new();
        for ListenerCount { transport, address, allocations, .. } in listeners {
            *sums.entry(((*transport).into(), address.port())).or_default() += allocations;
        }
        let help = "Current allocations by transport and listener port.";
        let mut metric =
            self.0.encoder.encode_descriptor("listener_allocations", help, None, MetricType::Gauge)?;
        for ((transport, port), allocations) in &sums {
            let port = port.to_string();
            let labels = [("transport", *transport), ("port", &*port)];
            metric.encode_family(&labels)?.encode_gauge(allocations)?;
        }
        Ok(())
    }

    fn ended_allocations(&mut self, totals: &Totals) -> fmt::Result {
        let metrics = [
            ("ended_allocations", "Ended allocations by realm and listener."),
            ("ended_allocation_bytes", "Payload bytes of ended allocations by realm."),
            ("ended_allocation_seconds", "Duration of ended allocations."),
        ];
        self.ended_as(metrics, totals)?;
        // Families under the names that the previous version used.
        let metrics = [
            ("sessions_ended", "Old name of turnpike_ended_allocations; the next version removes it."),
            ("session_bytes", "Old name of turnpike_ended_allocation_bytes; the next version removes it."),
            (
                "session_seconds",
                "Old name of turnpike_ended_allocation_seconds; the next version removes it.",
            ),
        ];
        self.ended_as(metrics, totals)
    }

    #[expect(clippy::cast_precision_loss, reason = "the format defines a histogram's sum as a float")]
    fn ended_as(&mut self, metrics: [(&str, &str); 3], totals: &Totals) -> fmt::Result {
        let [(name, help), in_bytes, in_seconds] = metrics;
        let mut metric = counter(&mut self.0.encoder, name, help)?;
        for ((realm, transport, port), value) in &totals.ended {
            let port = port.to_string();
            count(&mut metric, &[("realm", &**realm), ("transport", *transport), ("port", &*port)], *value)?;
        }
        let (name, help) = in_bytes;
        let mut metric = counter(&mut self.0.encoder, name, help)?;
        for (realm, bytes) in &totals.bytes {
            for (direction, value) in ["to_peer", "to_client"].into_iter().zip(bytes) {
                count(&mut metric, &[("realm", &**realm), ("direction", direction)], *value)?;
            }
        }
        let bounds = LENGTHS.into_iter().map(f64::from).chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(totals.lengths).collect();
        let (name, help) = in_seconds;
        histogram(&mut self.0.encoder, name, help, totals.lived_ms as f64 / 1000.0, &buckets)
    }

    fn kernel(&mut self, kernel: &KernelSnapshot) -> fmt::Result {
        self.0.by(
            "kernel_datagrams",
            "Datagrams relayed by the kernel, updated every second; included in relayed_datagrams.",
            "direction",
            |snapshot| vec![("to_peer", snapshot.across[0].0), ("to_client", snapshot.across[1].0)],
        )?;
        self.0.by(
            "kernel_bytes",
            "Payload bytes relayed by the kernel; included in relayed_bytes.",
            "direction",
            |snapshot| vec![("to_peer", snapshot.across[0].1), ("to_client", snapshot.across[1].1)],
        )?;
        self.0.each(
            "kernel_channels_limited",
            "Channels relayed in user space because a bandwidth limit applies to their allocation.",
            |snapshot| snapshot.kernel_limited,
        )?;
        kernel_path::encode(&mut self.0.encoder, kernel)
    }

    /// Certificate files are labelled with their paths as in the configuration.
    fn certificates(&mut self, told: &CertificateState) -> fmt::Result {
        let validities = told.expiry.validities();
        let starts = validities.iter().map(|(file, (first, _))| (file, *first));
        let help = "Start of the validity of the certificates in use in Unix seconds, by file.";
        gauges(&mut self.0.encoder, "certificate_not_before_seconds", help, "file", starts)?;
        let ends = validities.iter().map(|(file, (_, last))| (file, *last));
        let help = "Expiry of the certificates in use in Unix seconds, by file.";
        gauges(&mut self.0.encoder, "certificate_not_after_seconds", help, "file", ends)?;
        counts(
            &mut self.0.encoder,
            "certificate_reloads",
            "Certificate reloads by result; after a failure the old certificates stay in use.",
            "result",
            told.reloads(),
        )
    }

    fn acme(&mut self, acme: &AcmeStatus) -> fmt::Result {
        let help = "Failed orders of a certificate since the last success, by name in tls.acme.";
        let failures = acme.names().into_iter().map(|(name, status)| (name, status.failures));
        gauges(&mut self.0.encoder, "acme_failures", help, "name", failures)?;
        counts(
            &mut self.0.encoder,
            "acme_orders",
            "Orders of certificates by result; after a failure the old certificate stays in use.",
            "result",
            acme.orders(),
        )
    }

    fn geoip(&mut self, geoip: &GeoIpCounts) -> fmt::Result {
        let help = "Build time of the GeoIP databases in use in Unix seconds, by file.";
        let built = geoip.built.iter().map(|(file, built)| (file, *built));
        gauges(&mut self.0.encoder, "geoip_built_seconds", help, "file", built)?;
        let help = "1 if the GeoIP databases in use are those in geoip.files, 0 if these files are unusable.";
        gauge(&mut self.0.encoder, "geoip_current", help, u64::from(geoip.is_current))?;
        let help = "GeoIP reloads by result; after a failure the old databases stay in use.";
        counts(&mut self.0.encoder, "geoip_reloads", help, "result", geoip.reloads)
    }

    fn quality(&mut self, figures: &QualityFigures) -> fmt::Result {
        let flows =
            quality::FLOWS.map(|(leg, direction)| [("leg", leg.name()), ("direction", direction.name())]);
        let help = "Lost RTP datagrams of an allocation, as a ratio, in windows of 100 datagrams or more.";
        self.samples("quality_loss_ratio", help, &LOSS_BOUNDS, flows.iter().zip(&figures.loss))?;
        let help = "Jitter that the leg adds to the RTP of an allocation, in the same windows.";
        self.samples("quality_jitter_seconds", help, &JITTER_BOUNDS, flows.iter().zip(&figures.jitter))?;
        let legs = quality::LEGS.map(|leg| [("leg", leg.name())]);
        let help = "Round trip between relay and end, per report of an allocation.";
        let samples = legs.iter().zip(&figures.round_trip);
        self.samples("quality_round_trip_seconds", help, &ROUND_TRIP_BOUNDS, samples)
    }

    /// Encodes a histogram for each set of labels.
    fn samples<'l, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        bounds: &[f64],
        series: impl Iterator<Item = (&'l [(&'static str, &'static str); N], &'l Samples)>,
    ) -> fmt::Result {
        let mut metric = self.0.encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (labels, Samples { buckets, sum }) in series {
            let bounds = bounds.iter().copied().chain([f64::INFINITY]);
            let counted: Vec<(f64, u64)> = bounds.zip(*buckets).collect();
            let count = buckets.iter().sum();
            metric.encode_family(labels)?.encode_histogram::<NoLabelSet>(*sum, count, &counted, None)?;
        }
        Ok(())
    }

    fn usage(&mut self, usage: &UsageFigures) -> fmt::Result {
        let help = "Batches of usage sent to the ledger, by result.";
        counts(&mut self.0.encoder, "usage_batches", help, "result", usage.batches)?;
        gauge(
            &mut self.0.encoder,
            "usage_unsaved_rows",
            "Rows of usage not yet in the ledger.",
            usage.unsaved,
        )?;
        let help = "Reports counted under (other), because there were too many users.";
        total(&mut self.0.encoder, "usage_summed_reports", help, usage.summed)
    }

    fn store(&mut self, store: &turnpike_stores::DirectoryCounts) -> fmt::Result {
        let is_up = u64::from(store.is_up);
        gauge(&mut self.0.encoder, "store_up", "1 while the store answers.", is_up)?;
        gauge(&mut self.0.encoder, "store_cached_users", "Store users cached in memory.", store.users)?;
        counts(
            &mut self.0.encoder,
            "store_answers",
            "User lookups answered without a query of their own, by source.",
            "from",
            store.answers,
        )?;
        counts(&mut self.0.encoder, "store_queries", "User queries by result.", "result", store.queries)?;
        let buckets: Vec<(f64, u64)> = store.query_times.to_vec();
        let help = "Duration of user queries, including those that timed out.";
        histogram(&mut self.0.encoder, "store_query_seconds", help, store.query_seconds, &buckets)
    }

    /// Webhooks are labelled with the hosts in their URLs, whose other parts may be secret.
    fn webhooks(&mut self, webhooks: &[WebhookCounts]) -> fmt::Result {
        let mut hosts: BTreeMap<&str, [u64; 4]> = BTreeMap::new();
        for WebhookCounts { host, delivered, lost, failures, waiting } in webhooks {
            let sums = hosts.entry(host).or_default();
            sums.iter_mut().zip([delivered, lost, failures, waiting]).for_each(|(sum, count)| *sum += count);
        }
        let of = |index: usize| hosts.iter().map(move |(host, counts)| (*host, counts[index]));
        let encoder = &mut self.0.encoder;
        let help = "Events delivered to webhooks, by host.";
        counts(encoder, "webhook_events", help, "host", of(0))?;
        let help = "Events dropped because a webhook's spool or queue was full.";
        counts(encoder, "webhook_events_lost", help, "host", of(1))?;
        let help = "Requests to webhooks that failed and are repeated.";
        counts(encoder, "webhook_failures", help, "host", of(2))?;
        let help = "Events that wait for delivery to a webhook.";
        gauges(encoder, "webhook_waiting", help, "host", of(3))
    }

    fn fleet(&mut self, fleet: &FleetCounts) -> fmt::Result {
        gauge(&mut self.0.encoder, "bans", "Bans in effect on users and client addresses.", fleet.bans)?;
        let Some(node) = &fleet.node else { return Ok(()) };
        let quotas = &node.quotas;
        for (name, help, value) in [
            (
                "fleet_up",
                "1 while the fleet store answers and this node is a member, 0 while it is alone.",
                u64::from(node.is_up),
            ),
            (
                "fleet_recovering",
                "1 while the fleet store is recovering and grants no shared quota.",
                u64::from(node.is_recovering),
            ),
            (
                "fleet_node_number",
                "Number of this node in CONNECTION-IDs and mobility tickets; 0 if it has none.",
                u64::from(node.number),
            ),
            (
                "fleet_cordoned",
                "1 while an administrator keeps new clients off this node.",
                u64::from(node.is_cordoned),
            ),
            ("fleet_key_ring_version", "Version of the keys shared by all nodes.", node.ring),
            (
                "fleet_quota_buckets",
                "Shared quotas in use on this node: users, realms and the total.",
                quotas.buckets,
            ),
            ("fleet_quota_held", "Shared quota held by this node, in allocations.", quotas.held),
            ("fleet_quota_waiting", "Shared quotas not yet reported to the store.", quotas.waiting),
        ] {
            gauge(&mut self.0.encoder, name, help, value)?;
        }
        let help = "Known nodes of the fleet by state.";
        gauges(&mut self.0.encoder, "fleet_nodes", help, "state", node.nodes)?;
        let refusals = ["user", "realm", "total"].into_iter().zip(quotas.refused);
        let help = "Allocations refused by limits of the whole fleet, by limit.";
        counts(&mut self.0.encoder, "fleet_refusals", help, "limit", refusals)?;
        let help = "Clients redirected to another node or to this node's own address, by reason.";
        counts(&mut self.0.encoder, "fleet_redirects", help, "reason", node.redirects)?;
        let help = "Clients that repeated their request after a redirect and were served here.";
        total(&mut self.0.encoder, "fleet_returns", help, node.returned)?;
        let help = "Quota exchanges with the store by result.";
        counts(&mut self.0.encoder, "fleet_exchanges", help, "result", node.exchanges)?;
        let help = "Total duration of quota exchanges with the store.";
        total(&mut self.0.encoder, "fleet_exchange_seconds", help, node.exchange_seconds)?;
        let help = "Messages and quota levels from other nodes, by kind; unreadable ones come from a node with a different fleet.secret or clock, and repeated ones are ignored.";
        counts(&mut self.0.encoder, "fleet_heard", help, "kind", node.heard)?;
        let help = "Allocation status lines lost because the store was unreachable or slow.";
        total(&mut self.0.encoder, "fleet_status_lines_lost", help, node.lines_lost)
    }

    /// Counters of the state machines, which define the families and labels. The format requires all
    /// samples of a family to be contiguous.
    fn turn(&mut self) -> fmt::Result {
        let mut families: Vec<(&'static str, Vec<TurnSample<'_>>)> = Vec::new();
        for (worker, snapshot) in self.0.snapshots {
            for (family, label, value) in snapshot.turn.counters() {
                let sample = (worker.as_str(), label, value);
                match families.iter_mut().find(|(name, _)| *name == family) {
                    Some((_, samples)) => samples.push(sample),
                    None => families.push((family, vec![sample])),
                }
            }
        }
        for (family, samples) in &families {
            let mut metric = counter(&mut self.0.encoder, family, turn_help(family).unwrap_or_default())?;
            for (worker, label, value) in samples {
                let labels: Vec<_> = [("worker", *worker)].into_iter().chain(*label).collect();
                count(&mut metric, &labels, *value)?;
            }
        }
        Ok(())
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "the format defines a histogram's bounds and sum as floats"
    )]
    fn allocation_times(&mut self) -> fmt::Result {
        let mut all = Stats::default();
        self.0.snapshots.iter().for_each(|(_, snapshot)| all.merge(&snapshot.turn));
        let bounds = ALLOCATION_MS.map(|ms| ms as f64 / 1000.0).into_iter().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(all.allocation_times).collect();
        let help = "Time from request to allocation, including store lookups.";
        histogram(
            &mut self.0.encoder,
            "allocation_seconds",
            help,
            all.allocation_ms as f64 / 1000.0,
            &buckets,
        )
    }

    fn refused(&mut self) -> fmt::Result {
        each!(self;
            "ports_exhausted" "Allocations refused because all relay ports were in use." ports_exhausted;
            "files_exhausted" "Allocations refused because file descriptors ran out." files_exhausted;
            "ttl_expired" "Datagrams dropped because their TTL or hop limit expired." ttl_expired;
        );
        Ok(())
    }

    fn received(&mut self) -> fmt::Result {
        each!(self;
            "wakeups" "Wake-ups of the worker." wakeups;
            "pauses" "Times the worker paused to batch more work per wake-up (server.coalesce_us)." pauses;
            "rx_calls" "Receive calls." rx.calls;
            "rx_would_block" "Receive calls that found nothing." rx.would_block;
            "rx_buffers" "Buffers received; a GRO super-packet counts as one." rx.buffers;
            "rx_datagrams" "Datagrams received." rx.datagrams;
            "rx_bytes" "Bytes received." rx.bytes;
            "rx_kernel_drops" "Datagrams dropped by the kernel because a receive buffer was full." rx.kernel_drops;
            "rx_truncated" "Buffers dropped because they were too long." rx.truncated;
        );
        self.batches()
    }

    fn sent(&mut self) -> fmt::Result {
        each!(self;
            "tx_calls" "Send calls." tx.calls;
            "tx_messages" "Messages sent; a GSO super-packet counts as one." tx.messages;
            "tx_super_packets" "GSO super-packets of two or more datagrams sent." tx.super_packets;
            "tx_datagrams" "Datagrams sent." tx.datagrams;
            "tx_bytes" "Bytes sent." tx.bytes;
        );
        self.0.by("tx_dropped", "Datagrams not sent, by reason.", "reason", |snapshot| {
            vec![
                ("would_block", snapshot.tx.would_block),
                ("too_big", snapshot.tx.too_big),
                ("refused", snapshot.tx.refused),
            ]
        })?;
        each!(self;
            "tx_step_downs" "Sockets and routes that fell back from GSO." tx.step_downs;
        );
        Ok(())
    }

    fn streams(&mut self) -> fmt::Result {
        self.0.gauge("connections", "Current client connections.", |snapshot| snapshot.streams.open)?;
        each!(self;
            "connections_accepted" "Connections accepted." streams.accepted;
            "connections_adopted" "Connections taken over from another worker." streams.adopted;
            "connections_plain" "Connections without TLS." streams.plain;
        );
        by_variant!(self;
            "connections_closed" "Connections that ended, by reason." "reason" CloseReason streams.closed;
        );
        self.0.by("tls_handshakes", "TLS handshakes finished, by kind.", "kind", |snapshot| {
            vec![("full", snapshot.streams.handshakes_full), ("resumed", snapshot.streams.handshakes_resumed)]
        })?;
        by_variant!(self;
            "tls_handshakes_by_group" "TLS handshakes finished with a key exchange, by group." "group" KeyExchangeGroup streams.by_group;
            "tls_handshakes_failed" "TLS handshakes that failed, by reason." "reason" HandshakeFailure streams.failed;
        );
        each!(self;
            "accept_pauses" "Pauses in accepting connections because file descriptors ran out." streams.accept_pauses;
            "stream_dropped" "Datagrams dropped because a client read too slowly." streams.queue_drops;
            "stream_dropped_bytes" "Bytes dropped because a client read too slowly, including headers." streams.queue_dropped_bytes;
            "stream_reads" "Read calls on connections." streams.reads;
            "stream_read_bytes" "Bytes read from connections, before decryption." streams.read_bytes;
            "stream_received" "Messages received on connections." streams.received;
            "stream_sent" "Messages sent to clients on connections." streams.sent;
            "stream_writes" "Send calls on connections." streams.writes;
        );
        Ok(())
    }

    fn dtls(&mut self) -> fmt::Result {
        let mut metric = self.0.encoder.encode_descriptor(
            "dtls_associations",
            "Current DTLS associations by stage.",
            None,
            MetricType::Gauge,
        )?;
        for (worker, snapshot) in self.0.snapshots {
            for (stage, count) in [("half_open", snapshot.dtls.half_open), ("open", snapshot.dtls.open)] {
                metric
                    .encode_family(&[("worker", worker.as_str()), ("stage", stage)])?
                    .encode_gauge(&count)?;
            }
        }
        each!(self;
            "dtls_cookies" "Cookies sent to DTLS clients." dtls.cookies;
        );
        self.0.by("dtls_handshakes", "DTLS handshakes finished, by version.", "version", |snapshot| {
            vec![("1.2", snapshot.dtls.handshakes_1_2), ("1.3", snapshot.dtls.handshakes_1_3)]
        })?;
        by_variant!(self;
            "dtls_handshakes_failed" "DTLS handshakes that failed, by reason." "reason" DtlsFailure dtls.failed;
            "dtls_ended" "DTLS associations that ended, by reason." "reason" DtlsEnd dtls.ended;
            "dtls_dropped" "Datagrams dropped on DTLS listeners, by reason." "reason" DtlsDrop dtls.dropped;
        );
        each!(self;
            "dtls_datagrams" "Datagrams received for DTLS." dtls.datagrams;
            "dtls_received" "Messages decrypted from DTLS clients." dtls.received;
            "dtls_sent" "Messages encrypted for DTLS clients." dtls.sent;
        );
        Ok(())
    }

    fn peers(&mut self) -> fmt::Result {
        self.0.gauge(
            "peer_connections_open",
            "Connections to peers, open or being established.",
            |snapshot| snapshot.peers.open,
        )?;
        each!(self;
            "peer_stalls" "Stalls of connections to peers because the receiver read too slowly." peers.stalls;
            "peer_spliced_bytes" "Bytes moved by splice on connections to peers." peers.spliced_bytes;
            "peer_accept_pauses" "Pauses in accepting connections on relayed addresses because file descriptors ran out." peers.accept_pauses;
            "handoffs_lost" "Messages lost between workers." handoffs_lost;
        );
        Ok(())
    }

    fn handed_on(&mut self) -> fmt::Result {
        self.0.gauge("handed_on_open", "Current connections handed on to a web server.", |snapshot| {
            snapshot.handed_on.open
        })?;
        by_variant!(self;
            "handed_on" "Connections for a web server, by kind." "kind" HandedOnBy handed_on.taken;
            "handed_on_ended" "Connections for a web server that ended, by reason." "reason" HandOnEnd handed_on.ended;
        );
        self.0.by("handed_on_bytes", "Bytes of handed-on connections, by source.", "source", |snapshot| {
            vec![("client", snapshot.handed_on.from_clients), ("server", snapshot.handed_on.from_servers)]
        })?;
        Ok(())
    }

    /// Histogram of batch sizes. Bucket i of the snapshot counts calls with 2^i to 2^(i+1) - 1 datagrams.
    #[expect(clippy::cast_precision_loss, reason = "the format defines a histogram's sum as a float")]
    fn batches(&mut self) -> fmt::Result {
        let mut metric = self.0.encoder.encode_descriptor(
            "rx_batch_datagrams",
            "Datagrams per receive call.",
            None,
            MetricType::Histogram,
        )?;
        for (worker, snapshot) in self.0.snapshots {
            let batch = &snapshot.rx.batch;
            let last = batch.len() - 1;
            let buckets: Vec<(f64, u64)> = batch
                .iter()
                .enumerate()
                .map(|(index, calls)| {
                    let bound =
                        if index == last { f64::INFINITY } else { ((1_u64 << (index + 1)) - 1) as f64 };
                    (bound, *calls)
                })
                .collect();
            let count = batch.iter().sum();
            metric.encode_family(&[("worker", worker.as_str())])?.encode_histogram::<NoLabelSet>(
                snapshot.rx.datagrams as f64,
                count,
                &buckets,
                None,
            )?;
        }
        Ok(())
    }
}

fn histogram(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    sum: f64,
    buckets: &[(f64, u64)],
) -> fmt::Result {
    let count = buckets.iter().map(|(_, count)| count).sum();
    encoder
        .encode_descriptor(name, help, None, MetricType::Histogram)?
        .encode_histogram::<NoLabelSet>(sum, count, buckets, None)
}

/// Worker number, label, and value of the counter.
type TurnSample<'a> = (&'a str, Option<(&'static str, &'static str)>, u64);

fn turn_help(family: &str) -> Option<&'static str> {
    Some(match family {
        "relayed_datagrams" => "Payload datagrams relayed.",
        "relayed_bytes" => "Payload bytes relayed.",
        "icmp_relayed" => "ICMP errors passed on as Data indications.",
        "nonces_issued" => "Nonces issued with 401 and 438.",
        "retransmits_answered" => "Retransmitted requests answered from memory.",
        "allocations_opened" => "Allocations created.",
        "allocations_closed" => "Ended allocations by reason.",
        "drain_refusals" => "Allocations refused because the server was draining.",
        "loop_refusals" => {
            "Requests from this server's own relayed addresses to create or move an allocation."
        }
        "limit_refusals" => "Requests refused because a limit was reached, by limit.",
        "bandwidth_pauses" => "Pauses in reading streams because of a bandwidth limit, by limit.",
        "requests" => "Well-formed requests, by method.",
        "successes" => "Success responses, by method.",
        "error_responses" => "Error responses, by STUN error code.",
        "dropped_datagrams" => "Datagrams dropped, by reason.",
        "peer_refusals" => "Requests refused because of their peer (403), by the rule that applied.",
        "credentials_refused" => "Credentials refused, by reason.",
        "connection_bytes" => "Bytes relayed on connections to peers (RFC 6062).",
        "peer_connections" => "Events on connections to peers (RFC 6062).",
        "peer_connection_refusals" => "Refused peer connections and ConnectionBinds by reason.",
        "mobility" => "Events of mobile allocations (RFC 8016).",
        "redirects" => "Requests redirected to another server (300 Try Alternate).",
        "ban_refusals" => "Requests refused because their user or client is banned.",
        "network_refusals" => "Allocations refused because of the client's country or autonomous system.",
        "nat_discovery_requests" => "Binding requests for NAT discovery (RFC 5780) by attribute.",
        _ => return None,
    })
}

pub(crate) fn numbered(workers: Vec<WorkerSnapshot>) -> Vec<(String, WorkerSnapshot)> {
    workers.into_iter().enumerate().map(|(number, snapshot)| (number.to_string(), snapshot)).collect()
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, time::Duration};

    use turnpike_relay::RelayAddress;
    use turnpike_turn::server::Transport;

    use super::*;
    use turnpike_process::exposition::encode;

    use crate::fleet::NodeCounts;

    fn quality_figures() -> QualityFigures {
        let mut figures = QualityFigures::default();
        figures.loss[1] = Samples { buckets: [2, 0, 0, 0, 1, 0, 0, 0, 0], sum: 0.03125 };
        figures.jitter[2] = Samples { buckets: [0, 0, 0, 0, 0, 0, 0, 0, 1], sum: 0.25 };
        figures.round_trip[0] = Samples { buckets: [0, 0, 4, 0, 0, 0, 0, 0, 0], sum: 0.125 };
        figures
    }

    fn scrape() -> Scrape {
        let mut first = WorkerSnapshot { allocations: 3, wakeups: 11, ..WorkerSnapshot::default() };
        first.turn.to_peer_datagrams = 7;
        first.turn.to_client_bytes = 900;
        first.turn.allocation_times[1] = 2;
        first.rx.datagrams = 40;
        first.rx.batch[0] = 1;
        first.rx.batch[3] = 4;
        first.rx.batch[11] = 2;
        first.tx.too_big = 5;
        first.across = [(70, 7000), (90, 9000)];
        first.kernel_limited = 8;
        let listener = |transport, server_name: Option<&str>| ListenerCount {
            transport,
            address: ([192, 0, 2, 1], 3478).into(),
            server_name: server_name.map(str::to_owned),
            allocations: 2,
        };
        let listeners = vec![
            listener(Transport::Udp, None),
            listener(Transport::Tls, None),
            listener(Transport::Tls, Some("a.example")),
        ];
        let relay = RelayState {
            address: RelayAddress { bind: [192, 0, 2, 1].into(), external: None },
            is_up: true,
            since: UNIX_EPOCH + Duration::from_secs(1_000),
        };
        let snapshots = ServerSnapshots {
            workers: numbered(vec![first, WorkerSnapshot::default()]),
            realms: vec![("example.org".into(), 3)],
            listeners,
            relays: Arc::from([relay]),
            peer_names: vec![("sfu.internal".to_owned(), true)],
            kernel: Some(KernelSnapshot { flows: 6, refused: 2, ..KernelSnapshot::default() }),
        };
        Scrape {
            snapshots,
            ended: Totals {
                ended: [(("example.org".into(), "udp", 3478), 4)].into(),
                bytes: [("example.org".into(), [500, 600])].into(),
                lengths: [1, 0, 2, 0, 0, 0, 0, 0, 1],
                lived_ms: 90_000_500,
            },
            certificates: Arc::default(),
            acme: Arc::default(),
            quality: Some(quality_figures()),
            geoip: Some(GeoIpCounts {
                built: vec![("country.mmdb".to_owned(), 1_800_000_000)],
                is_current: true,
                reloads: [("loaded", 2), ("failed", 1)],
            }),
            usage: Some(UsageFigures { batches: [("saved", 6), ("failed", 1)], unsaved: 4, summed: 3 }),
            store: Some(turnpike_stores::DirectoryCounts {
                is_up: true,
                users: 5,
                answers: ["cache", "negative", "stale", "joined", "unavailable"].map(|from| (from, 1)),
                queries: ["found", "none", "failed", "timeout"].map(|result| (result, 2)),
                query_times: std::array::from_fn(|index| {
                    (f64::from(u32::try_from(index).expect("twelve at most")), 1)
                }),
                query_seconds: 2.5,
            }),
            fleet: FleetCounts {
                bans: 9,
                node: Some(NodeCounts {
                    is_up: true,
                    nodes: [("serving", 3), ("draining", 1), ("silent", 0)],
                    redirects: ["load", "full", "draining", "own_address", "owner"].map(|reason| (reason, 4)),
                    exchanges: [("done", 8), ("failed", 0)],
                    exchange_seconds: 0.25,
                    heard: [("message", 1), ("level", 2), ("unreadable", 0), ("repeated", 1)],
                    returned: 6,
                    ..NodeCounts::default()
                }),
            },
            webhooks: ["a.example", "a.example", "b.example"]
                .map(|host| WebhookCounts {
                    host: host.to_owned(),
                    delivered: 5,
                    lost: 1,
                    failures: 2,
                    waiting: 3,
                })
                .into(),
            common: ProcessMetrics {
                log_lost: 2,
                reloads: [("loaded", 0), ("failed", 0)],
                upgrades: [("done", 0), ("failed", 0)],
                ..ProcessMetrics::default()
            },
        }
    }

    /// Parses strictly: every sample belongs to the last declared family and is unique.
    fn parse(text: &str) -> HashMap<String, f64> {
        let mut samples = HashMap::new();
        let mut family = String::new();
        let mut lines = text.lines().peekable();
        while let Some(line) = lines.next() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                family = rest.split(' ').next().expect("a name").to_owned();
            } else if line == "# EOF" {
                assert!(lines.peek().is_none(), "there is text after # EOF");
                return samples;
            } else if !line.starts_with('#') {
                let (series, value) = line.rsplit_once(' ').expect("a sample");
                assert!(
                    series.starts_with(&family) && series.starts_with("turnpike_"),
                    "{series} in {family}"
                );
                let value = value.parse().expect("a number");
                assert!(samples.insert(series.to_owned(), value).is_none(), "{series} twice");
            }
        }
        panic!("no # EOF");
    }

    #[test]
    fn each_family_has_a_distinct_help_text() {
        for (family, ..) in WorkerSnapshot::default().turn.counters() {
            assert!(turn_help(family).is_some(), "{family} has no help");
        }
        let text = encode(scrape()).expect("encodes");
        let mut helps = HashMap::new();
        for line in text.lines().filter_map(|line| line.strip_prefix("# HELP ")) {
            let (family, help) = line.split_once(' ').expect("a name and a help text");
            assert!(help.len() > 10 && help.ends_with('.'), "{family}: {help:?}");
            assert_eq!(helps.insert(help, family), None, "{family} has the same help text as another family");
        }
        let types = text.lines().filter(|line| line.starts_with("# TYPE ")).count();
        assert_eq!(helps.len(), types);
    }

    #[test]
    fn certificate_expiry_and_reloads_are_exposed() {
        let mut scrape = scrape();
        scrape.certificates.expiry.put([("turn.pem".to_owned(), (0, 1_900_000_000))]);
        scrape.common.reloads[0].1 = 1;
        let samples = parse(&encode(scrape).expect("encodes"));
        for (series, value) in [
            ("turnpike_certificate_not_after_seconds{file=\"turn.pem\"}", 1_900_000_000.0),
            ("turnpike_certificate_reloads_total{result=\"loaded\"}", 0.0),
            ("turnpike_certificate_reloads_total{result=\"failed\"}", 0.0),
            ("turnpike_config_reloads_total{result=\"loaded\"}", 1.0),
            ("turnpike_config_reloads_total{result=\"failed\"}", 0.0),
        ] {
            assert_eq!(samples.get(series), Some(&value), "{series} in {samples:#?}");
        }
    }

    #[test]
    fn all_counters_are_exposed_per_worker() {
        let samples = parse(&encode(scrape()).expect("encodes"));
        for (series, value) in [
            ("turnpike_allocations{worker=\"0\"}", 3.0),
            ("turnpike_allocations{worker=\"1\"}", 0.0),
            ("turnpike_realm_allocations{realm=\"example.org\"}", 3.0),
            ("turnpike_listener_allocations{transport=\"udp\",port=\"3478\"}", 2.0),
            ("turnpike_listener_allocations{transport=\"tls\",port=\"3478\"}", 4.0),
            ("turnpike_relay_address_up{address=\"192.0.2.1\"}", 1.0),
            ("turnpike_relay_address_since_seconds{address=\"192.0.2.1\"}", 1_000.0),
            ("turnpike_wakeups_total{worker=\"0\"}", 11.0),
            ("turnpike_relayed_datagrams_total{worker=\"0\",direction=\"to_peer\"}", 7.0),
            ("turnpike_relayed_bytes_total{worker=\"0\",direction=\"to_client\"}", 900.0),
            ("turnpike_tx_dropped_total{worker=\"0\",reason=\"too_big\"}", 5.0),
            ("turnpike_log_lines_lost_total", 2.0),
            ("turnpike_ended_allocations_total{realm=\"example.org\",transport=\"udp\",port=\"3478\"}", 4.0),
            ("turnpike_ended_allocation_bytes_total{realm=\"example.org\",direction=\"to_client\"}", 600.0),
            ("turnpike_ended_allocation_seconds_bucket{le=\"60.0\"}", 3.0),
            ("turnpike_ended_allocation_seconds_sum", 90_000.5),
            ("turnpike_allocation_seconds_bucket{le=\"0.005\"}", 2.0),
            ("turnpike_ended_allocation_seconds_count", 4.0),
            ("turnpike_usage_batches_total{result=\"saved\"}", 6.0),
            ("turnpike_geoip_built_seconds{file=\"country.mmdb\"}", 1_800_000_000.0),
            ("turnpike_quality_loss_ratio_bucket{leg=\"client\",direction=\"downlink\",le=\"0.02\"}", 2.0),
            ("turnpike_quality_loss_ratio_sum{leg=\"client\",direction=\"downlink\"}", 0.03125),
            ("turnpike_quality_jitter_seconds_bucket{leg=\"peer\",direction=\"uplink\",le=\"0.1\"}", 0.0),
            ("turnpike_quality_jitter_seconds_count{leg=\"peer\",direction=\"uplink\"}", 1.0),
            ("turnpike_quality_round_trip_seconds_bucket{leg=\"client\",le=\"0.05\"}", 4.0),
            ("turnpike_geoip_current", 1.0),
            ("turnpike_geoip_reloads_total{result=\"failed\"}", 1.0),
            ("turnpike_usage_unsaved_rows", 4.0),
            ("turnpike_usage_summed_reports_total", 3.0),
            ("turnpike_store_up", 1.0),
            ("turnpike_store_cached_users", 5.0),
            ("turnpike_draining", 0.0),
            ("turnpike_bans", 9.0),
            ("turnpike_fleet_up", 1.0),
            ("turnpike_fleet_recovering", 0.0),
            ("turnpike_fleet_nodes{state=\"serving\"}", 3.0),
            ("turnpike_fleet_redirects_total{reason=\"own_address\"}", 4.0),
            ("turnpike_fleet_returns_total", 6.0),
            ("turnpike_fleet_heard_total{kind=\"repeated\"}", 1.0),
            ("turnpike_fleet_exchanges_total{result=\"done\"}", 8.0),
            ("turnpike_fleet_exchange_seconds_total", 0.25),
            ("turnpike_kernel_datagrams_total{worker=\"0\",direction=\"to_peer\"}", 70.0),
            ("turnpike_kernel_bytes_total{worker=\"0\",direction=\"to_client\"}", 9000.0),
            ("turnpike_kernel_passes_total{reason=\"super_packet\"}", 0.0),
            ("turnpike_kernel_flows", 6.0),
            ("turnpike_kernel_flows_refused_total", 2.0),
            ("turnpike_kernel_channels_limited_total{worker=\"0\"}", 8.0),
            ("turnpike_webhook_events_total{host=\"a.example\"}", 10.0),
            ("turnpike_webhook_events_lost_total{host=\"b.example\"}", 1.0),
            ("turnpike_webhook_failures_total{host=\"a.example\"}", 4.0),
            ("turnpike_webhook_waiting{host=\"b.example\"}", 3.0),
            ("turnpike_bandwidth_pauses_total{worker=\"0\",limit=\"realm\"}", 0.0),
        ] {
            let found = samples.iter().find(|(name, _)| same_series(name, series));
            assert_eq!(found.map(|(_, value)| *value), Some(value), "{series} in {samples:#?}");
        }
    }

    #[test]
    fn the_batch_histogram_is_cumulative_and_ends_at_infinity() {
        let samples = parse(&encode(scrape()).expect("encodes"));
        let bucket = |bound: &str| {
            let series = format!("turnpike_rx_batch_datagrams_bucket{{le=\"{bound}\",worker=\"0\"}}");
            samples.iter().find(|(name, _)| same_series(name, &series)).map(|(_, value)| *value)
        };
        assert_eq!(bucket("1.0"), Some(1.0));
        assert_eq!(bucket("7.0"), Some(1.0));
        assert_eq!(bucket("15.0"), Some(5.0));
        assert_eq!(bucket("+Inf"), Some(7.0));
    }

    fn same_series(a: &str, b: &str) -> bool {
        let parts = |series: &str| {
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let mut labels: Vec<String> =
                labels.trim_end_matches('}').split(',').map(str::to_owned).collect();
            labels.sort();
            (name.to_owned(), labels)
        };
        parts(a) == parts(b)
    }
}
