//! Codec, oracle and fuzz tests: one module per behaviour, linked into one program. A test that needs its own
//! process starts one (`turnpike_testkit::alone`).
#![forbid(unsafe_code)]
#![cfg(test)]

mod fuzz_channel_data;
mod fuzz_frames;
mod fuzz_indication;
mod fuzz_proxy_protocol;
mod fuzz_stun;
mod message_integrity;
mod no_alloc;
mod oracle;
mod prelude;
mod rfc_vectors;
mod stream_splits;
mod stun;
mod support;
