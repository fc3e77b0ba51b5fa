//! Messages between two processes of one user, with descriptors: a pair of Unix sockets that keep messages apart (SOCK_SEQPACKET and
//! SCM_RIGHTS, unix(7)). Blocking, for threads that have nothing else to do meanwhile.

use std::{
    fs::File,
    io::{self, IoSlice},
    mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use serde::{Serialize, de::DeserializeOwned};
use socket2::{Domain, SockRef, Socket, Type};
use zeroize::Zeroizing;

use crate::sys::{self, Control};

/// Bytes of a message that travel at a time, far below what a socket holds by default.
const PIECE: usize = 32 << 10;
/// Descriptors that travel at a time: the kernel takes up to 253 (SCM_MAX_FD).
const DESCRIPTORS: usize = 250;
/// Room for them, behind the head of a control message.
const CONTROL: usize = 1024;
/// In front of each piece: how many bytes of the message are still to come, this piece's included, and how many descriptors.
const HEAD: usize = 8;
/// For a value as JSON.
const ROOM: usize = 256 << 10;
/// No message of ours is longer.
const LONGEST: usize = 256 << 20;
/// As many descriptors may be on their way as the process may have open (ETOOMANYREFS): for so long somebody is expected to take them.
const TOO_MANY: Duration = Duration::from_secs(5);

/// One end.
#[derive(Debug)]
pub struct Channel {
    fd: OwnedFd,
}

/// What came.
#[derive(Debug, Default)]
pub struct Message {
    /// Overwritten when it is dropped: there may be secrets among them.
    pub bytes: Zeroizing<Vec<u8>>,
    /// In the order in which they were sent; none of them is inherited by other programs.
    pub descriptors: Vec<OwnedFd>,
}

impl Channel {
    /// Both ends.
    ///
    /// # Errors
    /// Those of socketpair(2).
    pub fn pair() -> io::Result<(Self, Self)> {
        let (one, other) = Socket::pair(Domain::UNIX, Type::SEQPACKET, None)?;
        Ok((Self { fd: one.into() }, Self { fd: other.into() }))
    }

    /// Standard input, which is empty from then on.
    ///
    /// # Errors
    /// `InvalidInput` where it is no such socket, `PermissionDenied` where another user made it; those of dup(2) and getsockopt(2).
    pub fn from_stdin() -> io::Result<Self> {
        let this = Self::try_from(io::stdin().as_fd().try_clone_to_owned()?)?;
        let peer = this.peer()?;
        // SAFETY: no pointers.
        if peer.uid != unsafe { libc::geteuid() } {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "another user has made this socket"));
        }
        let nothing = File::open("/dev/null")?;
        // SAFETY: no pointers; nobody owns the descriptor of standard input.
        sys::check(unsafe { libc::dup2(nothing.as_raw_fd(), libc::STDIN_FILENO) })?;
        Ok(this)
    }

    /// From now on a send or a receive may take so long, piece by piece; then it fails with `TimedOut`.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub fn set_patience(&self, patience: Duration) -> io::Result<()> {
        let socket = SockRef::from(&self.fd);
        socket.set_read_timeout(Some(patience))?;
        socket.set_write_timeout(Some(patience))
    }

    /// Waits until there is a message, or the other end is closed; false if neither comes in this time.
    ///
    /// # Errors
    /// Those of poll(2).
    pub fn is_ready(&self, time: Duration) -> io::Result<bool> {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let ms = libc::c_int::try_from(left.as_millis()).unwrap_or(libc::c_int::MAX);
            let mut asked = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: the pointer is to one live `pollfd`.
            match sys::check(unsafe { libc::poll(&raw mut asked, 1, ms) }) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                answer => return answer.map(|ready| ready > 0),
            }
        }
    }

    /// Sends a message. The descriptors stay open here.
    ///
    /// # Errors
    /// Those of sendmsg(2); `BrokenPipe` where the other end is closed, `TimedOut` after [`Channel::set_patience`].
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

    /// Sends a value as JSON, which names what it holds: the other process may be of another version.
    ///
    /// # Errors
    /// Those of [`Channel::send`].
    pub fn send_value(&self, value: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        // What it outgrows is not overwritten: room for nearly all that there is.
        let mut text = Zeroizing::new(Vec::with_capacity(ROOM));
        serde_json::to_writer(&mut *text, value)?;
        self.send(&text, descriptors)
    }

    /// Receives such a value.
    ///
    /// # Errors
    /// Those of [`Channel::receive`]; `InvalidData` for another value.
    pub fn receive_value<T: DeserializeOwned>(&self) -> io::Result<(T, Vec<OwnedFd>)> {
        let Message { bytes, descriptors } = self.receive()?;
        let value = serde_json::from_slice(&bytes).map_err(|error| {
            let why = format!(
                "what the other process sent cannot be read ({error}): it is of too different a version"
            );
            io::Error::new(io::ErrorKind::InvalidData, why)
        })?;
        Ok((value, descriptors))
    }

    /// Receives a message.
    ///
    /// # Errors
    /// Those of recvmsg(2); `UnexpectedEof` where the other end is closed, `InvalidData` for what is none of our messages,
    /// `TimedOut` after [`Channel::set_patience`]; EMFILE where there is no room for the descriptors.
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

    /// Who made the socket at the other end.
    fn peer(&self) -> io::Result<libc::ucred> {
        // SAFETY: all members are integers, for which zero is a value.
        let mut peer: libc::ucred = unsafe { mem::zeroed() };
        let mut len = mem::size_of::<libc::ucred>() as u32;
        // SAFETY: the pointers and the length describe `peer`; the kernel writes no more.
        sys::check(unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut peer).cast(),
                &raw mut len,
            )
        })?;
        Ok(peer)
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
        let mut control = Control([0; CONTROL]);
        // SAFETY: all members are integers and pointers, for which zero is a value.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        // `IoSlice` has the layout of `iovec`, as its documentation promises; the kernel only reads them.
        message.msg_iov = pieces.as_ptr().cast_mut().cast();
        message.msg_iovlen = pieces.len() as _;
        if !descriptors.is_empty() {
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = write_rights(&mut control, descriptors) as _;
        }
        let until = Instant::now() + TOO_MANY;
        loop {
            // SAFETY: `message` describes `pieces` and `control`, which outlive the call.
            let sent = unsafe { libc::sendmsg(self.fd.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
            if sent >= 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::ETOOMANYREFS) if Instant::now() < until => {
                    thread::sleep(Duration::from_millis(1));
                }
                _ => return Err(timed_out(error)),
            }
        }
    }

    /// Appends a piece; `left` is what is to come, once that is known. What is to come after it.
    fn receive_piece(&self, to: &mut Message, left: Option<(usize, usize)>) -> io::Result<(usize, usize)> {
        let mut buffer = Zeroizing::new(vec![0_u8; HEAD + PIECE]);
        let mut control = Control([0; CONTROL]);
        let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        // SAFETY: all members are integers and pointers, for which zero is a value.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL as _;
        let got = loop {
            // SAFETY: `message` describes `buffer` and `control`, and the kernel writes no more than fits.
            let got = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
            match usize::try_from(got) {
                Ok(got) => break got,
                Err(_) => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(timed_out(error));
                    }
                }
            }
        };
        let before = to.descriptors.len();
        // SAFETY: the kernel set msg_controllen to what it wrote into `control`, which is not touched meanwhile.
        for rights in unsafe { sys::control_messages(&message) } {
            if (rights.level, rights.kind) != (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                continue;
            }
            let (numbers, _) = rights.data.as_chunks::<4>();
            // SAFETY: the kernel has opened these for us, and nobody else knows them.
            let own = |number: &[u8; 4]| unsafe { OwnedFd::from_raw_fd(i32::from_ne_bytes(*number)) };
            to.descriptors.extend(numbers.iter().map(own));
        }
        let came = to.descriptors.len() - before;
        if message.msg_flags & libc::MSG_CTRUNC != 0 {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "this is none of our messages");
        if message.msg_flags & libc::MSG_TRUNC != 0 {
            return Err(invalid());
        }
        let (head, piece) = buffer[..got].split_at_checked(HEAD).ok_or_else(invalid)?;
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
            // Once and for all: what is moved would leave a copy behind.
            to.bytes.reserve_exact(bytes);
        }
        to.bytes.extend_from_slice(piece);
        Ok((bytes - piece.len(), descriptors - came))
    }
}

impl TryFrom<OwnedFd> for Channel {
    type Error = io::Error;

    /// One end that has come from elsewhere.
    fn try_from(fd: OwnedFd) -> io::Result<Self> {
        let option = |name| sys::get_option(fd.as_fd(), libc::SOL_SOCKET, name);
        let is_ours = option(libc::SO_DOMAIN).ok() == Some(libc::AF_UNIX)
            && option(libc::SO_TYPE).ok() == Some(libc::SOCK_SEQPACKET);
        if is_ours {
            Ok(Self { fd })
        } else {
            Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "this is no socket for messages between processes",
            ))
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

/// Writes SCM_RIGHTS; how many bytes that takes.
fn write_rights(control: &mut Control<CONTROL>, descriptors: &[BorrowedFd<'_>]) -> usize {
    let bytes = u32::try_from(mem::size_of_val(descriptors)).unwrap_or(u32::MAX);
    // SAFETY: these only compute.
    let (space, len) = unsafe { (libc::CMSG_SPACE(bytes) as usize, libc::CMSG_LEN(bytes) as usize) };
    assert!(space <= CONTROL, "room for as many descriptors as travel at a time");
    // SAFETY: the buffer is longer than this and aligned for it.
    unsafe {
        let mut header: libc::cmsghdr = mem::zeroed();
        header.cmsg_len = len as _;
        header.cmsg_level = libc::SOL_SOCKET;
        header.cmsg_type = libc::SCM_RIGHTS;
        control.0.as_mut_ptr().cast::<libc::cmsghdr>().write(header);
    }
    let (places, _) = control.0[mem::size_of::<libc::cmsghdr>()..].as_chunks_mut::<4>();
    for (place, descriptor) in places.iter_mut().zip(descriptors) {
        *place = descriptor.as_raw_fd().to_ne_bytes();
    }
    space
}

/// What a blocking socket says whose time is over (socket(7), SO_RCVTIMEO).
fn timed_out(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error }
}
