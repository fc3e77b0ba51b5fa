//! The new process's side of an upgrade.

use std::{env, fmt::Display, io, os::fd::OwnedFd, sync::Arc, thread, time::Duration};

use serde::de::DeserializeOwned;
use turnpike_config::UPGRADE_VARIABLE;
use turnpike_worker::{Channel, Message};
use zeroize::Zeroizing;

use super::protocol::{FromNew, FromOld, PROTOCOL};
use crate::{carried_metrics::CarriedMetrics, error::ProcessError};

/// Time to wait for the rest of a refused offer.
const REST: Duration = Duration::from_secs(2);

pub struct PreviousProcess {
    channel: Channel,
    text: Zeroizing<Vec<u8>>,
    descriptors: Vec<OwnedFd>,
}

/// Runs a service, which takes over if this process was started by a previous one. If the service cannot
/// start, the previous process receives the reason and keeps serving.
pub fn begin<E: Display + From<ProcessError>>(
    service: &str,
    run: impl FnOnce(&mut Option<PreviousProcess>) -> Result<(), E>,
) -> Result<(), E> {
    let mut previous = PreviousProcess::of_this_process(service)?;
    let ended = run(&mut previous);
    if let (Some(previous), Err(error)) = (previous, &ended) {
        refuse(&previous.channel, error);
    }
    ended
}

impl PreviousProcess {
    fn of_this_process(service: &str) -> Result<Option<Self>, ProcessError> {
        if env::var_os(UPGRADE_VARIABLE).is_none() {
            return Ok(None);
        }
        let channel = Channel::from_stdin().map_err(|error| {
            ProcessError::Upgrade(format!(
                "{UPGRADE_VARIABLE} is set, but standard input is not connected to a process being upgraded ({error}): unset it"
            ))
        })?;
        Self::receive_offer(channel, service).map(Some)
    }

    fn receive_offer(channel: Channel, service: &str) -> Result<Self, ProcessError> {
        let offered = check_hello(&channel, service)
            .and_then(|()| channel.receive().map_err(|error| error.to_string()));
        match offered {
            Ok(Message { bytes, descriptors }) => Ok(Self { channel, text: bytes, descriptors }),
            Err(why) => {
                refuse(&channel, &why);
                // Closing the socket with unread data would lose the refusal.
                let _ = channel.set_patience(REST).and_then(|()| channel.receive());
                Err(ProcessError::Upgrade(why))
            }
        }
    }

    pub fn offer<T: DeserializeOwned>(&mut self) -> Result<(T, Vec<OwnedFd>), ProcessError> {
        let text = std::mem::take(&mut self.text);
        let offer = serde_json::from_slice::<T>(&text).map_err(|error| {
            ProcessError::Upgrade(format!(
                "cannot read the old process's offer ({error}): its version is incompatible; restart instead"
            ))
        })?;
        Ok((offer, std::mem::take(&mut self.descriptors)))
    }

    /// Takes over once everything else that can fail is done: `receive` waits for the sessions and returns
    /// their number, and `serve` begins to serve them. If `keeps_flows` is true, flows in the kernel stay.
    fn take_over(
        &self,
        carried: &CarriedMetrics,
        keeps_flows: bool,
        receive: impl FnOnce() -> Result<usize, String>,
        serve: impl FnOnce(),
    ) -> Result<(), ProcessError> {
        let gone = |error: io::Error| {
            ProcessError::Upgrade(format!("the old process cancelled the upgrade ({error})"))
        };
        let version = env!("CARGO_PKG_VERSION").to_owned();
        self.channel.send_value(&FromNew::Ready { version, keeps_flows }, &[]).map_err(gone)?;
        let sessions = receive().map_err(ProcessError::Upgrade)?;
        self.channel.send_value(&FromNew::Taken { sessions }, &[]).map_err(gone)?;
        loop {
            match self.channel.receive_value::<FromOld>().map_err(gone)?.0 {
                FromOld::Commit => break,
                // All sessions that this page counts are moving to this process.
                FromOld::Metrics(text) => carried.expect(&text),
                FromOld::Hello { .. } | FromOld::Released => {
                    return Err(ProcessError::Upgrade(
                        "the old process sent an unexpected message".to_owned(),
                    ));
                }
            }
        }
        serve();
        // Errors are ignored: this process serves even if the old one has just exited.
        let _ = self.channel.send_value(&FromNew::Serving, &[]);
        Ok(())
    }

    /// Listens to the old process until it exits; calls `released` once the old process has released the
    /// kernel path.
    fn listen(self, carried: Arc<CarriedMetrics>, released: impl FnOnce() + Send + 'static) {
        carried.begin();
        let listening = Arc::clone(&carried);
        let listen = move || {
            let mut released = Some(released);
            loop {
                match self.channel.receive_value::<FromOld>().map(|(said, _)| said) {
                    Ok(FromOld::Released) => {
                        if let Some(released) = released.take() {
                            released();
                        }
                    }
                    Ok(FromOld::Metrics(text)) => listening.set(&text),
                    Ok(FromOld::Hello { .. } | FromOld::Commit) => {}
                    Err(_) => break,
                }
            }
            if let Some(released) = released {
                released();
            }
            listening.end();
            tracing::info!("the previous process has exited");
        };
        if let Err(error) = thread::Builder::new().name("predecessor".to_owned()).spawn(listen) {
            carried.end();
            tracing::warn!("lost the connection to the previous process: {error}");
        }
    }
}

/// Takes over from the previous process, if any: `receive` waits for its sessions and returns their number,
/// `serve` begins to serve them, and `released` is called once the kernel path is free. If `keeps_flows` is
/// true, flows in the kernel stay.
pub fn take_over(
    previous: &mut Option<PreviousProcess>,
    carried: &Arc<CarriedMetrics>,
    keeps_flows: bool,
    receive: impl FnOnce() -> Result<usize, String>,
    serve: impl FnOnce(),
    released: impl FnOnce() + Send + 'static,
) -> Result<(), ProcessError> {
    if let Some(previous) = previous {
        previous.take_over(carried, keeps_flows, receive, serve)?;
    }
    // The previous process cannot resume after this point.
    if let Some(previous) = previous.take() {
        previous.listen(Arc::clone(carried), released);
    }
    Ok(())
}

fn check_hello(channel: &Channel, service: &str) -> Result<(), String> {
    let hello = channel.receive_value::<FromOld>().map_err(|error| error.to_string())?.0;
    let FromOld::Hello { protocol, version, service: theirs } = hello else {
        return Err("the old process sent an unexpected message".to_owned());
    };
    let ours = env!("CARGO_PKG_VERSION");
    if protocol != PROTOCOL {
        return Err(format!(
            "turnpike {version} uses upgrade protocol {protocol}, but turnpike {ours} uses {PROTOCOL}: restart instead"
        ));
    }
    if theirs != service {
        return Err(format!("a turnpike {theirs} process cannot continue as turnpike {service}"));
    }
    Ok(())
}

fn refuse(channel: &Channel, why: &dyn Display) {
    let why = why.to_string();
    // If the reason cannot be sent, it is still in the log.
    let _ = channel.send_value(&FromNew::Refused { why }, &[]);
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use turnpike_testkit::PATIENCE;

    use super::*;

    fn pair() -> (Channel, Channel) {
        let (here, there) = Channel::pair().expect("a pair");
        here.set_patience(PATIENCE).expect("the socket is open");
        there.set_patience(PATIENCE).expect("the socket is open");
        (here, there)
    }

    fn hello(protocol: u32, service: &str) -> Value {
        json!({ "hello": { "protocol": protocol, "version": "9.8.7", "service": service, "more": [1] } })
    }

    fn said(channel: &Channel) -> Value {
        channel.receive_value::<Value>().expect("a message").0
    }

    fn met(hello: &Value) -> (Channel, Result<PreviousProcess, ProcessError>) {
        let (here, there) = pair();
        here.send_value(hello, &[]).expect("the other process listens");
        here.send(b"[7]", &[]).expect("the other process listens");
        (here, PreviousProcess::receive_offer(there, "serve"))
    }

    #[test]
    fn unknown_protocols_and_services_are_refused_with_a_reason() {
        for (greeting, why) in [
            (hello(PROTOCOL + 1, "serve"), "turnpike 9.8.7 uses upgrade protocol 2"),
            (hello(PROTOCOL, "forward"), "turnpike forward process cannot continue as turnpike serve"),
            (json!("commit"), "unexpected message"),
            (json!({ "greetings": 1 }), "cannot parse"),
        ] {
            let (old, previous) = met(&greeting);
            let error = previous.err().expect("refused").to_string();
            assert!(error.contains(why), "{error}");
            let told = said(&old);
            assert!(told["refused"]["why"].as_str().is_some_and(|told| told.contains(why)), "{told}");
        }
    }

    #[test]
    fn the_new_process_serves_only_after_commit() {
        let (old, previous) = met(&hello(PROTOCOL, "serve"));
        let mut previous = previous.expect("the offer fits");
        assert_eq!(previous.offer::<Vec<u8>>().expect("the offer is readable").0, [7]);
        let carried = CarriedMetrics::default();
        let other = thread::spawn(move || {
            assert_eq!(
                said(&old),
                json!({ "ready": { "version": env!("CARGO_PKG_VERSION"), "keeps_flows": true } })
            );
            assert_eq!(said(&old), json!({ "taken": { "sessions": 5 } }));
            assert!(!old.is_ready(Duration::ZERO).expect("the channel is open"), "no commit yet");
            let page = "# TYPE turnpike_x counter\nturnpike_x_total 4\n# EOF\n";
            old.send_value(&FromOld::Metrics(page.to_owned()), &[]).expect("the other process listens");
            old.send_value(&FromOld::Commit, &[]).expect("the other process listens");
            assert_eq!(said(&old), json!("serving"));
        });
        let mut serves = false;
        previous.take_over(&carried, true, || Ok(5), || serves = true).expect("all is well");
        other.join().expect("the other side got all messages");
        assert!(serves && !carried.lives());
        assert!(carried.add_to("# EOF\n".to_owned()).contains("turnpike_x_total 4"));
    }

    #[test]
    fn the_new_process_does_not_serve_if_the_old_one_ends_early() {
        let (old, previous) = met(&hello(PROTOCOL, "serve"));
        let previous = previous.expect("the offer fits");
        let receive = || {
            drop(old);
            Ok(5)
        };
        let error = previous
            .take_over(&CarriedMetrics::default(), false, receive, || panic!("the new process serves"))
            .expect_err("the upgrade is cancelled");
        assert!(error.to_string().contains("cancelled the upgrade"), "{error}");
    }

    #[test]
    fn metrics_of_the_old_process_arrive_until_it_ends() {
        let (old, previous) = met(&hello(PROTOCOL, "serve"));
        let carried = Arc::<CarriedMetrics>::default();
        let (sender, released) = std::sync::mpsc::channel();
        previous
            .expect("the offer fits")
            .listen(Arc::clone(&carried), move || sender.send(()).expect("the test waits"));
        assert!(carried.lives());
        old.send_value(&FromOld::Released, &[]).expect("the other process listens");
        released.recv_timeout(PATIENCE).expect("`released` is called");
        let page = |count| format!("# TYPE turnpike_x counter\nturnpike_x_total {count}\n# EOF\n");
        for count in [1, 2] {
            old.send_value(&FromOld::Metrics(page(count)), &[]).expect("the other process listens");
        }
        let has = |text: &str| carried.add_to("# EOF\n".to_owned()).contains(text);
        turnpike_testkit::eventually("the last page is received", || has("turnpike_x_total 2"));
        drop(old);
        turnpike_testkit::eventually("the old process's end is noticed", || !carried.lives());
        assert!(has("turnpike_x_total 2"));
    }
}
