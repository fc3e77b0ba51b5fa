//! Files read strictly: every mistake at once, each with file, line and column, and with what was expected or the nearest name.
//!
//! A [`Document`] is read into types of serde's, as experiments and profiles are. Whoever judges values by tables of his own, as the
//! configuration does, tells what is wrong by the same [`Mistake`]s.
#![forbid(unsafe_code)]

mod document;
mod mistake;

pub use document::Document;
pub use mistake::{Mistake, Mistakes, Origin, hint, nearest};
