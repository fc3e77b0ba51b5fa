//! Handover steps of a worker ([`crate::upgrade`]): it pauses, exports its sessions of UDP clients to the new
//! process and keeps its TCP connections, or resumes normal service.

use std::{io, os::fd::OwnedFd};

use serde::{Deserialize, Serialize};
use turnpike_worker::{Channel, HandoverBatch, HandoverStep};

use super::{Command, Worker};
use crate::{tcp, udp};

/// First message on a channel, sent before the sessions.
#[derive(Serialize, Deserialize)]
struct Head {
    /// Last values of the kernel's drop counters, for each rule and UDP listener.
    drops: Vec<Vec<u32>>,
}

impl Worker {
    pub(super) fn upgrade(&mut self, step: HandoverStep) {
        match step {
            HandoverStep::Pause(done) => {
                let now = self.frame.now_ms();
                if let Some(engine) = &mut self.udp {
                    engine.suspend_across(&mut udp::UdpTick {
                        now,
                        poller: &self.frame.poller,
                        worker: &mut self.worker_rules,
                    });
                    // Send the datagrams received so far before another process reads from the sockets.
                    engine.flush();
                }
                let _ = done.send(());
                self.rest();
            }
            HandoverStep::ResumeFlows => self.resume_across(),
            // Valid only on a paused worker.
            HandoverStep::Export(..)
            | HandoverStep::Import(..)
            | HandoverStep::Resume
            | HandoverStep::Forget(_)
            | HandoverStep::Serve => {}
        }
    }

    pub(super) fn export_sockets(&self, rules: &[u32]) -> io::Result<Vec<OwnedFd>> {
        let mut sockets = Vec::new();
        for rule in rules {
            let of_tcp = self.tcp.listening(*rule);
            let of_udp = self.udp.iter().flat_map(|engine| engine.listening(udp::RuleKey(*rule)));
            for descriptor in of_tcp.into_iter().chain(of_udp) {
                sockets.push(descriptor.try_clone_to_owned()?);
            }
        }
        Ok(sockets)
    }

    /// Runs upgrade steps until the worker serves again or stops; defers other commands.
    fn rest(&mut self) {
        while let Some(command) = self.frame.next_command() {
            match command {
                Command::Upgrade(HandoverStep::Export(channel, answer)) => {
                    let _ = answer.send(self.export_sessions(&channel));
                }
                Command::Upgrade(HandoverStep::Import(channel, answer)) => {
                    let imported = self.import_sessions(&channel);
                    self.frame.is_stopped = imported.is_err();
                    let _ = answer.send(imported);
                    if self.frame.is_stopped {
                        return;
                    }
                }
                Command::Upgrade(HandoverStep::Resume) => return self.resume_across(),
                Command::Upgrade(HandoverStep::Forget(done)) => {
                    self.forget();
                    let _ = done.send(());
                    return;
                }
                Command::Upgrade(HandoverStep::Serve) => return self.tcp.take_hold(),
                other => self.frame.defer(other),
            }
        }
    }

    fn resume_across(&mut self) {
        let now = self.frame.now_ms();
        if let Some(engine) = &mut self.udp {
            engine.resume_across(now);
        }
    }

    /// Sends all sessions that can be handed over; they also remain here.
    fn export_sessions(&mut self, channel: &Channel) -> io::Result<usize> {
        let now = self.frame.now_ms();
        let rules: Vec<udp::RuleKey> = self.handed_over.iter().map(|key| udp::RuleKey(*key)).collect();
        let of_rule = |key: &udp::RuleKey| self.udp.as_ref().map(|engine| engine.listener_drops(*key));
        let drops = rules.iter().map(|key| of_rule(key).unwrap_or_default()).collect();
        channel.send_value(&Head { drops }, &[])?;
        let mut count = 0;
        if let Some(engine) = &self.udp {
            for some in engine.portable().chunks(HandoverBatch::<udp::Portable>::MOST) {
                let exported = some.iter().filter_map(|at| engine.export(*at, &rules, now));
                let (sessions, descriptors): (Vec<_>, Vec<_>) = exported.unzip();
                count += sessions.len();
                channel.send_value(&HandoverBatch { sessions, is_last: false }, &descriptors)?;
            }
        }
        channel.send_value(&HandoverBatch::<udp::Portable> { sessions: Vec::new(), is_last: true }, &[])?;
        Ok(count)
    }

    /// Drops exported sessions and keeps connections.
    fn forget(&mut self) {
        let now = self.frame.now_ms();
        self.tcp.surrender(tcp::Tick { now, poller: &self.frame.poller });
        if let Some(engine) = &mut self.udp {
            engine.surrender(&mut udp::UdpTick {
                now,
                poller: &self.frame.poller,
                worker: &mut self.worker_rules,
            });
        }
        self.publish(now);
    }

    /// Takes over from a worker of the old process, and serves clients once all other workers are ready too.
    pub(crate) fn run_from_handover(&mut self) {
        self.rest();
        // If the worker was stopped, the sessions still belong to the old process.
        if !self.frame.is_stopped && !self.run_commands(self.frame.now_ms()) {
            self.run();
        }
    }

    /// Imports the sessions of the worker with the same number; returns their number.
    fn import_sessions(&mut self, channel: &Channel) -> io::Result<usize> {
        let incomplete =
            || io::Error::new(io::ErrorKind::InvalidData, "the old process sent incomplete data");
        let now = self.frame.now_ms();
        let (Head { drops }, _) = channel.receive_value::<Head>()?;
        for (key, drops) in self.handed_over.iter().zip(drops) {
            if let Some(engine) = &self.udp {
                engine.expect_drops(udp::RuleKey(*key), &drops);
            }
        }
        let mut count = 0;
        loop {
            let (HandoverBatch { sessions, is_last }, descriptors) =
                channel.receive_value::<HandoverBatch<udp::Portable>>()?;
            if sessions.len() != descriptors.len() {
                return Err(incomplete());
            }
            count += sessions.len();
            for (session, descriptor) in sessions.into_iter().zip(descriptors) {
                let key = *self.handed_over.get(session.rule).ok_or_else(incomplete)?;
                let engine = self.udp.as_mut().ok_or_else(incomplete)?;
                let mut tick =
                    udp::UdpTick { now, poller: &self.frame.poller, worker: &mut self.worker_rules };
                engine.resume(session, udp::RuleKey(key), descriptor, &mut tick)?;
            }
            if is_last {
                return Ok(count);
            }
        }
    }
}
