//! Undelivered events of one webhook on disk: append-only segments of JSON lines, and the number of the last delivered event.
//!
//! ```text
//!  DIR/lock                           held by the process that writes here
//!  DIR/delivered                      20 digits
//!  DIR/00000000000000000001.events    one event per line, named after its first sequence number
//! ```
//!
//! A written line survives the process; [`Spool::sync`] makes it survive the machine. A line that a crash cut off is removed.

use std::{
    collections::VecDeque,
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, BufRead, BufReader, Read, Seek, SeekFrom},
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Deserialize;

use crate::event::{Event, LOST, LostEvents};

const ENDING: &str = "events";
/// A spool has at least this many segments, because it is shortened by whole segments.
const SEGMENTS: u64 = 16;
const LARGEST_SEGMENT: u64 = 4 << 20;
/// Occurs only in lines with a [`LOST`] event, because quotes within data are escaped.
const REPORT: &str = "\"type\":\"lost\"";

#[derive(Debug)]
pub(crate) struct Spool {
    dir: PathBuf,
    /// Name of the directory, and prefix of event ids.
    pub(crate) id: String,
    source: Arc<str>,
    _lock: File,
    most_bytes: u64,
    /// Oldest first; the last one is appended to.
    segments: VecDeque<Segment>,
    tail: Option<Arc<File>>,
    delivered_file: Arc<File>,
    delivered: u64,
    /// Last event that [`Self::take`] has returned.
    taken: u64,
    next: u64,
    reader: Option<Reader>,
    /// Drops that are not reported yet.
    lost: Vec<LostEvents>,
    /// Number of events dropped since the spool was opened.
    pub(crate) dropped: u64,
    is_dirty: bool,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    first: u64,
    count: u64,
    bytes: u64,
}

/// An open segment, at the line with the number `next`.
#[derive(Debug)]
struct Reader {
    first: u64,
    next: u64,
    lines: BufReader<File>,
}

/// An event as a line of JSON without its line end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) sequence: u64,
    pub(crate) json: Vec<u8>,
}

impl Segment {
    fn end(self) -> u64 {
        self.first + self.count
    }
}

impl Spool {
    /// Opens or creates a spool; `None` if another process or spool has locked it.
    pub(crate) fn open(dir: &Path, source: &Arc<str>, most_bytes: u64) -> io::Result<Option<Self>> {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let lock = options().create(true).open(dir.join("lock"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        let delivered_file = options().create(true).open(dir.join("delivered"))?;
        let mut text = String::new();
        (&delivered_file).take(20).read_to_string(&mut text)?;
        let delivered = text.parse().unwrap_or(0);
        let mut spool = Self {
            dir: dir.to_owned(),
            id: dir.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            source: Arc::clone(source),
            _lock: lock,
            most_bytes,
            segments: VecDeque::new(),
            tail: None,
            delivered_file: Arc::new(delivered_file),
            delivered,
            taken: delivered,
            next: delivered + 1,
            reader: None,
            lost: Vec::new(),
            dropped: 0,
            is_dirty: false,
        };
        spool.scan()?;
        Ok(Some(spool))
    }

    fn scan(&mut self) -> io::Result<()> {
        let mut firsts: Vec<u64> = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if path.extension().is_some_and(|ending| ending == ENDING)
                && let Some(first) = path.file_stem().and_then(|stem| stem.to_str()?.parse().ok())
            {
                firsts.push(first);
            }
        }
        firsts.sort_unstable();
        let last = firsts.last().copied();
        for first in firsts {
            let file = options().open(self.path(first))?;
            let (count, bytes) = whole_lines(&file, first, last == Some(first))?;
            self.segments.push_back(Segment { first, count, bytes });
            if last == Some(first) {
                file.set_len(bytes)?;
                self.tail = Some(Arc::new(file));
            }
        }
        let end = self.segments.back().map_or(0, |segment| segment.end());
        if end > self.next {
            self.next = end;
        } else if end < self.next {
            // A power failure took lines that had been delivered: numbers continue after them, in another segment.
            self.tail = None;
        }
        self.remove_delivered()
    }

    /// Writes a first part of `events`, at most a segment, and returns its length. If it fails, nothing has changed.
    pub(crate) fn append(&mut self, events: &[Arc<Event>]) -> io::Result<usize> {
        let room = self.segment_bytes();
        if self.segments.back().is_none_or(|tail| tail.bytes >= room) || self.tail.is_none() {
            self.rotate()?;
        }
        let dropped = self.to_drop(room);
        let mut reports = self.lost.clone();
        let lost: u64 = dropped.iter().map(|segment| self.replace_by_report(*segment, &mut reports)).sum();
        let (mut text, mut next) = (String::new(), self.next);
        let mut write = |event: &Event, text: &mut String| {
            event.write(format_args!("{}-{next}", self.id), next, text);
            text.push('\n');
            next += 1;
        };
        for report in &reports {
            write(&Event::new(&self.source, LOST, report), &mut text);
        }
        let mut written = 0;
        while let Some(event) = events.get(written).filter(|_| (text.len() as u64) < room) {
            write(event, &mut text);
            written += 1;
        }
        let (Some(tail), Some(segment)) = (&self.tail, self.segments.back_mut()) else {
            return Err(io::Error::other("no segment to write to"));
        };
        if let Err(error) = tail.write_all_at(text.as_bytes(), segment.bytes) {
            let _ = tail.set_len(segment.bytes);
            self.reader = None;
            return Err(error);
        }
        self.lost.clear();
        segment.bytes += text.len() as u64;
        segment.count += next - self.next;
        self.next = next;
        self.is_dirty = true;
        self.dropped += lost;
        for segment in dropped {
            // A segment that stays is delivered after the next start, although it was reported.
            let _ = self.remove(segment);
        }
        Ok(written)
    }

    /// Reports events that were dropped before they reached the spool.
    pub(crate) fn report(&mut self, lost: LostEvents) {
        lost.add_to(&mut self.lost);
    }

    /// Returns the next events, at most `most`, and no more than one beyond `most_bytes`.
    pub(crate) fn take(&mut self, most: usize, most_bytes: usize) -> io::Result<Vec<Record>> {
        let mut taken = Vec::new();
        let mut bytes = 0;
        while taken.len() < most && bytes < most_bytes {
            let wanted = self.taken + 1;
            let Some(segment) = self.segments.iter().copied().find(|segment| segment.end() > wanted) else {
                break;
            };
            let sequence = wanted.max(segment.first);
            let json = match self.line(segment, sequence) {
                Ok(json) => json,
                Err(error) => {
                    self.reader = None;
                    return Err(error);
                }
            };
            self.taken = sequence;
            bytes += json.len();
            taken.push(Record { sequence, json });
        }
        Ok(taken)
    }

    fn line(&mut self, segment: Segment, sequence: u64) -> io::Result<Vec<u8>> {
        let fits = |reader: &&mut Reader| reader.first == segment.first && reader.next <= sequence;
        let reader = match self.reader.as_mut().filter(fits) {
            Some(_) => self.reader.as_mut(),
            None => {
                let file = File::open(self.path(segment.first))?;
                let reader =
                    Reader { first: segment.first, next: segment.first, lines: BufReader::new(file) };
                Some(self.reader.insert(reader))
            }
        };
        let Some(reader) = reader else { return Err(io::Error::other("no reader")) };
        loop {
            let mut json = Vec::new();
            reader.lines.read_until(b'\n', &mut json)?;
            if json.pop() != Some(b'\n') {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the segment is too short"));
            }
            reader.next += 1;
            if reader.next > sequence {
                return Ok(json);
            }
        }
    }

    /// Records that all events up to `sequence` have been delivered.
    pub(crate) fn delivered(&mut self, sequence: u64) -> io::Result<()> {
        self.delivered = self.delivered.max(sequence);
        self.taken = self.taken.max(sequence);
        self.is_dirty = true;
        self.delivered_file.write_all_at(format!("{:020}", self.delivered).as_bytes(), 0)?;
        self.remove_delivered()
    }

    /// Number of events that are not delivered yet.
    pub(crate) fn waiting(&self) -> u64 {
        let left = |segment: &Segment| segment.end().saturating_sub(segment.first.max(self.delivered + 1));
        self.segments.iter().map(left).sum()
    }

    pub(crate) fn has_more(&self) -> bool {
        self.segments.back().is_some_and(|segment| segment.end() > self.taken + 1)
    }

    pub(crate) fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Files to be synced, outside of any lock on the spool.
    pub(crate) fn sync(&mut self) -> Vec<Arc<File>> {
        let is_dirty = std::mem::replace(&mut self.is_dirty, false);
        let files = self.tail.iter().chain([&self.delivered_file]).filter(|_| is_dirty);
        files.map(Arc::clone).collect()
    }

    /// Removes the spool from the disk.
    pub(crate) fn remove_all(self) -> io::Result<()> {
        fs::remove_dir_all(&self.dir)
    }

    /// Segments to be dropped, so that another one fits: the oldest of which no event has been taken. Taken events may be on their way.
    fn to_drop(&self, room: u64) -> Vec<Segment> {
        let mut bytes: u64 = self.segments.iter().map(|segment| segment.bytes).sum();
        let mut dropped = Vec::new();
        for segment in self.segments.iter().take(self.segments.len().saturating_sub(1)) {
            if bytes.saturating_add(room) <= self.most_bytes {
                break;
            }
            if segment.first > self.taken && segment.count > 0 {
                bytes -= segment.bytes;
                dropped.push(*segment);
            }
        }
        dropped
    }

    /// Adds a dropped segment to `reports`, and also the reports in it, because they will not arrive. Returns the number of other events
    /// in it.
    fn replace_by_report(&self, segment: Segment, reports: &mut Vec<LostEvents>) -> u64 {
        #[derive(Deserialize)]
        struct Report {
            data: LostEvents,
        }
        let text = fs::read_to_string(self.path(segment.first)).unwrap_or_default();
        let mut count = segment.count;
        for line in text.lines().filter(|line| line.contains(REPORT)) {
            if let Ok(report) = serde_json::from_str::<Report>(line) {
                report.data.add_to(reports);
                count = count.saturating_sub(1);
            }
        }
        let (first, last) = (Some(segment.first), Some(segment.end() - 1));
        let reason = "the spool was full".into();
        LostEvents { count: Some(count), first, last, reason }.add_to(reports);
        count
    }

    fn segment_bytes(&self) -> u64 {
        (self.most_bytes / SEGMENTS).clamp(1, LARGEST_SEGMENT)
    }

    fn rotate(&mut self) -> io::Result<()> {
        if let Some(full) = &self.tail {
            full.sync_data()?;
        }
        let first = self.next;
        let file = options().create(true).truncate(true).open(self.path(first))?;
        // An empty segment of the same name is the previous tail.
        self.segments.retain(|segment| segment.first != first);
        self.segments.push_back(Segment { first, count: 0, bytes: 0 });
        self.tail = Some(Arc::new(file));
        Ok(())
    }

    fn remove_delivered(&mut self) -> io::Result<()> {
        while let Some(oldest) = self.segments.front().copied().filter(|_| self.segments.len() > 1) {
            if oldest.end() > self.delivered + 1 {
                break;
            }
            self.remove(oldest)?;
        }
        Ok(())
    }

    fn remove(&mut self, segment: Segment) -> io::Result<()> {
        self.segments.retain(|other| other.first != segment.first);
        if self.reader.as_ref().is_some_and(|reader| reader.first == segment.first) {
            self.reader = None;
        }
        fs::remove_file(self.path(segment.first))
    }

    fn path(&self, first: u64) -> PathBuf {
        self.dir.join(format!("{first:020}.{ENDING}"))
    }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options
}

/// Number of whole lines and their length. In the `last` segment, which a power failure may have filled with anything, lines must
/// also be events with the right numbers.
fn whole_lines(mut file: &File, first: u64, last: bool) -> io::Result<(u64, u64)> {
    #[derive(Deserialize)]
    struct Line {
        sequence: String,
    }
    file.seek(SeekFrom::Start(0))?;
    let (mut lines, mut count, mut bytes) = (BufReader::new(file), 0, 0);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = lines.read_until(b'\n', &mut line)?;
        let is_right = || {
            let read: Result<Line, _> = serde_json::from_slice(&line);
            read.is_ok_and(|read| read.sequence.parse() == Ok(first + count))
        };
        if line.last() != Some(&b'\n') || last && !is_right() {
            return Ok((count, bytes));
        }
        (count, bytes) = (count + 1, bytes + read as u64);
    }
}

#[cfg(test)]
mod tests;
