//! Tests of webhooks over sockets.

mod delivery;
mod restart;
mod support;
