//! Reflector in the kernel (`bpf/echo.bpf.c`), which sends datagrams back on the Ethernet interfaces present
//! at startup. It leaves more of a core to the load generator than a reflector in user space.

use std::net::SocketAddr;

use aya::{
    Ebpf, EbpfLoader,
    maps::{HashMap, MapData, PerCpuArray},
};

use crate::{
    error::OffloadError,
    layout::mapped,
    links::{self, Link},
    netlink::{Interface, Netlink},
    object::{map_error, take},
    verification::{classifier, load_classifier},
};

static OBJECT: &[u8] = aya::include_bytes_aligned!("../bpf/echo.o");

const PROGRAM: &str = "turnpike_echo";

/// Entry of the map, with the layout of `struct listener`.
type Listener = [u8; 20];

pub struct Echo {
    interfaces: Vec<String>,
    links: Vec<Link>,
    echoed: PerCpuArray<MapData, u64>,
    /// Keeps the program and its other map alive.
    object: Ebpf,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Echoed {
    pub datagrams: u64,
    pub bytes: u64,
}

impl Echo {
    /// Reflects datagrams to these addresses, on all Ethernet interfaces that are up and have an address.
    pub fn start(listeners: &[SocketAddr]) -> Result<Self, OffloadError> {
        let room = u32::try_from(listeners.len()).unwrap_or(u32::MAX).max(1);
        let mut object = EbpfLoader::new()
            .btf(None)
            .map_max_entries("listeners", room)
            .load(OBJECT)
            .map_err(OffloadError::load)?;
        // The program needs the descriptors of the maps, so load it before taking the maps.
        load_classifier(&mut object, PROGRAM)?;
        let mut map: HashMap<_, Listener, u32> =
            HashMap::try_from(take(&mut object, "listeners")?).map_err(map_error)?;
        for listener in listeners {
            map.insert(key(*listener), 1, 0).map_err(map_error)?;
        }
        let echoed = PerCpuArray::try_from(take(&mut object, "echoed")?).map_err(map_error)?;
        let mut echo = Self { interfaces: Vec::new(), links: Vec::new(), echoed, object };
        let mut netlink = Netlink::new()?;
        let addressed = netlink.with_addresses()?;
        let serves =
            |it: &Interface| it.is_up && it.is_ethernet && !it.is_port && addressed.contains(&it.number);
        for interface in netlink.interfaces()?.into_iter().filter(serves) {
            let program = classifier(&mut echo.object, PROGRAM)?;
            echo.links.push(links::attach_to_tc(
                program,
                PROGRAM,
                (&interface, links::HookDirection::Ingress),
                links::reach_tc(),
            )?);
            echo.interfaces.push(interface.name);
        }
        Ok(echo)
    }

    #[must_use]
    pub fn interfaces(&self) -> &[String] {
        &self.interfaces
    }

    #[must_use]
    pub fn echoed(&self) -> Echoed {
        let sum = |index| self.echoed.get(&index, 0).map_or(0, |values| values.iter().sum());
        Echoed { datagrams: sum(0), bytes: sum(1) }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.links.drain(..).for_each(Link::detach);
    }
}

fn key(listener: SocketAddr) -> Listener {
    let mut key = [0; 20];
    // The wildcard address of IPv4 is ::ffff:0.0.0.0; that of IPv6 is all zeros.
    key[..16].copy_from_slice(&mapped(listener.ip()));
    key[16..18].copy_from_slice(&listener.port().to_be_bytes());
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_layout_matches_the_program() {
        let source = include_str!("../bpf/echo.bpf.c");
        let fields = source.split("struct listener {").nth(1).and_then(|rest| rest.split("};").next());
        let fields: Vec<&str> = fields
            .expect("the program defines the struct")
            .lines()
            .filter_map(|line| line.trim().strip_suffix(';'))
            .collect();
        assert_eq!(fields, ["u32 address[4]", "u16 port", "u16 zero"]);
        assert!(source.contains("enum { ECHOED_DATAGRAMS, ECHOED_BYTES, ECHOED };"));
        let at = |text: &str| key(text.parse().expect("an address"));
        assert_eq!(at("192.0.2.1:258"), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 192, 0, 2, 1, 1, 2, 0, 0]);
        assert_eq!(at("0.0.0.0:9")[..18], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 0, 0, 0, 0, 0, 9]);
        assert_eq!(at("[::]:9")[..18], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9]);
    }
}
