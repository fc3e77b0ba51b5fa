//! epoll(7), level-triggered for datagrams and listeners, edge-triggered for streams.

use std::{
    fmt, io,
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{
        Timespec,
        epoll::{self, EventData, EventFlags},
    },
    io::Errno,
    time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Value given to [`Poller::add`] or [`Poller::add_with`].
    pub token: u64,
    pub readable: bool,
    pub writable: bool,
    /// EPOLLERR: read the error queue of a UDP socket with `errors`; on other sockets, receive. The event
    /// repeats until the error is read.
    pub error: bool,
    /// EPOLLRDHUP, edge-triggered only: the peer has sent FIN or the connection is broken.
    pub closed: bool,
    /// EPOLLPRI, edge-triggered only: an urgent byte is queued; reads stop before it.
    pub priority: bool,
}

/// Events to watch. Errors and hang-ups are always reported, as [`Event::error`] and [`Event::readable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    Level {
        read: bool,
        write: bool,
    },
    /// Readable, for a socket shared by several pollers: each event wakes at least one of them
    /// (EPOLLEXCLUSIVE, epoll_ctl(2)). Only for [`Poller::add_with`].
    Exclusive,
    /// All events of a stream, edge-triggered: read until a read is short, write until a write is short. A
    /// writable socket is reported immediately; after that, TCP reports it only after a short write
    /// (SOCK_NOSPACE).
    Edge,
    /// `Edge` without writability.
    EdgeRead,
    /// End of stream and errors only, edge-triggered; data causes no wake-up.
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

/// Maximum number of events per wait. A thousand thin flows need few calls, and the arena holds all their
/// datagrams.
const BATCH: usize = 256;

/// Waits of at least this length use the timer instead of the timeout of epoll_pwait2(2).
const COARSE: Duration = Duration::from_millis(1);

/// Token of the poller's own timer; callers must not use it.
const TIMER: u64 = u64::MAX - 1;

pub struct Poller {
    fd: OwnedFd,
    events: Vec<Event>,
    /// True if the kernel has epoll_pwait2(2).
    fine: bool,
    /// timerfd(2) of [`Poller::wait_until`] and its expiry in the caller's milliseconds.
    timer: OwnedFd,
    alarm: Option<u64>,
    /// Time for which [`Poller::wait_until`] polls after a batch before it sleeps; zero, the default, sleeps
    /// immediately. A wake-up adds microseconds of latency (interrupt, leaving the idle state); polling costs
    /// the core this much time after each batch.
    pub busy_poll: Duration,
    lively: bool,
}

impl Poller {
    /// If a wait returns this many events, more may be ready. One event may be the poller's own timer.
    pub const FULL: usize = BATCH - 1;

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
        // Edge-triggered, so the timer need not be read: each expiration is one event.
        epoll::add(&poller.fd, &poller.timer, EventData::new_u64(TIMER), EventFlags::IN | EventFlags::ET)?;
        Ok(poller)
    }

    /// Watches for readability. ENOSPC if /proc/sys/fs/epoll/max_user_watches is reached.
    pub fn add(&self, fd: &impl AsFd, token: u64) -> io::Result<()> {
        self.add_with(fd, token, Interest::Level { read: true, write: false })
    }

    pub fn add_with(&self, fd: &impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.fd, fd, EventData::new_u64(token), interest.flags())?)
    }

    /// Changes the watched events. A condition that is already true is reported again.
    pub fn set(&self, fd: &impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.fd, fd, EventData::new_u64(token), interest.flags())?)
    }

    /// Stops watching, as closing the descriptor does.
    pub fn remove(&self, fd: &impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.fd, fd)?)
    }

    /// Waits until `due` (forever if `None`), in milliseconds of the caller's clock, which now reads `now`.
    /// May return early without events. `at_most` also limits the wait and may be finer than a millisecond;
    /// zero does not wait.
    ///
    /// A deadline that rarely changes costs nothing, because it is a timer that stays set. A timeout of
    /// epoll_wait(2) would be set up and removed in each call that sleeps.
    pub fn wait_until(
        &mut self,
        now: u64,
        due: Option<u64>,
        at_most: Option<Duration>,
    ) -> io::Result<&[Event]> {
        let (due, at_most) =
            match at_most.map(|time| (time, u64::try_from(time.as_nanos().div_ceil(1_000_000)))) {
                // The wait is long enough to use the timer.
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

    /// Waits without the timer; `None` waits forever. Precision is the thread's timer slack (see
    /// [`crate::rlimit::exact_timers`]), or whole milliseconds, rounded up, before Linux 5.11. A signal ends
    /// the wait like a timeout.
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
                // SAFETY: the kernel has written `count` events.
                done => return done.map(|count| unsafe { room[..count].assume_init_ref() }),
            }
        }
        // Limit the timeout to what an i32 can hold in milliseconds.
        let timeout = timeout.map(|time| timespec(time.min(Duration::from_millis(i32::MAX as u64))));
        let (ready, _) = epoll::wait(&self.fd, &mut room[..], timeout.as_ref())?;
        Ok(ready)
    }

    /// epoll_pwait2(2) by number: glibc has had it since 2.35, and rustix does not call it on kernels that
    /// may lack it.
    fn wait_fine(
        &self,
        room: &mut [MaybeUninit<epoll::Event>; BATCH],
        timeout: Duration,
    ) -> Result<usize, Errno> {
        let timeout = timespec(timeout);
        // SAFETY: the pointer and count describe `room`, whose type has the kernel's layout; `timeout` lives
        // until the call returns, and no signal mask is given.
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

/// The descriptor is needed for EPIOCSPARAMS (Linux 6.9), and by a poller that watches this one.
impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
