//! Metadata services of cloud providers: all use the same link-local address, but different paths and
//! headers.

use std::net::{IpAddr, SocketAddr};

use serde_json::Value;

use super::{
    SourceAnswer,
    http::{HttpRequest, HttpRequestError, ask as ask_over, connect},
    zone,
};

const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::new(169, 254, 169, 254)), 80);

const AZURE: Option<(&str, &str)> = Some(("Metadata", "true"));
const AZURE_ZONE: &str = "/metadata/instance/compute/zone?api-version=2021-02-01&format=text";

struct Cloud {
    name: &'static str,
    /// Required by the service to keep out requests from browsers.
    header: Option<(&'static str, &'static str)>,
    address: &'static str,
    zone: &'static str,
}

const CLOUDS: [Cloud; 5] = [
    Cloud {
        name: "Google",
        header: Some(("Metadata-Flavor", "Google")),
        address: "/computeMetadata/v1/instance/network-interfaces/0/access-configs/0/external-ip",
        zone: "/computeMetadata/v1/instance/zone",
    },
    Cloud {
        name: "Azure",
        header: AZURE,
        address: "/metadata/instance/network/interface/0/ipv4/ipAddress/0/publicIpAddress?api-version=2021-02-01&format=text",
        zone: AZURE_ZONE,
    },
    // Azure lists addresses of the Standard SKU only in this document, even if there is no load balancer.
    Cloud {
        name: "Azure (Standard)",
        header: AZURE,
        address: "/metadata/loadbalancer?api-version=2020-10-01",
        zone: AZURE_ZONE,
    },
    Cloud {
        name: "Hetzner",
        header: None,
        address: "/hetzner/v1/metadata/public-ipv4",
        zone: "/hetzner/v1/metadata/availability-zone",
    },
    Cloud {
        name: "DigitalOcean",
        header: None,
        address: "/metadata/v1/interfaces/public/0/ipv4/address",
        zone: "/metadata/v1/region",
    },
];

/// AWS requires a token obtained by PUT; OpenStack and others use the same paths without a token.
const AWS_TOKEN: &str = "/latest/api/token";
const AWS_ADDRESS: &str = "/latest/meta-data/public-ipv4";
const AWS_ZONE: &str = "/latest/meta-data/placement/availability-zone";

pub(super) fn ask() -> Result<SourceAnswer, HttpRequestError> {
    ask_at(SERVER)
}

fn ask_at(server: SocketAddr) -> Result<SourceAnswer, HttpRequestError> {
    let get = |method, path: &str, headers: &[(&str, &str)]| {
        let host = server.ip().to_string();
        ask_over(connect(server)?, &HttpRequest { method, host: &host, path, headers })
    };
    let mut tried = Vec::new();
    let mut found = |name: &str,
                     answer: Result<String, HttpRequestError>,
                     zone_at: &dyn Fn() -> Result<String, HttpRequestError>| {
        match answer {
            // There is no service at this address, so the other paths fail as well.
            Err(trouble @ HttpRequestError::Silent(..)) => Some(Err(trouble)),
            Err(trouble) => {
                tried.push(format!("{name}: {trouble}"));
                None
            }
            Ok(text) => match address_in(&text) {
                Some(address) => {
                    let zone = zone_at().ok().and_then(|text| zone(&text));
                    Some(Ok(SourceAnswer { addresses: vec![address], zone }))
                }
                None => {
                    tried.push(format!("{name}: no public address in the response"));
                    None
                }
            },
        }
    };
    for Cloud { name, header, address, zone } in &CLOUDS {
        let headers: Vec<_> = header.iter().copied().collect();
        if let Some(told) = found(name, get("GET", address, &headers), &|| get("GET", zone, &headers)) {
            return told;
        }
    }
    let token = get("PUT", AWS_TOKEN, &[("X-aws-ec2-metadata-token-ttl-seconds", "60")]).unwrap_or_default();
    let token = [("X-aws-ec2-metadata-token", token.trim())];
    let headers = if token[0].1.is_empty() { &[][..] } else { &token[..] };
    let told = found("AWS", get("GET", AWS_ADDRESS, headers), &|| get("GET", AWS_ZONE, headers));
    told.unwrap_or_else(|| Err(HttpRequestError::Missing(tried.join("; "))))
}

fn address_in(text: &str) -> Option<IpAddr> {
    let of_json = || {
        let answer: Value = serde_json::from_str(text).ok()?;
        answer["loadbalancer"]["publicIpAddresses"][0]["frontendIpAddress"].as_str()?.parse().ok()
    };
    text.trim().parse().ok().or_else(of_json)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, Write as _},
        net::TcpListener,
        thread,
    };

    use super::*;

    fn service(knows: &'static [(&'static str, &'static str)], header: &'static str) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("a bound address");
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.expect("a connection");
                let lines = BufReader::new(stream.try_clone().expect("a descriptor")).lines();
                let head: Vec<String> =
                    lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
                let line = head[0].trim_end_matches(" HTTP/1.0");
                let may =
                    header.is_empty() || line.starts_with("PUT") || head.iter().any(|line| line == header);
                let known = knows.iter().find(|(path, _)| *path == line).filter(|_| may);
                let answer = match known {
                    Some((_, body)) => {
                        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
                    }
                    None => "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".to_owned(),
                };
                stream.write_all(answer.as_bytes()).expect("the client listens");
            }
        });
        address
    }

    fn told(address: &str, zone: Option<&str>) -> SourceAnswer {
        SourceAnswer { addresses: vec![address.parse().expect("one")], zone: zone.map(str::to_owned) }
    }

    #[test]
    fn each_cloud_gets_its_own_request() {
        let google = service(
            &[
                (
                    "GET /computeMetadata/v1/instance/network-interfaces/0/access-configs/0/external-ip",
                    "203.0.113.1",
                ),
                ("GET /computeMetadata/v1/instance/zone", "projects/1/zones/europe-west1-b"),
            ],
            "Metadata-Flavor: Google",
        );
        assert_eq!(ask_at(google).expect("an answer"), told("203.0.113.1", Some("europe-west1-b")));
        let azure = service(
            &[(
                "GET /metadata/instance/network/interface/0/ipv4/ipAddress/0/publicIpAddress?api-version=2021-02-01&format=text",
                "203.0.113.2",
            )],
            "Metadata: true",
        );
        assert_eq!(ask_at(azure).expect("an answer"), told("203.0.113.2", None));
        let azure_standard = service(
            &[
                (
                    "GET /metadata/instance/network/interface/0/ipv4/ipAddress/0/publicIpAddress?api-version=2021-02-01&format=text",
                    "",
                ),
                (
                    "GET /metadata/loadbalancer?api-version=2020-10-01",
                    r#"{"loadbalancer":{"publicIpAddresses":[{"frontendIpAddress":"203.0.113.5","privateIpAddress":"10.0.0.5"}]}}"#,
                ),
                ("GET /metadata/instance/compute/zone?api-version=2021-02-01&format=text", "2"),
            ],
            "Metadata: true",
        );
        assert_eq!(ask_at(azure_standard).expect("an answer"), told("203.0.113.5", Some("2")));
        let aws = service(
            &[
                ("PUT /latest/api/token", "t0ken"),
                ("GET /latest/meta-data/public-ipv4", "203.0.113.3"),
                ("GET /latest/meta-data/placement/availability-zone", "eu-west-1a"),
            ],
            "X-aws-ec2-metadata-token: t0ken",
        );
        assert_eq!(ask_at(aws).expect("an answer"), told("203.0.113.3", Some("eu-west-1a")));
        let openstack = service(&[("GET /latest/meta-data/public-ipv4", "203.0.113.4\n")], "");
        assert_eq!(ask_at(openstack).expect("an answer"), told("203.0.113.4", None));
    }

    #[test]
    fn a_missing_public_address_and_a_missing_service_are_reported() {
        let private = service(&[("GET /latest/meta-data/public-ipv4", "")], "");
        let why = ask_at(private).expect_err("no public address").to_string();
        assert!(why.contains("AWS: no public address in the response") && why.contains("Hetzner: "), "{why}");
        let absent =
            TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("one");
        assert!(matches!(ask_at(absent), Err(HttpRequestError::Silent(..))));
    }
}
