//! http-01, which responds to requests for one token on port 80 while a challenge is pending.

use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode, body::Bytes, body::Incoming, server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time::timeout,
};
use turnpike_net::BindError;

use crate::{error::OrderError, proof::ChallengeResponse};

/// Maximum simultaneous connections: CAs validate from several networks at once, and anyone else
/// may connect too.
const CONNECTIONS: usize = 32;
const CONNECTION: Duration = Duration::from_secs(10);
const LONGEST_REQUEST: usize = 8192;
const BACKLOG: u32 = 64;

/// Listens until it is dropped.
pub(crate) struct HttpChallenge(#[expect(dead_code, reason = "ends its tasks when dropped")] JoinSet<()>);

impl HttpChallenge {
    /// Listens on all `addresses`. If the machine does not support an address's family, that
    /// address is skipped as long as another one works.
    pub(crate) async fn listen(
        addresses: &[SocketAddr],
        proof: &ChallengeResponse,
    ) -> Result<Self, OrderError> {
        let path = format!("/.well-known/acme-challenge/{}", proof.token);
        let answer = Arc::new((path, proof.text.clone()));
        let mut tasks = JoinSet::new();
        let mut refused = None;
        for address in addresses {
            match listener(*address) {
                Ok(listener) => _ = tasks.spawn(serve(listener, Arc::clone(&answer))),
                Err(error) => {
                    let error = BindError::ip(address, error, "with acme.http_listen");
                    refused = Some(OrderError::Listen(error.or("set a different acme.challenge")));
                }
            }
        }
        match refused {
            Some(error) if tasks.is_empty() => Err(error),
            _ => Ok(Self(tasks)),
        }
    }
}

fn listener(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    if address.is_ipv6() {
        socket2::SockRef::from(&socket).set_only_v6(true)?;
    }
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

async fn serve(listener: TcpListener, answer: Arc<(String, String)>) {
    let free = Arc::new(Semaphore::new(CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let Ok(permit) = Arc::clone(&free).acquire_owned().await else { return };
        while connections.try_join_next().is_some() {}
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let answer = Arc::clone(&answer);
        connections.spawn(async move {
            let _ = timeout(CONNECTION, respond(stream, answer)).await;
            drop(permit);
        });
    }
}

async fn respond(stream: TcpStream, answer: Arc<(String, String)>) -> Result<(), hyper::Error> {
    let service = service_fn(move |request: Request<Incoming>| {
        let is_asked = request.method() == Method::GET && request.uri().path() == answer.0;
        let (status, body) = if is_asked {
            (StatusCode::OK, answer.1.clone())
        } else {
            (StatusCode::NOT_FOUND, String::new())
        };
        let mut response = Response::new(Full::new(Bytes::from(body)));
        *response.status_mut() = status;
        async { Ok::<_, Infallible>(response) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(false)
        .max_buf_size(LONGEST_REQUEST)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    async fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.expect("the server listens");
        stream.write_all(request.as_bytes()).await.expect("the server reads");
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer).await;
        answer
    }

    fn free_address() -> SocketAddr {
        let probe = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        probe.local_addr().expect("bound")
    }

    #[tokio::test]
    async fn only_the_token_is_answered_and_the_port_is_free_afterwards() {
        let address = free_address();
        let proof = ChallengeResponse { token: "TOKEN".to_owned(), text: "TOKEN.THUMB".to_owned() };
        let challenge = HttpChallenge::listen(&[address], &proof).await.expect("a free port");
        let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: turn.example.org\r\n\r\n");
        let answer = ask(address, &get("/.well-known/acme-challenge/TOKEN")).await;
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\nTOKEN.THUMB"), "{answer}");
        for path in ["/", "/.well-known/acme-challenge/", "/.well-known/acme-challenge/OTHER"] {
            let answer = ask(address, &get(path)).await;
            assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
        }
        let long = ask(address, &get(&"x".repeat(2 * LONGEST_REQUEST))).await;
        assert!(!long.contains("200"), "{long}");
        assert!(matches!(
            HttpChallenge::listen(&[address], &proof).await,
            Err(OrderError::Listen(error)) if error.place == address.to_string()
        ));
        drop(challenge);
        while std::net::TcpListener::bind(address).is_err() {
            tokio::task::yield_now().await;
        }
    }
}
