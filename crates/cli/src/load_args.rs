//! Commands of `turnpike load`. Their flags are the settings of the generators.

use clap::Subcommand;
use turnpike_load::{
    stream::{BulkLoad, ConnectLoad, ExchangeLoad, StreamTarget},
    turn, udp,
};

/// Generators.
#[derive(Subcommand)]
pub(crate) enum LoadCommand {
    /// Drive traffic, allocations or invalid packets through a TURN server and measure what comes back
    #[command(long_about = LOAD_TURN, after_help = LOAD_TURN_EXAMPLES)]
    Turn(Box<turn::Config>),
    /// Bulk over TCP, through a forwarder or straight
    #[command(long_about = LOAD_TCP, after_help = LOAD_TCP_EXAMPLES)]
    Tcp {
        #[command(flatten)]
        target: StreamTarget,
        #[command(flatten)]
        options: BulkLoad,
    },
    /// Requests and responses over open TCP connections
    #[command(long_about = LOAD_RR, after_help = LOAD_RR_EXAMPLES)]
    Rr {
        #[command(flatten)]
        target: StreamTarget,
        #[command(flatten)]
        options: ExchangeLoad,
    },
    /// TCP connections opened and closed
    #[command(long_about = LOAD_CONNECT, after_help = LOAD_CONNECT_EXAMPLES)]
    Connect {
        #[command(flatten)]
        target: StreamTarget,
        #[command(flatten)]
        options: ConnectLoad,
    },
    /// Datagrams there and back
    #[command(long_about = LOAD_UDP, after_help = LOAD_UDP_EXAMPLES)]
    Udp(Box<udp::Config>),
}

const LOAD_TURN: &str = "\
Drive traffic, allocations or invalid packets through a TURN server and measure what comes back.

Each client allocates, binds, and sends datagrams through the server to a reflector, which sends them back. Round trips count \
from the moment a datagram was due, so that a stall hides nothing; where the generator itself was late, the result says so. A \
progress line appears on standard error each second.

The JSON result is one object: sent, received, lost, duplicated, reordered, send_pps, recv_pps, recv_bps, \
rtt_us {min,p50,p90,p99,p999,max}, jitter_us, late_us {p50,p99,max}, clients, size, rate, duration_s, datapath, transport, relay, errors {}. \
Over TLS and DTLS also full_handshakes and resumed_handshakes.

Over TCP and TLS a message that waits for a slow server is still under way; one that finds no room any more counts as not sent, and \
as error send_would_block. With --relay tcp each client has a connection to the peer of its own; what comes back on it is cut into \
pieces of --size bytes, and sent_bytes and received_bytes are told; a piece that is not what was sent is an error garbled.

With --profile each client has a call, a conference or the like, with a peer of the generator's own that sends by itself, and is no \
echo. Latency is of one way then, from when a packet was due until it arrived, and loss is told by direction and by stream \
(profile {name, seed, to_peer, to_client, streams []}); rtt_us is that latency of both directions. See docs/load.md.

With --migrate each client opens a new socket from time to time, closes the old one at once, as where a phone changes networks, and \
sends a Refresh with its mobility ticket from the new one (RFC 8016); the clients take turns. What is on its way to the old socket is lost \
and counts as lost; what is due until the server has answered waits for that, and its round trip shows it. The result tells migrations_done, migrations_failed and \
migration_ms_p50, _p99 and _max: from opening the socket, handshakes included, to the server's answer.

With --reconnect a client that hears nothing for so long asks for an allocation anew, from another socket and at the first server, again \
and again, as calls do (ICE) when the server was restarted or the path has changed. What it would have sent meanwhile counts as sent and \
lost, and as error no_allocation. The result tells sessions_lost (allocations given up), returns_done and returns_failed, \
reconnect_ms_p50, _p90, _p99 and _max (from the last that a client heard until it has another allocation), lost_within_ms (from when the \
first gave its allocation up until the last did), lost_of_others (of the lost datagrams, those of clients that never had to come back), clients_silent (those who heard nothing at the end), and pause_ms_p50, _p99 \
and _max: of the longest silence that each client had in the measured time. Silence while the generator itself stood still does not count.

A client that the server sends to another one (300 Try Alternate, RFC 8489 section 10) goes there, over the same transport and with the \
same credentials, over at most five servers and to none twice; the result tells redirects.";

const LOAD_TURN_EXAMPLES: &str = "\
Examples (with `turnpike reflect` and `turnpike serve --user a:b --allow-peer 127.0.0.0/8 --relay-ip 127.0.0.1` running):
  turnpike load turn 127.0.0.1 --user a:b
  turnpike load turn turn:127.0.0.1:3478 --user a:b --clients 64 --burst 4 --rate 200k --max-loss 0.1
  turnpike load turn 127.0.0.1 --user a:b --rate max --size 1200 --json -
  turnpike load turn 127.0.0.1 --user a:b --mode allocate --clients 100 --rate max
  turnpike load turn turns:127.0.0.1 --ca cert.pem --server-name turn.example.org --user a:b
  turnpike load turn 127.0.0.1 --user a:b --clients 50 --migrate 2
  turnpike load turn 127.0.0.1 --user a:b --clients 200 --profile call --max-loss 0.1
  turnpike load turn 127.0.0.1 --user a:b --clients 200 --profile call --reconnect 2 --duration 60        (and restart the server)
  turnpike credentials --token-key-file KEY --user KID --server-name NAME | turnpike load turn 127.0.0.1 --access-token-file -
  turnpike load turn turn:127.0.0.1?transport=tcp --relay tcp --user a:b --rate max      (with `turnpike reflect --tcp 127.0.0.1:3480`)

Exit codes: 0 done, 1 failed, 2 bad usage, 3 a limit (--max-loss, --max-p99) was exceeded.";

const LOAD_TCP: &str = "\
Send bytes over TCP to `turnpike reflect`, or from it, straight or through a forwarder, as fast as they go.

Every byte is accounted for: if one is missing, the run fails. What the receiving side saw arrive within the measured time is \
recv_bps. A progress line appears on standard error each second.

The JSON result is that of all generators, with sent, received, send_pps and recv_pps in bytes, and to_server_bps, to_client_bps \
and generator_cpu_s besides.";

const LOAD_TCP_EXAMPLES: &str = "\
Examples (with `turnpike reflect` running there, or behind the forwarder):
  turnpike load tcp 127.0.0.1
  turnpike load tcp 10.0.0.1:9000 -P 8 --duration 5 --json -
  turnpike load tcp 10.0.0.1:9000 --bidir --verify

Exit codes: 0 done, 1 failed, 2 bad usage.";

const LOAD_RR: &str = "\
Send requests over open TCP connections to `turnpike reflect`, straight or through a forwarder, and measure how long each response \
takes.

At rate \"max\" the loop is closed: a stall delays requests instead of counting against each of them. With a rate, latency counts \
from the moment a request was due, and requests that found no free connection to the end are told.

The JSON result is that of all generators, with transactions_per_s and generator_cpu_s besides.";

const LOAD_RR_EXAMPLES: &str = "\
Examples (with `turnpike reflect` running there, or behind the forwarder):
  turnpike load rr 127.0.0.1
  turnpike load rr 10.0.0.1:9000 --clients 64 --size 32
  turnpike load rr 10.0.0.1:9000 --clients 64 --rate 20k --max-p99 500

Exit codes: 0 done, 1 failed, 2 bad usage, 3 a limit (--max-loss, --max-p99) was exceeded.";

const LOAD_CONNECT: &str = "\
Open TCP connections to `turnpike reflect`, straight or through a forwarder: connect, send a byte, receive a byte, close.

Latency is from the connect, or with a rate from the moment it was due, to the last byte received. A connection that fails is \
counted by its reason; when none has succeeded for 1.5 s the run fails.

The JSON result is that of all generators, with connections_per_s and generator_cpu_s besides.";

const LOAD_CONNECT_EXAMPLES: &str = "\
Examples (with `turnpike reflect` running there, or behind the forwarder):
  turnpike load connect 127.0.0.1
  turnpike load connect 10.0.0.1:9000 --clients 32 --duration 5
  turnpike load connect 10.0.0.1:9000 --clients 32 --rate 2k --max-loss 0

Exit codes: 0 done, 1 failed, 2 bad usage, 3 a limit (--max-loss, --max-p99) was exceeded.";

const LOAD_UDP: &str = "\
Send datagrams to `turnpike reflect`, straight or through a forwarder, and measure what comes back.

As `load turn`, without TURN: round trips count from the moment a datagram was due, and where the generator itself was late, the \
result says so.

With --profile each client has a call, a conference or the like with a peer of the generator's own instead, in one thread: what is \
measured is latency and loss of each direction and stream. See docs/load.md.";

const LOAD_UDP_EXAMPLES: &str = "\
Examples (with `turnpike reflect` running there, or behind the forwarder):
  turnpike load udp 127.0.0.1
  turnpike load udp 10.0.0.1:9000 --clients 64 --rate 100k --max-loss 0.1
  turnpike load udp 10.0.0.1:9000 --rate max --size 1200 --json -
  turnpike load udp 10.0.0.1:9000 --peer 10.0.0.9:9001 --clients 100 --profile vpn    (the forwarder leads to 10.0.0.9:9001)

Exit codes: 0 done, 1 failed, 2 bad usage, 3 a limit (--max-loss, --max-p99) was exceeded.";
