//! NAT behaviour discovery (RFC 5780). The server may send the response to a Binding request from another
//! address, to another port of the client, or with padding, so that the client learns how its NAT maps and
//! filters.
//!
//! Each of these features lets an unauthenticated request trigger packets from another address or large
//! packets. So they are off by default, a response has at most as much padding as its request, and no
//! response goes to a well-known port. Requests that use these features are rate-limited per network and in
//! total. So are responses with OTHER-ADDRESS, because it makes a response longer than twice its request.

use std::{
    hash::BuildHasher as _,
    net::{IpAddr, SocketAddr},
};

use foldhash::fast::RandomState;
use smallvec::SmallVec;
use turnpike_rates::Rate;
use turnpike_wire::stun::kind;

use crate::{
    server::{
        BadRequest, Client, Disposition, DropReason, Fault, ListenerId, Policy, PrefixLengths,
        RequestRefusal, Server,
        request::{Method, Request, response::Envelope},
    },
    time::Now,
};

/// Maximum padding in bytes: an Ethernet MTU, so that padded responses exceed it (RFC 5780 section 7.6).
pub const MAX_PADDING: usize = 1500;

/// Lower ports belong to services that might interpret a response.
pub const MIN_RESPONSE_PORT: u16 = 1024;

/// NAT discovery for one address family, with a listener for each pair of address and port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NatDiscovery {
    pub addresses: [IpAddr; 2],
    /// External addresses to announce if the server is behind a one-to-one NAT.
    pub external: [Option<IpAddr>; 2],
    pub ports: [u16; 2],
    /// `listeners[i][j]` sends from `addresses[i]` and `ports[j]`.
    pub listeners: [[ListenerId; 2]; 2],
}

/// Requests per second on each worker; those above the limit are dropped and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscoveryLimits {
    /// Limit for one source (IPv4 /24 or IPv6 /56), with a burst worth 5 seconds. Default 10 (RFC 5780
    /// section 5).
    pub per_source: u32,
    /// Limit for all sources together, with a burst worth one second. Default 1000.
    pub total: u32,
}

impl Default for DiscoveryLimits {
    fn default() -> Self {
        Self { per_source: 10, total: 1000 }
    }
}

impl NatDiscovery {
    fn position(&self, local: SocketAddr) -> Option<Position> {
        let address = self.addresses.iter().position(|ip| *ip == local.ip())?;
        let port = self.ports.iter().position(|port| *port == local.port())?;
        Some(Position { address, port })
    }

    fn told(&self, at: Position) -> SocketAddr {
        let ip = self.external[at.address].unwrap_or(self.addresses[at.address]);
        SocketAddr::new(ip, self.ports[at.port])
    }
}

#[derive(Clone, Copy)]
struct Position {
    address: usize,
    port: usize,
}

struct DiscoveryRequest<'a> {
    change_address: bool,
    change_port: bool,
    padding: Option<&'a [u8]>,
    response_port: Option<u16>,
}

impl<'a> DiscoveryRequest<'a> {
    fn read(request: &Request<'a>) -> Result<Self, BadRequest> {
        let bad = |attribute, fault| BadRequest { attribute, fault };
        let changes = changes(request).ok_or(bad(kind::CHANGE_REQUEST, Fault::Malformed))?;
        let (change_address, change_port) = changes;
        // Section 7.5: 16 bits and 2 bytes of padding, which some clients include in the attribute length.
        let response_port = match request.get(kind::RESPONSE_PORT) {
            None => None,
            Some([high, low] | [high, low, _, _]) => Some(u16::from_be_bytes([*high, *low])),
            Some(_) => return Err(bad(kind::RESPONSE_PORT, Fault::Malformed)),
        };
        let padding = request.get(kind::PADDING);
        if response_port.is_some() && padding.is_some() {
            return Err(bad(kind::RESPONSE_PORT, Fault::Beside(kind::PADDING)));
        }
        if response_port.is_some_and(|port| port < MIN_RESPONSE_PORT) {
            return Err(bad(kind::RESPONSE_PORT, Fault::OutOfRange));
        }
        Ok(Self { change_address, change_port, padding, response_port })
    }

    fn is_plain(&self) -> bool {
        !self.change_address && !self.change_port && self.padding.is_none() && self.response_port.is_none()
    }
}

fn changes(request: &Request<'_>) -> Option<(bool, bool)> {
    // Section 7.2: 32 bits, of which A (0x04) and B (0x02) are used.
    match request.get(kind::CHANGE_REQUEST) {
        None => Some((false, false)),
        Some([_, _, _, flags]) => Some((flags & 0x04 != 0, flags & 0x02 != 0)),
        Some(_) => None,
    }
}

/// Accepts a CHANGE-REQUEST without flags: clients send it because some servers require it.
pub(crate) fn unknown_in_plain_binding(request: &Request<'_>) -> SmallVec<[u16; 4]> {
    request.unknown(|kind| match kind {
        kind::CHANGE_REQUEST => changes(request) == Some((false, false)),
        kind => is_of_ice(kind),
    })
}

/// A STUN server ignores ICE attributes (RFC 8445 section 7.1).
fn is_of_ice(kind: u16) -> bool {
    matches!(kind, kind::PRIORITY | kind::USE_CANDIDATE)
}

fn is_of_discovery(kind: u16) -> bool {
    matches!(kind, kind::CHANGE_REQUEST | kind::PADDING | kind::RESPONSE_PORT)
}

impl<P: Policy> Server<P> {
    /// Returns `None` on listeners without NAT discovery, where its attributes get 420 (section 6).
    pub(crate) fn discover(
        &mut self,
        now: Now,
        client: &Client,
        request: &Request<'_>,
        envelope: &Envelope,
    ) -> Option<Disposition> {
        let here = |discovery: &NatDiscovery| Some((*discovery, discovery.position(client.local)?));
        let (discovery, position) = self.config.nat_discovery.iter().find_map(here)?;
        // A stream or another socket may share the address but cannot respond from the other addresses.
        if discovery.listeners[position.address][position.port] != client.listener {
            return None;
        }
        let unknown = request.unknown(|kind| is_of_discovery(kind) || is_of_ice(kind));
        if !unknown.is_empty() {
            let why = RequestRefusal::UnknownAttribute(unknown[0]);
            self.tell_stranger_refused(now, client, ("", request.method), 420, why);
            return Some(self.unknown_attributes(envelope, &unknown));
        }
        let wanted = match DiscoveryRequest::read(request) {
            Ok(wanted) => wanted,
            Err(bad) => {
                let why = RequestRefusal::BadRequest(bad);
                self.tell_stranger_refused(now, client, ("", request.method), 400, why);
                self.write_failure(envelope, 400);
                return Some(Disposition::Reply);
            }
        };
        let limits = self.config.discovery_limits;
        let source = client.address.ip();
        let told = if wanted.is_plain() {
            self.hint_rate.admit(now.ms, source, limits).is_ok()
        } else if let Err(reason) = self.discovery_rate.admit(now.ms, source, limits) {
            return Some(Disposition::Drop(reason));
        } else {
            true
        };
        self.data.stats.discovery(
            wanted.change_address || wanted.change_port,
            wanted.padding.is_some(),
            wanted.response_port.is_some(),
        );

        let Position { address, port } = position;
        let from = Position {
            address: address ^ usize::from(wanted.change_address),
            port: port ^ usize::from(wanted.change_port),
        };
        let other = Position { address: address ^ 1, port: port ^ 1 };
        self.data.stats.successes[Method::Binding as usize] += 1;
        let mut response = envelope.success(&mut self.reply);
        // Section 6.1 puts four addresses into every response: 68 bytes over IPv4, 3.4 times a plain Binding
        // request. Addresses after the first are included only while the response stays within twice the
        // request's length. OTHER-ADDRESS is an exception, at a bounded rate: it announces discovery in the
        // response to a plain request (sections 4.3 and 4.4).
        response.xor_address(kind::XOR_MAPPED_ADDRESS, client.address);
        // Section 6.1 requires padding as long as the MTU. Here it is at most as long as the request's
        // padding: otherwise, 24 bytes from a forged source address would cause a response of 1,500 bytes.
        let padding = wanted.padding.map(|asked| &[0; MAX_PADDING][..asked.len().min(MAX_PADDING)]);
        let padding_len = padding.map_or(0, |padding| 4 + padding.len().next_multiple_of(4));
        let room = 2 * request.len_without_fingerprint() - padding_len;
        for (kind, address) in [
            (kind::OTHER_ADDRESS, discovery.told(other)),
            (kind::RESPONSE_ORIGIN, discovery.told(from)),
            (kind::MAPPED_ADDRESS, client.address),
        ] {
            let needed = kind == kind::OTHER_ADDRESS && told;
            if needed || response.len() + address_len(address) <= room {
                response.address(kind, address);
            }
        }
        if let Some(padding) = padding {
            response.attribute(kind::PADDING, padding);
        }
        response.finish(envelope.fingerprint);
        Some(Disposition::ReplyFrom(Client {
            listener: discovery.listeners[from.address][from.port],
            address: SocketAddr::new(
                client.address.ip(),
                wanted.response_port.unwrap_or(client.address.port()),
            ),
            local: SocketAddr::new(discovery.addresses[from.address], discovery.ports[from.port]),
        }))
    }
}

const fn address_len(address: SocketAddr) -> usize {
    if address.is_ipv4() { 12 } else { 24 }
}

/// Number of buckets, which bounds memory. Networks whose hashes collide share one rate.
const BUCKETS: usize = 4096;
/// Burst, in seconds' worth of requests.
const SOURCE_BURST: u64 = 5;

/// Each bucket stores the time at which it will be full again, in microseconds.
#[derive(Default)]
pub(crate) struct DiscoveryRate {
    /// Allocated on the first request.
    sources: Vec<u64>,
    total: u64,
    hasher: RandomState,
}

impl DiscoveryRate {
    fn admit(&mut self, now_ms: u64, source: IpAddr, limits: DiscoveryLimits) -> Result<(), DropReason> {
        if self.sources.is_empty() {
            self.sources = vec![0; BUCKETS];
        }
        let now = now_ms.saturating_mul(1000);
        #[expect(clippy::cast_possible_truncation, reason = "reduced to the number of buckets")]
        let bucket =
            &mut self.sources[self.hasher.hash_one(PrefixLengths::SITE.of(source)) as usize % BUCKETS];
        let of_source = Rate::per_second(limits.per_source, SOURCE_BURST).spend(*bucket, now);
        let of_source = of_source.ok_or(DropReason::DiscoverySourceLimit)?;
        let of_total = Rate::per_second(limits.total, 1).spend(self.total, now);
        let of_total = of_total.ok_or(DropReason::DiscoveryTotalLimit)?;
        (*bucket, self.total) = (of_source, of_total);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const LIMITS: DiscoveryLimits = DiscoveryLimits { per_source: 10, total: 100 };

    fn admitted(rate: &mut DiscoveryRate, now_ms: u64, sources: &[&str], tries: usize) -> usize {
        let mut sources = sources.iter().map(|ip| ip.parse().unwrap()).cycle();
        (0..tries).filter(|_| rate.admit(now_ms, sources.next().unwrap(), LIMITS).is_ok()).count()
    }

    #[test]
    fn a_network_gets_a_burst_of_five_seconds_then_its_rate() {
        let mut rate = DiscoveryRate::default();
        assert_eq!(admitted(&mut rate, 7000, &["192.0.2.1", "192.0.2.200"], 1000), 50);
        assert_eq!(admitted(&mut rate, 7099, &["192.0.2.9"], 10), 0);
        assert_eq!(admitted(&mut rate, 8000, &["192.0.2.9"], 100), 10);
        assert_eq!(admitted(&mut rate, 8000, &["198.51.100.1"], 10), 10, "another network");
    }

    #[test]
    fn all_networks_share_a_total_rate() {
        let mut rate = DiscoveryRate::default();
        let many: Vec<String> = (0..250).map(|n| format!("10.1.{n}.1")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(admitted(&mut rate, 0, &many, 250), 100);
        assert_eq!(admitted(&mut rate, 500, &many, 250), 50);
        assert_eq!(
            rate.admit(500, "10.2.0.1".parse().unwrap(), LIMITS),
            Err(DropReason::DiscoveryTotalLimit)
        );
    }

    #[test]
    fn a_very_high_rate_still_limits() {
        let mut full_at = 0;
        let mut admitted = 0;
        while admitted <= 1_000_000
            && let Some(later) = Rate::per_second(u32::MAX, 1).spend(full_at, 0)
        {
            (full_at, admitted) = (later, admitted + 1);
        }
        assert_eq!(admitted, 1_000_000);
    }

    #[test]
    fn memory_is_bounded_for_any_number_of_sources() {
        let mut rate = DiscoveryRate::default();
        for n in 0..100_000_u32 {
            let _ = rate.admit(u64::from(n), Ipv4Addr::from_bits(n << 8).into(), LIMITS);
        }
        assert_eq!(rate.sources.len(), BUCKETS);
    }
}
