//! Reads configurations of coturn, rinetd and oxidinetd, and recognizes others to report a helpful
//! error.
#![forbid(unsafe_code)]

pub mod coturn;
pub mod forward;
pub mod toml_text;
mod translation;
pub mod wrong_format;

pub use translation::{Imported, Note};
