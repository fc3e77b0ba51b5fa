//! Two webrtc-rs peer connections exchange messages over a data channel, through a TURN server only.
//!
//! Usage: `turnpike-interop-webrtc-rs TRANSPORT HOST PORT USERNAME PASSWORD SECONDS`.
//! It prints `version NAMES`, then every 250 ms `MS SENT RECEIVED SENT RECEIVED`: the time since the call began, and the messages of each end so far.
#![forbid(unsafe_code)]

use std::{
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::time::{Instant, interval, sleep};
use webrtc::{
    api::APIBuilder,
    data_channel::{RTCDataChannel, data_channel_state::RTCDataChannelState},
    ice_transport::ice_server::RTCIceServer,
    peer_connection::{
        RTCPeerConnection, configuration::RTCConfiguration,
        policy::ice_transport_policy::RTCIceTransportPolicy,
    },
};

const INTERVAL: Duration = Duration::from_millis(60);

#[derive(Default)]
struct Counts {
    sent: AtomicU64,
    received: AtomicU64,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [transport, host, port, username, password, seconds] = &arguments[..] else {
        return Err("TRANSPORT HOST PORT USERNAME PASSWORD SECONDS".into());
    };
    println!("version webrtc-rs {} with turn {}", locked_version("webrtc"), locked_version("turn"));
    let (scheme, over) = if transport == "tls" { ("turns", "tcp") } else { ("turn", transport.as_str()) };
    let server = RTCIceServer {
        urls: vec![format!("{scheme}:{host}:{port}?transport={over}")],
        username: username.clone(),
        credential: password.clone(),
    };
    let configuration = RTCConfiguration {
        ice_servers: vec![server],
        ice_transport_policy: RTCIceTransportPolicy::Relay,
        ..Default::default()
    };
    let api = APIBuilder::new().build();
    let [a, b] = [
        api.new_peer_connection(configuration.clone()).await?,
        api.new_peer_connection(configuration).await?,
    ];
    let counts = [(); 2].map(|()| Arc::new(Counts::default()));

    talk(&a.create_data_channel("call", None).await?, &counts[0]);
    let of_b = Arc::clone(&counts[1]);
    b.on_data_channel(Box::new(move |channel| {
        talk(&channel, &of_b);
        Box::pin(async {})
    }));
    let offer = a.create_offer(None).await?;
    introduce(&a, offer, &b).await?;
    let answer = b.create_answer(None).await?;
    introduce(&b, answer, &a).await?;

    while counts.iter().any(|end| end.received.load(Relaxed) == 0) {
        sleep(Duration::from_millis(10)).await;
    }
    let began = Instant::now();
    let seconds = Duration::from_secs_f64(seconds.parse()?);
    let mut ticks = interval(Duration::from_millis(250));
    while began.elapsed() < seconds {
        ticks.tick().await;
        let [a, b] = &counts;
        let numbers =
            [&a.sent, &a.received, &b.sent, &b.received].map(|count| count.load(Relaxed).to_string());
        println!("{} {}", began.elapsed().as_millis(), numbers.join(" "));
    }
    Ok(())
}

/// Version of a crate in the lock file.
fn locked_version(name: &str) -> &'static str {
    let package = format!("name = \"{name}\"\nversion = \"");
    let (_, rest) = include_str!("../Cargo.lock").split_once(&package).expect("a dependency");
    rest.split_once('"').expect("a version").0
}

/// Sends and counts messages on a channel while it is open.
fn talk(channel: &Arc<RTCDataChannel>, counts: &Arc<Counts>) {
    let of_messages = Arc::clone(counts);
    channel.on_message(Box::new(move |_| {
        of_messages.received.fetch_add(1, Relaxed);
        Box::pin(async {})
    }));
    let (channel, counts) = (Arc::clone(channel), Arc::clone(counts));
    tokio::spawn(async move {
        let mut ticks = interval(INTERVAL);
        loop {
            ticks.tick().await;
            if channel.ready_state() != RTCDataChannelState::Open {
                continue;
            }
            if channel.send_text("message").await.is_ok() {
                counts.sent.fetch_add(1, Relaxed);
            }
        }
    });
}

/// Sets a description with all candidates on both ends.
async fn introduce(
    from: &RTCPeerConnection,
    description: webrtc::peer_connection::sdp::session_description::RTCSessionDescription,
    to: &RTCPeerConnection,
) -> Result<(), Box<dyn Error>> {
    let mut gathered = from.gathering_complete_promise().await;
    from.set_local_description(description).await?;
    let _ = gathered.recv().await;
    let whole = from.local_description().await.ok_or("no description")?;
    to.set_remote_description(whole).await?;
    Ok(())
}
