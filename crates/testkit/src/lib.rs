//! What tests of several crates need. Nothing of it is in the product.
#![forbid(unsafe_code)]

pub mod randomness;
