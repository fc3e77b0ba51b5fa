//! Heavy flows keep their super-packets and thin ones go across; no flow is reordered when it is now the one and now the other.

use std::net::SocketAddr;

use super::{PEER, SERVER, on_links};
use crate::harness::{Load, Reflect, SOON};

fn load(arguments: &[&str]) -> Load {
    Load::as_user(SocketAddr::new(SERVER[0], 3478), "any:body").with(arguments)
}

#[test]
fn bursts_stay_in_user_space_and_lone_datagrams_do_not() {
    on_links("kernel_path::order::bursts_stay_in_user_space_and_lone_datagrams_do_not", |links| {
        let server = links.serve(&[]);
        let reflect = Reflect::start(PEER[0], &[]);
        let run = load(&["--clients", "50", "--rate", "2000", "--duration", "2"]).to(reflect.address).run();
        let result = run.result();
        assert_eq!((result["lost"].as_u64(), result["reordered"].as_u64()), (Some(0), Some(0)), "{result}");
        let received = result["received"].as_u64().expect("a number");
        assert!(server.across() > received * 3 / 2, "{} of {result}", server.across());

        let before = server.across();
        let run = load(&["--clients", "2", "--rate", "20000", "--burst", "32", "--duration", "2"])
            .to(reflect.address)
            .run();
        let result = run.result();
        assert_eq!(result["reordered"].as_u64(), Some(0), "{result}");
        assert!(server.passes("super_packet") > 100, "{}", server.passes("super_packet"));
        let received = result["received"].as_u64().expect("a number");
        assert!(server.across() - before < received / 10, "{} of {result}", server.across() - before);
    });
}

#[test]
fn a_flow_that_is_now_thin_and_now_heavy_keeps_its_order_under_load() {
    const TEST: &str = "kernel_path::order::a_flow_that_is_now_thin_and_now_heavy_keeps_its_order_under_load";
    on_links(TEST, |links| {
        let server = links.serve(&[]);
        let reflect = Reflect::start(PEER[0], &[]);
        // Streams of single datagrams and of bursts, by turns, beside others that keep user space busy.
        let busy = load(&["--clients", "4", "--rate", "max", "--window", "64", "--duration", "12"])
            .to(reflect.address)
            .start();
        let mut runs = Vec::new();
        for (rate, burst) in [("300", "1"), ("3000", "16"), ("900", "3")] {
            runs.push(
                load(&["--clients", "30", "--rate", rate, "--burst", burst, "--duration", "8"])
                    .to(reflect.address)
                    .start(),
            );
        }
        let peer = SocketAddr::new(PEER[0], 0);
        runs.push(load(&["--profile", "call", "--clients", "5", "--duration", "8"]).to(peer).start());
        runs.push(load(&["--profile", "screen", "--clients", "5", "--duration", "8"]).to(peer).start());
        for run in runs {
            let run = run.wait(SOON);
            assert_eq!(run.code, Some(0), "{}", run.output());
            assert_eq!(run.result()["reordered"].as_u64(), Some(0), "{}", run.result());
        }
        let busy = busy.wait(SOON);
        assert_eq!(busy.result()["reordered"].as_u64(), Some(0), "{}", busy.result());
        assert!(
            server.across() > 1000 && server.passes("super_packet") > 100 && server.passes("settling") > 0
        );
    });
}
