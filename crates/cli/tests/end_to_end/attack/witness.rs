//! A client that relays on the very worker that is attacked: below what saturates that, it loses nothing and hears of nothing.

use std::{
    io::Write as _,
    net::TcpStream,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use super::{
    is_thorough, row,
    strangers::{Packet, pour_in},
};
use crate::harness::{Certificate, Load, Reflect, SOON, Serve, V4, eventually, fetch};

/// What is done again and again, and how many of it at a time.
type Attack = (&'static str, Box<dyn Fn(&Serve, u32) -> u32 + Sync>);

fn attacks() -> Vec<Attack> {
    let flood = |packet: Packet| -> Attack {
        let pour = move |serve: &Serve, round: u32| {
            let server = match packet {
                Packet::ClientHello => serve.address_of("dtls", V4),
                _ => serve.address(V4),
            };
            pour_in(packet, server, round % 400 * 20, 20);
            20
        };
        (packet.name(), Box::new(pour))
    };
    let stream = |name: &'static str, bytes: &'static [u8]| -> Attack {
        let connect = move |serve: &Serve, _| {
            for _ in 0..5 {
                let mut stream = TcpStream::connect(serve.address_of("tls", V4)).expect("it listens");
                // Where it has been closed already, that is an answer too.
                let _ = stream.write_all(bytes);
            }
            5
        };
        (name, Box::new(connect))
    };
    let mut all: Vec<Attack> = Packet::ALL.map(flood).into();
    all.extend([
        stream("TCP connections that close at once", b""),
        stream("TCP connections with garbage", b"GET / HTTP/1.0\r\n\r\n"),
        stream("TLS connections with half a ClientHello", &[0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3]),
        (
            "requests to the admin interface",
            Box::new(|serve: &Serve, _| {
                for path in ["/metrics", "/v1/status", "/v1/sessions", "/nothing"] {
                    let _ = fetch(serve.admin(), path);
                }
                4
            }),
        ),
        (
            "reloads",
            Box::new(|serve: &Serve, _| {
                serve.program.signal("HUP");
                1
            }),
        ),
    ]);
    all
}

#[test]
fn a_client_on_the_attacked_worker_loses_nothing() {
    let duration = if is_thorough() { "10" } else { "1.5" };
    let certificate = Certificate::new(&["turn.example.org"]);
    let serve = Serve::start_secured(&certificate, &["--workers", "1"]);
    let reflect = Reflect::start(V4, &[]);
    for (name, attack) in attacks() {
        let witness = Load::new(serve.address(V4))
            .to(reflect.address)
            .with(&["--clients", "4", "--rate", "400", "--warmup", "0.1", "--duration", duration])
            .start();
        eventually("it relays", || (serve.allocations() == 4).then_some(()));
        let ended = AtomicBool::new(false);
        let (done, result) = thread::scope(|scope| {
            // Also where an assertion fails, or the scope would wait for ever.
            let stop = StopAtEnd(&ended);
            let attacker = scope.spawn(|| {
                let mut done = 0;
                for round in 0.. {
                    if ended.load(Ordering::Relaxed) {
                        break;
                    }
                    done += attack(&serve, round);
                    // A few thousand a second: what saturates a worker is another question.
                    thread::sleep(Duration::from_millis(5));
                }
                done
            });
            let run = witness.wait(SOON * 2);
            drop(stop);
            assert_eq!(run.code, Some(0), "{name}: {}", run.output());
            (attacker.join().expect("it does not panic"), run.result())
        });
        assert!(done > 0, "{name}");
        assert!(result["sent"].as_u64() >= Some(400), "{name}: {result}");
        for what in ["lost", "duplicated", "reordered"] {
            assert_eq!(result[what], 0, "{name}: {what}: {result}");
        }
        row("witness", &[&name, &done, &result["sent"], &result["lost"], &result["rtt_us"]["p99"]]);
        serve.wait_for_allocations(0);
    }
}

struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
