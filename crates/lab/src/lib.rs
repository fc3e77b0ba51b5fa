#![forbid(unsafe_code)]
//! x
#![allow(dead_code)]
mod error;
mod program;
mod strict;
mod tools;
mod topology;
