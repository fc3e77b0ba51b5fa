//! Runs the programs with BPF_PROG_TEST_RUN, on frames and tables supplied by the tests.

use crate::prelude::*;
use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, RawFd},
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, HashMap, MapData, PerCpuArray, PerCpuValues},
    programs::Xdp,
    util::KernelVersion,
};
use turnpike_offload::{
    layout::{ACROSS, ARRIVED, BYTES, CALM, DATAGRAMS, MEASURED, SINCE, STATE_WORDS, STREAMS_WORDS, UP},
    load_program,
};

pub(crate) const MTU: u32 = 1400;
pub(crate) const LOOPBACK: u32 = 1;

pub(crate) const PLACES: u32 = 16;

/// True if this kernel supports the XDP program: it has bpf_xdp_load_bytes.
pub(crate) fn has_xdp() -> bool {
    KernelVersion::current().expect("a version") >= KernelVersion::new(5, 18, 0)
}

pub(crate) fn object() -> io::Result<Vec<u8>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/bpf/relay.o");
    fs::read(std::env::var("TURNPIKE_BPF_OBJECT").unwrap_or_else(|_| path.to_owned()))
}

/// BPF_F_TEST_SKB_CHECKSUM_COMPLETE: the kernel verifies the sum afterwards.
const COMPLETE: u32 = 1 << 2;

pub(crate) fn tells_mtu() -> bool {
    KernelVersion::current().expect("a version") >= KernelVersion::new(5, 12, 0)
}

pub(crate) fn places() -> &'static [Place] {
    if has_xdp() { &[Place::Tc, Place::Xdp] } else { &[Place::Tc] }
}

pub(crate) struct Program {
    object: Ebpf,
    flows: HashMap<MapData, FlowKey, Flow>,
    departures: HashMap<MapData, FlowKey, FlowKey>,
    states: Array<MapData, [u64; STATE_WORDS]>,
    streams: Array<MapData, [u64; STREAMS_WORDS]>,
    drained: Array<MapData, u64>,
    routes: Array<MapData, u64>,
    hops: Array<MapData, [u64; HOP_WORDS]>,
    ports: Array<MapData, u64>,
    counts: PerCpuArray<MapData, u64>,
}

thread_local! {
    static PROGRAM: RefCell<Option<Program>> = const { RefCell::new(None) };
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) action: Action,
    pub(crate) states: Vec<State>,
}

pub(crate) fn with_program(test: impl FnOnce(&mut Program)) {
    PROGRAM.with_borrow_mut(|program| {
        if program.is_none() {
            // SAFETY: changes this thread's namespace only.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                skip(&format!("no permission for network namespaces: {}", io::Error::last_os_error()));
                return;
            }
            set_up_loopback();
            match Program::load(tells_mtu()) {
                Ok(loaded) => *program = Some(loaded),
                Err(error) if error.contains("Operation not permitted") => {
                    skip(&format!("no permission to load programs: {error}"));
                    return;
                }
                Err(error) => panic!("{error}"),
            }
        }
        test(program.as_mut().expect("the program is loaded"));
    });
}

impl Program {
    /// Loads the variant that asks the kernel for MTUs, or the one for kernels that do not report them.
    pub(crate) fn load(kernel_tells_mtu: bool) -> Result<Self, String> {
        let object = object().map_err(|error| error.to_string())?;
        let mut object = EbpfLoader::new()
            .btf(None)
            .override_global("leases", &1_u32, true)
            .map_max_entries("departures", PLACES)
            .override_global("kernel_tells_mtu", &u32::from(kernel_tells_mtu), true)
            .map_max_entries("flows", PLACES)
            .map_max_entries("states", PLACES)
            .map_max_entries("streams", PLACES)
            .map_max_entries("drained", PLACES)
            .map_max_entries("routes", PLACES)
            .map_max_entries("gateways", PLACES)
            .map_max_entries("hops", PLACES)
            .load(&object)
            .map_err(|error| format!("{error:?}"))?;
        let program: &mut SchedClassifier = object
            .program_mut("turnpike")
            .expect("the object contains the program")
            .try_into()
            .expect("the right type");
        load_program(|| program.load()).map_err(|error| format!("{error:?}"))?;
        if has_xdp() {
            let program: &mut Xdp = object
                .program_mut("turnpike_xdp")
                .expect("the object contains the program")
                .try_into()
                .expect("the right type");
            load_program(|| program.load()).map_err(|error| format!("{error:?}"))?;
        }
        let program: &mut SchedClassifier = object
            .program_mut("turnpike_leaves")
            .expect("the object contains the program")
            .try_into()
            .expect("the right type");
        load_program(|| program.load()).map_err(|error| format!("{error:?}"))?;
        let mut take = |name| object.take_map(name).expect("a map");
        Ok(Self {
            departures: take("departures").try_into().expect("a hash map"),
            flows: take("flows").try_into().expect("a hash map"),
            states: take("states").try_into().expect("an array"),
            streams: take("streams").try_into().expect("an array"),
            drained: take("drained").try_into().expect("an array"),
            routes: take("routes").try_into().expect("an array"),
            hops: take("hops").try_into().expect("an array"),
            ports: take("ports").try_into().expect("an array"),
            counts: take("counts").try_into().expect("an array"),
            object,
        })
    }

    pub(crate) fn knows_complete(&self) -> bool {
        let frame = [0; 64];
        test_run(self.descriptor(Place::Tc), &frame, &[], COMPLETE).is_ok()
    }

    pub(crate) fn fill(&mut self, tables: &Tables) {
        let old: Vec<FlowKey> = self.flows.keys().filter_map(Result::ok).collect();
        for key in old {
            self.flows.remove(&key).expect("the flow was installed");
        }
        let old: Vec<FlowKey> = self.departures.keys().filter_map(Result::ok).collect();
        for key in old {
            self.departures.remove(&key).expect("the entry was installed");
        }
        for (key, flow) in &tables.flows {
            self.flows.insert(key, flow, 0).expect("there is room");
            if let Some(leaves) = flow.leaves() {
                self.departures.insert(leaves, key, 0).expect("there is room");
            }
        }
        for (slot, state) in (0..).zip(&tables.states) {
            let mut words = [0; STATE_WORDS];
            let State { up, calm, since, arrived, across } = *state;
            for (word, value) in
                [(UP, up), (CALM, calm), (SINCE, since), (ARRIVED, arrived), (ACROSS, across)]
            {
                words[word] = value;
            }
            self.states.set(slot, words, 0).expect("in range");
        }
        for (slot, hop) in (0..).zip(&tables.hops) {
            self.hops.set(slot, hop, 0).expect("in range");
        }
        for (slot, drained) in (0..).zip(&tables.drained) {
            self.drained.set(slot, drained, 0).expect("in range");
        }
        for (slot, route) in (0..).zip(&tables.routes) {
            self.routes.set(slot, route, 0).expect("in range");
        }
        for (word, classes) in (0..).zip(&tables.classes) {
            self.ports.set(word, classes, 0).expect("in range");
        }
        self.reset_counts();
    }

    pub(crate) fn run(&mut self, place: Place, frame: &Frame<'_>) -> io::Result<Outcome> {
        /// TC_ACT_UNSPEC, TC_ACT_SHOT, TC_ACT_REDIRECT; XDP_PASS, XDP_DROP, XDP_TX; XDP_REDIRECT.
        const TC: [u32; 3] = [u32::MAX, 2, 7];
        const XDP: [u32; 3] = [2, 1, 3];
        const XDP_REDIRECT: u32 = 4;
        let flags = match frame.summed {
            Summed::Complete if place == Place::Tc => COMPLETE,
            Summed::Nothing | Summed::Complete => 0,
            Summed::Verified | Summed::Partial => panic!("the kernel's test does not support this state"),
        };
        // struct __sk_buff: interface number, segments and their size. XDP always uses loopback.
        let mut context = [0_u8; 192];
        context[40..44].copy_from_slice(&frame.interface.to_ne_bytes());
        context[164..168].copy_from_slice(&frame.segments.to_ne_bytes());
        context[176..180].copy_from_slice(&frame.segment_size.to_ne_bytes());
        assert_eq!(frame.interface, LOOPBACK);
        let context = &context[..if place == Place::Tc { context.len() } else { 0 }];
        let (result, bytes) = test_run(self.descriptor(place), frame.bytes, context, flags)?;
        let [up, dropped, across] = if place == Place::Tc { TC } else { XDP };
        // XDP_REDIRECT to an interface is equivalent to XDP_TX.
        let result = if place == Place::Xdp && result == XDP_REDIRECT { across } else { result };
        let counted: Vec<Count> = counts(&self.counts);
        assert!(counted.len() <= 1, "{counted:?}");
        let count = counted.first().copied();
        let states: Vec<_> = (0..PLACES).map(|slot| self.states.get(&slot, 0).expect("in range")).collect();
        let action = match (result, count) {
            (result, Some(count)) if result == across => {
                let counted: Vec<_> = states.iter().filter(|state| state[DATAGRAMS] != 0).collect();
                let datagrams = if count == Count::TurnedBack { 2 } else { 1 };
                assert_eq!(
                    counted.iter().map(|state| state[DATAGRAMS]).sum::<u64>(),
                    datagrams,
                    "{counted:?}"
                );
                let bytes_counted: u64 = counted.iter().map(|state| state[BYTES]).sum();
                let payload = usize::try_from(bytes_counted / datagrams).expect("a length");
                Action::Across { interface: LOOPBACK, bytes, count, payload }
            }
            (result, count) if result == up => {
                assert_eq!(bytes, frame.bytes, "packets to user space are unchanged");
                Action::Up(count)
            }
            (result, Some(count)) if result == dropped => Action::Dropped(count),
            other => panic!("{other:?}"),
        };
        let state = |words: &[u64; STATE_WORDS]| State {
            up: words[UP],
            calm: words[CALM],
            since: words[SINCE],
            arrived: words[ARRIVED],
            across: words[ACROSS],
        };
        Ok(Outcome { action, states: states.iter().map(state).collect() })
    }

    /// Runs the program at TC egress on a frame with this mark, queue priority and arrival interface (0 if a
    /// socket sent it); returns the counts.
    pub(crate) fn leave(&mut self, frame: &[u8], [mark, priority, arrived_by]: [u32; 3]) -> Vec<Count> {
        self.reset_counts();
        let mut context = [0_u8; 192];
        for (at, word) in [(8, mark), (32, priority), (36, arrived_by), (40, LOOPBACK)] {
            context[at..at + 4].copy_from_slice(&word.to_ne_bytes());
        }
        let program = self.object.program("turnpike_leaves").expect("the object contains the program");
        let program = <&SchedClassifier>::try_from(program)
            .expect("the right type")
            .fd()
            .expect("the program is loaded");
        let (result, bytes) =
            test_run(program.as_fd().as_raw_fd(), frame, &context, 0).expect("the program runs");
        assert_eq!(
            (result, &bytes[..]),
            (u32::MAX, frame),
            "the program at TC egress must not change packets"
        );
        let counted = counts(&self.counts);
        self.reset_counts();
        counted
    }

    pub(crate) fn flow(&self, key: &FlowKey) -> Flow {
        self.flows.get(key, 0).expect("the flow is installed")
    }

    pub(crate) fn set_flow(&mut self, flow: &Flow) {
        self.flows.insert(flow.key, flow, 0).expect("there is room");
    }

    /// Marks all sockets as drained, so that no datagram is in user space any more.
    pub(crate) fn settle(&mut self) {
        self.reset_counts();
        for slot in 0..PLACES {
            self.drained.set(slot, now_ns(), 0).expect("in range");
            self.states.set(slot, [0; STATE_WORDS], 0).expect("in range");
        }
    }

    /// Measures the flows with the first state, which stay in user space until `calm`. Must follow [`Program::settle`].
    pub(crate) fn measure(&mut self, calm: u64) {
        let mut words = [0; STATE_WORDS];
        (words[MEASURED], words[CALM]) = (1, calm);
        self.states.set(0, words, 0).expect("in range");
    }

    pub(crate) fn streams(&self) -> [u64; STREAMS_WORDS] {
        self.streams.get(&0, 0).expect("in range")
    }

    pub(crate) fn set_streams(&mut self, words: [u64; STREAMS_WORDS]) {
        self.streams.set(0, words, 0).expect("in range");
    }

    pub(crate) fn reset_counts(&mut self) {
        for what in 0..self.counts.len() {
            let zeros = vec![0; aya::util::nr_cpus().expect("a number")];
            let zeros = PerCpuValues::try_from(zeros).expect("one value per CPU");
            self.counts.set(what, zeros, 0).expect("in range");
        }
    }

    fn descriptor(&self, place: Place) -> RawFd {
        let named = |name| self.object.program(name).expect("the object contains the program");
        let descriptor = match place {
            Place::Tc => <&SchedClassifier>::try_from(named("turnpike")).expect("the right type").fd(),
            Place::Xdp => <&Xdp>::try_from(named("turnpike_xdp")).expect("the right type").fd(),
        };
        descriptor.expect("the program is loaded").as_fd().as_raw_fd()
    }
}

fn counts(map: &PerCpuArray<MapData, u64>) -> Vec<Count> {
    use strum::VariantArray as _;
    let sum = |what: &Count| {
        let values = map.get(&(*what as u32), 0).expect("in range");
        values.iter().sum::<u64>()
    };
    Count::VARIANTS.iter().copied().filter(|what| sum(what) > 0).collect()
}

/// BPF_PROG_TEST_RUN with flags that aya does not support.
fn test_run(program: RawFd, frame: &[u8], context: &[u8], flags: u32) -> io::Result<(u32, Vec<u8>)> {
    const COMMAND: i64 = 10;
    #[repr(C)]
    #[derive(Default)]
    struct Attributes {
        program: u32,
        result: u32,
        data_size_in: u32,
        data_size_out: u32,
        data_in: u64,
        data_out: u64,
        repeat: u32,
        duration: u32,
        context_size_in: u32,
        context_size_out: u32,
        context_in: u64,
        context_out: u64,
        flags: u32,
        cpu: u32,
        batch_size: u32,
        unused: u32,
    }
    let mut out = vec![0_u8; 4096];
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).expect("short");
    let mut attributes = Attributes {
        program: program.cast_unsigned(),
        data_size_in: length(frame),
        data_size_out: length(&out),
        data_in: frame.as_ptr() as u64,
        data_out: out.as_mut_ptr() as u64,
        repeat: 1,
        context_size_in: length(context),
        context_in: if context.is_empty() { 0 } else { context.as_ptr() as u64 },
        flags,
        ..Attributes::default()
    };
    // SAFETY: pointers and lengths of live buffers.
    let done = unsafe { libc::syscall(libc::SYS_bpf, COMMAND, &raw mut attributes, size_of::<Attributes>()) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    out.truncate(attributes.data_size_out as usize);
    Ok((attributes.result, out))
}

fn set_up_loopback() {
    let mtu = MTU.to_string();
    let done = std::process::Command::new("ip").args(["link", "set", "lo", "up", "mtu", &mtu]).status();
    assert!(done.is_ok_and(|status| status.success()), "ip(8) could not set up loopback");
}
