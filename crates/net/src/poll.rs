//! epoll(7), level-triggered for datagrams and listeners, edge-triggered for streams, and an eventfd to wake a worker from another thread.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::sys;

/// What is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// As given to [`Poller::add`].
    pub token: u64,
    /// Readable.
    pub readable: bool,
    /// Writable.
    pub writable: bool,
    /// EPOLLERR: for UDP sockets with `errors`, read the error queue; for others, receive. The event comes back until
    /// one of them took the error.
    pub error: bool,
    /// EPOLLRDHUP, edge-triggered only: the other side of a stream has said all (FIN), or is gone.
    pub closed: bool,
    /// EPOLLPRI, edge-triggered only: there is an urgent byte, at which a read stops short.
    pub priority: bool,
}

/// Events that one wait can bring. Enough that a thousand thin flows need few calls, few enough that the arena holds
/// what they bring.
const BATCH: usize = 256;

/// What need not be as exact as a time-out of epoll_pwait2(2) is.
const COARSE: Duration = Duration::from_millis(1);

/// The token of a poller's own timer; callers must not use it.
const TIMER: u64 = u64::MAX - 1;

/// An epoll instance.
#[derive(Debug)]
pub struct Poller {
    fd: OwnedFd,
    raw: Vec<libc::epoll_event>,
    events: Vec<Event>,
    /// Whether the kernel has epoll_pwait2(2).
    fine: bool,
    /// timerfd(2) of [`Poller::wait_until`], and for when it is set.
    timer: OwnedFd,
    alarm: Option<u64>,
    /// How long to look again before sleeping.
    busy_poll: Duration,
    /// The last wait brought something.
    lively: bool,
}

impl Poller {
    /// So many events, and there may be more that are ready: one more could have been the poller's own timer.
    pub const FULL: usize = BATCH - 1;

    /// Creates one.
    ///
    /// # Errors
    /// Those of epoll_create1(2).
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers; the result is checked before it is owned.
        let fd = unsafe { OwnedFd::from_raw_fd(sys::check(libc::epoll_create1(libc::EPOLL_CLOEXEC))?) };
        let flags = libc::TFD_CLOEXEC | libc::TFD_NONBLOCK;
        // SAFETY: as above, for timerfd_create(2).
        let timer =
            unsafe { OwnedFd::from_raw_fd(sys::check(libc::timerfd_create(libc::CLOCK_MONOTONIC, flags))?) };
        let poller = Self {
            fd,
            raw: vec![libc::epoll_event { events: 0, u64: 0 }; BATCH],
            events: Vec::with_capacity(BATCH),
            fine: true,
            timer,
            alarm: None,
            busy_poll: Duration::ZERO,
            lively: false,
        };
        // Edge-triggered, it need not be read: each expiration is one event.
        poller.control(libc::EPOLL_CTL_ADD, &poller.timer, TIMER, libc::EPOLLIN | libc::EPOLLET)?;
        Ok(poller)
    }

    /// How long [`Poller::wait_until`] looks again and again after it has brought something, before it sleeps; zero, the
    /// default, sleeps at once. A wake-up costs a busy worker many microseconds of latency (an interrupt to its core, leaving
    /// the idle state); looking costs its core all of this time after each batch.
    pub fn set_busy_poll(&mut self, time: Duration) {
        self.busy_poll = time;
    }

    /// Watches for readability.
    ///
    /// # Errors
    /// Those of epoll_ctl(2); ENOSPC when /proc/sys/fs/epoll/max_user_watches is reached.
    pub fn add(&self, fd: &impl AsFd, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, libc::EPOLLIN)
    }

    /// As [`Poller::add`], for a socket that several pollers watch: each event wakes one of them up, or some, but not all
    /// (EPOLLEXCLUSIVE, epoll_ctl(2)).
    ///
    /// # Errors
    /// As for [`Poller::add`].
    pub fn add_exclusive(&self, fd: &impl AsFd, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, libc::EPOLLIN | libc::EPOLLEXCLUSIVE)
    }

    /// Watches for a stream's readability, writability, end and urgent byte, edge-triggered: whoever is told must read until a
    /// read is short, or write until a write is; no call is needed to change what is watched. Watching a socket that is
    /// writable tells so at once; after that, TCP tells only when a short write was made before (SOCK_NOSPACE).
    ///
    /// # Errors
    /// Those of epoll_ctl(2), as for [`Poller::add`].
    pub fn add_edge(&self, fd: &impl AsFd, token: u64) -> io::Result<()> {
        let both = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLPRI;
        self.control(libc::EPOLL_CTL_ADD, fd, token, both | libc::EPOLLET)
    }

    /// As [`Poller::add_edge`], but without writability.
    ///
    /// # Errors
    /// Those of epoll_ctl(2), as for [`Poller::add`].
    pub fn add_edge_readable(&self, fd: &impl AsFd, token: u64) -> io::Result<()> {
        let read = libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLPRI;
        self.control(libc::EPOLL_CTL_ADD, fd, token, read | libc::EPOLLET)
    }

    /// From [`Poller::add_edge_readable`] to [`Poller::add_edge`]; what is ready already is told again.
    ///
    /// # Errors
    /// Those of epoll_ctl(2).
    pub fn add_edge_writable(&self, fd: &impl AsFd, token: u64) -> io::Result<()> {
        let both = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLPRI;
        self.control(libc::EPOLL_CTL_MOD, fd, token, both | libc::EPOLLET)
    }

    /// From either of the two to nothing but a stream's end and its errors: bytes that come wake nobody up.
    /// [`Poller::add_edge_writable`] leads back.
    ///
    /// # Errors
    /// Those of epoll_ctl(2).
    pub fn set_edge_end(&self, fd: &impl AsFd, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, token, libc::EPOLLRDHUP | libc::EPOLLET)
    }

    /// Also watches for writability, or stops to.
    ///
    /// # Errors
    /// Those of epoll_ctl(2).
    pub fn set_writable(&self, fd: &impl AsFd, token: u64, on: bool) -> io::Result<()> {
        let interest = if on { libc::EPOLLIN | libc::EPOLLOUT } else { libc::EPOLLIN };
        self.control(libc::EPOLL_CTL_MOD, fd, token, interest)
    }

    /// Watches for any of the two, or for neither: errors and hang-ups are told all the same, as [`Event::error`] and
    /// [`Event::readable`].
    ///
    /// # Errors
    /// Those of epoll_ctl(2).
    pub fn set_interest(&self, fd: &impl AsFd, token: u64, readable: bool, writable: bool) -> io::Result<()> {
        let interest = if readable { libc::EPOLLIN } else { 0 } | if writable { libc::EPOLLOUT } else { 0 };
        self.control(libc::EPOLL_CTL_MOD, fd, token, interest)
    }

    /// Stops watching. Closing the descriptor does the same.
    ///
    /// # Errors
    /// Those of epoll_ctl(2).
    pub fn remove(&self, fd: &impl AsFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, fd, 0, 0)
    }

    fn control(&self, operation: i32, fd: &impl AsFd, token: u64, interest: i32) -> io::Result<()> {
        let mut event = libc::epoll_event { events: interest.cast_unsigned(), u64: token };
        // SAFETY: both descriptors are open, the pointer is to a live `epoll_event`.
        sys::check(unsafe {
            libc::epoll_ctl(self.fd.as_raw_fd(), operation, fd.as_fd().as_raw_fd(), &raw mut event)
        })
        .map(|_| ())
    }

    /// Waits until `due` on the caller's clock, whose reading is `now`, both in milliseconds; `None` is for ever. Never
    /// returns much too late, but may return early with nothing.
    ///
    /// A loop whose deadline hardly changes pays nothing for it: it is a timer that stays set, whereas a time-out of
    /// epoll_wait(2) is set up and taken down by each call that sleeps.
    ///
    /// # Errors
    /// Those of epoll_wait(2) but EINTR, and of timerfd_settime(2).
    pub fn wait_until(&mut self, now: u64, due: Option<u64>) -> io::Result<&[Event]> {
        self.wait_until_within(now, due, None)
    }

    /// The same, but no longer than `at_most`, which may be finer than the clock's milliseconds; zero only looks.
    ///
    /// # Errors
    /// As for [`Poller::wait_until`].
    pub fn wait_until_within(
        &mut self,
        now: u64,
        due: Option<u64>,
        at_most: Option<Duration>,
    ) -> io::Result<&[Event]> {
        let (due, at_most) =
            match at_most.map(|time| (time, u64::try_from(time.as_nanos().div_ceil(1_000_000)))) {
                // Not so fine: that goes by the timer too.
                Some((time, Ok(ms))) if time >= COARSE => {
                    (Some(due.map_or(now + ms, |due| due.min(now + ms))), None)
                }
                _ => (due, at_most),
            };
        if due.is_some_and(|due| due <= now) || at_most.is_some_and(|time| time.is_zero()) {
            self.wait(Some(Duration::ZERO))?;
            self.lively = !self.events.is_empty();
            return Ok(&self.events);
        }
        if let Some(due) = due
            && self.alarm.is_none_or(|alarm| due < alarm || alarm <= now)
        {
            self.set_alarm(Duration::from_millis(due - now))?;
            self.alarm = Some(due);
        }
        if self.lively && !self.busy_poll.is_zero() {
            let until = Instant::now() + at_most.map_or(self.busy_poll, |time| time.min(self.busy_poll));
            while Instant::now() < until {
                if !self.wait(Some(Duration::ZERO))?.is_empty() {
                    return Ok(&self.events);
                }
            }
        }
        self.wait(at_most)?;
        self.lively = !self.events.is_empty();
        Ok(&self.events)
    }

    fn set_alarm(&self, after: Duration) -> io::Result<()> {
        let value = libc::timespec {
            tv_sec: after.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: after.subsec_nanos().into(),
        };
        let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let setting = libc::itimerspec { it_interval: never, it_value: value };
        // SAFETY: the pointer is to a live `itimerspec`; the old setting is not asked for.
        let done = unsafe {
            libc::timerfd_settime(self.timer.as_raw_fd(), 0, &raw const setting, std::ptr::null_mut())
        };
        sys::check(done).map(|_| ())
    }

    /// Waits, `None` for ever; as exact as the thread's timer slack (see [`crate::rlimit::exact_timers`]), or in whole
    /// milliseconds, rounded up, before Linux 5.11. An interruption by a signal counts as a time-out.
    ///
    /// # Errors
    /// Those of epoll_wait(2) but EINTR.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<&[Event]> {
        self.events.clear();
        let count = match self.wait_raw(timeout) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
        let raised = self.raw[..count].iter().filter(|raw| raw.u64 != TIMER);
        if raised.clone().count() < count {
            self.alarm = None;
        }
        self.events.extend(raised.map(|raw| {
            let flags = raw.events.cast_signed();
            Event {
                token: raw.u64,
                readable: flags & (libc::EPOLLIN | libc::EPOLLHUP) != 0,
                writable: flags & libc::EPOLLOUT != 0,
                error: flags & libc::EPOLLERR != 0,
                closed: flags & libc::EPOLLRDHUP != 0,
                priority: flags & libc::EPOLLPRI != 0,
            }
        }));
        Ok(&self.events)
    }

    fn wait_raw(&mut self, timeout: Option<Duration>) -> io::Result<usize> {
        let whole_ms = timeout.is_none_or(|t| t.subsec_nanos() % 1_000_000 == 0);
        if !whole_ms && self.fine {
            match self.wait_fine(timeout.unwrap_or_default()) {
                Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => self.fine = false,
                done => return done,
            }
        }
        let ms = timeout.map_or(-1, |t| i32::try_from(t.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX));
        // SAFETY: the pointer and count describe `raw`.
        sys::check(unsafe { libc::epoll_wait(self.fd.as_raw_fd(), self.raw.as_mut_ptr(), BATCH as i32, ms) })
            .map(|count| count as usize)
    }

    /// epoll_pwait2(2), called by number because glibc has it only since 2.35.
    fn wait_fine(&mut self, timeout: Duration) -> io::Result<usize> {
        let timeout = libc::timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // SAFETY: the pointer and count describe `raw`, `timeout` lives until the call returns, and no signal mask is
        // given.
        let count = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.fd.as_raw_fd(),
                self.raw.as_mut_ptr(),
                BATCH as i32,
                &raw const timeout,
                std::ptr::null::<libc::sigset_t>(),
                0_usize,
            )
        };
        if count < 0 { Err(io::Error::last_os_error()) } else { Ok(count as usize) }
    }
}

/// For what epoll itself can be told (ioctl EPIOCSPARAMS of Linux 6.9), and for another poller that waits for this one.
impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Wakes a [`Poller`] from any thread.
#[derive(Clone, Debug)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    /// An eventfd watched by `poller` under `token`.
    ///
    /// # Errors
    /// Those of eventfd(2) and epoll_ctl(2).
    pub fn new(poller: &Poller, token: u64) -> io::Result<Self> {
        // SAFETY: no pointers; the result is checked before it is owned.
        let fd = unsafe {
            OwnedFd::from_raw_fd(sys::check(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK))?)
        };
        poller.add(&fd, token)?;
        Ok(Self(Arc::new(fd)))
    }

    /// Wakes; many calls may give one event.
    pub fn wake(&self) {
        let one = 1_u64.to_ne_bytes();
        // SAFETY: the pointer and length describe `one`. A full counter (EAGAIN) wakes just as well.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// To be called by the woken side, before it looks at what it was woken for.
    pub fn acknowledge(&self) {
        let mut count = [0_u8; 8];
        // SAFETY: the pointer and length describe `count`. Nothing to read (EAGAIN) is as good.
        unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }
}
