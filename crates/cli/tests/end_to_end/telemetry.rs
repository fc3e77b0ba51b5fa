//! `[telemetry]`: metrics and logs at a collector that decodes them.

use crate::prelude::*;
use std::{
    io::{BufRead as _, BufReader},
    sync::{Arc, Mutex},
};

/// Field of a Protocol Buffers message.
#[derive(Clone, Debug)]
enum Field {
    Varint(u64),
    Fixed(u64),
    Bytes(Vec<u8>),
}

/// Fields of a message by number, in order.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Field)> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let (first, rest) = bytes.split_first().expect("a whole number");
            *bytes = rest;
            value |= u64::from(first & 0x7F) << shift;
            if first & 0x80 == 0 {
                break;
            }
        }
        value
    }
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes);
        let field = match tag & 7 {
            0 => Field::Varint(varint(&mut bytes)),
            1 => {
                let (value, rest) = bytes.split_first_chunk().expect("eight bytes");
                bytes = rest;
                Field::Fixed(u64::from_le_bytes(*value))
            }
            2 => {
                let length = usize::try_from(varint(&mut bytes)).expect("a length");
                let (value, rest) = bytes.split_at(length);
                bytes = rest;
                Field::Bytes(value.to_vec())
            }
            other => panic!("wire type {other}"),
        };
        found.push((tag >> 3, field));
    }
    found
}

/// Submessages and strings with this path of field numbers.
fn find(message: &[u8], path: &[u64]) -> Vec<Vec<u8>> {
    let Some((number, rest)) = path.split_first() else { return vec![message.to_vec()] };
    let inner = fields(message).into_iter().filter(|(found, _)| found == number);
    inner
        .flat_map(|(_, field)| match field {
            Field::Bytes(bytes) => find(&bytes, rest),
            _ => Vec::new(),
        })
        .collect()
}

fn text(message: &[u8], path: &[u64]) -> String {
    let found = find(message, path).into_iter().next().unwrap_or_default();
    String::from_utf8(found).expect("UTF-8")
}

fn number(message: &[u8], wanted: u64) -> Option<f64> {
    #[expect(clippy::cast_precision_loss, reason = "small counts")]
    fields(message).into_iter().find(|(number, _)| *number == wanted).map(|(number, field)| match field {
        // NumberDataPoint: as_double.
        Field::Fixed(bits) if number == 4 => f64::from_bits(bits),
        Field::Fixed(value) | Field::Varint(value) => value as f64,
        Field::Bytes(_) => panic!("no number"),
    })
}

/// A metric's name, and the values of its points with their labels.
type Points = BTreeMap<String, f64>;

/// Values of gauges and sums in a request with metrics, in the form of the exposition format.
fn points(request: &[u8]) -> Points {
    let mut points = Points::new();
    for metric in find(request, &[1, 2, 2]) {
        let name = text(&metric, &[1]);
        let sum = find(&metric, &[7, 1]);
        let suffix = if sum.is_empty() { "" } else { "_total" };
        for point in find(&metric, &[5, 1]).into_iter().chain(sum) {
            let labels: Vec<String> = find(&point, &[7])
                .iter()
                .map(|label| format!("{}=\"{}\"", text(label, &[1]), text(label, &[2, 1])))
                .collect();
            let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
            let value = number(&point, 4).or_else(|| number(&point, 6)).expect("a value");
            points.insert(format!("{name}{suffix}{labels}"), value);
        }
    }
    points
}

/// One log record.
#[derive(Clone, Debug)]
struct Record {
    scope: String,
    severity: f64,
    body: String,
    attributes: BTreeMap<String, String>,
}

fn records(request: &[u8]) -> Vec<Record> {
    let scopes = find(request, &[1, 2]);
    let of_scope = |scope: &Vec<u8>| {
        let name = text(scope, &[1, 1]);
        let records = find(scope, &[2]).into_iter();
        records
            .map(|record| Record {
                scope: name.clone(),
                severity: number(&record, 2).expect("a severity"),
                body: text(&record, &[5, 1]),
                attributes: find(&record, &[6])
                    .iter()
                    .map(|attribute| (text(attribute, &[1]), text(attribute, &[2, 1])))
                    .collect(),
            })
            .collect::<Vec<_>>()
    };
    scopes.iter().flat_map(of_scope).collect()
}

/// Response of a collector: status line, more header fields, body.
type Answer = (&'static str, &'static str, Vec<u8>);

const TAKEN: (&str, &str) = ("200 OK", "");

/// Paths, heads and bodies of requests.
type Requests = Mutex<Vec<(String, String, Vec<u8>)>>;

struct Collector {
    address: SocketAddr,
    requests: Arc<Requests>,
}

impl Collector {
    /// `answer` gets the path and the number of earlier requests; `None` never answers.
    fn start(answer: impl Fn(&str, usize) -> Option<Answer> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((V4, 0)).expect("loopback has a free port");
        let address = listener.local_addr().expect("the socket is bound");
        let requests = Arc::<Requests>::default();
        let (all, answer) = (Arc::clone(&requests), Arc::new(answer));
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (all, answer) = (Arc::clone(&all), Arc::clone(&answer));
                thread::spawn(move || serve_connection(stream, &all, &*answer));
            }
        });
        Self { address, requests }
    }

    fn taking() -> Self {
        Self::start(|_, _| Some((TAKEN.0, TAKEN.1, Vec::new())))
    }

    fn bodies(&self, path: &str) -> Vec<Vec<u8>> {
        let requests = self.requests.lock().expect("no test panicked here");
        requests.iter().filter(|(to, _, _)| to == path).map(|(_, _, body)| body.clone()).collect()
    }

    fn points(&self) -> Points {
        self.bodies("/v1/metrics").last().map(|body| points(body)).unwrap_or_default()
    }

    fn records(&self) -> Vec<Record> {
        self.bodies("/v1/logs").iter().flat_map(|body| records(body)).collect()
    }

    fn config(&self) -> String {
        format!(
            "[telemetry]\nendpoint = \"http://{}\"\nheaders = [\"X-Key: a secret\"]\ninterval = 1\n\
             [shutdown]\ndeadline = 0\n",
            self.address
        )
    }
}

fn serve_connection(
    stream: TcpStream,
    all: &Requests,
    answer: &(dyn Fn(&str, usize) -> Option<Answer> + Send + Sync),
) {
    let mut reader = BufReader::new(stream.try_clone().expect("a descriptor is free"));
    let mut stream = stream;
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).unwrap_or(0) == 0 {
                return;
            }
        }
        let length =
            head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        reader.read_exact(&mut body).expect("the whole body");
        let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
        let earlier = {
            let mut all = all.lock().expect("no test panicked here");
            all.push((path.clone(), head, body));
            all.len() - 1
        };
        let Some((status, more, body)) = answer(&path, earlier) else {
            thread::sleep(10 * SOON);
            return;
        };
        let head = format!("HTTP/1.1 {status}\r\n{more}Content-Length: {}\r\n\r\n", body.len());
        if stream.write_all(&[head.as_bytes(), &body].concat()).is_err() {
            return;
        }
    }
}

/// Samples of a page that are the same in a later one.
fn steady(page: &str) -> Points {
    let samples = page.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.rsplit_once(' '));
    let lasting =
        ["turnpike_allocations_opened", "turnpike_config_reloads", "turnpike_draining", "turnpike_upgrades"];
    samples
        .filter(|(series, _)| lasting.iter().any(|name| series.starts_with(name)))
        .map(|(series, value)| (series.to_owned(), value.parse().expect("a number")))
        .collect()
}

#[test]
fn metrics_and_logs_reach_the_collector() {
    let collector = Collector::taking();
    let dir = Dir::new();
    let config = dir.file("turnpike.toml", collector.config());
    let serve = Serve::start(&["-c", config.to_str().expect("the test's path is UTF-8")]);
    let client = stun::Client::new(serve.address(V4));
    client.allocate(USER, PASSWORD, &client.challenge().2);
    let page = || fetch(serve.admin(), "/metrics").expect("the admin interface answers").1;
    eventually("the metrics are the page's", || {
        let (wanted, found) = (steady(&page()), collector.points());
        wanted.len() > 4 && wanted.iter().all(|(series, value)| found.get(series) == Some(value))
    });
    let families = page().lines().filter(|line| line.starts_with("# TYPE")).count();
    let request = collector.bodies("/v1/metrics").pop().expect("a request");
    assert_eq!(find(&request, &[1, 2, 2]).len(), families);
    let resource: BTreeMap<String, String> = find(&request, &[1, 1, 1])
        .iter()
        .map(|attribute| (text(attribute, &[1]), text(attribute, &[2, 1])))
        .collect();
    assert_eq!(resource["service.name"], "turnpike-serve");
    assert_eq!(resource["service.version"], env!("CARGO_PKG_VERSION"));
    eventually("the log arrives", || {
        collector.records().iter().any(|record| record.body.starts_with("listening on udp"))
    });
    let head = collector.requests.lock().expect("no test panicked here")[0].1.to_lowercase();
    assert!(
        head.contains("content-type: application/x-protobuf") && head.contains("x-key: a secret"),
        "{head}"
    );
    serve.program.signal("TERM");
    serve.program.wait(SOON).ended(0);
    let records = collector.records();
    let last = records.iter().find(|record| record.body == "stopped").expect("the last line");
    assert_eq!((last.scope.as_str(), last.severity), ("turnpike_process::control", 9.0));
    let allocation = records.iter().find(|record| record.attributes.contains_key("relayed"));
    assert!(allocation.is_some(), "{records:#?}");
}

#[test]
fn the_forwarder_exports_too() {
    let collector = Collector::taking();
    let dir = Dir::new();
    let rule = "[[rule]]\nprotocol = \"udp\"\nlisten = \"127.0.0.1:0\"\ntarget = \"127.0.0.1:9\"\n";
    let config = dir.file("forward.toml", collector.config() + rule);
    let forward = Forward::start(&["-c", config.to_str().expect("the test's path is UTF-8")]);
    eventually("metrics and logs arrive", || {
        collector.points().contains_key("turnpike_draining") && !collector.records().is_empty()
    });
    forward.program.signal("TERM");
    forward.program.wait(SOON).ended(0);
}

#[test]
fn a_collector_that_refuses_or_rejects_costs_records_and_no_service() {
    // Refused; later; partly rejected, with three records; then taken.
    let rejected = vec![0x0A, 0x02, 0x08, 0x03];
    let collector = Collector::start(move |path, _| {
        static LOGS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let taken = || Some((TAKEN.0, TAKEN.1, Vec::new()));
        if path != "/v1/logs" {
            return taken();
        }
        match LOGS.fetch_add(1, Ordering::Relaxed) {
            0 => Some(("503 Service Unavailable", "Retry-After: 1\r\n", Vec::new())),
            1 => Some((TAKEN.0, TAKEN.1, rejected.clone())),
            2 => Some(("400 Bad Request", "", Vec::new())),
            _ => taken(),
        }
    });
    let dir = Dir::new();
    let config = dir.file("turnpike.toml", collector.config());
    let serve = Serve::start(&["-c", config.to_str().expect("the test's path is UTF-8")]);
    let page = || fetch(serve.admin(), "/metrics").expect("the admin interface answers").1;
    let metric = |name: &str| Metrics::new(page()).sum(name, "");
    eventually("the second request loses three records", || {
        metric("turnpike_telemetry_records_lost_total") == 3
    });
    let bodies = collector.bodies("/v1/logs");
    assert_eq!(bodies[0], bodies[1], "the collector gets the same records again");
    let client = stun::Client::new(serve.address(V4));
    client.allocate(USER, PASSWORD, &client.challenge().2);
    eventually("the third request loses its records", || metric("turnpike_telemetry_records_lost_total") > 3);
    assert!(client.is_answered());
    let errors = "signal=\"logs\",result=\"error\"";
    assert_eq!(Metrics::new(page()).sum("turnpike_telemetry_requests_total", errors), 2);
}

#[test]
fn a_collector_that_never_answers_delays_nothing() {
    let collector = Collector::start(|_, _| None);
    let dir = Dir::new();
    let config = dir.file("turnpike.toml", collector.config());
    let serve = Serve::start(&["-c", config.to_str().expect("the test's path is UTF-8")]);
    eventually("a request hangs", || !collector.bodies("/v1/logs").is_empty());
    let client = stun::Client::new(serve.address(V4));
    assert_eq!(client.allocate(USER, PASSWORD, &client.challenge().2), None);
    serve.program.signal("TERM");
    serve.program.wait(SOON).ended(0);
}

#[test]
fn endpoints_are_checked() {
    for (line, why) in [
        ("endpoint = \"collector:4318\"", "it does not begin with https://"),
        ("endpoint = \"http://a/?b\"", "it contains a query"),
        ("headers = [\"Authorization\"]", "it has no colon"),
        ("interval = 0", "seconds, 1 to 3600"),
    ] {
        let dir = Dir::new();
        let config = dir.file("turnpike.toml", format!("[telemetry]\n{line}\n"));
        let config = config.to_str().expect("the test's path is UTF-8");
        let output = turnpike(&["serve", "--check", "-c", config]).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("turnpike.toml:2") && said.contains(why), "{said}");
    }
}
