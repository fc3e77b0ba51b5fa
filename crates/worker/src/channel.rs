//! Blocking messages with descriptors between two processes of one user, over a pair of Unix sockets
//! (SOCK_SEQPACKET and SCM_RIGHTS, unix(7)).

use std::{
    fs::File,
    io::{self, IoSlice, IoSliceMut},
    mem::{MaybeUninit, size_of},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    cmsg_space,
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketType, recvmsg, sendmsg,
        sockopt::{socket_domain, socket_peercred, socket_type},
    },
    process::geteuid,
    stdio::dup2_stdin,
};
use serde::{Serialize, de::DeserializeOwned};
use socket2::{Domain, SockRef, Socket, Type};
use zeroize::Zeroizing;

/// Bytes per packet, far below a socket's default buffer.
const PIECE: usize = 32 << 10;
/// Descriptors per packet; the kernel accepts up to 253 (SCM_MAX_FD).
const DESCRIPTORS: usize = 250;
const CONTROL: usize = cmsg_space!(ScmRights(DESCRIPTORS));
/// Header of each packet: number of bytes still to come, including this packet's, and number of descriptors.
const HEAD: usize = 2 * size_of::<u32>();
/// Initial capacity for a JSON value.
const ROOM: usize = 256 << 10;
/// Maximum length of a message in bytes.
const LONGEST: usize = 256 << 20;
/// Time for which to retry after ETOOMANYREFS: a process must not have more descriptors in flight than it may
/// have open, so the receiver has to take some first.
const TOO_MANY: Duration = Duration::from_secs(5);

/// One end of a pair of sockets.
#[derive(Debug)]
pub struct Channel {
    fd: OwnedFd,
}

#[derive(Debug, Default)]
pub struct Message {
    /// Zeroized on drop, as they may contain secrets.
    pub bytes: Zeroizing<Vec<u8>>,
    /// Descriptors in the order in which they were sent; close-on-exec.
    pub descriptors: Vec<OwnedFd>,
}

impl Channel {
    pub fn pair() -> io::Result<(Self, Self)> {
        let (one, other) = Socket::pair(Domain::UNIX, Type::SEQPACKET, None)?;
        Ok((Self { fd: one.into() }, Self { fd: other.into() }))
    }

    /// Takes the channel from standard input, and replaces standard input with /dev/null. `InvalidInput` if
    /// standard input is not a channel, `PermissionDenied` if another user created the socket.
    pub fn from_stdin() -> io::Result<Self> {
        let this = Self::try_from(io::stdin().as_fd().try_clone_to_owned()?)?;
        if socket_peercred(&this.fd)?.uid != geteuid() {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "another user created this socket"));
        }
        dup2_stdin(File::open("/dev/null")?)?;
        Ok(this)
    }

    /// Sets the timeout per packet for sending and receiving, which then fail with `TimedOut`.
    pub fn set_patience(&self, patience: Duration) -> io::Result<()> {
        let socket = SockRef::from(&self.fd);
        socket.set_read_timeout(Some(patience))?;
        socket.set_write_timeout(Some(patience))
    }

    /// Waits up to `time` for a message or the end of the channel; false on timeout.
    pub fn is_ready(&self, time: Duration) -> io::Result<bool> {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&left)) {
                Err(Errno::INTR) => {}
                answer => return Ok(answer? > 0),
            }
        }
    }

    /// Sends a message; the descriptors stay open here. `BrokenPipe` if the other end is closed, `TimedOut`
    /// after [`Channel::set_patience`].
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let (mut bytes, mut descriptors) = (bytes, descriptors);
        loop {
            let head = (bytes.len(), descriptors.len());
            let (piece, later) = bytes.split_at(bytes.len().min(PIECE));
            let (now, waiting) = descriptors.split_at(descriptors.len().min(DESCRIPTORS));
            self.send_piece(head, piece, now)?;
            if later.is_empty() && waiting.is_empty() {
                return Ok(());
            }
            (bytes, descriptors) = (later, waiting);
        }
    }

    /// Sends a value as JSON, because the other process may run a different version.
    pub fn send_value(&self, value: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        // Large enough to avoid a reallocation, which would leave a copy behind that is not zeroized.
        let mut text = Zeroizing::new(Vec::with_capacity(ROOM));
        serde_json::to_writer(&mut *text, value)?;
        self.send(&text, descriptors)
    }

    /// Receives a value sent with [`Channel::send_value`]; `InvalidData` if it cannot be parsed.
    pub fn receive_value<T: DeserializeOwned>(&self) -> io::Result<(T, Vec<OwnedFd>)> {
        let Message { bytes, descriptors } = self.receive()?;
        let value = serde_json::from_slice(&bytes).map_err(|error| {
            let why =
                format!("cannot parse the other process's message ({error}): its version is incompatible");
            io::Error::new(io::ErrorKind::InvalidData, why)
        })?;
        Ok((value, descriptors))
    }

    /// Receives a message. `UnexpectedEof` if the other end is closed, `InvalidData` if it has a different
    /// format, `TimedOut` after [`Channel::set_patience`], EMFILE if the descriptors exceed the limit.
    pub fn receive(&self) -> io::Result<Message> {
        let mut message = Message::default();
        let mut left = None;
        loop {
            let (bytes, descriptors) = self.receive_piece(&mut message, left)?;
            if (bytes, descriptors) == (0, 0) {
                return Ok(message);
            }
            left = Some((bytes, descriptors));
        }
    }

    fn send_piece(
        &self,
        (bytes, all): (usize, usize),
        piece: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_be_bytes();
        let head = [number(bytes), number(all)];
        let pieces = [IoSlice::new(head.as_flattened()), IoSlice::new(piece)];
        let mut space = [MaybeUninit::uninit(); CONTROL];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            let has_room = control.push(SendAncillaryMessage::ScmRights(descriptors));
            assert!(has_room, "control buffer has room for the maximum number of descriptors");
        }
        let until = Instant::now() + TOO_MANY;
        loop {
            match sendmsg(&self.fd, &pieces, &mut control, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::TOOMANYREFS) if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
                Err(error) => return Err(timed_out(error)),
            }
        }
    }

    /// Appends a packet. `left` is the header that this packet must have, if known. Returns the numbers of
    /// bytes and descriptors still missing after it.
    fn receive_piece(&self, to: &mut Message, left: Option<(usize, usize)>) -> io::Result<(usize, usize)> {
        let mut buffer = Zeroizing::new(vec![0_u8; HEAD + PIECE]);
        let mut space = [MaybeUninit::uninit(); CONTROL];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = loop {
            let part = &mut [IoSliceMut::new(&mut buffer)];
            match recvmsg(&self.fd, part, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                got => break got.map_err(timed_out)?,
            }
        };
        let before = to.descriptors.len();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                to.descriptors.extend(descriptors);
            }
        }
        let came = to.descriptors.len() - before;
        if got.flags.contains(ReturnFlags::CTRUNC) {
            return Err(Errno::MFILE.into());
        }
        if got.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "malformed message");
        if got.flags.contains(ReturnFlags::TRUNC) {
            return Err(invalid());
        }
        let (head, piece) = buffer[..got.bytes].split_at_checked(HEAD).ok_or_else(invalid)?;
        let (numbers, _) = head.as_chunks::<4>();
        let [bytes, descriptors] = [0, 1].map(|at| u32::from_be_bytes(numbers[at]) as usize);
        if bytes > LONGEST
            || left.is_some_and(|left| left != (bytes, descriptors))
            || piece.len() != bytes.min(PIECE)
            || came != descriptors.min(DESCRIPTORS)
        {
            return Err(invalid());
        }
        if left.is_none() {
            // Reserve the exact size, because a reallocation would leave a copy behind.
            to.bytes.reserve_exact(bytes);
        }
        to.bytes.extend_from_slice(piece);
        Ok((bytes - piece.len(), descriptors - came))
    }
}

impl TryFrom<OwnedFd> for Channel {
    type Error = io::Error;

    /// Takes over one end of a channel that was passed to this process.
    fn try_from(fd: OwnedFd) -> io::Result<Self> {
        let is_ours = socket_domain(&fd).is_ok_and(|domain| domain == AddressFamily::UNIX)
            && socket_type(&fd).is_ok_and(|kind| kind == SocketType::SEQPACKET);
        if is_ours {
            Ok(Self { fd })
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "not a SOCK_SEQPACKET Unix socket"))
        }
    }
}

impl From<Channel> for OwnedFd {
    fn from(channel: Channel) -> Self {
        channel.fd
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Maps EWOULDBLOCK of a blocking socket (SO_RCVTIMEO, socket(7)) to `TimedOut`.
fn timed_out(error: Errno) -> io::Error {
    if error == Errno::WOULDBLOCK { io::ErrorKind::TimedOut.into() } else { error.into() }
}
