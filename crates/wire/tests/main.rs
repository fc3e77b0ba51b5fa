//! One module per behaviour, linked into one program; `turnpike_testkit::alone` starts another process.
#![forbid(unsafe_code)]
#![cfg(test)]

mod client_hello;
mod fuzz_channel_data;
mod fuzz_client_hello;
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
