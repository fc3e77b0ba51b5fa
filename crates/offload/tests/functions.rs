//! Kernel functions that the programs call, read from the object: a function missing from a kernel would
//! disable the data path there.

use object::{
    Endianness,
    elf::FileHeader64,
    read::elf::{FileHeader as _, SectionHeader as _},
};

/// bpf_redirect_peer, the last function of Linux 5.10.
const LAST_OF_5_10: i32 = 155;
/// bpf_check_mtu of Linux 5.12, called in a branch that is dead code on older kernels.
const CHECK_MTU: i32 = 163;
/// bpf_xdp_load_bytes of Linux 5.18.
const LAST_OF_5_18: i32 = 189;

/// Section of the XDP program; all others are for TC.
const XDP: &str = "xdp";

fn called(code: &[u8]) -> Vec<i32> {
    /// BPF_LD | BPF_IMM | BPF_DW, which takes two instructions.
    const LOAD_64: u8 = 0x18;
    /// BPF_JMP | BPF_CALL; without a source register, a kernel function.
    const CALL: u8 = 0x85;
    let (mut called, mut instructions) = (Vec::new(), code.chunks_exact(8));
    while let Some(instruction) = instructions.next() {
        match (instruction[0], instruction[1] >> 4) {
            (LOAD_64, _) => _ = instructions.next(),
            (CALL, 0) => called.push(i32::from_le_bytes(std::array::from_fn(|at| instruction[4 + at]))),
            _ => {}
        }
    }
    called
}

#[test]
fn programs_call_only_functions_of_linux_5_10_and_5_18() {
    let object = crate::program::object().expect("the object is in the repository");
    let header = FileHeader64::<Endianness>::parse(&object[..]).expect("an ELF file");
    let endian = header.endian().expect("an endianness");
    let sections = header.sections(endian, &object[..]).expect("the object has sections");
    let mut last = [0, 0];
    for section in sections
        .iter()
        .filter(|section| section.sh_flags(endian) & u64::from(object::elf::SHF_EXECINSTR) != 0)
    {
        let name = sections.section_name(endian, section).expect("a name");
        let code = section.data(endian, &object[..]).expect("the section has contents");
        let last = &mut last[usize::from(name == XDP.as_bytes())];
        *last = called(code).into_iter().filter(|it| *it != CHECK_MTU).fold(*last, i32::max);
    }
    let [at_tc, in_the_driver] = last;
    assert!((1..=LAST_OF_5_10).contains(&at_tc), "function {at_tc} at TC");
    assert!((1..=LAST_OF_5_18).contains(&in_the_driver), "function {in_the_driver} in the driver");
}
