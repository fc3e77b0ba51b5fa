//! Whether a port is only held by a forwarder that is about to end: what it still serves has sockets connected to its clients, and
//! nobody listens any more. The kernel's table of UDP sockets (proc(5), /proc/net/udp) tells the two apart.

use std::fs;

/// Whether all UDP sockets of a port in this network namespace are connected ones, and there are any.
pub(crate) fn is_left(port: u16) -> bool {
    let tables = ["/proc/self/net/udp", "/proc/self/net/udp6"];
    let held: Vec<bool> = tables
        .iter()
        .filter_map(|table| fs::read_to_string(table).ok())
        .flat_map(|table| connected(&table, port))
        .collect();
    !held.is_empty() && held.iter().all(|connected| *connected)
}

/// Of each socket of this port whether it is connected. A line is `slot: address:port remote:port state ...` in hexadecimal digits;
/// the state is that of TCP: 01 for a connected socket.
fn connected(table: &str, port: u16) -> Vec<bool> {
    let state = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let (_, found) = fields.next()?.rsplit_once(':')?;
        let state = fields.nth(1)?;
        (u16::from_str_radix(found, 16).ok()? == port).then_some(state == "01")
    };
    table.lines().filter_map(state).collect()
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn a_connected_socket_leaves_its_port_and_a_listening_one_does_not() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        assert!(!is_left(port), "somebody listens");
        socket.connect("127.0.0.1:9").unwrap();
        assert!(is_left(port));
        let v6 = UdpSocket::bind(("::1", port));
        assert!(v6.is_err() || !is_left(port), "one of two listens");
        drop((socket, v6));
        assert!(!is_left(port), "nobody has it");
    }

    #[test]
    fn lines_that_say_nothing_are_passed_over() {
        let table = "  sl  local_address rem_address   st tx_queue\n\
                      1: 0100007F:0035 00000000:0000 07 0:0\n 2: x\n 3: 0100007F:0035 0200007F:1234 01 0:0\n";
        assert_eq!(connected(table, 53), [false, true]);
        assert!(connected(table, 54).is_empty());
    }
}
