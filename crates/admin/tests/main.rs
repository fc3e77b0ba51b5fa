//! Tests of the admin interface of a real relay, over real sockets.
#![forbid(unsafe_code)]
#![cfg(test)]

mod prelude;
mod support;

mod access;
mod accounts;
mod allocations;
mod answers;
mod bounds;
mod capture;
mod changes;
mod commands;
mod credentials;
mod document;
mod events;
mod fleet;
mod input;
mod listening;
mod live;
mod old_names;
mod page;
mod usage;
mod vendor_credentials;
