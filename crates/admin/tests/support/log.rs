//! Log lines of all tests in this program.

use std::{
    io::{self, Write},
    sync::{Mutex, Once},
};

static LINES: Mutex<Vec<u8>> = Mutex::new(Vec::new());

pub(crate) fn keep() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        tracing_subscriber::fmt().with_writer(|| Kept).with_ansi(false).init();
    });
}

pub(crate) fn lines_with(parts: &[&str]) -> Vec<String> {
    let text = String::from_utf8(LINES.lock().unwrap().clone()).unwrap();
    let fits = |line: &&str| parts.iter().all(|part| line.contains(part));
    text.lines().filter(fits).map(str::to_owned).collect()
}

struct Kept;

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LINES.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
