//! A STUN Binding request, repeated until it is answered: the sign that a relay serves.

use std::{
    net::{SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use crate::Failure;

const PATIENCE: Duration = Duration::from_secs(15);
const INTERVAL: Duration = Duration::from_millis(50);
/// RFC 8489 section 5: Binding request, no attributes, the magic cookie, a transaction ID.
const REQUEST: [u8; 20] = *b"\x00\x01\x00\x00\x21\x12\xa4\x42turnpike-xts";

/// Asks `address` until it answers or 15 seconds have passed.
pub(crate) fn until_answered(address: SocketAddr) -> Result<(), Failure> {
    let any: SocketAddr = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse()?;
    let socket = UdpSocket::bind(any)?;
    // A connected socket hears of a closed port at once; that error only means "not yet".
    socket.connect(address)?;
    socket.set_read_timeout(Some(INTERVAL))?;
    let deadline = Instant::now() + PATIENCE;
    let mut answer = [0; 1500];
    while Instant::now() < deadline {
        let asked = Instant::now();
        if socket.send(&REQUEST).is_ok()
            && let Ok(length) = socket.recv(&mut answer)
            && is_answer(&answer[..length])
        {
            return Ok(());
        }
        // A refused port answers sooner than the timeout.
        std::thread::sleep(INTERVAL.saturating_sub(asked.elapsed()));
    }
    Err(format!("{address} does not answer STUN").into())
}

/// A Binding success response to our request.
fn is_answer(bytes: &[u8]) -> bool {
    bytes.len() >= 20 && bytes[..2] == [0x01, 0x01] && bytes[4..20] == REQUEST[4..20]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_success_response_to_our_request_is_an_answer() {
        let mut answer = REQUEST;
        assert!(!is_answer(&answer), "our own request echoed");
        answer[0] = 1;
        assert!(is_answer(&answer));
        answer[19] ^= 1;
        assert!(!is_answer(&answer), "another transaction");
        assert!(!is_answer(&[1, 1]));
    }

    #[test]
    fn a_server_that_answers_late_is_waited_for() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        let serving = std::thread::spawn(move || {
            let mut request = [0; 100];
            // The first request is lost on purpose.
            server.recv_from(&mut request).unwrap();
            let (_, client) = server.recv_from(&mut request).unwrap();
            let mut answer = REQUEST;
            answer[0] = 1;
            server.send_to(&answer, client).unwrap();
        });
        until_answered(address).unwrap();
        serving.join().unwrap();
    }
}
