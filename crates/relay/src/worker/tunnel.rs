//! Forwards datagrams of DTLS clients after an upgrade. They arrive in the new process, but the old one has
//! the keys, so the new process forwards them, and the old one replies through the same sockets. After two
//! upgrades, the process in the middle has a tunnel to each of the others.
//!
//! ```text
//!  │ listener, 2 bytes │ TOS │ TTL │ client: IP 16, port 2 │ local: IP 16, port 2 │ datagram …     new ──▶ old
//!  header without a datagram: the association has ended                                             old ──▶ new
//! ```

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
};

use foldhash::fast::RandomState;
use hashbrown::HashSet;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
use turnpike_net::{ArenaSpan, Poller, TcpSocket};
use turnpike_turn::{
    server::{Client, ListenerId},
    time::Now,
};
use turnpike_wire::address::canonical;

use super::Worker;

/// Poller tokens of the tunnels to the old and to the new process.
pub(super) const TO_OLD: u64 = u64::MAX - 2;
pub(super) const TO_NEW: u64 = u64::MAX - 3;

const BUFFER: usize = 4 << 20;
const HEAD: usize = 40;
const SHARE: usize = 256;

#[derive(Default)]
pub(super) struct Tunnels {
    old: Option<TcpSocket>,
    new: Option<TcpSocket>,
    /// DTLS clients whose associations are in the old process.
    elsewhere: HashSet<Client, RandomState>,
}

struct TunnelHead {
    client: Client,
    tos: u8,
    ttl: u8,
}

impl Tunnels {
    pub(super) fn open(&mut self) -> io::Result<TcpSocket> {
        let (near, far) = messages()?;
        self.new = Some(near);
        Ok(far)
    }

    pub(super) fn close(&mut self) {
        self.new = None;
    }

    pub(super) fn watch(&self, poller: &Poller) -> io::Result<()> {
        self.new.as_ref().map_or(Ok(()), |new| poller.add(new, TO_NEW))
    }

    pub(super) fn join(
        &mut self,
        old: TcpSocket,
        clients: impl IntoIterator<Item = Client>,
        poller: &Poller,
    ) -> io::Result<()> {
        poller.add(&old, TO_OLD)?;
        self.old = Some(old);
        self.elsewhere.extend(clients);
        Ok(())
    }

    pub(super) fn clients(&self) -> impl Iterator<Item = Client> {
        self.elsewhere.iter().copied()
    }

    #[inline]
    pub(super) fn leads_away(&self, client: &Client) -> bool {
        !self.elsewhere.is_empty() && self.elsewhere.contains(client)
    }

    pub(super) fn lead_from(&self, listener: ListenerId) -> bool {
        self.elsewhere.iter().any(|client| client.listener == listener)
    }

    /// Passes a datagram to the old process; returns false if it is lost, for example because the tunnel's
    /// socket buffer is full.
    pub(super) fn pass_on(&self, client: &Client, (tos, ttl): (u8, u8), datagram: &[u8]) -> bool {
        let Some(old) = &self.old else { return false };
        // A header without a datagram means the end of the association.
        if datagram.is_empty() {
            return true;
        }
        let head = TunnelHead { client: *client, tos, ttl }.write();
        old.write_vectored(&[io::IoSlice::new(&head), io::IoSlice::new(datagram)], false).is_ok()
    }

    pub(super) fn tell_ended(&self, client: Client) {
        let Some(new) = &self.new else { return };
        // If this message is lost, the client's datagrams are forwarded here until we exit.
        let _ = new.write(&TunnelHead { client, tos: 0, ttl: 0 }.write());
    }
}

impl Worker {
    pub(super) fn hear_of_old(&mut self) {
        let mut head = [0; HEAD];
        while let Some(old) = &self.tunnels.old {
            match old.read(&mut head) {
                Ok(HEAD) => {
                    let ended = TunnelHead::read(&head).client;
                    if self.tunnels.elsewhere.remove(&ended) {
                        self.tunnels.tell_ended(ended);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The old process has ended, so its clients start over here.
                _ => {
                    let _ = self.frame.poller.remove(old);
                    self.tunnels.old = None;
                    let clients: Vec<Client> = self.tunnels.elsewhere.drain().collect();
                    clients.into_iter().for_each(|client| self.tunnels.tell_ended(client));
                }
            }
        }
    }

    pub(super) fn receive_from_new(&mut self, now: Now) {
        for _ in 0..SHARE {
            if self.rx.room() < crate::dtls::Associations::ROOM {
                self.flush();
            }
            let Some(new) = &self.tunnels.new else { return };
            let filled = self.rx.fill(0, |room| new.read(room));
            let message = match filled {
                Ok(message) if message.len as usize > HEAD => message,
                Ok(message) if message.len > 0 => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // The new process has ended, so nothing reads from the sockets any more.
                _ => {
                    let _ = self.frame.poller.remove(new);
                    return self.tunnels.close();
                }
            };
            let Some(head) = self.rx.bytes(message).first_chunk::<HEAD>() else { return };
            let TunnelHead { client, tos, ttl } = TunnelHead::read(head);
            #[expect(clippy::cast_possible_truncation, reason = "40")]
            let head = HEAD as u32;
            let datagram = ArenaSpan { offset: message.offset + head, len: message.len - head };
            if self.tunnels.leads_away(&client) {
                self.tunnels.pass_on(&client, (tos, ttl), self.rx.bytes(datagram));
            } else {
                self.route_dtls_datagram(now, client, datagram, (tos, ttl));
            }
        }
    }

    pub(super) fn tell_ended_associations(&mut self) {
        while let Some(client) = self.out.dtls.next_ended() {
            self.tunnels.tell_ended(client);
        }
    }
}

impl TunnelHead {
    fn write(&self) -> [u8; HEAD] {
        let Self { client: Client { listener: ListenerId(listener), address, local }, tos, ttl } = self;
        let mut head = [0; HEAD];
        head[..2].copy_from_slice(&listener.to_be_bytes());
        (head[2], head[3]) = (*tos, *ttl);
        for (at, place) in [address, local].into_iter().zip([4, 22]) {
            let ip = match at.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            head[place..place + 16].copy_from_slice(&ip.octets());
            head[place + 16..place + 18].copy_from_slice(&at.port().to_be_bytes());
        }
        head
    }

    fn read(head: &[u8; HEAD]) -> Self {
        let [l0, l1, tos, ttl, rest @ ..] = head;
        let [address, local] = [&rest[..18], &rest[18..]].map(|at| {
            let ip: [u8; 16] = std::array::from_fn(|n| at[n]);
            canonical(SocketAddr::new(Ipv6Addr::from(ip).into(), u16::from_be_bytes([at[16], at[17]])))
        });
        let listener = ListenerId(u16::from_be_bytes([*l0, *l1]));
        Self { client: Client { listener, address, local }, tos: *tos, ttl: *ttl }
    }
}

/// Connected pair of sockets that preserve message boundaries. They buffer up to [`BUFFER`] bytes if the
/// kernel allows that much.
fn messages() -> io::Result<(TcpSocket, TcpSocket)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    for end in [&near, &far] {
        sockopt::set_socket_send_buffer_size_force(end, BUFFER)
            .or_else(|_| sockopt::set_socket_send_buffer_size(end, BUFFER))?;
    }
    Ok((near.into(), far.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn header_round_trips(
            listener: u16,
            tos: u8,
            ttl: u8,
            address: SocketAddr,
            local: SocketAddr,
        ) {
            // Client addresses have neither flow labels nor scope ids.
            let [address, local] =
                [address, local].map(|at| canonical(SocketAddr::new(at.ip(), at.port())));
            let client = Client { listener: ListenerId(listener), address, local };
            let read = TunnelHead::read(&TunnelHead { client, tos, ttl }.write());
            prop_assert_eq!((read.client, read.tos, read.ttl), (client, tos, ttl));
        }
    }

    #[test]
    fn datagrams_of_old_clients_are_passed_to_the_old_process() {
        let poller = Poller::new().unwrap();
        let client = |port: u16| Client {
            listener: ListenerId(2),
            address: ([192, 0, 2, 1], port).into(),
            local: ([192, 0, 2, 9], 443).into(),
        };
        let (mut old, mut new) = (Tunnels::default(), Tunnels::default());
        let far = old.open().unwrap();
        new.join(far, [1, 2].map(client), &poller).unwrap();
        assert!(new.leads_away(&client(1)) && !new.leads_away(&client(3)));
        assert!(new.lead_from(ListenerId(2)) && !new.lead_from(ListenerId(1)));
        assert!(new.pass_on(&client(2), (7, 64), b"datagram"));
        let mut message = [0; 100];
        let len = old.new.as_ref().unwrap().read(&mut message).unwrap();
        let head = TunnelHead::read(message.first_chunk().unwrap());
        assert_eq!((head.client, head.tos, head.ttl), (client(2), 7, 64));
        assert_eq!(&message[HEAD..len], b"datagram");
        // When the queue is full, datagrams are dropped; the sender neither blocks nor fails.
        let passed = (0..1_000_000).take_while(|_| new.pass_on(&client(1), (0, 0), &[0; 1000])).count();
        assert!((1..1_000_000).contains(&passed));
    }
}
