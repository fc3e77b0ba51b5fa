//! Worker thread with its own epoll, listeners, connections and sessions. [`Worker::run`] handles a wake-up
//! from top to bottom.

mod upgrade;

use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use hashbrown::HashMap;
use turnpike_net::{Datapath, Event, Poller};
use turnpike_worker::{Frame, HandoverStep, INBOX};

use crate::{
    Address, RuleId, RuleSnapshot,
    batching::{self, Batching},
    common::ForwardCommon,
    kernel::Parts,
    listen::{Acceptor, ListenerKind, RuleSockets, Tcp},
    state::RuleState,
    tcp, udp,
    worker_context::WorkerRules,
};

/// Milliseconds between checks of sessions with former targets.
const LEAVE_MS: u64 = 1000;
/// Token of the sockmap, for connections that the kernel stops forwarding. Like [`INBOX`] it also contains
/// [`udp::TOKENS`]; no other token has all these bits.
const RAISED: u64 = u64::MAX - 2;

pub(crate) enum Command {
    Change(Box<RuleChange>),
    TargetsChanged,
    /// Accept no new connections or sessions.
    Drain(mpsc::Sender<()>),
    /// Close the listeners; sent only after [`Command::Drain`].
    Unlisten(mpsc::Sender<()>),
    /// Send the listeners of the rules with these keys, in the order of their ranges. [`HandoverStep::Export`] uses
    /// the same rules.
    ExportSockets(Arc<[u32]>, mpsc::Sender<io::Result<Vec<OwnedFd>>>),
    Upgrade(HandoverStep),
}

impl From<HandoverStep> for Command {
    fn from(step: HandoverStep) -> Self {
        Self::Upgrade(step)
    }
}

pub(crate) struct RuleChange {
    pub(crate) common: Arc<ForwardCommon>,
    pub(crate) parts: Parts,
    pub(crate) leave: Vec<Arc<RuleState>>,
    pub(crate) come: Vec<(Arc<RuleState>, RuleSockets)>,
    pub(crate) done: mpsc::Sender<()>,
}

pub(crate) type ForwardSnapshots = Vec<(RuleId, RuleSnapshot)>;

pub(crate) struct Worker {
    pub(crate) frame: Frame<Command, ForwardSnapshots>,
    datapath: Datapath,
    tcp: tcp::Engine,
    /// Created when the first rule needs it, because its buffers are large.
    udp: Option<udp::Engine>,
    worker_rules: WorkerRules,
    gather: Batching,
    /// Keys of the rules in a handover, in the order of the old process.
    pub(crate) handed_over: Arc<[u32]>,
    /// Time of the next check for former targets.
    leave_at: Option<u64>,
}

impl Worker {
    pub(crate) fn new(
        (number, started): (usize, Instant),
        datapath: Datapath,
        busy_poll: Duration,
        common: &Arc<ForwardCommon>,
    ) -> io::Result<Self> {
        let mut frame = Frame::new(number, started)?;
        frame.poller.busy_poll = busy_poll;
        Ok(Self {
            frame,
            datapath,
            tcp: tcp::Engine::new(Arc::clone(common), number == 0),
            udp: None,
            worker_rules: WorkerRules::new(Arc::clone(common)),
            gather: Batching::default(),
            handed_over: Arc::default(),
            // Another process may have handed over sessions with former targets.
            leave_at: Some(0),
        })
    }

    pub(crate) fn set_common(&mut self, common: &Arc<ForwardCommon>) {
        self.tcp.set_common(common);
        self.worker_rules.common = Arc::clone(common);
    }

    /// Takes the kernel resources needed by the rules that are added next.
    pub(crate) fn take(&mut self, Parts { flows, waits, sockmap }: Parts) -> io::Result<()> {
        let now = self.frame.now_ms();
        if let Some(flows) = flows {
            let engine = self.udp.get_or_insert_with(|| udp::Engine::new(self.datapath));
            engine.use_kernel(flows, now, !waits);
        }
        if let Some(sockmap) = sockmap {
            self.frame.poller.add(&sockmap, RAISED)?;
            self.tcp.use_sockmap(sockmap);
        }
        Ok(())
    }

    /// Starts serving a rule; `inherited` contains the listeners of rules that the same command removed.
    pub(crate) fn add_rule(
        &mut self,
        state: &Arc<RuleState>,
        bound: RuleSockets,
        inherited: &mut HashMap<Address, Acceptor>,
    ) -> io::Result<()> {
        let now = self.frame.now_ms();
        match bound {
            RuleSockets::Tcp(sockets) => {
                let rule = &state.rule;
                let take = |(offset, socket)| match socket {
                    Tcp::Fresh(socket) => Some((offset, socket)),
                    Tcp::Inherited(address) => {
                        let socket = inherited.remove(&address)?;
                        socket.set_inherited(rule);
                        Some((offset, socket))
                    }
                };
                let sockets = sockets.into_iter().filter_map(take).collect();
                self.tcp.add_rule(state, sockets, tcp::Tick { now, poller: &self.frame.poller })
            }
            RuleSockets::Udp(listeners) => {
                self.worker_rules.add(state);
                self.tcp.watch_health(state, now);
                let engine = self.udp.get_or_insert_with(|| udp::Engine::new(self.datapath));
                let key = udp::RuleKey(state.key);
                engine.add_rule(key, &state.rule, listeners, &self.frame.poller)?;
                engine.limit_rates(key, state.rates.as_ref());
                if state.goes_across {
                    engine.offload_rule(key);
                }
                Ok(())
            }
        }
    }

    pub(crate) fn run(&mut self) {
        let mut events: Vec<Event> = Vec::new();
        let mut now = self.frame.now_ms();
        self.keep_time();
        loop {
            let due = self.due();
            let at_most = self.udp.as_mut().and_then(udp::Engine::before_wait);
            if let Err(error) = self.frame.wait(now, due, at_most, &mut events) {
                tracing::error!(worker = self.frame.number, %error, "epoll failed; this worker stops");
                return;
            }
            now = self.frame.now_ms();
            self.frame.dirty |= !events.is_empty();
            if let Some(engine) = &mut self.udp {
                let mut tick =
                    udp::UdpTick { now, poller: &self.frame.poller, worker: &mut self.worker_rules };
                self.frame.dirty |= engine.after_wait(&events, events.len() < Poller::FULL, &mut tick);
            }
            let (mut woken, mut newcomers, mut datagrams) = (false, false, 0);
            for event in &events {
                if event.token == INBOX {
                    woken = true;
                } else if event.token == RAISED {
                    self.tcp.on_raised(tcp::Tick { now, poller: &self.frame.poller });
                } else if event.token & udp::TOKENS != 0 {
                    datagrams += 1;
                    if let Some(engine) = &mut self.udp {
                        let mut tick =
                            udp::UdpTick { now, poller: &self.frame.poller, worker: &mut self.worker_rules };
                        engine.on_event(event, &mut tick);
                    }
                } else if tcp::Engine::is_listener(event) {
                    newcomers = true;
                } else {
                    self.tcp.on_event(event, tcp::Tick { now, poller: &self.frame.poller });
                }
            }
            if let Some(engine) = &mut self.udp {
                engine.flush();
                let mut tick =
                    udp::UdpTick { now, poller: &self.frame.poller, worker: &mut self.worker_rules };
                self.frame.dirty |= engine.on_tick(&mut tick);
            }
            let tick = tcp::Tick { now, poller: &self.frame.poller };
            self.frame.dirty |= self.tcp.on_tick(tick);
            if newcomers {
                let listening =
                    |event: &&Event| event.token & udp::TOKENS == 0 && tcp::Engine::is_listener(event);
                for event in events.iter().filter(listening) {
                    self.tcp.on_event(event, tick);
                }
            }
            if woken && self.run_commands(now) {
                return;
            }
            if self.leave_at.is_some_and(|due| due <= now) {
                self.leave_former(now);
            }
            if self.frame.is_publication_due(now) {
                self.leave_unhealthy(now);
                self.publish(now);
            }
            let mut wake_up = self.tcp.take_wake_up();
            wake_up.other += datagrams + u32::from(woken);
            if self.gather.should_sleep(now, wake_up) {
                thread::sleep(batching::REST);
            }
        }
    }

    /// Sets exact timers for this thread, because the kernel path has deadlines of tens of microseconds.
    fn keep_time(&self) {
        if self.udp.as_ref().is_some_and(udp::Engine::goes_across) {
            let _ = turnpike_net::rlimit::exact_timers();
        }
    }

    /// Runs pending commands; returns true to stop.
    fn run_commands(&mut self, now: u64) -> bool {
        while let Some(command) = self.frame.command() {
            // Other commands wait until the clock has been read again.
            let ends_tick = matches!(command, Command::Upgrade(_));
            self.carry_out(command, now);
            if ends_tick {
                break;
            }
        }
        if self.frame.is_stopped {
            self.tcp.stop(tcp::Tick { now, poller: &self.frame.poller });
            if let Some(engine) = &mut self.udp {
                engine.stop(&mut udp::UdpTick {
                    now,
                    poller: &self.frame.poller,
                    worker: &mut self.worker_rules,
                });
            }
            self.publish(now);
        }
        self.frame.is_stopped
    }

    fn carry_out(&mut self, command: Command, now: u64) {
        match command {
            Command::Change(change) => self.change(*change, now),
            Command::TargetsChanged => {
                self.tcp.on_resolved(tcp::Tick { now, poller: &self.frame.poller });
                self.leave_at = Some(now);
            }
            Command::Drain(done) => {
                self.tcp.drain(tcp::Tick { now, poller: &self.frame.poller });
                if let Some(engine) = &mut self.udp {
                    engine.drain(&mut udp::UdpTick {
                        now,
                        poller: &self.frame.poller,
                        worker: &mut self.worker_rules,
                    });
                }
                let _ = done.send(());
            }
            Command::Unlisten(done) => {
                if let Some(engine) = &mut self.udp {
                    engine.unlisten(&mut udp::UdpTick {
                        now,
                        poller: &self.frame.poller,
                        worker: &mut self.worker_rules,
                    });
                }
                let _ = done.send(());
            }
            Command::ExportSockets(rules, answer) => {
                let _ = answer.send(self.export_sockets(&rules));
                self.handed_over = rules;
            }
            Command::Upgrade(step) => self.upgrade(step),
        }
    }

    fn change(&mut self, change: RuleChange, now: u64) {
        self.set_common(&change.common);
        if let Err(error) = self.take(change.parts) {
            tracing::error!(worker = self.frame.number, %error, "cannot watch kernel-forwarded connections: raise the limit on watches \
             (fs.epoll.max_user_watches); using copy = auto");
        }
        self.keep_time();
        let mut inherited = HashMap::new();
        for state in &change.leave {
            if ListenerKind::of(state.rule.protocol) == ListenerKind::Tcp {
                let sockets = self.tcp.remove_rule(state, tcp::Tick { now, poller: &self.frame.poller });
                inherited.extend(sockets.into_iter().map(|socket| (socket.address(), socket)));
            } else if let Some(engine) = &mut self.udp {
                self.tcp.unwatch_health(state);
                let key = udp::RuleKey(state.key);
                engine.remove_rule(
                    key,
                    &mut udp::UdpTick { now, poller: &self.frame.poller, worker: &mut self.worker_rules },
                );
                self.worker_rules.remove(key);
            }
        }
        for (state, bound) in change.come {
            if let Err(error) = self.add_rule(&state, bound, &mut inherited) {
                tracing::error!(worker = self.frame.number, rule = state.rule.id.0, %error, "cannot serve the rule");
            }
        }
        // Closed before the reply, so that no client reaches a listener that is not served.
        drop(inherited);
        self.publish(now);
        let _ = change.done.send(());
    }

    /// Ends sessions with unhealthy targets, so that the client's next datagram selects another one. UDP
    /// has no connection that breaks, so the client would otherwise keep sending to a target that is down.
    fn leave_unhealthy(&mut self, now: u64) {
        let Some(engine) = &mut self.udp else { return };
        for state in self.worker_rules.turned() {
            let is_down = |choice: udp::ChosenTarget| state.targets.is_down(choice.target);
            let mut tick = udp::UdpTick { now, poller: &self.frame.poller, worker: &mut self.worker_rules };
            engine.leave_targets(udp::RuleKey(state.key), is_down, &mut tick);
        }
    }

    /// Ends sessions with former targets, immediately or once the target has sent nothing for a while. TCP
    /// connections continue.
    fn leave_former(&mut self, now: u64) {
        self.leave_at = None;
        let Some(engine) = &mut self.udp else { return };
        for state in self.worker_rules.with_former_targets() {
            let is_former = |choice: Option<udp::ChosenTarget>| {
                choice.is_none_or(|choice| state.targets.is_former(choice.target))
            };
            let key = udp::RuleKey(state.key);
            let mut tick = udp::UdpTick { now, poller: &self.frame.poller, worker: &mut self.worker_rules };
            if engine.leave_former(key, is_former, &mut tick) {
                self.leave_at = Some(now + LEAVE_MS);
            } else {
                self.worker_rules.has_no_orphans(key);
            }
            self.frame.dirty = true;
        }
    }

    /// Time at which work that is not triggered by an event is next due.
    fn due(&self) -> Option<u64> {
        let udp = self.udp.as_ref().and_then(udp::Engine::next_timeout);
        [udp, self.tcp.next_timeout(), self.leave_at].into_iter().flatten().min()
    }

    fn publish(&mut self, now: u64) {
        let mut rules: Vec<(RuleId, RuleSnapshot)> = Vec::new();
        let mut add =
            |id: &RuleId, snapshot: &RuleSnapshot| match rules.iter_mut().find(|(other, _)| other == id) {
                Some((_, total)) => total.add(snapshot),
                None => rules.push((id.clone(), snapshot.clone())),
            };
        self.tcp.snapshots(|id, snapshot| add(id, &snapshot));
        if let Some(engine) = &self.udp {
            engine.snapshots().for_each(|(id, snapshot)| add(id, snapshot));
            for (key, id, tallies) in engine.tallies() {
                let targets = self.worker_rules.targets(key).map(|targets| targets.describe(tallies));
                add(id, &RuleSnapshot { targets: targets.unwrap_or_default(), ..RuleSnapshot::default() });
            }
        }
        self.frame.publish(now, |published| *published = rules);
    }
}
