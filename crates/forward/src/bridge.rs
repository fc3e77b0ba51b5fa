//! Datagrams over a TCP stream, for rules between UDP and TCP.
//!
//! ```text
//! plain    datagram ─▶ one write        one read ─▶ one datagram        (like oxidinetd; TCP may
//! join or split them) framed   │ length, 2 bytes big endian │ datagram │ length │ datagram │ …    
//! (boundaries survive) ```
//!
//! Data for a slow reader waits in a bounded queue. If the queue is full, whole datagrams are dropped and
//! counted, so a stream never contains half a frame.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    time::Instant,
};

use serde::{Deserialize, Serialize};
use turnpike_net::{Interest, Poller, TcpSocket};

/// Maximum UDP payload over IPv4: 65535 - 20 - 8.
pub(crate) const MAX_DATAGRAM: usize = 65_507;
/// Bytes per read of a framed stream; a plain read is limited to one datagram.
pub(crate) const SCRATCH: usize = 1 << 16;
/// Queue limit per stream in bytes. The queue may exceed this limit by the rest of a partly written
/// datagram.
const QUEUE: usize = 128 << 10;
/// Maximum frames per sendmsg(2); a GRO super-packet contains at most 64 or 128 datagrams, depending on
/// the kernel.
const RUN: usize = 64;
/// Maximum reads per stream in one turn, for fairness.
const READS: usize = 4;
/// Maximum capacity in bytes that the buffer for an incomplete frame keeps once the frame is complete.
const KEEP: usize = 4096;
/// Length of the length field in bytes.
const PREFIX: usize = 2;

/// Non-blocking TCP connection that carries datagrams.
#[derive(Debug)]
pub(crate) struct Stream {
    socket: TcpSocket,
    framed: bool,
    /// Time at which the connect started; more precise than the milliseconds of a tick.
    pub(crate) begun: Instant,
    pub(crate) connecting: bool,
    /// The peer has sent FIN.
    pub(crate) read_closed: bool,
    /// Two flags: whether the poller watches for readability, and whether it watches for writability.
    pub(crate) interest: (bool, bool),
    deframer: Deframer,
    queue: VecDeque<u8>,
}

/// State of a stream that is passed to another process, without its socket.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct BridgeState {
    connecting: bool,
    partial: Vec<u8>,
    /// Data not yet accepted by a slow reader.
    queue: Vec<u8>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sent {
    /// Datagrams that were sent or queued.
    pub(crate) datagrams: u64,
    /// Payload of these datagrams in bytes, without length fields.
    pub(crate) bytes: u64,
    /// Datagrams dropped because the queue was full.
    pub(crate) dropped: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Turn {
    /// Payload in bytes, without length fields.
    pub(crate) bytes: u64,
    pub(crate) datagrams: u64,
    pub(crate) too_long: u64,
    pub(crate) closed: bool,
}

impl Turn {
    /// Subtracts datagrams and bytes that exceeded a rate.
    pub(crate) fn limit(&mut self, datagrams: u64, bytes: u64) {
        self.datagrams -= datagrams;
        self.bytes -= bytes;
    }
}

impl Stream {
    /// `socket` must be watched for readability, and while connecting also for writability.
    pub(crate) fn new(socket: TcpSocket, framed: bool, connecting: bool) -> Self {
        Self {
            socket,
            framed,
            begun: Instant::now(),
            connecting,
            read_closed: false,
            interest: (true, connecting),
            deframer: Deframer::default(),
            queue: VecDeque::new(),
        }
    }

    pub(crate) fn resume(socket: TcpSocket, framed: bool, held: BridgeState) -> Self {
        let mut this = Self::new(socket, framed, held.connecting);
        this.deframer.partial = held.partial;
        this.queue = held.queue.into();
        this
    }

    pub(crate) fn held(&self) -> BridgeState {
        BridgeState {
            connecting: self.connecting,
            partial: self.deframer.partial.clone(),
            queue: self.queue.iter().copied().collect(),
        }
    }

    pub(crate) fn socket(&self) -> &TcpSocket {
        &self.socket
    }

    /// Replaces the socket after a failed connect; queued data goes to the new one.
    pub(crate) fn reconnect(&mut self, socket: TcpSocket) {
        self.socket = socket;
        self.begun = Instant::now();
        self.connecting = true;
        self.interest = (true, true);
    }

    /// Returns two flags: whether readability must be watched, and whether writability must be.
    pub(crate) fn wanted(&self) -> (bool, bool) {
        (!self.read_closed, self.connecting || !self.queue.is_empty())
    }

    pub(crate) fn watch(&mut self, token: u64, poller: &Poller) {
        let wanted = self.wanted();
        let interest = Interest::Level { read: wanted.0, write: wanted.1 };
        if wanted != self.interest && poller.set(&self.socket, token, interest).is_ok() {
            self.interest = wanted;
        }
    }

    /// Returns true once connected, false if the event belongs to a previous socket, or the error
    /// of a failed connect.
    pub(crate) fn finish_connecting(&mut self) -> io::Result<bool> {
        self.socket.take_error()?;
        self.connecting = self.socket.peer_addr().is_err();
        Ok(!self.connecting)
    }

    /// Sends datagrams, queues them, or drops them if the queue is full. EAGAIN and EINTR are not errors.
    pub(crate) fn send<'a>(&mut self, mut datagrams: impl Iterator<Item = &'a [u8]>) -> io::Result<Sent> {
        let most = if self.framed { RUN } else { 1 };
        let mut total = Sent::default();
        let mut run: [&[u8]; RUN] = [&[]; RUN];
        loop {
            let mut count = 0;
            for datagram in datagrams.by_ref().take(most) {
                run[count] = datagram;
                count += 1;
            }
            if count == 0 {
                return Ok(total);
            }
            self.send_run(&run[..count], &mut total)?;
        }
    }

    /// Sends queued data as far as possible. EAGAIN and EINTR are not errors.
    pub(crate) fn send_queued(&mut self) -> io::Result<()> {
        while !self.connecting && !self.queue.is_empty() {
            let (front, back) = self.queue.as_slices();
            let sent =
                written(self.socket.write_vectored(&[IoSlice::new(front), IoSlice::new(back)], false))?;
            if sent == 0 {
                return Ok(());
            }
            self.queue.drain(..sent);
        }
        if self.queue.is_empty() {
            // Free the memory, because there may be thousands of idle streams.
            self.queue = VecDeque::new();
        }
        Ok(())
    }

    /// Reads from the stream and passes each datagram to `each`. EAGAIN and EINTR are not errors.
    pub(crate) fn receive(&mut self, scratch: &mut [u8], mut each: impl FnMut(&[u8])) -> io::Result<Turn> {
        let mut turn = Turn::default();
        let room = if self.framed { SCRATCH } else { MAX_DATAGRAM }.min(scratch.len());
        for _ in 0..READS {
            let got = match self.socket.read(&mut scratch[..room]) {
                Ok(0) => {
                    turn.closed = true;
                    break;
                }
                Ok(got) => got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            };
            let mut hand_on = |datagram: &[u8]| {
                if datagram.len() > MAX_DATAGRAM {
                    turn.too_long += 1;
                    return;
                }
                turn.datagrams += 1;
                turn.bytes += datagram.len() as u64;
                each(datagram);
            };
            if self.framed {
                self.deframer.feed(&scratch[..got], hand_on);
            } else {
                hand_on(&scratch[..got]);
            }
            if got < room {
                break;
            }
        }
        Ok(turn)
    }

    /// Writes once and queues the rest.
    fn send_run(&mut self, run: &[&[u8]], total: &mut Sent) -> io::Result<()> {
        let mut prefixes = [[0; PREFIX]; RUN];
        for (prefix, datagram) in prefixes.iter_mut().zip(run) {
            *prefix = u16::try_from(datagram.len()).unwrap_or(u16::MAX).to_be_bytes();
        }
        let prefix = if self.framed { PREFIX } else { 0 };
        let mut sent = 0;
        if self.queue.is_empty() && !self.connecting {
            let mut slices = [IoSlice::new(&[]); 2 * RUN];
            for (at, datagram) in run.iter().enumerate() {
                slices[2 * at] = IoSlice::new(&prefixes[at][..prefix]);
                slices[2 * at + 1] = IoSlice::new(datagram);
            }
            sent = written(self.socket.write_vectored(&slices[..2 * run.len()], false))?;
        }
        for (at, datagram) in run.iter().enumerate() {
            let len = prefix + datagram.len();
            if sent == 0 && len > 0 && self.queue.len() + len > QUEUE {
                total.dropped += 1;
                continue;
            }
            total.datagrams += 1;
            total.bytes += datagram.len() as u64;
            if sent >= len {
                sent -= len;
                continue;
            }
            let in_prefix = sent.min(prefix);
            self.queue.extend(&prefixes[at][in_prefix..prefix]);
            self.queue.extend(&datagram[sent - in_prefix..]);
            sent = 0;
        }
        Ok(())
    }
}

/// Number of bytes written; 0 if the socket's buffer is full.
fn written(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(0),
        other => other,
    }
}

/// Splits framed streams into datagrams. Only incomplete frames are copied.
#[derive(Debug, Default)]
struct Deframer {
    /// Incomplete frame with its length field; at most 65,537 bytes.
    partial: Vec<u8>,
}

impl Deframer {
    fn feed(&mut self, mut bytes: &[u8], mut each: impl FnMut(&[u8])) {
        if !self.partial.is_empty() {
            self.take(&mut bytes, PREFIX);
            let Some(prefix) = self.partial.first_chunk() else { return };
            let whole = PREFIX + usize::from(u16::from_be_bytes(*prefix));
            self.take(&mut bytes, whole);
            if self.partial.len() < whole {
                return;
            }
            each(&self.partial[PREFIX..]);
            self.partial.clear();
            if self.partial.capacity() > KEEP {
                self.partial = Vec::new();
            }
        }
        while let Some((prefix, rest)) = bytes.split_first_chunk() {
            let Some((datagram, rest)) = rest.split_at_checked(usize::from(u16::from_be_bytes(*prefix)))
            else {
                break;
            };
            each(datagram);
            bytes = rest;
        }
        self.partial.extend_from_slice(bytes);
    }

    /// Moves bytes to `partial` until it contains `want` bytes, or `bytes` is empty.
    fn take(&mut self, bytes: &mut &[u8], want: usize) {
        let missing = want.saturating_sub(self.partial.len()).min(bytes.len());
        let (head, rest) = bytes.split_at(missing);
        self.partial.extend_from_slice(head);
        *bytes = rest;
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "small numbers, and payload that may wrap")]
mod tests {
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
        os::fd::OwnedFd,
    };

    use super::*;

    fn pair() -> (TcpSocket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        near.set_nonblocking(true).unwrap();
        (OwnedFd::from(near).into(), far)
    }

    fn frames(datagrams: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for datagram in datagrams {
            bytes.extend(u16::try_from(datagram.len()).unwrap().to_be_bytes());
            bytes.extend(datagram);
        }
        bytes
    }

    #[test]
    fn frames_survive_every_split_of_the_stream() {
        let datagrams: Vec<Vec<u8>> = [0, 1, 2, 255, 256, 300, 0, 7]
            .iter()
            .map(|len| (0..*len).map(|i| (i * 7) as u8).collect())
            .collect();
        let stream = frames(&datagrams);
        for step in 1..=stream.len() {
            let mut deframer = Deframer::default();
            let mut seen = Vec::new();
            for piece in stream.chunks(step) {
                deframer.feed(piece, |datagram| seen.push(datagram.to_vec()));
            }
            assert_eq!(seen, datagrams, "in pieces of {step}");
            assert!(deframer.partial.is_empty());
        }
    }

    #[test]
    fn queue_for_a_stalled_reader_is_bounded_and_drops_whole_datagrams() {
        let (near, mut far) = pair();
        let mut stream = Stream::new(near, true, false);
        let datagram = |number: u32| {
            let mut bytes = vec![number as u8; 1200];
            bytes[..4].copy_from_slice(&number.to_be_bytes());
            bytes
        };
        // Sends more than fits into both socket buffers and the queue; loopback buffers autotune to 6
        // MiB.
        let mut dropped = 0;
        for number in 0..20_000 {
            dropped += stream.send([&datagram(number)[..]].into_iter()).unwrap().dropped;
            assert!(stream.queue.len() <= QUEUE + MAX_DATAGRAM + PREFIX);
        }
        assert!(dropped > 0, "all 24 MB fit into the buffers");
        assert_eq!(stream.wanted(), (true, true));
        // Only whole frames arrive, in order.
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            far.read_to_end(&mut bytes).unwrap();
            bytes
        });
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while !stream.queue.is_empty() {
            assert!(std::time::Instant::now() < deadline);
            stream.send_queued().unwrap();
            std::thread::yield_now();
        }
        drop(stream);
        let (mut numbers, mut deframer) = (Vec::new(), Deframer::default());
        deframer.feed(&reader.join().unwrap(), |frame| {
            let number = u32::from_be_bytes(*frame.first_chunk().unwrap());
            assert_eq!(frame, datagram(number));
            numbers.push(number);
        });
        assert!(deframer.partial.is_empty());
        assert!(numbers.is_sorted());
        assert_eq!(numbers.len() as u64 + dropped, 20_000);
    }

    #[test]
    fn frame_too_long_for_udp_is_dropped_and_the_next_one_passes() {
        let (near, mut far) = pair();
        let mut stream = Stream::new(near, true, false);
        let sent = frames(&[vec![1; 65_535], vec![2; 9]]);
        let writer = std::thread::spawn(move || {
            far.write_all(&sent).unwrap();
            far
        });
        let (mut scratch, mut seen, mut too_long) = (vec![0; SCRATCH], Vec::new(), 0);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while seen.is_empty() {
            assert!(std::time::Instant::now() < deadline);
            let turn = stream.receive(&mut scratch, |datagram| seen.push(datagram.to_vec())).unwrap();
            too_long += turn.too_long;
        }
        drop(writer.join().unwrap());
        assert_eq!((seen, too_long), (vec![vec![2; 9]], 1));
    }
}
