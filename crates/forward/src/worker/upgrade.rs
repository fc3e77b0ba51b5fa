//! A worker's part of an upgrade ([`crate::upgrade`]): it rests, gives its sessions of UDP clients to the worker of the same number in the
//! new process, and goes on with its connections; or with everything, as if nothing had been.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, mpsc},
};

use serde::{Deserialize, Serialize};
use turnpike_net::Channel;

use super::{Command, Worker};
use crate::{tcp, udp};

/// Sessions that travel at a time: while the one process writes some, the other one reads those before.
const BATCH: usize = 64;

/// What a worker is told in an upgrade. Who asks to be answered waits for it. Rules are named by their keys.
pub(crate) enum Step {
    /// The listeners of these rules, in the order of their ranges.
    ExportSockets(Arc<[u32]>, mpsc::Sender<io::Result<Vec<OwnedFd>>>),
    /// Rest: what comes waits in its socket.
    Pause(mpsc::Sender<()>),
    /// Give the sessions of these rules: how many.
    Export(Channel, Arc<[u32]>, mpsc::Sender<io::Result<usize>>),
    /// Go on: there is no upgrade.
    Resume,
    /// Go on with what is left; answered when what is not has been forgotten.
    Forget(mpsc::Sender<()>),
    /// Serve what was taken in.
    Serve,
    /// The kernel forwards again.
    ResumeFlows,
}

/// A worker's part of a handover in the new process.
pub(crate) struct Takeover {
    /// From the other one.
    pub(crate) channel: Channel,
    /// Of the rules in the order of the other process, the keys that they have here.
    pub(crate) rules: Arc<[u32]>,
    /// Receives the number of sessions, or the reason why they cannot be taken over.
    pub(crate) answer: mpsc::Sender<io::Result<usize>>,
}

/// What comes before the sessions.
#[derive(Serialize, Deserialize)]
struct Head {
    /// Of the UDP listeners of each rule: the kernel's drop counter as last seen.
    drops: Vec<Vec<u32>>,
}

#[derive(Serialize, Deserialize)]
struct Batch {
    /// Each has one descriptor beside it.
    sessions: Vec<udp::Portable>,
    is_last: bool,
}

impl Worker {
    /// A step of a worker that serves. True means the end.
    pub(super) fn upgrade(&mut self, step: Step) -> bool {
        match step {
            Step::ExportSockets(rules, answer) => _ = answer.send(self.export_sockets(&rules)),
            Step::Pause(done) => return self.pause(&done),
            Step::ResumeFlows => self.resume_across(),
            // Who rests, or has yet to begin, is told these.
            Step::Export(..) | Step::Resume | Step::Forget(_) | Step::Serve => {}
        }
        false
    }

    fn export_sockets(&self, rules: &[u32]) -> io::Result<Vec<OwnedFd>> {
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

    /// Rests until it is told how it goes on. True means the end.
    fn pause(&mut self, done: &mpsc::Sender<()>) -> bool {
        let now = self.now();
        if let Some(engine) = &mut self.udp {
            engine.suspend_across(&mut udp::Tick {
                now,
                poller: &self.poller,
                worker: &mut self.worker_rules,
            });
            // What was read has left before anybody else reads.
            engine.flush();
        }
        let _ = done.send(());
        let mut later = Vec::new();
        while let Some(command) = self.inbox.wait() {
            match command {
                Command::Upgrade(Step::Export(channel, rules, answer)) => {
                    let _ = answer.send(self.export_sessions(&channel, &rules));
                }
                Command::Upgrade(Step::Resume) => {
                    self.resume_across();
                    break;
                }
                Command::Upgrade(Step::Forget(done)) => {
                    self.forget();
                    let _ = done.send(());
                    break;
                }
                Command::Stop => {
                    later.push(Command::Stop);
                    break;
                }
                other => later.push(other),
            }
        }
        let now = self.now();
        later.into_iter().any(|command| self.carry_out(command, now))
    }

    fn resume_across(&mut self) {
        let now = self.now();
        if let Some(engine) = &mut self.udp {
            engine.resume_across(now);
        }
    }

    /// Sends all sessions that can go. They remain here.
    fn export_sessions(&mut self, channel: &Channel, rules: &[u32]) -> io::Result<usize> {
        let now = self.now();
        let rules: Vec<udp::RuleKey> = rules.iter().map(|key| udp::RuleKey(*key)).collect();
        let of_rule = |key: &udp::RuleKey| self.udp.as_ref().map(|engine| engine.listener_drops(*key));
        let drops = rules.iter().map(|key| of_rule(key).unwrap_or_default()).collect();
        channel.send_value(&Head { drops }, &[])?;
        let mut count = 0;
        if let Some(engine) = &self.udp {
            for some in engine.portable().chunks(BATCH) {
                let exported = some.iter().filter_map(|at| engine.export(*at, &rules, now));
                let (sessions, descriptors): (Vec<_>, Vec<_>) = exported.unzip();
                count += sessions.len();
                channel.send_value(&Batch { sessions, is_last: false }, &descriptors)?;
            }
        }
        channel.send_value(&Batch { sessions: Vec::new(), is_last: true }, &[])?;
        Ok(count)
    }

    /// The other worker has them now. Connections live on here.
    fn forget(&mut self) {
        let now = self.now();
        self.tcp.surrender(tcp::Tick { now, poller: &self.poller });
        if let Some(engine) = &mut self.udp {
            engine.surrender(&mut udp::Tick { now, poller: &self.poller, worker: &mut self.worker_rules });
        }
        self.publish(now);
    }

    /// Takes over from a worker of the old process, and serves if all other workers can do so too.
    pub(crate) fn run_from_handover(&mut self, takeover: Takeover) {
        let Takeover { channel, rules, answer } = takeover;
        let result = self.receive(&channel, &rules);
        let has_it = result.is_ok();
        let _ = answer.send(result);
        drop(channel);
        let mut later = Vec::new();
        while has_it && let Some(command) = self.inbox.wait() {
            match command {
                Command::Upgrade(Step::Serve) => {
                    self.tcp.take_hold();
                    let now = self.now();
                    if !later.into_iter().any(|command| self.carry_out(command, now)) {
                        self.run();
                    }
                    return;
                }
                // The sessions are the old process's still: none of them ends.
                Command::Stop => return,
                other => later.push(other),
            }
        }
    }

    /// Takes in what the worker of the same number gives; how many sessions.
    fn receive(&mut self, channel: &Channel, rules: &[u32]) -> io::Result<usize> {
        let incomplete =
            || io::Error::new(io::ErrorKind::InvalidData, "what the old process sent is not complete");
        let now = self.now();
        let (Head { drops }, _) = channel.receive_value::<Head>()?;
        for (key, drops) in rules.iter().zip(drops) {
            if let Some(engine) = &self.udp {
                engine.expect_drops(udp::RuleKey(*key), &drops);
            }
        }
        let mut count = 0;
        loop {
            let (Batch { sessions, is_last }, descriptors) = channel.receive_value::<Batch>()?;
            if sessions.len() != descriptors.len() {
                return Err(incomplete());
            }
            count += sessions.len();
            for (session, descriptor) in sessions.into_iter().zip(descriptors) {
                let key = *rules.get(session.rule).ok_or_else(incomplete)?;
                let engine = self.udp.as_mut().ok_or_else(incomplete)?;
                let mut tick = udp::Tick { now, poller: &self.poller, worker: &mut self.worker_rules };
                engine.resume(session, udp::RuleKey(key), descriptor, &mut tick)?;
            }
            if is_last {
                return Ok(count);
            }
        }
    }
}
