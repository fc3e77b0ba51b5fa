//! Random sequences of valid and nearly valid steps, reproducible from a seed.

use std::time::Duration;

use rand::{Rng as _, SeedableRng as _, seq::IndexedRandom as _};
use rand_chacha::ChaCha8Rng;
use turnpike_client::ClientTransport;
use turnpike_wire::stun::{FAMILY_IPV4, FAMILY_IPV6, kind, method};

use super::{
    Kind,
    step::{Auth, Client, Dialect, Field, Peer, Request, Sequence, Step},
};

pub(super) const UDP: u8 = 17;
/// Lifetimes in seconds of nonces (in the test configuration), of permissions, and of channels and
/// allocations.
const LIFETIMES: [u64; 3] = [60, 300, 600];
/// Minimum number of seconds between a step and the expiry of anything, because servers check for expiry at different times.
const MARGIN: u64 = 12;

/// Generates the sequence with this number. Each client uses one of `transports`.
pub(super) fn sequence(seed: u64, number: u64, kind: Kind, transports: &[ClientTransport]) -> Sequence {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(number);
    let mut generator = Generator { random, kind, believed: Vec::new() };
    generator.sequence(transports)
}

pub(super) struct Generator {
    pub(super) random: ChaCha8Rng,
    kind: Kind,
    /// Expected state of each client if all its requests succeeded.
    believed: Vec<Believed>,
}

#[derive(Clone, Default)]
struct Believed {
    has_allocation: bool,
    permitted: Vec<Peer>,
    channels: Vec<(u16, Peer)>,
}

impl Generator {
    fn sequence(&mut self, transports: &[ClientTransport]) -> Sequence {
        let clients = match self.kind {
            Kind::Requests => self.random.random_range(1..=2),
            Kind::Time => 1,
            Kind::Overload => 8,
            Kind::Shared => self.random.random_range(2..=4),
        };
        let steps = match self.kind {
            Kind::Requests => self.random.random_range(3..=12),
            Kind::Time => self.random.random_range(4..=9),
            Kind::Overload => self.random.random_range(8..=24),
            Kind::Shared => self.random.random_range(6..=20),
        };
        self.believed = vec![Believed::default(); clients];
        let mixed = self.kind == Kind::Shared || self.kind == Kind::Overload;
        let first = self.pick(transports);
        let transports = (0..clients).map(|_| if mixed { self.pick(transports) } else { first }).collect();
        let dialect = self.pick(&[Dialect::Classic, Dialect::Sha256, Dialect::Userhash]);
        let steps = match self.kind {
            Kind::Time => self.with_waits(steps),
            _ => (0..steps).map(|_| self.step()).collect(),
        };
        Sequence { kind: self.kind, transports, dialect, steps }
    }

    /// Steps between waits, none close to the expiry of an earlier step's state.
    fn with_waits(&mut self, count: usize) -> Vec<Step> {
        let mut steps = vec![Step::Request(Client(0), self.allocate(0))];
        let mut times = vec![0];
        let mut now = 0;
        for _ in 0..count {
            let waits: Vec<u64> = [40, 75, 130, 220, 280, 320, 400, 580, 620]
                .into_iter()
                .filter(|wait| now + wait <= 700 && is_clear(&times, now + wait))
                .collect();
            if let Some(wait) =
                waits.choose(&mut self.random).copied().filter(|_| self.random.random_bool(0.5))
            {
                now += wait;
                steps.push(Step::Wait(Duration::from_secs(wait)));
            }
            times.push(now);
            steps.push(self.step());
        }
        steps
    }

    fn step(&mut self) -> Step {
        let client = Client(self.random.random_range(0..self.believed.len()));
        let nearly = match self.kind {
            Kind::Requests => 0.35,
            Kind::Time => 0.05,
            Kind::Overload => 0.1,
            Kind::Shared => 0.1,
        };
        match self.random.random_range(0..100) {
            0..=2 => Step::Again(client),
            3 => {
                self.believed[client.0] = Believed::default();
                Step::Leave(client)
            }
            4..=23 if self.believed[client.0].has_allocation => self.data(client),
            24 => self.data(client),
            _ => {
                let mut request = self.plausible(client.0);
                if self.random.random_bool(nearly) {
                    self.spoil(&mut request);
                } else {
                    self.believe(client.0, &request);
                }
                Step::Request(client, request)
            }
        }
    }

    fn data(&mut self, client: Client) -> Step {
        let length = self.length();
        let believed = &self.believed[client.0];
        let bound = believed.channels.choose(&mut self.random).copied();
        let permitted = believed.permitted.choose(&mut self.random).copied();
        match self.random.random_range(0..3) {
            0 => {
                let peer = permitted.filter(|_| self.random.random_bool(0.8));
                Step::Peer(peer.unwrap_or_else(|| self.peer()), client, length)
            }
            1 => {
                let number = bound.map(|(number, _)| number).filter(|_| self.random.random_bool(0.85));
                Step::Channel(client, number.unwrap_or_else(|| self.channel()), length)
            }
            _ => {
                let peer = permitted.filter(|_| self.random.random_bool(0.8)).unwrap_or_else(|| self.peer());
                let mut request =
                    Request::new(method::SEND, vec![Field::Peer(peer), Field::Data(length)], Auth::None);
                request.indication = true;
                if self.random.random_bool(0.1) {
                    request.fields.push(Field::Value(kind::DONT_FRAGMENT, Vec::new()));
                }
                if self.random.random_bool(0.1) {
                    self.spoil_fields(&mut request);
                }
                Step::Request(client, request)
            }
        }
    }

    fn plausible(&mut self, client: usize) -> Request {
        let has_allocation = self.believed[client].has_allocation;
        let mut request = match self.random.random_range(0..20) {
            0 => Request::new(method::BINDING, Vec::new(), Auth::None),
            _ if !has_allocation => self.allocate(client),
            1 => self.allocate(client),
            2..=8 => self.permit(),
            9..=15 => self.bind(client),
            _ => self.refresh(),
        };
        request.fingerprint = self.random.random_bool(0.1);
        if self.random.random_bool(0.1) {
            request.fields.push(Field::Value(kind::SOFTWARE, b"differential".to_vec()));
        }
        request
    }

    fn allocate(&mut self, client: usize) -> Request {
        let mut fields = vec![Field::Value(kind::REQUESTED_TRANSPORT, vec![UDP, 0, 0, 0])];
        match self.random.random_range(0..20) {
            0..=2 => fields.push(Field::number(kind::LIFETIME, self.pick_lifetime())),
            3 => fields.push(Field::Value(kind::EVEN_PORT, vec![0x80])),
            4 => fields.push(Field::Value(kind::EVEN_PORT, vec![0])),
            5 => fields.push(Field::Token),
            6 => fields.push(Field::Value(kind::DONT_FRAGMENT, Vec::new())),
            7 => fields.push(family(kind::REQUESTED_ADDRESS_FAMILY, FAMILY_IPV4)),
            8 | 9 => fields.push(family(kind::REQUESTED_ADDRESS_FAMILY, FAMILY_IPV6)),
            10 | 11 => fields.push(family(kind::ADDITIONAL_ADDRESS_FAMILY, FAMILY_IPV6)),
            _ => {}
        }
        // Every other client uses the second user in sequences of kind `Overload`.
        let auth = if self.kind == Kind::Overload && client % 2 == 1 { Auth::OtherUser } else { Auth::Good };
        Request::new(method::ALLOCATE, fields, auth)
    }

    fn permit(&mut self) -> Request {
        let count = self.pick(&[1, 1, 1, 2, 3]);
        let fields = (0..count).map(|_| Field::Peer(self.peer())).collect();
        Request::new(method::CREATE_PERMISSION, fields, Auth::Good)
    }

    fn bind(&mut self, client: usize) -> Request {
        let old = self.believed[client].channels.choose(&mut self.random).copied();
        let (number, peer) =
            old.filter(|_| self.random.random_bool(0.3)).unwrap_or_else(|| (self.channel(), self.peer()));
        let [high, low] = number.to_be_bytes();
        let fields = vec![Field::Value(kind::CHANNEL_NUMBER, vec![high, low, 0, 0]), Field::Peer(peer)];
        Request::new(method::CHANNEL_BIND, fields, Auth::Good)
    }

    fn refresh(&mut self) -> Request {
        let mut fields = Vec::new();
        match self.random.random_range(0..10) {
            0..=2 => {}
            3 | 4 => fields.push(Field::number(kind::LIFETIME, 0)),
            5 => fields.push(family(kind::REQUESTED_ADDRESS_FAMILY, self.pick(&[FAMILY_IPV4, FAMILY_IPV6]))),
            _ => fields.push(Field::number(kind::LIFETIME, self.pick_lifetime())),
        }
        Request::new(method::REFRESH, fields, Auth::Good)
    }

    fn believe(&mut self, client: usize, request: &Request) {
        let believed = &mut self.believed[client];
        let peers = || {
            request.fields.iter().filter_map(|field| match field {
                Field::Peer(peer) => Some(*peer),
                _ => None,
            })
        };
        match request.method {
            method::ALLOCATE if !believed.has_allocation => {
                *believed = Believed { has_allocation: true, ..Believed::default() };
            }
            method::REFRESH if request.fields.contains(&Field::number(kind::LIFETIME, 0)) => {
                *believed = Believed::default();
            }
            method::CREATE_PERMISSION => believed.permitted.extend(peers()),
            method::CHANNEL_BIND => {
                if let Some(Field::Value(_, number)) = request.fields.first()
                    && let [high, low, ..] = number[..]
                    && let Some(peer) = peers().next()
                {
                    believed.channels.push((u16::from_be_bytes([high, low]), peer));
                    believed.permitted.push(peer);
                }
            }
            _ => {}
        }
    }

    pub(super) fn pick<T: Copy>(&mut self, among: &[T]) -> T {
        among[self.random.random_range(0..among.len())]
    }

    fn pick_lifetime(&mut self) -> u32 {
        self.pick(&[1, 300, 600, 601, 1_200, 3_600, 3_601, 86_400, u32::MAX])
    }

    fn length(&mut self) -> u16 {
        self.pick(&[0, 1, 3, 4, 5, 100, 101, 1_200])
    }

    fn channel(&mut self) -> u16 {
        self.pick(&[0x4000, 0x4001, 0x4002, 0x4000, 0x4001, 0x4FFF, 0x3FFF, 0x5000, 0x7FFF, 0x8000])
    }

    fn peer(&mut self) -> Peer {
        let other = Peer::Relay(Client(self.random.random_range(0..self.believed.len())));
        match self.kind {
            Kind::Shared => self.pick(&[Peer::Near, Peer::Sibling, Peer::Far, Peer::Far, Peer::Six, other]),
            _ => self.pick(&[
                Peer::Near,
                Peer::Near,
                Peer::Near,
                Peer::Sibling,
                Peer::Sibling,
                Peer::Far,
                Peer::Far,
                Peer::Six,
                Peer::Denied,
                other,
            ]),
        }
    }
}

pub(super) fn family(kind: u16, family: u8) -> Field {
    Field::Value(kind, vec![family, 0, 0, 0])
}

fn is_clear(times: &[u64], now: u64) -> bool {
    times.iter().all(|then| LIFETIMES.iter().all(|lifetime| (now - then).abs_diff(*lifetime) > MARGIN))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn of(kind: Kind) -> Vec<Sequence> {
        (0..300).map(|number| sequence(7, number, kind, &ClientTransport::ALL)).collect()
    }

    #[test]
    fn equal_seeds_give_equal_sequences() {
        assert_eq!(of(Kind::Requests), of(Kind::Requests));
        assert_ne!(
            sequence(7, 1, Kind::Requests, &ClientTransport::ALL),
            sequence(8, 1, Kind::Requests, &ClientTransport::ALL)
        );
    }

    #[test]
    fn sequences_contain_every_kind_of_step() {
        let sequences = of(Kind::Requests);
        let steps: Vec<&Step> = sequences.iter().flat_map(|sequence| &sequence.steps).collect();
        let requests: Vec<&Request> = steps.iter().filter_map(|step| step.request()).collect();
        let methods: BTreeSet<u16> = requests.iter().map(|request| request.method).collect();
        for wanted in [
            method::BINDING,
            method::ALLOCATE,
            method::REFRESH,
            method::SEND,
            method::CREATE_PERMISSION,
            method::CHANNEL_BIND,
        ] {
            assert!(methods.contains(&wanted), "{wanted}");
        }
        let good =
            requests.iter().filter(|request| request.auth == Auth::Good && request.damage.is_none()).count();
        assert!(good * 2 > requests.len(), "{good} of {}", requests.len());
        assert!(requests.iter().any(|request| request.auth.rule().is_some()));
        assert!(requests.iter().any(|request| request.damage.is_some()));
        assert!(steps.iter().any(|step| matches!(step, Step::Channel(..))));
        assert!(steps.iter().any(|step| matches!(step, Step::Peer(..))));
        let dialects: Vec<Dialect> = sequences.iter().map(|sequence| sequence.dialect).collect();
        assert!(dialects.contains(&Dialect::Classic) && dialects.contains(&Dialect::Userhash));
        let transports: BTreeSet<String> = sequences.iter().map(|it| it.transports[0].to_string()).collect();
        assert_eq!(transports.len(), 4);
    }

    #[test]
    fn steps_keep_their_distance_from_expiries() {
        let sequences = of(Kind::Time);
        assert!(
            sequences.iter().any(|sequence| sequence.steps.iter().any(|step| matches!(step, Step::Wait(_))))
        );
        for sequence in sequences {
            let mut now = 0;
            let mut times = Vec::new();
            for step in &sequence.steps {
                match step {
                    Step::Wait(time) => now += time.as_secs(),
                    _ => {
                        assert!(is_clear(&times, now), "{sequence}");
                        times.push(now);
                    }
                }
            }
            assert!(now <= 700, "{sequence}");
        }
    }
}
