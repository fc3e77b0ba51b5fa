//! Configurations of other programs. coturn's is translated to our format, rules of rinetd and oxidinetd are
//! read directly, and other formats are recognized for a helpful error.
#![forbid(unsafe_code)]

pub mod coturn;
pub mod forward;
pub mod toml_text;
mod translation;
pub mod wrong_format;

pub use translation::{Imported, Note};
