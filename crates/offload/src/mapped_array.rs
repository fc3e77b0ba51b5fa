//! A memory-mapped BPF array of 64-bit words, shared with the program: reading a counter or setting a route takes no system call.

use std::{
    io,
    ops::Deref,
    os::fd::AsFd,
    ptr::{self, NonNull},
    sync::atomic::AtomicU64,
};

use rustix::{
    mm::{MapFlags, ProtFlags, mmap, munmap},
    param::page_size,
};

/// The words of an array map made with BPF_F_MMAPABLE, whose values are whole words (bpf(2)).
#[derive(Debug)]
pub(crate) struct MappedArray {
    start: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: what it points to is shared memory of atomics, mapped until it is dropped.
unsafe impl Send for MappedArray {}
// SAFETY: as above.
unsafe impl Sync for MappedArray {}

impl MappedArray {
    /// Maps `len` words.
    pub(crate) fn map(map: impl AsFd, len: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: at an address of the kernel's choice, so that it overlaps nothing; unmapped by `drop` alone.
        let start = unsafe { mmap(ptr::null_mut(), bytes(len), access, MapFlags::SHARED, map, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }
}

impl Deref for MappedArray {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is of that many words at least, page-aligned, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for MappedArray {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and nobody borrows it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), bytes(self.len)) };
    }
}

fn bytes(words: usize) -> usize {
    (words * size_of::<u64>()).next_multiple_of(page_size())
}
