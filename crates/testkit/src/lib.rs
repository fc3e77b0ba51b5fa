//! What tests of several crates need. Nothing of it is in the product.
#![forbid(unsafe_code)]

pub mod alone;
pub mod certificates;
pub mod databases;
pub mod process;
pub mod randomness;
pub mod stun;
mod wait;

pub use wait::{PATIENCE, eventually};
