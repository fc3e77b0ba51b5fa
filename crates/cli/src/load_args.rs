//! Commands of `turnpike load`; the flags are defined by the settings of each generator.

use clap::Subcommand;
use turnpike_load::{
    stream::{BulkLoad, ConnectLoad, ExchangeLoad, StreamTarget},
    turn, udp,
};

#[derive(Subcommand)]
pub(crate) enum LoadCommand {
    /// Load a TURN server with traffic, allocations or invalid packets
    #[command(long_about = LOAD_TURN, after_help = LOAD_TURN_EXAMPLES)]
    Turn(Box<turn::TurnLoadConfig>),
    /// Transfer bulk data over TCP, directly or through a forwarder
    #[command(long_about = LOAD_TCP, after_help = LOAD_TCP_EXAMPLES)]
    Tcp {
        #[command(flatten)]
        target: StreamTarget,
        #[command(flatten)]
        options: BulkLoad,
    },
    /// Exchange requests and responses over open TCP connections
    #[command(long_about = LOAD_RR, after_help = LOAD_RR_EXAMPLES)]
    Rr {
        #[command(flatten)]
        target: StreamTarget,
        #[command(flatten)]
        options: ExchangeLoad,
    },
    /// Open and close TCP connections
    #[command(long_about = LOAD_CONNECT, after_help = LOAD_CONNECT_EXAMPLES)]
    Connect {
        #[command(flatten)]
        target: StreamTarget,
        #[command(flatten)]
        options: ConnectLoad,
    },
    /// Send datagrams to a reflector and back
    #[command(long_about = LOAD_UDP, after_help = LOAD_UDP_EXAMPLES)]
    Udp(Box<udp::UdpLoadConfig>),
}

const LOAD_TURN: &str = "\
Load a TURN server with traffic, allocations or invalid packets, and measure loss and latency.

Each client allocates, binds a channel, and sends datagrams through the server to a reflector, which returns them. Round-trip times are measured \
from the moment a datagram was due, so a stall is not hidden; the result reports delays of the generator itself. A progress line appears \
on standard error every second.

The JSON result is one object: sent, received, lost, duplicated, reordered, send_pps, recv_pps, recv_bps, \
rtt_us {min,p50,p90,p99,p999,max}, jitter_us, late_us {p50,p99,max}, clients, size, rate, duration_s, datapath, transport, relay, errors {}. \
Over TLS and DTLS also full_handshakes and resumed_handshakes.

TCP and TLS: a message waiting for a slow server counts as in flight; a message for which the send buffer has no room counts as not sent \
and as an error (send_would_block). With --relay tcp, each client has its own connection to the peer. The returned bytes are split into pieces of \
--size bytes; the result includes sent_bytes and received_bytes, and a piece that arrives changed counts as an error (garbled).

--profile: each client exchanges the traffic of a call, a conference or the like with a peer in the generator, which sends its own stream instead of an \
echo. Latency is one-way, from the moment a packet was due to its arrival, and loss is reported by direction and stream \
(profile {name, seed, to_peer, to_client, streams []}); rtt_us is the latency of both directions together. See docs/load.md.

--migrate: each client in turn opens a new socket and closes the old one immediately, like a phone that changes networks, and sends a Refresh \
with its mobility ticket from the new socket (RFC 8016). Datagrams on their way to the old socket are lost and counted as lost. Datagrams that are due \
before the server answers are held back, and their round-trip time includes the wait. The result includes migrations_done, migrations_failed and \
migration_ms_p50, _p99 and _max, measured from opening the socket to the server's answer, including handshakes.

--reconnect: a client that gets no replies for the given time requests a new allocation from a new socket at the first server, and retries until \
it succeeds, like ICE after a restart of the server or a change of path. Datagrams due in the meantime count as sent and lost, and as errors \
(no_allocation). The result includes allocations_lost (allocations given up), returns_done, returns_failed, reconnect_ms_p50, _p90, _p99 and _max \
(from the last reply to the new allocation), lost_within_ms (from the first given-up allocation to the last), lost_of_others (lost datagrams \
of clients that never reconnected), clients_silent (clients without replies at the end), and pause_ms_p50, _p99 and _max (longest silence of \
each client in the measured time, not counting stalls of the generator itself).

Redirects: a client that receives 300 Try Alternate (RFC 8489 section 10) follows it with the same transport and credentials, over at most five \
servers and never twice to the same one; the result includes redirects.";

const LOAD_TURN_EXAMPLES: &str = "\
Examples (with `turnpike reflect` and `turnpike serve --user a:b --allow-peer 127.0.0.0/8 --relay-ip 127.0.0.1` running):
  turnpike load turn 127.0.0.1 --user a:b
  turnpike load turn turn:127.0.0.1:3478 --user a:b --clients 64 --burst 4 --rate 200k --max-loss 0.1
  turnpike load turn 127.0.0.1 --user a:b --rate max --size 1200 --json -
  turnpike load turn 127.0.0.1 --user a:b --mode allocate --clients 100 --rate max
  turnpike load turn turns:127.0.0.1 --ca cert.pem --server-name turn.example.org --user a:b
  turnpike load turn 127.0.0.1 --user a:b --clients 50 --migrate 2
  turnpike load turn 127.0.0.1 --user a:b --clients 200 --profile call --max-loss 0.1
  turnpike load turn 127.0.0.1 --user a:b --clients 200 --profile call --reconnect 2 --duration 60        (then restart the server)
  turnpike credentials --token-key-file KEY --user KID --server-name NAME | turnpike load turn 127.0.0.1 --access-token-file -
  turnpike load turn turn:127.0.0.1?transport=tcp --relay tcp --user a:b --rate max      (with `turnpike reflect --tcp 127.0.0.1:3480`)

Exit codes: 0 success, 1 failure, 2 bad usage, 3 a limit (--max-loss, --max-p99) was exceeded.";

const LOAD_TCP: &str = "\
Transfer bytes over TCP to or from `turnpike reflect`, directly or through a forwarder, at full speed.

Every byte is accounted for: the run fails if one is missing. recv_bps counts the bytes that arrived at the receiver within the measured \
time. A progress line appears on standard error every second.

The JSON result has the common fields, with sent, received, send_pps and recv_pps in bytes, plus to_server_bps, to_client_bps \
and generator_cpu_s.";

const LOAD_TCP_EXAMPLES: &str = "\
Examples (with `turnpike reflect` running at that address or behind the forwarder):
  turnpike load tcp 127.0.0.1
  turnpike load tcp 10.0.0.1:9000 -P 8 --duration 5 --json -
  turnpike load tcp 10.0.0.1:9000 --bidir --verify

Exit codes: 0 success, 1 failure, 2 bad usage.";

const LOAD_RR: &str = "\
Exchange requests and responses with `turnpike reflect` over open TCP connections, directly or through a forwarder, and measure the \
response time.

With --rate max, the loop is closed: a stall delays later requests without adding to their latency. With a fixed rate, latency is measured \
from the moment a request was due, and the result reports requests that found no free connection before the end.

The JSON result has the common fields plus transactions_per_s and generator_cpu_s.";

const LOAD_RR_EXAMPLES: &str = "\
Examples (with `turnpike reflect` running at that address or behind the forwarder):
  turnpike load rr 127.0.0.1
  turnpike load rr 10.0.0.1:9000 --clients 64 --size 32
  turnpike load rr 10.0.0.1:9000 --clients 64 --rate 20k --max-p99 500

Exit codes: 0 success, 1 failure, 2 bad usage, 3 a limit (--max-loss, --max-p99) was exceeded.";

const LOAD_CONNECT: &str = "\
Open TCP connections to `turnpike reflect`, directly or through a forwarder: connect, send a byte, receive a byte, close.

Latency is measured from the connect (with a fixed rate, from the moment it was due) to the last byte received. Failed connections are \
counted by reason; the run fails if none succeeds for 1.5 s.

The JSON result has the common fields plus connections_per_s and generator_cpu_s.";

const LOAD_CONNECT_EXAMPLES: &str = "\
Examples (with `turnpike reflect` running at that address or behind the forwarder):
  turnpike load connect 127.0.0.1
  turnpike load connect 10.0.0.1:9000 --clients 32 --duration 5
  turnpike load connect 10.0.0.1:9000 --clients 32 --rate 2k --max-loss 0

Exit codes: 0 success, 1 failure, 2 bad usage, 3 a limit (--max-loss, --max-p99) was exceeded.";

const LOAD_UDP: &str = "\
Send datagrams to `turnpike reflect`, directly or through a forwarder, and measure the replies.

Works like `load turn` without TURN: round-trip times are measured from the moment a datagram was due, and the result reports delays of the \
generator itself.

With --profile, each client exchanges the traffic of a call, a conference or the like with a peer in the generator, in one thread, and the result reports \
latency and loss by direction and stream. See docs/load.md.";

const LOAD_UDP_EXAMPLES: &str = "\
Examples (with `turnpike reflect` running at that address or behind the forwarder):
  turnpike load udp 127.0.0.1
  turnpike load udp 10.0.0.1:9000 --clients 64 --rate 100k --max-loss 0.1
  turnpike load udp 10.0.0.1:9000 --rate max --size 1200 --json -
  turnpike load udp 10.0.0.1:9000 --peer 10.0.0.9:9001 --clients 100 --profile vpn    (the forwarder's target is 10.0.0.9:9001)

Exit codes: 0 success, 1 failure, 2 bad usage, 3 a limit (--max-loss, --max-p99) was exceeded.";
