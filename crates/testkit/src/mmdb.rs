//! Writes small MaxMind DB files (MaxMind DB file format, version 2.0) for tests of GeoIP look-ups.

use std::{collections::BTreeMap, net::IpAddr};

/// A network, its country, and the number of its autonomous system; an empty country and 0 are left out.
pub type Network<'a> = (&'a str, &'a str, u32);

/// Bits of a record: a node has two.
const RECORD_BITS: u16 = 24;
/// Zeros between tree and data, which pointers from the tree count too.
const SEPARATOR: usize = 16;
const METADATA: &[u8] = b"\xab\xcd\xefMaxMind.com";
/// IPv4 addresses are in ::/96.
const V4_BITS: u8 = 96;

/// Builds an IPv6 database of this type with the build time `built` in Unix seconds. A network within another one must come after it.
///
/// # Panics
///
/// If a network is not an address prefix.
#[must_use]
pub fn mmdb(kind: &str, built: u64, networks: &[Network<'_>]) -> Vec<u8> {
    let (mut tree, mut data) = (Tree::default(), Vec::new());
    for (network, country, asn) in networks {
        let at = data.len();
        let mut record = BTreeMap::new();
        if !country.is_empty() {
            record.insert("country", Value::Map([("iso_code", Value::Text(country))].into()));
        }
        if *asn > 0 {
            record.insert("autonomous_system_number", Value::Number(u64::from(*asn), UINT32));
        }
        Value::Map(record).write(&mut data);
        tree.insert(prefix(network), at);
    }
    let nodes = tree.nodes.len();
    let mut file = Vec::new();
    for record in tree.nodes.iter().flatten() {
        let value = match *record {
            Record::Empty => nodes,
            Record::Node(node) => node,
            Record::Data(at) => nodes + SEPARATOR + at,
        };
        let bytes = u32::try_from(value).expect("a small file").to_be_bytes();
        file.extend(&bytes[bytes.len() - usize::from(RECORD_BITS / 8)..]);
    }
    file.extend([0; SEPARATOR]);
    file.extend(data);
    file.extend(METADATA);
    let number = |number: u64, kind| Value::Number(number, kind);
    let metadata = [
        ("binary_format_major_version", number(2, UINT16)),
        ("binary_format_minor_version", number(0, UINT16)),
        ("build_epoch", number(built, UINT64)),
        ("database_type", Value::Text(kind)),
        ("description", Value::Map([("en", Value::Text("Networks for tests"))].into())),
        ("ip_version", number(6, UINT16)),
        ("languages", Value::EmptyArray),
        ("node_count", number(nodes as u64, UINT32)),
        ("record_size", number(RECORD_BITS.into(), UINT16)),
    ];
    Value::Map(metadata.into()).write(&mut file);
    file
}

/// First bits of an address in the tree, and their number.
fn prefix(network: &str) -> (u128, u8) {
    let (address, bits) = network.split_once('/').expect("a prefix");
    let bits: u8 = bits.parse().expect("a prefix length");
    match address.parse().expect("an address") {
        IpAddr::V4(ip) => (ip.to_bits().into(), V4_BITS + bits),
        IpAddr::V6(ip) => (ip.to_bits(), bits),
    }
}

#[derive(Clone, Copy)]
enum Record {
    Empty,
    Node(usize),
    /// Position in the data section.
    Data(usize),
}

struct Tree {
    nodes: Vec<[Record; 2]>,
}

impl Default for Tree {
    fn default() -> Self {
        Self { nodes: vec![[Record::Empty; 2]] }
    }
}

impl Tree {
    fn insert(&mut self, (address, bits): (u128, u8), at: usize) {
        let mut node = 0;
        for depth in 0..bits {
            let side = usize::from(address >> (127 - depth) & 1 == 1);
            if depth + 1 == bits {
                self.nodes[node][side] = Record::Data(at);
                return;
            }
            node = match self.nodes[node][side] {
                Record::Node(next) => next,
                whole => {
                    self.nodes.push([whole; 2]);
                    let next = self.nodes.len() - 1;
                    self.nodes[node][side] = Record::Node(next);
                    next
                }
            };
        }
    }
}

const UINT16: u8 = 5;
const UINT32: u8 = 6;
const UINT64: u8 = 9;

enum Value<'a> {
    Text(&'a str),
    /// The number and its type.
    Number(u64, u8),
    Map(BTreeMap<&'a str, Value<'a>>),
    EmptyArray,
}

impl Value<'_> {
    fn write(&self, to: &mut Vec<u8>) {
        match self {
            Self::Text(text) => {
                control(2, text.len(), to);
                to.extend(text.as_bytes());
            }
            Self::Number(number, kind) => {
                let bytes = number.to_be_bytes();
                let bytes = &bytes[number.leading_zeros() as usize / 8..];
                control(*kind, bytes.len(), to);
                to.extend(bytes);
            }
            Self::Map(members) => {
                control(7, members.len(), to);
                for (key, value) in members {
                    Value::Text(key).write(to);
                    value.write(to);
                }
            }
            Self::EmptyArray => control(11, 0, to),
        }
    }
}

/// Type and size. Types above 7 have a byte of their own.
fn control(kind: u8, size: usize, to: &mut Vec<u8>) {
    let size = u8::try_from(size).ok().filter(|size| *size < 29).expect("a short value");
    if kind > 7 {
        to.extend([size, kind - 7]);
    } else {
        to.push(kind << 5 | size);
    }
}
