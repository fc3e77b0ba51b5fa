//! Helpers for tests of the UDP engine: a worker that runs only the engine, with a clock that tests can
//! advance, echoing targets, and clients that check every byte.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use turnpike_forward::{
    ConnectionReport, EndReason, Host, Protocol, Rule, RuleSnapshot, TargetSlot,
    udp::{Admission, ChosenTarget, Engine, RuleKey, TOKENS, UdpListeners, UdpTick, WorkerContext},
};
use turnpike_net::{Datapath, PassedSockets, TxStats};
pub(crate) use turnpike_testkit::{PATIENCE, eventually, free_address};
use turnpike_worker::{Frame, INBOX, Sender};

pub(crate) const DATAPATHS: [Datapath; 3] = [Datapath::Basic, Datapath::Mmsg, Datapath::Gso];
pub(crate) const THREAD: &str = "udp-worker";
pub(crate) const KEY: RuleKey = RuleKey(7);
pub(crate) const LOCALHOST: &str = "127.0.0.1:0";

pub(crate) fn rule(protocol: Protocol, listen: SocketAddr, target: SocketAddr) -> Rule {
    Rule { protocol, ..Rule::new("test", listen, target.into()) }
}

/// Records the engine's calls, and contains settings.
#[derive(Default)]
pub(crate) struct World {
    pub(crate) targets: HashMap<RuleKey, Vec<SocketAddr>>,
    pub(crate) denied: Vec<IpAddr>,
    pub(crate) most: Option<u64>,
    pub(crate) most_in_total: Option<u64>,
    pub(crate) active: HashMap<RuleKey, u64>,
    pub(crate) reports: Vec<ConnectionReport>,
    /// Number of choices not yet released.
    pub(crate) held: i64,
    pub(crate) failures: Vec<SocketAddr>,
    turn: usize,
}

struct Shared(Arc<Mutex<World>>);

impl WorkerContext for Shared {
    fn permits(&mut self, _: RuleKey, client: IpAddr) -> bool {
        !self.0.lock().unwrap().denied.contains(&client)
    }

    fn enter(&mut self, rule: RuleKey) -> Admission {
        let mut world = self.0.lock().unwrap();
        let total: u64 = world.active.values().sum();
        if world.most_in_total.is_some_and(|most| total >= most) {
            return Admission::TotalFull;
        }
        let most = world.most.unwrap_or(u64::MAX);
        let active = world.active.entry(rule).or_default();
        if *active >= most {
            return Admission::RuleFull;
        }
        *active += 1;
        Admission::Entered
    }

    fn leave(&mut self, rule: RuleKey) {
        *self.0.lock().unwrap().active.get_mut(&rule).unwrap() -= 1;
    }

    fn choose(&mut self, rule: RuleKey, _: SocketAddr, port: u16, _: &[TargetSlot]) -> Option<ChosenTarget> {
        let mut world = self.0.lock().unwrap();
        let turn = world.turn;
        world.turn += 1;
        let targets = world.targets.get(&rule)?;
        let target = turn % targets.len();
        let mut address = targets[target];
        address.set_port(address.port() + port);
        world.held += 1;
        Some(ChosenTarget { target: TargetSlot { at: target as u32, serial: 1 }, address })
    }

    fn answered(&mut self, _: RuleKey, _: ChosenTarget) {}

    fn release(&mut self, _: RuleKey, choice: ChosenTarget, failed: bool) {
        let mut world = self.0.lock().unwrap();
        world.held -= 1;
        if failed {
            world.failures.push(choice.address);
        }
    }

    fn ended(&mut self, report: ConnectionReport) {
        self.0.lock().unwrap().reports.push(report);
    }
}

type Command = Box<dyn FnOnce(&mut Engine, &mut UdpTick<'_>) + Send>;

pub(crate) struct Worker {
    pub(crate) world: Arc<Mutex<World>>,
    commands: Sender<Option<Command>>,
    ahead: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(crate) fn start(datapath: Datapath) -> Self {
        let mut frame = Frame::<Option<Command>, ()>::new(0, Instant::now()).unwrap();
        let commands = frame.sender.clone();
        let world = Arc::new(Mutex::new(World::default()));
        let ahead = Arc::new(AtomicU64::new(0));
        let (own_ahead, mut context) = (Arc::clone(&ahead), Shared(Arc::clone(&world)));
        let thread = thread::Builder::new().name(THREAD.to_owned()).spawn(move || {
            let mut engine = Engine::new(datapath);
            let started = Instant::now();
            let clock = || started.elapsed().as_millis() as u64 + own_ahead.load(Ordering::SeqCst);
            loop {
                let timeout =
                    engine.next_timeout().map(|due| Duration::from_millis(due.saturating_sub(clock())));
                let events = frame.poller.wait(timeout).unwrap().to_vec();
                let now = clock();
                let mut tick = UdpTick { now, poller: &frame.poller, worker: &mut context };
                for event in events.iter().filter(|event| event.token != INBOX) {
                    assert_ne!(event.token & TOKENS, 0);
                    engine.on_event(event, &mut tick);
                }
                engine.flush();
                engine.on_tick(&mut tick);
                while let Some(command) = frame.command() {
                    let mut tick = UdpTick { now, poller: &frame.poller, worker: &mut context };
                    match command {
                        Some(command) => command(&mut engine, &mut tick),
                        None => return engine.stop(&mut tick),
                    }
                }
            }
        });
        Self { world, commands, ahead, thread: Some(thread.unwrap()) }
    }

    /// Runs a closure on the worker's thread.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Engine, &mut UdpTick<'_>) -> T + Send + 'static,
    ) -> T {
        let (sender, answer) = mpsc::channel();
        let command = Box::new(move |engine: &mut Engine, tick: &mut UdpTick<'_>| {
            sender.send(question(engine, tick)).unwrap();
        });
        self.commands.tell(Some(command));
        answer.recv_timeout(PATIENCE).unwrap()
    }

    /// Blocks the worker during the closure, so that it receives all data at once.
    pub(crate) fn stall(&self, meanwhile: impl FnOnce()) {
        let (release, released) = mpsc::channel();
        let (sender, stalled) = mpsc::channel();
        let command = Box::new(move |_: &mut Engine, _: &mut UdpTick<'_>| {
            sender.send(()).unwrap();
            released.recv_timeout(PATIENCE).unwrap();
        });
        self.commands.tell(Some(command));
        stalled.recv_timeout(PATIENCE).unwrap();
        meanwhile();
        release.send(()).unwrap();
    }

    pub(crate) fn add(&self, key: RuleKey, rule: &Rule, datapath: Datapath) -> SocketAddr {
        self.add_with(key, rule, datapath, false)
    }

    /// Like [`Worker::add`], but other processes of this user may share the port, as with real forwarders.
    pub(crate) fn add_shared(&self, key: RuleKey, rule: &Rule, datapath: Datapath) -> SocketAddr {
        self.add_with(key, rule, datapath, true)
    }

    fn add_with(&self, key: RuleKey, rule: &Rule, datapath: Datapath, reuse_port: bool) -> SocketAddr {
        let targets = rule.targets.iter().map(|target| {
            let Host::Ip(ip) = target.host else { panic!("tests use IP addresses only") };
            SocketAddr::new(ip, target.ports.first)
        });
        self.world.lock().unwrap().targets.insert(key, targets.collect());
        let listeners = UdpListeners::bind(rule, datapath, reuse_port, &PassedSockets::default()).unwrap();
        let address = listeners.addresses()[0];
        let rule = rule.clone();
        self.ask(move |engine, tick| engine.add_rule(key, &rule, listeners, tick.poller).unwrap());
        address
    }

    pub(crate) fn snapshot(&self) -> RuleSnapshot {
        self.ask(|engine, _| engine.snapshots().next().unwrap().1.clone())
    }

    pub(crate) fn tx_stats(&self) -> TxStats {
        self.ask(|engine, _| *engine.tx_stats())
    }

    pub(crate) fn active(&self) -> usize {
        self.ask(|engine, _| engine.active())
    }

    pub(crate) fn advance(&self, time: Duration) {
        let time = time.as_millis() as u64;
        let before = self.ask(|_, tick| tick.now);
        self.ahead.fetch_add(time, Ordering::SeqCst);
        // The wake-up that runs the closure may have read the clock earlier; the closure runs after the tick
        // of that wake-up.
        eventually("time has passed", || self.ask(|_, tick| tick.now) >= before + time);
    }

    pub(crate) fn reasons(&self) -> Vec<EndReason> {
        self.world.lock().unwrap().reports.iter().map(|report| report.reason).collect()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.commands.tell(None);
        let ended = self.thread.take().unwrap().join();
        if !thread::panicking() {
            ended.unwrap();
            let world = self.world.lock().unwrap();
            assert_eq!(world.held, 0, "a target was not released");
            assert_eq!(world.active.values().sum::<u64>(), 0, "a slot was not released");
        }
    }
}

/// UDP target that echoes.
pub(crate) struct Echo {
    pub(crate) address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Echo {
    pub(crate) fn start(address: &str) -> Self {
        let socket = UdpSocket::bind(address).unwrap();
        let address = socket.local_addr().unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut bytes = vec![0; 1 << 16];
            while !stopped.load(Ordering::SeqCst) {
                if let Ok((len, from)) = socket.recv_from(&mut bytes) {
                    let _ = socket.send_to(&bytes[..len], from);
                }
            }
        });
        Self { address, stop, thread: Some(thread) }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.take().unwrap().join().unwrap();
    }
}

pub(crate) fn client(server: SocketAddr) -> UdpSocket {
    let any: SocketAddr = if server.is_ipv6() { "[::1]:0" } else { LOCALHOST }.parse().unwrap();
    let socket = UdpSocket::bind(any).unwrap();
    socket.connect(server).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

pub(crate) fn expect_echo(client: &UdpSocket, bytes: &[u8]) {
    client.send(bytes).unwrap();
    assert_eq!(receive(client), bytes);
}

pub(crate) fn receive(socket: &UdpSocket) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 16];
    let len = socket.recv(&mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

/// Bytes that identify the sender and the number of the datagram.
pub(crate) fn payload(who: usize, number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (who.wrapping_mul(31) ^ number.wrapping_mul(7) ^ at.wrapping_mul(3)) as u8).collect()
}
