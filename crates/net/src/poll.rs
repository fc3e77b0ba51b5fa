//! epoll(7), level-triggered for datagrams and listeners, edge-triggered for streams, and an eventfd to wake a worker from another thread.

use std::{
    fmt, io,
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::{
        EventfdFlags, Timespec,
        epoll::{self, EventData, EventFlags},
        eventfd,
    },
    io::Errno,
    time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime},
};

/// What is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// As given to [`Poller::add`] or [`Poller::add_with`].
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

/// What a descriptor is watched for. Errors and hang-ups are told all the same, as [`Event::error`] and [`Event::readable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// While it is readable, writable, either, or neither.
    Level {
        /// Readable.
        read: bool,
        /// Writable.
        write: bool,
    },
    /// While it is readable, for a socket that several pollers watch: each event wakes one of them up, or some, but not all
    /// (EPOLLEXCLUSIVE, epoll_ctl(2)). Only for [`Poller::add_with`].
    Exclusive,
    /// A stream's readability, writability, end and urgent byte, edge-triggered: the owner must read until a read is short, or write until
    /// a write is; no call is needed to change what is watched. A socket that is writable tells so at once; after that, TCP tells only when
    /// a short write was made before (SOCK_NOSPACE).
    Edge,
    /// As `Edge`, but without writability.
    EdgeRead,
    /// Of a stream nothing but its end and its errors, edge-triggered: bytes that come wake nobody up.
    EdgeEnd,
}

impl Interest {
    fn flags(self) -> EventFlags {
        let of_stream = EventFlags::IN | EventFlags::RDHUP | EventFlags::PRI | EventFlags::ET;
        match self {
            Self::Level { read, write } => {
                let mut flags = EventFlags::empty();
                flags.set(EventFlags::IN, read);
                flags.set(EventFlags::OUT, write);
                flags
            }
            Self::Exclusive => EventFlags::IN | EventFlags::EXCLUSIVE,
            Self::Edge => of_stream | EventFlags::OUT,
            Self::EdgeRead => of_stream,
            Self::EdgeEnd => EventFlags::RDHUP | EventFlags::ET,
        }
    }
}

/// Events that one wait can bring. Enough that a thousand thin flows need few calls, few enough that the arena holds
/// what they bring.
const BATCH: usize = 256;

/// What need not be as exact as a time-out of epoll_pwait2(2) is.
const COARSE: Duration = Duration::from_millis(1);

/// The token of a poller's own timer; callers must not use it.
const TIMER: u64 = u64::MAX - 1;

/// An epoll instance.
pub struct Poller {
    fd: OwnedFd,
    events: Vec<Event>,
    /// Whether the kernel has epoll_pwait2(2).
    fine: bool,
    /// timerfd(2) of [`Poller::wait_until`], and for when it is set.
    timer: OwnedFd,
    alarm: Option<u64>,
    /// Time for which [`Poller::wait_until`], after it has brought something, looks again and again before it sleeps; zero, the default,
    /// sleeps at once. A wake-up costs a busy worker many microseconds of latency (an interrupt to its core, leaving the idle state);
    /// looking costs its core all of this time after each batch.
    pub busy_poll: Duration,
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
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        let poller = Self {
            fd: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            events: Vec::with_capacity(BATCH),
            fine: true,
            timer,
            alarm: None,
            busy_poll: Duration::ZERO,
            lively: false,
        };
        // Edge-triggered, it need not be read: each expiration is one event.
        epoll::add(&poller.fd, &poller.timer, EventData::new_u64(TIMER), EventFlags::IN | EventFlags::ET)?;
        Ok(poller)
    }

    /// Watches while it is readable.
    ///
    /// # Errors
    /// Those of epoll_ctl(2); ENOSPC when /proc/sys/fs/epoll/max_user_watches is reached.
    pub fn add(&self, fd: &impl AsFd, token: u64) -> io::Result<()> {
        self.add_with(fd, token, Interest::Level { read: true, write: false })
    }

    /// Watches.
    ///
    /// # Errors
    /// As for [`Poller::add`].
    pub fn add_with(&self, fd: &impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.fd, fd, EventData::new_u64(token), interest.flags())?)
    }

    /// Watches for something else; if it is ready already, that is told again.
    ///
    /// # Errors
    /// Those of epoll_ctl(2).
    pub fn set(&self, fd: &impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.fd, fd, EventData::new_u64(token), interest.flags())?)
    }

    /// Stops watching. Closing the descriptor does the same.
    ///
    /// # Errors
    /// Those of epoll_ctl(2).
    pub fn remove(&self, fd: &impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.fd, fd)?)
    }

    /// Waits until `due` on the caller's clock, whose reading is `now`, both in milliseconds; `None` is for ever. Never
    /// returns much too late, but may return early with nothing. Waits no longer than `at_most`, which may be finer than the
    /// clock's milliseconds; zero only looks.
    ///
    /// A loop whose deadline hardly changes pays nothing for it: it is a timer that stays set, whereas a time-out of
    /// epoll_wait(2) is set up and taken down by each call that sleeps.
    ///
    /// # Errors
    /// Those of epoll_wait(2) but EINTR, and of timerfd_settime(2).
    pub fn wait_until(
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
        let setting = Itimerspec { it_interval: Timespec::default(), it_value: timespec(after) };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &setting)?;
        Ok(())
    }

    /// Waits, `None` for ever; as exact as the thread's timer slack (see [`crate::rlimit::exact_timers`]), or in whole
    /// milliseconds, rounded up, before Linux 5.11. An interruption by a signal counts as a time-out.
    ///
    /// # Errors
    /// Those of epoll_wait(2) but EINTR.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<&[Event]> {
        self.events.clear();
        let mut room = [const { MaybeUninit::uninit() }; BATCH];
        let ready = match self.wait_raw(&mut room, timeout) {
            Ok(ready) => ready,
            Err(Errno::INTR) => &[],
            Err(error) => return Err(error.into()),
        };
        for raw in ready {
            let (token, flags) = (raw.data.u64(), raw.flags);
            if token == TIMER {
                self.alarm = None;
                continue;
            }
            self.events.push(Event {
                token,
                readable: flags.intersects(EventFlags::IN | EventFlags::HUP),
                writable: flags.intersects(EventFlags::OUT),
                error: flags.intersects(EventFlags::ERR),
                closed: flags.intersects(EventFlags::RDHUP),
                priority: flags.intersects(EventFlags::PRI),
            });
        }
        Ok(&self.events)
    }

    fn wait_raw<'a>(
        &mut self,
        room: &'a mut [MaybeUninit<epoll::Event>; BATCH],
        timeout: Option<Duration>,
    ) -> Result<&'a [epoll::Event], Errno> {
        let whole_ms = timeout.is_none_or(|t| t.subsec_nanos() % 1_000_000 == 0);
        if !whole_ms && self.fine {
            match self.wait_fine(room, timeout.unwrap_or_default()) {
                Err(Errno::NOSYS) => self.fine = false,
                // SAFETY: so many events have been written.
                done => return done.map(|count| unsafe { room[..count].assume_init_ref() }),
            }
        }
        // In whole milliseconds, rounded up, as long as they fit in an integer.
        let timeout = timeout.map(|time| timespec(time.min(Duration::from_millis(i32::MAX as u64))));
        let (ready, _) = epoll::wait(&self.fd, &mut room[..], timeout.as_ref())?;
        Ok(ready)
    }

    /// epoll_pwait2(2), called by number because glibc has it only since 2.35, and rustix does not call it on kernels that may lack it.
    fn wait_fine(
        &self,
        room: &mut [MaybeUninit<epoll::Event>; BATCH],
        timeout: Duration,
    ) -> Result<usize, Errno> {
        let timeout = timespec(timeout);
        // SAFETY: the pointer and count describe `room`, whose type has the kernel's layout; `timeout` lives until the call returns, and no
        // signal mask is given.
        let count = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.fd.as_raw_fd(),
                room.as_mut_ptr(),
                BATCH as i32,
                &raw const timeout,
                std::ptr::null::<libc::sigset_t>(),
                0_usize,
            )
        };
        usize::try_from(count)
            .map_err(|_| Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL))
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() }
}

impl fmt::Debug for Poller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poller").field("fd", &self.fd).finish_non_exhaustive()
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
pub(crate) struct Waker(Arc<OwnedFd>);

impl Waker {
    /// An eventfd watched by `poller` under `token`.
    pub(crate) fn new(poller: &Poller, token: u64) -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        poller.add(&fd, token)?;
        Ok(Self(Arc::new(fd)))
    }

    /// Wakes; many calls may give one event.
    pub(crate) fn wake(&self) {
        // A full counter (EAGAIN) wakes just as well.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// To be called by the woken side, before it looks at what it was woken for.
    pub(crate) fn acknowledge(&self) {
        // Nothing to read (EAGAIN) is as good.
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}
