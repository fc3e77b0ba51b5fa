//! Health check of one target: its schedule, and the request in progress.

use std::{io, sync::Arc};

use turnpike_net::{Interest, Poller, TcpSocket};

use super::stream_check::StreamCheck;
use crate::{Address, datagram_check::DatagramCheck, state::RuleState, targets::TargetMember};

pub(super) struct Check {
    pub(super) state: Arc<RuleState>,
    pub(super) member: Arc<TargetMember>,
    /// Start of the next check, or timeout of the current one; milliseconds.
    pub(super) due: u64,
    pub(super) interval: u64,
    pub(super) patience: u64,
    pub(super) asked: Option<CheckSocket>,
}

pub(super) enum CheckSocket {
    Connect(TcpSocket),
    Stream(StreamCheck),
    Datagram(DatagramCheck),
}

impl CheckSocket {
    pub(super) fn begin(check: &Check, address: &Address, token: u64, poller: &Poller) -> io::Result<Self> {
        if check.state.rule.targets_speak_udp() {
            let Address::Ip(address) = address else { return Err(io::ErrorKind::Unsupported.into()) };
            let asked = DatagramCheck::begin(&check.state.rule, *address)?;
            poller.add_with(&asked, token, Interest::EdgeRead)?;
            return Ok(Self::Datagram(asked));
        }
        // A check has no client address.
        let options = turnpike_net::ConnectOptions { transparent: false, ..check.state.connect.clone() };
        let socket = address.connect(&options)?;
        poller.add_with(&socket, token, Interest::Edge)?;
        Ok(match &check.state.rule.health_question {
            Some(question) => Self::Stream(StreamCheck::new(socket, &check.state.rule, question)),
            None => Self::Connect(socket),
        })
    }
}

impl Check {
    pub(super) fn is_for(&self, state: &Arc<RuleState>) -> bool {
        Arc::ptr_eq(&self.state, state)
    }
}
