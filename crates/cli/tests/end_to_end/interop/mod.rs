//! Third-party programs: their clients against `serve`, our client against their server, and their
//! clients and servers on both sides of `forward`.

mod acme;
mod aioice;
mod bare_machine;
use crate::prelude::*;

pub(crate) mod browsers;
mod calls;
mod classic;
mod coturn_abuse;
mod coturn_client;
mod coturn_extensions;
mod coturn_server;
mod forward;
mod node;
mod openapi;
mod openssl;
mod pion;

fn report(ended: &Finished) -> Value {
    let last = ended.stdout.lines().last().unwrap_or_default();
    serde_json::from_str(last)
        .unwrap_or_else(|error| panic!("no report ({error}), exit {:?}: {}", ended.code, ended.output()))
}
