//! Strict file parsing: reports all errors at once, each with file, line, column, and the expected value or
//! the nearest name.
//!
//! [`Document`] parses experiments and profiles into serde types. The configuration has its own tables of
//! keys and is read from a tree of [`ValueNode`]s. Both report errors as [`Mistake`]s.
#![forbid(unsafe_code)]

mod document;
mod mistake;
mod tree;

pub use document::Document;
pub use mistake::{Mistake, Mistakes, Origin, hint, nearest};
pub use tree::{TableEntry, Value, ValueNode, file_text, find, parse_file, parse_value};
