//! Minimal io_uring(7) for a forwarder of thin connections: one ring and one thread.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

pub(crate) const ACCEPT: u8 = 13;
pub(crate) const SEND: u8 = 26;
pub(crate) const RECV: u8 = 27;

/// IORING_SETUP_SINGLE_ISSUER and IORING_SETUP_DEFER_TASKRUN (Linux 6.1): completions do not interrupt the
/// thread.
const SETUP: u32 = 1 << 12 | 1 << 13;
/// IORING_ENTER_GETEVENTS, IORING_ENTER_EXT_ARG.
const ENTER: u32 = 1 | 1 << 3;
const CQ_RING: i64 = 0x0800_0000;
const SQES: i64 = 0x1000_0000;

/// `struct io_uring_params`, with the ten words of offsets for each ring.
#[repr(C)]
#[derive(Default)]
struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    rest: [u32; 7],
    sq: [u32; 10],
    cq: [u32; 10],
}

/// `struct io_uring_sqe`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Request {
    opcode: u8,
    flags: u8,
    ioprio: u16,
    fd: i32,
    offset: u64,
    address: u64,
    len: u32,
    op_flags: u32,
    user_data: u64,
    rest: [u64; 3],
}

impl Request {
    /// Request on a socket, with a memory area; the completion returns `user_data`.
    pub(crate) fn new(opcode: u8, socket: &impl AsRawFd, bytes: &mut [u8], user_data: u64) -> Self {
        let (address, len) = (bytes.as_mut_ptr() as u64, bytes.len() as u32);
        // Without memory (accept) the address must be 0.
        let address = if len == 0 { 0 } else { address };
        Self { opcode, fd: socket.as_raw_fd(), address, len, user_data, ..Self::default() }
    }
}

/// `struct io_uring_cqe`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Completion {
    pub(crate) user_data: u64,
    pub(crate) result: i32,
    pub(crate) flags: u32,
}

/// Both queues, in memory shared with the kernel.
pub(crate) struct Ring {
    fd: OwnedFd,
    requests: *mut Request,
    sq_tail: *const AtomicU32,
    sq_array: *mut u32,
    sq_mask: u32,
    cq_head: *const AtomicU32,
    cq_tail: *const AtomicU32,
    cq_mask: u32,
    completions: *const Completion,
    /// Requests not yet submitted.
    queued: u32,
}

impl Ring {
    pub(crate) fn new(entries: u32) -> io::Result<Self> {
        let mut params = Params { flags: SETUP, ..Params::default() };
        // SAFETY: the pointer is to a live `io_uring_params`.
        let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, entries, &raw mut params) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).map_err(io::Error::other)?) };
        let (sq_entries, cq_entries) = (params.sq_entries as usize, params.cq_entries as usize);
        let sq = map(&fd, 0, params.sq[6] as usize + 4 * sq_entries)?;
        let cq = map(&fd, CQ_RING, params.cq[5] as usize + size_of::<Completion>() * cq_entries)?;
        let requests = map(&fd, SQES, size_of::<Request>() * sq_entries)?;
        let at = |base: *mut u8, offset: u32| base.wrapping_add(offset as usize);
        Ok(Self {
            fd,
            requests: requests.cast(),
            sq_tail: at(sq, params.sq[1]).cast(),
            sq_array: at(sq, params.sq[6]).cast(),
            sq_mask: params.sq_entries - 1,
            cq_head: at(cq, params.cq[0]).cast(),
            cq_tail: at(cq, params.cq[1]).cast(),
            cq_mask: params.cq_entries - 1,
            completions: at(cq, params.cq[5]).cast(),
            queued: 0,
        })
    }

    /// Queues a request. Its memory must live until the completion.
    pub(crate) fn push(&mut self, request: Request) {
        if self.queued > self.sq_mask {
            self.enter(0, Duration::ZERO);
        }
        // SAFETY: the queue has room, because the kernel consumes all submitted requests; `at` is below the
        // number of entries.
        unsafe {
            let tail = (*self.sq_tail).load(Ordering::Relaxed);
            let at = (tail & self.sq_mask) as usize;
            *self.requests.add(at) = request;
            *self.sq_array.add(at) = tail & self.sq_mask;
            (*self.sq_tail).store(tail.wrapping_add(1), Ordering::Release);
        }
        self.queued += 1;
    }

    /// Submits queued requests and waits up to `timeout` for a completion.
    pub(crate) fn wait(&mut self, timeout: Duration, mut each: impl FnMut(&mut Self, Completion)) {
        self.enter(1, timeout);
        loop {
            // SAFETY: the kernel does not modify entries between head and tail until the head moves.
            let completion = unsafe {
                let head = (*self.cq_head).load(Ordering::Relaxed);
                if head == (*self.cq_tail).load(Ordering::Acquire) {
                    return;
                }
                let completion = *self.completions.add((head & self.cq_mask) as usize);
                (*self.cq_head).store(head.wrapping_add(1), Ordering::Release);
                completion
            };
            each(self, completion);
        }
    }

    fn enter(&mut self, wanted: u32, timeout: Duration) {
        let time = libc::timespec { tv_sec: 0, tv_nsec: timeout.subsec_nanos().into() };
        // `struct io_uring_getevents_arg`: signal mask, its size, padding, timeout.
        let argument = [0_u64, 0, &raw const time as u64];
        let fd = self.fd.as_raw_fd();
        let (at, size) = (argument.as_ptr(), size_of_val(&argument));
        // SAFETY: `argument` and the time that it points to live until the call returns. A signal or the
        // timeout also ends the call.
        unsafe { libc::syscall(libc::SYS_io_uring_enter, fd, self.queued, wanted, ENTER, at, size) };
        self.queued = 0;
    }
}

fn map(fd: &OwnedFd, offset: i64, len: usize) -> io::Result<*mut u8> {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
    // SAFETY: a new mapping with the size given by the kernel, never unmapped.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, fd.as_raw_fd(), offset) };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(at.cast()) }
}
