#![forbid(unsafe_code)]
//! x
#![allow(dead_code)]
mod error;
mod experiment;
pub mod metric;
pub mod order;
mod probe;
mod program;
pub mod progress;
pub mod record;
mod run;
pub mod search;
pub mod stats;
mod stop;
mod strict;
mod tools;
mod topology;
pub mod verdict;
pub mod void;
