//! Requests that the commands send over the Unix socket, and their output.

use crate::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

use turnpike_ctl::top;

fn client(running: &Running) -> Client {
    Client::new(Some(Target::Unix(running.dir.path("a.sock"))), None).unwrap()
}

fn shown(run: impl FnOnce(&mut Vec<u8>) -> Result<(), CommandError>) -> String {
    let mut out = Vec::new();
    run(&mut out).unwrap_or_else(|error| panic!("{error}"));
    String::from_utf8(out).unwrap()
}

#[test]
fn allocations_are_shown_as_a_table_or_json_array() {
    let running = Running::server(2);
    let client = client(&running);
    let list = |wanted: AllocationListFilter, format| {
        shown(|out| commands::list_allocations(&client, wanted, format, out))
    };
    assert_eq!(list(AllocationListFilter::default(), OutputFormat::Text(None)), "no allocations\n");
    assert_eq!(list(AllocationListFilter::default(), OutputFormat::Json), "[]\n");
    let clients: Vec<_> = (0..3).map(|_| running.allocated()).collect();
    let text = list(AllocationListFilter::default(), OutputFormat::Text(None));
    let mut lines = text.lines();
    assert!(lines.next().unwrap().starts_with("ID "), "{text}");
    for (client, relayed) in &clients {
        let address = client.local_addr().unwrap().to_string();
        let line = text.lines().find(|line| line.contains(&address)).expect("the client's line");
        assert!(line.contains(&relayed.to_string()) && line.contains(" udp "), "{line}");
    }
    assert_eq!(lines.count(), 3);
    let json: Value =
        serde_json::from_str(&list(AllocationListFilter::default(), OutputFormat::Json)).unwrap();
    assert_eq!(json.as_array().unwrap().len(), 3);
    let only = clients[1].0.local_addr().unwrap().to_string();
    let wanted = AllocationListFilter { client: Some(only.clone()), ..AllocationListFilter::default() };
    let one: Value = serde_json::from_str(&list(wanted, OutputFormat::Json)).unwrap();
    assert_eq!(one[0]["client"], only);
    assert_eq!(one.as_array().unwrap().len(), 1);
    assert_eq!(
        list(
            AllocationListFilter { limit: Some(2), ..AllocationListFilter::default() },
            OutputFormat::Text(None)
        )
        .lines()
        .count(),
        3
    );
    let error = commands::list_allocations(
        &client,
        AllocationListFilter { client: Some("alice & co?".to_owned()), ..AllocationListFilter::default() },
        OutputFormat::Text(None),
        &mut Vec::new(),
    );
    assert!(error.expect_err("no address").to_string().contains("\"alice & co?\""), "quoted as typed");
}

#[test]
fn allocations_command_requests_all_pages() {
    let limit = turnpike_net::rlimit::raise_open_files(8192);
    assert!(limit >= 4096, "two descriptors per allocation are needed, but ulimit -n is {limit}");
    let running = Running::server(1);
    let _clients: Vec<_> = (0..1005).map(|_| running.allocated()).collect();
    let text = shown(|out| {
        commands::list_allocations(
            &client(&running),
            AllocationListFilter::default(),
            OutputFormat::Json,
            out,
        )
    });
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json.as_array().unwrap().len(), 1005);
}

#[test]
fn allocation_is_shown_and_ended_by_its_id() {
    let running = Running::server(1);
    let client = client(&running);
    let (socket, relayed) = running.allocated();
    let list = shown(|out| {
        commands::list_allocations(&client, AllocationListFilter::default(), OutputFormat::Json, out)
    });
    let id = serde_json::from_str::<Value>(&list).unwrap()[0]["id"].as_str().unwrap().to_owned();
    let text = shown(|out| commands::show_allocation(&client, &id, OutputFormat::Text(None), out));
    for part in [&id, &relayed.to_string(), &socket.local_addr().unwrap().to_string(), "over udp to"] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    let json: Value =
        serde_json::from_str(&shown(|out| commands::show_allocation(&client, &id, OutputFormat::Json, out)))
            .unwrap();
    assert!(json["permissions"].is_array());
    let text = shown(|out| commands::end_allocation(&client, &id, OutputFormat::Text(None), out));
    assert!(text.starts_with(&format!("ended allocation {id} of ")), "{text}");
    for unknown in [id.as_str(), "../../metrics", "", "x"] {
        let error = commands::end_allocation(&client, unknown, OutputFormat::Text(None), &mut Vec::new())
            .expect_err(unknown);
        let error = error.to_string();
        assert!(error.contains("allocation") && error.lines().count() == 1, "{error}");
    }
}

#[test]
fn reload_prints_one_line_per_change_or_error() {
    let running = Running::server(1);
    let client = client(&running);
    let reload = |json| shown(|out| commands::reload(&client, json, out));
    assert_eq!(reload(false), "reloaded; nothing has changed that a reload can apply\n");
    let lines = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
    *running.program.reload.lock().unwrap() = Ok(Reloaded {
        changed: lines(&["auth.users: 1 added", "realm a: removed"]),
        after_restart: lines(&["server.workers"]),
        warnings: lines(&["a doubt"]),
    });
    assert_eq!(
        reload(false),
        "warning: a doubt\nserver.workers: takes effect only after a restart\nauth.users: 1 added\nrealm a: removed\n"
    );
    let json: Value = serde_json::from_str(&reload(true)).unwrap();
    assert_eq!(json["changed"][1], "realm a: removed");
    *running.program.reload.lock().unwrap() = Err(NotReloaded::Refused(lines(&["line 1", "line 2"])));
    let error = commands::reload(&client, false, &mut Vec::new()).expect_err("an error").to_string();
    assert_eq!(error, "the configuration is invalid, and the old one stays in effect\nline 1\nline 2");
}

#[test]
fn drain_prints_the_remaining_allocations() {
    let running = Running::server(1);
    let client = client(&running);
    let soon = Drain { deadline_s: Some(9), ..Drain::default() };
    let text = shown(|out| commands::drain(&client, soon, false, out));
    assert_eq!(text, "draining for at most 9 s; open allocations or connections: 7\n");
    let json: Value =
        serde_json::from_str(&shown(|out| commands::drain(&client, Drain::default(), true, out))).unwrap();
    assert_eq!((json["open"].as_u64(), json["deadline_s"].as_f64()), (Some(7), Some(30.0)));
}

#[test]
fn token_file_grants_its_access_on_loopback() {
    let running = Running::server(1);
    let dir = Dir::new();
    let at = |token: Option<&str>| {
        let file = token.map(|token| dir.file("token", &format!("{token}\n")));
        Client::new(Some(Target::Tcp(running.tcp[0])), file.as_deref()).unwrap()
    };
    let reload =
        |client: Client| commands::reload(&client, false, &mut Vec::new()).map_err(|error| error.to_string());
    assert_eq!(reload(at(Some(FULL))), Ok(()));
    assert!(reload(at(Some(READ))).expect_err("read-only access").contains("this token is read-only"));
    assert!(reload(at(None)).expect_err("read-only access").contains("changes need a token"));
    let missing = Client::new(None, Some(&dir.path("nowhere"))).err().expect("no such file").to_string();
    assert!(missing.contains("nowhere"), "{missing}");
}

#[test]
fn tls_client_verifies_the_server_certificate() {
    let own = Certificate::new(&["localhost"]);
    let running = Running::start(Some(1), |settings, dir| {
        settings.listen = vec![AdminAddress::Tcp(([0, 0, 0, 0], 0).into())];
        settings.tls_cert = Some(dir.file("own.pem", &own.pem));
        settings.tls_key = Some(dir.file("own.key", &own.key));
        settings.tokens = vec![Secret::new(FULL)];
    });
    let (ca, token) = (running.dir.path("own.pem"), running.dir.file("token", FULL));
    let strange = running.dir.file("strange.pem", &Certificate::of_authority(&["localhost"]).1);
    let reload = |host: &str, ca: &std::path::Path| {
        let target = Target::Tls(host.to_owned(), running.tcp[0].port());
        let client = Client::new(Some(target), Some(&token)).unwrap().trusting(Some(ca.to_owned()));
        commands::reload(&client, false, &mut Vec::new()).map_err(|error| error.to_string())
    };
    assert_eq!(reload("localhost", &ca), Ok(()));
    for (host, ca, told) in [
        ("127.0.0.1", &ca, "is for localhost, not for 127.0.0.1"),
        ("localhost", &strange, "authority that this machine does not trust"),
        ("localhost", &running.dir.path("nowhere.pem"), "nowhere.pem"),
    ] {
        let error = reload(host, ca).expect_err(told);
        assert!(error.contains(told), "{error}");
    }
}

#[test]
fn top_prints_json_lines_or_one_screen() {
    let running = Running::server(2);
    let _clients: Vec<_> = (0..3).map(|_| running.allocated()).collect();
    let options = |once, json| top::Options {
        interval: Duration::from_millis(200),
        once,
        json,
        colours: false,
        columns: Some(120),
    };
    let text = shown(|out| top::run(client(&running), &options(true, false), out, || false));
    for part in ["turnpike serve", "allocations 7", "WORKER", "Top talkers", "Certificates", "none so far"] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    let line = shown(|out| top::run(client(&running), &options(true, true), out, || false));
    assert_eq!(line.lines().count(), 1);
    assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["status"]["job"], "serve");
    let asked = AtomicUsize::new(0);
    let enough = || asked.fetch_add(1, Ordering::Relaxed) > 20;
    let lines = shown(|out| top::run(client(&running), &options(false, true), out, enough));
    assert!(lines.lines().count() > 2, "{lines}");
    assert!(lines.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{lines}");
    let absent = Client::new(Some(Target::Unix(running.dir.path("none.sock"))), None).unwrap();
    let error = top::run(absent, &options(false, false), &mut Vec::new(), || false).expect_err("no program");
    assert!(error.to_string().contains("none.sock"), "{error}");
}

#[test]
fn connection_errors_list_the_tried_addresses_and_remedy() {
    let dir = Dir::new();
    let asked = |path: std::path::PathBuf| {
        let client = Client::new(Some(Target::Unix(path)), None).unwrap();
        commands::reload(&client, false, &mut Vec::new()).expect_err("no program").to_string()
    };
    let absent = asked(dir.path("none.sock"));
    assert!(absent.contains("none.sock") && absent.contains("--admin"), "{absent}");
    drop(std::os::unix::net::UnixListener::bind(dir.path("dead.sock")).unwrap());
    assert!(asked(dir.path("dead.sock")).contains("no running turnpike serve"));
    // Root may connect to any socket.
    let others = std::os::unix::net::UnixListener::bind(dir.path("others.sock")).unwrap();
    fs::set_permissions(dir.path("others.sock"), fs::Permissions::from_mode(0o000)).unwrap();
    if std::os::unix::net::UnixStream::connect(dir.path("others.sock")).is_err() {
        assert!(asked(dir.path("others.sock")).contains("another user"));
    }
    drop(others);
    let strange = std::os::unix::net::UnixListener::bind(dir.path("strange.sock")).unwrap();
    let answering = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut stream, _) = strange.accept().unwrap();
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            request.push(byte[0]);
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi").unwrap();
    });
    assert!(asked(dir.path("strange.sock")).contains("unexpected response from"));
    answering.join().unwrap();
}

#[test]
fn narrow_terminals_do_not_break_addresses() {
    let running = Running::server(1);
    let client = client(&running);
    let (socket, relayed) = running.allocated();
    let addresses = [socket.local_addr().unwrap().to_string(), relayed.to_string()];
    let id = running.get("/v1/allocations").ok()["allocations"][0]["id"].as_str().unwrap().to_owned();
    for columns in [34, 40, 60, 80, 100] {
        let format = OutputFormat::Text(Some(columns));
        let texts = [
            shown(|out| commands::list_allocations(&client, AllocationListFilter::default(), format, out)),
            shown(|out| commands::show_allocation(&client, &id, format, out)),
        ];
        for text in texts {
            assert!(text.lines().all(|line| line.chars().count() <= columns), "{columns}:\n{text}");
            for whole in addresses.iter().chain([&id]) {
                assert!(text.contains(whole.as_str()), "no {whole} at {columns}:\n{text}");
            }
        }
    }
    let ended = shown(|out| commands::end_allocation(&client, &id, OutputFormat::Text(Some(40)), out));
    assert!(ended.lines().all(|line| line.len() <= 40) && ended.contains(&addresses[0]), "{ended}");
}
