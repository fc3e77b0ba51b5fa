//! Quality of the media that an allocation relays, measured on arrival: RTP headers, STUN transactions, the spin bit of QUIC, and (if configured)
//! unencrypted RTCP receiver reports. Payload is not kept.
//!
//! ```text
//!  client ── uplink, round trip ──▶ relay ── round trip, downlink ──▶ peers         way ToPeer; ToClient is the mirror image
//! ```
//!
//! A meter sits next to the bandwidth limits of its allocation, like a [`super::tap`]: without one, the packet path does no work for it. If
//! the kernel relays some of its flows, it counts their streams ([`kernel`]), and passes on STUN. A meter holds at most four streams per direction, and grows only when a stream
//! begins. It ends with its worker: after a move or an upgrade, measurement begins again.

mod ends;
mod kernel;
mod measured;
mod quic;
mod round_trip;
mod rtcp;
mod rtp;

use std::net::SocketAddr;

use crate::server::{AllocationId, Link, Policy, Server, Way};
use ends::{opposite, sender};
pub use kernel::{KERNEL_STREAMS, KernelMeter, KernelStream, KernelStreams, KnownStream};
pub use measured::{Measured, MeasuredFlow, MeasuredLeg};
use quic::Spin;
use round_trip::{RoundTrip, Transactions};
use rtp::Flow;

/// Depth of measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QualityLevel {
    #[default]
    Off,
    /// Headers of RTP and QUIC, and STUN transactions.
    Headers,
    /// RTCP receiver reports too.
    On,
}

/// Quality of an allocation with traffic since its previous report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QualityReport {
    pub id: AllocationId,
    pub client: SocketAddr,
    pub link: Link,
    pub measured: Measured,
}

/// Measures one allocation.
#[derive(Debug)]
pub(crate) struct Meter {
    reads_rtcp: bool,
    has_news: bool,
    /// Indexed by way, like the following two.
    flows: [Flow; 2],
    transactions: Transactions,
    spin: Spin,
    /// Client first, then peers.
    round_trips: [RoundTrip; 2],
}

impl Meter {
    /// `None` if nothing is measured.
    pub(crate) fn new(level: QualityLevel) -> Option<Box<Self>> {
        (level != QualityLevel::Off).then(|| {
            Box::new(Self {
                reads_rtcp: level == QualityLevel::On,
                has_news: false,
                flows: Default::default(),
                transactions: Transactions::default(),
                spin: Spin::default(),
                round_trips: Default::default(),
            })
        })
    }

    /// Follows a change of the level.
    pub(crate) fn at_level(before: Option<Box<Self>>, level: QualityLevel) -> Option<Box<Self>> {
        match before {
            Some(mut meter) if level != QualityLevel::Off => {
                meter.reads_rtcp = level == QualityLevel::On;
                Some(meter)
            }
            _ => Self::new(level),
        }
    }

    /// Takes the payload of a relayed datagram. The first byte shows its protocol (RFC 7983, RFC 9443).
    #[inline(never)]
    pub(crate) fn relayed(&mut self, way: Way, at_us: u64, payload: &[u8]) {
        self.has_news = true;
        let Some((first, _)) = payload.split_first() else { return };
        match *first {
            0..=1 => {
                if let Some((end, sample)) = self.transactions.relayed(way, at_us, payload) {
                    self.round_trips[end].add(sample);
                }
            }
            64..=127 | 192..=255 => {
                if let Some((end, sample)) = self.spin.relayed(way, at_us, payload) {
                    self.round_trips[end].add(sample);
                }
            }
            128..=191 => match payload.get(1) {
                Some(192..=223) if self.reads_rtcp => {
                    let (flows, other) = (&mut self.flows, opposite(way));
                    flows[other as usize].add_counted();
                    rtcp::blocks(payload, |block| flows[other as usize].reported(at_us, block));
                }
                Some(192..=223) | None => {}
                Some(_) => self.flows[way as usize].arrived(at_us, payload),
            },
            _ => {}
        }
    }

    pub(crate) fn measured(&self) -> Measured {
        let [to_peer, to_client] = &self.flows;
        let leg = |end: usize, from: &Flow, to: &Flow| MeasuredLeg {
            round_trip_us: self.round_trips[end].smoothed(),
            uplink: from.measured(),
            downlink: to.measured_behind(),
        };
        Measured {
            client: leg(sender(Way::ToPeer), to_peer, to_client),
            peer: leg(sender(Way::ToClient), to_client, to_peer),
        }
    }
}

impl<P: Policy> Server<P> {
    /// Sets the microseconds by which the current time exceeds [`crate::time::Now::ms`]; jitter needs them.
    #[inline]
    pub fn set_microseconds(&mut self, beyond_ms: u64) {
        self.data.beyond_ms_us = beyond_ms;
    }

    /// Reports the quality of the allocation in a slot; `None` if it is not measured, or has relayed nothing since its previous report.
    pub fn report_quality(&mut self, slot: u32) -> Option<QualityReport> {
        let (_, entry, state) = self.allocation(slot)?;
        let (client, link) = (entry.client.address, entry.link);
        let meter = entry.limits.as_mut()?.meter.as_mut()?;
        KernelMeter(meter).add_counted();
        std::mem::take(&mut meter.has_news).then(|| QualityReport {
            id: state.id,
            client,
            link,
            measured: meter.measured(),
        })
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod kernel_tests;
#[cfg(test)]
mod tests;
