//! Experiment: benefit or cost of MSG_ZEROCOPY for datagrams of media packet size, with a sender at a fixed
//! rate and a sink.
//!
//! ```text
//! zerocopy --variant sink --from 10.77.2.2:5300                                                    in the namespace of the receiver
//! zerocopy --variant copy|zerocopy --from 10.77.2.1:5301 --to 10.77.2.2:5300 --rate 100000 [--size 1200] [--segments 16] [--seconds 10]
//! ```
//!
//! The sender always sends the same buffer, which is never written to, so it need not wait for completions.
//! It still reads them from the error queue, as any sender must. `copied` is the share of completions with
//! the flag "copied" (a device without support, or a receiver on the same machine).
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "developer tool; panics show the location")]

mod bare;

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::AsRawFd,
    thread,
    time::{Duration, Instant},
};

use bare::Run;

/// From linux/udp.h, linux/errqueue.h and asm-generic/socket.h.
const UDP_SEGMENT: libc::c_int = 103;
const SO_ZEROCOPY: libc::c_int = 60;
const SO_EE_ORIGIN_ZEROCOPY: u8 = 5;
const SO_EE_CODE_ZEROCOPY_COPIED: u8 = 1;
/// Interval between two batches.
const TICK: Duration = Duration::from_micros(500);

fn set(socket: &UdpSocket, level: libc::c_int, name: libc::c_int, value: libc::c_int) {
    let size = libc::socklen_t::try_from(size_of_val(&value)).unwrap();
    // SAFETY: the pointer and size describe `value`.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), size) };
    assert_eq!(set, 0, "option {name}: {}", io::Error::last_os_error());
}

/// Reads completions from the error queue. Returns their number, and the number flagged as copied.
fn notes(socket: &UdpSocket) -> (u64, u64) {
    #[repr(align(8))]
    struct Room([u8; 128]);
    let (mut count, mut copied) = (0, 0);
    loop {
        let mut room = Room([0; 128]);
        // SAFETY: zero is a valid value for every member of `msghdr`.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        (header.msg_control, header.msg_controllen) = (room.0.as_mut_ptr().cast(), room.0.len());
        let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
        // SAFETY: the header points to `room`, of the length given with it.
        if unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) } < 0 {
            return (count, copied);
        }
        // SAFETY: the kernel has filled in the header.
        let first = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
        if first.is_null() {
            continue;
        }
        // SAFETY: the error queue of this socket only carries `sock_extended_err`.
        let note = unsafe { *libc::CMSG_DATA(first).cast::<libc::sock_extended_err>() };
        // Inclusive range.
        let range = u64::from(note.ee_data.wrapping_sub(note.ee_info)) + 1;
        if note.ee_origin == SO_EE_ORIGIN_ZEROCOPY {
            count += range;
            copied += if note.ee_code == SO_EE_CODE_ZEROCOPY_COPIED { range } else { 0 };
        }
    }
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    clippy::cast_possible_truncation,
    reason = "rates"
)]
fn send(run: &Run, socket: &UdpSocket, variant: &str) {
    let (size, segments): (usize, usize) = (run.get("size", 1200), run.get("segments", 1));
    let rate: f64 = run.get("rate", 100_000.0);
    socket.connect(run.need::<SocketAddr>("to")).unwrap();
    set(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, 4 << 20);
    let flags = if variant == "zerocopy" {
        set(socket, libc::SOL_SOCKET, SO_ZEROCOPY, 1);
        libc::MSG_ZEROCOPY | libc::MSG_DONTWAIT
    } else {
        libc::MSG_DONTWAIT
    };
    if segments > 1 {
        set(socket, libc::SOL_UDP, UDP_SEGMENT, size.try_into().unwrap());
    }
    let bytes = vec![0x5A_u8; size * segments];
    let (mut sent, mut refused, mut noted, mut copied) = (0_u64, 0_u64, 0, 0);
    let began = Instant::now();
    while run.goes_on() {
        let due = (began.elapsed().as_secs_f64() * rate) as u64;
        while sent + refused < due {
            // SAFETY: the pointer and length describe `bytes`, which is not written to while the socket is
            // open.
            let done = unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
            // Fails if the buffer is full, or if there are too many unread completions (ENOBUFS,
            // net.core.optmem_max).
            *(if done < 0 { &mut refused } else { &mut sent }) += segments as u64;
        }
        if variant == "zerocopy" {
            let (more, of_them) = notes(socket);
            (noted, copied) = (noted + more, copied + of_them);
        }
        thread::sleep(TICK);
    }
    let share = if noted > 0 { copied as f64 / noted as f64 } else { 0.0 };
    let more = [("refused", refused as f64), ("notes", noted as f64), ("copied", share)];
    run.report("zerocopy", &format!("{variant}, {segments} of {size}"), sent, &more);
}

fn take(run: &Run, socket: &UdpSocket) {
    set(socket, libc::SOL_SOCKET, libc::SO_RCVBUF, 4 << 20);
    socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let (mut buffer, mut taken) = (vec![0; 1 << 16], 0);
    while run.goes_on() {
        taken += u64::from(socket.recv(&mut buffer).is_ok());
    }
    run.report("zerocopy", "sink", taken, &[]);
}

fn main() {
    let run = Run::start(&["variant", "from", "to", "rate", "size", "segments"]);
    let socket = UdpSocket::bind(run.need::<SocketAddr>("from")).unwrap();
    match &*run.need::<String>("variant") {
        "sink" => take(&run, &socket),
        variant @ ("copy" | "zerocopy") => send(&run, &socket, variant),
        other => panic!("--variant {other}"),
    }
}
