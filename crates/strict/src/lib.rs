//! Files read strictly: every mistake at once, each with file, line and column, and with what was expected or the nearest name.
//!
//! A [`Document`] is read into serde types, as experiments and profiles are. The configuration has tables of its own and reads a tree of
//! [`Node`]s. Both report the same [`Mistake`]s.
#![forbid(unsafe_code)]

mod document;
mod mistake;
mod tree;

pub use document::Document;
pub use mistake::{Mistake, Mistakes, Origin, hint, nearest};
pub use tree::{Entry, Node, Value, file_text, find, parse_file};
