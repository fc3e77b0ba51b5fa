//! Seeds: sequences that reach every part of the target.

use turnpike_testkit::fuzz::{self, Input};

use super::Run;

/// Sequence of events in the encoding of [`Run::event`].
#[derive(Clone, Default)]
struct Script(Vec<u8>);

impl Script {
    fn new(flags: u8) -> Self {
        Self(vec![flags])
    }

    fn event(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Method index, flags and complete attributes.
    fn request(self, method: u8, how: u16, attributes: &[&[u8]]) -> Self {
        let [high, low] = how.to_be_bytes();
        let count = u8::try_from(attributes.len()).expect("few");
        let transaction = u8::try_from(self.0.len() % 251).expect("a byte");
        self.event(&[&[1, method, high, low, transaction, count][..], &attributes.concat()].concat())
    }

    fn allocated(self, how: u16, attributes: &[&[u8]]) -> Self {
        self.request(0, 2, &[&[4, 0]]).request(0, how, attributes).event(&[9, 0, 0])
    }
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let (udp, tcp, ticket, dual): ([u8; 2], [u8; 2], [u8; 1], [u8; 2]) = ([4, 0], [4, 1], [10], [6, 0]);
    let relaying = |script: Script, how| {
        script
            .request(2, how, &[&[0, 0], &[0, 1]])
            .request(3, how, &[&[2, 0], &[0, 0]])
            .event(&[4, 0, 3, 1, 2, 3])
            .event(&[5, 1, 3, 1, 2, 3])
            .event(&[10, 0, 0, 3, 1, 2, 3])
            .event(&[10, 0, 1, 2, 1, 2])
            .event(&[11, 0, 0, 3, 4, 0, 0, 5, 0x78])
    };
    let mut seeds = Vec::new();
    // Authenticates with each scheme, and with a token.
    for how in [0, 0x100, 0x200, 0x300, 0x08] {
        let token: &[u8] = if how == 8 { &[16, 2, 0, 30] } else { &[9] };
        seeds.push(relaying(Script::new(0).allocated(how, &[&udp, token]), how).request(
            1,
            how,
            &[&[3, 0, 0], token],
        ));
    }
    for flags in [0, 1] {
        let dual = Script::new(flags).allocated(0, &[&udp, &dual, &[7, 0]]);
        let expiring = relaying(dual, 0).event(&[8, 1, 44]).event(&[8, 2, 88]).event(&[8, 16, 0]);
        seeds.push(expiring);
        // Mobile, from another address, with an upgrade in between.
        let moving =
            relaying(Script::new(flags).allocated(0, &[&udp, &ticket]), 0).event(&[19]).event(&[7, 1]);
        let moving = moving.request(1, 2, &[]).request(1, 0, &[&[11, 0, 0]]).event(&[4, 0, 1, 1]);
        seeds.push(moving.request(1, 0, &[&[11, 0, 1]]).event(&[15, 2]));
        let relaying_tcp = Script::new(flags).event(&[7, 2]).allocated(0, &[&tcp]).request(4, 0, &[&[0, 0]]);
        let bound =
            relaying_tcp.event(&[12, 0, 0]).request(2, 0, &[&[0, 1]]).event(&[13, 0, 1]).event(&[7, 3]);
        let bound =
            bound.request(5, 2, &[&[12, 0]]).request(5, 0, &[&[12, 0]]).event(&[14, 0]).event(&[8, 0, 31]);
        seeds.push(bound.event(&[15, 2]));
    }
    // A slow store, and reloads.
    let asked =
        Script::new(2).request(0, 2, &[&udp]).request(0, 0, &[&udp]).event(&[16, 0, 0]).event(&[9, 0, 0]);
    seeds.push(asked.request(1, 0, &[&[3, 2, 0]]).event(&[8, 0, 11]).event(&[16, 0, 4]));
    let reloaded = relaying(Script::new(0).allocated(0, &[&udp]), 0).event(&[17, 9]).event(&[4, 0, 1, 1]);
    seeds.push(
        reloaded
            .event(&[18, 2, 0])
            .allocated(0, &[&udp])
            .event(&[18, 1])
            .event(&[18, 0])
            .allocated(0, &[&udp]),
    );
    let discovery = Script::new(0).request(6, 2, &[]).request(6, 3, &[&[13, 6]]).request(6, 2, &[&[14, 8]]);
    seeds.push(discovery.request(6, 2, &[&[15, 0x9C, 0x40]]).request(6, 2, &[&[18, 0, 0]]));
    // Recorded clients, one after the other, with immediate reports from the runtime.
    for messages in fuzz::captured("stun").chunks(12) {
        let mut script = Script::new(0).request(0, 2, &[&udp]);
        for message in messages {
            let length = u16::try_from(message.len()).expect("a datagram").to_be_bytes();
            script =
                script.event(&[&[3][..], &length, message].concat()).event(&[9, 0, 0]).event(&[12, 0, 0]);
        }
        seeds.push(script);
    }
    seeds.into_iter().map(|script| script.0).collect()
}

#[test]
fn the_servers_seeds_relay_move_and_connect() {
    let mut reached = [0; 7];
    for seed in seeds() {
        let mut input = Input::new(&seed);
        let mut run = Run::new(input.byte());
        while !input.is_empty() {
            run.event(&mut input);
        }
        let stats = run.server.stats();
        reached[0] += stats.to_peer_datagrams;
        reached[1] += stats.to_client_datagrams;
        reached[2] += stats.icmp_relayed;
        reached[3] += stats.mobility.iter().sum::<u64>();
        reached[4] += stats.connection_events.iter().sum::<u64>();
        reached[5] += stats.nat_discovery.iter().sum::<u64>();
        reached[6] += stats.retransmits + stats.allocations_closed.iter().sum::<u64>();
    }
    assert!(reached.iter().all(|count| *count > 0), "{reached:?}");
}
