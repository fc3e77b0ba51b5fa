//! Strict file parsing: reports all errors at once, each with file, line, column, and the expected value or
//! the nearest name.
//!
//! A [`Document`] is parsed into serde types, for experiments and profiles. The configuration has its own tables and reads a tree of
//! [`Node`]s. Both report the same [`Mistake`]s.
#![forbid(unsafe_code)]

mod document;
mod mistake;
mod tree;

pub use document::Document;
pub use mistake::{Mistake, Mistakes, Origin, hint, nearest};
pub use tree::{Entry, Node, Value, file_text, find, parse_file};
