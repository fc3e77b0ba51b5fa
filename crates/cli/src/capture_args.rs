//! `turnpike capture`: the datagrams of one allocation in the pcapng format.

use std::{
    fs::File,
    io::{self, IsTerminal as _, Write},
    path::{Path, PathBuf},
};

use clap::Args;
use turnpike_ctl::commands::{self, CaptureBounds, CommandError};

use crate::admin_args::ConnectArgs;

#[derive(Args)]
pub(crate) struct CaptureArgs {
    /// Allocation ID, 32 hex digits, from `turnpike allocations` or the log
    id: String,

    /// File to write, or - for standard output [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    write: Option<PathBuf>,

    /// Bytes of payload to capture from each datagram, 0 to 65535; 0 captures headers only
    #[arg(long, value_name = "N", default_value = "0")]
    snap: u16,

    /// Datagrams after which the capture ends, 1 to 1000000
    #[arg(long, value_name = "N", default_value = "10000", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    count: u64,

    /// Seconds after which the capture ends, 1 to 3600
    #[arg(long, value_name = "S", default_value = "60", value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,

    #[command(flatten)]
    connect: ConnectArgs,
}

impl CaptureArgs {
    pub(crate) fn run(self, out: &mut dyn Write) -> Result<(), CommandError> {
        let Self { id, write, snap, count, seconds, connect } = self;
        let bounds = CaptureBounds { snap, count, seconds };
        let client = connect.client()?;
        match write.filter(|file| file != Path::new("-")) {
            None if io::stdout().is_terminal() => Err(CommandError::Terminal),
            None => commands::capture(&client, &id, bounds, out),
            Some(file) => {
                let mut out = File::create(&file).map_err(|source| CommandError::File { file, source })?;
                commands::capture(&client, &id, bounds, &mut out)
            }
        }
    }
}

pub(crate) const CAPTURE: &str = "\
Capture the datagrams that one allocation relays, on the client's leg and on the peers' leg, as a pcapng file for tcpdump and Wireshark.

By default, only headers are captured: addresses, ports, lengths and TURN headers; --snap adds payload. The packets are UDP even if the client \
uses TCP, TLS or DTLS. Requests and responses are not captured. While a capture runs, the kernel does not relay the allocation's datagrams.

Needs the Unix socket, or a token from admin.capture_tokens. Beginning and end are in the audit log.";

pub(crate) const CAPTURE_EXAMPLES: &str = "\
Examples:
  turnpike capture 5f2c9a7be01d4c3f8a6b1e2d3c4f5a69 -w call.pcapng
  turnpike capture 5f2c9a7be01d4c3f8a6b1e2d3c4f5a69 --snap 12 --seconds 10 | tcpdump -nr -    (with RTP headers)";
