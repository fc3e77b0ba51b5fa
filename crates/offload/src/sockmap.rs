//! Pairs of TCP sockets of one worker between which the kernel passes interactive traffic (`bpf/verdict.bpf.c`) without
//! waking user space.
//!
//! ```text
//!  socket ─▶ turnpike_chat: small, and the other side keeps up? ─yes─▶ queue of a kernel thread ─▶ other socket
//!                 └─ no, or user space has set UP ──▶ read(2), as without the program
//! ```
//!
//! A pair starts with both directions in user space, and stays in the map until its sockets are closed: data
//! that arrives between the last read and a removal would be lost with the map's queue. Each direction has a
//! single word for the number of bytes seen and where they go, so user space and the program always agree on
//! who handles a byte.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    sync::atomic::{AtomicU64, Ordering},
};

use aya::{
    Btf, Ebpf, EbpfLoader,
    maps::{HashMap, MapData, RingBuf, SockMap},
    programs::SkSkb,
    util::KernelVersion,
};
use rustix::net::sockopt::socket_cookie;

use crate::{
    error::{OffloadError, chain},
    mapped_array::MappedArray,
    object::{array, map_error, take},
    slots::Slots,
    verification::load_program,
};

static OBJECT: &[u8] = aya::include_bytes_aligned!("../bpf/verdict.o");

const PROGRAM: &str = "turnpike_chat";

/// First kernel that resumes an interrupted send correctly. Older kernels send bytes twice if the reader is
/// slow.
const SOUND: KernelVersion = KernelVersion::new(6, 16, 0);

/// Words (64 bits) per direction, as in the program's `struct side`.
const SIDE_WORDS: usize = 8;
const SEEN: usize = 0;
const BASE: usize = 1;
const RUN: usize = 2;
const HANDED: usize = 3;
/// Flag in the word SEEN: data goes to user space.
const UP: u64 = 1 << 63;
/// Flag in the word BASE: the value is valid.
const KNOWN: u64 = 1 << 32;

/// Time until slots are reused, in milliseconds: the program may still be working for the old socket.
const REST_MS: u64 = 1000;

pub struct Sockmap {
    places: HashMap<MapData, u64, u32>,
    sockets: SockMap<MapData>,
    sides: MappedArray,
    raised: RingBuf<MapData>,
    free: Slots,
    _object: Ebpf,
}

#[derive(Debug)]
#[must_use = "its slot is lost unless the two sockets are parted"]
pub struct Joined {
    pair: u32,
    cookies: [u64; 2],
    is_whole: bool,
}

impl Joined {
    #[must_use]
    pub fn pair(&self) -> u32 {
        self.pair
    }

    fn place(&self, side: usize) -> usize {
        self.pair as usize * 2 + side
    }
}

impl Sockmap {
    pub fn load(workers: usize, pairs: u32) -> Result<Vec<Self>, OffloadError> {
        if KernelVersion::current().is_ok_and(|it| it < SOUND) {
            return Err(OffloadError::Unsound);
        }
        let btf = Btf::from_sys_fs().map_err(|error| OffloadError::Kernel {
            what: "a description of its own types (/sys/kernel/btf/vmlinux)",
            source: io::Error::other(chain(&error)),
        })?;
        (0..workers).map(|_| Self::new(&btf, pairs)).collect()
    }

    fn new(btf: &Btf, pairs: u32) -> Result<Self, OffloadError> {
        let places = pairs.saturating_mul(2);
        let mut object = EbpfLoader::new()
            .btf(Some(btf))
            .map_max_entries("places", places)
            .map_max_entries("sockets", places)
            .map_max_entries("sides", places)
            .load(OBJECT)
            .map_err(OffloadError::load)?;
        // The program needs the descriptors of the maps, so load it before taking the maps.
        let program = program(&mut object)?;
        load_program(|| program.load())?;
        // If the kernel does not report the size, assume that it compiles the program.
        if program.info().is_ok_and(|info| info.size_jitted() == 0) {
            return Err(OffloadError::Interpreted);
        }
        let sockets = SockMap::try_from(take(&mut object, "sockets")?).map_err(map_error)?;
        self::program(&mut object)?.attach(sockets.fd()).map_err(OffloadError::program)?;
        Ok(Self {
            places: HashMap::try_from(take(&mut object, "places")?).map_err(map_error)?,
            sockets,
            sides: array(&mut object, "sides", places as usize * SIDE_WORDS)?,
            raised: RingBuf::try_from(take(&mut object, "raised")?).map_err(map_error)?,
            free: Slots::new(pairs, REST_MS),
            _object: object,
        })
    }

    /// Joins two sockets. User space keeps reading until [`Sockmap::lower`] has switched both directions to
    /// the kernel. `None` if there are too many pairs. `now` is the time of a monotonic clock in
    /// milliseconds. After an error, nothing has changed.
    pub fn join(&mut self, now: u64, sockets: [BorrowedFd<'_>; 2]) -> io::Result<Option<Joined>> {
        let cookies = [socket_cookie(sockets[0])?, socket_cookie(sockets[1])?];
        let Some(pair) = self.free.take_rested(now) else { return Ok(None) };
        let mut joined = Joined { pair, cookies, is_whole: false };
        for (side, cookie) in cookies.iter().enumerate() {
            let place = joined.place(side);
            self.word(place, BASE).store(0, Ordering::Relaxed);
            self.word(place, RUN).store(0, Ordering::Relaxed);
            self.word(place, HANDED).store(0, Ordering::Relaxed);
            self.word(place, SEEN).store(UP, Ordering::Release);
            if let Err(error) = self.places.insert(cookie, number(place), 0) {
                self.part(now, joined);
                return Err(io::Error::other(chain(&error)));
            }
        }
        // The slots are known now, so each socket's bytes are counted from the first one.
        for (side, socket) in sockets.iter().enumerate() {
            if let Err(error) = self.sockets.set(number(joined.place(side)), &socket.as_raw_fd(), 0) {
                if side == 0 {
                    self.part(now, joined);
                    return Err(io::Error::other(chain(&error)));
                }
                // Removing the first socket from the map could lose data, so the pair stays in user space
                // permanently.
                return Ok(Some(joined));
            }
        }
        joined.is_whole = true;
        Ok(Some(joined))
    }

    /// Separates a pair. Must be called before its sockets are closed, which removes them from the map.
    pub fn part(&mut self, now: u64, joined: Joined) {
        for cookie in joined.cookies {
            let _ = self.places.remove(&cookie);
        }
        self.free.give_back(now, joined.pair);
    }

    #[must_use]
    pub fn seen(&self, joined: &Joined, side: usize) -> u64 {
        self.word(joined.place(side), SEEN).load(Ordering::Acquire) & !UP
    }

    #[must_use]
    pub fn is_up(&self, joined: &Joined, side: usize) -> bool {
        self.word(joined.place(side), SEEN).load(Ordering::Acquire) & UP != 0
    }

    /// Number of bytes from this side that the kernel has passed on or will soon pass on, or that user space
    /// had read before the kernel took over. User space reads the rest.
    #[must_use]
    pub fn handed(&self, joined: &Joined, side: usize) -> u64 {
        match self.word(joined.place(side), SEEN).load(Ordering::Acquire) {
            seen if seen & UP == 0 => seen,
            _ => self.word(joined.place(side), HANDED).load(Ordering::Acquire),
        }
    }

    /// Switches data from this side to user space. After that, [`Sockmap::handed`] no longer grows.
    pub fn raise(&self, joined: &Joined, side: usize) {
        let place = joined.place(side);
        let seen = self.word(place, SEEN).fetch_or(UP, Ordering::AcqRel);
        if seen & UP == 0 {
            self.word(place, HANDED).store(seen, Ordering::Release);
        }
    }

    /// Lets the kernel pass data from this side again, provided that exactly `taken` bytes have arrived and
    /// all have been written to the other side. Returns true on success.
    pub fn lower(&self, joined: &Joined, side: usize, taken: u64) -> bool {
        let place = joined.place(side);
        // Data received before the other socket was joined may still be unwritten; the program does not know
        // how much.
        let is_based = taken == 0 || self.word(place, BASE).load(Ordering::Acquire) & KNOWN != 0;
        if !joined.is_whole || !is_based {
            return false;
        }
        self.word(place, RUN).store(0, Ordering::Relaxed);
        let seen = self.word(place, SEEN);
        seen.compare_exchange(UP | taken, taken, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Returns a pair with a direction that the program has switched to user space; `None` if there are no
    /// more. The pair may have been parted since then.
    pub fn raised(&mut self) -> Option<u32> {
        let place = <[u8; 4]>::try_from(&*self.raised.next()?).map(u32::from_ne_bytes);
        place.ok().map(|place| place / 2)
    }

    fn word(&self, place: usize, word: usize) -> &AtomicU64 {
        &self.sides[place * SIDE_WORDS + word]
    }
}

/// Readable when [`Sockmap::raised`] has entries.
impl AsFd for Sockmap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.raised.as_fd()
    }
}

fn program(object: &mut Ebpf) -> Result<&mut SkSkb, OffloadError> {
    let program = object.program_mut(PROGRAM).ok_or_else(|| OffloadError::Object(format!("no {PROGRAM}")))?;
    program.try_into().map_err(OffloadError::program)
}

fn number(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_matches_the_program() {
        let source = include_str!("../bpf/verdict.bpf.c");
        let fields = source.split("struct side {").nth(1).and_then(|rest| rest.split('}').next());
        let words: Vec<&str> = fields
            .expect("the program defines the struct")
            .lines()
            .filter_map(|line| line.trim().strip_prefix("u64 ")?.strip_suffix(';'))
            .collect();
        assert_eq!(words, ["seen", "base", "run", "handed", "unused[4]"]);
        assert_eq!([SEEN, BASE, RUN, HANDED, SIDE_WORDS], [0, 1, 2, 3, 4 + 4]);
        assert!(source.contains(&format!("#define UP (1ULL << {})", UP.trailing_zeros())));
        assert!(source.contains(&format!("#define KNOWN (1ULL << {})", KNOWN.trailing_zeros())));
    }
}
