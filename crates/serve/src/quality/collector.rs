//! Makes the workers report quality.

use std::{
    net::SocketAddr,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::sync::{oneshot, watch};
use turnpike_api::quality::{FlowQuality, LegQuality, Quality};
use turnpike_relay::Relay;
use turnpike_turn::server::{AllocationId, Measured, MeasuredFlow, MeasuredLeg, QualityLevel};

const INTERVAL: Duration = Duration::from_secs(10);

/// Passes the reports of all workers to `report` until the relay has ended. While nothing is measured, the workers are not asked.
pub(crate) async fn collect(
    relay: Weak<Relay>,
    mut level: watch::Receiver<QualityLevel>,
    report: impl Fn(AllocationId, SocketAddr, &Quality) + Send + Sync + 'static,
) {
    let report = Arc::new(report);
    while level.wait_for(|level| *level != QualityLevel::Off).await.is_ok() {
        tokio::time::sleep(INTERVAL).await;
        let Some(workers) = relay.upgrade().map(|relay| relay.workers()) else { return };
        for worker in 0..workers {
            let mut next = Some(0);
            while let Some(slot) = next {
                let (answer, answered) = oneshot::channel();
                let Some(relay) = relay.upgrade() else { return };
                let report = Arc::clone(&report);
                relay.report_quality(
                    worker,
                    slot,
                    move |quality| report(quality.id, quality.client, &in_ms(&quality.measured)),
                    move |next| _ = answer.send(next),
                );
                drop(relay);
                next = answered.await.unwrap_or_default();
            }
        }
    }
}

fn in_ms(measured: &Measured) -> Quality {
    Quality { client: leg(&measured.client), peer: leg(&measured.peer) }
}

fn leg(leg: &MeasuredLeg) -> LegQuality {
    LegQuality {
        round_trip_ms: leg.round_trip_us.map(ms),
        uplink: leg.uplink.as_ref().map(flow),
        downlink: leg.downlink.as_ref().map(flow),
    }
}

fn flow(flow: &MeasuredFlow) -> FlowQuality {
    FlowQuality {
        expected: flow.expected,
        lost: flow.lost,
        reordered: flow.reordered,
        jitter_ms: ms(flow.jitter_us),
        longest_gap_ms: flow.longest_gap_us / 1000,
    }
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
fn ms(us: u64) -> f64 {
    us as f64 / 1000.0
}
