//! Tests of the interface over real sockets, in front of a real relay.
#![forbid(unsafe_code)]
#![cfg(test)]

mod prelude;
mod support;

mod access;
mod accounts;
mod allocations;
mod answers;
mod bounds;
mod changes;
mod commands;
mod credentials;
mod document;
mod fleet;
mod input;
mod listening;
mod live;
mod old_names;
mod page;
mod vendor_credentials;
