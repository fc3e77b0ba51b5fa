//! Other programs' configurations: coturn's is translated into a file of ours, rules of rinetd and oxidinetd are read as they are, and
//! files that we do not read are recognised.
#![forbid(unsafe_code)]

pub mod coturn;
pub mod forward;
pub mod toml_text;
mod translation;
pub mod wrong_format;

pub use translation::{Imported, Note};
