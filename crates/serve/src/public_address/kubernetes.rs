//! The Kubernetes Node that runs this process's pod, read with the pod's service account.

use std::{
    env, fs,
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::Arc,
};

use rustls::{ClientConfig, ClientConnection, StreamOwned, pki_types::ServerName};
use serde_json::Value;
use turnpike_client::{Security, TlsOptions};

use super::{
    SourceAnswer,
    http::{HttpRequest, HttpRequestError, ask as ask_over, connect},
    zone,
};

/// Present in every pod with a service account (Kubernetes: Accessing the API from a Pod).
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const ZONE: &str = "topology.kubernetes.io/zone";

pub(super) fn ask(annotation: Option<&str>) -> Result<SourceAnswer, HttpRequestError> {
    let variable = |name: &str| {
        let missing = |_| {
            HttpRequestError::Missing(format!(
                "{name} is not set in the environment: this works only in a Kubernetes pod"
            ))
        };
        env::var(name).map_err(missing)
    };
    let node = variable("NODE_NAME")?;
    let (host, port) = (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
    read(&describe(&node, (&host, &port), Path::new(ACCOUNT))?, annotation)
}

fn describe(node: &str, (host, port): (&str, &str), account: &Path) -> Result<Value, HttpRequestError> {
    let wrong = |why: String| HttpRequestError::Missing(why);
    let ip: IpAddr =
        host.parse().map_err(|_| wrong(format!("KUBERNETES_SERVICE_HOST is not an address: {host:?}")))?;
    let port: u16 =
        port.parse().map_err(|_| wrong(format!("KUBERNETES_SERVICE_PORT is not a port: {port:?}")))?;
    let token = fs::read_to_string(account.join("token"))
        .map_err(|error| wrong(format!("cannot read the service account's token: {error}")))?;
    // Node names are host names, so other characters would need escaping in the path.
    if !node.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-".contains(&byte)) {
        return Err(wrong(format!("NODE_NAME is not a node name: {node:?}")));
    }
    let server = SocketAddr::new(ip, port);
    let options = TlsOptions { ca: Some(account.join("ca.crt")), ..TlsOptions::default() };
    let security = Security::new(&options, None, server).map_err(|error| wrong(error.to_string()))?;
    let connection = ClientConnection::new(Arc::new(for_http(&security.config)), ServerName::from(ip));
    let connection = connection.map_err(|error| wrong(error.to_string()))?;
    let stream = StreamOwned::new(connection, connect(server)?);
    let authorization = format!("Bearer {}", token.trim());
    let path = format!("/api/v1/nodes/{node}");
    let headers = [("Authorization", authorization.as_str()), ("Accept", "application/json")];
    let body = ask_over(stream, &HttpRequest { method: "GET", host, path: &path, headers: &headers })?;
    serde_json::from_str(&body).map_err(|error| HttpRequestError::Strange(host.to_owned(), error.to_string()))
}

/// Removes the TURN protocols from the ALPN list.
fn for_http(config: &ClientConfig) -> ClientConfig {
    let mut config = config.clone();
    config.alpn_protocols.clear();
    config
}

fn read(node: &Value, annotation: Option<&str>) -> Result<SourceAnswer, HttpRequestError> {
    let addresses = match annotation {
        None => {
            let all = node["status"]["addresses"].as_array().map_or(&[][..], Vec::as_slice);
            let external = all.iter().filter(|address| address["type"] == "ExternalIP");
            external.filter_map(|address| address["address"].as_str()?.parse().ok()).collect()
        }
        Some(key) => {
            let text = node["metadata"]["annotations"][key].as_str();
            let text =
                text.ok_or_else(|| HttpRequestError::Missing(format!("the node has no annotation {key}")))?;
            let parts = text.split(',').map(str::trim).map(str::parse);
            let wrong = |_| {
                HttpRequestError::Missing(format!("annotation {key} is not a list of addresses: {text:?}"))
            };
            parts.collect::<Result<Vec<IpAddr>, _>>().map_err(wrong)?
        }
    };
    if addresses.is_empty() {
        return Err(HttpRequestError::Missing(
            "the node has no ExternalIP: set one in Kubernetes, or use an annotation".to_owned(),
        ));
    }
    Ok(SourceAnswer { addresses, zone: node["metadata"]["labels"][ZONE].as_str().and_then(zone) })
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, Write as _},
        net::TcpListener,
        thread,
    };

    use rustls::{
        ServerConfig, ServerConnection,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    };
    use serde_json::json;
    use turnpike_testkit::{Dir, certificates::Certificate};

    use super::*;

    fn server_config(certificate: &Certificate) -> ServerConfig {
        let chain = CertificateDer::from_pem_slice(certificate.pem.as_bytes()).expect("a certificate");
        let key = PrivateKeyDer::from_pem_slice(certificate.key.as_bytes()).expect("a key");
        let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions().expect("versions");
        builder.with_no_client_auth().with_single_cert(vec![chain], key).expect("certificate and key match")
    }

    fn node() -> Value {
        json!({
            "metadata": { "labels": { ZONE: "eu-west-1a" }, "annotations": { "a/b": "203.0.113.7, 2001:db8::7" } },
            "status": { "addresses": [
                { "type": "InternalIP", "address": "10.0.0.5" },
                { "type": "ExternalIP", "address": "203.0.113.5" },
            ] },
        })
    }

    #[test]
    fn external_addresses_annotation_and_zone_are_read() {
        let told = |addresses: &[&str]| SourceAnswer {
            addresses: addresses.iter().map(|address| address.parse().expect("one")).collect(),
            zone: Some("eu-west-1a".to_owned()),
        };
        assert_eq!(read(&node(), None).expect("an external address"), told(&["203.0.113.5"]));
        assert_eq!(
            read(&node(), Some("a/b")).expect("the annotation exists"),
            told(&["203.0.113.7", "2001:db8::7"])
        );
        let why = read(&node(), Some("other")).expect_err("no such annotation").to_string();
        assert!(why.contains("no annotation other"), "{why}");
        let why = read(&json!({}), None).expect_err("no address").to_string();
        assert!(why.contains("no ExternalIP"), "{why}");
    }

    #[test]
    fn the_api_is_queried_over_tls_with_the_pods_account() {
        let (certificate, authority) = Certificate::of_authority(&["127.0.0.1"]);
        let account = Dir::new();
        account.file("ca.crt", &authority);
        account.file("token", "t0ken\n");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("a bound address").port().to_string();
        let config = Arc::new(server_config(&certificate));
        let server = thread::spawn(move || {
            let (stream, _) = listener.accept().expect("a connection");
            let connection = ServerConnection::new(config).expect("a configuration");
            let mut stream = StreamOwned::new(connection, stream);
            let mut head = Vec::new();
            let mut reader = BufReader::new(&mut stream);
            while !head.ends_with(b"\r\n\r\n") {
                reader.read_until(b'\n', &mut head).expect("a request");
            }
            let body = node().to_string();
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
                .expect("the client listens");
            stream.flush().expect("the client listens");
            String::from_utf8(head).expect("text")
        });
        let found = describe("node-1.example", ("127.0.0.1", &port), account.path()).expect("an answer");
        assert_eq!(found, node());
        let asked = server.join().expect("no panic");
        assert!(asked.starts_with("GET /api/v1/nodes/node-1.example HTTP/1.0\r\n"), "{asked}");
        assert!(asked.contains("\r\nAuthorization: Bearer t0ken\r\n"), "{asked}");
        assert!(describe("../x", ("127.0.0.1", &port), account.path()).is_err());
    }
}
