//! Memory-mapped BPF array of 64-bit words, shared with the program: reading a counter or setting a route
//! takes no system call.

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

/// Words of an array map created with BPF_F_MMAPABLE (bpf(2)).
#[derive(Debug)]
pub(crate) struct MappedArray {
    start: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: points to shared memory of atomics, mapped until dropped.
unsafe impl Send for MappedArray {}
// SAFETY: as above.
unsafe impl Sync for MappedArray {}

impl MappedArray {
    pub(crate) fn map(map: impl AsFd, len: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, so nothing overlaps; only `drop` unmaps it.
        let start = unsafe { mmap(ptr::null_mut(), bytes(len), access, MapFlags::SHARED, map, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }
}

impl Deref for MappedArray {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has at least that many words, is page-aligned, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for MappedArray {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and no borrow is left.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), bytes(self.len)) };
    }
}

fn bytes(words: usize) -> usize {
    (words * size_of::<u64>()).next_multiple_of(page_size())
}
