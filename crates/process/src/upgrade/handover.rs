//! State that a service hands over, and the descriptors that belong to it.

use std::{io, os::fd::OwnedFd, time::Duration};

use serde::{Deserialize, Serialize};
use turnpike_net::PassedSockets;
use turnpike_worker::Channel;
use zeroize::Zeroizing;

use crate::error::ProcessError;

/// A listening socket and its address in the configuration.
pub type NamedSocket = (String, OwnedFd);

/// State that a service can hand over to a new process; used from a thread that may block.
pub trait HandoverState: Send + Sync {
    /// Exports everything that the new process needs before the workers pause.
    fn offer(&self) -> io::Result<HandoverOffer>;
    /// Pauses the workers. Afterwards, even after an error, the caller calls [`HandoverState::forget`] or
    /// [`HandoverState::resume`].
    fn pause(&self, successor_keeps_flows: bool) -> io::Result<()>;
    /// Sends the sessions to the workers at the other ends of `channels`; returns their number.
    fn export(&self, channels: Vec<Channel>, patience: Duration) -> io::Result<usize>;
    fn resume(&self);
    fn forget(&self);
}

pub struct HandoverOffer {
    /// State as JSON; it contains keys.
    pub(crate) text: Zeroizing<Vec<u8>>,
    pub(crate) descriptors: Vec<OwnedFd>,
    /// This process's ends of the channels between workers.
    pub(crate) channels: Vec<Channel>,
}

impl HandoverOffer {
    pub fn new(
        offer: &impl Serialize,
        descriptors: Vec<OwnedFd>,
        channels: Vec<Channel>,
    ) -> io::Result<Self> {
        // Allocated large enough from the start, because a growing buffer would leave copies of keys in
        // memory.
        let mut text = Zeroizing::new(Vec::with_capacity(1 << 16));
        serde_json::to_writer(&mut *text, offer)?;
        Ok(Self { text, descriptors, channels })
    }
}

/// Names of the last descriptors in an offer: first the sockets of the admin interface and the credential
/// service, then those passed by a service manager.
#[derive(Default, Serialize, Deserialize)]
pub struct DescriptorNames {
    page: Vec<String>,
    passed: Vec<String>,
}

impl DescriptorNames {
    pub fn export(
        page: Vec<NamedSocket>,
        passed: &PassedSockets,
        descriptors: &mut Vec<OwnedFd>,
    ) -> io::Result<Self> {
        let mut names = Self::default();
        for (name, descriptor) in page {
            names.page.push(name);
            descriptors.push(descriptor);
        }
        for (descriptor, name) in passed.lend()? {
            names.passed.push(name);
            descriptors.push(descriptor);
        }
        Ok(names)
    }

    pub fn import(
        self,
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<(Vec<NamedSocket>, PassedSockets), ProcessError> {
        let Self { page, passed } = self;
        let first = descriptors.len().checked_sub(page.len() + passed.len());
        let incomplete = || ProcessError::Upgrade("the old process's offer is incomplete".to_owned());
        let mut sockets = descriptors.split_off(first.ok_or_else(incomplete)?).into_iter();
        let page = page.into_iter().zip(sockets.by_ref()).collect();
        Ok((page, PassedSockets::new(sockets.zip(passed))?))
    }
}
